"""Problems, ready-made objectives, and models as variables."""

from rookery.problems.problems import Bilevel, Compositional, Minimax, MultiLevel, Problem, SingleLevel, WeightedNodes

__all__ = ["Bilevel", "Compositional", "Minimax", "MultiLevel", "Problem", "SingleLevel", "WeightedNodes"]
