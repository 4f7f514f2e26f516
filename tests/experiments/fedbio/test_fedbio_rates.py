"""How the rates of `fedbio-rates` are read off the runs: the mean so far, the best step of a grid, and the slope."""

import numpy as np
import pandas as pd
import pytest

from rookery.experiments.fedbio import rates
from rookery.experiments.fedbio.quadratics import EPSILONS, steps

NEST = {"name": "FedNest", "cost": "exchanges"}


def runs(name: str, mean, *, epsilons=(0.0,), grid=None, batch=lambda epsilon: 1) -> pd.DataFrame:
    """Runs whose mean of ‖∇Φ‖² after n rounds is mean(step, n), two seeds alike; a sample a client, level and round."""
    rounds = np.unique(np.round(np.geomspace(1, 1e7, 600)))
    frames = []
    for epsilon in epsilons:
        for step in grid or steps(name, 4, epsilon):
            for seed in (0, 1):
                labels = {"study": "rate", "method": name, "clients": 4, "epsilon": epsilon, "step": step, "seed": seed}
                costs = {"round": rounds, "exchanges": 3 * rounds, "samples": 2 * rounds * batch(epsilon)}
                means = mean(step, rounds)
                floor = np.where(rounds == rounds[-1], means, np.nan)
                frames.append(
                    pd.DataFrame(
                        {"run": f"{name} {epsilon} {step}", **labels, **costs, "so_far": means, "floor": floor}
                    )
                )
    return pd.concat(frames, ignore_index=True)


def test_the_mean_so_far_is_the_trapezoidal_rule_and_the_floor_the_second_half() -> None:
    places = np.array([0, 1, 3, 10])
    one = {"study": "rate", "run": "a", "clients": 4, "round": places, "samples_upper": 0, "samples_lower": 8 * places}
    results = pd.concat([pd.DataFrame({**one, "seed": s, "relative": 1.0 + s * places}) for s in (0, 1)])
    found = rates.measured(results.reset_index(drop=True))
    np.testing.assert_allclose(found["so_far"][found["round"] > 0], [1, 1, 1, 1.5, 2.5, 6])  # of 1, and of 1 + t
    np.testing.assert_allclose(found["samples"], [0, 2, 6, 20] * 2)
    np.testing.assert_allclose(found["floor"], [np.nan, np.nan, np.nan, 1, np.nan, np.nan, np.nan, 11])


def test_what_is_thinned_gives_what_the_whole_gives() -> None:
    """Of every run a few rows are kept, by which nothing that is read off it changes."""
    rng = np.random.default_rng(0)
    rounds = np.arange(0, 12001, 6)
    frames = []
    for step in steps("FedNest", 4, 0.0):
        for seed in (0, 1, 2):
            relative = np.exp(-step * rounds) + step * rng.exponential(size=len(rounds))
            labels = {"study": "rate", "method": "FedNest", "clients": 4, "epsilon": 0.0, "step": step, "seed": seed}
            costs = {"round": rounds, "exchanges": 25 * rounds, "samples_upper": 4 * rounds, "samples_lower": rounds}
            frames.append(pd.DataFrame({"run": f"step {step}", **labels, **costs, "relative": relative}))
    results = pd.concat(frames, ignore_index=True)
    thin = rates.thinned(results)
    assert len(thin) <= 13 * results.groupby(["run", "seed"]).ngroups
    whole, found = (rates._costs(each, "FedNest")[4] for each in (rates.measured(results), thin))
    assert [*found] == [*whole]
    assert len(found) >= 3
    np.testing.assert_allclose([*found.values()], [*whole.values()], rtol=1e-12)


@pytest.mark.parametrize(("power", "slope"), [(1, -2.0), pytest.param(2, -1.5, marks=pytest.mark.slow)])
def test_a_floor_like_a_power_of_the_step_has_the_slope_of_the_best_step(power: int, slope: float) -> None:
    """1/(step n) + floor: the best step goes like ε^{1/power}, its rounds like 1/(ε step)."""
    grid = tuple(2.0 ** (-k / 4) for k in range(4, 53))
    results = runs("FedNest", lambda step, n: 1 / (step * n) + step**power, grid=grid)
    costs = rates._costs(results, "FedNest")[4]
    assert tuple(costs) == EPSILONS["FedNest"]
    for cost in ("exchanges", "samples"):
        found, error = costs.slope(cost)
        assert abs(found - slope) < error + 0.01 < 0.05
    assert rates.rate(results, **NEST).holds


def test_a_rate_that_is_too_steep_does_not_hold() -> None:
    results = runs("FedNest", lambda step, n: np.where(step == 0.04, 0.6, 1.2) * n ** (-1 / 3))  # n ∝ ε^{-3}
    assert rates.rate(results, **NEST).holds is False


@pytest.mark.parametrize(
    ("slope", "error", "holds"),
    [(-1.9, 0.05, True), (-2.03, 0.05, True), (-2.08, 0.09, None), (-1.9, 0.3, None), (-2.1, 0.05, False)],
)
def test_a_slope_holds_if_its_interval_reaches_little_beyond_the_bound(
    slope: float, error: float, holds: bool | None
) -> None:
    assert rates._no_steeper(slope, error, -2.0) is holds


def test_the_logarithm_of_the_accelerated_methods_proof_is_taken_out() -> None:
    """n = (ln T)^{3/2}/ε rounds of 12 local steps: 3 exchanges of `runs`, two for every 8 steps at M = 4."""
    best = lambda step, n: np.where(step == 0.125, 1.0, 2.0) * np.log(12 * n) ** 1.5 / n
    costs = rates._costs(runs("FedBiOAcc", best, epsilons=EPSILONS["FedBiOAcc"]), "FedBiOAcc")[4]
    assert costs.slope("exchanges")[0] < -1.1
    slope, error = costs.slope("exchanges", rates._logarithms(4, costs))
    assert abs(slope + 1) < error + 0.01 < 0.05


def test_a_best_step_at_the_edge_of_the_grid_does_not_count() -> None:
    results = runs("FedNest", lambda step, n: 1 / (step * n))  # no floor: the largest step is best
    finding = rates.rate(results, **NEST)
    assert finding.holds is None
    assert "inside the grid" in finding.note


def test_samples_are_a_clients_own_and_follow_the_batch() -> None:
    epsilons = EPSILONS["FedBiO"]
    results = runs(
        "FedBiO",
        lambda step, n: np.where(step == 0.04, 1.0, 2.0) / n,
        epsilons=epsilons,
        grid=(0.02, 0.04, 0.08),
        batch=lambda e: 1 / e,
    )
    costs = rates._costs(results, "FedBiO")[4]
    np.testing.assert_allclose(costs.of("exchanges"), [3 / e for e in epsilons], rtol=0.02)
    np.testing.assert_allclose(costs.of("samples"), [2 / e**2 for e in epsilons], rtol=0.02)
    finding = rates.rate(results, name="FedBiO", cost="exchanges")  # a mean like 1/n has no floor
    assert finding.holds is None
    assert "dying away" in finding.note


@pytest.mark.slow
def test_a_run_writes_the_thinned_results(quick):
    results, _ = quick("fedbio-rates")
    labels = ["run", "study", "method", "clients", "epsilon", "step", "seed", "round"]
    assert list(results) == [*labels, "exchanges", "samples", "so_far", "floor"]
    assert results.groupby(["run", "seed"]).size().max() <= 13
