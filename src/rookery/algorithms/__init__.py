"""Algorithms: one paper or family to a file, each a frozen record of hyperparameters with `init` and `round`."""

from rookery.algorithms.fednest import FedNest, FedNestSGD, LFedNest, LFedNestNonAlt, LFedNestSVRG
from rookery.algorithms.saddle import FedAvgSaddle, ScaffoldSaddle
from rookery.algorithms.single_level import FedAvg, FedSVRG

__all__ = [
    "FedAvg",
    "FedAvgSaddle",
    "FedNest",
    "FedNestSGD",
    "FedSVRG",
    "LFedNest",
    "LFedNestNonAlt",
    "LFedNestSVRG",
    "ScaffoldSaddle",
]
