"""How a search chooses: the values that were tried, the best of them, and whether it lies at the edge."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

Key = tuple[Any, ...]


class Edge(NamedTuple):
    """A chosen value that is the smallest or the largest of those tried, and the next one beyond."""

    key: Key
    name: str
    value: float
    beyond: float

    def words(self) -> str:
        """As a summary has it.

        >>> Edge(("FedNest", "i.i.d."), "rate", 0.1, 0.3).words()
        'FedNest, i.i.d.: rate 0.1 (the largest)'
        """
        side = "largest" if self.beyond > self.value else "smallest"
        return f"{', '.join(map(str, self.key))}: {self.name} {self.value:g} (the {side})"


@dataclass(frozen=True)
class Grid:
    """The values of a search, and how the best are found in how its runs ended.

    Attributes:
        pattern: finds the values in a run's name: a regular expression with a named group for each.
        keys: the labels that have values of their own.
        score: score(search) gives each run's; the highest mean over a key's runs with the same values wins, and a run
            whose score is no number never does.
        fixed: values whose grid is the paper's own, and is not left.
        wider: wider(key, values) gives the configurations of a search with these values, for a grid that is widened
            where the best is at its edge; None: it is only marked.
    """

    pattern: str
    keys: tuple[str, ...]
    score: Callable[[pd.DataFrame], pd.Series]
    fixed: tuple[str, ...] = ()
    wider: Callable[[Key, dict[str, float]], Sequence[Any]] | None = None

    def _means(self, search: pd.DataFrame) -> dict[Key, pd.DataFrame]:
        """For each key a row for each set of values, with its mean score."""
        values = search["run"].str.extract(self.pattern).astype(float)
        table = pd.concat([search[list(self.keys)], values], axis=1).assign(score=self.score(search))
        table = table[values.notna().any(axis=1)]
        found = {}
        for key, own in table.groupby(list(self.keys), sort=False):
            names = [name for name in values if own[name].notna().any()]
            score = own["score"].where(np.isfinite(own["score"]), -np.inf)
            found[key] = own.assign(score=score).groupby(names)["score"].mean().reset_index()
        return found

    def best(self, search: pd.DataFrame) -> dict[Key, dict[str, float]]:
        """The values with the highest score, for each key."""
        means = self._means(search)
        return {
            key: {str(name): float(own[name].iloc[int(own["score"].argmax())]) for name in own if name != "score"}
            for key, own in means.items()
        }

    def edges(self, search: pd.DataFrame) -> list[Edge]:
        """The best values at the edge of what was tried, where more than one was."""
        found = []
        means = self._means(search)
        for key, best in self.best(search).items():
            for name, value in best.items():
                tried = np.unique(means[key][name])
                if len(tried) < 2 or tried[0] < value < tried[-1]:
                    continue
                beside = tried[1] if value == tried[0] else tried[-2]
                beyond = float(f"{value**2 / beside:.1g}") if value and beside else value
                found.append(Edge(key, name, value, beyond))
        return found
