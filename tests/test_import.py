"""`import rookery` and `rookery --help` import nothing slow, and every public name resolves."""

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rookery as rk
from rookery.cli import program

HEAVY = {"jax", "numpy", "pandas", "matplotlib", "orbax", "pooch", "scipy", "sklearn"}


def fresh(code):
    """What the code prints as JSON, run in a separate Python process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@functools.cache
def imported():
    """The modules that `import rookery` and a public name load, and what `tasks` and `theory` are then."""
    return fresh("""
import json, sys
import rookery as rk
loaded = list(sys.modules)
rk.FedNest
named = list(sys.modules)
from rookery.run.solve import solve
found = [callable(rk.tasks.quadratic), rk.tasks.__name__, rk.theory.__name__]
from rookery.tasks import quadratic
from rookery.cli.registry import TASKS
same = quadratic is rk.tasks.quadratic is TASKS["quadratic"]
print(json.dumps({"loaded": loaded, "named": named, "found": [*found, same, hasattr(rk, "task"), rk.solve is solve]}))
""")


@pytest.mark.xdist_group("imports")
def test_import_loads_nothing_that_is_slow():
    assert not set(imported()["loaded"]) & {*HEAVY, "typer", "rookery.run.solve"}


HELP = {
    (): "compare",
    ("--help",): "Run one or several algorithms",
    ("--version",): "0.",
    ("runn",): "Did you mean 'run'?",
    ("list", "--jsn"): "No such option",
    **{
        (*words, "--help"): "Usage: rookery"
        for words in (
            *((name,) for name in program.COMMANDS),
            ("federation", "init"),
            ("federation", "revoke"),
            ("flare", "submit"),
        )
    },
}


def said(*lines):
    """What the program prints for each of these lines, and the modules that it has then loaded."""
    return fresh(f"""
import contextlib, io, json, sys
from rookery.cli import main
printed = []
for line in {lines!r}:
    sys.argv, out = ["rookery", *line], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        main()
    printed.append(out.getvalue())
print(json.dumps([printed, list(sys.modules)]))
""")


def test_help_and_refusals_wait_for_nothing_slow():
    """JAX alone takes a second of CPU to import. That of every command, too."""
    printed, loaded = said(*HELP)
    for text, expected in zip(printed, HELP.values(), strict=True):
        assert expected in text
    assert not set(loaded) & HEAVY


def test_every_command_is_in_the_help():
    """The lines of the help stand apart from the commands, which are not imported for it."""
    for name, (module, _) in program.COMMANDS.items():
        importlib.import_module(f"rookery.cli.{module}")
        assert program.Commands().get_command(None, name).name == name
    folder = Path(program.__file__).parent
    added = [
        path.stem
        for path in folder.glob("*.py")
        if "@app.command" in path.read_text() or "app.add_" in path.read_text()
    ]
    assert {module for module, _ in program.COMMANDS.values()} == {*added}


def test_no_function_has_the_name_of_a_package():
    packages = {path.stem for path in Path(rk.__file__).parent.iterdir()}
    assert [name for name in rk.__all__ if name in packages and not inspect.ismodule(getattr(rk, name))] == []


@pytest.mark.xdist_group("imports")
def test_the_first_public_name_loads_no_tables_or_pictures():
    assert {"jax", "numpy"} <= set(imported()["named"])
    assert not set(imported()["named"]) & (HEAVY - {"jax", "numpy"})


@pytest.mark.parametrize(("name", "place"), rk._MODULES.items())
def test_public_modules_are_found_by_their_short_names(name, place):
    module = importlib.import_module(name)
    assert module is importlib.import_module(place) is getattr(rk, name.removeprefix("rookery."))
    assert module.__name__ == module.__spec__.name == place


@pytest.mark.slow
@pytest.mark.parametrize("first", ["rookery.cli.registry", "rookery.tasks", "rookery.theory"])
def test_every_public_name_resolves_whatever_is_imported_first(first):
    code = f"""
import json
import {first}
import rookery as rk
from rookery import *
assert tasks is rk.tasks and theory is rk.theory
print(json.dumps([name for name in rk.__all__ if not hasattr(rk, name) or name not in dir(rk)]))
"""
    assert fresh(code) == []


@pytest.mark.xdist_group("imports")
def test_tasks_and_theory_are_there_without_an_import_of_their_own():
    assert imported()["found"] == [True, "rookery.tasks", "rookery.theory", True, False, True]


FIRST = """
import json, os
from pathlib import Path
import jax, numpy, optax, orbax.checkpoint, pandas, sklearn.linear_model
import rookery
failed = []
folder = Path(rookery.__file__).parent
names = sorted(
    ".".join(["rookery", *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")
    for package in ("engines", "language", "plan")
    for path in (folder / package).rglob("*.py")
)
for name in names:
    child = os.fork()
    if not child:
        try:
            __import__(name)
        except ImportError as error:
            os._exit("circular" in str(error))
        os._exit(0)
    failed += [name] * (os.waitpid(child, 0)[1] != 0)
print(json.dumps([len(names), failed]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_every_module_of_the_engines_can_be_imported_first():
    """No import is circular, whatever was imported before."""
    count, failed = fresh(FIRST)
    assert count > 80
    assert failed == []
