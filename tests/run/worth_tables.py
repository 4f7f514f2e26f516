"""Tables of made-up hospitals for the tests of `worth`."""

import numpy as np
import pandas as pd

from rookery.run.worth import methods
from rookery.run.worth.designs import site
from rookery.run.worth.hospitals import federation, split


def rows(seed: int = 0, sizes: tuple[int, ...] = (40, 24, 30), width: int = 3, strength: float = 1.0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes), width))
    ill = rng.random(len(x)) < 1 / (1 + np.exp(-strength * x.sum(axis=1)))
    names = np.repeat([f"h{k}" for k in range(len(sizes))], sizes)
    return pd.DataFrame({f"x{j}": x[:, j] for j in range(width)} | {"hospital": names, "ill": ill.astype(int)})


def study(table: pd.DataFrame, splits: int = 2) -> methods.Study:
    data = federation(table, "hospital", "ill", None, [], [])
    return methods.Study(tuple(site(data, each, split(each, splits, 0)) for each in data.hospitals))


def lives(seed: int = 0, sizes: tuple[int, ...] = (40, 24, 30), width: int = 3, strength: float = 1.0) -> pd.DataFrame:
    """Days until a death or the end of observation; several patients share a day."""
    rng = np.random.default_rng(seed)
    table = rows(seed, sizes, width).drop(columns="ill")
    risk = strength * table.filter(like="x").sum(axis=1)
    death, end = rng.exponential(30 * np.exp(-risk)), rng.uniform(5, 60, len(risk))
    return table.assign(days=np.ceil(np.minimum(death, end)), died=(death <= end).astype(int))


def survival_study(table: pd.DataFrame, splits: int = 2) -> methods.Study:
    data = federation(table, "hospital", None, None, [], [], "days", "died")
    return methods.Study(tuple(site(data, each, split(each, splits, 0)) for each in data.hospitals))
