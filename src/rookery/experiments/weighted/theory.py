"""How far learnt weights are from the best: Theorem 2 and its corollaries, on linear regression.

Everything but the weights has a closed form.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import WeightedNodesABA
from rookery.data.clients import Clients
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, description
from rookery.experiments.machinery.claims import lead, together
from rookery.experiments.machinery.curves import last, values
from rookery.experiments.machinery.drawing import below, spread, ticks
from rookery.experiments.machinery.numbers import Figures, listed, means
from rookery.parts.projection import capped_simplex
from rookery.problems.problems import WeightedNodes
from rookery.tasks.task import Task

DIMENSION, SPREAD = 5, 0.5  # of θ; the cosine between a dissimilar node's offset and the common direction
BASE: dict[str, Any] = {"valid": 100, "train": 1000, "similar": 4, "others": 6, "distance": 1.0, "cap": 0.5}
SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "valid": ("samples of the centre, n_valid", (10, 30, 100, 300, 1000, 3000)),
    "train": ("samples of a node, n_train", (30, 100, 300, 1000, 3000, 10_000)),
    "distance": ("distance of the dissimilar nodes", (0.03, 0.1, 0.3, 1.0, 3.0)),
    "others": ("number of dissimilar nodes", (2, 6, 16, 40)),
    "cap": ("largest weight b", (0.25, 0.3, 0.5, 1.0)),
    "nodes": ("nodes K, two in five of them similar", (5, 10, 20, 40)),
}
LEARNERS = {"excess": "learnt weights", "local": "Local-train", "equal": "equal weights"}


def squares(theta: Any, rows: Any) -> Any:
    """½(xᵀθ − y)², the mean over the rows."""
    return 0.5 * jnp.mean((rows["x"] @ theta - rows["y"]) ** 2)


def _samples(seed: int, node: int, count: int, theta: np.ndarray) -> dict[str, np.ndarray]:
    """Draw n samples x ~ N(0, I), y = xᵀθ + ε, and return d + 1 rows with the same loss, by a QR factorisation.

    A longer draw begins with the shorter one.
    """
    draws = np.random.default_rng([seed, node]).normal(size=(count, DIMENSION + 1))
    draws[:, -1] += draws[:, :-1] @ theta
    rows = np.zeros((DIMENSION + 1, DIMENSION + 1))
    _, triangle = np.linalg.qr(draws)
    rows[: len(triangle)] = triangle * math.sqrt(len(rows) / count)
    return {"x": rows[:, :-1], "y": rows[:, -1]}


def theory_task(seed: int, valid: int, train: int, similar: int, others: int, distance: float, cap: float) -> Task:
    """Linear regression of Appendix B; the metrics are of ŵ, and of the two other learners.

    `dist` is Dist(ŵ, W*). Three metrics are L_0 − L_0(θ*) on the population: `excess` for θ̂(ŵ), `local` for the
    minimiser of L̂_0, and `equal` for θ̂ with equal weights. `gap` is the largest ⟨∇F̂(w), w − v⟩ over the v in Δ_b,
    which bounds F̂(w) − min F̂ where F̂ is convex.
    """
    around = np.random.default_rng([seed, 0]).normal(size=(others, DIMENSION - 1))
    around *= math.sqrt(1 - SPREAD**2) / np.linalg.norm(around, axis=1, keepdims=True)
    center = np.ones(DIMENSION)
    theta = np.tile(center, (similar + others, 1))
    theta[similar:] += distance * np.column_stack([np.full(others, SPREAD), around])
    nodes = [_samples(seed, 2 + k, train, own) for k, own in enumerate(theta)]
    middle = _samples(seed, 1, valid, center)
    normal = lambda rows: (rows["x"].T @ rows["x"] / len(rows["x"]), rows["x"].T @ rows["y"] / len(rows["x"]))
    hessians, slopes = (np.array(part) for part in zip(*map(normal, nodes), strict=True))
    model = lambda w: np.linalg.solve(np.tensordot(w, hessians, 1), w @ slopes)
    excess = lambda theta: 0.5 * float(np.sum((theta - center) ** 2))
    local, equal = excess(np.linalg.solve(*normal(middle))), excess(model(np.full(len(theta), 1 / len(theta))))

    def measure(x: Any, y: Any) -> dict[str, float]:
        w = np.asarray(x)
        found, (hessian, slope) = model(w), normal(middle)
        h = np.linalg.solve(np.tensordot(w, hessians, 1), hessian @ found - slope)
        gradient = -(hessians @ found - slopes) @ h  # (13)
        full = np.clip(1 - cap * np.arange(len(w)), 0, cap)  # of the v with the lowest ⟨∇F̂, v⟩: the cap while it lasts
        return {
            "dist": to_optimal(w, similar, cap),
            "excess": excess(found),
            "local": local,
            "equal": equal,
            "gap": float(gradient @ w - np.sort(gradient) @ full),
        }

    return Task(
        name="regression",
        problem=WeightedNodes(squares, cap),
        clients=Clients(lower=nodes, center=middle),
        init=np.zeros(DIMENSION),
        evaluate=measure,
        metric="dist",
    )


def to_optimal(w: np.ndarray, similar: int, cap: float) -> float:
    """Dist(w, W*), the Euclidean distance to (4): the w in Δ_b with no weight on any but the first, similar nodes."""
    nearest = np.zeros_like(w)
    nearest[:similar] = capped_simplex(jnp.asarray(w[:similar]), cap)
    return float(np.linalg.norm(w - nearest))


def learnt(quick: bool, sweep: str, value: float) -> Config:
    """ABA run to the minimiser ŵ of F̂, in the base case with one number changed."""
    own = {"similar": round(0.4 * value), "others": round(0.6 * value)} if sweep == "nodes" else {sweep: value}
    case = BASE | own
    smooth = case["others"] * case["distance"] ** 2  # of F̂, about
    smooth += (case["similar"] + case["others"]) * DIMENSION / case["train"]
    step = float(f"{1 / smooth:.3g}")
    return Config(
        name=f"{sweep} = {value:g}",
        labels={"sweep": sweep, "value": value},
        task=theory_task,
        settings=case,
        algorithm=WeightedNodesABA(
            model_step=0.5, linear_step=0.5, weight_step=step, steps=40, sync_every=1, batch_size=None
        ),
        rounds=40 if quick else 1000,
        every=40 if quick else 1000,
        seeds=tuple(range(2 if quick else 30)),
        float64=True,
    )


def theory_runs(quick: bool) -> list[Config]:
    """One number at a time."""
    tried = {sweep: values[2:4] if quick else values for sweep, (_, values) in SWEEPS.items()}
    return [learnt(quick, sweep, value) for sweep, values in tried.items() for value in values]


def _ends(results: pd.DataFrame, sweep: str, metric: str) -> dict[float, np.ndarray]:
    """The metric at the end, one for each seed, by the values of a sweep."""
    found = values(results, "value", sweep=sweep)
    return {value: last(results, metric, sweep=sweep, value=value) for value in found}


def theory_picture(results: pd.DataFrame) -> Figure:
    """For each sweep Dist(ŵ, W*), and below it the excess risks."""
    sweeps = list(dict.fromkeys(results["sweep"]))
    fig, axes = report.figure(2 * -(-len(sweeps) // 3), 3, width=13.5, height=6.4 * -(-len(sweeps) // 3))
    for place, sweep in enumerate(sweeps):
        row, column = 2 * (place // 3), place % 3
        above, under = axes[row, column], axes[row + 1, column]
        distances = _ends(results, sweep, "dist")
        spread(above, [*distances], [*distances.values()], color=report.BLUE, marker="o")
        for (metric, words), colour in zip(LEARNERS.items(), (report.BLUE, report.ORANGE, report.GREY), strict=True):
            own = _ends(results, sweep, metric)
            spread(under, [*own], [*own.values()], color=colour, marker="o", label=words)
        for ax in (above, under):
            ax.set_xscale("log")
            ticks(ax, [*distances])
        above.set_ylim(bottom=0)
        under.set_yscale("log")
        report.label(above, "", "" if column else r"Dist($\hat w$, W*)", SWEEPS[sweep][0])
        report.label(under, SWEEPS[sweep][0], "" if column else r"$L_0 - L_0(\theta^*)$")
    below(fig, axes[1, 0], 3)
    return fig


claim = Claims("theory")


def _falls(results: pd.DataFrame, sweep: str) -> Finding:
    """Dist(ŵ, W*) falls from one end of a sweep to the other by more than the margin."""
    rows = _ends(results, sweep, "dist")
    first, *_, end = rows
    fall = lead(rows[first], rows[end])
    figures = {f"fall from {first:g} to {end:g}, and the margin": fall, f"at {listed(rows)}": means(rows)}
    return Finding(fall.holds, figures)


for name in ("valid", "train"):
    claim(f"Dist(ŵ, W*) falls with n_{name}.", "Thm 2, (10)", sweep=name)(_falls)


def _beats(results: pd.DataFrame, other: str, furthest: float = math.inf) -> Finding:
    """The excess risk is below the other's by more than the margin, at every distance up to the furthest."""
    own, others = (_ends(results, "distance", metric) for metric in ("excess", other))
    leads = {distance: lead(others[distance], own[distance]) for distance in own if distance <= furthest}
    ratios = np.divide(means(own), means(others))
    figures: Figures = {f"excess risk over that of {LEARNERS[other]}, distances {listed(own)}": ratios}
    figures |= {f"saved at distance {distance:g}, and the margin": more for distance, more in leads.items()}
    return Finding(together([more.holds for more in leads.values()]), figures)


text = "Better than Local-train when the dissimilarity is small (distances up to .3)."
claim(text, "Cor. 1", other="local", furthest=0.3)(_beats)
claim("Preferable to equal weights at any dissimilarity.", "Section 3, Prop. 2", other="equal")(_beats)

theory = Experiment(
    **description("weighted-theory", globals()),
    runs=theory_runs,
    picture=theory_picture,
    claims=tuple(claim),
)
