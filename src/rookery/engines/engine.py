"""What the engines share: the job, the session, the keys of a round, and compiled programs found by what they are."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import urandom
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import compat, convolutions, draws, jaxprs
from rookery.base.processes import Processes
from rookery.data.clients import Clients
from rookery.data.cohort import sample_cohort
from rookery.engines.checkpoints import Keepers
from rookery.engines.checks import check_features, check_means, check_measure
from rookery.language import channel as channels
from rookery.language import hyperparameters
from rookery.language.ledger import Amounts
from rookery.plan import trace as plan
from rookery.plan.computing import AS_IT_IS, Computing
from rookery.plan.costs import counted_loops
from rookery.plan.trace import Carry, Plan, Setting
from rookery.problems.problems import Problem


@dataclass(frozen=True, eq=False)
class Job:
    """What is to be solved, and how."""

    problem: Problem
    clients: Clients
    algorithm: Any
    start: tuple[Any, Any]  # x and y
    cohort: Any  # clients per round
    seed: int = 0
    channel: Any = None
    faults: channels.Faults | None = None
    on_nonfinite: str = "stop"  # or "warn"
    measure: Any = None  # measure(client, x, y, memory) -> {name: number}, for `Session.measure`
    computing: Computing = AS_IT_IS  # in which precision, and with how much memory
    noise_seed: int | None = None  # where a channel's noise comes from; None: the operating system's entropy


class Stopped(NamedTuple):
    """Why a session could not go on: the round after `round` rounds was not completed."""

    round: int
    reason: str
    failed: bool  # too few replies; otherwise a value that is not finite


class Session(Protocol):
    """A run on an engine, between two rounds."""

    processes: Processes  # the processes that run it together
    clients: Clients  # the job's, with what the engine has learnt of their data
    durable: bool  # whether every round is saved, where there is a checkpoint: others depend on it
    shows_each: bool  # whether results may show what a single client's evaluation gave
    rounds: int  # done so far
    state: Any  # the algorithm's; valid until the next `advance`
    memory: Any  # what the clients remember, one row for each, where the engine sees it; else None
    fingerprint: str  # of the program
    stopped: Stopped | None  # set once it could not go on
    warned: Stopped | None  # set once a value was not finite, and the run went on all the same
    keepers: Keepers | None  # those who hold memory that `save` does not give, and save it themselves
    notes: Sequence[str]  # what to say before the first round

    def init(self) -> Amounts:
        """The state before the first round, and what it has cost."""

    def advance(self, rounds: int) -> list[Amounts]:
        """That many more rounds, or fewer if it has to stop; what each has cost."""

    def measure(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """What the job's `measure` gives, a number for each client, and which of them replied.

        No round is done, and nothing is counted.
        """

    def save(self) -> Any:
        """All that `restore` needs, but for what the keepers hold: a pytree of arrays, valid until `advance`."""

    def restore(self, saved: Any, rounds: int) -> None:
        """Go on from what `save` gave after that many rounds."""

    def close(self) -> None:
        """Give up what the engine holds."""


class Engine(Protocol):
    """An interpreter of plans."""

    sees_memory: bool  # whether a session shows what the clients remember

    def open(self, job: Job) -> Session:
        """A session for this job."""


class Keys(NamedTuple):
    """What a round derives from the seed: who takes part, the algorithm's key, and which replies get lost."""

    ids: Array
    key: Array
    chance: Array


_CHANCE = 0x70726976  # what tells the stream of lost replies from all others
_NOISE = 0x6E6F6973  # the noise of a `noise_seed`, which may be the same number as the seed,
_MEASURE = 0x6D656173  # and that of evaluations


def start_keys(seed: Array, n: int) -> Keys:
    """Those of `init`, in which everybody takes part."""
    chance = jax.random.fold_in(jax.random.fold_in(seed, _CHANCE), 0)
    return Keys(jnp.arange(n, dtype=jnp.int32), jax.random.fold_in(seed, 0), chance)


def measure_keys(seed: Array, t: Any, n: int) -> Keys:
    """Those of an evaluation after t rounds, of everybody."""
    key = jax.random.fold_in(jax.random.fold_in(seed, _MEASURE), t)
    return Keys(jnp.arange(n, dtype=jnp.int32), key, key)


def round_keys(seed: Array, t: Any, n: int, cohort: int) -> Keys:
    """Those of round t, counted from 0."""
    choice, key = jax.random.split(jax.random.fold_in(seed, t + 1))
    return Keys(sample_cohort(choice, n, cohort), key, jax.random.fold_in(choice, _CHANCE))


def noise_root(job: Job) -> Any:
    """Two words from which the server draws a channel's noise, or () where there is no channel.

    They come from the operating system: nothing that a client sees, the seed included, leads to them. They are a part
    of the carry, so that a checkpoint keeps them.
    """
    if job.channel is None:
        return ()
    if job.noise_seed is None:
        return np.frombuffer(urandom(8), np.uint32)
    return np.asarray(jax.random.key_data(jax.random.fold_in(draws.seed_key(job.noise_seed), _NOISE)))


def check_noise(job: Job, saved: Any) -> None:
    """Raise ValueError if a checkpoint's noise is not that of the job's `noise_seed`."""
    if job.channel is not None and job.noise_seed is not None and not np.array_equal(noise_root(job), saved):
        raise ValueError(
            f"noise_seed={job.noise_seed}: the checkpoint's noise comes from somewhere else, and a run keeps its "
            "noise. Leave noise_seed out to go on with that, or give another folder."
        )


@dataclass(frozen=True, eq=False)
class Traced:
    """A job's plans: of the start, of a round, and of an evaluation."""

    job: Job
    setting: Setting
    hyper: dict[str, Any]
    start: Plan
    round: Plan
    measure: Any  # a plan, or None where nothing is measured
    seed: Array
    noise: Any  # see `noise_root`

    @property
    def fingerprint(self) -> str:
        """Of both plans and their constants."""
        return jaxprs.digest(self.start.fingerprint, self.round.fingerprint, *self.start.consts, *self.round.consts)


def traced(job: Job, debug: bool = False, convolve: str = "auto", seen: Clients | None = None) -> Traced:
    """Trace a job's plans, and check what shows only then. `seen`: the clients' shapes as those see them who work."""
    if seen is None and job.clients.here is not None:
        raise ValueError(
            f"This process holds the data of {len(job.clients.here)} of the {job.clients.n} clients, others hold the "
            'rest: give engine=rk.Simulation(mesh="all").'
        )
    split = hyperparameters.split(job.algorithm)
    as_products = convolutions.chosen(convolve)
    clients = job.clients if seen is None else seen
    setting = Setting(
        job.computing(job.problem), clients, split.fixed, job.cohort, job.channel, job.faults, debug, as_products
    )
    start, one_round, *more = plan.plans(setting, job.start, split.traced, job.measure)
    measure = more[0] if more else None
    for each in (start, one_round):
        counted_loops(each.body)  # which refuses some
    if job.clients.held:  # else those check who hold the data
        check_features(job.problem, job.clients, job.start[0])
        check_means(job.problem, job.clients, *job.start, start.sample_by_sample | one_round.sample_by_sample)
    if job.clients.held and measure is not None and "mean" in measure.sample_by_sample:
        check_measure(job.problem, job.clients, job.measure, job.start, start.made.carry.memory)
    seed, noise = draws.seed_key(job.seed), noise_root(job)
    return Traced(job, setting, split.traced, start, one_round, measure, seed, noise)


class Programs:
    """Compiled programs by what they are, the least recently used of them dropped. Threads may share it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._held: OrderedDict[Any, Any] = OrderedDict()
        self.made = 0  # how many had to be made

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """The program of this key, made if there is none."""
        with self._lock:  # `make` wraps a function; it is compiled when it is first called
            if key not in self._held:
                self.made += 1
                self._held[key] = make()
            self._held.move_to_end(key)
            program = self._held[key]
            while len(self._held) > self._most:
                self._held.popitem(last=False)
            return program

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._held.clear()


PROGRAMS = Programs(most=64)


def compiled(of: Plan, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` of a function that runs this plan.

    On a GPU a hash of JAX's random keys is then a call of one kernel. Written out, as JAX does by itself, each is a
    hundred operations, and with all of them a third of the compiler's time. But the kernel reads and writes arrays of
    what is drawn: plans that draw many numbers at once keep to the other way, in which nothing is stored.
    """
    program, by_kernel = jax.jit(function, **options), compat.keys_by_kernel()
    if jax.default_backend() != "gpu" or by_kernel is None or jaxprs.largest_draw(of.jaxpr) > _DRAWN_BY_KERNEL:
        return program

    def run(*args: Any) -> Any:
        with by_kernel(True):
            return program(*args)

    return run


_DRAWN_BY_KERNEL = 2**14  # numbers of one draw


def where_not_finite(carry: Carry, finite: Any) -> str:
    """The name of the first leaf of a carry that is not finite."""
    named = {"state": carry.state, "what a client remembers": carry.memory}
    flags = iter(np.asarray(finite).tolist())
    for name, part in named.items():
        for path, _ in real_leaves(part):
            if not next(flags):
                shown = jax.tree_util.keystr(path).removeprefix(".")
                return shown if name == "state" else f"{name} ({shown or 'the array itself'})"
    return "a value"


def real_leaves(value: Any) -> list[tuple[Any, Any]]:
    """The leaves that are real numbers, with their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return [(path, leaf) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def too_few(t: int, least: int, minimum: int) -> Stopped:
    """The round failed."""
    return Stopped(
        t,
        f"round {t + 1}: an exchange got {least} replies with a weight above 0, and needs {minimum}.",
        failed=True,
    )


def not_finite(t: int, where: str) -> Stopped:
    """The round diverged."""
    when = f"round {t + 1}" if t >= 0 else "before the first round"
    return Stopped(max(t, 0), f"{when}: {where} is not finite.", failed=False)
