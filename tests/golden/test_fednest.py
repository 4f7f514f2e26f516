"""FedNest and its variants against the NumPy transcription: full batches, unequal clients, weights and local steps."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import quadratics as q
import transcription as golden

import rookery as rk
from rookery.data.rows import View

METHODS = [rk.FedNest, rk.LFedNest, rk.FedNestSGD, rk.LFedNestSVRG, rk.LFedNestNonAlt]
INNER, OUTER = [3, 1, 2, 4, 1], [2, 3, 1, 1, 2]  # τ_i
PROBLEMS: dict[str, Any] = {
    "bilevel": (q.BILEVEL, *q.bilevel()),
    "minimax": (q.MINIMAX, *q.minimax()),
    "compositional": (q.COMPOSITIONAL, *q.compositional()),
}


def pair(cls: type, **given: Any) -> tuple[Any, golden.Nest]:
    """The same hyperparameters for the library, in words, and for the transcription, in letters."""
    words: dict[str, Any] = {
        "upper_step": 0.08,
        "lower_step": 0.12,
        "lower_rounds": 2,
        "lower_local_steps": INNER,
        "upper_local_steps": OUTER,
        "neumann": "sum",
        "neumann_terms": 3,
        "hessian_step": 0.2,
        "scale_steps": False,
    } | given
    each = lambda steps: [steps] * q.N_CLIENTS if isinstance(steps, int) else steps
    letters = golden.Nest(
        alpha=words["upper_step"],
        beta=words["lower_step"],
        T=words["lower_rounds"],
        tau_inner=each(words["lower_local_steps"]),
        tau_outer=each(words["upper_local_steps"]),
        N=words["neumann_terms"],
        inverse_l=words["hessian_step"],
        neumann=words["neumann"],
        scaled=words["scale_steps"],
    )
    return cls(**words), letters


# The local method on both kinds (compositional problems, and FedNest: below); the rest is slow.
EACH = [
    pytest.param(cls, kind, marks=() if cls is rk.LFedNest and kind != "compositional" else pytest.mark.slow)
    for cls in METHODS
    for kind in PROBLEMS
]


@pytest.mark.parametrize(("cls", "kind"), EACH)
def test_equals_the_transcription(cls: type, kind: str) -> None:
    problem, ours, clients = PROBLEMS[kind]
    algorithm, letters = pair(cls)
    letters = replace(letters, kind=kind, project=q.project if kind == "minimax" else letters.project)
    expected = list(golden.nest(cls.__name__, ours, letters, q.INIT, golden.everyone(ours, 12)))
    q.assert_same(q.trajectory(problem, clients, algorithm, q.INIT, 12), expected)
    if kind == "minimax":  # the projection was at work, so a missing one would show
        assert any(np.isclose(np.linalg.norm(x), q.RADIUS) for x, _ in expected[1:])


@pytest.mark.slow
@pytest.mark.parametrize("cls", [rk.FedNest, pytest.param(rk.LFedNest, marks=pytest.mark.slow)])
def test_conjugate_gradients_and_scaled_steps(cls: type) -> None:
    # Two iterations in four dimensions: not yet the exact solution, so their number shows.
    problem, ours, clients = PROBLEMS["bilevel"]
    algorithm, letters = pair(cls, neumann="cg", neumann_terms=2, scale_steps=True, upper_step=0.2, lower_step=0.3)
    expected = list(golden.nest(cls.__name__, ours, letters, q.INIT, golden.everyone(ours, 12)))
    q.assert_same(q.trajectory(problem, clients, algorithm, q.INIT, 12), expected)


def test_a_cohort_is_averaged_by_its_own_weights() -> None:
    problem, ours, clients = PROBLEMS["bilevel"]
    algorithm, letters = pair(rk.FedNest)
    who = q.cohorts(q.N_CLIENTS, 2, 15, seed=7)
    assert len({tuple(cohort) for cohort in who}) > 3
    expected = list(golden.nest("FedNest", ours, letters, q.INIT, who))
    q.assert_same(q.trajectory(problem, clients, algorithm, q.INIT, 15, cohort=2, seed=7), expected)


@pytest.mark.slow
def test_equal_clients_and_plain_steps() -> None:
    """One data set of the same size each, int local steps: the library then takes slices, without masks."""
    ours, clients = q.bilevel(weights=[1.0] * 5, lower=(3,) * 5, upper=(2,) * 5)
    algorithm, letters = pair(rk.FedNest, lower_rounds=1, lower_local_steps=3, upper_local_steps=2)
    expected = list(golden.nest("FedNest", ours, letters, q.INIT, golden.everyone(ours, 12)))
    q.assert_same(q.trajectory(q.BILEVEL, clients, algorithm, q.INIT, 12), expected)


@pytest.mark.slow
def test_minimax_in_its_bilevel_form() -> None:
    """There the implicit part is not left out: it is −∇²_xy g [∇²_y g]⁻¹∇_y f with g = −f."""
    _, ours, clients = PROBLEMS["minimax"]
    algorithm, letters = pair(rk.FedNest)
    letters = replace(letters, project=q.project)
    expected = list(golden.nest("FedNest", ours, letters, q.INIT, golden.everyone(ours, 12)))
    q.assert_same(q.trajectory(q.MINIMAX.as_bilevel(), clients, algorithm, q.INIT, 12), expected)


@pytest.mark.slow
def test_compositional_in_its_bilevel_form() -> None:
    _, ours, clients = PROBLEMS["compositional"]
    algorithm, letters = pair(rk.FedNest, hessian_step=0.5)
    expected = list(golden.nest("FedNest", ours, letters, q.INIT, golden.everyone(ours, 12)))
    q.assert_same(q.trajectory(q.COMPOSITIONAL.as_bilevel(), clients, algorithm, q.INIT, 12), expected)


@pytest.mark.parametrize("i", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, q.N_CLIENTS))])
def test_compositional_local_steps_are_exactly_x_minus_alpha_tau_h(i: int) -> None:
    """With no loss beside it the direct gradient is 0, and so nothing is corrected locally."""
    weights = np.eye(q.N_CLIENTS)[i]  # all the weight on client i, which isolates its steps
    ours, clients = q.compositional(weights, extra=False)
    algorithm, letters = pair(rk.FedNest, lower_rounds=1)
    (x, _), (moved, y) = q.trajectory(q.COMPOSITIONAL_ALONE, clients, algorithm, q.INIT, 1)
    h = ours.jacobian(i, x).T @ ours.outer_gradient(i, y)
    np.testing.assert_allclose(moved, x - letters.alpha * OUTER[i] * h, rtol=1e-12, atol=1e-13)
    assert np.abs(h).min() > 1e-3


def test_compositional_start_without_y() -> None:
    """y may be left out, and then starts at zero."""
    ours, clients = q.compositional(extra=False)
    algorithm, letters = pair(rk.FedNest, lower_rounds=1)
    letters = replace(letters, kind="compositional")
    start = (q.INIT[0], np.zeros(q.Y_DIM))
    expected = list(golden.nest("FedNest", ours, letters, start, golden.everyone(ours, 12)))
    q.assert_same(q.trajectory(q.COMPOSITIONAL_ALONE, clients, algorithm, (q.INIT[0], None), 12), expected)


@pytest.mark.slow
def test_random_neumann_takes_one_of_the_n_products() -> None:
    """Each round's x is that of exactly one N' in 0..N−1, and over the rounds all of them occur."""
    problem, ours, clients = PROBLEMS["bilevel"]
    algorithm, letters = pair(rk.FedNest, neumann="random", neumann_terms=4, upper_step=0.02)
    everyone = range(q.N_CLIENTS)
    drawn = Counter()
    for (x, _), (moved, y) in itertools.pairwise(q.trajectory(problem, clients, algorithm, q.INIT, 20)):
        ways = {n: golden.fed_out(ours, replace(letters, draw=lambda: n), everyone, x, y) for n in range(6)}
        fits = [n for n, way in ways.items() if np.allclose(moved, way, rtol=0, atol=1e-10)]
        assert len(fits) == 1, "N' is none of these, or not to be told from another"
        drawn[fits[0]] += 1
    assert set(drawn) == {0, 1, 2, 3}


@pytest.mark.slow
def test_light_random_neumann_is_redrawn_by_every_client_and_local_step() -> None:
    sizes, steps = (2, 3), [1, 2]
    ours, clients = q.bilevel(weights=[0.4, 0.6], lower=sizes, upper=sizes)
    algorithm, letters = pair(
        rk.LFedNest, neumann="random", lower_local_steps=1, upper_local_steps=steps, lower_rounds=1, upper_step=0.02
    )
    letters = replace(letters, tau_inner=[1, 1], tau_outer=steps)
    seen = q.trajectory(q.BILEVEL, clients, algorithm, q.INIT, 20)
    places = [(0, 0), (1, 0), (1, 1)]  # (client, local step)
    found = []
    for before, after in itertools.pairwise(seen):
        fits = []
        for draws in itertools.product(range(3), repeat=3):
            table = dict(zip(places, draws, strict=True))
            way = golden.NEST["LFedNest"](ours, replace(letters, draw=lambda i, v: table[i, v]), range(2), *before)
            if np.allclose(after[0], way[0], rtol=0, atol=1e-10):
                fits.append(draws)
        assert len(fits) == 1
        found += fits
    for k, place in enumerate(places):
        assert {draws[k] for draws in found} == {0, 1, 2}, place
    for a, b in itertools.combinations(range(3), 2):
        assert any(draws[a] != draws[b] for draws in found), "one draw serves two places"


@pytest.mark.slow
def test_data_in_pieces() -> None:
    ours, clients = q.bilevel(lower=q.ONE_LARGE_CLIENT)
    assert clients.lower.chunk is not None
    algorithm, letters = pair(rk.FedNest)
    expected = list(golden.nest("FedNest", ours, letters, q.INIT, golden.everyone(ours, 12)))
    q.assert_same(q.trajectory(q.BILEVEL, clients, algorithm, q.INIT, 12), expected)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [rk.FedNest, pytest.param(rk.LFedNest, marks=pytest.mark.slow)])
def test_hessian_step_auto(cls: type) -> None:
    """ℓ is twice the norm of a power iteration's vector, which goes on by one product a round, at its (x, y⁺)."""
    problem, ours, clients = PROBLEMS["bilevel"]
    algorithm, letters = pair(cls, hessian_step="auto")
    probe = np.asarray(rk.solve(problem, clients, algorithm, q.INIT, 0).state.probe)
    everyone = range(q.N_CLIENTS)
    sharpest = np.linalg.eigvalsh(golden.mean(ours, everyone, [ours.g_yy(i, *q.INIT) for i in everyone]))[-1]
    assert 0.9 * sharpest < np.linalg.norm(probe) <= sharpest * (1 + 1e-12)

    x, y = q.INIT
    expected = [(x, y)]
    for _ in range(10):
        inner = golden.fed_inn if cls is rk.FedNest else golden.lfed_inn
        for _ in range(letters.T):
            y = inner(ours, letters, everyone, x, y)
        size = np.linalg.norm(probe)
        hessians = [ours.g_yy(i, x, y) for i in everyone]
        if cls is rk.FedNest:
            moved = golden.fed_out(ours, replace(letters, inverse_l=1 / (2 * size)), everyone, x, y)
        else:  # a client whose own Hessian is sharper, by five products from the same vector, takes a smaller step
            ends = []
            for i in everyone:
                own = probe
                for _ in range(5):
                    own = hessians[i] @ own / np.linalg.norm(own)
                inverse_l = 1 / (2 * max(size, np.linalg.norm(own)))
                ends.append(golden.local_x(ours, replace(letters, inverse_l=inverse_l), i, x, y))
            moved = golden.mean(ours, everyone, ends)
        probe = golden.mean(ours, everyone, [hessian @ probe / size for hessian in hessians])
        x = moved
        expected.append((x, y))
    q.assert_same(q.trajectory(problem, clients, algorithm, q.INIT, 10), expected)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [rk.FedNest, rk.LFedNest, rk.LFedNestNonAlt])
def test_no_minibatch_serves_twice_but_svrgs_pairs(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every oracle call has its own minibatch, except that the two gradients of SVRG share one."""
    drawn: Counter[tuple[Any, ...]] = Counter()

    def record(offset: Any, key: Any, step: Any) -> None:
        drawn[(int(offset), *key.tolist(), int(step))] += 1

    def spy(self: View, key: Any, size: int, step: Any, replace: bool, seen: Any = None) -> Any:
        jax.debug.callback(record, self.offset, jax.random.key_data(key), step)
        return self.all()  # which samples they are does not matter here, and these compile faster

    monkeypatch.setattr(View, "draw", spy)
    n, rounds, repeats, steps, terms = 2, 2, 2, 2, 2
    _, clients = q.bilevel(weights=[1.0] * n, lower=(2,) * n, upper=(2,) * n)
    algorithm, _ = pair(
        cls,
        batch_size=1,
        anchor_batch=1,
        lower_rounds=repeats,
        lower_local_steps=steps,
        upper_local_steps=steps,
        neumann_terms=terms,
    )
    problem = replace(q.BILEVEL)  # an object of its own: the spy must be traced, and stay in no other test's program
    rk.solve(problem, clients, algorithm, q.INIT, rounds)
    jax.effects_barrier()
    if cls is rk.FedNest:  # at the first local step SVRG's two gradients cancel
        twice = repeats * (steps - 1) + (steps - 1)
        alone = repeats + (1 + terms) + 2  # the anchors; p's first vector and the products; both parts of h
    else:
        twice = 0
        alone = repeats * steps + steps * (1 + terms + 1)  # a step on x has one ξ, the products and the mixed product
    expected = Counter({1: n * rounds * alone, 2: n * rounds * twice})
    assert Counter(drawn.values()) == +expected
