"""Clients: the federation's data, end to end without padding; minibatches; the choice of a cohort."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rookery import frames, hosts, jaxprs, tree
from rookery.arguments import check_counts
from rookery.placement import HostArray, on_host
from rookery.placement import check as check_placement

if TYPE_CHECKING:
    import pandas as pd

Rows: TypeAlias = Any  # a pytree of arrays with a common leading axis: the samples
Count = int | Int[Array, ""]


class Batch(NamedTuple):
    """Samples for a loss. With a mask, only the marked rows count and the loss is their mean, row by row."""

    rows: Rows
    mask: Bool[Array, " rows"] | None = None
    seen: bool = False  # the problem's `features` have been applied
    places: Int[Array, " rows"] | None = None  # which of the client's samples they are
    key: Array | None = None  # for a loss that is random


class Chunks(NamedTuple):
    """A whole data set in masked pieces, for clients of very unequal sizes: get(i) for i < pieces, `total` samples."""

    get: Callable[[Count], Batch]
    pieces: Int[Array, ""]
    total: Int[Array, ""]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "offsets", "sizes"],
    meta_fields=["widest", "narrowest", "chunk"],
)
@dataclass(frozen=True)
class Source:
    """One data set of every client, end to end: client i has rows offsets[i] to offsets[i] + sizes[i].

    `widest`, `narrowest` and `chunk` describe the whole federation, also in a `Source` that holds one client's rows
    alone: the shapes that a client computes with follow from them, and are the same on every engine.
    """

    rows: Rows
    offsets: Int[Array, " n"]
    sizes: Int[Array, " n"]
    widest: int  # the largest client's number of samples
    narrowest: int  # the smallest client's
    chunk: int | None  # the length of the pieces a whole data set is taken in; None: at once

    def member(self, rows: Rows, offset: Any, size: Any) -> "Source":
        """The same data set as one client has it."""
        return Source(rows, offset, size, self.widest, self.narrowest, self.chunk)


def _chunk(total: int, clients: int, widest: int) -> int | None:
    """Pieces are taken where the largest client is more than twice the average.

    A cohort's work then follows its own largest client, not the whole federation's.
    """
    average = -(-total // clients)
    return None if widest <= max(2 * average, 32) else max(average, 16)


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
        place = jnp.arange(size, dtype=jnp.int32)
        mask = None if self.narrowest >= size else place < self.size
        index = minibatch(key, step, self.size, length=size, replace=replace)
        if seen is None:
            return Batch(self.take(index), mask, places=index)
        return Batch(jax.tree.map(lambda a: a.at[index].get(mode="promise_in_bounds"), seen), mask, True, index)


@partial(jax.jit, static_argnames=("length", "replace"))
def minibatch(key: Array, step: Count, size: Count, length: int, replace: bool) -> Int[Array, " length"]:
    """The samples of the step-th minibatch: places in 0..size−1. (`Client.loop` finds it by its name.)"""
    place = jnp.arange(length, dtype=jnp.int32)
    size = jnp.asarray(size, jnp.int32)
    if replace:
        return jax.random.randint(jax.random.fold_in(key, step), (length,), 0, size, jnp.int32)
    own = jnp.minimum(length, size)
    position = jnp.asarray(step, jnp.int32) * own + place
    return shuffled(key, position % size, position // size, size)


_SHUFFLE_ROUNDS = 24


def shuffled(key: Array, rank: Int[Array, " k"], epoch: Int[Array, " k"], size: Count) -> Int[Array, " k"]:
    """The sample at each rank of a pseudo-random order of 0..size−1, one order for each (key, epoch).

    The swap-or-not shuffle of Hoang, Morris and Rogaway (CRYPTO 2012): a bijection for any size, computed place by
    place. No permutation is sorted or stored, and clients of different sizes cost the same. Its rounds are written out,
    for they then fuse into one kernel where a loop would launch dozens; the barriers keep them out of other kernels,
    which would compute (and compile) them again.
    """
    words = jax.random.key_data(key)
    size = jnp.asarray(size, jnp.int32)
    drift = _mix(epoch.astype(jnp.uint32) ^ words[0]) + words[1]
    turns = np.arange(_SHUFFLE_ROUNDS, dtype=np.uint32)[:, None] * np.uint32(0x9E3779B9)
    salts = _mix(drift + turns)
    fractions = (salts >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    pivots = jnp.minimum((fractions * size.astype(jnp.float32)).astype(jnp.int32), size - 1)
    salts, pivots = jax.lax.optimization_barrier(((~salts).astype(jnp.int32), pivots))
    # What follows is 24 times as long in the program: so a row of numbers for each constant (made of the salts: it is
    # then vectorised as they are), plain operations on signed words, and of a hash what its first bit depends on.
    zero = salts[:1] & 0
    x = zero + rank.astype(jnp.int32)
    size, *constants = (zero + value for value in (size, 16, 15, *(int(f.view(np.int32)) for f in _FACTORS)))
    sixteen, fifteen, *factors = constants
    for turn in range(_SHUFFLE_ROUNDS):
        salt, pivot = (jax.lax.slice_in_dim(each, turn, turn + 1) for each in (salts, pivots))
        partner = pivot - x
        partner = jax.lax.select(jax.lax.lt(partner, zero), partner + size, partner)
        h = jax.lax.max(x, partner) ^ salt
        h = (h ^ jax.lax.shift_right_logical(h, sixteen)) * factors[0]
        h = (h ^ jax.lax.shift_right_logical(h, fifteen)) * factors[1]
        x = jax.lax.select(jax.lax.lt(h, zero), partner, x)
    return jax.lax.optimization_barrier(x[0])


_FACTORS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def _mix(h: Array) -> Array:
    """A 32-bit finaliser: every input bit reaches every output bit."""
    h = (h ^ (h >> 16)) * _FACTORS[0]
    h = (h ^ (h >> 15)) * _FACTORS[1]
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
        test: likewise, data that no method sees: for `evaluate_client`, where the data are.
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

    here: range | None = None  # the clients whose data this process holds; None: all
    digest: str | None = None  # of all data, where one process does not hold them
    schema: frames.Schema | None = None  # what the arrays stand for, where they were made of a table
    by_size = False  # whether weights are to be in proportion to sizes that are not known yet

    def __init__(
        self,
        lower: Sequence[Rows] | None = None,
        upper: Sequence[Rows] | None = None,
        weights: Sequence[float] | Float[Array, " n"] | str | None = None,
        *,
        test: Sequence[Rows] | None = None,
        center: Rows | None = None,
        center_client: int | None = None,
        replace: bool = False,
    ) -> None:
        for name, given in (("lower", lower), ("upper", upper), ("test", test)):
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
        n = len(lower if lower is not None else upper)  # type: ignore[arg-type]
        if test is not None and len(test) != n:
            raise ValueError(f"test has data of {len(test)} clients, and there are {n}: give one entry per client.")
        self._test = None if test is None else _join(test, "test")
        self._describe(weights, center, center_client, replace)

    def _describe(self, weights: Any, center: Rows | None, center_client: int | None, replace: bool) -> None:
        """All but the clients' data."""
        n = len(self.lower.sizes)
        if isinstance(weights, str):
            if weights != "size":
                raise ValueError(f'weights={weights!r} is not known: give numbers, "size" or None.')
            weights = self.lower_sizes.astype(float)
        self.weights = _check_weights(weights, n)
        self._center = None if center is None else _join([center], "center")
        self.center_client = _check_center_client(center_client, center, n)
        if not isinstance(replace, bool | np.bool_):
            raise ValueError(f"replace={replace!r} is not True or False.")
        self.replace = bool(replace)

    @classmethod
    def from_frame(
        cls,
        table: Any,
        by: str,
        *,
        upper: float | None = None,
        test: float | None = None,
        features: Sequence[str] | None = None,
        label: str | None = None,
        target: str | None = None,
        drop: Sequence[str] = (),
        categories: Mapping[str, Sequence[Any]] | None = None,
        classes: Sequence[Any] | None = None,
        standardize: str | frames.Numbers | None = None,
        center: str | None = None,
        weights: Sequence[float] | Float[Array, " n"] | str | None = None,
        replace: bool = False,
        seed: int = 0,
    ) -> "Clients":
        """The clients of a table, with a column that says whose row it is.

        A sample is {"features": floats (d,), "label": int32, "target": float}, the last two where they are asked for.
        `schema` has what they stand for, `names` the clients' names, in their (sorted) order.

        Arguments:
            table: a pandas DataFrame; a path to a CSV or Parquet file; {name: array}; or an object with `column_names`
                (or `columns`) that gives a column by name: a Hugging Face dataset, a PyArrow table.
            by: the column with the client's name.
            upper: the share of each client's rows that go to the upper level, at least one, drawn by the seed and the
                client's name; the others, at least one, are the lower level's. None: one data set for both.
            test: the share of each client's rows, at least one, that no method sees: for `evaluate_client`.
            features: columns of numbers (or of vectors of one length); None: all but `by`, label, target and `drop`.
            label: a column of classes, words or integers, coded 0, 1, … in the order of `classes`.
            target: a column with a number to predict.
            drop: columns to leave out.
            categories: {column: its values}, for columns of text: a feature for each value, 1 where a row has it.
            classes: the labels there may be; None: those in the table, sorted. (Both are known to every client.)
            standardize: "client": each client's numbers, less the mean of its own rows at the lower level and over
                their deviation (zero where they do not vary); nothing of other clients or of the upper level enters.
                Or {column: (mean, scale)} with numbers that are public. None: as they are.
            center: the client whose rows are the centre's, all of them; it is then no client. For `WeightedNodes`.
            weights, replace: as in `Clients`.
            seed: of the split.

        Example:
            >>> rows = {"hospital": ["a", "a", "b", "b", "b"], "age": [61, 48, 70, 39, 55], "ill": [1, 0, 1, 0, 0]}
            >>> clients = Clients.from_frame(rows, by="hospital", upper=0.3, label="ill")
            >>> clients.names, clients.lower_sizes.tolist(), clients.schema.features
            (('a', 'b'), [1, 2], ('age',))
        """
        found = frames.divide(
            table,
            by,
            upper=upper,
            test=test,
            features=features,
            label=label,
            target=target,
            drop=drop,
            categories=categories,
            classes=classes,
            standardize=standardize,
            center=center,
            seed=seed,
        )
        clients = cls(found.lower, found.upper, weights, test=found.test, center=found.center, replace=replace)
        clients.schema = found.schema
        return clients

    @classmethod
    def from_arrays(
        cls,
        rows: Rows,
        sizes: Sequence[int] | np.ndarray,
        *,
        upper: tuple[Rows, Any] | None = None,
        test: tuple[Rows, Any] | None = None,
        weights: Sequence[float] | Float[Array, " n"] | str | None = None,
        center: Rows | None = None,
        center_client: int | None = None,
        replace: bool = False,
        placement: str = "device",
    ) -> "Clients":
        """Clients whose samples stand end to end in arrays: nothing is made for each client, be there a million.

        Arguments:
            rows: a pytree of arrays with all samples of the lower level, client after client.
            sizes: how many of them each client has.
            upper: (rows, sizes) of the upper level; None: both levels use the same data.
            test: (rows, sizes) of data that no method sees.
            weights, center, center_client, replace: as in `Clients`.
            placement: "device": the rows are copied to it. "host": they stay where they are, in NumPy arrays or
                `numpy.memmap` (they may be changed between two runs, not during one), and the rows of the next rounds'
                cohorts travel to the device while it computes. For data that do not fit the device.

        Example:
            >>> clients = Clients.from_arrays(np.arange(6.0), [1, 2, 3], weights="size")
            >>> clients.n, clients.client_data(1)["lower"][0].tolist()
            (3, [1.0, 2.0])
        """
        check_placement(placement)
        given = {"lower": (rows, sizes), "upper": upper, "test": test}
        sources = {name: None if own is None else _end_to_end(own, name, placement) for name, own in given.items()}
        for name, source in sources.items():
            if source is not None and len(source.sizes) != len(sizes):
                raise ValueError(f"{name} has data of {len(source.sizes)} clients, and there are {len(sizes)}.")
        clients = object.__new__(cls)
        clients._lower, clients._upper, clients._test = sources.values()
        clients._describe(weights, center, center_client, replace)
        return clients

    @classmethod
    def from_loader(
        cls,
        n: int,
        load: Callable[[int], Mapping[str, Rows]],
        *,
        weights: Sequence[float] | Float[Array, " n"] | str | None = None,
        center: Rows | None = None,
        center_client: int | None = None,
        replace: bool = False,
    ) -> "Clients":
        """Clients whose data are loaded where they live.

        Of several processes (`rookery.hosts`), each loads the clients of its own devices alone, for an
        `rk.Simulation(mesh="all")`. A single process loads all of them.

        Arguments:
            n: how many clients there are.
            load: load(i) -> {"lower": rows, "upper": rows, "test": rows} of client i, each a pytree of arrays whose
                leading axis counts samples; what there is not is left out, for all clients.
            weights, center, center_client, replace: as in `Clients`.

        Example:
            >>> clients = Clients.from_loader(3, lambda i: {"lower": np.full(i + 1, i)})
            >>> clients.lower_sizes.tolist()
            [1, 2, 3]
        """
        check_counts(n=n)
        here = hosts.share(n)
        group = hosts.Hosts(together=len(here) < n)
        each = [dict(load(i)) for i in here]
        names = [name for name in ("lower", "upper", "test") if name in each[0]]
        for i, own in zip(here, each, strict=True):
            if set(own) != set(names) or not {"lower", "upper"} & set(names):
                raise ValueError(
                    f"load({i}) gives {sorted(map(str, own))}; give 'lower' or 'upper' or both, and 'test' where there "
                    "are such data, for every client the same."
                )
        held = {name: _join([own[name] for own in each], name, here.start) for name in names}
        sample = lambda source: [[str(a.dtype), list(a.shape[1:])] for a in jax.tree.leaves(source.rows)]
        group.agree({f"{name} sample": sample(source) for name, source in held.items()})
        sizes = {name: np.asarray(source.sizes).tolist() for name, source in held.items()}
        each_told = group.gathered((sizes, [jaxprs.digest(*jax.tree.leaves(own))[:16] for own in each]))

        def whole(name: str) -> Source | None:
            if name not in held:
                return None
            counts = np.concatenate([told[name] for told, _ in each_told]).astype(np.int64)
            ends = np.cumsum(counts)
            begin = ends[here.start] - counts[here.start]  # of the rows that are here
            offsets, widest = jnp.asarray(ends - counts - begin, jnp.int32), int(counts.max())
            chunk = _chunk(int(ends[-1]), n, widest)
            return Source(held[name].rows, offsets, jnp.asarray(counts, jnp.int32), widest, int(counts.min()), chunk)

        clients = object.__new__(cls)
        clients._lower, clients._upper, clients._test = map(whole, ("lower", "upper", "test"))
        clients._describe(weights, center, center_client, replace)
        digests = [own for _, told in each_told for own in told]
        clients.digest = jaxprs.digest(*digests, clients.weights, *jax.tree.leaves(clients.center), str(replace))
        clients.here = None if group.count == 1 else here
        return clients

    @classmethod
    def like(
        cls,
        lower: Any = None,
        upper: Any = None,
        n: int = 1,
        weights: Sequence[float] | Float[Array, " n"] | str | None = None,
        *,
        test: Any = None,
        center: Rows | None = None,
        center_client: int | None = None,
        replace: bool = False,
    ) -> "Clients":
        """Clients whose data are elsewhere, for the coordinator of a `Federation` over a network.

        Arguments:
            lower, upper, test: what one sample looks like: a pytree of arrays, or of `jax.ShapeDtypeStruct`,
                without an axis for samples. Their numbers do not matter.
            n: how many clients there are.
            center: the centre's data themselves; with a center_client, which holds them, one sample of them.
            weights, center_client, replace: as in `Clients`.

        Example:
            >>> sample = {"features": np.zeros(4), "label": np.int32(0)}
            >>> Clients.like(lower=sample, upper=sample, n=3).held
            False
        """
        check_counts(n=n)
        shaped = lambda a: a if hasattr(a, "shape") else np.asarray(a)
        row = lambda a: np.zeros((1, *shaped(a).shape), jax.dtypes.canonicalize_dtype(shaped(a).dtype))
        each = {
            name: [jax.tree.map(row, sample)] * n
            for name, sample in (("lower", lower), ("upper", upper), ("test", test))
            if sample is not None
        }
        if center_client is not None:
            center = jax.tree.map(row, center)
        by_size = isinstance(weights, str) and weights == "size"
        given = None if by_size else weights
        clients = cls(**each, weights=given, center=center, center_client=center_client, replace=replace)
        clients.by_size = by_size
        return clients.told({name: [1] * n for name in each})

    def told(self, sizes: Mapping[str, Sequence[int]], center: int | None = None) -> "Clients":
        """These clients, whose data are elsewhere, of these sizes at each level; `center`: of the centre's data."""

        def of(name: str, source: Source | None) -> Source | None:
            if source is None:
                return None
            own = np.asarray(sizes[name], np.int32)
            widest, total = int(own.max()), int(own.sum())
            rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((widest, *a.shape[1:]), a.dtype), source.rows)
            at = jnp.zeros(len(own), jnp.int32)
            return Source(rows, at, jnp.asarray(own), widest, int(own.min()), _chunk(total, len(own), widest))

        levels = [of(name, source) for name, source in self.levels().items()]
        held = self._center
        if held is not None and self.center_client is not None:
            count = 1 if center is None else center
            rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), held.rows)
            held = Source(rows, jnp.zeros(1, jnp.int32), jnp.full(1, count, jnp.int32), count, count, None)
        clients = Clients.tree_unflatten((self.replace, self.center_client), (*levels, self.weights, held))
        clients.by_size, clients.schema = self.by_size, self.schema
        if clients.by_size:
            clients.weights = _check_weights(clients.lower_sizes.astype(float), clients.n)
        return clients

    def levels(self) -> dict[str, Source | None]:
        return {"lower": self._lower, "upper": self._upper, "test": self._test}

    @property
    def held(self) -> bool:
        """Whether the data are here: not those of `like`."""
        return not any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(self))

    @property
    def placement(self) -> str:
        """Where the clients' rows are: "device" or "host"."""
        return "host" if on_host(self.levels()) else "device"

    @property
    def names(self) -> tuple[str, ...]:
        """What the clients are called: as the table has it, or by their number."""
        return self.schema.names if self.schema else tuple(map(str, range(self.n)))

    def summary(self) -> "pd.DataFrame":
        """A row for each client: its weight, its samples at each level, and how many have each label."""
        of = self.schema.label if self.schema else "label"
        counts = {f"{of}={name}": own for name, own in self.label_counts().items()}
        return frames.summary(self.names, np.asarray(self.weights), self._sizes(), counts)

    def describe(self) -> str:
        """The same in words."""
        by = f" by {self.schema.by}" if self.schema else ""
        return frames.describe(by, self.names, self._sizes(), self.label_counts())

    def label_counts(self) -> dict[str, Int[np.ndarray, " n"]]:
        """For each class, how many samples of it each client has, at both levels and in the test data together.

        Empty if samples have no "label" that is an integer.
        """
        sources = [source for source in (self._lower, self._upper, self._test) if source is not None]
        rows = [source.rows.get("label") if isinstance(source.rows, dict) else None for source in sources]
        if any(own is None or own.ndim != 1 or not jnp.issubdtype(own.dtype, jnp.integer) for own in rows):
            return {}
        labels = np.concatenate([np.asarray(own) for own in rows])
        owner = np.concatenate([np.repeat(np.arange(self.n), np.asarray(source.sizes)) for source in sources])
        classes = dict(enumerate(self.schema.classes)) if self.schema else {int(k): k for k in np.unique(labels)}
        return {str(name): np.bincount(owner[labels == k], minlength=self.n) for k, name in classes.items()}

    def _sizes(self) -> dict[str, np.ndarray]:
        test = {} if self._test is None else {"test": np.asarray(self._test.sizes)}
        if self.one_data_set:
            return {"samples": self.lower_sizes, **test}
        return {"lower": self.lower_sizes, "upper": self.upper_sizes, **test}

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
    def test(self) -> Source | None:
        """The data that no method sees; None if there are none."""
        return self._test

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
        if self.here is not None and i not in self.here:
            raise ValueError(f"client {i}'s data are with another process; this one holds {self.here}.")
        held: dict[str, Any] = {"replace": self.replace}
        for name, source in (("lower", self._lower), ("upper", self._upper), ("test", self._test)):
            if source is not None:
                begin, end = int(source.offsets[i]), int(source.offsets[i] + source.sizes[i])
                held[name] = [jax.tree.map(lambda a: np.asarray(a)[begin:end], source.rows)]
        if self._center is not None:
            shown = np.asarray if self.center_client == i else (lambda a: np.zeros_like(a[:1]))
            held["center"] = jax.tree.map(shown, self._center.rows)
        return held

    def few(self, most: int, ragged: bool) -> "Clients":
        """A federation of one client with a few samples of the largest one; `ragged`: as if clients' sizes differed."""

        def own(source: Source) -> Source:
            sizes = np.asarray(source.sizes)
            here = range(len(sizes)) if self.here is None else self.here
            largest = here.start + int(np.argmax(sizes[here.start : here.stop]))
            begin, size = int(source.offsets[largest]), min(int(source.sizes[largest]), most)
            rows = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)[begin : begin + size]), source.rows)
            least = size - ragged
            return Source(rows, jnp.zeros(1, jnp.int32), jnp.full(1, size, jnp.int32), size, least, None)

        return self._each(own, jnp.ones(1))

    def members(self, ids: Int[Array, " cohort"] | None, first: Count = 0) -> "Clients":
        """The data of these clients, one beside the other: `client_axes` says which leaves have a row for each.

        Arguments:
            ids: their numbers; None: the shapes of one client's own.
            first: the number of the first client whose data are here.
        """
        if ids is None:
            rows = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
            number = lambda a, _: jax.ShapeDtypeStruct((1,), a.dtype)
        else:
            rows, number = lambda a: a, lambda a, at: a[at][:, None]
        here = None if ids is None else ids - first

        def own(source: Source) -> Source:
            numbers = number(source.offsets, here), number(source.sizes, here)
            return source.member(jax.tree.map(rows, source.rows), *numbers)

        return self._each(own, number(self.weights, ids))

    def client_axes(self) -> list[int | None]:
        """For each leaf of `members`: 0 if every client has a row of it, None if it is the rows that all share."""
        marked = self._each(lambda source: source.member(jax.tree.map(lambda a: -1, source.rows), 0, 0), 0)
        return [None if mark < 0 else 0 for mark in jax.tree.leaves(marked)]

    def site(self, i: int, padded: int | None = None) -> "Clients":
        """What client i alone holds, as its site has it; the rows padded to a number that several sites have."""

        def own(source: Source) -> Source:
            begin, size = int(source.offsets[i]), int(source.sizes[i])
            length = size if padded is None else max(size, min(padded, source.widest))
            cut = lambda a: np.asarray(a)[begin : begin + size]  # a slice of a JAX array would be compiled
            pad = lambda a: np.concatenate([a, np.zeros((length - size, *a.shape[1:]), a.dtype)])
            rows = jax.tree.map(lambda a: jnp.asarray(pad(cut(a))), source.rows)
            return source.member(rows, jnp.zeros(1, jnp.int32), jnp.full(1, size, jnp.int32))

        return self._each(own, jnp.ones(1))

    def seen_by_site(self, own: "Clients") -> "Clients":
        """The shapes of the federation as a site traces a plan with them: its own rows, everybody's numbers."""
        shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
        everyone = lambda a: jax.ShapeDtypeStruct((self.n,), a.dtype)

        def of(source: Source) -> Source:
            return source.member(jax.tree.map(shape, source.rows), everyone(source.offsets), everyone(source.sizes))

        seen = own._each(of, shape(self.weights))
        seen._center = jax.tree.map(shape, self._center)
        return seen

    def holding(self, own: "Clients") -> "Clients":
        """What one of these clients has, its own data as those of a single client: as its site has it, see `site`."""

        def of(described: Source | None, held: Source | None) -> Source | None:
            if described is None or held is None:
                return None
            return described.member(held.rows, jnp.zeros(1, jnp.int32), jnp.asarray(held.sizes))

        pairs = zip(self.levels().values(), own.levels().values(), strict=True)
        sources = [of(described, held) for described, held in pairs]
        return Clients.tree_unflatten((self.replace, self.center_client), (*sources, jnp.ones(1), None))

    def at_center(self) -> "Clients":
        """The centre's data alone."""
        return Clients.tree_unflatten((self.replace, self.center_client), (None, None, None, jnp.ones(1), self._center))

    def _each(self, own: Callable[[Source], Source], weights: Any) -> "Clients":
        """With what `own` makes of each data set, without the centre's."""
        sources = [None if source is None else own(source) for source in (self._lower, self._upper, self._test)]
        return Clients.tree_unflatten((self.replace, self.center_client), (*sources, weights, None))

    def view(self, level: Literal["lower", "upper", "test", "center"], i: Count) -> View:
        """Client i's part of the data of one level; the centre's has a single part, 0."""
        source = {"lower": self.lower, "upper": self.upper, "test": self._test, "center": self._center}[level]
        assert source is not None
        size = source.widest if source.widest == source.narrowest else source.sizes[i]
        return View(source.rows, source.offsets[i], size, source.widest, source.narrowest, source.chunk)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[bool, int | None]]:
        """The arrays, so that a compiled function takes the data as an argument."""
        arrays = (self._lower, self._upper, self._test, self.weights, self._center)
        return arrays, (self.replace, self.center_client)

    @classmethod
    def tree_unflatten(cls, fixed: tuple[bool, int | None], children: tuple[Any, ...]) -> "Clients":
        """The inverse of tree_flatten."""
        clients = object.__new__(cls)
        clients._lower, clients._upper, clients._test, clients.weights, clients._center = children
        clients.replace, clients.center_client = fixed
        return clients

    def __repr__(self) -> str:
        sizes = f"{self.lower.narrowest}–{self.lower.widest} lower, {self.upper.narrowest}–{self.upper.widest} upper"
        test = "" if self._test is None else f", {self._test.narrowest}–{self._test.widest} for tests"
        center = "" if self._center is None else f", {self._center.widest} at the centre"
        where = ", on the host" if self.placement == "host" else ""
        return f"Clients(n={self.n}, samples each: {sizes}{test}{center}{where})"


def _join(parts: Sequence[Rows], level: str, first: int = 0) -> Source:
    """The data of clients, the first of them of this number."""
    if not parts:
        raise ValueError(f"{level} is an empty list: a federation needs at least one client.")
    leaves, structure = jax.tree_util.tree_flatten_with_path(parts[0])
    names = [tree.path_name(path) for path, _ in leaves]
    if not leaves:
        raise ValueError(f"{level}: client {first} holds no arrays.")
    columns: list[list[np.ndarray]] = [[] for _ in leaves]
    sizes = np.empty(len(parts), np.int32)
    for i, part in enumerate(parts):
        flat, own = jax.tree.flatten(part)
        if str(own) != str(structure):
            raise ValueError(
                f"{level}: client {first + i}'s data has the structure {own}, client {first}'s {structure}."
            )
        arrays = [np.asarray(leaf) for leaf in flat]
        for name, array in zip(names, arrays, strict=True):
            if array.ndim == 0:
                raise ValueError(
                    f"{level}: client {first + i}'s {name} is a single number; its leading axis must count samples."
                )
        lengths = {len(array) for array in arrays}
        if len(lengths) > 1:
            each = ", ".join(f"{name}: {len(array)}" for name, array in zip(names, arrays, strict=True))
            raise ValueError(
                f"{level}: client {first + i}'s arrays disagree in their leading axis ({each}); "
                "give every array of a client one row per sample."
            )
        sizes[i] = lengths.pop()
        if sizes[i] == 0:
            raise ValueError(f"{level}: client {first + i} is empty; leave it out, or give it at least one sample.")
        for column, name, array in zip(columns, names, arrays, strict=True):
            if column and (array.shape[1:], array.dtype) != (column[0].shape[1:], column[0].dtype):
                raise ValueError(
                    f"{level}: client {first + i}'s {name} has samples of shape {array.shape[1:]} and type "
                    f"{array.dtype}, client {first}'s {column[0].shape[1:]} and {column[0].dtype}; they must agree."
                )
            column.append(array)
    return _source([np.concatenate(column) for column in columns], structure, names, sizes, level, first)


def _end_to_end(given: Any, level: str, placement: str) -> Source:
    """A level's data, given as (rows, sizes): all samples end to end, and each client's number of them."""
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"{level} is a {type(given).__name__}; give a pair (rows, sizes).")
    rows, counts = given
    leaves, structure = jax.tree_util.tree_flatten_with_path(rows)
    names = [tree.path_name(path) for path, _ in leaves]
    if not leaves:
        raise ValueError(f"{level}: the rows hold no arrays.")
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if placement == "host" and not isinstance(leaf, np.ndarray):
            raise TypeError(
                f"{level}: {name} is a {type(leaf).__name__}; rows that stay on the host are NumPy arrays or "
                "numpy.memmap: give one of those, or leave placement out."
            )
    arrays = [np.asarray(leaf) for _, leaf in leaves]
    counted = np.asarray(counts)
    if counted.ndim != 1 or not len(counted) or counted.dtype.kind not in "iu":
        raise ValueError(f"{level}: sizes are whole numbers, one for each client; they are {counts!r:.60}.")
    if counted.min() < 1:
        raise ValueError(f"{level}: client {int(np.argmin(counted))} is empty; leave it out.")
    total = int(counted.sum(dtype=np.int64))
    for name, array in zip(names, arrays, strict=True):
        if array.ndim == 0 or len(array) != total:
            has = "is a single number" if array.ndim == 0 else f"has {len(array)} rows"
            raise ValueError(f"{level}: {name} {has}, and the sizes add up to {total}.")
    return _source(arrays, structure, names, counted, level, placement=placement)


_AT_ONCE = 1 << 22  # numbers that are looked at together
_ALIGNED = 64  # bytes, for memory that JAX shares


def _source(
    joined: list[np.ndarray], structure: Any, names: list[str], sizes: np.ndarray, level: str, begin: int = 0,
    placement: str = "device",
) -> Source:  # fmt: skip
    """A level's data, looked at once: arrays of all samples end to end."""
    ends = np.cumsum(sizes, dtype=np.int64)
    if ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{level}: {ends[-1]} samples in all; at most {np.iinfo(np.int32).max} can be indexed.")
    for name, array in zip(names, joined, strict=True):
        real = jnp.issubdtype(array.dtype, jnp.floating) or np.issubdtype(array.dtype, np.integer)
        if not (real or array.dtype == bool):
            raise ValueError(f"{level}: {name} has the type {array.dtype}; data are arrays of real numbers.")
        made = jax.dtypes.canonicalize_dtype(array.dtype)
        if made == array.dtype and array.dtype.kind in "biu":
            continue
        wrong = _rows_where(lambda a: ~np.isfinite(a) | overflows(a), array)
        for find, what, fix in (
            (lambda a: ~np.isfinite(a), "is not finite (NaN or infinity)", "clean or fill the data before the run"),
            (overflows, f"does not fit into {made}", "rescale the data, or set jax_enable_x64"),
        ):
            bad = wrong[_rows_where(find, array[wrong])] if wrong.size else wrong
            if bad.size:
                client = int(np.searchsorted(ends, bad[0], side="right"))
                row = int(bad[0] - (ends[client] - sizes[client]))
                raise ValueError(
                    f"{level}: {name} {what} in {bad.size} sample(s), first in sample {row} of client "
                    f"{begin + client}; {fix}."
                )
    put = HostArray if placement == "host" else _placed
    return Source(
        jax.tree.unflatten(structure, [put(array) for array in joined]),
        jnp.asarray(ends - sizes, jnp.int32),
        jnp.asarray(sizes, jnp.int32),
        int(sizes.max()),
        int(sizes.min()),
        _chunk(int(ends[-1]), len(sizes), int(sizes.max())),
    )


def _rows_where(find: Callable[[np.ndarray], np.ndarray], array: np.ndarray) -> np.ndarray:
    """The places of the rows in which something is found, looked for piece by piece: a mask of all would be large."""
    step = max(1, _AT_ONCE // max(1, int(np.prod(array.shape[1:], dtype=np.int64))))
    found = []
    for begin in range(0, len(array), step):
        piece = array[begin : begin + step]
        piece = piece.astype(np.float32) if piece.dtype.kind == "V" else piece  # bfloat16
        marked = find(piece)
        if marked.any():
            found.append(begin + np.flatnonzero(marked.reshape(len(piece), -1).any(axis=1)))
    return np.concatenate(found) if found else np.zeros(0, int)


def _placed(array: np.ndarray) -> Array:
    """The array on the default device, copied once: `jnp.asarray` would hold two copies for a while.

    On a CPU `device_put` shares aligned memory. What nobody can write to (JAX's own arrays, files mapped for reading)
    may be shared with the caller; anything else is copied into memory of NumPy's, which has huge pages, where rows here
    and there are found faster.
    """
    with jax.ensure_compile_time_eval():  # under a trace, too
        where = next(iter(jax.device_put(0).devices())).platform
        if where == "cpu" and _writeable(array):
            made = jax.dtypes.canonicalize_dtype(array.dtype)
            room = np.empty(array.size * made.itemsize + _ALIGNED, np.uint8)
            begin = -room.ctypes.data % _ALIGNED
            own = room[begin : begin + array.size * made.itemsize].view(made).reshape(array.shape)
            np.copyto(own, array, casting="unsafe")
            array = own
        return jax.block_until_ready(jax.device_put(array))


def _writeable(array: Any) -> bool:
    """Whether the array, or one that it is a view of, can be written to."""
    return isinstance(array, np.ndarray) and (array.flags.writeable or _writeable(array.base))


def overflows(array: np.ndarray) -> Bool[np.ndarray, "..."]:
    """Where a finite number does not fit into the type that the array gets in JAX, which may be narrower."""
    made = jax.dtypes.canonicalize_dtype(array.dtype)
    if made == array.dtype:
        return np.zeros(array.shape, bool)
    if np.issubdtype(made, np.integer):
        return (array < np.iinfo(made).min) | (array > np.iinfo(made).max)
    with np.errstate(over="ignore"):
        return np.isfinite(array) & ~np.isfinite(array.astype(made))


def _check_weights(weights: Any, n: int) -> Float[Array, " n"]:
    if weights is None:
        return jnp.full(n, 1.0 / n, jnp.result_type(float))
    try:
        given: Any = np.asarray(weights)
        given = given.astype(float) if given.dtype.kind in "iufVO" else None  # neither words, nor true and false
    except (TypeError, ValueError):
        given = None
    if given is None:
        raise ValueError(f'weights={weights!r}: give one number per client, "size" or None.')
    if given.shape != (n,):
        raise ValueError(f"weights has the shape {given.shape}; give one number for each of the {n} clients.")
    if not ((given >= 0).all() and 0 < given.sum() < np.inf):
        raise ValueError("weights must be finite, not negative, and not all zero.")
    return jnp.asarray(given / given.sum(), jnp.result_type(float))


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
        share = jnp.asarray(chances, jnp.float32)
        return jnp.sort(jax.random.choice(key, n, (size,), p=share / jnp.sum(share))).astype(jnp.int32)
    if size == n:
        return jnp.arange(n, dtype=jnp.int32)
    if size > 2048 or 8 * size > n:
        return jnp.sort(jax.random.permutation(key, jnp.arange(n, dtype=jnp.int32))[:size])
    # One after the other, draw j from 0..n−size+j; if it has been taken, take n−size+j itself. It has been taken if it
    # equals an earlier draw, or if it is the number n−size+k of an earlier draw k that was taken, and so on back.
    first, place = n - size, jnp.arange(size, dtype=jnp.int32)
    draws = jax.random.randint(key, (size,), 0, first + place + 1, jnp.int32)
    taken = jnp.any(jnp.tril(draws[:, None] == draws[None, :], -1), axis=1)
    back = jnp.where((draws >= first) & (draws - first < place), draws - first, place)
    for _ in range(size.bit_length()):
        taken, back = taken | taken[back], back[back]
    return jnp.sort(jnp.where(taken, first + place, draws))
