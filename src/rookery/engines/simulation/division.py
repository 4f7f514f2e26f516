"""The division of clients among devices: which device has which clients, and their data placed there."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
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


@dataclass(frozen=True)
class Division:
    """Which device has which clients: device d those from d·each on, the last devices perhaps fewer or none."""

    mesh: Mesh
    n: int

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.mesh.size

    @property
    def each(self) -> int:
        """The most clients that a device has."""
        return -(-self.n // self.devices)

    def bounds(self, device: int) -> tuple[int, int]:
        """The first client of a device, and the one after its last."""
        return min(device * self.each, self.n), min((device + 1) * self.each, self.n)

    def check(self, clients: Clients) -> None:
        """Raise ValueError if this process does not hold the data of its devices' clients."""
        local = [d for d, device in enumerate(self.mesh.devices) if device.process_index == jax.process_index()]
        needed = [self.bounds(d) for d in local]
        here = range(clients.n) if clients.here is None else clients.here
        if any(first < last and not (here.start <= first and last <= here.stop) for first, last in needed):
            raise ValueError(
                f"Simulation: this process holds the data of clients {here.start} to {here.stop - 1}, but its devices "
                'in the mesh have other clients. Give mesh="all", for which Clients.from_loader loads.'
            )

    def divided(self, clients: Clients) -> Clients:
        """The data on the devices: each has its own clients', and all have the weights and the centre's data."""
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
        ends = np.concatenate([[0], np.cumsum(np.asarray(data.sizes, np.int64))])
        return max(int(ends[last] - ends[first]) for first, last in map(self.bounds, range(self.devices)))

    def _place(self, data: ClientRows, begin: int) -> ClientRows:
        """A level's data on the devices, from rows that begin with those of client `begin`."""
        sizes = np.asarray(data.sizes, np.int64)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        bounds = [self.bounds(d) for d in range(self.devices)]
        longest = self._longest(data)
        sizes_there = np.full((self.devices, self.each), data.narrowest, np.int32)
        offsets = np.zeros((self.devices, self.each), np.int32)
        for d, (first, last) in enumerate(bounds):
            sizes_there[d, : last - first] = sizes[first:last]
            offsets[d, : last - first] = ends[first:last] - ends[first]

        def piece(rows: Any, d: int) -> np.ndarray:
            first, last = (int(ends[i] - ends[begin]) for i in bounds[d])
            local = np.asarray(rows)[first:last]
            return np.concatenate([local, np.zeros((longest - len(local), *local.shape[1:]), local.dtype)])

        rows = jax.tree.map(lambda a: self._put(partial(piece, a), longest, a), data.rows)
        put = lambda a: self._put(lambda d: a[d], self.each, a[0])
        return data.member(rows, put(offsets), put(sizes_there))

    def _put(self, piece: Callable[[int], np.ndarray], length: int, like: Any) -> Array:
        """An array of which device d has piece(d), which has this length."""
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
    """The shapes of the clients' data if one device held all of them."""

    def of(data: ClientRows) -> ClientRows:
        total = int(np.asarray(data.sizes, np.int64).sum())
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((total, *a.shape[1:]), a.dtype), data.rows)
        return data.member(rows, data.offsets, data.sizes)

    return clients.map_levels(of, clients.weights, clients.center)
