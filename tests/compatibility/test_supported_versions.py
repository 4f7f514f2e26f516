"""The supported versions are the same wherever they stand."""

import re
import runpy
import tomllib
from pathlib import Path

import rookery as rk

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLASSIFIERS = "\n".join(PROJECT["classifiers"])
PYTHONS = re.findall(r"Python :: (3\.\d+)$", CLASSIFIERS, re.MULTILINE)
PAGE = (ROOT / "docs" / "versions.md").read_text()


def bounds(name: str, text: str) -> tuple[int, int]:
    """The bounds of a requirement such as jax>=0.10,<0.12: the minor versions."""
    (found,) = re.findall(rf"^{name}>=0\.(\d+),<0\.(\d+)$", text, re.MULTILINE)
    return int(found[0]), int(found[1])


def test_pythons() -> None:
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert runpy.run_path(str(ROOT / "tools" / "try_wheel.py"))["SUPPORTED"] == tuple(PYTHONS)
    assert f"\n| Python | {', '.join(PYTHONS)} |" in PAGE
    assert f"on Python {PYTHONS[0]}:" in (ROOT / "constraints-oldest.txt").read_text()


def test_jax() -> None:
    oldest, beyond = bounds("jax", "\n".join(PROJECT["dependencies"]))
    assert f"\n| JAX | {', '.join(f'0.{minor}' for minor in range(oldest, beyond))} |" in PAGE
    assert f"\njax==0.{oldest}.0\n" in (ROOT / "constraints-oldest.txt").read_text()


def test_the_version() -> None:
    assert rk.__version__ == PROJECT["version"]
    assert f"\nversion: {rk.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_licences_of_everything_that_is_packed() -> None:
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])
    data = ROOT / "src" / "rookery" / "data" / "heart"
    assert data / "ATTRIBUTION.md" in [ROOT / name for name in PROJECT["license-files"]]
    assert "CC BY 4.0" in (data / "ATTRIBUTION.md").read_text()
    assert PROJECT["license"] == "Apache-2.0 AND CC-BY-4.0"
