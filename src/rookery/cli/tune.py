"""`rookery tune`: search the step sizes and other hyperparameters of an algorithm on a task."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import rookery as rk
from rookery.cli.asked import (
    AlgorithmName,
    Asked,
    ClientCount,
    Cohort,
    ConfigFile,
    Partition,
    Seed,
    Settings,
    TaskName,
    ask,
    text_of,
    value_of,
)
from rookery.cli.program import AsJson, Command, Quiet, app, border, complain, say, writable
from rookery.cli.running import START, repeated

CANDIDATES = 49  # as many as `rk.tune` tries


@app.command(cls=Command)
def tune(
    task: TaskName,
    algorithm: AlgorithmName = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="A hyperparameter to search, with a range, upper_step=0.001:1 or local_steps=1:20, or with values, "
            "local_steps=1,5,20; a step size alone: a tenth to ten times its value. Repeat it for more. Left out: all "
            "step sizes that --set does not give.",
        ),
    ] = None,
    candidates: Annotated[int, typer.Option(help="How many to try, at most.")] = CANDIDATES,
    metric: Annotated[
        str | None,
        typer.Option(help="What decides (+name: higher is better, -name: lower); the task's main metric if left out."),
    ] = None,
    settings: Settings = None,
    rounds: Annotated[int | None, typer.Option(help="Of the best candidates; the task has a default.")] = None,
    cohort: Cohort = None,
    clients: ClientCount = None,
    partition: Partition = None,
    seed: Seed = 0,
    mesh: Annotated[str | None, typer.Option(help="Divide the candidates among devices: all, or how many.")] = None,
    config: ConfigFile = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; a new runs/tune-TASK-ALGORITHM if left out.")
    ] = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Search step sizes and other hyperparameters: many candidates at once, the worse half stopped early."""
    from rookery import report
    from rookery.cli.registry import blaming

    with border(), blaming():
        asked = ask(task, algorithm, settings or [], clients, partition, seed)
        chosen, method = asked.task, asked.method
        folder = _new_folder(asked) if out is None else writable(out)
        if (folder / "tuning.json").exists():
            raise ValueError(f"{folder} holds a search already: give another --out.")
        rounds_asked = chosen.rounds if rounds is None else rounds
        given = [entry.partition("=")[0].strip().replace("-", "_") for entry in settings or []]
        search = _search(over, method, given)
        if asked.note and not quiet:
            print(asked.note, file=sys.stderr)
        found = rk.tune(
            chosen.problem,
            chosen.clients,
            method,
            chosen.init,
            rounds_asked,
            evaluate=chosen.evaluate,
            evaluate_client=chosen.evaluate_client,
            metric=chosen.metric if metric is None else metric,
            search=search,
            candidates=candidates,
            cohort=chosen.cohort if cohort is None else cohort,
            seed=seed,
            engine=None if mesh is None else rk.Simulation(mesh=value_of(mesh)),
            progress=False if quiet or json else None,
        )
        if found.interrupted and found.best is None:
            complain("Stopped before any candidates were compared.")
            raise typer.Exit(130)
        options = {"clients": clients, "partition": partition, "cohort": cohort, "rounds": rounds, "seed": seed or None}
        kept = [entry for entry, name in zip(settings or [], given, strict=True) if name not in found.search]
        base = [f"{shlex.quote(task)} --algorithm {shlex.quote(algorithm or asked.algorithm.name)}"]
        base += [f"--{name} {value}" for name, value in options.items() if value is not None]
        base += [f"--set {shlex.quote(entry)}" for entry in kept]
        more = [] if metric is None else [f"--metric {metric}"]
        more += [] if candidates == CANDIDATES else [f"--candidates {candidates}"]
        more += [] if mesh is None else [f"--mesh {mesh}"]
        told = _told(asked, found, base, more, folder)
        folder.mkdir(parents=True, exist_ok=True)
        found.table.to_csv(folder / "candidates.csv", index=False)
        (folder / "tuning.json").write_text(report.to_json(told) + "\n")
        title = f"{asked.title}: {found.metric} by step size"
        picture = report.save(found.picture(title), folder / "landscape.png")
        if found.best is not None:
            options |= {"rounds": rounds_asked, "seed": seed}
            (folder / "best.toml").write_text(repeated(asked, options, told["best"]), encoding="utf-8")
        if json:
            print(report.to_json({**told, "candidates": found.table.to_dict("records")}))
        say(quiet, json, *_tuned(found, asked, told, picture, candidates))
        if found.best is None and not math.isfinite(found.start):
            complain(f"All {len(found.table)} candidates diverged: {found.metric} is not finite at round 0. {START}")
            raise typer.Exit(1)
        if found.best is None:
            complain(f"All {len(found.table)} candidates diverged. Search smaller steps: {told['next']}")
            raise typer.Exit(1)
        if not (found.value > found.start if found.higher_is_better else found.value < found.start):
            complain(f"No candidate is better than the start, where {found.metric} is {report.number(found.start)}.")
        if found.interrupted:
            complain("Stopped early: this is the best so far.")
            raise typer.Exit(130)


def _new_folder(asked: Asked) -> Path:
    """One that is not there yet."""
    plain = re.sub(r"[^A-Za-z0-9-]+", "-", f"tune-{asked.named.name}-{asked.algorithm.name}")
    names = (plain if number == 1 else f"{plain}-{number}" for number in itertools.count(1))
    return writable(next(Path("runs") / name for name in names if not (Path("runs") / name).exists()))


def _search(over: list[str] | None, method: Any, given: list[str]) -> dict[str, Any] | None:
    """What to search, each with its range or its list of values if it has one; None if there is nothing."""
    from rookery.cli.registry import key
    from rookery.run.search import step_sizes

    if over is None:
        names = [name for name in step_sizes(method) if name not in given]
        if not names and step_sizes(method):
            raise ValueError(
                f"--set gives every step size of {type(method).__name__}; name those to search with --over."
            )
        return dict.fromkeys(names) or None
    ranges: dict[str, Any] = {}
    for entry in over:
        name, sign, text = entry.partition("=")
        name = name.strip().replace("-", "_")
        key(type(method).__name__, name, [field.name for field in dataclasses.fields(method)])
        if name in ranges:
            raise ValueError(f"--over {entry!r}: {name} is named twice; give it once.")
        ranges[name] = _values(entry, text.strip()) if sign else None
    return ranges


def _values(entry: str, text: str) -> tuple[float, float] | list[Any]:
    """A range, low:high, or values, a,b,c; one value alone is likely a mistake."""
    try:
        if ":" in text and "," not in text:
            low, high = (float(end) for end in text.split(":"))
            return low, high
        values = [value_of(part.strip()) for part in text.split(",")]
        if len(values) < 2 or any(part == "" for part in values):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--over {entry!r} must have the form name=low:high, as in upper_step=0.001:1, or name=value,value,..., as "
            "in local_steps=1,5,20."
        ) from None
    return values


def _over(name: str, searched: Any) -> str:
    """The option that searches this."""
    if isinstance(searched, list):
        return f"--over {name}={','.join(str(text_of(value)) for value in searched)}"
    return f"--over {name}={searched[0]:.3g}:{searched[1]:.3g}"


def _told(asked: Asked, found: rk.Tuning, base: list[str], more: list[str], folder: Path) -> dict[str, Any]:
    """What a search has come to, and what to run next, as JSON holds it."""
    best = {} if found.best is None else {name: getattr(found.best, name) for name in found.search}
    run = " ".join(["rookery run", *base, *(f"--set {name}={text_of(value)}" for name, value in best.items())])
    ranges = found.moved()
    if found.best is None:
        smaller = {name: (own[0] / 100, own[0]) for name, own in ranges.items() if isinstance(own, tuple)}
        ranges |= smaller
    again = " ".join(["rookery tune", *base, *more, *(_over(name, own) for name, own in ranges.items())])
    return {
        "task": asked.named.name,
        "task_settings": asked.arguments,
        "algorithm": asked.algorithm.name,
        "rounds": found.rounds,
        "metric": found.metric,
        "search": found.search,
        "best": best,
        "value": found.value,
        "edges": found.edges,
        "diverged": found.diverged,
        "tried": len(found.table),
        "seconds": found.seconds,
        "compiling": found.compiling,
        "interrupted": found.interrupted,
        "run": run if best else None,
        "next": again if found.edges or found.diverged == len(found.table) else None,
        "out": folder,
    }


def _tuned(found: rk.Tuning, asked: Asked, told: dict[str, Any], picture: Path, candidates: int) -> list[Any]:
    """A search for the terminal: the best candidates and the one that was set, how it went, and what to do next."""
    import pandas as pd

    from rookery import report

    names, rungs = list(found.search), [name for name in found.table.columns if name.startswith("round ")]
    columns: dict[str, list[Any]] = {"": [*names, *rungs]}
    for place, row in enumerate(found.table.to_dict("records")):
        lost = row["status"] == "diverged"
        words = ["best" if place == 0 else str(place + 1)] if place < 5 and not lost else []
        if all(row[name] == getattr(asked.method, name) for name in names):
            words.append("as set: diverged" if lost else "as set")
        if words:
            columns[", ".join(words)] = ["" if pd.isna(row[name]) else row[name] for name in [*names, *rungs]]
    seconds = f"{found.seconds:.0f} s, {found.compiling:.0f} of them compiling"
    tried = f"{found.diverged} of {len(found.table)} diverged. It took {seconds}."
    if len(found.table) < candidates:
        tried += f" (Of at most {candidates}: the values form a grid, and the next larger one has more.)"
    title = f"{asked.title}: {found.metric}, the best of {len(found.table)} candidates"
    said = [report.table(pd.DataFrame(columns), title), tried, f"The picture: {picture}"]
    if told["run"]:
        said.append(f"Run the best:\n  {told['run']}")
    for name, end in found.edges.items():
        low, high = min(found.search[name]), max(found.search[name])
        said.append(f"{name} is best at the {end} end of its range, {low:.3g} to {high:.3g}.")
    if found.edges:
        said.append(f"Look further there:\n  {told['next']}")
    return said
