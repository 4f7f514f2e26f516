"""The clients' data and oracles: unequal sizes, weights, derivatives by finite differences, features; from arrays."""

import logging
import math
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import rookery as rk
from rookery.base import tree
from rookery.data.rows import Batch, Chunks
from rookery.engines.engine import Job
from rookery.engines.simulation import device as simulation
from rookery.language import means
from rookery.language.fed import Client

KEY = jax.random.key(0)

# How a whole data set is taken: one slice, one masked gather, masked pieces of 16 (or more) samples.
SIZES = {"plain": [4, 4, 4, 4], "masked": [1, 5, 3, 7], "chunked": [3, 1, 60, 16, 17, 32]}


def samples(sizes: list[int], seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"a": rng.normal(size=(s, 3)), "t": rng.normal(size=s)} for s in sizes]


def robust(x: Any, batch: Any) -> Any:
    """Not quadratic, a mean over the batch, and a term without data."""
    return jnp.mean(jnp.log(jnp.cosh(batch["a"] @ x - batch["t"]))) + 0.05 * x @ x


def robust_gradient(x: np.ndarray, own: dict[str, np.ndarray]) -> np.ndarray:
    each = [np.tanh(a @ x - t) * a for a, t in zip(own["a"], own["t"], strict=True)]
    return np.mean(each, axis=0) + 0.1 * x


@pytest.mark.parametrize("regime", SIZES)
def test_full_batch_gradient_of_every_client(regime: str) -> None:
    data = samples(SIZES[regime])
    clients = rk.Clients(upper=data)
    expected_kind = {"plain": (Batch, None), "masked": (Batch, None), "chunked": (Chunks, 22)}[regime]
    problem, x = rk.SingleLevel(robust), np.array([0.5, -1.0, 0.2])

    def gradient(i: Any) -> Any:
        c = Client(problem, clients, i, i)
        whole = c.upper(KEY)
        assert isinstance(whole, expected_kind[0])
        return c.f_x(jnp.asarray(x), (), whole), c.f(jnp.asarray(x), (), whole), c.work

    assert clients.upper.chunk == expected_kind[1]
    found, values, work = jax.jit(jax.vmap(gradient))(jnp.arange(len(data)))
    for i, own in enumerate(data):
        np.testing.assert_allclose(found[i], robust_gradient(x, own), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(values[i], robust(x, own), rtol=1e-12)
        assert work[i].tolist() == [len(own["t"]), 0, 1, 0]


@pytest.mark.parametrize(
    "regime", [name if name == "masked" else pytest.param(name, marks=pytest.mark.slow) for name in SIZES]
)
def test_single_precision_stays_single(regime: str) -> None:
    """Also where double precision is enabled: a loss of float32 arrays has float32 gradients."""
    data = [jax.tree.map(lambda a: a.astype(np.float32), own) for own in samples(SIZES[regime])]
    c = Client(rk.SingleLevel(robust), rk.Clients(upper=data), 0, 0)
    assert jax.jit(lambda x: c.f_x(x, (), c.upper(KEY)))(jnp.zeros(3, jnp.float32)).dtype == jnp.float32


@pytest.mark.parametrize("regime", SIZES)
def test_nothing_is_padded(regime: str) -> None:
    sizes = SIZES[regime]
    clients = rk.Clients(lower=samples(sizes), upper=samples(sizes[::-1]))
    for source, own in ((clients.lower, sizes), (clients.upper, sizes[::-1])):
        assert {leaf.shape[0] for leaf in jax.tree.leaves(source.rows)} == {sum(own)}
        assert np.asarray(source.sizes).tolist() == own
    assert clients.lower_sizes.tolist() == sizes
    assert clients.upper_sizes.tolist() == sizes[::-1]


def test_what_a_client_holds() -> None:
    low, up = samples([2, 3]), samples([4, 1], seed=1)
    held = rk.Clients(low, up, replace=True).client_data(1)
    np.testing.assert_array_equal(held["lower"][0]["a"], low[1]["a"])
    np.testing.assert_array_equal(held["upper"][0]["t"], up[1]["t"])
    assert rk.Clients(**held).n == 1
    assert rk.Clients(**held).replace


def test_one_data_set_serves_both_levels() -> None:
    for given in ({"lower": samples([2, 3])}, {"upper": samples([2, 3])}):
        clients = rk.Clients(**given)
        assert clients.one_data_set
        assert clients.lower is clients.upper
    assert not rk.Clients(samples([2]), samples([2])).one_data_set


@pytest.mark.parametrize(
    ("weights", "expected"),
    [(None, [1 / 3] * 3), ("size", [0.2, 0.3, 0.5]), ([1, 3, 4], [0.125, 0.375, 0.5]), ([0.0, 1.0, 0.0], [0, 1, 0])],
)
def test_weights(weights: Any, expected: list[float]) -> None:
    for given in ({"lower": samples([2, 3, 5]), "upper": samples([1, 1, 9])}, {"upper": samples([2, 3, 5])}):
        np.testing.assert_allclose(rk.Clients(**given, weights=weights).weights, expected, rtol=1e-14)


# Numbers of local steps.


@pytest.mark.parametrize(
    ("sizes", "passes", "batch", "expected"),
    [
        ([12, 12], 2, 4, [6, 6]),
        ([12, 12], 1, 5, [3, 3]),  # ⌈12/5⌉
        ([12, 3, 8], 2, 5, [5, 2, 4]),  # ⌈24/5⌉; a client with fewer samples has one step an epoch; ⌈16/5⌉
        ([12, 3], 0.5, 2, [3, 1]),
        ([12, 3], 2, None, [2, 2]),  # full batches: one step an epoch
        ([12, 3], 1.5, None, [2, 2]),
    ],
)
def test_epochs(sizes: list[int], passes: float, batch: int | None, expected: list[int]) -> None:
    clients = rk.Clients(upper=samples(sizes))
    problem = rk.SingleLevel(robust)
    count = lambda i: Client(problem, clients, i, i).steps(rk.Epochs(passes), KEY, batch, "upper")
    assert [int(count(i)) for i in range(len(sizes))] == expected


def steps_of(sizes: list[int], passes: float, batch: int | None) -> list[int]:
    """Each client's number of steps, as a traced program finds it."""
    described = rk.Clients.like(upper=np.zeros(()), n=len(sizes)).with_sizes({"upper": sizes})
    rows = jnp.zeros(1)  # not used: the steps follow from the sizes
    clients = described.map_levels(lambda data: data.member(rows, data.offsets, data.sizes), described.weights)
    count = lambda i: Client(rk.SingleLevel(robust), clients, i, i).steps(rk.Epochs(passes), KEY, batch, "upper")
    return jax.vmap(lambda i: jnp.asarray(count(i)))(jnp.arange(len(sizes))).tolist()


@pytest.mark.parametrize(
    ("sizes", "passes", "batch", "expected"),
    [
        ([10_000], 0.0004, 1, [4]),
        ([10_000], 0.0005, 1, [5]),
        ([10_000], 1.0004, 1, [10_004]),
        ([100_000, 50_000], 33.333, 50_000, [67, 34]),
        ([3, 6, 9], 5 / 3, 1, [5, 10, 15]),  # no step more by rounding
        ([10, 20], 0.1 + 0.2, 1, [3, 6]),
        ([10, 20], np.float32(0.1), 1, [1, 2]),
        ([10, 20], 1e-10, 3, [1, 1]),
        ([2**31 - 1, 2**31 - 2, 1], 1.0, 1, [2**31 - 1, 2**31 - 2, 1]),
        ([2**31 - 1, 2**30 + 1], 0.9999999, 1, [2147483433, 1073741718]),
        ([7, 5], 1.5, 10**12, [2, 2]),
    ],
)
def test_epochs_are_exact(sizes: list[int], passes: float, batch: int, expected: list[int]) -> None:
    assert steps_of(sizes, passes, batch) == expected


def test_epochs_are_exact_on_a_grid() -> None:
    rng = np.random.default_rng(0)
    for widest in (50, 50_000, 2**31 - 1):
        sizes = [widest, *rng.integers(1, widest, 40).tolist(), 1, 2, 3]
        for passes in ("0.001", "0.123456789", "7.00000000001"):
            for batch in (1, 7, widest // 3):
                if math.ceil(Fraction(passes) * widest / batch) >= 2**31:
                    continue
                expected = [math.ceil(Fraction(passes) * size / min(size, batch)) for size in sizes]
                assert steps_of(sizes, float(passes), batch) == expected, (passes, batch)


def test_more_steps_than_can_be_counted_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Epochs\(passes=1000.0\) with batches of 1 makes 3000000000 steps; at most"):
        steps_of([3_000_000, 5], 1000.0, 1)


def test_a_range_of_local_steps_is_drawn_uniformly() -> None:
    c = Client(rk.SingleLevel(robust), rk.Clients(upper=samples([2])), 0, 0)
    drawn = jax.vmap(lambda key: c.steps((2, 4), key, None, "upper"))(jax.random.split(KEY, 6000))
    counts = np.bincount(np.asarray(drawn))
    assert counts[:2].tolist() == [0, 0]
    assert len(counts) == 5
    assert np.abs(counts[2:] - 2000).max() < 5 * np.sqrt(2000)


def test_local_steps_by_client() -> None:
    clients = rk.Clients(upper=samples([2, 2, 2]))
    steps = [int(Client(rk.SingleLevel(robust), clients, 0, i).steps([5, 1, 3], KEY, None, "upper")) for i in range(3)]
    assert steps == [5, 1, 3]  # by the client's number, whatever its place in the cohort


# The oracles, by finite differences of the losses alone.

X = {"u": jnp.array([0.4, -0.7]), "s": jnp.array(0.3)}
Y = {"w": jnp.array([[0.2, -0.5], [0.1, 0.6]])}
V = {"w": jnp.array([[1.0, 0.3], [-0.4, 0.8]])}


def upper(x: Any, y: Any, b: Any) -> Any:
    return jnp.mean(jnp.sin(b["a"][:, :2] @ y["w"] @ x["u"]) + jnp.exp(x["s"]) * b["t"]) + jnp.sum(y["w"] ** 2) * x["s"]


def lower(x: Any, y: Any, b: Any) -> Any:
    scores = b["a"][:, :2] @ y["w"]
    fit = jnp.mean(jnp.log1p(jnp.exp(scores @ x["u"] - b["t"])))
    return fit + 0.5 * jnp.exp(x["s"]) * jnp.sum(y["w"] ** 2) + jnp.sum(x["u"] @ y["w"])


NONLINEAR = rk.Bilevel(upper, lower)


def differences(fn: Callable[[Any], Any], z: Any, size: float = 1e-5) -> np.ndarray:
    """∂fn/∂z by central differences, the entries of z first."""
    flat, back = ravel_pytree(z)
    value = jax.jit(jax.vmap(lambda step: ravel_pytree(fn(back(flat + step)))[0]))
    steps = size * jnp.eye(flat.size)
    return np.asarray(value(steps) - value(-steps)) / (2 * size)


def near(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ravel_pytree(found)[0], expected.ravel(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("regime", [pytest.param("plain", marks=pytest.mark.slow), "masked"])
def test_oracles_by_finite_differences(regime: str) -> None:
    low, up = samples(SIZES[regime], 1), samples(SIZES[regime][::-1], 2)
    i = 1
    f, g = (lambda x, y: upper(x, y, up[i])), (lambda x, y: lower(x, y, low[i]))

    @jax.jit
    def oracles(i: Any) -> dict[str, Any]:
        c = Client(NONLINEAR, rk.Clients(low, up), i, i)
        mine, yours = c.lower(KEY), c.upper(KEY)
        return {
            "f": c.f(X, Y, yours),
            "g": c.g(X, Y, mine),
            "f_x": c.f_x(X, Y, yours),
            "f_y": c.f_y(X, Y, yours),
            "f_x_and_y": c.f_x_and_y(X, Y, yours),
            "g_y": c.g_y(X, Y, mine),
            "g_yy": c.g_yy(X, Y, mine, V),
            "g_xy": c.g_xy(X, Y, mine, V),
            "g_y_and_products": c.g_y_and_products(X, Y, mine, V),
        }

    found = oracles(jnp.asarray(i))
    np.testing.assert_allclose(found["f"], jax.jit(f)(X, Y), rtol=1e-12)
    np.testing.assert_allclose(found["g"], jax.jit(g)(X, Y), rtol=1e-12)
    f_x, f_y = differences(lambda x: f(x, Y), X), differences(lambda y: f(X, y), Y)
    near(found["f_x"], f_x)
    near(found["f_y"], f_y)
    near(found["f_x_and_y"][0], f_x)
    near(found["f_x_and_y"][1], f_y)
    near(found["g_y"], differences(lambda y: g(X, y), Y))
    # The products with a vector, from the explicit matrices of second derivatives.
    v = np.asarray(ravel_pytree(V)[0])
    near(found["g_yy"], differences(lambda y: jax.grad(g, 1)(X, y), Y) @ v)
    near(found["g_xy"], differences(lambda x: jax.grad(g, 1)(x, Y), X) @ v)
    for name, together in zip(("g_y", "g_yy", "g_xy"), found["g_y_and_products"], strict=True):
        near(together, np.asarray(ravel_pytree(found[name])[0]))


# Problems that have a bilevel form.


def test_minimax_as_bilevel() -> None:
    problem = rk.Minimax(upper, project_upper=lambda x: tree.scale(0.5, x))
    bilevel, batch = problem.as_bilevel(), samples([4])[0]
    assert float(bilevel.f(X, Y, batch)) == float(upper(X, Y, batch))
    assert float(bilevel.g(X, Y, batch)) == -float(upper(X, Y, batch))
    near(jax.grad(bilevel.g, 1)(X, Y, batch), -differences(lambda y: upper(X, y, batch), Y))
    assert bilevel.project_upper is problem.project_upper
    assert bilevel.lower_scope == "global"


def inner(x: Any, b: Any) -> Any:
    return {"w": jnp.mean(jnp.tanh(jnp.outer(x["u"], x["u"]) + b["t"][:, None, None]) * x["s"], axis=0)}


def outer_with_batch(value: Any, b: Any) -> Any:
    return jnp.mean(jnp.sum(value["w"] ** 2) * b["t"] ** 2)


def outer_alone(value: Any) -> Any:
    return jnp.sum(jnp.exp(value["w"]))


def extra(x: Any, b: Any) -> Any:
    return jnp.mean(jnp.cos(b["a"][:, :2] @ x["u"])) * x["s"]


@pytest.mark.parametrize("regime", [pytest.param("plain", marks=pytest.mark.slow), "masked"])
def test_compositional_as_bilevel(regime: str) -> None:
    """∇_y g = y − r(x), ∇²_y g = I, ∇²_xy g·v = −∇r(x)ᵀv, ∇_y f = ∇f(y), ∇_x f = ∇h(x)."""
    low, up = samples(SIZES[regime], 1), samples(SIZES[regime][::-1], 2)
    problem = rk.Compositional(inner, outer_with_batch, extra, inner_scope="client")
    bilevel = problem.as_bilevel()
    assert bilevel.lower_scope == "client"
    i = 2

    @jax.jit
    def oracles(i: Any) -> Any:
        c = Client(bilevel, rk.Clients(low, up), i, i)
        mine, yours = c.lower(KEY), c.upper(KEY)
        products = c.g_yy(X, Y, mine, V), c.g_xy(X, Y, mine, V)
        return c.g_y(X, Y, mine), *products, c.f_y(X, Y, yours), c.f_x(X, Y, yours)

    g_y, g_yy, g_xy, f_y, f_x = oracles(jnp.asarray(i))
    r = lambda x: inner(x, low[i])
    near(g_y, np.asarray(Y["w"] - r(X)["w"]))
    near(g_yy, np.asarray(V["w"]))
    near(g_xy, -differences(r, X) @ np.asarray(V["w"]).ravel())
    near(f_y, differences(lambda y: outer_with_batch(y, up[i]), Y))
    near(f_x, differences(lambda x: extra(x, up[i]), X))


def test_the_outer_function_may_leave_out_the_batch() -> None:
    batch = samples([3])[0]
    assert float(rk.Compositional(inner, outer_alone).f(X, Y, batch)) == float(outer_alone(Y))
    both = rk.Compositional(inner, outer_alone, extra).f(X, Y, batch)
    np.testing.assert_allclose(both, outer_alone(Y) + extra(X, batch), rtol=1e-14)


# Features.


def hidden(x: Any, batch: Any) -> Any:
    return {**batch, "a": jnp.tanh(batch["a"][:, :2] * x["u"])}


def on_hidden(x: Any, y: Any, b: Any) -> Any:
    return jnp.mean((jnp.sum(b["a"] @ y["w"], axis=1) - b["t"]) ** 2) + 0.1 * jnp.exp(x["s"]) * jnp.sum(y["w"] ** 2)


WITH = rk.Bilevel(on_hidden, on_hidden, features=hidden)
WITHOUT = rk.Bilevel(*[lambda x, y, b: on_hidden(x, y, hidden(x, b))] * 2)


@pytest.mark.parametrize(
    ("size", "regime"),
    [
        (None, "plain"),
        (2, "masked"),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in ((None, "masked"), (2, "plain"))),
    ],
)
def test_features_change_no_gradient(regime: str, size: int | None) -> None:
    clients = rk.Clients(samples(SIZES[regime], 1), samples(SIZES[regime], 2))

    @jax.jit
    def oracles(i: Any) -> list[Any]:
        found = []
        for problem in (WITH, WITHOUT):
            c = Client(problem, clients, i, i)
            seen = c.seen(X)
            assert (seen is None) == (problem is WITHOUT)
            ready, fresh, upper = c.lower(KEY, size, 1, seen=seen), c.lower(KEY, size, 1), c.upper(KEY, size, 1)
            assert ready.seen == (problem is WITH)
            on_y = c.g_y(X, Y, ready), c.g_yy(X, Y, ready, V)
            found.append((on_y, c.g_xy(X, Y, fresh, V), c.f_x(X, Y, upper), c.f_y(X, Y, upper)))
        return found

    a, b = (ravel_pytree(found)[0] for found in oracles(jnp.asarray(1)))
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    assert np.abs(a).min() > 1e-4  # x and y matter in all of them


def _wide(x: Any, batch: Any) -> Any:
    return {**batch, "a": jnp.tanh(batch["a"] @ x["w"])}


def _head(x: Any, y: Any, batch: Any) -> Any:
    """Of x itself, too; the numbers of a batch that are no real ones go through as they are."""
    far = batch["a"] @ y - batch["t"] + batch["n"] % 2
    return jnp.mean(jnp.log(jnp.cosh(far))) + 0.1 * jnp.sum(jnp.sin(x["w"])) * jnp.sum(y**2)


@pytest.mark.parametrize(
    "sizes", [pytest.param([5, 5, 5], marks=pytest.mark.slow), [5, 2, 4]], ids=["equal", "unequal"]
)
def test_both_levels_through_the_features_at_once(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions, and what is counted of them, are those of each level by itself."""
    level = lambda seed: [{**own, "n": np.arange(len(own["t"]))} for own in samples(sizes, seed)]
    problem, clients = rk.Bilevel(_head, lambda *z: 2 * _head(*z), features=_wide), rk.Clients(level(1), level(2))
    rng = np.random.default_rng(5)
    x, y, v = {"w": rng.normal(size=(3, 9))}, rng.normal(size=9), rng.normal(size=9)
    joined = means.share_features
    found: list[bool] = []
    ends = []
    for at_once in (True, False):
        asked = lambda *given: found.append(joined(*given)) or (at_once and found[-1])
        monkeypatch.setattr(means, "share_features", asked)

        @jax.jit
        def directions() -> list[Any]:
            c = Client(problem, clients, 1, 1)
            return [*c.f_and_g(x, y, v, c.upper(KEY, 3, 1), c.lower(KEY, 2, 1)), c.counts]

        ends.append(directions())
    assert found == [sizes[0] == sizes[1]] * 2
    for a, b in zip(*(jax.tree.leaves(own) for own in ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    whole = Client(problem, clients, 1, 1)
    assert not joined(problem, x, whole.upper(), whole.lower())  # more numbers than x has


def both_levels(problem: Any, engine: Any) -> rk.Run:
    rng = np.random.default_rng(5)
    level = lambda seed: [{**own, "n": np.arange(5)} for own in samples([5, 5, 5], seed)]
    start = {"w": rng.normal(size=(3, 9))}, rng.normal(size=9)
    method = rk.ASFBO(local_steps=(1, 3), batch_size=2)
    return rk.solve(problem, rk.Clients(level(1), level(2)), method, start, 3, cohort=2, every=3, engine=engine)


@cache
def without_features() -> rk.Run:
    """For all engines to be compared with."""
    return both_levels(rk.Bilevel(*[lambda x, y, b: _head(x, y, _wide(x, b))] * 2), rk.Simulation())


@pytest.mark.slow
@pytest.mark.xdist_group("both levels")
@pytest.mark.parametrize(
    "engine", [rk.Simulation(), rk.Simulation(debug=True), rk.Federation()], ids=["simulation", "debug", "federation"]
)
def test_a_run_with_both_levels_at_once(engine: Any) -> None:
    runs = [both_levels(rk.Bilevel(_head, _head, features=_wide), engine), without_features()]
    for a, b in zip(*(jax.tree.leaves(run.state) for run in runs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    assert runs[0].history.drop(columns="seconds").equals(runs[1].history.drop(columns="seconds"))


def test_a_derivative_of_ones_own_and_rows_in_another_kind_of_dict() -> None:
    """With a loss that has only a reverse rule both levels go together; rows of two structures go by themselves."""
    rng = np.random.default_rng(6)
    x, y, v = {"w": rng.normal(size=(3, 9))}, rng.normal(size=9), rng.normal(size=9)
    smooth = jax.custom_vjp(lambda r: jnp.log(jnp.cosh(r)))
    smooth.defvjp(lambda r: (smooth(r), r), lambda r, g: (g * jnp.tanh(r),))
    head = lambda of: lambda x, y, b: jnp.mean(of(b["a"] @ y - b["t"])) + 0.1 * y @ y
    ends = []
    for of, kind in ((smooth, dict), (lambda r: jnp.log(jnp.cosh(r)), OrderedDict)):
        upper = [kind(own) for own in samples([5, 5], 2)]
        problem, clients = rk.Bilevel(head(of), head(of), features=_wide), rk.Clients(samples([5, 5], 1), upper)

        @jax.jit
        def directions() -> Any:
            c = Client(problem, clients, 1, 1)
            batches = c.upper(KEY, 2, 1), c.lower(KEY, 2, 1)
            assert means.share_features(problem, x, *batches) == (kind is dict)
            return c.f_and_g(x, y, v, *batches)

        ends.append(directions())
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "features",
    [
        lambda x, b: {**b, "a": b["a"] @ x["w"] - jnp.mean(b["a"] @ x["w"], axis=0)},
        lambda x, b: jax.tree.map(lambda a: jnp.repeat(a, 2, axis=0), _wide(x, b)),
        lambda x, b: {**_wide(x, b), "of x": x["w"]},
        lambda x, b: {**_wide(x, b), "number": 2.0},
    ],
    ids=["statistics", "two rows", "no rows", "a number"],
)
@pytest.mark.parametrize("size", [5, 1])
def test_features_that_are_not_made_row_by_row_are_refused(features: Any, size: int) -> None:
    level = [{**own, "n": np.arange(size)} for own in samples([size] * 3)]
    start = {"w": np.ones((3, 9))}, np.ones(9)
    with pytest.raises(ValueError, match="on two samples together it returns other rows"):
        rk.solve(rk.Bilevel(_head, _head, features=features), rk.Clients(level), rk.ASFBO(batch_size=2), start, 1)


def test_features_are_left_out_where_they_would_cost_more() -> None:
    c = Client(WITH, rk.Clients(samples([4, 4])), 0, 0)
    assert c.seen(X, uses=3) is None  # fewer samples than the whole data set
    assert c.seen(X, uses=4) is not None
    assert Client(WITH, rk.Clients(samples(SIZES["chunked"])), 0, 0).seen(X) is None


@pytest.mark.slow
@pytest.mark.parametrize("cls", [pytest.param(rk.FedNest, marks=pytest.mark.slow), rk.LFedNestNonAlt])
def test_features_change_no_run(cls: type) -> None:
    clients = rk.Clients(samples(SIZES["plain"], 1), samples(SIZES["plain"], 2))
    method = cls(upper_step=0.1, lower_step=0.1, lower_local_steps=3, neumann_terms=2, hessian_step=0.2)
    runs = [rk.solve(problem, clients, method, (X, Y), 4, every=4) for problem in (WITH, WITHOUT)]
    for a, b in zip(jax.tree.leaves(runs[0].state), jax.tree.leaves(runs[1].state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
    assert not np.allclose(runs[0].x["u"], X["u"])


# Clients whose samples stand end to end.


def test_from_arrays_is_the_same_as_lists() -> None:
    rng = np.random.default_rng(0)
    sizes, upper = [3, 1, 4], [2, 2, 1]
    rows, more = ({"a": rng.normal(size=(sum(s), 2)), "t": rng.integers(0, 3, sum(s))} for s in (sizes, upper))

    def parts(rows: dict[str, Any], sizes: list[int]) -> list[Any]:
        cuts = np.cumsum(sizes)[:-1]
        each = {name: np.split(a, cuts) for name, a in rows.items()}
        return [{name: own[i] for name, own in each.items()} for i in range(len(sizes))]

    whole = rk.Clients.from_arrays(rows, sizes, upper=(more, upper), weights="size", center=more, center_client=1)
    lists = rk.Clients(parts(rows, sizes), parts(more, upper), "size", center=more, center_client=1)
    assert str(jax.tree.structure(whole)) == str(jax.tree.structure(lists))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(lists), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("rows", "sizes", "more", "message"),
    [
        (
            np.zeros(5),
            [2, 2],
            {},
            r"^lower: \(the array itself\) must have as many rows as the sizes add up to, 4; got 5",
        ),
        (
            np.zeros(5),
            [5, 0],
            {},
            r"^lower: every client must have at least one sample; client 1 has the size 0\. Leave",
        ),
        (
            np.zeros(10),
            [12, -2],
            {},
            r"^lower: every client must have at least one sample; client 1 has the size -2\. Leave",
        ),
        (np.zeros(5), [2.0, 3.0], {}, r"^lower: sizes must be whole numbers"),
        (np.zeros(5), [], {}, r"^lower: sizes must be whole numbers"),
        (np.array([0.0, 1.0, np.nan]), [2, 1], {}, r"^lower: .* is not finite .* first in sample 0 of client 1"),
        (
            np.zeros(5),
            [2, 3],
            {"upper": (np.zeros(3), [3])},
            r"^upper must have one size for each of the 2 clients; got 1",
        ),
        (np.zeros(5), [2, 3], {"test": np.zeros(5)}, r"^test must be a pair \(rows, sizes\); got a ndarray"),
        (
            np.zeros(5),
            [2, 3],
            {"weights": [1]},
            r"^weights must be one number for each of the 2 clients; got an array of shape",
        ),
        (np.zeros(5, ">f4"), [2, 3], {}, r"^lower: .* must have this machine's byte order; its type is >f4"),
    ],
)
def test_arrays_that_are_refused(rows: Any, sizes: Any, more: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        rk.Clients.from_arrays(rows, sizes, **more)


@pytest.mark.parametrize("given", [None, [1.0, 2.0]])
def test_loaders_that_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"load\(1\) must give a dict with 'lower' or 'upper' or both; got a \w+"):
        rk.Clients.from_loader(2, lambda i: given if i else {"lower": np.zeros(2)})


def test_a_loader_may_use_its_buffer_again() -> None:
    buffer = {"a": np.zeros((3, 2), np.float32)}

    def load(i: int) -> dict[str, Any]:
        buffer["a"][:] = i
        return {"lower": buffer}

    assert rk.Clients.from_loader(3, load).lower.rows["a"][:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


# Clients whose data are elsewhere.


def test_clients_like_a_sample() -> None:
    sample = {"a": np.zeros(2), "t": np.int32(0)}
    clients = rk.Clients.like(lower=sample, upper=jax.tree.map(jnp.asarray, sample), n=3, weights="size")
    assert (clients.n, clients.held) == (3, False)
    announced = clients.with_sizes({"lower": [3, 1, 4], "upper": [2, 2, 2]})
    assert announced.weights.tolist() == [0.375, 0.125, 0.5]
    assert (announced.lower.widest, announced.lower.narrowest, announced.upper.widest) == (4, 1, 2)
    with pytest.raises(ValueError, match="must hold data for a simulation; got"):
        rk.solve(rk.Bilevel(lambda x, y, b: x @ y, lambda x, y, b: y @ y), clients, rk.FedNest(), (np.zeros(2),) * 2, 1)


# Many clients.


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros that JAX could share on a CPU."""
    room = np.zeros(int(np.prod(shape)) + 16, np.float32)
    return room[-room.ctypes.data % 64 // 4 :][: int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, bool, jnp.bfloat16])
def test_what_a_user_writes_later_changes_nothing(dtype: Any) -> None:
    given = {"odd": np.ones((7, 3), dtype), "even": aligned((7, 3)), "none": np.ones((7, 0), dtype)}
    clients = rk.Clients.from_arrays(given, [3, 4])
    given["odd"][:] = 0
    given["even"][:] = 1
    given["even"].flags.writeable = False  # and a view that can't be written to is still of memory that can
    again = rk.Clients.from_arrays(given["even"][:], [3, 4])
    given["even"].flags.writeable = True
    given["even"][:] = 2
    assert clients.lower.rows["odd"].dtype == dtype
    assert clients.lower.rows["odd"].all()
    assert not clients.lower.rows["even"].any()
    assert (again.lower.rows == 1).all()


CONSTRUCTORS: dict[str, Callable[..., rk.Clients]] = {
    "Clients": lambda rows, sizes, weights, center: rk.Clients(
        lower=[rows[:3], rows[3:]], test=[rows[:1], rows[1:]], weights=weights, center=center
    ),
    "from_arrays": lambda rows, sizes, weights, center: rk.Clients.from_arrays(
        rows, sizes, upper=(rows, sizes), test=(rows, sizes), weights=weights, center=center
    ),
    "from_loader": lambda rows, sizes, weights, center: rk.Clients.from_loader(
        2, lambda i: {"lower": rows[:3] if i == 0 else rows[3:]}, weights=weights, center=center
    ),
    "from_frame": lambda rows, sizes, weights, center: rk.Clients.from_frame(
        {"by": ["a", "b"] * (len(rows) // 2), "v": rows[:, 0], "t": rows[:, 1]}, "by", target="t", weights=weights
    ),
    "like": lambda rows, sizes, weights, center: rk.Clients.like(
        lower=rows[0], n=2, weights=weights, center=center
    ).with_sizes({"lower": sizes}),
}


@pytest.mark.parametrize("make", CONSTRUCTORS)
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float64])
@pytest.mark.parametrize("how", ["array", "read-only view of a bytearray", "locked"])
def test_what_a_caller_changes_later_changes_nothing(make: str, dtype: Any, how: str) -> None:
    def given(values: Any, kind: Any) -> tuple[np.ndarray, np.ndarray]:
        """An array for the constructor, aligned as JAX shares it, and one by which its memory can be written to."""
        values = np.asarray(values, kind)
        memory = bytearray(values.nbytes + 64)
        begin = -np.frombuffer(memory, np.uint8).ctypes.data % 64
        own = np.frombuffer(memory, kind, values.size, begin).reshape(values.shape)
        own[...] = values
        if how == "array":
            return own, own
        if how == "locked":
            free, locked = own, own[...]
            locked.flags.writeable = False
            return locked, free
        shown = np.frombuffer(memoryview(memory).toreadonly(), kind, values.size, begin).reshape(values.shape)
        assert not shown.flags.writeable
        return shown, own

    arrays = [given(np.ones((8, 2)), dtype), given([3, 5], np.int32), given([1, 3], np.float32)]
    arrays.append(given(np.ones((4, 2)), dtype))
    clients = CONSTRUCTORS[make](*(own for own, _ in arrays))
    before = [np.array(leaf) for leaf in jax.tree.leaves(clients) if not isinstance(leaf, jax.ShapeDtypeStruct)]
    for _, memory in arrays:
        memory[...] = 0
    after = [np.array(leaf) for leaf in jax.tree.leaves(clients) if not isinstance(leaf, jax.ShapeDtypeStruct)]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sizes_that_change_between_two_runs_change_nothing() -> None:
    problem, sizes = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2)), aligned((2,)).view(np.int32)
    sizes[:] = [2, 8]
    clients = rk.Clients.from_arrays(np.arange(10.0), sizes)
    run = lambda: float(rk.solve(problem, clients, rk.FedAvg(step=0.5, local_steps=1), np.zeros(()), 1).x)
    first = run()
    sizes[:] = [1, 1]
    assert run() == first


def test_what_is_written_to_a_file_later_changes_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.ones((64, 2), np.float32))
    clients = rk.Clients.from_arrays(np.load(tmp_path / "rows.npy", mmap_mode="r"), [32, 32])
    np.load(tmp_path / "rows.npy", mmap_mode="r+")[:] = 0
    assert (clients.lower.rows == 1).all()


def test_a_map_over_clients_keeps_what_is_known_of_them() -> None:
    table = {"site": ["b", "a", "b"], "v": [1.0, 2.0, 3.0], "ill": ["yes", "no", "no"]}
    clients = rk.Clients.from_frame(table, by="site", label="ill", weights="size")
    twice = jax.tree.map(lambda a: a + 0, clients)
    assert (twice.names, twice.schema, twice.by_size) == (("a", "b"), clients.schema, True)
    assert list(twice.label_counts()) == ["no", "yes"]
    back = jax.jit(lambda c: c)(clients)
    assert back.names == ("a", "b")
    renamed = rk.Clients.from_frame({**table, "site": ["d", "c", "d"]}, by="site", label="ill", weights="size")
    assert jax.jit(lambda c: c)(renamed).names == ("c", "d")


def test_names_make_no_other_program() -> None:
    problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b["features"][:, 0]) ** 2))
    run = lambda *names: rk.solve(
        problem,
        rk.Clients.from_frame({"site": names, "v": [1.0, 2.0, 3.0]}, by="site"),
        rk.FedAvg(step=0.1),
        np.zeros(()),
        2,
    )
    run("a", "b", "b")
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        compiled: list[str] = []
        patch.setattr(
            logging.getLogger("jax._src.interpreters.pxla"), "handle", lambda r: compiled.append(r.getMessage())
        )
        run("c", "d", "d")
    assert not [line for line in compiled if "advance" in line]


# Both levels as one.


@pytest.mark.parametrize("placement", ["device", "host"])
def test_both_levels_as_one(placement: str) -> None:
    lower, upper, test = ({"v": own + np.arange(n * 1.0)} for own, n in ((0, 5), (100, 4), (200, 2)))
    clients = rk.Clients.from_arrays(
        lower, [2, 3], upper=(upper, [3, 1]), test=(test, [1, 1]), weights="size", center={"v": np.ones(1)},
        replace=True, placement=placement,
    )  # fmt: skip
    one = clients.single_level()
    assert (one.one_data_set, one.replace, one.placement) == (True, True, placement)
    assert one.client_data(0)["lower"][0]["v"].tolist() == [0, 1, 100, 101, 102]
    assert one.client_data(1)["lower"][0]["v"].tolist() == [2, 3, 4, 103]
    np.testing.assert_allclose(one.weights, [5 / 9, 4 / 9])
    assert np.asarray(one.test.rows["v"]).tolist() == np.asarray(clients.test.rows["v"]).tolist()
    assert np.asarray(one.center.rows["v"]).tolist() == [1]
    assert one.single_level() is one
    given = rk.Clients(lower=[np.zeros(2)] * 2, upper=[np.zeros(1)] * 2, weights=[1, 3])
    assert given.single_level().weights.tolist() == [0.25, 0.75]


def test_levels_that_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match=r"needs samples of one kind at both levels; the lower level has "):
        rk.Clients(lower=[np.zeros(2)], upper=[np.zeros((2, 3))]).single_level()
    with pytest.raises(ValueError, match=r"single_level\(\) needs the data of all clients in this process\. Make"):
        rk.Clients.like(lower=np.zeros(()), upper=np.zeros(())).single_level()


def test_a_baseline_on_the_same_clients_in_one_line() -> None:
    rng = np.random.default_rng(0)
    table = {"site": rng.choice(["a", "b"], 40), "v": rng.normal(size=40), "row": np.arange(40.0)}
    given = dict(by="site", features=["v"], target="row", test=0.2)
    nested = rk.Clients.from_frame(table, upper=0.3, **given)
    loss = lambda x, b: jnp.mean((x - b["features"][:, 0]) ** 2)
    measure = lambda c, x, y: {"loss": c.mean(lambda b: loss(x, b), c.test())}
    for clients in (nested.single_level(), rk.Clients.from_frame(table, **given)):
        assert np.asarray(clients.test.rows["target"]).tolist() == np.asarray(nested.test.rows["target"]).tolist()
        run = rk.solve(rk.SingleLevel(loss), clients, rk.FedAvg(step=0.2), np.zeros(()), 5, evaluate_client=measure)
        rows = [np.sort(clients.client_data(i)["lower"][0]["target"]) for i in range(2)]
        both = [
            np.sort(np.concatenate([nested.client_data(i)[k][0]["target"] for k in ("lower", "upper")])) for i in (0, 1)
        ]
        for one, other in zip(rows, both, strict=True):
            np.testing.assert_array_equal(one, other)
        assert np.isfinite(run.history["loss"]).all()


def test_clients_with_wider_numbers_than_the_run_are_refused() -> None:
    problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
    clients = rk.Clients(upper=[np.array([1.0, 2.0]), np.array([3.0])])
    for engine in (rk.Simulation(), rk.Federation()):
        with (
            jax.enable_x64(False),
            pytest.raises(
                TypeError, match=r"^The clients hold float64: they were made with jax_enable_x64, and this run"
            ),
        ):
            rk.solve(problem, clients, rk.FedAvg(step=0.1, batch_size=1), np.zeros(()), 2, engine=engine)
    with jax.enable_x64(False):
        narrow = rk.Clients(upper=[np.array([1.0, 2.0]), np.array([3.0])])
    run = rk.solve(problem, narrow, rk.FedAvg(step=0.1, batch_size=1), np.zeros(()), 2)  # the other way round works
    assert run.x.dtype == np.float64


def test_what_nobody_can_write_to_is_not_copied() -> None:
    rows = jnp.arange(12.0).reshape(6, 2)
    clients = rk.Clients.from_arrays(rows, [1, 5])
    assert clients.lower.rows.unsafe_buffer_pointer() == rows.unsafe_buffer_pointer()


BUILD = """
import sys
import jax, numpy as np
import rookery as rk

def resident(name):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

n, unequal = 200_000, sys.argv[1] == "unequal"
sizes = np.arange(n) % 8 + 1 if unequal else np.full(n, 5)
rows = {"a": np.ones((int(sizes.sum()), 31), sys.argv[2]), "t": np.ones(int(sizes.sum()), np.float32)}
rk.Clients.from_arrays(np.ones((3, 2), np.float32), [1, 2], weights="size")
before, calls = resident("VmRSS"), 0

def counted(*_):
    global calls
    calls += 1

sys.setprofile(counted)
clients = rk.Clients.from_arrays(rows, sizes, weights="size")
sys.setprofile(None)
held = sum(leaf.nbytes for leaf in jax.tree.leaves(clients))
print(calls, (resident("VmHWM") - before) / held)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *(pytest.param(sizes, "float32", marks=pytest.mark.slow) for sizes in ("equal", "unequal")),
        ("unequal", "float64"),
    ],
)
def test_nothing_is_made_for_each_client_and_data_are_copied_once(sizes: str, dtype: str) -> None:
    """200,000 clients: calls of Python do not count them, and memory at its peak is that of the clients themselves."""
    environment = {**os.environ, "JAX_ENABLE_X64": "0", "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-c", BUILD, sizes, dtype]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=120)
    calls, copies = done.stdout.split()
    assert int(calls) < 20_000
    assert float(copies) < 1.4


def test_a_round_of_a_cohort_needs_no_memory_for_each_of_the_others() -> None:
    """Beside its inputs and outputs; the clients' own memory is donated, and written in place."""
    problem = rk.SingleLevel(lambda x, rows: jnp.mean((rows["a"] @ x - rows["t"]) ** 2))
    needed = []
    for n in (1_000, 50_000):
        clients = rk.Clients.from_arrays({"a": np.ones((2 * n, 3)), "t": np.ones(2 * n)}, np.full(n, 2))
        session = rk.Simulation().open(Job(problem, clients, rk.Scaffold(batch_size=1), (np.zeros(3), ()), 10))
        session.init()
        traced, program = session._traced, simulation.Program(session._traced.round, clients, "auto")
        compiled = jax.jit(partial(simulation.advance, program, 10, 0, 4, 1), donate_argnums=3)
        given = (traced.round.consts, clients, traced.hyper, session.save(), 0, 1, True, traced.seed)
        needs = compiled.lower(*given).compile().memory_analysis()
        assert needs.alias_size_in_bytes >= 24 * n
        needed.append(needs.temp_size_in_bytes)
    assert needed[1] < needed[0] + 50_000  # a byte for each client
