"""The tables of the comparison of methods: python -m rookery.experiments.choice.tables RESULTS docs/which-method.md."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from rookery.experiments.choice import setting
from rookery.experiments.choice.problems import PRODUCT, Ends, ahead, among, ended, work
from rookery.experiments.choice.setting import METHODS, PROBLEMS, SEEDS
from rookery.experiments.machinery.running import read_results
from rookery.experiments.machinery.summary import table

Cell = Callable[[str, str], str]


def page(results: pd.DataFrame) -> str:
    """Return the page in Markdown."""
    parts = {by: "\n".join(_table(_valued(ended(results, by)))) for by in ("exchanges", "work")}
    parts["costs"] = "\n".join(_table(lambda problem, method: _cost(results, problem, method)))
    auc = ended(results, column="auc")
    parts["auc"] = "; ".join(f"{m} {_number(auc['cleaning', m], 2)}" for m in METHODS[:-1])
    text = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    return text.format(setting=setting, PRODUCT=PRODUCT, **parts)


def _table(cell: Cell) -> list[str]:
    rows = [(m, *(cell(p, m) if setting.plays(m, p) else "–" for p in PROBLEMS)) for m in METHODS]
    return table(("method", *(own.words for own in PROBLEMS.values())), rows)


def _valued(ends: Ends) -> Cell:
    """The metric of a method: bold if no other is better by more than the margin."""

    def cell(problem: str, method: str) -> str:
        better = [ahead(ends, problem, m, method).holds for m in among(ends, problem, METHODS) if m != method]
        words = _number(ends[problem, method], 1 if PROBLEMS[problem].metric == "distance" else 3)
        return words if any(better) else f"**{words}**"

    return cell


def _number(values: np.ndarray, digits: int) -> str:
    """Mean and standard deviation."""
    mean, spread = (f"{value:.{digits}f}" for value in (values.mean(), values.std(ddof=1)))
    if digits > 1:
        mean, spread = mean.lstrip("0"), spread.lstrip("0")
    return f"{mean} ± {spread}".replace("-", "−")


def _cost(results: pd.DataFrame, problem: str, method: str) -> str:
    """The work of a client in a round, and the milliseconds of the round."""
    rows, own = results[(results["problem"] == problem) & (results["method"] == method)], PROBLEMS[problem]
    last = rows[rows["seed"] == SEEDS[0]].iloc[-1:]
    each = float(work(last).iloc[0] / last["round"].iloc[0]) / (own.cohort or own.clients)
    steps = rows.groupby("seed")[["round", "seconds"]].diff().dropna()
    return f"{each:.0f}, {1000 * np.median(steps['seconds'] / steps['round']):.1f} ms"


def main(folder: str, path: str) -> None:
    """Write the page."""
    Path(path).write_text(page(read_results(Path(folder))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
