"""Claims: what is stated about an experiment's results, how it is checked, and what is said where it does not hold."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

Kind = Literal["experiment", "theory", "own"]
KINDS: dict[Kind, str] = {"experiment": "the paper's experiments", "theory": "the paper's theory", "own": "our own"}
REPRODUCED, OURS, PAPERS, UNDECIDED, NOT_RUN = VERDICTS = (
    "reproduced",
    "differs, ours",
    "differs, the paper's",
    "undecided",
    "not run",
)


@dataclass(frozen=True)
class Verdict:
    """One of the VERDICTS, and its reason: the evidence or the argument.

    `cause` belongs to "differs, ours": "set-up" or "budget".
    """

    name: str
    why: str = ""
    cause: str = ""

    def __post_init__(self) -> None:
        """Refuse a verdict without a reason."""
        if self.name not in VERDICTS:
            raise ValueError(f"{self.name!r} is no verdict; there are: {', '.join(VERDICTS)}.")
        if self.name != REPRODUCED and not self.why:
            raise ValueError(f"“{self.name}” needs a reason: give `why`.")
        if (self.name == OURS) != (self.cause in ("set-up", "budget")):
            raise ValueError(f"“{OURS}”, and no other, has a cause, “set-up” or “budget”; not {self.cause!r}.")


def differs(cause: str, why: str) -> Verdict:
    """It differs, and that is ours: by the "set-up" or the "budget", or, cause "paper", the paper's statement fails."""
    return Verdict(PAPERS, why) if cause == "paper" else Verdict(OURS, why, cause)


@dataclass(frozen=True)
class Finding:
    """What a check measured: the figures, whether the claim holds on them, and what else is to be said.

    A figure is a number, or several where its name says what they belong to. `holds` is None where the difference is
    within the tolerance.
    """

    holds: bool | None
    figures: dict[str, float | list[float]]
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A statement about an experiment's results, where the paper makes it, and its check on the numbers.

    Attributes:
        text: the statement.
        where: the place in the paper.
        check: what is measured, and whether the claim holds; None: not run.
        kind: the paper's experiment or theory, or our own statement.
        otherwise: the verdict where it does not hold (or is not run), with its reason.
    """

    text: str
    where: str
    check: Callable[[pd.DataFrame], Finding] | None
    kind: Kind = "experiment"
    otherwise: Verdict | None = None


def judge(claim: Claim, results: pd.DataFrame, whole: bool = True) -> dict[str, Any]:
    """The claim as claims.json has it: the figures and the verdict.

    `whole` is False where the runs are scaled down, or are fewer: then a claim that does not hold is undecided. At full
    size it needs a verdict of its own, or a ValueError is raised.
    """
    finding = Finding(False, {}) if claim.check is None else claim.check(results)
    if claim.check is None and claim.otherwise is None:
        raise ValueError(f"The claim “{claim.text}” is not run: give `otherwise`, with the reason.")
    if finding.holds:
        verdict = Verdict(REPRODUCED)
    elif finding.holds is None:
        verdict = Verdict(UNDECIDED, finding.note or "The difference is within the tolerance.")
        finding = dataclasses.replace(finding, note="")
    elif claim.otherwise is not None and (whole or claim.check is None):
        verdict = claim.otherwise
    elif whole:
        raise ValueError(
            f"The claim “{claim.text}” does not hold, and nothing is said for that: give it `otherwise`, a verdict "
            "with its reason."
        )
    else:
        verdict = Verdict(UNDECIDED, "Scaled down: it does not hold here.")
    return {
        "claim": claim.text,
        "where": claim.where,
        "kind": claim.kind,
        "verdict": verdict.name,
        "cause": verdict.cause,
        "figures": {name: _plain(value) for name, value in finding.figures.items()},
        "note": f"{verdict.why} {finding.note}".strip(),
    }


def _plain(value: float | list[float]) -> Any:
    """A number as strict JSON has it: infinity and NaN are words."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return float(f"{value:.6g}") if np.isfinite(value) else str(float(value))


# Tolerances.


# Of the t distribution, two-sided 95 %, by the degrees of freedom: the seeds less one.
T_QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}


def margin(seeds: int) -> float:
    """How many standard errors a difference over so many seeds must exceed to count.

    Two from ten seeds on; below that the t quantile, since few seeds say little about their spread. One seed has none.

    >>> margin(13), margin(5), margin(3), margin(1)
    (2.0, 2.776, 4.303, inf)
    """
    return math.inf if seeds < 2 else T_QUANTILES.get(seeds - 1, 2.0)


class Lead(NamedTuple):
    """How much higher one is than another: the mean difference, and the margin that it must exceed."""

    mean: float
    error: float

    @property
    def holds(self) -> bool | None:
        """Whether it is higher; None where the difference is within the tolerance."""
        return None if abs(self.mean) <= self.error else self.mean > 0


def lead(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, paired: bool = True) -> Lead:
    """How much higher a is than b, over the seeds; `paired` where both have the same ones, in the same order.

    The error is `margin` times the standard error; unpaired, the margin is that of the fewer seeds.

    >>> lead([0.91, 0.93, 0.92], [0.90, 0.92, 0.91]).holds
    True
    >>> lead([0.91, 0.93, 0.92], [0.90, 0.91, 0.91]).holds is None
    True
    """
    first, second = np.asarray(a, float), np.asarray(b, float)
    parts = [first - second] if paired and first.shape == second.shape else [first, second]
    seeds = min(len(part) for part in parts)
    if seeds < 2:
        return Lead(float(first.mean() - second.mean()), math.inf)
    variance = sum(float(np.var(part, ddof=1)) / len(part) for part in parts)
    return Lead(float(first.mean() - second.mean()), margin(seeds) * math.sqrt(variance))


def together(each: Sequence[bool | None]) -> bool | None:
    """Of several: all hold, or one does not, or it is undecided.

    >>> together([True, None]), together([None, False]), together([True, True])
    (None, False, True)
    """
    if any(one is not None and not one for one in each):
        return False
    return None if any(one is None for one in each) else True
