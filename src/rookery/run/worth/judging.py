"""Intervals of the differences between methods, and what they mean for each hospital."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rookery.run.worth.designs import Site
from rookery.run.worth.methods import ALONE, FEDERATED, FLOORS
from rookery.run.worth.metrics import LOWER, METRICS, SURVIVAL_METRICS, spoken

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.95
_FEW_EVENTS = 5  # in the tests of a split
GAINS, LOSES, UNCLEAR, UNDEFINED = "gains", "loses", "cannot tell", "undefined"


def interval(differences: np.ndarray, ratio: float) -> tuple[float, float, float]:
    """Return the mean difference over repeated splits, and the ends of its interval.

    The R splits share rows, so their differences are not independent. Their variance is multiplied by 1/R + test
    rows/training rows, and Student's t has R − 1 degrees of freedom (Nadeau and Bengio, Inference for the
    Generalization Error, 2003). If the difference is the same on every split, as it may be with few test rows, its
    variance is unknown: unless the difference is zero, the ends are NaN.

    >>> [round(end, 3) for end in interval(np.array([0.0, 0.1, 0.2]), 0.5)]
    [0.1, -0.293, 0.493]
    """
    from scipy.special import stdtrit  # slow to import

    known = differences[~np.isnan(differences)]
    if len(known) < 2 or (np.ptp(known) < 1e-12 and abs(known[0]) > 1e-12):
        return (float(known.mean()) if len(known) else np.nan), np.nan, np.nan
    mean = float(known.mean())
    half = float(stdtrit(len(known) - 1, (1 + LEVEL) / 2) * np.sqrt(known.var(ddof=1) * (1 / len(known) + ratio)))
    return mean, mean - half, mean + half


def judged(measured: "pd.DataFrame", sites: Sequence[Site], metric: str) -> "pd.DataFrame":
    """Return the means of all metrics, each method's gain over a hospital's own model, and verdicts by every metric."""
    import pandas as pd

    rows = []
    methods, metrics = list(dict.fromkeys(measured["method"])), metrics_in(measured)
    for site in sites:
        own = measured[measured["hospital"] == site.name]
        train = site.splits.train[0]
        ratio = float((~train).sum() / train.sum())
        by_method: dict[str, dict[str, Any]] = {name: {"hospital": site.name, "method": name} for name in methods}
        verdicts: dict[str, dict[str, Any]] = {name: {} for name in methods}
        for each in metrics:
            by_split = own.pivot(index="split", columns="method", values=each)
            for name, row in by_method.items():
                row[each] = float(by_split[name].mean())
                if name == ALONE:
                    verdicts[name] |= {"verdict": "", f"{each}_verdict": ""}
                    continue
                better = (by_split[name] - by_split[ALONE]) * (-1 if each in LOWER else 1)
                mean, low, high = interval(better.to_numpy(float), ratio)
                verdict = UNDEFINED if np.isnan(mean) else _verdict(low, high, one_class(site))
                verdicts[name][f"{each}_verdict"] = verdict
                if each == metric:
                    verdicts[name] |= {"gain": mean, "low": low, "high": high, "verdict": verdict}
        rows += [row | verdicts[name] for name, row in by_method.items()]
    first = ["hospital", "method", *metrics, "gain", "low", "high", "verdict"]
    return pd.DataFrame(rows, columns=[*first, *(f"{each}_verdict" for each in metrics)])


def metrics_in(table: "pd.DataFrame") -> list[str]:
    """Return the metrics that a table has columns of."""
    return [name for name in (*METRICS, *SURVIVAL_METRICS) if name in table.columns]


def _verdict(low: float, high: float, unbeatable: bool) -> str:
    """Return the verdict of an interval. `unbeatable`: there is one class, which a constant answer predicts."""
    return GAINS if low > 0 and not unbeatable else LOSES if high < 0 else UNCLEAR


def rarer(site: Site) -> int:
    """Return how many rows of the less frequent class a hospital has."""
    return int(min(site.positive.sum(), (~site.positive).sum()))


def one_class(site: Site) -> bool:
    """Return whether the hospital's test rows have one class in every split. With times there are no classes."""
    if site.survival:
        return False
    tests = site.splits.train.shape[1] - site.splits.train.sum(axis=1)
    found = (site.positive & ~site.splits.train).sum(axis=1)
    return bool(np.all((found == 0) | (found == tests)))


def _events_in_tests(site: Site) -> int:
    """Return how many events the test rows of each split have."""
    return int((site.positive & ~site.splits.train[0]).sum())


def advise(table: "pd.DataFrame", site: Site, metric: str) -> str:
    """Return one sentence on what joining is worth for a hospital."""
    own: Any = table[table["hospital"] == site.name].set_index("method")
    federated, floor = own[own.index.isin(FEDERATED)], own[own.index.isin(FLOORS)].iloc[0]
    gaining, losing = (federated[federated["verdict"] == verdict] for verdict in (GAINS, LOSES))
    count = len(site.positive)
    parts = []
    if one_class(site):
        few = rarer(site)
        what = f"all its {count} rows are" if few == 0 else f"all but {few} of its {count} rows are"
        parts.append(
            f"cannot be judged beyond always saying the commoner class, because {what} of that class and its test rows "
            "hold no other"
        )
    elif len(gaining):
        best = gaining["gain"].idxmax()
        others = [name for name in gaining.index if name != best]
        also = f", and also with {_listed(others)}" if others else ""
        parts.append(f"gains {_amount(own.loc[best], metric)} with {best}{also}")
        if not _better(own.loc[best, metric], floor[metric], metric):
            parts.append(f"that is no more than {_floor(metric)}")
    elif (federated["verdict"] == UNCLEAR).all():
        parts.append("shows no demonstrable gain: no method can be told apart from its own model")
    else:
        parts.append("shows no demonstrable gain over its own model")
    if len(losing):
        worst = losing["gain"].idxmin()
        others = [name for name in losing.index if name != worst]
        also = f", and {_listed(others)} also lose{'' if len(others) > 1 else 's'}" if others else ""
        parts.append(f"{worst} costs it {_amount(own.loc[worst], metric)}{also}")
        mild = federated[(federated["verdict"] != LOSES) & (federated["gain"] > own.loc[worst, "gain"] / 2)]
        if len(mild):
            parts.append(f"{_listed(list(mild.index))} avoid{'' if len(mild) > 1 else 's'} most of that loss")
    if site.survival and (tested := _events_in_tests(site)) < _FEW_EVENTS:
        parts.append(f"each of its tests holds only {tested} event{'s' if tested > 1 else ''}, which can show little")
    if not one_class(site) and floor["verdict"] in (GAINS, UNCLEAR):
        parts.append(f"its own model does not demonstrably beat {_floor(metric)}")
    return f"{_named(site.name, 'Hospital')} {'; '.join(parts)}."


def headline(table: "pd.DataFrame", metric: str) -> str:
    """Return what the comparison found, in one sentence."""
    names = list(dict.fromkeys(table["hospital"]))
    gaining, losing = (_hospitals(table, "verdict", verdict) for verdict in (GAINS, LOSES))
    doubt = {verdict: _doubt(table, verdict) for verdict in (GAINS, LOSES)}
    harms = "seems to harm" if doubt[LOSES] else "demonstrably harms"
    harmed = f"at least one method {harms} {_listed(losing)}{doubt[LOSES]}" if losing else ""
    by = f"By {spoken(metric)}, "
    if gaining:
        ending = "" if len(gaining) > 1 else "s"
        gain = f"seem{ending} to gain" if doubt[GAINS] else f"demonstrably gain{ending}"
        found = f"{len(gaining)} of {len(names)} hospitals {gain}: {_listed(gaining)}{doubt[GAINS]}"
        return by + found + (f"; {harmed}." if harmed else ".")
    if losing:
        return f"{by}nobody demonstrably gains from this federation, and {harmed}."
    return f"{by}nothing can be told apart: no method demonstrably helps or harms any hospital."


def disagreement(table: "pd.DataFrame") -> str:
    """Return who gains or loses by another metric but not by this one; empty if nobody does."""
    here = {verdict: _hospitals(table, "verdict", verdict) for verdict in (GAINS, LOSES)}
    found = []
    for each in metrics_in(table):
        gaining, losing = (
            [name for name in _hospitals(table, f"{each}_verdict", verdict) if name not in here[verdict]]
            for verdict in (GAINS, LOSES)
        )
        said = [f"{_listed(gaining)} {'gain' if len(gaining) > 1 else 'gains'}"] if gaining else []
        said += [f"at least one method harms {_listed(losing)}"] if losing else []
        if said:
            found.append(f"by {spoken(each)}, {', and '.join(said)}")
    return f"Other metrics judge otherwise: {'; '.join(found)}." if found else ""


def tendency(table: "pd.DataFrame") -> str:
    """Return at how many hospitals each method gains, demonstrably or not: many small gains together are not chance."""
    count = table["hospital"].nunique()
    gaining = table[table["gain"] > 0]
    gains = [f"{name} at {int((gaining['method'] == name).sum())}" for name in FEDERATED if name in {*table["method"]}]
    return f"Gains on average over the splits, demonstrable or not, of {count} hospitals: {', '.join(gains)}."


def _hospitals(table: "pd.DataFrame", column: str, verdict: str) -> list[str]:
    """Return the hospitals with this verdict on some method of a federation."""
    rows = table[table["method"].isin(FEDERATED) & (table[column] == verdict)]
    return [_named(name) for name in dict.fromkeys(rows["hospital"])]


def _named(hospital: str, word: str = "hospital") -> str:
    """Return a hospital's name for a sentence; a bare number would not be understood as a name."""
    return f"{word} {hospital}" if hospital.replace(".", "").isdigit() else hospital


def _doubt(table: "pd.DataFrame", verdict: str) -> str:
    """Return a remark if chance alone would give at least half as many verdicts of this kind."""
    federated = table[table["method"].isin(FEDERATED)]
    found, chance = int((federated["verdict"] == verdict).sum()), len(federated) * (1 - LEVEL) / 2
    if found > 2 * chance:
        return ""
    return f" ({found} of {len(federated)} comparisons; chance alone gives about {chance:.2g})"


def _better(value: float, other: float, metric: str) -> bool:
    return value < other if metric in LOWER else value > other


def _shown(value: float, metric: str) -> str:
    """Return a difference as people read it: in points of a percent, or as a number for the Brier score."""
    return f"{value:.3f}" if metric == "brier" else f"{100 * value:.{0 if value >= 0.01 else 1}f}"


def _floor(metric: str) -> str:
    """Return what the simplest baseline does; for metrics of probabilities, it knows the frequency of the classes."""
    if metric in SURVIVAL_METRICS:
        return "chance"
    return "always saying the commoner class" if "accuracy" in metric else "always giving the share of positive rows"


def _amount(row: Any, metric: str) -> str:
    low, high = sorted((abs(row["low"]), abs(row["high"])))
    unit = f"{'of' if metric == 'brier' else 'points of'} {spoken(metric)}"
    return f"{_shown(abs(row['gain']), metric)} {unit} ({_shown(low, metric)} to {_shown(high, metric)})"


def _listed(names: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
