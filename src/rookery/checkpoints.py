"""Checkpoints: one file of arrays and one JSON header, written whole or not at all. No pickle."""

import dataclasses
import json
import os
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery.clients import Clients
from rookery.hyperparameters import is_optimizer

_FORMAT = 2
_ROUNDS = (0, 1, 2, 5, 10, 30, 100, 1000, 10000)  # where two schedules are compared


def identity(algorithm: Any, clients: Clients, start: Any, seed: int, cohort: int, program: str) -> dict[str, Any]:
    """What must agree for a run to go on from a checkpoint: what its numbers depend on."""
    hyperparameters = {}
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        hyperparameters[field.name] = [float(value(t)) for t in _ROUNDS] if callable(value) else _shown(value)
    return {
        "algorithm": type(algorithm).__name__,
        **hyperparameters,
        "seed": seed,
        "cohort": cohort,
        "clients": clients.n,
        "center_client": clients.center_client,
        "start": _digest(start),
        "data": _digest(clients),
        "program (losses, projection, channel or the library's own code)": program,
    }


def _shown(value: Any) -> str:
    """A hyperparameter in words; arrays by their numbers, of which a text would leave some out.

    Of an optimizer, whose numbers are part of the program, that it is one: its text has addresses in memory.
    """
    if is_optimizer(value):
        return "an optimizer"
    return f"{np.shape(value)} {_digest(value)}" if hasattr(value, "dtype") or isinstance(value, list) else repr(value)


def _digest(value: Any) -> str:
    digest = 0
    for leaf in jax.tree.leaves(value):
        array = np.ascontiguousarray(leaf)
        digest = zlib.crc32(array.tobytes(), zlib.crc32(f"{array.dtype}{array.shape}".encode(), digest))
    return f"{digest:08x}"


def save(path: str | Path, identity: dict[str, Any], done: int, carry: Any, extra: dict[str, Any], best: Any) -> None:
    """Write the run as it stands after `done` rounds."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"format": _FORMAT, "identity": identity, "round": done, "extra": extra}
    arrays = {f"carry_{i}": _stored(leaf) for i, leaf in enumerate(jax.tree.leaves(carry))}
    if best is not None:
        leaves = jax.tree.leaves((best.x, best.y, best.memory))
        arrays |= {f"best_{i}": _stored(leaf) for i, leaf in enumerate(leaves)}
    beside = path.with_name(path.name + ".writing")
    with beside.open("wb") as file:
        np.savez(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def load(
    path: str | Path, identity: dict[str, Any], carry: Any, start: Any, rounds: int
) -> tuple[int, Any, dict[str, Any], Any]:
    """The rounds done, the carry, the record's extra and the best (x, y, memory); of structures like those given."""
    if Path(path).is_dir():
        raise ValueError(f"checkpoint={str(path)!r} is a folder; give the name of a file.")
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = dict(file)
        header = json.loads(stored.pop("header").tobytes())
    except Exception as error:
        raise ValueError(
            f"{path} is not a checkpoint of this program, or is damaged; delete it to start afresh."
        ) from error
    if header.get("format") != _FORMAT:
        raise ValueError(f"{path} has the format {header.get('format')!r}, this version reads {_FORMAT}.")
    for name, value in identity.items():
        if header["identity"].get(name) != value:
            raise ValueError(
                f"{path} belongs to another run: its {name} is {header['identity'].get(name)!r}, this run's {value!r}. "
                "Give another checkpoint file, or delete this one."
            )
    if header["round"] > rounds:
        raise ValueError(f"{path} is {header['round']} rounds on, more than rounds={rounds}; name another file.")
    carry = _fill(path, carry, stored, "carry")
    best = _fill(path, start, stored, "best") if header["extra"]["best"] is not None else None
    return header["round"], carry, header["extra"], best


def _stored(leaf: Any) -> np.ndarray:
    """As NumPy stores it: types that it does not know, such as bfloat16, by their bits."""
    array = np.asarray(leaf)
    return array if array.dtype.kind in "biuf" else array.view(f"u{array.dtype.itemsize}")


def _fill(path: str | Path, like: Any, stored: dict[str, np.ndarray], name: str) -> Any:
    leaves, structure = jax.tree.flatten(like)
    values = []
    for i, leaf in enumerate(leaves):
        value, dtype = stored.get(f"{name}_{i}"), np.dtype(leaf.dtype)
        if value is not None and dtype.kind not in "biuf" and value.dtype == f"u{dtype.itemsize}":
            value = value.view(dtype)
        if value is None or (value.shape, value.dtype) != (leaf.shape, dtype):
            raise ValueError(
                f"{path} belongs to another run: its arrays have other shapes or types; delete it or name another."
            )
        values.append(jnp.asarray(value))
    return jax.tree.unflatten(structure, values)
