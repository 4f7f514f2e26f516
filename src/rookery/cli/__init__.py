"""The command line: reads what is asked, hands it to the library, shows the answer; one clear line for bad input."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from rookery.cli.program import app, main

__all__ = ["app", "main"]


def __getattr__(name: str) -> ModuleType:
    """Import a command's module on first use."""
    if name.startswith("_") or find_spec(f"rookery.cli.{name}") is None:
        raise AttributeError(f"module 'rookery.cli' has no attribute {name!r}")
    return import_module(f"rookery.cli.{name}")
