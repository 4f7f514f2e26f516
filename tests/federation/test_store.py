"""A site's file of what it remembers."""

from pathlib import Path

import pytest

from rookery.engines.federation.store import Store


def test_other_data_than_those_it_began_with_are_refused(tmp_path: Path) -> None:
    """(A site that comes back with them: test_faults.)"""
    path = tmp_path / "run.memory"
    Store(path, "one").check()  # there is nothing yet
    Store(path, "one").begin()
    Store(path, "one").check()
    with pytest.raises(ValueError, match="its data are not those with which it began this run"):
        Store(path, "other").check()
    Store(path, "other").begin()  # does not replace what is there
    with pytest.raises(ValueError, match="its data are not those"):
        Store(path, "other").check()
