"""The message that opens a run at a site: written by the coordinator, checked by the site."""

import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rookery.base.jaxprs import digest
from rookery.base.printable import printable
from rookery.data.clients import Clients
from rookery.data.rows import ClientRows
from rookery.engines import engine
from rookery.engines.federation import description
from rookery.engines.federation.site import RefusedError
from rookery.plan.trace import Plan

_RUN_NAME = re.compile(r"[0-9a-f]{8,64}")


def fingerprint(plans: tuple[Plan, ...]) -> str:
    """Return the fingerprint of the plans and of all constants that they close over."""
    return digest(*(p.fingerprint for p in plans), *(c for p in plans for c in p.consts))[:32]


def sample_of(source: ClientRows) -> list[Any]:
    """Describe one sample: the name, shape and dtype of each array."""
    leaves = jax.tree_util.tree_leaves_with_path(source.rows)
    return [[jax.tree_util.keystr(path), list(a.shape[1:]), str(a.dtype)] for path, a in leaves]


def run_fields(traced: engine.Traced) -> dict[str, Any]:
    """Return the fields of the message that are the same for every site."""
    job, clients = traced.job, traced.job.clients
    plans = (traced.start, traced.round, *([] if traced.measure is None else [traced.measure]))
    center = clients.center
    return {
        "jax": jax.__version__,
        "algorithm": _described(job.algorithm),
        "channel": _described(job.channel),
        "faults": description.describe(job.faults),
        "clients": clients.n,
        "cohort": job.replies,
        "chance": job.chance,
        "levels": {
            level: [source.widest, source.narrowest, source.chunk]
            for level, source in clients.levels().items()
            if source is not None
        },
        "replace": clients.replace,
        "center": None if center is None else {"sample": sample_of(center), "size": center.widest},
        "center_client": clients.center_client,
        "products": traced.setting.products,
        "measures": traced.measure is not None,
        "fingerprint": fingerprint(plans),
        "signatures": [p.signature for p in plans],
        **({} if job.asynchronous is None else {"asynchronous": True}),
    }


def _described(record: Any) -> Any:
    """Return a description, or {"own": True} if there is none: the site's module must then provide the object."""
    try:
        return description.describe(record)
    except TypeError:
        return {"own": True}


def is_run_name(name: Any) -> bool:
    """Return whether this can be the name of a run."""
    return isinstance(name, str) and _RUN_NAME.fullmatch(name) is not None


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether a JSON value is an integer of at least `least` that fits an int32."""
    return type(value) is int and least <= value < 2**31


def is_sample(value: Any) -> bool:
    """Return whether a JSON value is a description by `sample_of`."""
    is_array = lambda entry: isinstance(entry, list) and [type(part) for part in entry] == [str, list, str]
    return isinstance(value, list) and all(
        is_array(entry) and all(is_count(size, 0) for size in entry[1]) for entry in value
    )


def _is_levels(value: Any) -> bool:
    def fits(level: Any) -> bool:
        return isinstance(level, list) and len(level) == 3 and all(map(is_count, [s for s in level if s is not None]))

    return isinstance(value, dict) and all(fits(level) and None not in level[:2] for level in value.values())


def _is_center(value: Any) -> bool:
    return isinstance(value, dict) and is_sample(value.get("sample")) and is_count(value.get("size"))


_TEXT = ("a text", lambda value: isinstance(value, str))
_FLAG = ("true or false", lambda value: isinstance(value, bool))
_OBJECT = ("an object", lambda value: isinstance(value, dict))
_NAME = ("8 to 64 hexadecimal digits", is_run_name)
_COUNT = ("an integer of at least 1", is_count)
_ROUNDS = ("an integer of at least -1", lambda value: is_count(value, -1))
_DESCRIPTION = ("a description", lambda value: value is None or isinstance(value, dict))
_is_chance: Callable[[Any], bool] = lambda value: isinstance(value, float) and 0 < value < 1
# Every field of the message, and what it must be.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "do": _TEXT,
    "number": ("an integer", lambda value: type(value) is int),
    "run": _NAME,
    "store": _NAME,
    "conditions": _OBJECT,
    "jax": _TEXT,
    "algorithm": _DESCRIPTION,
    "channel": _DESCRIPTION,
    "faults": _DESCRIPTION,
    "clients": _COUNT,
    "cohort": _COUNT,
    "chance": ("null, or a number between 0 and 1", lambda value: value is None or _is_chance(value)),
    "client": ("an integer of at least 0", lambda value: is_count(value, 0)),
    "sizes": ("numbers of samples", lambda value: isinstance(value, dict) and all(map(is_count, value.values()))),
    "levels": ("sizes by level", _is_levels),
    "replace": _FLAG,
    "center": ("null, or a sample and a size", lambda value: value is None or _is_center(value)),
    "center_client": ("null, or an integer of at least 0", lambda value: value is None or is_count(value, 0)),
    "products": _FLAG,
    "measures": _FLAG,
    "study": _OBJECT,
    "allow_other_study": _FLAG,
    "remembers": _FLAG,
    "fingerprint": _TEXT,
    "signatures": ("texts", lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value)),
    "done": _ROUNDS,
    "wrote": _ROUNDS,
    "asynchronous": ("true, or left out", lambda value: value is True),
}
_OPTIONAL = ("asynchronous",)


def check_opening(header: dict[str, Any]) -> None:
    """Raise RefusedError unless the run has this site's conditions and the message has exactly the known fields."""
    theirs = header.get("conditions")
    apart = description.differences(theirs if isinstance(theirs, dict) else {}, "here", "at the coordinator")
    if apart:
        raise RefusedError(f"it runs under other conditions: {'; '.join(apart)}. Use the same on both sides.")
    missing = [name for name in _FIELDS if name not in header and name not in _OPTIONAL]
    if missing:
        raise RefusedError(f"the opening must have the field {missing[0]!r}; it is missing.")
    for name, value in header.items():
        if name not in _FIELDS:
            raise RefusedError(f"the opening must have known fields only; got {printable(name, 50)!r}.")
        what, fits = _FIELDS[name]
        if not fits(value):
            raise RefusedError(f"the opening's {name!r} must be {what}; got {printable(json.dumps(value), 100)}.")
    clients = header["clients"]
    for name, most in (("cohort", clients), ("client", clients - 1), ("center_client", clients - 1)):
        if header[name] is not None and header[name] > most:
            raise RefusedError(
                f"the opening's {name!r} must be at most {most}, as there are {clients} clients; got {header[name]}."
            )


def described_clients(header: dict[str, Any], data: Clients) -> Clients:
    """Return the federation's clients as the message describes them, shapes without data, to a site that has `data`."""
    levels = header["levels"]
    integers: Callable[[int], Any] = lambda n: jax.ShapeDtypeStruct((n,), jnp.int32)
    everyone = integers(header["clients"])
    if set(levels) != {name for name, source in data.levels().items() if source is not None}:
        raise RefusedError(f"its data must have the coordinator's levels, {', '.join(sorted(levels))}; it has others.")

    def level(name: str, source: ClientRows | None) -> ClientRows | None:
        if source is None:
            return None
        widest, narrowest, chunk = levels[name]
        size = int(source.sizes[0])
        if size != header["sizes"].get(name):
            raise RefusedError(f"its number of samples ({name}) has changed since it connected. Start the site again.")
        if not narrowest <= size <= widest:
            raise RefusedError(
                f"the opening must allow for its number of samples ({name}), {size}; got {narrowest} to {widest}."
            )
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((widest, *a.shape[1:]), a.dtype), source.rows)
        return ClientRows(rows, everyone, everyone, widest, narrowest, chunk)

    sources = [level(name, source) for name, source in data.levels().items()]
    weights = jax.ShapeDtypeStruct((header["clients"],), jnp.result_type(float))
    center = None
    if header["center"] is not None:
        one, size = integers(1), header["center"]["size"]
        center = ClientRows(_center_rows(header["center"]["sample"], size, data), one, one, size, size, None)
    return Clients.tree_unflatten((header["replace"], header["center_client"]), (*sources, weights, center))


def _center_rows(sample: list[Any], size: int, data: Clients) -> Any:
    """Return the shapes of the centre's rows, with the structure of this site's, or of its clients' samples."""
    like = data.lower.rows if data.center is None else data.center.rows
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    if [jax.tree_util.keystr(path) for path, _ in leaves] != [name for name, _, _ in sample]:
        raise RefusedError("the centre's samples must have the arrays of this site's; they have others.")
    try:
        shapes = [jax.ShapeDtypeStruct((size, *shape), jnp.dtype(dtype)) for _, shape, dtype in sample]
    except TypeError as error:
        raise RefusedError(
            "the centre's samples must have arrays of types that are known here; they have another."
        ) from error
    return jax.tree.unflatten(structure, shapes)
