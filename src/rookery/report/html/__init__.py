"""The report: saved runs, reproductions and files of JSON lines in one HTML page that opens offline."""

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

import rookery
from rookery import report
from rookery.language.ledger import COUNTED
from rookery.language.metrics import direction
from rookery.run.trackers import flat

_HERE = Path(__file__).parent
_QUANTILES = ("_q0", "_q10", "_q50", "_q90", "_q100")  # of a metric over the clients
_DASHES: dict[str, list[int]] = {"-": [], "--": [8, 5], "-.": [9, 4, 2, 4], ":": [2, 4]}
_LOOKS = 190  # there are not many more that can be told apart
_WHAT = (
    "give folders that `rookery run --out`, `Run.save` or `rookery reproduce` wrote, files of rk.trackers.JsonLines, "
    "or a run's history as a CSV file."
)


@dataclass(frozen=True)
class Source:
    """A run as a report shows it. Runs of the same label are seeds of one line."""

    name: str  # where it comes from
    label: str
    seed: int | None
    history: pd.DataFrame
    settings: dict[str, Any]  # flat
    metric: str | None = None  # the one to look at first
    exchanges: list[dict[str, Any]] = field(default_factory=list)
    weights: pd.DataFrame | None = None  # columns `weight` and, where there are groups, `group`
    stopped: str | None = None


@dataclass(frozen=True)
class Claims:
    """What became of a paper's claims in a reproduction; each a row of its claims.json."""

    name: str
    claims: list[dict[str, Any]]


def write(paths: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Write the report of these runs to the file `out`, and return it.

    A path is a folder that `rookery run --out`, `Run.save` or `rookery reproduce` wrote, a folder of such folders, a
    file of `rk.trackers.JsonLines`, or a run's history as a CSV file. The page needs no other file and no network.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out {out}: a report's name ends in .html.")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; give a file, as {out / 'report.html'}.")
    sources, claims = read(paths)
    page = render(sources, claims, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return out


def render(sources: Sequence[Source], claims: Sequence[Claims] = (), title: str | None = None) -> str:
    """The page, as text."""
    said = _title(sources, claims) if title is None else title
    # "<" might end the script element that holds the data, or begin a comment in it.
    data = json.dumps(payload(sources, claims), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(said),
        "style": (_HERE / "report.css").read_text(encoding="utf-8"),
        "script": (_HERE / "report.js").read_text(encoding="utf-8"),
        "data": data.replace("<", "\\u003c"),
    }
    return fill(_HERE / "page.html", parts)


def fill(page: Path, parts: dict[str, str]) -> str:
    """A page with its {{parts}}. `base` (styles) and `charts` (a program), which all pages have, are not given."""
    shared = {"base": "base.css", "charts": "charts.js"}
    known = {name: (_HERE / file).read_text(encoding="utf-8") for name, file in shared.items()} | parts
    return re.sub(r"{{(\w+)}}", lambda found: known[found[1]], page.read_text(encoding="utf-8"))


def _title(sources: Sequence[Source], claims: Sequence[Claims]) -> str:
    """The reproductions and tasks in it."""
    tasks = [str(source.settings["task"]) for source in sources if source.settings.get("task")]
    names = list(dict.fromkeys([*(entry.name for entry in claims), *tasks]))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "Runs"


# What a page holds.


def payload(sources: Sequence[Source], claims: Sequence[Claims] = ()) -> dict[str, Any]:
    """The data of a page, as JSON holds them."""
    labels = list(dict.fromkeys(source.label for source in sources))
    metrics = _metrics(sources)
    if not metrics:
        raise ValueError("These runs have no metrics: give `solve` an evaluate(x, y) -> {name: number}.")
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
]


def _lines(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Each line's name and look: that of its method in every picture, where the name is a method's."""
    methods = [label.partition(",")[0] for label in labels]
    names = methods if len(set(methods)) == len(labels) else labels
    looks = list(report.styles(names[:_LOOKS]).values())
    return [
        {"label": label, "colour": look["color"], "dash": _DASHES[look["linestyle"]]}
        for label, look in zip(labels, (looks[k % _LOOKS] for k in range(len(labels))), strict=True)
    ]


def _metrics(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The metrics by name: which way is better, if the name tells, and whether there are quantiles over clients."""
    columns = list(dict.fromkeys(name for source in sources for name in _shown(source.history)))
    with_quantiles = {name for name in columns if all(name + end in columns for end in _QUANTILES)}
    hidden = {name + end for name in with_quantiles for end in _QUANTILES}
    main = [source.metric for source in sources if source.metric]
    signed = {metric[1:]: metric for metric in main if metric.startswith(("+", "-"))}
    return [
        {"name": name, "higher": _higher(signed.get(name, name)), "quantiles": name in with_quantiles}
        for name in columns
        if name not in hidden
    ]


def _shown(history: pd.DataFrame) -> list[str]:
    """The metrics of a history that are numbers, somewhere; quantiles over clients among them."""
    named = {*report.metrics(history), *(name for name in history.columns if re.fullmatch(r".+_q\d+", str(name)))}
    numbers = [name for name in history.columns if name in named and history[name].dtype.kind in "ifub"]
    return [name for name in numbers if history[name].notna().any()]


def _higher(metric: str) -> bool | None:
    try:
        return direction(metric).higher_is_better
    except ValueError:
        return None


def _run(source: Source, line: int) -> dict[str, Any]:
    history = source.history
    plain = ("round", "exchanges", "gradients", "products", "seconds")
    each = {name: history[name] for name in plain if name in history}
    for name, parts in (("bytes", ("bytes_up", "bytes_down")), ("samples", ("samples_upper", "samples_lower"))):
        if all(part in history for part in parts):
            each[name] = history[parts[0]] + history[parts[1]]
    each |= {name: history[name] for name in _shown(history)}
    weights = {name: history[name] for name in history.columns if re.fullmatch(r"weight_\d+", str(name))}
    weights = {name.removeprefix("weight_"): own for name, own in weights.items() if own.notna().any()}
    return {
        "line": line,
        "name": source.name,
        "seed": source.seed,
        "stopped": source.stopped,
        "settings": report.plain(source.settings),
        "data": {name: _numbers(own) for name, own in each.items() if own.notna().any()},
        "series": {name: _numbers(own) for name, own in weights.items()} or None,
        "exchanges": report.plain(source.exchanges),
        "weights": None if source.weights is None else _final(source.weights),
    }


def _final(weights: pd.DataFrame) -> dict[str, Any]:
    groups = weights["group"].astype(str) if "group" in weights else [""] * len(weights)
    return {"group": list(groups), "weight": _numbers(weights["weight"])}


def _numbers(column: pd.Series) -> list[Any]:
    """The values, and null where one is not finite."""
    values = column.to_numpy()
    if values.dtype.kind in "iu":
        return list(values.tolist())
    return [value if math.isfinite(value) else None for value in values.astype(float).tolist()]


# Where runs come from.


def read(paths: Sequence[Path]) -> tuple[list[Source], list[Claims]]:
    """The runs at these paths, and the claims of the reproductions among them."""
    if not paths:
        raise ValueError(f"There is nothing to report: {_WHAT}")
    saved: list[tuple[dict[str, Any], Source]] = []
    reproduced: dict[str, list[Source]] = {}
    claims: list[Claims] = []
    for path in dict.fromkeys(found for given in paths for found in _runs_in(given)):
        if not path.exists():
            raise ValueError(f"There is no {path}: {_WHAT}")
        if path.suffix.lower() == ".csv":
            saved.append(_from_history(path))
        elif path.is_file():
            saved += _from_lines(path)
        elif (path / "run.json").exists():
            saved.append(_from_run(path))
        elif (path / "settings.json").exists():
            saved.append(_from_saved(path))
        elif (path / "claims.json").exists() or (path / "results.csv").exists():
            own, stated = _from_reproduction(path)
            reproduced[str(path)] = own
            claims.append(stated)
        else:
            raise ValueError(f"{path} is not a run: {_WHAT}")
    labels = report.labels([description for description, _ in saved])
    sources = [replace(source, label=label) for label, (_, source) in zip(labels, saved, strict=True)]
    for name, own in reproduced.items():
        before = f"{Path(name).name}: " if len(reproduced) > 1 or saved else ""
        sources += [replace(source, label=before + source.label) for source in own]
    return sources, claims


def _runs_in(path: Path) -> list[Path]:
    """Return the runs in a folder of runs; any other path alone."""
    own = any((path / name).exists() for name in ("run.json", "settings.json", "claims.json", "results.csv"))
    inside = [] if own else [entry.parent for name in ("run", "settings") for entry in path.glob(f"*/{name}.json")]
    return sorted(inside) or [path]


def _from_history(file: Path) -> tuple[dict[str, Any], Source]:
    """Read a CSV file that `run.history.to_csv` wrote. It says nothing of its settings, so its name is its label."""
    history = _table(file)
    if "round" not in history or not len(history) or history["round"].dtype.kind not in "if":
        raise ValueError(
            f"{file} must have a column `round` of numbers, as run.history has; got {', '.join(map(str, history))}."
        )
    description: dict[str, Any] = {
        "task": "",
        "algorithm": file.stem,
        "cohort": None,
        "hyperparameters": {},
        "task_settings": {},
    }
    return description, Source(name=str(file), label="", seed=None, history=history, settings={})


def _from_run(folder: Path) -> tuple[dict[str, Any], Source]:
    """A folder that `rookery run --out` wrote."""
    description, history = report.read_run(folder)
    missing = [
        name for name in ("task", "algorithm", "cohort", "task_settings", "hyperparameters") if name not in description
    ]
    if missing or "round" not in history:
        what = f"run.json has no {missing[0]}" if missing else "history.csv has no column round"
        raise ValueError(f"{folder} is not a run: {what}, as `rookery run --out` writes it.")
    settings = {name: description.get(name) for name in ("task", "algorithm", "cohort", "rounds", "seed", "version")}
    own = {name: value for name, value in description["task_settings"].items() if name != "seed"}
    settings |= flat({"task": own}) | description["hyperparameters"]
    weights = folder / "weights.csv"
    return description, Source(
        name=str(folder),
        label="",
        seed=description.get("seed"),
        history=history,
        settings=settings,
        metric=description.get("metric"),
        exchanges=description.get("exchanges", []),
        weights=_read_weights(weights) if weights.exists() else None,
        stopped=description.get("stopped"),
    )


def _from_saved(folder: Path) -> tuple[dict[str, Any], Source]:
    """A folder that `Run.save` wrote."""
    try:
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        ended = {name: settings.pop(name) for name in ("stopped", "interrupted", "best")}
        if not isinstance(settings["hyperparameters"], dict):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is not a run: settings.json is not as `Run.save` writes it.") from error
    history, exchanges = (_table(folder / f"{name}.csv") for name in ("history", "exchanges"))
    if "round" not in history or not len(history):
        raise ValueError(f"{folder} is not a run: history.csv has no column round, or no rows.")
    ended["exchanges"] = exchanges.to_dict("records")
    return _from_entries(str(folder), settings, history, ended)


def _read_weights(file: Path) -> pd.DataFrame:
    frame = _table(file)
    if "weight" not in frame or frame["weight"].dtype.kind not in "if":
        raise ValueError(f"{file} has no column `weight` of numbers.")
    return frame


def _table(file: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as a table: {error}") from error


def _from_reproduction(folder: Path) -> tuple[list[Source], Claims]:
    """A folder that `rookery reproduce` wrote: the columns before `round` are settings, those after it measurements."""
    try:
        claims = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
        complete = isinstance(claims, list) and all(
            {"claim", "where", "kind", "verdict"} <= row.keys() for row in claims
        )
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder} is not a reproduction: no readable claims.json.") from error
    frame = _table(folder / "results.csv")
    missing = [name for name in ("run", "seed", "round") if name not in frame]
    if missing or not complete:
        what = f"results.csv has no column {missing[0]}" if missing else "claims.json is not a list of claims"
        raise ValueError(f"{folder} is not a reproduction: {what}.")
    place = list(frame.columns).index("round")
    settings = [name for name in frame.columns[:place] if name not in ("run", "seed")]
    sources = []
    groups: Any = frame.groupby(["run", "seed"], sort=False)
    for (label, seed), own in groups:
        known = {name: own[name].iloc[0] for name in settings if own[name].notna().any()}
        history = own.drop(columns=["run", "seed", *settings])
        said = {"experiment": folder.name, "seed": seed, **known}
        sources.append(Source(f"{folder.name}: {label}", str(label), int(seed), history, report.plain(said)))
    return sources, Claims(folder.name, claims)


def _from_lines(file: Path) -> list[tuple[dict[str, Any], Source]]:
    """The runs in a file of JSON lines; of one that was gone on with, the last."""
    found: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {}
    now = None
    for place, line in enumerate(_lines_of(file), 1):
        try:
            entry = json.loads(line)
            event = entry.pop("event")
            if event == "start":
                now = json.dumps(entry["settings"], sort_keys=True)
                found[now] = (entry["settings"], [], {})
            elif event == "row" and "round" in entry:
                found[now][1].append(entry)  # type: ignore[index]
            elif event == "end":
                found[now][2].update(entry)  # type: ignore[index]
            else:
                raise ValueError(event)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{file}, line {place}: not as rk.trackers.JsonLines writes it.") from error
    runs = [_from_entries(str(file), said, pd.DataFrame(rows), end) for said, rows, end in found.values() if rows]
    if not runs:
        raise ValueError(f"{file} holds no run: {_WHAT}")
    return runs


def _lines_of(file: Path) -> list[str]:
    """The whole lines of a file: the last one may be on its way."""
    try:
        return [line for line in file.read_text(encoding="utf-8").split("\n")[:-1] if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a run: {_WHAT}") from error


def _from_entries(
    name: str, settings: dict[str, Any], history: pd.DataFrame, end: dict[str, Any]
) -> tuple[dict[str, Any], Source]:
    known = ("round", "seconds", *COUNTED)
    metrics = {name: history[name].astype(float) for name in map(str, history.columns) if name not in known}
    own = ("algorithm", "hyperparameters", "seed", "cohort", "rounds", "every")
    description = {
        "task": "",
        "algorithm": settings.get("algorithm", "?"),
        "cohort": settings.get("cohort"),
        "hyperparameters": settings.get("hyperparameters", {}),
        "task_settings": {key: value for key, value in settings.items() if key not in own},
    }
    return description, Source(
        name=name,
        label="",
        seed=settings.get("seed"),
        history=history.assign(**metrics),
        settings={name: value for name, value in settings.items() if name != "hyperparameters"}
        | description["hyperparameters"],
        exchanges=end.get("exchanges", []),
        stopped=end.get("stopped"),
    )
