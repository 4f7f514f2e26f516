"""Tables, pictures and saved runs: the methods' colours, the look of every figure, and the files that a run leaves."""

import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rookery.clients import Clients
from rookery.ledger import COUNTED
from rookery.metrics import direction
from rookery.printable import without_address
from rookery.solve import Run, metrics_of

# Okabe and Ito's colours, which stay apart for colour-blind readers; yellow is left out, it is too pale for a line.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#767676"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
_FILLS = (*COLOURS, "#F0E442", GREY, "#8C564B")  # for areas
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DRAWN = 1e100  # larger values are left out: near the largest float a logarithmic axis has no room for its ticks

# The methods that often share a picture, each with its own look. A name that is not here gets one from its letters.
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
    """The colour, line and marker of a method: the same in every picture, whatever else is in it.

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
    """The looks of names that share a picture: each one's own, but for names that would look alike."""
    looks: dict[str, dict[str, Any]] = {}
    spare = [(colour, line, marker) for marker in _MARKERS for line in _LINES for colour in COLOURS]
    for name in names:
        look = style(name)
        taken = {tuple(other.values()) for other in looks.values()}
        lines = {own[:2] for own in taken}
        if tuple(look.values())[:2] in lines:  # another line; if there is none left, another marker on it
            free = next((own for own in spare if own[:2] not in lines), None)
            free = free or next(own for own in spare if own not in taken)
            look = dict(zip(look, free, strict=True))
        looks[name] = look
    return looks


def figure(rows: int = 1, cols: int = 1, width: float | None = None, height: float | None = None) -> tuple[Figure, Any]:
    """A figure with a grid of plain axes, always as a two-dimensional array; width and height in inches, in all."""
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
    """The words of one panel: a title on the left, and what the axes are."""
    if title:
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    if x:
        ax.set_xlabel(x)
    if x.startswith(("rounds", "exchanges")) and ax.get_xscale() == "linear":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if y:
        ax.set_ylabel(y)


def band(ax: Axes, frame: pd.DataFrame, x: str, y: str, label: str, seed: str = "seed", **look: Any) -> None:
    """The mean of y over the seeds as a line, and the range from the lowest to the highest as a band.

    Rows are matched by `round` where the frame has it (bytes or seconds of the same round may differ between seeds),
    else by x; a round that some seed has no value of is left out. `look` changes the style that belongs to the label.
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
        first = zlib.crc32(label.encode()) % 4  # the markers of different lines then seldom hide each other
        drawn.setdefault("markevery", (first, max(1, len(place) // 8)))
    ax.plot(place, middle, label=label, **drawn)
    if seed in frame and frame[seed].nunique() > 1:
        low, high = groups[y].min().to_numpy(float), groups[y].max().to_numpy(float)
        ax.fill_between(place, low, high, color=drawn["color"], alpha=0.18, linewidth=0)


def legend(ax: Axes, **options: Any) -> None:
    """A legend without a frame, where it hides least."""
    ax.legend(**{"frameon": False, "fontsize": 9, **options})


def save(fig: Figure, path: str | Path) -> Path:
    """Write the figure (the ending says how: .png, .pdf, .svg) and make its folder if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=160, facecolor="white")
    return path


def number(value: Any) -> str:
    """A number as a person reads it.

    >>> [number(v) for v in (0.93333, 12345, 1e-9, float("nan"), "x")]
    ['0.9333', '12345', '1e-09', 'nan', 'x']
    """
    if isinstance(value, bool | str) or value is None:
        return str(value)
    if isinstance(value, int | np.integer):
        return str(int(value))
    return f"{float(value):.4g}"


def size(count: float) -> str:
    """Bytes as a person reads them.

    >>> [size(n) for n in (12, 3400, 5.6e6, 7.8e9)]
    ['12 B', '3.4 kB', '5.6 MB', '7.8 GB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"


def table(frame: pd.DataFrame, title: str = "") -> Table:
    """A frame as a table for the terminal: its first column to the left, numbers and sizes to the right."""
    grid = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD)
    for place, name in enumerate(frame.columns):
        numeric = frame[name].map(lambda v: re.match(r"[-+.\d]|nan$|never$|$", number(v)) is not None).all()
        grid.add_column(Text(str(name)), justify="right" if numeric and place else "left", overflow="fold")
    for row in frame.itertuples(index=False):
        grid.add_row(*(Text(number(value)) for value in row))
    return grid


@contextmanager
def bars(title: str, total: int, done: int, show: bool) -> Iterator[Callable[[str, int], Callable[[Any], None]]]:
    """Show two bars: over the runs, and over the rounds of the current run.

    Yields `start(name, rounds)`, which returns a callback for `solve`; call it with None for a run that is skipped.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        runs = progress.add_task(f"{title}: runs", total=total, completed=done)
        rounds = progress.add_task("rounds", total=None, visible=False)

        def start(name: str, count: int) -> Callable[[Any], None]:
            progress.reset(rounds, description=name, total=count, visible=True)

            def update(run: Any) -> None:
                done = count if run is None else run.rounds
                progress.update(rounds, completed=done)
                if done == count:
                    progress.advance(runs)

            return update

        yield start
        progress.update(rounds, visible=False)


# Metrics.

ACROSS = {
    "rounds": "rounds",
    "exchanges": "exchanges (each: every client sends once)",
    "bytes": "megabytes sent, both ways",
    "samples": "samples used",
    "gradients": "gradients computed, all clients together",
    "products": "Hessian- and Jacobian-vector products, all clients together",
    "seconds": "seconds",
}


def metrics(history: pd.DataFrame) -> list[str]:
    """The columns of a history that `evaluate` gave, but for the weights of single clients."""
    return metrics_of(history)


def across(history: pd.DataFrame) -> pd.DataFrame:
    """Return the history with a column for each measure in ACROSS that it records."""
    sums = {"rounds": ("round",), "bytes": ("bytes_up", "bytes_down"), "samples": ("samples_upper", "samples_lower")}
    made: dict[str, Any] = {
        name: sum(history[part] for part in parts) for name, parts in sums.items() if {*parts} <= {*history}
    }
    if "bytes" in made:
        made["bytes"] = made["bytes"] / 1e6
    return history.assign(**made)


def mean_and_error(values: Sequence[float]) -> str:
    r"""Return the mean and, of several values, its standard error.

    >>> mean_and_error([0.90, 0.92, 0.94]), mean_and_error([0.5])
    ('0.92\xa0±\xa00.012', '0.5')
    """
    own = np.asarray(values, float)
    if len(own) < 2:
        return number(own.mean())
    return f"{own.mean():.3g}\u00a0±\u00a0{own.std(ddof=1) / math.sqrt(len(own)):.2g}"  # kept in one line


def scale(ax: Axes, higher: bool, values: Sequence[float]) -> None:
    """A logarithmic axis for a metric that falls by orders of magnitude, a plain one for the rest."""
    finite = [v for v in values if math.isfinite(v)]
    if finite and not higher and min(finite) > 0 and max(finite) > 30 * min(finite):
        ax.set_yscale("log")


# Saved runs.


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite become null, arrays lists, other things their text."""
    if isinstance(value, dict):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray | jax.Array) and value.ndim > 0):
        return [plain(entry) for entry in value]
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, float | np.floating | jax.Array | np.ndarray):
        return float(value) if math.isfinite(value) else None
    return without_address(value)


def to_json(value: Any) -> str:
    """The value as JSON text."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def summary(run: Run) -> dict[str, Any]:
    """What a run came to: the metrics at both ends, what a round costs, and the round's exchanges."""
    first, last = run.history.iloc[0], run.history.iloc[-1]
    rounds = max(1, int(last["round"] - first["round"]))
    return {
        "rounds_done": run.rounds,
        "interrupted": run.interrupted,
        "first": {name: float(first[name]) for name in metrics(run.history)},
        "last": {name: float(last[name]) for name in metrics(run.history)},
        "best": None if run.best is None else {"round": run.best.round, "value": run.best.value},
        "exchanges_per_round": float(last["exchanges"] - first["exchanges"]) / rounds,
        "bytes_up_per_round": float(last["bytes_up"] - first["bytes_up"]) / rounds,
        "bytes_down_per_round": float(last["bytes_down"] - first["bytes_down"]) / rounds,
        "seconds": float(last["seconds"]),
        "exchanges": run.exchanges.to_dict("records"),
    }


def write_run(folder: Path, description: dict[str, Any], run: Run, metric: str) -> None:
    """Save a run: run.json, history.csv, exchanges.csv, state.npz, best.npz and picture.png, of this metric."""
    folder.mkdir(parents=True, exist_ok=True)
    write_description(folder, {**description, **summary(run), "metric": metric})
    run.history.to_csv(folder / "history.csv", index=False)
    run.exchanges.to_csv(folder / "exchanges.csv", index=False)
    np.savez(folder / "state.npz", **named_arrays(run.state))
    if run.best is not None:
        best = {name: getattr(run.best, name) for name in ("round", "value", "x", "y", "memory")}
        np.savez(folder / "best.npz", **named_arrays(best))
    title = f"{description['algorithm']} on {description['task']}"
    save(picture(run.history, metric, title), folder / "picture.png")


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write run.json, which marks a folder as a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(to_json(description) + "\n")


def read_description(folder: Path) -> dict[str, Any]:
    """What run.json says."""
    try:
        found = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is not a run: no readable run.json, as `rookery run --out` writes it.") from error
    lacking = [name for name in ("task", "algorithm") if not isinstance(found, dict) or name not in found]
    if lacking:
        raise ValueError(f"{folder} is not a run: its run.json says nothing of {lacking[0]}.")
    return found


def read_run(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """The description and the history of a saved run."""
    description = read_description(folder)
    try:
        history = pd.read_csv(folder / "history.csv")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds a run that has not ended: go on with it by `rookery run --resume`."
        ) from error
    lacking = sorted({"round", "seconds", *COUNTED} - set(history.columns))
    if lacking or not len(history) or not isinstance(description.get("metric"), str):
        raise ValueError(f"{folder} is not a run: its history.csv or run.json is damaged.")
    return description, history


def labels(descriptions: Sequence[dict[str, Any]]) -> list[str]:
    """Name saved runs: the algorithm, the task if there are several, and the settings that differ, without the seed."""
    flat = [
        {"cohort": d["cohort"]}
        | {name: value for name, value in d["task_settings"].items() if name != "seed"}
        | d["hyperparameters"]
        for d in descriptions
    ]
    several = len({d["task"] for d in descriptions}) > 1
    heads = [f"{d['algorithm']} on {d['task']}" if several and d["task"] else str(d["algorithm"]) for d in descriptions]
    names = []
    for head, own in zip(heads, flat, strict=True):
        rivals = [other for name, other in zip(heads, flat, strict=True) if name == head]
        differing = [name for name in own if any(other.get(name) != own[name] for other in rivals)]
        names.append(", ".join([head, *(f"{name}={own[name]}" for name in differing)]))
    return names


def named_arrays(value: Any) -> dict[str, Any]:
    """The arrays of a pytree by their places in it: x/w, y/b."""
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") or "value": np.asarray(leaf) for path, leaf in leaves
    }


def picture(history: pd.DataFrame, metric: str, title: str) -> Figure:
    """One run: the metric, with or without its sign, over rounds and over exchanges."""
    fig, axes = figure(1, 2, width=9.2, height=3.6)
    history, shown = across(history), direction(metric, otherwise=False)
    for ax, by in zip(axes[0], ("rounds", "exchanges"), strict=True):
        band(ax, history, by, shown.name, label=title, color=BLUE, linestyle="-", marker="o")
        scale(ax, shown.higher_is_better, history[shown.name].tolist())
        label(ax, x=ACROSS[by], y=shown.name.replace("_", " ") if by == "rounds" else "")
    fig.suptitle(title, fontsize=12, fontweight="bold")
    return fig


def weights_picture(history: pd.DataFrame, groups: Sequence[str], title: str = "") -> Figure:
    """How the clients' weights (the columns `weight_0`, `weight_1`, …) evolve, a line each; one colour for a group."""
    fig, axes = figure(1, 1, width=6.4, height=4.0)
    ax = axes[0, 0]
    colours = dict(zip(dict.fromkeys(groups), itertools.cycle(COLOURS), strict=False))
    for k, group in enumerate(groups):
        own = history[f"weight_{k}"]
        first = groups.index(group) == k
        words = f"{group} ({list(groups).count(group)} clients)" if first else None
        ax.plot(history["round"], own, color=colours[group], alpha=0.7, linewidth=1.3, label=words)
    ax.axhline(1 / len(groups), color=GREY, linewidth=0.8, linestyle=":")
    label(ax, x="rounds", y="weight", title=title)
    legend(ax)
    return fig


def clients_picture(clients: Clients, title: str = "") -> Figure:
    """Who has what: each client's samples by level, and the shares of its labels where samples have any.

    Up to 40 clients are named; of more, the order is by size.
    """
    counts = {name: own.astype(float) for name, own in clients.label_counts().items()}
    levels = {"": clients.lower_sizes}
    if not clients.one_data_set:
        levels = {"lower level": clients.lower_sizes, "upper level": clients.upper_sizes}
    named = clients.n <= 40
    total = np.sum(list(levels.values()), axis=0)
    order = np.arange(clients.n)[::-1] if named else np.argsort(total, kind="stable")
    height = min(9.0, 1.5 + 0.25 * clients.n) if named else 5.0
    fig, axes = figure(1, 1 + bool(counts), width=9.2 if counts else 5.6, height=max(2.4, height))
    shades = dict(zip(levels, (GREY, "#c4c4c4"), strict=False))
    _stacked(axes[0, 0], {name: own[order] for name, own in levels.items()}, shades)
    label(axes[0, 0], x="samples", y="" if named else "clients, by size")
    if counts:
        shares = {name: own[order] / total[order] for name, own in _most_frequent(counts).items()}
        colours = dict(zip(shares, _FILLS, strict=False)) | {"others": "#dddddd"}
        _stacked(axes[0, 1], shares, colours)
        label(axes[0, 1], x="share of the client's samples")
        axes[0, 1].set_xlim(0, 1)
    for place, ax in enumerate(axes[0]):
        ticks = [clients.names[i] for i in order] if named and place == 0 else []
        ax.set_yticks(range(len(ticks)), ticks)
        ax.set_ylim(-0.6, clients.n - 0.4)
        ax.grid(visible=False)
    if title:
        fig.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return fig


def _stacked(ax: Axes, parts: dict[str, np.ndarray], colours: dict[str, str]) -> None:
    """Horizontal bars, one for each client, of parts one after the other."""
    begin: Any = 0.0
    for name, own in parts.items():
        ax.barh(
            np.arange(len(own)),
            own,
            left=begin,
            height=0.8 if len(own) <= 40 else 1.0,
            color=colours[name],
            label=name or None,
        )
        begin = begin + own
    if any(parts):
        legend(ax, loc="lower left", bbox_to_anchor=(-0.01, 1), ncols=6, handlelength=1, columnspacing=1.2, borderpad=0)


def _most_frequent(counts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As many classes as there are colours to tell apart; the rest together."""
    if len(counts) <= len(_FILLS):
        return counts
    first = sorted(counts, key=lambda name: -counts[name].sum())[: len(_FILLS)]
    others = np.sum([own for name, own in counts.items() if name not in first], axis=0)
    return {name: own for name, own in counts.items() if name in first} | {"others": others}


def compared(panels: Sequence[tuple[str, pd.DataFrame, str]], by: str) -> Figure:
    """Draw a panel for each (title, runs, metric), and in it a line for each `label`, over a measure of ACROSS."""
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    fig, axes = figure(rows, columns, width=6.4 if columns == 1 else 4.8 * columns, height=4.2 * rows)
    looks = styles(list(dict.fromkeys(name for _, runs, _ in panels for name in runs["label"])))
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (title, runs, metric) in zip(axes.flat, panels, strict=False):
        shown = direction(metric, otherwise=False)
        for name, own in runs.groupby("label", sort=False):
            band(ax, own, by, shown.name, label=str(name), **looks[str(name)])
        scale(ax, shown.higher_is_better, runs[shown.name].tolist())
        label(ax, x=ACROSS[by], y=shown.name.replace("_", " "), title=title)
        legend(ax)
    return fig


def landscape(table: pd.DataFrame, names: Sequence[str], metric: str, higher: bool, start: float, title: str) -> Figure:
    """The candidates of a search (`Tuning.table`): a curve of one step size, maps of pairs of more; good is dark."""
    good, lost = (table[(table["status"] == "diverged") == is_lost] for is_lost in (False, True))
    shades = _Shades(good["last"].to_numpy(float), higher, start)
    pairs, levels = list(itertools.combinations(names, 2)), table[names[0]].nunique()
    panels = max(1, len(pairs))
    cols, width, height = (panels, 4.6, 3.5) if panels <= 3 else (3, 4.2, 3.2) if panels <= 6 else (5, 3.4, 2.7)
    text = 6.0 if panels <= 3 and levels <= 7 else None
    if len(pairs) == 1:
        width, height, text = 1.6 + 0.75 * levels, 1.2 + 0.57 * levels, 8.5
    rows = -(-panels // cols)
    fig, axes = figure(rows, cols, width * cols, height * rows)
    for ax in axes.flat[panels:]:
        ax.set_visible(False)
    if not pairs:
        _curve(axes[0, 0], good, lost, names[0], metric, higher, start)
    for ax, (x, y) in zip(axes.flat, pairs, strict=False):
        _map(ax, table, x, y, shades, text)
    if pairs and len(good):
        words = f"{metric.replace('_', ' ')}, when last seen"
        fig.colorbar(shades.scale(), ax=axes, label=words, shrink=0.9, pad=0.02, extend=shades.extend)
    fig.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    early = good[good["status"] == "stopped"]["rounds"].min()
    notes = {
        "framed: the best" if pairs else "ringed: the best": len(good) > 0,
        f"×: diverged, {len(lost)} of {len(table)}": len(lost) > 0,
        f"r{early}: stopped at round {early}": len(pairs) <= 1 and early > 0,
        "a cell is one candidate, the other step sizes differ from cell to cell": len(pairs) > 1,
    }
    fig.supxlabel(";  ".join(filter(notes.get, notes)), fontsize=9, color=GREY, x=0.01, ha="left")
    return fig


class _Shades:
    """From a metric to a shade of blue, the better the darker; what is worse than the start is as pale as that."""

    def __init__(self, values: np.ndarray, higher: bool, start: float) -> None:
        self.colours = colormaps["Blues" if higher else "Blues_r"]
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        worst, self.extend = (low, "neither") if higher else (high, "neither")
        if math.isfinite(start) and (start > low if higher else start < high):
            worst, self.extend = start, "min" if higher else "max"
        low, high = (worst, high) if higher else (low, worst)
        if low > high:  # nothing is better than the start
            low, high = min(values), max(values)
        logarithmic = not higher and low > 0 and high > 30 * low
        self.norm = LogNorm(low, high, clip=True) if logarithmic else Normalize(low, high, clip=True)

    def scale(self) -> ScalarMappable:
        """For a colour bar."""
        return ScalarMappable(self.norm, self.colours)

    def colour(self, value: float) -> Any:
        """The shade of one value."""
        return self.colours(self.norm(value))

    def ink(self, value: float) -> str:
        """What can be read on it."""
        red, green, blue, _ = self.colour(value)
        return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else "#222222"


def _map(ax: Axes, table: pd.DataFrame, x: str, y: str, shades: _Shades, text: float | None) -> None:
    """A cell for each pair of values, and in it, if `text` is a size of type, the metric."""
    places = {name: {value: k for k, value in enumerate(sorted(table[name].unique()))} for name in (x, y)}
    for rank, row in reversed(list(enumerate(table.to_dict("records")))):
        across, up = places[x][row[x]], places[y][row[y]]
        face = "#f2f2f2" if row["status"] == "diverged" else shades.colour(row["last"])
        edge, width = (VERMILION, 2.5) if rank == 0 and row["status"] != "diverged" else ("white", 1.5)
        cell = Rectangle((across - 0.5, up - 0.5), 1, 1, facecolor=face, edgecolor=edge, linewidth=width)
        ax.add_patch(cell)
        if row["status"] == "diverged":
            ax.plot(across, up, "x", color=GREY, markersize=7 if text else 5)
        elif text:
            write = partial(ax.text, color=shades.ink(row["last"]), ha="center", va="center")
            early = text > 8 and row["status"] == "stopped"
            write(across, up + 0.12 * early, f"{row['last']:.3g}", fontsize=text)
            if early:
                write(across, up - 0.22, f"r{row['rounds']}", fontsize=text - 2, alpha=0.8)
    for axis, name, every in ((ax.xaxis, x, 1 if text else 2), (ax.yaxis, y, 1)):  # what has room
        axis.set_ticks(list(places[name].values())[::every], [f"{value:.3g}" for value in places[name]][::every])
    ax.set(xlim=(-0.52, len(places[x]) - 0.48), ylim=(-0.52, len(places[y]) - 0.48))
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=None if text and text > 8 else 8)
    label(ax, x=x, y=y)


def _curve(ax: Axes, good: pd.DataFrame, lost: pd.DataFrame, x: str, metric: str, higher: bool, start: float) -> None:
    line = good.sort_values(x)
    ax.set(xscale="log")
    ax.plot(line[x], line["last"], color=BLUE, linewidth=1.2, marker="o", markersize=5)
    for _, row in good[good["status"] == "stopped"].iterrows():
        ax.annotate(
            f"r{row['rounds']}", (row[x], row["last"]), (0, 6), textcoords="offset points", fontsize=8, color=GREY
        )
    ax.plot(good[x].head(1), good["last"].head(1), "o", markersize=12, markerfacecolor="none", color=VERMILION)
    scale(ax, higher, good["last"].tolist())
    if ax.get_yscale() == "log" and good["last"].min() < start < ax.get_ylim()[1] / 10:
        ax.set_ylim(top=10 * start)  # how far above the start they end does not matter
    for value in lost[x]:
        ax.plot(value, 0.03, "x", color=GREY, transform=ax.get_xaxis_transform(), clip_on=False)
    label(ax, x=x, y=f"{metric.replace('_', ' ')}, when last seen")
