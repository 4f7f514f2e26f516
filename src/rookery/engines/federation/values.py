"""Values of a phase as the coordinator sees them: its own, and those that only sites hold."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from rookery.base.jaxprs import is_key


@dataclass(eq=False)
class ServerValue:
    """A value of the server. What sites hold is tracked by this object's identity, not by its numbers."""

    array: Any
    number: int = -1  # once it is sent
    constant: int = -1  # its number among the plan's constants, which every site has


@dataclass(eq=False)
class Mapped:
    """A client's function, to be computed by the cohort."""

    number: int
    call: int  # its number in the plan
    sent: list[ServerValue]
    keys: Any  # one for each client of the cohort, or None
    local: list[Any]  # per-client values
    shapes: list[Any]
    noise: Any = None  # in a simulation with a noise_seed: a key for each client; otherwise sites draw their own


@dataclass(frozen=True)
class Computed:
    """A value that the sites have computed and hold."""

    mapped: Mapped
    output: int


@dataclass(frozen=True)
class Remembered:
    """A leaf of what a site remembers from round to round."""

    kind: str  # "memory", or "client" for the channel's
    leaf: int


@dataclass(eq=False)
class Scattered:
    """The server's rows, one for each client."""

    rows: Any


@dataclass(eq=False)
class Cohort:
    """The clients that are asked."""

    ids: list[int]
    has: set[int] = field(default_factory=set)  # the numbers of the values counted as sent
    pending: list[Mapped] = field(default_factory=list)  # functions that go out with the next request
    down: int = 0  # bytes that go out with the next request
    delivered: set[int] = field(default_factory=set)  # the numbers of the values that have gone out

    @property
    def places(self) -> dict[int, list[int]]:
        """The places of each client: a client may have been drawn twice."""
        found: dict[int, list[int]] = {}
        for place, client in enumerate(self.ids):
            found.setdefault(client, []).append(place)
        return found


class Wanted(NamedTuple):
    """What a request asks for: the reply to an exchange of the plan, or to remember something.

    `masks`: in a secure sum, the fields that name the masks.
    """

    call: int
    reply: list[Any]
    remember: dict[str, list[Any]] = {}  # noqa: RUF012
    masks: dict[str, Any] | None = None


@jax.jit
def client_keys(key: Any, ids: Any) -> Any:
    """Return each client's key."""
    return jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(key, i))(ids))


def arrays_for(maps: list[Mapped], place: int) -> list[Any]:
    """Return the arrays that only the client at this place of the cohort is sent."""
    arrays = []
    for m in maps:
        arrays += [] if m.keys is None else [m.keys[place]]
        arrays += [value.rows[place] for value in m.local if isinstance(value, Scattered)]
        arrays += [] if m.noise is None else [m.noise[place]]
    return arrays


def closure(maps: list[Mapped]) -> list[Mapped]:
    """Return these functions and all that they depend on, in the order in which they are computed."""
    found: dict[int, Mapped] = {}

    def visit(m: Mapped) -> None:
        if m.number not in found:
            for value in m.local:
                if isinstance(value, Computed):
                    visit(value.mapped)
            found[m.number] = m

    for m in maps:
        visit(m)
    return list(found.values())


def reference(value: Any) -> Any:
    """Return how a request refers to a client's value."""
    if isinstance(value, Computed):
        return ["m", value.mapped.number, value.output]
    if isinstance(value, Remembered):
        return [value.kind, value.leaf]
    return "row"


def shape_of(value: Any) -> Any:
    """Return the shape and type of a client's value."""
    assert isinstance(value, Computed)
    return value.mapped.shapes[value.output]


def sent_array(array: Any) -> Any:
    """Return an array as it is sent."""
    kind = jax.typeof(array)
    return np.asarray(jax.random.key_data(array) if is_key(kind) else array, None if is_key(kind) else kind.dtype)
