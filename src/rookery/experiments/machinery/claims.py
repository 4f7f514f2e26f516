"""Claims of a paper: how each is checked on the results, and the verdict where it does not hold."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from rookery.experiments.machinery.numbers import Numbers

Kind = Literal["experiment", "theory", "own"]
KINDS: dict[Kind, str] = {"experiment": "the paper's experiments", "theory": "the paper's theory", "own": "our own"}
REPRODUCED, OURS, PAPERS = "reproduced", "differs, ours", "differs, the paper's"
UNDECIDED, NOT_RUN = "undecided", "not run"
VERDICTS = (REPRODUCED, OURS, PAPERS, UNDECIDED, NOT_RUN)


class Verdict(NamedTuple):
    """One of the VERDICTS, its reason, and for "differs, ours" its cause: "set-up" or "budget"."""

    name: str
    why: str = ""
    cause: str = ""


FAILURES = {  # by their words in texts.md
    "set-up": Verdict(OURS, cause="set-up"),
    "budget": Verdict(OURS, cause="budget"),
    "the paper's": Verdict(PAPERS),
    "undecided": Verdict(UNDECIDED),
    "not run": Verdict(NOT_RUN),
}


@dataclass(frozen=True)
class Finding:
    """What a check measured.

    Attributes:
        holds: whether the claim holds; None where the difference is within the tolerance.
        figures: what was measured, by name: a number, or several.
        note: a remark for the reader.
    """

    holds: bool | None
    figures: Mapping[str, Any]
    note: str = ""


Check = Callable[[pd.DataFrame], Finding]


@dataclass(frozen=True)
class Claim:
    """A statement about an experiment's results; calling it with the results checks it.

    Attributes:
        text: the statement.
        where: the place in the paper, or "ours".
        check: measures it and says whether it holds; None: not run.
        kind: the paper's experiment or theory, or our own statement.
    """

    text: str
    where: str
    check: Check | None
    kind: Kind = "experiment"

    def __call__(self, results: pd.DataFrame) -> Finding:
        if self.check is None:
            return Finding(False, {})
        return self.check(results)

    def on(self, selected: Callable[[pd.DataFrame], pd.DataFrame]) -> "Claim":
        """The same claim, checked on a selection of the results."""
        return dataclasses.replace(self, check=lambda results: self(selected(results)))


class Claims(list[Claim]):
    """The claims of an experiment, in order; calling it makes a decorator that adds a check as a claim.

    `kind` is that of the paper's claims.

    >>> claim = Claims()
    >>> @claim("It converges.", "Fig. 1")
    ... def converges(results):
    ...     return Finding(False, {})
    >>> len(claim), converges(None).holds
    (1, False)
    """

    def __init__(self, kind: Kind = "experiment") -> None:
        super().__init__()
        self.kind = kind

    def __call__(
        self, text: str, where: str = "ours", kind: Kind | None = None, **settings: Any
    ) -> Callable[[Callable[..., Finding] | None], Claim]:
        """Decorate a check; it is called with the results and these settings."""

        def add(check: Callable[..., Finding] | None) -> Claim:
            given = partial(check, **settings) if check else None
            self.append(Claim(text, where, given, kind or ("own" if where == "ours" else self.kind)))
            return self[-1]

        return add


def judge(claim: Claim, results: pd.DataFrame, whole: bool = True, otherwise: Verdict | None = None) -> dict[str, Any]:
    """Check a claim and return its entry in claims.json.

    `whole` is False where the runs are scaled down or fewer: a claim that does not hold is then undecided. Else it has
    the verdict `otherwise`; without one a ValueError is raised.
    """
    finding = claim(results)
    note = finding.note
    if finding.holds:
        verdict = Verdict(REPRODUCED)
    elif finding.holds is None:
        verdict, note = Verdict(UNDECIDED, note or "The difference is within the tolerance."), ""
    elif whole or claim.check is None:
        if otherwise is None:
            raise ValueError(f"The claim “{claim.text}” does not hold or is not run. Give the reason in texts.md.")
        verdict = otherwise
    else:
        verdict = Verdict(UNDECIDED, "Scaled down: it does not hold here.")
    return {
        "claim": claim.text,
        "where": claim.where,
        "kind": claim.kind,
        "verdict": verdict.name,
        "cause": verdict.cause,
        "figures": {name: _plain(value) for name, value in finding.figures.items()},
        "note": f"{verdict.why} {note}".strip(),
    }


def _plain(value: Any) -> Any:
    """Numbers as strict JSON: six digits, with infinity and NaN as words."""
    if np.ndim(value):
        return [_plain(entry) for entry in value]
    return float(f"{value:.6g}") if np.isfinite(value) else str(float(value))


def margin(seeds: int) -> float:
    """How many standard errors a difference over so many seeds must exceed to count.

    Two from ten seeds on; below that the 97.5 % quantile of Student's t. One seed has no spread.

    >>> margin(13), round(margin(5), 3), round(margin(3), 3), margin(1)
    (2.0, 2.776, 4.303, inf)
    """
    if seeds >= 10:
        return 2.0
    return math.inf if seeds < 2 else float(stdtrit(seeds - 1, 0.975))


class Lead(NamedTuple):
    """The mean difference of two methods, and the margin that it must exceed."""

    mean: float
    error: float

    @property
    def holds(self) -> bool | None:
        """Whether the first is higher; None where the difference is within the margin."""
        return None if abs(self.mean) <= self.error else self.mean > 0


def lead(a: Numbers | float, b: Numbers | float = 0.0, paired: bool = True) -> Lead:
    """How much higher a is than b over the seeds, seed by seed if `paired` and both have the same number of seeds.

    Unpaired, the margin is that of the smaller number of seeds. One of the two may be a number.

    >>> lead([0.91, 0.93, 0.92], [0.90, 0.92, 0.91]).holds
    True
    >>> lead([0.91, 0.93, 0.92], [0.90, 0.91, 0.91]).holds is None
    True
    """
    first, second = np.asarray(a, float), np.asarray(b, float)
    if first.ndim != second.ndim:
        first, second = np.broadcast_arrays(first, second)
    parts = [first - second] if paired and first.shape == second.shape else [first, second]
    seeds = min(len(part) for part in parts)
    if seeds < 2:
        return Lead(float(first.mean() - second.mean()), math.inf)
    variance = sum(float(np.var(part, ddof=1)) / len(part) for part in parts)
    return Lead(float(first.mean() - second.mean()), margin(seeds) * math.sqrt(variance))


def together(parts: Sequence[bool | None]) -> bool | None:
    """Whether all hold: False if one does not, else None if one is undecided.

    >>> together([True, None]), together([None, False]), together([True, True])
    (None, False, True)
    """
    if any(part is not None and not part for part in parts):
        return False
    return None if any(part is None for part in parts) else True


def all_lead(leads: Mapping[str, Lead], words: str = "lead") -> Finding:
    """Every lead exceeds its margin; the least one is the first figure.

    >>> all_lead({"A": Lead(0.2, 0.1), "B": Lead(0.1, 0.1)}).holds is None
    True
    """
    least = min(leads.values(), key=lambda own: own.mean - own.error)
    figures = {f"least {words}, and the margin": least}
    figures |= {f"{words}, and the margin, {name}": own for name, own in leads.items()}
    return Finding(together([own.holds for own in leads.values()]), figures)
