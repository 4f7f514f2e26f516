"""Runs with the clients' memory on the host: the rows of cohorts travel with each compiled call."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base.jaxprs import is_key
from rookery.data.clients import Clients
from rookery.data.cohort import Draw
from rookery.engines import engine
from rookery.engines.simulation import device
from rookery.engines.simulation.memory import fits, readable
from rookery.engines.streaming.cohorts import Cohorts
from rookery.language import ledger
from rookery.language.ledger import Amounts
from rookery.plan.calls import MapCall
from rookery.plan.trace import Carry, Plan

BYTES = 2**23  # of rows that travel with one call, unless one cohort has more
_SHARE = 0.75  # of the device's memory, which the clients' memory, the data and the state may take together


def chosen(traced: engine.Traced, settings: device.Settings) -> bool:
    """Return whether the clients' memory stays on the host; raise ValueError if that is asked for and impossible."""
    rows = jax.tree.leaves(traced.start.made.carry[1:3])
    if settings.memory == "device" or not rows:
        return False
    reason = _reason_against(traced, rows)
    if settings.memory == "host":
        if reason:
            raise ValueError(f'Simulation: memory must be "device" {reason}; got "host".')
        return True
    return jax.default_backend() != "cpu" and not reason and not fits(traced, _SHARE)


def _reason_against(traced: engine.Traced, rows: list[Any]) -> str:
    plan, measure = traced.start, traced.measure
    made = {v for call in plan.body.steps if isinstance(call, MapCall) and call.same_for_all for v in call.outputs}
    if not made.issuperset(jax.tree.leaves(plan.outputs.carry[1:3])):
        return f"for {type(traced.job.algorithm).__name__}, which computes in init what each client remembers"
    if any(is_key(row) for row in rows):
        return "for clients that remember random keys"
    if measure is not None:
        read = {v for call in measure.body.of(MapCall) for v in call.local}
        if not read.isdisjoint(jax.tree.leaves(measure.inputs.carry.memory)):
            return "with an evaluate_client that reads what clients remember (evaluate may)"
    return ""


class Session(device.Session):
    """A run with the clients' memory on the host. Results equal those with the memory on the device."""

    def __init__(self, traced: engine.Traced, settings: device.Settings) -> None:
        rows = traced.start.made.carry[1:3]
        job, whole = traced.job, ledger.nbytes(jax.tree.leaves(rows))
        of_cohort = -(-whole // job.clients.n) * job.cohort
        self._rounds_per_call = max(1, min(device.ROUNDS_AT_ONCE, BYTES // of_cohort))
        self._capacity = min(job.clients.n, self._rounds_per_call * job.cohort)  # clients whose rows travel together
        super().__init__(traced, settings, remembered=-(-whole // job.clients.n) * self._capacity)
        self._cohorts = Cohorts(traced.seed, job.clients.n, job.draw, self._rounds_per_call)
        if settings.memory == "auto":
            self.notes = [*self.notes, f"What clients remember ({readable(whole)}) stays on the host."]

    def init(self) -> Amounts:
        """See `engine.Session.init`."""
        cost = super().init()
        everyone = lambda a: np.repeat(np.asarray(a), self._data.n, axis=0)
        self._carry = _with_rows(self._carry, jax.tree.map(everyone, _rows(self._carry)))
        return cost

    def _program(
        self, name: str, of: Plan, function: Callable[..., Any], *fixed: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        if name == "start":
            name, function = "start with a row", _start
        return super()._program(name, of, function, *fixed, donate=donate)

    def advance(self, rounds: int) -> list[Amounts]:
        """See `engine.Session.advance`."""
        traced, job, cohorts = self._traced, self._job, self._cohorts
        fixed = job.draw, job.minimum, self._rounds_per_call, device.together()
        program = engine.PROGRAMS.find(
            ("rounds with rows", traced.round.identity, engine.shapes(self._data), self._block, self._capacity, *fixed),
            lambda: engine.compiled(
                traced.round, partial(_advance, Program(traced.round, self._data, self._block), *fixed),
                donate_argnums=3,
            ),
        )  # fmt: skip
        cohorts.noise = np.asarray(self._carry.noise) if job.draw.secret else ()
        done: list[Amounts] = []
        while len(done) < rounds and self.stopped is None:
            count = min(rounds - len(done), self._rounds_per_call)
            cohorts.restart(self.rounds)
            cohorts.reach(self.rounds + 1)
            clients = np.unique(cohorts(self.rounds)[:count])
            here = np.full(self._capacity, job.clients.n, np.int32)  # places without a client come last
            here[: len(clients)] = clients
            on_host = _rows(self._carry)
            carry = _with_rows(self._carry, jax.tree.map(partial(_taken, here, len(clients)), on_host))
            strict = job.on_nonfinite == "stop"
            with self._explained():
                carry, reports = program(
                    traced.round.consts, self._data, traced.hyper, carry, self.rounds, count, strict, traced.seed, here
                )
                reports = jax.device_get(reports)
            for whole, rows in zip(jax.tree.leaves(on_host), jax.tree.leaves(_rows(carry)), strict=True):
                whole[clients] = np.asarray(rows)[: len(clients)]
            self._carry = _with_rows(carry, on_host)
            done += self._completed(reports, count)
        return done


def _rows(carry: Carry) -> Any:
    return carry.memory, carry.client


def _with_rows(carry: Carry, rows: Any) -> Carry:
    return carry._replace(memory=rows[0], client=rows[1])


def _start(*args: Any) -> tuple[Carry, Any]:
    """See `device.start`. Keeps only the rows of the first client, because all clients begin with the same."""
    carry, report = device.start(*args)
    return _with_rows(carry, jax.tree.map(lambda a: a[:1], _rows(carry))), report


def _taken(here: np.ndarray, count: int, whole: np.ndarray) -> np.ndarray:
    """The rows of the first `count` clients in `here`, in an array with a place for each."""
    rows = np.zeros((len(here), *whole.shape[1:]), whole.dtype)
    rows[:count] = whole[here[:count]]
    return rows


class Program(device.Program):
    """A plan interpreted with the rows of some clients only: those in `clients`, in ascending order."""

    clients: Any

    def rows(self, ids: Any, n: int, value: Any) -> Any:
        where = jnp.searchsorted(self.clients, ids)
        return jax.tree.map(lambda a: a[where], value)

    def put(self, ids: Any, n: int, value: Any, rows: Any) -> Any:
        where = jnp.searchsorted(self.clients, ids)
        return jax.tree.map(lambda a, new: a.at[where].set(new), value, rows)


def _advance(
    program: Program, draw: Draw, minimum: int, limit: int, together: int, consts: Any, clients: Clients, hyper: Any,
    carry: Carry, begin: Any, rounds: Any, strict: Any, seed: Array, here: Array,
) -> Any:  # fmt: skip
    """See `device.advance`. `here`: the clients whose rows the carry has."""
    program = copy.copy(program)
    program.clients = here
    return device.advance(
        program, draw, minimum, limit, together, consts, clients, hyper, carry, begin, rounds, strict, seed
    )
