"""The division of clients among devices: which device has which clients, and how their data are placed."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from rookery.base.jaxprs import is_key
from rookery.data.clients import Clients
from rookery.data.rows import ClientRows

AXIS = "clients"
EVERYWHERE, DIVIDED = PartitionSpec(), PartitionSpec(AXIS)


def mesh_of(setting: Any) -> Mesh:
    """The devices of a `mesh` setting, as a mesh with one axis, the clients."""
    if isinstance(setting, Mesh):
        devices = setting.devices.reshape(-1)
    elif isinstance(setting, str) and setting == "all":
        devices = np.asarray(jax.devices())
    elif isinstance(setting, int) and not isinstance(setting, bool) and 1 <= setting <= jax.device_count():
        devices = np.asarray(jax.devices()[:setting])
    else:
        raise ValueError(
            f'Simulation: mesh must be "all", a jax.sharding.Mesh, or a number of devices from 1 to '
            f"{jax.device_count()}; got {setting!r}."
        )
    return Mesh(devices, (AXIS,))


def divide(mesh: Mesh, clients: Clients) -> "Division":
    """Divide clients evenly among devices: by number and, if their sizes differ, also by samples.

    The devices of a process have the clients that `Clients.from_loader` loads there.
    """
    n, each = clients.n, -(-clients.n // mesh.size)
    levels = [level for level in (clients.lower, clients.upper) if level is not None]
    samples = sum((np.asarray(level.sizes, np.int64) for level in levels), np.zeros(n, np.int64))
    held: list[np.ndarray] = []
    for _, devices in itertools.groupby(device.process_index for device in mesh.devices):
        count = len(list(devices))
        first, last = (min(each * d, n) for d in (len(held), len(held) + count))
        held += [first + share for share in shares(samples[first:last], count, each)]
    return Division(mesh, tuple(held))


def shares(samples: np.ndarray, devices: int, each: int) -> list[np.ndarray]:
    """Return the clients of each device, at most `each`: consecutive ones if all are equal, else the smallest first.

    Unequal clients are dealt in turns, the largest first. In each turn every device gets one, and the device with the
    fewest samples so far gets the largest.
    """
    n = len(samples)
    if n == 0 or samples.min() == samples.max() or devices == 1:
        return [np.arange(min(each * d, n), min(each * (d + 1), n)) for d in range(devices)]
    dealt = np.full((-(-n // devices), devices), n)
    dealt.reshape(-1)[:n] = np.argsort(-samples, kind="stable")
    sizes, load = np.append(samples, 0), np.zeros(devices, np.int64)
    for row in dealt:
        order = np.argsort(load, kind="stable")
        row[order] = row.copy()
        load += sizes[row]
    return [column[column < n][::-1] for column in dealt.T]


@dataclass(frozen=True, eq=False)
class Division:
    """Which device has which clients.

    The rows of a divided array are slots: device d has the `each` slots from d·each on, one for each of its clients.
    """

    mesh: Mesh
    held: tuple[np.ndarray, ...]  # by device, its clients

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.mesh.size

    @cached_property
    def n(self) -> int:
        """The number of clients."""
        return sum(map(len, self.held))

    @property
    def each(self) -> int:
        """The slots of a device."""
        return -(-self.n // self.devices)

    @cached_property
    def slots(self) -> np.ndarray | None:
        """The slot of each client; None if it is the number of the client."""
        slots = np.empty(self.n, np.int32)
        for d, clients in enumerate(self.held):
            slots[clients] = d * self.each + np.arange(len(clients))
        return None if np.array_equal(slots, np.arange(self.n)) else slots

    def slots_of(self, ids: Array) -> Array:
        """The slots of these clients."""
        return ids if self.slots is None else jnp.asarray(self.slots)[ids]

    def client_at(self, slots: Array) -> Array:
        """The clients in these slots."""
        if self.slots is None:
            return slots
        clients = np.zeros(self.devices * self.each, np.int32)
        clients[self.slots] = np.arange(self.n)
        return jnp.asarray(clients)[slots]

    def by_client(self, leaf: Any) -> Any:
        """An array with a row for each slot, reordered by client; the rows of unused slots come last."""
        return leaf if self.slots is None else self._reordered(leaf, self._clients_first)

    def by_slot(self, leaf: Any) -> Any:
        """The inverse of `by_client`."""
        return leaf if self.slots is None else self._reordered(leaf, np.argsort(self._clients_first))

    @cached_property
    def _clients_first(self) -> np.ndarray:
        assert self.slots is not None
        return np.concatenate([self.slots, np.setdiff1d(np.arange(self.devices * self.each), self.slots)])

    def _reordered(self, leaf: Any, rows: np.ndarray) -> Any:
        divided = NamedSharding(self.mesh, DIVIDED)
        return jax.jit(lambda a, rows: a[rows], out_shardings=divided)(leaf, self.replicated(rows))

    def check(self, clients: Clients) -> None:
        """Raise ValueError if this process does not hold the data of its devices' clients."""
        local = [d for d, device in enumerate(self.mesh.devices) if device.process_index == jax.process_index()]
        here = range(clients.n) if clients.here is None else clients.here
        if any(((self.held[d] < here.start) | (self.held[d] >= here.stop)).any() for d in local):
            raise ValueError(
                f"Simulation: this process holds the data of clients {here.start} to {here.stop - 1}, but its devices "
                'in the mesh have other clients. Give mesh="all", for which Clients.from_loader loads.'
            )

    def divided(self, clients: Clients) -> Clients:
        """The data on the devices: each has its clients' data, and all have the weights and the centre's data."""
        begin = 0 if clients.here is None else clients.here.start
        center = None if clients.center is None else self.replicated(clients.center)
        return clients.map_levels(lambda data: self._place(data, begin), self.replicated(clients.weights), center)

    def device_shapes(self, clients: Clients) -> Clients:
        """The shapes of divided clients as one device sees them."""
        shape = lambda a, *lead: jax.ShapeDtypeStruct((*lead, *a.shape[1:]), a.dtype)

        def of(data: ClientRows) -> ClientRows:
            rows = jax.tree.map(lambda a: shape(a, self._longest(data)), data.rows)
            return data.member(rows, shape(data.offsets, self.n), shape(data.sizes, self.n))

        return clients.map_levels(of, shape(clients.weights, self.n), clients.center)

    def specs(self, clients: Clients) -> Any:
        """How the arrays of the clients are divided."""
        return clients.map_levels(lambda _: DIVIDED, EVERYWHERE, None if clients.center is None else EVERYWHERE)

    def _longest(self, data: ClientRows) -> int:
        """The most samples that a device has."""
        sizes = np.asarray(data.sizes, np.int64)
        return max(int(sizes[clients].sum()) for clients in self.held)

    def _place(self, data: ClientRows, begin: int) -> ClientRows:
        """A level's data on the devices, from rows that begin with those of client `begin`."""
        sizes = np.asarray(data.sizes, np.int64)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        longest = self._longest(data)
        sizes_there = np.full((self.devices, self.each), data.narrowest, np.int32)
        offsets = np.zeros((self.devices, self.each), np.int32)
        for d, clients in enumerate(self.held):
            sizes_there[d, : len(clients)] = sizes[clients]
            offsets[d, : len(clients)] = np.cumsum(sizes[clients]) - sizes[clients]

        def piece(rows: Any, d: int) -> np.ndarray:
            clients, local = self.held[d], np.asarray(rows)
            if self.slots is None and len(clients):
                local = local[ends[clients[0]] - ends[begin] : ends[clients[-1] + 1] - ends[begin]]
            else:
                counts = sizes[clients]
                starts = ends[clients] - ends[begin] - offsets[d, : len(clients)]
                local = local[np.repeat(starts, counts) + np.arange(counts.sum())]
            return np.concatenate([local, np.zeros((longest - len(local), *local.shape[1:]), local.dtype)])

        rows = jax.tree.map(lambda a: self._put(partial(piece, a), longest, a), data.rows)
        put = lambda a: self._put(lambda d: a[d], self.each, a[0])
        return data.member(rows, put(offsets), put(sizes_there))

    def _put(self, piece: Callable[[int], np.ndarray], length: int, like: Any) -> Array:
        """An array of which device d has piece(d), a piece of this length."""
        sharding = NamedSharding(self.mesh, DIVIDED)
        here = [
            jax.device_put(piece(d), device)
            for d, device in enumerate(self.mesh.devices)
            if device.process_index == jax.process_index()
        ]
        shape = (length * self.devices, *like.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, here)

    def replicated(self, value: Any) -> Any:
        """The same arrays on every device."""
        sharding = NamedSharding(self.mesh, EVERYWHERE)

        def put(leaf: Any) -> Any:
            if is_key(leaf):
                return jax.random.wrap_key_data(put(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
            array = np.asarray(leaf, getattr(leaf, "dtype", None))
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        return jax.tree.map(put, value)


def undivided_shapes(clients: Clients) -> Clients:
    """The shapes of the clients' data if one device held all data."""

    def of(data: ClientRows) -> ClientRows:
        total = int(np.asarray(data.sizes, np.int64).sum())
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((total, *a.shape[1:]), a.dtype), data.rows)
        return data.member(rows, data.offsets, data.sizes)

    return clients.map_levels(of, clients.weights, clients.center)
