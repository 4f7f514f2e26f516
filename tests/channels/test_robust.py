"""Robust means: every rule against NumPy, what it tolerates, and what is refused."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.engines.federation import in_words
from rookery.language.channel import Bookkeeping, ChannelExchange
from rookery.theory.quadratic import solution

M, F = 9, 2
RNG = np.random.default_rng(0)
ROWS = ({"a": RNG.normal(size=(M, 2, 3)), "b": RNG.normal(size=(M, 1))}, RNG.normal(size=(M, 4)))
RADIUS = 1.5
LAST = ({"a": RNG.normal(size=(2, 3)), "b": RNG.normal(size=1)}, RNG.normal(size=4))


def exchange(rows: Any, state: Any, key: Any) -> ChannelExchange:
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), rows)
    return ChannelExchange("x, y", "mean", shapes, state=state, key=key)


@functools.partial(jax.jit, static_argnums=0)
def compiled(rule: Any, rows: Any, state: Any, key: Any, there: Any) -> Any:
    return rule.reduce(exchange(rows, state, key), rows, there / sum(there), there)


def reduced(rule: Any, rows: Any = ROWS, present: Any = None, state: Any = (), key: int = 0) -> Any:
    m = len(jax.tree.leaves(rows)[0])
    there = np.ones(m, bool) if present is None else present
    return jax.tree.map(np.asarray, compiled(rule, rows, state, jax.random.key(key), jnp.asarray(there)))


def flat(tree: Any, lead: bool = True) -> np.ndarray:
    leaves = [np.asarray(a) for a in jax.tree.leaves(tree)]
    return np.concatenate([a.reshape(len(a), -1) if lead else a.ravel() for a in leaves], axis=-1)


# The rules again, on the rows of one variable that count, of which f may be lies.


def trimmed(g: np.ndarray, f: int, last: Any) -> np.ndarray:
    columns = [sorted(column)[f : len(g) - f] for column in g.T]
    return np.array([sum(kept) / len(kept) for kept in columns])


def geometric(g: np.ndarray, f: int, last: Any) -> np.ndarray:
    v = np.median(g, axis=0)
    for _ in range(8):
        w = [1 / max(np.linalg.norm(row - v), 1e-6) for row in g]
        v = sum(a * row for a, row in zip(w, g, strict=True)) / sum(w)
    return v


def krum(keep: int) -> Callable[..., np.ndarray]:
    def one(g: np.ndarray, f: int, last: Any) -> np.ndarray:
        scores = []
        for j in range(len(g)):
            squares = sorted(np.sum((g[j] - g[k]) ** 2) for k in range(len(g)) if k != j)
            scores.append(sum(squares[: len(g) - f - 2]))
        return np.mean(g[np.argsort(scores)[:keep]], axis=0)

    return one


def centered(g: np.ndarray, f: int, last: np.ndarray) -> np.ndarray:
    v = last
    for _ in range(3):
        v = v + sum((row - v) * min(1, RADIUS / np.linalg.norm(row - v)) for row in g) / len(g)
    return v


def mixed(g: np.ndarray, f: int, last: Any) -> np.ndarray:
    near = [sorted(range(len(g)), key=lambda k, j=j: np.linalg.norm(g[j] - g[k]))[: len(g) - f] for j in range(len(g))]
    return trimmed(np.array([np.mean(g[some], axis=0) for some in near]), f, last)


RULES: dict[str, tuple[Any, Callable[..., np.ndarray]]] = {
    "median": (rk.median(), lambda g, f, last: np.median(g, axis=0)),
    "median of a number": (rk.median(F), lambda g, f, last: np.median(g, axis=0)),
    "trimmed mean": (rk.trimmed_mean(F), trimmed),
    "trimmed mean of a share": (rk.trimmed_mean(F / M), trimmed),
    "geometric median": (rk.geometric_median(F), geometric),
    "Krum": (rk.krum(F), krum(1)),
    "multi-Krum": (rk.krum(F, keep=3), krum(3)),
    "centered clipping": (rk.centered_clipping(RADIUS, F), centered),
    "nearest-neighbour mixing": (rk.nearest_neighbors(rk.trimmed_mean(F)), mixed),
    "buckets of one": (rk.bucketing(rk.trimmed_mean(F), 1), trimmed),
}
each_rule = pytest.mark.parametrize("name", RULES)


@each_rule
def test_equals_numpy_variable_by_variable(name: str) -> None:
    """A dict is one variable; a tuple's entries are variables of their own."""
    rule, again = RULES[name]
    state = LAST if "clipping" in name else ()
    result = reduced(rule, state=state)
    for part, rows, last in zip(result, ROWS, LAST, strict=True):
        np.testing.assert_allclose(flat(part, False), again(flat(rows), F, flat(last, False)), rtol=0, atol=1e-10)


@each_rule
def test_neither_absent_rows_nor_rows_that_are_not_finite_count(name: str) -> None:
    """A reply that is not finite is left out of its own variable, as one of the liars."""
    rule, again = RULES[name]
    rows = jax.tree.map(np.array, ROWS)
    rows[0]["a"][3, 1, 1], rows[0]["b"][4, 0] = np.nan, -np.inf
    rows[1][0] = 1e300  # absent
    present = np.arange(M) > 0
    state = LAST if "clipping" in name else ()
    if name in ("Krum", "multi-Krum"):  # eight replies tolerate two liars
        assert rule.least(F) <= M - 1
    result = reduced(rule, rows, present, state)
    kept, f = [1, 2, 5, 6, 7, 8], 0
    np.testing.assert_allclose(
        flat(result[0], False), again(flat(ROWS[0])[kept], f, flat(LAST[0], False)), rtol=0, atol=1e-10
    )
    np.testing.assert_allclose(result[1].ravel(), again(flat(ROWS[1])[1:], F, flat(LAST[1], False)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["trimmed mean", "Krum", "centered clipping"])
def test_more_replies_that_are_not_finite_than_a_rule_bears_end_the_run(name: str) -> None:
    rows = jax.tree.map(np.array, ROWS)
    rows[1][:3] = np.inf
    result = reduced(RULES[name][0], rows, state=LAST if "clipping" in name else ())
    assert np.isfinite(flat(result[0], False)).all()
    assert np.isnan(result[1]).all()


@each_rule
def test_huge_lies_in_single_precision_are_borne(name: str) -> None:
    """Their squares, and their differences, overflow."""
    rows = np.ones((M, 3), np.float32) + np.float32(0.01) * RNG.normal(size=(M, 3)).astype(np.float32)
    rows[:2] = [[3e38, -3e38, 3e38], [1e30, 1e30, 1e30]]
    rule = RULES[name][0]
    state = np.ones(3, np.float32) if "clipping" in name else ()
    result = reduced(rule, rows, state=state)
    assert result.dtype == np.float32
    assert np.max(np.abs(result - 1)) < (0.1 if "clipping" not in name else RADIUS)


def test_bucketing_takes_means_of_disjoint_groups() -> None:
    """The median of three means of two: for each key one of the 15 ways to pair six replies."""
    g = RNG.normal(size=(6, 1))

    def pairings(left: list[int]) -> Any:
        if not left:
            yield []
        for other in left[1:]:
            rest = [i for i in left[1:] if i != other]
            yield from ([(left[0], other), *more] for more in pairings(rest))

    possible = {round(float(np.median([g[list(p)].mean() for p in some])), 9) for some in pairings(list(range(6)))}
    found = {round(float(reduced(rk.bucketing(rk.median(1)), g, key=key)[0]), 9) for key in range(12)}
    assert found <= possible
    assert len(found) > 2


def test_without_liars_the_trimmed_mean_is_the_mean() -> None:
    result = reduced(rk.trimmed_mean(0))
    np.testing.assert_allclose(flat(result, False), flat(jax.tree.map(lambda a: a.mean(0), ROWS), False), atol=1e-12)


def test_bookkeeping_is_clamped_again_and_trimmed() -> None:
    """A liar that sends a bookkeeping of 10⁹, or NaN, moves the result by what an honest client could."""
    marks = [Bookkeeping("τ", most=5.0, least=1.0), Bookkeeping("h")]
    tau = np.array([3, 2, 4, 10**9, -7, 3, 2])
    h = np.array([1.0, 2.0, np.nan, 4.0, 1e300, 3.0, 2.5])
    rule, there = rk.trimmed_mean(2), np.ones(7, bool)
    both = rule.reduce_bookkeeping(marks, [jnp.asarray(tau), jnp.asarray(h)], jnp.ones(7) / 7, jnp.asarray(there))
    np.testing.assert_allclose(both[0], np.mean([2, 3, 3]))  # of 1, 2, 2, 3, 3, 4, 5
    np.testing.assert_allclose(both[1], np.mean([2.0, 2.5, 3.0, 4.0]))  # one NaN: a single liar is left


# On the quadratic.

TASK = rk.tasks.quadratic(clients=10, heterogeneity=0.0, noise=0.0, seed=7)
BEST = solution(TASK)
STEPS = {"upper_step": 0.1, "lower_step": 0.3, "linear_step": 0.3}
LIARS = rk.Faults(attack=rk.attacks.SignFlip((1, 4, 7), scale=10.0))
BEARING: dict[str, tuple[Any, float]] = {
    "median": (rk.median(3), 1e-11),
    "trimmed mean": (rk.trimmed_mean(3), 1e-11),
    "geometric median": (rk.geometric_median(3), 1e-5),  # up to the smoothing
    "Krum": (rk.krum(3), 1e-11),
    "multi-Krum": (rk.krum(3, keep=5), 1e-11),
    "nearest-neighbour mixing": (rk.nearest_neighbors(rk.trimmed_mean(3)), 1e-11),
    "centered clipping": (rk.centered_clipping(0.03, 3), 0.1),  # up to the radius
}


def distance(channel: Any, faults: Any = LIARS, rounds: int = 400, **given: Any) -> float:
    run = rk.solve(
        TASK.problem, TASK.clients, rk.SOBA(**STEPS), TASK.init, rounds, channel=channel, faults=faults, **given
    )
    return float(np.linalg.norm(run.x - BEST.x))


QUICK = {"median", "Krum"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in BEARING]
)
def test_three_of_ten_clients_that_send_minus_ten_times_theirs(name: str) -> None:
    """Seven equal honest clients reach the solution."""
    channel, within = BEARING[name]
    assert distance(channel) < within


MOST: dict[str, tuple[Any, int]] = {
    "median": (rk.median(4), 4),
    "trimmed mean": (rk.trimmed_mean(4), 4),
    "geometric median": (rk.geometric_median(4), 4),
    "nearest-neighbour mixing": (rk.nearest_neighbors(rk.trimmed_mean(4)), 4),
    "Krum": (rk.krum(3, keep=5), 3),
    "bucketing": (rk.bucketing(rk.median(2)), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", [rk.attacks.InnerProduct, rk.attacks.SignFlip], ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("name", MOST)
def test_as_many_as_a_rule_promises(name: str, attack: Any) -> None:
    channel, liars = MOST[name]
    faults = rk.Faults(attack=attack(liars, scale=10.0))
    assert distance(channel, faults) < (1e-5 if name == "geometric median" else 1e-11)
    assert distance(None, faults, 20) > 1


def test_with_the_plain_mean_they_do_harm() -> None:
    with pytest.warns(rk.NonFiniteWarning):
        distance(None, rounds=3000)
    assert distance(None, rounds=20) > 1e3
    assert distance(None, None) < 1e-11


def test_unlike_honest_clients_move_the_median() -> None:
    """No bug: no rule can tell an honest client that differs from a liar."""
    unlike = rk.tasks.quadratic(clients=5, seed=0, noise=0.0)
    run = rk.solve(unlike.problem, unlike.clients, rk.SOBA(**STEPS), unlike.init, 400, channel=rk.median())
    assert np.linalg.norm(run.x - solution(unlike).x) > 0.01


# What is refused, before anything is compiled.

CASES: list[tuple[Any, str]] = [
    (rk.median(5), r"rk.median tolerates at most 4 of the 10 clients.*needs 11 clients to tolerate 5; got attackers=5"),
    (rk.krum(4), r"rk.krum tolerates at most 3 of the 10 .*needs 11"),
    (rk.krum(3, keep=6), r"rk.krum tolerates at most 2 of the 10"),
    (rk.krum(0.4), r"rk.krum tolerates at most 3 .*got attackers=0.4"),
    (rk.bucketing(rk.median(3)), r"rk.bucketing tolerates at most 2 of the 10 .*needs 13"),
    (rk.nearest_neighbors(rk.trimmed_mean(5)), r"rk.nearest_neighbors tolerates at most 4"),
    ({"x, y, u": rk.chain(rk.clip(1.0), rk.median(5))}, r"rk.median tolerates at most 4"),
]


@pytest.mark.parametrize(("channel", "message"), CASES)
def test_more_liars_than_a_rule_bears(channel: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as told:
        distance(channel, None, 1)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rk.median(-1), r"rk.median: attackers must be an integer of at least 0, or a share.*got -1"),
        (lambda: rk.trimmed_mean(0.5), r"share of the cohort below 0.5; got 0.5"),
        (lambda: rk.trimmed_mean(None), r"rk.trimmed_mean: attackers must be .*got None"),
        (lambda: rk.median(True), r"rk.median: attackers must be"),
        (lambda: rk.krum(1, keep=0), r"rk.krum: keep must be an integer of at least 1"),
        (lambda: rk.centered_clipping(0), r"rk.centered_clipping: radius must be a positive number"),
        (lambda: rk.geometric_median(iterations=0), r"rk.geometric_median: iterations must be"),
        (lambda: rk.bucketing(rk.median()), r"rk.bucketing: rule must have a number of attackers"),
        (lambda: rk.bucketing(rk.median(1), 0), r"rk.bucketing: size must be"),
        (lambda: rk.chain(rk.median(), rk.krum()), r"rk.chain must have at most one channel that reduces"),
        (lambda: rk.chain(rk.clip(1.0), rk.median(), rk.gaussian(1.0)), r"the noise of Gaussian .*Median reduces"),
    ],
)
def test_bad_rules(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_rule() -> None:
    for make in (rk.bucketing, rk.nearest_neighbors):
        with pytest.raises(TypeError, match=r"rule must be a robust mean such as rk.median\(2\); got Clip"):
            make(rk.clip(1.0))


SINGLE = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
FOUR = rk.Clients(upper=[np.full((2, 2), float(i)) for i in range(4)])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (rk.CoBo(), r"rk.median must be given to exchanges that are means or sums; got 'gradients', which gathers"),
        (rk.DRFA(local_steps=2), r"in the exchange \"x, x at t'\", a client may be in the cohort twice"),
    ],
)
def test_exchanges_that_no_rule_protects(method: Any, message: str) -> None:
    """The message names a way out: other exchanges by name."""
    with pytest.raises(ValueError, match=message):
        rk.solve(SINGLE, FOUR, method, np.zeros(2), 1, channel=rk.median())


def test_a_method_that_weighs_its_clients_itself_is_refused() -> None:
    clients = rk.Clients(lower=[np.full((2, 2), float(i)) for i in range(4)], center=np.ones((3, 2)))
    nodes = rk.WeightedNodes(lambda x, b: jnp.mean((x - b) ** 2))
    with pytest.raises(ValueError, match=r"rk.median needs replies that count equally; .* weighs the clients itself"):
        rk.solve(nodes, clients, rk.WeightedNodesProx(), np.zeros(2), 1, channel=rk.median())


def test_integers_are_refused_unless_they_are_bookkeeping() -> None:
    with pytest.raises(TypeError, match=r"rk.median needs real updates, but the exchange 'x, y' sends int32"):
        reduced(rk.median(), np.ones((3, 2), np.int32))


# Weights, lost replies, the last aggregate.


def test_clients_count_equally_whatever_their_weights() -> None:
    """An attacker would claim the largest."""
    clients = rk.Clients(upper=[np.full((2, 2), float(i)) for i in range(4)], weights=[1, 1, 1, 97])
    run = lambda data, channel: rk.solve(SINGLE, data, rk.FedAvg(step=0.1), np.zeros(2), 5, channel=channel).x
    np.testing.assert_allclose(run(clients, rk.trimmed_mean(0)), run(FOUR, None), rtol=1e-12)
    assert np.max(np.abs(run(clients, None) - run(FOUR, None))) > 0.1


def test_a_round_needs_as_many_replies_as_its_rule() -> None:
    """`Faults.minimum` is raised to the replies that the rule needs for its attackers."""
    lossy = rk.Faults(dropout=0.5)
    with pytest.raises(rk.RoundFailedError, match=r"got \d replies with a weight above 0, and needs 7"):
        distance(rk.krum(2), lossy, 20)
    assert distance(rk.median(), rk.Faults(dropout=0.2)) < 1e-11


def test_centered_clipping_starts_from_the_last_aggregate() -> None:
    """Against NumPy, over rounds: x ← x + the aggregate of the updates −2·step·(x − i)."""
    step, radius = 0.1, 0.3
    run = rk.solve(SINGLE, FOUR, rk.FedAvg(step=step), np.zeros(2), 6, channel=rk.centered_clipping(radius))
    x, v = np.zeros(2), np.zeros(2)
    for _ in range(6):
        updates = [-2 * step * (x - i) / 2 for i in range(4)]  # the mean over two coordinates
        for _ in range(3):
            v = v + np.mean([(u - v) * min(1, radius / max(np.linalg.norm(u - v), 1e-300)) for u in updates], axis=0)
        x = x + v
    np.testing.assert_allclose(run.x, x, rtol=1e-10)


def test_a_chain_passes_the_rule_its_own_state() -> None:
    alone = rk.solve(SINGLE, FOUR, rk.FedAvg(step=0.1), np.zeros(2), 4, channel=rk.centered_clipping(0.3)).x
    chained = rk.chain(rk.clip(1e6), rk.centered_clipping(0.3))
    np.testing.assert_allclose(
        rk.solve(SINGLE, FOUR, rk.FedAvg(step=0.1), np.zeros(2), 4, channel=chained).x, alone, rtol=1e-12
    )


def test_explain_says_that_the_server_sees_each_reply() -> None:
    plan = rk.explain(SINGLE, FOUR, rk.FedAvg(), np.zeros(2), channel=rk.median())
    assert "not aggregated: the server uses each reply" in str(plan)


@pytest.mark.parametrize(
    ("channel", "begin"),
    [(rk.median(), "nothing is done to it; "), (rk.chain(rk.clip(2.0), rk.median()), "it is clipped here: ")],
)
def test_what_a_site_s_owner_reads(channel: Any, begin: str) -> None:
    text = in_words._of_channel(channel)
    assert text.startswith(begin)
    assert text.endswith("The coordinator sees each reply, and combines them by a rule (Median).")
