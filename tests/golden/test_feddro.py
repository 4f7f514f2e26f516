"""The compositional methods against a NumPy transcription, and on problems whose limits are known in closed form."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q

import rookery as rk
from rookery.algorithms import feddro
from rookery.data.rows import View
from rookery.language.fed import Client

Vector = np.ndarray
CENTRE = np.array([0.5, -1.0, 0.2, 0.4])
OURS, CLIENTS = q.compositional()
PROBLEM = rk.Compositional(q._inner, lambda v: jnp.sum(jnp.sqrt(1 + (v - CENTRE) ** 2)), q._extra)
X, Y = q.INIT
ETA, BETA, STEPS, ROUNDS = 0.05, 0.3, 3, 6


# The methods again, step by step as in the paper's boxes: one t for every local step.


def slope(v: Vector) -> Vector:
    """∇f."""
    return (v - CENTRE) / np.sqrt(1 + (v - CENTRE) ** 2)


def gradient(k: int, x: Vector, y: Vector) -> Vector:
    """(7)."""
    return OURS.extra_gradient(k, x) + OURS.jacobian(k, x).T @ slope(y)


def mean(values: Any, cohort: Sequence[int] = range(q.N_CLIENTS)) -> Vector:
    p = OURS.p[list(cohort)]
    return np.tensordot(p / p.sum(), np.stack(list(values)), axes=1)


def inner(xs: Any) -> Vector:
    """g at each client's own point."""
    return mean(OURS.r(k, x) for k, x in enumerate(xs))


def fed_dro(printed: bool, cohorts: list[Sequence[int]] | None = None) -> Iterator[tuple[Vector, Vector]]:
    """Alg. 2. `point[k]` is the point of client k's part of ȳ, if it took part in the last round."""
    everyone = range(q.N_CLIENTS)
    x_bar, y_bar = X, inner([X] * q.N_CLIENTS)
    xs = dict.fromkeys(everyone, X)
    point = dict.fromkeys(everyone, X)
    yield x_bar, y_bar
    for t in range(STEPS * ROUNDS):
        here = everyone if cohorts is None else cohorts[t // STEPS]
        old = {k: xs[k] if printed or t % STEPS else point.get(k, x_bar) for k in here}
        new = {k: xs[k] - ETA * gradient(k, xs[k], y_bar) for k in here}
        ys = [(1 - BETA) * (y_bar - OURS.r(k, old[k])) + OURS.r(k, new[k]) for k in here]
        y_bar = mean(ys, here)
        xs |= new
        if (t + 1) % STEPS == 0:
            point = new
            x_bar = mean(new.values(), here)
            xs = dict.fromkeys(everyone, x_bar)
            yield x_bar, y_bar


def ds_fed_dro(gamma_x: float, gamma_y: float) -> Iterator[tuple[Vector, Vector]]:
    """Alg. 3, with the client's own y_k in (7)."""
    n = q.N_CLIENTS
    x, y = X, inner([X] * n)
    xs, ys = [x] * n, [y] * n
    yield x, y
    for t in range(STEPS * ROUNDS):
        xs = [xs[k] - ETA * gradient(k, xs[k], ys[k]) for k in range(n)]
        ys = [(1 - BETA) * ys[k] + BETA * OURS.r(k, xs[k]) for k in range(n)]
        if (t + 1) % STEPS == 0:
            x = x - gamma_x * mean(x - own for own in xs)
            y = y - gamma_y * mean(y - own for own in ys)
            xs, ys = [x] * n, [y] * n
            yield x, y


def fed_avg(case: str, every_step: bool) -> Iterator[tuple[Vector, Vector]]:
    """Alg. 1, and the modified version of Theorem 4.2."""
    n = q.N_CLIENTS
    xs, y_bar = [X] * n, inner([X] * n)
    ys = [OURS.r(k, X) for k in range(n)] if case == "I" else [y_bar] * n
    yield X, y_bar
    for t in range(STEPS * ROUNDS):
        xs = [xs[k] - ETA * gradient(k, xs[k], ys[k]) for k in range(n)]
        ys = [OURS.r(k, xs[k]) for k in range(n)]
        end = (t + 1) % STEPS == 0
        if every_step or (end and case == "II"):
            ys = [mean(ys)] * n
        if end:
            xs = [mean(xs)] * n
            if case == "I":
                ys = [OURS.r(k, xs[k]) for k in range(n)]
            yield xs[0], ys[0]


def mbsgd(own: bool) -> Iterator[tuple[Vector, Vector]]:
    x, y = X, Y
    yield x, y
    for _ in range(ROUNDS):
        y = inner([x] * q.N_CLIENTS)
        x = x - ETA * mean(gradient(k, x, OURS.r(k, x) if own else y) for k in range(q.N_CLIENTS))
        yield x, y


def parallel_sgd() -> Iterator[tuple[Vector, Vector]]:
    x = X
    yield x, Y
    for _ in range(ROUNDS):
        x = x - ETA * mean(OURS.extra_gradient(k, x) for k in range(q.N_CLIENTS))
        yield x, Y


def scgd() -> Iterator[tuple[Vector, Vector]]:
    x, y = X, inner([X] * q.N_CLIENTS)
    yield x, y
    for _ in range(ROUNDS):
        y = (1 - BETA) * y + BETA * inner([x] * q.N_CLIENTS)
        x = x - ETA * mean(gradient(k, x, y) for k in range(q.N_CLIENTS))
        yield x, y


def nasa(gradient_momentum: float) -> Iterator[tuple[Vector, Vector]]:
    x, z, u = X, np.zeros_like(X), inner([X] * q.N_CLIENTS)
    yield x, u
    for _ in range(ROUNDS):
        x = x - ETA * z
        new = mean(gradient(k, x, u) for k in range(q.N_CLIENTS))
        z, u = (
            (1 - gradient_momentum) * z + gradient_momentum * new,
            (1 - BETA) * u + BETA * inner([x] * q.N_CLIENTS),
        )
        yield x, u


def gcivr() -> Iterator[tuple[Vector, Vector]]:
    everyone = range(q.N_CLIENTS)
    g = lambda x: mean(OURS.r(k, x) for k in everyone)
    jacobian = lambda x: mean(OURS.jacobian(k, x) for k in everyone)
    plain = lambda x: mean(OURS.extra_gradient(k, x) for k in everyone)
    x, before = X, X
    yield X, Y
    y, z, u = Y, np.zeros((4, 3)), X
    for t in range(STEPS * ROUNDS):
        if t % STEPS == 0:
            y, z, u = g(x), jacobian(x), plain(x)
        else:
            y, z, u = y + g(x) - g(before), z + jacobian(x) - jacobian(before), u + plain(x) - plain(before)
        x, before = x - ETA * (u + z.T @ slope(y)), x
        if (t + 1) % STEPS == 0:
            yield x, y


LOCAL: dict[str, Any] = {"step": ETA, "local_steps": STEPS}
DRO = LOCAL | {"momentum": BETA}
METHODS: dict[str, tuple[Any, Any]] = {
    "FedDRO": (rk.FedDRO(**DRO), lambda: fed_dro(printed=False)),
    "FedDRO as printed": (rk.FedDRO(**DRO, as_printed=True), lambda: fed_dro(printed=True)),
    "DSFedDRO": (rk.DSFedDRO(**DRO, server_step=1.3, server_inner_step=0.8), lambda: ds_fed_dro(1.3, 0.8)),
    "FedAvg I": (rk.CompositionalFedAvg(**LOCAL, case="I"), lambda: fed_avg("I", every_step=False)),
    "FedAvg II": (rk.CompositionalFedAvg(**LOCAL, case="II"), lambda: fed_avg("II", every_step=False)),
    "FedAvg modified": (rk.CompositionalFedAvg(**LOCAL, share_inner_every_step=True), lambda: fed_avg("II", True)),
    "MBSGD": (rk.MBSGD(step=ETA), lambda: mbsgd(own=False)),
    "MBSGD own": (rk.MBSGD(step=ETA, inner="own"), lambda: mbsgd(own=True)),
    "ParallelSGD": (rk.ParallelSGD(step=ETA), parallel_sgd),
    "SCGD": (rk.SCGD(step=ETA, momentum=BETA), scgd),
    "NASA": (rk.NASA(step=ETA, momentum=BETA, gradient_momentum=0.6), lambda: nasa(0.6)),
    "GCIVR": (rk.GCIVR(step=ETA, anchor_every=STEPS), gcivr),
}
NO_COMMON_Y = {"FedAvg I", "MBSGD own", "ParallelSGD"}  # it stays at its start
D, D_G = q.X_DIM, q.Y_DIM
NUMBERS = {  # exchanges of a round, and the numbers that a client sends in it
    "FedDRO": (STEPS, STEPS * D_G + D),
    "FedDRO as printed": (STEPS, STEPS * D_G + D),
    "DSFedDRO": (1, D_G + D),
    "FedAvg I": (1, D),
    "FedAvg II": (1, D_G + D),
    "FedAvg modified": (STEPS, STEPS * D_G + D),
    "MBSGD": (2, D_G + D),
    "MBSGD own": (1, D),
    "ParallelSGD": (1, D),
    "SCGD": (2, D_G + D),
    "NASA": (1, D_G + D),
    "GCIVR": (STEPS, STEPS * (D_G + D_G * D + D)),
}
AT_THE_START = {"FedDRO", "FedDRO as printed", "DSFedDRO", "FedAvg II", "FedAvg modified", "SCGD", "NASA"}  # ȳ⁰


SECOND = ("FedDRO as printed", "FedAvg I", "FedAvg modified", "MBSGD own")  # another variant of a method that is there


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SECOND else n for n in METHODS])
def test_equals_the_transcription(name: str) -> None:
    algorithm, transcribed = METHODS[name]
    seen: list[Any] = []
    look = lambda x, y: seen.append((np.array(x), np.array(y))) or {}
    history = rk.solve(PROBLEM, CLIENTS, algorithm, q.INIT, ROUNDS, evaluate=look).history
    if name in NO_COMMON_Y:
        assert all((y == Y).all() for _, y in seen)
        q.assert_same([(x,) for x, _ in seen], [(x,) for x, _ in transcribed()])
    elif name in AT_THE_START:
        q.assert_same(seen, list(transcribed()))
    else:
        q.assert_same(seen[1:], list(transcribed())[1:])

    exchanges, numbers = NUMBERS[name]
    assert np.diff(history["exchanges"]).tolist() == [exchanges] * ROUNDS
    assert np.diff(history["bytes_up"]).tolist() == [8 * numbers * q.N_CLIENTS] * ROUNDS
    first = history.iloc[0]
    assert (first["exchanges"], first["bytes_up"]) == ((1, 8 * D_G * q.N_CLIENTS) if name in AT_THE_START else (0, 0))


@pytest.mark.slow
def test_a_cohort_and_a_random_output() -> None:
    """A client that took part in the last round subtracts at its own point, another one at the mean.

    The output is one of the averaged iterates, each as likely, and the method itself goes on from the last.
    """
    who = q.cohorts(q.N_CLIENTS, 3, ROUNDS, seed=2)
    again = [set(a) & set(b) for a, b in itertools.pairwise(who)]
    assert any(again)
    assert any(set(b) - both for b, both in zip(who[1:], again, strict=True))
    iterates = list(fed_dro(printed=False, cohorts=who))
    run = rk.solve(PROBLEM, CLIENTS, rk.FedDRO(**DRO, output="random"), q.INIT, ROUNDS, cohort=3, seed=2)
    for got, expected in zip(run.state.last, iterates[-1], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10)
    fits = [t for t, (x, y) in enumerate(iterates) if np.allclose(run.x, x, atol=1e-10) and np.allclose(run.y, y)]
    assert len(fits) == 1
    assert fits[0] > 0

    method = rk.FedDRO(output="random")

    def drawn(key: Any) -> Any:
        state = feddro._start(method, jnp.zeros(()), ())
        for t, k in enumerate(jax.random.split(key, 5)):
            state = feddro._after(method, state, jnp.float64(t + 1), (), k)
        return state.x

    counts = Counter(jax.vmap(drawn)(jax.random.split(jax.random.key(0), 5000)).tolist())
    assert set(counts) == {1, 2, 3, 4, 5}
    assert all(abs(count - 1000) < 5 * np.sqrt(5000 * 0.2 * 0.8) for count in counts.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "once", "twice"),  # minibatches of a client in a round: each serves once, or twice
    [
        (rk.FedDRO(**DRO, batch_size=1), STEPS + 2, STEPS - 1),
        (rk.DSFedDRO(**DRO, batch_size=1), STEPS + STEPS + 1, 0),
        (rk.MBSGD(batch_size=1), 1, 1),
    ],
    ids=["FedDRO", "DSFedDRO", "MBSGD"],
)
def test_which_minibatches_serve_twice(algorithm: Any, once: int, twice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ζ^{t+1} serves (8) of step t and (7) of step t + 1, in DS-FedDRO at one point; there are I ξ and I + 1 ζ."""
    drawn: Counter[tuple[Any, ...]] = Counter()

    def record(offset: Any, key: Any, step: Any) -> None:
        drawn[(int(offset), *key.tolist(), int(step))] += 1

    def spy(self: View, key: Any, size: int, step: Any, replace: bool, seen: Any = None) -> Any:
        jax.debug.callback(record, self.offset, jax.random.key_data(key), step)
        return self.all()

    monkeypatch.setattr(View, "draw", spy)
    problem = replace(PROBLEM)  # an object of its own: the spy must be traced, and stay in no other test's program
    rounds, n = 2, q.N_CLIENTS
    rk.solve(problem, CLIENTS, algorithm, q.INIT, rounds)
    jax.effects_barrier()
    expected = Counter({1: n * rounds * once, 2: n * rounds * twice})
    assert Counter(drawn.values()) == +expected


@pytest.mark.parametrize("sizes", [q.LOWER_SIZES, q.ONE_LARGE_CLIENT])
def test_the_inner_oracles(sizes: tuple[int, ...]) -> None:
    """On a masked batch, and on one in pieces: value, ∇rᵀv and the Jacobian; and what they count."""
    data = q.data(sizes, 4, **q._INNER)
    ours, i, v = replace(OURS, lower=data), 2, np.array([1.0, -2.0, 0.5, 3.0])

    @jax.jit
    def oracles(x: Any) -> Any:
        c = Client(PROBLEM, rk.Clients(data, OURS.upper), i, i)
        batch = c.lower(jax.random.key(0))
        value, pullback = c.r_and_pullback(x, batch)
        found = value, pullback(v), c.r(x, batch), c.r_x(x, batch, v), *c.r_and_jacobian(x, batch)
        return found, c.work

    (value, product, again, product_again, third, jacobian), work = oracles(X)
    for got in (value, again, third):
        np.testing.assert_allclose(got, ours.r(i, X), rtol=1e-12)
    for got in (product, product_again):
        np.testing.assert_allclose(got, ours.jacobian(i, X).T @ v, rtol=1e-12)
    np.testing.assert_allclose(jacobian, ours.jacobian(i, X), rtol=1e-12)
    assert work.tolist() == [0, sizes[i], 0, 2 + q.Y_DIM]


@pytest.mark.parametrize(
    ("problem", "algorithm", "message"),
    [
        (q.COMPOSITIONAL, rk.FedDRO(), r"FedDRO needs an outer function without data.*or take .*FedNest"),
        (replace(PROBLEM, extra=None), rk.ParallelSGD(), r"ParallelSGD minimises only the extra part h.*Give extra"),
        (replace(PROBLEM, inner_scope="client"), rk.MBSGD(), r"MBSGD needs an inner function that is one for all"),
        (
            PROBLEM,
            rk.FedDRO(local_steps=(1, 3)),
            r"FedDRO: local_steps must be an integer of at least 1.*; got \(1, 3\)",
        ),  # type: ignore[arg-type]
        (PROBLEM, rk.FedDRO(momentum=1.5), r"FedDRO: momentum must be a number above 0 and at most 1.*; got 1.5"),
    ],
)
def test_what_they_do_not_solve(problem: Any, algorithm: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rk.solve(problem, CLIENTS, algorithm, q.INIT, 1)


# Theorem 4.1: f(v) = √(1 + v²), g_1 = 3x + 2, g_2 = −x − 2. Φ = √(1 + x²), whose only stationary point is 0.

phi = lambda v: jnp.sqrt(1 + v**2)
COUNTEREXAMPLE = rk.Compositional(lambda x, b: jnp.mean(b["a"] * x + b["s"]), phi)
PAIR = rk.Clients(lower=[{"a": np.array([a]), "s": np.array([s])} for a, s in ((3.0, 2.0), (-1.0, -2.0))])
AVERAGES: dict[str, Callable[..., Any]] = {
    "I": lambda **given: rk.CompositionalFedAvg(case="I", **given),
    "II": lambda **given: rk.CompositionalFedAvg(case="II", **given),
    "modified": lambda **given: rk.CompositionalFedAvg(share_inner_every_step=True, **given),
    "FedDRO": lambda **given: rk.FedDRO(momentum=0.5, as_printed=True, **given),
}


def end(problem: Any, clients: rk.Clients, algorithm: Any, start: float, rounds: int) -> float:
    return float(rk.solve(problem, clients, algorithm, (start, None), rounds, every=rounds).x)


@pytest.mark.parametrize(
    ("name", "start", "golden"),
    [
        ("I", 0.0, (-0.385792844094, -0.620939745527, -0.741623318617, -0.859492412061)),
        ("II", 0.0, (-0.32656735151, -0.558590638516, -0.69624005565, -0.845139834331)),
        ("modified", 1.5, (1.318519932147, 1.159959789573, 1.014943292737, 0.3677520641514)),
        ("FedDRO", 1.5, (1.318519932147, 1.170177440074, 1.033497643988, 0.4122919486694)),
    ],
)
def test_counterexample_trajectories(name: str, start: float, golden: tuple[float, ...]) -> None:
    algorithm = AVERAGES[name](step=0.05, local_steps=5)
    seen = q.trajectory(COUNTEREXAMPLE, PAIR, algorithm, (start, None), 10)
    np.testing.assert_allclose([seen[t][0] for t in (1, 2, 3, 10)], golden, rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limit", "ends"),
    [
        ("I", -0.756336, {0.01: -0.77223, 0.05: -0.860410731, 1 / 9: -1.01990}),
        ("II", -0.722393, {0.01: -0.74756, 0.05: -0.846599031, 1 / 9: -0.99140}),
    ],
)
def test_fedavg_fails_at_every_step(name: str, limit: float, ends: dict[float, float]) -> None:
    """Theorem 4.1: from both sides to the same wrong point, and a smaller step does not help."""
    for step, expected in ends.items():
        for start in (-3.0, 0.0):
            got = end(COUNTEREXAMPLE, PAIR, AVERAGES[name](step=step, local_steps=5), start, 600)
            assert got == pytest.approx(expected, abs=6e-6)
    small = [end(COUNTEREXAMPLE, PAIR, AVERAGES[name](step=s, local_steps=5), 0.0, 8000) for s in (0.001, 0.0005)]
    assert 2 * small[1] - small[0] == pytest.approx(limit, abs=1e-5)  # to η = 0 along the line through both


@pytest.mark.parametrize(
    "name", ["FedDRO", *(pytest.param(name, marks=pytest.mark.slow) for name in ("modified", "default"))]
)
def test_shared_inner_values_converge(name: str) -> None:
    """Theorem 4.2; with d_g = 1 and h = 0 at every step size, and in either order."""
    make = AVERAGES.get(name, lambda **given: rk.FedDRO(momentum=0.5, **given))
    for step in (0.02, 0.05, 1 / 9):
        assert abs(end(COUNTEREXAMPLE, PAIR, make(step=step, local_steps=5), 1.5, 1000)) < 1e-12


@pytest.mark.slow
def test_ds_feddro_has_a_floor_of_order_beta() -> None:
    """About −2β(I − 1) for any server steps; so it converges as β(I − 1) → 0."""
    for beta, eta, servers, expected in (
        (0.5, 0.05, (1.0, 1.0), -0.80378),
        (0.01, 0.01, (1.0, 1.0), -0.08066),
        (0.001, 0.001, (1.0, 1.0), -0.0080150),
        (0.001, 0.001, (1.3, 1.4), -0.0080150),
    ):
        x, y = servers
        algorithm = rk.DSFedDRO(step=eta, momentum=beta, local_steps=5, server_step=x, server_inner_step=y)
        assert end(COUNTEREXAMPLE, PAIR, algorithm, 1.5, 8000) == pytest.approx(expected, abs=6e-6)


# d_g = 2: f(v) = φ(v_1) + φ(v_2), g_1 = (3x − 1, 1), g_2 = (−1, 2x + 1).

TWO = rk.Compositional(lambda x, b: jnp.mean(b["a"] * x + b["s"], axis=0), lambda v: jnp.sum(phi(v)))
TWO_CLIENTS = rk.Clients(
    lower=[{"a": np.array([a]), "s": np.array([s])} for a, s in (((3.0, 0.0), (-1.0, 1.0)), ((0.0, 2.0), (-1.0, 1.0)))]
)
SOLUTION = 0.25868781179842


def error(beta: float, eta: float, printed: bool) -> float:
    algorithm = rk.FedDRO(step=eta, momentum=beta, local_steps=5, as_printed=printed)
    return abs(end(TWO, TWO_CLIENTS, algorithm, 0.0, 6000) - SOLUTION)


@pytest.mark.slow
def test_the_printed_order_has_an_error_in_the_limit_and_ours_has_not() -> None:
    """With β = cη; Theorem 4.3 has c = 4B_g⁴L_f², here 4·3⁴ = 324. (The specification's table has four digits.)"""
    for c, etas, as_printed, at_own_point in (
        (1, (0.02, 0.005, 0.001), (0.3380, 0.3359, 0.3353), (0.0622, 0.0163, 0.0033)),
        (16, (0.02, 0.005, 0.001), (0.0975, 0.0723, 0.0651), (0.0622, 0.0163, 0.0033)),
        (324, (0.002, 0.001, 0.0005), (0.0078, 0.0056, 0.0045), (0.0066, 0.0033, 0.0017)),
    ):
        for eta, printed, own in zip(etas, as_printed, at_own_point, strict=True):
            assert error(c * eta, eta, printed=True) == pytest.approx(printed, abs=6e-5)
            assert error(c * eta, eta, printed=False) == pytest.approx(own, abs=6e-5)
    assert error(0.5, 0.001, printed=True) == pytest.approx(0.0044, abs=6e-5)  # a constant β mends it, too
