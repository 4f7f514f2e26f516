"""The report: runs and reproductions in one HTML page that opens offline."""

import html
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import rookery
from rookery import report
from rookery.base.printable import first_few
from rookery.language.metrics import direction
from rookery.report.html.sources import Claims, Source, read
from rookery.run.evaluation import QUANTILES
from rookery.run.result import SUMS

__all__ = ["Claims", "Source", "higher_is_better", "page", "payload", "read", "render", "write"]

_HERE = Path(__file__).parent
_QUANTILES = tuple(f"_q{q}" for q in QUANTILES)
_DASHES: dict[str, list[int]] = {"-": [], "--": [8, 5], "-.": [9, 4, 2, 4], ":": [2, 4]}
_LOOKS = 190  # distinct line styles; hardly more can be told apart


def write(paths: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Write the report of these runs to the file `out`, and return it.

    A path is a folder that `rookery run --out`, `Run.save` or `rookery reproduce` wrote, a folder of such folders, a
    file of `rk.trackers.JsonLines`, or a run's history as a CSV file. The page needs no other file and no network.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out must end in .html; got {out}.")
    if out.is_dir():
        raise ValueError(f"--out must be a file, e.g. {out / 'report.html'}; got the folder {out}.")
    text = render(*read(paths), title)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out


def render(sources: Sequence[Source], claims: Sequence[Claims] = (), title: str | None = None) -> str:
    """Return the report as an HTML page."""
    data = json.dumps(payload(sources, claims), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # "<" might end the script element that holds the data, or begin a comment
    title = html.escape(_title(sources, claims) if title is None else title)
    return page(_HERE / "report", {"title": title, "data": data, "schemes": "light"})


def page(place: Path, parts: dict[str, str]) -> str:
    """Return a page made of the files PLACE.html, PLACE.css and PLACE.js, with {{parts}} filled in."""
    text = lambda path: path.read_text(encoding="utf-8")
    filled = lambda template, parts: re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], template)
    own = {"style": text(place.with_suffix(".css")), "script": text(place.with_suffix(".js"))}
    own["body"] = filled(text(place.with_suffix(".html")), parts)
    shared = {"base": text(_HERE / "base.css"), "charts": text(_HERE / "charts.js")}
    return filled(text(_HERE / "page.html"), {**shared, **own, **parts})


def _title(sources: Sequence[Source], claims: Sequence[Claims]) -> str:
    """Name the reproductions and tasks."""
    tasks = [str(source.settings["task"]) for source in sources if source.settings.get("task")]
    names = list(dict.fromkeys([*(entry.name for entry in claims), *tasks]))
    return first_few(names) or "Runs"


def payload(sources: Sequence[Source], claims: Sequence[Claims] = ()) -> dict[str, Any]:
    """Return the data of a page as JSON values."""
    labels = list(dict.fromkeys(source.label for source in sources))
    metrics = _metrics(sources)
    if not metrics:
        raise ValueError("These runs have no metrics. Pass evaluate(x, y) -> {name: number} to `solve`.")
    first = next((source.metric.lstrip("+-") for source in sources if source.metric), "")
    return {
        "made": f"Rookery {rookery.__version__}",
        "across": _ACROSS,
        "metrics": metrics,
        "first": first if any(entry["name"] == first for entry in metrics) else metrics[0]["name"],
        "lines": _lines(labels),
        "colours": report.COLOURS,
        "runs": [_run(source, labels.index(source.label)) for source in sources],
        "claims": [{"name": entry.name, "claims": report.plain(entry.claims)} for entry in claims],
    }


_ACROSS = [
    {"name": "round", "label": "rounds", "kind": "count"},
    {"name": "exchanges", "label": "exchanges", "kind": "count"},
    {"name": "bytes", "label": "bytes, both ways", "kind": "bytes"},
    {"name": "samples", "label": "samples", "kind": "count"},
    {"name": "gradients", "label": "gradients", "kind": "count"},
    {"name": "products", "label": "Hessian- and Jacobian-vector products", "kind": "count"},
    {"name": "seconds", "label": "seconds", "kind": "seconds"},
    {"name": "clock", "label": "simulated seconds", "kind": "seconds"},
    {"name": "epsilon", "label": "ε", "kind": None},
]


def _lines(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the name and style of each line; methods have the same style in every figure."""
    methods = [label.partition(",")[0] for label in labels]
    names = methods if len(set(methods)) == len(labels) else labels
    looks = list(report.styles(names[:_LOOKS]).values())
    return [
        {"label": label, "colour": look["color"], "dash": _DASHES[look["linestyle"]]}
        for label, look in zip(labels, (looks[k % _LOOKS] for k in range(len(labels))), strict=True)
    ]


def _metrics(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return the metrics: name, whether higher is better if the name tells, and whether they have quantiles."""
    columns = list(dict.fromkeys(name for source in sources for name in _shown(source.history)))
    with_quantiles = {name for name in columns if all(name + end in columns for end in _QUANTILES)}
    hidden = {name + end for name in with_quantiles for end in _QUANTILES}
    main = [source.metric for source in sources if source.metric]
    signed = {metric[1:]: metric for metric in main if metric.startswith(("+", "-"))}
    return [
        {"name": name, "higher": higher_is_better(signed.get(name, name)), "quantiles": name in with_quantiles}
        for name in columns
        if name not in hidden
    ]


def _shown(history: pd.DataFrame) -> list[str]:
    """Return the metrics and quantiles of a history that have any number."""
    named = {*report.metrics(history), *(name for name in history.columns if re.fullmatch(r".+_q\d+", str(name)))}
    numbers = [name for name in history.columns if name in named and history[name].dtype.kind in "ifub"]
    return [name for name in numbers if history[name].notna().any()]


def higher_is_better(metric: str) -> bool | None:
    """Return whether higher is better; None if the name does not tell."""
    try:
        return direction(metric).higher_is_better
    except ValueError:
        return None


def _run(source: Source, line: int) -> dict[str, Any]:
    history = source.history
    plain = ("round", "exchanges", "gradients", "products", "seconds", "clock", "epsilon")
    columns = {name: history[name] for name in plain if name in history}
    for name, (up, down) in SUMS.items():
        if up in history and down in history:
            columns[name] = history[up] + history[down]
    columns |= {name: history[name] for name in _shown(history)}
    weights = {name: history[name] for name in history.columns if re.fullmatch(r"weight_\d+", str(name))}
    weights = {name.removeprefix("weight_"): column for name, column in weights.items() if column.notna().any()}
    return {
        "line": line,
        "name": source.name,
        "seed": source.seed,
        "stopped": source.stopped,
        "settings": report.plain(source.settings),
        "data": {name: _numbers(column) for name, column in columns.items() if column.notna().any()},
        "series": {name: _numbers(column) for name, column in weights.items()} or None,
        "exchanges": report.plain(source.exchanges),
        "weights": None if source.weights is None else _final(source.weights),
    }


def _final(weights: pd.DataFrame) -> dict[str, Any]:
    groups = weights["group"].astype(str) if "group" in weights else [""] * len(weights)
    return {"group": list(groups), "weight": _numbers(weights["weight"])}


def _numbers(column: pd.Series) -> list[Any]:
    """Return the values, with None for those that are not finite."""
    values = column.to_numpy()
    if values.dtype.kind in "iu":
        return list(values.tolist())
    return [value if math.isfinite(value) else None for value in values.astype(float).tolist()]
