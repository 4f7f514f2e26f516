"""The code that a run depends on: the definitions that a function or class reaches, with a digest of each.

Imports are read from the source text; nothing is imported. A module of the library counts as a whole, with everything
it imports. In the experiments, in a user's own module, in the `__init__` of a package and in the list of public names,
only the definitions in use count: a claim, a picture or another experiment's task does not change a run.
"""

import ast
import functools
import hashlib
import importlib.util
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = __name__.partition(".")[0]
EXPERIMENTS = f"{PACKAGE}.experiments"
PRESENTATION = (f"{PACKAGE}.report.", f"{PACKAGE}.base.drawing.")  # does not change the numbers of a run
PUBLIC = f"{PACKAGE}.run.public"  # where the package's `__init__` loads its names from
ALL, _STARRED = "*", "import *"

Node = tuple[str, str]  # a module, and a name in it or ALL
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class _Piece:
    """A whole module, or the statements that define one name in it."""

    digests: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()  # that it uses
    imports: frozenset[Node] = frozenset()


class Sources:
    """The source texts of modules, by name.

    Arguments:
        texts: the modules of the package.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = dict(texts)
        self._packages = {name.rpartition(".")[0] for name in texts}
        self._known: dict[frozenset[Node], dict[str, str]] = {}

    def digests(self, things: Iterable[Any]) -> dict[str, str]:
        """A digest of each piece of code that the functions and classes depend on, by its name.

        Leaves out the standard library and installed packages other than this one.
        """
        roots = frozenset(node for thing in things for node in self._root(thing))
        if roots not in self._known:
            self._known[roots] = self._reached(roots)
        return self._known[roots]

    def _root(self, thing: Any) -> list[Node]:
        module = getattr(thing, "__module__", None) or ""
        if module not in self.texts:
            if _installed(module):
                return []
            try:
                self.texts[module] = inspect.getsource(sys.modules[module])
            except (KeyError, OSError, TypeError) as error:
                raise TypeError(f"The source of {thing!r} cannot be read; define it in a file.") from error
        return self._targets(module, thing.__qualname__.partition(".")[0])

    def _reached(self, roots: Iterable[Node]) -> dict[str, str]:
        found: dict[str, str] = {}
        seen, ahead = set(roots), sorted(roots)
        while ahead:
            module, name = ahead.pop()
            pieces = _pieces(self.texts[module], module, module in self._packages)
            starred = frozenset((other, name) for other, _ in pieces[_STARRED].imports)
            piece = pieces.get(name, _Piece(imports=starred))
            if piece.digests:
                found[f"{module}:{name}"] = " ".join(piece.digests)
            used = {target for imported in piece.imports for target in self._targets(*imported)}
            new = (used | {(module, other) for other in piece.names}) - seen
            seen |= new
            ahead += new
        return found

    def _targets(self, module: str, name: str) -> list[Node]:
        """The submodule, definition or both that an import of a name from a module refers to."""
        below = f"{module}.{name}"
        targets = [(below, ALL)] if below in self.texts else []
        if module in self.texts:
            library = module.startswith(f"{PACKAGE}.") and not f"{module}.".startswith(f"{EXPERIMENTS}.")
            whole = library and module not in self._packages and module != PUBLIC
            targets.append((module, ALL if whole else name))
        return [target for target in targets if not f"{target[0]}.".startswith(PRESENTATION)]


@functools.cache
def package() -> Sources:
    """The sources of this package."""
    return Sources(texts(Path(__file__).parents[2]))


def texts(root: Path) -> dict[str, str]:
    """The source of every module of the package in this folder, by the module's name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


def _installed(module: str) -> bool:
    """Whether a module belongs to the standard library or to an installed package."""
    if not module or module.partition(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return file is not None and any(Path(file).is_relative_to(place) for place in places)


@functools.cache
def _pieces(text: str, module: str, is_package: bool) -> dict[str, _Piece]:
    """The module as a whole, under ALL; its `import *`, under _STARRED; and each name that its top level defines."""
    tree = ast.parse(text)
    parent = module if is_package else module.rpartition(".")[0]
    found = {ALL: _Piece((digest(tree),), imports=frozenset(node for _, node in _imports(tree, parent)))}
    found[_STARRED] = _Piece()
    for statement in tree.body:
        if not isinstance(statement, _Definition):
            for name, imported in _imports(statement, parent):
                at = _STARRED if name == "*" else name
                _add(found, at, _Piece((":".join(imported),), imports=frozenset([imported])))
        own = _Piece(
            (digest(ast.Module([statement], [])),),
            frozenset(_names(statement)),
            frozenset(node for _, node in _imports(statement, parent)),
        )
        for name in _defined(statement):
            _add(found, name, own)
    return found


def _add(found: dict[str, _Piece], name: str, piece: _Piece) -> None:
    before = found.get(name, _Piece())
    found[name] = _Piece((*before.digests, *piece.digests), before.names | piece.names, before.imports | piece.imports)


def _imports(tree: ast.AST, parent: str) -> Iterator[tuple[str, Node]]:
    """Each import in the code, also inside functions: the name that it binds, and what it refers to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], (alias.name, ALL)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), parent)
            for alias in node.names:
                yield alias.asname or alias.name, (module, alias.name)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _defined(statement: ast.stmt) -> set[str]:
    """The names that a top-level statement binds or may change, except imports."""
    if isinstance(statement, _Definition):
        return {statement.name}
    found: set[str] = set()
    hidden: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.comprehension):
            hidden |= _names(node.target)  # visible only in the comprehension
        elif isinstance(node, ast.Expr) or isinstance(getattr(node, "ctx", None), ast.Store):
            found |= _names(node)
        elif isinstance(node, _Definition):
            found.add(node.name)
    return found - hidden


def digest(tree: ast.Module) -> str:
    """A hash of the code without docstrings, comments and layout, the same on every version of Python.

    >>> digest(ast.parse("x = (1)  # one")) == digest(ast.parse("x = 1")) != digest(ast.parse("x = 2"))
    True
    """
    return hashlib.sha256(json.dumps(_outline(tree)).encode()).hexdigest()


def _outline(node: Any) -> Any:
    """An AST as lists: a node's type and its fields, without empty ones, in which versions of Python differ."""
    if isinstance(node, list):
        return [_outline(entry) for entry in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    fields.pop("kind", None)  # the u of u"…"
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, documented) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    if isinstance(node, ast.JoinedStr):  # Python 3.12 puts an empty text into {x:{width}}
        fields["values"] = [v for v in node.values if not (isinstance(v, ast.Constant) and v.value == "")]
    kept = {name: value for name, value in fields.items() if value is not None and value != []}
    return [type(node).__name__, *([name, _outline(value)] for name, value in kept.items())]
