"""Which way a metric is to go: told by its last word or by a sign, never guessed."""

from typing import Any

import numpy as np
import pytest

from rookery import tasks
from rookery.language.metrics import Direction, direction


@pytest.mark.parametrize(
    ("metric", "name", "higher"),
    [
        ("accuracy", "accuracy", True),
        ("worst_accuracy", "worst_accuracy", True),
        ("test/AUC", "test/AUC", True),
        ("reward", "reward", True),
        ("episode_returns", "episode_returns", True),
        ("loss", "loss", False),
        ("accuracy_gap", "accuracy_gap", False),
        ("precision_error", "precision_error", False),
        ("error_rate", "error_rate", False),
        ("test_accuracy_mean", "test_accuracy_mean", True),
        ("accuracy_gap_q90", "accuracy_gap_q90", False),
        ("+loss", "loss", True),
        ("-reward", "reward", False),
        ("+weight_women", "weight_women", True),
    ],
)
def test_directions(metric: str, name: str, higher: bool) -> None:
    found = direction(metric)
    assert found == Direction(name, higher)
    assert direction(found.signed) == found
    assert found.better(2.0, 1.0) == higher
    assert found.better(1.0, 2.0) != higher
    assert not found.better(np.nan, 1.0)
    assert not found.better(1.0, 1.0)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            "accuracy_women",
            r"'accuracy_women' does not say .*'\+accuracy_women' if higher is better, '-accuracy_women' if low",
        ),
        ("test_acuracy", r"Write '\+test_acuracy' .*Or did you mean 'test_accuracy'\?$"),
        ("rate", r"'rate' does not say"),
        ("loss_reduction", r"'loss_reduction' does not say"),
        ("", "A metric must be a name .*; got ''"),
        ("-", "A metric must be a name .*; got '-'"),
        (None, "A metric must be a name .*; got None"),
    ],
)
def test_what_no_name_tells(metric: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        direction(metric)


def test_a_direction_for_the_rest() -> None:
    assert direction("weight_women", otherwise=True) == Direction("weight_women", True)
    assert direction("loss", otherwise=True) == Direction("loss", False)


@pytest.mark.slow
def test_the_metrics_of_tasks() -> None:
    small = [
        tasks.quadratic(clients=2),
        tasks.minimax_quadratic(clients=2),
        tasks.portfolio(clients=2),
        tasks.hyperparameters(clients=2),
        tasks.hyperrep(clients=2, width=4),
        tasks.loss_tuning(clients=2),
        tasks.data_cleaning(clients=2),
        tasks.few_shot(clients=2),
        tasks.group_weights(clients=2),
        tasks.fairness(clients=2, data="synthetic"),
        tasks.dro_imbalanced(clients=2),
        tasks.weighted_nodes(nodes=3, minority=1, samples=10, validation=10, cap=0.5),
        tasks.worst_group(clients=2, bad=0.5),
        tasks.fed_heart(),
    ]
    names = {name for name in tasks.__all__ if name.islower()} - {"fed_tcga"}  # its data may not be at hand
    assert {task.name.replace("-", "_") for task in small} == names
    for task in small:
        assert direction(task.metric).higher_is_better == task.metric.endswith("accuracy")
