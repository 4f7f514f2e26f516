"""The public names: `rookery` loads this file when one of them is first used."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from rookery import objectives, parts, tree
from rookery.algorithms import *  # noqa: F403
from rookery.algorithms import __all__ as _algorithms
from rookery.channel import Bookkeeping, Channel, Faults, chain
from rookery.channels import clip, gaussian
from rookery.clients import Clients
from rookery.diagnosis import Diagnosis, check
from rookery.engines.federation import Federation
from rookery.engines.room import MemoryLimitError
from rookery.engines.simulation import Simulation
from rookery.explain import explain
from rookery.fed import (
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
from rookery.hosts import HostError
from rookery.problems import Bilevel, Compositional, Minimax, SingleLevel, WeightedNodes
from rookery.server_optimizer import with_server_optimizer
from rookery.solve import Best, NonFiniteWarning, RoundFailedError, Run, Stepped, session, solve
from rookery.tune import Tuning, tune
from rookery.weights import load_weights, save_weights

if _TYPE_CHECKING:  # `rookery` loads these on their own
    from rookery import tasks, theory, trackers

__all__ = [
    "Algorithm",
    "AtLeastOne",
    "BatchSize",
    "Best",
    "Bilevel",
    "Bookkeeping",
    "Channel",
    "Client",
    "Clients",
    "Compositional",
    "Diagnosis",
    "Epochs",
    "Faults",
    "Fed",
    "Federation",
    "HostError",
    "MemoryLimitError",
    "Minimax",
    "NonFiniteError",
    "NonFiniteWarning",
    "Positive",
    "RoundFailedError",
    "Run",
    "Share",
    "Simulation",
    "SingleLevel",
    "Step",
    "Stepped",
    "Steps",
    "Tuning",
    "WeightedNodes",
    "chain",
    "check",
    "clip",
    "explain",
    "gaussian",
    "load_weights",
    "objectives",
    "parts",
    "save_weights",
    "session",
    "solve",
    "tasks",
    "theory",
    "trackers",
    "tree",
    "tune",
    "with_server_optimizer",
    *_algorithms,
]
