"""Many candidates of one algorithm side by side: a round vmapped over hyperparameters.

A mesh divides the candidates among its devices. Each device holds all clients' data, and the devices do not communicate
during a call.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from rookery.data.clients import Clients
from rookery.data.cohort import Draw
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.simulation import device, division
from rookery.engines.simulation.device import Program, Settings
from rookery.engines.streaming import fetched
from rookery.plan.trace import Carry, Plan

Values = dict[str, tuple[float, ...]]  # for each hyperparameter that differs, one number for each candidate
_AXIS = "candidates"
_ALL, _DIVIDED = PartitionSpec(), PartitionSpec(_AXIS)


class Sweep:
    """A job for several values of its real hyperparameters. All candidates use the same cohorts and minibatches."""

    def __init__(self, job: Job, searched: set[str], settings: Settings | None = None) -> None:
        settings = Settings() if settings is None else settings
        self._mesh = None if settings.mesh is None else _devices(settings.mesh)
        job = replace(job, computing=settings.computing)
        data: Any = job.clients
        block = settings.block
        if data.placement != "device":
            if self._mesh is not None:
                raise ValueError(
                    f'tune: mesh must be None for clients with placement="{data.placement}"; every device of a mesh '
                    "needs all rows. Leave mesh out."
                )
            traced, data, block = fetched.prepared(job, block, convolve=settings.convolutions)
        else:
            traced = engine.traced(job, convolve=settings.convolutions)
        self._rest = {name: value for name, value in traced.hyper.items() if name not in searched}
        self._searched, self._draw, self._block = tuple(sorted(searched)), job.draw, block
        self._minimum = job.minimum
        if self._mesh is not None:
            every, first = NamedSharding(self._mesh, _ALL), self._mesh.devices[0]
            placed = lambda plan, where: replace(plan, consts=jax.device_put(plan.consts, where))
            measure = None if traced.measure is None else placed(traced.measure, first)
            job = replace(job, **jax.device_put({"clients": job.clients, "start": job.start}, every))
            data = job.clients
            plans = {"start": placed(traced.start, every), "round": placed(traced.round, every), "measure": measure}
            traced = replace(traced, **plans)
        self._traced, self._data, self._start = traced, data, job.start

    def even(self, count: int) -> int:
        """Round a number of candidates up to a multiple of the number of devices."""
        devices = 1 if self._mesh is None else self._mesh.size
        return -(-count // devices) * devices

    def start(self, values: Values, count: int) -> Carry:
        """All `count` candidates before their first round. Values that no candidate changes are computed once."""
        traced = self._traced
        program = self._program("sweep start", traced.start, _start_all)
        seeds = traced.seed, traced.noise
        return program(traced.start.consts, self._data, self._rest, values, jnp.arange(count), self._start, *seeds)

    def advance(
        self, values: Values, carries: Carry, ids: Any, begin: int, rounds: int, left: Any = ()
    ) -> tuple[Carry, Bool[Array, " slots"], Bool[Array, " slots"], Any]:
        """Compute `rounds` more rounds for the candidates in the slots; `carries` is donated. See `_advance_some`."""
        traced = self._traced
        program = self._program("sweep", traced.round, _advance_some, self._draw, self._minimum, donate=(4,))
        end = rounds, left, traced.seed
        return program(traced.round.consts, self._data, self._rest, values, carries, ids, begin, *end)

    def candidate(self, carries: Carry, i: int) -> tuple[Any, Any]:
        """The state of candidate i and what its clients remember, on the first device of a mesh."""
        chosen = _one(carries, i)
        return chosen if self._mesh is None else jax.device_put(chosen, self._mesh.devices[0])

    def measure(self, state: Any, memory: Any, t: int) -> Any:
        """Evaluate all clients on a `candidate` after t rounds: rows by name."""
        traced, data = self._traced, self._data
        if self._mesh is not None:
            data = jax.tree.map(lambda a: a.addressable_data(0), data)
        program = engine.PROGRAMS.find(
            ("measure", traced.measure.identity, engine.shapes(data), self._block),
            lambda: jax.jit(partial(device.measure, Program(traced.measure, data, self._block))),
        )
        iterates = Carry((state.x, state.y), memory)
        return program(traced.measure.consts, data, traced.hyper, iterates, t, traced.seed)

    def _program(self, name: str, of: Plan, function: Any, *fixed: Any, donate: tuple[int, ...] = ()) -> Any:
        """The compiled function(program, mesh, *fixed, ...), from the cache if it is there."""
        return engine.PROGRAMS.find(
            (name, of.identity, engine.shapes(self._data), self._searched, self._block, self._mesh, *fixed),
            lambda: engine.compiled(
                of, partial(function, Program(of, self._data, self._block), self._mesh, *fixed), donate_argnums=donate
            ),
        )


def _devices(setting: Any) -> Mesh:
    """The devices of a `mesh` setting, as a mesh with one axis, the candidates."""
    devices = division.mesh_of(setting).devices
    if any(device.process_index != jax.process_index() for device in devices):
        raise ValueError(
            f"tune: mesh must have devices of this process only; got {setting!r}. "
            "Give mesh=jax.sharding.Mesh(jax.local_devices(), 'devices')."
        )
    return Mesh(devices, (_AXIS,))


def _divided(devices: Mesh | None, function: Callable[..., Any], shared: tuple[Any, ...], *each: Any) -> Any:
    """Compute function(*shared, *each), where a device has its part of the values in `each`, one per candidate."""
    if devices is None:
        return function(*shared, *each)
    specs = ((_ALL,) * len(shared), (_DIVIDED,) * len(each))
    local = lambda shared, each: function(*shared, *each)
    return jax.shard_map(local, mesh=devices, in_specs=specs, out_specs=_DIVIDED, check_vma=False)(shared, each)


@jax.jit
def _one(carries: Carry, i: Any) -> tuple[Any, Any]:
    return jax.tree.map(lambda a: a[i], (carries.state, carries.memory))


def _start_all(
    program: Program, devices: Mesh | None, consts: Any, clients: Clients, rest: Any, values: Values,
    slots: Int[Array, " slots"], start: Any, seed: Array, noise: Any,
) -> Carry:  # fmt: skip
    def some(
        consts: Any, clients: Clients, rest: Any, start: Any, seed: Array, noise: Any, values: Any, slots: Array
    ) -> Carry:
        one = lambda value, slot: device.start(program, consts, clients, rest | value, start, seed, noise)[0]
        return jax.vmap(one)(values, slots)

    return _divided(devices, some, (consts, clients, rest, start, seed, noise), _stacked(values), slots)


def _advance_some(
    program: Program, devices: Mesh | None, draw: Draw, minimum: int, consts: Any, clients: Clients, rest: Any,
    values: Values, carries: Carry, ids: Int[Array, " slots"], begin: Any, rounds: Any, left: Any, seed: Array,
) -> tuple[Carry, Bool[Array, " slots"], Bool[Array, " slots"], Any]:  # fmt: skip
    """Advance some candidates. Returns all carries, and by slot whether all rounds were finite and had enough replies.

    `left` has the seconds of the clock that each slot may still use, or it is (). A slot stops before the round
    that would take longer. The last result has by slot the seconds that are left, and how many rounds there were.
    `ids` says which candidate is in a slot; an empty slot has a number beyond the last. The candidates on a device
    share the draws of cohorts and minibatches. Other candidates, or another number of rounds, do not compile again.
    """
    begin, rounds = jnp.asarray(begin, jnp.int32), jnp.asarray(rounds, jnp.int32)

    def some(
        consts: Any, clients: Clients, rest: Any, begin: Any, rounds: Any, seed: Array, values: Any, slots: Any
    ) -> Any:
        def one(value: Any, slot: Any, t: Any) -> Any:
            carry, finite, replied, timed = slot
            traced = program, draw, consts, clients, rest | value
            ids, before, after, report = device.one_round(*traced, carry, t, seed)
            good: Any = True
            if timed:
                left, done = timed
                seconds = jax.lax.bitcast_convert_type(report["seconds"], jnp.float32)
                good = (done == t - begin) & (seconds <= left)
                timed = left - jnp.where(good, seconds, 0), done + good
            carry = device.put(program, clients.n, carry, ids, before, after, good)
            finite &= jnp.all(report["finite"]) | ~jnp.asarray(good)
            return carry, finite, replied & ((report["least"] >= minimum) | ~jnp.asarray(good)), timed

        body = lambda t, slots: jax.vmap(one, (0, 0, None))(values, slots, t)
        return jax.lax.fori_loop(begin, begin + rounds, body, slots)

    fine = jnp.ones(len(ids), bool)
    timed = () if isinstance(left, tuple) else (jnp.asarray(left, jnp.float32), jnp.zeros(len(ids), jnp.int32))
    slots = jax.tree.map(lambda a: a.at[ids].get(mode="clip"), carries), fine, fine, timed
    advanced, finite, replied, timed = _divided(
        devices, some, (consts, clients, rest, begin, rounds, seed), _stacked(values), slots
    )
    carries = jax.tree.map(lambda a, b: a.at[ids].set(b, mode="drop"), carries, advanced)
    if devices is not None:
        carries = jax.lax.with_sharding_constraint(carries, NamedSharding(devices, _DIVIDED))
    return carries, finite, replied, timed


def _stacked(values: Values) -> Any:
    """An array of each hyperparameter. It is weakly typed, as in `solve`: float32 computations stay in float32."""
    return {name: jnp.stack(each) for name, each in values.items()}
