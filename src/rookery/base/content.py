"""Digests of Python values by content: functions, objects and arrays. They are the same in every process."""

import dataclasses
import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rookery.base.placement import HostArray


def of_arrays(value: Any) -> str:
    """Return a digest of a tree of arrays; of data that are elsewhere, only shapes and types count."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(value):
        array = leaf if isinstance(leaf, jax.ShapeDtypeStruct | HostArray) else np.asarray(leaf, order="C")
        digest.update(f"{array.dtype}{array.shape}".encode())
        if isinstance(array, jax.ShapeDtypeStruct):
            continue
        for piece in array.pieces() if isinstance(array, HostArray) else [array]:
            digest.update(piece.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


CODE = ("its code", "the function")  # keys of a fingerprint that are not names of variables


def fingerprint(function: Callable[..., Any] | None) -> dict[str, str] | None:
    """Return digests of a function's code and of the values it reads, by name; the same in every process.

    For a callable object or a bound method, these are the digests of the object's class and attributes.

    Functions that it calls count in the same way. Functions and classes of installed libraries count only by name, and
    objects that cannot be pickled count only by type. The function's own name, line numbers and comments do not count.
    """
    if function is None:
        return None
    code: Any
    if isinstance(function, types.FunctionType) and not _installed(function):
        code, read = (function.__code__, function.__defaults__, function.__kwdefaults__), dict(_read(function))
    else:
        owner = getattr(function, "__self__", function)
        code, read = (type(owner), getattr(function, "__func__", None)), _attributes(owner)
        if not read:
            return {"the function": Content().of(function)}
    return {"its code": Content().of(code), **{name: Content().of(value) for name, value in read.items()}}


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a user's class; empty if it does not reveal them."""
    if _installed(type(value)) or isinstance(value, type):
        return {}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    try:
        _, arguments, state, *items = (*value.__reduce_ex__(4), None, None, None)[:5]
    except Exception:
        return {}
    if arguments != (type(value),) or not isinstance(state, dict) or any(more is not None for more in items):
        return {}
    return {name: entry for name, entry in state.items() if not is_cached(type(value), name)}


def _read(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function closes over or reads from modules, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    if _installed(function):
        return
    names = sorted(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        if name in function.__globals__:
            yield name, value
        if isinstance(value, types.ModuleType) and not _installed(value):
            yield from ((f"{name}.{other}", getattr(value, other)) for other in names if hasattr(value, other))


def _names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*folders, str(Path(__file__).parents[1]), "<frozen ")


def _installed(value: Any) -> bool:
    """Return whether a function, class or module belongs to an installed library, Python or this package."""
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename.startswith(_library_folders())
    name = value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", ""))
    package = sys.modules.get(name.partition(".")[0])  # a module in C may have no file of its own
    file = getattr(sys.modules.get(name), "__file__", None) or getattr(package, "__file__", None)
    return name in sys.builtin_module_names if file is None else file.startswith(_library_folders())


class Content:
    """A digest of any value by its content, without addresses or anything else that differs between processes.

    Arguments:
        unknown: a text for an object that does not reveal its content; by default only its type counts.
    """

    def __init__(self, unknown: Callable[[Any], str] = lambda value: "") -> None:
        self._unknown = unknown
        self._hash = hashlib.blake2b(digest_size=16)
        self._seen: dict[int, tuple[int, Any]] = {}  # by id; holding the object keeps its id from being reused

    def of(self, value: Any) -> str:
        """Return the digest of one value."""
        self._add(value)
        return self._hash.hexdigest()

    def _text(self, *words: Any) -> None:
        self._hash.update("".join(f"{len(str(word))}:{word}" for word in words).encode(errors="backslashreplace"))

    def _all(self, kind: str, values: Any) -> None:
        values = list(values)
        self._text(kind, len(values))
        for value in values:
            self._add(value)

    def _add(self, value: Any) -> None:
        if value is None or value is ... or isinstance(value, bool | int | float | complex | str | bytes):
            return self._text(type(value).__name__, repr(value))
        if id(value) in self._seen:
            return self._text("seen", self._seen[id(value)][0])
        self._seen[id(value)] = len(self._seen), value
        if isinstance(value, jax.Array | np.ndarray | np.generic | HostArray) and value.dtype != object:
            local = not isinstance(value, jax.Array) or value.is_fully_addressable
            numbers: Any = jax.random.key_data(value) if _is_key(value) else value  # type: ignore[arg-type]
            return self._text("array", of_arrays(numbers) if local else f"{value.dtype}{value.shape}")
        if isinstance(value, types.CodeType):
            self._text("code", value.co_code.hex(), value.co_exceptiontable.hex(), value.co_argcount, value.co_flags)
            self._text(*value.co_names, *value.co_freevars)
            return self._all("constants", value.co_consts)
        if isinstance(value, types.ModuleType):
            return self._text("module", value.__name__)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return self._all("method", (value.__func__, value.__self__))
        if isinstance(value, functools.partial):
            return self._all("partial", (value.func, value.args, value.keywords))
        if isinstance(value, type):
            return self._class(value)
        if hasattr(value, "__wrapped__") and callable(value):  # e.g. a jitted function
            return self._all(type(value).__name__, (value.__wrapped__,))
        return self._object(value)

    def _function(self, function: types.FunctionType) -> None:
        if _installed(function):
            self._text("function", function.__globals__.get("__name__"), function.__code__.co_qualname)
        else:
            self._add(function.__code__)
        self._all("defaults", (function.__defaults__, function.__kwdefaults__))
        for name, value in _read(function):
            self._text(name)
            self._add(value)

    def _class(self, cls: type) -> None:
        self._text("class", cls.__qualname__)
        if _installed(cls):
            return self._text(cls.__module__)
        self._all("bases", cls.__bases__)
        for name, value in sorted(vars(cls).items()):
            value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            value = value.fget if isinstance(value, property) else value
            if not name.startswith("__") or isinstance(value, types.FunctionType):
                self._text(name)
                self._add(value)

    def _object(self, value: Any) -> None:
        self._add(type(value))
        if isinstance(value, set | frozenset):
            return self._text(*sorted(Content(self._unknown).of(entry) for entry in value))
        if isinstance(value, dict | types.MappingProxyType):
            return self._all("items", [part for item in value.items() for part in item])
        if isinstance(value, list | tuple):
            return self._all("entries", value)
        if dataclasses.is_dataclass(value):  # only the fields: other attributes are caches
            return self._all("fields", [getattr(value, field.name, None) for field in dataclasses.fields(value)])
        if of_jax(value) and " at 0x" not in (text := repr(value)):
            return self._text(text)
        try:
            parts = value.__reduce_ex__(4)
        except Exception:
            return self._text(self._unknown(value))
        if isinstance(parts, str):
            return self._text(parts)
        state = parts[2] if len(parts) > 2 else None
        if isinstance(state, dict):
            state = {name: entry for name, entry in state.items() if not is_cached(type(value), name)}
        return self._all("state", [parts[1], state, *(list(more) for more in parts[3:5] if more is not None)])


def is_cached(cls: type, name: str) -> bool:
    """Return whether the attribute is a cached property."""
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)


def of_jax(value: Any) -> bool:
    """Return whether a value's class belongs to JAX or NumPy."""
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib", "numpy")


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))
