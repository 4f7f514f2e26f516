"""Write and read the files of a run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from rookery.base.drawing import save
from rookery.base.printing import number, to_json
from rookery.report.pictures import picture
from rookery.run.result import ALWAYS, FORMAT, Run, check_format, metrics_of


def summary(run: Run) -> dict[str, Any]:
    """Summarise a run: its first and last metrics, the cost of a round, and the round's exchanges."""
    first, last = run.history.iloc[0], run.history.iloc[-1]
    rounds = max(1, int(last["round"] - first["round"]))
    return {
        "rounds_done": run.rounds,
        "interrupted": run.interrupted,
        "first": {name: float(first[name]) for name in metrics_of(run.history)},
        "last": {name: float(last[name]) for name in metrics_of(run.history)},
        "best": None if run.best is None else {"round": run.best.round, "value": run.best.value},
        "exchanges_per_round": float(last["exchanges"] - first["exchanges"]) / rounds,
        "bytes_up_per_round": float(last["bytes_up"] - first["bytes_up"]) / rounds,
        "bytes_down_per_round": float(last["bytes_down"] - first["bytes_down"]) / rounds,
        "seconds": float(last["seconds"]),
        "clock": float(last["clock"]) if "clock" in run.history else None,
        "epsilon": float(last["epsilon"]) if "epsilon" in run.history else None,
        "exchanges": run.exchanges.to_dict("records"),
    }


def write_run(folder: Path, description: dict[str, Any], run: Run, metric: str) -> None:
    """Save a run: run.json, history.csv, exchanges.csv, state.npz, best.npz, and picture.png of the metric."""
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
    (folder / "run.json").write_text(to_json({"format": FORMAT, **description}) + "\n")


def read_description(folder: Path) -> dict[str, Any]:
    """Read run.json."""
    try:
        description = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is not a run: it has no readable run.json of `rookery run --out`.") from error
    for name in ("task", "algorithm"):
        if not isinstance(description, dict) or name not in description:
            raise ValueError(f"{folder} is not a run: its run.json has no {name}.")
    check_format(description.pop("format", 1), folder)
    return description


def read_run(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """Read the description and the history of a saved run."""
    description = read_description(folder)
    try:
        history = pd.read_csv(folder / "history.csv")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds a run that has not ended. Continue with `rookery run --resume`.") from error
    if set(ALWAYS) - set(history.columns) or not len(history) or not isinstance(description.get("metric"), str):
        raise ValueError(f"{folder} is not a run: its history.csv or run.json is damaged.")
    return description, history


def labels(descriptions: Sequence[dict[str, Any]]) -> list[str]:
    """Name saved runs by the algorithm, the task if there are several, and the differing settings without the seed."""
    flat = [
        {"cohort": d["cohort"], **_private(d.get("private")), **(d.get("channel") or {})}
        | {name: value for name, value in d["task_settings"].items() if name != "seed"}
        | d["hyperparameters"]
        for d in descriptions
    ]
    several = len({d["task"] for d in descriptions}) > 1
    heads = [f"{d['algorithm']} on {d['task']}" if several and d["task"] else str(d["algorithm"]) for d in descriptions]
    names = []
    for head, settings in zip(heads, flat, strict=True):
        rivals = [other for name, other in zip(heads, flat, strict=True) if name == head]
        differing = [name for name in settings if any(other.get(name) != settings[name] for other in rivals)]
        names.append(", ".join([head, *(f"{name}={settings[name]}" for name in differing)]))
    return names


def _private(asked: dict[str, Any] | None) -> dict[str, str]:
    """Return the budget of a private run as one setting."""
    if not asked:
        return {}
    usual = {"unit": "client", "clip": 1.0, "noise": None}
    other = [f" {name} {asked[name]}" for name, value in usual.items() if asked.get(name, value) != value]
    return {"private": f"({number(asked['epsilon'])}, {number(asked['delta'])}){''.join(other)}"}


def named_arrays(value: Any) -> dict[str, Any]:
    """Return the arrays of a pytree by their paths: x/w, y/b."""
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") or "value": np.asarray(leaf) for path, leaf in leaves
    }
