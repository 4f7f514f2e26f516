"""Problems, the objectives that make them, and the variables and models that they are stated in."""

from rookery.problems.problems import Bilevel, Compositional, Minimax, Problem, SingleLevel, WeightedNodes

__all__ = ["Bilevel", "Compositional", "Minimax", "Problem", "SingleLevel", "WeightedNodes"]
