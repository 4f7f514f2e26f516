"""Clients: the federation's data, as users make and describe them."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rookery.base import jaxprs
from rookery.base.arguments import check_counts, is_integer, kind_of
from rookery.base.placement import check as check_placement
from rookery.base.processes import Processes, share
from rookery.data import frames, summaries
from rookery.data.joining import both_levels, client_rows, end_to_end, join
from rookery.data.layout import Layout
from rookery.data.rows import ClientRows, Rows

if TYPE_CHECKING:
    import pandas as pd

Weights = Sequence[float] | Float[Array, " n"] | str | None


@jax.tree_util.register_pytree_node_class
class Clients(Layout):
    """The federation's data: one pytree of arrays for each client and level. Clients may differ in size.

    Arguments:
        lower: a list with one entry per client: a pytree of arrays whose leading axis counts that client's samples for
            the lower level (training data, say).
        upper: the same for the upper level (validation data). With only one of the two, both levels use the same data,
            as minimax and single-level problems do.
        weights: p_i, one number per client; None: equal; "size": in proportion to the samples of the lower level.
        test: the same for data that no method sees, for `evaluate_client`.
        center: the centre's data, one pytree of arrays: the validation data of `WeightedNodes`. The server holds them,
            unless center_client is given.
        center_client: the number of the client that holds the centre's data.
        replace: whether minibatches are drawn with replacement. By default, a local run of steps goes through the
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
        weights: Weights = None,
        *,
        test: Sequence[Rows] | None = None,
        center: Rows | None = None,
        center_client: int | None = None,
        replace: bool = False,
    ) -> None:
        given = {"lower": lower, "upper": upper, "test": test}
        for name, parts in given.items():
            if parts is not None and not isinstance(parts, list | tuple):
                raise TypeError(f"{name} must be a list with one entry per client; got {kind_of(parts)}.")
        if lower is None and upper is None:
            raise ValueError(
                "Clients needs data; got none. Give lower=[...], upper=[...] or both, one entry per client."
            )
        if lower is not None and upper is not None and len(lower) != len(upper):
            raise ValueError(
                f"lower and upper must have one entry per client each; got {len(lower)} and {len(upper)} entries."
            )
        n = len(lower if lower is not None else upper)  # type: ignore[arg-type]
        if test is not None and len(test) != n:
            raise ValueError(f"test must have one entry for each of the {n} clients; got {len(test)} entries.")
        levels = {name: None if parts is None else join(parts, name) for name, parts in given.items()}
        self._set(levels, weights, center, center_client, replace)

    def _set(
        self, levels: Mapping[str, ClientRows | None], weights: Any, center: Any, center_client: Any, replace: Any
    ) -> None:
        """Check and set all attributes."""
        self._lower, self._upper, self._test = (levels.get(name) for name in ("lower", "upper", "test"))
        n = len(self.lower.sizes)
        if isinstance(weights, str):
            if weights != "size":
                raise ValueError(f'weights must be numbers, "size" or None; got {weights!r}.')
            weights, self.by_size = self.lower_sizes.astype(float), True
        self.weights = _check_weights(weights, n)
        self._center = None if center is None else join([center], "center")
        self.center_client = _check_center_client(center_client, center, n)
        if not isinstance(replace, bool | np.bool_):
            raise ValueError(f"replace must be True or False; got {replace!r}.")
        self.replace = bool(replace)

    from_frame: "classmethod[Any, ..., Clients]" = classmethod(frames.from_frame)

    @classmethod
    def from_arrays(
        cls,
        rows: Rows,
        sizes: Sequence[int] | np.ndarray,
        *,
        upper: tuple[Rows, Any] | None = None,
        test: tuple[Rows, Any] | None = None,
        weights: Weights = None,
        center: Rows | None = None,
        center_client: int | None = None,
        replace: bool = False,
        placement: str = "device",
    ) -> "Clients":
        """Make clients from arrays that hold all samples end to end. No Python object is made for each client.

        Arguments:
            rows: a pytree of arrays with all samples of the lower level, client after client.
            sizes: each client's number of samples.
            upper: (rows, sizes) of the upper level; None: both levels use the same data.
            test: (rows, sizes) of data that no method sees.
            weights, center, center_client, replace: as in `Clients`.
            placement: "device": the rows are copied to the device. "host": they stay where they are, in NumPy arrays or
                `numpy.memmap` (you may change them between runs, not during one), and the rows of the next rounds'
                cohorts travel to the device while it computes. Use it for data that do not fit the device. "pinned":
                they are copied once, to pinned memory, from which the program of the rounds itself reads those of each
                cohort. On a GPU this is faster, and takes as much of the host's memory as the rows have bytes.

        Example:
            >>> clients = Clients.from_arrays(np.arange(6.0), [1, 2, 3], weights="size")
            >>> clients.n, clients.client_data(1)["lower"][0].tolist()
            (3, [1.0, 2.0])
        """
        check_placement(placement)
        given = {"lower": (rows, sizes), "upper": upper, "test": test}
        levels = {name: None if pair is None else end_to_end(pair, name, placement) for name, pair in given.items()}
        for name, data in levels.items():
            if data is not None and len(data.sizes) != len(sizes):
                raise ValueError(
                    f"{name} must have one size for each of the {len(sizes)} clients; got {len(data.sizes)} sizes."
                )
        clients = object.__new__(cls)
        clients._set(levels, weights, center, center_client, replace)
        return clients

    @classmethod
    def from_loader(
        cls,
        n: int,
        load: Callable[[int], Mapping[str, Rows]],
        *,
        weights: Weights = None,
        center: Rows | None = None,
        center_client: int | None = None,
        replace: bool = False,
    ) -> "Clients":
        """Make clients whose data are loaded by the process that needs them.

        If several processes run together (`rookery.hosts`), each loads only the clients of its own devices, for
        `rk.Simulation(mesh="all")`. A single process loads all of them.

        Arguments:
            n: the number of clients.
            load: load(i) -> {"lower": rows, "upper": rows, "test": rows} of client i, each a pytree of arrays whose
                leading axis counts samples. Leave out levels without data, the same ones for every client.
            weights, center, center_client, replace: as in `Clients`.

        Example:
            >>> clients = Clients.from_loader(3, lambda i: {"lower": np.full(i + 1, i)})
            >>> clients.lower_sizes.tolist()
            [1, 2, 3]
        """
        check_counts(n=n)
        here = share(n)
        processes = Processes(together=len(here) < n)
        loaded = [_loaded(load, i) for i in here]
        names: list[str] = [name for name in ("lower", "upper", "test") if name in loaded[0]]
        for i, data in zip(here, loaded, strict=True):
            if set(data) != set(names) or not {"lower", "upper"} & set(names):
                raise ValueError(
                    f"load({i}) must give 'lower' or 'upper' or both, and 'test' if there are test data, the same for "
                    f"every client; got {sorted(map(str, data))}."
                )
        local = {name: join([data[name] for data in loaded], name, here.start) for name in names}
        sample = lambda data: [[str(a.dtype), list(a.shape[1:])] for a in jax.tree.leaves(data.rows)]
        processes.agree({f"{name} sample": sample(data) for name, data in local.items()})
        sizes = {name: np.asarray(data.sizes).tolist() for name, data in local.items()}
        digests = [jaxprs.digest(*jax.tree.leaves(data))[:16] for data in loaded]
        gathered = processes.gather((sizes, digests))

        def whole(name: str, data: ClientRows) -> ClientRows:
            counts = np.concatenate([sizes[name] for sizes, _ in gathered]).astype(np.int64)
            offsets = np.cumsum(counts) - counts
            return client_rows(data.rows, counts, offsets - offsets[here.start])

        clients = object.__new__(cls)
        levels = {name: whole(name, data) for name, data in local.items()}
        clients._set(levels, weights, center, center_client, replace)
        all_digests = [digest for _, digests in gathered for digest in digests]
        clients.digest = jaxprs.digest(*all_digests, clients.weights, *jax.tree.leaves(clients.center), str(replace))
        clients.here = None if processes.count == 1 else here
        return clients

    @classmethod
    def like(
        cls,
        lower: Any = None,
        upper: Any = None,
        n: int = 1,
        weights: Weights = None,
        *,
        test: Any = None,
        center: Rows | None = None,
        center_client: int | None = None,
        replace: bool = False,
    ) -> "Clients":
        """Describe clients whose data are elsewhere, for the coordinator of a `Federation` over a network.

        Arguments:
            lower, upper, test: one sample: a pytree of arrays, or of `jax.ShapeDtypeStruct`, without an axis for
                samples. Only shapes and types matter.
            n: the number of clients.
            center: the centre's data; if a center_client holds them, one sample of them.
            weights, center_client, replace: as in `Clients`.

        Example:
            >>> sample = {"features": np.zeros(4), "label": np.int32(0)}
            >>> Clients.like(lower=sample, upper=sample, n=3).held
            False
        """
        check_counts(n=n)
        shaped = lambda a: a if hasattr(a, "shape") else np.asarray(a)
        row = lambda a: np.zeros((1, *shaped(a).shape), jax.dtypes.canonicalize_dtype(shaped(a).dtype))
        samples = {"lower": lower, "upper": upper, "test": test}
        parts = {name: [jax.tree.map(row, sample)] * n for name, sample in samples.items() if sample is not None}
        if center_client is not None:
            center = jax.tree.map(row, center)
        by_size = isinstance(weights, str) and weights == "size"
        clients = cls(
            **parts,
            weights=None if by_size else weights,
            center=center,
            center_client=center_client,
            replace=replace,
        )
        clients.by_size = by_size
        return clients.with_sizes({name: [1] * n for name in parts})

    def with_sizes(self, sizes: Mapping[str, Sequence[int]], center: int | None = None) -> "Clients":
        """Return clients like these with the sizes that their sites announced; `center`: the centre's size."""
        rows = lambda data, length: jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((length, *a.shape[1:]), a.dtype), data.rows
        )

        def resized(name: str, data: ClientRows | None) -> ClientRows | None:
            if data is None:
                return None
            counts = np.array(sizes[name], np.int32)
            return client_rows(rows(data, int(counts.max())), counts, np.zeros(len(counts), np.int32))

        levels = [resized(name, data) for name, data in self.levels().items()]
        held = self._center
        if held is not None and self.center_client is not None:
            count = 1 if center is None else center
            held = client_rows(rows(held, count), np.array([count]), np.zeros(1, int))
        return self._with_levels(levels, held)

    def single_level(self) -> "Clients":
        """Return these clients with both levels joined into one data set, for `SingleLevel` and `Minimax` problems.

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
                "set where the data are: Clients.like(lower=sample, n=...), or a loader that gives only 'lower'."
            )
        return self._with_levels([both_levels(lower, upper), None, self._test], self._center)

    def weighted(self, weights: Weights) -> "Clients":
        """Return the same clients with other weights, as `Clients(weights=...)` takes them.

        >>> clients = Clients(lower=[np.zeros(3), np.ones(1)], weights="size")
        >>> clients.weighted(None).weights.tolist()
        [0.5, 0.5]
        """
        clients = copy.copy(self)
        clients.by_size = isinstance(weights, str) and weights == "size"
        clients.weights = _check_weights(self.lower_sizes.astype(float) if clients.by_size else weights, self.n)
        if self.digest is not None:
            clients.digest = jaxprs.digest(self.digest, clients.weights)
        return clients

    def _with_levels(self, levels: Sequence[ClientRows | None], center: ClientRows | None) -> "Clients":
        """Return the same clients with other data; weights in proportion to the sizes follow them."""
        clients = Clients.tree_unflatten(self.tree_flatten()[1], (*levels, self.weights, center))
        if clients.by_size:
            clients.weights = _check_weights(clients.lower_sizes.astype(float), clients.n)
        return clients

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names: those of the table, or their numbers."""
        return self.schema.names if self.schema else tuple(map(str, range(self.n)))

    def summary(self) -> "pd.DataFrame":
        """Return a row for each client: its weight, its samples at each level, and how many have each label."""
        label = self.schema.label if self.schema else "label"
        counts = {f"{label}={name}": count for name, count in self.label_counts().items()}
        return summaries.summary(self.names, np.asarray(self.weights), self._sizes(), counts)

    def describe(self) -> str:
        """Return the summary in words."""
        by = f" by {self.schema.by}" if self.schema else ""
        return summaries.describe(by, self.names, self._sizes(), self.label_counts())

    def label_counts(self) -> dict[str, Int[np.ndarray, " n"]]:
        """Return, for each class, each client's number of samples, over both levels and the test data.

        Empty if samples have no integer "label".
        """
        levels = [data for data in self.levels().values() if data is not None]
        columns = [data.rows.get("label") if isinstance(data.rows, dict) else None for data in levels]
        if any(a is None or a.ndim != 1 or not jnp.issubdtype(a.dtype, jnp.integer) for a in columns):
            return {}
        labels = np.concatenate([np.asarray(a) for a in columns])
        client = np.concatenate([np.repeat(np.arange(self.n), np.asarray(data.sizes)) for data in levels])
        classes = dict(enumerate(self.schema.classes)) if self.schema else {int(k): k for k in np.unique(labels)}
        return {str(name): np.bincount(client[labels == k], minlength=self.n) for k, name in classes.items()}

    def _sizes(self) -> dict[str, np.ndarray]:
        test = {} if self._test is None else {"test": np.asarray(self._test.sizes)}
        if self.one_data_set:
            return {"samples": self.lower_sizes, **test}
        return {"lower": self.lower_sizes, "upper": self.upper_sizes, **test}

    def client_data(self, i: int) -> dict[str, Rows]:
        """Return what client i holds, as arguments for `Clients(**...)` with n = 1.

        Where another client or the server holds the centre's data, a row of zeros shows what a sample looks like.
        """
        if self.here is not None and i not in self.here:
            raise ValueError(f"client {i}'s data are with another process; this one holds {self.here}.")
        arguments: dict[str, Any] = {"replace": self.replace}
        for name, data in self.levels().items():
            if data is not None:
                begin, end = int(data.offsets[i]), int(data.offsets[i] + data.sizes[i])
                arguments[name] = [jax.tree.map(lambda a: np.asarray(a)[begin:end], data.rows)]
        if self._center is not None:
            shown = np.asarray if self.center_client == i else (lambda a: np.zeros_like(a[:1]))
            arguments["center"] = jax.tree.map(shown, self._center.rows)
        return arguments

    def __repr__(self) -> str:
        sizes = f"{self.lower.narrowest}–{self.lower.widest} lower, {self.upper.narrowest}–{self.upper.widest} upper"
        test = "" if self._test is None else f", {self._test.narrowest}–{self._test.widest} for tests"
        center = "" if self._center is None else f", {self._center.widest} at the centre"
        where = {"device": "", "host": ", on the host", "pinned": ", in pinned memory"}[self.placement]
        return f"Clients(n={self.n}, samples each: {sizes}{test}{center}{where})"


def _loaded(load: Callable[[int], Mapping[str, Rows]], i: int) -> dict[str, Rows]:
    """Load a client's data and copy them: a loader may reuse its buffers."""
    data: Any = load(i)
    if not isinstance(data, Mapping):
        raise TypeError(f"load({i}) must give a dict with 'lower' or 'upper' or both; got {kind_of(data)}.")
    return jax.tree.map(lambda a: a.copy() if isinstance(a, np.ndarray) else a, dict(data))


def _check_weights(weights: Any, n: int) -> Float[Array, " n"]:
    kind = jnp.result_type(float)
    if weights is None:
        return jnp.asarray(np.full(n, 1.0 / n, kind))  # in NumPy: JAX would compile this for each n
    try:
        numbers: Any = np.asarray(weights)
        numbers = numbers.astype(float) if numbers.dtype.kind in "iufVO" else None  # neither text nor booleans
    except (TypeError, ValueError):
        numbers = None
    if numbers is None:
        raise ValueError(f'weights must be one number per client, "size" or None; got {weights!r}.')
    if numbers.shape != (n,):
        raise ValueError(
            f"weights must be one number for each of the {n} clients; got an array of shape {numbers.shape}."
        )
    if not ((numbers >= 0).all() and 0 < numbers.sum() < np.inf):
        raise ValueError(f"weights must be finite, not negative, and not all zero; got {weights!r:.60}.")
    return jnp.asarray((numbers / numbers.sum()).astype(kind))


def _check_center_client(number: Any, center: Rows | None, n: int) -> int | None:
    if number is None:
        return None
    if center is None:
        raise ValueError(f"center_client={number!r} needs the centre's data; got none. Give center.")
    if not is_integer(number) or not 0 <= number < n:
        raise ValueError(
            f"center_client must be the number of a client, from 0 to {n - 1}, or None for the server; got {number!r}."
        )
    return int(number)
