"""Clients without their rows, whose shapes are known: the base of what stands for `Clients` in a program."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rookery.data.clients import Clients
from rookery.data.rows import ClientRows


@dataclass(frozen=True)
class RowSpec:
    """The shape and type of one row of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def rows(self, count: int) -> jax.ShapeDtypeStruct:
        """The shape of an array of that many rows."""
        return jax.ShapeDtypeStruct((count, *self.shape), self.dtype)


@dataclass(frozen=True)
class Rowless:
    """Stands for `Clients` in a program.

    Attributes:
        rowless: the clients without their rows.
        specs: for each level the structure of its rows and a `RowSpec` for each array; None for a level without data.
        capacities: for each level, the most rows that a block of clients has.
    """

    rowless: Clients
    specs: tuple[Any, ...]
    capacities: tuple[int, ...]

    @property
    def n(self) -> int:
        """The number of clients."""
        return self.rowless.n

    @property
    def weights(self) -> Any:
        """The clients' weights."""
        return self.rowless.weights

    def at_center(self) -> Clients:
        """See `Clients.at_center`."""
        return self.rowless.at_center()

    def client_axes(self) -> list[int | None]:
        """See `Clients.client_axes`."""
        return self.shapes().client_axes()

    def shapes(self) -> Clients:
        """The shapes with which plans are traced."""
        return with_rows(self.rowless, lambda k, j, spec: spec.rows(self.capacities[k]), self.specs)


def without_rows(clients: Clients, block: int) -> dict[str, Any]:
    """The attributes of a `Rowless` for these clients, for blocks of this size."""
    levels = list(clients.levels().values())
    rowless = clients.map_levels(
        lambda data: data.member(None, data.offsets, data.sizes), clients.weights, clients.center
    )
    capacities = tuple(0 if data is None else largest(data.sizes, block) for data in levels)
    return {"rowless": rowless, "specs": tuple(map(_specs, levels)), "capacities": capacities}


def with_rows(rowless: Clients, make: Callable[[int, int, RowSpec], Any], specs: tuple[Any, ...]) -> Clients:
    """The clients with the rows make(level, array, spec), where both are given by number."""

    def filled(k: int, data: ClientRows | None) -> ClientRows | None:
        if data is None:
            return None
        structure, arrays = specs[k]
        rows = structure.unflatten([make(k, j, spec) for j, spec in enumerate(arrays)])
        return data.member(rows, data.offsets, data.sizes)

    levels = [filled(k, data) for k, data in enumerate(rowless.levels().values())]
    return rowless.with_data(levels, rowless.weights, rowless.center)


def _specs(data: ClientRows | None) -> Any:
    if data is None:
        return None
    leaves, structure = jax.tree.flatten(data.rows)
    return structure, tuple(RowSpec(leaf.shape[1:], leaf.dtype) for leaf in leaves)


def largest(sizes: Any, count: int) -> int:
    """The most rows that `count` different clients have."""
    return int(np.sort(np.asarray(sizes, np.int64))[-count:].sum())
