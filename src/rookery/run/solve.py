"""`solve`: rounds, evaluation, history, the best state, checkpoints, and a clean end on Ctrl-C."""

import dataclasses
import difflib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base import content
from rookery.base.arguments import check_counts, check_seed
from rookery.base.printable import without_address
from rookery.data.clients import Clients
from rookery.engines import checkpoints, default_engine
from rookery.engines.checks import check_function, check_run, start_values
from rookery.engines.engine import Engine, Job, Session
from rookery.language.channel import Channel, Faults, check_kind, draws_noise
from rookery.language.fed import Algorithm
from rookery.language.ledger import COUNTED, Amounts, Ledger
from rookery.language.metrics import check_numbers, direction
from rookery.problems.problems import Problem, required_arguments
from rookery.problems.variables import Taken, taken
from rookery.run.weights import save_weights

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

QUANTILES = (0, 10, 50, 90, 100)  # over clients, in percent
FEW = 5  # of fewer, quantiles are single clients' own numbers
_OWN = ("round", "seconds", *COUNTED)  # the columns of a history that are not metrics
_SERIES = re.compile(r"weight_\d+|.+_q\d+")  # a weight for each client, quantiles: in the history, and not in tables
_AT_ONCE = 256  # rounds in one call at most, and
_SAVED = ("history.csv", "exchanges.csv", "settings.json", "weights.safetensors")  # the files of `Run.save`
_NOT_PRIVATE = "The noise comes from a seed and can be drawn again: this run is not private."
SECONDS_AT_ONCE = 0.5  # about how long a call may take, so that progress is seen and Ctrl-C is heard


class NonFiniteWarning(UserWarning):
    """A value became infinite or not a number."""


class RoundFailedError(RuntimeError):
    """A round could not be completed: too few clients replied.

    `run` is the run as far as it got; None if `tune` was searching.
    """

    run: Any = None


def metrics_of(history: "pd.DataFrame") -> list[str]:
    """The columns of a history that are looked at one by one: not the clients' weights, and no quantiles."""
    return [name for name in history.columns if is_metric(str(name))]


def is_metric(name: str) -> bool:
    """Whether a column of a history is looked at on its own: not a count, a client's weight, or a quantile."""
    return name not in _OWN and _SERIES.fullmatch(name) is None


@dataclass(frozen=True)
class Best:
    """The state with the best value of the metric that `keep_best` names.

    `memory` is what the clients remembered then, one row for each, where `evaluate` looks at it; else None.
    """

    round: int
    value: float
    x: Any
    y: Any
    memory: Any = None


@dataclass
class Run:
    """What `solve` returns.

    Attributes:
        x, y: the variables at the end (y is empty for single-level problems).
        history: a DataFrame with a row for each evaluation: round, exchanges, bytes_up, bytes_down, samples_upper,
            samples_lower, samples_busiest, gradients, products, missing, seconds (all from the start on) and the
            metrics. `samples_busiest` follows, at each step of the protocol, the client that has the most to do: what a
            run in lock-step waits for. `missing` counts the replies that did not arrive. `seconds` is the rounds'
            alone, with compilation, without evaluation.
        weights: the clients' weights, of the methods that learn them.
        memory: what the clients remember, one row for each: their personal models, of the methods that have some. None
            if they remember nothing, and on a `Federation`, where nobody else sees it.
        exchanges: a DataFrame of the last round's exchanges: name, kind, shape of one reply, how often, bytes.
        best: see `Best`; None without `keep_best`.
        state: the algorithm's whole state.
        interrupted: whether Ctrl-C was pressed, or a callback ended the run early.
        stopped: where the first value appeared that is not finite, if that ended the run; else None. The state is then
            the last one that is finite.
        settings: the algorithm, its hyperparameters, the seed and so on, as JSON holds them.
        notes: what a reader of the results has to know, such as that the noise can be drawn again.
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
        """The clients' weights, one each, of a method that learns them."""
        if not hasattr(self.state, "weights"):
            raise AttributeError("This method learns no weights of the clients; rk.WeightedNodesProx does, say.")
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
            what = "is a file" if folder.is_file() else f"holds {written[0]} already"
            raise ValueError(f"folder must be a new folder; {folder} {what}. Give another one.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder must be one that can be made; {folder}: {error.strerror}.") from error
        best = None if self.best is None else {name: getattr(self.best, name) for name in ("x", "y", "memory")}
        save_weights(
            folder / "weights.safetensors", {"x": self.x, "y": self.y, "memory": self.memory, "best": best or ()}
        )
        ended: dict[str, Any] = {"rounds": self.rounds, "interrupted": self.interrupted, "stopped": self.stopped}
        ended["best"] = None if self.best is None else {"round": self.best.round, "value": self.best.value}
        (folder / "settings.json").write_text(json.dumps({**self.settings, **ended}, indent=2) + "\n")
        self.exchanges.to_csv(folder / "exchanges.csv", index=False)
        self.history.to_csv(folder / "history.csv", index=False)

    def plot(self, *metrics: str, x: str = "round", ax: "Axes | None" = None) -> "Axes":
        """Plot metrics of the history and return the matplotlib axes.

        Arguments:
            metrics: columns of the history; none: all metrics, without quantiles and clients' weights.
            x: what they are plotted over: "round", "exchanges", "bytes" (both ways), "samples" (of both levels),
                "gradients", "products", "seconds", or another column of counts.
            ax: axes to draw on; None: those of a new figure.

        >>> import jax.numpy as jnp, rookery as rk
        >>> problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
        >>> clients = rk.Clients(upper=[jnp.array([1.0]), jnp.array([3.0])])
        >>> error = lambda x, y: {"error": abs(x - 2)}
        >>> run = rk.solve(problem, clients, rk.FedAvg(step=0.1), jnp.zeros(()), 20, evaluate=error)
        >>> run.plot("error", x="gradients").get_xlabel()
        'gradients'
        """
        sums = {"bytes": ["bytes_up", "bytes_down"], "samples": ["samples_upper", "samples_lower"]}
        over = [*_OWN, *sums]
        if x not in over:
            raise ValueError(f"x must be one of {', '.join(over)}; got {x!r}.{_nearest(x, over)}")
        known = [str(name) for name in self.history.columns if name not in _OWN]
        shown = list(metrics) or metrics_of(self.history)
        if not shown:
            raise ValueError("This run has no metrics to plot; give evaluate=... to rk.solve.")
        for name in shown:
            if name not in known:
                has = ", ".join(known) or "none"
                raise ValueError(f"plot must be given metrics of the run ({has}); got {name!r}.{_nearest(name, known)}")
        if ax is not None and not hasattr(ax, "set_xlabel"):
            raise TypeError(f"ax must be matplotlib axes, such as plt.subplots()[1], or None for new ones; got {ax!r}.")
        if ax is None:
            from matplotlib import pyplot as plt  # slow to import, and not needed before

            ax = plt.subplots(layout="constrained")[1]
        across = self.history[sums.get(x, [x])].sum(axis=1)
        for name in shown:
            ax.plot(across, self.history[name], label=name)
        values = self.history[shown].to_numpy(float)
        values = values[np.isfinite(values)]
        falls = not any(direction(name, otherwise=True).higher_is_better for name in shown)
        if falls and values.size and values.min() > 0 and values.max() > 30 * values.min():
            ax.set_yscale("log")
        ax.set_xlabel({"round": "rounds", "bytes": "bytes, both ways"}.get(x, x.replace("_", " ")))
        ax.set_ylabel(shown[0].replace("_", " ") if len(shown) == 1 else "")
        if len(shown) > 1:
            ax.legend(frameon=False)
        return ax

    def __repr__(self) -> str:
        last: Any = self.history.iloc[-1][metrics_of(self.history)] if len(self.history) else {}
        metrics = "".join(f", {name}={value:.4g}" for name, value in last.items())
        ended = ", interrupted" if self.interrupted else ", stopped" if self.stopped else ""
        return f"Run(rounds={self.rounds}{metrics}{ended})"


def _nearest(name: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), known, 1)
    return f" Did you mean {near[0]!r}?" if near else ""


Evaluate = Callable[..., dict[str, Any]]


@runtime_checkable
class Tracker(Protocol):
    """What follows a run as a callback of `solve`: it is told the settings, every row of the history, and the end.

    Of a run that goes on from a checkpoint it is told all rows, from the first on.
    """

    def start(self, settings: dict[str, Any]) -> None:
        """The run begins: its algorithm, hyperparameters, seed and so on."""

    def row(self, row: dict[str, Any]) -> None:
        """A new row of the history, by column."""

    def end(self, run: Run | None) -> None:
        """The run is over; None if an exception ended it."""


def solve(
    problem: Problem,
    clients: Clients,
    algorithm: Algorithm,
    init: Any,
    rounds: int,
    *,
    cohort: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    evaluate: Evaluate | None = None,
    evaluate_client: Evaluate | None = None,
    every: int = 1,
    engine: Engine | None = None,
    channel: "Channel | Mapping[str, Channel] | None" = None,
    faults: Faults | None = None,
    checkpoint: str | Path | None = None,
    keep_best: str | None = None,
    callbacks: Sequence[Callable[[Run], Any] | Tracker] = (),
    on_nonfinite: str = "stop",
    progress: bool | str | None = None,
) -> Run:
    """Run an algorithm on a problem.

    Arguments:
        problem: `Bilevel`, `Minimax`, `Compositional`, `SingleLevel` or `WeightedNodes`.
        clients: the federation's data.
        algorithm: `rk.FedNest(...)` and so on.
        init: (x, y), pytrees or models (Equinox modules, Flax variables and states); x alone for single-level problems.
            Floating-point arrays are optimised, everything else in a model is kept, and results have the same
            structure. For compositional problems x alone, or (x, None), too: y then starts at zero. There a plain tuple
            of two is always (x, y): an x that is one itself is given as (x, None). For weighted nodes θ alone, with
            weights 1/K, or (w, θ).
        rounds: how many rounds.
        cohort: clients per round, drawn uniformly, afresh each round; None: all of them. A mean is over the cohort with
            the clients' weights, Σ p_i v_i / Σ p_i: with unequal weights and a small cohort its expectation is not the
            mean over all clients (with one client in a cohort, weights have no effect).
        seed: where all randomness comes from that a client can see: cohorts, minibatches, lost replies. The same seed
            gives the same run on every engine and after every resume.
        noise_seed: where a channel's noise comes from. None, the default: the operating system's entropy, so that
            nobody can draw it again; a checkpoint keeps it. A number makes a simulation repeatable, but its noise hides
            nothing, and `Run.notes` says so. Refused over a network.
        evaluate: evaluate(x, y) -> {metric: number}, called at the start, every `every` rounds and at the end; or
            evaluate(x, y, memory), with what the clients remember, one row for each (None if they remember nothing).
        evaluate_client: evaluate_client(client, x, y) -> {metric: number}, on every client, where its data are, and
            compiled like a part of a method. The data are client.test(), client.upper() and client.lower(), and
            client.mean(fn, data) is fn(rows), a mean over its rows, of all of them. Or evaluate_client(client, x, y,
            memory), with what the client remembers. The history gets the weighted mean over clients under the metric's
            name, and quantiles under name_q0, _q10, _q50, _q90 and _q100; over a network there are quantiles where five
            clients or more reply, or where every site's policy allows its own numbers to be shown. It is no part of the
            method: it passes no channel, and the ledger does not count it. With `faults`, sites that can't be reached
            are left out.
        every: rounds from one row of the history to the next, each with an evaluation. Without `evaluate`,
            `evaluate_client` and callbacks many rounds go in one compiled call whatever `every` is, and the rows'
            `seconds` are interpolated.
        engine: `Simulation(block=..., debug=...)`, the default, or `Federation()`.
        channel: what stands between the clients' values and the server: `rk.chain(rk.clip(1.0), rk.gaussian(1.1))`, for
            all exchanges, or {name of an exchange: channel}. None: the plain mean.
        faults: `rk.Faults(dropout=0.2)`: replies that do not arrive. If fewer than its minimum do, the run ends with
            `rk.RoundFailedError`.
        checkpoint: a folder. The run is saved there at evaluations, in the background, and a later call with the same
            arguments continues from there, to as many rounds as that call asks for; the result is that of an
            uninterrupted run. The last evaluation is always saved; earlier ones as often as they can be written in at
            most a twentieth of the time. A call with another `evaluate`, `evaluate_client` or `keep_best` is refused,
            since the history would mix two metrics. A function counts by its code and by the values that it reads;
            library functions count by name, and values that cannot be pickled by their type.
        keep_best: a metric; the state where it is best is kept in `Run.best`. Write "+name" if higher is better,
            "-name" if lower is better. Without a sign the name must tell, as "accuracy" and "error_rate" do.
        callbacks: functions, called with the run so far after every evaluation (one that returns True ends the run),
            and trackers, `rk.trackers.JsonLines("run.jsonl")` and so on, which are told each new row of the history.
        on_nonfinite: "stop": the run ends before the first round that makes a value of the state or of a client's
            memory infinite or not a number, with a warning; `Run.stopped` says where. "warn": it goes on, with a
            warning.
        progress: show a bar with the metrics and the time left (a string is its title); None: if standard error is a
            terminal.

    Ctrl-C ends the run after the rounds under way and returns it as far as it got; a second one stops at once.
    """
    models = taken(problem, init)
    problem = models.problem
    x, y = start_values(problem, clients, models.init)
    cohort = check_run(problem, clients, algorithm, x, y, rounds, cohort, every, seed)
    rounds, every, seed = int(rounds), int(every), int(seed)
    engine = _engine(engine)
    functions, trackers = _callbacks(callbacks)
    for callback in functions:
        check_function("a callback", callback, "run")
    if evaluate is not None:
        check_function("evaluate", evaluate, "x, y", "x, y, memory")
    check_between(channel, faults, noise_seed, cohort)
    if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(f"checkpoint is {checkpoint!r}; give the name of a folder.")
    if on_nonfinite not in ("stop", "warn"):
        raise ValueError(f'on_nonfinite={on_nonfinite!r} is not known; give "stop" or "warn".')
    record = _Record(models, evaluate, keep_best, evaluate_client is not None, every, rounds)
    if record.sees_memory and not engine.sees_memory and hasattr(algorithm, "memory"):
        raise ValueError(
            "evaluate(x, y, memory) looks at what the clients remember, and a Federation's sites keep that to "
            "themselves: give an evaluate(x, y), or use the Simulation."
        )

    measure = measuring(models, evaluate_client)
    begin = time.perf_counter()
    job = Job(problem, clients, algorithm, (x, y), cohort, seed, channel, faults, on_nonfinite, measure)
    job = dataclasses.replace(job, noise_seed=noise_seed)
    session = engine.open(job)
    with closing(session):
        clients, processes = session.clients, session.processes
        processes.agree({"rounds": rounds, "every": every, "keep_best": keep_best, "checkpoint": str(checkpoint)})
        record.ledger.add([session.init()], clients.n)
        record.seconds += time.perf_counter() - begin
        record.ledger.rounds = 0
        saver, found = None, None
        if checkpoint is not None:
            identity = checkpoints.identity(algorithm, clients, (x, y), seed, cohort, session.fingerprint)
            identity |= {
                "keep_best": record.goal and record.goal.signed,
                "evaluate": content.fingerprint(evaluate),
                "evaluate_client": content.fingerprint(evaluate_client),
            }
            saver = checkpoints.Checkpoint(checkpoint, identity, session)
            found = saver.resume(record.seen(session), rounds)
        if found is not None:
            record.restore(session, found.extra, found.best)
        else:
            record.evaluate(session)

        ended = False
        if found is not None:
            noise_seed = found.extra.get("noise_seed")
        record.noise_seed = noise_seed
        repeatable = noise_seed is not None and draws_noise(channel)
        notes = (f"{_NOT_PRIVATE} (noise_seed={noise_seed})",) if repeatable else ()
        settings = _settings(problem, clients, algorithm, engine, channel, faults)
        settings |= {"cohort": cohort, "seed": seed, "rounds": rounds, "every": every}
        settings |= {} if noise_seed is None else {"noise_seed": noise_seed}
        following = _Following(trackers if processes.lead else [], settings)
        showing = _bar(progress if processes.lead else False, algorithm, rounds, session, notes)
        with following, saver or nullcontext(), showing as bar, interrupts(session.durable) as interrupt:
            pace = Pace(1 if session.durable else _AT_ONCE)
            looks = record.looks or bool(functions)  # if nothing looks at the state, calls go on beyond `every` rounds
            following.tell(record.rows)
            bar(session.rounds, record.rows[-1])
            while session.rounds < rounds and not session.stopped:
                until = every - session.rounds % every if looks else rounds
                count = pace.next(min(until, rounds - session.rounds))
                said = processes.gather((count, ended or interrupt.is_set()))
                if any(stop for _, stop in said):
                    break
                count = said[0][0]
                begin = time.perf_counter()
                costs = session.advance(count)
                jax.block_until_ready(session.state)
                seconds = time.perf_counter() - begin
                pace.took(count, seconds)
                known = len(record.rows)
                record.passed(costs, cohort, seconds, session.rounds, looks)
                due = session.rounds % every == 0 or session.rounds == rounds
                if due and record.rows[-1]["round"] != session.rounds:
                    record.evaluate(session)
                if saver is not None and (len(record.rows) > known or (session.durable and costs)):
                    saver.save(record.extra(), record.best, always=session.durable)
                following.tell(record.rows)
                if due and functions:
                    so_far = record.run(session, interrupted=False)
                    ended = processes.on_lead(lambda: any([_is_true(function(so_far)) for function in functions]))
                bar(session.rounds, record.rows[-1])
            if record.rows[-1]["round"] != session.rounds:  # Ctrl-C, or a round that was not completed
                record.evaluate(session)
                if saver is not None:
                    saver.save(record.extra(), record.best, always=session.durable)
                following.tell(record.rows)
            if saver is not None:
                saver.finish(record.extra(), record.best)
            interrupted = not session.stopped and (session.rounds < rounds or interrupt.is_set())
            run = record.run(session, interrupted)
            as_text = lambda value: value.tolist() if hasattr(value, "tolist") else without_address(value)
            run.settings = json.loads(json.dumps(settings, default=as_text))
            run.notes = notes
            if session.stopped is None or not session.stopped.failed:
                run.stopped = None if session.stopped is None else session.stopped.reason
                following.run = run
        if session.warned is not None:
            warnings.warn(f"{session.warned.reason} The run went on.", NonFiniteWarning, stacklevel=2)
    if session.stopped is not None and session.stopped.failed:
        error = RoundFailedError(session.stopped.reason)
        error.run = run
        raise error
    if run.stopped is not None:
        begun = not run.stopped.startswith("before")
        where = "The run stopped there, and what it returns is from before." if begun else "No round was run."
        cure = "Smaller steps are the usual cure" if begun else "Look at the start and the data, as rk.check does"
        warnings.warn(
            f"{run.stopped} {where} {cure}; rk.Simulation(debug=True) tells which client and which local step; "
            'on_nonfinite="warn" goes on.',
            NonFiniteWarning,
            stacklevel=2,
        )
    return run


class Stepped:
    """A run that is advanced by hand; see `rk.session`.

    Attributes:
        rounds: done so far.
        stopped: why it cannot be advanced any further; None if it can.
        counts: what the rounds have cost so far, by the columns of `Run.history`.
    """

    def __init__(self, models: Taken, session: Session, cohort: int) -> None:
        self._models, self._session, self._cohort, self._ledger = models, session, cohort, Ledger()
        self._ledger.add([session.init()], session.clients.n)

    def advance(self, rounds: int = 1) -> int:
        """Compute more rounds, and return how many were completed: fewer only if the run has stopped."""
        check_counts(0, rounds=rounds)
        costs = self._session.advance(int(rounds)) if rounds and self._session.stopped is None else []
        self._ledger.add(costs, self._cohort)
        return len(costs)

    @property
    def rounds(self) -> int:
        """The rounds done so far."""
        return self._session.rounds

    @property
    def stopped(self) -> str | None:
        """Why the run cannot be advanced any further; None if it can."""
        return None if self._session.stopped is None else self._session.stopped.reason

    @property
    def counts(self) -> dict[str, int]:
        """What the rounds have cost so far."""
        return dict(self._ledger.counts)

    @property
    def state(self) -> Any:
        """A copy of the algorithm's state, with x and y."""
        return self._models.whole(_own(self._session.state))

    @property
    def memory(self) -> Any:
        """A copy of what the clients remember; see `Run.memory`."""
        return self._models.whole(_own(self._session.memory))

    def close(self) -> None:
        """Release the engine's resources."""
        self._session.close()

    def __enter__(self) -> "Stepped":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def session(
    problem: Problem,
    clients: Clients,
    algorithm: Algorithm,
    init: Any,
    *,
    cohort: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    engine: Engine | None = None,
    channel: "Channel | Mapping[str, Channel] | None" = None,
    faults: Faults | None = None,
) -> Stepped:
    """Open a run and advance it by hand, for loops that `solve` does not have.

    The arguments are those of `solve`, and so are the numbers. The run stops before the first round that makes a value
    infinite or not a number, and before a round with too few replies.

    >>> import jax.numpy as jnp, rookery as rk
    >>> problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
    >>> clients = rk.Clients(upper=[jnp.array([1.0]), jnp.array([3.0])])
    >>> with rk.session(problem, clients, rk.FedAvg(step=0.1), jnp.zeros(())) as run:
    ...     while abs(run.state.x - 2) > 0.1:
    ...         completed = run.advance(5)
    >>> run.rounds, run.counts["exchanges"]
    (15, 15)
    """
    models = taken(problem, init)
    x, y = start_values(models.problem, clients, models.init)
    cohort = check_run(models.problem, clients, algorithm, x, y, 0, cohort, 1, seed)
    check_between(channel, faults, noise_seed, cohort)
    job = Job(models.problem, clients, algorithm, (x, y), cohort, int(seed), channel, faults, noise_seed=noise_seed)
    return Stepped(models, _engine(engine).open(job), cohort)


def _engine(given: Any) -> Any:
    """The engine, or the default one; TypeError if it is not an engine."""
    engine = default_engine() if given is None else given
    if isinstance(engine, type) or not hasattr(engine, "open"):
        raise TypeError(f"engine is {engine!r}; give rk.Simulation(...) or rk.Federation().")
    return engine


def check_between(channel: Any, faults: Any, noise_seed: Any, cohort: int) -> None:
    """Raise TypeError or ValueError if what stands between clients and server is not what it should be."""
    check_kind(channel)
    if faults is not None and not isinstance(faults, Faults):
        raise TypeError(f"faults must be rk.Faults(dropout=...) or None; got {faults!r}.")
    if faults is not None and faults.minimum > cohort:
        raise ValueError(f"faults: minimum must be at most the cohort of {cohort} clients; got {faults.minimum}.")
    if noise_seed is not None:
        check_seed(noise_seed, "noise_seed")
        if channel is None:
            raise ValueError("noise_seed needs a channel that draws noise, such as rk.gaussian; got channel=None.")


def _callbacks(given: Any) -> tuple[list[Callable[[Run], Any]], list[Tracker]]:
    """The functions and the trackers among the callbacks."""
    if callable(given) or isinstance(given, Tracker):
        what = "function" if callable(given) else "tracker"
        raise TypeError(f"callbacks is a {what}; give a list of {what}s.")
    if not isinstance(given, Iterable):
        raise TypeError(f"callbacks is {given!r}; give a list of functions.")
    given = list(given)
    trackers = [entry for entry in given if isinstance(entry, Tracker)]
    functions = [entry for entry in given if not isinstance(entry, Tracker)]
    for entry in given:
        made = not (isinstance(entry, type) and isinstance(entry, Tracker))
        if not made or not (callable(entry) or isinstance(entry, Tracker)):
            what = repr(entry) if made else f"the class {entry.__name__}"
            raise TypeError(
                f'callbacks holds {what}; give functions, or trackers as rk.trackers.JsonLines("run.jsonl").'
            )
    return functions, trackers


def _settings(
    problem: Problem, clients: Clients, algorithm: Algorithm, engine: Engine, channel: Any, faults: Faults | None
) -> dict[str, Any]:
    """What a tracker is told of a run, but for its length and its seed."""
    own: Any = dataclasses.fields(algorithm) if dataclasses.is_dataclass(algorithm) else ()
    settings = {
        "algorithm": type(algorithm).__name__,
        "hyperparameters": {field.name: getattr(algorithm, field.name) for field in own},
        "problem": type(problem).__name__,
        "clients": clients.n,
        "engine": type(engine).__name__,
    }
    given = {"channel": channel, "faults": faults}
    return settings | {name: without_address(value) for name, value in given.items() if value is not None}


class _Following:
    """Tells trackers of a run: its settings, each row once, and its end, also where an exception ends it."""

    def __init__(self, trackers: Sequence[Tracker], settings: dict[str, Any]) -> None:
        self._trackers, self._settings, self._told = trackers, settings, 0
        self.run: Run | None = None

    def __enter__(self) -> "_Following":
        for tracker in self._trackers:
            tracker.start(self._settings)
        return self

    def tell(self, rows: Sequence[dict[str, Any]]) -> None:
        """The rows so far."""
        for row in rows[self._told :]:
            for tracker in self._trackers:
                tracker.row(dict(row))
        self._told = len(rows)

    def __exit__(self, *error: object) -> None:
        for tracker in self._trackers:
            tracker.end(self.run)


def _own(value: Any) -> Any:
    """A copy of a pytree of arrays."""
    return jax.tree.map(lambda a: a.copy() if hasattr(a, "copy") else a, value)


def _copied(leaf: Any) -> Any:
    """A copy, in NumPy; of a random key, of which NumPy knows nothing, in JAX."""
    return jnp.copy(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.array(leaf)


def _is_true(answer: Any) -> bool:
    """Whether a callback says True, in Python, NumPy or JAX; any other answer means nothing."""
    one = isinstance(answer, bool) or (np.ndim(answer) == 0 and getattr(answer, "dtype", None) == np.dtype(bool))
    return one and bool(answer)


def measuring(models: Taken, evaluate_client: Evaluate | None) -> Evaluate | None:
    """`evaluate_client` as engines take it: measure(client, x, y, memory), of variables."""
    if evaluate_client is None:
        return None
    check_function("evaluate_client", evaluate_client, "client, x, y", "client, x, y, memory")
    sees, given = required_arguments(evaluate_client), evaluate_client
    return lambda client, x, y, memory: given(client, *models.whole((x, y, memory)[: 3 if sees >= 4 else 2]))


def over_clients(
    rows: Mapping[str, np.ndarray], replied: np.ndarray, weights: np.ndarray, shows_each: bool = True
) -> dict[str, float]:
    """The weighted mean and the quantiles of each metric over those who replied; NaN where there is no weight.

    Without `shows_each` there are no quantiles of fewer than five clients, and a mean of one is NaN.
    """
    found, p = {}, weights[replied]
    least = 1 if shows_each else 2
    for name, each in rows.items():
        own = np.asarray(each, float)[replied]
        found[name] = float(np.sum(np.where(p > 0, p * own, 0)) / np.sum(p)) if np.sum(p > 0) >= least else np.nan
        if shows_each or own.size >= FEW:
            found |= {f"{name}_q{q}": float(np.percentile(own, q)) if own.size else np.nan for q in QUANTILES}
    return found


class Pace:
    """How many rounds to compute in one call: up to eight times as many as before, if the call remains short."""

    def __init__(self, most: int) -> None:
        self._most, self._at_once = most, 1

    def next(self, wanted: int) -> int:
        """The rounds of the next call, at most those wanted."""
        return max(1, min(wanted, self._most, self._at_once))

    def took(self, count: int, seconds: float) -> None:
        """A call of `count` rounds has taken this long."""
        self._at_once = max(1, min(8 * count, int(SECONDS_AT_ONCE * count / seconds)))


class _Record:
    """The history as it grows: rows every `every` rounds and at the end, which is after `rounds`."""

    def __init__(
        self, models: Taken, evaluate: Evaluate | None, keep_best: str | None, measures: bool, every: int, rounds: int
    ) -> None:
        self._models, self._evaluate, self._asked = models, models.seeing(evaluate), keep_best
        self._measures, self._every, self._rounds = measures, every, rounds
        self.goal = None if keep_best is None else direction(keep_best)
        self.looks = measures or evaluate is not None
        self.noise_seed: int | None = None
        if self.goal is not None and not self.looks:
            raise ValueError(f"keep_best={keep_best!r} needs evaluate=..., or evaluate_client=..., that returns it.")
        self.sees_memory = evaluate is not None and required_arguments(evaluate) >= 3
        self.ledger = Ledger()
        self.seconds = 0.0
        self.rows: list[dict[str, Any]] = []
        self.best: Best | None = None  # of the rows that are due every `every` rounds, which a longer run has, too
        self._last: Best | None = None  # the last state, if it is better and due only because the run ends there

    def seen(self, session: Session) -> tuple[Any, Any, Any]:
        """x, y and, where `evaluate` looks at it, what the clients remember."""
        return session.state.x, session.state.y, session.memory if self.sees_memory else None

    def passed(self, costs: list[Amounts], cohort: int, seconds: float, done: int, looks: bool) -> None:
        """Count the rounds of a call, `done` with the last of them.

        If nothing looks at the state between two calls, the rows that were due between the rounds are added.
        """
        if looks:
            self.ledger.add(costs, cohort)
            self.seconds += seconds
            return
        before = self.seconds
        for k, cost in enumerate(costs, 1):
            self.ledger.add([cost], cohort)
            self.seconds = before + seconds * k / len(costs)
            if (done - len(costs) + k) % self._every == 0:
                self._add(done - len(costs) + k, {})

    def _add(self, done: int, metrics: dict[str, float]) -> None:
        self.rows.append({"round": done, **self.ledger.counts, "seconds": self.seconds, **metrics})

    def evaluate(self, session: Session) -> None:
        """Add a row for the session as it stands."""
        # The next rounds donate the state: what `evaluate` sees is its own to keep.
        own = jax.tree.map(jnp.copy, self.seen(session)[: 3 if self.sees_memory else 2]) if self._evaluate else ()
        metrics = session.processes.on_lead(lambda: self._metrics(own))
        for name, value in (
            over_clients(*session.measure(), np.asarray(session.clients.weights, float), session.shows_each)
            if self._measures
            else {}
        ).items():
            if name in metrics:
                raise ValueError(f"evaluate and evaluate_client both return {name!r}; call one of them something else.")
            metrics[name] = value
        taken = sorted(set(_OWN) & set(metrics))
        if taken:
            raise ValueError(
                f"evaluate returns {taken[0]!r}, a name that the history uses itself; call it something else."
            )
        self._add(session.rounds, metrics)
        self._compare(session)

    def _metrics(self, own: tuple[Any, ...]) -> dict[str, float]:
        """What the user's function gives."""
        metrics = {} if self._evaluate is None else self._evaluate(*own)
        check_numbers("evaluate", metrics)
        return {name: float(value) for name, value in metrics.items()}

    def _compare(self, session: Session) -> None:
        """Keep the state if the last row is due and better than the best. Rows off the schedule never become best."""
        regular = session.rounds % self._every == 0
        if self.goal is None or not (regular or session.rounds == self._rounds):
            return
        metrics = {name: value for name, value in self.rows[-1].items() if name not in _OWN}
        if self.goal.name not in metrics:
            known, meant = ", ".join(metrics) or "nothing", _nearest(self.goal.name, list(metrics))
            raise ValueError(
                f"keep_best={self._asked!r} must name a metric that evaluate returns; it returns {known}.{meant}"
            )
        value = metrics[self.goal.name]
        better = np.isfinite(value) if self.best is None else self.goal.better(value, self.best.value)
        if better:
            copy = jax.tree.map(_copied, self.seen(session))  # the run goes on in the state's own buffers
            found = Best(session.rounds, value, *copy)
            self.best, self._last = (found, None) if regular else (self.best, found)

    def run(self, session: Session, interrupted: bool) -> Run:
        import pandas as pd  # slow to import, and not needed before

        # The next rounds donate the state: a run that is handed out keeps its own copy.
        state, memory = _own((session.state, session.memory))
        columns = ["name", "kind", "shape", "count", "bytes_up", "bytes_down"]
        exchanges = pd.DataFrame(self.ledger.last, columns=columns)
        whole, best = self._models.whole, self._last or self.best
        if best is not None:
            best = Best(best.round, best.value, *map(whole, (best.x, best.y, best.memory)))
        return Run(
            pd.DataFrame(self.rows), exchanges, whole(state), best, interrupted, session.rounds, whole(memory)
        )  # fmt: skip

    def extra(self) -> dict[str, Any]:
        """What a checkpoint holds of it, which is written while the run goes on: as it is now."""
        best = None if self.best is None else {"round": self.best.round, "value": self.best.value}
        told = {"counts": dict(self.ledger.counts), "last": list(self.ledger.last), "every": self._every}
        told["noise_seed"] = self.noise_seed
        return {**told, "seconds": self.seconds, "rows": list(self.rows), "best": best}

    def restore(self, session: Session, extra: dict[str, Any], best: Any) -> None:
        """Go on from a checkpoint, without the last row if this run has none after that round."""
        self.ledger.counts, self.ledger.last = extra["counts"], extra["last"]
        self.seconds, self.rows = extra["seconds"], extra["rows"]
        self.best = None if extra["best"] is None else Best(extra["best"]["round"], extra["best"]["value"], *best)
        last = self.rows[-1]["round"]
        if last % extra["every"]:  # the saved run ended there, or was interrupted: its state is the session's
            if last % self._every and last != self._rounds:
                self.rows.pop()
            else:
                self._compare(session)


@contextmanager
def interrupts(said: bool = False) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, which is `said`; the second raises KeyboardInterrupt."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        if said:
            os.write(2, b"Stopping after this round; Ctrl-C again stops at once.\n")  # a print may be under way

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(
    progress: bool | str | None, algorithm: Any, rounds: int, session: Session, notes: Sequence[str]
) -> Iterator[Callable[..., None]]:
    """What shows the rounds done and the last row's metrics; the notes above it, and in the log."""
    notes = (*session.notes, *notes)
    for note in notes:
        logging.getLogger("rookery").info(note)
    show = sys.stderr.isatty() if progress is None else bool(progress)
    if not show:
        yield lambda done, row: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        title = progress if isinstance(progress, str) else type(algorithm).__name__
        task = bar.add_task(title, total=rounds, completed=session.rounds, metrics="")
        for note in notes:
            bar.console.print(note, highlight=False)

        def update(done: int, row: dict[str, Any]) -> None:
            metrics = "  ".join(f"{name} {value:.4g}" for name, value in row.items() if is_metric(name))
            bar.update(task, completed=done, metrics=metrics)

        yield update
