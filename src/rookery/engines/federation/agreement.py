"""What participants must agree on besides the plan: the source of the study.

A study is the modules that define a problem's functions, and the modules that these import from their own folder. Their
top-level definitions are compared: functions and classes by their syntax, constants by their values. Comments, layout
and docstrings do not count. Only digests and the values of short constants are sent, never source text.
"""

import ast
import dataclasses
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

import rookery
from rookery.base.jaxprs import is_key
from rookery.base.printable import printable

_LEAVES, _CHARACTERS = 300, 20_000  # limits for a constant whose values are sent; of a larger one, only the digest
_ELEMENTS = 64  # of an array whose values are compared one by one
_SHOWN = 80  # characters of a value in a message
_SHARE = "Define the task in a file of its own, which the coordinator's script and all sites import."
_LINES = 3  # differences that are listed
_SKIPPED = ("lineno", "col_offset", "end_lineno", "end_col_offset", "ctx", "kind", "type_comment", "type_params")
_PATHS = sysconfig.get_paths()
_INSTALLED = [Path(rookery.__file__).parent, *(Path(_PATHS[name]) for name in ("stdlib", "purelib", "platlib"))]


@dataclasses.dataclass(frozen=True)
class Definition:
    """A top-level definition of a module.

    Attributes:
        kind: "function", "class", "constant", "import" or "statement".
        digest: the digest of its syntax, or of its value.
        values: the texts of a constant's parts, by their places in it; None: only the digest is compared.
        parts: digests of a function's statements, to say where two differ.
        lines: the line where it begins, then those where its parts begin; known on this side only.
        filled: whether it is an empty container to be filled later, such as a cache, whose value does not count.
    """

    kind: str
    digest: str
    values: dict[str, str] | None = None
    parts: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    filled: bool = False


@dataclasses.dataclass(frozen=True)
class Declared:
    """The definitions of a study's modules, by file and name.

    Attributes:
        private: the file that only one participant has, if it defines the task. Definitions in it that the other side
            lacks are not compared, nor is `data`, and none of its values is shown.
    """

    files: dict[str, dict[str, Definition]]
    private: str | None = None

    def words(self) -> dict[str, Any]:
        """Return the part that is sent, as JSON."""
        sent = lambda one: [one.kind, one.digest, one.values, list(one.parts)]
        return {file: {name: sent(one) for name, one in names.items()} for file, names in self.files.items()}


def declared(*things: Any, private: ModuleType | None = None) -> Declared:
    """Return what the study of these functions, problems, tasks or modules declares.

    Arguments:
        things: functions, modules, or records of functions such as a problem.
        private: the site's own module, or None: see `Declared.private`. A script that is being run (`__main__`) is
            treated like such a module.
    """
    privates = [vars(module) for module in (private, sys.modules.get("__main__")) if module is not None]
    is_private = lambda names: any(names is each for each in privates)
    roots = {id(names): names for thing in things for names in _namespaces(thing, set()) if _is_study(names)}
    files: dict[str, dict[str, Definition]] = {}
    for root in roots.values():
        folder = _file(root).parent
        for names in _with_imports(root, [each for each in privates if each is not root]):
            files.setdefault(_file(names).relative_to(folder).as_posix(), {}).update(_definitions(names))
    return Declared(files, next((_file(names).name for names in roots.values() if is_private(names)), None))


def differences(ours: Declared, theirs: Any) -> list[str]:
    """Return a line for each definition in which a site's study differs from the coordinator's `Declared.words()`."""
    lines: list[str] = []
    for file, names in _read(theirs).items():
        here = ours.files.get(file)
        private = file == ours.private
        if here is None and ours.private is not None:  # the site defines the task in its private file
            here, private = ours.files[ours.private], True
        shown = printable(file, _SHOWN)
        if here is None:
            where = ", ".join(ours.files) or "no file of its own"
            lines.append(f"{shown} defines a part of the coordinator's task, and this site's is in {where}. {_SHARE}")
            continue
        missing = [] if private else [name for name in here if name not in names]
        lines += [f"{shown}: {name} is not at the coordinator." for name in missing]
        names = {name: other for name, other in names.items() if not (private and name == "data")}
        unknown = [name for name in names if name not in here] if private else []
        if unknown:
            listed = printable(", ".join(unknown), _SHOWN)
            lines.append(f"{shown} defines {listed}, and this site's file does not. {_SHARE}")
        for name, other in names.items():
            one = here.get(name)
            if one is None and not private:
                lines.append(f"{shown}: {printable(name, _SHOWN)} is missing here.")
            elif one is not None and (one.kind, one.digest) != (other.kind, other.digest):
                lines.append(f"{shown}: {_difference(name, one, other, private)}")
    more = len(lines) - _LINES
    return [*lines[:_LINES], f"{more} more definitions differ."] if more > 0 else lines


def _difference(name: str, one: Definition, other: Definition, private: bool) -> str:
    if one.kind != other.kind or private or one.kind == "import":
        return f"{name} differs."
    if one.kind == "constant":
        if one.values is not None and other.values is not None:
            for place in (*one.values, *other.values):
                here, there = one.values.get(place, "missing"), other.values.get(place, "missing")
                if here != there:
                    short = lambda text: printable(text, _SHOWN)
                    return f"{name}{short(place)} is {short(here)} here, {short(there)} at the coordinator."
        return f"{name} has another value here than at the coordinator."
    differ = [i for i, part in enumerate(one.parts) if other.parts[i : i + 1] != (part,)]
    line = one.lines[1 + differ[0]] if differ else one.lines[-1 if len(other.parts) > len(one.parts) else 0]
    return f"the {one.kind} {name} differs at line {line}." if one.kind != "statement" else f"line {line} differs."


def _read(words: Any) -> dict[str, dict[str, Definition]]:
    """Return the definitions that the other side has sent; ValueError if it has sent something else."""
    if not isinstance(words, dict) or not all(isinstance(names, dict) for names in words.values()):
        raise ValueError("the opening's 'study' must list definitions by file and name; got something else.")
    return {file: {name: _definition(sent) for name, sent in names.items()} for file, names in words.items()}


def _definition(sent: Any) -> Definition:
    match sent:
        case [str(kind), str(digest), None | dict() as values, list(parts)]:
            if all(isinstance(text, str) for text in (*(values or {}).values(), *parts)):
                return Definition(kind, digest, values, tuple(parts))
    raise ValueError("the opening's 'study' must list definitions by file and name; got something else.")


# The modules of a study, each as its namespace: the globals of its functions.

Names = dict[str, Any]


def _namespaces(thing: Any, seen: set[int]) -> Iterator[Names]:
    """Yield the namespaces of all functions that a thing holds."""
    if id(thing) in seen or thing is None:
        return
    seen.add(id(thing))
    held: Iterable[Any] = ()
    match thing:
        case ModuleType():
            yield vars(thing)
        case FunctionType():
            yield thing.__globals__
            held = [thing.__dict__.get("__wrapped__"), *_contents(thing)]
        case MethodType():
            held = [thing.__func__, thing.__self__]
        case functools.partial():
            held = [thing.func, *thing.args, *thing.keywords.values()]
        case dict():
            held = thing.values()
        case list() | tuple():
            held = thing
        case type():
            yield _imported(thing.__module__)
        case _ if dataclasses.is_dataclass(thing):
            held = [type(thing), *(getattr(thing, field.name, None) for field in dataclasses.fields(thing))]
        case _ if callable(thing):
            held = [type(thing), getattr(thing, "__wrapped__", None)]
    for one in held:
        yield from _namespaces(one, seen)


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet assigned
            continue


def _imported(name: str) -> Names:
    module = sys.modules.get(name)
    return vars(module) if isinstance(module, ModuleType) else {}


def _is_study(names: Names) -> bool:
    """Return whether a module belongs to a study: it is not part of Python or of an installed package."""
    path = names.get("__file__")
    return isinstance(path, str) and path.endswith(".py") and _is_own(path)


@functools.cache
def _is_own(path: str) -> bool:
    file = Path(path).resolve()
    installed = any(folder in file.parents for folder in _INSTALLED)
    return not installed and not {"site-packages", "dist-packages"} & set(file.parts)


def _with_imports(root: Names, without: list[Names]) -> list[Names]:
    """Return the module and all that it imports from its own folder."""
    found, folder = [root], _file(root).parent
    for names in found:  # which grows
        for other in map(_imported, _imports(str(_file(names)), names.get("__package__") or "")):
            known = any(other is each for each in (*found, *without))
            if not known and _is_study(other) and folder in _file(other).parents:
                found.append(other)
    return found


@functools.cache
def _imports(path: str, package: str) -> list[str]:
    """Return the names of modules that a file may import."""
    found: list[str] = []
    for node in ast.walk(ast.Module(_body(path), [])):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*up, *([node.module] if node.module else [])])
            found += [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
    return list(dict.fromkeys(found))


def _file(names: Names) -> Path:
    return Path(names["__file__"]).resolve()


# The definitions of a module.


@functools.cache  # as imported: the file may be edited later
def _body(path: str) -> list[ast.stmt]:
    try:
        return ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []


def _definitions(names: Names) -> dict[str, Definition]:
    """Return the top-level definitions of a module, with the values of its constants."""
    found = dict(_syntax(str(_file(names))))
    for name, one in found.items():
        if one.kind == "constant" and name in names and not one.filled:
            flat = _flat(names[name], str(_file(names).parent))
            if flat is not None:
                short = len(flat) <= _LEAVES and sum(len(k) + len(v) for k, v in flat.items()) <= _CHARACTERS
                found[name] = dataclasses.replace(one, digest=_digest(repr(flat)), values=flat if short else None)
    return found


@functools.cache
def _syntax(path: str) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for node in _body(path):
        match node:
            case ast.Expr(value=ast.Constant()):
                continue  # a docstring
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                parts = [part for part in node.body if not _is_text(part)]
                digests = tuple(_digest(_plain(part))[:8] for part in parts)
                lines = (node.lineno, *(part.lineno for part in parts))
                found[node.name] = Definition(kind, _digest(_plain(node)), None, digests, lines)
            case ast.Import() | ast.ImportFrom():
                origin = f"{'.' * node.level}{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names if origin != "__future__." else ():
                    name = f"the import of {alias.asname or alias.name}"
                    found[name] = Definition("import", _digest(origin + alias.name), lines=(node.lineno,))
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                    if not (name.startswith("__") and name.endswith("__")):
                        digest = _digest((found[name].digest if name in found else "") + _plain(node))
                        filled = _is_empty(node.value)
                        found[name] = Definition("constant", digest, lines=(node.lineno,), filled=filled)
            case ast.If() if _plain(node.test) == _MAIN:
                continue
            case _:
                name = f"statement {sum(one.kind == 'statement' for one in found.values()) + 1}"
                found[name] = Definition("statement", _digest(_plain(node)), lines=(node.lineno,))
    return found


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_empty(node: ast.AST | None) -> bool:
    match node:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Name(id="dict" | "list" | "set"), args=[], keywords=[]):
            return True
    return False


def _plain(node: Any) -> str:
    """Return a node's syntax without docstrings and positions, the same in every version of Python."""
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _SKIPPED]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            fields = [(n, [v for v in value if not _is_text(v)] if n == "body" else value) for n, value in fields]
        shown = ",".join(f"{name}={_plain(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({shown})"
    if isinstance(node, list):
        return f"[{','.join(map(_plain, node))}]"
    return repr(node)


_MAIN = _plain(ast.parse('__name__ == "__main__"', mode="eval").body)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]


def _flat(value: Any, folder: str) -> dict[str, str] | None:
    """Return the texts of a plain value's parts, by place; None if it is not plain, or names this machine's folder."""
    found: dict[str, str] = {}
    try:
        _add(value, "", found, folder, 0)
    except (TypeError, RecursionError):
        return None
    return found


def _add(value: Any, place: str, found: dict[str, str], folder: str, depth: int) -> None:
    entries: Iterable[tuple[Any, Any]] = ()
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() if type(value).__module__ == "builtins":
            text = repr(value)
            if folder in text:
                raise TypeError
            found[place] = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({_digest(text)})"
        case np.generic() | np.ndarray() | jax.Array():
            if is_key(value) or value.dtype == object:
                raise TypeError
            array = np.asarray(value)
            found[place] = f"an array {array.dtype}{list(array.shape)}"
            if array.size <= _ELEMENTS:
                for i, entry in enumerate(array.ravel().tolist()):
                    found[f"{place}[{i}]" if array.ndim else f"{place}[()]"] = repr(entry)
            else:
                found[f"{place}[...]"] = f"others ({hashlib.sha256(array.tobytes()).hexdigest()[:16]})"
        case tuple() | list() if type(value) in (tuple, list):
            found[place] = f"a {type(value).__name__} of {len(value)}"
            entries = enumerate(value)
        case set() | frozenset():
            found[place] = f"a set of {sorted(map(repr, value))}"
        case Mapping() if type(value) is dict:
            found[place] = f"a dict of {list(value)}"  # in order, which may be that of columns
            if not all(isinstance(key, str | int | float | tuple) for key in value):
                raise TypeError
            entries = value.items()
        case _:
            raise TypeError
    if depth > 20 or len(found) > 100_000:
        raise TypeError
    for key, entry in entries:
        _add(entry, f"{place}[{key!r}]", found, folder, depth + 1)
