"""A site's part in secure sums: its keys, its masks, and what it helps to unmask.

Importing this file needs `cryptography`. The protocol is that of Bonawitz et al. (2017). One agreement on keys serves
several exchanges of a round. It has a slot for each, with secrets of its own, so that what is revealed for one exchange
says nothing of another. A slot hides one reply, and its secrets are shared among the sites:

- if the reply arrived, the others reveal the seed of its own mask; if it did not, the key of its masks with the others.
  A site never reveals both of one slot;
- a site reveals shares once for a slot, only if enough replies are added up, and only with the same participants
  whenever the same reply is asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rookery.engines.federation import masks
from rookery.engines.federation.identity import Identity
from rookery.engines.federation.site import ForgottenError, RefusedError
from rookery.engines.federation.store import Moment

MOST_SLOTS = 64  # of one agreement
_MOST_SITES = 10_000


class Hides(NamedTuple):
    """The reply that a slot hides.

    Attributes:
        call: the exchange's number in the plan.
        request: a digest of what the reply depends on.
        among: the numbers of the clients with which it has masks, its own included.
    """

    call: int
    request: str
    among: tuple[int, ...]


@dataclass(eq=False)
class Agreement:
    """What a site knows of one agreement on keys."""

    context: str
    moment: Moment
    envelope: bytes = field(repr=False)  # the private key with which shares are encrypted
    keys: list[bytes] = field(repr=False)  # by slot
    seeds: list[bytes] = field(repr=False)
    threshold: int = 0  # 0: others' keys have not come yet
    peers: dict[int, np.ndarray] = field(default_factory=dict)  # their public parts, see `public_parts`
    names: dict[int, str] = field(default_factory=dict)
    own: list[bytes] = field(default_factory=list, repr=False)  # its own shares of its secrets, by slot
    sealed: np.ndarray | None = None
    hides: dict[int, Hides] = field(default_factory=dict)  # by slot
    revealed: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by slot, the clients that are added up


def context_of(run: str, moment: Moment, number: int) -> str:
    """Return the text that keys and signatures of an agreement are bound to."""
    return f"{run} {moment[0]} {moment[1]} {number}"


def public_parts(envelope: bytes, keys: Sequence[bytes], seeds: Sequence[bytes]) -> np.ndarray:
    """Return what a site announces, in rows: its public keys (envelope, slots), and commitments to its seeds."""
    parts = [masks.public_key(envelope), *map(masks.public_key, keys), *map(masks.commitment, seeds)]
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, masks.SECRET)


def signed_text(context: str, client: int, parts: np.ndarray) -> bytes:
    """Return what a site signs."""
    return f"rookery secure sum keys {context} {client} ".encode() + parts.tobytes()


def pair_purpose(context: str, slot: int, call: int, one: int, other: int) -> str:
    """Return the purpose of the key of two clients' common mask."""
    return f"mask {context} {slot} {call} {min(one, other)} {max(one, other)}"


def own_purpose(context: str, slot: int, call: int, client: int) -> str:
    """Return the purpose of the key of a client's own mask."""
    return f"own mask {context} {slot} {call} {client}"


class Masking:
    """A site's part in the secure sums of a run.

    Arguments:
        run: the run's name.
        client: the site's number.
        identity: its certificate; None: keys are not signed, for sites in one process or without certificates.
        unmasked: by the digest of a reply, the names of the sites with which it was added up. It outlives this object.
        note: note(digest, names), called before shares are revealed, to remember that.
    """

    def __init__(
        self,
        run: str,
        client: int,
        identity: Identity | None = None,
        unmasked: dict[str, list[str]] | None = None,
        note: Callable[[str, list[str]], None] | None = None,
    ) -> None:
        self._run, self._client, self._identity = run, client, identity
        self._unmasked: dict[str, list[str]] = {} if unmasked is None else unmasked
        self._note = note or self._unmasked.__setitem__
        self._agreements: dict[int, Agreement] = {}

    def announce(self, header: dict[str, Any]) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return the public keys of a new agreement, signed."""
        number, slots = _integer(header["agreement"]), _integer(header["slots"])
        moment: Moment = (int(header["phase"]), int(header["round"]))
        if not 1 <= slots <= MOST_SLOTS:
            raise RefusedError(f"an agreement on keys must have 1 to {MOST_SLOTS} slots; got {slots}.")
        self._agreements = {n: a for n, a in self._agreements.items() if a.moment == moment}
        if number not in self._agreements:
            keys, seeds = ([masks.new_secret() for _ in range(slots)] for _ in range(2))
            context = context_of(self._run, moment, number)
            self._agreements[number] = Agreement(context, moment, masks.new_secret(), keys, seeds)
        own = self._agreements[number]
        if len(own.keys) != slots:
            raise RefusedError("an agreement on keys must keep its number of slots; it has another.")
        parts = public_parts(own.envelope, own.keys, own.seeds)
        if self._identity is None:
            return {}, [parts]
        signature = self._identity.sign(signed_text(own.context, self._client, parts))
        return {"cert": self._identity.cert, "signature": signature}, [parts]

    def share(self, header: dict[str, Any], arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Take the others' public keys, and return shares of this site's secrets, encrypted for each of them."""
        own = self._agreement(header)
        threshold, peers = _integer(header["threshold"]), header["peers"]
        clients = [_integer(peer["client"]) for peer in peers]
        names = {client: str(peer["name"]) for client, peer in zip(clients, peers, strict=True)}
        given = dict(zip(clients, arrays, strict=True))
        if own.threshold:
            same = own.threshold == threshold and own.names == names
            if not (same and all(np.array_equal(own.peers[client], given[client]) for client in clients)):
                raise RefusedError("it has agreed on keys with other sites already, and does so once.")
            assert own.sealed is not None
            return [own.sealed]
        self._check_peers(own, threshold, peers, names, given)
        places = sorted(client + 1 for client in clients)
        split = lambda secrets: [masks.split(secret, threshold, places) for secret in secrets]
        of_seeds, of_keys = split(own.seeds), split(own.keys)
        both = lambda slot, client: of_seeds[slot][client + 1] + of_keys[slot][client + 1]
        own.own = [both(slot, self._client) for slot in range(len(own.keys))]
        rows = []
        for client in (client for client in sorted(clients) if client != self._client):
            key = self._envelope(own, given[client], self._client, client)
            rows += [masks.seal(key, slot, both(slot, client)) for slot in range(len(own.keys))]
        shape = len(clients) - 1, len(own.keys), masks.SEALED
        own.sealed = np.frombuffer(b"".join(rows), np.uint8).reshape(shape)
        own.threshold, own.peers, own.names = threshold, given, names
        return [own.sealed]

    def _check_peers(
        self, own: Agreement, threshold: int, peers: Any, names: dict[int, str], given: dict[int, np.ndarray]
    ) -> None:
        count, shape = len(peers), (1 + 2 * len(own.keys), masks.SECRET)
        if len(names) != count or len(set(names.values())) != count or count > _MOST_SITES:
            raise RefusedError("each site must be among the participants of a secure sum once.")
        if any(parts.dtype != np.uint8 or parts.shape != shape for parts in given.values()):
            raise RefusedError("the keys of a participant must have the form of an agreement on keys.")
        mine = given.get(self._client)
        if mine is None or not np.array_equal(mine, public_parts(own.envelope, own.keys, own.seeds)):
            raise RefusedError("its own keys must be among those of the participants, as it announced them.")
        if not count < 2 * threshold <= 2 * count or threshold < 2:
            raise RefusedError(
                f"the threshold of a secure sum must be more than half of its {count} sites, or some could reveal what "
                f"others hide; got {threshold}."
            )
        if self._identity is None:
            return
        for peer, client in zip(peers, given, strict=True):
            try:
                text = signed_text(own.context, client, given[client])
                self._identity.check(names[client], peer.get("cert"), peer.get("signature"), text)
            except ValueError as error:
                raise RefusedError(f"{error}.") from error

    def hide(
        self, moment: Moment, call: int, threshold: int, header: Any, request: str, reply: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Return a reply under its masks.

        Arguments:
            moment, call: the exchange.
            threshold: the fewest sites of a sum, by the plan.
            header: the agreement, the slot and the clients that the coordinator names.
            request: a digest of what the reply depends on.
            reply: arrays of unsigned integers of one type.
        """
        own = self._agreement(header)
        slot, among = self._slot(own, header), _clients(header["among"])
        if own.moment != moment or own.threshold != threshold:
            raise RefusedError("the keys of a secure sum must be of its round, with the plan's threshold.")
        if self._client not in among or not own.peers.keys() >= set(among) or len(among) < threshold:
            raise RefusedError(
                f"a secure sum must be of at least {threshold} sites that agreed on keys, this one among them; got "
                f"{len(among)}."
            )
        hides = Hides(call, request, among)
        if own.hides.setdefault(slot, hides) != hides:
            raise RefusedError("a mask must hide one reply, among the same sites; it is asked to use one again.")
        flat = np.concatenate([a.ravel() for a in reply])
        seed, key = own.seeds[slot], own.keys[slot]
        masks.add_stream(flat, masks.derived(seed, own_purpose(own.context, slot, call, self._client)))
        for client in among:
            if client != self._client:
                purpose = pair_purpose(own.context, slot, call, self._client, client)
                common = _agreed(key, own.peers[client][1 + slot], purpose)
                masks.add_stream(flat, common, 1 if self._client < client else -1)
        ends = np.cumsum([a.size for a in reply])[:-1]
        return [part.reshape(a.shape) for part, a in zip(np.split(flat, ends), reply, strict=True)]

    def reveal(self, header: dict[str, Any], arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Return this site's shares for a slot: of seeds for the clients that are added up, of keys for the others."""
        own = self._agreement(header)
        slot, added = self._slot(own, header), _clients(header["added"])
        if slot not in own.hides:
            raise RefusedError("it is asked to unmask a sum to which it has not replied.")
        _, request, among = own.hides[slot]
        if self._client not in added or not set(among) >= set(added) or len(added) < own.threshold:
            raise RefusedError(
                f"a sum must have at least {own.threshold} of the sites that it was masked for, this one among them, "
                f"to be unmasked; got {len(added)}."
            )
        if own.revealed.get(slot, added) != added:
            raise RefusedError("a sum must be unmasked for the same sites as before; the request names others.")
        names = sorted(own.names[client] for client in added)
        if self._unmasked.get(request, names) != names:
            raise RefusedError(
                "it has helped to add up this very reply with other sites, and the difference would show single ones. "
                "Begin a run with another seed."
            )
        shares = self._opened(own, slot, among, arrays)
        if request not in self._unmasked:
            self._note(request, names)
        own.revealed[slot] = added
        kind = lambda client: slice(0, masks.SHARE) if client in added else slice(masks.SHARE, None)
        chosen = b"".join(shares[client][kind(client)] for client in among)
        return [np.frombuffer(chosen, np.uint8).reshape(len(among), masks.SHARE)]

    def _opened(self, own: Agreement, slot: int, among: tuple[int, ...], arrays: list[np.ndarray]) -> dict[int, bytes]:
        """Return this site's shares of everybody's secrets, those of others decrypted."""
        (sealed,) = arrays
        others = [client for client in among if client != self._client]
        if sealed.dtype != np.uint8 or sealed.shape != (len(others), masks.SEALED):
            raise RefusedError("a request to unmask must have an encrypted share of each other site.")
        shares = {self._client: own.own[slot]}
        for client, text in zip(others, sealed, strict=True):
            key = self._envelope(own, own.peers[client], client, self._client)
            try:
                shares[client] = masks.unseal(key, slot, text.tobytes())
            except ValueError as error:
                raise RefusedError(f"{error} ({own.names[client]}).") from error
        return shares

    def _envelope(self, own: Agreement, parts: np.ndarray, sender: int, receiver: int) -> bytes:
        """Return the key of the shares that one client sends another; `parts` is of the other one."""
        return _agreed(own.envelope, parts[0], f"shares {own.context} {sender} {receiver}")

    def _agreement(self, header: Any) -> Agreement:
        number = _integer(header["agreement"])
        if number not in self._agreements:
            raise ForgottenError
        return self._agreements[number]

    def _slot(self, own: Agreement, header: Any) -> int:
        slot = _integer(header["slot"])
        if not own.threshold or not 0 <= slot < len(own.keys):
            raise RefusedError("a secure sum must have a slot of an agreement on keys; it has none.")
        return slot


def _agreed(private: bytes, public: np.ndarray, purpose: str) -> bytes:
    try:
        return masks.agreed_key(private, public.tobytes(), purpose)
    except ValueError as error:
        raise RefusedError("the keys of a participant must be valid; those of one are not.") from error


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("an integer is missing")
    return value


def _clients(value: Any) -> tuple[int, ...]:
    """Return clients' numbers, which must be in order and different."""
    found = tuple(_integer(client) for client in value)
    if list(found) != sorted(set(found)):
        raise RefusedError("the sites of a secure sum must be in order, each once.")
    return found
