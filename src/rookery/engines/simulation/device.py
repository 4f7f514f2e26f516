"""Simulation on one device: a cohort is vectorised, and many rounds are one compiled program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import convolutions, jaxprs
from rookery.base.arguments import is_integer
from rookery.base.processes import ONE_PROCESS, Processes
from rookery.data.clients import Clients
from rookery.data.cohort import Draw
from rookery.engines import engine
from rookery.engines.engine import Stopped
from rookery.engines.folders import ByClient
from rookery.engines.interpreter import Block, Fitting, Interpreter
from rookery.engines.simulation.memory import ADVICE, MemoryLimitError, memory_estimate, readable
from rookery.language import ledger
from rookery.language.channel import is_private
from rookery.language.ledger import Amounts
from rookery.plan.computing import Computing
from rookery.plan.costs import costs, counted_loops
from rookery.plan.trace import Carry, Given, Plan

ROUNDS_AT_ONCE = 256  # in one compiled call
DRAWN_TOGETHER = 8  # rounds that draw their random numbers in one step


@dataclass(frozen=True)
class Settings:
    """The settings of a simulation; see `rookery.Simulation`."""

    block: int | str = "auto"
    mesh: Any = None
    debug: bool = False
    convolutions: str = "auto"
    precision: str | None = None
    remat: bool = False
    memory: str = "auto"
    device_bytes: int | None = None

    sees_memory = True

    def __post_init__(self) -> None:
        whole = isinstance(self.block, int) and not isinstance(self.block, bool) and self.block >= 1
        if not whole and self.block != "auto":
            raise ValueError(f'Simulation: block must be an integer of at least 1, or "auto"; got {self.block!r}.')
        if not isinstance(self.debug, bool):
            raise ValueError(f"Simulation: debug must be True or False; got {self.debug!r}.")
        if self.memory not in ("auto", "device", "host"):
            raise ValueError(f'Simulation: memory must be "auto", "device" or "host"; got {self.memory!r}.')
        if self.device_bytes is not None and not (is_integer(self.device_bytes) and self.device_bytes >= 0):
            raise ValueError(
                f"Simulation: device_bytes must be an integer of at least 0, or None; got {self.device_bytes!r}."
            )
        if self.memory == "host" and (self.mesh is not None or self.debug):
            other = "debug=True" if self.debug else f"mesh={self.mesh!r}"
            raise ValueError(f'Simulation: memory must be "device" with {other}; got "host". Leave out one of the two.')
        convolutions.check(self.convolutions, "Simulation")
        self.computing.check("Simulation")
        if self.mesh is not None and self.debug:
            raise ValueError("Simulation: mesh must be None with debug=True, which runs on one device. Leave mesh out.")

    @property
    def computing(self) -> Computing:
        """How losses are computed."""
        return Computing(self.precision, self.remat)


class Session:
    """A run in this process: an `engine.Session`."""

    processes: Processes = ONE_PROCESS
    keepers = None
    durable = False
    shows_each = True

    def __init__(
        self, traced: engine.Traced, simulation: Settings, devices: int = 1, remembered: int | None = None,
        rows: int = 0,
    ) -> None:  # fmt: skip
        self._traced, self._job = traced, traced.job
        self._data = traced.job.clients.without_names()
        self.clients = traced.job.clients
        self.rounds = 0
        self.stopped: Stopped | None = None
        self.warned: Stopped | None = None
        self._carry: Any = None
        self._changed: np.ndarray | None = None  # for each client, whether its memory has changed since `by_client`
        self._memory_estimate = memory_estimate(traced, devices, self.processes, remembered, rows)
        auto = simulation.block == "auto"
        self._block: Block = Fitting(self._memory_estimate.side_by_side) if auto else simulation.block
        memory = self._memory_estimate.notes(-(-self._job.cohort // devices)) if auto else []
        self.notes = [*traced.notes, *memory]

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the program and its constants."""
        return self._traced.fingerprint

    @property
    def channel(self) -> Any:
        """See `engine.Session`."""
        return self._job.channel

    @property
    def account(self) -> Any:
        """See `engine.Session`."""
        return self._traced.account

    @property
    def state(self) -> Any:
        """The algorithm's state. The next `advance` donates its buffers, and those of `memory`."""
        return self._carry.state

    @property
    def memory(self) -> Any:
        """What the clients remember, one row for each."""
        return self._carry.memory

    def _program(
        self, name: str, of: Plan, function: Callable[..., Any], *fixed: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        """The compiled function(program, *fixed, ...), from the cache if it is there."""
        return engine.PROGRAMS.find(
            (name, of.identity, engine.shapes(self._data), self._block, *fixed),
            lambda: engine.compiled(
                of, partial(function, Program(of, self._data, self._block), *fixed), donate_argnums=donate
            ),
        )

    def init(self) -> Amounts:
        traced = self._traced
        program = self._program("start", traced.start, start)
        with self._explained():
            self._carry, report = program(
                traced.start.consts, self._data, traced.hyper, traced.job.start, traced.seed, traced.noise
            )
            report = jax.device_get(report)
        if not report["finite"].all():
            reason = engine.not_finite(-1, engine.where_not_finite(self._carry, report["finite"]))
            if self._job.on_nonfinite == "stop":
                self.stopped = reason
            else:
                self.warned = reason
        return amounts(traced.start, report)

    def advance(self, rounds: int) -> list[Amounts]:
        of, job = self._traced.round, self._job
        fixed = job.draw, job.minimum, ROUNDS_AT_ONCE, together()
        return self._advanced(rounds, self._program("rounds", of, advance, *fixed, donate=(3,)), of, self._data)

    def _advanced(self, rounds: int, program: Any, of: Plan, data: Any) -> list[Amounts]:
        """Compute rounds with this program of at most ROUNDS_AT_ONCE of them, for this plan and these clients."""
        traced, strict = self._traced, self._job.on_nonfinite == "stop"
        done: list[Amounts] = []
        while len(done) < rounds and self.stopped is None:
            count = min(rounds - len(done), ROUNDS_AT_ONCE)
            with self._explained():
                self._carry, reports = program(
                    of.consts, data, traced.hyper, self._carry, self.rounds, count, strict, traced.seed
                )
                reports = jax.device_get(reports)
            done += self._completed(reports, count)
        return done

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a device's out-of-memory error into one that says what needs how much memory, and what helps."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            block: Any = self._block.fit if isinstance(self._block, Fitting) else self._block
            estimate = self._memory_estimate
            raise MemoryLimitError(
                f"The device, which has {readable(estimate.limit)}, is out of memory. "
                f"{estimate.sizes(min(self._job.cohort, block))} {ADVICE}"
            ) from error

    def _completed(self, reports: Any, count: int) -> list[Amounts]:
        """Take note of the rounds that were completed, and return the cost of each."""
        costs = []
        for k in range(count):
            report = jax.tree.map(lambda a: a[k], reports)
            if report["least"] < self._job.minimum:
                self.stopped = engine.too_few(self.rounds, int(report["least"]), self._job.minimum)
                break
            if not report["finite"].all():
                reason = engine.not_finite(self.rounds, engine.where_not_finite(self._carry, report["finite"]))
                if self._job.on_nonfinite == "stop":
                    self.stopped = reason
                    break
                self.warned = self.warned or reason
            costs.append(amounts(self._traced.round, report))
            self._note_changed(report.get("ids", slice(None)))
            self.rounds += 1
        return costs

    def measure(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return self._measured(self._program("measure", self._traced.measure, measure))

    def _measured(self, program: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
        traced, carry = self._traced, self._carry
        iterates = Carry((carry.state.x, carry.state.y), carry.memory)
        values = program(traced.measure.consts, self._data, traced.hyper, iterates, self.rounds, traced.seed)
        return {name: np.asarray(rows) for name, rows in values.items()}, np.ones(self._data.n, bool)

    def save(self) -> Carry:
        return self._carry

    def by_client(self) -> ByClient | None:
        changed, self._changed = self._changed, np.zeros(self._data.n, bool)
        state, rows = (len(jax.tree.leaves(part)) for part in (self._carry.state, self._carry[1:3]))
        return ByClient(range(state, state + rows), None if changed is None else np.flatnonzero(changed))

    def _note_changed(self, ids: Any) -> None:
        if self._changed is not None:
            self._changed[ids] = True

    def restore(self, saved: Any, rounds: int) -> None:
        engine.check_noise(self._job, saved.noise)
        self._carry, self.rounds, self._changed = saved, rounds, np.zeros(self._data.n, bool)

    def close(self) -> None:
        self._carry = None


def amounts(traced: Plan, report: dict[str, Any]) -> Amounts:
    """The cost of a round, from its report."""
    turns = tuple(np.asarray(n) for n in report["turns"])
    key = tuple((n.shape, n.tobytes()) for n in turns)
    cache = traced.derived.setdefault("costs", {})
    if key not in cache:
        if len(cache) > 1000:
            cache.clear()
        cache[key] = costs(traced, turns)
    seconds = float(np.asarray(report["seconds"]).view(np.float32)) if "seconds" in report else None
    return Amounts(cache[key], ledger.as_integers(report["work"]), int(report["missing"]), seconds)


# The compiled programs.


class Program:
    """A plan to be interpreted for data of these shapes. The caller passes the plan's constants."""

    def __init__(self, traced: Plan, clients: Clients, block: Block) -> None:
        self.body, self.made, self.axes = traced.body, jax.tree.structure(traced.made), clients.client_axes()
        self.loops = counted_loops(traced.body)
        self.block = block
        self.private = is_private(traced.channel)

    def __call__(self, consts: list[Any], clients: Clients, given: Given) -> tuple[Any, dict[str, Any]]:
        """The plan's outputs, a `trace.Made`, and the round's report."""
        return self.interpreted(self.interpreter(clients), consts, given)

    def interpreted(self, interpreter: Interpreter, consts: list[Any], given: Given) -> tuple[Any, dict[str, Any]]:
        """The plan's outputs and the round's report, computed by this interpreter."""
        out = interpreter.run(self.body, [*consts, *jax.tree.leaves(given)])
        made = jax.tree.unflatten(self.made, out)
        zero = jnp.int32(0)
        report = {
            "work": interpreter.work,
            "turns": [interpreter.turns[number] for number in self.loops],
            "missing": zero if made.missing is None else made.missing,
            "least": jnp.int32(2**30) if made.least is None else made.least,
        }
        if made.seconds is not None:
            report["seconds"] = jax.lax.bitcast_convert_type(made.seconds, jnp.uint32)
        return made, report

    def interpreter(self, clients: Clients) -> Interpreter:
        """A new interpreter of the plan."""
        return Interpreter(clients, self.axes, self.block)

    def rows(self, ids: Any, n: int, value: Any) -> Any:
        """The cohort's rows of a value with a row for each client."""
        return value if len(ids) == n else jax.tree.map(lambda a: a[ids], value)

    def put(self, ids: Any, n: int, value: Any, rows: Any) -> Any:
        """The inverse of `rows`: the value with the cohort's rows written."""
        return rows if len(ids) == n else jax.tree.map(lambda a, new: a.at[ids].set(new), value, rows)

    def here(self, ids: Any, entries: Any) -> Any:
        """Select, from an entry for each member of the cohort, those of the members on this device."""
        return entries

    def everywhere(self, flags: Any) -> Any:
        """Whether flags are true on all devices."""
        return flags


def start(program: Program, consts: Any, clients: Clients, hyper: Any, start: Any, seed: Array, noise: Any) -> Any:
    """The carry before the first round, and a report."""
    keys = engine.start_keys(seed, clients.n)
    given = Given(start, hyper, jnp.int32(0), keys.ids, clients.weights, keys.key, keys.chance, noise)
    made, report = program(consts, clients, given)
    report["finite"] = program.everywhere(finite(made.carry, program.private))
    return made.carry, report


def measure(program: Program, consts: Any, clients: Clients, hyper: Any, iterates: Carry, t: Any, seed: Array) -> Any:
    """Evaluate all clients after t rounds on x, y and their memory: rows by name."""
    t = jnp.asarray(t, jnp.int32)
    keys = engine.measure_keys(seed, t, clients.n)
    made, _ = program(consts, clients, Given(iterates, hyper, t, keys.ids, clients.weights, keys.key, keys.chance))
    return made.carry.state


def finite(carry: Carry, private: bool) -> Array:
    """For each leaf of the state and, unless the run is private, of the clients' memory: whether it is finite."""
    parts = (carry.state,) if private else (carry.state, carry.memory)
    leaves = [leaf for part in parts for _, leaf in engine.real_leaves(part)]
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]) if leaves else jnp.ones(0, bool)


def one_round(
    program: Program, draw: Draw, consts: Any, clients: Clients, hyper: Any, carry: Carry, t: Any, seed: Array
) -> Any:
    """Compute round t, counted from 0.

    Returns the cohort, the carry before and after the round (of the clients' memory only the cohort's rows), and a
    report.
    """
    keys = engine.round_keys(seed, t, clients.n, draw, carry.noise)
    memory, client = program.rows(keys.ids, clients.n, (carry.memory, carry.client))
    before = carry._replace(memory=memory, client=client)
    t = jnp.asarray(t, jnp.int32)
    given = Given(before, hyper, t, keys.ids, clients.weights, keys.key, keys.chance, present=keys.present)
    made, report = program(consts, clients, given)
    after = made.carry
    if made.stayed is not None:  # clients that missed an exchange keep their earlier memory
        stayed = program.here(keys.ids, made.stayed)
        keep = lambda new, old: jnp.where(stayed.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
        memory, client = jax.tree.map(keep, (after.memory, after.client), (before.memory, before.client))
        after = after._replace(memory=memory, client=client)
    report["finite"] = program.everywhere(finite(after, program.private))
    return keys.ids, before, after, report


def put(program: Program, n: int, carry: Carry, ids: Any, before: Carry, after: Carry, good: Any) -> Carry:
    """The carry with the results of a round; if the round was not good, with its values from before."""
    choose = lambda new, old: jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
    state, server = choose((after.state, after.server), (before.state, before.server))
    rows = choose((after.memory, after.client), (before.memory, before.client))
    memory, client = program.put(ids, n, (carry.memory, carry.client), rows)
    return Carry(state, memory, client, server, carry.noise)


def advance(
    program: Program, draw: Draw, minimum: int, limit: int, together: int, consts: Any, clients: Clients, hyper: Any,
    carry: Carry, begin: Any, rounds: Any, strict: Any, seed: Array,
) -> Any:  # fmt: skip
    """Compute at most `rounds` rounds from round `begin` on, until one is not good; `carry` is donated.

    `together` rounds draw their cohorts, keys and minibatches in one step. With a limit of one round there is no while
    loop, so the host never blocks on its predicate. That round is always computed, and discarded if `rounds` is 0.
    """
    begin = jnp.asarray(begin, jnp.int32)

    def one(i: Any, state: Any) -> Any:
        wanted, carry = state
        ids, before, after, report = one_round(program, draw, consts, clients, hyper, carry, begin + i, seed)
        good = wanted & (report["least"] >= minimum) & (jnp.all(report["finite"]) | ~jnp.asarray(strict))
        if len(ids) < clients.n and jax.tree.leaves((carry.memory, carry.client)):
            report["ids"] = ids
        return (good, put(program, clients.n, carry, ids, before, after, good)), report

    return repeated(one, limit, together, carry, begin, rounds)


def repeated(one: Callable[[Any, Any], Any], limit: int, together: int, carry: Any, begin: Array, rounds: Any) -> Any:
    """The carry after at most `rounds` rounds, until one is not good, and their reports.

    `one(i, (wanted, carry))` returns ((whether the round was good, carry), report).
    """
    rounds = jnp.asarray(rounds, jnp.int32)

    def recorded(progress: Any, result: Any) -> Any:
        (i, _, reports), (state, report) = progress, result
        row = jnp.concatenate([leaf.astype(jnp.uint32).ravel() for leaf in jax.tree.leaves(report)])
        return i + 1, state, reports.at[i].set(row)

    going = lambda progress: (progress[0] < rounds) & progress[1][0]
    state: Any = (rounds > 0, carry)
    turn = jaxprs.LoopBody(one, state)
    state, report = turn.carry, turn.aux
    if together == 1 or limit == 1:
        turn.prune()
        some = lambda progress: recorded(progress, turn(*progress[:2]))
    else:
        ahead = turn.ahead()

        def some(progress: Any) -> Any:
            first = progress[0]
            drawn = ahead(first + jnp.arange(together, dtype=jnp.int32))
            more = lambda progress: going(progress) & (progress[0] < first + together)

            def next_one(progress: Any) -> Any:
                i, state, _ = progress
                return recorded(progress, turn(i, state, [rows[i - first] for rows in drawn]))

            return jax.lax.while_loop(more, next_one, progress)

    leaves, structure = jax.tree.flatten(report)
    progress = (jnp.int32(0), state, jnp.zeros((limit, sum(leaf.size for leaf in leaves)), jnp.uint32))
    _, (_, carry), reports = some(progress) if limit == 1 else jax.lax.while_loop(going, some, progress)
    columns = jnp.split(reports, np.cumsum([leaf.size for leaf in leaves])[:-1].tolist(), axis=1)
    back = [c.reshape(limit, *leaf.shape).astype(leaf.dtype) for c, leaf in zip(columns, leaves, strict=True)]
    return carry, jax.tree.unflatten(structure, back)


def together() -> int:
    """The number of rounds whose draws are one step: one on a CPU, where launching a kernel costs little."""
    return 1 if jax.default_backend() == "cpu" else DRAWN_TOGETHER
