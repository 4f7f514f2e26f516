"""The report of `check`: a line per check, with a verdict and advice."""

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class Line:
    """One check: its result, a verdict, and advice if the verdict is not good."""

    name: str
    value: str
    verdict: Verdict = "good"
    advice: str = ""

    def __str__(self) -> str:
        mark = {"good": "good", "note": "note", "bad": "BAD "}[self.verdict]
        return f"  {mark}  {self.name}: {self.value}" + (f"\n        → {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Diagnosis:
    """The result of `check`; print it.

    Attributes:
        title: the problem and the number of clients examined.
        lines: one per check.
        numbers: `mu` and `smoothness` (the smallest and the largest curvature of the lower level, at its solution),
            `condition`, `residual` (of the lower level after `steps` gradient steps, relative to the start),
            `difference` (of hypergradient and finite differences, relative) and `implicit_share`, if computed.
        suggested: hyperparameters to start from, by their names.
    """

    title: str
    lines: tuple[Line, ...]
    numbers: dict[str, float] = field(default_factory=dict)
    suggested: dict[str, Any] = field(default_factory=dict)

    @property
    def bad(self) -> tuple[Line, ...]:
        """The lines that report a problem."""
        return tuple(line for line in self.lines if line.verdict == "bad")

    def __str__(self) -> str:
        verdict = {0: "no problems found", 1: "one problem found"}.get(len(self.bad), f"{len(self.bad)} problems found")
        text = [f"{self.title}: {verdict}.", *map(str, self.lines)]
        if self.suggested:
            text.append("  Try: " + ", ".join(f"{name}={value!r}" for name, value in self.suggested.items()))
        return "\n".join(text)


class Findings:
    """The lines, numbers and suggestions of a `Diagnosis` as they accumulate."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.numbers: dict[str, float] = {}
        self.suggested: dict[str, Any] = {}

    def add(self, name: str, value: str, verdict: Verdict = "good", advice: str = "") -> None:
        """Add a line."""
        self.lines.append(Line(name, value, verdict, advice))
