"""Look up names, and suggest the nearest ones for a name that is unknown."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

V = TypeVar("V")


def find(kind: str, name: str, known: Mapping[str, V]) -> tuple[str, V]:
    """Return a known name and its entry; capitals, `-` and `_` do not matter.

    >>> find("task", "Minimax_Quadratic", {"minimax-quadratic": 1})[0]
    'minimax-quadratic'
    >>> find("algorithm", "FedNets", {"FedAvg": 1, "FedNest": 2})
    Traceback (most recent call last):
    ValueError: There is no algorithm 'FedNets'; did you mean FedNest?
    """
    by_plain = {plain(entry): entry for entry in known}
    entry = by_plain.get(plain(name))
    if entry is None:
        raise ValueError(f"There is no {kind} {name!r}; {suggestion(name, known)}")
    return entry, known[entry]


def check_setting(owner: str, name: str, known: Iterable[str]) -> None:
    """Raise ValueError unless `owner` has this setting."""
    if name not in known:
        raise ValueError(f"{owner} has no setting {name!r}; {suggestion(name, known)}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known names, or list all of them."""
    by_plain: dict[Any, str] = {plain(entry): entry for entry in known}
    close = [by_plain[entry] for entry in difflib.get_close_matches(plain(name), by_plain, n=3, cutoff=0.6)]
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are: {', '.join(sorted(by_plain.values(), key=str.casefold))}."


def split_names(text: str | None) -> list[str]:
    """Return the names in a text like a,b,c.

    >>> split_names("north, south,")
    ['north', 'south']
    """
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def plain(name: str) -> str:
    """Return the name in lower case, without `-` and `_`."""
    return name.lower().replace("-", "").replace("_", "")
