"""The parts of a secure sum by themselves: keys, shares and streams."""

import itertools

import numpy as np
import pytest
from scipy import stats

from rookery.engines.federation import masks

KEY = bytes(range(32))


def test_the_field_is_one() -> None:
    """By the Lucas-Lehmer test for 2^521 - 1."""
    value = 4
    for _ in range(519):
        value = (value * value - 2) % masks.PRIME
    assert value == 0


@pytest.mark.parametrize(("threshold", "count"), [(2, 3), (3, 5), (4, 4), (34, 50)])
def test_as_many_shares_as_the_threshold_give_the_secret(threshold: int, count: int) -> None:
    secret = masks.new_secret()
    shares = masks.split(secret, threshold, range(1, count + 1))
    for places in (
        range(1, threshold + 1),
        range(count - threshold + 1, count + 1),
        range(count, count - threshold, -1),
    ):
        factors = masks.joiner(list(places))
        assert masks.joined({i: shares[i] for i in places}, factors) == secret


def test_fewer_shares_fit_every_secret() -> None:
    """One share less than the threshold: for any secret there is a last share that completes it."""
    shares = masks.split(masks.new_secret(), 3, (1, 2, 3))
    factors = masks.joiner((1, 2, 3))
    for other in (bytes(32), b"\xff" * 32):
        rest = sum(factors[i] * int.from_bytes(shares[i]) for i in (1, 2))
        last = (int.from_bytes(other) - rest) * pow(factors[3], -1, masks.PRIME) % masks.PRIME
        assert masks.joined({1: shares[1], 2: shares[2], 3: last.to_bytes(66)}, factors) == other


def test_a_share_is_uniform() -> None:
    """Whatever the secret: the first bytes of shares of zero (the top one has a single bit)."""
    found = [masks.split(bytes(32), 2, (7,))[7][1:9] for _ in range(2000)]
    counts = np.bincount(np.frombuffer(b"".join(found), np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-6


def test_a_wrong_share_does_not_pass_as_a_secret() -> None:
    shares = masks.split(KEY, 2, (1, 2))
    shares[2] = masks.split(KEY, 2, (2,))[2]
    with pytest.raises(ValueError, match="not those of one secret"):
        masks.joined(shares, masks.joiner((1, 2)))


def test_both_sides_agree_on_a_key_for_each_purpose() -> None:
    one, other = masks.new_secret(), masks.new_secret()
    ours = masks.agreed_key(one, masks.public_key(other), "a")
    assert ours == masks.agreed_key(other, masks.public_key(one), "a")
    assert ours != masks.agreed_key(one, masks.public_key(other), "b")


def test_a_public_key_of_small_order_is_refused() -> None:
    with pytest.raises(ValueError, match="shared"):
        masks.agreed_key(KEY, bytes(32), "a")


def test_what_was_sealed_is_opened_by_its_key_and_number_only() -> None:
    sealed = masks.seal(KEY, 3, b"content")
    assert masks.unseal(KEY, 3, sealed) == b"content"
    changed = bytes([sealed[0] ^ 1]) + sealed[1:]
    for key, number, what in ((KEY, 4, sealed), (bytes(32), 3, sealed), (KEY, 3, changed)):
        with pytest.raises(ValueError, match="not what its sender wrote"):
            masks.unseal(key, number, what)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_a_stream_cancels_and_does_not_depend_on_how_it_is_cut(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1000).astype(dtype)
    hidden = values.copy()
    masks.add_stream(hidden, KEY)
    assert not np.any(hidden == values) or dtype == "uint16"
    monkeypatch.setattr(masks, "_CHUNK", 64)
    masks.add_stream(hidden, KEY, -1)
    np.testing.assert_array_equal(hidden, values)


def test_streams_are_uniform_and_those_of_two_keys_independent() -> None:
    """Each of 16 bits, bytes, and the joint distribution of two streams' low nibbles."""
    streams = [np.zeros(1 << 16, np.uint32) for _ in range(2)]
    for stream, key in zip(streams, (KEY, masks.derived(KEY, "other")), strict=True):
        masks.add_stream(stream, key)
        assert stats.chisquare(np.bincount(stream.view(np.uint8), minlength=256)).pvalue > 1e-6
        assert stats.chisquare(np.bincount(stream >> 22, minlength=1024)).pvalue > 1e-6
    pairs = (streams[0] & 15) * 16 + (streams[1] & 15)
    assert stats.chisquare(np.bincount(pairs, minlength=256)).pvalue > 1e-6


def test_pairwise_masks_cancel() -> None:
    """The sum of all masked values is the sum of the values."""
    count, rng = 5, np.random.default_rng(0)
    values = rng.integers(0, 2**32, (count, 100), np.uint32)
    private = [masks.new_secret() for _ in range(count)]
    hidden = values.copy()
    for i, j in itertools.permutations(range(count), 2):
        key = masks.agreed_key(private[i], masks.public_key(private[j]), "pair")
        masks.add_stream(hidden[i], key, 1 if i < j else -1)
    np.testing.assert_array_equal(hidden.sum(0, dtype=np.uint32), values.sum(0, dtype=np.uint32))
