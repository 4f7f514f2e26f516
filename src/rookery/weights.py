"""A model's weights in a file that every library reads: safetensors, arrays by name and nothing else."""

import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The format: the header's length (8 bytes, little endian), the header (JSON: type, shape and place of each array), the
# arrays' bytes, end to end.
_LONGEST_HEADER = 100_000_000
_KINDS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def save_weights(path: str | Path, model: Any) -> None:
    """Write the floating-point arrays of a model (or of any pytree) to a safetensors file.

    Arguments:
        path: the file; one that is there is replaced once the new one is complete.
        model: a pytree: the names are those of its fields, "layers.0.weight".
    """
    arrays = {name: np.asarray(leaf) for name, leaf in _named(model) if _is_weight(leaf)}
    if not arrays:
        raise ValueError(f"save_weights: the model ({type(model).__name__}) holds no floating-point arrays.")
    kinds = {kind: name for name, kind in _KINDS.items()}
    header, end = {}, 0
    for name, a in arrays.items():
        header[name] = {"dtype": kinds[a.dtype.name], "shape": a.shape, "data_offsets": (end, end + a.nbytes)}
        end += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = Path(path)
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for a in arrays.values():
            file.write(np.ascontiguousarray(a).tobytes())
    os.replace(fresh, path)


def load_weights(path: str | Path, like: Any = None) -> Any:
    """The weights of a safetensors file, from whatever library.

    Arguments:
        path: the file.
        like: a model of the same structure: it comes back with the file's weights, each in the type that the model has.
            None: the arrays as a dictionary, by name.

    >>> import tempfile, numpy as np
    >>> path = tempfile.mkdtemp() + "/w.safetensors"
    >>> save_weights(path, {"layers": [{"weight": np.ones((2, 3))}]})
    >>> {name: a.shape for name, a in load_weights(path).items()}
    {'layers.0.weight': (2, 3)}
    """
    try:
        arrays = _read(Path(path).read_bytes())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no safetensors file: {error}.") from error
    return arrays if like is None else _put(arrays, like, str(path))


def _read(data: bytes) -> dict[str, np.ndarray]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, _LONGEST_HEADER):
        raise ValueError("its header is longer than the file")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    held, arrays = memoryview(data)[8 + size :], {}
    for name, own in header.items():
        (begin, end), shape = own["data_offsets"], tuple(own["shape"])
        if own["dtype"] not in _KINDS:
            raise ValueError(f"{name} has the type {own['dtype']}, which is not known here")
        kind = jnp.dtype(_KINDS[own["dtype"]])
        if not 0 <= begin <= end <= len(held) or math.prod(shape) * kind.itemsize != end - begin:
            raise ValueError(f"{name} does not lie where the header says")
        arrays[name] = np.frombuffer(held[begin:end], kind).reshape(shape)
    return arrays


def _put(arrays: dict[str, np.ndarray], like: Any, path: str) -> Any:
    wanted = {name: leaf for name, leaf in _named(like) if _is_weight(leaf)}
    missing, further = sorted(set(wanted) - set(arrays)), sorted(set(arrays) - set(wanted))
    if missing or further:
        each = [f"{what}: {_some(names)}" for what, names in (("missing", missing), ("not known", further)) if names]
        raise ValueError(f"{path} does not fit the model ({'; '.join(each)}); load_weights(path) gives it by name.")
    for name, leaf in wanted.items():
        if arrays[name].shape != leaf.shape:
            raise ValueError(f"{path}: {name} has the shape {arrays[name].shape}, the model's has {leaf.shape}.")
    leaves, structure = jax.tree.flatten(like)
    names = [name for name, _ in _named(like)]
    put = [
        jnp.asarray(arrays[name], leaf.dtype) if name in wanted else leaf
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, put)


def _named(model: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def _is_weight(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
