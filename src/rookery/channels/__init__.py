"""The channels: clipping and noise."""

from rookery.channels.privacy import clip, gaussian

__all__ = ["clip", "gaussian"]
