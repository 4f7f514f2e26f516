"""Clients with pinned rows: a program reads those of a block or of a cohort by itself, for any cohort, in any order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base.pinned import unpacked
from rookery.data.clients import Clients
from rookery.data.rows import ClientRows, entries
from rookery.engines.streaming.rowless import Rowless, with_rows, without_rows


@partial(jax.tree_util.register_dataclass, data_fields=["words", "rowless"], meta_fields=["specs", "capacities"])
@dataclass(frozen=True)
class Gathered(Rowless):
    """Stands for `Clients` in a program, which reads the rows of some clients in one piece before it uses them.

    Each row crosses to the device once, however often the clients' work reads it.

    Attributes:
        words: for each level, its arrays in pinned memory; see `pinned.PinnedArray`.
    """

    words: tuple[tuple[Array, ...], ...]

    def members(self, ids: Any) -> Clients:
        """See `Clients.members`: each client's rows once, end to end."""
        own = lambda begins, sizes: (begins[:, None], sizes[ids][:, None])
        return self._read(ids, own, self.weights[ids][:, None])

    def cohort(self, ids: Any) -> Clients:
        """All clients, of which only these have rows: a round's program is computed with it as with `Clients`."""
        own = lambda begins, sizes: (jnp.zeros_like(sizes).at[ids].set(begins), sizes)
        return self._read(ids, own, self.weights, self.rowless.center)

    def _read(self, ids: Any, own: Callable[[Any, Any], tuple[Any, Any]], weights: Any, center: Any = None) -> Clients:
        levels = list(self.rowless.levels().values())
        places: list[Any] = [
            None if data is None else _places(data, ids, self.capacities[k]) for k, data in enumerate(levels)
        ]

        def read(k: int, j: int, spec: Any) -> Any:
            # Behind the barrier: otherwise every kernel that uses these rows would read them from the host.
            words = jax.lax.optimization_barrier(entries(self.words[k][j], places[k][1]))
            return unpacked(words, (self.capacities[k], *spec.shape), spec.dtype)

        filled = list(with_rows(self.rowless, read, self.specs).levels().values())
        members = [
            None if data is None else data.member(data.rows, *own(place[0], data.sizes))
            for data, place in zip(filled, places, strict=True)
        ]
        return self.rowless.with_data(members, weights, center)


def gathered(clients: Clients, block: int) -> Gathered:
    """The stand-in for these clients, for blocks of this size."""
    levels = clients.levels().values()
    words = tuple(() if data is None else tuple(a.words for a in jax.tree.leaves(data.rows)) for data in levels)
    return Gathered(words=words, **without_rows(clients, block))


def _places(data: ClientRows, ids: Any, capacity: int) -> tuple[Any, Any]:
    """Where the rows of each of these clients begin end to end, and for each place there its row in the level."""
    if data.widest == data.narrowest:  # a client that occurs several times is read several times
        begins = jnp.arange(len(ids), dtype=jnp.int32) * data.widest
        rows = data.offsets[ids][:, None] + jnp.arange(data.widest, dtype=jnp.int32)
        return begins, jnp.pad(rows.reshape(-1), (0, capacity - rows.size))
    order = jnp.argsort(ids)
    clients, sizes = ids[order], data.sizes[ids[order]]
    again = jnp.concatenate([jnp.zeros(1, bool), clients[1:] == clients[:-1]])
    ends = jnp.cumsum(jnp.where(again, 0, sizes), dtype=jnp.int32)
    begins = ends - sizes  # of a client that occurs several times: the same each time
    place = jnp.arange(capacity, dtype=jnp.int32)
    run = jnp.minimum(jnp.searchsorted(ends, place, side="right", method="scan_unrolled"), len(ids) - 1)
    rows = place + (data.offsets[clients] - begins)[run]
    return jnp.zeros_like(begins).at[order].set(begins), jnp.where(place < ends[-1], rows, data.offsets[clients[0]])
