"""FastDRO, PDSGD, AFL, DRFA and q-FedAvg against NumPy transcriptions, and on problems with closed-form solutions."""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q
from scipy.optimize import brentq

import rookery as rk
from rookery.data.cohort import sample_cohort
from rookery.language.fed import Client
from rookery.parts.projection import simplex

Vector = np.ndarray
N, ROUNDS, ETA = 4, 4, 0.1
SIZES, WEIGHTS = (3, 1, 5, 3), np.array([0.1, 0.4, 0.3, 0.2])
DATA = q.data(SIZES, 7, a=(3,), t=(), b=(3,))
CLIENTS = rk.Clients(upper=DATA, weights=WEIGHTS)
X = np.array([0.8, -0.5, 0.3])
BOX = 0.6  # x stays in [−0.6, 0.6]


def _loss(x: Any, batch: Any) -> Any:
    fit = 0.5 * (batch["a"] @ x - 3 * batch["t"]) ** 2 + jnp.log(jnp.cosh(batch["b"] @ x))
    return jnp.mean(fit) + 0.05 * x @ x


PROBLEM = rk.SingleLevel(_loss, project_upper=lambda x: jnp.clip(x, -BOX, BOX))


# The loss once more, sample by sample.


def loss(k: int, i: int, x: Vector) -> float:
    a, t, b = (DATA[k][name][i] for name in "atb")
    return float(0.5 * (a @ x - 3 * t) ** 2 + np.log(np.cosh(b @ x)) + 0.05 * x @ x)


def slope(k: int, i: int, x: Vector) -> Vector:
    a, t, b = (DATA[k][name][i] for name in "atb")
    return (a @ x - 3 * t) * a + np.tanh(b @ x) * b + 0.1 * x


def own_loss(k: int, x: Vector) -> float:
    return float(np.mean([loss(k, i, x) for i in range(SIZES[k])]))


def own_slope(k: int, x: Vector) -> Vector:
    return np.mean([slope(k, i, x) for i in range(SIZES[k])], axis=0)


def stepped(x: Vector, direction: Vector, step: float = ETA) -> Vector:
    return np.clip(x - step * direction, -BOX, BOX)


def noises(seed: int) -> list[Any]:
    """The key that each round is given."""
    return [jax.random.split(jax.random.fold_in(jax.random.key(seed), t + 1))[1] for t in range(ROUNDS)]


def everyone() -> list[Sequence[int]]:
    return [range(N)] * ROUNDS


def run(algorithm: Any, cohort: int | None = None, seed: int = 3, **given: Any) -> tuple[list[Any], rk.Run]:
    seen: list[Any] = []
    look = lambda x, y: seen.append((np.array(x),)) or {}
    return seen, rk.solve(PROBLEM, CLIENTS, algorithm, X, ROUNDS, cohort=cohort, seed=seed, evaluate=look, **given)


# The worst cases, by root finding on the level, for samples that count `reference`.


def worst(objective: str, losses: Vector, reference: Vector, size: float, penalty: float | None) -> Vector:
    if objective == "kl":
        p = reference * np.exp((losses - losses.max()) / penalty)
        return p / p.sum()
    if objective == "cvar":
        p, left = np.zeros(len(losses)), 1.0
        for i in np.argsort(-losses):
            p[i] = min(reference[i] / size, left)
            left -= p[i]
        return p
    above = lambda level: np.maximum(losses - level, 0)
    low, high = losses.min() - 1e3, losses[reference > 0].max()
    if penalty is not None:
        return reference * above(brentq(lambda level: reference @ above(level) - penalty, low, high)) / penalty

    def excess(level: float) -> float:
        return reference @ above(level) ** 2 - (1 + 2 * size) * (reference @ above(level)) ** 2

    if 1 + 2 * size >= 1 / reference[losses == high].sum():
        p = np.where(losses == high, reference, 0)
    else:
        p = reference * above(brentq(excess, low, high - 1e-9, xtol=1e-15, rtol=1e-15))
    return p / p.sum()


CASES: dict[str, dict[str, Any]] = {
    "CVaR": {"objective": "cvar", "size": 0.35},
    "chi2 ball": {"objective": "chi2", "size": 0.4},
    "chi2 penalty": {"objective": "chi2", "size": 1.0, "penalty": 0.5},
    "KL": {"objective": "kl", "size": 1.0, "penalty": 0.7},
}


@pytest.mark.parametrize(
    "name", [name if name in ("CVaR", "chi2 ball") else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_worst_case_of_a_batch(name: str) -> None:
    """For samples that count differently, with ties and with places that hold none."""
    rng, given = np.random.default_rng(1), {"penalty": None} | CASES[name]
    ours = jax.jit(rk.FastDRO(**given).worst)
    for factor in (0.01, 0.3, 1.0, 30.0):
        losses = factor * rng.normal(size=9).round(1)
        losses[4] = losses[2]
        reference = rng.uniform(0.1, 1, size=9)
        reference[[losses.argmax(), 5]] = 0
        reference /= reference.sum()
        found = ours(jnp.asarray(losses), jnp.asarray(reference))
        expected = worst(losses=losses, reference=reference, **given)
        np.testing.assert_allclose(found @ losses, expected @ losses, rtol=1e-9)  # p itself where it is unique:
        if name != "CVaR":
            np.testing.assert_allclose(found, expected, atol=1e-7)
    equal = ours(jnp.ones(5), jnp.full(5, 0.2))
    np.testing.assert_allclose(jnp.sum(equal), 1, rtol=1e-12)


@pytest.mark.parametrize(
    ("given", "p"),
    [
        ({"objective": "cvar", "size": 0.5}, (0, 0, 0.5, 0.5)),
        ({"objective": "cvar", "size": 0.3}, (0, 0, 1 / 6, 5 / 6)),
        ({"objective": "cvar", "size": 1.0}, (0.25, 0.25, 0.25, 0.25)),
        ({"objective": "chi2", "size": 0.25}, 0.25 * (1 + (np.array([0, 1, 2, 5]) - 2) / np.sqrt(7))),
        ({"objective": "chi2", "size": 1.0}, (0, 0, 0.1464466094067262, 0.8535533905932737)),
        ({"objective": "chi2", "size": 1.6}, (0, 0, 0, 1)),
        ({"objective": "chi2", "penalty": 2.0}, (0, 0.125, 0.25, 0.625)),
        ({"objective": "chi2", "penalty": 1.0}, (0, 0, 0.125, 0.875)),
        ({"objective": "kl", "penalty": 1.0}, (0.00626879, 0.01704033, 0.04632042, 0.93037047)),
        ({"objective": "kl", "penalty": 2.0}, (0.05698169, 0.09394692, 0.15489229, 0.69417909)),
    ],
)
def test_the_table(given: Any, p: Any) -> None:
    """ℓ = (0, 1, 2, 5), by hand."""
    found = rk.FastDRO(**given).worst(jnp.array([0.0, 1.0, 2.0, 5.0]), jnp.full(4, 0.25))
    np.testing.assert_allclose(found, p, atol=6e-9)


# The methods.


def fast_dro(pool: bool, who: list[Sequence[int]], objective: str, size: float, penalty: Any) -> Iterator[Vector]:
    x = X
    yield x
    for cohort in who:
        total = WEIGHTS[list(cohort)].sum()
        samples = [(k, i) for k in cohort for i in range(SIZES[k])]
        solve = partial(worst, objective, size=size, penalty=penalty)
        if pool:
            reference = np.array([WEIGHTS[k] / SIZES[k] for k, _ in samples]) / total
            p = solve(np.array([loss(k, i, x) for k, i in samples]), reference)
        else:
            each = [
                solve(np.array([loss(k, i, x) for i in range(SIZES[k])]), np.full(SIZES[k], 1 / SIZES[k]))
                for k in cohort
            ]
            p = np.concatenate([WEIGHTS[k] / total * own for k, own in zip(cohort, each, strict=True)])
        x = stepped(x, sum(p_i * slope(k, i, x) for p_i, (k, i) in zip(p, samples, strict=True)))
        yield x


@pytest.mark.parametrize(
    ("name", "pool", "cohort"),
    [
        ("CVaR", True, 3),
        pytest.param("chi2 ball", True, None, marks=pytest.mark.slow),
        ("chi2 penalty", False, 3),
        pytest.param("KL", True, 2, marks=pytest.mark.slow),
    ],
)
def test_fast_dro(name: str, pool: bool, cohort: int | None) -> None:
    given = {"penalty": None} | CASES[name]
    who = everyone() if cohort is None else q.cohorts(N, cohort, ROUNDS, seed=3)
    seen, ended = run(rk.FastDRO(step=ETA, pool=pool, **given), cohort)
    q.assert_same(seen, [(x,) for x in fast_dro(pool, who, **given)])
    assert np.diff(ended.history["gradients"]).tolist() == [len(cohort) for cohort in who]  # one backward pass each
    samples = (1 + pool) * np.array([sum(SIZES[k] for k in cohort) for cohort in who])
    assert np.diff(ended.history["samples_upper"]).tolist() == samples.tolist()


@partial(jax.jit, static_argnums=2)
def draw(key: Any, k: Any, size: int) -> Any:
    """The samples of a client's first minibatch with this key. Another test checks the draw."""
    batch = CLIENTS.view("upper", k).draw(key, size, 0, False)
    return batch.places, batch.mask


@cache
def pdsgd_run() -> list[tuple[Vector, Vector]]:
    return list(pdsgd(0.3, 0.8, 2, q.cohorts(N, 3, ROUNDS, seed=3), seed=3))


def pdsgd(
    gamma: float, penalty: float, size: int, who: list[Sequence[int]], seed: int
) -> Iterator[tuple[Vector, Vector]]:
    """With p itself, of all samples, and the draws of the run."""
    samples = [(k, i) for k in range(N) for i in range(SIZES[k])]
    start = np.array([WEIGHTS[k] / SIZES[k] for k, _ in samples])
    x, p = X, start
    yield x, p
    for cohort, noise in zip(who, noises(seed), strict=True):
        drawn = dict.fromkeys(samples, 0)
        for k in cohort:
            places, marked = draw(jax.random.fold_in(noise, k), k, size)
            for i in np.asarray(places)[np.asarray(marked)]:
                drawn[k, int(i)] += 1
        taken = [min(size, SIZES[k]) for k in range(N)]
        direction = np.zeros(3)
        new = p.copy()
        for j, (k, i) in enumerate(samples):
            factor = SIZES[k] / taken[k] * drawn[k, i]
            direction += N / len(cohort) * factor * p[j] * slope(k, i, x)
            if k in cohort:
                new[j] = p[j] ** (1 - gamma * penalty) * start[j] ** (gamma * penalty)
                new[j] *= np.exp(gamma * factor * loss(k, i, x))
        x, p = stepped(x, direction), new / new.sum()
        yield x, p


@pytest.mark.parametrize(
    "engine",
    [rk.Simulation(), pytest.param(rk.Federation(), marks=pytest.mark.slow)],
    ids=["simulation", "lockstep"],
)
def test_pdsgd(engine: Any) -> None:
    """A cohort with minibatches of 2, and a client with 1 sample. Clients that sit out keep normalised weights."""
    method = rk.PDSGD(step=ETA, dual_step=0.3, penalty=0.8, batch_size=2)
    seen, _ = run(method, 3, engine=engine)
    expected = pdsgd_run()
    q.assert_same(seen, [(x,) for x, _ in expected])
    assert (
        np.ptp(expected[-1][1] * np.concatenate([np.full(m, m / w) for m, w in zip(SIZES, WEIGHTS, strict=True)])) > 0.5
    )


@pytest.mark.slow
def test_pdsgd_ends_at_the_kl_worst_case() -> None:
    """On all the data, where it is FedAvg's solution of the same problem in its dual form."""
    rows = [{"t": np.array([0.0, 0.2, 1.0])}, {"t": np.array([0.5])}]
    clients = rk.Clients(upper=rows, weights="size")
    square = rk.SingleLevel(lambda x, b: jnp.mean((x - b["t"]) ** 2))
    x = float(rk.solve(square, clients, rk.PDSGD(step=0.1, dual_step=0.5, penalty=0.2), np.zeros(()), 600).x)
    t = np.array([0.0, 0.2, 1.0, 0.5])
    p = np.exp((x - t) ** 2 / 0.2)
    assert (p / p.sum()) @ (x - t) == pytest.approx(0, abs=1e-10)
    assert abs(x - t.mean()) > 0.02  # the mean's solution is another


def to_simplex(v: Vector) -> Vector:
    """By bisection on the threshold."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(v - low, 0)


def test_the_simplex() -> None:
    rng = np.random.default_rng(0)
    for size, scale in ((1, 3.0), (7, 0.1), (7, 1.0), (7, 10.0)):
        v = scale * rng.normal(size=size)
        np.testing.assert_allclose(simplex(jnp.asarray(v)), to_simplex(v), atol=1e-12)
    np.testing.assert_allclose(simplex(jnp.array([2.0, 2.0, -1.0, 0, 0, 0, 0])), [0.5, 0.5, 0, 0, 0, 0, 0])


def afl(gamma: float, who: list[Sequence[int]]) -> Iterator[tuple[Vector, Vector]]:
    x, weights = X, np.full(N, 1 / N)
    yield x, weights
    for cohort in who:
        factor = N / len(cohort)
        direction = sum(factor * weights[k] * own_slope(k, x) for k in cohort)
        v = np.array([factor * own_loss(k, x) if k in cohort else 0.0 for k in range(N)])
        x, weights = stepped(x, direction), to_simplex(weights + gamma * v)
        yield x, weights


def test_afl() -> None:
    expected = list(afl(0.4, everyone()))
    assert (expected[-1][1] == 0).any()  # the projection was at work
    seen, ended = run(rk.AFL(step=ETA, weight_step=0.4))
    average = [X] + [np.mean([x for x, _ in expected[1 : t + 1]], axis=0) for t in range(1, ROUNDS + 1)]
    q.assert_same(seen, [(x,) for x in average])
    np.testing.assert_allclose(ended.state.last, expected[-1][0], rtol=1e-10)
    np.testing.assert_allclose(ended.state.weights, expected[-1][1], atol=1e-10)

    sampled = list(afl(0.1, q.cohorts(N, 2, ROUNDS, seed=3)))
    seen, ended = run(rk.AFL(step=ETA, weight_step=0.1, output="last"), cohort=2)
    q.assert_same(seen, [(x,) for x, _ in sampled])
    np.testing.assert_allclose(ended.state.weights, sampled[-1][1], atol=1e-10)


def drfa(gamma: float, tau: int, who: list[Sequence[int]], seed: int) -> Iterator[tuple[Vector, Vector, Any]]:
    """With the draws of the run."""
    x, weights = X, np.full(N, 1 / N)
    yield x, weights, None
    for cohort, noise in zip(who, noises(seed), strict=True):
        size = len(cohort)
        choice, pick, _, _ = jax.random.split(noise, 4)
        drawn = [int(k) for k in sample_cohort(choice, N, size, jnp.asarray(weights))]
        snapshot = int(jax.random.randint(pick, (), 1, tau + 1))
        ends, between = [], []
        for k in drawn:
            path = [x]
            for _ in range(tau):
                path.append(path[-1] - ETA * own_slope(k, path[-1]))
            ends.append(path[tau])
            between.append(path[snapshot])
        x, there = (np.clip(np.mean(points, axis=0), -BOX, BOX) for points in (ends, between))
        v = np.zeros(N)
        for k in cohort:
            v[k] = N / size * own_loss(k, there)
        weights = to_simplex(weights + tau * gamma * v)
        yield x, weights, (snapshot, drawn)


def test_drfa() -> None:
    expected = list(drfa(0.05, 3, q.cohorts(N, 3, ROUNDS, seed=3), seed=3))
    draws = [draw for _, _, draw in expected[1:]]
    assert len({snapshot for snapshot, _ in draws}) > 1
    assert any(len(set(drawn)) < 3 for _, drawn in draws)  # somebody was drawn twice
    seen, ended = run(rk.DRFA(step=ETA, weight_step=0.05, local_steps=3), cohort=3)
    q.assert_same(seen, [(x,) for x, _, _ in expected])
    np.testing.assert_allclose(ended.state.weights, expected[-1][1], atol=1e-10)


def q_fedavg(fairness: float, steps: Sequence[int], who: list[Sequence[int]]) -> Iterator[Vector]:
    x, smooth = X, 1 / ETA
    yield x
    for cohort in who:
        delta: Any = 0.0
        h = 0.0
        for k in cohort:
            z = x
            for _ in range(steps[k]):
                z = z - own_slope(k, z) / smooth
            w, value = smooth * (x - z), own_loss(k, x) + 1e-10
            delta = delta + WEIGHTS[k] * value**fairness * w
            h += WEIGHTS[k] * (fairness * value ** (fairness - 1) * w @ w + smooth * value**fairness)
        x = stepped(x, delta / h, 1.0)
        yield x


def test_q_fedavg() -> None:
    steps, who = [3, 1, 2, 4], q.cohorts(N, 3, ROUNDS, seed=3)
    seen, _ = run(rk.QFedAvg(step=ETA, fairness=1.7, local_steps=steps), cohort=3)
    q.assert_same(seen, [(x,) for x in q_fedavg(1.7, steps, who)])


def test_q_fedavg_without_fairness_is_fedavg() -> None:
    steps = [3, 1, 2, 4]
    plain, _ = run(rk.QFedAvg(step=ETA, fairness=0.0, local_steps=steps), cohort=3)
    fedavg, _ = run(rk.FedAvg(step=ETA, local_steps=steps), cohort=3)
    q.assert_same(plain, fedavg)


# What they end at.


@pytest.mark.slow
def test_the_worst_client_of_three_quadratics() -> None:
    """F = x², 2(x−1)², (x−½)²/10: the first two are equal at √2/(1 + √2), with the weights 2−√2 and √2−1."""
    rows = [{"w": np.array([w]), "t": np.array([t])} for w, t in ((1.0, 0.0), (2.0, 1.0), (0.1, 0.5))]
    problem = rk.SingleLevel(lambda x, b: jnp.mean(b["w"] * (x - b["t"]) ** 2))
    solve = lambda method, rounds, **given: rk.solve(problem, rk.Clients(upper=rows), method, 0.0, rounds, **given)
    exact = np.sqrt(2) / (1 + np.sqrt(2))
    ended = solve(rk.AFL(step=0.1, weight_step=0.1, output="last"), 400)
    np.testing.assert_allclose(ended.x, exact, atol=1e-9)
    np.testing.assert_allclose(ended.state.weights, [2 - np.sqrt(2), np.sqrt(2) - 1, 0], atol=1e-9)
    # DRFA's clients are drawn: with small steps it moves about the same point, and not about the mean's, 0.66.
    drawn = rk.DRFA(step=0.01, weight_step=0.01, local_steps=2)
    ended = solve(drawn, 1000, evaluate=lambda x, y: {"x": x}, every=10)
    assert ended.history["x"][50:].mean() == pytest.approx(exact, abs=0.02)
    np.testing.assert_allclose(ended.state.weights, [2 - np.sqrt(2), np.sqrt(2) - 1, 0], atol=0.1)
    # A large q looks at the worst client: between the mean's solution and the worst client's.
    fair = float(solve(rk.QFedAvg(step=0.1, fairness=20.0), 400).x)
    assert abs(fair - exact) < 0.01
    pull = [rows[k]["w"][0] ** 21 * (fair - rows[k]["t"][0]) ** 41 for k in range(3)]  # F_k^q ∇F_k/2
    assert sum(pull) == pytest.approx(0, abs=1e-6 * abs(pull[0]))


@pytest.mark.parametrize("sizes", [pytest.param((4, 4, 4), marks=pytest.mark.slow), q.ONE_LARGE_CLIENT])
def test_the_oracles_of_single_samples(sizes: tuple[int, ...]) -> None:
    """For equal and for very unequal clients: losses, weighted gradients, places, and what they count."""
    data, x, i = q.data(sizes, 8, a=(3,), t=(), b=(3,)), jnp.asarray(X), 1
    clients = rk.Clients(upper=data)

    @partial(jax.jit, static_argnums=0)
    def look(size: int | None) -> Any:
        c = Client(PROBLEM, clients, i, i)
        batch = c.samples(jax.random.key(0), size)
        losses, weighted = c.losses_and_pullback(x, batch)
        marked = jnp.ones(len(losses)) if batch.mask is None else batch.mask
        return losses, weighted(marked * (1 + batch.places)), batch.places, marked, c.places, c.work

    one, slope = jax.jit(_loss), jax.jit(jax.grad(_loss))
    for size in (None, 2):
        losses, gradient, places, marked, there, work = look(size)
        assert there.shape == (max(sizes),)
        assert int(there.sum()) == sizes[i]
        on = np.asarray(places)[np.asarray(marked, bool)]
        assert len(set(on.tolist())) == len(on) == (sizes[i] if size is None else min(size, sizes[i]))
        alone = [jax.tree.map(lambda a: a[j : j + 1], data[i]) for j in on]
        np.testing.assert_allclose(losses[np.asarray(marked, bool)], [one(x, row) for row in alone], rtol=1e-12)
        expected = sum((1 + j) * slope(x, row) for j, row in zip(on, alone, strict=True))
        np.testing.assert_allclose(gradient, expected, rtol=1e-12)
        assert work.tolist() == [len(on), 0, 1, 0]


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (rk.FastDRO(objective="kl"), r"FastDRO: objective='kl' needs penalty"),
        (rk.FastDRO(penalty=1.0), r"FastDRO: penalty must be left out with objective='cvar', which takes size, its α"),
        (rk.FastDRO(objective="max"), r"FastDRO: objective must be one of 'cvar', 'chi2', 'kl'.*; got 'max'"),  # type: ignore[arg-type]
        (rk.PDSGD(penalty=None), r"PDSGD: penalty must be a positive number.*; got None"),
        (rk.AFL(output="random"), r"AFL: output must be one of 'last', 'average'.*; got 'random'"),  # type: ignore[arg-type]
        (rk.DRFA(local_steps=(1, 3)), r"DRFA: local_steps must be an integer of at least 1.*; got \(1, 3\)"),  # type: ignore[arg-type]
        (rk.QFedAvg(fairness=-1.0), r"QFedAvg: fairness must be a number of at least 0.*; got -1.0"),
    ],
)
def test_what_they_refuse(algorithm: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rk.solve(PROBLEM, CLIENTS, algorithm, X, 1)
