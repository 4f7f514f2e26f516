"""The channels: clipping, noise, budgets of privacy, compression, and secure sums."""

from rookery.channels.compression import low_rank, quantize, random_k, top_k
from rookery.channels.downlink import broadcast
from rookery.channels.privacy import clip, gaussian
from rookery.channels.private import private
from rookery.channels.secure import secure_sum

__all__ = [
    "broadcast", "clip", "gaussian", "low_rank", "private", "quantize", "random_k", "secure_sum", "top_k",
]  # fmt: skip
