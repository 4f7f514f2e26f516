"""`import rookery` stays light: what takes long to import is loaded on first use, and every public name resolves."""

import functools
import json
import subprocess
import sys

import pytest

HEAVY = {
    "matplotlib",
    "orbax",
    "pooch",
    "scipy",
    "sklearn",
    "typer",
    "rookery.cli",
    "rookery.data",
    "rookery.experiments",
    "rookery.report",
    "rookery.tasks",
    "rookery.theory",
    "rookery.trackers",
}


def fresh(code):
    """What the code, run by a Python of its own, prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@functools.cache
def imported():
    """Which modules `import rookery` loads, and what it then gives of tasks and theory; of one Python."""
    return fresh("""
import json, sys
import rookery as rk
loaded = list(sys.modules)
found = [callable(rk.tasks.quadratic), rk.tasks.__name__, rk.theory.__name__]
from rookery.tasks import quadratic
from rookery.registry import TASKS
same = quadratic is rk.tasks.quadratic is TASKS["quadratic"]
print(json.dumps({"loaded": loaded, "found": [*found, same, hasattr(rk, "task")]}))
""")


@pytest.mark.xdist_group("imports")
def test_import_loads_nothing_that_is_slow_and_not_needed():
    loaded = set(imported()["loaded"])
    assert "rookery.solve" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    "first",
    ["rookery.registry", *(pytest.param(n, marks=pytest.mark.slow) for n in ("rookery.tasks", "rookery.theory"))],
)
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
    assert imported()["found"] == [True, "rookery.tasks", "rookery.theory", True, False]
