"""The problems, the methods and their candidates, and the runs of the comparison of methods."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rookery import algorithms
from rookery.base.draws import seed_key
from rookery.experiments.machinery import Config, Grid
from rookery.experiments.machinery.numbers import keyed
from rookery.language.fed import Algorithm
from rookery.tasks.data_cleaning import data_cleaning
from rookery.tasks.hyperparameters import hyperparameters
from rookery.tasks.hyperrep import hyperrep, layers
from rookery.tasks.quadratic import quadratic
from rookery.tasks.task import Task

BUDGET, LOCAL, TERMS = 200, 5, 5  # exchanges; local steps; terms of a Neumann series
SEEDS, SEARCH_SEEDS = (0, 1, 2, 3, 4), (8, 9)  # of quadratics; the other problems have the first three
LEVELS = (1, 3, 10, 30, 100, 300, 1000)  # of each number that is searched, times the least one


class Problem(NamedTuple):
    """A problem of the comparison; `upper` and `lower` are the smallest steps that are tried."""

    words: str
    metric: str  # that is reported
    upper: float
    lower: float
    clients: int
    cohort: int | None = None
    batch_size: int | None = None
    single_level: bool = False

    @property
    def chosen_by(self) -> str:
        """The metric by which candidates are chosen, on seeds that are not reported; less is better."""
        return "distance" if self.metric == "distance" else "loss"

    @property
    def sign(self) -> int:
        """1 if a larger metric is better, else -1."""
        return 1 if self.metric == "accuracy" else -1


PROBLEMS = {
    "exact": Problem("quadratic, all clients", "distance", 1e-3, 3e-3, 20),
    "noisy": Problem("quadratic, cohorts and minibatches", "distance", 1e-3, 3e-3, 20, 5, 4),
    "penalties": Problem("hyperparameters", "loss", 1.0, 0.01, 10, 5),
    "layers": Problem("hyper-representation", "accuracy", 1e-2, 3e-3, 20, 5, 8, True),
    "cleaning": Problem("data cleaning", "accuracy", 30.0, 0.01, 20, 5, None, True),
}


def task(seed: int, problem: str, plain: bool = False, data: int | None = None) -> Task:
    """The problem with unlike clients.

    Arguments:
        seed: of the start of hyper-representation, and of the data.
        problem: one of PROBLEMS.
        plain: its single-level form, for FedAvg.
        data: the seed of the data of the last three problems, if it is another.
    """
    data = seed if data is None else data
    clients = PROBLEMS[problem].clients
    if problem in ("exact", "noisy"):
        samples = {"samples": 16, "noise": 0.5} if problem == "noisy" else {"samples": 1}
        made = quadratic(clients, seed=seed, **samples)
    elif problem == "penalties":
        made = hyperparameters(clients, partition="dirichlet", seed=data)
    elif problem == "cleaning":
        made = data_cleaning(clients, partition="dirichlet", seed=data)
    else:
        made = hyperrep(clients, partition="shards", width=32, seed=data)
        start = layers(seed_key(seed), 64, 32, 10)
        assert made.single_level is not None
        made = replace(made, init=start, single_level=replace(made.single_level, init=start))
    if plain:
        assert made.single_level is not None
        return made.single_level
    return made


ALIASES = {"SOBA": "FedBiO", "F2SA, 1 step": "F2SA"}  # one local step instead of LOCAL
EXCHANGES = {"FedMSA": 2, "LFedNest": 2, "FedNest": TERMS + 5}  # a round
SECOND = ("SOBA", "FedBiO", "SimFBO", "ASFBO", "LAASFBO", "LocalBSGM", "LFedNestNonAlt")  # uses products
FIRST = ("F2SA", "F2SA, 1 step", "F2SA2", "VPBGD", "MEHA", "SGHA")  # gradients alone
ONE = SECOND + FIRST  # with one exchange a round
MORE = ("FedMSA", "LFedNest", "FedNest")
METHODS = (*ONE, *MORE, "FedAvg")

CHOSEN = keyed(Path(__file__).with_name("chosen.csv"), 2)  # upper, lower and third number, by problem and method


def plays(method: str, problem: str) -> bool:
    """Whether a method is run on a problem."""
    return method != "FedAvg" or PROBLEMS[problem].single_level


def algorithm(problem: str, method: str, upper: float, lower: float, third: float) -> Algorithm:
    """A method with the steps of both levels and a third number, which `THIRD` names; FedAvg has only `lower`."""
    cls, own = getattr(algorithms, ALIASES.get(method, method)), PROBLEMS[problem]
    batch: dict[str, Any] = {"batch_size": own.batch_size}
    steps = batch | {"local_steps": 1 if method in ALIASES else LOCAL}
    if method == "FedAvg":
        return cls(step=lower, **steps)
    two = {"upper_step": upper, "lower_step": lower}
    if THIRD[method] == "server":
        two["linear_step"] = lower
        steps |= two | {f"server_{name}": third * value for name, value in two.items()}
        if method != "SimFBO":
            x, y, times = CHOSEN[problem, "SimFBO"]
            steps["bounds"] = tuple((step * times / 3, step * times * 3) for step in (x, y, y))
        return cls(**steps)
    two[THIRD[method]] = third
    if THIRD[method] == "multiplier":
        if method in ("VPBGD", "MEHA"):  # their step on x is along ∇F/λ
            two["upper_step"] = upper * third
        if method != "F2SA2":
            two["auxiliary_step"] = lower
    if method in ("FedBiO", "SOBA"):
        steps["shared_batch"] = True
    if method == "SGHA" and own.upper >= 1:  # the pull towards x̂ would overshoot: no step size scales it
        steps["smoothing"] = 0.0
    if THIRD[method] == "hessian_step":
        steps["neumann_terms"] = TERMS
        if method != "LocalBSGM":
            steps = batch | {"neumann_terms": TERMS, "lower_local_steps": LOCAL}
    return cls(**two, **steps)


THIRD = {  # what the third number of a method is
    **dict.fromkeys(("FedBiO", "SOBA", "FedMSA", "SGHA"), "linear_step"),
    **dict.fromkeys(("SimFBO", "ASFBO", "LAASFBO"), "server"),  # the server's steps, as multiples of the local ones
    **dict.fromkeys(("F2SA", "F2SA, 1 step", "F2SA2", "VPBGD", "MEHA"), "multiplier"),
    **dict.fromkeys(("LocalBSGM", "LFedNestNonAlt", "LFedNest", "FedNest"), "hessian_step"),
}
LEAST = {"server": 0.03, "multiplier": 1.0}  # of the third number; of a step: the smallest lower step


def candidates(problem: str, method: str) -> list[tuple[float, float, float]]:
    """What is tried: 49 triples in which any two values of any two numbers meet once. FedAvg has its 7 steps."""
    own, count = PROBLEMS[problem], len(LEVELS)
    at = lambda least, k: float(f"{least * LEVELS[k]:.3g}")
    if method == "FedAvg":
        return [(0.0, at(own.lower, k), 0.0) for k in range(count)]
    third = LEAST.get(THIRD[method], own.lower)
    middle = count // 2
    places = [(a, b, (a + 2 * b - 2 * middle) % count) for a, b in product(range(count), repeat=2)]
    return [(at(own.upper, a), at(own.lower, b), at(third, c)) for a, b, c in places]


def name(problem: str, method: str, values: Sequence[float]) -> str:
    """The name of a run of the search."""
    upper, lower, third = values
    return f"search: {problem}, {method}, upper {upper:g}, lower {lower:g}, third {third:g}"


GRID = Grid(
    r"upper (?P<upper>\S+), lower (?P<lower>\S+), third (?P<third>\S+)$",
    ("problem", "method"),
    lambda found: -found["score"],
)


LONGER = {"F2SA, 1 step": 2.5, "FedAvg": 1.5, "FedNest": 5.0}  # past the exchanges, to as much work as the others


def config(quick: bool, problem: str, method: str) -> Config:
    """A method with its chosen values on a problem."""
    own, budget = PROBLEMS[problem], 40 if quick else BUDGET
    rounds = round(budget * LONGER.get(method, 1) / EXCHANGES.get(method, 1))
    return Config(
        name=f"{own.words}, {method}",
        labels={"problem": problem, "method": method},
        task=task,
        settings={"problem": problem, "plain": method == "FedAvg"} | ({} if own.metric == "distance" else {"data": 0}),
        algorithm=algorithm(problem, method, *CHOSEN[problem, method]),
        cohort=own.cohort,
        rounds=rounds,
        every=max(1, budget // (100 if method in EXCHANGES else 40)),
        seeds=SEEDS[: 1 if quick else 5 if own.metric == "distance" else 3],
    )
