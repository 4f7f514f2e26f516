"""What the models see: each split's standardised features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from rookery.run.worth.hospitals import Federation, Hospital, Splits


@dataclass(frozen=True)
class Site:
    """A hospital's rows in every design: a split's rows for fitting (the first designs), or all its training rows.

    A row's features in design d are `rows @ maps[d]`: filled and standardised by the rows of that design, with markers
    of missing values, and 1 as the last feature. All designs share the rows, so that products with all models are one
    matrix product. With times, the rows are in descending order of time, and the last feature is 0, because Cox's loss
    has no intercept.
    """

    name: str
    rows: Float[np.ndarray, "n e"]
    maps: Float[np.ndarray, "designs e d"]
    used: Bool[np.ndarray, "designs n"]
    positive: Bool[np.ndarray, " n"]
    splits: Splits
    time: Float[np.ndarray, " n"] | None = None

    @property
    def survival(self) -> bool:
        """Whether positive rows are events at a time."""
        return self.time is not None

    def can_choose(self) -> Bool[np.ndarray, " splits"]:
        """Return for each split whether its validation rows tell models apart.

        Rows of one class do not: they prefer the most certain model. Nor do events after which nobody is at risk.
        """
        rows = self.splits.validation
        if self.survival:
            later = np.cumsum(rows, axis=1) - rows
            return (rows & self.positive & (later > 0)).any(axis=1)
        return (rows & self.positive).any(axis=1) & (rows & ~self.positive).any(axis=1)

    def features(self, design: int, chosen: Any = slice(None)) -> Float[np.ndarray, "rows d"]:
        """Return the features of the chosen rows."""
        return self.rows[chosen] @ self.maps[design]


def site(federation: Federation, hospital: Hospital, splits: Splits) -> Site:
    """Prepare a hospital's rows; every statistic comes from its own rows in the design."""
    values, gaps = hospital.values, list(federation.gaps)
    missing = np.isnan(values)
    with np.errstate(invalid="ignore"):
        centre, spread = _statistics(np.where(missing, 0.0, values))  # only for the precision of single floats
    known = np.where(missing, 0.0, (values - centre) / spread)
    count, width = values.shape
    rows = np.concatenate([known, missing[:, gaps], np.ones((count, 1))], axis=1)
    used = np.concatenate([splits.fit, splits.train])
    maps = np.zeros((len(used), rows.shape[1], rows.shape[1]))
    for chosen, own in zip(maps, used, strict=True):
        fill = np.zeros(width)
        for j in gaps:
            seen = known[own & ~missing[:, j], j]
            fill[j] = np.median(seen) if len(seen) else 0.0
        filled = np.concatenate([known + missing * fill, missing[:, gaps]], axis=1)
        mean, deviation = _statistics(filled[own])
        varies = np.ptp(filled[own], axis=0) > 0
        scale = np.where(varies, 1 / deviation, 0.0)  # a column that does not vary becomes zero
        np.fill_diagonal(chosen, [*scale, 0.0 if hospital.time is not None else 1.0])
        for place, j in enumerate(gaps):
            chosen[width + place, j] = fill[j] * scale[j]
        chosen[-1, :-1] = -mean * scale
    return Site(hospital.name, rows, maps, used, hospital.positive, splits, hospital.time)


def _statistics(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each column's mean and its deviation, or 1 for a deviation of zero."""
    deviation = values.std(axis=0)
    return values.mean(axis=0), np.where(deviation > 0, deviation, 1.0)


def samples(sites: Sequence[Site], used: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return each site's data as one sample, all of one shape: its rows, maps, labels, and each design's weights."""
    longest = max(len(each.rows) for each in sites)
    outcome = "event" if sites[0].survival else "positive"
    made = []
    for each, chosen in zip(sites, used, strict=True):
        pad = longest - len(each.rows)
        weights = chosen / chosen.sum(axis=1, keepdims=True)
        arrays = {
            "rows": np.pad(each.rows, ((0, pad), (0, 0))),
            "maps": each.maps,
            outcome: np.pad(each.positive, (0, pad)),
            "weights": np.pad(weights, ((0, 0), (0, pad))),
        }
        made.append({name: array[None].astype(np.float32) for name, array in arrays.items()})
    return made
