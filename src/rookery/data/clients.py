"""Clients: the federation's data, end to end without padding; the choice of a cohort."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rookery.base import jaxprs, processes
from rookery.base.arguments import check_counts, kind_of
from rookery.base.placement import check as check_placement
from rookery.base.placement import on_host
from rookery.data import frames
from rookery.data.source import Count, Rows, Source, View, chunk_length, end_to_end, join, joined

if TYPE_CHECKING:
    import pandas as pd


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
    by_size = False  # whether the weights are in proportion to the sizes

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
                raise TypeError(f"{name} is {kind_of(given)}; give a list with one entry per client.")
        if lower is None and upper is None:
            raise ValueError("Clients needs data: give lower=[...], upper=[...] or both, one entry per client.")
        if lower is not None and upper is not None and len(lower) != len(upper):
            raise ValueError(
                f"lower has data of {len(lower)} clients and upper of {len(upper)}: give one entry per client in both."
            )
        self._lower = None if lower is None else join(lower, "lower")
        self._upper = None if upper is None else join(upper, "upper")
        n = len(lower if lower is not None else upper)  # type: ignore[arg-type]
        if test is not None and len(test) != n:
            raise ValueError(f"test has data of {len(test)} clients, and there are {n}: give one entry per client.")
        self._test = None if test is None else join(test, "test")
        self._describe(weights, center, center_client, replace)

    def _describe(self, weights: Any, center: Rows | None, center_client: int | None, replace: bool) -> None:
        """All but the clients' data."""
        n = len(self.lower.sizes)
        if isinstance(weights, str):
            if weights != "size":
                raise ValueError(f'weights={weights!r} is not known: give numbers, "size" or None.')
            weights, self.by_size = self.lower_sizes.astype(float), True
        self.weights = _check_weights(weights, n)
        self._center = None if center is None else join([center], "center")
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
        client: str | None = None,
        weights: Sequence[float] | Float[Array, " n"] | str | None = None,
        replace: bool = False,
        seed: int = 0,
    ) -> "Clients":
        """Make clients from a table with a column that says whose row it is.

        A sample is {"features": floats (d,), "label": int32, "target": float}, the last two where they are asked for.
        `schema` says what they stand for; `names` are the clients' names in sorted order. All faults of a table are
        reported at once.

        Arguments:
            table: a pandas DataFrame; a path to a CSV or Parquet file; {name: array}; or an object with `column_names`
                (or `columns`) that gives a column by name: a Hugging Face dataset, a PyArrow table.
            by: the column with the client's name. In a CSV file names are text: 01, 1 and 001 are three clients.
            upper: the share of each client's rows that go to the upper level, at least one, drawn by the seed and the
                client's name; the others, at least one, are the lower level's. None: one data set for both.
            test: the share of each client's rows, at least one, that no method sees: for `evaluate_client`. Which rows
                they are follows from the table, `by`, `test` and `seed`; it does not depend on `upper`.
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
            client: a name, such as "client", under which each sample has its client's number (int32), the place in
                `names`; −1 in the centre's rows. For losses with a weight for each client.
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
            client=client,
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
        sources = {name: None if own is None else end_to_end(own, name, placement) for name, own in given.items()}
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
        here = processes.share(n)
        group = processes.Processes(together=len(here) < n)
        each = [_loaded(load, i) for i in here]
        names = [name for name in ("lower", "upper", "test") if name in each[0]]
        for i, own in zip(here, each, strict=True):
            if set(own) != set(names) or not {"lower", "upper"} & set(names):
                raise ValueError(
                    f"load({i}) gives {sorted(map(str, own))}; give 'lower' or 'upper' or both, and 'test' where there "
                    "are such data, for every client the same."
                )
        held = {name: join([own[name] for own in each], name, here.start) for name in names}
        sample = lambda source: [[str(a.dtype), list(a.shape[1:])] for a in jax.tree.leaves(source.rows)]
        group.agree({f"{name} sample": sample(source) for name, source in held.items()})
        sizes = {name: np.asarray(source.sizes).tolist() for name, source in held.items()}
        each_told = group.gather((sizes, [jaxprs.digest(*jax.tree.leaves(own))[:16] for own in each]))

        def whole(name: str) -> Source | None:
            if name not in held:
                return None
            counts = np.concatenate([told[name] for told, _ in each_told]).astype(np.int64)
            ends = np.cumsum(counts)
            begin = ends[here.start] - counts[here.start]  # of the rows that are here
            offsets, widest = jnp.asarray(ends - counts - begin, jnp.int32), int(counts.max())
            chunk = chunk_length(int(ends[-1]), n, widest)
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
            own = np.array(sizes[name], np.int32)
            widest, total = int(own.max()), int(own.sum())
            rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((widest, *a.shape[1:]), a.dtype), source.rows)
            at = jnp.zeros(len(own), jnp.int32)
            return Source(rows, at, jnp.asarray(own), widest, int(own.min()), chunk_length(total, len(own), widest))

        levels = [of(name, source) for name, source in self.levels().items()]
        held = self._center
        if held is not None and self.center_client is not None:
            count = 1 if center is None else center
            rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), held.rows)
            held = Source(rows, jnp.zeros(1, jnp.int32), jnp.full(1, count, jnp.int32), count, count, None)
        return self._with_levels(levels, held)

    def single_level(self) -> "Clients":
        """These clients with both levels joined into one data set, for `SingleLevel` and `Minimax` problems.

        Each client has its samples of the lower level, then those of the upper. The test data, the centre's data and
        the names stay the same, so a single-level baseline is trained and tested on the rows of the nested method:
        `rk.solve(rk.SingleLevel(loss), clients.single_level(), rk.FedAvg(), ...)`. Weights in proportion to the sizes
        follow the joined sizes; other weights stay as they are. Clients with one data set are returned unchanged.

        Example:
            >>> clients = Clients(lower=[np.zeros(3), np.ones(1)], upper=[np.zeros(1), np.ones(1)], weights="size")
            >>> joined = clients.single_level()
            >>> joined.lower_sizes.tolist(), [round(float(p), 2) for p in joined.weights]
            ([4, 2], [0.67, 0.33])
        """
        lower, upper = self._lower, self._upper
        if lower is None or upper is None:
            return self
        if not self.held or self.here is not None:
            raise ValueError(
                "clients.single_level() needs the data of all clients in this process. Make the clients with one data "
                "set where the data are: Clients.like(lower=sample, n=...), or a loader that gives 'lower' alone."
            )
        return self._with_levels([joined(lower, upper), None, self._test], self._center)

    def _with_levels(self, levels: Sequence[Source | None], center: Source | None) -> "Clients":
        """The same clients with other data at each level; weights in proportion to the sizes follow them."""
        clients = Clients.tree_unflatten(self.tree_flatten()[1], (*levels, self.weights, center))
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

    def unnamed(self) -> "Clients":
        """Without what is known of the table they come from: programs do not depend on names."""
        arrays, (replace, center_client, *_) = self.tree_flatten()
        return Clients.tree_unflatten((replace, center_client), arrays)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arrays, so that a compiled function takes the data as an argument; `jax.tree.map` keeps the names."""
        arrays = (self._lower, self._upper, self._test, self.weights, self._center)
        return arrays, (self.replace, self.center_client, self.schema, self.by_size)

    @classmethod
    def tree_unflatten(cls, fixed: tuple[Any, ...], children: tuple[Any, ...]) -> "Clients":
        """The inverse of tree_flatten; the schema, and whether weights are by size, may be left out."""
        clients = object.__new__(cls)
        clients._lower, clients._upper, clients._test, clients.weights, clients._center = children
        clients.replace, clients.center_client, *known = fixed
        if known:
            clients.schema, clients.by_size = known
        return clients

    def __repr__(self) -> str:
        sizes = f"{self.lower.narrowest}–{self.lower.widest} lower, {self.upper.narrowest}–{self.upper.widest} upper"
        test = "" if self._test is None else f", {self._test.narrowest}–{self._test.widest} for tests"
        center = "" if self._center is None else f", {self._center.widest} at the centre"
        where = ", on the host" if self.placement == "host" else ""
        return f"Clients(n={self.n}, samples each: {sizes}{test}{center}{where})"


def _loaded(load: Callable[[int], Mapping[str, Rows]], i: int) -> dict[str, Rows]:
    """A client's data, copied: a loader may use its buffers again."""
    own: Any = load(i)
    if not isinstance(own, Mapping):
        raise TypeError(f"load({i}) gives {kind_of(own)}; give a dict with 'lower' or 'upper' or both.")
    return jax.tree.map(lambda a: a.copy() if isinstance(a, np.ndarray) else a, dict(own))


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
