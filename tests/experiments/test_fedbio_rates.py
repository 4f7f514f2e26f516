"""How the rates of `fedbio-rates` are read off the runs: the mean so far, the best step of a grid, and the slope."""

import numpy as np
import pandas as pd
import pytest

from rookery.experiments import fedbio_rates
from rookery.experiments.fedbio_rates import EPSILONS, STEPS


def runs(name: str, mean, *, epsilons=(0.0,), steps=None, batch=lambda epsilon: 1) -> pd.DataFrame:
    """Runs whose mean of ‖∇Φ‖² after n rounds is mean(step, n), two seeds alike; a sample a client, level and round."""
    rounds = np.unique(np.round(np.geomspace(1, 1e7, 600)))
    frames = []
    for epsilon in epsilons:
        for step in steps or STEPS[name]:
            for seed in (0, 1):
                labels = {"study": "rate", "method": name, "clients": 4, "epsilon": epsilon, "step": step, "seed": seed}
                samples = 4 * rounds * batch(epsilon)  # of all clients
                costs = {"round": rounds, "exchanges": 3 * rounds, "samples_upper": samples, "samples_lower": samples}
                frames.append(
                    pd.DataFrame({"run": f"{name} {epsilon} {step}", **labels, **costs, "so_far": mean(step, rounds)})
                )
    return pd.concat(frames, ignore_index=True)


def test_the_mean_so_far_is_the_trapezoidal_rule() -> None:
    places = np.array([0, 1, 3, 10])
    one = {"study": "rate", "run": "a", "clients": 4, "round": places, "samples_upper": 0, "samples_lower": 8 * places}
    results = pd.concat([pd.DataFrame({**one, "seed": s, "relative": 1.0 + s * places}) for s in (0, 1)])
    found = fedbio_rates.with_means(results.reset_index(drop=True))
    np.testing.assert_allclose(found["so_far"][found["round"] > 0], [1, 1, 1, 1.5, 2.5, 6])  # of 1, and of 1 + t
    np.testing.assert_allclose(found["samples"], [0, 2, 6, 20] * 2)


@pytest.mark.parametrize(("power", "slope"), [(1, -2.0), (2, -1.5)])
def test_a_floor_like_a_power_of_the_step_has_the_slope_of_the_best_step(power: int, slope: float) -> None:
    """1/(step n) + floor: the best step goes like ε^{1/power}, its rounds like 1/(ε step)."""
    grid = tuple(2.0 ** (-k / 2) for k in range(2, 27))
    results = runs("FedNest", lambda step, n: 1 / (step * n) + step**power, steps=grid)
    costs = fedbio_rates._costs(results, "FedNest")[4]
    assert costs.epsilons == [*EPSILONS]
    for cost in ("exchanges", "samples"):
        found, error = costs.slope(cost)
        assert abs(found - slope) < error + 0.02 < 0.15
    assert fedbio_rates.fednest_rate(results).holds is not False


def test_a_rate_that_is_too_steep_does_not_hold() -> None:
    results = runs("FedNest", lambda step, n: np.where(step == 0.04, 0.6, 1.2) * n ** (-1 / 3))  # n ∝ ε^{-3}
    assert fedbio_rates.fednest_rate(results).holds is False


def test_a_best_step_at_the_edge_of_the_grid_does_not_count() -> None:
    results = runs("FedNest", lambda step, n: 1 / (step * n))  # no floor: the largest step is best
    finding = fedbio_rates.fednest_rate(results)
    assert finding.holds is None
    assert "inside the grid" in finding.note


def test_samples_are_a_clients_own_and_follow_the_batch() -> None:
    results = runs(
        "FedBiO", lambda step, n: np.where(step == 0.04, 1.0, 2.0) / n, epsilons=EPSILONS, batch=lambda e: 1 / e
    )
    costs = fedbio_rates._costs(results, "FedBiO")[4]
    np.testing.assert_allclose([one.exchanges for one in costs.each], [3 / e for e in EPSILONS], rtol=0.02)
    np.testing.assert_allclose([one.samples for one in costs.each], [2 / e**2 for e in EPSILONS], rtol=0.02)
    assert {one.step for one in costs.each} == {0.04}
    finding = fedbio_rates.fedbio_rate(results)  # a mean like 1/n has no floor
    assert finding.holds is None
    assert "dying away" in finding.note
