"""`rookery tune`: search step sizes and other hyperparameters of an algorithm on a task."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import rookery as rk
from rookery.cli import options as opt
from rookery.cli.execution import BAD_START
from rookery.cli.lookup import check_setting
from rookery.cli.program import Command, app
from rookery.cli.request import Request, TaskOptions, resolve
from rookery.cli.run_folder import repeating_config
from rookery.cli.settings import format_value, parse_value, setting_name
from rookery.cli.speeds import Speeds
from rookery.cli.terminal import complain, folder_name, show, writable

CANDIDATES = 49  # the default of `rk.tune`


@app.command(cls=Command)
def tune(
    task: opt.TaskName,
    algorithm: opt.AlgorithmName = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="A hyperparameter to search, with a range (upper_step=0.001:1, local_steps=1:20) or with values "
            "(local_steps=1,5,20). A step size without either is searched from a tenth to ten times its value. Repeat "
            "it for more. Default: all step sizes that --set does not give.",
        ),
    ] = None,
    candidates: Annotated[int, typer.Option(help="The largest number of candidates to try.")] = CANDIDATES,
    metric: Annotated[
        str | None,
        typer.Option(
            help="The metric that decides (+name: higher is better, -name: lower). Default: the task's main metric."
        ),
    ] = None,
    settings: opt.Settings = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of the best candidates; the task has a default.")] = None,
    cohort: opt.Cohort = None,
    clients: opt.ClientCount = None,
    partition: opt.Partition = None,
    seed: opt.Seed = 0,
    clock: opt.Clock = None,
    deadline: opt.LateReplies = None,
    first: opt.First = None,
    correct: opt.Correct = False,
    until: Annotated[
        float | None,
        typer.Option(
            help="With --clock: compare candidates after equal simulated seconds, at most this many, instead of equal "
            "rounds."
        ),
    ] = None,
    private: Annotated[float | None, typer.Option("--private", hidden=True)] = None,
    mesh: Annotated[str | None, typer.Option(help="Divide the candidates among devices: all, or a number.")] = None,
    config: opt.ConfigFile = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default: a new folder runs/tune-TASK-ALGORITHM.")
    ] = None,
    quiet: opt.Quiet = False,
    json: opt.AsJson = False,
) -> None:
    """Search step sizes and other hyperparameters: many candidates together, the worse half stopped early."""
    from rookery import report

    if private is not None:
        raise ValueError(
            "--private must be left out of a search, in which each candidate is a run that reveals something. Tune on "
            "public data."
        )
    settings, speeds = settings or [], Speeds(clock, deadline, first, correct)
    if until is not None and clock is None:
        raise ValueError("--until needs --clock, whose seconds it counts; got none. Give --clock, e.g. compute=50.")
    request = resolve(task, algorithm, TaskOptions(settings, clients, partition, seed))
    made, method = request.task, request.method
    folder = _new_folder(request) if out is None else writable(out)
    if (folder / "tuning.json").exists():
        raise ValueError(f"{folder} holds a search already. Give another --out.")
    if request.note and not quiet:
        print(request.note, file=sys.stderr)
    most = made.rounds if rounds is None else rounds
    tuning = rk.tune(
        made.problem,
        made.clients,
        method,
        made.init,
        most,
        evaluate=made.evaluate,
        evaluate_client=made.evaluate_client,
        metric=made.metric if metric is None else metric,
        search=_search(over, method, settings),
        candidates=candidates,
        cohort=made.cohort if cohort is None else cohort,
        seed=seed,
        **speeds.solve_options(),
        until=until,
        engine=None if mesh is None else rk.Simulation(mesh=parse_value(mesh)),
        progress=False if quiet or json else None,
    )
    if tuning.interrupted and tuning.best is None:
        complain("Stopped before any candidates were compared.")
        raise typer.Exit(130)
    options = {"clients": clients, "partition": partition, "cohort": cohort, "rounds": rounds, "seed": seed or None}
    timed = speeds.given
    kept = [entry for entry in settings if setting_name(entry) not in tuning.search]

    def base(rounds: int | None) -> list[str]:
        given = {name: value for name, value in (options | {"rounds": rounds} | timed).items() if value is not None}
        named = f"{shlex.quote(task)} --algorithm {shlex.quote(algorithm or request.named_algorithm.name)}"
        words = [
            f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}" for name, value in given.items()
        ]
        return [named, *words, *(f"--set {shlex.quote(entry)}" for entry in kept)]

    more = [] if metric is None else [f"--metric {metric}"]
    more += [] if until is None else [f"--until {until:g}"]
    more += [] if candidates == CANDIDATES else [f"--candidates {candidates}"]
    more += [] if mesh is None else [f"--mesh {mesh}"]
    ran = rounds if until is None else tuning.rounds
    data = _summary(request, tuning, base(ran), [*base(rounds), *more], folder)
    folder.mkdir(parents=True, exist_ok=True)
    tuning.table.to_csv(folder / "candidates.csv", index=False)
    (folder / "tuning.json").write_text(report.to_json(data) + "\n")
    title = f"{request.title}: {tuning.metric} by step size"
    picture = report.save(tuning.picture(title), folder / "landscape.png")
    if tuning.best is not None:
        options |= {"rounds": tuning.rounds, "seed": seed, **timed}
        (folder / "best.toml").write_text(repeating_config(request, options, data["best"]), encoding="utf-8")
    lines = _lines(tuning, request, data, picture, candidates)
    show(quiet, json, {**data, "candidates": tuning.table.to_dict("records")}, *lines)
    if tuning.best is None:
        all_diverged = f"All {len(tuning.table)} candidates diverged"
        bad_start = f"{all_diverged}: {tuning.metric} is not finite at round 0. {BAD_START}"
        smaller = f"{all_diverged}. Search smaller steps: {data['next']}"
        complain(smaller if math.isfinite(tuning.start) else bad_start)
        raise typer.Exit(1)
    if not (tuning.value > tuning.start if tuning.higher_is_better else tuning.value < tuning.start):
        complain(f"No candidate is better than the start, where {tuning.metric} is {report.number(tuning.start)}.")
    if until is not None and tuning.rounds == most:
        complain(f"The best candidate ran all {most} rounds, perhaps in less than {until:g} s. Increase --rounds.")
    if tuning.interrupted:
        complain("Stopped early: this is the best so far.")
        raise typer.Exit(130)


def _new_folder(request: Request) -> Path:
    """Return a folder that does not exist yet."""
    plain = folder_name(f"tune-{request.named_task.name}-{request.named_algorithm.name}")
    names = (plain if number == 1 else f"{plain}-{number}" for number in itertools.count(1))
    return writable(next(Path("runs") / name for name in names if not (Path("runs") / name).exists()))


def _search(over: list[str] | None, method: Any, settings: list[str]) -> dict[str, Any] | None:
    """Return the hyperparameters to search, each with its range, its values or None; None for the default search."""
    from rookery.run.search import step_sizes

    if over is None:
        given = [setting_name(entry) for entry in settings]
        names = [name for name in step_sizes(method) if name not in given]
        if not names and step_sizes(method):
            raise ValueError(
                f"--set gives every step size of {type(method).__name__}. Name the step sizes to search with --over."
            )
        return dict.fromkeys(names) or None
    ranges: dict[str, Any] = {}
    for entry in over:
        name, (_, sign, text) = setting_name(entry), entry.partition("=")
        check_setting(type(method).__name__, name, [field.name for field in dataclasses.fields(method)])
        if name in ranges:
            raise ValueError(f"--over {entry!r}: {name} is named twice. Give it once.")
        ranges[name] = _values(entry, text.strip()) if sign else None
    return ranges


def _values(entry: str, text: str) -> tuple[float, float] | list[Any]:
    """Return a range, low:high, or a list of values, a,b,c; a single value is likely a mistake."""
    try:
        if ":" in text and "," not in text:
            low, high = (float(end) for end in text.split(":"))
            return low, high
        values = [parse_value(part.strip()) for part in text.split(",")]
        if len(values) < 2 or any(part == "" for part in values):
            raise ValueError
    except ValueError:
        raise ValueError(
            "--over must have the form name=low:high, e.g. upper_step=0.001:1, or name=value,value,..., e.g. "
            f"local_steps=1,5,20; got {entry!r}."
        ) from None
    return values


def _over(name: str, searched: Any) -> str:
    """Return the option that searches these values or this range."""
    if isinstance(searched, list):
        return f"--over {name}={','.join(str(format_value(value)) for value in searched)}"
    return f"--over {name}={searched[0]:.3g}:{searched[1]:.3g}"


def _summary(
    request: Request, tuning: rk.Tuning, run_with: list[str], tune_with: list[str], folder: Path
) -> dict[str, Any]:
    """Return the contents of tuning.json: the result of a search, and the commands to run next."""
    best = {} if tuning.best is None else {name: getattr(tuning.best, name) for name in tuning.search}
    run = " ".join(["rookery run", *run_with, *(f"--set {name}={format_value(value)}" for name, value in best.items())])
    ranges = tuning.moved()
    if tuning.best is None:
        ranges |= {name: (low[0] / 100, low[0]) for name, low in ranges.items() if isinstance(low, tuple)}
    again = " ".join(["rookery tune", *tune_with, *(_over(name, searched) for name, searched in ranges.items())])
    return {
        "task": request.named_task.name,
        "task_settings": request.arguments,
        "algorithm": request.named_algorithm.name,
        **{name: getattr(tuning, name) for name in ("rounds", "until", "metric", "search")},
        "best": best,
        **{name: getattr(tuning, name) for name in ("value", "edges", "diverged")},
        "tried": len(tuning.table),
        **{name: getattr(tuning, name) for name in ("seconds", "compiling", "interrupted")},
        "run": run if best else None,
        "next": again if tuning.edges or tuning.diverged == len(tuning.table) else None,
        "out": folder,
    }


def _lines(tuning: rk.Tuning, request: Request, data: dict[str, Any], picture: Path, candidates: int) -> list[Any]:
    """Return the search for the terminal: the best candidates and the given one, the effort, and what to do next."""
    import pandas as pd

    from rookery import report

    names, rungs = list(tuning.search), list(tuning.table.columns)[len(tuning.search) + 3 :]
    columns: dict[str, list[Any]] = {"": [*names, *rungs]}
    for place, row in enumerate(tuning.table.to_dict("records")):
        diverged = row["status"] == "diverged"
        words = ["best" if place == 0 else str(place + 1)] if place < 5 and not diverged else []
        if all(row[name] == getattr(request.method, name) for name in names):
            words.append("as set: diverged" if diverged else "as set")
        if words:
            columns[", ".join(words)] = ["" if pd.isna(row[name]) else row[name] for name in [*names, *rungs]]
    seconds = f"{tuning.seconds:.0f} s, {tuning.compiling:.0f} of them compiling"
    effort = f"{tuning.diverged} of {len(tuning.table)} diverged. It took {seconds}."
    if len(tuning.table) < candidates:
        effort += f" (At most {candidates} were allowed: the values form a grid, and the next larger grid has more.)"
    title = f"{request.title}: {tuning.metric}, the best of {len(tuning.table)} candidates"
    lines = [report.table(pd.DataFrame(columns), title), effort, f"The picture: {picture}"]
    if data["run"]:
        lines.append(f"Run the best:\n  {data['run']}")
    for name, end in tuning.edges.items():
        low, high = min(tuning.search[name]), max(tuning.search[name])
        lines.append(f"{name} is best at the {end} end of its range, {low:.3g} to {high:.3g}.")
    if tuning.edges:
        lines.append(f"Look further there:\n  {data['next']}")
    return lines
