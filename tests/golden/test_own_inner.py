"""The methods with local inner functions, and Fed-DR-SCGD, against a NumPy transcription; and their limits."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q

import rookery as rk
from rookery.data.rows import View

Vector = np.ndarray
Trajectory = Iterator[tuple[Vector, ...]]  # x, and y where there is a common one
N, D, D_G = q.N_CLIENTS, q.X_DIM, q.Y_DIM
CENTRE = np.array([0.5, -1.0, 0.2, 0.4])
OURS, CLIENTS = q.compositional()
OWN = rk.Compositional(q._inner, q._outer, q._extra, inner_scope="client")
SHARED = rk.Compositional(q._inner, lambda v: jnp.sum(jnp.sqrt(1 + (v - CENTRE) ** 2)), q._extra)
X, Y = q.INIT
ETA, BETA, ALPHA, STEPS, ROUNDS = 0.03, 0.3, 0.6, 3, 4
COHORTS = q.cohorts(N, 3, ROUNDS, seed=2)
EVERYONE: list[Sequence[int]] = [range(N)] * ROUNDS


# A conditional problem: g(x; η, ξ) = Mx + m + q_ξ·tanh(Wx), one inner value for each outer sample ξ.


def conditional_inner(x: Any, batch: Any, sample: Any) -> Any:
    return jnp.mean(batch["M"] @ x + batch["m"] + sample["q"] * jnp.tanh(batch["W"] @ x), axis=0)


CONDITIONAL = rk.Compositional(conditional_inner, q._outer, q._extra, inner_scope="client")


# The methods once more: one t for every local step, averages where t + 1 is a multiple of STEPS.


def mean(values: Any, cohort: Sequence[int]) -> Vector:
    p = OURS.p[list(cohort)]
    return np.tensordot(p / p.sum(), np.stack(list(values)), axes=1)


def own_gradient(k: int, x: Vector, u: Vector) -> Vector:
    return OURS.extra_gradient(k, x) + OURS.jacobian(k, x).T @ OURS.outer_gradient(k, u)


def estimate(k: int, x: Vector) -> Vector:
    """v_k of a problem that is not conditional."""
    return own_gradient(k, x, OURS.r(k, x))


def conditional_estimate(k: int, x: Vector) -> Vector:
    """v_k: outer sample by outer sample, each with the inner mean that belongs to it."""

    def one(xi: q.Sample) -> Vector:
        value = q._own_mean(OURS.lower[k], lambda e: e["M"] @ x + e["m"] + xi["q"] * np.tanh(e["W"] @ x))
        jacobian = q._own_mean(OURS.lower[k], lambda e: e["M"] + (xi["q"] / np.cosh(e["W"] @ x) ** 2)[:, None] * e["W"])
        return xi["D"] @ x - xi["d"] + jacobian.T @ (xi["Q"] @ value - xi["q"])

    return q._own_mean(OURS.upper[k], one)


def fcsg(v: Any, a: float | None) -> Trajectory:
    """FCSG (a = None), and so ComFedL; FCSG-M."""
    x, d = X, None
    yield (x,)
    for cohort in EVERYONE:
        ends, momenta = [], []
        for k in cohort:
            own, own_d = x, d
            for _ in range(STEPS):
                new = v(k, own)
                own_d = new if a is None or own_d is None else (1 - a) * own_d + a * new
                own = own - ETA * own_d
            ends.append(own)
            momenta.append(own_d)
        x, d = mean(ends, cohort), mean(momenta, cohort)
        yield (x,)


def acc_fcsg_m(v: Any, a: float, cohorts: list[Sequence[int]]) -> Trajectory:
    x, d = X, None
    last: dict[int, Vector] = {}  # where each client of the last round took its last estimate
    yield (x,)
    for cohort in cohorts:
        points, ends, momenta = {}, [], []
        for k in cohort:
            own, own_d = x, d
            before = last.get(k, None if d is None else x + ETA * d)
            for _ in range(STEPS):
                own_d = v(k, own) if own_d is None else v(k, own) + (1 - a) * (own_d - v(k, before))
                own, before = own - ETA * own_d, own
            points[k] = before
            ends.append(own)
            momenta.append(own_d)
        x, d, last = mean(ends, cohort), mean(momenta, cohort), points
        yield (x,)


def local_scgdm(share: bool, a: float | None, cohorts: list[Sequence[int]]) -> Trajectory:
    """Gao et al., Alg. 1; with share = False u stays with the client."""
    x, u, m = X, None, None
    kept: dict[int, Vector] = {}
    yield (x, Y) if share else (x,)
    for cohort in cohorts:
        ends, values, momenta = [], [], []
        for k in cohort:
            own, own_u, own_m = x, u if share else kept.get(k), m
            for _ in range(STEPS):
                g = OURS.r(k, own)
                own_u = g if own_u is None else (1 - BETA) * own_u + BETA * g
                z = own_gradient(k, own, own_u)
                own_m = z if a is None or own_m is None else (1 - a) * own_m + a * z
                own = own - ETA * own_m
            kept[k] = own_u
            ends.append(own)
            values.append(own_u)
            momenta.append(own_m)
        x, u, m = mean(ends, cohort), mean(values, cohort), mean(momenta, cohort)
        yield (x, u) if share else (x,)


def fed_dr_scgd(a: float, radius: float | None, cohorts: list[Sequence[int]]) -> Trajectory:
    slope = lambda v: (v - CENTRE) / np.sqrt(1 + (v - CENTRE) ** 2)
    gradient = lambda k, x, u: OURS.extra_gradient(k, x) + OURS.jacobian(k, x).T @ slope(u)
    x, u, w = X, mean([OURS.r(k, X) for k in range(N)], range(N)), None
    last: dict[int, tuple[Vector, Vector]] = {}
    yield x, u
    for cohort in cohorts:
        points, ends, values, momenta = {}, [], [], []
        for k in cohort:
            own, own_u, own_w = x, u, w
            before = last.get(k, (x if w is None else x + ETA * w, u))
            for _ in range(STEPS):
                own_u = (1 - BETA) * (own_u - OURS.r(k, before[0])) + OURS.r(k, own)
                new = gradient(k, own, own_u)
                own_w = new if own_w is None else (1 - a) * (own_w - gradient(k, *before)) + new
                if radius is not None:
                    own_w = own_w * min(1.0, radius / np.linalg.norm(own_w))
                own, before = own - ETA * own_w, (own, own_u)
            points[k] = before
            ends.append(own)
            values.append(own_u)
            momenta.append(own_w)
        x, u, w, last = mean(ends, cohort), mean(values, cohort), mean(momenta, cohort), points
        yield x, u


LOCAL: dict[str, Any] = {"step": ETA, "local_steps": STEPS}
RADIUS = 1.5
SCGDM = LOCAL | {"momentum": BETA, "gradient_momentum": ALPHA}
METHODS: dict[str, tuple[Any, Any, Any, Any, int]] = {  # …, and the numbers that a client sends in a round
    "ComFedL": (OWN, rk.ComFedL(**LOCAL), lambda: fcsg(estimate, None), None, D),
    "FCSG-M": (OWN, rk.FCSG(**LOCAL, gradient_momentum=ALPHA), lambda: fcsg(estimate, ALPHA), None, 2 * D),
    "FCSG conditional": (CONDITIONAL, rk.FCSG(**LOCAL), lambda: fcsg(conditional_estimate, None), None, D),
    "Acc-FCSG-M conditional": (
        CONDITIONAL,
        rk.AccFCSGM(**LOCAL, gradient_momentum=ALPHA),
        lambda: acc_fcsg_m(conditional_estimate, ALPHA, COHORTS),
        COHORTS,
        2 * D,
    ),
    "Acc-FCSG-M": (
        OWN,
        rk.AccFCSGM(**LOCAL, gradient_momentum=ALPHA),
        lambda: acc_fcsg_m(estimate, ALPHA, EVERYONE),
        None,
        2 * D,
    ),
    "Local-SCGDM": (OWN, rk.LocalSCGDM(**SCGDM), lambda: local_scgdm(True, ALPHA, EVERYONE), None, 2 * D + D_G),
    "Local-SCGDM, own u": (
        OWN,
        rk.LocalSCGDM(**SCGDM, share_inner=False),
        lambda: local_scgdm(False, ALPHA, COHORTS),
        COHORTS,
        2 * D,
    ),
    "Local-SCGD": (
        OWN,
        rk.LocalSCGDM(**SCGDM | {"gradient_momentum": None}),
        lambda: local_scgdm(True, None, EVERYONE),
        None,
        D + D_G,
    ),
    "Fed-DR-SCGD": (
        SHARED,
        rk.FedDRSCGD(**SCGDM, radius=RADIUS),
        lambda: fed_dr_scgd(ALPHA, RADIUS, COHORTS),
        COHORTS,
        2 * D + D_G,
    ),
    "Fed-DR-SCGD, all clients": (
        SHARED,
        rk.FedDRSCGD(**SCGDM),
        lambda: fed_dr_scgd(ALPHA, None, EVERYONE),
        None,
        2 * D + D_G,
    ),
}


# Another variant of a method that is there.
SECOND = ("Acc-FCSG-M conditional", "Local-SCGD", "Local-SCGDM, own u", "Fed-DR-SCGD, all clients")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SECOND else n for n in METHODS])
def test_equals_the_transcription(name: str) -> None:
    problem, algorithm, transcribed, cohorts, numbers = METHODS[name]
    seen: list[Any] = []
    look = lambda x, y: seen.append((np.array(x), *jax.tree.leaves(y))) or {}
    size = N if cohorts is None else 3
    history = rk.solve(problem, CLIENTS, algorithm, q.INIT, ROUNDS, evaluate=look, cohort=size, seed=2).history
    q.assert_same(seen, list(transcribed()))
    assert np.diff(history["exchanges"]).tolist() == [1] * ROUNDS
    assert np.diff(history["bytes_up"]).tolist() == [8 * numbers * size] * ROUNDS
    start = (1, 8 * D_G * N) if "DR" in name else (0, 0)
    assert (history.iloc[0]["exchanges"], history.iloc[0]["bytes_up"]) == start


def test_the_transcription_exercises_what_it_should() -> None:
    """Clients return and others come anew; the ball is reached, and does not bind all the time."""
    who = [set(cohort) for cohort in COHORTS]
    assert any(a & b for a, b in itertools.pairwise(who))
    assert any((c & a) - b for a, b, c in zip(who, who[1:], who[2:], strict=False)), "no client sat a round out"
    bound, free = (list(fed_dr_scgd(ALPHA, radius, COHORTS)) for radius in (RADIUS, None))
    assert np.abs(bound[1][0] - free[1][0]).max() > 1e-4
    steps = [np.linalg.norm(b[0] - a[0]) / (ETA * STEPS) for a, b in itertools.pairwise(bound)]
    assert min(steps) < 0.9 * RADIUS


@pytest.mark.slow
def test_every_outer_sample_has_inner_samples_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn afresh at every step, once for both points of STORM."""
    drawn: Counter[tuple[Any, ...]] = Counter()

    def record(offset: Any, key: Any, step: Any) -> None:
        drawn[(int(offset), *key.tolist(), int(step))] += 1

    original = View.draw

    def spy(self: View, key: Any, size: int, step: Any, replace: bool, seen: Any = None) -> Any:
        jax.debug.callback(record, self.offset, jax.random.key_data(key), step)
        return original(self, key, size, step, replace, seen)

    monkeypatch.setattr(View, "draw", spy)
    problem = replace(CONDITIONAL)  # an object of its own: the spy must be traced, and stay in no other test's program
    clients = rk.Clients(q.data((3, 2, 5), 4, **q._INNER), q.data((2, 5, 2), 5, **q._OUTER))
    algorithm = rk.AccFCSGM(local_steps=3, batch_size=2, inner_batch=2)
    rk.solve(problem, clients, algorithm, q.INIT, 2)
    jax.effects_barrier()
    assert set(drawn.values()) == {1}
    assert len(drawn) == 2 * 3 * 3 * (2 + 2)  # rounds, clients, steps; the outer draws and an inner one for each


@pytest.mark.slow
def test_conditional_problems_in_lockstep() -> None:
    """The same numbers, and clients with few samples count only the samples they have."""
    clients = rk.Clients(q.data((3, 1), 4, **q._INNER), q.data((1, 4), 5, **q._OUTER))
    arguments = (CONDITIONAL, clients, rk.FCSG(local_steps=3, batch_size=2, inner_batch=2), q.INIT)
    here = rk.solve(*arguments, rounds=2)
    there = rk.solve(*arguments, rounds=2, engine=rk.Federation())
    for a, b in zip(jax.tree.leaves(here.state), jax.tree.leaves(there.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    columns = ["exchanges", "bytes_up", "bytes_down", "samples_upper", "samples_lower", "gradients", "products"]
    assert here.history[columns].equals(there.history[columns])
    work = {"samples_upper": 1 + 2, "samples_lower": 1 * 2 + 2 * 1, "products": 1 + 2}  # of a step
    for column, expected in work.items():
        assert np.diff(here.history[column]).tolist() == [3 * expected] * 2


@pytest.mark.parametrize(
    ("problem", "algorithm", "message"),
    [
        (CONDITIONAL, rk.ComFedL(), r"ComFedL needs an inner function g\(x, batch\).*conditional.*FCSG or AccFCSGM"),
        (
            replace(CONDITIONAL, inner_scope="global"),
            rk.FCSG(),
            r"FCSG needs an inner function that is each client's own",
        ),
        (SHARED, rk.LocalSCGDM(), r"LocalSCGDM needs an inner function that is each client's own"),
        (OWN, rk.FedDRSCGD(), r"FedDRSCGD needs an inner function that is one for all"),
        (replace(OWN, inner_scope="global"), rk.FedDRSCGD(), r"FedDRSCGD needs an outer function without data"),
        (OWN, rk.ComFedL(inner_batch=0), r"ComFedL: inner_batch must be an integer of at least 1.*; got 0"),
        (OWN, rk.LocalSCGDM(share_inner=1), r"LocalSCGDM: share_inner must be True or False.*; got 1"),  # type: ignore[arg-type]
        (
            SHARED,
            rk.NASA(gradient_momentum=None),
            r"NASA: gradient_momentum must be a number above 0 and at most 1.*; got None",
        ),
    ],
)
def test_what_they_do_not_solve(problem: Any, algorithm: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rk.solve(problem, CLIENTS, algorithm, q.INIT, 1)


def test_a_conditional_problem_is_checked_at_the_border() -> None:
    with pytest.raises(ValueError, match="no bilevel form"):
        CONDITIONAL.as_bilevel()
    wrong = replace(CONDITIONAL, inner=lambda x, batch, sample: sample["image"])
    with pytest.raises(ValueError, match=r"Compositional.inner fails on init .*KeyError: 'image'.*outer sample"):
        rk.solve(wrong, CLIENTS, rk.FCSG(), q.INIT, 1)


# f(v) = √(1 + v²), g_1 = 3x + 2, g_2 = −x − 2: mean f(g_k(x)) is least at −0.7563, f(mean g_k(x)) at 0.

TWO = rk.Compositional(lambda x, b: jnp.mean(b["a"] * x + b["s"]), lambda v: jnp.sqrt(1 + v**2), inner_scope="client")
PAIR = rk.Clients(lower=[{"a": np.array([a]), "s": np.array([s])} for a, s in ((3.0, 2.0), (-1.0, -2.0))])


@pytest.mark.parametrize(
    ("momentum", "gradient_momentum", "step", "shared", "own"),
    [
        pytest.param(0.9, 0.9, 0.05, -0.852, -0.854, marks=pytest.mark.slow),
        (0.1, 0.8, 0.004, -0.487, -0.762),
        pytest.param(0.01, 0.8, 0.002, -0.106, -0.759, marks=pytest.mark.slow),
        pytest.param(0.001, 0.8, 0.0005, -0.012, -0.757, marks=pytest.mark.slow),
    ],
)
def test_an_averaged_inner_value_solves_another_problem(
    momentum: float, gradient_momentum: float, step: float, shared: float, own: float
) -> None:
    """With p fixed and a momentum that falls, as in the theory; from a start between the two."""
    given: dict[str, Any] = {"step": step, "momentum": momentum, "gradient_momentum": gradient_momentum}
    for share, expected in ((True, shared), (False, own)):
        algorithm = rk.LocalSCGDM(**given, local_steps=5, share_inner=share)
        rounds = 8000
        run = rk.solve(TWO, PAIR, algorithm, (-0.4, None), rounds, every=rounds)
        assert float(run.x) == pytest.approx(expected, abs=7e-4)
