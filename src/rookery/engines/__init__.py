"""Engines: they execute plans."""

from typing import Any


def default_engine() -> Any:
    """The engine of a run that does not name one."""
    from rookery.engines.simulation import Simulation

    return Simulation()
