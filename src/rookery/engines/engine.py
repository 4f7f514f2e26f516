"""What the engines share: the job, the session, the keys of a round, and the cache of compiled programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import urandom
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import compat, convolutions, draws, jaxprs
from rookery.base.printable import first_few
from rookery.base.processes import Processes
from rookery.base.programs import Programs
from rookery.data.clients import Clients
from rookery.data.cohort import Draw
from rookery.engines.checkpoints import Keepers
from rookery.engines.checks import check_features, check_means, check_measure, check_whole_batches
from rookery.engines.folders import ByClient
from rookery.language import channel as channels
from rookery.language import hyperparameters
from rookery.language.asynchronous import Asynchronous
from rookery.language.clock import Clock
from rookery.language.ledger import Amounts
from rookery.plan import asynchrony
from rookery.plan import trace as plan
from rookery.plan.computing import AS_IT_IS, Computing
from rookery.plan.costs import bytes_down, counted_loops
from rookery.plan.trace import Carry, Plan, Setting
from rookery.problems.problems import Problem


@dataclass(frozen=True, eq=False)
class Job:
    """A problem to solve, and how to solve it."""

    problem: Problem
    clients: Clients
    algorithm: Any
    start: tuple[Any, Any]  # x and y
    cohort: Any  # clients per round; with Poisson sampling, the places for them
    seed: int = 0
    channel: Any = None
    faults: channels.Faults | None = None
    on_nonfinite: str = "stop"  # or "warn"
    measure: Any = None  # measure(client, x, y, memory) -> {name: number}, for `Session.measure`
    computing: Computing = AS_IT_IS  # precision and rematerialisation
    noise_seed: int | None = None  # of a channel's noise; None: the operating system's entropy
    chance: float | None = None  # of a client to be in a Poisson cohort; None: cohorts of a fixed size
    clock: Clock | None = None
    asynchronous: Asynchronous | None = None

    @property
    def replies(self) -> int:
        """The clients that reply in a round; with Poisson sampling, the places for them."""
        return self.cohort if self.asynchronous is None else self.asynchronous.buffer

    @property
    def minimum(self) -> int:
        """The replies that an exchange needs. How many clients a Poisson cohort has is secret, so it needs none."""
        if self.asynchronous is not None:
            return 1
        return 0 if self.faults is None or self.chance is not None else self.faults.minimum

    @property
    def draw(self) -> Draw:
        """How cohorts are drawn."""
        return Draw(self.cohort, self.chance, channels.is_private(self.channel))


class Stopped(NamedTuple):
    """Why a session could not go on after `round` rounds."""

    round: int
    reason: str
    failed: bool  # too few replies; otherwise a value that is not finite


class Session(Protocol):
    """A run on an engine, between two rounds."""

    processes: Processes  # the processes that run it together
    clients: Clients  # the job's, with what the engine has learnt about their data
    durable: bool  # whether a checkpoint is written after every round, because others depend on it
    shows_each: bool  # whether results may show the evaluation of a single client
    rounds: int  # done so far
    state: Any  # the algorithm's; valid until the next `advance`
    memory: Any  # what the clients remember, one row for each, where the engine sees it; else None
    fingerprint: str  # of the program
    stopped: Stopped | None  # set once the run could not go on
    warned: Stopped | None  # set once a value was not finite and the run went on
    keepers: Keepers | None  # hold memory that `save` does not return, and save it themselves
    notes: Sequence[str]  # messages for the user before the first round
    channel: Any  # the job's; a private one is calibrated
    account: Any  # of a private run; else None

    def init(self) -> Amounts:
        """Compute the state before the first round, and return its cost."""

    def advance(self, rounds: int) -> list[Amounts]:
        """Compute this many rounds, or fewer if the run has to stop, and return the cost of each."""

    def measure(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Evaluate the job's `measure`: a number for each client by name, and which clients replied.

        It advances no round, and its cost is not counted.
        """

    def save(self) -> Any:
        """Return all that `restore` needs except what the keepers hold: a pytree of arrays, valid until `advance`."""

    def by_client(self) -> ByClient | None:
        """Return which arrays of `save` have a row for each client, and which rows have changed since the last call.

        None: no array has, or everything must be written each time. `restore` counts as a call.
        """

    def restore(self, saved: Any, rounds: int) -> None:
        """Continue from what `save` returned after that many rounds."""

    def close(self) -> None:
        """Release the engine's resources."""


class Engine(Protocol):
    """An interpreter of plans."""

    sees_memory: bool  # whether a session shows what the clients remember

    def open(self, job: Job) -> Session:
        """Open a session for this job."""


class RoundKeys(NamedTuple):
    """What a round derives from the seed."""

    ids: Array  # the cohort
    key: Array  # the algorithm's
    chance: Array  # decides which replies get lost
    present: Any = ()  # with Poisson sampling: which of `ids` are in the cohort


# Separate streams of random numbers: of lost replies, of a `noise_seed` (which may equal the seed), of evaluations, and
# of cohorts that the server keeps secret.
_CHANCE, _NOISE, _MEASURE, _SECRET = 0x70726976, 0x6E6F6973, 0x6D656173, 0x73656372


def start_keys(seed: Array, n: int) -> RoundKeys:
    """The keys of `init`, in which all clients take part."""
    chance = jax.random.fold_in(jax.random.fold_in(seed, _CHANCE), 0)
    return RoundKeys(jnp.arange(n, dtype=jnp.int32), jax.random.fold_in(seed, 0), chance)


def measure_keys(seed: Array, t: Any, n: int) -> RoundKeys:
    """The keys of an evaluation on all clients after t rounds."""
    key = jax.random.fold_in(jax.random.fold_in(seed, _MEASURE), t)
    return RoundKeys(jnp.arange(n, dtype=jnp.int32), key, key)


def choice_and_key(seed: Array, t: Any) -> Array:
    """Two keys of round t, counted from 0: one that draws its clients, and the algorithm's."""
    return jax.random.split(jax.random.fold_in(seed, t + 1))


def round_keys(seed: Array, t: Any, n: int, draw: Draw | int, noise: Any = ()) -> RoundKeys:
    """The keys of round t, counted from 0. `draw`: a cohort's size, or how it is drawn. `noise`: see `noise_root`."""
    draw = draw if isinstance(draw, Draw) else Draw(draw)
    choice, key = choice_and_key(seed, t)
    chance = jax.random.fold_in(choice, _CHANCE)
    if draw.secret:
        choice = jax.random.fold_in(jax.random.fold_in(plan.noise_key(noise), _SECRET), t)
    ids, present = draw(choice, n)
    return RoundKeys(ids, key, chance, () if present is None else present)


def noise_root(job: Job) -> Any:
    """The two words from which the server draws a channel's noise; () without a channel.

    They come from the operating system, so that nothing a client sees, the seed included, leads to them. They are part
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
            f"noise_seed must match the checkpoint's noise, which comes from another source; got {job.noise_seed}. "
            "Leave noise_seed out to continue with the checkpoint's noise, or give another folder."
        )


@dataclass(frozen=True, eq=False)
class Traced:
    """A job's plans: of the start, of a round, and of an evaluation."""

    job: Job
    setting: Setting
    hyper: dict[str, Any]
    start: Plan
    round: Plan
    measure: Any  # a plan, or None without an evaluation
    seed: Array
    noise: Any  # see `noise_root`

    @cached_property
    def account(self) -> Any:
        """The privacy account of the run; None without a private channel."""
        channel = self.job.channel
        return channel.account(self.start, self.round, self.setting) if hasattr(channel, "account") else None

    @property
    def notes(self) -> list[str]:
        """Messages for the user before the first round."""
        late, clients = self.round.unheard, self.job.clients
        if not late:
            return []
        return [
            f"{len(late)} of {clients.n} clients are always too late for an exchange, so that it leaves out their "
            f"data: {first_few([clients.names[i] for i in late])}."
        ]

    @property
    def fingerprint(self) -> str:
        """A digest of the plans of the start and of a round, of their constants, and of the weight of late replies."""
        late = [] if self.job.asynchronous is None else [repr(self.job.asynchronous)]
        plans = self.start, self.round
        return jaxprs.digest(*(p.fingerprint for p in plans), *(const for p in plans for const in p.consts), *late)


def traced(job: Job, debug: bool = False, convolve: str = "auto", shapes: Clients | None = None) -> Traced:
    """Trace a job's plans and check what only a trace shows.

    `shapes`: the shapes of the clients' data as the worker sees them.
    """
    if shapes is None and job.clients.here is not None:
        raise ValueError(
            f"This process holds the data of {len(job.clients.here)} of the {job.clients.n} clients, and other "
            'processes hold the rest. Give engine=rk.Simulation(mesh="all").'
        )
    split = hyperparameters.split(job.algorithm)
    as_products = convolutions.chosen(convolve)
    clients, late = job.clients if shapes is None else shapes, job.asynchronous is not None
    setting = Setting(
        job.computing(job.problem), clients, split.fixed, job.replies, job.channel, job.faults, debug, as_products,
        job.chance, None if job.clock is None or late else job.clock.at(job.clients), late,
    )  # fmt: skip
    hyper = plan.with_levels(job.channel, split.traced)
    start, one_round, *more = plan.plans(setting, job.start, hyper, job.measure)
    if setting.clock is not None:  # only a plan says what clients are sent
        setting = setting._replace(clock=setting.clock._replace(down=(bytes_down(start), bytes_down(one_round))))
        start, one_round, *more = plan.plans(setting, job.start, hyper, job.measure)
    job, setting = replace(job, channel=one_round.channel), setting._replace(channel=one_round.channel)
    hyper = plan.with_levels(job.channel, hyper)  # calibrated
    measure = more[0] if more else None
    if job.asynchronous is not None:
        asynchrony.check(one_round, job.asynchronous)
    for traced_plan in (start, one_round):
        counted_loops(traced_plan.body)  # raises for nested loops that engines can't count
    names = start.sample_by_sample | one_round.sample_by_sample
    check_whole_batches(job.problem, names if measure is None else names | measure.sample_by_sample)
    if job.clients.held:  # otherwise the sites check their own data
        check_features(job.problem, job.clients, job.start[0])
        check_means(job.problem, job.clients, *job.start, names)
    if job.clients.held and measure is not None and "mean" in measure.sample_by_sample:
        check_measure(job.problem, job.clients, job.measure, job.start, start.made.carry.memory)
    seed, noise = draws.seed_key(job.seed), noise_root(job)
    return Traced(job, setting, hyper, start, one_round, measure, seed, noise)


PROGRAMS = Programs(most=64)


def shapes(value: Any) -> Any:
    """The structure, shapes and types of a pytree."""
    leaves, structure = jax.tree.flatten(value)
    return structure, tuple((a.shape, a.dtype) for a in leaves)


def compiled(of: Plan, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` of a function that runs this plan.

    On a GPU each hash of a random key becomes one kernel call. JAX's default writes out a hundred operations for each
    hash, and compiling those takes a third of the compiler's time. The kernel stores what it draws, so plans that draw
    many numbers in one call keep the default, which stores nothing.
    """
    quick = compat.cpu_options() if jax.default_backend() == "cpu" else None
    program, by_kernel = jax.jit(function, compiler_options=quick, **options), compat.keys_by_kernel()
    if jax.default_backend() != "gpu" or by_kernel is None or jaxprs.largest_draw(of.jaxpr) > _DRAWN_BY_KERNEL:
        return program

    def run(*args: Any) -> Any:
        with by_kernel(True):
            return program(*args)

    return run


_DRAWN_BY_KERNEL = 2**14  # numbers of one draw


def where_not_finite(carry: Carry, finite: Any) -> str:
    """The name of the first leaf of a carry that is not finite; `finite` has a flag for each of its real leaves."""
    named = {"state": carry.state, "what a client remembers": carry.memory}
    flags = iter(np.asarray(finite).tolist())
    for name, part in named.items():
        for path, _ in real_leaves(part):
            if not next(flags):
                shown = jax.tree_util.keystr(path).removeprefix(".")
                return shown if name == "state" else f"{name} ({shown or 'the array itself'})"
    return "a value"


def real_leaves(value: Any) -> list[tuple[Any, Any]]:
    """The leaves of real or complex numbers, with their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return [(path, leaf) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def too_few(t: int, least: int, minimum: int) -> Stopped:
    """Why round t failed: an exchange got too few replies."""
    return Stopped(
        t,
        f"round {t + 1}: an exchange got {least} replies with a weight above 0, and needs {minimum}.",
        failed=True,
    )


def not_finite(t: int, where: str) -> Stopped:
    """Why round t diverged; -1 is the start."""
    when = f"round {t + 1}" if t >= 0 else "before the first round"
    return Stopped(max(t, 0), f"{when}: {where} is not finite.", failed=False)
