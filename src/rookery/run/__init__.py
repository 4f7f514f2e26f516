"""Runs: solve, tune, check, explain, and what is kept of them."""
