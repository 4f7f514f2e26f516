"""The channels: clipping, noise, budgets of privacy, compression, and robust means."""

from rookery.channels.compression import low_rank, quantize, random_k, top_k
from rookery.channels.downlink import broadcast
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
    "broadcast", "bucketing", "centered_clipping", "clip", "gaussian", "geometric_median", "krum", "low_rank", "median",
    "nearest_neighbors", "private", "quantize", "random_k", "top_k", "trimmed_mean",
]  # fmt: skip
