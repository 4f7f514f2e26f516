"""The papers' own hyperparameters: the constants of a problem in, an algorithm with its hyperparameters out.

One file per paper: `fednest` (with the constants of bilevel, minimax, compositional and single-level problems),
`fedbio`, `feddro`, `asfbo` and `weighted_nodes`. `quadratic_constants` computes the constants of a quadratic task.
Where a printed formula had to be corrected, the file or the docstring says so.
"""

from rookery.theory.asfbo import asfbo, asfbo_terms
from rookery.theory.fedbio import fedbio, fedbio_acc
from rookery.theory.feddro import ds_feddro, feddro
from rookery.theory.fednest import (
    CompositionalConstants,
    Constants,
    MinimaxConstants,
    SingleLevelConstants,
    Smoothness,
    Steps,
    fednest,
    fedsvrg,
    steps,
)
from rookery.theory.quadratic import quadratic_constants
from rookery.theory.weighted_nodes import WeightedConstants, weighted_nodes

__all__ = [
    "CompositionalConstants", "Constants", "MinimaxConstants", "SingleLevelConstants", "Smoothness", "Steps",
    "WeightedConstants", "asfbo", "asfbo_terms", "ds_feddro", "fedbio", "fedbio_acc", "feddro", "fednest", "fedsvrg",
    "quadratic_constants", "steps", "weighted_nodes",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
