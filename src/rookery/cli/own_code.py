"""Load users' own code from a file or a module."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rookery.base.printable import located
from rookery.cli.lookup import suggestion
from rookery.tasks.task import Task


def is_reference(name: str) -> bool:
    """Return whether the name refers to a file or to a member of a module.

    >>> [is_reference(name) for name in ("quadratic", "hospital.py:task", "hospital.py", "mine.tasks:small")]
    [False, True, True, True]
    """
    return ":" in name or name.endswith(".py")


def load_reference(text: str) -> tuple[str, str, Any]:
    """Load file.py:name or package.module:name; return its short name, a reference from any folder, and the object."""
    where, _, name = text.rpartition(":")
    if text.endswith(".py"):
        where, name = text, ""
    is_file = where.endswith(".py")
    module = load_file(Path(where), where) if is_file else _load_module(where)
    members = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    members += [key for key, value in vars(module).items() if isinstance(value, Task)]
    members = [key for key in members if not key.startswith("_")]
    if not name:
        likely = "task" if "task" in members or not members else members[0]
        raise ValueError(f"{text} is a file. Name something in it, e.g. {where}:{likely}.")
    if not hasattr(module, name):
        raise ValueError(f"{where} has no {name!r}; {suggestion(name, members) if members else 'it defines nothing.'}")
    if is_file:
        return f"{Path(where).name}:{name}", f"{Path(where).resolve()}:{name}", getattr(module, name)
    return text, text, getattr(module, name)


def load_file(path: Path, shown: str | None = None) -> ModuleType:
    """Return the module of a file; raise ValueError, with one line, if it cannot be loaded."""
    if not path.is_file():
        raise ValueError(f"There is no file {path.absolute()}.")
    try:
        return _import_file(path.resolve())
    except (Exception, SystemExit) as error:
        raise ValueError(f"{shown or path.name} can't be loaded: {located(error)}") from error


def _import_file(path: Path) -> ModuleType:
    """Import a file, once; it can import the files in its folder."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path) and module.__name__ != "__main__":
            return module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()
    name = path.stem
    if name.isidentifier() and name not in sys.modules:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin == str(path):
            return importlib.import_module(name)
    name = f"{name}_{len(sys.modules)}"  # another module has its name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise ValueError(
                f"There is no module {name!r}. If it is a file, write its name in full: hospital.py:task."
            ) from None
        raise ValueError(f"{name} can't be loaded: {located(error)}") from error
