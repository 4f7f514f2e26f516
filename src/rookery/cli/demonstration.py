"""The demo: three stories on handwritten digits, in each of which a nested method does what averaging cannot."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rookery import report
from rookery.algorithms import FedAvg, FedBiO, FedDRO, FineTuned, LocalTrain, WeightedNodesProx
from rookery.run.result import Run
from rookery.run.solve import solve
from rookery.tasks import Task, data_cleaning, weighted_nodes, worst_group

SEEDS = 3
STEPS = (0.03, 0.1, 0.3, 1.0, 3.0)
PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
FINE_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # as many as 3 × 3


@dataclass(frozen=True)
class Entry:
    """A method in a story: what it is in words, and how it is run.

    `chosen` are settings of the method or the task from the grid `searched`, by the images of
    `benchmarks/demo_search.py`, which are in no test set; `given` are others that differ from the task's defaults.
    """

    words: str
    algorithm: type
    rounds: int
    chosen: dict[str, Any]
    searched: dict[str, Sequence[Any]]
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the algorithm."""
        return self.algorithm.__name__


@dataclass(frozen=True)
class Story:
    """A problem, who solves it (the nested method last), and the metric that says how well."""

    name: str
    make: Callable[..., Task]
    settings: dict[str, Any]
    metric: str
    what: str  # the metric in words
    entries: tuple[Entry, ...]

    def task(self, entry: Entry, seed: int) -> tuple[Task, Any]:
        """The task as the method reads it, and the method."""
        words = entry.chosen | entry.given
        own = {name: value for name, value in words.items() if not hasattr(entry.algorithm, name)}
        task = self.make(**self.settings, **own, seed=seed)
        if type(task.problem) not in entry.algorithm.solves:  # type: ignore[attr-defined]
            assert task.single_level is not None
            task = task.single_level
        return task, task.algorithm(entry.algorithm, **{k: v for k, v in words.items() if k not in own})

    def command(self, entry: Entry) -> str:
        """What runs the method by itself."""
        words = self.settings | entry.given | entry.chosen
        told = "".join(f" --set {name}={_plain(value)}" for name, value in words.items())
        task = self.make.__name__.replace("_", "-")
        return f"rookery run {task} --algorithm {entry.name} --rounds {entry.rounds}{told}"


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


CLEANING = Story(
    "wrong labels",
    data_cleaning,
    {"wrong": "clients", "validation": 0.06, "equal": True},
    "accuracy",
    "test images read right",
    (
        Entry(
            "FedAvg on all labels",
            FedAvg,
            100,
            {"step": 0.3, "penalty": 1e-2},
            {"step": STEPS, "penalty": PENALTIES},
            {"fit": "all", "local_steps": 5},
        ),
        Entry(
            "FedAvg on the checked labels alone",
            FedAvg,
            100,
            {"step": 0.3, "penalty": 1e-4},
            {"step": STEPS, "penalty": PENALTIES},
            {"fit": "validation", "local_steps": 5},
        ),
        Entry(
            "nested: learns which labels to trust",
            FedBiO,
            100,
            {"upper_step": 1300.0, "penalty": 1e-4},
            {"upper_step": (400.0, 1300.0, 4000.0, 13000.0, 40000.0), "penalty": PENALTIES},
        ),
    ),
)
CLINIC = Story(
    "a clinic among unlike ones",
    weighted_nodes,
    {"setting": 2, "validation": 50},
    "accuracy",
    "the clinic's test images read right",
    (
        Entry(
            "FedAvg over all clinics",
            FedAvg,
            200,
            {"step": 1.0},
            {"step": FINE_STEPS},
        ),
        Entry(
            "the clinic alone",
            LocalTrain,
            200,
            {"step": 2.0},
            {"step": FINE_STEPS},
        ),
        Entry(
            "FedAvg, fine-tuned by each clinic",
            FineTuned,
            200,
            {"step": 3.0, "personal_step": 3.0},
            {"step": (1.0, 3.0, 10.0), "personal_step": (1.0, 3.0, 10.0)},
        ),
        Entry(
            "nested: learns whom to learn from",
            WeightedNodesProx,
            40,
            {"model_step": 2.0, "weight_step": 0.4},
            {"model_step": (1.0, 2.0, 4.0), "weight_step": (0.2, 0.4, 0.8)},
        ),
    ),
)
ROBUST = Story(
    "bad scanners",
    worst_group,
    {},
    "worst_accuracy",
    "the bad scanners' test images read right",
    (
        Entry(
            "FedAvg",
            FedAvg,
            100,
            {"step": 0.3, "penalty": 1e-3},
            {"step": STEPS, "penalty": PENALTIES},
            {"local_steps": 20},
        ),
        Entry(
            "FedAvg, groups weighted by hand",
            FedAvg,
            100,
            {"step": 0.1, "penalty": 1e-3},
            {"step": STEPS, "penalty": PENALTIES},
            {"local_steps": 20, "count": "groups"},
        ),
        Entry(
            "nested: minds the group served worst",
            FedDRO,
            100,
            {"step": 0.1, "penalty": 1e-4},
            {"step": STEPS, "penalty": PENALTIES},
        ),
    ),
)
STORIES = (CLEANING, CLINIC, ROBUST)


@dataclass(frozen=True)
class Demo:
    """What the demo leaves: every run's last evaluation, the seconds of compilation, and the picture's place.

    `stopped` names the runs that ended early because a value was not finite.
    """

    runs: pd.DataFrame
    compiling: float
    picture: Path
    stopped: tuple[str, ...] = ()

    def rows(self) -> pd.DataFrame:
        """One row for each method of each story: what it brings, and what a run of it costs."""
        return _rows(self.runs)

    def numbers(self) -> dict[str, Any]:
        """The same for `--json`."""
        return {
            "results": self.rows().to_dict("records"),
            "learnt": {story.name: _learnt(self.runs, story) for story in STORIES},
            "compiling_seconds": self.compiling,
            "picture": str(self.picture),
            "stopped": list(self.stopped),
        }

    def table(self) -> Table:
        """The same for the terminal."""
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
        of = f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
        grid = report.table(shown, f"Handwritten digits, {of}")
        ends = rows.groupby("story", sort=False).tail(1).index
        for end in ends[:-1]:
            grid.rows[end].end_section = True
        grid.caption = (
            "right: test images read right; in the last story, those of the bad scanners. up, down: by all clients "
            f"together. seconds: of one run, plus {self.compiling:.0f} s of compilation in all."
        )
        grid.caption_justify = "left"
        return grid

    def lines(self) -> list[str]:
        """What was learnt, and how to run each story's nested method by itself."""
        told = [f"{story.name.capitalize()}: {_finding(self.runs, story)}" for story in STORIES]
        enough = (
            "FedAvg is enough where wrong labels are spread at random, where clinics differ in frequencies alone, and "
            "where one model can serve all groups: see docs/demo.md."
        )
        return [*told, enough, "Each nested method by itself:", *(f"  {s.command(s.entries[-1])}" for s in STORIES)]


def demo(out: str | Path, *, seeds: int = SEEDS, rounds: int | None = None, progress: bool = True) -> Demo:
    """Run every method of every story, and write the picture and the numbers into the folder `out`.

    `rounds` is the most that a method is given, for a quick look.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    compiling, rows, stopped = 0.0, [], []
    with _bar(sum(1 + seeds for story in STORIES for _ in story.entries), progress) as tell:
        for story in STORIES:
            for entry in story.entries:
                count = entry.rounds if rounds is None else min(rounds, entry.rounds)
                tell(f"{story.name}: compiling {entry.name}")
                begin = time.perf_counter()
                train(story, entry, 1, seed=0)
                compiling += time.perf_counter() - begin
                for seed in range(seeds):
                    tell(f"{story.name}: {entry.words}")
                    run = train(story, entry, count, seed)
                    told: dict[Any, Any] = {"story": story.name, "words": entry.words, "algorithm": entry.name}
                    rows.append({**told, "seed": seed, **run.history.iloc[-1].to_dict()})
                    if run.stopped is not None:
                        stopped.append(f"{entry.name}, {story.name}, seed {seed}: {run.stopped}")
    runs = pd.DataFrame(rows)
    runs.to_csv(out / "demo.csv", index=False)
    return Demo(runs, compiling, report.save(draw(runs), out / "demo.png"), tuple(stopped))


def train(story: Story, entry: Entry, rounds: int, seed: int) -> Run:
    """One run of a method, evaluated before the first round and after the last."""
    task, method = story.task(entry, seed)
    return solve(
        task.problem,
        task.clients,
        method,
        task.init,
        rounds,
        seed=seed,
        evaluate=task.evaluate,
        every=rounds,
        progress=False,
    )


@contextmanager
def _bar(steps: int, progress: bool) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; each call of what it yields names the next step."""
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), disable=not progress, transient=True) as bar:
        task = bar.add_task("", total=steps, completed=-1)

        def tell(what: str) -> None:
            bar.update(task, advance=1, description=what)

        yield tell


# What came of it.


def _rows(runs: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for story in STORIES:
        for entry in story.entries:
            own = _of(runs, story, entry)
            cost = {name: own[name].mean() for name in ("bytes_up", "bytes_down", "seconds")}
            counts = {"rounds": int(own["round"].iloc[0]), "exchanges": int(own["exchanges"].iloc[0])}
            value = own[story.metric]
            brings = {"metric": story.metric, "mean": value.mean(), "spread": value.std()}
            words = {"story": story.name, "words": entry.words, "algorithm": entry.name}
            rows.append({**words, **brings, **counts, **cost})
    return pd.DataFrame(rows)


def _of(runs: pd.DataFrame, story: Story, entry: Entry) -> pd.DataFrame:
    return runs[(runs["story"] == story.name) & (runs["words"] == entry.words)]


def _percent(mean: float, spread: float) -> str:
    return f"{100 * mean:.1f} %" if pd.isna(spread) else f"{100 * mean:.1f} ± {100 * spread:.1f} %"


def _learnt(runs: pd.DataFrame, story: Story) -> dict[str, float]:
    """What the nested method learnt beside a model, the mean over the seeds."""
    names = {
        CLEANING.name: ("weight_clean", "weight_corrupted"),
        CLINIC.name: ("similar_weight",),
        ROBUST.name: ("weight_bad", "accuracy_good"),
    }
    own = _of(runs, story, story.entries[-1])
    return {name: float(own[name].mean()) for name in names[story.name]}


def _finding(runs: pd.DataFrame, story: Story) -> str:
    learnt = _learnt(runs, story)
    if story is CLEANING:
        right, wrong = learnt.values()
        return f"a right label ends with a weight of {right:.2f} on average, a wrong one with {wrong:.2f}."
    if story is CLINIC:
        return f"the five clinics like this one end with {100 * learnt['similar_weight']:.0f} % of the weight."
    before = _of(runs, story, story.entries[0])["accuracy_good"].mean()
    return (
        f"the bad scanners, a quarter of the clients, count {100 * learnt['weight_bad']:.0f} %; the price: of the good "
        f"scanners' images {100 * learnt['accuracy_good']:.0f} % are read right, by FedAvg {100 * before:.0f} %."
    )


# The picture.

_PALE = "#c4cbd3"


def draw(runs: pd.DataFrame) -> Figure:
    """Three columns, a story each: above, who reads how much right; below, what was learnt, or what it costs."""
    fig, axes = report.figure(2, 3, width=10.4, height=5.9)
    fig.set_layout_engine(None)
    fig.subplots_adjust(left=0.012, right=0.995, top=0.91, bottom=0.1, wspace=0.06, hspace=0.2)
    titles = {
        CLEANING.name: "8 of 20 clients have wrong labels:\nnesting finds them",
        CLINIC.name: "10 of 15 clinics code differently:\nnesting finds the right five",
        ROBUST.name: "5 of 20 clients have a bad scanner:\nnesting does not give them up",
    }
    for ax, story in zip(axes[0], STORIES, strict=True):
        ax.set_title(titles[story.name], loc="left", fontsize=12, fontweight="bold")
        _scores(ax, runs, story)
    _label_weights(axes[1, 0], _of(runs, CLEANING, CLEANING.entries[-1]))
    _clinic_weights(axes[1, 1], _of(runs, CLINIC, CLINIC.entries[-1]))
    _price(axes[1, 2], runs)
    count = runs["seed"].nunique()
    note = "Handwritten digits; no image leaves its client." + (
        f" A bar is the mean of {count} runs, a dot one of them." if count > 1 else ""
    )
    fig.text(0.012, 0.015, note, fontsize=10, color="#555555")
    return fig


def _scores(ax: Axes, runs: pd.DataFrame, story: Story) -> None:
    """A bar for each method, its words above it, the nested one's in colour."""
    for k, entry in enumerate(story.entries):
        values = 100 * _of(runs, story, entry)[story.metric]
        nested = entry is story.entries[-1]
        ax.barh(-k, values.mean(), height=0.42, color=report.BLUE if nested else _PALE)
        if len(values) > 1:
            ax.plot(values, [-k] * len(values), "o", color="#222222", markersize=3.5, alpha=0.75)
        weight = "bold" if nested else "normal"
        ax.text(0.5, -k + 0.25, entry.words, fontsize=10.5, fontweight=weight, va="bottom")
        ax.text(max(values) + 2, -k, f"{values.mean():.0f} %", fontsize=12, fontweight=weight, va="center")
    _across(ax, story.what)
    ax.set(ylim=(-len(story.entries) + 0.6, 0.75))


def _across(ax: Axes, words: str, most: float = 100) -> None:
    """An axis of bars that lie: no numbers but those at the bars."""
    ax.set(xlim=(0, 1.14 * most), xticks=[], yticks=[])
    ax.set_xlabel(words, fontsize=10.5, loc="left", style="italic")
    ax.spines["bottom"].set_visible(False)
    ax.grid(visible=False)


def _label_weights(ax: Axes, own: pd.DataFrame) -> None:
    kinds = {"right labels": ("weight_clean", report.BLUE), "wrong labels": ("weight_corrupted", report.VERMILION)}
    for k, (words, (name, colour)) in enumerate(kinds.items()):
        ax.barh(-k, own[name].mean(), height=0.42, color=colour)
        ax.text(0.005, -k + 0.25, words, fontsize=10.5, va="bottom")
        ax.text(own[name].mean() + 0.02, -k, f"{own[name].mean():.2f}", fontsize=12, va="center")
    _across(ax, "learnt: how much a label counts (0 to 1)", most=1)
    ax.set(ylim=(-1.4, 0.75))


def _clinic_weights(ax: Axes, own: pd.DataFrame) -> None:
    kinds = weighted_nodes(**CLINIC.settings).groups
    means = [own[f"weight_{k}"].mean() for k in range(len(kinds))]
    words = {"minority": "codes as this clinic does", "majority": "codes differently"}
    for k, (kind, mean) in enumerate(zip(kinds, means, strict=True)):
        like = kind == "minority"
        first = kinds.index(kind) == k
        ax.bar(k, mean, color=report.BLUE if like else report.VERMILION, label=words[kind] if first else None)
    ax.axhline(1 / len(kinds), color=report.GREY, linewidth=1, linestyle=":")
    ax.text(
        len(kinds) - 0.5, 1 / len(kinds) + 0.004, "if all counted the same", fontsize=10, color="#555555", ha="right"
    )
    ax.legend(frameon=False, fontsize=10.5, loc="upper right", bbox_to_anchor=(1.02, 0.9), handlelength=0.8)
    ax.set(xticks=[], yticks=[], ylim=(0, 1.15 * max(means)))
    ax.set_xlabel("learnt: how much each clinic counts", fontsize=10.5, loc="left", style="italic")


def _price(ax: Axes, runs: pd.DataFrame) -> None:
    """The good scanners, before and after."""
    for k, entry in enumerate(ROBUST.entries):
        values = 100 * _of(runs, ROBUST, entry)["accuracy_good"]
        ax.barh(-k, values.mean(), height=0.42, color=report.BLUE if k == len(ROBUST.entries) - 1 else _PALE)
        ax.text(0.5, -k + 0.25, entry.words, fontsize=10.5, va="bottom")
        ax.text(values.mean() + 1.5, -k, f"{values.mean():.0f} %", fontsize=12, va="center")
    _across(ax, "the price: good scanners' images read right")
    ax.set(ylim=(-len(ROBUST.entries) + 0.6, 0.75))
