"""The pool: which clients' rows are on the device, where, and who makes room for whom.

The cohorts of the next rounds are known (they follow from the seed), so the client who makes room is the one who will
be needed last (Belady, 1966). Nothing here touches a row or a device.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

NEVER = np.iinfo(np.int32).max  # the next round of a client that is not needed as far as one can see


class Arena:
    """Rows end to end, of which parts are taken and given back."""

    def __init__(self, rows: int) -> None:
        self._free = [(0, rows)]  # begin and length, in order, no two of them adjacent

    def take(self, size: int) -> int | None:
        """Where so many rows begin that are now taken; None if nowhere is room for all of them together."""
        for k, (begin, length) in enumerate(self._free):
            if length >= size:
                self._free[k : k + 1] = [(begin + size, length - size)] if length > size else []
                return begin
        return None

    def give(self, begin: int, size: int) -> int:
        """Give rows back; the length of the free part that they are now in."""
        k = bisect_left(self._free, (begin, 0))
        end = begin + size
        after = k
        if k < len(self._free) and self._free[k][0] == end:
            end, after = end + self._free[k][1], k + 1
        if k and sum(self._free[k - 1]) == begin:
            begin, k = self._free[k - 1][0], k - 1
        self._free[k:after] = [(begin, end - begin)]
        return end - begin


class Plan(NamedTuple):
    """Rounds whose cohorts are on the device together, and who has to be brought there for them."""

    begin: int
    end: int
    moves: list[tuple[int, ...]]  # a client, and where its rows go at each level


class Pool:
    """Whose rows are on the device.

    Arguments:
        sizes: for each level, the rows of each client.
        costs: for each level, what it takes to bring a row.
        rooms: for each level, the rows that there is room for: at least those of any cohort.
        cohorts: cohorts(t) -> the cohorts of rounds t, t + 1, … as far as one looks ahead at once, a row for each.
    """

    def __init__(
        self, sizes: Sequence[np.ndarray], costs: Sequence[int], rooms: Sequence[int],
        cohorts: Callable[[int], np.ndarray],
    ) -> None:  # fmt: skip
        self._costs = np.sum([own * cost for own, cost in zip(sizes, costs, strict=True)], axis=0)
        self._sizes, self._rooms, self._cohorts = [own.tolist() for own in sizes], rooms, cohorts
        n = len(sizes[0])
        self._next = np.full(n, NEVER, np.int64)  # the round in which a client is needed next
        self._locked = np.zeros(n, bool)  # needed by the rounds that are being planned
        self.clear()
        self._begin, self._ids = 0, np.zeros((0, 0), np.int32)
        self._following = np.zeros((0, 0), np.int64)  # for each of a cohort, the round in which it is needed again

    def clear(self) -> None:
        """Nobody's rows are there."""
        self.planned = -1  # the round after those planned last
        self._arenas = [Arena(room) for room in self._rooms]
        self._places: dict[int, tuple[int, ...]] = {}
        self._queue: list[tuple[int, int]] = []  # (-next round, client): entries that no longer hold are skipped

    def plan(self, t: int, most: int, enough: int) -> Plan:
        """Some rounds from t on, at most `most`, as many as fit; no more once it costs `enough` to bring their rows."""
        self._look_ahead(t, most)
        moves: list[tuple[int, ...]] = []
        aside: list[tuple[int, int]] = []
        self._locked[:] = False
        end, cost, counted = t, 0, 0
        while end < t + most and (end == t or cost < enough):
            cohort = self._ids[end - self._begin]
            self._locked[cohort] = True
            fits = self._fits(cohort, moves, aside)
            if not fits and end > t:
                break
            if not fits:  # the room is there, in too many parts: start anew
                self.clear()
                moves, aside = [], []
                fits = self._fits(cohort, moves, aside)
                assert fits, "a cohort that there is no room for"
            self._next[cohort] = following = self._following[end - self._begin]
            for client, later in zip(cohort.tolist(), following.tolist(), strict=True):
                heapq.heappush(self._queue, (-later, client))
            end += 1
            cost += sum(int(self._costs[client]) for client, *_ in moves[counted:])
            counted = len(moves)
        for entry in aside:
            heapq.heappush(self._queue, entry)
        self.planned = end
        return Plan(t, end, moves)

    def _fits(self, cohort: np.ndarray, moves: list[tuple[int, ...]], aside: list[tuple[int, int]]) -> bool:
        """Find a place for those of a cohort who have none; False if there is none."""
        for client in cohort.tolist():
            if client in self._places:
                continue
            places = self._placed(client, aside)
            if places is None:
                return False
            self._places[client] = places
            heapq.heappush(self._queue, (-int(self._next[client]), client))
            moves.append((client, *places))
        return True

    def _placed(self, client: int, aside: list[tuple[int, int]]) -> tuple[int, ...] | None:
        """Where a client's rows of each level can go, others having made room if need be."""
        taken: list[int] = []
        for level, (arena, sizes) in enumerate(zip(self._arenas, self._sizes, strict=True)):
            begin = arena.take(sizes[client])
            while begin is None:
                other = self._last(aside)
                if other is None:
                    self._give(client, taken)
                    return None
                places = self._places.pop(other)
                if not taken and all(each[other] == each[client] for each in self._sizes):
                    return places  # of one who has as many rows
                freed = self._give(other, places)[level]
                begin = arena.take(sizes[client]) if freed >= sizes[client] else None
            taken.append(begin)
        return tuple(taken)

    def _last(self, aside: list[tuple[int, int]]) -> int | None:
        """The client who is needed last of those who are there; None if all are needed."""
        while self._queue:
            entry = heapq.heappop(self._queue)
            later, client = -entry[0], entry[1]
            if client not in self._places or self._next[client] != later:
                continue
            if not self._locked[client]:
                return client
            aside.append(entry)
        return None

    def _give(self, client: int, places: Sequence[int]) -> list[int]:
        """Give back a client's rows; at each level, the free part there is now."""
        levels = zip(self._arenas, self._sizes, places, strict=False)
        return [arena.give(begin, sizes[client]) for arena, sizes, begin in levels]

    def _look_ahead(self, t: int, most: int) -> None:
        """Know the cohorts of `most` rounds from t on and, once that takes more of them, when everybody is next."""
        if t != self.planned:
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
