"""How a search chooses the best of the values that were tried."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

Key = tuple[Any, ...]


class Edge(NamedTuple):
    """A chosen value that is the smallest or the largest tried, and the next one beyond it."""

    key: Key
    name: str
    value: float
    beyond: float

    def words(self) -> str:
        """The edge in words.

        >>> Edge(("FedNest", "i.i.d."), "rate", 0.1, 0.3).words()
        'FedNest, i.i.d.: rate 0.1 (the largest)'
        """
        side = "largest" if self.beyond > self.value else "smallest"
        return f"{', '.join(map(str, self.key))}: {self.name} {self.value:g} (the {side})"


@dataclass(frozen=True)
class Grid:
    """The values of a search, and how the best are chosen by where its runs ended.

    Attributes:
        pattern: a regular expression that finds the values in a run's name, with a named group for each.
        keys: the labels for which values are chosen separately.
        score: score(search) gives the score of each run. The highest mean over a key's runs with the same values wins;
            scores that are not finite never do.
        fixed: values whose grid is the paper's own, and is not widened.
        wider: wider(key, values) gives the configurations to try beyond the edge; None: the edge is only marked.
    """

    pattern: str
    keys: tuple[str, ...]
    score: Callable[[pd.DataFrame], pd.Series]
    fixed: tuple[str, ...] = ()
    wider: Callable[[Key, dict[str, float]], Sequence[Any]] | None = None

    def _means(self, search: pd.DataFrame) -> dict[Key, pd.DataFrame]:
        """For each key, the mean score of each set of values."""
        values = search["run"].str.extract(self.pattern).astype(float)
        table = pd.concat([search[list(self.keys)], values], axis=1).assign(score=self.score(search))
        table = table[values.notna().any(axis=1)]
        means = {}
        for key, own in table.groupby(list(self.keys), sort=False):
            names = [name for name in values if own[name].notna().any()]
            score = own["score"].where(np.isfinite(own["score"]), -np.inf)
            means[key] = own.assign(score=score).groupby(names)["score"].mean().reset_index()
        return means

    def best(self, search: pd.DataFrame) -> dict[Key, dict[str, float]]:
        """The values with the highest score, for each key."""
        rows = {key: own.iloc[int(own["score"].argmax())] for key, own in self._means(search).items()}
        return {key: {str(n): float(value) for n, value in row.drop("score").items()} for key, row in rows.items()}

    def edges(self, search: pd.DataFrame) -> list[Edge]:
        """The best values at the edge of those tried, where more than one was tried."""
        edges = []
        means = self._means(search)
        for key, best in self.best(search).items():
            for name, value in best.items():
                tried = np.unique(means[key][name])
                if len(tried) < 2 or tried[0] < value < tried[-1]:
                    continue
                beside = tried[1] if value == tried[0] else tried[-2]
                beyond = float(f"{value**2 / beside:.1g}") if value and beside else value
                edges.append(Edge(key, name, value, beyond))
        return edges
