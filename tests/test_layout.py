"""The architecture: imports point one way, and public names are documented."""

import ast
import dataclasses
import functools
import inspect
import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rookery as rk
from rookery import algorithms
from rookery.report import methods as catalogue

SOURCE = Path(rk.__file__).parent
# A package may import those before it, and its own files.
ORDER = ["base", "data", "problems", "language", "plan", "channels", "parts", "algorithms", "engines", "run", "report"]
ORDER += ["tasks", "theory", "testing", "experiments", "cli"]
RANK = {name: rank for rank, name in enumerate(ORDER)}
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


@functools.cache
def parsed(path: Path) -> tuple[str | None, list[ast.Import | ast.ImportFrom]]:
    """A file's docstring, and its imports, at its top or inside a function."""
    tree = ast.parse(path.read_text())
    return ast.get_docstring(tree), [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(path: Path) -> set[str]:
    """The packages of rookery that a file imports."""
    found = set()
    for node in parsed(path)[1]:
        if isinstance(node, ast.ImportFrom) and node.module == "rookery":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rookery."):
            found.add(node.module.split(".")[1])  # type: ignore[union-attr]
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("rookery.")}
    return found


def test_nothing_that_comes_from_the_network_is_run() -> None:
    """No module of the federation can unpickle, evaluate or import what a message names."""
    modules = r"import (pickle|cloudpickle|dill|marshal|shelve)\b"
    calls = r"\b(eval|exec|__import__|import_module|import_string)\(|resolve_name\((?!(PROGRAM|RESPONDER)\))"
    for path in sorted((SOURCE / "engines" / "federation").rglob("*.py")):
        assert not re.search(f"{modules}|{calls}", path.read_text()), path.name


def test_imports_point_one_way() -> None:
    for path in FILES:
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        assert own in RANK, f"{own} has no place in ORDER"
        wrong = {name for name in imported(path) - {own, "__version__"} if RANK[name] >= RANK[own]}
        assert not wrong, f"{path}: {own} imports {sorted(wrong)}"


def test_the_wheel_has_every_file_that_is_not_code() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["rookery"]
    packed = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    files = {path for path in SOURCE.rglob("*.*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == packed


def test_what_may_change_with_jax_is_in_one_file() -> None:
    """Private JAX, jaxprs, and primitives that are matched by name."""
    private = r"jax\._src|jax\.(extend|interpreters)\b|jax\.core\b|primitive\.name|str\(\w+\.primitive\)"
    found = {str(path.relative_to(SOURCE)) for path in FILES if re.search(private, path.read_text())}
    assert found == {"base/compat.py"}


def test_no_files_import_each_other_in_a_circle() -> None:
    names = {".".join(("rookery", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        nodes = [node for node in parsed(path)[1] if isinstance(node, ast.ImportFrom)]
        used = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
        graph[name] = ({*used, *(str(node.module) for node in nodes)} & names.keys()) - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_algorithms_do_not_import_each_other() -> None:
    for path in (SOURCE / "algorithms").glob("[!_]*.py"):
        assert "algorithms" not in imported(path), path.name


def test_a_file_says_what_belongs_in_it() -> None:
    assert not [path for path in FILES if not parsed(path)[0]]


@pytest.mark.parametrize("name", algorithms.__all__)
def test_an_algorithm_documents_itself(name: str) -> None:
    cls = getattr(rk, name)
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    text = inspect.getdoc(cls) or ""
    for part in ("Departures from the paper:", "Exchanges per round:", "Reference:"):
        assert part in text, f"{name}: no {part!r} in its docstring"


def test_every_public_name_is_documented() -> None:
    assert not [name for name in rk.__all__ if not inspect.getdoc(getattr(rk, name))]


def test_the_page_of_all_methods_is_what_they_say_of_themselves() -> None:
    text = (SOURCE.parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")
    assert text == catalogue.page(), "make docs writes it anew"
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .*? \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(algorithms.__all__)


def test_the_readme_is_short_and_knows_what_it_names() -> None:
    text = (SOURCE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    table = text[text.index("## Which method") : text.index("## The command line")]
    named = set(re.findall(r"`(?:rk\.)?([A-Z]\w+)", table))
    assert named <= set(rk.__all__)
    assert f"provides {len(algorithms.__all__)} published methods" in " ".join(text.split())
    ((number, unverified),) = re.findall(r"(\d+) methods we did not have the paper's algorithm box: (.*?)\. The", text)
    without = re.findall(r"`(\w+)`", unverified)
    assert len(set(without)) == len(without) == int(number)
    said = {name: " ".join((getattr(algorithms, name).__doc__ or "").split()) for name in algorithms.__all__}
    for name in without:
        assert re.search("unverified|no access|as for `FCSG`", said[name]), name
    silent = [name for name in said if "algorithm box" in said[name] and name not in without]
    assert not silent, f"name them in the README: {silent}"
