"""The public names: `rookery` loads this file when one of them is first used."""

from rookery import parts
from rookery.algorithms import *  # noqa: F403
from rookery.algorithms import __all__ as _algorithms
from rookery.algorithms.fedbio import SOBA
from rookery.algorithms.server_optimizer import FedOpt, with_server_optimizer
from rookery.base import tree
from rookery.base.processes import HostError
from rookery.channels import (
    attacks,
    broadcast,
    bucketing,
    centered_clipping,
    clip,
    gaussian,
    geometric_median,
    krum,
    low_rank,
    median,
    nearest_neighbors,
    private,
    quantize,
    random_k,
    secure_sum,
    top_k,
    trimmed_mean,
)
from rookery.data.clients import Clients
from rookery.data.cohort import Poisson
from rookery.engines.federation import Federation
from rookery.engines.simulation import Simulation
from rookery.engines.simulation.memory import MemoryLimitError
from rookery.language.asynchronous import Asynchronous
from rookery.language.channel import Bookkeeping, Channel, Faults, chain
from rookery.language.clock import Clock
from rookery.language.fed import (
    Algorithm,
    AtLeastOne,
    BatchSize,
    Client,
    Epochs,
    Fed,
    NonFiniteError,
    Positive,
    Share,
    Step,
    Steps,
)
from rookery.problems import objectives
from rookery.problems.problems import Bilevel, Compositional, Minimax, MultiLevel, SingleLevel, WeightedNodes
from rookery.run.check import check
from rookery.run.diagnosis import Diagnosis
from rookery.run.explain import explain
from rookery.run.result import Best, NonFiniteWarning, RoundFailedError, Run
from rookery.run.session import Stepped, session
from rookery.run.solve import solve
from rookery.run.tune import Tuning, tune
from rookery.run.weights import load_weights, save_weights
from rookery.run.worth import Worth, worth

__all__ = [
    "SOBA", "Algorithm", "Asynchronous", "AtLeastOne", "BatchSize", "Best", "Bilevel", "Bookkeeping", "Channel",
    "Client", "Clients", "Clock", "Compositional", "Diagnosis", "Epochs", "Faults", "Fed", "FedOpt", "Federation",
    "HostError", "MemoryLimitError",
    "Minimax", "MultiLevel", "NonFiniteError", "NonFiniteWarning", "Poisson", "Positive", "RoundFailedError", "Run",
    "Share", "Simulation", "SingleLevel", "Step", "Stepped", "Steps", "Tuning", "WeightedNodes", "Worth", "attacks",
    "broadcast", "bucketing", "centered_clipping", "chain", "check", "clip", "explain", "gaussian", "geometric_median",
    "krum", "load_weights", "low_rank", "median", "nearest_neighbors", "objectives", "parts", "private", "quantize",
    "random_k", "save_weights", "secure_sum", "session", "solve", "top_k", "tree", "trimmed_mean", "tune",
    "with_server_optimizer", "worth", *_algorithms,
]  # fmt: skip
