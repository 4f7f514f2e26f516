"""Fig. 3 of the paper on weighted nodes: Covertype."""

from functools import partial

import pandas as pd

from rookery.experiments.machinery import Claims, Config, Experiment, Headline, description
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
    claim(f"{center.capitalize()}: Bi-level is best.", center=center)(nodes.best)
claim(table3.TRUSTED)(nodes.similar_trusted)


covtype = Experiment(
    **description("weighted-covtype", globals(), seeds=len(COVTYPE_SEEDS), fewer=len(nodes.SEEDS)),
    runs=covtype_runs,
    thinned=every_fourth,
    picture=partial(nodes.accuracies_picture, near=0.007),
    more={"all methods": nodes.accuracies_picture, "the nodes' weights": nodes.weights_picture},
    claims=tuple(claim),
    family="weighted",
    search=partial(nodes.search_in, data="covtype", setting=1),
    grid=nodes.SEARCH_GRID,
    headlines=lambda results: [
        Headline(f"{m}, minority", "", nodes.scores(results, m, "covtype", 1, "minority"))
        for m in ("Bi-level", "Local-train")
    ],
)
