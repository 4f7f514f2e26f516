"""The pages of reproductions say what the files beside them say, and the files what the results say."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS, page
from rookery.experiments.asfbo import fig1, hetero
from rookery.experiments.channels import shared as channels
from rookery.experiments.choice import setting
from rookery.experiments.delay import delay
from rookery.experiments.fedbio import cleaning, fair, hyperrep
from rookery.experiments.feddro import adult, images
from rookery.experiments.feddro import fig1 as feddro_fig1
from rookery.experiments.fednest import fig5, tuning
from rookery.experiments.machinery.claims import REPRODUCED, VERDICTS
from rookery.experiments.privacy import records, shared
from rookery.experiments.weighted import nodes

DOCS = Path(__file__).parents[2] / "docs"


def claims(name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((DOCS / "reproduction" / name / "claims.json").read_text())
    return found


def written(folder: Path, names: Iterable[str]) -> list[Path]:
    """What `make docs` writes for these experiments: their claims, summaries and pictures, and all pages."""
    for name in names:
        (folder / "reproduction" / name).mkdir(parents=True)
        for file in ("results.csv", "search.csv", "made.json", *EXPERIMENTS[name].pictures):
            if (DOCS / "reproduction" / name / file).exists():
                shutil.copy(DOCS / "reproduction" / name / file, folder / "reproduction" / name)
    page.write(folder / "reproduction", folder / "reproduction.md")
    return [path for path in folder.rglob("*") if path.suffix in (".md", ".png") or path.name == "claims.json"]


def same_as_published(folder: Path, path: Path) -> None:
    published = DOCS / path.relative_to(folder)
    assert path.read_bytes() == published.read_bytes(), f"{path.relative_to(folder)} is not of these results"


def test_the_pages_are_those_that_the_files_give(tmp_path: Path) -> None:
    """`make docs` was run after the last change: the claims checked again on every results.csv, all pages, and what the
    pictures show."""
    for path in written(tmp_path, EXPERIMENTS):
        same_as_published(tmp_path, path)


@pytest.mark.parametrize("name", ["feddro-thm41", "flamby-heart", "fednest-fig2c"])
def test_the_files_of_an_experiment_are_those_of_its_results(name: str, tmp_path: Path) -> None:
    """The pages gather all experiments."""
    own = [path for path in written(tmp_path, [name]) if path.parent.name == name]
    assert {path.name for path in own} == {"claims.json", "summary.md", *EXPERIMENTS[name].pictures}
    for path in own:
        same_as_published(tmp_path, path)


def test_every_experiment_is_on_the_page_of_its_paper() -> None:
    for name, experiment in EXPERIMENTS.items():
        assert f"## {page.heading(name)}\n" in (DOCS / "reproduction" / f"{name.split('-')[0]}.md").read_text()
        for file in experiment.pictures:
            assert (DOCS / "reproduction" / name / file).exists()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_claim_that_fails_has_a_verdict_and_a_reason(name: str) -> None:
    for claim in claims(name):
        assert claim["verdict"] in VERDICTS
        assert claim["verdict"] == REPRODUCED or claim["note"]


# Checks that once passed by an artefact: not reproduced until there are runs that show it.
NOT_TO_COUNT = {
    "fednest-fig6": [
        "Both SVRG and FedOut stabilise the training (within half a point, at every rate above the smallest)."
    ],
}


@pytest.mark.parametrize("name", NOT_TO_COUNT)
def test_a_pass_that_rests_on_an_artefact_does_not_count(name: str) -> None:
    verdicts = {claim["claim"]: claim["verdict"] for claim in claims(name)}
    assert REPRODUCED not in {verdicts[text] for text in NOT_TO_COUNT[name]}


CHOSEN = {
    "choice-problems": lambda problem, method: setting.CHOSEN[problem, method],
    "channels-liars": lambda *key: channels.CHOSEN["channels-liars", *key],
    "channels-unlike": lambda *key: channels.CHOSEN["channels-unlike", *key],
    "channels-bytes": lambda *key: channels.CHOSEN["channels-bytes", *key],
    "delay": lambda *key: delay.CHOSEN[key],
    "asfbo-fig1": lambda method, split: (fig1.CHOSEN[method, split],),
    "asfbo-hetero": lambda method, work: (hetero.HETERO_CHOSEN[method, work],),
    "fedbio-cleaning": lambda method: cleaning.CLEANING_CHOSEN[method],
    "fedbio-hyperrep": lambda method: (hyperrep.SHOT_STEPS[method],),
    "fedbio-fair": lambda method, split: (fair.FAIR_CHOSEN[method, split],),
    "feddro-fig1": lambda data, method: _of_images(data, method),
    "feddro-fig2": lambda *key: adult.CHOSEN[key],
    "feddro-fig4": lambda *key: adult.CHOSEN[key],
    "fednest-fig3a": lambda method, split: tuning.CHOSEN[method, split],
    "fednest-fig3b": lambda method, split: tuning.CHOSEN[method, split],
    "fednest-fig5": lambda split: fig5.FIG5_STEPS,
    "privacy-accuracy": lambda *key: shared.CHOSEN[key],
    "privacy-groups": lambda *key: shared.CHOSEN[key],
    "privacy-records": lambda *key: records.CHOSEN[key],
    "weighted-table3": lambda data, method: _of_weighted(data, method),
    "weighted-covtype": lambda data, method: _of_weighted(data, method),
}


# The best values of these fail with other seeds, as the page says: the second best are used.
SECOND = {
    "privacy-records": [
        ("representation-records", "FedNest", np.inf),
        ("cleaning-records", "FedBiO", np.inf),
        ("cleaning-records", "SimFBO", np.inf),
    ]
}


def _of_images(data: str, method: str) -> tuple[float, ...]:
    """The step and, with (4), β or PDSGD's dual step."""
    if "(4)" not in data:
        long = data == feddro_fig1.LONG
        return (feddro_fig1.LONG_TRIED[method][0] if long else images.CHOSEN[method].step,)
    own = feddro_fig1.FOUR[float(data.rpartition(" ")[2])][method]
    others = {"FedDRO": (own.momentum,), "DS-FedDRO": (own.momentum,), "PDSGD": (own.dual,)}
    return (own.step, *others.get(method, ()))


def _of_weighted(data: str, method: str) -> tuple[float, ...]:
    own = nodes.chosen(data)
    return tuple(own[name] for name in ([*nodes.GRID] if method == "Bi-level" else [method]))


@pytest.mark.parametrize("name", CHOSEN)
def test_the_values_used_are_the_best_of_the_published_search(name: str) -> None:
    grid = EXPERIMENTS[name].grid
    assert grid is not None
    search = pd.read_csv(DOCS / "reproduction" / name / "search.csv")
    for key, best in grid.best(search).items():
        if key in SECOND.get(name, ()):
            values = search["run"].str.extract(grid.pattern).astype(float)
            own = (search[list(grid.keys)] == list(key)).all(axis=1)
            others = search[own & (values != pd.Series(best)).any(axis=1)]
            best = grid.best(others)[key]
        assert tuple(best.values()) == CHOSEN[name](*key), key


def test_every_grid_is_held_against_what_is_used() -> None:
    assert {name for name, experiment in EXPERIMENTS.items() if experiment.grid is not None} == set(CHOSEN)


def test_what_to_use_when_follows_from_the_results() -> None:
    """The numbers of the page on slow clients, from its results."""
    found = pd.read_csv(DOCS / "reproduction" / "delay" / "results.csv", low_memory=False)
    page_text = (DOCS / "reproduction" / "delay.md").read_text()
    early, over, late, even = 0.1, delay.OVER, delay.LATE, delay.EVEN

    def says(words: str, *values: float, form: str = ".1f") -> None:
        low, high = (f"{value:{form}}".replace("0.", ".") for value in (min(values), max(values)))
        assert words.format(low, high) in page_text

    def leads(mode: str, other: str, share: float = 1.0, metric: str = "accuracy", nested: bool = False) -> list[float]:
        """In points, where clients are unlike."""
        own = delay.ahead(found, mode, other, share, kind=delay.UNLIKE, metric=metric)
        return [100 * lead.mean for name, lead in own.items() if not (nested and "FedAvg" in name)]

    sooner = lambda mode: {key: delay.faster(found, *key).mean() for key in delay.run_keys(found, mode)}
    says("and {} to {} times sooner, on average", *sooner(over).values())
    says("there {} to {} times sooner with nested", *(v for key, v in sooner(late).items() if key[1] != "FedAvg"))
    weights = {
        key: delay.at(found, key, metric="auc").mean()
        for key in delay.keys(False)
        if key[0] == delay.CLEAN and key[1] not in delay.SEVERAL
    }
    says("(AUC {} to {},", *(value for key, value in weights.items() if key[2] == late), form=".2f")
    says("against {} to {} in the other modes", *(v for key, v in weights.items() if key[2] != late), form=".2f")
    both = {round(lead.mean, 4) > 0 for lead in delay.ahead(found, late, over, 1 / 3).values()}
    assert both == {True, False}

    lost = [-lead for lead in leads(over, delay.SYNCHRONOUS, metric="slow") if lead]  # LFedNest has failed in both
    assert len(lost) == 10
    says("the accuracy on their labels falls by {} to {} points", *lost, form=".0f")
    assert max(-lead for lead in leads(late, delay.SYNCHRONOUS, metric="slow")) < 2
    says("{} to {} points ahead of them on all labels", *leads(late, delay.SYNCHRONOUS))
    within = delay.ahead(found, late, delay.SYNCHRONOUS, 1.0, kind=delay.UNLIKE)
    assert [lead.holds for lead in within.values()].count(None) == 2 == len(within) - 5
    says(
        "{} to {} points ahead on all labels with nested",
        *leads(late, delay.SYNCHRONOUS, early, nested=True),
        form=".0f",
    )
    says("another {} to {} points higher", *leads(even, late, metric="slow"), form=".0f")
    assert max(leads(even, late, early)) < 0
    assert all(run["clock"].max() >= delay.SECONDS for _, run in found.groupby(["run", "seed"]))

    alike = {key: steps for key, steps in delay.CHOSEN.items() if key[3] == delay.ALIKE and key[1] not in delay.SEVERAL}
    lower_steps = [lower for key, (_, lower) in alike.items() if key[2] == late]
    says("steps of the lower level of {} to {} for", *lower_steps, form=".2f")
    synchronous = [round(lower, 1) for key, (_, lower) in alike.items() if key[2] == delay.SYNCHRONOUS]
    says("and of {} to {} for synchronous rounds", *synchronous, form=".1f")
    begin = delay.ahead(found, late, delay.SYNCHRONOUS, early)
    assert {name for name, lead in begin.items() if lead.mean < 0} >= {"representation, FedAvg", "cleaning, ASFBO"}
    seconds = {m: delay.lengths(found, (delay.LEARN, m, delay.SYNCHRONOUS)).mean() for m in ("FedBiO", "FedAvg")}
    assert round(seconds["FedBiO"] / seconds["FedAvg"]) == 6
    for share in (early, 1 / 3, 1.0):
        ends = [delay.at(found, (delay.LEARN, "FedAvg", mode), share).mean() for mode in delay.MODES]
        assert max(ends) - min(ends) < 0.01
