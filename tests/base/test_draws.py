"""Random numbers that do not depend on double precision: as `jax.random` with it, in a process without it the same."""

import os
import subprocess
import sys
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtri

import rookery as rk
from rookery.base import draws
from rookery.channels.codecs import random_places
from rookery.data.cohort import sample_cohort

KEYS = jax.random.split(jax.random.key(7), 500)
SPANS = [(0, 1), (0, 2), (0, 5), (1, 8), (-7, 30_000), (3, 65_538), (0, 65_535), (-70_000, -60_000), (5, 5), (5, 2)]


@pytest.mark.parametrize("shape", [*(pytest.param(own, marks=pytest.mark.slow) for own in ((), (5,))), (2, 3)])
def test_integers_equal_those_of_jax(shape: tuple[int, ...]) -> None:
    ours = jax.jit(jax.vmap(lambda key, low, high: draws.integers(key, shape, low, high), (0, None, None)))
    for low, high in SPANS:
        expected = jax.vmap(lambda key: jax.random.randint(key, shape, low, high))(KEYS)
        assert jnp.array_equal(ours(KEYS, low, high), expected)
        own = draws.integers(KEYS[0], shape, low, high)
        assert own.dtype == jnp.int32
        assert jnp.array_equal(own, expected[0])


@pytest.mark.parametrize("shape", [(7,), (5, 3)])
def test_symmetric_uniform_numbers_equal_those_of_jax(shape: tuple[int, ...]) -> None:
    expected = jax.random.uniform(KEYS[0], shape, minval=-0.3, maxval=0.3)
    assert jnp.array_equal(draws.symmetric(KEYS[0], shape, 0.3), expected)


@pytest.mark.parametrize("shape", [pytest.param((), marks=pytest.mark.slow), (4,)])
def test_coins_equal_those_of_jax(shape: tuple[int, ...]) -> None:
    each = lambda draw: jax.jit(jax.vmap(lambda key, chance: draw(key, chance, shape), (0, None)))
    both = each(draws.coins), each(jax.random.bernoulli)
    for chance in (0.0, 1.0, 0.5, 0.02, 1e-7, 1 - 1e-9, -0.5, 1.5, np.nan, *np.random.default_rng(0).random(20)):
        ours, expected = (draw(KEYS, chance) for draw in both)
        assert jnp.array_equal(ours, expected), chance


def test_coins_at_the_edge_of_a_chance() -> None:
    """To the last of the 52 bits."""
    for key in KEYS[:50]:
        u = float(jax.random.uniform(key))
        assert [bool(draws.coins(key, chance)) for chance in (np.nextafter(u, 0), u, np.nextafter(u, 1))] == [0, 0, 1]


@pytest.mark.parametrize("chance", [0.02, 0.4, 1.0])
def test_tosses_up_to_the_first_head(chance: float) -> None:
    """They follow the geometric law, are the same in float32, and end at the cut."""
    keys = jax.random.split(jax.random.key(3), 4000)
    draw = lambda chance, most: np.asarray(jax.vmap(lambda key: draws.tosses(key, chance, most))(keys))
    found = draw(chance, 20 / chance)
    assert found.min() == 1
    assert found.max() <= 20 / chance
    np.testing.assert_array_equal(found, draw(np.float32(chance), np.float32(20 / chance)))
    np.testing.assert_array_equal(draw(chance, 3), np.minimum(found, 3))
    for most in (1, 2, 5, round(1 / chance)):
        share = 1 - (1 - chance) ** most
        assert abs(np.mean(found <= most) - share) <= 4 * np.sqrt(share * (1 - share) / len(keys))


def test_a_range_that_is_too_long() -> None:
    with pytest.raises(ValueError, match=r"must be shorter than 65536; got 1 to 65536"):
        draws.integers(KEYS[0], (), 1, 65_537)


def test_seeds() -> None:
    words = lambda key: np.asarray(jax.random.key_data(key)).tolist()
    for seed in (0, 1, 2**31, 2**32 - 1):
        assert words(draws.seed_key(seed)) == words(jax.random.key(seed))
    seeds = [0, 1, 2**32, 2**32 + 1, 2**40, 2**63, 2**64 - 1, np.uint64(2**64 - 2)]
    assert len({tuple(words(draws.seed_key(seed))) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("seed", [-1, 2**64, True, 1.0, "1", None])
def test_what_is_not_a_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match=rf"^seed must be an integer from 0 to 2\*\*64 - 1; got {seed!r}\.$"):
        draws.seed_key(seed)


def drawn() -> list[Any]:
    """One of each kind of draw, from several seeds: the branches of a cohort, with and without chances, among them."""
    found = []
    for key in map(draws.seed_key, (0, 5, 2**40)):
        cohorts = [sample_cohort(key, n, size) for n, size in ((5, 5), (10, 4), (1000, 6), (30_000, 2100))]
        cohorts.append(sample_cohort(key, 6, 4, jnp.array([0.1, 0.2, 0.3, 0.1, 0.1, 0.2])))
        assert all(ids.dtype == jnp.int32 for ids in cohorts)
        more = random_places(key, 30, 5), draws.integers(key, (6,), 2, 90), draws.coins(key, 0.3, (9,))
        found += [np.asarray(a).tolist() for a in (*cohorts, *more, jax.random.key_data(key))]
    return found


@pytest.mark.slow
def test_the_same_without_double_precision() -> None:
    assert jax.config.jax_enable_x64
    program = "import jax, test_draws; assert not jax.config.jax_enable_x64; print(test_draws.drawn())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    environment.pop("JAX_ENABLE_X64", None)
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(drawn())


def test_normal_numbers_are_the_same_in_any_precision() -> None:
    drawn = draws.normals(KEYS[0], (7, 143))
    assert drawn.dtype == jnp.float32
    (wide,) = draws.normals_like(KEYS[0], [np.zeros((7, 143))])
    assert wide.dtype == jnp.float64
    np.testing.assert_array_equal(drawn, wide)
    words = np.asarray(jax.random.key_data(jax.random.split(KEYS[0], (501,)))).ravel()[:1001]
    uniform = (2 * (words.view(np.int32).astype(float) // 256) + 1) / 2**24
    exact = [NormalDist().inv_cdf((1 + u) / 2) for u in uniform]
    np.testing.assert_allclose(wide.ravel(), exact, rtol=2e-6, atol=1e-7)


def test_normal_numbers_are_the_same_in_every_program() -> None:
    """Each operation by itself gives the bits that all of them give together, whatever the number of numbers."""
    uniform = jnp.asarray((2 * np.arange(-(2**23), 2**23, 1009) + 1) / 2**24, jnp.float32)
    together = np.asarray(jax.jit(draws._quantiles)(uniform))
    with jax.disable_jit():
        np.testing.assert_array_equal(together, draws._quantiles(uniform))
    np.testing.assert_array_equal(together[:7], jax.jit(draws._quantiles)(uniform[:7]))


def test_normal_numbers_reach_into_the_tails() -> None:
    """Each of the 2²⁴ numbers is near the exact quantile, and minus another one."""
    places = np.unique([*range(2000), *range(2**23 - 2000, 2**23), *range(0, 2**23, 997)])
    uniform = np.sort((2 * places + 1) / 2**24)
    above, below = (np.asarray(jax.jit(draws._quantiles)(jnp.asarray(u, jnp.float32))) for u in (uniform, -uniform))
    assert above.dtype == np.float32
    np.testing.assert_allclose(above, -ndtri((1 - uniform) / 2), rtol=3e-6, atol=0)
    assert above[-1] == pytest.approx(5.42, abs=0.01)
    np.testing.assert_array_equal(above, -below)


def test_normal_numbers_are_normal_and_independent() -> None:
    drawn = np.asarray(jax.vmap(lambda key: draws.normals(key, (501,)))(jax.random.split(KEYS[0], 400)))
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 1e-3
    assert len(np.unique(drawn)) > 0.98 * drawn.size
    for other in (drawn[:, 1:] * drawn[:, :-1], drawn[1:] * drawn[:-1], drawn[:, 1:] ** 2 * drawn[:, :-1] ** 2 - 1):
        assert abs(other.mean()) < 4.5 * other.std() / np.sqrt(other.size)


@pytest.mark.parametrize("engine", [rk.Simulation(), rk.Federation()], ids=["simulation", "federation"])
def test_another_default_generator_changes_nothing(engine: Any) -> None:
    problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
    clients = rk.Clients(upper=[np.array([1.0, 2, 3]), np.array([3.0])])
    method = rk.FedAvg(step=0.1, local_steps=3, batch_size=2)
    run = lambda: float(rk.solve(problem, clients, method, np.zeros(()), 3, engine=engine).x)
    expected = run()
    with jax.default_prng_impl("rbg"):
        assert run() == expected
