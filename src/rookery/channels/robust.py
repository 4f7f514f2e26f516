"""Robust means: rules by which the server combines replies, a bounded number of which may be lies."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base.arguments import check_counts, check_positive, is_integer, is_number
from rookery.channels.voting import (
    Rule,
    Votes,
    distances,
    mean_of,
    middle,
    pairs,
    ranks,
    trimmed,
    weighed,
)
from rookery.language.channel import ChannelExchange


@dataclass(frozen=True)
class Trimmed(Rule):
    """See `trimmed_mean`."""

    name: ClassVar[str] = "trimmed_mean"

    def combined(self, votes: Votes, last: list[Array], key: Array) -> list[Array]:
        return trimmed(votes)


@dataclass(frozen=True)
class Median(Rule):
    """See `median`."""

    name: ClassVar[str] = "median"

    def combined(self, votes: Votes, last: list[Array], key: Array) -> list[Array]:
        return middle(votes)


@dataclass(frozen=True)
class GeometricMedian(Rule):
    """See `geometric_median`."""

    iterations: int
    smoothing: float

    name: ClassVar[str] = "geometric_median"

    def combined(self, votes: Votes, last: list[Array], key: Array) -> list[Array]:
        def step(_: Any, v: list[Array]) -> list[Array]:
            w = jnp.where(votes.counted, 1 / jnp.maximum(distances(votes.rows, v), self.smoothing), 0)
            w = w / jnp.maximum(jnp.max(w), jnp.finfo(w.dtype).tiny)
            return [(weighed(w, a) / jnp.sum(w)).astype(a.dtype) for a in votes.rows]

        return jax.lax.fori_loop(0, self.iterations, step, middle(votes))


@dataclass(frozen=True)
class Krum(Rule):
    """See `krum`."""

    keep: int

    name: ClassVar[str] = "krum"

    def least(self, liars: int) -> int:
        return max(2 * liars + 3, liars + 2 + self.keep)

    def combined(self, votes: Votes, last: list[Array], key: Array) -> list[Array]:
        squares = jnp.square(pairs(votes))
        others = jnp.where(jnp.eye(len(squares), dtype=bool), jnp.inf, squares)
        nearest = jnp.arange(len(squares)) < votes.number - votes.liars - 2
        score = jnp.sum(jnp.where(nearest, jnp.sort(others, axis=1), 0), axis=1)
        chosen = votes.counted & (ranks(jnp.where(votes.counted, score, jnp.inf)) < self.keep)
        return mean_of(votes.rows, chosen)


@dataclass(frozen=True)
class CenteredClipping(Rule):
    """See `centered_clipping`."""

    radius: float
    iterations: int

    name: ClassVar[str] = "centered_clipping"

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        """The server's state is the last aggregate, at first zero."""
        _, client = super().init(exchange)
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), exchange.shapes), client

    def combined(self, votes: Votes, last: list[Array], key: Array) -> list[Array]:
        def step(_: Any, v: list[Array]) -> list[Array]:
            distance = distances(votes.rows, v)
            factor = jnp.where(distance > self.radius, self.radius / distance, 1)
            factor = jnp.where(votes.counted, factor, 0) / jnp.maximum(votes.number, 1)
            return [b + weighed(factor, a - b) for a, b in zip(votes.rows, v, strict=True)]

        start = [b.astype(a.dtype) for a, b in zip(votes.rows, last, strict=True)]
        return jax.lax.fori_loop(0, self.iterations, step, start)

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """Remember the aggregate."""
        return total, jax.tree.map(lambda a, b: a.astype(b.dtype), total, state)


@dataclass(frozen=True)
class _Wrapped(Rule):
    """A rule on replies that have been mixed before."""

    rule: Rule

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        return self.rule.init(exchange)

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        return self.rule.decode(exchange, total, key, state)


@dataclass(frozen=True)
class Bucketing(_Wrapped):
    """See `bucketing`."""

    size: int

    name: ClassVar[str] = "bucketing"

    def least(self, liars: int) -> int:
        return self.size * (self.rule.least(liars) - 1) + 1

    def combined(self, votes: Votes, last: list[Array], key: Array) -> list[Array]:
        m, size = len(votes.counted), self.size
        k1, k2 = jax.random.split(key)
        order = jnp.argsort(jax.random.bits(k1, (m,), jnp.uint32), stable=True)
        order = order[jnp.argsort(~votes.counted[order], stable=True)]  # those that do not count come last
        padding = -m % size

        def buckets(a: Array) -> Array:
            a = jnp.pad(a[order], [(0, padding), *[(0, 0)] * (a.ndim - 1)])
            return a.reshape(-1, size, *a.shape[1:])

        counts = jnp.sum(buckets(votes.counted), axis=1)
        shares = lambda a: jnp.maximum(counts, 1).astype(a.dtype).reshape(-1, 1, *(1,) * (a.ndim - 1))
        means = [jnp.sum(buckets(a) / shares(a), axis=1) for a in votes.rows]
        return self.rule.combined(Votes.of(means, counts > 0, votes.liars), last, k2)


@dataclass(frozen=True)
class Mixing(_Wrapped):
    """See `nearest_neighbors`."""

    name: ClassVar[str] = "nearest_neighbors"

    def least(self, liars: int) -> int:
        return self.rule.least(liars)

    def combined(self, votes: Votes, last: list[Array], key: Array) -> list[Array]:
        near = jax.vmap(ranks)(pairs(votes)) < votes.number - votes.liars
        mixed = [jax.vmap(lambda chosen, a=a: mean_of([a], chosen)[0])(near & votes.counted) for a in votes.rows]
        return self.rule.combined(Votes.of(mixed, votes.counted, votes.liars), last, key)


RULES = (Trimmed, Median, GeometricMedian, Krum, CenteredClipping, Bucketing, Mixing)

# Their public names.


def median(attackers: float | None = None) -> Median:
    """The median of the replies, coordinate by coordinate.

    It tolerates just under half of the clients.

    Arguments:
        attackers: the number of clients that may lie, or their share of the cohort below ½; None: as many as the rule
            tolerates.

    Reference: Yin, Chen, Ramchandran and Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates, ICML 2018.
    """
    return Median(_attackers("median", attackers))


def trimmed_mean(attackers: float = 0.2) -> Trimmed:
    """The mean without the largest and the smallest entries of each coordinate.

    It tolerates just under half of the clients. With attackers=0 it is the plain mean of clients with equal weights.

    Arguments:
        attackers: f, the number of clients that may lie, or their share of the cohort: as many entries are left out at
            each end.

    Reference: Yin et al. 2018, as for `median`.
    """
    return Trimmed(_attackers("trimmed_mean", attackers, required=True))


def geometric_median(
    attackers: float | None = None, *, iterations: int = 8, smoothing: float = 1e-6
) -> GeometricMedian:
    """The point with the least sum of distances to the replies, by Weiszfeld's iteration (RFA).

    It tolerates just under half of the clients. Steps v ← Σ w_j v_j/Σ w_j with w_j = 1/max(‖v_j − v‖, smoothing) start
    from the coordinate-wise median. (The paper's start at the mean lets one huge lie through, for any number of steps.)

    Arguments:
        attackers: the number of clients that may lie, or their share of the cohort; None: as many as the rule
            tolerates.
        iterations: R, the number of steps.
        smoothing: ν.

    Reference: Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, 2019.
    """
    check_counts(**{"rk.geometric_median: iterations": iterations})
    check_positive(**{"rk.geometric_median: smoothing": smoothing})
    return GeometricMedian(_attackers("geometric_median", attackers), int(iterations), float(smoothing))


def krum(attackers: float = 0.2, *, keep: int = 1) -> Krum:
    """The reply with the least sum of squared distances to its m − f − 2 nearest others, of m replies.

    It tolerates f attackers among m ≥ 2f + 3 clients.

    Arguments:
        attackers: f, the number of clients that may lie, or their share of the cohort.
        keep: how many such replies to average (multi-Krum), at most m − f − 2.

    Reference: Blanchard, El Mhamdi, Guerraoui and Stainer, Machine Learning with Adversaries: Byzantine Tolerant
    Gradient Descent, NeurIPS 2017.
    """
    check_counts(**{"rk.krum: keep": keep})
    return Krum(_attackers("krum", attackers, required=True), int(keep))


def centered_clipping(radius: float, attackers: float | None = None, *, iterations: int = 3) -> CenteredClipping:
    """The mean of replies that are clipped, at the server, to a ball around the last aggregate.

    It tolerates just under half of the clients in this sense: f attackers among m clients move a step of the iteration
    by at most f/m times the radius. Steps v ← v + mean (v_j − v)·min(1, radius/‖v_j − v‖) start from the last aggregate
    of the same exchange, which is the server's state, at first zero.

    Arguments:
        radius: τ, as a norm over a whole variable. What is sent is an update, so for methods that send iterates the
            radius scales with the step sizes.
        attackers: the number of clients that may lie, or their share of the cohort; None: as many as the rule
            tolerates.
        iterations: the number of steps.

    Reference: Karimireddy, He and Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021.
    """
    check_positive(**{"rk.centered_clipping: radius": radius})
    check_counts(**{"rk.centered_clipping: iterations": iterations})
    attackers = _attackers("centered_clipping", attackers)
    return CenteredClipping(attackers, float(radius), int(iterations))


def bucketing(rule: Rule, size: int = 2) -> Bucketing:
    """A rule on the means of random groups of `size` replies, for clients that differ.

    The groups' means differ less than the replies. Each attacker spoils one group at most, so `rule` must tolerate as
    many attackers among ⌈m/size⌉ replies.

    Arguments:
        rule: e.g. `rk.median(2)`; its attackers are clients.
        size: s, the number of replies in a group.

    Reference: Karimireddy, He and Jaggi, Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022.
    """
    check_counts(**{"rk.bucketing: size": size})
    if _checked("bucketing", rule).attackers is None:
        raise ValueError(f"rk.bucketing: rule must have a number of attackers; got {rule!r}. Give rk.{rule.name}(2).")
    return Bucketing(rule.attackers, rule, int(size))


def nearest_neighbors(rule: Rule) -> Mixing:
    """A rule on replies that are each replaced by the mean of the m − f nearest ones, itself included (NNM).

    It makes the replies of unlike clients more alike, and tolerates as many attackers as `rule` does.

    Arguments:
        rule: e.g. `rk.trimmed_mean(2)`; f is its number of attackers.

    Reference: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, Fixing by Mixing: A Recipe for Optimal
    Byzantine ML under Heterogeneity, AISTATS 2023.
    """
    return Mixing(_checked("nearest_neighbors", rule).attackers, rule)


def _checked(owner: str, rule: Any) -> Rule:
    if not isinstance(rule, Rule):
        raise TypeError(f"rk.{owner}: rule must be a robust mean such as rk.median(2); got {rule!r}.")
    return rule


def _attackers(owner: str, attackers: Any, required: bool = False) -> Any:
    if attackers is None and not required:
        return None
    counts = is_integer(attackers) and attackers >= 0
    if not counts and not (is_number(attackers) and 0 <= attackers < 0.5):
        none = "" if required else ", or None"
        raise ValueError(
            f"rk.{owner}: attackers must be an integer of at least 0, or a share of the cohort below 0.5{none}; got "
            f"{attackers!r}."
        )
    return int(attackers) if counts else float(attackers)
