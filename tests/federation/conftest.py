"""The sites' processes, which all files here share: each is started once, and keeps what it has compiled."""

from collections.abc import Iterator

import pytest
from tests.federation.processes import NAMES, Process


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
