"""One run of a configuration: how it is computed, fingerprinted and stored."""

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

import rookery
from rookery.experiments.machinery.experiment import Config, Experiment
from rookery.run.result import Run
from rookery.run.solve import solve


def run(config: Config, seed: int, data_dir: str | Path | None, callback: Callable[[Run], None]) -> Run:
    """Compute one run."""
    located = {"data_dir": data_dir} if "data_dir" in inspect.signature(config.task).parameters else {}
    with jax.enable_x64(config.float64):
        task = config.task(seed=seed, **config.settings, **located)
        return solve(
            task.problem,
            task.clients,
            config.algorithm,
            task.init,
            config.rounds,
            cohort=config.cohort,
            seed=seed,
            noise_seed=None if config.channel is None else seed,
            channel=config.channel,
            faults=config.faults,
            clock=None if config.clock is None else config.clock(seed=seed),
            asynchronous=config.asynchronous,
            evaluate=task.evaluate,
            evaluate_client=task.evaluate_client,
            every=config.every,
            engine=config.engine,
            callbacks=(callback,),
            on_nonfinite="warn",  # a diverging method of a figure or a search still has its whole run
            progress=False,
        )


def fingerprint(config: Config, seed: int) -> str:
    """A hash of all that decides a run's numbers: the settings, and the package's code without reports and command
    line."""
    what = {
        "task": describe(config.task),
        "settings": describe(config.settings),
        "algorithm": describe(config.algorithm),
        "run": [config.rounds, describe(config.cohort), config.every, seed, config.float64],
        "channel": describe(config.channel),
        "faults": describe(config.faults),
        "clock": [describe(config.clock), describe(config.asynchronous)],
        "code": _package(),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


@functools.cache
def _package() -> str:
    """A hash of the package's code."""
    root, found = Path(rookery.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in ("report", "cli"):
            found.update(path.read_bytes())
    return found.hexdigest()


def describe(value: Any) -> Any:
    """A hyperparameter or setting as JSON, the same in every process.

    Numbers are rounded to 12 digits, because computed ones may differ in the last digits from machine to machine.

    >>> describe({"steps": (1, 2), "rate": 0.1 + 0.2, "rule": max})
    {'steps': [1, 2], 'rate': 0.3, 'rule': 'builtins.max'}
    """
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(name): describe(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [describe(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return describe(np.asarray(value).tolist())
    if isinstance(value, functools.partial):
        return [describe(value.func), describe(value.args), describe(value.keywords)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return [f"{type(value).__module__}.{type(value).__qualname__}", fields]
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if callable(value) and "<" not in name and not name.endswith("."):
        return name
    raise TypeError(
        f"A setting of an experiment must be data, a named function or a functools.partial of one; got {value!r}."
    )


def runs_folder(experiment: Experiment, out: str | Path) -> Path:
    """The folder that stores the runs of an experiment written into `out`."""
    out = Path(out)
    shared = out.absolute().parent / f"{experiment.family}-runs"
    return shared if experiment.family is not None and shared.is_dir() else out / "runs"


def run_path(folder: Path, config: Config, seed: int, mark: str) -> Path:
    """The file of a run; `mark` is its fingerprint."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", config.name).strip("-").lower()
    return folder / f"{plain}.seed{seed}.{mark}.csv"


def unmarked(path: Path) -> str:
    """The name of a stored run without its fingerprint."""
    return path.name.rsplit(".", 2)[0]


def is_complete(path: Path, config: Config) -> bool:
    """Whether the file holds a run to its last round."""
    if not path.exists():
        return False
    try:
        return int(pd.read_csv(path)["round"].iloc[-1]) == config.rounds
    except (ValueError, KeyError, IndexError):
        return False


def read_run(path: Path, config: Config, seed: int) -> pd.DataFrame:
    """A stored run, with the columns of its configuration before it."""
    history = pd.read_csv(path)
    own = pd.DataFrame({"run": config.name, **config.labels, "seed": seed}, history.index)
    return pd.concat([own, history], axis=1)


def write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.writing")  # another process may be writing the same run
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
