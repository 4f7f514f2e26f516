"""`solve`: rounds, evaluation, history, the best state, checkpoints, and a clean end on Ctrl-C."""

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rookery import checkpoints, hyperparameters
from rookery.checks import check_run, start_values
from rookery.clients import Clients
from rookery.engines.federation import Federation
from rookery.engines.simulation import Amounts, Carry, Simulation
from rookery.fed import WORK, Algorithm, Exchange
from rookery.problems import Problem, required_arguments

_SERIES = re.compile(r"weight_\d+")  # a weight for each client: in the history, and not in tables
COUNTED = ("exchanges", "bytes_up", "bytes_down", "samples_busiest", *WORK)
_AT_ONCE = 256  # rounds in one compiled call at most, and
_SECONDS_AT_ONCE = 0.5  # about how long such a call may take, so that progress is seen and Ctrl-C is heard


def metrics_of(history: pd.DataFrame) -> list[str]:
    """The columns of a history that `evaluate` gave and that are looked at one by one: not the clients' weights."""
    return [name for name in history.columns if _shown(str(name))]


def _shown(name: str) -> bool:
    return name not in ("round", "seconds", *COUNTED) and _SERIES.fullmatch(name) is None


@dataclass(frozen=True)
class Best:
    """The state with the highest value of the metric that `keep_best` names.

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
            samples_lower, samples_busiest, gradients, products, seconds (all from the start on) and the metrics.
            `samples_busiest` follows, at each step of the protocol, the client that has the most to do: what a run in
            lock-step waits for. `seconds` is the rounds' alone, with compilation, without evaluation.
        weights: the clients' weights, of the methods that learn them.
        memory: what the clients remember, one row for each: their personal models, of the methods that have some. None
            if they remember nothing, and on a `Federation`, where nobody else sees it.
        exchanges: a DataFrame of the last round's exchanges: name, kind, shape of one reply, how often, bytes.
        best: see `Best`; None without `keep_best`.
        state: the algorithm's whole state.
        interrupted: whether Ctrl-C was pressed, or a callback ended the run early.
    """

    history: pd.DataFrame
    exchanges: pd.DataFrame
    state: Any
    best: Best | None = None
    interrupted: bool = False
    rounds: int = field(default=0)
    memory: Any = None

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

    def __repr__(self) -> str:
        last: Any = self.history.iloc[-1][metrics_of(self.history)] if len(self.history) else {}
        metrics = "".join(f", {name}={value:.4g}" for name, value in last.items())
        return f"Run(rounds={self.rounds}{metrics}{', interrupted' if self.interrupted else ''})"


Evaluate = Callable[..., dict[str, Any]]


def solve(
    problem: Problem,
    clients: Clients,
    algorithm: Algorithm,
    init: Any,
    rounds: int,
    *,
    cohort: int | None = None,
    seed: int = 0,
    evaluate: Evaluate | None = None,
    every: int = 1,
    engine: Any = None,
    checkpoint: str | Path | None = None,
    keep_best: str | None = None,
    callbacks: Sequence[Callable[[Run], Any]] = (),
    progress: bool | str | None = None,
) -> Run:
    """Run an algorithm on a problem.

    Arguments:
        problem: `Bilevel`, `Minimax`, `Compositional`, `SingleLevel` or `WeightedNodes`.
        clients: the federation's data.
        algorithm: `rk.FedNest(...)` and so on.
        init: (x, y), pytrees of floating-point arrays; x alone for single-level problems. For compositional problems y
            may be None: it then starts at zero. For weighted nodes θ alone, with weights 1/K, or (w, θ).
        rounds: how many rounds.
        cohort: clients per round, drawn afresh each round; None: all of them.
        seed: all randomness comes from it. The same seed gives the same run on every engine and after every resume.
        evaluate: evaluate(x, y) -> {metric: number}, called at the start, every `every` rounds and at the end; or
            evaluate(x, y, memory), with what the clients remember, one row for each (None if they remember nothing).
        every: rounds from one evaluation to the next.
        engine: `Simulation(block=..., debug=...)`, the default, or `Federation()`.
        checkpoint: a file. The run is saved there at every evaluation, and goes on from there if the file is that of
            the same run, cut short.
        keep_best: a metric; the state where it is highest is kept in `Run.best` ("-loss": where it is lowest).
        callbacks: each is called with the run so far after every evaluation; one that returns True ends the run.
        progress: show a bar with the metrics and the time left (a string is its title); None: if standard error is a
            terminal.

    Ctrl-C ends the run after the rounds under way and returns it as far as it got; a second one stops at once.
    """
    x, y = start_values(problem, clients, init)
    cohort = check_run(problem, clients, algorithm, x, y, rounds, cohort, every, seed)
    rounds, every, seed = int(rounds), int(every), int(seed)
    engine = Simulation() if engine is None else engine
    if isinstance(engine, type) or not hasattr(engine, "advance"):
        raise TypeError(f"engine is {engine!r}; give rk.Simulation(...) or rk.Federation().")
    if callable(callbacks):
        raise TypeError("callbacks is a function; give a list of functions.")
    split = hyperparameters.split(algorithm)
    record = _Record(evaluate, keep_best)
    if record.sees_memory and isinstance(engine, Federation) and hasattr(algorithm, "memory"):
        raise ValueError(
            "evaluate(x, y, memory) looks at what the clients remember, and a Federation's sites keep that to "
            "themselves: give an evaluate(x, y), or use the Simulation."
        )

    begin = time.perf_counter()
    carry, amounts = engine.start(problem, clients, split, x, y, seed)
    record.add([amounts], clients.n, time.perf_counter() - begin)
    done, identity = 0, {}
    if checkpoint is not None:
        if isinstance(engine, Federation):
            raise ValueError("checkpoint= needs the Simulation: the sites of a Federation keep their own memory.")
        identity = checkpoints.identity(algorithm, clients, (x, y), seed, cohort)
    if checkpoint is not None and Path(checkpoint).exists():
        done, carry, extra, best = checkpoints.load(checkpoint, identity, carry, record.seen(carry), rounds)
        record.restore(extra, best)
    else:
        record.evaluate(0, carry)

    at_once = 1
    stopped = False
    with _bar(progress, algorithm, rounds, done) as bar, _interrupts() as interrupt:
        bar(done, record.rows[-1])
        while done < rounds and not (stopped or interrupt.is_set()):
            to_evaluation = min(every - done % every, rounds - done)
            count = min(to_evaluation, _AT_ONCE, at_once)
            begin = time.perf_counter()
            carry, costs = engine.advance(problem, clients, split, cohort, carry, done, count, _AT_ONCE, seed)
            jax.block_until_ready(carry)
            seconds = time.perf_counter() - begin
            at_once = max(1, min(2 * count, int(_SECONDS_AT_ONCE * count / seconds)))
            done += count
            record.add(costs, cohort, seconds)
            if done % every == 0 or done == rounds or interrupt.is_set():
                record.evaluate(done, carry)
                if checkpoint is not None:
                    checkpoints.save(checkpoint, identity, done, carry, record.extra(), record.best)
                if callbacks:
                    so_far = record.run(carry, done, interrupted=False)
                    stopped = any([callback(so_far) is True for callback in callbacks])
            bar(done, record.rows[-1])
        if record.rows[-1]["round"] != done:  # Ctrl-C between the last test for it and the next
            record.evaluate(done, carry)
            if checkpoint is not None:
                checkpoints.save(checkpoint, identity, done, carry, record.extra(), record.best)
        ended_early = done < rounds or interrupt.is_set()
    return record.run(carry, done, interrupted=ended_early)


def _asked(exchange: Exchange, cohort: int) -> int:
    """How many clients: the cohort, or the one that holds the centre's data."""
    return 1 if exchange.kind == "center" else cohort


class _Record:
    """The history as it grows."""

    def __init__(self, evaluate: Evaluate | None, keep_best: str | None) -> None:
        self._evaluate, self._keep_best = evaluate, keep_best
        self.sees_memory = evaluate is not None and required_arguments(evaluate) >= 3
        self.counts = dict.fromkeys(COUNTED, 0)
        self.seconds = 0.0
        self.rows: list[dict[str, Any]] = []
        self.best: Best | None = None
        self._last: list[dict[str, Any]] = []

    def add(self, costs: Sequence[Amounts], cohort: int, seconds: float) -> None:
        self.seconds += seconds
        for cost in costs:
            for exchange, entry in cost.exchanges.items():
                self.counts["exchanges"] += int(entry["count"])
                self.counts["bytes_up"] += _asked(exchange, cohort) * int(entry["up"])
                self.counts["bytes_down"] += _asked(exchange, cohort) * int(entry["down"])
            self.counts["samples_busiest"] += int(cost.busiest)
            for name, amount in zip(WORK, np.asarray(cost.work), strict=True):
                self.counts[name] += int(amount)
        self._last = [
            {
                "name": exchange.name,
                "kind": exchange.kind,
                "shape": exchange.shape,
                "count": int(entry["count"]),
                "bytes_up": _asked(exchange, cohort) * int(entry["up"]),
                "bytes_down": _asked(exchange, cohort) * int(entry["down"]),
            }
            for exchange, entry in sorted(costs[-1].exchanges.items())
            if int(entry["count"]) or int(entry["down"]) or exchange.kind == "center"
        ]

    def seen(self, carry: Carry) -> tuple[Any, Any, Any]:
        """x, y and, where `evaluate` looks at it, what the clients remember."""
        return carry.state.x, carry.state.y, carry.memory if self.sees_memory else None

    def evaluate(self, done: int, carry: Carry) -> None:
        # The next rounds give up the state's buffers: what `evaluate` sees is its own to keep.
        own = jax.tree.map(jnp.copy, self.seen(carry)[: 3 if self.sees_memory else 2])
        metrics = {} if self._evaluate is None else self._evaluate(*own)
        if not isinstance(metrics, dict) or any(np.ndim(value) for value in metrics.values()):
            raise TypeError("evaluate must return a dict of numbers, {name: number}.")
        taken = sorted({"round", "seconds", *COUNTED} & set(metrics))
        if taken:
            raise ValueError(
                f"evaluate returns {taken[0]!r}, a name that the history uses itself; call it something else."
            )
        metrics = {name: float(value) for name, value in metrics.items()}
        self.rows.append({"round": done, **self.counts, "seconds": self.seconds, **metrics})
        if self._keep_best is not None:
            self._compare(done, carry, metrics)

    def _compare(self, done: int, carry: Carry, metrics: dict[str, float]) -> None:
        assert self._keep_best is not None
        name = self._keep_best.removeprefix("-")
        if name not in metrics:
            known = ", ".join(metrics) or "nothing"
            raise ValueError(f"keep_best={self._keep_best!r}: evaluate returns no such metric, but {known}.")
        value = -metrics[name] if self._keep_best.startswith("-") else metrics[name]
        best = -np.inf
        if self.best is not None:
            best = -self.best.value if self._keep_best.startswith("-") else self.best.value
        if value > best:
            copy = jax.tree.map(np.array, self.seen(carry))  # the run goes on in the state's own buffers
            self.best = Best(done, metrics[name], *copy)

    def run(self, carry: Carry, done: int, interrupted: bool) -> Run:
        # The next rounds give up the state's buffers: a run that is handed out keeps its own copy.
        own = jax.tree.map(lambda a: a.copy() if hasattr(a, "copy") else a, carry)
        columns = ["name", "kind", "shape", "count", "bytes_up", "bytes_down"]
        exchanges = pd.DataFrame(self._last, columns=columns)
        return Run(pd.DataFrame(self.rows), exchanges, own.state, self.best, interrupted, done, own.memory)

    def extra(self) -> dict[str, Any]:
        best = None if self.best is None else {"round": self.best.round, "value": self.best.value}
        return {"counts": self.counts, "seconds": self.seconds, "rows": self.rows, "last": self._last, "best": best}

    def restore(self, extra: dict[str, Any], best: Any) -> None:
        self.counts, self.seconds, self.rows, self._last = (extra[k] for k in ("counts", "seconds", "rows", "last"))
        self.best = None if extra["best"] is None else Best(extra["best"]["round"], extra["best"]["value"], *best)


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second raises KeyboardInterrupt."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(progress: bool | str | None, algorithm: Any, rounds: int, done: int) -> Iterator[Callable[..., None]]:
    show = sys.stderr.isatty() if progress is None else bool(progress)
    if not show:
        yield lambda done, row: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        title = progress if isinstance(progress, str) else type(algorithm).__name__
        task = bar.add_task(title, total=rounds, completed=done, metrics="")

        def update(done: int, row: dict[str, Any]) -> None:
            metrics = "  ".join(f"{name} {value:.4g}" for name, value in row.items() if _shown(name))
            bar.update(task, completed=done, metrics=metrics)

        yield update
