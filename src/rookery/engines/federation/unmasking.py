"""The coordinator's part in secure sums: it passes on keys and shares, and takes the masks off the sum.

Importing this file needs `cryptography`. See `masking` for the sites' part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rookery.engines.federation import masks
from rookery.engines.federation.links import Reply
from rookery.engines.federation.masking import own_purpose, pair_purpose
from rookery.engines.federation.replies import is_forgotten


@dataclass(eq=False)
class Agreed:
    """An agreement on keys, as the coordinator knows it.

    Attributes:
        number: its number, which names it.
        context: see `masking.context_of`.
        threshold: the fewest sites of a sum, and the number of shares that reveal a secret.
        slots: how many exchanges it serves.
        parts: the sites' public parts, by client.
        sealed: what each site has sent to the others, by client: a row for each other site in order.
        used: how many slots have been used.
    """

    number: int
    context: str
    threshold: int
    slots: int
    parts: dict[int, np.ndarray]
    sealed: dict[int, np.ndarray] = field(default_factory=dict)
    used: int = 0

    @property
    def clients(self) -> list[int]:
        """The clients with which a sum can be made, in order."""
        return sorted(self.sealed)

    def shares_for(self, client: int, slot: int, among: Sequence[int]) -> np.ndarray:
        """Return the encrypted shares that the clients among these have sent to this one."""
        order = sorted(self.parts)
        row = lambda sender: [c for c in order if c != sender].index(client)
        rows = [self.sealed[sender][row(sender), slot] for sender in among if sender != client]
        return np.stack(rows)

    def unmask(
        self, total: np.ndarray, slot: int, call: int, among: Sequence[int], added: Sequence[int],
        shares: Mapping[int, np.ndarray],
    ) -> None:  # fmt: skip
        """Take the masks off the sum of the replies of the clients `added`, in place.

        Arguments:
            total: the sum of the masked replies, flat.
            slot, call, among: as the replies were asked for.
            added: the clients whose replies are in the sum.
            shares: what sites have revealed, by client: see `Masking.reveal`. ValueError if they do not fit.
        """
        places = sorted(client + 1 for client in shares)[: self.threshold]
        factors = masks.joiner(places)
        for i, client in enumerate(among):
            secret = masks.joined({place: shares[place - 1][i].tobytes() for place in places}, factors)
            if client in added:
                if masks.commitment(secret) != self.parts[client][1 + self.slots + slot].tobytes():
                    raise ValueError("the shares are not those that were announced")
                masks.add_stream(total, masks.derived(secret, own_purpose(self.context, slot, call, client)), -1)
                continue
            if masks.public_key(secret) != self.parts[client][1 + slot].tobytes():
                raise ValueError("the shares are not those that were announced")
            for other in added:  # whose masks with this client do not cancel
                purpose = pair_purpose(self.context, slot, call, client, other)
                common = masks.agreed_key(secret, self.parts[other][1 + slot].tobytes(), purpose)
                masks.add_stream(total, common, -1 if other < client else 1)


def wrong_parts(reply: Reply, slots: int) -> str | None:
    """Return what is wrong with the reply to a request for keys, or None."""
    return _wrong(reply, (1 + 2 * slots, masks.SECRET), "send the keys of its masks as asked")


def wrong_sealed(reply: Reply, others: int, slots: int) -> str | None:
    """Return what is wrong with the reply to a request for encrypted shares, or None."""
    return None if is_forgotten(reply) else _wrong(reply, (others, slots, masks.SEALED), "share its secrets as asked")


def wrong_shares(reply: Reply, count: int) -> str | None:
    """Return what is wrong with the reply to a request to unmask, or None."""
    return _wrong(reply, (count, masks.SHARE), "reveal its shares as asked")


def _wrong(reply: Reply, shape: tuple[int, ...], what: str) -> str | None:
    fits = [(a.shape, a.dtype) for a in reply.arrays] == [(shape, np.dtype(np.uint8))]
    return None if fits else f"does not {what}"


def certificate_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the signature that goes with a site's keys, to be passed on."""
    return {name: header[name] for name in ("cert", "signature") if isinstance(header.get(name), str)}
