"""Decide which clients' rows are on the device, where they are, and which clients make room for others.

The seed determines the cohorts of the next rounds, so a client that makes room is the one needed last (Belady, 1966).
Nothing here touches a row or a device.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

NEVER = np.iinfo(np.int32).max  # the next round of a client that no known cohort needs


class Arena:
    """A range of rows from which intervals are allocated and freed."""

    def __init__(self, rows: int) -> None:
        self._free = [(0, rows)]  # begin and length, in order, no two of them adjacent

    def take(self, size: int) -> int | None:
        """Allocate an interval and return where it begins; None if no free interval is long enough."""
        for k, (begin, length) in enumerate(self._free):
            if length >= size:
                self._free[k : k + 1] = [(begin + size, length - size)] if length > size else []
                return begin
        return None

    def give(self, begin: int, size: int) -> int:
        """Free an interval and return the length of the free interval that now contains it."""
        k = bisect_left(self._free, (begin, 0))
        end = begin + size
        after = k
        if k < len(self._free) and self._free[k][0] == end:
            end, after = end + self._free[k][1], k + 1
        if k and sum(self._free[k - 1]) == begin:
            begin, k = self._free[k - 1][0], k - 1
        self._free[k:after] = [(begin, end - begin)]
        return end - begin


class Prefetch(NamedTuple):
    """Rounds whose cohorts are on the device together, and the clients to transfer for them."""

    begin: int
    end: int
    moves: list[tuple[int, ...]]  # a client, and where its rows go at each level


class Pool:
    """The clients whose rows are on the device.

    Arguments:
        sizes: for each level, the number of rows of each client.
        costs: for each level, the cost of transferring a row.
        capacities: for each level, the rows that fit on the device: at least those of any cohort.
        cohorts: cohorts(t) -> the cohorts of rounds t, t + 1, …, one row per round, for as many rounds as it draws.
    """

    def __init__(
        self, sizes: Sequence[np.ndarray], costs: Sequence[int], capacities: Sequence[int],
        cohorts: Callable[[int], np.ndarray],
    ) -> None:  # fmt: skip
        self._costs = np.sum([rows * cost for rows, cost in zip(sizes, costs, strict=True)], axis=0)
        self._sizes, self._capacities, self._cohorts = [rows.tolist() for rows in sizes], capacities, cohorts
        n = len(sizes[0])
        self._next = np.full(n, NEVER, np.int64)  # the round in which a client is needed next
        self._locked = np.zeros(n, bool)  # needed by the rounds of the current prefetch
        self.clear()
        self._begin, self._ids = 0, np.zeros((0, 0), np.int32)
        self._following = np.zeros((0, 0), np.int64)  # for each member of a cohort, the next round that needs it

    def clear(self) -> None:
        """Forget all rows on the device."""
        self.end = -1  # of the last prefetch
        self._arenas = [Arena(capacity) for capacity in self._capacities]
        self._places: dict[int, tuple[int, ...]] = {}
        self._queue: list[tuple[int, int]] = []  # (-next round, client); stale entries are skipped

    def prefetch(self, t: int, most: int, enough: int) -> Prefetch:
        """Schedule at most `most` rounds from t on: as many as fit, until transferring their rows costs `enough`."""
        self._look_ahead(t, most)
        moves: list[tuple[int, ...]] = []
        aside: list[tuple[int, int]] = []  # locked entries that were taken off the queue
        self._locked[:] = False
        end, cost, counted = t, 0, 0
        while end < t + most and (end == t or cost < enough):
            cohort = self._ids[end - self._begin]
            self._locked[cohort] = True
            fits = self._place_cohort(cohort, moves, aside)
            if not fits and end > t:
                break
            if not fits:  # free rows are too fragmented: start over
                self.clear()
                moves, aside = [], []
                fits = self._place_cohort(cohort, moves, aside)
                assert fits, "the capacities must hold any cohort"
            self._next[cohort] = following = self._following[end - self._begin]
            for client, later in zip(cohort.tolist(), following.tolist(), strict=True):
                heapq.heappush(self._queue, (-later, client))
            end += 1
            cost += sum(int(self._costs[client]) for client, *_ in moves[counted:])
            counted = len(moves)
        for entry in aside:
            heapq.heappush(self._queue, entry)
        self.end = end
        return Prefetch(t, end, moves)

    def _place_cohort(self, cohort: np.ndarray, moves: list[tuple[int, ...]], aside: list[tuple[int, int]]) -> bool:
        """Allocate rows for members of a cohort that have none; return whether all of them fit."""
        for client in cohort.tolist():
            if client in self._places:
                continue
            places = self._place(client, aside)
            if places is None:
                return False
            self._places[client] = places
            heapq.heappush(self._queue, (-int(self._next[client]), client))
            moves.append((client, *places))
        return True

    def _place(self, client: int, aside: list[tuple[int, int]]) -> tuple[int, ...] | None:
        """Return where a client's rows of each level go, evicting others if necessary; None if they do not fit."""
        taken: list[int] = []
        for level, (arena, sizes) in enumerate(zip(self._arenas, self._sizes, strict=True)):
            begin = arena.take(sizes[client])
            while begin is None:
                evicted = self._needed_last(aside)
                if evicted is None:
                    self._free(client, taken)
                    return None
                places = self._places.pop(evicted)
                if not taken and all(rows[evicted] == rows[client] for rows in self._sizes):
                    return places
                freed = self._free(evicted, places)[level]
                begin = arena.take(sizes[client]) if freed >= sizes[client] else None
            taken.append(begin)
        return tuple(taken)

    def _needed_last(self, aside: list[tuple[int, int]]) -> int | None:
        """The client on the device that is needed last; None if the current prefetch needs all of them."""
        while self._queue:
            entry = heapq.heappop(self._queue)
            later, client = -entry[0], entry[1]
            if client not in self._places or self._next[client] != later:
                continue
            if not self._locked[client]:
                return client
            aside.append(entry)
        return None

    def _free(self, client: int, places: Sequence[int]) -> list[int]:
        """Free a client's rows; for each level, return the length of the free interval that contains them."""
        levels = zip(self._arenas, self._sizes, places, strict=False)
        return [arena.give(begin, sizes[client]) for arena, sizes, begin in levels]

    def _look_ahead(self, t: int, most: int) -> None:
        """Know the cohorts of at least `most` rounds from t on, and the next round of every client."""
        if t != self.end:
            self._begin, self._ids = t, self._ids[:0]
        if self._begin + len(self._ids) >= t + most:
            return
        ids = [self._ids[t - self._begin :]] if len(self._ids) else []
        known = t + sum(map(len, ids))
        while known < t + 2 * most:
            ids.append(self._cohorts(known))
            known += len(ids[-1])
        self._begin, self._ids = t, np.concatenate(ids)
        flat = self._ids.reshape(-1)
        rounds = np.repeat(np.arange(t, known), self._ids.shape[1])
        order = np.argsort(flat, kind="stable")
        again = flat[order[1:]] == flat[order[:-1]]
        following = np.full(len(flat), NEVER, np.int64)
        following[order[:-1][again]] = rounds[order[1:][again]]
        self._following = following.reshape(self._ids.shape)
        first = order[np.concatenate([[True], ~again])]
        self._next[:] = NEVER
        self._next[flat[first]] = rounds[first]
        self._queue = [(-int(self._next[client]), client) for client in self._places]
        heapq.heapify(self._queue)
