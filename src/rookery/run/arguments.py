"""Validate the arguments that `solve`, `session`, `tune` and `explain` share."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rookery.base.arguments import check_seed
from rookery.channels.private import Budgeted
from rookery.data.cohort import Draw, Poisson
from rookery.engines import default_engine
from rookery.engines.checks import check_function, check_run, start_values
from rookery.engines.engine import Job
from rookery.language.asynchronous import Asynchronous
from rookery.language.channel import Faults, check_kind, is_private, rules
from rookery.language.clock import Clock
from rookery.run.progress import Tracker
from rookery.run.result import Run


def checked(job: Job, rounds: int = 0, every: int = 1) -> Job:
    """Return the job with its start as arrays and its cohort as a number; raise at the first wrong argument.

    Arguments:
        job: with `start` and `cohort` as the user gave them: `init`, and None for all clients.
    """
    check_kind(job.channel)
    if job.faults is not None and not isinstance(job.faults, Faults):
        raise TypeError(f"faults must be rk.Faults(dropout=...) or None; got {job.faults!r}.")
    _check_clock(job)
    x, y = start_values(job.problem, job.clients, job.start)
    wanted, sampling = job.cohort, None
    if isinstance(job.cohort, Poisson):
        sampling = _checked_sampling(job)
        wanted = sampling.places
    cohort = check_run(job.problem, job.clients, job.algorithm, x, y, rounds, wanted, every, job.seed)
    if isinstance(job.channel, Budgeted) and job.channel.rounds is None and job.channel.noise is None and rounds:
        job = replace(job, channel=replace(job.channel, rounds=int(rounds)))
    if job.faults is not None and job.faults.minimum > cohort:
        raise ValueError(f"faults: minimum must be at most the cohort of {cohort} clients; got {job.faults.minimum}.")
    job = _checked_lies(job, cohort)
    if job.noise_seed is not None:
        check_seed(job.noise_seed, "noise_seed")
        if job.channel is None:
            raise ValueError("noise_seed needs a channel that draws noise, such as rk.gaussian; got channel=None.")
    if job.on_nonfinite not in ("stop", "warn"):
        raise ValueError(f'on_nonfinite must be "stop" or "warn"; got {job.on_nonfinite!r}.')
    _check_asynchronous(job, cohort)
    chance = None if sampling is None else sampling.chance
    return replace(job, start=(x, y), cohort=cohort, chance=chance, seed=int(job.seed))


def _check_clock(job: Job) -> None:
    if job.clock is not None and not isinstance(job.clock, Clock):
        raise TypeError(f"clock must be rk.Clock(...) or None; got {job.clock!r}.")
    if job.clock is not None and is_private(job.channel):
        raise ValueError(
            "clock must be None in a private run, because the seconds would reveal who takes part, and other clients "
            "would decide whose replies are in time. Leave out the clock, or rk.private."
        )
    late = {} if job.faults is None else {"deadline": job.faults.deadline, "first": job.faults.first}
    for name, value in late.items():
        if value is not None and job.clock is None:
            raise ValueError(f"faults: {name} needs the speeds of clients; got clock=None. Give clock=rk.Clock(...).")


def _check_asynchronous(job: Job, cohort: int) -> None:
    how = job.asynchronous
    if how is None:
        return
    if not isinstance(how, Asynchronous):
        raise TypeError(f"asynchronous must be rk.Asynchronous(buffer=...) or None; got {how!r}.")
    if how.buffer > cohort:
        raise ValueError(
            f"asynchronous: buffer must be at most the {cohort} clients that work at the same time; got {how.buffer}. "
            "Choose a smaller buffer, or a larger cohort."
        )
    if job.faults is not None:
        raise ValueError(
            f"faults must be None in an asynchronous run, where late replies count; got {job.faults!r}. Leave out one "
            "of the two."
        )
    if hasattr(job.channel, "calibrated"):
        raise ValueError(
            "asynchronous must be None in a private run, whose privacy account assumes rounds with a cohort; "
            f"got {how!r}. Leave it out, or rk.private."
        )
    for needed in {"all clients", "synchronous rounds"} & set(getattr(job.algorithm, "needs", ())):
        raise ValueError(
            f"asynchronous must be None for {type(job.algorithm).__name__}, which needs {needed}; got {how!r}. Leave "
            "it out, or choose another method."
        )


def _checked_sampling(job: Job) -> Draw:
    n = job.clients.n
    if not is_private(job.channel):
        raise ValueError(f"cohort must be a number, except with channel=rk.private(...); got {job.cohort!r}.")
    if job.cohort.expected >= n:
        raise ValueError(
            f"cohort must be rk.Poisson of less than {n}, the number of clients; got {job.cohort!r}. For all of them, "
            "leave cohort out."
        )
    if "all clients" in getattr(job.algorithm, "needs", ()):
        name = type(job.algorithm).__name__
        raise ValueError(f"{name} needs all {n} clients in every round; got cohort={job.cohort!r}. Leave cohort out.")
    return Draw.poisson(job.cohort, n)


def _checked_lies(job: Job, cohort: int) -> Job:
    """Return the job with attackers' data flipped, and with the replies that its robust means need as the minimum."""
    faults = Faults() if job.faults is None else job.faults
    attack: Any = faults.attack
    if attack is not None:
        attack.check(job.clients.n)
        if hasattr(job.channel, "calibrated"):
            raise ValueError(
                "faults: attack must be None in a private run, whose privacy account assumes that clients clip; "
                f"got {attack!r}. Leave out the attack, or rk.private."
            )
    if hasattr(attack, "poisoned"):
        faults = replace(faults, attack=None)
        job = replace(job, clients=attack.poisoned(job.clients), faults=faults)
    needed = [rule.check_cohort(cohort) for rule in rules(job.channel)]
    if job.faults is not None and needed:
        job = replace(job, faults=replace(faults, minimum=max(faults.minimum, *needed)))
    return job


def check_publishes_nothing(channel: Budgeted, measures: bool, sees_memory: bool, keep_best: str | None) -> None:
    """Raise ValueError if an evaluation of a private run would use the clients' data."""
    if measures:
        raise ValueError(
            "evaluate_client must be left out of a private run: its results come from the clients' data, without "
            "noise. Give evaluate=..., on public data."
        )
    if channel.unit == "client" and sees_memory:
        raise ValueError(
            "evaluate must be a function of (x, y) in a private run: the clients' memory is not private. It takes (x, "
            "y, memory)."
        )
    if keep_best is not None:
        raise ValueError(
            "keep_best must be left out of a private run, because choosing by a metric can reveal what it was computed "
            f"from; got {keep_best!r}. Use the last state, or choose among the states of a callback by public data."
        )


def checked_engine(engine: Any) -> Any:
    """Return the engine, or the default one for None; raise TypeError if it is not an engine."""
    engine = default_engine() if engine is None else engine
    if isinstance(engine, type) or not hasattr(engine, "open"):
        raise TypeError(f"engine must be rk.Simulation(...) or rk.Federation(); got {engine!r}.")
    return engine


def checked_callbacks(callbacks: Any) -> tuple[list[Callable[[Run], Any]], list[Tracker]]:
    """Return the functions and the trackers among the callbacks; raise TypeError if there is anything else."""
    wanted = 'a list of functions and of trackers such as rk.trackers.JsonLines("run.jsonl")'
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be {wanted}; got {callbacks!r}.")
    functions, trackers = [], []
    for callback in list(callbacks):
        if isinstance(callback, type) and isinstance(callback, Tracker):
            raise TypeError(f"callbacks must be {wanted}; it holds the class {callback.__name__} itself.")
        if isinstance(callback, Tracker):
            trackers.append(callback)
        elif callable(callback):
            check_function("a callback", callback, "run")
            functions.append(callback)
        else:
            raise TypeError(f"callbacks must be {wanted}; it holds {callback!r}.")
    return functions, trackers
