"""The secure sums of one phase, at the coordinator: agreements on keys, and the round trips of the protocol.

Importing this file needs `cryptography`. See `masking` for what sites do.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rookery.engines.federation import wire
from rookery.engines.federation.links import Links, Reply, Request, SiteError, needed
from rookery.engines.federation.masking import MOST_SLOTS, context_of
from rookery.engines.federation.replies import is_forgotten
from rookery.engines.federation.store import Moment
from rookery.engines.federation.unmasking import (
    Agreed,
    certificate_of,
    wrong_parts,
    wrong_sealed,
    wrong_shares,
)

_TRIES = 5  # agreements for one exchange, if sites are restarted meanwhile


class Slot(NamedTuple):
    """The slot of an agreement on keys, whose masks hide the replies to one exchange."""

    agreed: Agreed
    number: int
    among: list[int]  # the clients that are asked

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a request that name the slot."""
        return {"agreement": self.agreed.number, "slot": self.number, "among": self.among}


class Summing:
    """The secure sums of one phase.

    Arguments:
        run, moment, links: the phase's.
        slots: how many exchanges are expected, or more.
        least: the fewest replies without which an exchange waits; None: all.
    """

    def __init__(self, run: str, moment: Moment, links: Links, slots: int, least: int | None) -> None:
        self._run, self._moment, self._links, self._least = run, moment, links, least
        self._slots = max(1, min(slots, MOST_SLOTS))
        self._agreed: dict[tuple[int, ...], Agreed] = {}

    def slot(self, clients: tuple[int, ...], threshold: int) -> Slot | None:
        """Return a fresh slot for an exchange with these clients; None if fewer than the threshold agree on keys."""
        agreed = self._agreed.get(clients)
        if agreed is None or agreed.used == agreed.slots or agreed.threshold != threshold:
            agreed = self._agree(clients, threshold)
        if agreed is None:
            return None
        self._agreed[clients] = agreed
        agreed.used += 1
        return Slot(agreed, agreed.used - 1, agreed.clients)

    def renew(self, clients: tuple[int, ...]) -> None:
        """Have these clients agree anew before the next exchange: some have forgotten their keys."""
        self._agreed.pop(clients, None)

    def unmask(self, slot: Slot, call: int, added: list[int], total: np.ndarray) -> str | None:
        """Take the masks off a sum, in place, or return why that can't be done."""
        agreed, threshold = slot.agreed, slot.agreed.threshold
        if len(added) < threshold:
            return f"needs {threshold} replies; got {len(added)}"
        sealed = {client: [agreed.shares_for(client, slot.number, slot.among)] for client in added}
        fields = {"agreement": agreed.number, "slot": slot.number, "added": added}
        check = lambda site, reply: wrong_shares(reply, len(slot.among))
        replies = self._ask("unmask", fields, [], sealed, check, threshold)
        if len(replies) < threshold:
            links, away = self._links, [client for client in added if client not in replies]
            who = "; ".join(f"{links.name(i)} {links.records[i].why.rstrip('.')}" for i in away)
            return f"needs {threshold} sites to unmask it; got {len(replies)} ({who})"
        shares = {client: reply.arrays[0] for client, reply in replies.items()}
        try:
            agreed.unmask(total, slot.number, call, slot.among, added, shares)
        except ValueError as error:
            return f"can't be unmasked: {error}"
        return None

    def _agree(self, clients: tuple[int, ...], threshold: int) -> Agreed | None:
        """Have the clients announce keys and exchange shares."""
        least = None if self._least is None else max(self._least, threshold)
        for _ in range(_TRIES):
            number, (phase, t) = self._links.number(), self._moment
            fields = {"agreement": number, "slots": self._slots, "phase": phase, "round": t}
            check = lambda site, reply: wrong_parts(reply, self._slots)
            keys = self._ask("keys", fields, [], {client: [] for client in clients}, check, least)
            if len(keys) < threshold:
                return None
            agreed = self._share(number, threshold, keys, least)
            if len(agreed.sealed) == len(keys) or least is not None:
                return agreed if len(agreed.sealed) >= threshold else None
        return None

    def _share(self, number: int, threshold: int, keys: dict[int, Reply], least: int | None) -> Agreed:
        """Pass on the keys, and take the shares."""
        there, name = sorted(keys), self._links.name
        peers = [{"client": i, "name": name(i), **certificate_of(keys[i].header)} for i in there]
        fields = {"agreement": number, "threshold": threshold, "peers": peers}
        parts = {client: keys[client].arrays[0] for client in there}
        check = lambda site, reply: wrong_sealed(reply, len(there) - 1, self._slots)
        replies = self._ask("shares", fields, list(parts.values()), {client: [] for client in there}, check, least)
        sealed = {client: reply.arrays[0] for client, reply in replies.items() if not is_forgotten(reply)}
        return Agreed(number, context_of(self._run, self._moment, number), threshold, self._slots, parts, sealed)

    def _ask(
        self, do: str, fields: dict[str, Any], shared: list[Any], own: Mapping[int, list[Any]],
        check: Callable[[int, Reply], str | None], least: int | None,
    ) -> dict[int, Reply]:  # fmt: skip
        """Ask clients for their part in the protocol. All are sent the arrays `shared`, and each its `own`."""
        number = self._links.number()
        header = {"do": do, "run": self._run, "number": number, **fields}
        messages = zip(own, wire.encode_each(header, shared, list(own.values())), strict=True)
        requests = {client: Request(number, message) for client, message in messages}
        try:
            return self._links.ask(requests, least, check)
        except SiteError as error:
            raise needed(error) from error
