"""The experiments of the FedDRO paper: what they consist of, and their quick versions."""

import json
from pathlib import Path

import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS
from rookery.experiments.feddro import fig1, fig3, images, thm41
from rookery.experiments.machinery.one_run import fingerprint

train_above, robust_risk = (fig1.FIG1_CLAIMS[i] for i in (0, 4))
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
        | dict.fromkeys(images.METRICS, value[method] + 0.001 * seed * (method not in images.IMAGES[:2]))
        for data, own in seeds.items()
        for method in images.IMAGES
        for seed in own
    )


def test_the_claims_on_risk_and_the_worst_class_go_by_the_seeds() -> None:
    three = {"a": (0, 1, 2)}
    one = {"b": (0,)}
    checks = robust_risk, fig1.worst_class  # lower is better, higher is better
    assert [check(image_ends(three, 0.5, 0.6, 0.6)).holds for check in checks] == [True, False]
    assert [check(image_ends(three, 0.5, 0.4, 0.4)).holds for check in checks] == [False, True]
    assert [check(image_ends(three, 0.5, 0.6, 0.4)).holds for check in checks] == [False, False]  # one is better
    assert [check(image_ends(one, 0.5, 0.6, 0.6)).holds for check in checks] == [None, None]  # one seed
    assert robust_risk(image_ends(three | one, 0.5, 0.6, 0.6)).holds is None
    assert robust_risk(image_ends(three | one, 0.5, 0.4, 0.4)).holds is False
    assert fig1.worst_class(image_ends(three, 0.0, 0.0, 0.0).assign(worst_accuracy=0.0)).holds is None


def test_the_lead_of_dsfeddro_goes_by_the_seeds_of_every_data_set() -> None:
    def found(seeds: dict[str, tuple[int, ...]], more: float) -> tuple[bool | None, str]:
        results = image_ends(seeds, 0.5, 0.5, 0.5)
        noise = 0.001 * results["seed"]
        results.loc[results["method"] == "DS-FedDRO", list(images.ACCURACIES)] += more
        results[list(images.ACCURACIES)] = results[list(images.ACCURACIES)].add(noise, axis=0)
        finding = fig1.ds_above(results)
        return finding.holds, finding.note

    assert found({"a": (0, 1, 2), "b": (0, 1)}, 0.01)[0] is True
    assert found({"a": (0, 1, 2), "b": (0, 1)}, -0.01)[0] is False
    holds, note = found({"a": (0, 1), "b": (0,)}, 0.01)
    assert holds is None
    assert "above in training accuracy, a (by 0.01 ± " in note
    assert "accuracy, b" not in note  # one seed
    holds, note = found({"b": (0,)}, -0.01)
    assert holds is None
    assert note.endswith("below in training accuracy, b (by 0.01 ± inf); test accuracy, b (by 0.01 ± inf).")


def test_fedavg_is_the_worst_only_by_the_seeds() -> None:
    three = {"a": (0, 1, 2)}
    assert fig1.fedavg_worst(image_ends(three, 0.5, 0.5, 0.4)).holds is True
    assert fig1.fedavg_worst(image_ends(three, 0.3, 0.5, 0.4)).holds is False
    assert fig1.fedavg_worst(image_ends({"b": (0,)}, 0.3, 0.5, 0.4)).holds is None
    rows = image_ends(three, 0.5, 0.4, 0.6)
    assert fig1.fedavg_worst(rows).holds is False
    assert fig1.fedavg_worst(rows[rows["method"] != "FedAvg, I = 5"]).holds is None  # then it is the one with I = 1


def test_two_methods_are_compared_by_the_seeds_that_both_have() -> None:
    """FedDRO and DS-FedDRO have three seeds, the baselines the first: with it they lead, by the means they do not."""
    results = image_ends({"a": (0, 1, 2)}, 0.5, 0.45, 0.45)
    ours = results["method"].isin(images.IMAGES[:2])
    results = results[ours | (results["seed"] == 0)]
    results.loc[ours & (results["seed"] > 0), [*images.METRICS]] = 0.3
    found = train_above(results)
    assert found.holds is True
    seeds = {name.rpartition(" (")[2]: values for name, values in found.figures.items()}
    assert seeds == {
        "seeds: 3, 3, 1, 1, 1, 1, 1)": pytest.approx([1.1 / 3] * 2 + [0.45] * 5),
        "seed 0 alone)": pytest.approx([0.5] * 2 + [0.45] * 5),
    }
    checks = robust_risk, fig1.worst_class, fig1.fedavg_worst
    assert [check(results).holds for check in checks] == [None, None, None]  # one seed has no spread


def test_of_the_long_runs_those_with_the_best_step_by_the_first_seed_are_compared() -> None:
    long = [f"{fig1.LONG}, step {step:g}" for step in (0.01, 0.05)]
    parts = [image_ends({"a": (0,), data: (0, 1)}, 0.5, 0.5, 0.5) for data in long]
    results = pd.concat([parts[0], parts[1][parts[1]["data"] != "a"]], ignore_index=True)
    results = results[(results["method"] != "PDSGD") | (results["data"] != long[1])]  # one step
    first, best = results["seed"] == 0, results["data"] == long[1]
    results.loc[(results["method"] == "FedDRO") & best & first, "train_accuracy"] = 0.6
    results.loc[(results["method"] == "MBSGD") & best & ~first, "train_accuracy"] = 0.9  # not the first seed
    compared = fig1._compared(results)
    assert list(compared["data"].unique()) == ["a", fig1.LONG]
    steps = compared[compared["data"] == fig1.LONG].groupby("method")["run"].unique().map(list)
    assert steps["FedDRO"] == [f"FedDRO, {long[1]}"]
    assert steps["PDSGD"] == [f"PDSGD, {long[0]}"]
    assert steps["MBSGD"] == [f"MBSGD, {long[0]}"]


def test_a_column_of_the_picture_is_titled_by_its_budget() -> None:
    def title(data: str, steps: int, clients: int) -> str:
        return fig1._column_title(pd.DataFrame({"data": [data], "steps": [steps], "clients": [clients]}))

    assert title("CIFAR10-ST", images.STEPS, 8) == "CIFAR10-ST, 12 epochs"
    assert title(fig1.LONG, fig1.LONG_STEPS, 8) == fig1.LONG
    assert title("CIFAR100-ST", images.STEPS, 8) == "CIFAR100-ST, 10 epochs"
    assert title("CIFAR10-ST", images.STEPS // 4, 32) == "CIFAR10-ST, 12 epochs, 32 clients"
    assert title("CIFAR10-ST", images.QUICK_STEPS, 8) == "CIFAR10-ST"


@pytest.mark.parametrize("name", ["feddro-fig1", "feddro-fig3", "feddro-k32"])
def test_a_reason_fits_a_cell(name: str) -> None:
    rows = json.loads((Path(__file__).parents[3] / f"docs/reproduction/{name}/claims.json").read_text())
    assert max(len(row["note"]) for row in rows) <= 450


@pytest.mark.parametrize("data", fig3.SYNCED)
def test_more_local_steps_help_and_saturate_by_the_seeds(data: str) -> None:
    def found(accuracies: tuple[float, ...], noise: float = 0.0) -> bool | None:
        rows = [
            {"run": f"{method} {local}", "method": method, "data": fig3.SYNCED[data], "local": local, "seed": seed}
            | {"round": at, "train_accuracy": value + (seed - 1) * noise * (local > 1)}
            for method in images.IMAGES[:2]
            for local, value in zip(fig3.IMAGE_SWEEP, accuracies, strict=True)
            for seed in (0, 1, 2)
            for at in (0, 120, 240)
        ]
        return fig3.image_locals_help(pd.DataFrame(rows), data=data).holds

    assert found((0.4, 0.6, 0.65)) is True
    assert found((0.4, 0.6, 0.75)) is False  # it goes on
    assert found((0.6, 0.4, 0.45)) is False  # it costs
    assert found((0.4, 0.6, 0.65), noise=0.3) is None


@pytest.mark.parametrize("name", ["feddro-fig1", "feddro-fig3"])
def test_the_committed_results_are_those_of_the_runs(name: str) -> None:
    results = pd.read_csv(Path(__file__).parents[3] / f"docs/reproduction/{name}/results.csv")
    there = {key: own["round"].tolist() for key, own in results.groupby(["run", "seed"])}
    runs = EXPERIMENTS[name].runs(False)
    assert there == {(c.name, s): [*range(0, c.rounds + 1, c.every)] for c in runs for s in c.seeds}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_quick_versions_run(name, quick):
    quick(name)
