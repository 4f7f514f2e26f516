"""The channels: clipping, noise, and budgets of privacy."""

from rookery.channels.privacy import clip, gaussian
from rookery.channels.private import private

__all__ = ["clip", "gaussian", "private"]
