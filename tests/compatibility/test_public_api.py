"""The public API is the committed listing: what is removed or renamed there breaks the programs of users."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rookery as rk

HERE = Path(__file__).parent
TOOL = runpy.run_path(str(HERE.parents[1] / "tools" / "public_api.py"))


def test_the_public_api_is_the_listing() -> None:
    listed, found = set((HERE / "public_api.txt").read_text().splitlines()), set(TOOL["listing"]())
    removed, added = sorted(listed - found), sorted(found - listed)
    assert not removed, f"deprecate first (docs/versions.md), or list anew: {removed}"
    assert not added, f"list anew with `python tools/public_api.py > tests/compatibility/public_api.txt`: {added}"


def lines(thing: Any) -> set[str]:
    return set(TOOL["described"]("it", thing))


def test_whatever_is_removed_changes_the_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Before:
        step: float = 0.1
        rounds: int = 1
        made: int = dataclasses.field(init=False, default=0)

        def solve(self, x: float, *, quiet: bool = False) -> float:
            return x

        @property
        def total(self) -> float:
            return 0.0

    fields = [("step", float, 0.1), ("made", int, dataclasses.field(init=False, default=0))]
    fewer = dataclasses.make_dataclass("Before", fields, frozen=True)
    assert lines(Before) - lines(fewer) == {
        "class it(step=0.1, rounds=1)", "it.solve(self, x, *, quiet=False)", "it.total"
    }  # fmt: skip
    assert "it.made" in lines(Before) & lines(fewer)

    class Pair(NamedTuple):
        x: int
        y: int = 2

    assert lines(Pair) == {"class it(x, y=2)"}
    monkeypatch.setattr(rk, "__all__", [name for name in rk.__all__ if name != "solve"])
    listed = (HERE / "public_api.txt").read_text().splitlines()
    assert [line.partition("(")[0] for line in set(listed) - set(TOOL["listing"]())] == ["rk.solve"]
