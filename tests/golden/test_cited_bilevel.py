"""The bilevel methods that the papers compare with: each against NumPy, its random choices replayed or recognised."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q
import transcription as golden
from evaluated import EvaluatedFed
from transcription import Vector, mean

import rookery as rk
from rookery.data.cohort import sample_cohort
from rookery.tasks.quadratic import Solution, solution

OURS, CLIENTS = q.bilevel(lower=(2,) * 5, upper=(3,) * 5)  # of one size, for smaller programs; of unequal weights
EQUAL_OURS, EQUAL_CLIENTS = q.bilevel([1.0] * 5, (2,) * 5, (3,) * 5)
EVERYONE = range(q.N_CLIENTS)
INNER, OUTER = [3, 1, 2, 4, 1], [2, 3, 1, 1, 2]  # τ_i
ALPHA, BETA, STEP = 0.08, 0.12, 0.2  # of x, of y, and 1/ℓ
STEPS = {"upper_step": ALPHA, "lower_step": BETA}


def series(hessian: np.ndarray, b: Vector, terms: int, step: float = STEP) -> Vector:
    """step·Σ_{k<terms} (I − step·H)^k b."""
    return step * sum(np.linalg.matrix_power(np.eye(len(b)) - step * hessian, k) @ b for k in range(terms))


def joint(problem: Any, cohort: Sequence[int], x: Vector, y: Vector) -> tuple[Any, ...]:
    """The cohort's mean f_x, f_y, ∇²_y g and ∇²_xy g."""
    parts = (problem.f_x, problem.f_y, problem.g_yy, problem.g_xy)
    return tuple(mean(problem, cohort, [part(i, x, y) for i in cohort]) for part in parts)


def noises(rounds: int, seed: int) -> list[Any]:
    """The key of each round of a run."""
    root = jax.random.key(seed)
    return [jax.random.split(jax.random.fold_in(root, t + 1))[1] for t in range(rounds)]


# FedMBO.

MBO = {"lower_rounds": 2, "neumann_terms": 4, "hessian_step": STEP}


def fedmbo(problem: Any, n: int, p: int, rounds: int, seed: int) -> Iterator[tuple[Vector, Vector]]:
    """Alg. 1 and 2 of Huang et al.; cohorts, orders and counts are replayed from the keys."""

    def fresh(key: Any) -> tuple[list[int], list[int]]:
        who, _, order = jax.random.split(key, 3)
        return [int(i) for i in sample_cohort(who, n, p)], [int(i) for i in jax.random.permutation(order, p)]

    x, y = q.INIT
    yield x, y
    for noise in noises(rounds, seed):
        lower, upper = jax.random.split(noise)
        for t in range(MBO["lower_rounds"]):
            ids, _ = fresh(jax.random.fold_in(lower, t))
            y = y - BETA * np.mean([problem.g_y(i, x, y) for i in ids], axis=0)
        k0, k1, k2, k3 = jax.random.split(upper, 4)
        counts = [int(c) for c in jax.random.randint(k0, (p,), 0, MBO["neumann_terms"])]
        slots = [
            (MBO["neumann_terms"] * STEP * problem.f_y(i, x, y), c) for i, c in zip(fresh(k1)[0], counts, strict=True)
        ]
        for l in range(1, max(counts) + 1):
            ids, order = fresh(jax.random.fold_in(k2, l - 1))
            slots = [slots[j] for j in order]
            for j, i in enumerate(ids):
                vector, count = slots[j]
                if l <= count:
                    slots[j] = vector - STEP * problem.g_yy(i, x, y) @ vector, count
        ids, order = fresh(k3)
        h = [problem.f_x(i, x, y) - problem.g_xy(i, x, y) @ slots[j][0] for i, j in zip(ids, order, strict=True)]
        x = x - ALPHA * np.mean(h, axis=0)
        yield x, y


def fedmbo_run(rounds: int, seed: int = 14, cohort: int = 3, **how: Any) -> tuple[rk.Run, list[Any], np.ndarray]:
    """A run, what the transcription gives, and the N_j of all rounds."""
    method = rk.FedMBO(**STEPS, **MBO)
    run = rk.solve(q.BILEVEL, EQUAL_CLIENTS, method, q.INIT, rounds, cohort=cohort, seed=seed, **how)
    keys = [jax.random.split(jax.random.split(noise)[1], 4)[0] for noise in noises(rounds, seed)]
    counts = np.array([jax.random.randint(key, (cohort,), 0, MBO["neumann_terms"]) for key in keys])
    return run, list(fedmbo(EQUAL_OURS, q.N_CLIENTS, cohort, rounds, seed)), counts


def test_fedmbo_equals_the_transcription() -> None:
    """Also: as many exchanges as the largest N_j asks for, and as many products as all of them together."""
    seen: list[Any] = []
    look = lambda x, y: seen.append((np.array(x), np.array(y))) or {}
    run, expected, counts = fedmbo_run(6, evaluate=look, every=1)
    q.assert_same(seen, expected)
    assert np.diff(run.history["exchanges"]).tolist() == (2 + 2 + counts.max(axis=1)).tolist()
    assert np.diff(run.history["products"]).tolist() == (counts.sum(axis=1) + 3).tolist()


@pytest.mark.slow
def test_fedmbo_on_both_engines() -> None:
    (here, expected, counts), (there, _, _) = fedmbo_run(1), fedmbo_run(1, engine=rk.Federation())
    assert counts[0].max() > counts[0].min()  # one slot is done before another
    np.testing.assert_allclose(there.x, expected[1][0], rtol=1e-10)
    ledger = lambda run: run.history.drop(columns="seconds")
    assert ledger(here).equals(ledger(there))


X, Y = jnp.array([0.3, -1.0, 0.7]), jnp.array([1.0, -0.5, 0.2, 0.4])


@pytest.mark.slow
def test_fedmbo_estimates_the_global_series() -> None:
    """The mean is the N-term series of the mean Hessian, not the mean of the clients' series, and not N + 1 terms."""
    task = rk.tasks.quadratic(clients=4, samples=2, noise=0.1, seed=2)
    x, y = np.asarray(X), np.asarray(Y)

    def target(closed: Solution, terms: int) -> Vector:
        p = series(closed.A, closed.C @ y - closed.c + closed.E.T @ x, terms, 0.1)
        return closed.D @ x - closed.d + closed.E @ y + closed.B.T @ p

    def alone(i: int) -> Solution:
        held = task.clients.client_data(i)
        return Solution(**{name: rows.mean(axis=0) for name, rows in {**held["lower"][0], **held["upper"][0]}.items()})

    everyone, local = solution(task), np.mean([target(alone(i), 4) for i in range(4)], axis=0)
    method = rk.FedMBO(neumann_terms=4, hessian_step=0.1)

    def one(key: Any) -> Any:
        fed = EvaluatedFed(task.problem, task.clients, jnp.arange(2))
        return method._hypergradient(fed, X, Y, key)

    samples = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 6000)))
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    off = lambda other: (np.abs(samples.mean(axis=0) - other) / error).max()
    assert off(target(everyone, 4)) < 4
    assert min(off(local), off(target(everyone, 3)), off(target(everyone, 5))) > 8


# FBO-AggITD.


def aggitd(problem: Any, n: int, chosen: int, x: Vector, y: Vector) -> tuple[Vector, Vector]:
    """One round of Alg. 1 of Xiao and Ji for a given Q, with the λ and the z^N of their formulas."""
    z = np.zeros_like(y)
    for t in range(n + 1):
        if t == chosen:
            z = mean(problem, EVERYONE, [problem.f_y(i, x, y) for i in EVERYONE])
        elif t > chosen:
            z = mean(problem, EVERYONE, [z - STEP * problem.g_yy(i, x, y) @ z for i in EVERYONE])
        if t < n:
            anchor = mean(problem, EVERYONE, [problem.g_y(i, x, y) for i in EVERYONE])
            ends = []
            for i in EVERYONE:
                own = y
                for _ in range(INNER[i]):
                    own = own - BETA / INNER[i] * (problem.g_y(i, x, own) - problem.g_y(i, x, y) + anchor)
                ends.append(own)
            y = mean(problem, EVERYONE, ends)
    p = STEP * (n + 1) * z
    h = mean(problem, EVERYONE, [problem.f_x(i, x, y) - problem.g_xy(i, x, y) @ p for i in EVERYONE])
    ends = []
    for i in EVERYONE:
        own = x
        for _ in range(OUTER[i]):
            own = own - ALPHA / OUTER[i] * (problem.f_x(i, own, y) - problem.f_x(i, x, y) + h)
        ends.append(own)
    return mean(problem, EVERYONE, ends), y


def test_aggitd_equals_the_transcription_for_one_q_in_each_round() -> None:
    method = rk.AggITD(**STEPS, lower_rounds=2, lower_local_steps=INNER, upper_local_steps=OUTER, hessian_step=STEP)
    drawn: Counter[int] = Counter()
    for before, after in itertools.pairwise(q.trajectory(q.BILEVEL, CLIENTS, method, q.INIT, 12)):
        ways = [aggitd(OURS, 2, chosen, *before) for chosen in range(3)]
        fits = [chosen for chosen, way in enumerate(ways) if np.allclose(after[0], way[0], rtol=0, atol=1e-10)]
        assert len(fits) == 1, "Q is none of these, or not to be told from another"
        np.testing.assert_allclose(after[1], ways[0][1], rtol=1e-10, atol=1e-10)
        drawn[fits[0]] += 1
    assert set(drawn) == {0, 1, 2}


@pytest.mark.slow
def test_aggitd_at_the_solution_is_unbiased_up_to_the_length_of_its_series() -> None:
    """Averaged over Q, h is the hypergradient with N + 1 terms, which vanishes at the solution as N grows."""
    task, n = rk.tasks.quadratic(clients=3, seed=2), 20
    closed = solution(task)
    best = closed.x, closed.y(closed.x)
    method = rk.AggITD(upper_step=1.0, lower_step=0.1, lower_rounds=n, hessian_step=STEP)

    def one(key: Any) -> Any:
        fed = EvaluatedFed(task.problem, task.clients, jnp.arange(3))
        state = method.init(fed, *map(jnp.asarray, best), key)
        chosen = jax.random.randint(jax.random.split(key, 5)[0], (), 0, n + 1)
        return chosen, state.x - method.round(fed, state, key).x

    chosen, h = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 20 * n))
    _, first = np.unique(np.asarray(chosen), return_index=True)
    assert len(first) == n + 1
    b = closed.C @ best[1] - closed.c + closed.E.T @ best[0]
    with_terms = lambda terms: (
        closed.D @ best[0] - closed.d + closed.E @ best[1] + closed.B.T @ series(closed.A, b, terms)
    )
    np.testing.assert_allclose(np.asarray(h)[first].mean(axis=0), with_terms(n + 1), rtol=0, atol=1e-10)
    sizes = [np.linalg.norm(with_terms(terms)) for terms in (6, n, n + 1, n + 2, 51)]
    assert all(size < 0.9 * larger for larger, size in itertools.pairwise(sizes))  # so N + 1 is told from N and N + 2
    assert sizes[-1] < 1e-8 < 1e-5 < sizes[0]


# Local momentum.

TERMS = 3  # of the summed series: one more in all
LOCAL = {**STEPS, "neumann": "sum", "neumann_terms": TERMS, "hessian_step": STEP}
MOMENTUM = 0.3


def estimates(i: int, x: Vector, y: Vector) -> tuple[Vector, Vector]:
    """The client's own hypergradient, and its lower gradient."""
    p = series(OURS.g_yy(i, x, y), OURS.f_y(i, x, y), TERMS + 1)
    return OURS.f_x(i, x, y) - OURS.g_xy(i, x, y) @ p, OURS.g_y(i, x, y)


def gao(reduced: bool, who: Sequence[Sequence[int]], tau: Sequence[int]) -> Iterator[tuple[Vector, Vector]]:
    """LocalBSGM, or LocalBSGVR if `reduced`. A client that sat out takes the mean of the others' last points."""
    (x, y), u, v = q.INIT, None, None
    last: dict[int, tuple[int, Vector, Vector]] = {}
    yield x, y
    for t, cohort in enumerate(who):
        ends = []
        for i in cohort:
            x_i, y_i, u_i, v_i = x, y, u, v
            _, x_old, y_old = last[i] if i in last and last[i][0] == t - 1 else (t, x, y)
            if u is not None and (i not in last or last[i][0] != t - 1):
                x_old, y_old = x + ALPHA * u, y + BETA * v
            for _ in range(tau[i]):
                new_u, new_v = estimates(i, x_i, y_i)
                if u_i is None:
                    u_i, v_i = new_u, new_v
                elif reduced:
                    old_u, old_v = estimates(i, x_old, y_old)
                    u_i, v_i = new_u + (1 - MOMENTUM) * (u_i - old_u), new_v + (1 - MOMENTUM) * (v_i - old_v)
                else:
                    u_i, v_i = (1 - MOMENTUM) * u_i + MOMENTUM * new_u, (1 - MOMENTUM) * v_i + MOMENTUM * new_v
                x_old, y_old = x_i, y_i
                x_i, y_i = x_i - ALPHA * u_i, y_i - BETA * v_i
            last[i] = t, x_old, y_old
            ends.append((x_i, y_i, u_i, v_i))
        x, y, u, v = (mean(OURS, cohort, [end[k] for end in ends]) for k in range(4))
        yield x, y


@pytest.mark.parametrize("reduced", [False, True])
def test_local_momentum_equals_the_transcription(reduced: bool) -> None:
    method = (rk.LocalBSGVR if reduced else rk.LocalBSGM)(**LOCAL, momentum=MOMENTUM, local_steps=OUTER)
    who = q.cohorts(q.N_CLIENTS, 3, 6, seed=5)
    stays = [set(a) & set(b) for a, b in itertools.pairwise(who)]
    assert any(stays)
    assert any(set(b) - set(a) for a, b in itertools.pairwise(who))
    got = q.trajectory(q.BILEVEL, CLIENTS, method, q.INIT, 6, cohort=3, seed=5)
    q.assert_same(got, list(gao(reduced, who, OUTER)))


def adafbio(rounds: int, steps: int) -> Iterator[tuple[Vector, Vector]]:
    x, y = q.INIT
    delta, m, c_upper, c_lower, decay, floor = 1.5, 4.0, 0.9, 0.6, 0.8, 0.3
    first = [estimates(i, x, y) for i in EVERYONE]
    w, v = (mean(OURS, EVERYONE, [e[k] for e in first]) for k in range(2))
    a, b = (1 - decay) * w**2, (1 - decay) * np.linalg.norm(v)
    yield x, y
    for t in range(rounds):
        ends = []
        for i in EVERYONE:
            x_i, y_i, w_i, v_i = x, y, w, v
            for s in range(steps):
                eta = delta / (m + steps * t + s) ** (1 / 3)
                x_new = x_i - ALPHA * eta * w_i / (np.sqrt(a) + floor)
                y_new = y_i - BETA * eta * v_i / (b + floor)
                (new_w, new_v), (old_w, old_v) = estimates(i, x_new, y_new), estimates(i, x_i, y_i)
                w_i = new_w + (1 - c_upper * eta**2) * (w_i - old_w)
                v_i = new_v + (1 - c_lower * eta**2) * (v_i - old_v)
                x_i, y_i = x_new, y_new
            ends.append((x_i, y_i, w_i, v_i))
        x, y, w, v = (mean(OURS, EVERYONE, [end[k] for end in ends]) for k in range(4))
        a, b = decay * a + (1 - decay) * w**2, decay * b + (1 - decay) * np.linalg.norm(v)
        yield x, y


def test_adafbio_equals_the_transcription() -> None:
    method = rk.AdaFBiO(**LOCAL, local_steps=3, delta=1.5, offset=4.0, c_upper=0.9, c_lower=0.6, decay=0.8, floor=0.3)
    q.assert_same(q.trajectory(q.BILEVEL, CLIENTS, method, q.INIT, 5), list(adafbio(5, 3)))


@pytest.mark.slow
def test_storm_lowers_the_variance() -> None:
    """At the same batch size LocalBSGVR's estimate scatters less than the plain one, which is that with momentum 1."""
    task = rk.tasks.quadratic(clients=1, samples=20, noise=0.5, seed=1, replace=True)
    closed, (x, y) = solution(task), (np.asarray(X), np.asarray(Y))
    p = series(closed.A, closed.C @ y - closed.c + closed.E.T @ x, 2)
    truth = closed.D @ x - closed.d + closed.E @ y + closed.B.T @ p
    slow = {
        "upper_step": 1e-6,
        "lower_step": 1e-6,
        "neumann": "sum",
        "neumann_terms": 1,
        "hessian_step": STEP,
        "batch_size": 2,
    }

    def squared_error(momentum: Any, key: Any) -> Any:
        method = rk.LocalBSGVR(**slow, momentum=momentum, local_steps=40)
        memory = jax.tree.map(lambda a: jnp.asarray(a)[None], method.memory(X, Y))
        fed = EvaluatedFed(task.problem, task.clients, jnp.arange(1), memory)
        return jnp.sum((method.round(fed, method.init(fed, X, Y, key), key).u - truth) ** 2)

    keys = jax.random.split(jax.random.key(0), 300)
    many = jax.jit(jax.vmap(squared_error, (None, 0)))
    plain, reduced = np.asarray(many(1.0, keys)), np.asarray(many(0.1, keys))
    bar = lambda errors: 3 * errors.std(ddof=1) / np.sqrt(len(errors))
    assert reduced.mean() + bar(reduced) < 0.2 * (plain.mean() - bar(plain))  # 0.1/(2 − 0.1), where nothing moves


# Comm-FedBiO.


def commfedbio(
    kind: str, feedback: bool, who: Sequence[Sequence[int]], seed: int, k: int, terms: int
) -> Iterator[tuple[Vector, Vector]]:
    """Li, Pei and Huang; the places of random-k and the sketches are replayed from the keys."""
    (x, y), size = q.INIT, q.Y_DIM
    u, errors = np.zeros(size), np.zeros((q.N_CLIENTS, size))
    yield x, y
    for cohort, noise in zip(who, noises(len(who), seed), strict=True):
        _, solver, _ = jax.random.split(noise, 3)
        ends = []
        for i in cohort:
            own = y
            for _ in range(INNER[i]):
                own = own - BETA * OURS.g_y(i, x, own)
            ends.append(own)
        y = mean(OURS, cohort, ends)
        if kind == "sketch":
            _, k1, k2 = jax.random.split(solver, 3)
            s1, s2 = np.asarray(jax.random.normal(k1, (k, size))), np.asarray(jax.random.normal(k2, (2 * k, size)))
            _, f_y, hessian, _ = joint(OURS, cohort, x, y)
            u = s1.T @ np.linalg.lstsq(s2 @ hessian @ s1.T, s2 @ f_y)[0]
        else:
            for step in range(terms):
                draw = jax.random.split(jax.random.fold_in(solver, step))[1]
                sent = []
                for i in cohort:
                    whole = STEP * (OURS.g_yy(i, x, y) @ u - OURS.f_y(i, x, y)) + errors[i]
                    if kind == "top":
                        places = np.argsort(-np.abs(whole))[:k]
                    else:
                        places = np.asarray(jax.random.permutation(draw, size))[:k]
                    message = np.zeros(size)
                    message[places] = whole[places] * (1 if feedback or kind == "top" else size / k)
                    if feedback:
                        errors[i] = whole - message
                    sent.append(message)
                u = u - mean(OURS, cohort, sent)
        own = [OURS.f_x(i, x, y) - OURS.g_xy(i, x, y) @ u for i in cohort]
        x = x - ALPHA * mean(OURS, cohort, own)
        yield x, y


@pytest.mark.parametrize(
    ("kind", "feedback"),
    [("top", True), *(pytest.param(*own, marks=pytest.mark.slow) for own in (("random", False), ("sketch", True)))],
)
def test_commfedbio_equals_the_transcription(kind: Any, feedback: bool) -> None:
    method = rk.CommFedBiO(
        **STEPS, lower_local_steps=INNER, linear_step=STEP, neumann_terms=3, compress=kind, shrink=2,
        error_feedback=feedback,
    )  # fmt: skip
    who = q.cohorts(q.N_CLIENTS, 3, 5, seed=2)
    got = q.trajectory(q.BILEVEL, CLIENTS, method, q.INIT, 5, cohort=3, seed=2)
    q.assert_same(got, list(commfedbio(kind, feedback, who, 2, k=2, terms=3)))


@pytest.mark.slow
def test_compression_saves_bytes_and_top_k_needs_error_feedback() -> None:
    """With heterogeneous clients it is exact without compression; top-k needs error feedback."""
    task = rk.tasks.quadratic(clients=4, lower_dim=6, heterogeneity=2.0, seed=5)
    rounds, terms = 3000, 3

    def run(**given: Any) -> rk.Run:
        words = {"upper_step": 0.05, "lower_step": 0.15, "neumann_terms": terms, "shrink": 6} | given
        method = rk.CommFedBiO(**words)
        return rk.solve(task.problem, task.clients, method, task.init, rounds, evaluate=task.evaluate, every=600)

    falling = lambda t: 0.15 / (1 + t / 60)
    whole, top = run(compress="none", linear_step=0.15), run(linear_step=falling)
    without = run(linear_step=falling, error_feedback=False)
    off = lambda run: np.sqrt(run.history["distance"].iloc[-3:])
    assert off(whole).max() < 1e-8
    assert off(top).max() < 0.05 * off(without).min()
    assert off(without).min() > 0.1
    up = lambda run: run.history["bytes_up"].iloc[-1] / rounds / 4
    others = 8 * 6 + 8 * 3  # y and h
    assert [up(each) - others for each in (whole, top)] == [terms * 8 * 6, terms * (8 + 4)]  # one entry and its place


# One machine.


def test_stocbio_is_exact_on_unlike_clients() -> None:
    task = rk.tasks.quadratic(clients=4, seed=0)
    method = rk.StocBiO(upper_step=0.05, lower_step=0.2, lower_rounds=5, neumann_terms=80, hessian_step=STEP)
    run = rk.solve(task.problem, task.clients, method, task.init, 600, evaluate=task.evaluate, every=600)
    assert float(run.history["distance"].iloc[-1]) < 1e-16


def synchronous(
    x: Vector, y: Vector, steps: int, terms: int | None, count: int | None, problem: Any = OURS
) -> tuple[Vector, Vector]:
    """T steps on y, one on x: the summed series of `terms` + 1 terms, or the random one with N' = `count` of N = 4."""
    everyone = range(len(problem.p))
    for _ in range(steps):
        y = y - BETA * mean(problem, everyone, [problem.g_y(i, x, y) for i in everyone])
    f_x, f_y, hessian, mixed = joint(problem, everyone, x, y)
    if terms is not None:
        p = series(hessian, f_y, terms + 1)
    else:
        p = 4 * STEP * np.linalg.matrix_power(np.eye(len(y)) - STEP * hessian, count) @ f_y  # type: ignore[arg-type]
    return x - ALPHA * (f_x - mixed @ p), y


@pytest.mark.slow
def test_alset_takes_one_of_the_n_products() -> None:
    method = rk.ALSET(**STEPS, lower_rounds=2, neumann_terms=4, hessian_step=STEP)
    drawn: Counter[int] = Counter()
    for before, after in itertools.pairwise(q.trajectory(q.BILEVEL, CLIENTS, method, q.INIT, 16)):
        ways = [synchronous(*before, 2, None, count) for count in range(5)]
        same = lambda way: np.allclose(np.hstack(after), np.hstack(way), rtol=0, atol=1e-10)
        fits = [count for count, way in enumerate(ways) if same(way)]
        assert len(fits) == 1
        drawn[fits[0]] += 1
    assert set(drawn) == {0, 1, 2, 3}


@pytest.mark.slow
def test_two_timescales_are_schedules_and_stocbio_sums() -> None:
    upper, lower = lambda k: ALPHA * (k + 1.0) ** -0.6, lambda k: BETA * (k + 1.0) ** -0.4
    method = rk.TTSA(upper_step=upper, lower_step=lower, neumann="sum", neumann_terms=3, hessian_step=STEP)
    x, y = q.INIT
    expected = [(x, y)]
    for k in range(6):
        y = y - lower(k) * mean(OURS, EVERYONE, [OURS.g_y(i, x, y) for i in EVERYONE])
        moved, _ = synchronous(x, y, 0, 3, None)
        x = x + (moved - x) * upper(k) / ALPHA
        expected.append((x, y))
    q.assert_same(q.trajectory(q.BILEVEL, CLIENTS, method, q.INIT, 6), expected)
    assert rk.StocBiO().neumann == "sum"
    assert rk.ALSET().neumann == rk.BSA().neumann == rk.TTSA().neumann == "random"


def test_alset_is_fednest_with_one_client_and_one_local_step() -> None:
    """The transcriptions of the two, which the library's classes equal, on one client."""
    ours, _ = q.bilevel(weights=[1.0], lower=(2,), upper=(3,))
    letters = golden.Nest(ALPHA, BETA, 2, [1], [1], TERMS, STEP)
    fednest = list(golden.nest("FedNest", ours, letters, q.INIT, golden.everyone(ours, 8)))
    q.assert_same([synchronous(*before, 2, TERMS, None, ours) for before in fednest[:-1]], fednest[1:])


@pytest.mark.parametrize("plain", [False, True])
def test_mrbo_equals_the_transcription(plain: bool) -> None:
    """With momentum 1 (where c·η² is cut off) it is the plain single loop."""
    c_upper, c_lower = (1e9, 1e9) if plain else (0.8, 0.5)
    method = rk.MRBO(
        **STEPS, delta=1.5, offset=4.0, c_upper=c_upper, c_lower=c_lower, neumann_terms=TERMS, hessian_step=STEP
    )

    def direction(x: Vector, y: Vector) -> tuple[Vector, Vector]:
        f_x, f_y, hessian, mixed = joint(OURS, EVERYONE, x, y)
        return f_x - mixed @ series(hessian, f_y, TERMS + 1), mean(
            OURS, EVERYONE, [OURS.g_y(i, x, y) for i in EVERYONE]
        )

    x, y = q.INIT
    (v, u), before = direction(x, y), None
    expected = [(x, y)]
    for k in range(6):
        now = direction(x, y)
        if k == 0 or plain:
            v, u = now
        else:
            last = (1.5 / (4 + k - 1) ** (1 / 3)) ** 2
            v = now[0] + (1 - c_upper * last) * (v - before[0])  # type: ignore[index]
            u = now[1] + (1 - c_lower * last) * (u - before[1])  # type: ignore[index]
        before = now
        eta = 1.5 / (4 + k) ** (1 / 3)
        x, y = x - ALPHA * eta * v, y - BETA * eta * u
        expected.append((x, y))
    q.assert_same(q.trajectory(q.BILEVEL, CLIENTS, method, q.INIT, 6), expected)
