"""Robust means where clients lie, and compression: our own experiments."""

from rookery.experiments.channels import compression, liars, unlike

EXPERIMENTS = (liars.liars, unlike.unlike, compression.compression)
