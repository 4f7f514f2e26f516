"""Compression of what clients send: `top_k`, `random_k`, `quantize` and `low_rank`, with and without feedback."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import tree
from rookery.channels.codecs import LowRank, Quantize, RandomK, TopK, packed, unpacked
from rookery.language.channel import ChannelExchange

_FEEDBACK = ("error", "difference", "aggregate", None)


@dataclass(frozen=True)
class Compression:
    """A codec for each array of a message, and the feedback that makes up for what the codec leaves out.

    Arguments:
        codec: how an array is packed.
        feedback: see `top_k`.
        bound: the norm to which the server scales down what it unpacks, if noise follows; None: it is not scaled.
    """

    codec: Any
    feedback: str | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        if self.feedback not in _FEEDBACK:
            raise ValueError(
                f'rk.{self.codec.name}: feedback must be "error", "difference", "aggregate" or None; got '
                f"{self.feedback!r}."
            )

    @property
    def sums_only(self) -> bool:
        """Whether the server needs the sum of all messages, so that no other channel can reduce them."""
        return self.feedback == "difference"

    @property
    def keeps_norm(self) -> bool:
        """Whether what is unpacked has at most the norm of what was packed."""
        return self.feedback is None and isinstance(self.codec, TopK | LowRank)

    @property
    def in_words(self) -> str:
        """A description, for a site's owner, of what is done to a reply."""
        added = {
            "error": " What is left out stays here and is added to the next reply.",
            "difference": " Only the difference to what the coordinator already knows of it is sent.",
            "aggregate": " Only the difference to the last result is sent.",
        }
        return f"{self.codec.in_words}.{added.get(self.feedback or '', '')}"

    def held_to(self, bound: float | None) -> "Compression":
        """Return the same compression, with what it unpacks scaled down to this norm; see `rk.chain`."""
        if self.feedback is not None:
            raise ValueError(
                f"rk.chain: noise needs a bound on each message, and feedback={self.feedback!r} adds values from "
                "earlier messages. Use feedback=None before noise."
            )
        if isinstance(self.codec, RandomK):
            raise ValueError(
                "rk.chain: noise needs a bound on each message, and rk.random_k enlarges the entries that it sends. "
                "Use rk.top_k or rk.quantize before noise."
            )
        return replace(self, bound=bound)

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        """Return zeros: the last aggregate or the known mean at the server, and a client's error or last value."""
        self._check(exchange)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), exchange.shapes)
        feedback = self._feedback(exchange)
        at_server = zeros if feedback in ("difference", "aggregate") else ()
        return at_server, zeros if feedback in ("difference", "error") else ()

    def public(self, state: Any) -> Any:
        """The last aggregate, if messages are relative to it."""
        return state if self.feedback == "aggregate" else None

    def encode(self, exchange: ChannelExchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """Pack a value, or what feedback makes of it."""
        feedback, unbiased = self._feedback(exchange), self._unbiased(exchange)
        value = _finite(value)
        if feedback == "error":
            value = _finite(tree.add(value, state))
        elif feedback is not None:
            value = _finite(tree.sub(value, state if feedback == "difference" else exchange.public))
        leaves = jax.tree.leaves(value)
        keys = (jax.random.fold_in(key, i) for i in range(len(leaves)))
        message = [packed(self.codec, a, k, unbiased) for a, k in zip(leaves, keys, strict=True)]
        if feedback == "error":
            state = tree.sub(value, self._arrays(exchange, message))
        elif feedback == "difference":
            state = tree.add(state, self._arrays(exchange, message))
        return message, state

    def unpack(self, exchange: ChannelExchange, message: Any, state: Any) -> Any:
        """Return the update that a message stands for; with feedback="difference", what it adds to the last one."""
        value = self._arrays(exchange, message)
        if self._feedback(exchange) == "aggregate":
            value = tree.add(value, state)
        return value if self.bound is None else tree.clipped(value, self.bound)

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """Note the result, if later messages are relative to it."""
        feedback = self._feedback(exchange)
        if feedback == "difference":
            total = tree.add(state, total)
        return total, state if feedback in ("error", None) else total

    def _feedback(self, exchange: ChannelExchange) -> str | None:
        """The feedback of this exchange. A centre has no memory, and single replies are not compared with results."""
        kinds = ("mean", "sum", "gather") if self.feedback == "error" else ("mean", "sum")
        return self.feedback if exchange.kind in kinds else None

    def _unbiased(self, exchange: ChannelExchange) -> bool:
        return self._feedback(exchange) in ("aggregate", None)

    def _arrays(self, exchange: ChannelExchange, message: Any) -> Any:
        leaves, structure = jax.tree.flatten(exchange.shapes)
        unbiased = self._unbiased(exchange)
        both = zip(message, leaves, strict=True)
        return jax.tree.unflatten(structure, [unpacked(self.codec, sent, like, unbiased) for sent, like in both])

    def _check(self, exchange: ChannelExchange) -> None:
        """Raise if the exchange can't be compressed in this way."""
        name, k = f"rk.{self.codec.name}", getattr(self.codec, "k", None)
        for leaf in jax.tree.leaves(exchange.shapes):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"{name} needs real floating-point updates, but the exchange {exchange.name!r} sends {leaf.dtype}. "
                    "Mark that part of the message in the method with bookkeeping=(None, rk.Bookkeeping(...))."
                )
            if k is not None and k > leaf.size:
                raise ValueError(
                    f"{name}: k must be at most the size of each array; the exchange {exchange.name!r} sends one of "
                    f"{leaf.size}, and k is {k}. Give share=... instead."
                )
        if self._feedback(exchange) == "difference" and not exchange.steady:
            raise ValueError(
                f'{name}: feedback="difference" needs every client in every round, with weights that do not change; '
                f"in the exchange {exchange.name!r}, clients may be missing or weights may change. Use "
                'feedback="error".'
            )


def top_k(share: float | None = None, *, k: int | None = None, feedback: str | None = "error") -> Compression:
    """Send the entries of each array with the largest absolute values, and their places.

    A place takes 1, 2 or 4 bytes, as the size of the array requires. Arrays that would not get smaller, such as single
    numbers, are sent as they are. An update with an entry that is not finite counts as zero.

    The result is biased, and `feedback` makes up for what is left out:

    - `"error"`: a client keeps what it left out and adds it to its next message. The client may be absent from rounds.
      Everything is sent in the end. If clients differ, iterates stay at a distance of the order of the step size from
      the solution, unless the step decreases.
    - `"difference"`: a client sends how its update differs from what the server knows of it. Differences vanish, so
      iterates converge to the solution with a constant step. This needs every client in every round.
    - `"aggregate"`: a client sends how its update differs from the last aggregate, which it is sent. The server adds
      the aggregate again. Clients remember nothing, so it suits clients that are sampled.
    - `None`: what is left out is lost.

    All three cover means and sums, and "error" covers gathers, too. Other messages are compressed without feedback:
    those of a client that holds the centre's data and, where clients would have to remember something, those of a
    cohort drawn by `resample`.

    Arguments:
        share: the share of each array's entries that is sent, rounded up; above 0 and below 1.
        k: the number of entries of each array, instead of a share.
        feedback: "error", "difference", "aggregate" or None.

    References: error: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018. Difference: Richtárik,
    Sokolov and Fatkhullin, EF21, NeurIPS 2021. Aggregate: Ortega and Jafarkhani, Communication-Efficient Federated
    Learning with Compressed Aggregate Feedback (CAFe), 2024.

    Example:
        >>> import rookery as rk
        >>> channel = rk.chain(rk.clip(1.0), rk.top_k(0.01))
    """
    return Compression(TopK(share, k), feedback)


def random_k(share: float | None = None, *, k: int | None = None, feedback: str | None = None) -> Compression:
    """Send k entries of each array, drawn at random by each client, and a seed of 4 bytes that gives their places.

    An array is divided into k stretches whose lengths differ by at most 1, and one entry is drawn from each. Without
    feedback, and with feedback="aggregate", entries are multiplied by the length of their stretch, so that the expected
    result is the update itself.

    Arguments:
        share, k, feedback: see `top_k`.
    """
    return Compression(RandomK(share, k), feedback)


def quantize(bits: int = 8, *, feedback: str | None = None) -> Compression:
    """Round each entry to one of a few levels between −s and s, where s is the largest absolute value of its array.

    There are 255 levels for 8 bits, 15 for 4, and only the two ends for 1. With 4 bits or 1, a byte holds several
    entries. Without feedback, and with feedback="aggregate", an entry is rounded up or down at random, so that the
    expected result is the update itself. With the other kinds of feedback it is rounded to the nearest level; with 1
    bit, its sign times the mean absolute value is sent.

    Arguments:
        bits: 8, 4 or 1.
        feedback: see `top_k`.
    """
    return Compression(Quantize(bits), feedback)


def low_rank(rank: int, *, feedback: str | None = "error") -> Compression:
    """Send each matrix as two factors of this rank: its projection onto the main directions of its columns.

    The directions come from a random start and one power iteration. Arrays with more than two axes count as matrices
    with the first axis as rows; vectors, and matrices that would not get smaller, are sent as they are. The result is
    biased, so use feedback.

    Arguments:
        rank: the number of directions.
        feedback: see `top_k`.

    Reference: the idea is that of Vogels, Karimireddy and Jaggi, PowerSGD, NeurIPS 2019, whose factors are averaged
    separately and started from the last round's; here each client's product is averaged.
    """
    return Compression(LowRank(rank), feedback)


def _finite(value: Any) -> Any:
    """The value, or zeros if an entry is not finite."""
    finite = [jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(value)]
    every = jnp.all(jnp.stack(finite)) if finite else True
    return jax.tree.map(lambda a: jnp.where(every, a, jnp.zeros((), a.dtype)), value)
