"""Two neighbouring federations, run side by side: what their clients release differs, and nothing else does."""

from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery.channels import private_clients
from rookery.data.cohort import Draw, Poisson
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.interpreter import Mapped
from rookery.engines.simulation import debug, device
from rookery.language import ledger
from rookery.plan.calls import ReduceCall


@dataclass
class Tape:
    """What a run did, step by step.

    Attributes:
        maps: of each client function, what the clients were sent, and their results.
        releases: each result before the noise, and the standard deviation of its noise.
        results: the same results, with noise.
    """

    maps: list[tuple[list[Any], list[Any]]] = field(default_factory=list)
    releases: list[tuple[list[np.ndarray], float]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


class Run:
    """A private run of a job without compilation, which can be repeated with another client and the same results.

    Arguments:
        job: the job; its noise multiplier should be 1, so that the noise of a release is its largest change.
        monkeypatch: pytest's.
    """

    def __init__(self, job: Job, monkeypatch: Any) -> None:
        self._first, self._tape, self.job = Tape(), Tape(), job
        monkeypatch.setattr(private_clients, "noisy", self._noisy)
        monkeypatch.setattr(debug, "check_finite", lambda *_: None)
        self.traced = engine.traced(job, debug=True)

    def _noisy(self, total: Any, scale: Any, key: Any) -> Any:
        """In place of the noise: write down the result, and return that of the first run."""
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), total)

        def note(total: Any, scale: Any) -> Any:
            tape, first = self._tape, self._first
            tape.releases.append(([np.asarray(a) for a in jax.tree.leaves(total)], float(scale)))
            i = len(tape.releases) - 1
            draw = np.random.default_rng(i).normal
            if tape is first:
                first.results.append(jax.tree.map(lambda a: (a + scale * draw(size=a.shape)).astype(a.dtype), total))
            return first.results[i]

        return jax.pure_callback(note, shapes, total, scale)

    def first(self, rounds: int = 2) -> list[Any]:
        """Compute the start and some rounds; return the carry after each of them."""
        self._first = self._tape = Tape()
        return self._carries(self.job.clients, None, False, rounds)

    def again(self, clients: Any, other: int, left_out: bool = False, rounds: int = 2) -> list[Any]:
        """Compute it again with other data of one client, or without that client."""
        self._tape = Tape()
        return self._carries(_as_long(clients, self.job.clients), other, left_out, rounds)

    def _carries(self, clients: Any, other: int | None, left_out: bool, rounds: int) -> list[Any]:
        traced, job = self.traced, self.job
        make = lambda plan: _Program(plan, clients, self._first, self._tape, other, left_out)
        begin, self.marks = make(traced.start), []
        carry, _ = device.start(begin, traced.start.consts, clients, traced.hyper, job.start, traced.seed, traced.noise)
        carries = [carry]
        self.marks.append(len(self._tape.releases))
        program = make(traced.round)
        for t in range(rounds):
            ids, before, after, _ = device.one_round(
                program, job.draw, traced.round.consts, clients, traced.hyper, carry, t, traced.seed
            )
            carry = device.put(program, clients.n, carry, ids, before, after, True)
            carries.append(carry)
            self.marks.append(len(self._tape.releases))
        return carries

    def changes(self) -> list[list[float]]:
        """How far the last run's results were from the first one's, in units of the noise: of the start, of rounds."""
        both = zip(self._first.releases, self._tape.releases, strict=True)
        found = [_distance(*results, *scales) for results, scales in (zip(a, b, strict=True) for a, b in both)]
        ends = [0, *self.marks]
        return [found[begin:end] for begin, end in pairwise(ends)]


def _as_long(clients: Any, like: Any) -> Any:
    """The clients with unused rows after the last one, so that a compiled part of the plan takes their data, too."""
    clients = copy(clients)
    for level in ("_lower", "_upper"):
        data, wanted = getattr(clients, level), getattr(like, level)
        if data is not None:
            pad = lambda a, to: jnp.concatenate([a, jnp.zeros((len(to) - len(a), *a.shape[1:]), a.dtype)])
            setattr(clients, level, replace(data, rows=jax.tree.map(pad, data.rows, wanted.rows)))
    return clients


def _distance(here: list[np.ndarray], there: list[np.ndarray], scale: float, same: float) -> float:
    assert scale == same  # the size of the noise is public
    return float(np.sqrt(sum(np.sum(np.abs(a - b) ** 2) for a, b in zip(here, there, strict=True)))) / scale


class _Program(device.Program):
    def __init__(self, plan: Any, clients: Any, first: Tape, tape: Tape, other: int | None, left_out: bool) -> None:
        super().__init__(plan, clients, "auto")
        self._how = first, tape, other, left_out

    def interpreter(self, clients: Any) -> Any:
        return _Replayed(clients, self.axes, self.block, *self._how)


class _Replayed(debug._Stepwise):
    """Computes the functions of all clients in the first run, and of one client in the others."""

    def __init__(
        self, clients: Any, axes: Any, block: Any, first: Tape, tape: Tape, other: Any, left_out: bool
    ) -> None:
        super().__init__(clients, axes, block)
        self._first, self._tape, self._other, self._left_out = first, tape, other, left_out

    def _inside(self) -> Any:
        how = self._first, self._tape, self._other, self._left_out
        return _Replayed(self._clients, self._axes, self._block, *how)

    def reduce(self, call: ReduceCall, read: Any) -> list[Any]:
        if not self._left_out:
            return super().reduce(call, read)
        here = read(call.ids) != self._other
        return super().reduce(call, lambda v: jnp.where(here, read(v), 0) if v is call.weights else read(v))

    def _compute(self, group: list[Mapped], reduced: Any = None) -> list[Any]:
        for mapped in group:
            ids, place = np.asarray(mapped.ids), len(self._tape.maps)
            sent = [np.asarray(jax.random.key_data(a) if _is_key(a) else a) for a in mapped.sent]
            again = self._tape is not self._first
            if again:
                known, rows = self._first.maps[place]
                jax.tree.map(np.testing.assert_array_equal, sent, known)  # what a client is sent is public
                rows = list(rows)
            else:
                rows = [None] * len(ids)
            local = [self._array(v) for v in mapped.local]
            for j, identity in enumerate(ids):
                if not again or identity == self._other:
                    rows[j] = self._on_one(mapped, jnp.int32(identity), [a[j] for a in local])
            self._tape.maps.append((sent, rows))
            mapped.rows = [_stacked(leaf) for leaf in zip(*(row[:-1] for row in rows), strict=True)] or [None]
        return []

    @property
    def work(self) -> Any:
        return ledger.NO_WORK  # not counted here


def _stacked(leaves: Any) -> Any:
    return jnp.stack(leaves) if _is_key(leaves[0]) else jnp.asarray(np.stack(leaves))


def _is_key(a: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(a), jax.dtypes.prng_key)


def poisson(job: Job, expected: float) -> Job:
    """The job with Poisson cohorts."""
    draw = Draw.poisson(Poisson(expected), job.clients.n)
    return replace(job, cohort=draw.places, chance=draw.chance)


def cohorts(job: Job, rounds: int) -> list[list[int]]:
    """The clients in the cohort of each round."""
    keys = [engine.round_keys(jax.random.key(job.seed), t, job.clients.n, job.draw, engine.noise_root(job))
            for t in range(rounds)]  # fmt: skip
    taken = [np.ones(len(k.ids), bool) if isinstance(k.present, tuple) else np.asarray(k.present) for k in keys]
    return [np.asarray(k.ids)[present].tolist() for k, present in zip(keys, taken, strict=True)]
