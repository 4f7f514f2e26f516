"""List the public API, with what its users rely on: python tools/public_api.py > tests/compatibility/public_api.txt

Public are the names of `import rookery as rk`, and of the modules that have short names there. A line is a name with
its parameters and their defaults, a member of a class, or a command with its options. Annotations are left out: they
differ between versions of Python and of the libraries.
"""

import dataclasses
import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import rookery as rk
from rookery.cli import program

FURTHER = ("rookery.parts", "rookery.tasks", "rookery.testing", "rookery.theory")  # modules with names of their own


def modules() -> dict[str, types.ModuleType]:
    """Return the public modules by name."""
    names = sorted({*rk._MODULES, *FURTHER})
    return {name: importlib.import_module(name) for name in names}


def public(module: types.ModuleType) -> list[str]:
    """Return a module's public names: `__all__`, or what it defines itself."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    defined = lambda thing: getattr(thing, "__module__", None) == module.__name__
    return sorted(name for name, thing in vars(module).items() if not name.startswith("_") and defined(thing))


def described(name: str, thing: Any) -> Iterator[str]:
    """Yield the lines of a name."""
    if inspect.ismodule(thing):
        yield f"{name}: module"
    elif inspect.isclass(thing):
        yield from _class(name, thing)
    elif inspect.isfunction(thing):
        yield f"{name}{_signature(thing)}"
    else:  # a type alias, a constant
        yield name


def _class(name: str, cls: type) -> Iterator[str]:
    given = "" if issubclass(cls, BaseException) else _signature(cls)
    yield f"class {name}{given}"
    fields = (
        [field.name for field in dataclasses.fields(cls) if not field.init] if dataclasses.is_dataclass(cls) else []
    )
    listed = inspect.signature(cls).parameters if given and given != "(...)" else {}
    for member in sorted({*vars(cls), *fields} - {*listed}):
        if member.startswith("_"):
            continue
        thing = inspect.getattr_static(cls, member, None)
        function = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
        yield f"{name}.{member}{_signature(function) if inspect.isfunction(function) else ''}"


def _signature(thing: Any) -> str:
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    plain = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else _Shown(p.default))
        for p in parameters
    ]
    return str(inspect.Signature(plain))


class _Shown:
    """A default as it is listed: without addresses."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        value = self.value
        if inspect.isroutine(value) or inspect.isclass(value):
            return str(value.__name__)
        return "..." if " at 0x" in repr(value) or type(value) is object else repr(value)


def commands() -> Iterator[str]:
    """Yield a line for each command: its arguments, and its options."""
    for name in program.COMMANDS:
        command = program.Commands().get_command(None, name)
        below = getattr(command, "commands", {})
        for words, one in sorted({f"{name} {word}": one for word, one in below.items()}.items()) or [(name, command)]:
            options = sorted(option for parameter in one.params for option in parameter.opts)
            yield f"$ rookery {words}: {' '.join(options)}"


def listing() -> list[str]:
    """Return the lines of the public API."""
    lines = [line for name in sorted(rk.__all__) for line in described(f"rk.{name}", getattr(rk, name))]
    for name, module in modules().items():
        lines += [line for word in public(module) for line in described(f"{name}.{word}", getattr(module, word))]
    return [*lines, *commands()]


if __name__ == "__main__":
    print("\n".join(listing()))
