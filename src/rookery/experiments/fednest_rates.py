"""The rates of the FedNest paper's theory (Theorems 3.1–3.2, Corollaries 3.1–3.3, Lemma 2.2) on quadratics."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from rookery import report, theory
from rookery.algorithms import FedNest
from rookery.data.clients import Clients
from rookery.experiments.claims import Claim, Finding, together
from rookery.experiments.experiment import Config, Experiment
from rookery.experiments.fednest import PAPER
from rookery.language.fed import Algorithm
from rookery.problems.problems import Compositional, Minimax, SingleLevel
from rookery.tasks import quadratic
from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task

CLASSES = ("bilevel", "minimax", "compositional", "single level")
SUMMED = "bilevel, summed series"  # the same problem and N, without the random choice of N'
DIM, CLIENTS, SAMPLES = 4, 5, 64
SCALE = 0.02  # of the upper loss: the theory's steps, which are not scale-free, are then of a useful size
MINIMAX_SCALE = 0.1  # of the only loss: less would need a lower step above 1, which Lemma C.3 forbids
NOISE = 2.0  # standard deviation of a sample's vectors, which are of about unit length
LOCAL_STEPS = np.array([1, 1, 2, 2, 3])  # τ_i
ROOTS = (18, 32, 56, 100, 180)  # √K
QUICK_ROOTS = (10, 20)
QUICK_EVERY, QUICK_N = 5, 7  # the same at every K: one program for all
LOWER_ROUNDS = 5  # T of bilevel and minimax
TERMS = (2, 3, 4, 6, 8, 12, 16, 24)  # N
RANDOM_TERMS = (2, 4, 8, 16)
QUICK_TERMS, QUICK_RANDOM_TERMS = (2, 4), (2, 4)
DRAWS, QUICK_DRAWS, PARTS = 20_000, 2_000, 50  # of the random hypergradient, a seed; and the parts that they come in
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36)  # 97.5 % quantiles of t with 1, 2, … degrees of freedom
TELLING = 0.1  # an interval wider than this to either side tells nothing
STILL = 1e-10  # the step of the runs that only draw hypergradients: x moves too little to matter
SPREAD = 4.0  # κ of the lower Hessian in the runs about the bias

Rows = list[dict[str, np.ndarray]]


# The four problems. Matrices differ between clients, vectors between clients and samples.


def rates_task(seed: int, problem: str, noise: float) -> Task:
    """A stochastic quadratic of one of the CLASSES. The seed is the run's alone: the problem is the same for all."""
    return _problem(problem, noise)


@functools.cache
def _problem(name: str, noise: float) -> Task:
    make = {"bilevel": _bilevel, "minimax": _minimax, "compositional": _compositional, "single level": _single_level}
    with jax.enable_x64(True):
        return make[name](np.random.default_rng(CLASSES.index(name)), noise)


def _bilevel(rng: np.random.Generator, noise: float) -> Task:
    """g_i = ½yᵀA_i y − yᵀ(B_i x + b), f_i = SCALE·(½‖y − c‖² + ½‖x − d‖²)."""
    still = SCALE * np.eye(DIM)
    lower: Rows = [
        {"A": _alike(_definite(rng, 1.0, 1.25)), "B": _alike(0.35 * _turn(rng)), "b": _noisy(rng, noise)}
        for _ in range(CLIENTS)
    ]
    upper: Rows = [
        {
            "C": _alike(still), "D": _alike(still), "E": _alike(np.zeros((DIM, DIM))),
            "c": SCALE * _noisy(rng, noise), "d": SCALE * _noisy(rng, noise),
        }
        for _ in range(CLIENTS)
    ]  # fmt: skip
    clients = Clients(lower, upper, replace=True)
    task = _task(quadratic(clients=1).problem, clients, (np.ones(DIM), np.ones(DIM)), np.zeros_like)
    return _with_gradient(task, solution(task).hypergradient)


def _minimax_objective(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    """½‖x − d‖² − ½yᵀAy + yᵀ(Bx + b), scaled, the mean over the batch."""
    a, b, shift, d = (jnp.mean(batch[name], axis=0) for name in ("A", "B", "b", "d"))
    return MINIMAX_SCALE * (0.5 * x @ x - d @ x - 0.5 * y @ a @ y + y @ (b @ x + shift))


MINIMAX = Minimax(_minimax_objective)


def _minimax(rng: np.random.Generator, noise: float) -> Task:
    rows: Rows = [
        {
            "A": _alike(_definite(rng, 1.0, 1.25)), "B": _alike(0.35 * _turn(rng)),
            "b": _noisy(rng, noise), "d": _noisy(rng, noise),
        }
        for _ in range(CLIENTS)
    ]  # fmt: skip
    a, b, shift, d = (_mean(rows, name) for name in ("A", "B", "b", "d"))
    gradient = lambda x: MINIMAX_SCALE * (x - d + b.T @ np.linalg.solve(a, b @ x + shift))
    return _task(MINIMAX, Clients(upper=rows, replace=True), (np.ones(DIM), np.ones(DIM)), gradient)


def _inner(x: Any, batch: Any) -> Float[Array, " d"]:
    """r(x) = Rx + s, the mean over the batch."""
    return jnp.mean(batch["R"], axis=0) @ x + jnp.mean(batch["s"], axis=0)


def _outer(y: Any, batch: Any) -> Float[Array, ""]:
    """SCALE·½‖y − c‖², the mean over the batch."""
    return SCALE * (0.5 * y @ y - jnp.mean(batch["c"], axis=0) @ y)


COMPOSITIONAL = Compositional(_inner, _outer)


def _compositional(rng: np.random.Generator, noise: float) -> Task:
    lower: Rows = [{"R": _alike(_definite(rng, 0.9, 1.0)), "s": _noisy(rng, noise)} for _ in range(CLIENTS)]
    upper: Rows = [{"c": _noisy(rng, 0.3)} for _ in range(CLIENTS)]  # D̃_f, and so the steps, depend on this noise
    r, s, c = _mean(lower, "R"), _mean(lower, "s"), _mean(upper, "c")
    gradient = lambda x: SCALE * r.T @ (r @ x + s - c)
    return _task(COMPOSITIONAL, Clients(lower, upper, replace=True), (np.ones(DIM), np.ones(DIM)), gradient)


def _single_loss(x: Any, batch: Any) -> Float[Array, ""]:
    """SCALE·(½xᵀDx − dᵀx), the mean over the batch."""
    return SCALE * (0.5 * x @ jnp.mean(batch["D"], axis=0) @ x - jnp.mean(batch["d"], axis=0) @ x)


SINGLE = SingleLevel(_single_loss)


def _single_level(rng: np.random.Generator, noise: float) -> Task:
    rows: Rows = [{"D": _alike(_definite(rng, 1.0, 2.0)), "d": _noisy(rng, noise)} for _ in range(CLIENTS)]
    matrix, d = _mean(rows, "D"), _mean(rows, "d")
    return _task(SINGLE, Clients(upper=rows, replace=True), np.ones(DIM), lambda x: SCALE * (matrix @ x - d))


def _task(problem: Any, clients: Clients, init: Any, gradient: Callable[[np.ndarray], np.ndarray]) -> Task:
    def evaluate(x: Any, y: Any) -> dict[str, float]:
        return {"gradient": float(np.sum(gradient(np.asarray(x, float)) ** 2))}

    return Task("fednest-rates", problem, clients, init, evaluate, metric="gradient")


def _with_gradient(task: Task, gradient: Callable[[np.ndarray], np.ndarray]) -> Task:
    return _task(task.problem, task.clients, task.init, gradient)


def _turn(rng: np.random.Generator) -> np.ndarray:
    """A random rotation."""
    return np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]


def _definite(rng: np.random.Generator, low: float, high: float) -> np.ndarray:
    """A symmetric matrix with eigenvalues evenly from low to high, in random directions."""
    turn = _turn(rng)
    return turn @ np.diag(np.linspace(low, high, DIM)) @ turn.T


def _alike(matrix: np.ndarray) -> np.ndarray:
    """The same for every sample."""
    return np.repeat(matrix[None], SAMPLES, axis=0)


def _noisy(rng: np.random.Generator, noise: float) -> np.ndarray:
    """A client's vector, about of unit length, and samples around it whose mean it is."""
    away = noise * rng.normal(size=(SAMPLES, DIM))
    return rng.normal(size=DIM) / math.sqrt(DIM) + away - away.mean(axis=0)


def _mean(rows: Rows, name: str) -> np.ndarray:
    return np.mean([own[name].mean(axis=0) for own in rows], axis=0)


# The methods, by the theory.


def _norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))


def _constants(name: str, noise: float) -> Any:
    """The problem's constants; gradients are bounded on a ball of radius 4 around the origin."""
    task = _problem(name, noise)
    if name == "bilevel":
        return theory.quadratic_constants(task)
    own = [task.clients.client_data(i) for i in range(CLIENTS)]
    if name == "single level":
        return theory.SingleLevelConstants(l_f=max(SCALE * _norm(c["upper"][0]["D"][0]) for c in own))
    if name == "minimax":
        curvature = []
        for c in own:
            a, b = c["upper"][0]["A"][0], c["upper"][0]["B"][0]
            curvature.append((float(np.linalg.eigvalsh(a)[0]), _norm(np.block([[np.eye(DIM), b.T], [b, -a]]))))
        mu, smooth = min(m for m, _ in curvature), max(s for _, s in curvature)
        return theory.MinimaxConstants(
            mu_f=MINIMAX_SCALE * mu,
            l_f0=MINIMAX_SCALE * 5 * smooth,
            l_f1=MINIMAX_SCALE * smooth,
            sigma_f=MINIMAX_SCALE * noise * math.sqrt(2 * DIM),
        )
    return theory.CompositionalConstants(
        l_f0=3 * SCALE,
        l_f1=SCALE,
        l_r0=max(_norm(c["lower"][0]["R"][0]) for c in own),
        sigma_f=SCALE * 0.3 * math.sqrt(DIM),
        sigma_r0=noise * math.sqrt(DIM),
    )


def _method(name: str, noise: float, rounds: int, first: int, **given: Any) -> Algorithm:
    """The theorem's method for K rounds; ᾱ is such that α is at its cap for the smallest K, `first`."""
    constants = _constants(_class(name), noise)
    others: dict[str, Any] = {"batch_size": 1}
    if name in ("bilevel", SUMMED):
        others |= {"resample": False, **given}  # every cohort is the whole federation
    if name == "single level":  # its cap is far above the others'
        cap = theory.fedsvrg(constants, 1, alpha_bar=math.inf).step / 8
        return theory.fedsvrg(constants, rounds, alpha_bar=cap * math.sqrt(first), local_steps=LOCAL_STEPS, **others)
    t = None if name == "compositional" else LOWER_ROUNDS
    bar = theory.steps(constants, rounds, t).cap * math.sqrt(first)
    others |= {"lower_local_steps": LOCAL_STEPS, "upper_local_steps": LOCAL_STEPS}
    if name == SUMMED:
        others["neumann"] = "sum"
    return theory.fednest(constants, rounds, t, alpha_bar=bar, **others)


# The bias of the hypergradient. One round of FedNest with one outer step is x ← x − α·h, so h is read off the move.


def bias_task(seed: int, terms: int, step: float, rounds: int) -> Task:
    """At (x, y*(x)) of a bilevel quadratic: how far the mean of `rounds` hypergradients with N = terms is off.

    `bias` is its component along the closed form's, whose length is `closed_form`; `off` is what else there is of it.
    All three are right at the end of the run. `closed_variance` is that of the component of one random hypergradient.
    """
    task = _bias_problem()
    closed = solution(task)
    x0, y0 = task.init
    hessian, f_y = closed.A / _bias_constants().l_g1, closed.C @ y0 - closed.c + closed.E.T @ x0
    left = np.linalg.matrix_power(np.eye(len(y0)) - hessian, terms) @ np.linalg.solve(closed.A, f_y)
    expected = -closed.B.T @ left
    length = float(np.linalg.norm(expected))
    power = lambda n: np.linalg.matrix_power(np.eye(len(y0)) - hessian, n)
    draws = [terms / _bias_constants().l_g1 * float(expected @ closed.B.T @ power(n) @ f_y) for n in range(terms)]
    variance = float(np.var(draws)) / length**2

    def evaluate(x: Any, y: Any) -> dict[str, float]:
        error = (x0 - np.asarray(x, float)) / (step * rounds) - closed.hypergradient(x0, y0)
        along = float(error @ expected) / length
        return {
            "bias": along, "closed_form": length, "closed_variance": variance,
            "off": float(np.linalg.norm(error - along * expected / length)),
            "bound": _bound(terms, float(np.linalg.norm(f_y))), "printed_bound": _bound(terms, _bias_constants().l_f1),
        }  # fmt: skip

    return Task("hypergradient", task.problem, task.clients, task.init, evaluate, metric="bias")


def _bound(terms: int, factor: float) -> float:
    """κ·factor·((κ − 1)/κ)^N."""
    kappa = _bias_constants().kappa
    return kappa * factor * (1 - 1 / kappa) ** terms


@functools.cache
def _bias_problem() -> Task:
    """A bilevel quadratic with one sample a client, started at (x, y*(x))."""
    with jax.enable_x64(True):
        return _biased(np.random.default_rng(10))


def _biased(rng: np.random.Generator) -> Task:
    one = lambda value: value[None]
    lower = [
        {
            "A": one(_definite(rng, 1.0, SPREAD)), "B": one(0.5 * _turn(rng) + 0.5 * np.eye(DIM)),
            "b": one(rng.normal(size=DIM)),
        }
        for _ in range(CLIENTS)
    ]  # fmt: skip
    upper = [
        {
            "C": one(np.eye(DIM)), "D": one(np.eye(DIM)), "E": one(np.zeros((DIM, DIM))),
            "c": one(3 * rng.normal(size=DIM) + 3), "d": one(rng.normal(size=DIM)),
        }
        for _ in range(CLIENTS)
    ]  # fmt: skip
    task = _task(quadratic(clients=1).problem, Clients(lower, upper), (np.ones(DIM), np.ones(DIM)), np.zeros_like)
    x = np.ones(DIM)
    return _task(task.problem, task.clients, (x, solution(task).y(x)), np.zeros_like)


@functools.cache
def _bias_constants() -> theory.Constants:
    return theory.quadratic_constants(_bias_problem())


def _bias_config(neumann: Any, terms: int, rounds: int, seeds: tuple[int, ...]) -> Config:
    step = 1.0 if rounds == 1 else STILL
    return Config(
        name=f"bias, {neumann}, N = {terms}",
        labels={"part": "bias", "problem": "bilevel", "neumann": neumann, "N": terms, "kappa": _bias_constants().kappa},
        task=bias_task,
        settings={"terms": terms, "step": step, "rounds": rounds},
        algorithm=FedNest(
            upper_step=step,
            lower_step=0.1,
            neumann=neumann,
            neumann_terms=terms - 1 if neumann == "sum" else terms,  # the sum has one term more
            hessian_step=1 / _bias_constants().l_g1,
        ),
        rounds=rounds,
        every=max(1, rounds // PARTS),
        seeds=seeds,
        float64=True,
    )


def rates_runs(quick: bool) -> list[Config]:
    """Each class at each K, with its own step; then the hypergradient at each N."""
    roots, seeds = (QUICK_ROOTS, (0, 1)) if quick else (ROOTS, tuple(range(3, 11)))
    given: dict[str, Any] = {"neumann_terms": QUICK_N} if quick else {}
    configs = [
        Config(
            name=f"{name}, K = {root**2}",
            labels={"part": "rate", "problem": name, "K": root**2},
            task=rates_task,
            settings={"problem": _class(name), "noise": NOISE},
            algorithm=_method(name, NOISE, root**2, roots[0] ** 2, **given),
            rounds=root**2,
            every=QUICK_EVERY
            if quick
            else root // 2,  # as many as √K: the start of a run, which is about √K long, is seen equally well
            seeds=seeds,
            float64=True,
        )
        for name in (*CLASSES, SUMMED)
        for root in roots
    ]
    terms, random, draws = (QUICK_TERMS, QUICK_RANDOM_TERMS, QUICK_DRAWS) if quick else (TERMS, RANDOM_TERMS, DRAWS)
    configs += [_bias_config("sum", n, 1, (0,)) for n in terms]
    return configs + [_bias_config("random", n, draws, seeds) for n in random]


def _class(name: str) -> str:
    return "bilevel" if name == SUMMED else name


# What the claims measure.


def means(results: pd.DataFrame, problem: str) -> pd.DataFrame:
    """(1/K) Σ ‖∇Φ(x^k)‖² by the trapezoid rule: a row for each seed, a column for each K."""
    own = results[(results["part"] == "rate") & (results["problem"] == problem)]
    area = lambda run: np.trapezoid(run["gradient"], run["round"]) / run["round"].max()
    return own.groupby(["seed", "K"])[["round", "gradient"]].apply(area).unstack("K")


def floors(results: pd.DataFrame, problem: str) -> pd.DataFrame:
    """The mean of ‖∇Φ(x^k)‖² over the second half of the rounds: a row for each seed, a column for each K."""
    own = results[(results["part"] == "rate") & (results["problem"] == problem)]
    later = own[own["round"] > own["K"] / 2]
    return later.groupby(["seed", "K"])["gradient"].mean().unstack("K")


def slope(table: pd.DataFrame) -> tuple[float, float]:
    """The slope of the logarithms, fitted for each seed: its mean, and half its 95 % interval by Student's t."""
    k = np.log(table.columns.to_numpy(float))
    each = np.array([np.polyfit(k, np.log(row), 1)[0] for row in table.to_numpy(float)])
    quantile = STUDENT[min(len(each) - 1, len(STUDENT)) - 1]
    return float(each.mean()), float(quantile * each.std(ddof=1) / math.sqrt(len(each)))


def _no_flatter(results: pd.DataFrame, problem: str) -> Finding:
    """The slopes of the mean over all rounds, which the theorem bounds, and of the floor are no flatter than −1/2.

    The mean is mostly the start's dying away, and its slope the step's own exponent; the floor's is the noise's.
    """
    figures: dict[str, float | list[float]] = {}
    each: list[bool | None] = []
    tables = {"mean ‖∇Φ‖²": means(results, problem), "its floor": floors(results, problem)}
    for words, table in tables.items():
        fitted, error = slope(table)
        each.append(fitted <= -0.5 + error if error <= TELLING else None)
        k = ", ".join(f"{value:.0f}" for value in table.columns)
        figures[f"slope of {words}, and half of its 95 % interval"] = [fitted, error]
        figures[f"{words} at K = {k}"] = table.mean().tolist()
    few = "An interval is too wide to tell: more seeds are needed."
    return Finding(together(each), figures, few if None in each else "")


def bilevel_rate(results: pd.DataFrame) -> Finding:
    """See `_no_flatter`."""
    return _no_flatter(results, "bilevel")


def minimax_rate(results: pd.DataFrame) -> Finding:
    """Likewise."""
    return _no_flatter(results, "minimax")


def compositional_rate(results: pd.DataFrame) -> Finding:
    """Likewise."""
    return _no_flatter(results, "compositional")


def single_level_rate(results: pd.DataFrame) -> Finding:
    """Likewise."""
    return _no_flatter(results, "single level")


def summed_rate(results: pd.DataFrame) -> Finding:
    """Likewise."""
    return _no_flatter(results, SUMMED)


def _biases(results: pd.DataFrame, neumann: str) -> pd.DataFrame:
    """At the end of the runs: by N, the mean over the seeds and its standard error."""
    own = results[(results["part"] == "bias") & (results["neumann"] == neumann)]
    groups = own[own["round"] == own["round"].max()].groupby("N")
    table = groups[["bias", "off", "closed_form", "bound", "printed_bound", "kappa"]].mean()
    return table.assign(error=groups["bias"].sem())


def bias_is_geometric(results: pd.DataFrame) -> Finding:
    """From each N to the next the summed series' bias falls by (κ − 1)/κ or more a term."""
    table = _biases(results, "sum")
    terms, rate = table.index.to_numpy(float), 1 - 1 / float(table["kappa"].iloc[0])
    each = (table["bias"].to_numpy()[1:] / table["bias"].to_numpy()[:-1]) ** (1 / np.diff(terms))
    holds = bool((each <= rate * (1 + 1e-6)).all() and (table["bias"] > 0).all())
    name = ", ".join(f"{a:.0f}–{b:.0f}" for a, b in itertools.pairwise(terms))
    return Finding(holds, {"(κ − 1)/κ": rate, f"factor a term at N = {name}": each.tolist()})


def bias_is_the_closed_form(results: pd.DataFrame) -> Finding:
    """The measured bias of the summed series is −Bᵀ(I − A/ℓ)^N A⁻¹∇_y f."""
    table = _biases(results, "sum")
    relative = np.hypot(table["bias"] - table["closed_form"], table["off"]) / table["closed_form"]
    return Finding(bool(relative.max() < 1e-6), {"largest relative difference": float(relative.max())})


def random_has_that_bias(results: pd.DataFrame) -> Finding:
    """The mean of the random hypergradients is off by the closed form, within four standard errors."""
    table = _biases(results, "random")
    away = (table["bias"] - table["closed_form"]) / table["error"]
    figures: dict[str, float | list[float]] = {
        f"measured at N = {', '.join(f'{n:.0f}' for n in table.index)}": table["bias"].tolist(),
        "standard error": table["error"].tolist(),
        "closed form": table["closed_form"].tolist(),
    }
    return Finding(bool((away.abs() < 4).all()), figures)


def variance_grows(results: pd.DataFrame) -> Finding:
    """The variance of one random hypergradient is the closed form's, within a third, and grows with N."""
    own = results[(results["neumann"] == "random")]
    terms, found, closed = sorted(own["N"].unique()), [], []
    for n in terms:
        parts = []
        for _, run in own[own["N"] == n].groupby("seed"):
            share = np.diff(run["round"]) / run["round"].max()
            parts += [(np.diff(run["bias"]) / share, np.diff(run["round"]))]
        values, lengths = (np.concatenate(part) for part in zip(*parts, strict=True))
        found.append(float(np.var(values, ddof=1) * lengths.mean()))
        closed.append(float(own[own["N"] == n]["closed_variance"].iloc[0]))
    near = all(abs(a / b - 1) < 1 / 3 for a, b in zip(found, closed, strict=True))
    figures: dict[str, float | list[float]] = {
        f"variance at N = {', '.join(f'{n:.0f}' for n in terms)}": found,
        "closed form": closed,
        "as a power of N": float(np.polyfit(np.log(terms), np.log(found), 1)[0]),
    }
    note = (
        "The mean of (N/ℓ)²(1 − λ/ℓ)^{2N'} over N' < N is about N/(λ(2ℓ − λ)). The second line of (10) bounds the "
        "first moment only, and the σ̃_f of (18) has no N; with N = O(κ_g log K) the bound "
        "is short of a factor log K. The rates above are mostly the start's dying away, and do not show it."
    )
    return Finding(near and bool((np.diff(found) > 0).all()), figures, note)


def bias_is_bounded(results: pd.DataFrame) -> Finding:
    """The bias stays below b as printed in (11)."""
    table = _biases(results, "sum")
    over, right = (float((table["bias"] / table[name]).max()) for name in ("printed_bound", "bound"))
    note = (
        "(11) has ℓ_{f,1}, the Lipschitz constant of ∇f_i; what its proof bounds is ∇_y f_i itself, by ℓ_{f,0}. With "
        "‖∇_y f‖ in its place the bound holds."
    )
    figures: dict[str, float | list[float]] = {"largest bias/b, as printed": over, "with ‖∇_y f‖ for ℓ_{f,1}": right}
    return Finding(over <= 1, figures, "" if over <= 1 else note)


# The picture.


def rates_picture(results: pd.DataFrame) -> Figure:
    """Left: mean ‖∇Φ‖² against K, over its value at the smallest K. Right: the hypergradient's bias against N."""
    fig, axes = report.figure(1, 2, width=11.0, height=4.4)
    left, right = axes[0]
    looks = dict(
        zip(
            (*CLASSES, SUMMED),
            (
                {"color": report.BLUE, "marker": "o"}, {"color": report.VERMILION, "marker": "s"},
                {"color": report.GREEN, "marker": "^"}, {"color": report.PURPLE, "marker": "D"},
                {"color": report.SKY, "marker": "v"},
            ),
            strict=True,
        )
    )  # fmt: skip
    for name, look in looks.items():
        table = means(results, name)
        table = table / table.iloc[:, 0].mean()
        fitted, error = slope(table)
        k, middle = table.columns.to_numpy(float), table.mean().to_numpy()
        dashed = {"linestyle": "--"} if name == SUMMED else {}
        spread = table.sem().to_numpy() * 2
        text = f"{name}: {fitted:.3f} ± {error:.3f}".replace("-", "−")
        left.errorbar(k, middle, yerr=spread, label=text, capsize=3, linewidth=1.6, markersize=5, **look, **dashed)
    left.plot(k, np.sqrt(k[0] / k), color=report.GREY, linestyle=":", linewidth=2, label="slope −1/2")
    left.set_xscale("log")
    left.set_yscale("log")
    report.label(left, "rounds K, each its own run", "mean ‖∇Φ‖², over that at the smallest K", "Rate in K")
    report.legend(left, title="fitted slope, 95 % interval", title_fontsize=9)

    summed, drawn = _biases(results, "sum"), _biases(results, "random")
    right.plot(summed.index, summed["bias"], label="summed series", color=report.SKY, marker="v", linestyle="--")
    both = {"color": report.BLUE, "marker": "o", "linestyle": "none", "capsize": 3}
    right.errorbar(drawn.index, drawn["bias"], yerr=2 * drawn["error"], label="random, mean of many draws", **both)
    bound = {"color": report.GREY, "linestyle": ":", "linewidth": 2}
    right.plot(summed.index, summed["bound"], label="κ‖∇_y f‖((κ − 1)/κ)ᴺ", **bound)
    right.set_yscale("log")
    report.label(right, "N", "bias of the hypergradient", f"Bias in N, κ = {summed['kappa'].iloc[0]:.2f}")
    report.legend(right)
    return fig


rates = Experiment(
    name="fednest-rates",
    title="the rate of FedNest in K and the bias of its hypergradient in N, on quadratics",
    paper=f"{PAPER}, ICML 2022, Theorems 3.1 and 3.2, Corollaries 3.1–3.3, Lemma 2.2. The paper has no such run.",
    setup=(
        f"Quadratics in {DIM} dimensions at either level, {CLIENTS} clients, all of them in every round, with Hessians "
        f"of their own and τ_i = {', '.join(map(str, LOCAL_STEPS))} local steps; {SAMPLES} samples a client, which "
        f"differ in their vectors (standard deviation {NOISE:g} a coordinate; the vectors themselves are of unit "
        "length), drawn one by one with replacement in every step and anchor. One problem a class; seeds are of the "
        "runs. The steps are "
        "`rk.theory`'s: α = min{ᾱ1, ᾱ2, ᾱ3, ᾱ/√K}, β = β̄α/T, α_i = α/τ_i, β_i = β/τ_i, N = ⌈κ_g log K⌉; ᾱ, which is "
        "free, is such that α is at its cap for the smallest K (an eighth of the cap at the single level), and falls "
        f"as 1/√K from there. T = {LOWER_ROUNDS} (bilevel, minimax), 1 (compositional). The upper losses are scaled by "
        f"{SCALE:g} ({MINIMAX_SCALE:g}, minimax): the theory's constants are not scale-free, and for a loss of unit "
        "size ᾱ3 would be the least of the four up to K of some 10⁵. Each K is a run of its own. The mean of "
        "‖∇Φ‖² over its rounds is from the closed form, every √K/2 rounds, by the trapezoid rule; a line is fitted to "
        "the logarithms for each seed. *No flatter* means: the mean slope is at most −1/2 plus half "
        "of its 95 % interval, and no more is granted, though at the smallest K the start has not quite died away (a "
        "factor 1 − exp(−2αλK)), which flattens the line by up to .01. The mean over all rounds is 80 to 99 % the "
        "start's dying away, so that its slope is the step's own; the *floor*, the mean over the second half, is the "
        "noise's, and has to fall no flatter, too.\n\n"
        "Bias: a bilevel quadratic without noise, at (x, y*(x)); the summed series from one round, the random one as "
        f"the mean over {DRAWS} rounds a seed whose steps of {STILL:g} leave x where it is. N counts terms, as in "
        "Lemma 2.2; the summed series has N, too."
    ),
    runs=rates_runs,
    picture=rates_picture,
    claims=(
        Claim("Bilevel: mean ‖∇Φ‖² falls no flatter than K^(−1/2).", "Thm 3.1, Cor. 3.1", bilevel_rate, "theory"),
        Claim("Minimax: mean ‖∇Φ‖² falls no flatter than K^(−1/2).", "Thm 3.1, Cor. 3.2", minimax_rate, "theory"),
        Claim("Compositional: mean ‖∇Φ‖² falls no flatter than K^(−1/2).", "Cor. 3.3", compositional_rate, "theory"),
        Claim("Single level: mean ‖∇f‖² falls no flatter than K^(−1/2).", "Thm 3.2", single_level_rate, "theory"),
        Claim(
            "The hypergradient's bias is geometric in N, no slower than (κ − 1)/κ.",
            "Lemma 2.2",
            bias_is_geometric,
            "theory",
        ),
        Claim("The mean of the random hypergradient has this bias.", "Lemma 2.2, (16)", random_has_that_bias, "theory"),
        Claim("The bias is at most κ_g ℓ_{f,1}((κ_g − 1)/κ_g)^N.", "(11)", bias_is_bounded, "theory"),
        Claim("The bias is the closed form, to rounding.", "ours", bias_is_the_closed_form, kind="own"),
        Claim(
            "The variance of the random hypergradient grows with N.",
            "ours; (10), (17f), (18)",
            variance_grows,
            kind="own",
        ),
        Claim("Bilevel with the summed series: no flatter than K^(−1/2).", "ours", summed_rate, kind="own"),
    ),
    differences=(
        "The paper has no experiment of this kind: problems, sizes and seeds are ours.",
        "The theorem's ᾱ, T and N are orders of magnitude; ours are named above.",
        "Read otherwise than printed: see `rookery.theory`.",
    ),
)

EXPERIMENTS = (rates,)
