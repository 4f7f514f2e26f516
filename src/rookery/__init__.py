"""Federated nested optimization: write the losses once, as plain JAX functions, and pick a method by name."""

import sys as _sys
from importlib import import_module as _import_module
from importlib.abc import Loader as _Loader
from importlib.machinery import ModuleSpec as _ModuleSpec
from importlib.util import find_spec as _find_spec
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from rookery import tasks as tasks
    from rookery import theory as theory
    from rookery.run import trackers as trackers
    from rookery.run.public import *  # noqa: F403
    from rookery.run.public import __all__ as __all__

__version__ = "0.2.0"

_MODULES = {  # short names of public modules: `import rookery.tree` imports `rookery.base.tree`
    "rookery.attacks": "rookery.channels.attacks",
    "rookery.channel": "rookery.language.channel",
    "rookery.client": "rookery.language.client",
    "rookery.clients": "rookery.data.clients",
    "rookery.fed": "rookery.language.fed",
    "rookery.hosts": "rookery.base.processes",
    "rookery.models": "rookery.problems.models",
    "rookery.objectives": "rookery.problems.objectives",
    "rookery.site": "rookery.run.join",
    "rookery.status": "rookery.report.status",
    "rookery.trackers": "rookery.run.trackers",
    "rookery.tree": "rookery.base.tree",
}


class _ShortNames(_Loader):
    """Import public modules by their short names."""

    def find_spec(self, name: str, path: _Any = None, target: _Any = None) -> _ModuleSpec | None:
        return _ModuleSpec(name, self) if name in _MODULES else None

    def create_module(self, spec: _ModuleSpec) -> _ModuleType:
        module = _import_module(_MODULES[spec.name])
        self.spec = module.__spec__
        return module

    def exec_module(self, module: _ModuleType) -> None:
        module.__spec__ = self.spec  # it was executed under its full name


def __getattr__(name: str) -> _Any:
    """Load public names and modules on first use, so that `rookery --help` does not import JAX."""
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'rookery' has no attribute {name!r}")
    if _find_spec(f"rookery.{name}") is not None:
        return _import_module(f"rookery.{name}")
    public = _import_module("rookery.run.public")
    globals().update({known: vars(public)[known] for known in public.__all__})
    globals()["__all__"] = sorted([*public.__all__, "tasks", "theory", "trackers"])
    if name not in globals():
        raise AttributeError(f"module 'rookery' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


_sys.meta_path.append(_ShortNames())
