"""Run the demo's stories, and show their results."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas as pd
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from rookery import report
from rookery.base.printing import bar
from rookery.cli.demo_picture import draw
from rookery.cli.demo_stories import CLEANING, CLINIC, ROBUST, SEEDS, STORIES, Entry, Story, runs_of, train
from rookery.run.result import Run


@dataclass(frozen=True)
class Demo:
    """The result of the demo.

    Attributes:
        runs: the last evaluation of every run.
        compiling: the seconds until all methods were compiled, several at a time.
        picture: the picture's file.
        stopped: the runs that ended early because a value was not finite.
    """

    runs: pd.DataFrame
    compiling: float
    picture: Path
    stopped: tuple[str, ...] = ()

    def rows(self) -> pd.DataFrame:
        """Return a row for each method of each story: its result, and what a run costs."""
        rows = []
        for story in STORIES:
            for entry in story.entries:
                runs = runs_of(self.runs, story, entry)
                metric = runs[story.metric]
                rows.append(
                    {
                        "story": story.name,
                        "words": entry.words,
                        "algorithm": entry.name,
                        "metric": story.metric,
                        "mean": metric.mean(),
                        "spread": metric.std(),
                        "rounds": int(runs["round"].iloc[0]),
                        "exchanges": int(runs["exchanges"].iloc[0]),
                        **{name: runs[name].mean() for name in ("bytes_up", "bytes_down", "seconds")},
                    }
                )
        return pd.DataFrame(rows)

    def numbers(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            "results": self.rows().to_dict("records"),
            "learnt": {story.name: _learnt(self.runs, story) for story in STORIES},
            "compiling_seconds": self.compiling,
            "picture": str(self.picture),
            "stopped": list(self.stopped),
        }

    def table(self) -> Table:
        """Return the result as a table for the terminal."""
        rows = self.rows()
        shown = pd.DataFrame(
            {
                "method": rows["words"],
                "right": [_percent(m, s) for m, s in zip(rows["mean"], rows["spread"], strict=True)],
                "rounds": rows["rounds"],
                "exchanges": rows["exchanges"],
                "up": rows["bytes_up"].map(report.size),
                "down": rows["bytes_down"].map(report.size),
                "seconds": rows["seconds"].map(lambda s: f"{s:.1f}"),
            }
        )
        seeds = self.runs["seed"].nunique()
        over = f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
        grid = report.table(shown, f"Handwritten digits, {over}")
        ends = rows.groupby("story", sort=False).tail(1).index
        for end in ends[:-1]:
            grid.rows[end].end_section = True
        grid.caption = (
            "right: test images read right; in the last story, images of the bad scanners. up, down: sent by and to "
            f"all clients together. seconds: for one run beside others, after {self.compiling:.0f} s of compilation."
        )
        grid.caption_justify = "left"
        return grid

    def lines(self) -> list[str]:
        """Return what was learnt, and the command that runs each story's nested method by itself."""
        findings = [f"{story.name.capitalize()}: {_finding(self.runs, story)}" for story in STORIES]
        enough = (
            "FedAvg is enough if wrong labels are spread at random, if clinics differ only in frequencies, or if one "
            "model can serve all groups: see docs/demo.md."
        )
        return [*findings, enough, "Each nested method by itself:", *(f"  {s.command(s.entries[-1])}" for s in STORIES)]


def run_demo(out: Path, *, seeds: int = SEEDS, rounds: int | None = None, progress: bool = True) -> Demo:
    """Run every method of every story, and write the picture and the numbers into the folder `out`.

    `rounds` limits the rounds of each method, for a quick look.
    """
    out.mkdir(parents=True, exist_ok=True)
    each = [(story, entry, seed) for story in STORIES for entry in story.entries for seed in range(seeds)]
    with _bar(len(_programs()) + len(each), progress) as advance, _side_by_side() as map_:

        def compile_(one: tuple[Story, Entry]) -> None:
            story, entry = one
            advance(f"{story.name}: compiling {entry.name}")
            train(story, entry, 1, seed=0)

        def run(one: tuple[Story, Entry, int]) -> Run:
            story, entry, seed = one
            advance(f"{story.name}: {entry.words}")
            return train(story, entry, entry.rounds if rounds is None else min(rounds, entry.rounds), seed)

        begin = time.perf_counter()
        map_(compile_, _programs())
        compiling = time.perf_counter() - begin
        done = list(zip(each, map_(run, each), strict=True))
    rows, stopped = [], []
    for (story, entry, seed), result in done:
        names: dict[Any, Any] = {"story": story.name, "words": entry.words, "algorithm": entry.name}
        rows.append({**names, "seed": seed, **result.history.iloc[-1].to_dict()})
        if result.stopped is not None:
            stopped.append(f"{entry.name}, {story.name}, seed {seed}: {result.stopped}")
    runs = pd.DataFrame(rows)
    runs.to_csv(out / "demo.csv", index=False)
    return Demo(runs, compiling, report.save(draw(runs), out / "demo.png"), tuple(stopped))


def _programs() -> list[tuple[Story, Entry]]:
    """Return all methods, the nested ones first, which take longest to compile.

    The stories take turns: two methods of one story may share a program, which is then compiled once.
    """
    turns = zip_longest(*(reversed(story.entries) for story in STORIES))
    return [(story, entry) for turn in turns for story, entry in zip(STORIES, turn, strict=True) if entry is not None]


@contextmanager
def _side_by_side() -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]]:
    """Yield a `map` whose calls run in threads, one for each core and at most four.

    JAX computes and compiles without Python's lock. After an error or Ctrl-C, no further call begins.
    """
    pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
    try:
        yield lambda function, values: list(pool.map(function, values))
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _bar(steps: int, progress: bool) -> Iterator[Callable[[str], None]]:
    """Show a bar on standard error; yield a function that starts the next step and names it."""
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with bar(*columns, show=progress, transient=True) as shown:
        task = shown.add_task("", total=steps, completed=-1)
        yield lambda step: shown.update(task, advance=1, description=step)


def _percent(mean: float, spread: float) -> str:
    return f"{100 * mean:.1f} %" if pd.isna(spread) else f"{100 * mean:.1f} ± {100 * spread:.1f} %"


def _learnt(runs: pd.DataFrame, story: Story) -> dict[str, float]:
    """Return what the nested method learnt besides a model, as means over the seeds."""
    names = {
        CLEANING.name: ("weight_clean", "weight_corrupted"),
        CLINIC.name: ("similar_weight",),
        ROBUST.name: ("weight_bad", "accuracy_good"),
    }
    nested = runs_of(runs, story, story.entries[-1])
    return {name: float(nested[name].mean()) for name in names[story.name]}


def _finding(runs: pd.DataFrame, story: Story) -> str:
    learnt = _learnt(runs, story)
    if story is CLEANING:
        right, wrong = learnt.values()
        return f"a right label ends with a weight of {right:.2f} on average, a wrong one with {wrong:.2f}."
    if story is CLINIC:
        return f"the five clinics like this one end with {100 * learnt['similar_weight']:.0f} % of the weight."
    before = runs_of(runs, story, story.entries[0])["accuracy_good"].mean()
    return (
        f"the bad scanners, a quarter of the clients, count {100 * learnt['weight_bad']:.0f} %; the price: of the good "
        f"scanners' images {100 * learnt['accuracy_good']:.0f} % are read right, by FedAvg {100 * before:.0f} %."
    )
