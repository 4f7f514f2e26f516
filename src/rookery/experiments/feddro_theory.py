"""What the FedDRO paper proves, on problems with a known answer: FedAvg's failure, and the rates."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report, theory
from rookery.algorithms import CompositionalFedAvg, DSFedDRO, FedBiO, FedBiOAcc, FedDRO, FedDRSCGD, FedMBO, SimFBO
from rookery.data.clients import Clients
from rookery.experiments.claims import Claim, Finding, differs
from rookery.experiments.curves import Figures, area, below, curves, late, mean, select, ticks
from rookery.experiments.experiment import Config, Experiment
from rookery.language.fed import Algorithm
from rookery.problems.problems import Compositional
from rookery.tasks.task import Task

PAPER = "Khanduri et al., On Federated Compositional Optimization: Algorithms, Analysis, and Guarantees (under review)"

# Theorem 4.1. Client k's inner function is a_k x + s_k, entry by entry; f(v) = Σ √(1 + v²).
EXAMPLES = {
    "one": [([3.0], [2.0]), ([-1.0], [-2.0])],
    "two": [([3.0, 0.0], [-1.0, 1.0]), ([0.0, 2.0], [-1.0, 1.0])],
}
SOLUTIONS = {"one": 0.0, "two": 0.25868781179842}
STEPS = (1 / 9, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)  # η
ORDERS = (0.02, 0.01, 0.005, 0.002, 0.001)  # η of the runs about FedDRO's order
LOCALS = (1, 2, 5, 20)  # I
LOCAL = 5
HORIZON = 100.0  # ηI times the rounds, for the gradient flow to be at e^{−100}; methods with slow modes: twice that
FAILS, SHARES = ("FedAvg, case I", "FedAvg, case II"), ("FedAvg, modified", "FedDRO")
NESTED = ("FedMBO", "SimFBO", "FedBiOAcc", "FedBiO", "Fed-DR-SCGD")
FIXED = {"DS-FedDRO": "DS-FedDRO, β = .5", "FedBiO": "FedBiO, inner steps .5"}


@functools.cache
def _problem(bilevel: bool) -> Any:
    problem = Compositional(
        inner=lambda x, rows: jnp.mean(rows["a"] * x + rows["s"], axis=0),
        outer=lambda v: jnp.sum(jnp.sqrt(1 + v**2)),
    )
    return problem.as_bilevel() if bilevel else problem


def example(seed: int, which: str, bilevel: bool = False) -> Task:
    """Two clients, everything exact; the metrics are |x − x*| and |∇Φ(x)|, and x starts at 1.5."""
    data = EXAMPLES[which]
    a, s = (np.mean([row[i] for row in data], axis=0) for i in range(2))

    def measure(x: Any, y: Any) -> dict[str, Any]:
        value = a * x + s
        return {
            "error": jnp.abs(x - SOLUTIONS[which]),
            "gradient": jnp.abs(jnp.sum(a * value / jnp.sqrt(1 + value**2))),
        }

    return Task(
        name="counterexample",
        problem=_problem(bilevel),
        clients=Clients(lower=[{"a": np.array([row[0]]), "s": np.array([row[1]])} for row in data]),
        init=(np.array(1.5), np.zeros(len(a))),
        evaluate=measure,
        metric="error",
    )


def tried(method: str, step: float, local: int) -> Algorithm:
    """A method at the step η, and with it all its other steps; the fixed ones keep β = .5."""
    own: dict[str, Any] = {"step": step, "local_steps": local}
    three: dict[str, Any] = {"upper_step": step, "lower_step": step, "linear_step": step}
    made: dict[str, Any] = {
        "FedAvg, case I": lambda: CompositionalFedAvg(**own, case="I"),
        "FedAvg, case II": lambda: CompositionalFedAvg(**own, case="II"),
        "FedAvg, modified": lambda: CompositionalFedAvg(**own, share_inner_every_step=True),
        "FedDRO": lambda: FedDRO(**own, momentum=0.5),
        "DS-FedDRO": lambda: DSFedDRO(**own, momentum=step),
        FIXED["DS-FedDRO"]: lambda: DSFedDRO(**own, momentum=0.5),
        "FedMBO": lambda: FedMBO(upper_step=local * step, lower_step=0.5, lower_rounds=local, hessian_step=0.5),
        "SimFBO": lambda: SimFBO(
            **three, **{f"server_{name}": value for name, value in three.items()}, local_steps=local, radius=None
        ),
        "FedBiOAcc": lambda: FedBiOAcc(**three, local_steps=local, delta=100.0, offset=1e6, **_HALVES),
        "FedBiO": lambda: FedBiO(**three, local_steps=local),
        FIXED["FedBiO"]: lambda: FedBiO(upper_step=step, lower_step=0.5, linear_step=0.5, local_steps=local),
        "Fed-DR-SCGD": lambda: FedDRSCGD(**own, momentum=step, gradient_momentum=0.5),
    }
    algorithm: Algorithm = made[method]()
    return algorithm


_HALVES: dict[str, Any] = {
    "c_upper": 0.5,
    "c_lower": 0.5,
    "c_linear": 0.5,
}  # momenta that are half new: α_t is 1 throughout


def stall(quick: bool, study: str, method: str, algorithm: Algorithm, step: float, local: int, which: str) -> Config:
    """One method, deterministic, for as long as the gradient flow needs."""
    nested = method.split(",")[0] in NESTED
    rounds = math.ceil((2.0 if quick else HORIZON * (2 if nested else 1)) / (step * local))
    return Config(
        name=f"{study}: {method}, step {step:.4g}, I = {local}",
        labels={"study": study, "method": method, "step": step, "local": local},
        task=example,
        settings={"which": which, "bilevel": method.split(",")[0] in NESTED[:4]},
        algorithm=algorithm,
        rounds=rounds,
        every=max(1, rounds // 60),
        seeds=(0,),
        float64=True,
    )


def thm41_runs(quick: bool) -> list[Config]:
    """All methods over the step; five over I; and FedDRO's two orders where the inner value has two entries."""
    steps, orders, locals_ = (STEPS[1:2], ORDERS[:1], LOCALS[1:2]) if quick else (STEPS, ORDERS, LOCALS)
    methods = (*FAILS, *SHARES, "DS-FedDRO", *NESTED, *FIXED.values())
    over_steps = [stall(quick, "step", m, tried(m, step, LOCAL), step, LOCAL, "one") for m in methods for step in steps]
    over_local = [
        stall(quick, "local", m, tried(m, 0.01, local), 0.01, local, "one")
        for m in (*FAILS, *SHARES, "DS-FedDRO")
        for local in locals_
    ]
    order = [
        stall(
            quick,
            "order",
            f"{words}, β = {c:g}η",
            FedDRO(step=step, momentum=c * step, local_steps=LOCAL, as_printed=printed),
            step,
            LOCAL,
            "two",
        )
        for c in (1.0, 16.0)
        for printed, words in ((False, "own point"), (True, "as printed"))
        for step in orders
    ]
    return over_steps + over_local + order


def _last(results: pd.DataFrame, metric: str, **labels: Any) -> float:
    [curve] = curves(results, metric, **labels)
    return float(curve.iloc[-1])


def _over(results: pd.DataFrame, over: str, metric: str, **labels: Any) -> tuple[list[float], list[float]]:
    values = sorted(select(results, **labels)[over].unique())
    return values, [_last(results, metric, **labels, **{over: value}) for value in values]


def thm41_picture(results: pd.DataFrame) -> Figure:
    """Where each method ends, against the step, against I, and FedDRO's two orders."""
    fig, axes = report.figure(1, 3, width=15.5, height=5.4)
    left, middle, right = axes[0]
    floor = lambda errors: np.maximum(errors, 1e-16)
    looks = report.styles(list(results["method"].unique()))
    for method in select(results, study="step")["method"].unique():
        steps, errors = _over(results, "step", "error", study="step", method=method)
        left.loglog(steps, floor(errors), **looks[method], label=method)
    for method in select(results, study="local")["method"].unique():
        locals_, errors = _over(results, "local", "error", study="local", method=method)
        middle.loglog(locals_, floor(errors), **looks[method])
    for method in select(results, study="order")["method"].unique():
        steps, errors = _over(results, "step", "error", study="order", method=method)
        printed, c = method.startswith("as printed"), method.split("= ")[1]
        colour = report.VERMILION if printed else report.BLUE
        line = "o-" if c == "1η" else "s--"
        right.loglog(steps, floor(errors), line, color=colour, label=method)
    ticks(middle, sorted(select(results, study="local")["local"].unique()))
    report.label(left, "step η", r"$|\bar x - x^*|$ at the end", f"One inner value, I = {LOCAL}")
    report.label(middle, "local steps I", "", "One inner value, η = .01")
    report.label(right, "step η", "", "FedDRO, two inner values")
    report.legend(right)
    below(fig, left, 4)
    return fig


def fedavg_stalls(results: pd.DataFrame) -> Finding:
    """Cases I and II end at least .6 from x* at every step, and by no more than a tenth closer as the step falls."""
    figures: Figures = {}
    holds = True
    for method in FAILS:
        steps, errors = _over(results, "step", "error", study="step", method=method)
        figures[f"|x − x*|, {method}, at η = {', '.join(f'{s:.3g}' for s in steps)}"] = errors
        holds = holds and min(errors) > 0.6 and errors[0] > 0.9 * errors[min(3, len(errors) - 1)]
    return Finding(holds, figures)


def fedavg_stalls_beyond_one(results: pd.DataFrame) -> Finding:
    """Case I at every I; case II converges at I = 1 and at no other."""
    figures: Figures = {}
    for method in FAILS:
        locals_, errors = _over(results, "local", "error", study="local", method=method)
        figures[f"|x − x*|, {method}, at I = {', '.join(map(str, locals_))}"] = errors
    one, two = (np.array(errors) for errors in figures.values())
    return Finding(bool(one.min() > 0.6 and two[0] < 1e-10 and two[1:].min() > 0.6), figures)


def shared_converges(results: pd.DataFrame) -> Finding:
    """The modified version and FedDRO end within 1e-10 of x* at every step and every I."""
    figures: Figures = {}
    for method in SHARES:
        for study, over in (("step", "step"), ("local", "local")):
            _, errors = _over(results, over, "error", study=study, method=method)
            figures[f"largest |x − x*|, {method}, over the {over}s"] = max(errors)
    return Finding(max(np.array(list(figures.values()))) < 1e-10, figures)


def ds_converges(results: pd.DataFrame) -> Finding:
    """DS-FedDRO with β = η ends ever closer to x* as the step falls, at last within .02, but not with β fixed."""
    steps, errors = _over(results, "step", "error", study="step", method="DS-FedDRO")
    _, fixed = _over(results, "step", "error", study="step", method=FIXED["DS-FedDRO"])
    at = f"at η = {', '.join(f'{s:.3g}' for s in steps)}"
    figures: Figures = {f"|x − x*|, β = η, {at}": errors, f"the same over 2β(I − 1), {at}": [
        error / (2 * step * (LOCAL - 1)) for step, error in zip(steps, errors, strict=True)
    ], f"|x − x*|, β = .5, {at}": fixed}  # fmt: skip
    falls = bool((np.diff(errors) > 0).all())
    return Finding(falls and errors[0] < 0.02 and min(fixed) > 0.3, figures)


def nested_fail(results: pd.DataFrame) -> Finding:
    """FedMBO, SimFBO, FedBiOAcc and Fed-DR-SCGD end at least .1 from x* at every step."""
    figures: Figures = {}
    least = []
    for method in (*NESTED, FIXED["FedBiO"]):
        steps, errors = _over(results, "step", "error", study="step", method=method)
        figures[f"|x − x*|, {method}, at η = {', '.join(f'{s:.3g}' for s in steps)}"] = errors
        least += [errors[0]] * (method in NESTED and method != "FedBiO")
    return Finding(min(least) > 0.1, figures)


def printed_order(results: pd.DataFrame) -> Finding:
    """With β = cη the printed order keeps an error as η falls (over a third of the largest), the default's is O(η)."""
    figures: Figures = {}
    holds = True
    for c in ("1", "16"):
        for words, stays in (("own point", False), ("as printed", True)):
            steps, errors = _over(results, "step", "error", study="order", method=f"{words}, β = {c}η")
            figures[f"|x − x*|, {words}, β = {c}η, at η = {', '.join(f'{s:g}' for s in steps)}"] = errors
            kept = errors[0] / errors[-1]
            holds = holds and (kept > 1 / 3 if stays else kept < 2 * steps[0] / steps[-1] + 0.05)
    return Finding(holds, figures)


thm41 = Experiment(
    name="feddro-thm41",
    title="where FedAvg and others end on a compositional problem with a known answer",
    paper=f"{PAPER}: Theorems 4.1 and 4.2, Section 4.1 (the paper has no such run).",
    setup=(
        "Two clients, everything exact. *One inner value*: f(v) = √(1 + v²), g₁ = 3x + 2, g₂ = −x − 2, so that g = x "
        "and x* = 0; f and g are smooth and Lipschitz and the clients' Jacobians differ by bounded amounts, as "
        "Assumptions 3.2–3.4 ask. *Two*: f(v) = √(1 + v₁²) + √(1 + v₂²), g₁ = (3x − 1, 1), g₂ = (−1, 2x + 1), x* = "
        f".25869. Start 1.5; {HORIZON:g}/(ηI) rounds of I local steps. FedDRO has β = .5, DS-FedDRO β = η and server "
        "steps 1. FedMBO, SimFBO, FedBiOAcc and FedBiO run on the bilevel form, ½‖y − g(x)‖² below, with all steps η "
        "(FedMBO: I lower rounds, an upper step Iη a round; FedBiOAcc: α_t = 1, momenta half new); Fed-DR-SCGD with "
        "β = η. Two lines keep the inner step at .5. At I = 5 and η → 0 the limit of case I is −.756, of case II −.722."
    ),
    runs=thm41_runs,
    picture=thm41_picture,
    claims=(
        Claim("FedAvg, cases I and II, stalls at every step size, and the gap does not vanish with it.",
              "Thm 4.1", fedavg_stalls, "theory"),
        Claim("It needs I > 1: case II converges at I = 1 (case I does not).", "Thm 4.1", fedavg_stalls_beyond_one,
              "theory"),
        Claim("The modified FedAvg and FedDRO converge.", "Thm 4.2, 4.3", shared_converges, "theory"),
        Claim("DS-FedDRO converges, with β falling with the step.", "Thm 5.2", ds_converges, "theory"),
        Claim("FedMBO, SimFBO, FedBiOAcc and Fed-DR-SCGD fail as well.", "Section 4.1", nested_fail, "theory", differs(
            "paper",
            "They do not: FedMBO, which takes no local step on x, converges; and with all steps falling together the "
            "others' distance falls, of SimFBO and FedBiOAcc like the square of the step, of Fed-DR-SCGD like the step "
            "itself. Between two exchanges their y_k move towards g_k by the lower step β a step, not all the way as "
            "in FedAvg. With the inner steps held fixed the distance does stay (last line).",
        )),
        Claim("FedDRO in the order of the printed Algorithm 2, with β = cη, tends to a wrong point; subtracting at the "
              "client's own point it converges.", "Alg. 2, (8)", printed_order, kind="own"),
    ),
    differences=(
        "The paper's own counterexample is in an appendix that is not in its text at hand; this one is ours.",
    ),
)  # fmt: skip


# Theorems 4.3 and 5.2.

CLIENTS = (1, 4, 16)  # K
LENGTHS = (1024, 4096, 16384, 65536)  # T, local steps in all
SAMPLES, NOISE, HETEROGENEITY, DIMENSION, VALUES = 64, 1.0, 0.5, 5, 3
CONSTANTS = theory.CompositionalConstants(l_f0=math.sqrt(VALUES), l_f1=1.0, l_r0=1.0)
RATED = ("FedDRO", "DS-FedDRO")


@functools.cache
def _stochastic() -> Any:
    return Compositional(
        inner=lambda x, rows: jnp.mean(jnp.einsum("nij,j->ni", rows["a"], x) + rows["s"], axis=0),
        outer=lambda v: jnp.sum(jnp.sqrt(1 + v**2)),
        extra=lambda x, rows: 0.05 * x @ x,
    )


def rates_task(seed: int, clients: int) -> Task:
    """The same problem for every seed, which is the run's alone."""
    return _composite(clients)


@functools.cache
def _composite(clients: int) -> Task:
    """K clients that differ, whose mean is the same for every K, and noisy samples; the metric is ‖∇Φ‖², relative."""
    rng = np.random.default_rng(7)
    a = rng.normal(size=(VALUES, DIMENSION))
    a, s = a / np.linalg.norm(a, 2), np.ones(VALUES)

    def centred(*shape: int) -> np.ndarray:
        """Along the first axis; a single one is zero."""
        draw = rng.normal(size=shape)
        return draw - draw.mean(axis=0)

    rows = {}
    for name, value in (("a", a), ("s", s)):
        own = HETEROGENEITY * centred(clients, 1, *value.shape) / math.sqrt(value.size)
        noise = NOISE * np.stack([centred(SAMPLES, *value.shape) for _ in range(clients)]) / math.sqrt(value.size)
        rows[name] = value + own + noise

    def gradient(x: Any) -> Any:
        value = a @ x + s
        return a.T @ (value / jnp.sqrt(1 + value**2)) + 0.1 * x

    start = np.full(DIMENSION, 2.0)
    first = float(jnp.sum(gradient(start) ** 2))
    data = [{name: value[k] for name, value in rows.items()} for k in range(clients)]
    return Task(
        name="composite",
        problem=_stochastic(),
        clients=Clients(upper=data, replace=True),
        init=(start, None),
        evaluate=lambda x, y: {"relative": jnp.sum(gradient(x) ** 2) / first},
        metric="relative",
    )


def rated(quick: bool, method: str, clients: int, length: int) -> Config:
    """A run of T local steps with the theorem's hyperparameters."""
    batch: dict[str, Any] = {"batch_size": 1, "first_batch": 1}
    algorithm: FedDRO | DSFedDRO
    if method == "FedDRO":
        algorithm = theory.feddro(CONSTANTS, length, clients, c=1.0, **batch)
    else:
        algorithm = theory.ds_feddro(length, clients, c=0.5, c_beta=4.0, c_gamma=0.5, **batch)
    rounds = max(1, length // algorithm.local_steps)
    return Config(
        name=f"{method}, K = {clients}, T = {length}",
        labels={"method": method, "clients": clients, "length": length},
        task=rates_task,
        settings={"clients": clients},
        algorithm=algorithm,
        rounds=rounds,
        every=max(1, rounds // 500),
        seeds=(0,) if quick else (0, 1, 2, 3, 4),
        float64=True,
    )


def rates_runs(quick: bool) -> list[Config]:
    """Two methods, three K, four T."""
    lengths, federations = ((256,), (1, 4)) if quick else (LENGTHS, CLIENTS)
    return [rated(quick, m, clients, length) for m in RATED for clients in federations for length in lengths]


def _error(results: pd.DataFrame, method: str, clients: int, length: int) -> float:
    """The mean of ‖∇Φ‖² over the run, as the theorems bound it; over the seeds."""
    return mean([area(c) for c in curves(results, "relative", method=method, clients=clients, length=length)])


def _floor(results: pd.DataFrame, method: str, clients: int, length: int) -> float:
    """The mean of ‖∇Φ‖² over the second half of the run; over the seeds."""
    return mean(late(results, "relative", method=method, clients=clients, length=length))


def _powers(results: pd.DataFrame, method: str, error: Any) -> tuple[float, float, float]:
    """The powers of K and of T in the error, by least squares over all pairs; and that of K at the longest T."""
    pairs = select(results, method=method)[["clients", "length"]].drop_duplicates().to_numpy()
    errors = np.log([error(results, method, k, t) for k, t in pairs])
    design = np.column_stack([np.log(pairs), np.ones(len(pairs))])
    of_k, of_t, _ = np.linalg.lstsq(design, errors, rcond=None)[0]
    longest = pairs[:, 1] == pairs[:, 1].max()
    at_end = np.polyfit(np.log(pairs[longest, 0]), errors[longest], 1)[0] if longest.sum() > 1 else np.nan
    return float(of_k), float(of_t), float(at_end)


def rates_picture(results: pd.DataFrame) -> Figure:
    """The mean of ‖∇Φ‖² against T for each K, and against K·T, where a linear speed-up is one line."""
    fig, axes = report.figure(2, 2, width=11.5, height=8.2)
    for row, method in enumerate(RATED):
        own = select(results, method=method)
        for clients, colour in zip(CLIENTS, (report.ORANGE, report.BLUE, report.GREEN), strict=True):
            if clients not in set(own["clients"]):
                continue
            lengths = np.array(sorted(select(own, clients=clients)["length"].unique()))
            errors = [_error(results, method, clients, length) for length in lengths]
            axes[row, 0].loglog(lengths, errors, "o-", color=colour, label=f"K = {clients}")
            axes[row, 1].loglog(clients * lengths, errors, "o-", color=colour, label=f"K = {clients}")
        report.label(axes[row, 0], "local steps T" if row else "", r"mean $\|\nabla\Phi\|^2$, relative", method)
        report.label(axes[row, 1], "samples in all, K·T" if row else "", "", f"{method}: one line, if linear")
        report.legend(axes[row, 0])
    return fig


def _speed_up(results: pd.DataFrame, method: str) -> Finding:
    """The error falls at least like K^{−.4} and T^{−.4}: the bound, C/√(KT), up to a tenth in the exponents; the mean
    over the run, which the theorems bound, and its floor, which is not the start's dying away."""
    figures: Figures = {}
    powers = []
    for error, words in ((_error, ""), (_floor, ", floor")):
        of_k, of_t, at_end = _powers(results, method, error)
        figures |= {f"power of K{words}": of_k, f"power of T{words}": of_t}
        figures[f"power of K at the longest T{words}"] = at_end
        powers += [of_k, of_t]
    return Finding(max(powers) <= -0.4, figures)


def feddro_speed_up(results: pd.DataFrame) -> Finding:
    """See `_speed_up`."""
    return _speed_up(results, "FedDRO")


def ds_speed_up(results: pd.DataFrame) -> Finding:
    """See `_speed_up`."""
    return _speed_up(results, "DS-FedDRO")


def fewer_exchanges(results: pd.DataFrame) -> Finding:
    """At the longest T and the most clients: until the mean of ‖∇Φ‖² so far is at the larger of the two ends,
    DS-FedDRO makes fewer exchanges."""
    own = results[(results["length"] == results["length"].max()) & (results["clients"] == results["clients"].max())]
    level = max(mean([area(c) for c in curves(own, "relative", "exchanges", method=m)]) for m in RATED)
    counts = {}
    for method in RATED:
        each = []
        for curve in curves(own, "relative", "exchanges", method=method):
            so_far = [area(curve.iloc[: end + 1]) for end in range(1, len(curve))]
            below = curve.index[1:][np.array(so_far) <= 1.1 * level]
            each.append(float(below[0]) if len(below) else np.inf)
        counts[method] = mean(each)
    figures: Figures = {"the mean of ‖∇Φ‖² to be reached (within a tenth)": level}
    figures |= {f"exchanges to it, {m}": count for m, count in counts.items()}
    return Finding(counts["DS-FedDRO"] < counts["FedDRO"], figures)


rates = Experiment(
    name="feddro-rates",
    title="linear speed-up in the number of clients, on a stochastic composition",
    paper=f"{PAPER}: Theorems 4.3 and 5.2 (which have no such run).",
    setup=(
        f"h = .05‖x‖², g = Ax + s with {VALUES} entries, f(v) = Σ√(1 + v²), x of {DIMENSION} entries. K clients whose "
        "A_k and s_k differ and have the same mean for every K; "
        f"{SAMPLES} noisy samples each, drawn one at a time with replacement. Hyperparameters as in the theorems "
        "(`rookery.theory`): FedDRO η = √(K/T), β = 4η, I = T^{1/4}/K^{3/4}; DS-FedDRO η = .5/√(IT), β = 4η, I = "
        "√(T/K), γ_x = √(KI), γ_y = γ_x/2. The error is the mean of ‖∇Φ‖² over a run, relative to the start's, over "
        "five seeds."
    ),
    runs=rates_runs,
    picture=rates_picture,
    claims=(
        Claim("FedDRO: the error falls like 1/√(KT), a linear speed-up.", "Thm 4.3", feddro_speed_up, "theory"),
        Claim("DS-FedDRO: likewise.", "Thm 5.2", ds_speed_up, "theory"),
        Claim(
            "DS-FedDRO needs fewer exchanges than FedDRO to the same error.",
            "Thm 5.2, Table 1",
            fewer_exchanges,
            "theory",
        ),
    ),
    differences=(
        "The paper has no such run; the set-up is ours.",
        "Theorem 5.2 prints γ_x = O(√(K/T)). With that a run's steps add up to K^{3/4}T^{−1/4} at most: a long run "
        "does not leave its start. γ_x = √(KI) is used instead, which makes γ_x·η the step of Theorem 4.3.",
    ),
)

EXPERIMENTS = (thm41, rates)
