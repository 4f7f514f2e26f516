"""Fig. 5 of FedNest: the light methods on MNIST, alternating between the levels or not."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.fednest import representation as shared
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Grid, Headline, description
from rookery.experiments.machinery.claims import lead, together
from rookery.experiments.machinery.curves import ends
from rookery.experiments.machinery.numbers import mean
from rookery.tasks import hyperrep
from rookery.tasks.task import Task

LIGHT = ("LFedNest", "LFedNestSVRG", "LFedNestNonAlt")
FIG5_STEPS = (0.003, 0.03)  # the upper step, which is also 1/ℓ, and the lower one, by the search


def light(quick: bool, method: str, upper: float, lower: float, **changes: Any) -> Config:
    """One light method, non-i.i.d., with 1/ℓ the upper step, as in the authors' code."""
    config = shared.representation(quick, method, "non-i.i.d.")
    algorithm: Any = config.algorithm
    return config.but(
        name=f"{method}, steps {upper:g} and {lower:g}",
        labels={"method": method},
        seeds=(0,) if quick else (0, 1, 2, 3, 4),
        algorithm=dataclasses.replace(algorithm, upper_step=upper, lower_step=lower, hessian_step=upper),
        settings={**config.settings, "share": False},
    ).but(**changes)


def validated(seed: int, data_dir: Any = None, **settings: Any) -> Task:
    """Hyper-representation with the upper loss on all clients' validation images, `validation_loss`."""
    task = hyperrep(seed=seed, data_dir=data_dir, **settings)
    rows = jax.tree.map(jnp.asarray, task.clients.upper.rows)
    loss = jax.jit(lambda x, y: task.problem.f(x, y, rows))
    return dataclasses.replace(task, evaluate=lambda x, y: {**task.evaluate(x, y), "validation_loss": loss(x, y)})


def light_tried(quick: bool, method: str, upper: float, lower: float) -> Config:
    """One pair of steps, on seeds that are not reported."""
    name, labels = f"search: {method}, upper {upper:g}, lower {lower:g}", {"method": method, "split": "non-i.i.d."}
    config = light(quick, method, upper, lower, name=name, labels=labels, task=validated)
    return config.but(every=config.rounds, seeds=(9,) if quick else (8, 9))


def fig5_search(quick: bool) -> list[Config]:
    """Both steps, the same for all three."""
    uppers, lowers = ((0.1,), (0.1,)) if quick else ((0.001, 0.003, 0.01, 0.03), (0.003, 0.01, 0.03, 0.1))
    return [light_tried(quick, m, upper, lower) for m in LIGHT for upper in uppers for lower in lowers]


def _common(results: pd.DataFrame) -> pd.DataFrame:
    """The runs up to the communications that all three methods have."""
    return results[results["exchanges"] <= results.groupby("method")["exchanges"].max().min()]


def fig5_picture(results: pd.DataFrame) -> Figure:
    """Test accuracy against rounds, and against the communications that all have."""
    fig, axes = report.figure(1, 2, width=11.0, height=4.8)
    each = dict(zip(LIGHT, (2, 3, 1), strict=True))
    lines = {f"{m} ({n} a round)": {"method": m, "look": report.style(m)} for m, n in each.items()}
    shared.panel(axes[0, 0], results, "round", lines, "by rounds", 0.8)
    shared.panel(axes[0, 1], _common(results), "exchanges", lines, "by communications", 0.8)
    return fig


def _leads(results: pd.DataFrame, pairs: list[tuple[str, str]]) -> Finding:
    """The first of each pair ends higher by more than the margin, by communications and by rounds."""
    ahead = lambda own: {f"{a} over {b}": lead(ends(own, method=a), ends(own, method=b)) for a, b in pairs}
    by_communications, by_rounds = ahead(_common(results)), ahead(results)
    figures = {f"lead by communications, and the margin, {pair}": own for pair, own in by_communications.items()}
    figures |= {f"lead by rounds, and the margin, {pair}": own for pair, own in by_rounds.items()}
    holds = together([own.holds for own in figures.values()])
    only = holds is None and together([own.holds for own in by_rounds.values()])
    note = "By rounds it holds; with as many communications the difference is within the margin."
    return Finding(holds, figures, note if only else "")


claim = Claims()


@claim("LFedNest and LFedNestSVRG achieve better performance than LFedNestNonAlt.", "H.1, Fig. 5a and b")
def alternating_better(results: pd.DataFrame) -> Finding:
    return _leads(results, [(m, "LFedNestNonAlt") for m in LIGHT[:2]])


@claim("LFedNestNonAlt remains around 80 % (75 to 85).", "H.1")
def nonalt_near_eighty(results: pd.DataFrame) -> Finding:
    end = ends(results, method="LFedNestNonAlt")
    return Finding(0.75 <= mean(end) <= 0.85, {"end, each seed": end})


@claim("SVRG in FedInn boosts it: LFedNestSVRG ends above LFedNest.", "H.1, Fig. 5a and b")
def svrg_helps_light(results: pd.DataFrame) -> Finding:
    return _leads(results, [("LFedNestSVRG", "LFedNest")])


fig5 = Experiment(
    **description("fednest-fig5", globals()),
    family=shared.FAMILY,
    runs=lambda quick: [light(quick, m, *((0.1, 0.1) if quick else FIG5_STEPS)) for m in LIGHT],
    picture=fig5_picture,
    claims=tuple(claim),
    search=fig5_search,
    grid=Grid(
        r"upper (?P<upper>\S+), lower (?P<lower>\S+)$",
        ("split",),
        lambda search: -search["validation_loss"],
        wider=lambda key, values: [light_tried(False, method, *values.values()) for method in LIGHT],
    ),
    headlines=lambda results: [
        Headline(m, "≈ .80" if m == "LFedNestNonAlt" else "", ends(results, method=m)) for m in reversed(LIGHT)
    ],
)
