"""The channels: clipping, noise, budgets of privacy, and robust means."""

from rookery.channels.privacy import clip, gaussian
from rookery.channels.private import private
from rookery.channels.robust import (
    bucketing,
    centered_clipping,
    geometric_median,
    krum,
    median,
    nearest_neighbors,
    trimmed_mean,
)

__all__ = [
    "bucketing", "centered_clipping", "clip", "gaussian", "geometric_median", "krum", "median", "nearest_neighbors",
    "private", "trimmed_mean",
]  # fmt: skip
