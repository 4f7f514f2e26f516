"""The demo: three stories on handwritten digits, each with a nested method that does what averaging cannot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from rookery.algorithms import FedAvg, FedBiO, FedDRO, FineTuned, LocalTrain, WeightedNodesProx
from rookery.run.result import Run
from rookery.run.solve import solve
from rookery.tasks import Task, data_cleaning, weighted_nodes, worst_group

SEEDS = 3


@dataclass(frozen=True)
class Entry:
    """A method in a story.

    Attributes:
        words: a description of the method.
        algorithm, rounds: how it is run.
        chosen: settings of the method or the task, chosen from the grid `searched` by `benchmarks/demo_search.py`, on
            images that are in no test set.
        searched: the grid.
        given: other settings that differ from the task's defaults.
    """

    words: str
    algorithm: type
    rounds: int
    chosen: dict[str, Any]
    searched: Mapping[str, Sequence[Any]]
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return self.algorithm.__name__


@dataclass(frozen=True)
class Story:
    """A task, the methods that solve it (the nested one last), and the metric that compares them."""

    name: str
    make: Callable[..., Task]
    settings: dict[str, Any]
    metric: str
    meaning: str  # of the metric
    entries: tuple[Entry, ...]

    def task(self, entry: Entry, seed: int) -> tuple[Task, Any]:
        """Return the task in the method's form, and the method."""
        settings = entry.chosen | entry.given
        of_task = {name: value for name, value in settings.items() if not hasattr(entry.algorithm, name)}
        task = self.make(**self.settings, **of_task, seed=seed)
        if type(task.problem) not in entry.algorithm.solves:  # type: ignore[attr-defined]
            assert task.single_level is not None
            task = task.single_level
        return task, task.algorithm(entry.algorithm, **{k: v for k, v in settings.items() if k not in of_task})

    def command(self, entry: Entry) -> str:
        """Return the command that runs the method by itself."""
        command = f"rookery run {self.make.__name__.replace('_', '-')} --algorithm {entry.name} --rounds {entry.rounds}"
        for name, value in (self.settings | entry.given | entry.chosen).items():
            text = f"{value:g}" if isinstance(value, float) else str(value)
            command += f" --set {name}={text.lower() if isinstance(value, bool) else text}"
        return command


# The grids. Every method of a story is searched over as many points.
_STEPS = (0.03, 0.1, 0.3, 1.0, 3.0)
_PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_PLAIN = {"step": _STEPS, "penalty": _PENALTIES}
_NESTED = {"upper_step": (400.0, 1300.0, 4000.0, 13000.0, 40000.0), "penalty": _PENALTIES}
_NINE = {"step": (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)}
_FINE_TUNED = {"step": (1.0, 3.0, 10.0), "personal_step": (1.0, 3.0, 10.0)}
_WEIGHTED = {"model_step": (1.0, 2.0, 4.0), "weight_step": (0.2, 0.4, 0.8)}
CLEANING = Story(
    "wrong labels",
    data_cleaning,
    {"wrong": "clients", "validation": 0.06, "equal": True},
    "accuracy",
    "test images read right",
    (
        Entry("FedAvg on all labels", FedAvg, 100, {"step": 0.3, "penalty": 1e-2}, _PLAIN,
              {"fit": "all", "local_steps": 5}),
        Entry("FedAvg on the checked labels only", FedAvg, 100, {"step": 0.3, "penalty": 1e-4}, _PLAIN,
              {"fit": "validation", "local_steps": 5}),
        Entry("nested: learns which labels to trust", FedBiO, 100, {"upper_step": 1300.0, "penalty": 1e-4}, _NESTED),
    ),
)  # fmt: skip
CLINIC = Story(
    "a clinic among dissimilar ones",
    weighted_nodes,
    {"setting": 2, "validation": 50},
    "accuracy",
    "the clinic's test images read right",
    (
        Entry("FedAvg over all clinics", FedAvg, 200, {"step": 1.0}, _NINE),
        Entry("the clinic alone", LocalTrain, 200, {"step": 2.0}, _NINE),
        Entry("FedAvg, fine-tuned by each clinic", FineTuned, 200, {"step": 3.0, "personal_step": 3.0}, _FINE_TUNED),
        Entry("nested: learns which clinics to trust", WeightedNodesProx, 40, {"model_step": 2.0, "weight_step": 0.4},
              _WEIGHTED),
    ),
)  # fmt: skip
ROBUST = Story(
    "bad scanners",
    worst_group,
    {},
    "worst_accuracy",
    "the bad scanners' test images read right",
    (
        Entry("FedAvg", FedAvg, 100, {"step": 0.3, "penalty": 1e-3}, _PLAIN, {"local_steps": 20}),
        Entry("FedAvg, groups weighted by hand", FedAvg, 100, {"step": 0.1, "penalty": 1e-3}, _PLAIN,
              {"local_steps": 20, "count": "groups"}),
        Entry("nested: protects the worst-served group", FedDRO, 100, {"step": 0.1, "penalty": 1e-4}, _PLAIN),
    ),
)  # fmt: skip
STORIES = (CLEANING, CLINIC, ROBUST)


def train(story: Story, entry: Entry, rounds: int, seed: int) -> Run:
    """Run a method, evaluated before the first round and after the last."""
    task, method = story.task(entry, seed)
    return solve(
        task.problem, task.clients, method, task.init, rounds,
        seed=seed, evaluate=task.evaluate, every=rounds, progress=False,
    )  # fmt: skip


def runs_of(runs: pd.DataFrame, story: Story, entry: Entry) -> pd.DataFrame:
    """Return the runs of one method of a story."""
    return runs[(runs["story"] == story.name) & (runs["words"] == entry.words)]
