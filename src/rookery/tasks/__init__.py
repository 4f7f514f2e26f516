"""Tasks: ready-made problems with their data, a start, a way to evaluate, and defaults that work."""

from rookery.tasks.hyperparameters import hyperparameters
from rookery.tasks.hyperrep import hyperrep
from rookery.tasks.loss_tuning import loss_tuning
from rookery.tasks.minimax_quadratic import minimax_quadratic
from rookery.tasks.quadratic import quadratic
from rookery.tasks.task import Task

__all__ = ["Task", "hyperparameters", "hyperrep", "loss_tuning", "minimax_quadratic", "quadratic"]
