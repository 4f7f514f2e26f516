"""The result of `solve`: `Run` with its history, plot and files, and the errors and warnings of a run."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rookery.base.arguments import nearest
from rookery.language.ledger import COUNTED
from rookery.language.metrics import direction
from rookery.run.weights import save_weights

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ALWAYS = ("round", "seconds", *COUNTED)  # the columns that every history has
COLUMNS = (*ALWAYS, "clock", "staleness", "epsilon")  # the columns of a history that are not metrics
SUMS = {"bytes": ("bytes_up", "bytes_down"), "samples": ("samples_upper", "samples_lower")}  # of columns, for plots
_AXES = {"round": "rounds", "bytes": "bytes, both ways", "clock": "simulated seconds", "epsilon": "ε"}
_SERIES = re.compile(r"weight_\d+|.+_q\d+")  # clients' weights and quantiles: in the history, but not in tables
FORMAT = 1  # of the files of a run; those of Rookery 0.1 do not name it
_SAVED = ("history.csv", "exchanges.csv", "settings.json", "weights.safetensors")


class NonFiniteWarning(UserWarning):
    """A value became infinite or NaN."""


class RoundFailedError(RuntimeError):
    """Too few clients replied, so a round could not be completed.

    `run` is the run up to that round; None if `tune` raised the error.
    """

    run: Any = None


def check_format(written: Any, where: str | Path) -> None:
    """Raise ValueError if the files of a run have a format that only a later version can read."""
    if type(written) is not int or not 1 <= written <= FORMAT:
        raise ValueError(
            f"{where} must have a format of runs that this version can read, up to {FORMAT}; got {written!r}. Update "
            "Rookery."
        )


def metrics_of(history: "pd.DataFrame") -> list[str]:
    """Return the metrics of a history, without quantiles and clients' weights."""
    return [name for name in history.columns if is_metric(str(name))]


def is_metric(name: str) -> bool:
    """Return whether a column of a history is a metric, rather than a count, a client's weight or a quantile."""
    return name not in COLUMNS and _SERIES.fullmatch(name) is None


def did_you_mean(name: Any, known: Sequence[str]) -> str:
    """Return a question that suggests the known name nearest to a misspelt one, or ""."""
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""


@dataclass(frozen=True)
class Best:
    """The state with the best value of the metric that `keep_best` names.

    `memory` holds the clients' memory at that round, one row per client, if `evaluate` takes it; otherwise None.
    """

    round: int
    value: float
    x: Any
    y: Any
    memory: Any = None


@dataclass
class Run:
    """The result of `solve`.

    Attributes:
        x, y: the final variables (y is empty for single-level problems).
        history: a DataFrame with a row per evaluation: round, exchanges, bytes_up, bytes_down, samples_upper,
            samples_lower, samples_busiest, gradients, products, missing, seconds (all since the start) and the
            metrics. `samples_busiest` adds up, over the steps of the protocol, the samples of the client with the most
            work, for which a run in lock-step waits. `missing` counts the replies that did not arrive. `seconds`
            covers the rounds and their compilation, but not the evaluations. A private run has `epsilon`, the ε that it
            has spent, and a run with a clock has `clock`, its simulated seconds.
        weights: the clients' weights, if the method learns them.
        memory: the clients' memory, one row per client, e.g. their personal models. None if they have no memory, and
            for a `Federation`, whose sites keep it to themselves.
        exchanges: a DataFrame of the last round's exchanges: name, kind, shape of one reply, count, bytes. A row of
            kind "finish" has what clients are sent after the last exchange, which only their memory depends on.
        best: see `Best`; None without `keep_best`.
        state: the algorithm's full state.
        interrupted: whether Ctrl-C or a callback ended the run early.
        stopped: where the first value that is not finite appeared, if it ended the run; otherwise None. The state is
            then the last finite one.
        settings: the algorithm, its hyperparameters, the seed and so on, as JSON values.
        notes: remarks that a reader of the results needs, e.g. that the noise can be drawn again.
        spent: whether the run ended early because its budget of privacy was spent.
    """

    history: "pd.DataFrame"
    exchanges: "pd.DataFrame"
    state: Any
    best: Best | None = None
    interrupted: bool = False
    rounds: int = field(default=0)
    memory: Any = None
    stopped: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    spent: bool = False

    @property
    def x(self) -> Any:
        """The upper variable."""
        return self.state.x

    @property
    def y(self) -> Any:
        """The lower variable."""
        return self.state.y

    @property
    def weights(self) -> Any:
        """The clients' weights, if the method learns them."""
        if not hasattr(self.state, "weights"):
            raise AttributeError(
                "This method learns no weights of the clients. Use one that does, e.g. rk.WeightedNodesProx."
            )
        return self.state.weights

    def save(self, folder: str | Path) -> None:
        """Write the run to a new folder.

        `history.csv` and `exchanges.csv` hold the tables, `settings.json` the settings and how the run ended.
        `weights.safetensors` holds the floating-point arrays of x, y, the clients' memory and the best state, under
        the names x, y, memory, best.x and so on; `rk.load_weights` reads it.
        """
        folder = Path(folder)
        written = [name for name in _SAVED if (folder / name).exists()]
        if written or folder.is_file():
            problem = "is a file" if folder.is_file() else f"already holds {written[0]}"
            raise ValueError(f"folder must be a new folder; {folder} {problem}. Choose another one.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder must be one that can be created; {folder}: {error.strerror}.") from error
        best = () if self.best is None else {name: getattr(self.best, name) for name in ("x", "y", "memory")}
        arrays = {"x": self.x, "y": self.y, "memory": self.memory, "best": best}
        save_weights(folder / "weights.safetensors", arrays)
        ended: dict[str, Any] = {"rounds": self.rounds, "interrupted": self.interrupted, "stopped": self.stopped}
        ended |= {"spent": self.spent, "notes": list(self.notes)}
        ended["best"] = None if self.best is None else {"round": self.best.round, "value": self.best.value}
        described = {"format": FORMAT, **self.settings, **ended}
        (folder / "settings.json").write_text(json.dumps(described, indent=2) + "\n")
        self.exchanges.to_csv(folder / "exchanges.csv", index=False)
        self.history.to_csv(folder / "history.csv", index=False)

    def plot(self, *metrics: str, x: str = "round", ax: "Axes | None" = None) -> "Axes":
        """Plot metrics of the history and return the matplotlib axes.

        Arguments:
            metrics: columns of the history; by default all metrics, without quantiles and clients' weights.
            x: the horizontal axis: "round", "exchanges", "bytes" (both ways), "samples" (of both levels), "gradients",
                "products", "seconds", "clock" (of a run with one), "epsilon" (of a private run), or another column of
                counts.
            ax: axes to draw on; None: those of a new figure.

        >>> import jax.numpy as jnp, rookery as rk
        >>> problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
        >>> clients = rk.Clients(upper=[jnp.array([1.0]), jnp.array([3.0])])
        >>> error = lambda x, y: {"error": abs(x - 2)}
        >>> run = rk.solve(problem, clients, rk.FedAvg(step=0.1), jnp.zeros(()), 20, evaluate=error)
        >>> run.plot("error", x="gradients").get_xlabel()
        'gradients'
        """
        over = [*(name for name in COLUMNS if name in self.history), *SUMS]
        if x not in over:
            raise ValueError(f"x must be one of {', '.join(over)}; got {x!r}.{did_you_mean(x, over)}")
        known = [str(name) for name in self.history.columns if name not in COLUMNS]
        shown = list(metrics) or metrics_of(self.history)
        if not shown:
            raise ValueError("This run has no metrics to plot; pass evaluate=... to rk.solve.")
        for name in shown:
            if name not in known:
                has, meant = ", ".join(known) or "none", did_you_mean(name, known)
                raise ValueError(f"plot must be given metrics of the run ({has}); got {name!r}.{meant}")
        if ax is not None and not hasattr(ax, "set_xlabel"):
            raise TypeError(f"ax must be matplotlib axes, such as plt.subplots()[1], or None for new ones; got {ax!r}.")
        if ax is None:
            from matplotlib import pyplot as plt  # slow to import

            ax = plt.subplots(layout="constrained")[1]
        across = self.history[list(SUMS.get(x, (x,)))].sum(axis=1)
        for name in shown:
            ax.plot(across, self.history[name], label=name)
        values = self.history[shown].to_numpy(float)
        values = values[np.isfinite(values)]
        falls = not any(direction(name, otherwise=True).higher_is_better for name in shown)
        if falls and values.size and values.min() > 0 and values.max() > 30 * values.min():
            ax.set_yscale("log")
        ax.set_xlabel(_AXES.get(x, x.replace("_", " ")))
        ax.set_ylabel(shown[0].replace("_", " ") if len(shown) == 1 else "")
        if len(shown) > 1:
            ax.legend(frameon=False)
        return ax

    def __repr__(self) -> str:
        last: Any = self.history.iloc[-1][metrics_of(self.history)] if len(self.history) else {}
        metrics = "".join(f", {name}={value:.4g}" for name, value in last.items())
        ended = (
            ", interrupted" if self.interrupted else ", stopped" if self.stopped else ", spent" if self.spent else ""
        )
        return f"Run(rounds={self.rounds}{metrics}{ended})"
