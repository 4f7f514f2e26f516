"""The sources of a report: saved runs, reproductions, files of JSON lines and histories as CSV."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from rookery import report
from rookery.run.result import COLUMNS, check_format
from rookery.run.trackers import flat

_WHAT = (
    "Give folders that `rookery run --out`, `Run.save` or `rookery reproduce` wrote, files of rk.trackers.JsonLines, "
    "or a run's history as a CSV file."
)


@dataclass(frozen=True)
class Source:
    """A run in a report. Runs with the same label are seeds of one line."""

    name: str  # its path
    label: str
    seed: int | None
    history: pd.DataFrame
    settings: dict[str, Any]  # flat
    metric: str | None = None  # the one to show first
    exchanges: list[dict[str, Any]] = field(default_factory=list)
    weights: pd.DataFrame | None = None  # columns `weight` and, for groups of clients, `group`
    stopped: str | None = None


@dataclass(frozen=True)
class Claims:
    """The verdicts on a paper's claims in a reproduction; each is a row of its claims.json."""

    name: str
    claims: list[dict[str, Any]]


def read(paths: Sequence[Path]) -> tuple[list[Source], list[Claims]]:
    """Read the runs at these paths, and the claims of the reproductions among them."""
    if not paths:
        raise ValueError(f"There is nothing to report. {_WHAT}")
    saved: list[tuple[dict[str, Any], Source]] = []
    reproduced: dict[str, list[Source]] = {}
    claims: list[Claims] = []
    for path in dict.fromkeys(run for given in paths for run in _runs_in(given)):
        if not path.exists():
            raise ValueError(f"{path} does not exist. {_WHAT}")
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
            raise ValueError(f"{path} is not a run. {_WHAT}")
    labels = report.labels([description for description, _ in saved])
    sources = [replace(source, label=label) for label, (_, source) in zip(labels, saved, strict=True)]
    for name, own in reproduced.items():
        before = f"{Path(name).name}: " if len(reproduced) > 1 or saved else ""
        sources += [replace(source, label=before + source.label) for source in own]
    return sources, claims


def _runs_in(path: Path) -> list[Path]:
    """Return the runs in a folder of runs; any other path as it is."""
    own = any((path / name).exists() for name in ("run.json", "settings.json", "claims.json", "results.csv"))
    inside = [] if own else [entry.parent for name in ("run", "settings") for entry in path.glob(f"*/{name}.json")]
    return sorted(inside) or [path]


def _from_history(file: Path) -> tuple[dict[str, Any], Source]:
    """Read a CSV file that `run.history.to_csv` wrote. It has no settings, so its name becomes the label."""
    history = _table(file)
    if "round" not in history or not len(history) or history["round"].dtype.kind not in "if":
        raise ValueError(
            f"{file} must have a column `round` of numbers, as run.history has; got {', '.join(map(str, history))}."
        )
    unknown: dict[str, Any] = {"task": "", "cohort": None, "hyperparameters": {}, "task_settings": {}}
    return unknown | {"algorithm": file.stem}, Source(name=str(file), label="", seed=None, history=history, settings={})


def _from_run(folder: Path) -> tuple[dict[str, Any], Source]:
    """Read a folder that `rookery run --out` wrote."""
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
    settings |= flat({"privacy": description.get("privacy") or {}})
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
    """Read a folder that `Run.save` wrote."""
    try:
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        written = settings.pop("format", 1)
        ended = {name: settings.pop(name) for name in ("stopped", "interrupted", "best")}
        ended |= {name: settings.pop(name, None) for name in ("spent", "notes")}
        if not isinstance(settings["hyperparameters"], dict):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is not a run: settings.json is not as `Run.save` writes it.") from error
    check_format(written, folder)
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
    """Read a folder that `rookery reproduce` wrote: columns before `round` are settings, later ones metrics."""
    try:
        claims = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
        complete = isinstance(claims, list) and all(
            {"claim", "where", "kind", "verdict"} <= row.keys() for row in claims
        )
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder} is not a reproduction: it has no readable claims.json.") from error
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
    """Read the runs in a file of JSON lines; of a run that was resumed, the last entry."""
    found: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {}
    now = None
    for place, line in enumerate(_lines_of(file), 1):
        try:
            entry = json.loads(line)
            event = entry.pop("event")
            written = entry.pop("format", 1) if event == "start" else 1
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
            raise ValueError(f"{file}, line {place}: not a line of rk.trackers.JsonLines.") from error
        check_format(written, f"{file}, line {place}")
    runs = [_from_entries(str(file), said, pd.DataFrame(rows), end) for said, rows, end in found.values() if rows]
    if not runs:
        raise ValueError(f"{file} holds no run. {_WHAT}")
    return runs


def _lines_of(file: Path) -> list[str]:
    """Return the complete lines of a file, whose last one may still be being written."""
    try:
        return [line for line in file.read_text(encoding="utf-8").split("\n")[:-1] if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a run. {_WHAT}") from error


def _from_entries(
    name: str, settings: dict[str, Any], history: pd.DataFrame, end: dict[str, Any]
) -> tuple[dict[str, Any], Source]:
    metrics = {name: history[name].astype(float) for name in map(str, history.columns) if name not in COLUMNS}
    own = ("algorithm", "hyperparameters", "seed", "cohort", "rounds", "every", "privacy")
    privacy = settings.get("privacy") or {}
    description = {
        "task": "",
        "algorithm": settings.get("algorithm", "?"),
        "cohort": settings.get("cohort"),
        "private": privacy if privacy.get("epsilon") is None else {**privacy, "noise": None},  # it follows from ε
        "hyperparameters": settings.get("hyperparameters", {}),
        "task_settings": {key: value for key, value in settings.items() if key not in own},
    }
    return description, Source(
        name=name,
        label="",
        seed=settings.get("seed"),
        history=history.assign(**metrics),
        settings={name: value for name, value in settings.items() if name not in ("hyperparameters", "privacy")}
        | description["hyperparameters"]
        | flat({"privacy": privacy}),
        exchanges=end.get("exchanges", []),
        stopped=end.get("stopped"),
    )
