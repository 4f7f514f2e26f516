"""The ready-made objectives: values, weights and gradients against an independent maximisation over p."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq, linprog, minimize_scalar
from scipy.special import logsumexp, softmax

import rookery as rk
from rookery.problems import objectives
from rookery.problems.objectives import chi2_risk, cvar_risk, kl_risk, variance_risk

LOSSES = np.array([0.0, 1.0, 2.0, 5.0])


def close(a, b, tolerance=1e-8):
    np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=tolerance, atol=tolerance)


# The closed forms, of losses alone.


@pytest.mark.parametrize(
    ("risk", "value", "p"),
    [
        (lambda l: kl_risk(l, 1.0), 3.685878060873427, (0.00626879, 0.01704033, 0.04632042, 0.93037047)),
        (lambda l: kl_risk(l, 2.0), 2.957461861647329, (0.05698169, 0.09394692, 0.15489229, 0.69417909)),
        (lambda l: chi2_risk(l, 2.0), 2.875, (0, 0.125, 0.25, 0.625)),
        (lambda l: variance_risk(l, 2.0), 2.875, (0, 0.125, 0.25, 0.625)),
        (lambda l: chi2_risk(l, 1.0), 3.5625, (0, 0, 0.125, 0.875)),
        (lambda l: variance_risk(l, 1.0), 3.75, (-0.25, 0, 0.25, 1)),
        (lambda l: cvar_risk(l, 0.5), 3.5, (0, 0, 0.5, 0.5)),
        (lambda l: cvar_risk(l, 0.3), 4.5, (0, 0, 1 / 6, 5 / 6)),
    ],
)
def test_the_table(risk, value, p):
    found = risk(jnp.asarray(LOSSES))
    close(found.value, value, 1e-12)
    close(found.weights, p, 1e-8)


@pytest.mark.parametrize(
    ("risk", "size", "value", "penalty"),
    [
        (kl_risk, 0.1, 2.8682242620, 4.442199),
        (kl_risk, 0.5, 3.9552961695, 1.897252),
        (chi2_risk, 0.25, 2 + math.sqrt(1.75), None),
        (chi2_risk, 1.0, 4.5606601718, None),
    ],
)
def test_the_balls_of_the_table_are_the_best_penalties(risk, size, value, penalty):
    """max over a ball of size ρ is min over λ of the penalised value + λρ."""
    of = lambda scale: float(risk(jnp.asarray(LOSSES), math.exp(scale)).value) + math.exp(scale) * size
    best = minimize_scalar(of, bounds=(-3, 5), method="bounded", options={"xatol": 1e-9})
    close(best.fun, value)
    assert penalty is None or math.exp(best.x) == pytest.approx(penalty, rel=1e-4)


# The same by other means: p by root finding, by linear programming.


def kl_reference(losses, penalty):
    """Where the Lagrangian is stationary, p_i = e^((ℓ_i − t)/λ) / m; t is such that they add up to 1."""
    weight = lambda level: np.exp((losses - level) / penalty)
    level = brentq(lambda t: weight(t).mean() - 1, losses.min() - 1, losses.max() + 1, xtol=1e-15)
    p = weight(level) / len(losses)
    return p @ losses - penalty * p @ np.log(len(p) * p), p


def chi2_reference(losses, penalty):
    """The maximum of a concave quadratic over the simplex: the projection of where it would be without."""
    m = len(losses)
    free = 1 / m + losses / (penalty * m)
    shift = brentq(lambda t: np.maximum(free - t, 0).sum() - 1, free.min() - 1, free.max(), xtol=1e-15)
    p = np.maximum(free - shift, 0)
    return p @ losses - penalty * m / 2 * np.sum((p - 1 / m) ** 2), p


def cvar_reference(losses, size):
    m = len(losses)
    p = linprog(-losses, A_eq=np.ones((1, m)), b_eq=[1], bounds=(0, 1 / (size * m))).x
    return p @ losses, p


def smooth_cvar_reference(losses, size, smoothing):
    weight = lambda level: np.minimum(np.exp((losses - level) / smoothing), 1 / size)
    level = brentq(lambda t: weight(t).mean() - 1, losses.min() - 1, losses.max() + 1, xtol=1e-15)
    p = weight(level) / len(losses)
    return p @ losses - smoothing * p @ np.log(len(p) * p), p


RNG = np.random.default_rng(3)
ROWS = {"a": jnp.asarray(RNG.normal(size=(6, 3))), "t": jnp.asarray(RNG.normal(size=6))}
MODEL = {"w": jnp.asarray(RNG.normal(size=3))}


def squares(x, rows):
    return (rows["a"] @ x["w"] - rows["t"]) ** 2


EACH = np.asarray(squares(MODEL, ROWS))
MIDDLE = float(np.mean(np.sort(EACH)[2:4]))  # a level between the three largest and the three others
CASES = {
    "kl": (objectives.kl(squares, 0.7), lambda l: kl_reference(l, 0.7), "value"),
    "kl with a cap that is not reached": (
        objectives.kl(squares, 3.0, cap=4.0),
        lambda l: kl_reference(l, 3.0),
        "value",
    ),
    "kl, no shift": (objectives.kl(squares, 0.7, shift=0.0), lambda l: kl_reference(l, 0.7), None),
    "kl, a shift": (objectives.kl(squares, 0.7, shift=4.0), lambda l: kl_reference(l, 0.7), None),
    "chi2": (objectives.chi2(squares, 8.0), lambda l: chi2_reference(l, 8.0), None),
    "chi2 exact, no weight at zero": (
        objectives.chi2(squares, 8.0, exact=True),
        lambda l: chi2_reference(l, 8.0),
        -8.0,
    ),
    "chi2 exact": (objectives.chi2(squares, 1.5, exact=True), lambda l: chi2_reference(l, 1.5), "root"),
    "cvar": (objectives.cvar(squares, 0.5), lambda l: cvar_reference(l, 0.5), MIDDLE),
    "cvar, smooth": (
        objectives.cvar(squares, 0.4, smoothing=0.5),
        lambda l: smooth_cvar_reference(l, 0.4, 0.5),
        ("smooth root", 0.5),
    ),
}


def best_level(rule, value, p):
    if rule == "value":
        return value
    if rule == "root":  # p = (ℓ − η)₊/(λm)
        return EACH.max() - p.max() * 1.5 * len(p)
    if isinstance(rule, tuple):  # p = e^{(ℓ−η)/λ}/m, of a sample below the bound
        return EACH.min() - rule[1] * math.log(len(p) * p[EACH.argmin()])
    return rule if rule > 0 else EACH.mean() + rule


FURTHER = ("kl, no shift", "kl with a cap that is not reached", "kl, a shift", "chi2 exact, no weight at zero")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in FURTHER else n for n in CASES])
def test_value_weights_and_gradient_are_those_of_the_worst_case(name):
    objective, reference, rule = CASES[name]
    value, p = reference(EACH)
    x = MODEL if rule is None else {"model": MODEL, "level": jnp.asarray(best_level(rule, value, p))}
    close(objective.value(x, ROWS), value)
    close(objective.weights(x, ROWS), p)
    expected = np.asarray(jax.jacobian(squares)(MODEL, ROWS)["w"]).T @ p  # Σ p_i ∇ℓ_i
    problem = objective.problem

    def phi(x):
        return problem.f(x, () if isinstance(problem, rk.SingleLevel) else problem.inner(x, ROWS), ROWS)

    close(phi(x), value)
    gradient = jax.grad(phi)(x)
    own = gradient if rule is None else gradient["model"]
    close(own["w"], expected)
    assert rule is None or abs(float(gradient["level"])) < 1e-8
    for of in (phi, lambda x: objective.value(x, ROWS)):  # by finite differences
        move = lambda h, i: jax.tree.map(jnp.asarray, _moved(x, h, i))
        slopes = [(float(of(move(1e-5, i))) - float(of(move(-1e-5, i)))) / 2e-5 for i in range(3)]
        close(slopes, expected, 1e-6)


def _moved(x, h, i):
    model = {"w": MODEL["w"].at[i].add(h)}
    return {**x, "model": model} if "model" in x else model


def test_the_level_is_minimised_at_the_value_and_the_gradient_is_right_up_to_a_factor_elsewhere():
    problem = CASES["kl"][0].problem
    value, p = kl_reference(EACH, 0.7)
    phi = lambda level: problem.f({"model": MODEL, "level": level}, problem.inner(at(level), ROWS), ROWS)
    at = lambda level: {"model": MODEL, "level": jnp.asarray(level)}
    best = minimize_scalar(
        lambda level: float(phi(level)), bounds=(-20, 20), method="bounded", options={"xatol": 1e-10}
    )
    close(best.fun, value)
    assert best.x == pytest.approx(value, abs=1e-4)
    expected = np.asarray(jax.jacobian(squares)(MODEL, ROWS)["w"]).T @ p
    for level in (value - 2, value + 2):
        u = math.exp((value - level) / 0.7)
        gradient = jax.grad(lambda x: problem.f(x, problem.inner(x, ROWS), ROWS))(at(level))
        close(gradient["model"]["w"], 2 * u / (1 + u) * expected)
        close(gradient["level"], (1 - u) / (1 + u))


def test_a_cap_bounds_the_weights_and_the_level_goes_the_right_way_from_anywhere():
    problem = objectives.kl(squares, 0.3, cap=2.0).problem
    p = smooth_cvar_reference(EACH, 0.5, 0.3)[1]
    assert p.max() == pytest.approx(2 / 6)
    assert kl_reference(EACH, 0.3)[1].max() > 2 / 6
    phi = lambda level: problem.f(at(level), problem.inner(at(level), ROWS), ROWS)
    at = lambda level: {"model": MODEL, "level": level}
    best = best_level(("smooth root", 0.3), None, p)
    levels = best + np.array([-1e5, -50, -5, -0.5, -1e-3, 1e-3, 0.5, 5, 50])
    slopes = np.array([float(jax.grad(phi)(level)) for level in levels])
    assert (np.sign(slopes) == np.sign(levels - best)).all()
    assert slopes.min() >= -2
    assert slopes.max() <= 1


@pytest.mark.parametrize("shift", [None, pytest.param(0.0, marks=pytest.mark.slow)])
def test_no_overflow_in_single_precision(shift):
    """Losses of 10,000 λ: finite values and gradients wherever the level is; the exact value at the best one."""
    loss = lambda x, rows: rows["l"] * x
    objective = objectives.kl(loss, 1e-3, shift=shift)
    rows = {"l": jnp.array([0.0, 5.0, 9.9995, 10.0], jnp.float32)}
    start, _ = objective.start(np.float32(1.0))
    large = np.asarray(rows["l"], float) / 1e-3
    value, p = logsumexp(large) - math.log(4), softmax(large)
    assert float(objective.value(start, rows)) == pytest.approx(value * 1e-3, rel=1e-6)
    close(objective.weights(start, rows), p, 1e-3)
    problem = objective.problem
    phi = lambda x: problem.f(x, problem.inner(x, rows), rows)
    levels = [10.0 - 0.5e-3, 0.0, 5.0, 20.0, 1e6] if shift is None else [None]
    for level in levels:
        x = start if level is None else {**start, "level": np.float32(level)}
        u = problem.inner(x, rows)
        at, gradient = jax.value_and_grad(phi)(x)
        slope = jax.grad(problem.outer)(jax.tree.map(jnp.zeros_like, u))  # where a running estimate may well start
        for number in jax.tree.leaves((u, at, slope, gradient)):
            assert number.dtype == jnp.float32
            assert bool(jnp.isfinite(number))
        assert level is None or level > 9.98 or float(gradient["level"]) < -1  # it is behind: up it goes
        if level == levels[0] and shift is None:
            assert float(at) == pytest.approx(value * 1e-3, rel=1e-5)
    near = objectives.kl(loss, 1e-3, shift=10.0).problem
    assert float(near.outer(near.inner(np.float32(1.0), rows))) == pytest.approx(value * 1e-3, rel=1e-6)


# Federated: the mean over clients of what each has is the whole.


def test_a_federated_step_is_a_step_on_the_whole():
    """Clients of different sizes, full batches, FedNest with lower_step 1: x − α∇Φ(x), to the last digit."""
    objective = objectives.kl(squares, 0.7)
    cut = lambda begin, end: jax.tree.map(lambda a: np.asarray(a[begin:end]), ROWS)
    clients = rk.Clients(upper=[cut(0, 1), cut(1, 4), cut(4, 6)], weights="size")
    x, _ = objective.start(MODEL, level=1.0)
    run = rk.solve(objective.problem, clients, rk.FedNest(upper_step=0.1, lower_step=1.0), (x, None), rounds=1)
    problem = objective.problem
    gradient = jax.grad(lambda x: problem.f(x, problem.inner(x, ROWS), ROWS))(x)
    close(run.x["model"]["w"], MODEL["w"] - 0.1 * gradient["model"]["w"], 1e-12)
    close(run.x["level"], 1.0 - 0.1 * gradient["level"], 1e-12)


def members(rows):
    return (rows["group"][:, None] == jnp.arange(2)) * rows["positive"][:, None]


def fair_clients(weights):
    """Nobody of group 1 at client 0, no positive at client 2."""
    rng = np.random.default_rng(1)
    rows = []
    for n, group, positive in ((4, [0] * 4, [1, 0, 1, 1]), (3, [0, 1, 1], [0, 1, 1]), (5, [0, 1, 1, 0, 1], [0] * 5)):
        data = {"a": rng.normal(size=(n, 3)), "t": rng.normal(size=n)}
        rows.append({**data, "group": np.array(group), "positive": np.array(positive, float)})
    return rk.Clients(upper=rows, weights=weights)


@pytest.mark.parametrize("weights", [pytest.param("size", marks=pytest.mark.slow), [0.5, 0.3, 0.2]])
def test_the_mean_of_the_clients_group_losses_is_the_groups_own(weights):
    clients = fair_clients(weights)
    shares = objectives.group_shares(clients, members, ["A", "B"])
    problem = objectives.equal_opportunity(squares, members, shares).problem
    own = [clients.client_data(i)["upper"][0] for i in range(3)]
    inner = [problem.inner(MODEL, rows) for rows in own]
    p = np.asarray(clients.weights)
    mean = jax.tree.map(lambda *values: sum(w * v for w, v in zip(p, values, strict=True)), *inner)
    each = np.concatenate([np.asarray(squares(MODEL, rows)) for rows in own])
    mass = np.concatenate([np.full(len(rows["t"]), w / len(rows["t"])) for w, rows in zip(p, own, strict=True)])
    belongs = np.concatenate([np.asarray(members(rows)) for rows in own])
    close(mean["all"], mass @ each, 1e-12)
    close(mean["groups"], (mass * each) @ belongs / (mass @ belongs), 1e-12)


@pytest.mark.parametrize("reference", [pytest.param("all", marks=pytest.mark.slow), "positives"])
def test_equal_opportunity_is_the_worst_case_over_groups(reference):
    clients = fair_clients("size")
    shares = objectives.group_shares(clients, members, ["A", "B"])
    given = {"strength": 0.5, "tolerance": 0.02, "smoothing": 0.3, "reference": reference}
    objective = objectives.equal_opportunity(squares, members, shares, **given)
    rows = clients.upper.rows
    each, belongs = np.asarray(squares(MODEL, rows)), np.asarray(members(rows))
    groups = each @ belongs / belongs.sum(axis=0)
    against = each.mean() if reference == "all" else each[belongs.sum(axis=1) > 0].mean()
    excess = np.array([0.0, *(groups - against - 0.02)])
    value, p = kl_reference(0.5 * excess, 0.3)  # the maximum over p of a·Σ p c − γ KL(p ‖ uniform)
    close(objective.value(MODEL, rows), each.mean() + value)
    found = objective.weights(MODEL, rows)
    assert list(found) == ["A", "B"]
    close(list(found.values()), p[1:])
    gradient = jax.grad(lambda x: objective.problem.f(x, objective.problem.inner(x, rows), rows))(MODEL)["w"]
    jacobian = np.asarray(jax.jacobian(squares)(MODEL, rows)["w"])
    mine = (jacobian.T @ belongs / belongs.sum(axis=0)).T
    base = jacobian.mean(axis=0) if reference == "all" else jacobian[belongs.sum(axis=1) > 0].mean(axis=0)
    close(gradient, jacobian.mean(axis=0) + 0.5 * p[1:] @ (mine - base))


def test_the_worst_group_is_the_worst_case_over_groups():
    clients = fair_clients("size")
    all_of = lambda rows: jnp.stack([1.0 * (rows["group"] == a) for a in (0, 1)], axis=1)
    objective = objectives.worst_group(squares, all_of, objectives.group_shares(clients, all_of, ["A", "B"]), 0.3)
    rows = clients.upper.rows
    each, group = np.asarray(squares(MODEL, rows)), np.asarray(rows["group"])
    value, p = kl_reference(np.array([each[group == a].mean() for a in (0, 1)]), 0.3)
    close(objective.value(MODEL, rows), value)
    found = objective.weights(MODEL, rows)
    assert list(found) == ["A", "B"]
    close(list(found.values()), p)


def test_the_portfolio_has_its_closed_form():
    returns = np.random.default_rng(0).normal(0.1, 1.0, size=(40, 4))
    mean, covariance = returns.mean(axis=0), np.cov(returns.T, bias=True)
    objective = objectives.portfolio(1.5)
    rows = {"returns": jnp.asarray(returns)}
    phi = lambda x: objective.problem.f(x, objective.problem.inner(x, rows), rows)
    best = np.linalg.solve(covariance, mean) / 3
    close(jax.grad(phi)(jnp.asarray(best)), 0, 1e-12)
    close(phi(jnp.asarray(best)), -mean @ np.linalg.solve(covariance, mean) / 6, 1e-12)
    x = jnp.asarray([1.0, -2.0, 0.5, 0.3])
    close(objective.value(x, rows), -np.mean(returns @ x) + 1.5 * np.var(returns @ x), 1e-12)
    close(objective.weights(x, rows) @ (-returns), jax.grad(phi)(x), 1e-12)
    held = objectives.portfolio(1.5, budget=2.0).problem.project_upper(x)
    close(held.sum(), 2)
    close(held - x, (held - x)[0], 1e-12)


# Errors: one clear line each.


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, "1", True])
def test_a_penalty_is_positive(bad):
    for make in (lambda: objectives.kl(squares, bad), lambda: objectives.chi2(squares, bad)):
        with pytest.raises(ValueError, match=r"penalty must be a positive number; got .*\."):
            make()
    with pytest.raises(ValueError, match=r"aversion must be a positive number; got .*\."):
        objectives.portfolio(bad)
    with pytest.raises(ValueError, match=r"smoothing must be a positive number; got .*\."):
        objectives.cvar(squares, 0.5, smoothing=bad)


def test_a_share_is_a_share():
    for bad in (0, 1.5, math.inf):
        with pytest.raises(ValueError, match=r"size must be a share of the samples in \(0, 1\]; got "):
            objectives.cvar(squares, bad)
    with pytest.raises(ValueError, match=r"cap must be a number above 1, or None; got 1"):
        objectives.kl(squares, 1.0, cap=1)
    with pytest.raises(ValueError, match=r"cap and shift must not be given together"):
        objectives.kl(squares, 1.0, cap=5, shift=0.0)
    with pytest.raises(ValueError, match=r"reference must be .*; got 'some'"):
        objectives.equal_opportunity(squares, members, {"A": 0.1}, reference="some")


def test_a_loss_is_one_number_for_each_sample():
    mean = lambda x, rows: jnp.mean(squares(x, rows))
    for make in (lambda: objectives.kl(mean, 1.0), lambda: objectives.chi2(mean, 1.0, exact=True)):
        objective = make()
        x = objective.start(MODEL)
        x = x[0] if isinstance(x, tuple) else x
        with pytest.raises(
            ValueError, match=r"must return one number for each sample, .* for 6 sample\(s\) it returns a single number"
        ):
            objective.value(x, ROWS)
        with pytest.raises(ValueError, match=r"for 1 sample\(s\) it returns a single number"):
            rk.solve(objective.problem, rk.Clients(upper=[ROWS]), _method(objective), objective.start(MODEL), 1)
    with pytest.raises(ValueError, match=r"for 6 sample\(s\) it returns the shape \(6, 1\)"):
        objectives.kl(lambda x, rows: squares(x, rows)[:, None], 1.0).value({"model": MODEL, "level": 0.0}, ROWS)


def _method(objective):
    return rk.FedAvg() if isinstance(objective.problem, rk.SingleLevel) else rk.FedNest()


def test_a_group_has_members():
    clients = fair_clients("size")
    third = lambda rows: jnp.concatenate([members(rows), jnp.zeros((len(rows["t"]), 1))], axis=1)
    with pytest.raises(
        ValueError, match=r"group 'C' must have members \(positives\) with some client; it has none\. Leave it out\."
    ):
        objectives.group_shares(clients, third, ["A", "B", "C"])
    with pytest.raises(
        ValueError, match=r"must return an array of shape \(batch, 2\), a column for each name; got \(12, 3\)\."
    ):
        objectives.group_shares(clients, third, ["A", "B"])
    with pytest.raises(ValueError, match="group 'B' must have members; its share of the samples is 0"):
        objectives.equal_opportunity(squares, members, {"A": 0.1, "B": 0})
    with pytest.raises(ValueError, match="shares must name at least one group"):
        objectives.equal_opportunity(squares, members, {})
    with pytest.raises(ValueError, match="penalty"):
        objectives.worst_group(squares, members, {"A": 0.5, "B": 0.5}, penalty=0)
    with pytest.raises(
        ValueError, match=r"must return an array of shape \(batch, 2\), a column for each share; got \(12, 3\)\."
    ):
        objectives.equal_opportunity(squares, third, {"A": 0.1, "B": 0.1}).value(MODEL, clients.upper.rows)


def test_the_printed_sign_of_chi2_drives_the_losses_apart():
    """(5) of the FedDRO paper is −var ℓ/(2λ); the right form is mean ℓ + var ℓ/(2λ). The numbers are docs/ ones."""
    penalty, targets = 8.0, ([0.0, 1.0], [2.0, 5.0])
    losses = lambda x, rows: 0.5 * (rows["t"] - x) ** 2
    inner = lambda x, rows: jnp.mean(losses(x, rows), keepdims=True)
    right = rk.Compositional(
        inner=inner,
        outer=lambda u: -jnp.sum(u**2) / (2 * penalty),
        extra=lambda x, rows: jnp.mean(losses(x, rows) + losses(x, rows) ** 2 / (2 * penalty)),
    )
    printed = rk.Compositional(
        inner=inner,
        outer=lambda u: jnp.sum(u**2) / (2 * penalty),
        extra=lambda x, rows: -jnp.mean(losses(x, rows) ** 2) / (2 * penalty),
    )
    clients = rk.Clients(upper=[{"t": np.array(own)} for own in targets])
    rows = {"t": jnp.asarray([t for own in targets for t in own])}
    for problem, variance in ((right, 2.39), (printed, 6.90)):
        method = rk.FedDRO(step=0.05, momentum=0.5)
        run = rk.solve(problem, clients, method, (np.array(2.0), None), rounds=30, progress=False)
        assert float(jnp.var(losses(run.x, rows))) == pytest.approx(variance, abs=0.01)


# In single precision.

RISKS = {
    "kl": lambda l, scale: kl_risk(l, scale),
    "kl with a cap": lambda l, scale: kl_risk(l, scale, 2.0),
    "cvar, smooth": lambda l, scale: cvar_risk(l, 0.3, scale),
    "cvar": lambda l, scale: cvar_risk(l, 0.3),
    "chi2": lambda l, scale: chi2_risk(l, scale),
    "chi2 ball": lambda l, scale: objectives.chi2_ball_risk(l, 0.5),
    "variance": lambda l, scale: variance_risk(l, scale),
}


@pytest.mark.parametrize("name", RISKS)
def test_a_risk_is_the_same_in_single_precision_at_every_scale(name):
    """25 cases: losses far from zero, spread over much less or much more than the penalty."""
    risk = jax.jit(RISKS[name])
    rng = np.random.default_rng(0)
    for _ in range(25):
        spread, offset = 10.0 ** rng.uniform(-2, 3), rng.choice([0, 1e3, -1e3, 1e4])
        losses = (offset + spread * rng.uniform(size=20)).astype(np.float32)
        scale = np.float32(spread * 10.0 ** rng.uniform(-5, 1))
        if name == "variance":
            scale = max(scale, np.float32(0.1 * spread))  # it is no worst case beyond, and its weights are large
        exact = risk(losses.astype(float), float(scale))
        found = risk(losses, scale)
        assert found.value.dtype == jnp.float32
        assert abs(float(found.weights.sum()) - 1) < 2e-6
        assert abs(float(found.value) - float(exact.value)) < 1e-6 * (abs(offset) + spread)
        np.testing.assert_allclose(found.weights, exact.weights, rtol=1e-3, atol=3e-5)


def test_a_capped_risk_in_single_precision():
    losses = np.linspace(1000, 1001, 10)
    found = kl_risk(jnp.asarray(losses, jnp.float32), 0.01, 2.0)
    assert float(found.value) == pytest.approx(
        1000 + 7 / 9 - 0.01 * math.log(2), abs=2e-4
    )  # the five largest at the cap
    assert float(found.weights.sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("tied", [[5, 5, 5, 0, 0, 0], [5, 5, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [3, 2, 2, 2, 2, 1]])
@pytest.mark.parametrize("cap", [1.5, 2.0, 3.0])
def test_a_capped_risk_with_ties(tied, cap):
    losses = np.array(tied, float)
    found = kl_risk(jnp.asarray(losses), 0.7, cap)
    value, p = smooth_cvar_reference(losses, 1 / cap, 0.7)
    close(found.value, value)
    close(found.weights, p)
    close(jax.grad(lambda l: kl_risk(l, 0.7, cap).value)(jnp.asarray(losses)), p)


@pytest.mark.parametrize("module", ["objectives", "tasks", "theory", "trackers"])
def test_a_module_offers_its_public_names_alone(module):
    offered = dir(getattr(rk, module))
    assert offered == sorted(getattr(rk, module).__all__)
    assert not {"Any", "jnp", "np", "math", "annotations"} & set(offered)
