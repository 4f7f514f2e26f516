"""Execute one run of the command line: solve it, save it, show it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import rookery as rk
from rookery.cli.privacy import CODE, PUBLIC, Privacy
from rookery.cli.request import Request
from rookery.cli.run_folder import describe, first_schedule, repeating_config, run_folder
from rookery.cli.speeds import UNTIMED, Speeds
from rookery.cli.terminal import complain, show, without_nonfinite_warnings

if TYPE_CHECKING:
    import pandas as pd

    from rookery.language.metrics import Direction
    from rookery.tasks.task import Task

BAD_START = "The start or the data cause it, not the steps: `rookery check` names the loss."
_ADVICE = "Try smaller steps; --debug names the client and the step where it begins."
_DIVERGED = 1e6  # times the first value


class RunOptions(NamedTuple):
    """The options of a run; None for the task's default."""

    rounds: int | None = None
    cohort: int | None = None
    every: int | None = None
    seed: int = 0
    out: Path | None = None
    resume: bool = False
    quiet: bool = False
    json: bool = False
    privacy: Privacy = PUBLIC
    speeds: Speeds = UNTIMED

    def describe(self, request: Request) -> dict[str, Any]:
        """Return the contents of run.json before the run starts."""
        return describe(request, self.rounds, self.cohort, self.every, self.seed, self.privacy, self.speeds)


def execute(
    request: Request, options: RunOptions, recorded: dict[str, Any], command: str = "run", **solve_options: Any
) -> int:
    """Run a request, write its folder and show the result; return the exit code.

    `recorded` holds further options of the command for run.toml; `solve_options` are passed to `rk.solve`.
    """
    import numpy as np

    from rookery import report
    from rookery.base import processes
    from rookery.language.metrics import direction

    task, out, privacy = request.task, options.out, options.privacy
    first_every, comments = first_schedule(out) if options.resume else (None, [])
    every = next(number for number in (options.every, first_every, task.every) if number is not None)
    if first_every not in (None, every):
        comments = [*comments, f"# Resumed with --every {every}; the first rows have --every {first_every}."]
    description = options._replace(every=every).describe(request)
    rounds, goal = description["rounds"], direction(task.metric)
    cohort = task.cohort if options.cohort is None else options.cohort
    recorded = {
        "rounds": rounds, "cohort": cohort if privacy.poisson else description["cohort"],
        "every": every if first_every is None else first_every, "seed": options.seed,
        **privacy.recorded, **options.speeds.recorded, **recorded,
    }  # fmt: skip
    best = task.metric if goal.higher_is_better else f"-{goal.name}"
    config = "".join(f"{line}\n" for line in dict.fromkeys(comments)) + repeating_config(request, recorded, {}, command)
    solve_options = options.speeds.solve_options(privacy.faults) | solve_options
    if request.note and not options.quiet and processes.lead():
        print(request.note, file=sys.stderr)
    with run_folder(out, options.resume, description, config) if processes.lead() else nullcontext():
        with np.errstate(all="ignore"), without_nonfinite_warnings():
            result = rk.solve(
                task.problem,
                task.clients,
                request.method,
                task.init,
                rounds,
                cohort=privacy.cohort(cohort),
                seed=options.seed,
                evaluate=task.evaluate,
                evaluate_client=task.evaluate_client,
                every=every,
                checkpoint=None if out is None else out / "checkpoint",
                channel=privacy.channel,
                keep_best=best if privacy.epsilon is None else None,  # a choice by a metric reveals something
                progress=False if options.quiet or options.json else None,
                **solve_options,
            )
        if not processes.lead():
            return 1 if result.stopped is not None else 130 if result.interrupted else CODE if result.spent else 0
        description["stopped"] = result.stopped
        if description["private"] is not None:
            description |= {"privacy": result.settings["privacy"], "spent": result.spent, "notes": result.notes}
        description["diverged"] = None if result.stopped is not None else divergence(result.history, goal)
        weights = _learnt_weights(task, result)
        if out is not None:
            report.write_run(out, description, result, task.metric)
            if weights is not None:
                exact = np.asarray(result.weights, float)
                weights.assign(weight=exact).to_csv(out / "weights.csv", index=False)
                picture = report.weights_picture(result.history, task.groups, request.title)
                report.save(picture, out / "weights.png")
    data = {**description, **report.summary(result), "metric": task.metric, "out": out}
    items = [*_tables(description, result), *description.get("notes", ())]
    if weights is not None:
        data["weights"] = weights.to_dict("records")
        items.append(report.table(weights, "Who was trusted"))
    if out is not None:
        files = ", ".join(sorted(path.name for path in out.iterdir() if not path.name.startswith(".")))
        items.append(f"Written to {out}: {files}.")
    show(options.quiet, options.json, data, *items)
    return _exit_code(request, description, result, resumable=out is not None)


def _exit_code(request: Request, description: dict[str, Any], result: rk.Run, resumable: bool) -> int:
    """Report a run that did not end well; return the exit code."""
    advice = BAD_START if bad_from_start(description) else _ADVICE
    if result.stopped is not None:
        complain(f"The run stopped: {result.stopped.rstrip('.')}. {advice}")
        return 1
    if result.interrupted:
        complain(f"Stopped after round {result.rounds}." + (" Continue with --resume." if resumable else ""))
        return 130
    if description["diverged"] is not None:
        complain(f"{request.title}: {description['diverged']} {advice}")
        return 1
    if result.spent:
        complain(f"{request.title}: {spent(description, result.rounds)}")
        return CODE
    return 0


def spent(description: dict[str, Any], rounds: int) -> str:
    """Say that the budget of privacy ended a run early."""
    asked = description["private"]
    return (
        f"the budget of ε = {asked['epsilon']:g} at δ = {asked['delta']:g} is spent after round {rounds} of "
        f"{description['rounds']}. More rounds need more noise, or a larger --private, in a new run."
    )


def _tables(description: dict[str, Any], result: rk.Run) -> list[Any]:
    import pandas as pd

    from rookery import report

    summary = report.summary(result)
    rows: list[dict[str, Any]] = [
        {"": name, "first": summary["first"][name], "last": summary["last"][name]} for name in summary["last"]
    ]
    up, down = summary["bytes_up_per_round"], summary["bytes_down_per_round"]
    costs = {
        "exchanges per round": summary["exchanges_per_round"],
        "sent per round": f"{report.size(up)} up, {report.size(down)} down",
        "seconds": summary["seconds"],
    }
    if summary["clock"] is not None:
        costs["simulated seconds"] = summary["clock"]
    if summary["epsilon"] is not None:
        costs = {f"ε at δ = {description['private']['delta']:g}": summary["epsilon"]} | costs
    rows += [{"": name, "first": "", "last": report.number(value)} for name, value in costs.items()]
    title = f"{description['algorithm']} on {description['task']}"
    cohort = description["cohort"]
    cohort = cohort if isinstance(cohort, int) else f"about {cohort[len('Poisson(') : -1]}"
    replies = description["channel"].get("asynchronous")
    title += f", {result.rounds} rounds of {cohort} clients" if replies is None else ""
    title += "" if replies is None else f", {result.rounds} rounds of {replies} replies"
    exchanges = result.exchanges[(result.exchanges["kind"] != "finish") | (result.exchanges["bytes_down"] > 0)]
    exchanges = exchanges.assign(
        bytes_up=exchanges["bytes_up"].map(report.size),
        bytes_down=exchanges["bytes_down"].map(report.size),
    ).rename(columns={"bytes_up": "up", "bytes_down": "down"})
    return [report.table(pd.DataFrame(rows), title), report.table(exchanges, "The exchanges of a round")]


def _learnt_weights(task: Task, result: rk.Run) -> pd.DataFrame | None:
    """Return each client's weight and group if the task has groups and the method learns weights, else None."""
    import numpy as np
    import pandas as pd

    if not task.groups or not hasattr(result.state, "weights"):
        return None
    weights = np.asarray(result.weights, float)
    return pd.DataFrame({"client": range(len(weights)), "group": task.groups, "weight": weights.round(4)})


def bad_from_start(description: dict[str, Any]) -> bool:
    """Return whether values were not finite before the first round."""
    stopped, diverged = description.get("stopped") or "", description.get("diverged") or ""
    return stopped.startswith("before") or diverged.endswith("from round 0 on.")


def divergence(history: pd.DataFrame, goal: Direction) -> str | None:
    """Say how the task's main metric shows that a run has diverged; None if it has not."""
    import numpy as np

    from rookery import report

    values = history[goal.name].to_numpy(float)
    first, last = float(values[0]), float(values[-1])
    if not np.isfinite(last):
        begin = history["round"].iloc[1 + max(np.flatnonzero(np.isfinite(values)), default=-1)]
        return f"{goal.name} is not finite from round {int(begin)} on."
    if abs(last) > _DIVERGED * max(abs(first), 1) and goal.better(first, last):
        return f"{goal.name} went from {report.number(first)} to {report.number(last)}: the run has diverged."
    return None
