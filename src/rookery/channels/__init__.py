"""What can stand in a channel."""

from rookery.channels.privacy import clip, gaussian

__all__ = ["clip", "gaussian"]
