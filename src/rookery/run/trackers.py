"""Trackers: callbacks of `solve` that write a run to JSON lines, TensorBoard, MLflow or Weights & Biases as it goes."""

import importlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rookery.base.printing import plain
from rookery.run.solve import Run, Tracker

__all__ = ["JsonLines", "MLflow", "TensorBoard", "Tracker", "Wandb"]


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings without the dicts in them.

    >>> flat({"seed": 0, "hyperparameters": {"step": 0.1}})
    {'seed': 0, 'hyperparameters.step': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _need(module: str, package: str) -> Any:
    """A module that Rookery does not bring along."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"This tracker needs {package}, which is not installed: pip install {package}") from error


@contextmanager
def _writing(argument: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{argument} must be one that can be written to; got {path}: {error.strerror}.") from error


def _ended(run: Run | None) -> bool:
    """Whether a run got to its end."""
    return run is not None and run.stopped is None and not run.interrupted


class JsonLines:
    """A run in a file, a JSON object a line; `rookery report` reads it.

    The first has `"event": "start"` and the settings; then one `"event": "row"` for each row of the history; the last
    has `"event": "end"` and the exchanges of a round. A number that is not finite is null. Every line is written at
    once. A file that is there is added to: it may hold several runs, one after the other.

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
            raise ValueError(f"JsonLines: {self.path} is a folder; give a file.")
        self._file: TextIO | None = None

    def start(self, settings: dict[str, Any]) -> None:
        """Open the file and write the settings."""
        with _writing("path", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        self._write({"event": "start", "settings": settings})

    def row(self, row: dict[str, Any]) -> None:
        """Write a row of the history."""
        self._write({"event": "row", **row})

    def end(self, run: Run | None) -> None:
        """Write how it ended, and close the file."""
        if self._file is None:
            return
        said: dict[str, Any] = {"event": "end", "rounds": None, "interrupted": True, "stopped": None, "exchanges": []}
        if run is not None:
            own = {"rounds": run.rounds, "interrupted": run.interrupted, "stopped": run.stopped}
            said |= {**own, "exchanges": run.exchanges.to_dict("records")}
        self._write(said)
        self._file.close()
        self._file = None

    def _write(self, entry: dict[str, Any]) -> None:
        assert self._file is not None, "start comes first"
        self._file.write(json.dumps(plain(entry), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


class TensorBoard:
    """A run as TensorBoard shows it: a curve for each column of the history, over rounds, and the settings as text.

    A run that goes on from a checkpoint replaces what the folder showed before. Give each run a folder of its own:
    the folders in one folder are compared.

    Arguments:
        folder: where the event file goes.

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
        begun = self._events.SessionLog(status=self._events.SessionLog.START)  # what was there from step 0 on is void
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
    """A run of MLflow's: the settings are its parameters, the columns of the history its metrics, over rounds.

    Arguments:
        experiment: MLflow's experiment, made if there is none of that name.
        name: of the run; None: the algorithm's.
        uri: the tracking server or folder; None: as MLflow is set (MLFLOW_TRACKING_URI).

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
        for first in range(0, len(metrics), 1000):  # the most that a batch may have
            self._client.log_batch(self.run_id, metrics=metrics[first : first + 1000])

    def end(self, run: Run | None) -> None:
        """End MLflow's run, as finished, killed or failed."""
        if self.run_id is not None:
            killed = run is not None and run.interrupted
            self._client.set_terminated(self.run_id, "FINISHED" if _ended(run) else "KILLED" if killed else "FAILED")


class Wandb:
    """A run of Weights & Biases: the settings are its config, the columns of the history its metrics, over rounds.

    Arguments:
        project: of Weights & Biases.
        name: of the run; None: the algorithm's.
        options: for `wandb.init`, as group="seeds" or mode="offline".

    Needs wandb: pip install wandb
    """

    def __init__(self, project: str = "rookery", name: str | None = None, **options: Any) -> None:
        self.project, self.name, self.options = project, name, options
        self._wandb = _need("wandb", "wandb")
        self._run: Any = None

    def start(self, settings: dict[str, Any]) -> None:
        """Begin a run with the settings as its config."""
        given = {"project": self.project, "name": self.name or settings["algorithm"], "config": plain(settings)}
        self._run = self._wandb.init(**given | self.options)

    def row(self, row: dict[str, Any]) -> None:
        """Log a row of the history."""
        self._run.log(row, step=row["round"])

    def end(self, run: Run | None) -> None:
        """End the run of Weights & Biases; code 1 if it broke off."""
        if self._run is not None:
            self._run.finish(exit_code=0 if _ended(run) else 1)
            self._run = None


def __dir__() -> list[str]:
    return __all__
