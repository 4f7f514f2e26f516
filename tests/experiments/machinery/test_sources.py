"""Fingerprints cover the code that a run depends on, and nothing else."""

import ast
import dataclasses
import functools
import subprocess
import sys

import pytest

from rookery import Federation, Simulation
from rookery.algorithms import FedBiO, FedNest
from rookery.experiments import Config
from rookery.experiments.feddro.images import Drop
from rookery.experiments.machinery import sources
from rookery.experiments.machinery.one_run import fingerprint
from rookery.experiments.weighted.nodes import one_center
from rookery.tasks import dro_imbalanced, hyperrep, quadratic

TEXTS = sources.package().texts
NESTED = Config("a", quadratic, FedNest(upper_step=0.1), 1)


def changes(config, module, old, new):
    """Whether an edit of a module changes the fingerprint of a configuration."""
    name = f"rookery.{module}"
    edited = TEXTS[name].replace(old, new)
    assert edited != TEXTS[name], f"{old!r} is not in {module}"
    code = sources.Sources({**TEXTS, name: edited})
    assert fingerprint(config, 0) == fingerprint(config, 0, sources.Sources(TEXTS))
    return fingerprint(config, 0, code) != fingerprint(config, 0)


def appended(config, module, line="_ADDED = 1"):
    return changes(config, module, TEXTS[f"rookery.{module}"], f"{TEXTS[f'rookery.{module}']}\n{line}\n")


@pytest.mark.parametrize(
    "module",
    [
        "algorithms.fednest",
        "engines.checks.losses",
        "data.clients",
        "language.fed",
        "parts.hypergradient",
        "parts.inverse_hessian",
        "problems.problems",
        "run.solve",
        "tasks.quadratic",
        "base.tree",
        Simulation.__module__.removeprefix("rookery."),
    ],
)
def test_a_changed_module_below_a_run_changes_its_fingerprint(module):
    assert appended(NESTED, module)
    assert not appended(NESTED, module, "# A comment.")


@pytest.mark.parametrize(
    "module",
    [
        "algorithms",
        "algorithms.fedbio",
        "cli",
        "data.datasets",
        "experiments.machinery.running",
        "experiments.fednest.fig4",
        "problems.objectives",
        "report",
        "tasks",
        "tasks.hyperrep",
        "theory",
        "run.tune",
    ],
)
def test_a_change_elsewhere_does_not(module):
    assert not appended(NESTED, module)


def test_each_run_has_the_modules_of_its_own_task_and_algorithm():
    assert appended(dataclasses.replace(NESTED, task=hyperrep), "data.datasets")
    assert appended(dataclasses.replace(NESTED, task=dro_imbalanced), "problems.objectives")
    assert appended(dataclasses.replace(NESTED, task=dro_imbalanced), "problems.models")
    assert appended(dataclasses.replace(NESTED, algorithm=FedBiO(upper_step=0.1)), "algorithms.fedbio")
    assert not appended(dataclasses.replace(NESTED, task=hyperrep), "report")  # data.partition draws with it


def test_the_code_of_another_engine_counts_where_it_is_used():
    module = Federation.__module__.removeprefix("rookery.")
    assert not appended(NESTED, module)
    assert appended(dataclasses.replace(NESTED, engine=Federation()), module)
    assert fingerprint(dataclasses.replace(NESTED, engine=Simulation(block=2)), 0) == fingerprint(NESTED, 0)


def test_docstrings_do_not_count():
    old = ast.get_docstring(ast.parse(TEXTS["rookery.data.clients"]))
    assert not changes(NESTED, "data.clients", old, "Something else.")


def test_of_an_experiments_module_only_what_the_task_and_its_settings_use_counts():
    config = dataclasses.replace(NESTED, task=one_center)
    assert appended(config, "tasks.weighted_nodes")
    module = "experiments.weighted.nodes"
    for name, counts in {"one_center": True, "_named": True, "scores": False}.items():  # _named is a helper of the task
        assert changes(config, module, f"def {name}(", f"def {name}(_more=None, *, ") is counts
    assert not changes(config, module, "PERSONAL = ", "PERSONAL = 'of' + ")
    assert changes(config, "experiments.machinery.one_run", "seed=seed,", "seed=seed + 1,")  # how a run calls solve


def test_the_code_of_a_schedule_counts():
    config = dataclasses.replace(NESTED, algorithm=FedNest(upper_step=Drop(0.1, 10)))
    assert changes(config, "experiments.feddro.images", "class Drop:", "class Drop:\n    more = 1\n")
    assert not changes(NESTED, "experiments.feddro.images", "class Drop:", "class Drop:\n    more = 1\n")


OWN = """
import functools
from rookery.algorithms import *
from rookery.experiments import Config
from rookery.experiments.machinery.one_run import fingerprint
from rookery.tasks import quadratic

SIZES = {"a": 3}
SIZES["b"] = 4
OTHER = [SIZES for quadratic in ()]

def step(t, start):
    return start / (t + 1)

def task(seed, clients=3):
    return quadratic(clients=SIZES["b"])

def claim(results):
    return OTHER

if __name__ == "__main__":
    print(fingerprint(Config("a", task, FedNest(upper_step=functools.partial(step, start=0.1)), 1), 0))
"""


@pytest.mark.slow
def test_of_a_users_own_module_only_what_is_used_counts(tmp_path):
    def of(text):
        path = tmp_path / "own.py"
        path.write_text(text)
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    first = of(OWN)
    assert of(OWN.replace("return OTHER", "return 2").replace("def claim", "# A comment.\ndef claim")) == first
    assert of(OWN.replace('SIZES["b"] = 4', 'SIZES["b"] = 5')) != first
    assert of(OWN.replace("(t + 1)", "(t + 2)")) != first


def test_imports_are_followed_in_every_form():
    texts = {
        "rookery": "from rookery.pack import *",
        "rookery.pack": "from .one import first\nfrom rookery.pack import two",
        "rookery.pack.one": "def first(): from rookery.low import x",
        "rookery.pack.two": "import rookery.high",
        "rookery.low": "x = 1",
        "rookery.high": "x = 2",
        "own": "import rookery.pack.two as b\nfrom rookery import *\ndef task(): return first\ndef other(): return b",
    }

    def reached(name):
        thing = functools.partial(print)
        thing.__module__, thing.__qualname__ = "own", name
        return {entry.removesuffix(":*") for entry in sources.Sources(texts).digests([thing]) if entry.endswith(":*")}

    assert reached("task") == {"rookery.pack.one", "rookery.low"}
    assert reached("other") == {"rookery.pack.two", "rookery.high"}


def test_what_has_no_source_is_refused_and_installed_code_is_left_out():
    assert sources.package().digests([max, pytest.approx]) == {}
    made = type("Made", (), {"__module__": "nowhere"})
    with pytest.raises(TypeError, match="define it in a file"):
        sources.package().digests([made])


CODE = '''
"""About the module."""
import math

@decorated(1)
class Shape(Base, kind=None):
    """About the class."""

    side: float = 1e-3  # of the square

    def area(self, *more: int, exact=True, **rest) -> float:
        """About the method."""
        parts = [n ** 2 for n in more if n] + [*rest]
        values = {"a": -1, **rest}
        lambda x, /, y=...: (x, y)[1:, None]
        match more:
            case [1, *_]:
                return f"{{{self.side!r:>{len(more)}}}} " "and" f"{parts=}"
        with open(u"name") as f, g():
            yield from (v async for v in values)
'''


def test_docstrings_comments_and_layout_do_not_count_in_a_digest_and_a_changed_number_does():
    def of(code):
        return sources.digest(ast.parse(code))

    assert of(CODE) == of(CODE.replace("About", "Of").replace("  # of the square", "\n"))
    assert of(CODE) == of(CODE.replace("1e-3", "(.001)").replace("-1, **rest", "-1,\n  **rest"))
    for old, new in (("1e-3", "1e-4"), ("exact=True", "exact=False"), ("[1:, None]", "[1:]"), ("kind=None", "kind=0")):
        assert of(CODE) != of(CODE.replace(old, new))
    assert of(CODE).startswith("0a4e0e3b194d"), "it must be the same on every version of Python"
