"""What the experiments share: configurations, claims, searches, curves, and the code that runs them.

Here are the names that an experiment is declared with.
"""

from rookery.experiments.machinery.claims import Claims, Finding
from rookery.experiments.machinery.experiment import Config, Experiment, Headline
from rookery.experiments.machinery.grid import Grid
from rookery.experiments.machinery.texts import description

__all__ = ["Claims", "Config", "Experiment", "Finding", "Grid", "Headline", "description"]
