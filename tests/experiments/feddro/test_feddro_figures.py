"""The experiments of the FedDRO paper: what they consist of, and their quick versions."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS
from rookery.experiments.feddro import fig1, fig3, images, rates, thm41
from rookery.experiments.machinery.one_run import fingerprint

training, comparable, ds_above, fedavg = fig1.claim
DOCS = Path(__file__).parents[3] / "docs/reproduction"
NAMES = [name for name in EXPERIMENTS if name.startswith("feddro-")]


@pytest.mark.parametrize("name", NAMES)
def test_runs_have_names_of_their_own_and_one_fingerprint_means_one_computation(name: str) -> None:
    experiment = EXPERIMENTS[name]
    configs = [*(experiment.search(False) if experiment.search else []), *experiment.runs(False)]
    assert len({config.name for config in configs}) == len(configs)
    what = [(config.task, repr(config.settings), config.algorithm, config.rounds) for config in configs]
    marks = [fingerprint(config, 0) for config in configs]
    for mark, own in zip(marks, what, strict=True):
        assert own == what[marks.index(mark)]


def test_the_claim_on_fedavg_can_fail() -> None:
    """One method that stalls and one that does not, each alone, as rows of results."""
    rows = [
        {
            "run": f"{method} {step}",
            "study": "step",
            "method": method,
            "step": step,
            "seed": 0,
            "round": 9,
            "error": 0.7,
        }
        for method in thm41.FAILS
        for step in (0.1, 0.01)
    ]
    assert thm41.fedavg_stalls(pd.DataFrame(rows)).holds
    rows[-1]["error"] = 1e-3  # at the smaller step it comes close
    assert not thm41.fedavg_stalls(pd.DataFrame(rows)).holds


def image_ends(seeds: dict[str, tuple[int, ...]], ours: float, others: float, last: float) -> pd.DataFrame:
    """One evaluation of every method: ours, the others, and the last baseline; seeds by data set, .001 apart."""
    value = dict.fromkeys(images.IMAGES, others) | dict.fromkeys(images.IMAGES[:2], ours) | {images.IMAGES[-1]: last}
    return pd.DataFrame(
        {"run": f"{method}, {data}", "method": method, "data": data, "seed": seed, "round": 9}
        | dict.fromkeys(images.ACCURACIES, value[method] + 0.001 * seed * (method not in images.IMAGES[:2]))
        for data, own in seeds.items()
        for method in images.IMAGES
        for seed in own
    )


THREE, ONE = {"a": (0, 1, 2)}, {"b": (0,)}


def test_our_methods_lead_only_by_more_than_the_margin_of_every_group_of_runs() -> None:
    found = lambda *given: training(image_ends(*given)).holds
    assert found(THREE, 0.5, 0.4, 0.4) is True
    assert found(THREE, 0.5, 0.6, 0.6) is False
    assert found(THREE, 0.5, 0.6, 0.4) is False  # one is better
    assert found(THREE, 0.5, 0.5, 0.4) is None  # within the margin
    assert found(ONE, 0.5, 0.4, 0.4) is None  # one seed has no spread
    assert found(THREE | ONE, 0.5, 0.4, 0.4) is None
    assert found(THREE | ONE, 0.5, 0.6, 0.6) is False


def test_a_comparable_accuracy_is_at_most_a_point_lower() -> None:
    assert comparable(image_ends(THREE, 0.5, 0.508, 0.4)).holds is True  # the mean is .509
    assert comparable(image_ends(THREE, 0.5, 0.51, 0.4)).holds is False
    figure = next(iter(comparable(image_ends(THREE, 0.5, 0.51, 0.4)).figures.values()))
    assert figure == [2, 0, 8]  # two methods, five baselines


@pytest.mark.parametrize(("more", "holds"), [(0.01, True), (-0.01, False), (0.0, None)])
def test_the_lead_of_dsfeddro_goes_by_the_seeds(more: float, holds: bool | None) -> None:
    results = image_ends(THREE, 0.5, 0.5, 0.5)
    results.loc[results["method"] == "DS-FedDRO", list(images.ACCURACIES)] += more
    assert ds_above(results).holds is holds


def test_fedavg_is_the_worst_only_by_the_seeds() -> None:
    assert fedavg(image_ends(THREE, 0.5, 0.5, 0.4)).holds is True
    assert fedavg(image_ends(THREE, 0.3, 0.5, 0.4)).holds is False
    assert fedavg(image_ends(ONE, 0.5, 0.5, 0.4)).holds is None
    assert fedavg(image_ends(THREE, 0.5, 0.4, 0.6)).holds is False


def test_the_committed_search_is_that_of_the_code() -> None:
    search = pd.read_csv(DOCS / "feddro-fig1/search.csv")
    assert set(search["run"]) == {config.name for config in EXPERIMENTS["feddro-fig1"].search(False)}


def test_every_tenth_image_of_a_client_is_held_out() -> None:
    settings = {"data": "digits", "clients": 4, "plain": False, "objective": "exp", "penalty": 5.0}
    whole = images.image_task(0, **settings)
    task = images.image_task(0, **settings, held_out=True)
    sizes = [int(size) for size in whole.clients.upper_sizes]
    assert [int(size) for size in task.clients.upper_sizes] == [size - size // 10 for size in sizes]
    assert set(task.evaluate(*task.init)) == {"validation_accuracy", "validation_risk"}


def test_the_spread_is_that_of_the_stored_weights() -> None:
    settings = {"data": "digits", "clients": 4, "plain": True, "objective": "exp", "penalty": 5.0}
    weights = np.random.default_rng(0).uniform(0.5, 2.0, (4, 30))
    task = images.image_task(0, **settings, spread=True)
    found = task.evaluate(task.init, (), np.log(weights) + 200.0)["spread"]  # 200: the level, which exp overflows
    assert float(found) == pytest.approx(weights.std() / weights.mean(), rel=1e-4)


@pytest.mark.parametrize("name", ["feddro-fig1", "feddro-fig3", "feddro-k32"])
def test_a_reason_fits_a_cell(name: str) -> None:
    rows = json.loads((DOCS / name / "claims.json").read_text())
    assert max(len(row["note"]) for row in rows) <= 450


def test_more_local_steps_help_only_if_they_do_so_in_every_group_of_runs() -> None:
    def found(*groups: tuple[float, ...]) -> bool | None:
        rows = [
            {"run": f"{method} {data} {local}", "method": method, "data": data, "local": local, "seed": seed}
            | {"round": 240, "train_accuracy": value}
            for method in images.IMAGES[:2]
            for data, accuracies in enumerate(groups)
            for local, value in zip(fig3.LONG_SWEEP, accuracies, strict=False)
            if method != "FedDRO" or local < 50
            for seed in (0, 1, 2)
        ]
        return fig3.locals_help(pd.DataFrame(rows), data=(0, 1)).holds

    assert found((0.4, 0.6, 0.65)) is True  # a quick run has one of them
    assert found((0.4, 0.6, 0.65), (0.3, 0.6, 0.7, 0.9)) is True  # I = 50, which one method has, is not compared
    assert found((0.4, 0.6, 0.65), (0.3, 0.6, 0.8)) is False


@pytest.mark.parametrize("data", fig3.SYNCED.values())
def test_more_local_steps_help_and_saturate_by_the_seeds(data: str) -> None:
    def found(accuracies: tuple[float, ...], noise: float = 0.0) -> bool | None:
        rows = [
            {"run": f"{method} {local}", "method": method, "data": data, "local": local, "seed": seed, "round": 240}
            | {"train_accuracy": value + (seed - 1) * noise * (local > 1)}
            for method in images.IMAGES[:2]
            for local, value in zip(fig3.SWEEP, accuracies, strict=True)
            for seed in (0, 1, 2)
        ]
        return fig3.locals_help(pd.DataFrame(rows), data=(data,)).holds

    assert found((0.4, 0.6, 0.65)) is True
    assert found((0.4, 0.6, 0.75)) is False  # it goes on
    assert found((0.6, 0.4, 0.45)) is False  # it costs
    assert found((0.4, 0.6, 0.65), noise=0.3) is None


@pytest.mark.parametrize(("power", "holds"), [(-1.5, True), (-1.2, True), (-1.8, False)])
def test_the_power_of_epsilon_is_held_against_the_bound(power: float, holds: bool) -> None:
    lengths = [2**n for n in range(10, 17)]
    rows = [
        {"study": "communications", "method": "FedDRO", "run": str(t), "clients": 4, "length": t, "local": 1, "seed": 0}
        | {"round": at, "relative": t ** (1 / power)}
        for t in lengths
        for at in (0, 1)
    ]
    found = rates._complexity(pd.DataFrame(rows), "FedDRO")
    assert found.holds is holds
    assert next(iter(found.figures.values()))[0] == pytest.approx(power)


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_results_are_those_of_the_runs(name: str) -> None:
    results = pd.read_csv(DOCS / name / "results.csv", low_memory=False)
    there = {(run, seed) for run, seed in results[["run", "seed"]].drop_duplicates().itertuples(index=False)}
    assert there == {(config.name, seed) for config in EXPERIMENTS[name].runs(False) for seed in config.seeds}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_quick_versions_run(name, quick):
    quick(name)
