"""Secure sums: exact with dropouts at every stage, masks used once, and nothing revealed below the threshold."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from rookery.engines.federation import masks
from rookery.engines.federation.masking import Masking
from rookery.engines.federation.site import ForgottenError, RefusedError
from rookery.engines.federation.unmasking import Agreed

MOMENT, NUMBER, CALL = (1, 3), 77, 5
STAGES = ("keys", "shares", "reply", "unmasking")


@dataclasses.dataclass
class Played:
    """The protocol among sites in one process: `lost` has the stage before which a site drops out."""

    values: list[list[np.ndarray]]
    threshold: int
    lost: dict[int, str] = dataclasses.field(default_factory=dict)
    slots: int = 2

    def __post_init__(self) -> None:
        self.sites = [Masking("run", i) for i in range(len(self.values))]
        self.replies: dict[tuple[int, int], list[np.ndarray]] = {}
        self.replied = self.agree()

    def there(self, clients: Any, stage: str) -> list[int]:
        return [i for i in clients if i not in self.lost or STAGES.index(self.lost[i]) > STAGES.index(stage)]

    def agree(self) -> list[int]:
        phase, t = MOMENT
        asked = {"agreement": NUMBER, "slots": self.slots, "phase": phase, "round": t}
        there = self.there(range(len(self.sites)), "keys")
        parts = {i: self.sites[i].announce(asked)[1][0] for i in there}
        peers = [{"client": i, "name": f"site {i}"} for i in parts]
        self.shares_request = {"agreement": NUMBER, "threshold": self.threshold, "peers": peers}
        self.parts = list(parts.values())
        sealed = {i: self.sites[i].share(self.shares_request, self.parts)[0] for i in self.there(there, "shares")}
        context = f"run {phase} {t} {NUMBER}"
        self.agreed = Agreed(NUMBER, context, self.threshold, self.slots, parts, sealed)
        return self.agreed.clients

    def ask(self, i: int, slot: int, request: str = "", **fields: Any) -> list[np.ndarray]:
        header = {"agreement": NUMBER, "slot": slot, "among": self.agreed.clients, **fields}
        threshold = fields.get("threshold", self.threshold)
        return self.sites[i].hide(MOMENT, CALL, threshold, header, request or f"{slot}", self.values[i])

    def reveal(self, i: int, slot: int, added: list[int]) -> list[np.ndarray]:
        header = {"agreement": NUMBER, "slot": slot, "added": added}
        return self.sites[i].reveal(header, [self.agreed.shares_for(i, slot, self.agreed.clients)])

    def sum(self, slot: int = 0) -> tuple[np.ndarray, list[int]]:
        """The flat sum, and whose it is."""
        added = self.there(self.agreed.clients, "reply")
        total = np.zeros(sum(a.size for a in self.values[0]), self.values[0][0].dtype)
        for i in added:
            reply = self.replies[i, slot] = self.ask(i, slot)
            total += np.concatenate([a.ravel() for a in reply])
        shares = {i: self.reveal(i, slot, added)[0] for i in self.there(added, "unmasking")}
        self.agreed.unmask(total, slot, CALL, self.agreed.clients, added, shares)
        return total, added


def integers(count: int, dtype: str = "uint32", size: int = 40) -> list[list[np.ndarray]]:
    rng, most = np.random.default_rng(count), np.iinfo(dtype).max
    draw = lambda shape: rng.integers(0, most, shape, dtype, endpoint=True)
    return [[draw((size // 4, 2)), draw((size // 2,))] for _ in range(count)]


def exact(values: list[list[np.ndarray]], added: list[int]) -> np.ndarray:
    rows = np.stack([np.concatenate([a.ravel() for a in values[i]]) for i in added])
    return rows.sum(0, dtype=rows.dtype)


FEW = [(3, 2), (4, 3), (5, 4)]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
@pytest.mark.parametrize("stage", [*STAGES, "never"])
@pytest.mark.parametrize(("count", "threshold"), FEW)
def test_a_sum_is_exact_whenever_a_site_drops_out(count: int, threshold: int, stage: str, dtype: str) -> None:
    lost = {1: stage} if stage != "never" else {}
    played = Played(integers(count, dtype), threshold, lost)
    for slot in range(played.slots):
        total, added = played.sum(slot)
        assert (1 in added) == (stage in ("unmasking", "never"))
        np.testing.assert_array_equal(total, exact(played.values, added))


@pytest.mark.parametrize("count", [pytest.param(n, marks=pytest.mark.slow) for n in (10, 25, 50)] + [7])
def test_a_sum_is_exact_with_a_dropout_at_every_stage_at_once(count: int) -> None:
    lost = dict(zip((1, 2, count - 1, 0), STAGES, strict=True)) if count >= 10 else {1: "shares", 6: "unmasking"}
    played = Played(integers(count), {7: 4, 10: 6}.get(count, -(-2 * count // 3)), lost, slots=1)
    total, added = played.sum()
    np.testing.assert_array_equal(total, exact(played.values, added))
    assert len(added) == count - sum(stage != "unmasking" for stage in lost.values())


def test_what_the_coordinator_receives_is_uniform() -> None:
    """A reply of zeros: its bytes, and those of the sums of two replies, look random; so do two slots' together."""
    values = [[np.zeros(1 << 14, np.uint32)] for _ in range(4)]
    played = Played(values, 3)
    for slot in range(2):
        played.sum(slot)
    uniform = lambda a, cells=256: stats.chisquare(np.bincount(a, minlength=cells)).pvalue > 1e-6
    for found in played.replies.values():
        assert uniform(found[0].view(np.uint8))
        assert uniform(found[0] >> 22, 1024)
    for (one, a), (other, b) in itertools.combinations(played.replies.items(), 2):
        assert uniform((a[0] + b[0]).view(np.uint8)), (one, other)
        assert uniform((a[0] - b[0]).view(np.uint8)), (one, other)
    three = sum(played.replies[i, 0][0] for i in range(3))
    assert uniform(three.view(np.uint8))  # all but one: it still has that one's masks


def test_all_masked_replies_and_the_shares_of_a_sum_say_nothing_of_a_dropped_out_reply() -> None:
    """Its reply comes late: the coordinator knows its masks with the others by then, and not its own mask."""
    values = [[np.zeros(1 << 14, np.uint32)] for _ in range(4)]
    played = Played(values, 3, {1: "reply"}, slots=1)
    total, added = played.sum()
    assert not total.any()
    late = played.ask(1, 0)[0].copy()
    # What the coordinator can take off: with the key that was revealed, the masks with all others.
    shares = {i: played.reveal(i, 0, added)[0] for i in added}
    places = sorted(i + 1 for i in shares)[:3]
    factors = masks.joiner(places)
    key = masks.joined({place: shares[place - 1][1].tobytes() for place in places}, factors)
    for other in added:
        purpose = f"mask {played.agreed.context} 0 {CALL} {min(1, other)} {max(1, other)}"
        common = masks.agreed_key(key, played.agreed.parts[other][1].tobytes(), purpose)
        masks.add_stream(late, common, -1 if other > 1 else 1)
    assert stats.chisquare(np.bincount(late.view(np.uint8), minlength=256)).pvalue > 1e-6


def test_below_the_threshold_no_site_reveals_anything() -> None:
    played = Played(integers(4), 3)
    for i in range(4):
        played.ask(i, 0)
    for added in ([0, 1], [0]):
        with pytest.raises(RefusedError, match="at least 3 of the sites"):
            played.reveal(0, 0, added)
    with pytest.raises(RefusedError, match="at least 3 sites"):
        played.ask(0, 1, among=[0, 1])


def test_fewer_shares_than_the_threshold_do_not_unmask() -> None:
    played = Played(integers(4), 3)
    total = np.zeros(40, np.uint32)
    for i in range(4):
        total += np.concatenate([a.ravel() for a in played.ask(i, 0)])
    shares = {i: played.reveal(i, 0, [0, 1, 2, 3])[0] for i in (0, 1)}
    with pytest.raises(ValueError, match="shares"):
        played.agreed.unmask(total, 0, CALL, [0, 1, 2, 3], [0, 1, 2, 3], shares)


def test_masks_are_used_once() -> None:
    played = Played(integers(4), 3)
    first = played.ask(0, 0, "a request")
    for a, b in zip(first, played.ask(0, 0, "a request"), strict=True):  # its reply was lost
        np.testing.assert_array_equal(a, b)
    with pytest.raises(RefusedError, match="must hide one reply"):
        played.ask(0, 0, "another request")
    with pytest.raises(RefusedError, match="must hide one reply"):
        played.ask(0, 0, "a request", among=[0, 1, 2])
    assert not np.array_equal(played.ask(0, 1, "a request")[0], first[0])  # fresh masks


def test_a_sum_is_unmasked_for_one_set_of_sites() -> None:
    played = Played(integers(4), 3)
    for i in range(4):
        played.ask(i, 0)
    one = played.reveal(0, 0, [0, 1, 2, 3])
    np.testing.assert_array_equal(played.reveal(0, 0, [0, 1, 2, 3])[0], one[0])  # its reply was lost
    with pytest.raises(RefusedError, match="the same sites as before"):
        played.reveal(0, 0, [0, 1, 2])  # would show the other half of site 3's secrets


def test_the_same_reply_is_not_added_up_with_other_sites() -> None:
    """In another slot, or in another run: the difference of the two sums would be the reply of a single site."""
    played = Played(integers(4), 3)
    for i, slot in itertools.product(range(4), range(2)):
        played.ask(i, slot, "the same")
    played.reveal(0, 0, [0, 1, 2, 3])
    played.reveal(0, 1, [0, 1, 2, 3])
    again = Played(integers(4), 3)
    again.sites = [Masking("run", i, unmasked=site._unmasked) for i, site in enumerate(played.sites)]
    again.agree()
    again.ask(0, 0, "the same")
    with pytest.raises(RefusedError, match="with other sites"):
        again.reveal(0, 0, [0, 1, 2])


def test_a_site_does_not_help_without_its_own_reply() -> None:
    played = Played(integers(4), 3)
    with pytest.raises(RefusedError, match="has not replied"):
        played.reveal(0, 0, [1, 2, 3])
    played.ask(0, 0)
    with pytest.raises(RefusedError, match="this one among them"):
        played.reveal(0, 0, [1, 2, 3])


def test_forged_shares_are_found() -> None:
    played = Played(integers(4), 3)
    for i in range(4):
        played.ask(i, 0)
    played.agreed.sealed[1] = played.agreed.sealed[1].copy()
    played.agreed.sealed[1][0, 0, 3] ^= 1  # on the way from site 1 to site 0
    with pytest.raises(RefusedError, match=r"not what its sender wrote \(site 1\)"):
        played.reveal(0, 0, [0, 1, 2, 3])
    added = [0, 1, 2, 3]
    played = Played(integers(4), 3)
    for i in added:
        played.ask(i, 0)
    shares = {i: played.reveal(i, 0, added)[0].copy() for i in (1, 2, 3)}
    shares[2][0, -1] ^= 1
    with pytest.raises(ValueError, match="shares"):
        played.agreed.unmask(np.zeros(40, np.uint32), 0, CALL, added, added, shares)


def test_a_site_answers_for_its_own_keys_and_once() -> None:
    played = Played(integers(4), 3)
    site, request = played.sites[0], played.shares_request
    first = played.agreed.sealed[0]
    np.testing.assert_array_equal(site.share(request, played.parts)[0], first)
    with pytest.raises(RefusedError, match="does so once"):
        site.share({**request, "threshold": 4}, played.parts)
    with pytest.raises(RefusedError, match="does so once"):
        site.share(request, [*played.parts[:3], played.parts[2]])
    fresh = Masking("run", 0)
    with pytest.raises(ForgottenError):
        fresh.share(request, played.parts)
    fresh.announce({"agreement": NUMBER, "slots": 2, "phase": 1, "round": 3})
    with pytest.raises(RefusedError, match="its own keys"):
        fresh.share(request, played.parts)


@pytest.mark.parametrize("threshold", [1, 2, 5])
def test_a_threshold_that_shows_both_halves_is_refused(threshold: int) -> None:
    """With half of the sites' shares, two groups could each be told that the other part is to be revealed."""
    with pytest.raises(RefusedError, match="more than half of its 4 sites"):
        Played(integers(4), threshold)


def test_keys_are_those_of_the_round_and_of_the_plans_threshold() -> None:
    played = Played(integers(4), 3)
    with pytest.raises(RefusedError, match="of its round, with the plan's threshold"):
        played.ask(0, 0, threshold=4)
    header = {"agreement": NUMBER, "slot": 0, "among": [0, 1, 2, 3]}
    with pytest.raises(RefusedError, match="of its round"):
        played.sites[0].hide((1, 4), CALL, 3, header, "", played.values[0])
    played.sites[0].announce({"agreement": 5, "slots": 1, "phase": 1, "round": 4})
    with pytest.raises(ForgottenError):  # keys of an earlier round are thrown away
        played.ask(0, 0)
