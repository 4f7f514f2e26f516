"""Many devices: the clients divided among them, each device computing those of the cohort that it holds.

The server's part of a plan is computed by every device, from the same numbers. An exchange ends in one sum over the
devices; between two exchanges they have nothing to tell each other, so each goes through its own members in as many
blocks as it needs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from rookery import __version__
from rookery.base.draws import seed_key
from rookery.base.jaxprs import digest
from rookery.base.processes import ONE_PROCESS, HostError, Processes
from rookery.data.clients import Clients
from rookery.data.rows import ClientRows
from rookery.engines import engine
from rookery.engines.checkpoints import Padded
from rookery.engines.engine import Job
from rookery.engines.interpreter import Block, Interpreter, Mapped, is_within, weighted_sum
from rookery.engines.simulation import device
from rookery.language import ledger
from rookery.language.ledger import Amounts
from rookery.plan.calls import Read, ScatterCall
from rookery.plan.trace import Carry, Plan

AXIS = "clients"
_EVERYBODY, _DIVIDED = PartitionSpec(), PartitionSpec(AXIS)
_CARRY: Any = Carry(_EVERYBODY, _DIVIDED, _DIVIDED, _EVERYBODY, _EVERYBODY)
_PIECES = 4  # the blocks in which a device computes its share of a cohort, if that is as large as is to be expected


def made(mesh: Any) -> Mesh:
    """The devices as a mesh with one axis, the clients."""
    if isinstance(mesh, Mesh):
        devices = mesh.devices.reshape(-1)
    elif isinstance(mesh, str) and mesh == "all":
        devices = np.asarray(jax.devices())
    elif isinstance(mesh, int) and not isinstance(mesh, bool) and 1 <= mesh <= jax.device_count():
        devices = np.asarray(jax.devices()[:mesh])
    else:
        raise ValueError(
            f'Simulation: mesh={mesh!r} is not "all", a jax.sharding.Mesh or a number of devices, of which there are '
            f"{jax.device_count()}."
        )
    return Mesh(devices, (AXIS,))


@dataclass(frozen=True)
class Division:
    """Which device has whom: device d the clients from d·each on, the last ones maybe fewer or none."""

    mesh: Mesh
    n: int

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.mesh.size

    @property
    def each(self) -> int:
        """The clients that a device has room for."""
        return -(-self.n // self.devices)

    def bounds(self, device: int) -> tuple[int, int]:
        """The first client of a device, and the one after its last."""
        return min(device * self.each, self.n), min((device + 1) * self.each, self.n)

    def check(self, clients: Clients) -> None:
        """Raise ValueError if this process does not hold the data of its devices' clients."""
        own = [d for d, device in enumerate(self.mesh.devices) if device.process_index == jax.process_index()]
        needed = [self.bounds(d) for d in own]
        here = range(clients.n) if clients.here is None else clients.here
        if any(first < last and not (here.start <= first and last <= here.stop) for first, last in needed):
            raise ValueError(
                f"Simulation: this process holds the data of the clients {here.start} to {here.stop - 1}, and its "
                'devices in the mesh have others: give mesh="all", for which Clients.from_loader loads.'
            )

    def divided(self, clients: Clients) -> Clients:
        """Their data on the devices, each with its own clients' alone; all have the weights and the centre's data."""
        begin = 0 if clients.here is None else clients.here.start
        levels = [None if source is None else self._source(source, begin) for source in clients.levels().values()]
        center = None if clients.center is None else self.replicated(clients.center)
        return _with(clients, levels, self.replicated(clients.weights), center)

    def seen(self, clients: Clients) -> Clients:
        """The shapes of divided clients as one device sees them."""
        shape = lambda a, *lead: jax.ShapeDtypeStruct((*lead, *a.shape[1:]), a.dtype)

        def own(source: ClientRows) -> ClientRows:
            rows = jax.tree.map(lambda a: shape(a, self._longest(source)), source.rows)
            return source.member(rows, shape(source.offsets, self.n), shape(source.sizes, self.n))

        levels = [None if source is None else own(source) for source in clients.levels().values()]
        return _with(clients, levels, shape(clients.weights, self.n), clients.center)

    def specs(self, clients: Clients) -> Any:
        """How their arrays are divided."""
        levels = [None if source is None else _DIVIDED for source in clients.levels().values()]
        return _with(clients, levels, _EVERYBODY, None if clients.center is None else _EVERYBODY)

    def _longest(self, source: ClientRows) -> int:
        """The most samples that a device has."""
        ends = np.concatenate([[0], np.cumsum(np.asarray(source.sizes, np.int64))])
        return max(int(ends[last] - ends[first]) for first, last in map(self.bounds, range(self.devices)))

    def _source(self, source: ClientRows, begin: int) -> ClientRows:
        """A level's data on the devices, of rows that begin with those of client `begin`."""
        sizes = np.asarray(source.sizes, np.int64)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        bounds = [self.bounds(d) for d in range(self.devices)]
        longest = self._longest(source)
        numbers = np.full((self.devices, self.each), source.narrowest, np.int32)
        offsets = np.zeros((self.devices, self.each), np.int32)
        for d, (first, last) in enumerate(bounds):
            numbers[d, : last - first] = sizes[first:last]
            offsets[d, : last - first] = ends[first:last] - ends[first]

        def piece(rows: Any, d: int) -> np.ndarray:
            first, last = (int(ends[i] - ends[begin]) for i in bounds[d])
            own = np.asarray(rows)[first:last]
            return np.concatenate([own, np.zeros((longest - len(own), *own.shape[1:]), own.dtype)])

        rows = jax.tree.map(lambda a: self._put(partial(piece, a), longest, a), source.rows)
        put = lambda a: self._put(lambda d: a[d], self.each, a[0])
        return source.member(rows, put(offsets), put(numbers))

    def _put(self, piece: Callable[[int], np.ndarray], length: int, like: Any) -> Array:
        """An array of which device d has piece(d), of this length."""
        sharding = NamedSharding(self.mesh, _DIVIDED)
        here = [
            jax.device_put(piece(d), device)
            for d, device in enumerate(self.mesh.devices)
            if device.process_index == jax.process_index()
        ]
        shape = (length * self.devices, *like.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, here)

    def replicated(self, value: Any) -> Any:
        """The same arrays on every device."""
        sharding = NamedSharding(self.mesh, _EVERYBODY)

        def put(leaf: Any) -> Any:
            if _is_key(leaf):
                return jax.random.wrap_key_data(put(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
            own = np.asarray(leaf, getattr(leaf, "dtype", None))
            return jax.make_array_from_callback(own.shape, sharding, lambda index: own[index])

        return jax.tree.map(put, value)


def _as_on_one(clients: Clients) -> Clients:
    """The shapes of the clients' data, as one device would hold them all."""

    def own(source: ClientRows) -> ClientRows:
        total = int(np.asarray(source.sizes, np.int64).sum())
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((total, *a.shape[1:]), a.dtype), source.rows)
        return source.member(rows, source.offsets, source.sizes)

    levels = [None if source is None else own(source) for source in clients.levels().values()]
    return _with(clients, levels, clients.weights, clients.center)


def _with(clients: Clients, levels: list[Any], weights: Any, center: Any) -> Clients:
    return Clients.tree_unflatten((clients.replace, clients.center_client), (*levels, weights, center))


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _processes(mesh: Mesh) -> Processes:
    """Those whose devices they are."""
    whose = {device.process_index for device in mesh.devices}
    if whose == {jax.process_index()}:
        return ONE_PROCESS
    if whose != set(range(jax.process_count())):
        raise ValueError(
            f"Simulation: the mesh has devices of the processes {sorted(whose)}, and there are {jax.process_count()}: "
            'give mesh="all", or devices of one process alone.'
        )
    return Processes(together=True)


def _described(traced: engine.Traced, settings: device.Settings) -> dict[str, Any]:
    """What several processes must agree upon."""
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
        self._division = division = Division(made(settings.mesh), job.clients.n)
        if division.devices > division.n:
            raise ValueError(
                f"Simulation: a mesh of {division.devices} devices, and {division.n} clients to divide among them: "
                f"give mesh={division.n} or fewer."
            )
        division.check(job.clients)
        self._as_on_one = lambda: engine.traced(job, convolve=settings.convolutions, seen=_as_on_one(job.clients))
        self.processes = _processes(division.mesh)
        seen = division.seen(job.clients)
        traced = engine.traced(job, convolve=settings.convolutions, seen=seen)
        if self.processes.count > 1:
            self.processes.agree(_described(traced, settings))
        super().__init__(self._placed(traced), settings, division.devices)
        self._data = division.divided(job.clients)

    def _placed(self, traced: engine.Traced) -> engine.Traced:
        put = self._division.replicated
        plan: Any = lambda own: None if own is None else replace(own, consts=put(own.consts))
        start, one_round, measure = map(plan, (traced.start, traced.round, traced.measure))
        job = replace(traced.job, start=put(traced.job.start))
        noise = traced.noise if self.processes.count == 1 else self._agreed(traced.noise)
        hyper, seed, noise = put((traced.hyper, traced.seed, noise))
        plans = {"start": start, "round": one_round, "measure": measure}
        return replace(traced, job=job, hyper=hyper, seed=seed, noise=noise, **plans)

    def _agreed(self, noise: Any) -> Any:
        """The first process's entropy, on all of them."""
        words = self.processes.broadcast(np.asarray(noise).tolist())
        return np.array(words, np.uint32) if words else ()

    @cached_property
    def fingerprint(self) -> str:
        """Of the program as one device would have it: the same for any number of devices."""
        return self._as_on_one().fingerprint

    @property
    def state(self) -> Any:
        """The algorithm's state, as one device of this process has it."""
        return jax.tree.map(_here, self._carry.state)

    @property
    def memory(self) -> Any:
        """What the clients remember, one row for each, on the host: all of it may be too much for one device."""
        return jax.tree.map(lambda a: self._whole(a)[: self._division.n], self._carry.memory)

    def _whole(self, leaf: Any) -> Any:
        """An array that is divided among the devices, of one process or several."""
        if _is_key(leaf):
            data = jnp.asarray(self._whole(jax.random.key_data(leaf)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return np.array(leaf) if self.processes.count == 1 else multihost_utils.process_allgather(leaf, tiled=True)

    def save(self) -> Carry:
        """See `engine.Session.save`."""
        padded = lambda leaf: Padded(leaf, self._division.n)
        memory, client = jax.tree.map(padded, (self._carry.memory, self._carry.client))
        return self._carry._replace(memory=memory, client=client)

    def advance(self, rounds: int) -> list[Amounts]:
        """See `engine.Session.advance`."""
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
        takes = {"start": 3, "rounds": 5, "measure": 3}[name]  # arguments after data and hyperparameters
        carry = [_EVERYBODY if name == "start" else _CARRY]
        gives = _EVERYBODY if name == "measure" else (_CARRY, _EVERYBODY)
        specs = (_EVERYBODY, data, _EVERYBODY, *carry, *[_EVERYBODY] * (takes - 1))

        def make() -> Any:
            program = Program(of, self._data, self._block, self._division)
            whole = partial(function, program, *fixed)
            divided = jax.shard_map(whole, mesh=mesh, in_specs=specs, out_specs=gives, check_vma=False)
            return engine.compiled(of, divided, donate_argnums=donate)

        key = (name, of.identity, device.shapes(self._data), self._block, *fixed, mesh)
        return engine.PROGRAMS.find(key, make)


def _here(leaf: Any) -> Any:
    """The part of an array on the first device of this process."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(_here(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    return leaf.addressable_data(0)


class Program(device.Program):
    """A plan, to be interpreted on one of the devices."""

    def __init__(self, traced: Plan, clients: Clients, block: Block, division: Division) -> None:
        super().__init__(traced, clients, block)
        self.division = division

    def interpreter(self, clients: Clients) -> Interpreter:
        """One for the members of a cohort that this device holds."""
        return _Share(clients, self.axes, self.block, self.division)

    def rows(self, ids: Any, n: int, value: Any) -> Any:
        """See `device.Program.rows`: of the members that are here."""
        if len(ids) == n:
            return value
        own = Members(ids, self.division)
        return jax.tree.map(lambda a: a[own.local], value)

    def put(self, ids: Any, n: int, value: Any, rows: Any) -> Any:
        """See `device.Program.put`: of the members that are here."""
        if len(ids) == n:
            return rows
        own = Members(ids, self.division)
        where = jnp.where(own.valid, own.local, self.division.each)  # beyond the last: not written
        return jax.tree.map(lambda a, new: a.at[where].set(new, mode="drop"), value, rows)

    def here(self, ids: Any, entries: Any) -> Any:
        """See `device.Program.here`."""
        return Members(ids, self.division).of(entries)

    def everywhere(self, flags: Any) -> Any:
        """See `device.Program.everywhere`."""
        return jax.lax.pmin(flags.astype(jnp.int32), AXIS) > 0


class Members:
    """The members of a cohort that this device holds: a part of `ids`, which ascend, with room for as many as may be.

    Attributes:
        room: how many they can be.
        count: how many they are.
        places: where in the cohort they are.
        valid: which of the `room` entries are members; the others stand for its first client.
        ids, local: their numbers in the federation, and among this device's clients.
    """

    def __init__(self, ids: Any, division: Division, repeats: bool = False) -> None:
        size, first = len(ids), jax.lax.axis_index(AXIS) * division.each
        self.room = size if repeats else min(size, division.each)
        before, after = (jnp.searchsorted(ids, end).astype(jnp.int32) for end in (first, first + division.each))
        self.count = after - before
        self.places = jnp.minimum(before + jnp.arange(self.room, dtype=jnp.int32), size - 1)
        self.valid = jnp.arange(self.room) < self.count
        self.local = jnp.where(self.valid, ids[self.places] - first, 0)
        self.ids = first + self.local

    def of(self, entries: Any) -> Any:
        """Their entries, of one for each of the cohort."""
        return entries[self.places]


class _Share(Interpreter):
    """Evaluates a plan's steps on one device: per-client values are those of the members that it holds."""

    def __init__(self, clients: Clients, axes: list[Any], block: Block, division: Division) -> None:
        super().__init__(clients, axes, block)
        self._division = division

    def _members(self, ids: Any) -> Clients:
        return self._clients.members(ids, jax.lax.axis_index(AXIS) * self._division.each)

    def _inside(self) -> Interpreter:
        return _Share(self._clients, self._axes, self._block, self._division)

    def _of_all(self, counts: Any) -> Any:
        samples = jnp.moveaxis(ledger.add(*jnp.moveaxis(counts[..., :2], (-1, -2), (0, 1))), 0, -1)
        sums = jax.vmap(ledger.total)(counts)
        sums, most = jax.lax.all_gather((sums, ledger.largest(samples)), AXIS)  # of each device, map by map
        busiest = ledger.total(ledger.largest(jnp.moveaxis(most, 0, 1))[:, :, None])
        return jnp.concatenate([ledger.total(sums.reshape(-1, *sums.shape[2:])), busiest], axis=1)

    def scatter(self, call: ScatterCall, read: Read) -> list[Any]:
        """See `Visitor`. Each device takes its members' rows."""
        return [Members(read(call.ids), self._division).of(read(call.rows))]

    def _gathered(self, ids: Any, rows: Any) -> Any:
        if _is_key(rows):
            words = self._gathered(ids, jax.random.key_data(rows))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(rows))
        each = self._division.each
        held = jax.lax.all_gather(rows, AXIS)
        begins = jnp.searchsorted(ids, jnp.arange(self._division.devices, dtype=jnp.int32) * each).astype(jnp.int32)
        owner = ids // each
        return held[owner, jnp.arange(len(ids), dtype=jnp.int32) - begins[owner]]

    def _weighted_sums(self, ids: Any, weights: Any, values: list[Any]) -> list[Any]:
        group = self._group(values)
        if group:
            return jax.lax.psum(self._compute(group, (weights, values)), AXIS)
        arrays = [self._array(v) for v in values]
        members = Members(ids, self._division, repeats=len(arrays[0]) == len(ids))
        masked = jnp.where(members.valid, members.of(weights), 0)
        return jax.lax.psum([weighted_sum(masked, a) for a in arrays], AXIS)

    def _compute(self, group: list[Mapped], reduced: Any = None) -> list[Any]:
        """See `Interpreter._compute`: for the members that are here, in as many blocks as they fill."""
        ids = group[0].ids
        members = Members(ids, self._division, group[0].call.repeats)
        block = self._share_of(self._block_of(group), ids, members.room)
        blocks = -(-members.room // block)
        room = blocks * block
        weights, values = reduced if reduced is not None else (jnp.zeros(len(ids)), [])
        inside = [v for v in values if is_within(v, group)]

        def padded(a: Any) -> Any:
            return jnp.concatenate([a, jnp.broadcast_to(a[:1], (room - len(a), *a.shape[1:]))]) if room > len(a) else a

        local = [[None if is_within(v, group) else padded(self._array(v)) for v in m.local] for m in group]
        keep = self._kept(group, reduced)
        who, valid = padded(members.ids), jnp.arange(room) < members.count
        shares = jnp.where(valid, padded(members.of(weights)), 0)

        def on_block(begin: Any) -> Any:
            """The sums, the rows to keep and the work of the members of one block."""
            cut = lambda a: a if blocks == 1 else jax.lax.dynamic_slice_in_dim(a, begin, block)
            there, here = cut(valid), cut(who)
            rows = [[None if a is None else cut(a) for a in each] for each in local]
            added, kept, counts = self._on_block(group, [here] * len(group), rows, inside, cut(shares), there, keep)
            masked = lambda a: jnp.where(there.reshape(-1, *(1,) * (a.ndim - 1)), a, jnp.zeros((), a.dtype))
            return added, (jax.tree.map(lambda a: a if _is_key(a) else masked(a), kept), counts)

        if blocks == 1:
            total, made = on_block(0)
        else:
            added, each = jax.eval_shape(on_block, jnp.int32(0))
            empty = jax.tree.map(lambda a: _empty((room, *a.shape[1:]), a.dtype), each)

            def one(b: Any, state: Any) -> Any:
                more, rows = on_block(b * block)
                put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, b * block, 0)
                return jax.tree.map(jnp.add, state[0], more), jax.tree.map(put, state[1], rows)

            zeros = [jnp.zeros(a.shape, a.dtype) for a in added]
            total, made = jax.lax.fori_loop(0, -(-members.count // block), one, (zeros, empty))
        kept, counts = jax.tree.map(lambda a: a[: members.room], made)
        for mapped, is_kept, rows, done in zip(group, keep, kept, counts, strict=True):
            found = iter(rows)
            mapped.rows = [next(found) if k else None for k in is_kept] or [None]
            self._worked(mapped, members.ids, done)
        sums = iter(total)
        rest = lambda v: weighted_sum(shares[: members.room], self._array(v))
        return [next(sums) if is_within(v, group) else rest(v) for v in values]

    def _share_of(self, block: int, ids: Any, room: int) -> int:
        """The block with which a device's share of a cohort wastes little."""
        if len(ids) == self._division.n and room == self._division.each:  # the share is all that there is room for
            return -(-room // -(-room // min(block, room)))
        if isinstance(self._block, int):
            return min(block, room)
        expected = -(-len(ids) // self._division.devices)
        return min(block, room, -(-expected // _PIECES))

    def _worked_at_center(self, counts: Any) -> None:
        """All devices compute it, and one counts."""
        self._worked_here.append(jnp.where(jax.lax.axis_index(AXIS) == 0, counts, 0))


def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(seed_key(0), shape)
    return jnp.zeros(shape, dtype)
