"""Simulation on many devices: each computes the members of the cohort that it holds.

Every device computes the server's part of a plan, from the same numbers. An exchange ends in one sum over the devices.
Between two exchanges they do not communicate, so each computes its own members in as many blocks as it needs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from rookery import __version__
from rookery.base.draws import seed_key
from rookery.base.jaxprs import digest, is_key
from rookery.base.processes import ONE_PROCESS, HostError, Processes
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.folders import Padded
from rookery.engines.interpreter import Block, Interpreter, Mapped, is_within, weighted_sum
from rookery.engines.simulation import device
from rookery.engines.simulation.division import AXIS, DIVIDED, EVERYWHERE, Division, divide, mesh_of, undivided_shapes
from rookery.language import ledger
from rookery.language.ledger import Amounts
from rookery.language.primitives import zeroed
from rookery.plan.calls import Read, ScatterCall
from rookery.plan.trace import Carry, Plan

_CARRY: Any = Carry(EVERYWHERE, DIVIDED, DIVIDED, EVERYWHERE, EVERYWHERE)
_PIECES = 4  # the blocks in which a device computes a share of the expected size


def _processes(mesh: Mesh) -> Processes:
    """The processes that the devices of a mesh belong to."""
    owners = {device.process_index for device in mesh.devices}
    if owners == {jax.process_index()}:
        return ONE_PROCESS
    if owners != set(range(jax.process_count())):
        raise ValueError(
            f"Simulation: mesh must have devices of this process or of all {jax.process_count()} processes; got those "
            f'of {sorted(owners)}. Give mesh="all", or devices of one process.'
        )
    return Processes(together=True)


def _described(traced: engine.Traced, settings: device.Settings) -> dict[str, Any]:
    """What several processes must agree on."""
    job = traced.job
    return {
        "version of JAX": jax.__version__,
        "version of rookery": __version__,
        "algorithm": type(job.algorithm).__name__,
        **{name: _shown(value) for name, value in traced.hyper.items()},
        "program (losses, projection, channel, shapes, or the hyperparameters that are not numbers)": digest(
            traced.start.fingerprint, traced.round.fingerprint, getattr(traced.measure, "fingerprint", "")
        ),
        "constants (what losses close over)": digest(
            *traced.start.consts, *traced.round.consts, *getattr(traced.measure, "consts", ())
        ),
        "start": digest(*jax.tree.leaves(job.start)),
        "seed": job.seed,
        "noise_seed": job.noise_seed,
        "cohort": job.cohort,
        "data": job.clients.digest or digest(*jax.tree.leaves(job.clients)),
        "faults": repr(job.faults),
        "engine": repr(settings),
        "answer to values that are not finite": job.on_nonfinite,
    }


def _shown(value: Any) -> str:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(value)]
    return str(leaves[0]) if len(leaves) == 1 and not leaves[0].ndim else digest(*leaves)


class Session(device.Session):
    """A run on many devices, of this process or of several."""

    def __init__(self, job: Job, settings: device.Settings) -> None:
        self._division = division = divide(mesh_of(settings.mesh), job.clients)
        if division.devices > division.n:
            raise ValueError(
                f"Simulation: mesh must have at most one device for each of the {division.n} clients; got "
                f"{division.devices} devices. Give mesh={division.n} or fewer."
            )
        division.check(job.clients)
        trace = partial(engine.traced, job, convolve=settings.convolutions)
        self._on_one_device = lambda: trace(shapes=undivided_shapes(job.clients))
        self.processes = _processes(division.mesh)
        traced = trace(shapes=division.device_shapes(job.clients))
        if self.processes.count > 1:
            self.processes.agree(_described(traced, settings))
        super().__init__(self._placed(traced), settings, division.devices)
        self._data = division.divided(job.clients)

    def _placed(self, traced: engine.Traced) -> engine.Traced:
        """The plans and their inputs on every device. All processes take the entropy of the first."""
        put, noise = self._division.replicated, traced.noise
        place: Any = lambda plan: None if plan is None else replace(plan, consts=put(plan.consts))
        plans = {name: place(getattr(traced, name)) for name in ("start", "round", "measure")}
        job = replace(traced.job, start=put(traced.job.start))
        if self.processes.count > 1:
            words = self.processes.broadcast(np.asarray(noise).tolist())
            noise = np.array(words, np.uint32) if words else ()
        hyper, seed, noise = put((traced.hyper, traced.seed, noise))
        return replace(traced, job=job, hyper=hyper, seed=seed, noise=noise, **plans)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the program for one device, which does not depend on the number of devices."""
        return self._on_one_device().fingerprint

    @property
    def state(self) -> Any:
        """The algorithm's state, on the first device of this process."""
        return jax.tree.map(_here, self._carry.state)

    @property
    def memory(self) -> Any:
        """What the clients remember, one row for each, on the host: one device may not have room for all of it."""
        return jax.tree.map(lambda a: self._whole(self._division.by_client(a))[: self._division.n], self._carry.memory)

    def _whole(self, leaf: Any) -> Any:
        """The whole of an array that is divided among the devices."""
        if is_key(leaf):
            data = jnp.asarray(self._whole(jax.random.key_data(leaf)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return np.array(leaf) if self.processes.count == 1 else multihost_utils.process_allgather(leaf, tiled=True)

    def save(self) -> Carry:
        padded = lambda leaf: Padded(self._division.by_client(leaf), self._division.n)
        memory, client = jax.tree.map(padded, (self._carry.memory, self._carry.client))
        return self._carry._replace(memory=memory, client=client)

    def restore(self, saved: Any, rounds: int) -> None:
        memory, client = jax.tree.map(self._division.by_slot, (saved.memory, saved.client))
        super().restore(saved._replace(memory=memory, client=client), rounds)

    def by_client(self) -> None:
        """None: the rows are on several devices, and each process writes its own."""

    def advance(self, rounds: int) -> list[Amounts]:
        try:
            return super().advance(rounds)
        except jax.errors.JaxRuntimeError as error:
            if self.processes.count == 1 or "RESOURCE_EXHAUSTED" in str(error):
                raise
            why = str(error).splitlines()[0]
            raise HostError(
                f"another process is gone, or can't be reached, in or after round {self.rounds + 1} ({why:.200})."
            ) from error

    def _program(
        self, name: str, of: Plan, function: Callable[..., Any], *fixed: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        mesh, data = self._division.mesh, self._division.specs(self._data)
        more = {"start": 2, "rounds": 4, "measure": 2}[name]  # arguments after the carry
        carry = EVERYWHERE if name == "start" else _CARRY
        inputs = (EVERYWHERE, data, EVERYWHERE, carry, *[EVERYWHERE] * more)
        outputs = EVERYWHERE if name == "measure" else (_CARRY, EVERYWHERE)

        def make() -> Any:
            program = Program(of, self._data, self._block, self._division)
            whole = partial(function, program, *fixed)
            divided = jax.shard_map(whole, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
            return engine.compiled(of, divided, donate_argnums=donate)

        slots = b"" if self._division.slots is None else self._division.slots.tobytes()
        key = (name, of.identity, engine.shapes(self._data), self._block, *fixed, mesh, slots)
        return engine.PROGRAMS.find(key, make)


def _here(leaf: Any) -> Any:
    """The part of an array on the first device of this process."""
    if is_key(leaf):
        return jax.random.wrap_key_data(_here(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    return leaf.addressable_data(0)


class Program(device.Program):
    """A plan to be interpreted on one of the devices, for the members of a cohort that it holds."""

    def __init__(self, traced: Plan, clients: Clients, block: Block, division: Division) -> None:
        super().__init__(traced, clients, block)
        self.division = division

    def interpreter(self, clients: Clients) -> Interpreter:
        return _Share(clients, self.axes, self.block, self.division)

    def rows(self, ids: Any, n: int, value: Any) -> Any:
        if len(ids) == n:
            return value
        members = Members(ids, self.division)
        return jax.tree.map(lambda a: a[members.local], value)

    def put(self, ids: Any, n: int, value: Any, rows: Any) -> Any:
        if len(ids) == n:
            return rows
        members = Members(ids, self.division)
        where = jnp.where(members.valid, members.local, self.division.each)  # beyond the last: not written
        return jax.tree.map(lambda a, new: a.at[where].set(new, mode="drop"), value, rows)

    def here(self, ids: Any, entries: Any) -> Any:
        return Members(ids, self.division).of(entries)

    def everywhere(self, flags: Any) -> Any:
        return jax.lax.pmin(flags.astype(jnp.int32), AXIS) > 0


class Members:
    """The members of a cohort that this device holds, in the order of their slots, padded to a fixed length.

    Attributes:
        most: the fixed length.
        count: the number of members.
        places: their positions in the cohort.
        valid: which of the `most` entries are members; the others stand for the device's first client.
        ids, local: the members' numbers in the federation, and among this device's clients.
    """

    def __init__(self, ids: Any, division: Division, repeats: bool = False) -> None:
        size, first = len(ids), jax.lax.axis_index(AXIS) * division.each
        self.most = size if repeats else min(size, division.each)
        slots, order = _by_slot(ids, division)
        before, after = (jnp.searchsorted(slots, end).astype(jnp.int32) for end in (first, first + division.each))
        self.count = after - before
        ranks = jnp.minimum(before + jnp.arange(self.most, dtype=jnp.int32), size - 1)
        self.places = ranks if order is None else order[ranks]
        self.valid = jnp.arange(self.most) < self.count
        self.local = jnp.where(self.valid, slots[ranks] - first, 0)
        self.ids = division.client_at(first + self.local)

    def of(self, entries: Any) -> Any:
        """The members' entries, from one for each client of the cohort."""
        return entries[self.places]


def _by_slot(ids: Any, division: Division) -> tuple[Any, Any]:
    """The slots of a cohort in ascending order, and the places of these clients in the cohort; None: the same order."""
    slots = division.slots_of(ids)
    order = None if division.slots is None else jnp.argsort(slots)
    return slots if order is None else slots[order], order


class _Share(Interpreter):
    """Evaluates a plan on one device: per-client values have a row for each member that the device holds."""

    def __init__(self, clients: Clients, axes: list[Any], block: Block, division: Division) -> None:
        super().__init__(clients, axes, block)
        self._division = division

    def _members(self, ids: Any) -> Clients:
        here = self._division.slots_of(ids) - jax.lax.axis_index(AXIS) * self._division.each
        return self._clients.members(ids, jnp.clip(here, 0, self._division.each - 1))

    def _inside(self) -> Interpreter:
        return _Share(self._clients, self._axes, self._block, self._division)

    def _total_work(self, counts: Any) -> Any:
        samples = jnp.moveaxis(ledger.add(*jnp.moveaxis(counts[..., :2], (-1, -2), (0, 1))), 0, -1)
        sums = jax.vmap(ledger.total)(counts)
        sums, most = jax.lax.all_gather((sums, ledger.largest(samples)), AXIS)  # of each device, map by map
        busiest = ledger.total(ledger.largest(jnp.moveaxis(most, 0, 1))[:, :, None])
        return jnp.concatenate([ledger.total(sums.reshape(-1, *sums.shape[2:])), busiest], axis=1)

    def scatter(self, call: ScatterCall, read: Read) -> list[Any]:
        return [Members(read(call.ids), self._division).of(read(call.rows))]

    def _gathered(self, ids: Any, rows: Any) -> Any:
        if is_key(rows):
            words = self._gathered(ids, jax.random.key_data(rows))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(rows))
        each = self._division.each
        by_device = jax.lax.all_gather(rows, AXIS)
        slots, order = _by_slot(ids, self._division)
        begins = jnp.searchsorted(slots, jnp.arange(self._division.devices, dtype=jnp.int32) * each).astype(jnp.int32)
        owner = slots // each
        in_slots = by_device[owner, jnp.arange(len(ids), dtype=jnp.int32) - begins[owner]]
        return in_slots if order is None else jnp.zeros_like(in_slots).at[order].set(in_slots)

    def _weighted_sums(self, ids: Any, weights: Any, values: list[Any]) -> list[Any]:
        group = self._group(values)
        if group:
            return jax.lax.psum(self._compute(group, (weights, values)), AXIS)
        arrays = [self._array(v) for v in values]
        members = Members(ids, self._division, repeats=len(arrays[0]) == len(ids))
        masked = jnp.where(members.valid, members.of(weights), 0)
        return jax.lax.psum([weighted_sum(masked, a) for a in arrays], AXIS)

    def _compute(self, group: list[Mapped], reduced: Any = None) -> list[Any]:
        """See `Interpreter._compute`: for the members on this device, in as many blocks as they fill."""
        ids = group[0].ids
        members = Members(ids, self._division, group[0].call.repeats)
        block = self._share_of(self._block_of(group), ids, members.most)
        blocks = -(-members.most // block)
        length = blocks * block
        weights, values = reduced if reduced is not None else (jnp.zeros(len(ids)), [])
        inside = [v for v in values if is_within(v, group)]

        def padded(a: Any) -> Any:
            missing = length - len(a)
            return jnp.concatenate([a, jnp.broadcast_to(a[:1], (missing, *a.shape[1:]))]) if missing else a

        local = [[None if is_within(v, group) else padded(self._array(v)) for v in m.local] for m in group]
        keep = self._kept(group, reduced)
        member_ids, valid = padded(members.ids), jnp.arange(length) < members.count
        shares = jnp.where(valid, padded(members.of(weights)), 0)

        def on_block(begin: Any) -> Any:
            """The sums, the rows to keep and the work of the members of one block."""
            cut = lambda a: a if blocks == 1 else jax.lax.dynamic_slice_in_dim(a, begin, block)
            valid_here, ids_here = cut(valid), cut(member_ids)
            rows = [[None if a is None else cut(a) for a in arrays] for arrays in local]
            added, kept, counts = self._on_block(
                group, [ids_here] * len(group), rows, inside, cut(shares), valid_here, keep
            )
            return added, (jax.tree.map(lambda a: a if is_key(a) else zeroed(valid_here, a), kept), counts)

        if blocks == 1:
            total, made = on_block(0)
        else:
            added, per_block = jax.eval_shape(on_block, jnp.int32(0))
            empty = jax.tree.map(lambda a: _empty((length, *a.shape[1:]), a.dtype), per_block)

            def one(b: Any, state: Any) -> Any:
                more, rows = on_block(b * block)
                put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, b * block, 0)
                return jax.tree.map(jnp.add, state[0], more), jax.tree.map(put, state[1], rows)

            zeros = [jnp.zeros(a.shape, a.dtype) for a in added]
            total, made = jax.lax.fori_loop(0, -(-members.count // block), one, (zeros, empty))
        kept, counts = jax.tree.map(lambda a: a[: members.most], made)
        for mapped, is_kept, rows, done in zip(group, keep, kept, counts, strict=True):
            remaining = iter(rows)
            mapped.rows = [next(remaining) if k else None for k in is_kept] or [None]
            self._worked(mapped, members.ids, done)
        sums = iter(total)
        rest = lambda v: weighted_sum(shares[: members.most], self._array(v))
        return [next(sums) if is_within(v, group) else rest(v) for v in values]

    def _share_of(self, block: int, ids: Any, most: int) -> int:
        """The size of blocks that wastes little on a device's share of a cohort, at most `most` clients."""
        equal = self._division.slots is None  # of unequal clients, a block takes as long as its largest
        if equal and len(ids) == self._division.n and most == self._division.each:  # every client takes part
            return -(-most // -(-most // min(block, most)))
        if isinstance(self._block, int):
            return min(block, most)
        expected = -(-len(ids) // self._division.devices)
        return min(block, most, -(-expected // _PIECES))

    def _worked_at_center(self, counts: Any) -> None:
        """Count the centre's work on one device; all of them compute it."""
        self._worked_here.append(jnp.where(jax.lax.axis_index(AXIS) == 0, counts, 0))


def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(seed_key(0), shape)
    return jnp.zeros(shape, dtype)
