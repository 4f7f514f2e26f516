"""Rookery: federated nested optimization. State the problem once as plain JAX losses, and pick a method by name."""

import sys as _sys
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from rookery.public import *  # noqa: F403
    from rookery.public import __all__ as __all__

__version__ = "0.1.0"

_FUNCTIONS = ("explain", "solve", "tune")  # each has the name of the module that defines it


class _Package(_ModuleType):
    """The package, which loads its public names and modules on first use: `rookery --help` need not wait for JAX."""

    def __getattr__(self, name: str) -> _Any:
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'rookery' has no attribute {name!r}")
        if name not in _FUNCTIONS and _find_spec(f"rookery.{name}") is not None:
            return _import_module(f"rookery.{name}")
        public = _import_module("rookery.public")
        vars(self).update(
            {known: vars(public)[known] for known in ("__all__", *public.__all__) if known in vars(public)}
        )
        if name not in vars(self):
            raise AttributeError(f"module 'rookery' has no attribute {name!r}")
        return vars(self)[name]

    def __setattr__(self, name: str, value: _Any) -> None:
        if not (
            name in _FUNCTIONS and isinstance(value, _ModuleType)
        ):  # importing rookery.solve must not hide the function
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self.__all__})


_sys.modules[__name__].__class__ = _Package
