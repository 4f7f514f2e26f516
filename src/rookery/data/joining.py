"""Join and check the arrays that users give for the clients of one level."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from rookery.base import placement as places
from rookery.base import tree
from rookery.base.arguments import kind_of
from rookery.base.pinned import pinned
from rookery.base.placement import HostArray
from rookery.data.rows import ClientRows, Rows, chunk_length

_PIECE = 1 << 22  # numbers that are checked together
_ALIGNED = 64  # bytes, for memory that JAX shares


def join(parts: Sequence[Rows], level: str, first: int = 0) -> ClientRows:
    """Join the clients' data; `first` is the number of the first client, for messages."""
    if not parts:
        raise ValueError(f"{level} must have at least one client; got an empty list.")
    names, _, structure = _named_leaves(parts[0])
    if not names:
        raise ValueError(f"{level}: a client must have at least one array; client {first} has none.")
    columns: list[list[np.ndarray]] = [[] for _ in names]
    sizes = np.empty(len(parts), np.int32)
    for i, part in enumerate(parts):
        client = f"{level}: client {first + i}"
        leaves, own_structure = jax.tree.flatten(part)
        if str(own_structure) != str(structure):
            raise ValueError(
                f"{client}'s data must have the structure of client {first}'s, {structure}; got {own_structure}."
            )
        arrays = [np.asarray(leaf) for leaf in leaves]
        for name, array in zip(names, arrays, strict=True):
            if array.ndim == 0:
                raise ValueError(
                    f"{client}'s {name} must have a leading axis that counts samples; got a single number."
                )
        lengths = {len(array) for array in arrays}
        if len(lengths) > 1:
            each = ", ".join(f"{name}: {len(array)}" for name, array in zip(names, arrays, strict=True))
            raise ValueError(
                f"{client}'s arrays must have one row per sample each; their leading axes differ ({each})."
            )
        sizes[i] = lengths.pop()
        if sizes[i] == 0:
            raise ValueError(f"{client} must have at least one sample; it has none. Leave it out, or give it data.")
        for column, name, array in zip(columns, names, arrays, strict=True):
            if column and (array.shape[1:], array.dtype) != (column[0].shape[1:], column[0].dtype):
                raise ValueError(
                    f"{client}'s {name} must have samples as client {first}'s, of shape {column[0].shape[1:]} and type "
                    f"{column[0].dtype}; got {array.shape[1:]} and {array.dtype}."
                )
            column.append(array)
    return _checked([np.concatenate(column) for column in columns], structure, names, sizes, level, first)


def end_to_end(given: Any, level: str, placement: str) -> ClientRows:
    """Check a level's data given as (rows, sizes): all samples end to end, and each client's number of samples."""
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"{level} must be a pair (rows, sizes); got {kind_of(given)}.")
    rows, sizes = given
    names, leaves, structure = _named_leaves(rows)
    if not leaves:
        raise ValueError(f"{level}: the rows must have at least one array; they have none.")
    for name, leaf in zip(names, leaves, strict=True):
        if placement != "device" and not isinstance(leaf, np.ndarray):
            raise TypeError(
                f'{level}: with placement="{placement}", {name} must be a NumPy array or numpy.memmap; got '
                f"{kind_of(leaf)}. Give one of those, or leave placement out."
            )
    arrays = [np.asarray(leaf) for leaf in leaves]
    counts = np.asarray(sizes)
    if counts.ndim != 1 or not len(counts) or counts.dtype.kind not in "iu":
        raise ValueError(f"{level}: sizes must be whole numbers, one for each client; got {sizes!r:.60}.")
    if counts.min() < 1:
        least = int(np.argmin(counts))
        raise ValueError(
            f"{level}: every client must have at least one sample; client {least} has the size {counts[least]}. "
            "Leave it out, or correct its size."
        )
    total = int(counts.sum(dtype=np.int64))
    for name, array in zip(names, arrays, strict=True):
        if array.ndim == 0 or len(array) != total:
            has = "a single number" if array.ndim == 0 else len(array)
            raise ValueError(f"{level}: {name} must have as many rows as the sizes add up to, {total}; got {has}.")
    return _checked(arrays, structure, names, counts, level, placement=placement)


def both_levels(lower: ClientRows, upper: ClientRows) -> ClientRows:
    """Join two levels into one: each client's samples of the lower level, then those of the upper."""
    names, first, structure = _named_leaves(lower.rows)
    upper_names, second, upper_structure = _named_leaves(upper.rows)
    kinds = lambda names, leaves: ", ".join(
        f"{name}: {a.dtype}{list(a.shape[1:])}" for name, a in zip(names, leaves, strict=True)
    )
    if structure != upper_structure or kinds(names, first) != kinds(upper_names, second):
        raise ValueError(
            "clients.single_level() needs samples of one kind at both levels; the lower level has "
            f"{kinds(names, first)}, the upper level {kinds(upper_names, second)}."
        )
    sizes = [np.asarray(data.sizes) for data in (lower, upper)]
    client = np.concatenate([np.repeat(np.arange(len(counts)), counts) for counts in sizes])
    order = np.argsort(client, kind="stable")
    arrays = [np.concatenate([np.asarray(a), np.asarray(b)])[order] for a, b in zip(first, second, strict=True)]
    return _checked(arrays, structure, names, sizes[0] + sizes[1], "lower", placement=places.of(lower.rows))


def _named_leaves(rows: Rows) -> tuple[list[str], list[Any], Any]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(rows)
    return [tree.path_name(path) for path, _ in leaves], [leaf for _, leaf in leaves], structure


def _checked(
    arrays: list[np.ndarray], structure: Any, names: list[str], sizes: np.ndarray, level: str, first: int = 0,
    placement: str = "device",
) -> ClientRows:  # fmt: skip
    """Check arrays of all samples end to end, in one pass, and place them."""
    ends = np.cumsum(sizes, dtype=np.int64)
    if ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{level} must have at most {np.iinfo(np.int32).max} samples in all; got {ends[-1]}.")
    for name, array in zip(names, arrays, strict=True):
        real = jnp.issubdtype(array.dtype, jnp.floating) or np.issubdtype(array.dtype, np.integer)
        if not (real or array.dtype == bool):
            raise ValueError(f"{level}: {name} must be an array of real numbers; its type is {array.dtype}.")
        if not array.dtype.isnative:
            raise ValueError(
                f"{level}: {name} must have this machine's byte order; its type is {array.dtype.str}. Give "
                f"a.astype({array.dtype.newbyteorder('=').str!r})."
            )
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        if dtype == array.dtype and array.dtype.kind in "biu":
            continue
        wrong = _rows_where(lambda a: ~np.isfinite(a) | overflows(a), array)
        for is_wrong, what, fix in (
            (lambda a: ~np.isfinite(a), "is not finite (NaN or infinity)", "clean or fill the data before the run"),
            (overflows, f"does not fit into {dtype}", "rescale the data, or set jax_enable_x64"),
        ):
            bad = wrong[_rows_where(is_wrong, array[wrong])] if wrong.size else wrong
            if bad.size:
                client = int(np.searchsorted(ends, bad[0], side="right"))
                row = int(bad[0] - (ends[client] - sizes[client]))
                raise ValueError(
                    f"{level}: {name} {what} in {bad.size} sample(s), first in sample {row} of client "
                    f"{first + client}; {fix}."
                )
    put: Any = {"device": _on_device, "host": HostArray, "pinned": pinned}[placement]
    rows = jax.tree.unflatten(structure, [put(array) for array in arrays])
    return client_rows(rows, sizes, ends - sizes)


def client_rows(rows: Rows, sizes: np.ndarray, offsets: Any) -> ClientRows:
    """Return rows as clients of these sizes."""
    widest, total = int(sizes.max()), int(sizes.sum(dtype=np.int64))
    return ClientRows(
        rows,
        # Copies, because the caller may use the arrays again; in NumPy, because JAX would compile this for each n.
        jnp.asarray(np.array(offsets, np.int32)),
        jnp.asarray(np.array(sizes, np.int32)),
        widest,
        int(sizes.min()),
        chunk_length(total, len(sizes), widest),
    )


def _rows_where(is_wrong: Callable[[np.ndarray], np.ndarray], array: np.ndarray) -> np.ndarray:
    """Return the indices of wrong rows. Works piece by piece: a mask of the whole array would be large."""
    step = max(1, _PIECE // max(1, int(np.prod(array.shape[1:], dtype=np.int64))))
    found = []
    for begin in range(0, len(array), step):
        piece = array[begin : begin + step]
        piece = piece.astype(np.float32) if piece.dtype.kind == "V" else piece  # bfloat16
        marked = is_wrong(piece)
        if marked.any():
            found.append(begin + np.flatnonzero(marked.reshape(len(piece), -1).any(axis=1)))
    return np.concatenate(found) if found else np.zeros(0, int)


def _on_device(array: np.ndarray) -> Array:
    """Copy the array once to the default device; `jnp.asarray` would hold two copies for a while.

    On a CPU, `device_put` shares aligned memory. Memory that nobody can write to (JAX's own arrays) may be shared with
    the caller. Anything else is copied into NumPy's memory, whose huge pages make scattered rows faster to read.
    """
    with jax.ensure_compile_time_eval():  # under a trace, too
        platform = next(iter(jax.device_put(0).devices())).platform
        if platform == "cpu" and _may_change(array):
            dtype = jax.dtypes.canonicalize_dtype(array.dtype)
            memory = np.empty(array.size * dtype.itemsize + _ALIGNED, np.uint8)
            begin = -memory.ctypes.data % _ALIGNED
            copy = memory[begin : begin + array.size * dtype.itemsize].view(dtype).reshape(array.shape)
            np.copyto(copy, array, casting="unsafe")
            array = copy
        return jax.block_until_ready(jax.device_put(array))


def _may_change(array: Any) -> bool:
    """Return whether the caller can write to the array's memory. Only the memory of JAX arrays and bytes is safe."""
    while isinstance(array, np.ndarray | memoryview):
        if isinstance(array, np.ndarray) and array.flags.writeable:
            return True
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return not isinstance(array, jax.Array | bytes)


def overflows(array: np.ndarray) -> Bool[np.ndarray, "..."]:
    """Mark finite numbers that do not fit into the type that the array gets in JAX, which may be narrower."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return np.zeros(array.shape, bool)
    if np.issubdtype(dtype, np.integer):
        return (array < np.iinfo(dtype).min) | (array > np.iinfo(dtype).max)
    with np.errstate(over="ignore"):
        return np.isfinite(array) & ~np.isfinite(array.astype(dtype))
