"""What an experiment consists of: its configurations, pictures and claims."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery.data.cohort import Poisson
from rookery.experiments.machinery.claims import Claim, Verdict
from rookery.experiments.machinery.grid import Grid
from rookery.language.fed import Algorithm
from rookery.tasks.task import Task


@dataclass(frozen=True)
class Config:
    """One configuration, run once for each seed.

    Attributes:
        name: its name in the results, unique within an experiment.
        task: task(seed=..., **settings) makes the task; it also gets `data_dir` if it takes it. Tasks of the same
            shape should share one problem object: then they share one compiled program.
        settings: the task's other arguments.
        algorithm, rounds, cohort, every: as in `solve`.
        seeds: the seeds of the task and of the run.
        labels: further columns of the results, e.g. the method or a swept value.
        float64: compute in double precision.
        channel: as in `solve`, with the run's seed as `noise_seed`.
        faults: as in `solve`.
        clock: clock(seed=...) makes the `rk.Clock` of a run.
        asynchronous: as in `solve`.
        engine: as in `solve`; it must not change the numbers, so the fingerprint leaves it out.
    """

    name: str
    task: Callable[..., Task]
    algorithm: Algorithm
    rounds: int
    settings: dict[str, Any] = field(default_factory=dict)
    cohort: int | Poisson | None = None
    every: int = 1
    seeds: tuple[int, ...] = (0, 1, 2)
    labels: dict[str, Any] = field(default_factory=dict)
    float64: bool = False
    channel: Any = None
    faults: Any = None
    clock: Callable[..., Any] | None = None
    asynchronous: Any = None
    engine: Any = None

    def but(self, **changes: Any) -> "Config":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


class Headline(NamedTuple):
    """A number of a figure or table: its name, the paper's value (empty if not given), and ours for each seed."""

    what: str
    paper: str
    ours: Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper: its runs, its pictures and its claims.

    Attributes:
        name: as in `rookery reproduce NAME`.
        title: one line.
        paper: the reference, with the figure or table.
        setup: the set-up in words (Markdown). `texts.description` reads this and the other words.
        runs: runs(quick) gives the configurations; with quick the same ones, scaled down.
        picture: a figure of the results.
        more: further figures, by their titles.
        claims: what is checked.
        differences: every known difference from the paper, in words.
        reasons: the verdicts on claims that do not hold, by their text.
        family: experiments of one family share their stored runs.
        search: search(quick) gives the configurations that chose a value the paper does not give. Where each of them
            ended is written to `search.csv` and into the summary.
        grid: how the best of them is found. Values at the edge of the grid are marked, or the search is widened.
        headlines: the numbers that the page of all reproductions shows.
        thinned: thinned(results) gives the rows and columns of `results.csv`, where all of them would be too large.
    """

    name: str
    title: str
    paper: str
    setup: str
    runs: Callable[[bool], list[Config]]
    picture: Callable[[pd.DataFrame], Figure]
    claims: tuple[Claim, ...]
    differences: tuple[str, ...] = ()
    reasons: Mapping[str, Verdict] = field(default_factory=dict)
    family: str | None = None
    search: Callable[[bool], list[Config]] | None = None
    grid: Grid | None = None
    headlines: Callable[[pd.DataFrame], list[Headline]] | None = None
    more: Mapping[str, Callable[[pd.DataFrame], Figure]] = field(default_factory=dict)
    thinned: Callable[[pd.DataFrame], pd.DataFrame] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the experiment follows no paper."""
        return self.paper.startswith("Our own")

    @property
    def pictures(self) -> dict[str, tuple[str, Callable[[pd.DataFrame], Figure]]]:
        """Title and drawing of every picture, by file name."""
        more = {f"{self.name}-{i}.png": pair for i, pair in enumerate(self.more.items(), 2)}
        return {f"{self.name}.png": (self.title, self.picture), **more}
