"""Save and load a model's weights as a safetensors file: arrays by name."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def save_weights(path: str | Path, model: Any) -> None:
    """Write the floating-point arrays of a model (or of any pytree) to a safetensors file.

    Arguments:
        path: the file; an existing one is replaced once the new one is complete.
        model: a pytree. An array's name is its path of fields and keys, "layers.0.weight". Where two arrays would get
            the same name, as in {"a": {"b": ...}, "a.b": ...}, a dot inside a key is written as "\\.".
    """
    from safetensors.numpy import save_file

    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"save_weights: {path.parent} must be an existing folder. Create it first.")
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in _named(model) if _is_weight(leaf)}
    if not arrays:
        raise ValueError(f"save_weights: the model ({type(model).__name__}) must hold floating-point arrays.")
    fresh = path.with_name(path.name + ".new")
    save_file(arrays, fresh)
    os.replace(fresh, path)


def load_weights(path: str | Path, like: Any = None) -> Any:
    """Read the weights in a safetensors file, regardless of the library that wrote it.

    Arguments:
        path: the file.
        like: a model of the same structure, which is returned with the file's weights, converted to the model's types.
            None: return a dictionary of the arrays by name.

    >>> import tempfile, numpy as np
    >>> path = tempfile.mkdtemp() + "/w.safetensors"
    >>> save_weights(path, {"layers": [{"weight": np.ones((2, 3))}]})
    >>> {name: a.shape for name, a in load_weights(path).items()}
    {'layers.0.weight': (2, 3)}
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not Path(path).is_file():
        raise FileNotFoundError(f"load_weights: {path} does not exist.")
    try:
        arrays = load_file(path, backend="pread")
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}.") from error
    return arrays if like is None else _put(arrays, like, str(path))


def _put(arrays: dict[str, np.ndarray], like: Any, path: str) -> Any:
    wanted = {name: leaf for name, leaf in _named(like) if _is_weight(leaf)}
    missing, further = sorted(set(wanted) - set(arrays)), sorted(set(arrays) - set(wanted))
    if missing or further:
        problems = [f"{what}: {_some(names)}" for what, names in (("missing", missing), ("unknown", further)) if names]
        raise ValueError(
            f"{path} does not fit the model ({'; '.join(problems)}). Read it with load_weights(path), without a model."
        )
    for name, leaf in wanted.items():
        if arrays[name].shape != leaf.shape:
            raise ValueError(f"{path}: {name} must have the model's shape {leaf.shape}; got {arrays[name].shape}.")
    leaves, structure = jax.tree.flatten(like)
    names = [name for name, _ in _named(like)]
    filled = [
        jnp.asarray(arrays[name], leaf.dtype) if name in wanted else leaf
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, filled)


def _named(model: Any) -> list[tuple[str, Any]]:
    """Return the leaves with their names, which are unique."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    texts = [[jax.tree_util.keystr((key,), simple=True) for key in path] for path, _ in leaves]
    names = [".".join(path) for path in texts]
    if len(set(names)) < len(names):
        escaped = lambda key: key.replace("\\", "\\\\").replace(".", "\\.")
        names = [".".join(map(escaped, path)) for path in texts]
    (name, count), *_ = [*Counter(names).most_common(1), ("", 0)]
    if count > 1:
        raise ValueError(f"{count} arrays of the model ({type(model).__name__}) have the name {name!r}. Rename them.")
    return list(zip(names, (leaf for _, leaf in leaves), strict=True))


def _is_weight(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
