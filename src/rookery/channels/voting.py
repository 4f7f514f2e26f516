"""What robust means are made of: replies that count, the rule that combines them, and the arithmetic on their rows."""

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from rookery.base.arguments import is_integer
from rookery.language.channel import Bookkeeping, ChannelExchange, Plain
from rookery.language.primitives import accumulator, result_type, zeroed


class Votes(NamedTuple):
    """The replies for one variable."""

    rows: list[Array]  # the variable's arrays, with a row for each client, and zeros for those that do not count
    counted: Bool[Array, " m"]  # whose replies count
    liars: Any  # how many of these may still be lies

    @property
    def number(self) -> Array:
        """How many replies count."""
        return jnp.sum(self.counted, dtype=jnp.int32)

    @classmethod
    def of(cls, rows: list[Array], counted: Array, liars: Any) -> "Votes":
        """Return the votes without replies that are not finite; each of these counts as a detected liar."""
        finite = [jnp.all(jnp.isfinite(a.reshape(len(a), -1)), axis=1) for a in rows]
        usable = functools.reduce(jnp.logical_and, finite, counted)
        left_out = jnp.sum(counted & ~usable, dtype=jnp.int32)
        return cls([zeroed(usable, a) for a in rows], usable, jnp.maximum(liars - left_out, 0))


@dataclass(frozen=True)
class Rule(Plain):
    """A rule that combines the replies to an exchange, variable by variable.

    A subclass has `combined` and, if it tolerates fewer liars than just under half of the replies, `least`.
    """

    attackers: int | float | None

    name: ClassVar[str]

    def least(self, liars: int) -> int:
        """The number of replies that the rule needs to tolerate this many liars."""
        return 2 * liars + 1

    def combined(self, votes: Votes, last: list[Array], key: Array) -> list[Array]:
        """The variable's arrays. `last`: what was returned in the last round, if the rule keeps it."""
        raise NotImplementedError

    def tolerated(self, clients: int) -> int:
        """Return how many clients of such a cohort may lie; raise ValueError if the rule can't tolerate them."""
        if self.attackers is None:
            return (clients - 1) // 2
        wanted = is_share(self.attackers)
        liars = math.floor(self.attackers * clients + 1e-9) if wanted else int(self.attackers)
        if self.least(liars) <= clients:
            return liars
        most = max((f for f in range(liars) if self.least(f) <= clients), default=None)
        tolerates = "tolerates none" if most is None else f"tolerates at most {most}"
        raise ValueError(
            f"rk.{self.name} {tolerates} of the {clients} clients of a cohort, and needs {self.least(liars)} clients "
            f"to tolerate {liars}; got attackers={self.attackers!r}. Give a larger cohort, or fewer attackers."
        )

    def check_cohort(self, clients: int) -> int:
        """Return the number of replies that a round needs; raise ValueError if the cohort is too small."""
        liars = self.tolerated(clients)
        return 1 if self.attackers is None else self.least(liars)

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        """No state; raise ValueError if the exchange is not a mean or a sum."""
        if exchange.kind in ("gather", "center"):
            why = {
                "gather": "gathers the replies, and the method uses each by itself",
                "center": "is with a single client, the centre",
            }[exchange.kind]
            raise ValueError(
                f"rk.{self.name} must be given to exchanges that are means or sums; got {exchange.name!r}, which "
                f"{why}. Name the exchanges that it protects: channel={{name: rule}}."
            )
        return (), ()

    def reduce(self, exchange: ChannelExchange, rows: Any, weights: Array, present: Array) -> Any:
        """Combine the replies that are present; NaN if too few of them are finite."""
        if exchange.uneven:
            raise ValueError(
                f"rk.{self.name} needs replies that count equally; in the exchange {exchange.name!r}, "
                f"{exchange.uneven}. Name the exchanges that it protects: channel={{name: rule}}."
            )
        liars, replies = self.tolerated(len(present)), jnp.sum(present, dtype=jnp.int32)
        if self.attackers is None:
            most, least = (replies - 1) // 2, 1
        else:
            most, least = jnp.int32(liars), self.least(liars)
        last, results = iter(jax.tree.leaves(exchange.state)), []
        for i, arrays in enumerate(variables(rows)):
            self._check_types(exchange, arrays)
            votes = Votes.of([a.astype(accumulator(a.dtype)) for a in arrays], present, most)
            before = [next(last) for _ in arrays] if jax.tree.leaves(exchange.state) else []
            values = self.combined(votes, before, jax.random.fold_in(exchange.key, i))
            holds = (replies - votes.number <= most) & (replies >= least) | (replies == 0)  # 0: the round fails
            results += [jnp.where(holds, v, jnp.nan).astype(a.dtype) for v, a in zip(values, arrays, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(rows), results)

    def reduce_bookkeeping(
        self, marks: list[Bookkeeping], rows: list[Array], weights: Array, present: Array
    ) -> list[Array]:
        """The trimmed mean of the bookkeeping, clamped to its bounds once more."""
        replies = jnp.sum(present, dtype=jnp.int32)
        most = (replies - 1) // 2 if self.attackers is None else jnp.int32(self.tolerated(len(present)))
        results = []
        for mark, array in zip(marks, rows, strict=True):
            bounded = mark.bounded(array).astype(accumulator(array.dtype))
            (value,) = trimmed(Votes.of([bounded], present, most))
            results.append(value.astype(result_type(array.dtype)))
        return results

    def _check_types(self, exchange: ChannelExchange, arrays: list[Array]) -> None:
        for array in arrays:
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise TypeError(
                    f"rk.{self.name} needs real updates, but the exchange {exchange.name!r} sends {array.dtype}. Mark "
                    "that part of the message in the method with bookkeeping=(None, rk.Bookkeeping(...))."
                )


def variables(message: Any) -> list[list[Array]]:
    """The arrays of each variable. Every entry of a (nested) tuple is a variable; any other message is a single one."""
    if isinstance(message, tuple):
        return [variable for entry in message for variable in variables(entry)]
    return [jax.tree.leaves(message)] if jax.tree.leaves(message) else []


def is_share(attackers: Any) -> bool:
    """Return whether a number of attackers is given as a share of the clients."""
    return not is_integer(attackers)


# Arithmetic on rows.


def trimmed(votes: Votes) -> list[Array]:
    """Per coordinate, the mean without the largest and the smallest entries, as many of each as there may be liars."""
    return _between(votes, votes.liars)


def middle(votes: Votes) -> list[Array]:
    """Per coordinate, the median."""
    return _between(votes, (votes.number - 1) // 2)


def _between(votes: Votes, cut: Any) -> list[Array]:
    """The mean of each coordinate's sorted entries, without the first `cut` and the last `cut` of them."""

    def one(a: Array) -> Array:
        ranked = jnp.sort(jnp.where(_beside(votes.counted, a), a, jnp.inf), axis=0)
        places = jnp.arange(len(a))
        inside = (places >= cut) & (places < votes.number - cut)
        share = 1 / jnp.maximum(votes.number - 2 * cut, 1).astype(a.dtype)
        return jnp.sum(jnp.where(_beside(inside, a), ranked * share, 0), axis=0)

    return [one(a) for a in votes.rows]


def _beside(flags: Array, rows: Array) -> Array:
    """A number for each row, in the shape of the rows."""
    return flags.reshape(-1, *(1,) * (rows.ndim - 1))


def weighed(weights: Array, rows: Array) -> Array:
    """Σ w_j v_j over the rows with a weight other than 0."""
    w = _beside(weights.astype(rows.dtype), rows)
    return jnp.sum(jnp.where(w != 0, w * rows, 0), axis=0)


def mean_of(rows: list[Array], chosen: Array) -> list[Array]:
    """The mean of the chosen rows."""
    count = jnp.maximum(jnp.sum(chosen, dtype=jnp.int32), 1)
    return [weighed(jnp.where(chosen, 1 / count.astype(a.dtype), 0), a) for a in rows]


def distances(rows: list[Array], point: list[Array]) -> Array:
    """‖row − point‖ over the whole variable; infinite where it overflows."""
    gaps = [jnp.abs(a - b).reshape(len(a), -1) for a, b in zip(rows, point, strict=True)]
    largest = functools.reduce(jnp.maximum, [jnp.max(gap, axis=1, initial=0) for gap in gaps])
    unit = jnp.clip(largest, 1e-30, 1e30)  # the reciprocals of other numbers are flushed to zero in single precision
    squares = [jnp.sum(jnp.square(gap / unit[:, None].astype(gap.dtype)), axis=1) for gap in gaps]
    return unit * jnp.sqrt(functools.reduce(jnp.add, squares))


def pairs(votes: Votes) -> Array:
    """The distances between replies, one row at a time; infinite to and from those that do not count."""
    one = lambda j: distances(votes.rows, [a[j] for a in votes.rows])
    apart = jax.lax.map(one, jnp.arange(len(votes.counted)))
    return jnp.where(votes.counted & votes.counted[:, None], apart, jnp.inf)


def ranks(values: Array) -> Array:
    """Each value's place in ascending order."""
    return jnp.argsort(jnp.argsort(values, stable=True), stable=True)
