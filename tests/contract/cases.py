"""The settings with which every algorithm is put through the contract. A new algorithm is added to SETTINGS, once."""

from dataclasses import replace
from typing import Any

import pytest

import rookery as rk
from rookery import algorithms
from rookery.engines.engine import Job
from rookery.testing import cases as testing
from rookery.testing.cases import HARD, UNEQUAL, VERY_UNEQUAL, Case, case, ragged, single

__all__ = ["HARD", "UNEQUAL", "VERY_UNEQUAL", "Case", "case", "ragged", "single"]

# Hyperparameters with which each algorithm is put through the contract: small numbers, every feature in use.
NESTED = {"upper_step": 0.05, "lower_step": 0.1, "lower_rounds": 2, "lower_local_steps": (1, 3), "neumann_terms": 2}
NEST = NESTED | {"upper_local_steps": 2, "hessian_step": 0.15, "batch_size": 2}
SADDLE = {"upper_step": 0.02, "lower_step": 0.05, "local_steps": (1, 3), "batch_size": 2}
SAMPLES = {"step": 0.05, "batch_size": 2}
SINGLE = {"step": 0.05, "local_steps": (1, 3), "batch_size": 2}
FEDBIO = {"upper_step": 0.02, "lower_step": 0.1, "local_steps": 2, "batch_size": 2}
GLOBAL_FEDBIO, LOCAL_FEDBIO = FEDBIO | {"linear_step": 0.1}, FEDBIO | {"neumann_terms": 2, "hessian_step": 0.15}
ACCELERATED = {"first_batch": 2, "lower_batch": 1}
COMPOSED = {"step": 0.05, "batch_size": 2}
DRO = COMPOSED | {"local_steps": 2, "momentum": 0.5, "first_batch": 2}
OWN = COMPOSED | {"local_steps": 2, "inner_batch": 2}
STEPS = {"upper_step": 0.05, "lower_step": 0.1, "batch_size": 2}
SERIES = STEPS | {"neumann": "sum", "neumann_terms": 2, "hessian_step": 0.15}  # a fixed number of terms
LOCAL_MOMENTUM = SERIES | {"momentum": 0.3, "local_steps": (1, 3)}
SYNCHRONOUS = SERIES | {"lower_rounds": 2}
STORM = {"delta": 2.0, "offset": 8.0, "c_upper": 0.8, "c_lower": 0.5}
LOOP = {"upper_step": 0.03, "lower_step": 0.05, "linear_step": 0.04, "server_upper_step": 0.02, "radius": 0.002}
LOOP |= {"local_steps": (1, 3), "batch_size": 2}
ADAPTIVE = LOOP | {"bounds": ((0.001, 1.0), (0.001, 1.0), None)}
FIRST_ORDER = {"upper_step": 0.02, "lower_step": 0.1, "multiplier": 5.0, "local_steps": (1, 3), "batch_size": 2}
LAGRANGIAN = {"upper_step": 0.02, "lower_step": 0.03, "linear_step": 0.1, "local_steps": (1, 3), "batch_size": 2}
NODES = {"model_step": 0.1, "linear_step": 0.15, "weight_step": 0.4, "steps": 5, "sync_every": 3, "refresh": 0.5}
NODES |= {"batch_size": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "ASFBO": ADAPTIVE,
    "LAASFBO": ADAPTIVE,
    "SimFBO": LOOP,
    "ShroFBO": LOOP,
    "FedNest": NEST,
    "LFedNest": NEST,
    "FedNestSGD": NEST,
    "LFedNestSVRG": NEST,
    "LFedNestNonAlt": NEST,
    "FedBiO": GLOBAL_FEDBIO,
    "FedBiOAcc": GLOBAL_FEDBIO | ACCELERATED | {"shared_batch": True},
    "FedBiOLocal": LOCAL_FEDBIO,
    "FedBiOAccLocal": LOCAL_FEDBIO | ACCELERATED,
    "FedDRO": DRO,
    "DSFedDRO": DRO | {"server_step": 1.2, "server_inner_step": 0.9},
    "CompositionalFedAvg": COMPOSED | {"local_steps": 3},
    "ComFedL": OWN,
    "LocalSCGDM": COMPOSED | {"local_steps": 3, "momentum": 0.5, "gradient_momentum": 0.6, "share_inner": False},
    "FCSG": OWN | {"gradient_momentum": 0.6},
    "AccFCSGM": OWN | {"gradient_momentum": 0.3},
    "FedDRSCGD": DRO | {"gradient_momentum": 0.6, "radius": 2.0},
    "ParallelSGD": COMPOSED,
    "MBSGD": COMPOSED,
    "SCGD": COMPOSED | {"momentum": 0.5},
    "NASA": COMPOSED | {"momentum": 0.5, "gradient_momentum": 0.5},
    "GCIVR": COMPOSED | {"anchor_every": 2},
    "FedMBO": STEPS | {"lower_rounds": 2, "neumann_terms": 1, "hessian_step": 0.15},
    "AggITD": STEPS | {"lower_rounds": 2, "lower_local_steps": (1, 3), "upper_local_steps": 2, "hessian_step": 0.15},
    "LocalBSGM": LOCAL_MOMENTUM,
    "LocalBSGVR": LOCAL_MOMENTUM,
    "AdaFBiO": SERIES | STORM | {"local_steps": 2},
    "CommFedBiO": STEPS | {"lower_local_steps": (1, 3), "linear_step": 0.15, "neumann_terms": 2, "shrink": 2},
    "StocBiO": SYNCHRONOUS,
    "MRBO": SERIES | STORM,
    "BOME": STEPS
    | {"auxiliary_step": 0.12, "lower_rounds": 2, "lower_local_steps": (1, 3), "lower_step": 0.3, "barrier_rate": 0.9},
    "F2SA": FIRST_ORDER | {"auxiliary_step": 0.12, "lower_rounds": 2, "control": "anchor"},
    "F2SA2": FIRST_ORDER,
    "BRFedBi": STEPS | {"linear_step": 0.1},
    "BRFedBiM": STEPS | {"linear_step": 0.1, "momentum": 0.4},
    "BRFedBiP": STEPS | {"linear_step": 0.1, "refresh": 0.4, "anchor_batch": 3},
    "FedMSA": LAGRANGIAN | {"momentum": 0.4, "jacobians": "tracked"},
    "MEHA": FIRST_ORDER | {"auxiliary_step": 0.12, "smoothing": 2.0},
    "SGHA": LAGRANGIAN | {"smoothing": 0.5, "dual_regularization": 0.1, "radius": 0.05, "control": "anchor"},
    "VPBGD": FIRST_ORDER | {"auxiliary_step": 0.12},
    "FedAvgSaddle": SADDLE,
    "LocalExtragradient": SADDLE | {"control": "anchor"},
    "MomentumLocalSGDA": SADDLE | {"momentum": 0.4},
    "ProxSkipGDA": {"upper_step": 0.02, "lower_step": 0.05, "chance": 0.4, "batch_size": 2},
    "ScaffoldSaddle": SADDLE,
    "FastDRO": SAMPLES | {"size": 0.4},
    "PDSGD": SAMPLES | {"dual_step": 0.1, "penalty": 2.0},
    "AFL": SAMPLES | {"weight_step": 0.1},
    "DRFA": SAMPLES | {"weight_step": 0.1, "local_steps": 2},
    "QFedAvg": SINGLE | {"fairness": 2.0},
    "FedAvg": SINGLE,
    "FedProx": SINGLE | {"proximal": 0.5},
    "Scaffold": SINGLE | {"server_step": 0.8},
    "FedSVRG": SINGLE,
    "LocalSVRG": {"step": 0.05, "sync_every": 3, "refresh": 0.5, "batch_size": 2},
    "CoBo": SINGLE | {"proximal": 0.5, "weight_step": 0.3, "normalize": True},
    "Ditto": SINGLE | {"personal_step": 0.1, "personal_steps": 2, "proximal": 0.5},
    "PFedMe": SINGLE | {"proximal": 2.0, "server_step": 0.8, "accuracy": 0.1, "inner_step": 0.1, "inner_steps": 3},
    "FineTuned": SINGLE | {"personal_step": 0.1, "personal_steps": 2},
    "LocalTrain": {"step": 0.05, "local_steps": 3, "refresh": 0.5, "batch_size": 2},
    "WeightedNodesProx": NODES | {"output": "random"},
    "WeightedNodesABA": NODES | {"steps": 3},
}

# Exchanges a round as the specification states them, from T and N; by class of problem.
T, N = NESTED["lower_rounds"], NESTED["neumann_terms"]
EXCHANGES: dict[tuple[str, str], int] = {
    ("ASFBO", "Bilevel"): 1,
    ("LAASFBO", "Bilevel"): 1,
    ("SimFBO", "Bilevel"): 1,
    ("ShroFBO", "Bilevel"): 1,
    ("FedNest", "Bilevel"): 2 * T + N + 3,
    ("FedNest", "Minimax"): 2 * T + 2,
    ("FedNest", "Compositional"): 2 * T + 3,
    ("LFedNest", "Bilevel"): T + 1,
    ("LFedNest", "Minimax"): T + 1,
    ("LFedNest", "Compositional"): T + 1,
    ("FedNestSGD", "Bilevel"): T + N + 3,
    ("FedNestSGD", "Minimax"): T + 2,
    ("FedNestSGD", "Compositional"): T + 3,
    ("LFedNestSVRG", "Bilevel"): 2 * T + 1,
    ("LFedNestSVRG", "Minimax"): 2 * T + 1,
    ("LFedNestSVRG", "Compositional"): 2 * T + 1,
    ("LFedNestNonAlt", "Bilevel"): 1,
    ("LFedNestNonAlt", "Minimax"): 1,
    ("LFedNestNonAlt", "Compositional"): 1,
    ("FedBiO", "Bilevel"): 1,
    ("FedBiOAcc", "Bilevel"): 2,
    ("FedBiOLocal", "LocalBilevel"): 1,
    ("FedBiOAccLocal", "LocalBilevel"): 2,
    ("FedDRO", "Compositional"): 2,
    ("DSFedDRO", "Compositional"): 1,
    ("CompositionalFedAvg", "Compositional"): 1,
    ("ComFedL", "LocalCompositional"): 1,
    ("LocalSCGDM", "LocalCompositional"): 1,
    ("FCSG", "LocalCompositional"): 1,
    ("AccFCSGM", "LocalCompositional"): 1,
    ("FedDRSCGD", "Compositional"): 1,
    ("ParallelSGD", "Compositional"): 1,
    ("MBSGD", "Compositional"): 2,
    ("SCGD", "Compositional"): 2,
    ("NASA", "Compositional"): 1,
    ("GCIVR", "Compositional"): 2,
    ("FedMBO", "Bilevel"): T + 2,  # with N = 1, so that no N_j is above 0
    ("AggITD", "Bilevel"): 2 * T + 3,
    ("LocalBSGM", "Bilevel"): 1,
    ("LocalBSGVR", "Bilevel"): 1,
    ("AdaFBiO", "Bilevel"): 1,
    ("CommFedBiO", "Bilevel"): N + 2,
    ("StocBiO", "Bilevel"): T + N + 2,
    ("MRBO", "Bilevel"): N + 2,
    ("BOME", "Bilevel"): T + 1,
    ("F2SA", "Bilevel"): 2 * (T + 1),
    ("F2SA2", "Bilevel"): 1,
    ("BRFedBi", "Bilevel"): 1,
    ("BRFedBiM", "Bilevel"): 1,
    ("BRFedBiP", "Bilevel"): 1,
    ("FedMSA", "Bilevel"): 2,
    ("FedMSA", "Compositional"): 2,
    ("FedMSA", "MultiLevel"): 2,
    ("MEHA", "Bilevel"): 1,
    ("SGHA", "Bilevel"): 2,
    ("VPBGD", "Bilevel"): 1,
    ("FedAvgSaddle", "Minimax"): 1,
    ("LocalExtragradient", "Minimax"): 2,
    ("MomentumLocalSGDA", "Minimax"): 1,
    ("ProxSkipGDA", "Minimax"): 1,
    ("ScaffoldSaddle", "Minimax"): 1,
    ("FastDRO", "SingleLevel"): 2,
    ("PDSGD", "SingleLevel"): 1,
    ("AFL", "SingleLevel"): 1,
    ("DRFA", "SingleLevel"): 2,
    ("QFedAvg", "SingleLevel"): 1,
    ("FedAvg", "SingleLevel"): 1,
    ("FedProx", "SingleLevel"): 1,
    ("Scaffold", "SingleLevel"): 1,
    ("FedSVRG", "SingleLevel"): 2,
    ("LocalSVRG", "SingleLevel"): 1,
    ("CoBo", "SingleLevel"): 2,
    ("Ditto", "SingleLevel"): 1,
    ("PFedMe", "SingleLevel"): 1,
    ("FineTuned", "SingleLevel"): 1,
    ("LocalTrain", "SingleLevel"): 0,
    ("WeightedNodesProx", "WeightedNodes"): 2 * 2 + 1,  # ⌈5/3⌉ = 2
    ("WeightedNodesABA", "WeightedNodes"): 2 * 1 + 1,
}

PRESETS = {
    "ALSET": "StocBiO",
    "BSA": "StocBiO",
    "TTSA": "StocBiO",
    "FedGDAGT": "FedAvgSaddle",
}  # the same code with other defaults, tested once
PER_CLIENT = ("weights", "shares", "last_weights", "models")  # fields of a state with an entry for each client
# One or two for each way of exchanging and remembering, on both engines in `make test`, and fewer for the rest of the
# contract: of all others `make test` has what follows from the plan, and `make slow` everything.
BOTH = {"FedNest", "FedBiOLocal", "ASFBO", "CommFedBiO", "FedDRO", "ScaffoldSaddle", "FedAvg", "DRFA", "PDSGD"}
BOTH |= {"WeightedNodesProx"}
CORE = {"FedAvg", "PDSGD", "ScaffoldSaddle"}  # a mean, a gather, memory
CHEAP = {"FedAvg", "ScaffoldSaddle"}  # one without and one with memory, quickly compiled
DEALT = {
    "CoBo",
    "DRFA",
    "FedMBO",
}  # methods that deal out work to clients at random: another order of clients is another deal


def weights(name: str) -> list[int] | None:
    """Unequal ones, unless the algorithm refuses them."""
    return None if "equal weights" in needs(name) else [1, 2, 1, 3]


def needs(name: str) -> tuple[str, ...]:
    """What the algorithm needs of problem, clients and run."""
    return getattr(getattr(rk, name), "needs", ())


def job(name: str, it: Case, algorithm: Any = None, seed: int = 25, **given: Any) -> Job:
    """The algorithm on a case, for an engine to open; `given`: channel, its noise, and faults."""
    what = testing.job(method(name), it, seed, **given)
    return what if algorithm is None else replace(what, algorithm=algorithm)


def full(name: str) -> Any:
    """The algorithm with full batches and a fixed number of local steps."""
    steps = {field: 2 for field in ("lower_local_steps", "local_steps") if field in SETTINGS[name]}
    return method(name, **dict.fromkeys(BATCHES & set(SETTINGS[name])), **steps)


BATCHES = {"batch_size", "upper_batch", "lower_batch", "first_batch", "inner_batch", "anchor_batch"}


def names() -> list[str]:
    """Every algorithm of the library, but for presets of another."""
    return sorted(set(algorithms.__all__) - set(PRESETS))


def claims(name: str) -> list[str]:
    """The classes of problems that an algorithm claims; "Local…" where the lower level is to be each client's own."""
    return testing.kinds(getattr(rk, name))


def pairs() -> list[tuple[str, str]]:
    """Every algorithm with every class of problem it claims."""
    return [(name, kind) for name in names() for kind in claims(name)]


def method(name: str, **given: Any) -> Any:
    """The algorithm with its settings."""
    return getattr(rk, name)(**(SETTINGS[name] | given))


def together(cases: list[tuple[str, str]], default: Any = None) -> Any:
    """One test for each case; those of one case go to one worker, which then compiles it once.

    With `default`, those of methods that are not in it are slow tests, and those for further classes of problem, too.
    """
    each = []
    for name, kind in cases:
        marks = [pytest.mark.xdist_group(f"{name}-{kind}")]
        if default is not None and (name not in default or kind != claims(name)[0]):
            marks.append(pytest.mark.slow)
        each.append(pytest.param(name, kind, marks=marks))
    return pytest.mark.parametrize(("name", "kind"), each)


# What several processes try together: with memory, the centre's data, a gather, a random output, two levels, a nested
# mean.
HOSTED = [
    ("ScaffoldSaddle", "Minimax"),
    ("WeightedNodesABA", "WeightedNodes"),
    ("PDSGD", "SingleLevel"),
    ("WeightedNodesProx", "WeightedNodes"),
    ("FedBiO", "Bilevel"),
    ("SCGD", "Compositional"),
]
