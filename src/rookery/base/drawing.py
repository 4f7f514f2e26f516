"""The look of figures: the methods' colours, axes, lines, bands and legends."""

import hashlib
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which colour-blind readers can tell apart, without yellow, which is too pale for a line.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#767676"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
FILLS = (*COLOURS, "#F0E442", GREY, "#8C564B")  # for areas
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DRAWN = 1e100  # larger values are left out: a logarithmic axis cannot place ticks near the largest float

# Methods that often share a figure, each with its own look. Other names get a look by hashing.
_STYLES: dict[str, tuple[str, str, str]] = {
    "fednest": (BLUE, "-", "o"),
    "lfednest": (VERMILION, "-", "s"),
    "fedavg": (GREY, "-", "D"),
    "fednestsgd": (SKY, "--", "v"),
    "lfednestsvrg": (ORANGE, "--", "^"),
    "lfednestnonalt": (PURPLE, "-.", "P"),
    "fedavgsaddle": (GREY, "--", "D"),
    "fedavgs": (GREY, "--", "D"),
    "scaffoldsaddle": (GREEN, "--", "X"),
    "scaffolds": (GREEN, "--", "X"),
    "fedsvrg": (GREEN, "-", "v"),
    "fedbio": (PURPLE, "-", "^"),
    "fedbioacc": (GREEN, "-", "P"),
    "asfbo": (GREEN, "-", "P"),
    "laasfbo": (BLACK, "-", "^"),
    "simfbo": (ORANGE, "-", "X"),
    "shrofbo": (SKY, "--", "D"),
    "feddro": (BLUE, "-", "o"),
    "dsfeddro": (VERMILION, "-", "s"),
    "fastdro": (GREEN, "--", "^"),
    "pdsgd": (PURPLE, "-.", "D"),
    "mbsgd": (ORANGE, "--", "v"),
    "gcivr": (GREEN, "-", "^"),
    "unconstrained": (GREY, "--", "D"),
    "fedavgi5": (BLACK, ":", "X"),
    "fedavgcasei": (ORANGE, "-", "o"),
    "fedavgcaseii": (ORANGE, "--", "s"),
    "fedavgmodified": (SKY, "--", "D"),
    "fedmbo": (BLACK, ":", "v"),
    "feddrscgd": (GREEN, "-", "P"),
    "bilevel": (BLUE, "-", "o"),
    "localtrain": (GREEN, "--", "^"),
    "ditto": (ORANGE, "-.", "v"),
    "pfedme": (PURPLE, ":", "P"),
}


def style(name: str) -> dict[str, Any]:
    """Return the colour, line and marker of a method, the same in every figure.

    >>> style("LFedNest-SVRG") == style("LFedNestSVRG")
    True
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    if plain in _STYLES:
        colour, line, marker = _STYLES[plain]
    else:
        number = zlib.crc32(plain.encode())
        colour = COLOURS[number % len(COLOURS)]
        line = _LINES[number // 7 % len(_LINES)]
        marker = _MARKERS[number // 28 % len(_MARKERS)]
    return {"color": colour, "linestyle": line, "marker": marker}


def styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the looks of names that share a figure: each name's own, unless two would look alike."""
    looks: dict[str, dict[str, Any]] = {}
    spare = [(colour, line, marker) for marker in _MARKERS for line in _LINES for colour in COLOURS]
    for name in names:
        look = style(name)
        taken = {tuple(other.values()) for other in looks.values()}
        lines = {other[:2] for other in taken}
        if tuple(look.values())[:2] in lines:  # take another line or, if none is left, another marker
            free = next((other for other in spare if other[:2] not in lines), None)
            free = free or next(other for other in spare if other not in taken)
            look = dict(zip(look, free, strict=True))
        looks[name] = look
    return looks


def figure(rows: int = 1, cols: int = 1, width: float | None = None, height: float | None = None) -> tuple[Figure, Any]:
    """Return a figure and a two-dimensional array of plain axes; width and height are the figure's, in inches."""
    fig = Figure(figsize=(width or 4.6 * cols, height or 3.5 * rows), layout="constrained")
    axes = fig.subplots(rows, cols, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(GREY)
        ax.tick_params(color=GREY)
        ax.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        ax.set_axisbelow(True)
    return fig, axes


def label(ax: Axes, x: str = "", y: str = "", title: str = "") -> None:
    """Set the title of a panel, on the left, and the labels of its axes."""
    if title:
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    if x:
        ax.set_xlabel(x)
    if x.startswith(("rounds", "exchanges")) and ax.get_xscale() == "linear":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if y:
        ax.set_ylabel(y)


def band(
    ax: Axes,
    frame: pd.DataFrame,
    x: str,
    y: str,
    label: str,
    seed: str = "seed",
    errors: float | None = 2.0,
    **look: Any,
) -> None:
    """Draw the mean of y over the seeds as a line, and around it a band.

    The band extends `errors` standard errors on each side of the mean, or from the lowest to the highest if `errors` is
    None. Rows are matched by `round` if the frame has it (bytes or seconds of the same round may differ between seeds),
    else by x. Rounds without a value for every seed are left out. `look` overrides the label's style.
    """
    seeds = frame[seed].nunique() if seed in frame else 1
    frame = frame.dropna(subset=[x, y])
    frame = frame[frame[y].abs() < _DRAWN]
    at = "round" if "round" in frame else x
    if seeds > 1 and at == "round":
        frame = frame[frame.groupby(at)[seed].transform("nunique") == seeds]
    groups = frame.groupby(at, sort=True)
    place, middle = groups[x].mean().to_numpy(float), groups[y].mean().to_numpy(float)
    drawn = {**style(label), "linewidth": 1.8, "markersize": 4.5, **look}
    if len(place) > 12:
        first = zlib.crc32(label.encode()) % 4  # so that markers of different lines seldom coincide
        drawn.setdefault("markevery", (first, max(1, len(place) // 8)))
    ax.plot(place, middle, label=label, **drawn)
    if seed in frame and frame[seed].nunique() > 1:
        if errors is None:
            low, high = groups[y].min().to_numpy(float), groups[y].max().to_numpy(float)
        else:
            width = errors * groups[y].sem().to_numpy(float)
            low, high = middle - width, middle + width
        ax.fill_between(place, low, high, color=drawn["color"], alpha=0.18, linewidth=0)


def legend(ax: Axes, **options: Any) -> None:
    """Add a legend without a frame, where it hides least."""
    ax.legend(**{"frameon": False, "fontsize": 9, **options})


def scale(ax: Axes, higher: bool, values: Sequence[float]) -> None:
    """Make the y axis logarithmic if the metric falls by orders of magnitude."""
    finite = [v for v in values if math.isfinite(v)]
    if finite and not higher and min(finite) > 0 and max(finite) > 30 * min(finite):
        ax.set_yscale("log")


def save(fig: Figure, path: str | Path) -> Path:
    """Write the figure in the format of the suffix (.png, .pdf, .svg); create its folder if needed.

    A PNG carries the `digest` of what is drawn as its metadatum "Drawn".
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Drawn": digest(fig)} if path.suffix == ".png" else None
    fig.savefig(path, dpi=160, facecolor="white", metadata=metadata)
    return path


def digest(fig: Figure) -> str:
    """Return a hash of what a figure shows: its words, and its lines, areas and bars to four digits."""
    shown = hashlib.sha256()
    for ax in fig.axes:
        words = [ax.get_title(loc="left"), ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale(), ax.get_yscale()]
        words += [text.get_text() for text in ax.texts] + [str(line.get_label()) for line in ax.lines]
        drawn = [line.get_xydata() for line in ax.lines]
        drawn += [path.vertices for area in ax.collections for path in area.get_paths()]
        drawn += [bar.get_bbox().get_points() for bar in ax.patches if isinstance(bar, Rectangle)]
        numbers = [f"{value:.4g}" for array in drawn for value in np.ravel(np.asarray(array, float))]
        shown.update("\n".join(words + numbers).encode())
    return shown.hexdigest()[:16]
