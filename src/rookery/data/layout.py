"""The clients' data as engines lay them out: by cohort, by site, at the centre."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rookery.base import placement
from rookery.data.frames import Schema
from rookery.data.rows import ClientRows, Count, View, entries


class Layout:
    """A pytree of the data at every level, the weights and the centre's data; `Clients` adds the methods for users."""

    weights: Float[Array, " n"]
    replace: bool
    center_client: int | None
    here: range | None = None  # the clients whose data this process holds; None: all
    digest: str | None = None  # of all data, where several processes hold them
    schema: Schema | None = None  # what the arrays stand for, if they come from a table
    by_size = False  # whether the weights are in proportion to the sizes

    _lower: ClientRows | None
    _upper: ClientRows | None
    _test: ClientRows | None
    _center: ClientRows | None

    @property
    def n(self) -> int:
        """The number of clients."""
        return int(self.weights.shape[0])

    @property
    def lower(self) -> ClientRows:
        """The data of the lower level."""
        return self._lower or self._upper  # type: ignore[return-value]

    @property
    def upper(self) -> ClientRows:
        """The data of the upper level."""
        return self._upper or self._lower  # type: ignore[return-value]

    @property
    def test(self) -> ClientRows | None:
        """The data that no method sees, if there are any."""
        return self._test

    @property
    def center(self) -> ClientRows | None:
        """The centre's data, in the form of one client's data; None if there are none."""
        return self._center

    @property
    def one_data_set(self) -> bool:
        """Whether both levels use the same data."""
        return self._lower is None or self._upper is None

    @property
    def lower_sizes(self) -> np.ndarray:
        """Each client's number of samples at the lower level."""
        return np.asarray(self.lower.sizes)

    @property
    def upper_sizes(self) -> np.ndarray:
        """Each client's number of samples at the upper level."""
        return np.asarray(self.upper.sizes)

    @property
    def held(self) -> bool:
        """Whether the data are in this program; those of `Clients.like` are not."""
        return not any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(self))

    @property
    def placement(self) -> str:
        """Where the clients' rows are: "device", "host" or "pinned"."""
        return placement.of(self.levels())

    def levels(self) -> dict[str, ClientRows | None]:
        """Return the data of each level by name; None where a level has none of its own."""
        return {"lower": self._lower, "upper": self._upper, "test": self._test}

    def view(self, level: Literal["lower", "upper", "test", "center"], i: Count) -> View:
        """Return client i's part of one level's data; the centre's data have a single part, 0."""
        data = {"lower": self.lower, "upper": self.upper, "test": self._test, "center": self._center}[level]
        assert data is not None
        size = data.widest if data.widest == data.narrowest else data.sizes[i]
        return View(data.rows, data.offsets[i], size, data.widest, data.narrowest, data.chunk)

    def members(self, ids: Int[Array, " cohort"] | None, here: Int[Array, " cohort"] | None = None) -> Self:
        """Return the data of these clients side by side; `client_axes` says which leaves have a row for each.

        Arguments:
            ids: their numbers; None: only the shapes of one client's data.
            here: their places among the clients whose data are here; None: the data of all clients are here.
        """
        rows: Callable[[Any], Any]
        number: Callable[[Any, Any], Any]
        if ids is None:
            rows = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
            number = lambda a, _: jax.ShapeDtypeStruct((1,), a.dtype)
        else:
            rows, number = lambda a: a, lambda a, at: entries(a, at)[:, None]
        local = ids if here is None else here

        def member(data: ClientRows) -> ClientRows:
            numbers = number(data.offsets, local), number(data.sizes, local)
            return data.member(jax.tree.map(rows, data.rows), *numbers)

        return self.map_levels(member, number(self.weights, ids))

    def client_axes(self) -> list[int | None]:
        """Return, for each leaf of `members`, 0 if every client has a row of it and None if all clients share it."""
        marked = self.map_levels(lambda data: data.member(jax.tree.map(lambda a: -1, data.rows), 0, 0), 0)
        return [None if mark < 0 else 0 for mark in jax.tree.leaves(marked)]

    def at_center(self) -> Self:
        """Return the centre's data only."""
        return self.with_data((None, None, None), jnp.ones(1), self._center)

    def site(self, i: int, padded: int | None = None) -> Self:
        """Return client i's data as its site holds them, with rows padded to a length that several sites share."""

        def local(data: ClientRows) -> ClientRows:
            begin, size = int(data.offsets[i]), int(data.sizes[i])
            length = size if padded is None else max(size, min(padded, data.widest))
            cut = lambda a: np.asarray(a)[begin : begin + size]  # a slice of a JAX array would be compiled
            pad = lambda a: np.concatenate([a, np.zeros((length - size, *a.shape[1:]), a.dtype)])
            rows = jax.tree.map(lambda a: jnp.asarray(pad(cut(a))), data.rows)
            return data.member(rows, jnp.zeros(1, jnp.int32), jnp.full(1, size, jnp.int32))

        return self.map_levels(local, jnp.ones(1))

    def at_site(self, local: "Layout") -> Self:
        """Return a site's data, `local`, in the form of the data of one of these clients: see `site`."""

        def of(described: ClientRows | None, data: ClientRows | None) -> ClientRows | None:
            if described is None or data is None:
                return None
            return described.member(data.rows, jnp.zeros(1, jnp.int32), jnp.asarray(data.sizes))

        pairs = zip(self.levels().values(), local.levels().values(), strict=True)
        return self.with_data([of(described, data) for described, data in pairs], jnp.ones(1))

    def site_shapes(self, local: Self) -> Self:
        """Return the shapes with which a site traces a plan: its own rows, and every client's offset and size."""
        shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
        everyone = lambda a: jax.ShapeDtypeStruct((self.n,), a.dtype)

        def of(data: ClientRows) -> ClientRows:
            return data.member(jax.tree.map(shape, data.rows), everyone(data.offsets), everyone(data.sizes))

        shapes = local.map_levels(of, shape(self.weights))
        shapes._center = jax.tree.map(shape, self._center)
        return shapes

    def subset(self, most: int, ragged: bool) -> Self:
        """Return one client with at most `most` samples of the largest; `ragged`: as if clients' sizes differed."""

        def of_largest(data: ClientRows) -> ClientRows:
            sizes = np.asarray(data.sizes)
            here = range(len(sizes)) if self.here is None else self.here
            largest = here.start + int(np.argmax(sizes[here.start : here.stop]))
            begin, size = int(data.offsets[largest]), min(int(data.sizes[largest]), most)
            rows = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)[begin : begin + size]), data.rows)
            return ClientRows(rows, jnp.zeros(1, jnp.int32), jnp.full(1, size, jnp.int32), size, size - ragged, None)

        return self.map_levels(of_largest, jnp.ones(1))

    def map_levels(self, change: Callable[[ClientRows], Any], weights: Any, center: Any = None) -> Self:
        """Return what `change` makes of each level's data, with these weights and centre's data, without names."""
        levels = [None if data is None else change(data) for data in self.levels().values()]
        return self.with_data(levels, weights, center)

    def without_names(self) -> Self:
        """Return the clients without a schema: programs do not depend on names."""
        return self.with_data(tuple(self.levels().values()), self.weights, self._center)

    def with_data(self, levels: Sequence[Any], weights: Any, center: Any = None) -> Self:
        """Return clients with this data of each level, these weights and centre's data, without names."""
        return self.tree_unflatten((self.replace, self.center_client), (*levels, weights, center))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arrays, which compiled functions take as arguments, and what `jax.tree.map` keeps."""
        arrays = (self._lower, self._upper, self._test, self.weights, self._center)
        return arrays, (self.replace, self.center_client, self.schema, self.by_size)

    @classmethod
    def tree_unflatten(cls, fixed: tuple[Any, ...], children: tuple[Any, ...]) -> Self:
        """Invert `tree_flatten`; `fixed` may lack the schema and whether weights are by size."""
        clients = object.__new__(cls)
        clients._lower, clients._upper, clients._test, clients.weights, clients._center = children
        clients.replace, clients.center_client, *known = fixed
        if known:
            clients.schema, clients.by_size = known
        return clients
