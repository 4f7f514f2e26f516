"""Fig. 3 of the paper on weighted nodes: Covertype."""

from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.machinery.claims import Claims, Finding, lead, together
from rookery.experiments.machinery.drawing import below
from rookery.experiments.machinery.experiment import Config, Experiment, Headline
from rookery.experiments.machinery.numbers import Figures, listed, mean, means
from rookery.experiments.papers import WEIGHTED_PAPER
from rookery.experiments.weighted import nodes
from rookery.tasks.weighted_nodes import KINDS

COVTYPE_SEEDS = (*nodes.SEEDS, 5, 6, 7, 10, 11, 12, 13, 14)  # 9 is the search's


def covtype_runs(quick: bool) -> list[Config]:
    """Five methods, setting 1; pFedMe, far behind and slow, with fewer seeds."""
    configs = nodes.all_methods(quick, "covtype", 1, seeds=COVTYPE_SEEDS[:1] if quick else COVTYPE_SEEDS)
    few = lambda config: config.labels["method"] == "pFedMe" and not quick
    return [config.but(seeds=nodes.SEEDS) if few(config) else config for config in configs]


def every_fourth(results: pd.DataFrame) -> pd.DataFrame:
    """Keep every fourth evaluation of a run, and the last."""
    runs = results.groupby(["run", "seed"], sort=False)
    return results[(runs.cumcount() % 4 == 0) | (runs.cumcount(ascending=False) == 0)]


def covtype_picture(results: pd.DataFrame) -> Figure:
    """The test accuracy over synchronisations; below, the best three enlarged."""
    fig, axes = report.figure(2, 2, width=9.0, height=6.6)
    [data] = dict.fromkeys(results["data"])
    for column, center in enumerate(KINDS):
        whole, near = axes[:, column]
        for ax in (whole, near):
            nodes.draw_methods(ax, results, "exchanges", data, 1, center)
        alone = nodes.scores(results, "Local-train", data, 1, center)
        near.axhspan(min(alone), max(alone), color=report.style("Local-train")["color"], alpha=0.12, linewidth=0)
        whole.set_ylim(bottom=nodes.after_start(results, data, 1, center) - 0.05)
        top = max(mean(nodes.scores(results, method, data, 1, center)) for method in nodes.METHODS)
        near.set_ylim(top - 0.012, top + 0.004)
        report.label(whole, "", "" if column else "test accuracy", f"{data}, {center}, setting 1")
        report.label(near, "synchronisations", "" if column else "test accuracy", "the three best, enlarged")
    below(fig, axes[0, 0], 5)
    return fig


claim = Claims()


def best_on_covtype(results: pd.DataFrame, center: str) -> Finding:
    """Bi-level is above every other method by more than the margin over their common seeds."""
    [data] = dict.fromkeys(results["data"])
    own = {method: nodes.scores(results, method, data, 1, center) for method in nodes.METHODS}
    leads = {method: lead(own["Bi-level"][: len(own[method])], own[method]) for method in nodes.METHODS[1:]}
    figures: Figures = {listed(nodes.METHODS): means(own)}
    figures |= {f"lead over {method}, and the margin": more for method, more in leads.items()}
    close = [f"{method} ({more})" for method, more in leads.items() if more.holds is None]
    note = f"The lead is within the margin: {', '.join(close)}." if close else ""
    return Finding(together([more.holds for more in leads.values()]), figures, note)


for center in KINDS:
    claim(f"{center.capitalize()}: Bi-level is best.", "Fig. 3")(partial(best_on_covtype, center=center))
claim("The weights of similar nodes rise, of dissimilar ones fall.", "Fig. 3")(nodes.similar_trusted)


covtype = Experiment(
    name="weighted-covtype",
    title="whom to learn from, on Covertype",
    paper=f"{WEIGHTED_PAPER}: Figure 3.",
    setup=(
        "15 nodes, 5 of the minority; 40,000 samples each, 5,000 at the centre, 50,000 to test; multi-class logistic "
        "regression on 54 columns, ten of them standardised; batches of 400, T_s = 500, q = 1/100. "
        f"{nodes.chosen_words('covtype')} 100 outer iterations; the others as many exchanges. The scored model is the "
        f"last: the paper shows curves, and a validation accuracy is Local-train's training accuracy. {nodes.PERSONAL} "
        "Bands: lowest to highest of the seeds. `results.csv` holds every fourth evaluation."
    ),
    runs=covtype_runs,
    thinned=every_fourth,
    picture=covtype_picture,
    more={"test accuracy over data points": nodes.over_samples, "the nodes' weights": nodes.weights_picture},
    claims=tuple(claim),
    differences=(
        f"{len(COVTYPE_SEEDS)} seeds, of pFedMe {len(nodes.SEEDS)}; the paper's figure is of one.",
        "A random fifth of the data is the test set.",
        *nodes.IMAGE_DIFFERENCES[:1],
    ),
    family="weighted",
    search=partial(nodes.search_in, data="covtype", setting=1),
    grid=nodes.SEARCH_GRID,
    headlines=lambda results: [
        Headline(f"{m}, minority", "", nodes.scores(results, m, "covtype", 1, "minority"))
        for m in ("Bi-level", "Local-train")
    ],
)
