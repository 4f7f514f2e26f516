"""The channels: clipping, noise, budgets of privacy, and compression."""

from rookery.channels.compression import low_rank, quantize, random_k, top_k
from rookery.channels.downlink import broadcast
from rookery.channels.privacy import clip, gaussian
from rookery.channels.private import private

__all__ = ["broadcast", "clip", "gaussian", "low_rank", "private", "quantize", "random_k", "top_k"]
