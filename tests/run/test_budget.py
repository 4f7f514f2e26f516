"""The budget of a private run that is resumed where a round may have been seen with other noise."""

import pytest

import rookery as rk
from rookery.engines.simulation import device

TASK = rk.tasks.quadratic(clients=4)


@pytest.fixture
def solved(tmp_path, monkeypatch):
    """`solve` with a checkpoint after every round, as over a network: a resumed run may repeat a round."""
    monkeypatch.setattr(device.Session, "durable", True)

    def solve(channel, **how):
        given = (TASK.problem, TASK.clients, TASK.algorithm(rk.FedBiO), TASK.init, 3)
        return rk.solve(*given, channel=channel, checkpoint=tmp_path, progress=False, **how)

    return solve


@pytest.mark.parametrize("channel", [rk.private(9, 1e-2), rk.private(1e3, 1e-2, noise=1.0)], ids=["ε", "noise"])
def test_a_complete_run_that_is_resumed_is_not_cut_short(solved, channel):
    first, again = solved(channel), solved(channel)
    assert (again.rounds, again.spent, first.spent) == (3, False, False)


def test_a_repeated_round_is_paid_for(solved):
    """With noise for three rounds, the run ends after two that were not repeated."""
    first = solved(rk.private(9, 1e-2), callbacks=[lambda run: run.rounds == 1])
    assert (first.rounds, first.interrupted, first.spent) == (1, True, False)
    again = solved(rk.private(9, 1e-2))
    assert (again.rounds, again.spent) == (2, True)
    assert again.history["epsilon"].iloc[-1] == pytest.approx(9, rel=1e-3)
