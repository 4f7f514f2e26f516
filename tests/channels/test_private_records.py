"""Private for each record: what oracles release, their sensitivity, noise and account."""

import math
from collections import Counter
from copy import copy
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.contract import cases

import rookery as rk
from rookery.base import compat
from rookery.channels.account import Account, Draws
from rookery.data.rows import View
from rookery.engines.engine import Job, traced
from rookery.engines.simulation import debug
from rookery.language import records
from rookery.language.records import Block, Records, release
from rookery.plan.releases import releases
from rookery.run.arguments import checked

BOUND, NEARLY_NONE = 0.5, 1e-9
REFUSED = {
    "FastDRO": "client.samples, single samples",
    "FedMBO": "known only during the run",
    "PDSGD": "single samples",
    "ProxSkipGDA": "has no bound before the run",
}


def channel(**given: Any) -> Any:
    return rk.private(**{"delta": 1e-3, "noise": NEARLY_NONE, "clip": BOUND, "unit": "record", **given})


def all_methods(quick: set[str]) -> list[Any]:
    pairs = [(name, kind) for name in cases.names() for kind in cases.testing.kinds(cases.method(name))]
    slow = lambda name: [] if name in quick or name in REFUSED else [pytest.mark.slow]
    return [pytest.param(name, kind, id=f"{name}-{kind}", marks=slow(name)) for name, kind in pairs]


class Noted:
    """Writes down every release of a debugging run; a second run continues from the results of the first."""

    def __init__(self, monkeypatch: Any) -> None:
        self.first: list[Any] = []
        self.now: list[Any] = []
        monkeypatch.setattr(release, "impl", self._note)
        monkeypatch.setattr(jax.lax.cond_p, "impl", self._branch)
        monkeypatch.setattr(debug, "check_finite", lambda *_: None)

    def _note(self, *values: Any, **mark: Any) -> list[Any]:
        self.now.append((mark, [np.asarray(a, float) for a in values]))
        i = len(self.now) - 1
        return list(values) if self.now is self.first else [jnp.asarray(a) for a in self.first[i][1]]

    @staticmethod
    def _branch(index: Any, *operands: Any, branches: Any, **_: Any) -> list[Any]:
        """Take the steps of the branch one by one, so that its releases are written down, too."""
        taken = branches[int(index)]
        return compat.eval_jaxpr(taken.jaxpr, taken.consts, *operands)

    def run(self, job: Any) -> None:
        session = debug.Session(traced(job, debug=True), rk.Simulation(debug=True))
        session.init()
        session.advance(1)


def neighbour(job: Any, value: float) -> Any:
    """The job with one record of each client that consists of this number at each level. A release is of one client."""
    clients = copy(job.clients)
    for level in ("_lower", "_upper", "_center"):
        data = getattr(clients, level)
        if data is not None:
            last = data.offsets + data.sizes - 1
            change = lambda a, last=last: a.at[last].set(value) if jnp.issubdtype(a.dtype, jnp.floating) else a
            setattr(clients, level, replace(data, rows=jax.tree.map(change, data.rows)))
    return replace(job, clients=clients)


@pytest.mark.parametrize(("name", "kind"), all_methods({"FedAvg"}))
def test_one_record_changes_no_release_by_more_than_its_bound(name: str, kind: str, monkeypatch: Any) -> None:
    """A record of NaN counts as absent. Sums are in units of the bound: 1 is the most that a record can add."""
    job = cases.job(name, cases.ragged(kind), channel=channel(), noise_seed=3)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            traced(job)
        return
    noted = Noted(monkeypatch)
    noted.now = noted.first
    noted.run(job)
    assert noted.first
    largest = 0.0
    absent: list[Any] = []
    for value in (math.nan, 1e30, math.inf):
        noted.now = []
        noted.run(neighbour(job, value))
        absent = absent or noted.now
        others = [noted.first, absent] if value != math.inf else [absent]
        for other in others if value != math.nan else [noted.first]:
            for (mark, before), (_, after) in zip(other, noted.now, strict=True):
                assert all(np.isfinite(a).all() for a in after), mark
                moved = math.sqrt(sum(float(np.sum((a - b) ** 2)) for a, b in zip(before, after, strict=True)))
                both_present = other is noted.first and value == 1e30  # then it was replaced
                assert moved <= (2 if both_present else 1) + 1e-5, (mark, moved)
                largest = max(largest, moved)
    assert largest > 0


@pytest.mark.parametrize(("name", "kind"), all_methods({"FedAvg"}))
def test_every_release_is_accounted_for(name: str, kind: str, monkeypatch: Any) -> None:
    """A debugging run makes as many releases of each kind, at each client, as the account says, or fewer."""
    if name in REFUSED:
        pytest.skip("refused")
    noted = Noted(monkeypatch)
    noted.now = noted.first
    job = cases.job(name, cases.ragged(kind), channel=channel(), noise_seed=3)
    found = traced(job, debug=True)
    noted.run(job)
    allowed: Counter[Any] = Counter()
    for plan, clients in ((found.start, job.clients.n), (found.round, job.cohort)):
        for event in releases(plan).records:
            for oracles, times in event.releases.items():
                allowed[event.level, oracles] += clients * event.times * times
    made = Counter((mark["level"], mark["oracles"]) for mark, _ in noted.first)
    assert all(made[kind] <= allowed[kind] for kind in made), (made, allowed)
    if not any(isinstance(value, tuple) for value in cases.SETTINGS[name].values()) and "center" not in str(made):
        assert set(made) == set(allowed)


def test_steps_that_a_loop_leaves_out_are_not_accounted_for() -> None:
    """SimFBO takes its first local step before the loop over the others."""
    job = cases.job("SimFBO", cases.ragged("Bilevel"), channel=channel(), noise_seed=3)
    found = traced(replace(job, algorithm=replace(job.algorithm, local_steps=4, batch_size=2)))
    assert [(event.level, event.times) for event in releases(found.round).records] == [
        ("upper", 1), ("lower", 1), ("upper", 3), ("lower", 3),
    ]  # fmt: skip


VIEW = View({"a": jnp.asarray(np.random.default_rng(0).normal(size=(300, 4)), jnp.float32)}, 0, 300, 300, 300, None)


def drawn_batch(seed: Any, size: int = 30, view: View = VIEW) -> Any:
    return Records(lambda _: 1.0, jax.random.key(seed), jnp.ones(2)).minibatch(view, "lower", size, None, 0)


def test_a_minibatch_has_each_record_with_the_same_probability_independently() -> None:
    @jax.jit
    @jax.vmap
    def drawn(seed: Any) -> Any:
        batch = drawn_batch(seed)
        there = jnp.arange(len(batch.index)) < batch.count
        return jnp.zeros(300).at[batch.index].add(there), batch.count

    there, count = drawn(jnp.arange(4000))
    there = np.asarray(there)
    assert there.max() == 1
    error = math.sqrt(0.1 * 0.9 / 4000)
    assert abs(there.mean(axis=0) - 0.1).max() < 4.5 * error
    assert abs(np.asarray(count).var() - 300 * 0.1 * 0.9) < 5 * 27 * math.sqrt(2 / 4000)
    pairs = np.corrcoef(there[:, :40].T)[np.triu_indices(40, 1)]
    assert abs(pairs).max() < 4.8 / math.sqrt(4000)


@pytest.mark.parametrize("size", [1, 7])
def test_a_small_client_and_a_batch_larger_than_its_data(size: int) -> None:
    view = View({"a": jnp.ones((200, 1))}, 0, jnp.int32(size), 200, 1, None)
    batch = drawn_batch(0, 30, view)
    assert int(batch.count) == size
    assert float(batch.expected) == size
    assert batch.chance == 1.0


def test_the_same_draw_is_one_event_and_another_is_another() -> None:
    """One key and step: one minibatch. Equal keys that are other values of the trace: another draw."""
    made = Records(lambda _: 1.0, jax.random.key(0), jnp.ones(2))
    key, other = jax.random.key(1), jax.random.key(1)
    first = made.minibatch(VIEW, "lower", 30, key, 0)
    assert made.minibatch(VIEW, "lower", 30, key, 0) is first
    for again in (
        made.minibatch(VIEW, "lower", 30, other, 0), made.minibatch(VIEW, "lower", 30, key, 1),
        made.minibatch(VIEW, "upper", 30, key, 0), made.minibatch(VIEW, "lower", 31, key, 0),
    ):  # fmt: skip
        assert again.number != first.number
        assert not np.array_equal(again.index, first.index[: len(again.index)])


def released(seed: Any, level: Any, size: int | None = None) -> Any:
    made = Records(lambda oracle: {"g_y": 2.0, "g_yy": 1.0}[oracle], jax.random.key(seed), level)
    batch = made.all(VIEW, "lower") if size is None else made.minibatch(VIEW, "lower", size, None, 0)
    v = jnp.asarray([3.0, 4.0])
    one = lambda row, key: (row["a"][0, :2], 5 * row["a"][0, 2:])
    return made.mean(batch, one, (Block("g_y"), Block("g_yy", v)))


def test_noise_is_in_units_of_the_bounds_and_of_the_public_vector() -> None:
    """The standard deviation is level · bound · ‖v‖ over the number that a mean divides by."""
    levels = jnp.asarray([3.0, 7.0], jnp.float32)
    with_noise = jax.jit(jax.vmap(lambda seed: released(seed, levels)))(jnp.arange(3000))
    without = released(0, 0 * levels)
    for part, exact, unit in zip(with_noise, without, (2.0, 5.0), strict=True):
        noise = np.asarray(part) - np.asarray(exact)
        expected = 3.0 * unit / 300
        assert abs(noise.std(axis=0) / expected - 1).max() < 4.5 / math.sqrt(2 * 3000)
        assert abs(noise.mean(axis=0)).max() < 4.5 * expected / math.sqrt(3000)
    both = np.concatenate([np.asarray(part) for part in with_noise], axis=1)
    assert abs(np.corrcoef(both.T)[np.triu_indices(4, 1)]).max() < 4.5 / math.sqrt(3000)


def test_a_record_is_clipped_as_a_whole_and_the_mean_is_right_below_the_bound() -> None:
    rows = np.asarray(VIEW.rows["a"], float)
    scaled = np.concatenate([rows[:, :2] / 2, 5 * rows[:, 2:] / 5], axis=1)
    clipped = scaled / np.maximum(np.linalg.norm(scaled, axis=1, keepdims=True), 1)
    expected = clipped.mean(axis=0) * [2, 2, 5, 5]
    found = np.concatenate([np.asarray(part) for part in released(0, jnp.zeros(2))])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_many_records_are_added_up_in_pieces(monkeypatch: Any) -> None:
    whole = Records(lambda _: 1.0, jax.random.key(0), jnp.ones(2)).all(VIEW, "lower")
    total = lambda: np.asarray(records._total(whole, lambda row, key: (row["a"],), [jnp.float32(1)])[0][0])
    rows = np.asarray(VIEW.rows["a"])
    expected = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)).sum(axis=0)
    np.testing.assert_allclose(total(), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(records, "_NUMBERS", 7 * rows.shape[1])
    np.testing.assert_allclose(total(), expected, rtol=1e-4, atol=1e-4)


PENALISED = rk.Bilevel(
    upper=lambda x, y, b: jnp.mean((b @ y - 1) ** 2) + jnp.sum(x**2),
    lower=lambda x, y, b: jnp.mean((b @ y) ** 2),
    penalty=lambda x, y: jnp.exp(x[0]) * jnp.sum(y**2),
)
INSIDE = rk.Bilevel(PENALISED.upper, lambda x, y, b: PENALISED.lower(x, y, b) + PENALISED.penalty(x, y))


@pytest.mark.slow
def test_a_penalty_is_a_term_of_the_loss_that_is_neither_clipped_nor_noisy() -> None:
    rng = np.random.default_rng(1)
    clients = rk.Clients(lower=list(rng.normal(size=(3, 6, 2))), upper=list(rng.normal(size=(3, 6, 2))))
    solved = lambda problem, **given: rk.solve(
        problem, clients, rk.FedBiO(upper_step=0.01, lower_step=0.05, linear_step=0.05, local_steps=2),
        (np.zeros(1), np.ones(2)), 3, **given,
    )  # fmt: skip
    _same(solved(PENALISED), solved(INSIDE), rtol=1e-12)
    # With bounds that clip nothing, and no noise, a private run is the plain one.
    plain = solved(PENALISED)
    for problem in (PENALISED, INSIDE):
        loose = solved(problem, channel=channel(clip=1e4, noise=1e-12), noise_seed=0)
        _same(plain, loose, rtol=1e-5, atol=1e-7)
    # With bounds that leave nothing of the data, the penalty alone moves y.
    tight = solved(PENALISED, channel=channel(clip=1e-9, noise=1e-12), noise_seed=0)
    expected = np.ones(2) * (1 - 0.05 * 2) ** 6
    np.testing.assert_allclose(tight.y, expected, rtol=1e-5)


@pytest.mark.slow
def test_every_level_of_a_composition_is_released_by_itself() -> None:
    """With bounds that clip nothing, and no noise, a private run is the plain one."""
    it = cases.ragged("MultiLevel")
    method = rk.FedMSA(0.02, 0.1, 0.1, 2, jacobians="tracked")
    plain, loose = (
        rk.solve(it.problem, it.clients(), method, it.init, 2, **given)
        for given in ({}, {"channel": channel(clip=1e4, noise=1e-12), "noise_seed": 0})
    )
    _same(plain, loose, rtol=1e-5, atol=1e-7)


def _same(run: Any, other: Any, **tolerance: float) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), run.state, other.state)


@pytest.mark.parametrize("problem", [
    rk.Minimax(lambda x, y, b: jnp.mean(b) * x @ y, penalty=lambda x, y: -0.5 * y @ y),
    rk.SingleLevel(lambda x, b: jnp.mean(b) * x @ x, penalty=lambda x: 0.5 * x @ x),
    rk.WeightedNodes(lambda y, b: jnp.mean(b) * y @ y, penalty=lambda y: 0.5 * y @ y),
])  # fmt: skip
def test_the_penalty_of_each_class(problem: Any) -> None:
    x, y, b = jnp.ones(2), jnp.full(2, 2.0), jnp.ones(3)
    bare = problem.without_penalty
    for loss in ("f", "g") if hasattr(problem, "g") else ("f",):
        whole, data = (getattr(it, loss)(x, y, b) for it in (problem, bare))
        assert float(whole - data) == pytest.approx(float(problem.free(loss)(x, y)))
        assert bare.free(loss) is None


SINGLE = rk.SingleLevel(lambda x, b: jnp.mean((b @ x - 1) ** 2))
CLIENTS = rk.Clients(upper=list(np.random.default_rng(2).normal(size=(4, 6, 2))))


def solved(**given: Any) -> Any:
    method = rk.FedAvg(step=0.1, batch_size=2, local_steps=2)
    return rk.solve(SINGLE, CLIENTS, method, np.zeros(2), 4, **given)


def test_the_same_numbers_in_blocks_on_several_devices() -> None:
    private = {"channel": channel(epsilon=8, noise=None, delta=1e-2), "noise_seed": 5}
    first = solved(**private)
    assert first.history["epsilon"].iloc[-1] == pytest.approx(8, rel=1e-2)
    _same(first, solved(**private, engine=rk.Simulation(mesh=2, block=1)), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedBiO", "LFedNest", "FedBiOAccLocal", "CommFedBiO", "FedDRO", "WeightedNodesProx"])
def test_other_methods_on_every_engine(name: str) -> None:
    kind = cases.testing.kinds(cases.method(name))[0]
    job = cases.job(name, cases.ragged(kind), channel=channel(noise=1.0), noise_seed=3)
    states = []
    for engine in (rk.Simulation(), rk.Simulation(block=2), rk.Simulation(mesh=2), rk.Simulation(debug=True)):
        session = engine.open(job)
        session.init()
        session.advance(2)
        states.append(jax.tree.map(np.asarray, session.state))
    for state in states[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8), states[0], state)


def test_noise_does_not_follow_from_the_seed() -> None:
    first, second = (solved(channel=channel(noise=1.0)) for _ in range(2))
    assert not np.allclose(first.x, second.x)


def test_clients_with_one_data_set_compose_both_levels() -> None:
    """A record is then in the lower and in the upper level."""
    rng = np.random.default_rng(1)
    one = rk.Clients(lower=list(rng.normal(size=(3, 6, 2))))
    two = rk.Clients(lower=list(rng.normal(size=(3, 6, 2))), upper=list(rng.normal(size=(3, 6, 2))))
    job = lambda clients: Job(PENALISED, clients, rk.FedBiO(), (np.zeros(1), np.ones(2)), 3, channel=channel(noise=4.0))
    spent = [traced(checked(job(clients), 3)).account.epsilon(1.0, 1e-3, 3) for clients in (one, two)]
    assert spent[0] > spent[1] * 1.3


@pytest.mark.parametrize(("given", "message"), [
    ({"delta": 0.2}, "delta must be below 1/n for the n = 6 records of the largest client; got 0.2"),
    ({"clip": {"g_y": 1.0}}, "clip must have a number for each oracle .*; got numbers for 'g_y', and none for"),
    ({"noise": {"lower": 1.0}}, "noise must be a number, or have one for 'lower' and one for 'upper'"),
    ({"quantile": 0.5}, "quantile must be None for records"),
    ({"unit": "row"}, 'unit must be "client" or "record"; got \'row\''),
    ({"epsilon": 0.01, "noise": 1.0}, "epsilon must be large enough for one round; got 0.01"),
])  # fmt: skip
def test_bad_input_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        solved(channel=channel(**given))
    assert "\n" not in str(error.value)


TRIALS, RATE, DELTA = 20_000, 0.2, 1e-3


@pytest.mark.parametrize(("true_share", "holds"), [(1.0, True), (0.5, False)])
def test_an_attack_on_one_record_succeeds_no_more_often_than_allowed(true_share: float, holds: bool) -> None:
    """A record that is as large as a bound allows, in a minibatch with noise; half of that noise is caught."""
    noise = 1.2
    view = lambda last: View({"a": jnp.zeros((10, 1)).at[9, 0].set(last)}, 0, 10, 10, 10, None)

    def seen(last: float, seed: Any) -> Any:
        made = Records(lambda _: 1.0, jax.random.key(seed), jnp.full(2, true_share * noise))
        batch = made.minibatch(view(last), "lower", round(10 * RATE), None, 0)
        return made.mean(batch, lambda row, key: row["a"][0], (Block("g_y"),))[0] * 10 * RATE

    attack = jax.jit(jax.vmap(seen, (None, 0)))
    there, absent = np.asarray(attack(1e9, jnp.arange(TRIALS))), np.asarray(attack(math.nan, -jnp.arange(1, TRIALS)))
    epsilon = Account((), (Draws(1, 1 / noise**2, RATE),)).epsilon(1.0, DELTA, 1)
    thresholds = np.linspace(-4, 5, 40)
    hits, alarms = (np.mean(values[:, None] > thresholds, axis=0) for values in (there, absent))
    error = np.sqrt((hits * (1 - hits) + np.exp(2 * epsilon) * alarms * (1 - alarms)) / TRIALS)
    excess = (hits - np.exp(epsilon) * alarms - DELTA) / np.maximum(error, 1 / TRIALS)
    assert bool(excess.max() < 4) == holds, excess.max()


def test_a_penalty_alone_moves_x_if_the_bound_leaves_nothing_of_the_data() -> None:
    problem = rk.SingleLevel(lambda x, b: jnp.mean((b @ x - 1) ** 2), penalty=lambda x: x @ x)
    tight = channel(clip=1e-9, noise=1e-12)
    run = rk.solve(problem, CLIENTS, rk.FedAvg(step=0.1), np.ones(2), 2, channel=tight, noise_seed=0)
    np.testing.assert_allclose(run.x, np.full(2, 0.8**2), rtol=1e-6)
