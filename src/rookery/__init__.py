"""Rookery: federated nested optimization. State the problem once as plain JAX losses, and pick a method by name."""

from rookery import objectives, tasks, theory
from rookery.algorithms import *  # noqa: F403
from rookery.algorithms import __all__ as _algorithms
from rookery.clients import Clients
from rookery.engines.federation import Federation
from rookery.engines.simulation import Simulation
from rookery.fed import Epochs, NonFiniteError
from rookery.problems import Bilevel, Compositional, Minimax, SingleLevel, WeightedNodes
from rookery.solve import Best, Run, solve
from rookery.tune import Tuning, tune

__version__ = "0.1.0"

__all__ = [
    "Best",
    "Bilevel",
    "Clients",
    "Compositional",
    "Epochs",
    "Federation",
    "Minimax",
    "NonFiniteError",
    "Run",
    "Simulation",
    "SingleLevel",
    "Tuning",
    "WeightedNodes",
    "objectives",
    "solve",
    "tasks",
    "theory",
    "tune",
    *_algorithms,
]
