"""What all participants must agree on: a study that differs is refused, with the place; nothing private is sent."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.engines.federation.test_hospitals import EXAMPLE

import rookery as rk
from rookery.cli.site import read_module
from rookery.engines.engine import Job
from rookery.engines.federation.agreement import Declared, declared, differences
from rookery.engines.federation.responder import Responder
from rookery.engines.federation.transports.memory import Memory
from rookery.problems.variables import adapt
from rookery.run.evaluation import measuring

STUDY = (EXAMPLE / "study.py").read_text()
Loader = Callable[..., ModuleType]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Loader]:
    """load(text, beside, name): a module of that text, in a folder of its own, with other files beside it."""
    before, paths, count = set(sys.modules), list(sys.path), [0]

    def loaded(text: str = STUDY, beside: dict[str, str] | None = None, name: str = "study") -> ModuleType:
        count[0] += 1
        folder = tmp_path / str(count[0])
        folder.mkdir()
        for other, content in (beside or {}).items():
            sys.modules.pop(other.removesuffix(".py"), None)
            (folder / other).write_text(content)
        (folder / f"{name}.py").write_text(text)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        sys.modules.pop(name, None)
        module = importlib.import_module(name)
        sys.path.remove(str(folder))
        return module

    yield loaded
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def of(module: ModuleType, **given: Any) -> Declared:
    return declared(module.task, module.task().problem, **given)


CHANGES = {
    "order": (
        'SOURCES = ("laboratory", "letter"',
        'SOURCES = ("letter", "laboratory"',
        "SOURCES[0] is 'letter' here, 'laboratory' at the coordinator.",
    ),
    "constant": (
        '"radius": ((14, 3.5)',
        '"radius": ((12.0, 3.5)',
        "PUBLISHED['radius'][0][0] is 12.0 here, 14 at the coordinator.",
    ),
    "columns": ("np.zeros(len(SCALES), np.float32),", "np.zeros(31, np.float32),", "SAMPLE['features'] is an array"),
    "preparation": ("- mean) / scale", "- mean) * scale", "the function rows differs at line LINE."),
    "default": ("def task(clients: int = 3)", "def task(clients: int = 4)", "the function task differs at line LINE."),
    "import": ("import pandas as pd", "import pandas.api as pd", "the import of pd differs."),
    "less": ("def trust(x)", "def trust2(x)", "trust is missing here."),
    "more": ("PENALTY = 0.01", "PENALTY = 0.01\nEXTRA = 1", "EXTRA is not at the coordinator."),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_study_that_differs_is_told_with_the_place(change: str, load: Loader) -> None:
    before, after, line = CHANGES[change]
    assert before in STUDY
    theirs = of(load())
    line = line.replace("LINE", str(1 + STUDY[: STUDY.index(before)].count("\n")))
    text = STUDY.replace(before, after).replace("pd.DataFrame", "object" if change == "import" else "pd.DataFrame")
    found = differences(of(load(text)), theirs.words())
    assert any(f"study.py: {line}" in text for text in found), found


LAYOUT = {
    "comments": lambda text: text.replace("PENALTY = 0.01", "PENALTY = 0.01  # agreed on in May\n\n\n# so"),
    "docstrings": lambda text: text.replace('"""The weight of each source, from 0 to 1."""', '"""Weights."""'),
    "layout": lambda text: text.replace(
        '("laboratory", "letter", "billing")', '(\n  "laboratory",\n  "letter", "billing",)'
    ),
    "line endings": lambda text: text.replace("\n", "\r\n"),
    "a way to write a number": lambda text: text.replace("PENALTY = 0.01", "PENALTY = 1e-2"),
    "for scripts": lambda text: text + '\nif __name__ == "__main__":\n    print(task())\n',
}


@pytest.mark.parametrize("change", LAYOUT)
def test_what_changes_nothing_is_accepted(change: str, load: Loader) -> None:
    assert LAYOUT[change](STUDY) != STUDY
    assert differences(of(load(LAYOUT[change](STUDY))), of(load()).words()) == []


def test_modules_beside_the_study_count(load: Loader) -> None:
    text = "from scales import SCALE\nimport helpers\nimport numpy as np\nimport rookery as rk\n" + SMALL
    beside = {"scales.py": "SCALE = {'a': 1.0}\n", "helpers.py": "def twice(x):\n    return 2 * x\n"}
    theirs = of(load(text, beside)).words()
    assert set(theirs) == {"study.py", "scales.py", "helpers.py"}
    other = beside | {"helpers.py": "def twice(x):\n    return x\n", "scales.py": "SCALE = {'a': 2.0}\n"}
    assert sorted(differences(of(load(text, other)), theirs)) == [
        "helpers.py: the function twice differs at line 2.",
        "scales.py: SCALE['a'] is 2.0 here, 1.0 at the coordinator.",
    ]


SMALL = """
from rookery.tasks import Task
CACHE = {}
def loss(x, rows):
    CACHE[0] = 1
    return ((x - rows) ** 2).mean()
def task(clients=2):
    like = rk.Clients.like(upper=np.float32(0), n=clients)
    return Task("study", rk.SingleLevel(loss), like, np.float32(0), lambda x, y: {"loss": x**2}, "loss", rounds=2)
"""


def test_a_cache_is_not_a_constant(load: Loader) -> None:
    first = load("import numpy as np, rookery as rk\n" + SMALL)
    theirs = of(first).words()
    first.CACHE["used"] = 3
    assert differences(of(first), theirs) == []


def test_many_differences_are_counted(load: Loader) -> None:
    constants = "".join(f"C{i} = {{}}\n" for i in range(9))
    filled = lambda n: "import numpy as np, rookery as rk\n" + SMALL + constants.format(*[n] * 9)
    assert differences(of(load(filled(1))), of(load(filled(2))).words())[-1] == "6 more definitions differ."


SITE = """
SECRET = 12345.678
def data():
    return {"upper": np.full(3, SECRET, np.float32)}
"""


def test_a_site_with_everything_in_its_own_file_shows_none_of_it(load: Loader) -> None:
    """Its data() and what it has beyond the study do not count; what differs is named without a value."""
    study = "import numpy as np, rookery as rk\nSECRET = 1.0\nOTHER = 2\n" + SMALL
    theirs = of(load(study)).words()
    own = load(study.replace("OTHER = 2", "OTHER = 777") + SITE + "\nEXTRA = 999\n", name="north")
    found = differences(of(own, private=own), theirs)
    assert found == ["study.py: SECRET differs.", "study.py: OTHER differs."]


def test_a_task_in_the_coordinators_script_is_told_apart_from_one_in_a_file(
    load: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites can't import what a script defines, unless it is the file that they have: the message says what to do."""
    study = "import numpy as np, rookery as rk\n" + SMALL
    script = load(study + "rounds, engine = 5, None\n", name="script")
    monkeypatch.setitem(sys.modules, "__main__", script)
    theirs = of(script).words()
    share = "Define the task in a file of its own, which the coordinator's script and all sites import."
    assert differences(of(load(study)), theirs) == [
        f"script.py defines a part of the coordinator's task, and this site's is in study.py. {share}"
    ]
    own = load(study + SITE, name="north")
    assert differences(of(own, private=own), theirs) == [
        f"script.py defines rounds, engine, and this site's file does not. {share}"
    ]
    assert differences(of(load(study + "rounds, engine = 5, None\n", name="script")), theirs) == []


def test_no_source_is_sent(load: Loader) -> None:
    text = json.dumps(of(load()).words())
    assert len(text) < 20_000
    for code in ("get_indexer", "logaddexp", "the table has no column", "def ", "lambda"):
        assert code not in text


def test_a_description_that_is_none_is_refused(load: Loader) -> None:
    ours = of(load())
    for words in (
        None,
        7,
        {"study.py": 7},
        {"study.py": {"a": 7}},
        {"study.py": {"a": ["constant", "x", {"a": 7}, []]}},
    ):
        with pytest.raises(ValueError, match="'study' must list definitions by file and name"):
            differences(ours, words)


def test_a_name_from_the_network_is_escaped(load: Loader) -> None:
    lines = differences(of(load()), {"study.py": {"a\x1b[2J" * 1000: ["constant", "x", {"\x1b": "\x1b"}, []]}})
    assert all(line.isprintable() and len(line) < 500 for line in lines)


# A run with responders.


def opened(theirs: ModuleType, ours: ModuleType, site: bool = False, coordinator: bool = False) -> list[str]:
    """Open a run, and return what the coordinator says."""
    task, told = theirs.task(2), list[str]()
    models = adapt(task.problem, task.init)
    job = Job(models.problem, task.clients, rk.FedAvg(), (np.float32(0), ()), 2, 0, measure=measuring(models, None))
    module = ModuleType("hospital")
    module.task, module.data = ours.task, lambda: {"upper": np.ones(3, np.float32)}  # type: ignore[attr-defined]
    path = Path(str(ours.__file__)).with_name("hospital.py")
    path.write_text(
        "import numpy as np\nfrom study import task\ndef data():\n    return {'upper': np.ones(3, np.float32)}\n"
    )
    sys.modules["study"] = ours
    responders = [Responder(name, read_module(path)[1], allow_other_study=site) for name in ("a", "b")]
    engine = rk.Federation(
        transport=Memory(2, lambda i, message: responders[i].handle(message), ["a", "b"]),
        patience=0.0,
        tell=told.append,
        study=theirs.task,
        allow_other_study=coordinator,
    )
    engine.open(job).close()
    return told


def test_a_run_is_refused_or_allowed_with_a_warning(load: Loader, caplog: pytest.LogCaptureFixture) -> None:
    """The constant is not in the plan: it is what the site makes its rows with."""
    text = "import numpy as np, rookery as rk\nSCALE = 1.0\n" + SMALL
    theirs, ours = load(text), load(text.replace("SCALE = 1.0", "SCALE = 2.0"))
    assert opened(theirs, load(text)) == []
    line = "study.py: SCALE is 2.0 here, 1.0 at the coordinator."
    with pytest.raises(ValueError, match="a refuses: its study is not the coordinator's") as raised:
        opened(theirs, ours)
    assert line in str(raised.value)
    assert "--allow-other-study" in str(raised.value)
    for allowed in ({"site": True}, {"coordinator": True}):
        caplog.clear()
        told = opened(theirs, ours, **allowed)
        assert [line in text for text in told] == [True, True]
        assert line in caplog.text
