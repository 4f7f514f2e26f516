"""The lock-step engine: a coordinator and sites that have traced the same plan, and exchange arrays."""

from rookery.engines.federation.federation import Federation

__all__ = ["Federation"]
