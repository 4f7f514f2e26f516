"""Loss tuning on long-tailed MNIST: the runs of Fig. 3, the search for their steps, and the set-up in words."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from rookery.algorithms import FedNestSGD, FedSVRG
from rookery.experiments.fednest.representation import INNER, METHODS
from rookery.experiments.machinery import Config, Grid
from rookery.experiments.machinery.numbers import SPLITS
from rookery.language.fed import Epochs
from rookery.tasks import loss_tuning

CENTRAL, UNTUNED = "centralised", "no tuning"
ROUNDS, EVERY = 3000, 30
SEEDS, SEARCH_SEEDS = (0, 1, 2, 3, 4), (8, 9)
MORE_SEEDS = (*SEEDS, 5, 6, 7, 10, 11, 12, 13, 14)  # of the methods that Fig. 3b compares
Steps = tuple[float, float]  # the upper and the lower one

# As in the authors' script, the same steps for all methods; read up to where the printed axes end.
EQUAL, SEARCHED = "equal", "searched"
EQUAL_STEPS: dict[str, Steps] = {"i.i.d.": (2.0, 0.01), "non-i.i.d.": (0.2, 0.01)}
EQUAL_ROUNDS, EQUAL_EVERY = 1000, 10
COMMUNICATIONS = 6000

# The upper and lower steps that were tried, every pair, and the pair that was chosen: for each method and split.
SEARCH: dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...], Steps]] = {
    ("FedNest", "i.i.d."): ((2.0, 6.0, 20.0, 60.0), (0.001, 0.003, 0.01, 0.03), (20.0, 0.003)),
    ("FedNestSGD", "i.i.d."): ((2.0, 6.0, 20.0), (0.003, 0.01, 0.03, 0.1), (6.0, 0.03)),
    ("LFedNest", "i.i.d."): ((0.06, 0.2, 0.6, 2.0), (0.001, 0.003, 0.01, 0.03), (0.2, 0.003)),
    (CENTRAL, "i.i.d."): ((2.0, 6.0, 20.0, 60.0), (0.003, 0.01, 0.03), (20.0, 0.01)),
    (UNTUNED, "i.i.d."): ((0.0,), (0.003, 0.01, 0.03), (0.0, 0.01)),
    ("FedNest", "non-i.i.d."): ((0.02, 0.06, 0.2, 0.6), (0.001, 0.003, 0.01), (0.06, 0.003)),
    ("FedNestSGD", "non-i.i.d."): ((0.2, 0.6, 2.0, 6.0), (0.001, 0.003, 0.01), (2.0, 0.003)),
}
CHOSEN = {key: chosen for key, (_, _, chosen) in SEARCH.items()}
BESIDE = (CENTRAL, UNTUNED)  # drawn as lines for comparison
TWO = ("FedNest", "LFedNest")  # what Fig. 3a compares
FIG3A = tuple((method, "i.i.d.") for method in (*TWO, *BESIDE))
FIG3B = (*((method, split) for method in INNER for split in SPLITS), *((method, "i.i.d.") for method in BESIDE))


def untuned(data_dir: Any = None, **settings: Any) -> Any:
    """The same training with the loss as it is."""
    return loss_tuning(data_dir=data_dir, **settings).single_level


def config(quick: bool, method: str, split: str, steps: Steps | None = None, **changes: Any) -> Config:
    """One method on the loss-tuning task, or one of the lines beside: CENTRAL and UNTUNED."""
    upper, lower = ((0.1, 0.1) if quick else CHOSEN[method, split]) if steps is None else steps
    batch = 8 if quick else 64
    nested: dict[str, Any] = {"upper_step": upper, "lower_step": lower, "hessian_step": lower, "neumann_terms": 5}
    settings: dict[str, Any] = {"data": "digits", "equal": True} if quick else {"data": "mnist"}
    settings["partition"] = SPLITS[split]
    cohort: int | None = 10
    if method == CENTRAL:  # one client with everything; as many samples and local steps a round as ten clients take
        settings["clients"], cohort = 1, None
        algorithm: Any = FedNestSGD(**nested, lower_local_steps=10, batch_size=10 * batch)
    elif method == UNTUNED:
        algorithm = FedSVRG(step=lower, local_steps=Epochs(5), batch_size=batch)
    else:
        algorithm = METHODS[method](**nested, lower_local_steps=Epochs(5), batch_size=batch)
    return Config(
        name=f"{method}, {split}",
        labels={"method": method, "split": split, "steps": SEARCHED, "upper_step": upper, "lower_step": lower},
        task=untuned if method == UNTUNED else loss_tuning,
        settings=settings,
        algorithm=algorithm,
        cohort=cohort,
        rounds=60 if quick else ROUNDS,
        every=10 if quick else EVERY,
        seeds=SEEDS[:1] if quick else SEEDS,
    ).but(**changes)


def at_equal_steps(quick: bool, method: str, split: str, seeds: Sequence[int]) -> Config:
    """One method with the steps that all methods of its split share."""
    own = config(quick, method, split, None if quick else EQUAL_STEPS[split])
    length: dict[str, Any] = {} if quick else {"rounds": EQUAL_ROUNDS, "every": EQUAL_EVERY}
    labels = own.labels | {"steps": EQUAL}
    chosen = tuple(seeds[: 1 if quick else None])
    return own.but(name=f"{own.name}, equal steps", labels=labels, seeds=chosen, **length)


def search(quick: bool, keys: Sequence[tuple[str, str]]) -> list[Config]:
    """Every pair of steps of these methods and splits, on seeds of its own."""
    few: dict[str, Any] = {"seeds": SEARCH_SEEDS[:1], "rounds": 20} if quick else {"seeds": SEARCH_SEEDS}
    return [
        config(quick, *key, (upper, lower), name=f"search: {', '.join(key)}, steps {upper:g}, {lower:g}", **few)
        for key in (keys[:1] if quick else keys)
        for upper in SEARCH[key][0][-2 if quick else 0 :]
        for lower in SEARCH[key][1][-1 if quick else 0 :]
    ]


GRID = Grid(
    pattern=r"steps (?P<upper>\S+), (?P<lower>\S+)$",
    keys=("method", "split"),
    score=lambda search: -search["validation_loss"],
)


KEPT = ["run", "method", "split", "steps", "seed", "round", "exchanges", "seconds", "accuracy", "tail_accuracy",
        "validation_loss"]  # fmt: skip
SHARED: dict[str, Any] = {
    "family": "fednest-tuning", "grid": GRID, "thinned": lambda results: results[KEPT],
}  # fmt: skip


def printed(results: pd.DataFrame, across: str) -> pd.DataFrame:
    """The runs at equal steps up to the end of the printed axis, and the lines beside them up to EQUAL_ROUNDS."""
    beside = results["method"].isin(BESIDE) & (results["round"] <= EQUAL_ROUNDS)
    limit = EQUAL_ROUNDS if across == "round" else COMMUNICATIONS
    return results[beside | ((results["steps"] == EQUAL) & (results[across] <= limit))]


def searched(results: pd.DataFrame) -> pd.DataFrame:
    """The runs with searched steps, whole."""
    return results[results["steps"] == SEARCHED]
