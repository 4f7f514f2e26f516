"""The order of the contract's tests."""

import pytest


def _case(item: pytest.Item) -> str:
    return next((str(mark.args[0]) for mark in item.iter_markers("xdist_group")), "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Case by case, not test by test: what one test of a case has compiled is still there for the next."""
    places = [i for i, item in enumerate(items) if item.path.parent.name == "contract"]
    ordered = sorted((items[i] for i in places), key=_case)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item
