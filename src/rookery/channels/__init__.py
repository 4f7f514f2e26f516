"""The channels: clipping, noise, budgets of privacy, and secure sums."""

from rookery.channels.privacy import clip, gaussian
from rookery.channels.private import private
from rookery.channels.secure import secure_sum

__all__ = ["clip", "gaussian", "private", "secure_sum"]
