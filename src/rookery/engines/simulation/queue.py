"""The queue of an asynchronous simulation: which client begins when, and which reply arrives when."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.engines import engine

# duration(client, t, again): seconds until its reply to the model of round t, with which it began `again` times before
Duration = Callable[[Array, Array, Array], Array]


class Queue(NamedTuple):
    """The clients at work between two rounds. All places but one are taken: the place of the last reply is free."""

    order: Array  # all clients: first those in the places, then the idle ones
    left: Array  # by place: the seconds until the reply arrives
    version: Array  # by place: the round whose model the client works on
    free: Array  # the place that is free
    began: Array  # by client: the round in which it last began
    again: Array  # by client: how often it had begun in that round before


class Events(NamedTuple):
    """What happens in a round: `buffer` clients begin, and as many replies arrive."""

    ids: Array  # the clients that begin
    again: Array  # how often each has begun in this round before
    place: Array  # where its reply is kept; the number of places if it arrives in this round
    source: Array  # of each reply that arrives: its place, or the number of places + its index among those that begin
    staleness: Array  # of each reply that arrives: how many rounds ago its client began
    seconds: Array  # how long the round takes


def start(seed: Array, n: int, places: int, duration: Duration) -> Queue:
    """The queue before the first round: all places but the last are taken, by clients that begin now."""
    choice = jax.random.fold_in(engine.choice_and_key(seed, 0)[0], _ORDER)
    order = jax.random.permutation(choice, jnp.arange(n, dtype=jnp.int32))
    taken = order[: places - 1]
    began = jnp.full(n, -1, jnp.int32).at[taken].set(0)
    left = jnp.full(places, jnp.inf, jnp.float32)
    if places > 1:
        left = left.at[:-1].set(jax.vmap(lambda client: duration(client, jnp.int32(0), jnp.int32(0)))(taken))
    nothing = jnp.zeros(places, jnp.int32), jnp.int32(places - 1)
    return Queue(order, left, *nothing, began, jnp.zeros(n, jnp.int32))


_ORDER = 0x6F726465  # separates the order before the first round from the draws in it


def rounds(
    queue: Queue, begin: Any, count: Any, most: int, buffer: int, once: bool, seed: Array, duration: Duration
) -> tuple[Queue, Events]:
    """The queue after `count` rounds, at most `most`, from round `begin` on, and what happens in each of them.

    `once`: whether a client must not begin twice in a round.
    """

    def one(i: Any, state: Any) -> Any:
        queue, events = state
        queue, event = one_round(queue, jnp.asarray(begin, jnp.int32) + i, buffer, once, seed, duration)
        return queue, jax.tree.map(lambda rows, row: rows.at[i].set(row), events, event)

    integers = jnp.zeros((most, buffer), jnp.int32)
    nothing = Events(integers, integers, integers, integers, integers, jnp.zeros(most, jnp.float32))
    return jax.lax.fori_loop(0, jnp.asarray(count, jnp.int32), one, (queue, nothing))


def one_round(queue: Queue, t: Array, buffer: int, once: bool, seed: Array, duration: Duration) -> tuple[Queue, Events]:
    """The queue after round t, and what happens in the round.

    A client begins in the free place. Then replies arrive, in order of time. The place of each is taken by another
    client, except that of the last.
    """
    n, places = len(queue.order), len(queue.left)
    choice = engine.choice_and_key(seed, t)[0]

    def turn(k: Any, state: Any) -> Any:
        queue, now, done, begun, events = state
        place, order = queue.free, queue.order
        # The client that was in the place, or one of the idle ones, which follow those in places.
        least = (queue.began[order[place]] == t).astype(jnp.int32) if once else 0
        drawn = jax.random.randint(jax.random.fold_in(choice, k), (), least, n - places - done + 1, jnp.int32)
        other = jnp.where(drawn == 0, place, places - 1 + drawn)
        order = _swapped(order, place, other)
        if once:  # a client that has begun in this round, and has replied, goes to the end, where none is drawn
            out = queue.began[order[other]] == t
            done += out
            order = _swapped(order, other, jnp.where(out, n - done, other))
        client = order[place]
        again = jnp.where(queue.began[client] == t, queue.again[client] + 1, 0)
        times = queue.left.at[place].set(now + duration(client, t, again))
        version = queue.version.at[place].set(t)
        began, counts = queue.began.at[client].set(t), queue.again.at[client].set(again)
        begun = begun.at[place].set(k)
        first = jnp.argmin(times).astype(jnp.int32)
        source = jnp.where(begun[first] >= 0, places + begun[first], first)
        event = Events(client, again, place, source, t - version[first], times[first])
        events = jax.tree.map(lambda rows, value: rows.at[k].set(value), events, event)
        queue = Queue(order, times.at[first].set(jnp.inf), version, first, began, counts)
        return queue, event.seconds, done, begun.at[first].set(-1), events

    integers, nobody = jnp.zeros(buffer, jnp.int32), jnp.full(places, -1, jnp.int32)
    nothing = Events(integers, integers, integers, integers, integers, jnp.zeros(buffer, jnp.float32))
    state = queue, jnp.float32(0), jnp.int32(0), nobody, nothing
    queue, now, _, begun, events = jax.lax.fori_loop(0, buffer, turn, state)
    stays = begun[events.place] == jnp.arange(buffer)
    events = events._replace(place=jnp.where(stays, events.place, places), seconds=now)
    return queue._replace(left=queue.left - now), events


def _swapped(order: Array, i: Array, j: Array) -> Array:
    """The order with the entries i and j exchanged."""
    return order.at[i].set(order[j]).at[j].set(order[i])
