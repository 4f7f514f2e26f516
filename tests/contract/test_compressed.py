"""Every algorithm gives the same numbers and the same ledger on all engines if what is sent is compressed."""

from typing import Any

import jax
import pytest

import rookery as rk
from rookery.channels import downlink
from rookery.testing import contract
from rookery.testing.runs import outcome

from .cases import EXCHANGES, case, job, pairs, ragged, together

ENGINES = {
    "the simulation in blocks of 2": rk.Simulation(block=2),
    "the in-memory federation": rk.Federation(),
    "four devices": rk.Simulation(mesh=4),
}
LOSSY = {"faults": rk.Faults(dropout=0.2)}
CHANNELS: dict[str, dict[str, Any]] = {
    "errors fed back": {"channel": rk.chain(rk.clip(5.0), rk.top_k(0.5), rk.broadcast(8)), **LOSSY},
    "one bit, relative to the aggregate": {"channel": rk.quantize(1, feedback="aggregate"), **LOSSY},
    "entries at random": {"channel": rk.random_k(0.5), **LOSSY},
    "four bits and noise": {"channel": rk.chain(rk.clip(1.0), rk.quantize(4), rk.gaussian(0.1)), "noise_seed": 7},
    "low rank": {"channel": rk.low_rank(1)},
}
REPEATED = {"DRFA"}  # a client may be drawn twice, and is then asked once


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of the cases are short."""
    monkeypatch.setattr(downlink, "LEAST", 2)


def agrees(name: str, kind: str, given: dict[str, Any]) -> None:
    here = contract.engines_agree(job(name, ragged(kind), **given), ENGINES, tolerance=1e-9)
    assert here.each_round == [EXCHANGES[name, kind]] * 2


@pytest.mark.slow
@together(pairs())
def test_all_engines_agree(name: str, kind: str) -> None:
    """Unequal clients, a cohort, blocks, minibatches, clipping, lost replies, feedback, and both directions.

    The quick tests of channels compare FedAvg's numbers on both engines with NumPy's.
    """
    agrees(name, kind, CHANNELS["errors fed back"])


@pytest.mark.slow
@pytest.mark.parametrize("channel", [name for name in CHANNELS if name != "errors fed back"])
@together(pairs())
def test_every_channel(name: str, kind: str, channel: str) -> None:
    agrees(name, kind, CHANNELS[channel])


@pytest.mark.slow
@together(pairs())
def test_the_bytes_are_those_on_the_wire(name: str, kind: str) -> None:
    what = job(name, case(kind), channel=CHANNELS["errors fed back"]["channel"])
    there = outcome(rk.Federation(), what)
    counts = there.counts["bytes_down"], there.counts["bytes_up"]
    assert (there.sent, there.received) == counts or name in REPEATED
    plain = outcome(rk.Simulation(), job(name, case(kind))).counts
    sizes = [leaf.size for leaf in jax.tree.leaves(what.start)]
    if EXCHANGES[name, kind] and max(sizes) > 2:
        assert there.counts["bytes_up"] < plain["bytes_up"]
