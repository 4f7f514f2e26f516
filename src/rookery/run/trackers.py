"""Trackers: callbacks of `solve` that write a run to JSON lines, TensorBoard, MLflow or Weights & Biases as it goes."""

import importlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rookery.base.printing import plain
from rookery.run.progress import Tracker
from rookery.run.result import FORMAT, Run

__all__ = ["JsonLines", "MLflow", "TensorBoard", "Tracker", "Wandb"]


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings with nested dicts flattened into dotted names.

    >>> flat({"seed": 0, "hyperparameters": {"step": 0.1}})
    {'seed': 0, 'hyperparameters.step': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _need(module: str, package: str) -> Any:
    """Import an optional module."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"This tracker needs {package}, which is not installed: pip install {package}") from error


@contextmanager
def _writing(argument: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{argument} must be writable; got {path}: {error.strerror}.") from error


def _ended(run: Run | None) -> bool:
    """Return whether a run reached its end."""
    return run is not None and run.stopped is None and not run.interrupted


class JsonLines:
    """Write a run to a file, one JSON object per line; `rookery report` reads it.

    The first object has `"event": "start"` and the settings. The last has `"event": "end"` and the exchanges of a
    round. In between there is one `"event": "row"` for each row of the history. A number that is not finite becomes
    null. Every line is flushed when it is written. An existing file is appended to, so it may hold several runs.

    Arguments:
        path: the file.

    Example:
        >>> import pathlib, tempfile, jax.numpy as jnp, rookery as rk
        >>> problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
        >>> clients = rk.Clients(upper=[jnp.array([1.0]), jnp.array([3.0])])
        >>> file = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
        >>> run = rk.solve(problem, clients, rk.FedAvg(), jnp.zeros(()), 2, callbacks=[rk.trackers.JsonLines(file)])
        >>> len(file.read_text().splitlines())
        5
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ValueError(f"JsonLines: {self.path} must be a file; it is a folder.")
        self._file: TextIO | None = None

    def start(self, settings: dict[str, Any]) -> None:
        """Open the file and write the settings."""
        with _writing("path", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        self._write({"event": "start", "format": FORMAT, "settings": settings})

    def row(self, row: dict[str, Any]) -> None:
        """Write a row of the history."""
        self._write({"event": "row", **row})

    def end(self, run: Run | None) -> None:
        """Write how the run ended and close the file."""
        if self._file is None:
            return
        entry: dict[str, Any] = {"event": "end", "rounds": None, "interrupted": True, "stopped": None, "exchanges": []}
        if run is not None:
            entry |= {"rounds": run.rounds, "interrupted": run.interrupted, "stopped": run.stopped}
            entry["exchanges"] = run.exchanges.to_dict("records")
        self._write(entry)
        self._file.close()
        self._file = None

    def _write(self, entry: dict[str, Any]) -> None:
        assert self._file is not None, "start comes first"
        self._file.write(json.dumps(plain(entry), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


class TensorBoard:
    """Log a run to TensorBoard: a curve over rounds for each column of the history, and the settings as text.

    A run that continues from a checkpoint replaces what the folder showed before. Give each run its own folder;
    TensorBoard compares the folders inside one folder.

    Arguments:
        folder: the folder of the event file.

    Needs tensorboard: pip install tensorboard
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._events = _need("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._tensor = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        self._types = importlib.import_module("tensorboard.compat.proto.types_pb2")
        self._writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = None

    def start(self, settings: dict[str, Any]) -> None:
        """Open an event file and write the settings."""
        with _writing("folder", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = self._writers.EventFileWriter(str(self.folder))
        begun = self._events.SessionLog(status=self._events.SessionLog.START)  # discards earlier events from step 0 on
        self._add(0, session_log=begun)
        lines = [f"| {name} | {value} |" for name, value in flat(plain(settings)).items()]
        text = "\n".join(["| setting | |", "|---|---|", *lines])
        words = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        words.tensor_shape.dim.add(size=1)
        kind = self._summary.SummaryMetadata()
        kind.plugin_data.plugin_name = "text"
        value = self._summary.Summary.Value(tag="settings", metadata=kind, tensor=words)
        self._add(0, summary=self._summary.Summary(value=[value]))

    def row(self, row: dict[str, Any]) -> None:
        """Write a row of the history."""
        values = [
            self._summary.Summary.Value(tag=name, simple_value=value) for name, value in row.items() if name != "round"
        ]
        self._add(row["round"], summary=self._summary.Summary(value=values))

    def end(self, run: Run | None) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **what))


class MLflow:
    """Log a run to MLflow: the settings as parameters, the columns of the history as metrics over rounds.

    Arguments:
        experiment: the name of the MLflow experiment, created if it does not exist.
        name: the run's name; None: the algorithm's.
        uri: the tracking server or folder; None: MLflow's setting (MLFLOW_TRACKING_URI).

    Needs mlflow: pip install mlflow
    """

    def __init__(self, experiment: str = "rookery", name: str | None = None, uri: str | None = None) -> None:
        self.experiment, self.name = experiment, name
        self._entities = _need("mlflow.entities", "mlflow")
        self._client = importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)
        self.run_id: str | None = None

    def start(self, settings: dict[str, Any]) -> None:
        """Begin a run and log the settings."""
        known = self._client.get_experiment_by_name(self.experiment)
        experiment = self._client.create_experiment(self.experiment) if known is None else known.experiment_id
        run = self._client.create_run(experiment, run_name=self.name or settings["algorithm"])
        self.run_id = run.info.run_id
        params = [self._entities.Param(name, str(value)[:500]) for name, value in flat(plain(settings)).items()]
        self._client.log_batch(self.run_id, params=params)

    def row(self, row: dict[str, Any]) -> None:
        """Log a row of the history."""
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(name, float(value), now, row["round"])
            for name, value in row.items()
            if name != "round"
        ]
        for first in range(0, len(metrics), 1000):  # MLflow's limit per batch
            self._client.log_batch(self.run_id, metrics=metrics[first : first + 1000])

    def end(self, run: Run | None) -> None:
        """End the MLflow run as finished, killed or failed."""
        if self.run_id is not None:
            killed = run is not None and run.interrupted
            self._client.set_terminated(self.run_id, "FINISHED" if _ended(run) else "KILLED" if killed else "FAILED")


class Wandb:
    """Log a run to Weights & Biases: the settings as config, the columns of the history as metrics over rounds.

    Arguments:
        project: the Weights & Biases project.
        name: the run's name; None: the algorithm's.
        options: passed to `wandb.init`, e.g. group="seeds" or mode="offline".

    Needs wandb: pip install wandb
    """

    def __init__(self, project: str = "rookery", name: str | None = None, **options: Any) -> None:
        self.project, self.name, self.options = project, name, options
        self._wandb = _need("wandb", "wandb")
        self._run: Any = None

    def start(self, settings: dict[str, Any]) -> None:
        """Begin a run with the settings as its config."""
        options = {"project": self.project, "name": self.name or settings["algorithm"], "config": plain(settings)}
        self._run = self._wandb.init(**options | self.options)

    def row(self, row: dict[str, Any]) -> None:
        """Log a row of the history."""
        self._run.log(row, step=row["round"])

    def end(self, run: Run | None) -> None:
        """Finish the run, with exit code 1 if it did not reach its end."""
        if self._run is not None:
            self._run.finish(exit_code=0 if _ended(run) else 1)
            self._run = None


def __dir__() -> list[str]:
    return __all__
