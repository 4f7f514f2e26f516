"""The public names: `rookery` loads this file when one of them is first used."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from rookery import objectives
from rookery.algorithms import *  # noqa: F403
from rookery.algorithms import __all__ as _algorithms
from rookery.channel import Faults, chain
from rookery.channels import clip, gaussian
from rookery.clients import Clients
from rookery.diagnosis import Diagnosis, check
from rookery.engines.federation import Federation
from rookery.engines.room import MemoryLimitError
from rookery.engines.simulation import Simulation
from rookery.explain import explain
from rookery.fed import Epochs, NonFiniteError
from rookery.hosts import HostError
from rookery.problems import Bilevel, Compositional, Minimax, SingleLevel, WeightedNodes
from rookery.server_optimizer import with_server_optimizer
from rookery.solve import Best, NonFiniteWarning, RoundFailedError, Run, Stepped, session, solve
from rookery.tune import Tuning, tune
from rookery.weights import load_weights, save_weights

if _TYPE_CHECKING:  # `rookery` loads these on their own
    from rookery import tasks, theory, trackers

__all__ = [
    "Best",
    "Bilevel",
    "Clients",
    "Compositional",
    "Diagnosis",
    "Epochs",
    "Faults",
    "Federation",
    "HostError",
    "MemoryLimitError",
    "Minimax",
    "NonFiniteError",
    "NonFiniteWarning",
    "RoundFailedError",
    "Run",
    "Simulation",
    "SingleLevel",
    "Stepped",
    "Tuning",
    "WeightedNodes",
    "chain",
    "check",
    "clip",
    "explain",
    "gaussian",
    "load_weights",
    "objectives",
    "save_weights",
    "session",
    "solve",
    "tasks",
    "theory",
    "trackers",
    "tune",
    "with_server_optimizer",
    *_algorithms,
]
