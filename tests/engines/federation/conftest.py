"""What files here share: the sites' processes, each started once and keeping what it has compiled; a small disk."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.federation.processes import NAMES, Process


@pytest.fixture(scope="session")
def _pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    folder = tmp_path_factory.mktemp("processes")
    found = [Process(folder, i) for i in range(len(NAMES))]
    yield found
    for process in found:
        process.kill()


@pytest.fixture
def sites(_pool: list[Process]) -> Iterator[list[Process]]:
    """Three sites' processes, idle."""
    yield _pool
    for process in _pool:
        if process.busy:  # the test has failed
            process.kill()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
