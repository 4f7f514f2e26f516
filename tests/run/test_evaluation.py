"""Evaluation where the data are: `evaluate_client` on every engine, against the same numbers computed in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.engines.federation import wire
from rookery.language.client import Client
from rookery.language.metrics import direction
from rookery.run.result import metrics_of

SIZES = (5, 9, 3, 40)  # so unequal that a whole data set comes in pieces
RNG = np.random.default_rng(0)


def rows(count: int) -> dict[str, np.ndarray]:
    """Samples of a regression."""
    return {"a": RNG.normal(size=(count, 3)), "b": RNG.normal(size=count)}


LOWER, UPPER, TEST = ([rows(n + more) for n in SIZES] for more in (0, 1, 4))


def clients(sizes: tuple[int, ...] = SIZES) -> rk.Clients:
    """Four clients that count by their sizes; or as many samples each as said."""
    cut = lambda each: [{k: a[:n] for k, a in own.items()} for own, n in zip(each, sizes, strict=True)]
    return rk.Clients(cut(LOWER), cut(UPPER), weights=(1.0, 2.0, 0.0, 4.0), test=cut(TEST))


def one_data_set() -> rk.Clients:
    """The same with one data set."""
    return rk.Clients(upper=[{k: a[:n] for k, a in own.items()} for own, n in zip(UPPER, SIZES, strict=True)])


def loss(y: Any, z: Any) -> Any:
    """The squared error."""
    return jnp.mean((z["a"] @ y - z["b"]) ** 2)


PROBLEM = rk.Bilevel(lambda x, y, z: loss(y, z), lambda x, y, z: loss(y, z) + jnp.exp(x) * jnp.sum(y**2))
START = (np.zeros(()), np.zeros(3))
METHOD = rk.FedBiO(upper_step=0.1, lower_step=0.05, linear_step=0.05, local_steps=2)


def measured(client: Client, x: Any, y: Any) -> dict[str, Any]:
    """The error on the test data, and the share of signs that are right there."""
    right = lambda z: jnp.mean(((z["a"] @ y > 0) == (z["b"] > 0)).astype(y.dtype))
    return client.mean(lambda z: {"loss": loss(y, z), "accuracy": right(z)}, client.test())


def by_hand(y: np.ndarray) -> dict[str, np.ndarray]:
    """The same, a number for each client."""
    each = [(own["a"] @ y, own["b"]) for own in ({k: a[:n] for k, a in t.items()} for t, n in zip(TEST, SIZES))]  # noqa: B905
    return {
        "loss": np.array([np.mean((found - b) ** 2) for found, b in each]),
        "accuracy": np.array([np.mean((found > 0) == (b > 0)) for found, b in each]),
    }


ENGINES = {"simulation": rk.Simulation(), "blocks": rk.Simulation(block=3), "federation": rk.Federation()}


@pytest.mark.parametrize(
    "engine", ["simulation", *(pytest.param(name, marks=pytest.mark.slow) for name in ("blocks", "federation"))]
)
def test_means_and_quantiles_are_those_of_the_clients(engine: str) -> None:
    run = rk.solve(
        PROBLEM, clients(), METHOD, START, 4, cohort=2, every=2, evaluate_client=measured, engine=ENGINES[engine],
        evaluate=lambda x, y: {"norm": jnp.linalg.norm(y)}, keep_best="accuracy_q0",
    )  # fmt: skip
    wanted, p = by_hand(np.asarray(run.y)), np.array([1, 2, 0, 4]) / 7
    last = run.history.iloc[-1]
    for name, own in wanted.items():
        assert last[name] == pytest.approx(p @ own, rel=1e-12)
        for q in (0, 10, 50, 90, 100):
            assert last[f"{name}_q{q}"] == pytest.approx(np.percentile(own, q), rel=1e-12)
    assert run.best is not None
    assert run.best.value == run.history["accuracy_q0"].max()
    assert metrics_of(run.history) == ["norm", "accuracy", "loss"]
    assert set(run.exchanges["name"]).isdisjoint({"evaluation"})


@pytest.mark.parametrize("engine", [pytest.param(rk.Simulation(), marks=pytest.mark.slow), rk.Federation()])
def test_an_evaluation_changes_neither_numbers_nor_ledger(engine: Any) -> None:
    runs = [
        rk.solve(PROBLEM, clients(), METHOD, START, 3, cohort=2, engine=engine, evaluate_client=own)
        for own in (None, measured)
    ]
    assert np.array_equal(runs[0].y, runs[1].y)
    counted = [c for c in runs[0].history.columns if c not in ("seconds",)]
    assert runs[0].history[counted].equals(runs[1].history[counted])


@pytest.mark.slow
def test_memory_is_seen_where_it_is() -> None:
    problem = rk.SingleLevel(lambda x, z: loss(x, z))
    method = rk.PFedMe(step=0.05, local_steps=2, inner_steps=2)
    own = lambda client, x, y, memory: {"distance": jnp.linalg.norm(memory - x)}
    evaluated = {}
    for name, engine in ENGINES.items():
        run = rk.solve(problem, one_data_set(), method, np.zeros(3), 3, cohort=2, engine=engine, evaluate_client=own)
        evaluated[name] = run.history
        if run.memory is not None:
            far = np.linalg.norm(np.asarray(run.memory) - np.asarray(run.x), axis=1)
            assert run.history["distance_q100"].iloc[-1] == pytest.approx(far.max(), rel=1e-12)
    columns = [f"distance_q{q}" for q in (0, 10, 50, 90, 100)]
    np.testing.assert_allclose(
        evaluated["simulation"][columns], evaluated["federation"][columns], rtol=1e-10, atol=1e-14
    )


@pytest.mark.slow
def test_after_a_failed_round_the_memory_of_before_is_shown() -> None:
    problem = rk.SingleLevel(lambda x, z: loss(x, z))
    method = rk.PFedMe(step=0.05, local_steps=2, inner_steps=2)
    own = lambda client, x, y, memory: {"distance": jnp.linalg.norm(memory)}
    histories = []
    for engine in (rk.Simulation(), rk.Federation()):
        with pytest.raises(rk.RoundFailedError) as failed:
            rk.solve(
                problem, one_data_set(), method, np.zeros(3), 30, engine=engine, evaluate_client=own, every=100,
                faults=rk.Faults(dropout=0.5, minimum=2), seed=3,
            )  # fmt: skip
        histories.append(failed.value.run.history)
    assert histories[0]["round"].tolist() == histories[1]["round"].tolist()
    assert histories[0]["round"].iloc[-1] > 0
    np.testing.assert_allclose(histories[0]["distance"], histories[1]["distance"], rtol=1e-10)


def test_a_site_that_is_lost_is_left_out_of_an_evaluation() -> None:
    def losing(sites: list[Any]) -> Any:
        def send(i: int, request: bytes) -> bytes:
            if i == 3 and wire.decode(request)[0].get("phase") == 2:
                raise TimeoutError
            return sites[i].handle(request)

        return send

    given = dict(cohort=2, engine=rk.Federation(transport=losing), evaluate_client=measured)
    with pytest.raises(RuntimeError, match="client 3 did not answer, 3 times, and the run has no faults"):
        rk.solve(PROBLEM, clients(), METHOD, START, 1, **given)
    run = rk.solve(PROBLEM, clients(), METHOD, START, 1, faults=rk.Faults(), **given)
    own = by_hand(np.asarray(run.y))["loss"][:3]
    last = run.history.iloc[-1]
    assert last["loss"] == pytest.approx(np.array([1, 2, 0]) / 3 @ own, rel=1e-12)
    assert last["loss_q100"] == pytest.approx(own.max(), rel=1e-12)


def test_what_is_no_mean_is_refused_where_clients_differ() -> None:
    def root(client: Client, x: Any, y: Any) -> dict[str, Any]:
        return {"rmse": client.mean(lambda z: jnp.sqrt(loss(y, z)), client.upper())}

    with pytest.raises(ValueError, match=r"evaluate_client: 'rmse' must be a mean over samples"):
        rk.solve(PROBLEM, clients(), METHOD, START, 1, evaluate_client=root)
    run = rk.solve(PROBLEM, clients((3, 3, 3, 3)), METHOD, START, 1, evaluate_client=root)
    each = [np.sqrt(np.mean((u["a"][:3] @ np.asarray(run.y) - u["b"][:3]) ** 2)) for u in UPPER]
    assert run.history["rmse"].iloc[-1] == pytest.approx(np.array([1, 2, 0, 4]) / 7 @ each)

    def rooted(client: Client, x: Any, y: Any) -> dict[str, Any]:
        batch = client.samples()
        errors = (batch.rows["a"] @ y - batch.rows["b"]) ** 2
        return {"rmse": jnp.sqrt(jnp.sum(errors * batch.mask) / jnp.sum(batch.mask))}

    run = rk.solve(PROBLEM, clients(), METHOD, START, 1, evaluate_client=rooted)
    own = [{k: a[:n] for k, a in u.items()} for u, n in zip(UPPER, SIZES, strict=True)]
    each = [np.sqrt(np.mean((u["a"] @ np.asarray(run.y) - u["b"]) ** 2)) for u in own]
    assert run.history["rmse_q100"].iloc[-1] == pytest.approx(max(each))


@pytest.mark.slow
def test_a_random_loss_and_a_compiled_evaluate() -> None:
    noisy = rk.SingleLevel(lambda x, z, key: loss(x, z) + 0.1 * jax.random.normal(key) * jnp.sum(x))
    own = lambda client, x, y: {"loss": client.f(x, y, client.upper())}
    given = dict(cohort=2, evaluate_client=own, evaluate=jax.jit(lambda x, y: {"norm": jnp.sum(x**2)}))
    one, other = (
        rk.solve(
            noisy, one_data_set(), rk.FedAvg(step=0.1, local_steps=2), np.ones(3), 2, engine=engine, **given
        ).history
        for engine in (rk.Simulation(), rk.Federation())
    )
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-10)
    assert one["loss"].nunique() == 3


@pytest.mark.slow
def test_tune_by_a_metric_of_the_clients() -> None:
    found = rk.tune(
        PROBLEM, clients(), METHOD, START, 4, evaluate_client=measured, metric="loss_q90", search=["upper_step"],
        candidates=3, cohort=2,
    )  # fmt: skip
    run = rk.solve(PROBLEM, clients(), found.best, START, 4, evaluate_client=measured, cohort=2)
    assert found.value == pytest.approx(run.history["loss_q90"].iloc[-1], rel=1e-9)
    with pytest.raises(ValueError, match="metric='loss' needs evaluate"):
        rk.tune(PROBLEM, clients(), METHOD, START, 4, metric="loss")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda c, x, y: {"loss": y}, "evaluate_client must return a dict of numbers"),
        (lambda c, x, y: {"seconds": x}, "must not return 'seconds', a column of the history"),
        (lambda c, x, y: {"norm": x}, "evaluate and evaluate_client both return 'norm'"),
        (lambda c, x, y: {"loss": c.f(x, y, c.lower(size=2))}, "needs a key; got None"),
        ("loss", "must be a function of"),
    ],
)
def test_bad_input(own: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        rk.solve(PROBLEM, clients(), METHOD, START, 1, evaluate_client=own, evaluate=lambda x, y: {"norm": x})


def test_no_test_data() -> None:
    bare = rk.Clients(LOWER, UPPER)
    with pytest.raises(ValueError, match="the clients have no test data"):
        rk.solve(PROBLEM, bare, METHOD, START, 1, evaluate_client=measured)
    with pytest.raises(ValueError, match="test must have one entry for each of the 4 clients; got 2"):
        rk.Clients(LOWER, UPPER, test=TEST[:2])


def test_a_quantile_goes_the_metrics_way() -> None:
    assert direction("accuracy_q10").higher_is_better
    assert not direction("loss_q90").higher_is_better


def test_a_table_with_rows_for_tests() -> None:
    table = {"site": ["a"] * 10 + ["b"] * 4, "v": np.arange(14.0)}
    made = rk.Clients.from_frame(table, by="site", upper=0.3, test=0.2)
    assert made.test is not None
    assert made.summary()[["lower", "upper", "test"]].to_numpy().tolist() == [[5, 3, 2], [2, 1, 1]]
    seen = [np.asarray(level.rows["features"]).ravel() for level in (made.lower, made.upper, made.test)]
    assert sorted(np.concatenate(seen).tolist()) == list(range(14))
    without = rk.Clients.from_frame(table, by="site", upper=0.3)
    assert set(seen[1]) == set(np.asarray(without.upper.rows["features"]).ravel())  # the same validation data
    alone = rk.Clients.from_frame(table, by="site", test=0.2)
    assert set(seen[2]) == set(np.asarray(alone.test.rows["features"]).ravel())  # and the same test data
    assert "for tests" in made.describe()
    with pytest.raises(ValueError, match=r"must leave rows to the lower level; got upper=0\.5 and test=0\.5"):
        rk.Clients.from_frame(table, by="site", upper=0.5, test=0.5)
    with pytest.raises(ValueError, match="has 2 rows, and both levels and the test data need one each"):
        rk.Clients.from_frame({"site": ["a"] * 5 + ["b"] * 2, "v": np.arange(7.0)}, by="site", upper=0.3, test=0.2)
