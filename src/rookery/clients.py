"""Clients: the federation's data, end to end without padding; minibatches; the choice of a cohort."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rookery import tree

Rows: TypeAlias = Any  # a pytree of arrays with a common leading axis: the samples
Count = int | Int[Array, ""]


class Batch(NamedTuple):
    """Samples for a loss. With a mask, only the marked rows count and the loss is their mean, row by row."""

    rows: Rows
    mask: Bool[Array, " rows"] | None = None
    seen: bool = False  # the problem's `features` have been applied
    places: Int[Array, " rows"] | None = None  # which of the client's samples they are


class Chunks(NamedTuple):
    """A whole data set in masked pieces, for clients of very unequal sizes: get(i) for i < pieces, `total` samples."""

    get: Callable[[Count], Batch]
    pieces: Int[Array, ""]
    total: Int[Array, ""]


@partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "offsets", "sizes"], meta_fields=["widest", "narrowest"]
)
@dataclass(frozen=True)
class Source:
    """One data set of every client, end to end: client i has rows offsets[i] to offsets[i] + sizes[i]."""

    rows: Rows
    offsets: Int[Array, " n"]
    sizes: Int[Array, " n"]
    widest: int
    narrowest: int

    @property
    def chunk(self) -> int | None:
        """The length of the pieces a whole data set is taken in, or None to take it at once.

        Pieces are taken where the largest client is more than twice the average: then a cohort's work follows its own
        largest client, not the whole federation's.
        """
        total = jax.tree.leaves(self.rows)[0].shape[0]
        average = -(-total // self.sizes.shape[0])
        return None if self.widest <= max(2 * average, 32) else max(average, 16)


class View(NamedTuple):
    """One client's part of a Source. Offset and size may be traced; the bounds on the size are static."""

    rows: Rows
    offset: Count
    size: Count
    widest: int
    narrowest: int
    chunk: int | None

    def take(self, index: Int[Array, " rows"]) -> Rows:
        """The client's samples at these places."""
        return jax.tree.map(lambda a: a.at[self.offset + index].get(mode="promise_in_bounds"), self.rows)

    def all(self) -> Batch | Chunks:
        """The client's whole data set."""
        if self.widest == self.narrowest:  # equal clients: one contiguous slice and no mask
            cut = lambda a: jax.lax.dynamic_slice_in_dim(a, self.offset, self.widest)
            return Batch(jax.tree.map(cut, self.rows), places=jnp.arange(self.widest))
        if self.chunk is None:
            return self._piece(0, self.widest)
        chunk = self.chunk
        size = jnp.asarray(self.size)
        return Chunks(lambda i: self._piece(i * chunk, chunk), -(-size // chunk), size)

    def _piece(self, start: Count, length: int) -> Batch:
        index = start + jnp.arange(length)
        places = jnp.minimum(index, self.size - 1)
        return Batch(self.take(places), index < self.size, places=places)

    def at_once(self) -> Batch:
        """The client's whole data set in one batch, even if clients differ so much that most of it is padding."""
        whole = self.all()
        return whole if isinstance(whole, Batch) else self._piece(0, self.widest)

    def draw(self, key: Array, size: int, step: Count, replace: bool, seen: Rows | None = None) -> Batch:
        """The step-th minibatch in the order that key stands for (see `Clients` for the two kinds of order).

        A client with fewer samples than `size` gives all of them, in a masked batch.
        """
        place = jnp.arange(size)
        mask = None if self.narrowest >= size else place < self.size
        if replace:
            index = jax.random.randint(jax.random.fold_in(key, step), (size,), 0, self.size)
        else:
            length = size if mask is None else jnp.minimum(size, self.size)
            position = step * length + place
            index = shuffled(key, position % self.size, position // self.size, self.size)
        if seen is None:
            return Batch(self.take(index), mask, places=index)
        return Batch(jax.tree.map(lambda a: a.at[index].get(mode="promise_in_bounds"), seen), mask, True, index)


_SHUFFLE_ROUNDS = 24


def shuffled(key: Array, rank: Int[Array, " k"], epoch: Int[Array, " k"], size: Count) -> Int[Array, " k"]:
    """The sample at each rank of a pseudo-random order of 0..size−1, one order for each (key, epoch).

    The swap-or-not shuffle of Hoang, Morris and Rogaway (CRYPTO 2012): a bijection for any size, computed place by
    place. No permutation is sorted or stored, and clients of different sizes cost the same.
    """
    words = jax.random.key_data(key)
    size = jnp.asarray(size, jnp.int32)
    x = rank.astype(jnp.int32)
    drift = _mix(epoch.astype(jnp.uint32) ^ words[0])

    def swap_or_not(i: Array, x: Int[Array, " k"]) -> Int[Array, " k"]:
        salt = _mix(drift + words[1] + jnp.asarray(i, jnp.uint32) * np.uint32(0x9E3779B9))
        fraction = (salt >> 8).astype(jnp.float32) * np.float32(2.0**-24)
        pivot = jnp.minimum((fraction * size.astype(jnp.float32)).astype(jnp.int32), size - 1)
        partner = pivot - x
        partner = jnp.where(partner < 0, partner + size, partner)
        larger = jnp.maximum(x, partner).astype(jnp.uint32)
        swap = _mix(larger ^ ~salt) >> 31 == 1
        return jnp.where(swap, partner, x)

    return jax.lax.fori_loop(np.int32(0), np.int32(_SHUFFLE_ROUNDS), swap_or_not, x)


def _mix(h: Array) -> Array:
    """A 32-bit finaliser: every input bit reaches every output bit."""
    h = (h ^ (h >> 16)) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * np.uint32(0x846CA68B)
    return h ^ (h >> 16)


@jax.tree_util.register_pytree_node_class
class Clients:
    """The federation's data: one pytree of arrays for each client and level, sizes may differ.

    Arguments:
        lower: a list with one entry per client: a pytree of arrays whose leading axis counts that client's samples for
            the lower level (training data, say).
        upper: likewise for the upper level (validation data). With one of the two, both levels use the same data, as
            minimax and single-level problems do.
        weights: p_i, one number per client; None: equal; "size": in proportion to the samples of the lower level.
        center: the centre's data, one pytree of arrays: the validation data of `WeightedNodes`. The server holds them.
        center_client: or the client of this number does, and nobody else.
        replace: minibatches are drawn with replacement; otherwise (the default) a local run of steps goes through the
            client's samples in a random order, each once in every epoch.

    Example:
        >>> import numpy as np
        >>> clients = Clients(lower=[{"t": np.zeros(3)}, {"t": np.ones(5)}], weights="size")
        >>> clients.n, clients.lower_sizes.tolist(), clients.weights.tolist()
        (2, [3, 5], [0.375, 0.625])
    """

    def __init__(
        self,
        lower: Sequence[Rows] | None = None,
        upper: Sequence[Rows] | None = None,
        weights: Sequence[float] | Float[Array, " n"] | str | None = None,
        *,
        center: Rows | None = None,
        center_client: int | None = None,
        replace: bool = False,
    ) -> None:
        for name, given in (("lower", lower), ("upper", upper)):
            if given is not None and not isinstance(given, list | tuple):
                raise TypeError(f"{name} is a {type(given).__name__}; give a list with one entry per client.")
        if lower is None and upper is None:
            raise ValueError("Clients needs data: give lower=[...], upper=[...] or both, one entry per client.")
        if lower is not None and upper is not None and len(lower) != len(upper):
            raise ValueError(
                f"lower has data of {len(lower)} clients and upper of {len(upper)}: give one entry per client in both."
            )
        self._lower = None if lower is None else _join(lower, "lower")
        self._upper = None if upper is None else _join(upper, "upper")
        n = int((self._lower or self._upper).sizes.shape[0])  # type: ignore[union-attr]
        given_weights: Any = weights
        if isinstance(weights, str):
            if weights != "size":
                raise ValueError(f'weights={weights!r} is not known: give numbers, "size" or None.')
            given_weights = self.lower_sizes.astype(float)
        self.weights = _check_weights(given_weights, n)
        self._center = None if center is None else _join([center], "center")
        self.center_client = _check_center_client(center_client, center, n)
        self.replace = replace

    @property
    def n(self) -> int:
        """How many clients there are."""
        return int(self.weights.shape[0])

    @property
    def lower(self) -> Source:
        """The data of the lower level."""
        return self._lower or self._upper  # type: ignore[return-value]

    @property
    def upper(self) -> Source:
        """The data of the upper level."""
        return self._upper or self._lower  # type: ignore[return-value]

    @property
    def center(self) -> Source | None:
        """The centre's data, as those of one client; None if there are none."""
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

    def client_data(self, i: int) -> dict[str, Rows]:
        """What client i alone holds, as arguments for a Clients of its own: `Clients(**...)` has n = 1.

        Where somebody else holds the centre's data, a row of zeros stands for them: what a sample looks like.
        """
        held: dict[str, Any] = {"replace": self.replace}
        for name, source in (("lower", self._lower), ("upper", self._upper)):
            if source is not None:
                begin, end = int(source.offsets[i]), int(source.offsets[i] + source.sizes[i])
                held[name] = [jax.tree.map(lambda a: np.asarray(a[begin:end]), source.rows)]
        if self._center is not None:
            shown = np.asarray if self.center_client == i else (lambda a: np.zeros_like(a[:1]))
            held["center"] = jax.tree.map(shown, self._center.rows)
        return held

    def view(self, level: Literal["lower", "upper", "center"], i: Count) -> View:
        """Client i's part of the data of one level; the centre's has a single part, 0."""
        source = {"lower": self.lower, "upper": self.upper, "center": self._center}[level]
        assert source is not None
        if source.widest == source.narrowest:
            size: Count = source.widest
            offset: Count = i * source.widest
        else:
            size, offset = source.sizes[i], source.offsets[i]
        return View(source.rows, offset, size, source.widest, source.narrowest, source.chunk)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[bool, int | None]]:
        """The arrays, so that a compiled function takes the data as an argument."""
        return (self._lower, self._upper, self.weights, self._center), (self.replace, self.center_client)

    @classmethod
    def tree_unflatten(cls, fixed: tuple[bool, int | None], children: tuple[Any, ...]) -> "Clients":
        """The inverse of tree_flatten."""
        clients = object.__new__(cls)
        clients._lower, clients._upper, clients.weights, clients._center = children
        clients.replace, clients.center_client = fixed
        return clients

    def __repr__(self) -> str:
        sizes = f"{self.lower.narrowest}–{self.lower.widest} lower, {self.upper.narrowest}–{self.upper.widest} upper"
        center = "" if self._center is None else f", {self._center.widest} at the centre"
        return f"Clients(n={self.n}, samples each: {sizes}{center})"


def _join(parts: Sequence[Rows], level: str) -> Source:
    if not parts:
        raise ValueError(f"{level} is an empty list: a federation needs at least one client.")
    leaves, structure = jax.tree_util.tree_flatten_with_path(parts[0])
    names = [tree.path_name(path) for path, _ in leaves]
    if not leaves:
        raise ValueError(f"{level}: client 0 holds no arrays.")
    columns: list[list[np.ndarray]] = [[] for _ in leaves]
    sizes = np.empty(len(parts), np.int32)
    for i, part in enumerate(parts):
        flat, own = jax.tree.flatten(part)
        if str(own) != str(structure):
            raise ValueError(f"{level}: client {i}'s data has the structure {own}, client 0's {structure}.")
        arrays = [np.asarray(leaf) for leaf in flat]
        for name, array in zip(names, arrays, strict=True):
            if array.ndim == 0:
                raise ValueError(
                    f"{level}: client {i}'s {name} is a single number; its leading axis must count samples."
                )
        lengths = {len(array) for array in arrays}
        if len(lengths) > 1:
            each = ", ".join(f"{name}: {len(array)}" for name, array in zip(names, arrays, strict=True))
            raise ValueError(
                f"{level}: client {i}'s arrays disagree in their leading axis ({each}); "
                "give every array of a client one row per sample."
            )
        sizes[i] = lengths.pop()
        if sizes[i] == 0:
            raise ValueError(f"{level}: client {i} is empty; leave it out, or give it at least one sample.")
        for column, name, array in zip(columns, names, arrays, strict=True):
            if column and (array.shape[1:], array.dtype) != (column[0].shape[1:], column[0].dtype):
                raise ValueError(
                    f"{level}: client {i}'s {name} has samples of shape {array.shape[1:]} and type {array.dtype}, "
                    f"client 0's {column[0].shape[1:]} and {column[0].dtype}; they must agree."
                )
            column.append(array)
    joined = [np.concatenate(column) for column in columns]
    ends = np.cumsum(sizes, dtype=np.int64)
    if ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{level}: {ends[-1]} samples in all; at most {np.iinfo(np.int32).max} can be indexed.")
    for name, array in zip(names, joined, strict=True):
        real = jnp.issubdtype(array.dtype, jnp.floating) or np.issubdtype(array.dtype, np.integer)
        if not (real or array.dtype == bool):
            raise ValueError(f"{level}: {name} has the type {array.dtype}; data are arrays of real numbers.")
        whole = array.astype(np.float32) if array.dtype.kind == "V" else array  # bfloat16
        bad = np.flatnonzero(~np.isfinite(whole.reshape(len(array), -1)).all(axis=1))
        if bad.size:
            client = int(np.searchsorted(ends, bad[0], side="right"))
            row = int(bad[0] - (ends[client] - sizes[client]))
            raise ValueError(
                f"{level}: {name} is not finite (NaN or infinity) in {bad.size} sample(s), first in sample {row} of "
                f"client {client}; clean or fill the data before the run."
            )
    return Source(
        jax.tree.unflatten(structure, [jnp.asarray(array) for array in joined]),
        jnp.asarray(ends - sizes, jnp.int32),
        jnp.asarray(sizes),
        int(sizes.max()),
        int(sizes.min()),
    )


def _check_weights(weights: Any, n: int) -> Float[Array, " n"]:
    if weights is None:
        return jnp.full(n, 1.0 / n)
    try:
        given = np.asarray(weights, float)
    except (TypeError, ValueError):
        raise ValueError(f'weights={weights!r}: give one number per client, "size" or None.') from None
    if given.shape != (n,):
        raise ValueError(f"weights has the shape {given.shape}; give one number for each of the {n} clients.")
    if not (np.isfinite(given).all() and (given >= 0).all() and given.sum() > 0):
        raise ValueError("weights must be finite, not negative, and not all zero.")
    return jnp.asarray(given / given.sum())


def _check_center_client(given: int | None, center: Rows | None, n: int) -> int | None:
    if given is None:
        return None
    if center is None:
        raise ValueError(f"center_client={given!r} says who holds the centre's data, and there are none: give center.")
    if not isinstance(given, int | np.integer) or isinstance(given, bool) or not 0 <= given < n:
        raise ValueError(
            f"center_client={given!r}: give the number of a client, from 0 to {n - 1}, or None for the server."
        )
    return int(given)


def sample_cohort(key: Array, n: int, size: int, chances: Float[Array, " n"] | None = None) -> Int[Array, " size"]:
    """A set of clients, drawn uniformly without replacement, in ascending order; with chances, by those, with it.

    A small cohort of a large federation is drawn by Floyd's method (Bentley, CACM 1987), whose cost does not grow
    with n.
    """
    if chances is not None:
        return jnp.sort(jax.random.choice(key, n, (size,), p=chances / jnp.sum(chances)))
    if size == n:
        return jnp.arange(n)
    if size > 2048 or 8 * size > n:
        return jnp.sort(jax.random.permutation(key, n)[:size])
    draws = jax.random.randint(key, (size,), 0, n - size + 1 + jnp.arange(size))

    def insert(j: Array, chosen: Int[Array, " size"]) -> Int[Array, " size"]:
        taken = jnp.any(chosen == draws[j])
        return chosen.at[j].set(jnp.where(taken, n - size + j, draws[j]))

    return jnp.sort(jax.lax.fori_loop(0, size, insert, jnp.full(size, -1)))
