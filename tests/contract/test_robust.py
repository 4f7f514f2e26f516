"""Every algorithm under every robust mean, with liars, on both engines and on a mesh; or refused, and why."""

import dataclasses
from typing import Any

import pytest

import rookery as rk
from rookery.engines import engine
from rookery.testing.runs import agree, outcome

from .cases import claims, job, names, ragged, together

RULES: dict[str, Any] = {
    "median": rk.median(),
    "trimmed mean": rk.trimmed_mean(1),
    "geometric median": rk.geometric_median(),
    "Krum": rk.krum(0, keep=2),
    "centered clipping": rk.centered_clipping(0.3),
    "bucketing": rk.bucketing(rk.median(0)),
    "nearest-neighbour mixing": rk.nearest_neighbors(rk.trimmed_mean(1)),
}
GATHERS, TWICE, WEIGHS = "which gathers the replies", "a client may be in the cohort twice", "weighs the clients itself"
REFUSED = {
    "CoBo": GATHERS, "CommFedBiO": GATHERS, "FastDRO": GATHERS, "FedMBO": GATHERS,
    "DRFA": TWICE, "WeightedNodesProx": WEIGHS, "WeightedNodesABA": WEIGHS,
}  # fmt: skip
BORNE = [(name, kind) for name in names() for kind in claims(name) if name not in REFUSED]


def lying(name: str, kind: str, channel: Any, attack: Any) -> Any:
    """A job with one liar among all four clients, whose replies are lost now and then."""
    faults = rk.Faults(dropout=0.1, attack=attack)
    what = job(name, ragged(kind), channel=channel, faults=faults)
    return dataclasses.replace(what, cohort=what.clients.n)


SOME = {"FastDRO", "DRFA"}


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.slow) for n in REFUSED])
def test_the_reason_for_a_refusal(name: str) -> None:
    for kind in claims(name):
        with pytest.raises(ValueError, match=REFUSED[name]):
            engine.traced(lying(name, kind, rk.median(), None))


@pytest.mark.slow
@together(BORNE)
def test_engines_agree(name: str, kind: str) -> None:
    """With the median, and a liar that knows all replies. The quick tests of attacks do so for FedAvg."""
    what = lying(name, kind, rk.median(), rk.attacks.InnerProduct((1,), 0.1))
    here = outcome(rk.Simulation(), what)
    for there in (rk.Federation(), rk.Simulation(mesh=2)):
        agree(here, outcome(there, what))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@together(BORNE)
def test_engines_agree_under_each_rule(name: str, kind: str, rule: str) -> None:
    """With a liar that lies by itself."""
    what = lying(name, kind, RULES[rule], rk.attacks.SignFlip((1,), 0.1))
    if rule != "median":  # whose attackers are as many as the replies allow
        what = dataclasses.replace(what, faults=dataclasses.replace(what.faults, dropout=0.0))
    here = outcome(rk.Simulation(), what)
    for there in (rk.Federation(), rk.Simulation(mesh=2)):
        agree(here, outcome(there, what))
