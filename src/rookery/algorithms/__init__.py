"""Algorithms: one paper or family to a file, each a frozen record of hyperparameters with `init` and `round`."""

from rookery.algorithms.asfbo import ASFBO, LAASFBO, ShroFBO, SimFBO
from rookery.algorithms.commfedbio import CommFedBiO
from rookery.algorithms.compositional_baselines import GCIVR, MBSGD, NASA, SCGD, ParallelSGD
from rookery.algorithms.fedbio import FedBiO, FedBiOAcc, FedBiOAccLocal, FedBiOLocal
from rookery.algorithms.feddro import CompositionalFedAvg, DSFedDRO, FedDRO
from rookery.algorithms.fednest import FedNest, FedNestSGD, LFedNest, LFedNestNonAlt, LFedNestSVRG
from rookery.algorithms.global_hypergradient import AggITD, FedMBO
from rookery.algorithms.local_momentum import AdaFBiO, LocalBSGM, LocalBSGVR
from rookery.algorithms.saddle import FedAvgSaddle, ScaffoldSaddle
from rookery.algorithms.single_level import FedAvg, FedSVRG
from rookery.algorithms.single_machine import ALSET, BSA, MRBO, TTSA, StocBiO

__all__ = [
    "ALSET",
    "ASFBO",
    "BSA",
    "GCIVR",
    "LAASFBO",
    "MBSGD",
    "MRBO",
    "NASA",
    "SCGD",
    "TTSA",
    "AdaFBiO",
    "AggITD",
    "CommFedBiO",
    "CompositionalFedAvg",
    "DSFedDRO",
    "FedAvg",
    "FedAvgSaddle",
    "FedBiO",
    "FedBiOAcc",
    "FedBiOAccLocal",
    "FedBiOLocal",
    "FedDRO",
    "FedMBO",
    "FedNest",
    "FedNestSGD",
    "FedSVRG",
    "LFedNest",
    "LFedNestNonAlt",
    "LFedNestSVRG",
    "LocalBSGM",
    "LocalBSGVR",
    "ParallelSGD",
    "ScaffoldSaddle",
    "ShroFBO",
    "SimFBO",
    "StocBiO",
]
