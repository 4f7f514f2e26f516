"""Engines: what interprets a plan."""

from typing import Any


def default_engine() -> Any:
    """The engine of a run that names none."""
    from rookery.engines.simulation import Simulation

    return Simulation()
