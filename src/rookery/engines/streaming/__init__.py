"""Simulation with rows that stay on the host: rows for the next cohorts are fetched while a round is computed."""
