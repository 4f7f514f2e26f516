"""Fig. 3 of the paper on weighted nodes: Covertype."""

from functools import partial

import pandas as pd

from rookery.experiments.machinery.claims import Claims
from rookery.experiments.machinery.experiment import Config, Experiment, Headline
from rookery.experiments.papers import WEIGHTED_PAPER
from rookery.experiments.weighted import nodes, table3
from rookery.tasks.weighted_nodes import KINDS

COVTYPE_SEEDS = (*nodes.SEEDS, 5, 6, 7, 10, 11, 12, 13, 14)  # 9 is the search's


def covtype_runs(quick: bool) -> list[Config]:
    """Five methods, setting 1; pFedMe, far behind and slow, with fewer seeds."""
    configs = nodes.all_methods(quick, "covtype", 1)
    fewer = lambda config: quick or config.labels["method"] == "pFedMe"
    return [config if fewer(config) else config.but(seeds=COVTYPE_SEEDS) for config in configs]


def every_fourth(results: pd.DataFrame) -> pd.DataFrame:
    """Keep every fourth evaluation of a run, and the last."""
    runs = results.groupby(["run", "seed"], sort=False)
    return results[(runs.cumcount() % 4 == 0) | (runs.cumcount(ascending=False) == 0)]


claim = Claims()
for center in KINDS:
    claim(f"{center.capitalize()}: Bi-level is best.")(partial(nodes.best, center=center))
claim(table3.TRUSTED)(nodes.similar_trusted)


covtype = Experiment(
    name="weighted-covtype",
    title="whom to learn from, on Covertype",
    paper=f"{WEIGHTED_PAPER}: Figure 3.",
    setup=(
        "15 nodes, 5 of the minority; 40,000 samples each, 5,000 at the centre, 50,000 to test; multi-class logistic "
        "regression on 54 columns, ten of them standardised; batches of 400, T_s = 500, q = 1/100. "
        "100 outer iterations; the others as many exchanges. The last model is scored: the paper shows curves, and "
        f"Local-train learns from the validation data. {nodes.PERSONAL} The first picture shows the three best, "
        "enlarged. `results.csv` holds every fourth evaluation."
    ),
    runs=covtype_runs,
    thinned=every_fourth,
    picture=partial(nodes.accuracies_picture, near=0.007),
    more={
        "all methods": nodes.accuracies_picture,
        "the nodes' weights": nodes.weights_picture,
    },
    claims=tuple(claim),
    differences=(
        "The paper's text says nothing about Figure 3: what it says about its other figures is checked here.",
        f"{len(COVTYPE_SEEDS)} seeds, of pFedMe {len(nodes.SEEDS)}; the paper's figure is of one. A random fifth of "
        "the data is the test set.",
        nodes.NOT_GIVEN,
    ),
    family="weighted",
    search=partial(nodes.search_in, data="covtype", setting=1),
    grid=nodes.SEARCH_GRID,
    headlines=lambda results: [
        Headline(f"{m}, minority", "", nodes.scores(results, m, "covtype", 1, "minority"))
        for m in ("Bi-level", "Local-train")
    ],
)
