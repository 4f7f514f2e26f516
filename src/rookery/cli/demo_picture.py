"""The picture of the demo: a column for each story."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rookery import report
from rookery.cli.demo_stories import CLEANING, CLINIC, ROBUST, STORIES, Entry, Story, runs_of
from rookery.tasks import weighted_nodes

_PALE = "#c4cbd3"
_TITLES = {
    CLEANING.name: "8 of 20 clients have wrong labels:\nnesting finds them",
    CLINIC.name: "10 of 15 clinics code differently:\nnesting finds the right five",
    ROBUST.name: "5 of 20 clients have a bad scanner:\nnesting does not give them up",
}


def draw(runs: pd.DataFrame) -> Figure:
    """Draw the accuracy of each method (above), and what was learnt or what it costs (below)."""
    fig, axes = report.figure(2, 3, width=10.4, height=5.9)
    fig.set_layout_engine(None)
    fig.subplots_adjust(left=0.012, right=0.995, top=0.91, bottom=0.1, wspace=0.06, hspace=0.2)
    for ax, story in zip(axes[0], STORIES, strict=True):
        ax.set_title(_TITLES[story.name], loc="left", fontsize=12, fontweight="bold")
        _draw_accuracies(ax, runs, story)
    _draw_label_weights(axes[1, 0], runs_of(runs, CLEANING, CLEANING.entries[-1]))
    _draw_clinic_weights(axes[1, 1], runs_of(runs, CLINIC, CLINIC.entries[-1]))
    _draw_price(axes[1, 2], runs)
    count = runs["seed"].nunique()
    note = "Handwritten digits; no image leaves its client."
    if count > 1:
        note += f" A bar is the mean of {count} runs, a dot one of them."
    fig.text(0.012, 0.015, note, fontsize=10, color="#555555")
    return fig


def _is_nested(story: Story, entry: Entry) -> bool:
    return entry is story.entries[-1]


def _draw_accuracies(ax: Axes, runs: pd.DataFrame, story: Story) -> None:
    for k, entry in enumerate(story.entries):
        values = 100 * runs_of(runs, story, entry)[story.metric]
        nested = _is_nested(story, entry)
        ax.barh(-k, values.mean(), height=0.42, color=report.BLUE if nested else _PALE)
        if len(values) > 1:
            ax.plot(values, [-k] * len(values), "o", color="#222222", markersize=3.5, alpha=0.75)
        weight = "bold" if nested else "normal"
        ax.text(0.5, -k + 0.25, entry.words, fontsize=10.5, fontweight=weight, va="bottom")
        ax.text(max(values) + 2, -k, f"{values.mean():.0f} %", fontsize=12, fontweight=weight, va="center")
    _set_bar_axes(ax, story.meaning, len(story.entries))


def _set_bar_axes(ax: Axes, label: str, bars: int, largest: float = 100) -> None:
    """Set up axes for horizontal bars, without ticks."""
    ax.set(xlim=(0, 1.14 * largest), ylim=(-bars + 0.6, 0.75), xticks=[], yticks=[])
    ax.set_xlabel(label, fontsize=10.5, loc="left", style="italic")
    ax.spines["bottom"].set_visible(False)
    ax.grid(visible=False)


def _draw_label_weights(ax: Axes, runs: pd.DataFrame) -> None:
    kinds = {"right labels": ("weight_clean", report.BLUE), "wrong labels": ("weight_corrupted", report.VERMILION)}
    for k, (words, (name, colour)) in enumerate(kinds.items()):
        mean = runs[name].mean()
        ax.barh(-k, mean, height=0.42, color=colour)
        ax.text(0.005, -k + 0.25, words, fontsize=10.5, va="bottom")
        ax.text(mean + 0.02, -k, f"{mean:.2f}", fontsize=12, va="center")
    _set_bar_axes(ax, "learnt: how much a label counts (0 to 1)", 2, largest=1)


def _draw_clinic_weights(ax: Axes, runs: pd.DataFrame) -> None:
    kinds = weighted_nodes(**CLINIC.settings).groups
    means = [runs[f"weight_{k}"].mean() for k in range(len(kinds))]
    words = {"minority": "codes as this clinic does", "majority": "codes differently"}
    for k, (kind, mean) in enumerate(zip(kinds, means, strict=True)):
        label = words[kind] if kinds.index(kind) == k else None
        ax.bar(k, mean, color=report.BLUE if kind == "minority" else report.VERMILION, label=label)
    equal = 1 / len(kinds)
    ax.axhline(equal, color=report.GREY, linewidth=1, linestyle=":")
    ax.text(len(kinds) - 0.5, equal + 0.004, "if all counted the same", fontsize=10, color="#555555", ha="right")
    ax.legend(frameon=False, fontsize=10.5, loc="upper right", bbox_to_anchor=(1.02, 0.9), handlelength=0.8)
    ax.set(xticks=[], yticks=[], ylim=(0, 1.15 * max(means)))
    ax.set_xlabel("learnt: how much each clinic counts", fontsize=10.5, loc="left", style="italic")


def _draw_price(ax: Axes, runs: pd.DataFrame) -> None:
    """Draw the accuracy on the good scanners' images."""
    for k, entry in enumerate(ROBUST.entries):
        values = 100 * runs_of(runs, ROBUST, entry)["accuracy_good"]
        ax.barh(-k, values.mean(), height=0.42, color=report.BLUE if _is_nested(ROBUST, entry) else _PALE)
        ax.text(0.5, -k + 0.25, entry.words, fontsize=10.5, va="bottom")
        ax.text(values.mean() + 1.5, -k, f"{values.mean():.0f} %", fontsize=12, va="center")
    _set_bar_axes(ax, "the price: good scanners' images read right", len(ROBUST.entries))
