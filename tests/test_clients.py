"""Clients made of arrays end to end, and clients whose data are elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk

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
        (np.zeros(5), [2, 2], {}, r"^lower: \(the array itself\) has 5 rows, and the sizes add up to 4"),
        (np.zeros(5), [5, 0], {}, r"^lower: client 1 is empty"),
        (np.zeros(5), [2.0, 3.0], {}, r"^lower: sizes are whole numbers"),
        (np.zeros(5), [], {}, r"^lower: sizes are whole numbers"),
        (np.array([0.0, 1.0, np.nan]), [2, 1], {}, r"^lower: .* is not finite .* first in sample 0 of client 1"),
        (np.zeros(5), [2, 3], {"upper": (np.zeros(3), [3])}, r"^upper has data of 1 clients, and there are 2"),
        (np.zeros(5), [2, 3], {"test": np.zeros(5)}, r"^test is a ndarray; give a pair \(rows, sizes\)"),
        (np.zeros(5), [2, 3], {"weights": [1]}, r"^weights has the shape"),
    ],
)
def test_arrays_that_are_refused(rows: Any, sizes: Any, more: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        rk.Clients.from_arrays(rows, sizes, **more)


# Clients whose data are elsewhere.


def test_clients_like_a_sample() -> None:
    sample = {"a": np.zeros(2), "t": np.int32(0)}
    clients = rk.Clients.like(lower=sample, upper=jax.tree.map(jnp.asarray, sample), n=3, weights="size")
    assert (clients.n, clients.held) == (3, False)
    told = clients.told({"lower": [3, 1, 4], "upper": [2, 2, 2]})
    assert told.weights.tolist() == [0.375, 0.125, 0.5]
    assert (told.lower.widest, told.lower.narrowest, told.upper.widest) == (4, 1, 2)
    with pytest.raises(ValueError, match="holds no data"):
        rk.solve(rk.Bilevel(lambda x, y, b: x @ y, lambda x, y, b: y @ y), clients, rk.FedNest(), (np.zeros(2),) * 2, 1)
