"""Validation of a problem, its clients and its start before anything is compiled."""

from rookery.engines.checks.arguments import check_function, check_nodes, check_one_data_set, check_run, start_values
from rookery.engines.checks.losses import check_losses, check_used
from rookery.engines.checks.values import check_features, check_mean, check_means, check_measure, check_whole_batches

__all__ = [
    "check_features", "check_function", "check_losses", "check_mean", "check_means", "check_measure", "check_nodes",
    "check_one_data_set", "check_run", "check_used", "check_whole_batches",
    "start_values",
]  # fmt: skip
