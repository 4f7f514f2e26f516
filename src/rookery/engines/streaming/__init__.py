"""Simulation with rows that stay on the host: those of the next cohorts are fetched while a round is computed."""
