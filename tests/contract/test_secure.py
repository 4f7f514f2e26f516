"""Every algorithm with secure sums: the same numbers and ledger on every engine, or refused with the reason."""

import re

import rookery as rk
from rookery.engines.engine import Job
from rookery.testing.runs import agree, outcome

from .cases import job, pairs, ragged, together

CORE = {"FedAvg"}
# 64 bits, so that a value which two engines round differently does not move the result by more than they differ.
SECURE = rk.chain(rk.clip(1.0), rk.secure_sum(bits=64))
REASONS = (
    r"the exchange .* gathers single replies",
    r"the exchange .* carries bookkeeping without",
    r"the exchange .* has one that is drawn with replacement",
    r"the exchange .* asks the one client with the centre's data",
)


def refused(what: Job) -> bool:
    """Whether a run is refused, and then with a reason, in one line, on every engine."""
    texts = set()
    for engine in (rk.Simulation(), rk.Simulation(mesh=4), rk.Federation()):
        try:
            engine.open(what)
        except ValueError as error:
            texts.add(str(error))
    if texts:
        (text,) = texts
        assert any(re.search(f"^rk.secure_sum .*{reason}", text) for reason in REASONS), text
    return bool(texts)


@together(pairs(), default=CORE)
def test_secure_sums(name: str, kind: str) -> None:
    """Unequal clients and minibatches, in blocks, on a device for each client, and in a federation with masks."""
    what = job(name, ragged(kind), channel=SECURE)
    if refused(what):
        return
    here = outcome(rk.Simulation(block=2), what)
    for engine in (rk.Simulation(mesh=4), rk.Federation()):
        agree(here, outcome(engine, what))
    plain = outcome(rk.Simulation(), job(name, ragged(kind), channel=rk.clip(1.0)))
    agree(here, outcome(rk.Simulation(), what))
    assert here.each_round == plain.each_round
