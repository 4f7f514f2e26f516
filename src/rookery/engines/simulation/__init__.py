"""The engine that computes all clients in this process: on one device, on many, or step by step."""

from rookery.engines.simulation.simulation import Simulation

__all__ = ["Simulation"]
