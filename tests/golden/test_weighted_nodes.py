"""Adaptively weighted nodes against a NumPy transcription of the paper's Algorithms 1–3, and what the paper promises.

The transcription is told which samples are drawn and when reference points move; all arithmetic is its own. The losses
are logistic, so that the Hessian depends on θ.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import rookery as rk
from rookery import theory

Vector = NDArray[np.float64]
SIZES, D, RIDGE, BATCH = (5, 7, 4, 6), 3, 0.1, 2
K = len(SIZES)


def _loss(theta: Any, b: Any) -> Any:
    return jnp.mean(jnp.logaddexp(0, -b["t"] * (b["a"] @ theta))) + RIDGE / 2 * theta @ theta


class Data(NamedTuple):
    """One node's samples."""

    a: Vector
    t: Vector

    def gradient(self, theta: Vector, rows: Any = slice(None)) -> Vector:
        a, t = self.a[rows], self.t[rows]
        return -(t / (1 + np.exp(t * (a @ theta)))) @ a / len(t) + RIDGE * theta

    def hessian(self, theta: Vector, rows: Any = slice(None)) -> Any:
        a = self.a[rows]
        p = 1 / (1 + np.exp(-a @ theta))
        return (a.T * (p * (1 - p))) @ a / len(a) + RIDGE * np.eye(D)


def _samples(rng: Any, n: int) -> Data:
    return Data(rng.normal(size=(n, D)), np.sign(rng.normal(size=n)))


RNG = np.random.default_rng(4)
NODES, CENTER = [_samples(RNG, n) for n in SIZES], _samples(RNG, 6)
LOWER = [{"a": n.a, "t": n.t, "place": np.arange(len(n.t))} for n in NODES]
CLIENTS = rk.Clients(lower=LOWER, center={"a": CENTER.a, "t": CENTER.t, "place": np.arange(6)})
CAP = 0.4
PROBLEM = rk.WeightedNodes(_loss, CAP)
START = np.array([0.5, -1.0, 0.2])


# Algorithm 1.


@jax.jit
def _batches(key: Any) -> Any:
    """Which samples every node draws at each of the first few steps."""
    one = lambda k, t: CLIENTS.view("lower", k).draw(
        jax.random.split(jax.random.fold_in(key, k))[0], BATCH, t, replace=False
    )
    return jax.vmap(lambda k: jax.vmap(lambda t: one(k, t).rows["place"])(jnp.arange(5)))(jnp.arange(K))


@partial(jax.jit, static_argnums=2)
def _moves(key: Any, q: float, count: int) -> Any:
    """When every node's reference point moves, for windows of `count` steps that begin at each of the first steps."""
    coins = lambda k: jax.random.split(jax.random.fold_in(key, k))[1]
    window = lambda k, first: jax.random.bernoulli(jax.random.fold_in(coins(k), first), q, (count,))
    return jax.vmap(lambda k: jax.vmap(lambda first: window(k, first))(jnp.arange(5)))(jnp.arange(K))


class Draws:
    """What is random in one call of Local-SVRG, from the key that the library's call gets."""

    def __init__(self, key: Any, q: float) -> None:
        self.rows = np.asarray(_batches(key))
        self.q, self.window = q, cache(lambda count: np.asarray(_moves(key, q, count)))

    def batch(self, k: int, t: int) -> Any:
        return self.rows[k, t]

    def moves(self, k: int, first: int, count: int) -> Any:
        return self.window(count)[k, first]


Gradient = Callable[[int, Vector, Any], Vector]  # (k, x, rows) -> ∇f_k on these rows


class Whole:
    """Counts the gradients on all the data, taken when a reference point is new."""

    def __init__(self) -> None:
        self.samples = np.zeros(K, int)


def local_svrg(
    gradient: Gradient, w: Vector, x0: Vector, draws: Draws, gamma: float, tau: int, T: int, mu: float | None,
    counted: Whole,
) -> Vector:  # fmt: skip
    """Algorithm 1, line by line."""
    everything = slice(None)
    x, y = [x0.copy() for _ in range(K)], [x0.copy() for _ in range(K)]
    new = [True] * K
    path = [x0]
    for t in range(T):
        first = t - t % tau
        after = []
        for k in range(K):
            rows = draws.batch(k, t)
            g = gradient(k, x[k], rows) - gradient(k, y[k], rows) + gradient(k, y[k], everything)
            counted.samples[k] += len(rows) + (SIZES[k] if new[k] else 0)
            new[k] = bool(draws.moves(k, first, min(tau, T - first))[t - first])
            y[k] = x[k] if new[k] else y[k]
            after.append(x[k] - gamma * g)
        mean = sum(w[k] * after[k] for k in range(K))
        x = [mean if (t + 1) % tau == 0 or t + 1 == T else after[k] for k in range(K)]
        path.append(mean)
    if mu is None:
        return path[-1]
    u = (1 - min(gamma * mu, draws.q / 4)) ** -(np.arange(T + 1) + 1.0)
    return u @ np.array(path) / u.sum()


# Algorithms 2 and 3.


@dataclass(frozen=True)
class Letters:
    """The papers' symbols."""

    gamma: float = 0.2
    gamma_h: float = 0.3
    eta: float = 1.0
    tau: int = 2
    T: int = 5
    q: float = 0.4
    mu: float | None = None


def project(v: Vector, cap: float = CAP) -> Vector:
    """The nearest point of the capped simplex, by bisection."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(v - middle, 0, cap).sum() > 1 else (low, middle)
    return np.clip(v - (low + high) / 2, 0, cap)


def hypergradient(s: Letters, w: Vector, theta: Vector, key: Any, counted: Whole) -> tuple[Vector, Vector]:
    """(14)–(15)."""
    k1, _, k3, _ = jax.random.split(key, 4)
    losses = lambda k, x, rows: NODES[k].gradient(x, rows)
    theta = local_svrg(losses, w, theta, Draws(k1, s.q), s.gamma, s.tau, s.T, s.mu, counted)
    b = CENTER.gradient(theta)
    system = lambda k, h, rows: NODES[k].hessian(theta, rows) @ h - b
    h = local_svrg(system, w, b, Draws(k3, s.q), s.gamma_h, s.tau, s.T, s.mu, counted)
    counted.samples += np.array(SIZES)
    return theta, np.array([-NODES[k].gradient(theta) @ h for k in range(K)])


def noises(rounds: int, seed: int) -> list[Any]:
    return [jax.random.split(jax.random.fold_in(jax.random.key(seed), t + 1))[1] for t in range(rounds)]


def prox(s: Letters, rounds: int, seed: int, counted: Whole) -> Iterator[tuple[Vector, Vector]]:
    """Algorithm 3."""
    w, theta = np.full(K, 1 / K), START
    yield w, theta
    for noise in noises(rounds, seed):
        theta, slope = hypergradient(s, w, theta, jax.random.split(noise)[0], counted)
        w = project(w - s.eta * slope)
        yield w, theta


def aba(s: Letters, rounds: int, seed: int, counted: Whole) -> Iterator[tuple[Vector, Vector]]:
    """Algorithm 2; the proximal steps of lines 13 and 14 written out as the quadratics' minimisers."""
    w = w_ag = np.full(K, 1 / K)
    theta = START
    yield w_ag, theta
    for step, noise in enumerate(noises(rounds, seed)):
        w_md = 2 / (step + 2) * w + step / (step + 2) * w_ag
        theta, slope = hypergradient(s, w_md, theta, noise, counted)
        w = project(w - slope / (2 * 2 / (s.eta * (step + 1))))  # min ⟨g, v⟩ + c‖v − w‖² is at w − g/(2c)
        w_ag = project(w_md - slope / (2 / (2 * s.eta)))
        yield w_ag, theta


def trajectory(problem: Any, clients: rk.Clients, method: Any, init: Any, rounds: int, **given: Any) -> Any:
    path: list[Any] = []
    keep = lambda x, y: path.append((np.asarray(x), np.asarray(y) if jax.tree.leaves(y) else None)) or {}
    return path, rk.solve(problem, clients, method, init, rounds, evaluate=keep, **given)


def settings(s: Letters) -> dict[str, Any]:
    steps = {"model_step": s.gamma, "linear_step": s.gamma_h, "weight_step": s.eta, "steps": s.T, "sync_every": s.tau}
    average = {} if s.mu is None else {"average": "theory", "strong_convexity": s.mu}
    return steps | average | {"refresh": s.q, "batch_size": BATCH}


@cache
def transcribed(name: str, letters: Letters) -> tuple[list[Any], int]:
    """Three rounds, and the samples that the nodes used in them."""
    counted = Whole()
    return list((prox if name == "Prox" else aba)(letters, 3, 8, counted)), int(counted.samples.sum())


@pytest.mark.parametrize(("name", "letters"), [("Prox", Letters()), ("ABA", Letters(mu=RIDGE, tau=5, eta=2.0))])
def test_equals_the_transcription(name: str, letters: Letters) -> None:
    expected, samples = transcribed(name, letters)
    method = getattr(rk, f"WeightedNodes{name}")(**settings(letters))
    ours, run = trajectory(PROBLEM, CLIENTS, method, START, 3, seed=8)
    for (w, theta), (w_golden, theta_golden) in zip(ours, expected, strict=True):
        np.testing.assert_allclose(w, w_golden, rtol=0, atol=1e-10)
        np.testing.assert_allclose(theta, theta_golden, rtol=0, atol=1e-10)
    assert np.isclose(expected[-1][0].max(), CAP)  # the cap was at work
    assert run.history["samples_lower"].iloc[-1] == samples  # refreshes among them, and no more than those
    assert (run.history["samples_upper"].diff()[1:] == 6).all()  # the centre's
    np.testing.assert_array_equal(run.weights, run.x)
    kinds = dict(zip(run.exchanges["name"], run.exchanges["kind"], strict=True))
    assert kinds == {"theta": "mean", "center": "center", "h": "mean", "slopes": "gather"}


def test_a_random_output_and_a_center_that_is_a_client() -> None:
    """Line 13 of Algorithm 3: one of w^(0), …, w^(S−1), with its θ. Who holds the centre changes no number."""
    letters = Letters(tau=5)
    path, samples = transcribed("Prox", letters)
    pairs = [(path[s][0], path[s + 1][1]) for s in range(3)]
    method = rk.WeightedNodesProx(**settings(letters), output="random")
    clients = rk.Clients(lower=LOWER, center=jax.tree.map(np.asarray, CLIENTS.center.rows), center_client=2)
    run = rk.solve(PROBLEM, clients, method, START, 3, seed=8)
    near = [np.allclose(run.x, w, atol=1e-10) and np.allclose(run.y, theta, atol=1e-10) for w, theta in pairs]
    assert sum(near) == 1
    np.testing.assert_allclose(run.state.last_weights, path[-1][0], atol=1e-10)
    exchanges = run.exchanges.set_index("name")
    assert exchanges.loc["center", "count"] == 1
    assert exchanges.loc["center", "bytes_up"] == D * 8  # of one client
    assert run.history["exchanges"].iloc[-1] == 3 * (2 * 1 + 2)
    assert run.history["samples_lower"].iloc[-1] == samples


@pytest.mark.parametrize("mu", [pytest.param(None, marks=pytest.mark.slow), RIDGE])
def test_local_svrg_equals_the_transcription(mu: float | None) -> None:
    """In rounds of τ steps, the reference points kept from one to the next."""
    w, tau, rounds, q, gamma = np.array([0.1, 0.4, 0.2, 0.3]), 3, 4, 0.4, 0.3
    x, y, new = START.copy(), [START.copy() for _ in range(K)], [True] * K
    virtual, expected, samples = [START], [START], 0
    for key in noises(rounds, 5):
        draws, each = Draws(key, q), [x.copy() for _ in range(K)]
        for v in range(tau):
            for k in range(K):
                rows, node = draws.batch(k, v), NODES[k]
                g = node.gradient(each[k], rows) - node.gradient(y[k], rows) + node.gradient(y[k])
                samples += BATCH + (SIZES[k] if new[k] else 0)
                new[k] = bool(draws.moves(k, 0, tau)[v])
                y[k] = each[k] if new[k] else y[k]
                each[k] = each[k] - gamma * g
            virtual.append(w @ np.array(each))
        x = virtual[-1]
        u = (1 - min(gamma * RIDGE, q / 4)) ** -(np.arange(len(virtual)) + 1.0)
        expected.append(x if mu is None else u @ np.array(virtual) / u.sum())
    average: dict[str, Any] = {} if mu is None else {"average": "theory", "strong_convexity": mu}
    method = rk.LocalSVRG(step=gamma, sync_every=tau, refresh=q, batch_size=BATCH, **average)
    clients = rk.Clients(upper=LOWER, weights=w)
    ours, run = trajectory(rk.SingleLevel(_loss), clients, method, START, rounds, seed=5)
    np.testing.assert_allclose([x for x, _ in ours], expected, rtol=0, atol=1e-10)
    assert run.history["samples_upper"].iloc[-1] == samples


# The hypergradient.


class Probed(NamedTuple):
    x: Any
    y: Any
    gradient: Any


@dataclass(frozen=True)
class Probe(rk.WeightedNodesProx):
    """Shows the hypergradient at the start."""

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> Any:
        return Probed(x, y, jnp.zeros_like(x))

    def round(self, fed: Any, state: Any, key: Any) -> Any:
        return Probed(state.x, *self.hypergradient(fed, state.x, state.y, key))


PROBE = {"sync_every": 1, "model_step": 1.0, "linear_step": 1.0}


@pytest.mark.slow
def test_hypergradient_against_differences() -> None:
    w = np.array([0.1, 0.4, 0.2, 0.3])

    def value(w: Vector) -> float:
        theta = START
        for _ in range(30):  # Newton
            slope = sum(w[k] * NODES[k].gradient(theta) for k in range(K))
            theta = theta - np.linalg.solve(sum(w[k] * NODES[k].hessian(theta) for k in range(K)), slope)
        return float(np.mean(np.log1p(np.exp(-CENTER.t * (CENTER.a @ theta))))) + RIDGE / 2 * theta @ theta

    expected = [(value(w + 1e-5 * e) - value(w - 1e-5 * e)) / 2e-5 for e in np.eye(K)]
    run = rk.solve(PROBLEM, CLIENTS, Probe(**PROBE, steps=400), (w, START), 1)
    np.testing.assert_allclose(run.state.gradient, expected, rtol=0, atol=1e-6)


# Linear regression with the same features everywhere: F(w) = ½(Σ w_k θ_k − θ_0)ᵀ S (Σ w_k θ_k − θ_0), appendix B.

FEATURES = np.random.default_rng(2).normal(size=(12, 6))
S = FEATURES.T @ FEATURES / 12
SQUARES = lambda theta, b: 0.5 * jnp.mean((b["a"] @ theta - b["t"]) ** 2)


def regression(optima: Any, theta_0: Vector) -> rk.Clients:
    rows = lambda theta: {"a": FEATURES, "t": FEATURES @ theta}
    return rk.Clients(lower=[rows(theta) for theta in optima], center=rows(theta_0))


OTHERS = np.random.default_rng(7).normal(size=(4, 6))
OPTIMA = np.concatenate([np.ones((2, 6)), 1 + OTHERS])  # two that are like the centre, four that are not
LIKE = regression(OPTIMA, np.ones(6))


@pytest.mark.slow
def test_hypergradient_in_closed_form() -> None:
    w = np.array([0.1, 0.2, 0.15, 0.25, 0.2, 0.1])
    theta = w @ OPTIMA
    step = 1 / np.linalg.eigvalsh(S).max()
    probe = Probe(**PROBE | {"model_step": step, "linear_step": step}, steps=1500)
    run = rk.solve(rk.WeightedNodes(SQUARES), LIKE, probe, (w, np.zeros(6)), 1)
    np.testing.assert_allclose(run.y, theta, atol=1e-8)
    np.testing.assert_allclose(run.state.gradient, (OPTIMA - theta) @ S @ (theta - 1), rtol=0, atol=1e-6)


# What the paper promises.


@pytest.mark.slow
def test_mean_estimation() -> None:
    """Section 3's example: no node is like the centre, and (½, ½) is best."""
    clients = rk.Clients(lower=[np.array([3.0, 1.0]), np.array([-3.0, -1.0])], center=np.array([1.0, -1.0]))
    problem = rk.WeightedNodes(lambda theta, b: jnp.mean((theta - b) ** 2))
    method = rk.WeightedNodesProx(model_step=0.4, linear_step=0.4, weight_step=0.03, steps=20)
    run = rk.solve(problem, clients, method, (np.array([0.9, 0.1]), np.zeros(())), 100)
    np.testing.assert_allclose(run.weights, [0.5, 0.5], atol=1e-6)
    assert abs(float(run.y)) < 1e-6


@pytest.mark.slow
def test_dissimilar_nodes_lose_their_weight_and_acceleration_helps() -> None:
    """Identical neighbours exist: the others' weights go to 0, and ABA gets there in far fewer rounds."""
    step = 1 / np.linalg.eigvalsh(S).max()
    slope = 1 / np.linalg.eigvalsh(OPTIMA @ S @ OPTIMA.T).max()  # of F
    given = {"model_step": step, "linear_step": step, "weight_step": 0.5 * slope, "steps": 200, "sync_every": 1}
    excess = lambda x, y: {"F": 0.5 * (x @ OPTIMA - 1) @ S @ (x @ OPTIMA - 1)}
    runs = {}
    for method in (rk.WeightedNodesProx(**given), rk.WeightedNodesABA(**given)):
        problem = rk.WeightedNodes(SQUARES, cap=0.8)
        run = rk.solve(problem, LIKE, method, np.zeros(6), 150, evaluate=excess, every=5)
        runs[type(method).__name__] = run
        assert float(run.weights.sum()) == pytest.approx(1)
        assert float(run.weights.max()) <= 0.8
    prox, aba = (runs[f"WeightedNodes{name}"] for name in ("Prox", "ABA"))
    assert float(aba.weights[2:].max()) < 2e-3
    first = lambda run, level: int(run.history["round"][run.history["F"] < level].min())
    level = prox.history["F"].iloc[-1]  # where 150 plain steps end
    assert first(aba, level * (1 + 1e-9)) <= 75


# The theory's steps.


def test_the_theorys_constants_by_hand() -> None:
    c = theory.WeightedConstants(mu=1, l_0=2, l_1=3, l_2=0.5, radius=1, nodes=4)
    bend = 2 * 2 * 3 + 0.5 * 4
    assert c.l_F == pytest.approx(bend * 2 * 2 + 4 * 3 * 4)  # (12)
    assert c.gamma_0(tau=1, q=0.1) == pytest.approx(min(3 / 240, 0.1 / 4))  # (17)
    gamma = c.gamma_0(tau=5, q=0.1)
    assert gamma == pytest.approx(1 / (3 * np.sqrt(5 * np.e) * 4 * (6 * 4 + 8 + 16 / 0.9)))
    noise, drift = c.error(tau=5, q=0.1)
    c_2, c_3 = 4 + 32 * gamma**2 * 9 / 0.3, 30 * np.e * gamma**3 * 27 * 2.1 / 0.1
    assert noise == pytest.approx(2 * 4 * (4 + bend**2) * 2 * 4 * (c_2 + 4 * c_3))
    assert drift == pytest.approx(2 * 4 * (4 + bend**2) * 45 * np.e * 3 * 16 * 4 * 16)
    method = theory.weighted_nodes(c, rounds=3, sync_every=5, refresh=0.1, convex=False)
    assert isinstance(method, rk.WeightedNodesProx)
    assert method.output == "random"
    assert method.weight_step == pytest.approx(1 / (3 * c.l_F))
    longest = max(1 / gamma, 3 * np.sqrt(noise + drift))  # (51) at s = 2
    assert float(method.model_step(2)) == pytest.approx(1 / longest)
    assert method.steps == np.ceil(longest * np.log(longest**3))


@pytest.mark.slow
def test_the_theorys_steps_converge() -> None:
    """Quadratic losses, whose constants are known, and single samples."""
    optima = np.array([[1.0, 0.0], [0.0, 1.0], [-0.5, -0.5]])
    scale = np.array([[1.0, 1.2], [1.2, 1.0]])  # two samples each, of unlike curvature
    rows = lambda theta: {"s": scale, "t": np.tile(theta, (2, 1))}
    loss = lambda theta, b: 0.5 * jnp.mean(jnp.sum(b["s"] * (theta - b["t"]) ** 2, axis=-1))
    best = np.array([0.2, 0.3, 0.5])
    clients = rk.Clients(lower=[rows(o) for o in optima], center=rows(best @ optima), replace=True)
    constants = theory.WeightedConstants(mu=1.1, l_0=1.1 * 1.6, l_1=1.2, radius=1.0, nodes=3)
    method = theory.weighted_nodes(constants, rounds=40, refresh=0.5, batch_size=1)
    value = lambda x, y: {"F": 0.55 * jnp.sum((x @ optima - best @ optima) ** 2)}
    start = (np.array([0.6, 0.2, 0.2]), np.zeros(2))
    F = rk.solve(rk.WeightedNodes(loss), clients, method, start, 40, evaluate=value, every=10).history["F"]
    assert (np.diff(F) < 0).all()
    assert F.iloc[-1] < 0.05 * F.iloc[0]
