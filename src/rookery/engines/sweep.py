"""Many candidates of one algorithm side by side: the interpreted round, vmapped over hyperparameters."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from rookery.clients import Clients
from rookery.engines import engine, fetched, simulation
from rookery.engines.engine import Job
from rookery.engines.simulation import Program
from rookery.plan import Carry

Values = dict[str, tuple[float, ...]]  # for each hyperparameter that differs, one number for each candidate


class Sweep:
    """A job for several values of its floats. They see the same cohorts and the same minibatches."""

    def __init__(self, job: Job, searched: set[str]) -> None:
        self._data: Any = job.clients
        self._block: int | str = "auto"
        if job.clients.placement == "host":
            self._traced, self._data, self._block = fetched.prepared(job, "auto")
        else:
            self._traced = engine.traced(job)
        self._rest = {name: value for name, value in self._traced.hyper.items() if name not in searched}
        self._job, self._searched = job, tuple(sorted(searched))

    def start(self, values: Values) -> Carry:
        """Every candidate before its first round; what the values do not change is computed once."""
        traced, data = self._traced, self._data
        program = engine.PROGRAMS.find(
            ("sweep start", traced.start.identity, simulation.shapes(data), self._searched),
            lambda: jax.jit(partial(_start_all, Program(traced.start, data, self._block))),
        )
        return program(traced.start.consts, data, self._rest, values, self._job.start, traced.seed)

    def advance(
        self, values: Values, carries: Carry, ids: Any, begin: int, rounds: int
    ) -> tuple[Carry, Bool[Array, " slots"]]:
        """`rounds` more rounds for the candidates in the slots; `carries` is donated. See `_advance_some`."""
        traced, data, cohort = self._traced, self._data, self._job.cohort
        program = engine.PROGRAMS.find(
            ("sweep", traced.round.identity, simulation.shapes(data), cohort, self._searched),
            lambda: jax.jit(partial(_advance_some, Program(traced.round, data, self._block), cohort), donate_argnums=4),
        )
        return program(traced.round.consts, data, self._rest, values, carries, ids, begin, rounds, traced.seed)

    def measure(self, carries: Carry, i: int, t: int) -> Any:
        """What every client makes of candidate i after t rounds: a row for each, by name."""
        traced, data = self._traced, self._data
        program = engine.PROGRAMS.find(
            ("sweep measure", traced.measure.identity, simulation.shapes(data)),
            lambda: jax.jit(partial(_measure_one, Program(traced.measure, data, self._block))),
        )
        return program(traced.measure.consts, data, traced.hyper, carries, i, t, traced.seed)


def _measure_one(
    program: Program, consts: Any, clients: Clients, hyper: Any, carries: Carry, i: Any, t: Any, seed: Array
) -> Any:
    state, memory = jax.tree.map(lambda a: a[i], (carries.state, carries.memory))
    return simulation.measure(program, consts, clients, hyper, Carry((state.x, state.y), memory), t, seed)


def _start_all(
    program: Program, consts: Any, clients: Clients, rest: Any, values: Values, start: Any, seed: Array
) -> Carry:
    one = lambda own: simulation.start(program, consts, clients, rest | own, start, seed)[0]
    return jax.vmap(one)(_stacked(values))


def _advance_some(
    program: Program, cohort: int, consts: Any, clients: Clients, rest: Any, values: Values, carries: Carry,
    ids: Int[Array, " slots"], begin: Any, rounds: Any, seed: Array,
) -> tuple[Carry, Bool[Array, " slots"]]:  # fmt: skip
    """The candidates' carries, and whether the state of each in a slot is finite; an empty slot has a number beyond the
    last.

    A cohort and its minibatches are drawn once for all of them. Which candidates, and how many rounds, may change
    without compiling again.
    """

    def one(value: Any, carry: Carry, t: Any) -> Carry:
        who, own, after, _ = simulation.one_round(program, cohort, consts, clients, rest | value, carry, t, seed)
        return simulation.put(program, clients.n, carry, who, own, after, True)

    values = _stacked(values)
    body = lambda t, held: jax.vmap(one, (0, 0, None))(values, held, t)
    held = jax.tree.map(lambda a: a.at[ids].get(mode="clip"), carries)
    begin = jnp.asarray(begin, jnp.int32)
    held = jax.lax.fori_loop(begin, begin + jnp.asarray(rounds, jnp.int32), body, held)
    finite = [jnp.all(jnp.isfinite(a.reshape(len(ids), -1)), axis=1) for _, a in engine.real_leaves(held.state)]
    carries = jax.tree.map(lambda a, b: a.at[ids].set(b, mode="drop"), carries, held)
    return carries, jnp.all(jnp.stack(finite), axis=0)


def _stacked(values: Values) -> Any:
    """One array for each. Numbers that come in one by one leave float32 what is float32, as in `solve`."""
    return {name: jnp.stack(each) for name, each in values.items()}
