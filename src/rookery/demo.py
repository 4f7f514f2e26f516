"""The demo: three methods on handwritten digits, with clients that are alike and clients that are not; one picture."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rookery import report
from rookery.algorithms import FedAvg, FedNest, LFedNest
from rookery.clients import Clients
from rookery.solve import Run, solve
from rookery.tasks import Task, hyperrep

METHODS = (FedNest, LFedNest, FedAvg)
SPLITS = {"iid": "every client has all ten digits", "shards": "most clients have only two digits"}
_SHORT = {"iid": "all ten", "shards": "mostly two"}
GOAL = 0.9  # the accuracy whose price the table gives


@dataclass(frozen=True)
class Demo:
    """What the demo leaves: every evaluation of every run, how long compiling took, and the picture's place.

    `stopped` names the runs that ended early because a value was not finite.
    """

    history: pd.DataFrame
    compiling: float
    picture: Path
    stopped: tuple[str, ...] = ()

    def rows(self) -> pd.DataFrame:
        """One row for each method and split, the mean over the seeds."""
        rows = []
        for (method, split), own in self.history.groupby(["method", "split"], sort=False):
            last = own.groupby("seed").last().mean(numeric_only=True)
            mean = own.groupby("round")["accuracy"].mean()
            good = mean.index[mean >= GOAL].tolist()
            rows.append(
                {
                    "method": method,
                    "split": split,
                    "accuracy": float(last["accuracy"]),
                    "exchanges": round(last["exchanges"]),
                    "megabytes": float(last["bytes"]),
                    "seconds": float(last["seconds"]),
                    "rounds_to_goal": int(good[0]) if good else None,
                }
            )
        return pd.DataFrame(rows)

    def numbers(self) -> dict[str, Any]:
        """The same for `--json`."""
        rows = self.rows().astype(object).where(self.rows().notna(), None)
        return {
            "results": rows.to_dict("records"),
            "compiling_seconds": self.compiling,
            "picture": str(self.picture),
            "stopped": list(self.stopped),
        }

    def table(self) -> Table:
        """The same for the terminal."""
        rows = self.rows()
        rounds = rows["rounds_to_goal"].map(lambda r: "never" if pd.isna(r) else f"{r:.0f}")
        shown = pd.DataFrame(
            {
                "method": rows["method"],
                "digits per client": rows["split"].map(_SHORT),
                "accuracy": rows["accuracy"].map(lambda a: f"{100 * a:.1f} %"),
                f"rounds to {100 * GOAL:.0f} %": rounds,
                "exchanges": rows["exchanges"],
                "megabytes": rows["megabytes"].map(lambda m: f"{m:.1f}"),
                "seconds": rows["seconds"].map(lambda s: f"{s:.1f}"),
            }
        )
        count = self.history["seed"].nunique()
        grid = report.table(shown, f"Handwritten digits, {self.history['round'].max()} rounds, mean of {count} run(s)")
        grid.caption = f"Seconds of one run; compiling the {len(METHODS)} methods took {self.compiling:.0f} s beside."
        grid.caption_justify = "left"
        return grid


def demo(out: str | Path, *, rounds: int = 200, every: int = 10, seeds: int = 3, progress: bool = True) -> Demo:
    """Train every method on every split, and write the picture and the numbers into the folder `out`."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    tasks = {split: hyperrep(partition=split) for split in SPLITS}
    compiling, frames, stopped = 0.0, [], []
    with _bar(len(METHODS) * (1 + len(SPLITS) * seeds), progress) as tell:
        for method in METHODS:
            own = _alike({split: _reading(task, method) for split, task in tasks.items()})
            tell(f"{method.__name__}: compiling")
            begin = time.perf_counter()
            _train(next(iter(own.values())), method, every, every, seed=0)
            compiling += time.perf_counter() - begin
            for split, task in own.items():
                for seed in range(seeds):
                    tell(f"{method.__name__}: {SPLITS[split]}")
                    run = _train(task, method, rounds, every, seed)
                    frames.append(report.across(run.history).assign(method=method.__name__, split=split, seed=seed))
                    if run.stopped is not None:
                        stopped.append(f"{method.__name__}, {split}, seed {seed}: {run.stopped}")
    history = pd.concat(frames, ignore_index=True)
    history.to_csv(out / "demo.csv", index=False)
    return Demo(history, compiling, report.save(draw(history), out / "demo.png"), tuple(stopped))


def _train(task: Task, method: type, rounds: int, every: int, seed: int) -> Run:
    return solve(
        task.problem,
        task.clients,
        task.algorithm(method),
        task.init,
        rounds,
        cohort=task.cohort,
        seed=seed,
        evaluate=task.evaluate,
        every=every,
        progress=False,
    )


def _reading(task: Task, method: type) -> Task:
    """The task as the method reads it: FedAvg trains all layers as one level."""
    return task.single_level if method is FedAvg and task.single_level is not None else task


def _alike(tasks: dict[str, Task]) -> dict[str, Task]:
    """The tasks with one problem and one size of client, so that a method is compiled once for all of them."""
    first = next(iter(tasks.values()))
    lower = min(int(task.clients.lower_sizes.min()) for task in tasks.values())
    upper = min(int(task.clients.upper_sizes.min()) for task in tasks.values())
    return {
        split: replace(task, problem=first.problem, evaluate=first.evaluate, clients=_cut(task.clients, lower, upper))
        for split, task in tasks.items()
    }


def _cut(clients: Clients, lower: int, upper: int) -> Clients:
    held = [clients.client_data(i) for i in range(clients.n)]
    sizes = {"lower": lower, "upper": upper}
    levels: dict[str, Any] = {
        level: [jax.tree.map(lambda a: a[:size], own[level][0]) for own in held]
        for level, size in sizes.items()
        if level in held[0]
    }
    return Clients(**levels)


@contextmanager
def _bar(steps: int, progress: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; each call of what it yields names the next step."""
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), disable=not progress, transient=True) as bar:
        task = bar.add_task("", total=steps, completed=-1)

        def tell(what: str) -> None:
            bar.update(task, advance=1, description=what)

        yield tell


def draw(history: pd.DataFrame) -> Figure:
    """The picture: accuracy over rounds and over megabytes, a row for each way to deal out the digits."""
    fig, axes = report.figure(2, 2, width=9.6, height=7.0)
    words = {
        "FedNest": "FedNest: nested, most messages",
        "LFedNest": "LFedNest: nested, fewer messages",
        "FedAvg": "FedAvg: not nested, plain averaging",
    }
    across = {"rounds": "rounds of training", "bytes": "megabytes sent, all clients together"}
    for row, (split, description) in zip(axes, SPLITS.items(), strict=True):
        for ax, (by, what) in zip(row, across.items(), strict=True):
            for method, own in history[history["split"] == split].groupby("method", sort=False):
                percent = own.assign(accuracy=100 * own["accuracy"])
                report.band(ax, percent, by, "accuracy", words[str(method)], **report.style(str(method)))
            ax.set(ylim=(0, 102), xlim=(0, None), yticks=range(0, 101, 20))
            report.label(ax, x=what, y="test images read right (%)" if by == "rounds" else "")
        report.label(row[0], title=description[0].upper() + description[1:])
    report.legend(axes[0, 0], loc="lower right")
    runs = history["seed"].nunique()
    if runs > 1:
        note = f"A line is the mean of {runs} runs, the shade around it their range."
        fig.supxlabel(note, fontsize=9, color=report.GREY, x=0.01, ha="left")
    fig.suptitle(
        "50 clients learn to read handwritten digits together, and no image leaves its client",
        fontsize=13,
        fontweight="bold",
        x=0.01,
        ha="left",
    )
    return fig
