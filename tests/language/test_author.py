"""What an author of methods meets: the oracles and their counts, and what a mistake is answered with."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk

RNG = np.random.default_rng(0)
SIZES = (1, 3, 40, 200)


def rows(size: int) -> dict[str, np.ndarray]:
    return {"a": RNG.normal(size=(size, 2)), "t": RNG.normal(size=size)}


def lower(x: Any, y: Any, b: Any) -> Any:
    return jnp.mean((b["a"] @ y - b["t"] * jnp.sum(x)) ** 2) + 0.5 * jnp.sum(jnp.exp(x) * y**2)


def upper(x: Any, y: Any, b: Any) -> Any:
    return jnp.mean((b["a"] @ y - b["t"]) ** 2) + 0.1 * jnp.sum(x**2)


PROBLEM = rk.Bilevel(upper=upper, lower=lower)
UNEQUAL = rk.Clients(lower=[rows(n) for n in SIZES], upper=[rows(n) for n in SIZES])
EQUAL = rk.Clients(lower=[rows(3)] * 4, upper=[rows(3)] * 4)
START = (np.full(2, 0.3), np.array([0.5, -1.0]))


class State(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Asks:
    """A round whose clients send what `ask` makes of them."""

    ask: Any
    batch_size: rk.BatchSize = None

    solves: ClassVar[tuple[type, ...]] = (rk.Bilevel,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        return State(x, y)

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        ask = lambda c, k: self.ask(c, state.x, state.y, c.lower(k, self.batch_size))
        return State(fed.mean(fed.map(ask, key)), state.y)


def asked(ask: Any, clients: Any = UNEQUAL, **given: Any) -> rk.Run:
    method = Asks(ask, given.pop("batch_size", None))
    return rk.solve(PROBLEM, clients, method, START, 1, **given)


@pytest.mark.parametrize("clients", [UNEQUAL, EQUAL], ids=["1, 3, 40, 200", "equal"])
@pytest.mark.parametrize("engine", [rk.Simulation(), rk.Federation()], ids=["simulation", "federation"])
def test_the_lower_levels_gradient_in_x(clients: Any, engine: Any) -> None:
    """Against JAX's own on each client's rows, by hand; and it counts as one gradient of each client."""
    run = asked(lambda c, x, y, batch: c.g_x(x, y, batch), clients, engine=engine)
    x, y = START
    each = [jax.grad(lower)(x, y, clients.client_data(i)["lower"][0]) for i in range(4)]
    weights = np.asarray(clients.weights) / np.sum(np.asarray(clients.weights))
    np.testing.assert_allclose(run.x, weights @ np.stack(each), rtol=1e-12)
    assert run.history["gradients"].iloc[-1] == 4
    assert run.history["samples_lower"].iloc[-1] == sum(SIZES if clients is UNEQUAL else (3,) * 4)


def test_both_gradients_of_the_lower_level_in_one_evaluation() -> None:
    run = asked(lambda c, x, y, batch: sum(c.g_x_and_y(x, y, batch)))
    apart = asked(lambda c, x, y, batch: c.g_x(x, y, batch) + c.g_y(x, y, batch))
    np.testing.assert_allclose(run.x, apart.x, rtol=1e-12)
    assert (run.history["gradients"].iloc[-1], apart.history["gradients"].iloc[-1]) == (4, 8)


@pytest.mark.parametrize("clients", [UNEQUAL, EQUAL], ids=["1, 3, 40, 200", "equal"])
@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("g", lambda c, x, y, batch: jax.grad(lambda x: c.g(x, y, batch))(x)),
        ("f", lambda c, x, y, batch: jax.grad(lambda x: c.f(x, y, c.upper()))(x)),
        ("g", lambda c, x, y, batch: jax.jvp(lambda x: c.g(x, y, batch), (x,), (x,))[1] * x),
    ],
)
def test_a_value_is_not_differentiated_uncounted(name: str, ask: Any, clients: Any) -> None:
    with pytest.raises(TypeError, match=rf"client.{name} must not be differentiated.*client.{name}_x_and_y"):
        asked(ask, clients)


def test_a_wrong_oracles_name_lists_the_right_ones() -> None:
    with pytest.raises(AttributeError, match=r"A client has no 'g_z'. Its oracles are f, f_x.*g_x, g_y.*losses"):
        asked(lambda c, x, y, batch: c.g_z(x, y, batch))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, v: x - 0.1 * v,
        lambda x, v: v + x,
        lambda x, v: jnp.sum(v),
        lambda x, v: v[0],
        lambda x, v: x @ v,
        lambda x, v: -v,
    ],
)
def test_a_per_client_value_is_not_an_array(wrong: Any) -> None:
    @dataclass(frozen=True)
    class Forgets(Asks):
        def round(self, fed: rk.Fed, state: State, key: Any) -> State:
            return State(wrong(state.x, fed.map(lambda c, k: c.g_x(state.x, state.y, c.lower()), key)), state.y)

    with pytest.raises(TypeError, match=r"A per-client value.*Exchange it first, e.g. fed.mean\(value"):
        rk.solve(PROBLEM, EQUAL, Forgets(None), START, 1)


@pytest.mark.parametrize(
    "name", ["Fed", "Client", "Algorithm", "Channel", "Step", "Steps", "BatchSize", "Bookkeeping", "tree", "parts"]
)
def test_what_an_author_needs_is_public(name: str) -> None:
    assert name in rk.__all__
    assert getattr(rk, name) is not None
