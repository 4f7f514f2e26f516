"""`solve`: run an algorithm on a problem, with evaluations, checkpoints and a clean end on Ctrl-C."""

import dataclasses
import json
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rookery.base import content
from rookery.base.printable import without_address
from rookery.channels.private import Budgeted
from rookery.data.clients import Clients
from rookery.data.cohort import Poisson
from rookery.engines import checkpoints
from rookery.engines.checks import check_function
from rookery.engines.engine import Engine, Job, Session
from rookery.language.asynchronous import Asynchronous
from rookery.language.channel import Channel, Faults, draws_noise
from rookery.language.clock import Clock
from rookery.language.fed import Algorithm
from rookery.problems.problems import Problem
from rookery.problems.variables import adapt
from rookery.run.arguments import check_publishes_nothing, checked, checked_callbacks, checked_engine
from rookery.run.budget import Budget
from rookery.run.evaluation import Evaluate, measuring
from rookery.run.progress import Followers, Pace, Tracker, interrupts, progress_bar
from rookery.run.record import Record
from rookery.run.result import NonFiniteWarning, RoundFailedError, Run, is_metric

_ROUNDS_PER_CALL = 256  # at most


def solve(
    problem: Problem,
    clients: Clients,
    algorithm: Algorithm,
    init: Any,
    rounds: int,
    *,
    cohort: int | Poisson | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    evaluate: Evaluate | None = None,
    evaluate_client: Evaluate | None = None,
    every: int = 1,
    engine: Engine | None = None,
    channel: "Channel | Mapping[str, Channel] | None" = None,
    faults: Faults | None = None,
    clock: Clock | None = None,
    asynchronous: Asynchronous | None = None,
    checkpoint: str | Path | None = None,
    keep_best: str | None = None,
    callbacks: Sequence[Callable[[Run], Any] | Tracker] = (),
    on_nonfinite: str = "stop",
    progress: bool | str | None = None,
) -> Run:
    """Run an algorithm on a problem.

    Arguments:
        problem: `Bilevel`, `Minimax`, `Compositional`, `MultiLevel`, `SingleLevel` or `WeightedNodes`.
        clients: the federation's data.
        algorithm: a method with its hyperparameters, e.g. `rk.FedNest(upper_step=0.01)`.
        init: the start (x, y), pytrees or models (Equinox modules, Flax variables and states); only x for single-level
            problems. Floating-point arrays are optimised, everything else in a model is kept, and results have the same
            structure. Compositional problems also take only x, or (x, None): y then starts at zero. For them a plain
            tuple of two is always (x, y), so pass an x that is such a tuple as (x, None). Weighted nodes take θ, with
            weights 1/K, or (w, θ).
        rounds: the number of rounds.
        cohort: clients per round, drawn uniformly, afresh each round; None: all of them. A mean is over the cohort with
            the clients' weights, Σ p_i v_i / Σ p_i: with unequal weights and a small cohort its expectation is not the
            mean over all clients (in a cohort of one client, weights have no effect). `rk.Poisson(50)`, for private
            runs: each client takes part with the same probability.
        seed: the source of all randomness that a client can see: cohorts, minibatches, lost replies. The same seed
            gives the same run on every engine and after every resume.
        noise_seed: the source of a channel's noise. None, the default: the operating system's entropy, so that nobody
            can draw the noise again; a checkpoint keeps it. A number makes a simulation repeatable, but its noise hides
            nothing, and `Run.notes` says so. Refused over a network.
        evaluate: evaluate(x, y) -> {metric: number}, called at the start, every `every` rounds and at the end; or
            evaluate(x, y, memory), with the clients' memory, one row per client (None if they have none).
        evaluate_client: evaluate_client(client, x, y) -> {metric: number}, compiled and run on every client, where its
            data are. The data are client.test(), client.upper() and client.lower(); client.mean(fn, data) is the mean
            of fn(rows) over all of the client's rows. Or evaluate_client(client, x, y, memory), with the client's
            memory. The history gets the weighted mean over clients under the metric's name, and quantiles under
            name_q0, _q10, _q50, _q90 and _q100. Over a network there are quantiles if five clients or more reply, or if
            every site's policy allows its own numbers to be shown. An evaluation is not part of the method: it does not
            go through the channel, and the ledger does not count it. With `faults`, sites that cannot be reached are
            left out.
        every: rounds between two rows of the history, each with an evaluation. Without `evaluate`, `evaluate_client`
            and callbacks, one compiled call takes many rounds regardless of `every`, and the rows' `seconds` are
            interpolated.
        engine: `Simulation(block=..., debug=...)`, the default, or `Federation()`.
        channel: transforms messages between clients and server, e.g. `rk.chain(rk.clip(1.0), rk.gaussian(1.1))` for all
            exchanges, or {name of an exchange: channel}. None: the plain mean. `rk.private(8, 1e-5)` keeps the run to a
            budget of privacy; it ends before a round that the budget does not allow.
        faults: `rk.Faults(dropout=0.2)`: replies that do not arrive. If fewer than its minimum do, the run ends with
            `rk.RoundFailedError`.
        clock: the clients' speeds, e.g. `rk.Clock(compute=[100.0, 10.0], uplink=1e6)`: the history gets a column
            `clock`, the seconds that the rounds would have taken. With it, `rk.Faults` can leave out late replies. For
            simulations only.
        asynchronous: `rk.Asynchronous(buffer=10)`: clients reply when they are ready, and a round ends after that many
            replies. `cohort` clients then work at the same time. A simulation needs a `clock`.
        checkpoint: a folder. The run is saved there at evaluations, in the background, and a later call with the same
            arguments continues from there, up to the rounds of that call; the result is that of an uninterrupted run.
            The last evaluation is always saved. An earlier one is skipped if saving has taken more than a twentieth of
            the run's time so far, or is still under way. A call with another `evaluate`, `evaluate_client` or
            `keep_best` is refused, because the history would mix two metrics. A function is identified by its code and
            by the values that it reads. Library functions are identified by name; of values that cannot be pickled,
            only the type counts.
        keep_best: a metric; the state where it is best is kept in `Run.best`. Write "+name" if higher is better,
            "-name" if lower is better. Without a sign the name must tell, e.g. "accuracy" or "error_rate".
        callbacks: functions, called with the run so far after every evaluation (one that returns True ends the run),
            and trackers, e.g. `rk.trackers.JsonLines("run.jsonl")`, which get each new row of the history.
        on_nonfinite: "stop": the run ends before the first round that makes a value of the state or of a client's
            memory infinite or NaN, with a warning; `Run.stopped` says where. "warn": the run continues, with a warning.
        progress: show a bar with the metrics and the time left (a string is its title); None: show it if standard error
            is a terminal.

    Ctrl-C ends the run after the rounds under way and returns it as far as it got; a second one stops immediately.
    """
    models = adapt(problem, init)
    measure = measuring(models, evaluate_client)
    job = Job(models.problem, clients, algorithm, models.init, cohort, seed, channel, faults, on_nonfinite, measure)
    job = checked(
        dataclasses.replace(job, noise_seed=noise_seed, clock=clock, asynchronous=asynchronous), rounds, every
    )
    rounds, every = int(rounds), int(every)
    engine = checked_engine(engine)
    functions, trackers = checked_callbacks(callbacks)
    _check_options(evaluate, checkpoint)
    record = Record(models, evaluate, keep_best, measure is not None, every, rounds, noise_seed, bool(functions))
    if isinstance(job.channel, Budgeted):
        check_publishes_nothing(job.channel, measure is not None, record.sees_memory, keep_best)
    if record.sees_memory and not engine.sees_memory and hasattr(algorithm, "memory"):
        raise ValueError(
            "evaluate must be a function of (x, y) here, because the sites of a Federation keep the clients' memory to "
            "themselves; it takes (x, y, memory). Use a Simulation for that."
        )

    begin = time.perf_counter()
    with closing(engine.open(job)) as session:
        lead = session.processes.lead
        session.processes.agree(
            {"rounds": rounds, "every": every, "keep_best": keep_best, "checkpoint": str(checkpoint)}
        )
        record.budget = Budget.of(session, rounds)
        record.start(session.init(), session.clients.n, time.perf_counter() - begin)
        saver = None
        if checkpoint is None:
            record.evaluate(session)
        else:
            saver = _resume(checkpoint, job, session, record, evaluate, evaluate_client)
        given = dataclasses.replace(job, faults=faults)
        settings, notes = _settings(given, engine, session, record), _notes(job.channel, record)
        for note in (*session.notes, *notes):
            logging.getLogger("rookery").info(note)
        with (
            Followers(trackers if lead else [], settings) as followers,
            saver or nullcontext(),
            progress_bar(progress if lead else False, algorithm, (*session.notes, *notes)) as bar,
            interrupts(session.durable) as interrupt,
        ):

            def show() -> None:
                followers.tell(record.rows)
                bar(session.rounds, rounds, _metrics_text(record.rows[-1]))

            _run_rounds(session, record, job.replies, saver, functions, show, interrupt)
            early = session.rounds < record.affordable or interrupt.is_set()
            run = record.run(session, not session.stopped and early)
            run.settings, run.notes = json.loads(json.dumps(settings, default=_as_json)), notes
            if session.stopped is None or not session.stopped.failed:
                run.stopped = None if session.stopped is None else session.stopped.reason
                followers.run = run
        if session.warned is not None:
            warnings.warn(f"{session.warned.reason} The run continued.", NonFiniteWarning, stacklevel=2)
    if session.stopped is not None and session.stopped.failed:
        error = RoundFailedError(session.stopped.reason)
        error.run = run
        raise error
    if run.stopped is not None:
        warnings.warn(_stop_message(run.stopped), NonFiniteWarning, stacklevel=2)
    return run


def _run_rounds(
    session: Session, record: Record, cohort: int, saver: checkpoints.Checkpoint | None,
    functions: Sequence[Callable[[Run], Any]], show: Callable[[], None], interrupt: threading.Event,
) -> None:  # fmt: skip
    """Advance the session to the last round, or until it stops, a callback returns True, or Ctrl-C is pressed."""

    def save() -> None:
        if saver is not None:
            saver.save(record.extra(), record.best, always=session.durable)

    pace = Pace(1 if session.durable else _ROUNDS_PER_CALL)
    ended = False
    show()
    while session.rounds < record.affordable and not session.stopped:
        until = record.every - session.rounds % record.every if record.watched else record.rounds
        count = pace.next(min(until, record.affordable - session.rounds))
        answers = session.processes.gather((count, ended or interrupt.is_set()))
        if any(stop for _, stop in answers):
            break
        count = answers[0][0]
        begin = time.perf_counter()
        costs = session.advance(count)
        jax.block_until_ready(session.state)
        seconds = time.perf_counter() - begin
        pace.took(count, seconds)
        if record.advance(session, costs, cohort, seconds) or (session.durable and costs):
            save()
        show()
        if functions and record.is_due(session.rounds):
            run = record.run(session, interrupted=False)
            ended = session.processes.on_lead(lambda: any([_is_true(function(run)) for function in functions]))
    if record.complete(session):  # Ctrl-C, or a round that was not completed
        save()
        show()
    if saver is not None:
        saver.finish(record.extra(), record.best)


def _check_options(evaluate: Any, checkpoint: Any) -> None:
    if evaluate is not None:
        check_function("evaluate", evaluate, "x, y", "x, y, memory")
    if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(f"checkpoint must be the name of a folder; got {checkpoint!r}.")


def _resume(
    folder: str | Path, job: Job, session: Session, record: Record, evaluate: Any, evaluate_client: Any
) -> checkpoints.Checkpoint:
    """Open the checkpoint and continue from its last round; if there is none, evaluate the start."""
    identity = checkpoints.identity(
        job.algorithm, session.clients, job.start, job.seed, job.cohort, session.fingerprint
    )
    identity |= {
        "keep_best": record.goal and record.goal.signed,
        "evaluate": content.fingerprint(evaluate),
        "evaluate_client": content.fingerprint(evaluate_client),
    }
    saver = checkpoints.Checkpoint(folder, identity, session)
    saved = saver.resume(record.seen(session), record.rounds)
    if saved is None:
        record.evaluate(session)
    else:
        record.restore(session, saved.extra, saved.best)
    return saver


def _settings(job: Job, engine: Engine, session: Session, record: Record) -> dict[str, Any]:
    """Return the settings of a run, for trackers and `Run.settings`."""
    fields: Any = dataclasses.fields(job.algorithm) if dataclasses.is_dataclass(job.algorithm) else ()
    settings = {
        "algorithm": type(job.algorithm).__name__,
        "hyperparameters": {field.name: getattr(job.algorithm, field.name) for field in fields},
        "problem": type(job.problem).__name__,
        "clients": session.clients.n,
        "engine": type(engine).__name__,
    }
    channel = getattr(session, "channel", job.channel)  # a private one is calibrated there
    options = {"channel": None if record.budget is not None else channel, "faults": job.faults}
    options |= {"clock": job.clock, "asynchronous": job.asynchronous}
    settings |= {name: without_address(value) for name, value in options.items() if value is not None}
    cohort = job.cohort if job.chance is None else f"Poisson({job.chance * session.clients.n:g})"
    settings |= {} if record.budget is None else {"privacy": record.budget.settings}
    settings |= {"cohort": cohort, "seed": job.seed, "rounds": record.rounds, "every": record.every}
    return settings | ({} if record.noise_seed is None else {"noise_seed": record.noise_seed})


def _as_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else without_address(value)


def _notes(channel: Any, record: Record) -> tuple[str, ...]:
    notes, seed = [] if record.budget is None else [record.budget.in_words()], record.noise_seed
    if seed is not None and draws_noise(channel):
        notes.append(
            f"The noise comes from a seed and can be drawn again: this run is not private. (noise_seed={seed})"
        )
    return tuple(notes)


def _metrics_text(row: dict[str, Any]) -> str:
    spent = {"ε": row["epsilon"]} if "epsilon" in row else {}
    metrics = {name: value for name, value in row.items() if is_metric(name)}
    return "  ".join(f"{name} {value:.4g}" for name, value in (spent | metrics).items())


def _is_true(answer: Any) -> bool:
    """Return whether a callback returned True, in Python, NumPy or JAX; any other answer is ignored."""
    single = isinstance(answer, bool) or (np.ndim(answer) == 0 and getattr(answer, "dtype", None) == np.dtype(bool))
    return single and bool(answer)


def _stop_message(reason: str) -> str:
    begun = not reason.startswith("before")
    where = "The run stopped there and returns the last finite state." if begun else "No round was run."
    cure = "Smaller steps are the usual cure" if begun else "Check the start and the data, e.g. with rk.check"
    return (
        f"{reason} {where} {cure}; rk.Simulation(debug=True) names the client and the local step; "
        'on_nonfinite="warn" continues.'
    )
