"""Attacks for testing robust means: what lying clients send instead of their replies.

`rk.Faults(attack=rk.attacks.SignFlip(2))` makes two clients lie. They replace what would be sent, after every channel's
encoding, so that a clip does not limit them. Only the real numbers of an update are replaced; for replies that are
iterates, an update is the difference from the value that the server sent. The start, and the centre's data, are honest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import draws
from rookery.base.arguments import is_integer, is_number
from rookery.base.placement import HostArray
from rookery.data.clients import Clients
from rookery.data.rows import ClientRows

__all__ = ["ALittleIsEnough", "InnerProduct", "LabelFlip", "Mimic", "NaN", "Noise", "SignFlip"]

_WHO = 0x6C696172  # separates the draw of who lies from that of lost replies


@dataclass(frozen=True)
class _Attack:
    """Who lies, and how often they are drawn.

    Arguments:
        attackers: the number of clients that lie, their share of all clients, or a tuple with the clients' numbers.
        redraw: whether a new set of clients lies in each round; False: the same clients in all rounds.
        seed: draws the clients that lie in all rounds. With `redraw`, the run's seed draws them.
        bookkeeping: whether bookkeeping is replaced, too.
    """

    attackers: Any
    redraw: bool = field(default=False, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    bookkeeping: bool = field(default=False, kw_only=True)

    knows_all: ClassVar[bool] = False  # whether it is made of the honest clients' replies

    def __post_init__(self) -> None:
        name, who = type(self).__name__, self.attackers
        for size in ("scale", "z"):
            value = getattr(self, size, 1.0)
            if not (is_number(value) or (value is None and size == "z")):
                raise ValueError(f"rk.attacks.{name}: {size} must be a number; got {value!r}.")
        chosen = isinstance(who, Sequence) and len(set(who)) == len(who) and all(is_integer(i) and i >= 0 for i in who)
        share = is_number(who) and not is_integer(who) and 0 <= who <= 1
        if not (share or chosen or (is_integer(who) and who >= 0)):
            raise ValueError(
                f"rk.attacks.{name}: attackers must be a number of clients, a share from 0 to 1, or a tuple of "
                f"clients' numbers; got {who!r}."
            )
        if self.redraw and chosen:
            raise ValueError(f"rk.attacks.{name}: redraw must be False if attackers are clients' numbers; got {who!r}.")

    @property
    def alone(self) -> bool:
        """Whether a client can compute its lie by itself, at its site."""
        return not (self.knows_all or self.redraw)

    def check(self, n: int) -> None:
        """Raise ValueError unless the attackers are among n clients."""
        who = self.attackers
        wrong = [i for i in who if i >= n] if isinstance(who, Sequence) else [who] * (is_integer(who) and who > n)
        if wrong:
            raise ValueError(
                f"rk.attacks.{type(self).__name__}: attackers must be among the {n} clients, 0 to {n - 1}; got {who!r}."
            )

    def liars(self, n: int, key: Array | None = None) -> Any:
        """Return whether each of n clients lies in the round with this key."""
        who = self.attackers
        if isinstance(who, Sequence):
            return np.isin(np.arange(n), who)
        count = int(who) if is_integer(who) else int(who * n + 1e-9)
        if not self.redraw:
            return np.random.default_rng(self.seed).permutation(n) < count
        assert key is not None
        words = jax.random.bits(jax.random.fold_in(key, _WHO), (n,), jnp.uint32)
        return jnp.zeros(n, bool).at[jnp.argsort(words)[:count]].set(True)

    def replace(self, message: Any, lies: Any, key: Array) -> Any:
        """A client's message, replaced if it lies."""
        return self._replaced(message, lambda leaves: self.own(leaves, key), lies)

    def replace_all(self, messages: Any, ids: Array, liars: Array, present: Any, key: Array) -> Any:
        """All messages, with a row for each client of the cohort, and the liars' rows replaced."""
        liars = liars if present is None else liars & present
        honest = ~liars if present is None else ~liars & present
        if self.knows_all:
            return self._replaced(messages, lambda leaves: self.together(leaves, honest, liars, ids), liars)
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)
        return self._replaced(messages, lambda leaves: jax.vmap(self.own)(leaves, keys), liars)

    def own(self, leaves: list[Array], key: Array) -> list[Array]:
        """What a client sends instead, from its own reply."""
        raise NotImplementedError

    def together(self, rows: list[Array], honest: Array, liars: Array, ids: Array) -> list[Array]:
        """What all liars send, from the replies of the honest."""
        raise NotImplementedError

    def _replaced(self, message: Any, lie: Callable[[list[Array]], list[Array]], liars: Any) -> Any:
        updates, marked = message
        leaves, structure = jax.tree.flatten((updates, marked) if self.bookkeeping else updates)
        real = [i for i, a in enumerate(leaves) if self.bookkeeping or jnp.issubdtype(a.dtype, jnp.floating)]
        wide = [leaves[i].astype(jnp.promote_types(leaves[i].dtype, jnp.float32)) for i in real]
        for i, new in zip(real, lie(wide), strict=True):
            flags = jnp.reshape(liars, jnp.shape(liars) + (1,) * (leaves[i].ndim - jnp.ndim(liars)))
            leaves[i] = jnp.where(flags, _as(new, leaves[i].dtype), leaves[i])
        changed = jax.tree.unflatten(structure, leaves)
        return changed if self.bookkeeping else (changed, marked)


@dataclass(frozen=True)
class SignFlip(_Attack):
    """The client's own update, times −scale.

    Arguments:
        scale: s of −s·v.
    """

    scale: float = 1.0

    def own(self, leaves: list[Array], key: Array) -> list[Array]:
        return [-self.scale * a for a in leaves]


@dataclass(frozen=True)
class Noise(_Attack):
    """Normal noise instead of the update. Every client of the cohort is sent a key of 8 bytes for each exchange.

    Arguments:
        scale: the standard deviation of the noise.
    """

    scale: float = 1.0

    def own(self, leaves: list[Array], key: Array) -> list[Array]:
        return [
            self.scale * noise.astype(a.dtype) for a, noise in zip(leaves, draws.normals_like(key, leaves), strict=True)
        ]


@dataclass(frozen=True)
class NaN(_Attack):
    """Values that are not numbers."""

    def own(self, leaves: list[Array], key: Array) -> list[Array]:
        return [jnp.full_like(a, jnp.nan) for a in leaves]


@dataclass(frozen=True)
class InnerProduct(_Attack):
    """Inner-product manipulation (IPM): −scale times the mean of the honest replies.

    Arguments:
        scale: ε.

    Reference: Xie, Koyejo and Gupta, Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product Manipulation,
    UAI 2019.
    """

    scale: float = 0.5

    knows_all: ClassVar[bool] = True

    def together(self, rows: list[Array], honest: Array, liars: Array, ids: Array) -> list[Array]:
        return [-self.scale * _moments(a, honest)[0] for a in rows]


@dataclass(frozen=True)
class ALittleIsEnough(_Attack):
    """ALIE: the mean of the honest replies minus z standard deviations, coordinate by coordinate.

    Arguments:
        z: the number of standard deviations. None: the largest for which enough honest replies are still farther from
            the mean, Φ⁻¹((m − f − s)/(m − f)) with s = ⌊m/2⌋ + 1 − f, for f liars among the m clients that reply.

    Reference: Baruch, Baruch and Goldberg, A Little Is Enough: Circumventing Defenses For Distributed Learning, NeurIPS
    2019.
    """

    z: float | None = None

    knows_all: ClassVar[bool] = True

    def together(self, rows: list[Array], honest: Array, liars: Array, ids: Array) -> list[Array]:
        z: Any = self.z
        if z is None:
            f, h = jnp.sum(liars, dtype=jnp.int32), jnp.sum(honest, dtype=jnp.int32)
            share = (h - ((f + h) // 2 + 1 - f)) / jnp.maximum(h, 1)
            z = jax.scipy.special.ndtri(jnp.clip(share, 0.5, 1 - 1e-6))
        both = [_moments(a, honest) for a in rows]
        return [(mean - z * deviation).astype(mean.dtype) for mean, deviation in both]


@dataclass(frozen=True)
class Mimic(_Attack):
    """All liars send the reply of the honest client with the lowest number, which then counts several times.

    (In the paper the attackers watch a few rounds, and choose the client whose replies vary most.)

    Reference: Karimireddy, He and Jaggi, Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022.
    """

    knows_all: ClassVar[bool] = True

    def together(self, rows: list[Array], honest: Array, liars: Array, ids: Array) -> list[Array]:
        chosen = jnp.argmin(jnp.where(honest, ids, jnp.iinfo(ids.dtype).max))
        return [a[chosen] for a in rows]


@dataclass(frozen=True)
class LabelFlip(_Attack):
    """Clients whose data are wrong and who are otherwise honest.

    Arguments:
        flip: flip(rows) -> rows of the same shapes, e.g. `lambda rows: {**rows, "label": 9 - rows["label"]}`. It is
            given all samples of a level, but only the attackers' samples are replaced by its result. Test data stay as
            they are.
    """

    flip: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.flip):
            raise TypeError(
                f"rk.attacks.LabelFlip: flip must be a function rows -> rows; got {self.flip!r}. Give e.g. flip=lambda "
                'rows: {**rows, "label": 9 - rows["label"]}.'
            )
        if self.redraw:
            raise ValueError(
                "rk.attacks.LabelFlip: redraw must be False, because data stay the same; got True. Leave it out."
            )

    def poisoned(self, clients: Clients) -> Clients:
        """Return the clients with the attackers' data flipped."""
        if not clients.held or clients.here is not None:
            raise ValueError(
                "rk.attacks.LabelFlip needs clients whose data are all in this process; got others. Flip the labels "
                "where the data are."
            )
        flipped = clients.map_levels(lambda data: self._flipped(data, clients.n), clients.weights, clients.center)
        flipped._test, flipped.schema, flipped.by_size = clients.test, clients.schema, clients.by_size
        return flipped

    def _flipped(self, data: ClientRows, n: int) -> ClientRows:
        lies = np.repeat(self.liars(n), np.asarray(data.sizes))
        rows = jax.tree.map(np.asarray, data.rows)
        wrong = jax.tree.map(np.asarray, self.flip(rows))
        shapes = [jax.tree.map(lambda a: (a.shape, a.dtype.name), what) for what in (rows, wrong)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"rk.attacks.LabelFlip: flip must return rows of the same shapes and types, {shapes[0]}; got "
                f"{shapes[1]}."
            )

        def mixed(old: Any, new: Any) -> Any:
            both = np.where(lies.reshape(-1, *(1,) * (old.ndim - 1)), np.asarray(new), np.asarray(old))
            return type(old)(both) if isinstance(old, HostArray) else jnp.asarray(both)

        rows = jax.tree.map(mixed, data.rows, wrong)
        return ClientRows(rows, data.offsets, data.sizes, data.widest, data.narrowest, data.chunk)


def _moments(rows: Array, honest: Array) -> tuple[Array, Array]:
    """The mean and the standard deviation of the honest rows."""
    chosen = honest.reshape(-1, *(1,) * (rows.ndim - 1))
    count = jnp.maximum(jnp.sum(honest, dtype=jnp.int32), 1).astype(rows.dtype)
    mean = jnp.sum(jnp.where(chosen, rows, 0), axis=0) / count
    return mean, jnp.sqrt(jnp.sum(jnp.where(chosen, jnp.square(rows - mean), 0), axis=0) / count)


def _as(value: Array, dtype: Any) -> Array:
    """The value in this type; an integer type gets the nearest integer, and its largest one for NaN."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return value.astype(dtype)
    bounds = jnp.iinfo(dtype)
    return jnp.clip(jnp.nan_to_num(jnp.round(value), nan=jnp.inf), bounds.min, bounds.max).astype(dtype)
