"""Nested methods where clients are slow: our own experiment."""

from rookery.experiments.delay import delay

EXPERIMENTS = (delay.delay,)
