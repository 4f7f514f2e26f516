"""The experiments about adaptively weighted nodes: their quick versions, and how they measure."""

import numpy as np
import pandas as pd
import pytest

from rookery.experiments.machinery.claims import Lead
from rookery.experiments.machinery.numbers import fitted_power
from rookery.experiments.weighted import nodes, rates, table3, tables45, theory
from rookery.tasks.weighted_nodes import KINDS


@pytest.mark.slow
def test_learnt_weights_on_linear_regression(quick):
    results, claims = quick("weighted-theory")
    [better] = [claim for text, claim in claims.items() if text.startswith("Better than Local-train")]
    assert all(saved > 0 for saved, _ in better["figures"].values())
    base = results[(results["sweep"] == "distance") & (results["value"] == 1.0)]
    start, end = (base[base["round"] == at] for at in (0, 40))
    np.testing.assert_allclose(start["excess"], start["equal"], rtol=1e-12)  # weights start equal
    np.testing.assert_allclose(start["dist"], np.sqrt(6 * 0.1**2 + 4 * 0.15**2))  # (.1, …) against (¼, ¼, ¼, ¼, 0, …)
    assert (end["dist"].to_numpy() < start["dist"].to_numpy()).all()
    assert (end["gap"].to_numpy() < 0.1 * start["gap"].to_numpy()).all()


@pytest.mark.slow
def test_whom_to_learn_from_on_digits(quick, tmp_path):
    """Five methods, both centres; even after two rounds the similar nodes have gained weight."""
    results, claims = quick("weighted-digits")
    assert set(results["method"]) == set(nodes.METHODS)
    assert claims[table3.TRUSTED]["figures"]["its least rise"] > 0
    pictures = {path.name for path in (tmp_path / "weighted-digits").glob("*.png")}
    assert pictures == {"weighted-digits.png", "weighted-digits-2.png"}
    ends = results.groupby("method")["exchanges"].max()
    assert ends["Local-train"] == 0
    assert len({ends[method] for method in nodes.METHODS if method != "Local-train"}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weighted-table3", "weighted-tables4-5", "weighted-covtype"])
def test_whom_to_learn_from_at_the_papers_size(name, quick):
    results, _ = quick(name)
    assert results["run"].nunique() >= 4


def test_the_scored_model_is_the_one_with_the_best_validation_accuracy() -> None:
    common = {"method": "FedAvg", "data": "mnist", "setting": 2, "center": "both"}
    rows = [(0, 0.5, 0.9), (0, 0.7, 0.6), (1, 0.8, 0.3), (1, 0.4, 0.99)]
    results = pd.DataFrame(
        [{**common, "seed": s, "minority_validation_accuracy": v, "minority_accuracy": a} for s, v, a in rows]
    )
    assert nodes.scores(results, "FedAvg", "mnist", 2, "minority") == [0.6, 0.3]
    assert nodes.scores(results, "FedAvg", "mnist", 2, "minority", last=True) == [0.6, 0.99]


def _sizes(accuracies: dict[int, dict[int, float]]) -> pd.DataFrame:
    """Tables 4 and 5 with one data set, both centres alike: the accuracy by size and seed."""
    return pd.DataFrame(
        {"method": "Bi-level", "data": "digits", "setting": 2, "center": center, "validation": size, "seed": seed,
         f"{center}_accuracy": accuracy, f"{center}_validation_accuracy": 0.9}
        for center in KINDS for size, own in accuracies.items() for seed, accuracy in own.items()
    )  # fmt: skip


def test_of_the_sizes_the_last_model_is_scored() -> None:
    rows = [(0.9, 0.3), (0.8, 0.4)]
    results = pd.concat(
        _sizes({100: {1: accuracy}}).assign(minority_validation_accuracy=valid) for valid, accuracy in rows
    )
    assert tables45._by_size(results, "digits", "minority") == {100: [0.4]}


def test_sizes_are_compared_seed_by_seed() -> None:
    check = tables45.largest_is_best
    small = {1: 0.80, 2: 0.90, 3: 0.70}
    ahead = check(_sizes({100: small, 200: {1: 0.81, 2: 0.911, 3: 0.71}}))
    assert ahead.holds is True
    np.testing.assert_allclose(ahead.figures["digits minority, over 100: difference, margin"][0], 0.031 / 3)
    assert check(_sizes({100: small, 200: {1: 0.79, 2: 0.889, 3: 0.69}})).holds is False
    assert check(_sizes({100: small, 200: {1: 0.79, 2: 0.93, 3: 0.70}})).holds is None


def _ends(ends: dict[str, tuple[float, ...]], data: str = "covtype", setting: int = 1) -> pd.DataFrame:
    """Results whose last evaluation on the minority is given by method and seed."""
    return pd.DataFrame(
        {"run": method, "method": method, "data": data, "setting": setting, "seed": seed, "minority_accuracy": accuracy,
         "minority_validation_accuracy": 0.5, "center": nodes.where(method, "minority")}
        for method, own in ends.items() for seed, accuracy in enumerate(own)
    )  # fmt: skip


ENDS: dict[str, tuple[float, ...]] = {
    "Bi-level": (0.86, 0.85, 0.86), "Local-train": (0.861, 0.84, 0.85), "Ditto": (0.859, 0.849, 0.859),
    "FedAvg": (0.6, 0.6, 0.6), "pFedMe": (0.7, 0.7, 0.7),
}  # fmt: skip


def test_best_means_ahead_of_every_method_by_more_than_the_margin() -> None:
    found = nodes.best(_ends(ENDS), "minority")
    assert found.holds is None
    assert "Local-train" in found.note
    assert "Ditto" not in found.note
    assert nodes.best(_ends(ENDS | {"Local-train": (0.851, 0.84, 0.85)}), "minority").holds is True
    assert nodes.best(_ends(ENDS | {"Local-train": (0.871, 0.86, 0.87)}), "minority").holds is False


def test_most_cells_are_more_than_half() -> None:
    leads = {True: Lead(1.0, 0.1), None: Lead(0.0, 0.1), False: Lead(-1.0, 0.1)}
    most = lambda *cells: nodes.over_cells({str(i): {"": leads[own]} for i, own in enumerate(cells)}, most=True).holds
    assert most(True, True, None) is True
    assert most(True, True, False, False) is False
    assert most(True, True, None, False) is None


def test_methods_are_compared_at_equal_data_points() -> None:
    """Bi-level is read off between its evaluations, where the other's run ends."""
    curve = {"Bi-level": ((0, 0.0), (100, 0.8), (200, 0.9)), "Ditto": ((0, 0.0), (50, 0.3))}
    rows = [
        {"run": method, "method": method, "data": "mnist", "setting": 1, "center": nodes.where(method, "minority"),
         "seed": seed, "samples_busiest": at, "minority_accuracy": accuracy + 0.001 * seed * (method == "Ditto")}
        for method, own in curve.items() for seed in (0, 1, 2) for at, accuracy in own
    ]  # fmt: skip
    assert nodes.at_equal_points(pd.DataFrame(rows), "Ditto", "mnist", 1, "minority").mean == pytest.approx(0.099)


def test_fedavg_below_local_needs_most_cells_of_settings_2_to_4() -> None:
    low, high = ENDS | {"Local-train": (0.65, 0.66, 0.65)}, ENDS | {"Local-train": (0.5, 0.51, 0.5)}
    of = lambda *cells: pd.concat([_ends(own, setting=setting) for setting, own in enumerate(cells, 1)])
    assert table3.fedavg_below_local(of(high, low, low, high)).holds is True
    assert table3.fedavg_below_local(of(low, low, high, high)).holds is False


def test_the_best_of_the_search_is_the_mean_over_the_centres() -> None:
    words = "step {}, linear 0.1, weight 0.1, sync {}"
    tries = [("minority", (0.05, 10), 0.9), ("majority", (0.05, 10), 0.5), ("minority", (0.02, 20), 0.8),
             ("majority", (0.02, 20), 0.7)]  # fmt: skip
    rows = [
        {"run": f"search: mnist, Bi-level, {center}, {words.format(*values)}", "method": "Bi-level",
         f"{center}_validation_accuracy": accuracy}
        for center, values, accuracy in tries
    ]  # fmt: skip
    rows += [
        {"run": f"search: mnist, Ditto, both, λ {value}", "method": "Ditto",
         **{f"{c}_validation_accuracy": value for c in KINDS}}
        for value in (0.05, 0.2, 0.1)
    ]  # fmt: skip
    best = nodes.SEARCH_GRID.best(pd.DataFrame(rows).assign(data="mnist"))
    assert best["mnist", "Bi-level"] == {"step": 0.02, "linear": 0.1, "weight": 0.1, "sync": 20}
    assert best["mnist", "Ditto"] == {"λ": 0.2}


def test_samples_in_few_rows_have_the_same_loss() -> None:
    center = np.arange(theory.DIMENSION) / 2
    few, theta = theory._samples(3, 1, 50, center), np.linspace(-1, 1, theory.DIMENSION)
    draws = np.random.default_rng([3, 1]).normal(size=(50, theory.DIMENSION + 1))
    x, noise = draws[:, :-1], draws[:, -1]
    expected = 0.5 * np.mean((x @ theta - x @ center - noise) ** 2)
    assert float(theory.squares(theta, few)) == pytest.approx(expected, rel=1e-12)


def test_distance_to_the_optimal_weights() -> None:
    distance = theory.to_optimal
    assert distance(np.array([0.3, 0.7, 0.0]), 2, 0.8) == pytest.approx(0)
    assert distance(np.array([0.2, 0.6, 0.2]), 2, 1.0) == pytest.approx(np.sqrt(0.1**2 + 0.1**2 + 0.2**2))
    assert distance(np.array([0.2, 0.6, 0.2]), 2, 0.6) == pytest.approx(np.sqrt(0.2**2 + 0.2**2))  # the cap is at work


def test_when_a_rate_counts_as_reached() -> None:
    """ABA: the gap itself; Prox: the root mean square over the iterates before the one just made."""
    curve = pd.Series([1.0, 0.5, 0.1, 0.1, 0.1], pd.RangeIndex(5))
    assert rates.rounds_to(curve, "ABA", 0.6) == 1
    assert rates.rounds_to(curve, "Prox", 0.6) == 4  # 1, .79, .65, .56 after 1, 2, 3, 4 rounds
    assert rates.rounds_to(curve, "ABA", 0.01) == np.inf


def test_slopes_are_exact_on_powers() -> None:
    epsilons = np.array([0.1, 0.03, 0.01, 0.003, 0.001])
    slope, error = fitted_power(epsilons, 7 * epsilons**-1.5)
    assert slope == pytest.approx(-1.5)
    assert error == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_rates(quick):
    """The largest ε is reached by both methods, with local steps and without."""
    _, claims = quick("weighted-rates")
    found = [claim for text, claim in claims.items() if "faster" in text]
    counts = [figure for claim in found for name, figure in claim["figures"].items() if "communications" in name]
    assert len(counts) == 4
    assert all(np.isfinite(float(count)) for [count] in counts)
