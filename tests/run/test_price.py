"""The price of privacy that `rk.explain` prints below a plan."""

import math

import pytest

import rookery as rk

TASK = rk.tasks.quadratic(clients=40)
DELTA = 1e-3


def price(algorithm, cohort=None, **given):
    how = {"cohort": cohort, "private": rk.private(delta=DELTA, **given)}
    return rk.explain(TASK.problem, TASK.clients, TASK.algorithm(algorithm), TASK.init, **how).price


def test_it_counts_what_a_round_releases_and_who_pays_for_it():
    found = price(rk.FedNest, noise=2.0)
    assert found.round.count == 2 * 3 + 20 + 3
    assert found.shares["Hp"] == pytest.approx(20 / 29)
    assert 'a round releases 29 results of its cohort: "q" 3 times, "y" 3 times, "p", "Hp" 20 times' in str(found)
    assert '"Hp": a noise multiplier of 2, 69% of what a round reveals' in str(found)
    assert "all 40 clients in each round" in str(found)
    assert 'the start releases 1 result of all clients: "w, v"' in str(price(rk.AdaFBiO, noise=2.0))


def test_its_numbers_are_those_of_the_run():
    """The noise for a budget, and the shares that belong to it."""
    found, channel = price(rk.LFedNest, epsilon=3, rounds=6), rk.private(3, DELTA, rounds=6)
    plan = rk.explain(TASK.problem, TASK.clients, TASK.algorithm(rk.LFedNest), TASK.init, channel=channel)
    assert found.channel.levels == plan.channel.levels
    assert channel.spent(found.chosen, 6) == pytest.approx(3, rel=1e-3)
    assert found.epsilon(6, found.noise(3, 6)) == pytest.approx(3, rel=1e-3)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert "ε after 6 rounds with the noise below: 3" in str(found)


@pytest.mark.parametrize(
    ("epsilon", "said"), [(8, "ε = 8 ends the run after 1 round"), (0.1, "ε = 0.1 does not allow one round")]
)
def test_a_budget_that_the_noise_does_not_keep_to(epsilon, said):
    assert said in str(price(rk.FedBiO, epsilon=epsilon, noise=1.0, rounds=5))


def test_without_rounds_there_is_no_noise_for_a_budget():
    assert "the noise for ε = 8 depends on the number of rounds, which was not given" in str(
        price(rk.FedBiO, epsilon=8)
    )


@pytest.mark.parametrize("cohort", [None, 4, rk.Poisson(4)])
def test_a_refusal_is_printed_below_the_plan(cohort):
    how = {"cohort": cohort, "private": rk.private(8, DELTA)}
    plan = rk.explain(TASK.problem, TASK.clients, TASK.algorithm(rk.CommFedBiO), TASK.init, **how)
    shown = str(plan).splitlines()
    assert shown[0].startswith("CommFedBiO.round")
    assert shown[-1].startswith("Privacy for each client is refused: A private run must have releases that can all be")
    assert shown[-1].endswith("The server sees every reply to the exchange 'Hu − f_y' by itself.")
    assert plan.price.epsilon() == plan.price.noise(8, 10) == math.inf


def test_what_is_wrong_without_privacy_is_raised():
    with pytest.raises(ValueError, match="cohort must be"):
        price(rk.FedBiO, 99, epsilon=8)
    with pytest.raises(ValueError, match=r"private must be rk.private\(...\), without another channel; got both."):
        rk.explain(
            TASK.problem, TASK.clients, TASK.algorithm(rk.FedBiO), TASK.init, channel=rk.clip(1.0),
            private=rk.private(8, DELTA),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"private must be rk.private\(...\), without another channel; got 8."):
        rk.explain(TASK.problem, TASK.clients, TASK.algorithm(rk.FedBiO), TASK.init, private=8)


def test_the_price_for_each_record():
    """A client pays for what its oracles release; the lower and the upper data have accounts of their own."""
    private = rk.private(8, DELTA, rounds=5, unit="record")
    task = rk.tasks.quadratic(clients=2, samples=20)
    price = rk.explain(task.problem, task.clients, task.algorithm(rk.FedBiO), task.init, private=private).price
    shown = str(price)
    assert price.count == 2
    assert shown.startswith("Privacy for each record, at δ = 0.001, all 2 clients in each round\n")
    assert "a client releases in a round, from all records of its upper data: f_x, f_y\n" in shown
    assert "ε after 5 rounds with the noise below: 8\n    lower data: a noise multiplier of" in shown
    assert price.epsilon(5, price.noise(8, 5)) == pytest.approx(8, rel=1e-3)


@pytest.mark.parametrize("unit", ["client", "record"])
def test_an_evaluation_on_the_clients_data_is_refused(unit):
    evaluate = lambda client, x, y: {"loss": client.f(x, y, client.upper())}
    how = {"channel": rk.private(8, DELTA, unit=unit), "evaluate_client": evaluate, "progress": False}
    with pytest.raises(ValueError, match="evaluate_client must be left out of a private run"):
        rk.solve(TASK.problem, TASK.clients, TASK.algorithm(rk.FedBiO), TASK.init, 1, **how)
