"""The result of `worth`: its text, its picture, and the folder it is saved to."""

from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from rookery.run.worth.judging import GAINS, LEVEL, LOSES
from rookery.run.worth.methods import ALONE, FEDERATED
from rookery.run.worth.metrics import LOWER, number, spoken

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FILES = ("worth.csv", "splits.csv", "weights.csv", "worth.png", "worth.html")
_BLOCK = 4  # hospitals side by side in a text
_TITLE, _SHORT = 24, 13  # characters of a name above its panel, and of one that leaves room for its accuracy


@dataclass(frozen=True, eq=False)
class Worth:
    """What joining a federation is worth for each hospital, as `worth` found it.

    Attributes:
        headline: the finding in one sentence.
        advice: one sentence for each hospital.
        other_metrics: who gains or loses by another metric but not by this one; empty if nobody does.
        table: a DataFrame with a row for each hospital and method: the mean of every metric over the splits; `gain`,
            how much better the method is than the hospital's own model in the chosen metric (for the Brier score and
            the calibration error, how much lower), with the ends `low` and `high` of its interval; and `verdict`:
            "gains" if the interval lies above zero, "loses" if below, else "cannot tell".
        splits: a DataFrame with the metrics of every split.
        weights: a DataFrame with the mean learnt weights: a row for each hospital, a column for each it learns from.
        metric: the metric that gains refer to.
        notes: what was left out or filled, and how the numbers were computed.
        settings: the arguments, the label and its positive value or the columns of times and events, and each
            hospital's rows, and events.
    """

    headline: str
    advice: dict[str, str]
    other_metrics: str
    table: "pd.DataFrame"
    splits: "pd.DataFrame"
    weights: "pd.DataFrame"
    metric: str
    notes: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def hospitals(self) -> list[str]:
        """The hospitals' names."""
        return list(self.advice)

    @property
    def methods(self) -> list[str]:
        """The methods' names, the hospital's own model first."""
        return list(dict.fromkeys(self.table["method"]))

    def cell(self, hospital: str, method: str) -> str:
        """Return a method's mean for a hospital, with its gain and half of the interval; a star if that excludes zero.

        The number is "–" where the metric is undefined: the test rows have one class, or no two can be compared.
        """
        row: Any = self.table.set_index(["hospital", "method"]).loc[(hospital, method)]
        value = number(row[self.metric])
        if method == ALONE or np.isnan(row["gain"]):
            return value
        half = (row["high"] - row["low"]) / 2
        star = "*" if row["verdict"] in (GAINS, LOSES) else ""
        return f"{value} ({number(row['gain'], '+')} ± {number(half)}){star}"

    def __str__(self) -> str:
        lines = [self.headline, ""]
        for begin in range(0, len(self.hospitals), _BLOCK):
            some = self.hospitals[begin : begin + _BLOCK]
            rows = [[spoken(self.metric), *some]]
            rows += [[method, *(self.cell(name, method) for name in some)] for method in self.methods]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += [
                "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
            ]
            lines.append("")
        lines.append(f"In brackets: the gain over the hospital's own model, ± half of its {LEVEL:.0%} interval.")
        lines.append("A star marks an interval that excludes zero.")
        lines += ["", *(f"- {sentence}" for sentence in self.advice.values()), ""]
        return "\n".join([*lines, *([self.other_metrics, ""] if self.other_metrics else []), *self.notes])

    def __repr__(self) -> str:
        return f"Worth({self.headline!r}, hospitals={len(self.hospitals)}, metric={self.metric!r})"

    def plot(self) -> "Figure":
        """Draw a panel for each hospital: every method's gain over the hospital's own model, with its interval."""
        from rookery.base.drawing import GREEN, GREY, VERMILION, figure, label  # matplotlib is slow to import

        colours = {GAINS: GREEN, LOSES: VERMILION}
        compared = [method for method in self.methods if method != ALONE]
        across = min(4, len(self.hospitals))
        down = -(-len(self.hospitals) // across)
        fig, axes = figure(down, across, width=1.2 + 2.6 * across, height=0.9 + 2.5 * down)
        by_place: Any = self.table.set_index(["hospital", "method"])
        ends = self.table[["low", "gain", "high"]].to_numpy(float)
        reach = np.nanmax(np.abs(ends)) if np.isfinite(ends).any() else 1.0
        left = max(np.nanmax(-ends, initial=0.0), 0.1 * reach)
        right = max(np.nanmax(ends, initial=0.0), 0.1 * reach)
        between = "\n" if max(map(len, self.hospitals)) > _SHORT else ": "
        for place, ax in enumerate(axes.flat):
            if place >= len(self.hospitals):
                ax.set_visible(False)
                continue
            name = self.hospitals[place]
            ax.axvline(0, color=GREY, linewidth=1)
            for height, method in enumerate(compared):
                row = by_place.loc[(name, method)]
                colour = colours.get(row["verdict"], GREY)
                if not np.isnan(row["low"]):
                    ax.plot(
                        [row["low"], row["high"]], [height, height], color=colour, linewidth=2, solid_capstyle="butt"
                    )
                face = colour if method in FEDERATED else "white"
                ax.plot(row["gain"], height, "o", color=colour, markerfacecolor=face, markersize=6)
            first = place % across == 0
            ax.set_yticks(range(len(compared)), compared if first else [""] * len(compared))
            ax.set(ylim=(len(compared) - 0.5, -0.5), xlim=(-1.05 * left, 1.05 * right))
            ax.grid(axis="x", color="#e4e4e4", linewidth=0.8)
            ax.grid(visible=False, axis="y")
            own = number(by_place.loc[(name, ALONE)][self.metric])
            label(ax, title=f"{_panel(name)}{between}alone {own}")
        better = f"lower {spoken(self.metric)}" if self.metric in LOWER else spoken(self.metric)
        key = "green: gains, orange: loses, grey: the interval includes zero; hollow: for comparison only"
        fig.supxlabel(f"gain in {better} over the hospital's own model\n{key}", fontsize=9)
        title = fill(self.headline, 25 * across)
        fig.suptitle(_literal(title), fontsize=12, fontweight="bold", x=0.01, ha="left")
        return fig

    def save(self, folder: str | Path) -> Path:
        """Write the tables (CSV), the picture and a page that opens offline to a folder, and return the page's path.

        The folder gets `worth.csv`, `splits.csv`, `weights.csv`, `worth.png` and `worth.html`.
        """
        from rookery.base.drawing import save
        from rookery.run.worth.page import page

        folder = check_folder(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder must be one that can be created; {folder}: {error.strerror}.") from error
        self.table.to_csv(folder / "worth.csv", index=False)
        self.splits.to_csv(folder / "splits.csv", index=False)
        self.weights.to_csv(folder / "weights.csv")
        picture = save(self.plot(), folder / "worth.png")
        path = folder / "worth.html"
        path.write_text(page(self, picture.read_bytes()), encoding="utf-8")
        return path


def _panel(name: str) -> str:
    """Return a hospital's name, shortened to fit a panel."""
    return _literal(name if len(name) <= _TITLE else name[: _TITLE - 1] + "…")


def _literal(text: str) -> str:
    """Return text that Matplotlib draws as it is; between dollar signs it would see mathematics."""
    return text.replace("$", r"\$")


def check_folder(folder: str | Path) -> Path:
    """Return the folder; raise ValueError if it already holds a result."""
    folder = Path(folder)
    written = [name for name in FILES if (folder / name).exists()]
    if written or folder.is_file():
        problem = "is a file" if folder.is_file() else f"already holds {written[0]}"
        raise ValueError(f"folder must be a new folder; {folder} {problem}. Choose another one.")
    return folder
