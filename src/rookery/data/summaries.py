"""Summaries of the clients' data: who holds how much of what."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = 20  # with more classes than this, a table counts classes instead of samples per class
_NAMED = 6  # classes that a sentence names
_LEVELS = {"lower": "at the lower level", "upper": "at the upper", "samples": "to learn", "test": "for tests"}


def summary(
    names: Sequence[str], weights: np.ndarray, sizes: Mapping[str, np.ndarray], counts: Mapping[str, np.ndarray]
) -> "pd.DataFrame":
    """Return a row for each client: name, weight, samples at each level, and samples of each class in all."""
    import pandas as pd

    shown = dict(counts)
    if len(counts) > _COLUMNS:
        shown = {"classes": np.sum([count > 0 for count in counts.values()], axis=0)}
    return pd.DataFrame({"client": list(names), "weight": weights, **sizes, **shown})


def describe(by: str, names: Sequence[str], sizes: Mapping[str, np.ndarray], counts: Mapping[str, np.ndarray]) -> str:
    """Return the summary in words."""
    total = np.sum(list(sizes.values()), axis=0)
    small, large = int(np.argmin(total)), int(np.argmax(total))
    each = f"from {total[small]} ({names[small]}) to {total[large]} ({names[large]}) each"
    if total[small] == total[large]:
        each = f"{total[small]} each"
    words = f"{len(names)} client{'s' * (len(names) > 1)}{by} with {total.sum()} samples, {each}"
    if len(sizes) > 1:
        shares = [f"{size.sum() / total.sum():.0%} {_LEVELS[level]}" for level, size in sizes.items()]
        shares[0] = shares[0].replace("%", "% of them")
        words += f"; {', '.join(shares[:-1])} and {shares[-1]}"
    return f"{words}.{_labels(names, counts) if counts else ''}"


def _labels(names: Sequence[str], counts: Mapping[str, np.ndarray]) -> str:
    table = np.stack(list(counts.values()))
    overall = table.sum(axis=1) / table.sum()
    order = np.argsort(-overall, kind="stable")[:_NAMED]
    classes = ", ".join(f"{list(counts)[i]} ({overall[i]:.0%})" for i in order)
    more = f" and {len(counts) - len(order)} more" if len(counts) > len(order) else ""
    lacking = int((table == 0).any(axis=0).sum())
    words = f"In {lacking} of the clients a class is missing" if lacking else "All clients have all classes"
    if len(names) > 1:
        distance = np.abs(table / table.sum(axis=0) - overall[:, None]).sum(axis=0) / 2
        most = int(np.argmax(distance))
        share = f"{distance[most]:.0%}"
        words += f"; least like the whole is {names[most]}, where {share} of the labels would have to change"
    return f" Labels: {classes}{more}. {words}."
