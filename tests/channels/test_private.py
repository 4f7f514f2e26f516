"""`rk.private` for clients, attacked: what one client can change, the noise, Poisson cohorts, budgets, and refusals."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.channels import neighbours
from tests.contract import cases

import rookery as rk
from rookery.data.cohort import Draw, overflow
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.federation import session as federation
from rookery.engines.simulation import device
from rookery.language.channel import ChannelExchange
from rookery.plan.releases import releases
from rookery.run.arguments import checked
from rookery.testing import cases as testing
from rookery.testing import runs

slow = partial(pytest.param, marks=pytest.mark.slow)
SQUARES = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))


class State(NamedTuple):
    x: Any
    seen: Any
    y: Any = ()


@dataclass(frozen=True)
class Everything:
    """A method with every kind of exchange, whose state keeps all results."""

    scale: float = 1.0  # of the updates

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def memory(self, x: Any, y: Any) -> Any:
        return jnp.zeros_like(x)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        first = fed.mean(fed.map(lambda c, k: self.scale * c.f_x(x, (), c.upper(k, None)), key), "start")
        zero = jnp.zeros_like(x)
        kinds = ("x", "sum", "weights", "other", "vector", "integers")
        return State(x, {"start": first, "loop": [zero, zero], **dict.fromkeys(kinds, zero)})

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        x, n = state.x, fed.n
        gradient = lambda c, k: self.scale * c.f_x(x, (), c.upper(k, None))

        def local(c: Any, k: Any, memory: Any) -> Any:
            g = gradient(c, k)
            return (x - g - memory, 3 + g, (g > 0).astype(jnp.int32)), memory + g

        marks = (None, rk.Bookkeeping("a vector", most=5.0, least=1.0), rk.Bookkeeping("integers", most=1))
        (moved, vector, integers), heard = fed.mean(
            fed.map_state(local, key), "x", around=(x, None, None), bookkeeping=marks, heard=True
        )
        values = fed.map(gradient, key)
        total = fed.sum(values, "sum")
        weighted = fed.mean(values, "weights", weights=jnp.arange(1.0, n + 1))
        turns = fed.loop(2, lambda i, both: [both[1], fed.mean(values, "loop")], [0 * x, 0 * x])
        fresh = fed.resample(key)
        other = fresh.mean(fresh.map(gradient, key), "other")
        seen = {"start": state.seen["start"], "x": moved - x, "sum": total, "weights": weighted, "other": other}
        marked = {"vector": vector, "integers": jnp.asarray(integers, x.dtype)}
        return State(moved + 0 * heard.weight, {**seen, **marked, "loop": turns})


def squares(n: int = 4, dimension: int = 3, weights: Any = (1, 2, 1, 3), rows: Any = None) -> rk.Clients:
    rng = np.random.default_rng(4)
    each = [rng.normal(size=(2 + i % 3, dimension)) for i in range(n)] if rows is None else rows
    return rk.Clients(upper=each, weights=weights)


def everything(
    clients: rk.Clients, cohort: Any, channel: Any, method: Any = None, dimension: int = 3, **more: Any
) -> Job:
    job = Job(SQUARES, clients, method or Everything(), np.ones(dimension), cohort, 25, channel, **more)
    return checked(job, 3)


# One client's effect on every result.

BY_HAND = rk.private(delta=1e-3, noise=1.0, clip=0.01)  # a noise of 1: what one client may change is one unit of noise
COHORTS = ("all", "fixed", "poisson")
REPLACED = ("huge", "nan", "inf", "other")
FEW = ("nan", "other")
OTHER = 3  # the client that is replaced, with the largest weight


def neighbour(it: testing.Case, weights: Any, how: str) -> rk.Clients:
    """The clients of a case, one of them with other data. `Clients` takes finite data, so others are put in later."""
    mark = 12345.0

    def spoilt(a: Any) -> Any:
        a = np.array(a)
        if not np.issubdtype(a.dtype, np.floating):
            return a
        if how == "other":
            return -3 * a[:-1]
        return a * 1e30 if how == "huge" else np.full_like(a, mark)

    changed = lambda rows: [jax.tree.map(spoilt, part) if i == OTHER else part for i, part in enumerate(rows)]
    clients = replace(it, data={level: changed(rows) for level, rows in it.data.items()}).clients(weights=weights)
    if how in ("huge", "other"):
        return clients
    becomes = lambda a: jnp.where(a == mark, getattr(jnp, how), a) if jnp.issubdtype(a.dtype, jnp.floating) else a
    return jax.tree.map(becomes, clients)


def drawn_often(job: Job, rounds: int) -> Job:
    """The job with noise from which the client is in every cohort."""
    for seed in range(100):
        job = replace(job, noise_seed=seed)
        if all(OTHER in cohort for cohort in neighbours.cohorts(job, rounds)):
            return job
    raise AssertionError("the client is never drawn")


def check_effects(
    job: Job, it: testing.Case, weights: Any, monkeypatch: Any, replaced: Any = REPLACED, rounds: int = 2
) -> None:
    """Check that a client which is replaced or left out changes every result by at most what is declared.

    All results of the first run are used in the others, too. Whatever else a client changes is then a leak.
    """
    job = drawn_often(job, 2)
    run = neighbours.Run(job, monkeypatch)
    first = run.first(rounds)
    declared = [sum(draws.times * draws.precision for draws in part)
                for part in (run.traced.account.start, run.traced.account.round)]  # fmt: skip
    largest = 0.0
    for how in (*replaced, "left out"):
        left_out = how == "left out"
        clients = job.clients if left_out else neighbour(it, weights, how)
        again = run.again(clients, OTHER, left_out, rounds)
        most = 1 if left_out else 2
        for changes, precision in zip(run.changes(), [declared[0], *[declared[1]] * rounds], strict=True):
            assert np.sum(np.square(changes)) <= most**2 * precision * (1 + 1e-9), (how, changes)
            largest = max([largest, *changes])
        for before, after in zip(first, again, strict=True):
            same = np.testing.assert_array_equal
            jax.tree.map(same, (before.state, before.server), (after.state, after.server))
            others = np.arange(it.n) != OTHER
            jax.tree.map(lambda a, b: same(a[others], b[others]), before.memory, after.memory)
    assert largest > 0.1  # of the noise: the attack is one


def attacked(method: Any, kind: str, cohort: str, channel: Any = BY_HAND) -> tuple[Job, testing.Case, Any]:
    it = testing.ragged(kind)
    weights = testing.weights(method, it)
    job = testing.job(method, it, channel=channel)
    if cohort == "poisson":
        job = neighbours.poisson(job, 2)
    return (job if cohort != "all" else replace(job, cohort=it.n)), it, weights


@pytest.mark.parametrize(("cohort", "quantile"), [slow("fixed", None), ("poisson", 0.5)])
def test_one_client_changes_every_kind_of_result_of_a_round_by_at_most_what_is_declared(
    cohort: str, quantile: float | None, monkeypatch: Any
) -> None:
    channel = rk.private(delta=1e-3, noise=1.0, clip=0.3, quantile=quantile)
    check_effects(*attacked(Everything(), "SingleLevel", cohort, channel), monkeypatch, FEW, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("quantile", [None, 0.5])
@pytest.mark.parametrize("cohort", COHORTS)
def test_one_client_changes_every_kind_of_result_by_at_most_what_is_declared(
    cohort: str, quantile: float | None, monkeypatch: Any
) -> None:
    channel = rk.private(delta=1e-3, noise=1.0, clip=0.3, quantile=quantile)
    check_effects(*attacked(Everything(), "SingleLevel", cohort, channel), monkeypatch)


SEEN, NOT_BOUNDED = "sees every reply to the exchange {} by itself", "carries bookkeeping without a bound"
REFUSED = {
    "CoBo": SEEN.format("'gradients'"),
    "CommFedBiO": SEEN.format("'Hu − f_y'"),
    "DRFA": "A cohort is drawn with replacement",
    "FastDRO": SEEN.format("'losses'"),
    "FedMBO": SEEN.format("'p'"),
    "LocalTrain": "must have exchanges; got a method without any",
    "PDSGD": NOT_BOUNDED,
    "QFedAvg": NOT_BOUNDED,
    "WeightedNodesABA": SEEN.format("'slopes'"),
    "WeightedNodesProx": SEEN.format("'slopes'"),
}  # fmt: skip
QUICK = {("FedAvg", "fixed")}
ATTACKS = [
    (name, kind, cohort)
    for name, kind in cases.pairs()
    for cohort in COHORTS[1:]
    if name not in REFUSED and not (cohort == "poisson" and "all clients" in cases.needs(name))
]


@pytest.mark.parametrize(("name", "kind", "cohort"), [case if case[::2] in QUICK else slow(*case) for case in ATTACKS])
def test_one_client_changes_every_result_of_a_method_by_at_most_what_is_declared(
    name: str, kind: str, cohort: str, monkeypatch: Any
) -> None:
    check_effects(*attacked(cases.method(name), kind, cohort), monkeypatch)


@pytest.mark.parametrize("name", REFUSED)
def test_the_methods_that_are_refused(name: str) -> None:
    job, _, _ = attacked(cases.method(name), cases.claims(name)[0], "fixed")
    with pytest.raises(ValueError, match=REFUSED[name]):
        engine.traced(job)


@dataclass(frozen=True)
class OnlyStart:
    """A method that exchanges in `init` alone."""

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        return State(fed.mean(fed.map(lambda c, k: c.f_x(x, (), c.upper(k, None)), key), "start"), ())

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        return state


def test_a_start_alone_is_private() -> None:
    found = engine.traced(everything(squares(), None, rk.private(1.0, 1e-3), OnlyStart()))
    assert 0.99 < found.job.channel.spent(found.account, 3) <= 1
    assert found.job.channel.spent(found.account, 0) == found.job.channel.spent(found.account, 3)
    assert np.isfinite(found.job.channel.init(found.start.exchanges["start"])[0]["noise"])


# The noise.

WIDE = 4000


@pytest.fixture(scope="module")
def noises() -> dict[str, tuple[Any, float]]:
    """All results of three rounds in which every update is zero, by name, with the share of a client in them."""
    clients = squares(4, WIDE, rows=[np.zeros((1, WIDE))] * 4)
    job = everything(clients, 2, rk.private(delta=1e-3, noise=2.0, clip=0.5), Everything(0.0), WIDE, noise_seed=3)
    shares = {"start": 3 / 7, "x": 6 / 7, "sum": 6 / 7, "weights": 4 / 5, "other": 6 / 7, "loop": 6 / 7}
    found: dict[str, tuple[Any, float]] = {}
    session = rk.Simulation().open(job)
    session.init()
    for t in range(3):
        session.advance(1)
        for name, result in session.state.seen.items():
            if name in ("vector", "integers"):
                continue  # clamped to their bounds
            for i, each in enumerate(result if name == "loop" else [result]):
                if name != "start" or t == 0:
                    found[f"{name} {t} {i}"] = (np.array(each), shares[name])
    return found


def test_the_noise_of_every_release_has_its_size(noises: Any) -> None:
    assert len(noises) == 1 + 3 * 6
    for name, (noise, share) in noises.items():
        assert np.std(noise) == pytest.approx(2.0 * 0.5 * share, rel=5 / math.sqrt(2 * WIDE)), name
        assert abs(np.mean(noise)) < 5 * share / math.sqrt(WIDE), name


def test_no_two_releases_share_noise(noises: Any) -> None:
    """Of turns of a loop, of exchanges, of rounds, of the start, or of another cohort."""
    rows = np.array([noise for noise, _ in noises.values()])
    for shift in (0, 1):  # entries of one array against each other, too
        correlation = np.corrcoef(rows, np.roll(rows, shift, axis=1))[: len(rows), len(rows) :]
        if shift == 0:
            np.fill_diagonal(correlation, 0)
        assert np.max(np.abs(correlation)) < 5 / math.sqrt(WIDE)


def test_the_noise_of_bookkeeping_and_of_an_adaptive_bound_has_its_size() -> None:
    shape = jax.ShapeDtypeStruct((WIDE,), jnp.float64)
    level, share = 0.01, 0.1
    channel = replace(rk.private(delta=1e-3, noise=level, quantile=0.3), levels=(("x", level),))
    exchange = ChannelExchange("x", "mean", shape, jnp.asarray(share))
    state, keys = channel.init(exchange)[0], jax.random.split(jax.random.key(0), WIDE)
    marks = [rk.Bookkeeping("a", most=6.0, least=2.0), rk.Bookkeeping("b", most=4.0)]
    first, second = channel.hide(exchange, marks, [jnp.full(WIDE, 2.0)] * 2, keys[0], state, jnp.ones(()))
    size = level * 4 * math.sqrt(WIDE) * share
    assert np.std(first - 4) == pytest.approx(size, rel=5 / math.sqrt(2 * WIDE))
    assert np.std(second - 2) == pytest.approx(size, rel=5 / math.sqrt(2 * WIDE))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(WIDE)
    assert np.ptp(first) < 4  # none is at its bounds
    decoded = jax.vmap(lambda key: channel.decode(exchange, (jnp.zeros(1), jnp.zeros(())), key, state))
    updates, after = decoded(keys)
    bits = 0.3 - np.log(np.asarray(after["bound"], float)) / 0.2 - 0.5
    assert np.std(updates) == pytest.approx(level / math.sqrt(0.95) * share, rel=5 / math.sqrt(2 * WIDE))
    assert np.std(bits) == pytest.approx(level / math.sqrt(0.05) * share / 2, rel=5 / math.sqrt(2 * WIDE))
    assert abs(np.corrcoef(updates[:, 0], bits)[0, 1]) < 5 / math.sqrt(WIDE)


AVERAGE = rk.FedAvg(step=0.1)


def solved(channel: Any = None, rounds: int = 3, clients: Any = None, method: Any = AVERAGE, **given: Any) -> rk.Run:
    channel = rk.private(delta=1e-3, noise=1.0) if channel is None else channel
    return rk.solve(
        SQUARES, squares() if clients is None else clients, method, np.ones(3), rounds, channel=channel, **given
    )


def test_noise_and_cohorts_come_from_the_noise_seed_alone() -> None:
    """Two runs with one seed differ in both, and nothing of them follows from the seed."""
    first, second = (solved(seed=3, cohort=2).x for _ in range(2))
    assert np.all(np.asarray(first) != np.asarray(second))
    np.testing.assert_array_equal(*(solved(seed=3, cohort=2, noise_seed=9).x for _ in range(2)))
    for cohort in (6, rk.Poisson(6)):
        job = everything(squares(12, weights=None), cohort, rk.private(delta=1e-3, noise=1.0))
        drawn = lambda seed, noise: neighbours.cohorts(replace(job, seed=seed, noise_seed=noise), 3)
        one = drawn(1, 1)
        assert one == drawn(2, 1)
        assert one != drawn(1, 2)
        assert drawn(1, None) != drawn(1, None)
        assert len({str(each) for each in one}) == 3


@dataclass(frozen=True)
class Resampled(Everything):
    """A method whose only exchange is with another cohort."""

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        fresh = fed.resample(key)
        other = fresh.mean(fresh.map(lambda c, k: c.f_x(state.x, (), c.upper(k, None)), key), "other")
        return State(state.x, {**state.seen, "other": other})


@pytest.mark.parametrize("cohort", [2, rk.Poisson(2)])
def test_another_cohort_of_a_round_comes_from_the_noise_seed_alone(cohort: Any) -> None:
    """Without noise, its mean tells who is in it."""
    channel = rk.private(delta=1e-3, noise=1e-12, clip=1e3)
    found = engine.traced(everything(squares(8, weights=None), cohort, channel, Resampled()))
    program = device.Program(found.round, found.job.clients, "auto")
    carry = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), found.start.made.carry)
    carry = carry._replace(server={"other": found.job.channel.init(found.round.exchanges["other"])[0]})

    @jax.jit
    def mean(seed: Any, noise: Any) -> Any:
        before = carry._replace(noise=noise)
        given = program, found.job.draw, found.round.consts, found.job.clients, found.hyper, before, 0, seed
        return device.one_round(*given)[2].state.seen["other"]

    by = lambda seed, noise: np.asarray(mean(jax.random.key(seed), np.uint32([noise, 0]))).round(6).tolist()
    assert by(1, 1) == by(2, 1)
    assert len({str(by(1, noise)) for noise in range(6)}) > 2


# Poisson cohorts.


@pytest.mark.parametrize(("n", "expected"), [(20, 6), (200, 5), (3, 1), (40, 0.5)])
def test_a_poisson_cohort_has_each_client_with_the_same_probability(n: int, expected: float) -> None:
    draw, times = Draw.poisson(rk.Poisson(expected), n), 3000
    ids, present = jax.jit(jax.vmap(lambda key: draw(key, n)))(jax.random.split(jax.random.key(1), times))
    member = np.zeros((times, n))
    np.put_along_axis(member, np.asarray(ids), np.asarray(present, float), axis=1)
    chance = expected / n
    error = math.sqrt(chance * (1 - chance) / times)
    assert np.max(np.abs(member.mean(axis=0) - chance)) < 5 * error
    assert member.sum(axis=1).mean() == pytest.approx(expected, abs=5 * error * math.sqrt(n))
    together = member.T @ member / times - chance**2
    np.fill_diagonal(together, 0)
    assert np.max(np.abs(together)) < 6 * chance * math.sqrt((1 - chance**2) / times)
    assert all(len(set(row.tolist())) == draw.places for row in np.asarray(ids))
    assert np.max(member.sum(axis=1)) <= draw.places


def test_a_poisson_cohort_has_enough_places() -> None:
    for n, expected in ((1000, 50), (100_000, 3), (30, 20)):
        draw = Draw.poisson(rk.Poisson(expected), n)
        assert draw.places < n or n == 30
        assert overflow(draw.places, n, draw.chance) < 1e-12
        assert draw.places == n or overflow(draw.places - 3, n, draw.chance) > 1e-15  # and not many more


@pytest.fixture(scope="module")
def exact() -> Any:
    """A run of PFedMe with Poisson cohorts, noise close to zero and a loose clip, round by round."""
    method = rk.PFedMe(step=0.05, proximal=2.0, local_steps=2)
    clients = squares(6, weights=(1, 2, 1, 3, 2, 2))
    channel = rk.private(delta=1e-3, noise=1e-12, clip=1e3)
    job = checked(Job(SQUARES, clients, method, np.ones(3), rk.Poisson(2), 25, channel, noise_seed=12), 5)
    session = rk.Simulation().open(job)
    session.init()
    carries = []
    for _ in range(5):
        carries.append(jax.tree.map(np.array, session.save()))
        session.advance(1)
    carries.append(jax.tree.map(np.array, session.save()))
    return job, carries


def test_clients_that_fill_up_a_poisson_cohort_do_nothing(exact: Any) -> None:
    job, carries = exact
    for cohort, before, after in zip(neighbours.cohorts(job, 5), carries, carries[1:], strict=False):
        for i in range(6):
            changed = any((a[i] != b[i]).any() for a, b in _leaves(before.memory, after.memory))
            assert changed == (i in cohort)


def test_an_empty_cohort_changes_nothing_but_by_noise_and_means_divide_by_a_public_number(exact: Any) -> None:
    """A mean over clients that all send the same is that value times the cohort's weight over its expectation."""
    clients = squares(6, weights=(1, 2, 1, 3, 2, 2), rows=[np.zeros((1, 3))] * 6)
    channel = rk.private(delta=1e-3, noise=1e-12, clip=1e3)
    cohorts = set()
    for faults in (None, rk.Faults(dropout=1e-9)):
        job = Job(SQUARES, clients, rk.FedAvg(step=0.5), np.ones(3), rk.Poisson(1), 25, channel, faults, noise_seed=4)
        job = checked(job, 6)
        session = rk.Simulation(debug=faults is not None).open(job)
        session.init()
        for t, cohort in enumerate(neighbours.cohorts(job, 6)):
            before = np.array(session.state.x)
            session.advance(1)
            share = sum(np.asarray(clients.weights)[cohort]) / (np.sum(np.asarray(clients.weights)) / 6)
            moved = before * (1 - share / 3)  # a step of 0.5 along the gradient, 2x/3
            np.testing.assert_allclose(session.state.x, moved, atol=1e-6, err_msg=f"round {t}")
            cohorts.add(len(cohort))
    assert 0 in cohorts
    assert max(cohorts) > 1


def _leaves(*trees: Any) -> Any:
    return zip(*map(jax.tree.leaves, trees), strict=True)


# The budget.


def test_a_run_ends_when_its_budget_is_spent() -> None:
    evaluated: list[int] = []
    channel = rk.private(2.0, 1e-3, noise=4.0)
    run = solved(channel, 12, every=2, callbacks=[lambda run: evaluated.append(run.rounds)])
    spent = run.history.set_index("round")["epsilon"]
    assert run.spent
    assert not run.interrupted
    assert 0 < run.rounds < 12
    one_more = solved(rk.private(delta=1e-3, noise=4.0), run.rounds + 1)
    assert spent.loc[run.rounds] <= 2 < one_more.history["epsilon"].iloc[-1]
    assert spent.loc[0] == 0
    assert spent.is_monotonic_increasing
    assert evaluated[-1] == run.rounds
    assert f"after {run.rounds} rounds" in run.notes[0]


@pytest.mark.parametrize("cohort", [None, slow(2), rk.Poisson(2)])
def test_the_calibrated_noise_spends_the_budget_at_the_last_round(cohort: Any) -> None:
    run = solved(rk.private(2.0, 1e-3), 4, cohort=cohort)
    assert not run.spent
    assert 1.98 < run.history["epsilon"].iloc[-1] <= 2
    shorter = solved(rk.private(2.0, 1e-3, rounds=4), 3, cohort=cohort)
    assert shorter.history["epsilon"].iloc[-1] == pytest.approx(run.history["epsilon"].iloc[3])
    longer = solved(rk.private(2.0, 1e-3, rounds=2), 4, cohort=cohort)
    assert (longer.rounds, longer.spent) == (2, True)


@pytest.mark.slow
def test_noise_by_name_is_the_noise_of_that_exchange(monkeypatch: Any) -> None:
    job, _, _ = attacked(cases.method("FedBiOAcc"), "Bilevel", "fixed")
    names = list(engine.traced(job).round.exchanges)
    sizes = dict(zip(names, (3.0, 7.0), strict=True))
    channel = rk.private(delta=1e-3, noise=sizes, clip=dict.fromkeys(names, 0.5))
    run = neighbours.Run(replace(job, channel=channel, noise_seed=1), monkeypatch)
    run.first(rounds=1)
    share = run._first.releases[0][1] / (3.0 * 0.5)
    assert [scale for _, scale in run._first.releases] == pytest.approx([1.5 * share, 3.5 * share])
    assert dict(run.traced.job.channel.levels) == sizes


def test_the_split_of_the_noise_is_better_than_equal_multipliers() -> None:
    """LFedNest has two exchanges, one of them twice, here with different bounds."""
    job, _, _ = attacked(cases.method("LFedNest"), "Bilevel", "all")
    names = list(engine.traced(job).round.exchanges)
    clips = {name: 0.1 * 9**i for i, name in enumerate(names)}
    total = lambda found, levels: sum(
        sum(math.prod(a.shape) for a in jax.tree.leaves(found.round.exchanges[e.name].shapes))
        * (levels[e.name] * clips[e.name]) ** 2 * times
        for event in releases(found.round).events for e, times in event.releases.items()
    )  # fmt: skip
    found = engine.traced(replace(job, channel=rk.private(2.0, 1e-3, clips, rounds=3)))
    chosen = dict(found.job.channel.levels)
    equal = found.job.channel.account(found.start, found.round, found.setting, dict.fromkeys(names, 1.0))
    level = equal.noise(2.0, 1e-3, 3)
    assert found.job.channel.spent(found.account, 3) == pytest.approx(equal.epsilon(level, 1e-3, 3), rel=2e-3)
    assert total(found, chosen) < 0.9 * total(found, dict.fromkeys(names, level))
    for name in names:  # a change of any one, at the same ε, makes it worse
        ratios = {**chosen, name: 1.2 * chosen[name]}
        factor = found.job.channel.account(found.start, found.round, found.setting, ratios).noise(2.0, 1e-3, 3)
        assert total(found, chosen) < total(found, {name: factor * ratio for name, ratio in ratios.items()})


def test_a_session_ends_with_its_budget() -> None:
    given = (SQUARES, squares(), AVERAGE, np.ones(3))
    with rk.session(*given, channel=rk.private(2.0, 1e-3, rounds=3)) as run:
        assert run.epsilon == 0
        assert run.advance(2) == 2
        assert run.stopped is None
        assert run.advance(5) == 1
        assert run.advance() == 0
        assert (run.rounds, run.stopped) == (3, "The budget of privacy is spent.")
        assert 1.98 < run.epsilon <= 2
    with rk.session(*given, channel=rk.private(delta=1e-3, noise=1.0)) as run:
        assert run.advance(5) == 5  # it has no budget
    with pytest.raises(ValueError, match=r"epsilon must be large enough for one round; got 0.5"):
        rk.session(*given, channel=rk.private(0.5, 1e-3, noise=1.0))
    with rk.session(*given) as run:
        assert run.epsilon is None


@pytest.mark.parametrize("engine", [None, slow(rk.Federation())])
def test_a_resumed_run_goes_on_with_its_account_and_its_noise(engine: Any, tmp_path: Any) -> None:
    channel = rk.private(2.0, 1e-3, rounds=6)
    how = {"cohort": rk.Poisson(2), "noise_seed": 5, "engine": engine}
    whole = solved(channel, 6, **how)
    solved(channel, 3, checkpoint=tmp_path / "run", **how)
    resumed = solved(channel, 6, checkpoint=tmp_path / "run", **how)
    np.testing.assert_array_equal(resumed.x, whole.x)
    assert resumed.history["epsilon"].tolist() == whole.history["epsilon"].tolist()
    longer = solved(channel, 9, checkpoint=tmp_path / "run", **how)
    assert (longer.rounds, longer.spent) == (6, True)


def test_over_a_network_a_resume_is_charged_and_draws_other_noise(tmp_path: Any, monkeypatch: Any) -> None:
    """The round that was under way may have been seen already, with replies that differ."""
    opened: list[Any] = []
    plain = federation.Session.__init__

    def durable(self: Any, *given: Any) -> None:
        plain(self, *given)
        self.durable = True
        opened.append(self)

    monkeypatch.setattr(federation.Session, "__init__", durable)
    monkeypatch.setattr(federation.Session, "close", lambda self: None)
    channel, how = rk.private(2.0, 1e-3, rounds=6), {"engine": rk.Federation(), "checkpoint": tmp_path / "run"}
    first = solved(channel, 2, **how)
    solved(channel, 3, **how)
    last = solved(channel, 6, **how)
    account = opened[0].account
    assert (last.rounds, last.spent) == (4, True)  # two of the six are charged for the two resumes
    expected = [channel.spent(account, rounds) for rounds in (0, 1, 2, 4, 6)]
    assert last.history["epsilon"].tolist() == pytest.approx(expected)
    assert first.history["epsilon"].tolist() == pytest.approx(expected[:3])
    roots = {tuple(np.asarray(session._carry.noise).tolist()) for session in opened}
    assert len(roots) == 3


def test_a_checkpoint_with_another_budget_is_refused(tmp_path: Any) -> None:
    solved(rk.private(2.0, 1e-3, rounds=6), 2, checkpoint=tmp_path / "run", noise_seed=5)
    for other in (rk.private(3.0, 1e-3, rounds=6), rk.private(2.0, 1e-3, rounds=7), rk.private(2.0, 1e-3, 2.0, 6)):
        with pytest.raises(ValueError, match=r"(?s)checkpoint.*another") as refused:
            solved(other, 6, checkpoint=tmp_path / "run", noise_seed=5)
        assert "\n" not in str(refused.value)


# Bad input.

CASE = testing.case("SingleLevel")
PRIVATE = rk.private(1.0, 1e-3)
BAD: dict[str, tuple[Any, str]] = {
    "epsilon 0": (lambda: rk.private(0, 1e-3), r"epsilon must be a positive number; got 0"),
    "epsilon negative": (lambda: rk.private(-1.0, 1e-3), r"epsilon must be a positive number; got -1"),
    "epsilon nan": (lambda: rk.private(math.nan, 1e-3), r"epsilon must be a positive number; got nan"),
    "epsilon infinite": (lambda: rk.private(math.inf, 1e-3), r"epsilon must be a positive number; got inf"),
    "neither": (lambda: rk.private(delta=1e-3), r"epsilon must be given.*got neither"),
    "delta 0": (lambda: rk.private(1, 0), r"delta must be a number between 0 and 1.*got 0"),
    "delta missing": (lambda: rk.private(1), r"delta must be a number between 0 and 1.*got None"),
    "delta 1/n": (lambda: solved(rk.private(1, 0.25)), r"delta must be below 1/n for the n = 4 clients, .*; got 0.25"),
    "clip 0": (lambda: rk.private(1, 1e-3, clip=0), r"clip must be a positive number; got 0"),
    "clip by name": (lambda: rk.private(1, 1e-3, clip={"x": -1}), r"clip\['x'\] must be a positive number; got -1"),
    "noise 0": (lambda: rk.private(delta=1e-3, noise=0), r"noise must be a positive number; got 0"),
    "rounds 0": (lambda: rk.private(1, 1e-3, rounds=0), r"rounds must be an integer of at least 1, or None; got 0"),
    "quantile": (lambda: rk.private(1, 1e-3, quantile=1), r"quantile must be a number between 0 and 1.*got 1"),
    "unit": (lambda: rk.private(1, 1e-3, unit="site"), r"unit must be .*got 'site'"),
    "unknown clip": (
        lambda: solved(rk.private(1, 1e-3, clip={"z": 1.0})),
        r"clip must have a number for each exchange of the method, 'x'; got 'z'",
    ),
    "unknown noise": (
        lambda: solved(rk.private(delta=1e-3, noise={"x": 1.0, "z": 1.0})),
        r"noise must have a number for each exchange of the method, 'x'; got 'x', 'z'",
    ),
    "small budget": (
        lambda: solved(rk.private(0.1, 1e-3, noise=1.0)),
        r"epsilon must be large enough for one round; got 0.1, and a round costs",
    ),
    "no noise is enough": (
        lambda: solved(rk.private(1e-9, 1e-12)),
        r"epsilon must be large enough for 3 rounds; got 1e-09",
    ),
    "weights": (
        lambda: solved(PRIVATE, clients=rk.Clients(upper=[np.ones((k, 3)) for k in (1, 2)], weights="size")),
        r'must have public weights; got clients with weights="size"',
    ),
    "Poisson alone": (
        lambda: rk.solve(SQUARES, squares(), AVERAGE, np.ones(3), 1, cohort=rk.Poisson(2)),
        r"cohort must be a number, except with channel=rk.private",
    ),
    "Poisson of all": (lambda: solved(PRIVATE, cohort=rk.Poisson(4)), r"cohort must be rk.Poisson of less than 4"),
    "Poisson of none": (lambda: rk.Poisson(0), r"expected must be a positive number of clients; got 0"),
    "chain": (lambda: rk.chain(PRIVATE), r"rk.private must be the whole channel of a run; got it in a chain"),
    "dict": (lambda: solved({"x": PRIVATE}), r"rk.private must be the channel of all exchanges; got it for one"),
    "evaluate_client": (
        lambda: solved(PRIVATE, evaluate_client=lambda client, x, y: {"loss": 1.0}),
        r"evaluate_client must be left out of a private run",
    ),
    "keep_best": (
        lambda: solved(PRIVATE, evaluate=lambda x, y: {"loss": 1.0}, keep_best="loss"),
        r"keep_best must be left out of a private run.*got 'loss'",
    ),
    "memory": (
        lambda: solved(PRIVATE, evaluate=lambda x, y, memory: {"loss": 1.0}),
        r"evaluate must be a function of \(x, y\) in a private run",
    ),
    "tune": (
        lambda: rk.tune(
            SQUARES, squares(), AVERAGE, np.ones(3), 1, search={"step": (0.1, 1.0)}, metric="loss", channel=PRIVATE,
            evaluate=lambda x, y: {"loss": 1.0},
        ),
        r"tune must not be given rk.private",
    ),
    "rounds of a session": (
        lambda: rk.session(SQUARES, squares(), AVERAGE, np.ones(3), channel=PRIVATE),
        r"rounds must be given here.*got None",
    ),
    "rounds of a plan": (
        lambda: rk.explain(SQUARES, squares(), AVERAGE, np.ones(3), channel=PRIVATE),
        r"rounds must be given here.*got None",
    ),
    "a method": (
        lambda: rk.solve(CASE.problem, CASE.clients(), cases.method("DRFA"), np.ones(3), 1, channel=PRIVATE),
        r"must have releases that can all be accounted for",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_anything_is_compiled(what: str) -> None:
    call, message = BAD[what]
    made = engine.PROGRAMS.made
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)
    assert engine.PROGRAMS.made == made


# Engines.


LOSSY = rk.Faults(dropout=0.3)


def compared(name: str, kind: str, cohort: str, engines: Any, faults: Any, **given: Any) -> None:
    method = cases.method(name, **given)
    job, _, _ = attacked(method, kind, cohort, rk.private(delta=1e-3, noise=0.5, clip=0.3, quantile=0.5))
    job = replace(job, noise_seed=8, faults=faults)
    here = runs.outcome(rk.Simulation(), job)
    for other in engines:
        runs.agree(here, runs.outcome(other, job))


ENGINES = (rk.Simulation(block=2), rk.Simulation(mesh=2), rk.Simulation(debug=True), rk.Federation())


def test_engines_agree() -> None:
    compared("PFedMe", "SingleLevel", "poisson", [rk.Federation()], LOSSY)


@pytest.mark.slow
@pytest.mark.parametrize("faults", [None, LOSSY], ids=["all reply", "lossy"])
@pytest.mark.parametrize("cohort", COHORTS[1:])
@pytest.mark.parametrize(
    ("name", "kind", "given"),
    [
        ("PFedMe", "SingleLevel", {}), ("FedBiOAccLocal", "LocalBilevel", {}), ("AdaFBiO", "Bilevel", {}),
        ("LFedNest", "Bilevel", {}), ("FedNest", "Bilevel", {"resample": True}),
    ],
)  # fmt: skip
def test_all_engines_agree(name: str, kind: str, given: Any, cohort: str, faults: Any) -> None:
    compared(name, kind, cohort, ENGINES, faults, **given)


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [2, rk.Poisson(2)])
def test_rows_in_host_memory_make_no_difference(cohort: Any) -> None:
    rows = np.random.default_rng(1).normal(size=(12, 3))
    device, host = (
        solved(clients=rk.Clients.from_arrays(rows, [2, 3, 3, 4], placement=where), cohort=cohort, noise_seed=3)
        for where in ("device", "host")
    )
    np.testing.assert_allclose(host.x, device.x, rtol=1e-12)


# Whether a client took part: an attack.

TRIALS = 20_000


def threshold_attack(epsilon: float, delta: float, parts: tuple[float, ...]) -> list[float]:
    """By how much the best test of one client's presence beats (ε, δ), beyond its error, for `parts` of the noise.

    The client sends a huge update in each of three rounds, or in the other world the opposite of it. The attacker sees
    the sum of the results, which is all that they tell.
    """
    clients = lambda mine: squares(5, 1, None, [np.zeros((1, 1))] * 4 + [np.full((1, 1), mine)])
    worlds = clients(1e6), clients(-1e6)
    channel = rk.private(epsilon, delta)
    job = checked(Job(SQUARES, worlds[0], rk.FedAvg(step=0.1), np.zeros(1), None, 3, channel), 3)
    found = engine.traced(job)
    start, rounds = (device.Program(plan, worlds[0], "auto") for plan in (found.start, found.round))

    def last(data: Any, part: Any, root: Any) -> Any:
        carry, _ = device.start(start, found.start.consts, data, found.hyper, job.start, found.seed, root)
        carry = carry._replace(server=jax.tree.map(lambda level: part * level, carry.server))
        for t in range(3):
            given = rounds, job.draw, found.round.consts, data, found.hyper, carry, t, found.seed
            ids, before, after, _ = device.one_round(*given)
            carry = device.put(rounds, data.n, carry, ids, before, after, True)
        return carry.state.x[0]

    several = jax.jit(jax.vmap(last, (None, None, 0)))
    roots = np.random.default_rng(6).integers(0, 2**32, size=(2, TRIALS, 2), dtype=np.uint32)

    def beaten(part: float) -> float:
        seen = [np.asarray(several(data, part, root)) for data, root in zip(worlds, roots, strict=True)]
        at = np.linspace(*np.quantile(seen[1], [0.01, 0.999]), 400)
        true, false = (1 - np.searchsorted(np.sort(values), at) / TRIALS for values in seen)
        error = 4 * np.sqrt((true * (1 - true) + math.exp(2 * epsilon) * false * (1 - false) + 1e-4) / TRIALS)
        return float(np.max(true - math.exp(epsilon) * false - error)) - delta

    return [beaten(part) for part in parts]


def test_no_test_of_a_client_beats_the_budget_and_half_the_noise_is_found_out() -> None:
    whole, half = threshold_attack(1.0, 0.02, (1.0, 0.5))
    assert whole < 0
    assert half > 0.05
