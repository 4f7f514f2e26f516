"""The algorithms, one paper or family per file: frozen records of hyperparameters with `init` and `round`."""

from rookery.algorithms.asfbo import ASFBO, LAASFBO, ShroFBO, SimFBO
from rookery.algorithms.bome import BOME
from rookery.algorithms.br_fedbi import BRFedBi, BRFedBiM, BRFedBiP
from rookery.algorithms.cobo import CoBo
from rookery.algorithms.commfedbio import CommFedBiO
from rookery.algorithms.compositional_baselines import GCIVR, MBSGD, NASA, SCGD, ParallelSGD
from rookery.algorithms.fedbio import FedBiO, FedBiOAcc, FedBiOAccLocal, FedBiOLocal
from rookery.algorithms.feddro import CompositionalFedAvg, DSFedDRO, FedDRO
from rookery.algorithms.fedmsa import FedMSA
from rookery.algorithms.fednest import FedNest, FedNestSGD, LFedNest, LFedNestNonAlt, LFedNestSVRG
from rookery.algorithms.first_order import F2SA, F2SA2, VPBGD
from rookery.algorithms.global_hypergradient import AggITD, FedMBO
from rookery.algorithms.group_dro import AFL, DRFA, QFedAvg
from rookery.algorithms.local_momentum import AdaFBiO, LocalBSGM, LocalBSGVR
from rookery.algorithms.meha import MEHA
from rookery.algorithms.own_inner import FCSG, AccFCSGM, ComFedL, FedDRSCGD, LocalSCGDM
from rookery.algorithms.personalised import Ditto, FineTuned, LocalTrain, PFedMe
from rookery.algorithms.saddle import (
    FedAvgSaddle,
    FedGDAGT,
    LocalExtragradient,
    MomentumLocalSGDA,
    ProxSkipGDA,
    ScaffoldSaddle,
)
from rookery.algorithms.sample_dro import PDSGD, FastDRO
from rookery.algorithms.sgha import SGHA
from rookery.algorithms.single_level import FedAvg, FedProx, FedSVRG, Scaffold
from rookery.algorithms.single_machine import ALSET, BSA, MRBO, TTSA, StocBiO
from rookery.algorithms.weighted_nodes import LocalSVRG, WeightedNodesABA, WeightedNodesProx
from rookery.base.arguments import naming_fields as _naming_fields

__all__ = [
    "AFL", "ALSET", "ASFBO", "BOME", "BSA", "DRFA", "F2SA", "F2SA2", "FCSG", "GCIVR", "LAASFBO", "MBSGD", "MEHA",
    "MRBO", "NASA", "PDSGD", "SCGD", "SGHA", "TTSA", "VPBGD", "AccFCSGM", "AdaFBiO", "AggITD", "BRFedBi", "BRFedBiM",
    "BRFedBiP", "CoBo", "ComFedL", "CommFedBiO", "CompositionalFedAvg", "DSFedDRO", "Ditto", "FastDRO", "FedAvg",
    "FedAvgSaddle", "FedBiO", "FedBiOAcc", "FedBiOAccLocal", "FedBiOLocal", "FedDRO", "FedDRSCGD", "FedGDAGT",
    "FedMBO", "FedMSA", "FedNest", "FedNestSGD", "FedProx", "FedSVRG", "FineTuned", "LFedNest", "LFedNestNonAlt",
    "LFedNestSVRG", "LocalBSGM", "LocalBSGVR", "LocalExtragradient", "LocalSCGDM", "LocalSVRG", "LocalTrain",
    "MomentumLocalSGDA", "PFedMe", "ParallelSGD", "ProxSkipGDA", "QFedAvg", "Scaffold", "ScaffoldSaddle", "ShroFBO",
    "SimFBO", "StocBiO", "WeightedNodesABA", "WeightedNodesProx",
]  # fmt: skip

for _name in __all__:
    _naming_fields(globals()[_name])
