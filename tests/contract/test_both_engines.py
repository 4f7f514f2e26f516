"""Every algorithm gives the same numbers and the same ledger on both engines, in the settings that users have."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rookery as rk
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.testing import contract
from rookery.testing.runs import Outcome, agree, close, outcome

from .cases import CHEAP, CORE, EXCHANGES, HARD, case, full, job, pairs, ragged, together

PAIRS = pairs()
REPEATED = {"DRFA"}  # a client may be drawn twice, and is then asked once
BLOCKS = rk.Simulation(block=2)


ENGINES = {"the simulation in blocks of 2": BLOCKS, "the in-memory federation": rk.Federation()}


def measured(name: str, there: Outcome) -> None:
    """What went over the wire is what the ledger says."""
    counts = there.counts["bytes_down"], there.counts["bytes_up"]
    assert (there.sent, there.received) == counts or name in REPEATED


@together(PAIRS, default=CHEAP)
def test_the_hard_setting(name: str, kind: str) -> None:
    """Unequal clients, a cohort, blocks, minibatches, clipping, noise and lost replies, all at once."""
    here = contract.engines_agree(job(name, ragged(kind), **HARD), ENGINES, tolerance=1e-10)
    assert here.each_round == [EXCHANGES[name, kind]] * 2
    assert here.counts["missing"] > 0 or not EXCHANGES[name, kind]


def test_who_may_be_asked_twice() -> None:
    """What is measured is what the ledger says, but for these."""
    for name in ("FedAvg", "DRFA"):
        assert contract.repeats(job(name, case("SingleLevel"))) == (name in REPEATED)


SETTINGS: dict[str, Any] = {
    "equal clients": lambda name, kind: job(name, case(kind)),
    "unequal clients": lambda name, kind: job(name, ragged(kind)),
    "full batches": lambda name, kind: job(name, ragged(kind), full(name)),
    "a channel": lambda name, kind: job(name, ragged(kind), channel=HARD["channel"], noise_seed=HARD["noise_seed"]),
    "lost replies": lambda name, kind: job(name, ragged(kind), faults=HARD["faults"]),
}


@pytest.mark.slow  # all at once they are in the hard setting; one by one they say which it was
@pytest.mark.parametrize("setting", SETTINGS)
@together(PAIRS)
def test_setting_by_setting(name: str, kind: str, setting: str) -> None:
    here = contract.engines_agree(SETTINGS[setting](name, kind), ENGINES, 3, 1e-10)
    assert here.each_round == [EXCHANGES[name, kind]] * 3
    lossy = setting == "lost replies" and EXCHANGES[name, kind] > 0
    assert (here.counts["missing"] > 0) == lossy


# Single precision, as users compile it.


def in_single_precision(cases: list[tuple[str, str]]) -> list[Any]:
    """What `single.py` says of these cases."""
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parent), *sys.path])
    program = [sys.executable, "-m", f"{here.name}.single", *("-".join(pair) for pair in cases)]
    said = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in said.stdout.splitlines()]


@pytest.mark.parametrize(
    "cases",
    [[("FedAvg", "SingleLevel")]]
    + [pytest.param(some, marks=pytest.mark.slow) for some in (PAIRS[k::4] for k in range(4))],
    ids=lambda cases: "-".join((cases[0][0], "to", cases[-1][0])),
)
def test_single_precision(cases: list[tuple[str, str]]) -> None:
    """Optimised programs without jax_enable_x64: both engines agree as well as 32 bits can, and nothing is wider."""
    for told in in_single_precision(cases):
        assert told["difference"] < 1e-4, told
        assert told["types"] == ["float32"], told
        assert told["ledger"], told


# Sizes, cohorts and blocks of all kinds.

ANY = {
    "FedAvg": rk.FedAvg(step=0.05, local_steps=(1, 3), batch_size=2),
    "FedSVRG": rk.FedSVRG(step=0.05, local_steps=2, batch_size=2),
    "PDSGD": rk.PDSGD(step=0.05, dual_step=0.1, penalty=2.0, batch_size=3),
}


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(ANY)), st.lists(st.integers(1, 9), min_size=2, max_size=5), st.data())
def test_any_sizes_cohorts_and_blocks(name: str, sizes: list[int], data: Any) -> None:
    n = len(sizes)
    cohort, block = data.draw(st.integers(1, n), label="cohort"), data.draw(st.integers(1, n), label="block")
    rng = np.random.default_rng(sum(sizes))
    draw = lambda size: {"a": rng.normal(size=(size, 3)), "t": np.sign(rng.normal(size=size))}
    clients = rk.Clients(upper=[draw(size) for size in sizes], weights=rng.uniform(0.5, 2, n))
    what = Job(case("SingleLevel").problem, clients, ANY[name], (jax.numpy.ones(3), ()), cohort, seed=n)
    whole = outcome(rk.Simulation(), what, 3)
    agree(whole, outcome(rk.Simulation(block=block), what, 3))
    there = outcome(rk.Federation(), what, 3)
    agree(whole, there)
    measured(name, there)


# Transports and sites that do not behave.


def disturbed(sites: list[Any]) -> Any:
    """Loses, repeats and delays requests, to sites that forget."""
    asked = itertools.count()
    old: dict[int, list[bytes]] = {}

    def send(i: int, request: bytes) -> bytes:
        turn = next(asked)
        if turn % 7 == 3:
            raise TimeoutError
        if turn % 5 == 2:
            for before in old.get(i, [])[-3:]:
                sites[i].handle(before)
        if turn % 3 == 0:
            sites[i].forget()
        old.setdefault(i, []).append(request)
        first = sites[i].handle(request)
        if turn % 2:
            assert sites[i].handle(request) == first
        return first

    return send


DISTURBED = [
    ("ScaffoldSaddle", "Minimax"),
    ("PDSGD", "SingleLevel"),
    ("CommFedBiO", "Bilevel"),
    ("FedSVRG", "SingleLevel"),  # without memory
]


@together(DISTURBED, default=CORE)
def test_lost_repeated_and_late_requests_change_nothing(name: str, kind: str) -> None:
    what = job(name, ragged(kind), **HARD)
    calm, there = outcome(rk.Federation(), what, 4), outcome(rk.Federation(transport=disturbed), what, 4)
    agree(calm, there, 0)
    measured(name, calm)
    assert any(there.memory) == (name != "FedSVRG")


@together(DISTURBED, default=CORE)
def test_who_does_not_answer_keeps_its_memory(name: str, kind: str) -> None:
    """A site that can't be reached in a round is left out of it, as a lost reply is."""
    what = job(name, ragged(kind), faults=rk.Faults())
    ids = np.asarray(engine.round_keys(jax.random.key(what.seed), 0, what.clients.n, what.cohort).ids).tolist()

    def send_to(sites: list[Any], i: int, request: bytes) -> bytes:
        if i == ids[0] and reachable == [False]:
            raise TimeoutError
        return sites[i].handle(request)

    reachable = [True]
    session = rk.Federation(transport=lambda sites: lambda i, request: send_to(sites, i, request)).open(what)
    session.init()
    before = [site.memory.after(0) for site in session.sites]
    reachable[:] = [False]
    (cost,) = session.advance(1)
    after = [site.memory.after(1) for site in session.sites]
    assert cost.missing == EXCHANGES[name, kind]
    moved = [not jax.tree.all(jax.tree.map(np.array_equal, *own)) for own in zip(before, after, strict=True)]
    remembers = bool(jax.tree.leaves(before))
    assert [i for i, has in enumerate(moved) if has] == (sorted(ids[1:]) if remembers else [])
    close(np.isfinite(np.asarray(session.state.x)).all(), True)
