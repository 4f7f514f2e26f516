"""One run of the command line: computed, described, shown, resumed."""

from __future__ import annotations

import dataclasses
import os
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rookery as rk
from rookery.cli.asked import Asked, text_of, value_of
from rookery.cli.config import to_toml
from rookery.cli.program import complain, say, told_below, writable

if TYPE_CHECKING:
    import pandas as pd

    from rookery.language.metrics import Direction
    from rookery.tasks.task import Task

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def execute(
    asked: Asked,
    method: Any,
    hyper: dict[str, Any],
    rounds: int | None,
    cohort: int | None,
    every: int | None,
    seed: int,
    out: Path | None,
    resume: bool,
    quiet: bool,
    json: bool,
    also: dict[str, Any],
    command: str = "run",
    **how: Any,
) -> int:
    """Run what is asked, write its folder, show it; the exit code. `also`: further options; `how`: of `solve`."""
    import numpy as np

    from rookery import report
    from rookery.base import processes
    from rookery.language.metrics import direction

    chosen = asked.task
    first, notes = _recorded(out) if resume else (None, [])
    every = next(number for number in (every, first, chosen.every) if number is not None)
    if first not in (None, every):
        notes = [*notes, f"# Resumed with --every {every}; the first rows have --every {first}."]
    description = described(asked, method, hyper, rounds, cohort, every, seed)
    rounds, size, goal = description["rounds"], description["cohort"], direction(chosen.metric)
    options = {"rounds": rounds, "cohort": size, "every": every if first is None else first, "seed": seed, **also}
    config = "".join(f"{line}\n" for line in dict.fromkeys(notes)) + repeated(asked, options, {}, command)
    if asked.note and not quiet and processes.lead():
        print(asked.note, file=sys.stderr)
    folder = _folder(out, resume, description, config) if processes.lead() else nullcontext()
    with folder:
        with np.errstate(all="ignore"), told_below():
            result = rk.solve(
                chosen.problem,
                chosen.clients,
                method,
                chosen.init,
                rounds,
                cohort=size,
                seed=seed,
                evaluate=chosen.evaluate,
                evaluate_client=chosen.evaluate_client,
                every=every,
                checkpoint=None if out is None else out / "checkpoint",
                keep_best=chosen.metric if goal.higher_is_better else f"-{goal.name}",
                progress=False if quiet or json else None,
                **how,
            )
        if not processes.lead():
            return 1 if result.stopped is not None else 130 if result.interrupted else 0
        description["stopped"] = result.stopped
        description["diverged"] = None if result.stopped is not None else _diverged(result.history, goal)
        trusted = _trusted(chosen, result)
        if out is not None:
            report.write_run(out, description, result, chosen.metric)
            if trusted is not None:
                exact = np.asarray(result.weights, float)
                trusted.assign(weight=exact).to_csv(out / "weights.csv", index=False)
                picture = report.weights_picture(result.history, chosen.groups, asked.title)
                report.save(picture, out / "weights.png")
    if json:
        said = {**description, **report.summary(result), "metric": chosen.metric, "out": out}
        print(report.to_json(said if trusted is None else said | {"weights": trusted.to_dict("records")}))
    say(quiet, json, *_tables(description, result))
    if trusted is not None:
        say(quiet, json, report.table(trusted, "Who was trusted"))
    if out is not None:
        files = ", ".join(sorted(path.name for path in out.iterdir() if not path.name.startswith(".")))
        say(quiet, json, f"Written to {out}: {files}.")
    advice = START if from_the_start(description) else _ADVICE
    if result.stopped is not None:
        complain(f"The run stopped: {result.stopped.rstrip('.')}. {advice}")
        return 1
    if result.interrupted:
        complain(f"Stopped after round {result.rounds}." + (" Go on with --resume." if out else ""))
        return 130
    if description["diverged"] is not None:
        complain(f"{asked.title}: {description['diverged']} {advice}")
        return 1
    return 0


def described(
    asked: Asked, method: Any, hyper: dict[str, Any], rounds: int | None, cohort: int | None, every: int, seed: int
) -> dict[str, Any]:
    """Return what run.json says of a run before it starts; what `solve` would refuse is refused here."""
    from rookery.engines import checks

    task = asked.task
    rounds, cohort = task.rounds if rounds is None else rounds, task.cohort if cohort is None else cohort
    start = checks.start_values(task.problem, task.clients, task.init)
    return {
        "task": asked.named.name,
        "task_settings": asked.arguments,
        "algorithm": asked.algorithm.name,
        "hyperparameters": hyper,
        "seed": seed,
        "cohort": checks.check_run(task.problem, task.clients, method, *start, rounds, cohort, every, seed),
        "rounds": rounds,
        "version": rk.__version__,
    }


def repeated(asked: Asked, options: dict[str, Any], changed: dict[str, Any], command: str = "run") -> str:
    """The file that repeats a run by --config: what was asked, and the defaults that went with it.

    Hyperparameters that --set can't express are left out: they are the task's or the algorithm's own.
    """
    names = ("clients", "partition")
    own: dict[str, Any] = {"task": asked.named.reference, "algorithm": asked.algorithm.reference}
    own |= {name: asked.arguments.get(name) for name in names if command == "run"}  # a coordinator counts its sites
    method = {f.name: getattr(asked.method, f.name) for f in dataclasses.fields(asked.method)}
    given = {name: value for name, value in asked.arguments.items() if name not in (*names, "seed")}
    texts = {name: text_of(value) for name, value in (given | method | changed).items()}
    settings = {name: _plain(text) for name, text in texts.items() if text is not None}
    return to_toml(own | options, settings, f"Repeat it: rookery {command} --config THIS_FILE --out OTHER_FOLDER")


def _plain(text: str) -> Any:
    """The value itself where TOML has such values."""
    value = value_of(text)
    return value if isinstance(value, bool | int | float) else text


def _recorded(out: Path | None) -> tuple[int | None, list[str]]:
    """The --every that the run in this folder began with, and the lines of its run.toml about later ones."""
    try:
        text = (out / "run.toml").read_text(encoding="utf-8") if out is not None else ""
        return tomllib.loads(text).get("every"), [line for line in text.splitlines() if line.startswith("# Resumed")]
    except (OSError, ValueError):
        return None, []


@contextmanager
def _folder(out: Path | None, resume: bool, description: dict[str, Any], config: str) -> Iterator[None]:
    """Refuse to write over a run, or to go on with another one; mark the folder as this run's, while it lasts."""
    if out is None:
        if resume:
            raise ValueError("--resume needs --out DIR: the folder of the run to go on with.")
        yield
        return
    from rookery import report

    writable(out)
    old = out / "checkpoint.npz"
    if old.exists():
        raise ValueError(f"{old} is of an earlier version, and can't be read: delete it, or give another --out.")
    there = (out / "run.json").exists() or (out / "checkpoint").exists()
    if there and not resume:
        raise ValueError(f"{out} holds a run already: go on with --resume, or give another --out.")
    if resume and not there:
        raise ValueError(f"{out} holds no run to go on with; leave out --resume to start one.")
    out.mkdir(parents=True, exist_ok=True)
    with alone(out):
        if there:
            check_same(out, description)  # run.json stays as it is until there is something new to say
        else:
            report.write_description(out, description)
        (out / "run.toml").write_text(config, encoding="utf-8")
        yield


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else runs in this folder meanwhile. The system lets the lock go when the process ends, however it ends."""
    if fcntl is None:
        yield
        return
    path = folder / ".lock"
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            process = lock.read().strip() or "unknown"
            raise ValueError(
                f"{folder}: this run is under way, in process {process}; wait for it, or stop it."
            ) from None
        except OSError:  # a file system without locks
            pass
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def check_same(out: Path, description: dict[str, Any]) -> None:
    """Raise ValueError if the folder's run is another one, or further on."""
    from rookery import report

    before, now = report.read_description(out), report.plain(description)
    for name in ("task", "algorithm", "seed", "cohort", "task_settings", "hyperparameters"):
        was, is_ = before.get(name), now[name]
        pairs = [(name, was, is_)]
        if isinstance(was, dict) and isinstance(is_, dict):
            pairs = [(entry, was.get(entry), is_.get(entry)) for entry in {**was, **is_}]
        differing = [f"its {entry} is {a}, here it is {b}" for entry, a, b in pairs if a != b]
        if differing:
            raise ValueError(
                f"{out} holds another run: {'; '.join(differing)}. Give the same settings, or another --out."
            )
    done = before.get("rounds_done")
    if isinstance(done, int) and done > description["rounds"]:
        raise ValueError(
            f"{out} is {done} rounds on, more than --rounds {description['rounds']}: give at least {done}."
        )


def _tables(description: dict[str, Any], result: rk.Run) -> list[Any]:
    import pandas as pd

    from rookery import report

    short = report.summary(result)
    rows: list[dict[str, Any]] = [
        {"": name, "first": short["first"][name], "last": short["last"][name]} for name in short["last"]
    ]
    up, down = short["bytes_up_per_round"], short["bytes_down_per_round"]
    costs = {
        "exchanges per round": short["exchanges_per_round"],
        "sent per round": f"{report.size(up)} up, {report.size(down)} down",
        "seconds": short["seconds"],
    }
    rows += [{"": name, "first": "", "last": report.number(value)} for name, value in costs.items()]
    what = f"{description['algorithm']} on {description['task']}"
    title = f"{what}, {result.rounds} rounds of {description['cohort']} clients"
    exchanges = result.exchanges.assign(
        bytes_up=result.exchanges["bytes_up"].map(report.size),
        bytes_down=result.exchanges["bytes_down"].map(report.size),
    ).rename(columns={"bytes_up": "up", "bytes_down": "down"})
    return [report.table(pd.DataFrame(rows), title), report.table(exchanges, "The exchanges of a round")]


def _trusted(task: Task, result: rk.Run) -> pd.DataFrame | None:
    """Each client's weight and group, where the task knows the groups and the method learns weights; else None."""
    import numpy as np
    import pandas as pd

    if not task.groups or not hasattr(result.state, "weights"):
        return None
    weights = np.asarray(result.weights, float)
    return pd.DataFrame({"client": range(len(weights)), "group": task.groups, "weight": weights.round(4)})


START = "The start itself is to blame, or the data, and not the steps: `rookery check` names the loss."
_ADVICE = "Try smaller steps; --debug names the client and the step where it begins."
_FAR = 1e6


def from_the_start(description: dict[str, Any]) -> bool:
    """Whether values were not finite before the first round."""
    stopped, diverged = description.get("stopped") or "", description.get("diverged") or ""
    return stopped.startswith("before") or diverged.endswith("from round 0 on.")


def _diverged(history: pd.DataFrame, goal: Direction) -> str | None:
    """Say how the metric that the task is judged by shows that a run has diverged; None if it does not."""
    import numpy as np

    from rookery import report

    values = history[goal.name].to_numpy(float)
    first, last = float(values[0]), float(values[-1])
    if not np.isfinite(last):
        bad = history["round"].iloc[1 + max(np.flatnonzero(np.isfinite(values)), default=-1)]
        return f"{goal.name} is not finite from round {int(bad)} on."
    if abs(last) > _FAR * max(abs(first), 1) and goal.better(first, last):
        return f"{goal.name} went from {report.number(first)} to {report.number(last)}: the run has diverged."
    return None
