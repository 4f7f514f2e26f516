"""What the command line knows by name: the library's algorithms and tasks, those of packages, and one's own files.

A package offers its own by entry points of the groups `rookery.tasks` and `rookery.algorithms`.
"""

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax

from rookery import algorithms, tasks
from rookery.base.arguments import kind_of
from rookery.base.printable import is_own, located
from rookery.engines.simulation.memory import memory_of, words
from rookery.tasks.task import Task

V = TypeVar("V")

ALGORITHMS: dict[str, type] = {name: getattr(algorithms, name) for name in algorithms.__all__}
TASKS: dict[str, Callable[..., Task]] = {
    name.replace("_", "-"): getattr(tasks, name) for name in tasks.__all__ if name.islower()
}


class Found(NamedTuple):
    """Something by its name.

    Attributes:
        name: what it is called in tables and files.
        reference: what finds it from any folder.
        thing: of a task, a function that returns it; of an algorithm, the class.
        given: hyperparameters that go with it, where the name stands for an instance.
    """

    name: str
    reference: str
    thing: Any
    given: dict[str, Any]


def find_task(name: str) -> Found:
    """A task by its name, by file.py:name, by package.module:name, or one that a package offers."""
    name, reference, thing = _find("task", name, TASKS)
    if isinstance(thing, Task):
        return Found(name, reference, lambda: thing, {})
    if not callable(thing) or isinstance(thing, type):
        raise ValueError(f"{name} is {_kind(thing)}; a task is a Task of rookery.tasks, or a function returning one.")
    return Found(name, reference, thing, {})


def make_task(found: Found, **settings: Any) -> Task:
    """The task with these settings. What goes wrong in somebody's own function is told with its place."""
    missing = [
        p.name
        for p in inspect.signature(found.thing).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in settings
    ]
    if missing:
        option = f"--{missing[0]} ..." if missing[0] in ("clients", "partition") else f"--set {missing[0]}=..."
        raise ValueError(f"{found.name} needs a value for {missing[0]}: {option}")
    if found.name in TASKS:
        _check_memory(found, settings)
        return found.thing(**settings)
    try:
        task = found.thing(**settings)
    except Exception as error:
        raise ValueError(f"{found.name} failed: {located(error)}") from error
    if not isinstance(task, Task):
        raise ValueError(f"{found.name} returns {_kind(task)}; it must return a rookery.tasks.Task.")
    return task


_MANY = 100_000  # clients: to make fewer takes no time to speak of
_FEW = 16


def _check_memory(found: Found, settings: dict[str, Any]) -> None:
    """Raise ValueError if so many clients do not fit into memory; a few show what one takes."""
    many = settings.get("clients", 0)
    if many < _MANY:
        return
    made = lambda count: found.thing(**settings | {"clients": count})
    made(_FEW)  # fills caches
    peaks = []
    for count in (_FEW, 2 * _FEW):
        tracemalloc.start()
        try:
            made(count)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    needed, there = (peaks[1] - peaks[0]) / _FEW * many, memory_of(jax.local_devices()[0])
    if needed > there:
        raise ValueError(
            f"{found.name}: clients must fit into memory; {many} take about {words(needed)}, and there are "
            f"{words(there)}. Give fewer."
        )


def find_algorithm(name: str) -> Found:
    """An algorithm by its name, by file.py:name, by package.module:name, or one that a package offers."""
    name, reference, thing = _find("algorithm", name, ALGORITHMS)
    cls = thing if isinstance(thing, type) else type(thing)
    missing = [part for part in ("solves", "init", "round") if not hasattr(cls, part)]
    if missing or not dataclasses.is_dataclass(cls):
        lacks = f" without {' and '.join(missing)}" if len(missing) < 3 and missing else ""
        raise ValueError(
            f"{name} is {_kind(thing)}{lacks}; an algorithm is a frozen dataclass with solves, init and round."
        )
    given = {} if cls is thing else {f.name: getattr(thing, f.name) for f in dataclasses.fields(cls) if f.init}
    return Found(name, reference, cls, given)


def is_algorithm(reference: str) -> bool:
    """Whether a reference is to an algorithm, and not to a task."""
    return hasattr(_refer(reference)[2], "solves")


def offered(kind: str) -> tuple[dict[str, Found], list[str]]:
    """All algorithms or all tasks, sorted by name, and a line for each of a package's that is broken."""
    known, look = (ALGORITHMS, find_algorithm) if kind == "algorithm" else (TASKS, find_task)
    found, broken = {}, []
    for name in names(kind):
        try:
            found[name] = look(name)
        except ValueError as error:
            broken.append(str(error))
    taken = [name for name in _plugins(kind) if _plain(name) in {*map(_plain, known)}]
    broken += [f"A package's {kind} {name!r} has the name of one of the library's, and is not used." for name in taken]
    return found, broken


def names(kind: str) -> list[str]:
    """The names of all algorithms or tasks, sorted, those of packages included; nothing is loaded."""
    known = {_plain(name): name for name in (*_plugins(kind), *(ALGORITHMS if kind == "algorithm" else TASKS))}
    return sorted(known.values(), key=str.casefold)


def is_reference(name: str) -> bool:
    """Whether the name is that of a file or of a module's member.

    >>> [is_reference(name) for name in ("quadratic", "hospital.py:task", "hospital.py", "mine.tasks:small")]
    [False, True, True, True]
    """
    return ":" in name or name.endswith(".py")


def _find(kind: str, name: str, known: Mapping[str, Any]) -> tuple[str, str, Any]:
    """The name as it is written, what finds it again, and the thing itself."""
    if is_reference(name):
        return _refer(name)
    plugins = _plugins(kind)
    name, thing = find(kind, name, {**plugins, **known})
    if not isinstance(thing, EntryPoint):
        return name, name, thing
    try:
        return name, name, thing.load()
    except Exception as error:
        package = "" if thing.dist is None else f" of the package {thing.dist.name}"
        raise ValueError(f"The {kind} {name!r}{package} can't be loaded: {located(error)}") from error


def _plugins(kind: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=f"rookery.{kind}s")}


# One's own code.


def _refer(text: str) -> tuple[str, str, Any]:
    where, _, name = text.rpartition(":")
    if text.endswith(".py"):
        where, name = text, ""
    is_file = where.endswith(".py")
    if is_file and not Path(where).is_file():
        raise ValueError(f"There is no file {Path(where).absolute()}.")
    try:
        module = _file(Path(where)) if is_file else _module(where)
    except (Exception, SystemExit) as error:
        lacking = error.name if isinstance(error, ModuleNotFoundError) else None
        if not is_file and lacking is not None and f"{where}.".startswith(f"{lacking}."):
            raise ValueError(
                f"There is no module {where!r}; of a file give the whole name: hospital.py:task."
            ) from None
        raise ValueError(f"{where} can't be loaded: {located(error)}") from error
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    own += [key for key, value in vars(module).items() if isinstance(value, Task)]
    own = [key for key in own if not key.startswith("_")]
    if not name:
        raise ValueError(f"{text} is a file; say what in it, as in {where}:{_likely(own)}.")
    if not hasattr(module, name):
        raise ValueError(f"{where} has no {name!r}; {_nearest(name, own) if own else 'it defines nothing.'}")
    if is_file:
        return f"{Path(where).name}:{name}", f"{Path(where).resolve()}:{name}", getattr(module, name)
    return text, text, getattr(module, name)


def _likely(own: list[str]) -> str:
    return "task" if "task" in own or not own else own[0]


def load_file(path: Path) -> ModuleType:
    """The module of somebody's own file; ValueError, in one line, if it can't be loaded."""
    if not path.is_file():
        raise ValueError(f"There is no file {path.absolute()}.")
    try:
        return _file(path)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path.name} can't be loaded: {located(error)}") from error


def _file(path: Path) -> ModuleType:
    """The module of a file, loaded once; files beside it can be imported."""
    path = path.resolve()
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
    name = f"{name}_{len(sys.modules)}"  # its own is taken, by a module of Python's, say
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(name)


@contextmanager
def blaming() -> Iterator[None]:
    """An error that somebody's own code raises, or makes another package raise, becomes one line with its place."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not any(map(is_own, frames)) or Path(__file__).parents[1] in Path(frames[-1].filename).parents:
            raise
        raise ValueError(located(error)) from error


def _kind(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    return "a function" if inspect.isfunction(thing) else kind_of(thing)


# Names.


def find(kind: str, name: str, known: Mapping[str, V]) -> tuple[str, V]:
    """The entry of that name, and its name as it is written; capitals, `-` and `_` do not matter.

    >>> find("task", "Minimax_Quadratic", TASKS)[0]
    'minimax-quadratic'
    >>> find("algorithm", "FedNets", {"FedAvg": 1, "FedNest": 2})
    Traceback (most recent call last):
    ValueError: There is no algorithm 'FedNets'; did you mean FedNest?
    """
    plain = {_plain(entry): entry for entry in known}
    entry = plain.get(_plain(name))
    if entry is None:
        raise ValueError(f"There is no {kind} {name!r}; {_nearest(name, known)}")
    return entry, known[entry]


def key(owner: str, name: str, known: Iterable[str]) -> str:
    """The name, if it is known; for the settings of `owner`."""
    known = list(known)
    if name not in known:
        raise ValueError(f"{owner} has no setting {name!r}; {_nearest(name, known)}")
    return name


def _nearest(name: str, known: Iterable[str]) -> str:
    plain: dict[Any, str] = {_plain(entry): entry for entry in known}
    close = [plain[entry] for entry in difflib.get_close_matches(_plain(name), plain, n=3, cutoff=0.6)]
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are: {', '.join(sorted(plain.values(), key=str.casefold))}."


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
