"""Tasks: ready-made problems with their data, a start, a way to evaluate, and defaults that work."""

from rookery.tasks.composition import composition
from rookery.tasks.data_cleaning import data_cleaning
from rookery.tasks.dro_imbalanced import dro_imbalanced
from rookery.tasks.fairness import fairness
from rookery.tasks.few_shot import few_shot
from rookery.tasks.flamby import fed_heart, fed_tcga
from rookery.tasks.group_weights import group_weights
from rookery.tasks.hyperparameters import hyperparameters
from rookery.tasks.hyperrep import hyperrep
from rookery.tasks.loss_tuning import loss_tuning
from rookery.tasks.minimax_quadratic import minimax_quadratic
from rookery.tasks.portfolio import portfolio
from rookery.tasks.quadratic import quadratic
from rookery.tasks.task import Task
from rookery.tasks.weighted_nodes import weighted_nodes
from rookery.tasks.worst_group import worst_group

__all__ = [
    "Task",
    "composition",
    "data_cleaning",
    "dro_imbalanced",
    "fairness",
    "fed_heart",
    "fed_tcga",
    "few_shot",
    "group_weights",
    "hyperparameters",
    "hyperrep",
    "loss_tuning",
    "minimax_quadratic",
    "portfolio",
    "quadratic",
    "weighted_nodes",
    "worst_group",
]


def __dir__() -> list[str]:
    return __all__
