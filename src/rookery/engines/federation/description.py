"""Descriptions of methods, channels and faults that can be sent: the name of a class and its fields. No code is sent.

The receiver looks the name up among the classes that it knows.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import rookery
from rookery import algorithms
from rookery.base.printable import printable
from rookery.channels import attacks, codecs, robust
from rookery.channels.compression import Compression
from rookery.channels.downlink import Broadcast
from rookery.channels.privacy import Clip, Gaussian
from rookery.channels.private import Private, PrivateRecords
from rookery.channels.secure import SecureSum
from rookery.engines.federation import wire
from rookery.language import channel, client
from rookery.language.hyperparameters import is_array

PROTOCOLS = (1, 1)  # the oldest and the newest version of the messages that this version of Rookery understands


def known(names: Mapping[str, Any] | None = None) -> dict[str, type]:
    """Return the classes that a description may name: this library's, and those among a site's `names`."""
    parts = [
        channel.Chain, channel.Plain, channel.Faults, Clip, Gaussian, Private, PrivateRecords, SecureSum,
        client.Epochs, Broadcast, Compression, codecs.TopK, codecs.RandomK, codecs.Quantize, codecs.LowRank,
        *robust.RULES,
    ]  # fmt: skip
    parts += [getattr(attacks, name) for name in attacks.__all__ if name != "LabelFlip"]
    found = {cls.__name__: cls for cls in (*parts, *(getattr(algorithms, name) for name in algorithms.__all__))}
    for thing in (names or {}).values():
        if isinstance(thing, type) and dataclasses.is_dataclass(thing):
            found.setdefault(thing.__name__, thing)
    return found


def describe(value: Any) -> Any:
    """Return a description of the value as JSON; TypeError if there is none (for a schedule, an optimizer)."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and value.ndim == 0:
        return describe(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        module = type(value).__module__
        extra = {} if module.partition(".")[0] == "rookery" else {"module": module}  # where a site may have it, too
        return {"class": type(value).__name__, "fields": fields, **extra}
    if isinstance(value, tuple) and type(value) is tuple:
        return {"tuple": [describe(entry) for entry in value]}
    if isinstance(value, Mapping):
        return {"dict": {str(name): describe(entry) for name, entry in value.items()}}
    if is_array(value):
        array = np.asarray(value)
        return {"array": array.tolist(), "dtype": str(array.dtype)}
    if isinstance(value, list):
        return {"list": [describe(entry) for entry in value]}
    raise TypeError(f"{type(value).__name__}")


def build(described: Any, classes: Mapping[str, type], kind: str = "method") -> Any:
    """Invert `describe`; ValueError if this is not a description, or names an unknown class (of this `kind`)."""
    if described is None or isinstance(described, bool | int | float | str):
        return described
    match described:
        case {"class": str(name), "fields": dict(fields)}:
            if name not in classes:
                raise ValueError(_unknown(kind, name, described.get("module")))
            try:
                return classes[name](**{field: build(value, classes, kind) for field, value in fields.items()})
            except TypeError as error:
                raise ValueError(f"{name} has other fields here ({error}). Use the same version of it.") from error
        case {"tuple": list(entries)}:
            return tuple(build(entry, classes, kind) for entry in entries)
        case {"list": list(entries)}:
            return [build(entry, classes, kind) for entry in entries]
        case {"dict": dict(entries)}:
            return {name: build(entry, classes, kind) for name, entry in entries.items()}
        case {"array": list(entries), "dtype": str(dtype)}:
            if dtype not in wire.TYPES:
                raise ValueError(
                    f"an array must have one of the types {', '.join(wire.TYPES)}; got {printable(dtype)}."
                )
            return np.asarray(entries, wire.TYPES[dtype])
    raise ValueError("it must be described by classes and their fields; got something else.")


def _unknown(kind: str, name: str, module: Any) -> str:
    """Return the message for a class that this site does not know."""
    line = f"This site does not know the {kind} {printable(repr(name))}."
    if not name.isidentifier():
        return line
    named = isinstance(module, str) and all(part.isidentifier() for part in module.split(".")) and module != "__main__"
    where = printable(module) if named else "its_module"
    return f"{line} Import it in the site's module, for example: from {where} import {printable(name)}."


def conditions(protocol: int | None = None) -> dict[str, Any]:
    """Return the versions, and the settings that must be the same on both sides for their numbers to agree.

    `protocol` is the version of the messages that both sides understand; None: the newest that this side does.
    """
    config: Any = jax.config
    return {
        "protocol": PROTOCOLS[1] if protocol is None else protocol,
        "rookery": rookery.__version__,
        "precision": "float64" if config.jax_enable_x64 else "float32",
        "matmul precision": str(config.jax_default_matmul_precision),
        "PRNG": str(config.jax_default_prng_impl),
        "PRNG, partitionable": bool(config.jax_threefry_partitionable),
    }


def differences(theirs: Mapping[str, Any], we: str, they: str, protocols: Any = None) -> list[str]:
    """Return a line for each condition that keeps the other side from taking part, named as seen from `we`.

    Versions of Rookery may differ, and of the protocol if there is a version that both understand. `protocols` are the
    versions that the other side understands; None: the version in its conditions.
    """
    ours = conditions()
    protocols = [theirs.get("protocol")] * 2 if protocols is None else protocols
    lines = [
        f"{name}: {ours.get(name)!r} {we}, {theirs.get(name)!r} {they}"
        for name in {**ours, **theirs}
        if name not in ("protocol", "rookery") and ours.get(name) != theirs.get(name)
    ]
    if agreed_protocol(protocols) is None:
        here, there = (
            f"{_versions(*said)} (Rookery {by.get('rookery')})" for said, by in ((PROTOCOLS, ours), (protocols, theirs))
        )
        lines.insert(0, f"protocol: {here} {we}, {there} {they}")
    return lines


def agreed_protocol(theirs: Any) -> int | None:
    """Return the newest version of the messages that both sides understand; None if there is none.

    `theirs` is the oldest and the newest version that the other side understands.
    """
    match theirs:
        case [int(oldest), int(newest)]:
            common = min(newest, PROTOCOLS[1])
            return common if max(oldest, PROTOCOLS[0]) <= common else None
    return None


def _versions(oldest: Any, newest: Any) -> str:
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
