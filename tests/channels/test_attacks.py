"""Attacks: what liars send, on every engine, and what stays as it is."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import rookery as rk
from rookery.channels import attacks
from rookery.engines.engine import Job
from rookery.language.channel import Plain
from rookery.testing import runs
from rookery.testing.cases import case, job, ragged

M = 6
CENTERS = np.random.default_rng(1).normal(size=(M, 3))
CLIENTS = rk.Clients(upper=[np.tile(center, (2, 1)) for center in CENTERS])
PROBLEM = rk.SingleLevel(lambda x, b: jnp.mean(jnp.sum((x - b) ** 2, axis=-1)))
METHOD = rk.FedAvg(step=0.1)
SECURE = rk.chain(rk.clip(1.0), rk.secure_sum())
LIARS = (1, 4)
HONEST = [0, 2, 3, 5]


@dataclass(frozen=True)
class Rows(Plain):
    """Keeps the updates that the server received, a row for each client, as its state. Nothing moves."""

    def init(self, exchange: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda a: jnp.zeros((M, *a.shape), a.dtype), exchange.shapes), ()

    def reduce(self, exchange: Any, rows: Any, weights: Any, present: Any) -> Any:
        return rows

    def decode(self, exchange: Any, total: Any, key: Any, state: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda a: jnp.zeros_like(a[0]), total), total


def received(attack: Any, rounds: int = 1, method: Any = METHOD) -> dict[str, np.ndarray]:
    """What the server received in the last round, by exchange."""
    start, faults = (jnp.zeros(3), ()), rk.Faults(attack=attack)
    what = Job(PROBLEM, CLIENTS, method, start, M, channel=Rows(), faults=faults)
    return runs.outcome(rk.Simulation(), what, rounds).server


SENT = 0.2 * CENTERS  # from zero: −step·gradient


def alie(m: int, f: int) -> float:
    return float(norm.ppf((m - f - (m // 2 + 1 - f)) / (m - f)))


MEAN, DEVIATION = SENT[HONEST].mean(axis=0), SENT[HONEST].std(axis=0)
EXPECTED: dict[str, tuple[Any, Any]] = {
    "sign flip": (rk.attacks.SignFlip(LIARS, scale=3.0), -3 * SENT[list(LIARS)]),
    "NaN": (rk.attacks.NaN(LIARS), np.full((2, 3), np.nan)),
    "inner product": (rk.attacks.InnerProduct(LIARS, scale=0.7), [-0.7 * MEAN] * 2),
    "a little is enough": (rk.attacks.ALittleIsEnough(LIARS, z=1.3), [MEAN - 1.3 * DEVIATION] * 2),
    "its largest z": (rk.attacks.ALittleIsEnough(LIARS), [MEAN - max(alie(M, 2), 0) * DEVIATION] * 2),
    "mimic": (rk.attacks.Mimic(LIARS), [SENT[0]] * 2),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_liars_send(name: str) -> None:
    """Against NumPy; honest clients' replies stay."""
    attack, expected = EXPECTED[name]
    x = received(attack)["x"]
    np.testing.assert_allclose(x[list(LIARS)], expected, atol=1e-12)
    np.testing.assert_allclose(x[HONEST], SENT[HONEST], atol=1e-12)


def test_other_liars_in_the_next_call_lie() -> None:
    """The set is a value of the program, which is compiled once."""
    for liar in range(2):
        x = received(rk.attacks.SignFlip((liar,), 100.0))["x"]
        assert np.flatnonzero(np.abs(x).max(axis=1) > 3).tolist() == [liar]


def test_noise_is_the_liars_own_and_has_its_size() -> None:
    sent = received(rk.attacks.Noise(LIARS, 2.0))["x"]
    np.testing.assert_allclose(sent[HONEST], SENT[HONEST], atol=1e-12)
    assert np.all(sent[1] != sent[4])
    wide = rk.Clients(upper=[np.zeros((1, 20_000))] * 4)
    x = rk.solve(PROBLEM, wide, METHOD, np.zeros(20_000), 1, faults=rk.Faults(attack=rk.attacks.Noise(4, 2.0))).x
    assert np.std(x) == pytest.approx(2.0 / np.sqrt(4), rel=0.03)


# Who lies.


def who(attack: Any, n: int = 20, key: int = 0) -> set[int]:
    return set(np.flatnonzero(attack.liars(n, jax.random.key(key))).tolist())


def test_a_number_a_share_or_chosen_clients() -> None:
    assert who(rk.attacks.SignFlip((3, 7))) == {3, 7}
    fixed = [who(rk.attacks.SignFlip(5), key=key) for key in range(3)]
    assert fixed[0] == fixed[1] == fixed[2] == who(rk.attacks.NaN(0.25))
    assert len(fixed[0]) == 5
    assert fixed[0] != who(rk.attacks.SignFlip(5, seed=1))
    drawn = [who(rk.attacks.SignFlip(5, redraw=True), key=key) for key in range(40)]
    assert {len(some) for some in drawn} == {5}
    assert set.union(*drawn) == set(range(20))


class Point(NamedTuple):
    x: Any
    y: tuple[()] = ()


@dataclass(frozen=True)
class Twice:
    """Two exchanges a round."""

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> Point:
        return Point(x)

    def round(self, fed: rk.Fed, state: Point, key: Any) -> Point:
        gradient = fed.map(lambda c, k: c.f_x(state.x, (), c.upper()), key)
        return Point(state.x + fed.mean(gradient, name="a") + fed.mean(gradient, name="b"))


def test_liars_that_are_drawn_anew_differ_by_round_and_are_the_same_in_a_round() -> None:
    """Two exchanges a round, under one draw: a client that lies in one lies in the other."""
    attack, lied = rk.attacks.SignFlip(2, 1e3, redraw=True), []
    for rounds in (1, 2, 3):
        sent = received(attack, rounds, Twice())
        by_name = [np.flatnonzero(np.abs(sent[name]).max(axis=1) > 10).tolist() for name in ("a", "b")]
        assert by_name[0] == by_name[1]
        assert len(by_name[0]) == 2
        lied.append(set(by_name[0]))
    assert len(set.union(*lied)) > 2


# What stays.


@pytest.mark.parametrize(
    ("attack", "more"),
    [(rk.attacks.SignFlip(2), 0), (rk.attacks.ALittleIsEnough(2), 0), (rk.attacks.Noise(2), 8 * M * 2)],
    ids=["alone", "knows all", "noise"],
)
def test_the_ledger_is_that_of_honest_clients(attack: Any, more: int) -> None:
    """But for the keys of noise."""
    honest, lying = (
        rk.solve(PROBLEM, CLIENTS, METHOD, np.zeros(3), 2, faults=rk.Faults(attack=a)) for a in (None, attack)
    )
    counted = ["exchanges", "bytes_up", "gradients", "samples_upper", "missing"]
    assert honest.history[counted].equals(lying.history[counted])
    assert lying.history["bytes_down"].iloc[-1] - honest.history["bytes_down"].iloc[-1] == more
    assert honest.exchanges.equals(lying.exchanges) or more


def test_a_clip_does_not_bind_a_liar_and_the_server_s_does() -> None:
    """It replaces what is sent after clipping; centered clipping is at the server."""
    faults, start = rk.Faults(attack=rk.attacks.SignFlip((0,), 1e4)), np.full(3, 5.0)
    moved = lambda channel: float(
        np.linalg.norm(rk.solve(PROBLEM, CLIENTS, METHOD, start, 1, channel=channel, faults=faults).x - start)
    )
    assert moved(rk.clip(0.1)) > 10
    assert moved(rk.centered_clipping(0.1, iterations=1)) <= 0.1


def test_bookkeeping_is_honest_unless_it_is_attacked() -> None:
    """QFedAvg sends h beside its direction."""
    run = lambda **given: rk.solve(
        PROBLEM, CLIENTS, rk.QFedAvg(step=0.05), np.zeros(3), 1, faults=rk.Faults(attack=rk.attacks.NaN((0,), **given)),
        channel={"delta, h": rk.median()},
    ).x  # fmt: skip
    assert np.isfinite(run()).all()
    assert np.isfinite(run(bookkeeping=True)).all()  # the trimmed mean leaves it out


# Engines.

ENGINES = {
    "blocks": rk.Simulation(block=2),
    "federation": rk.Federation(),
    "turn by turn": rk.Simulation(debug=True),
    "mesh": rk.Simulation(mesh=2),
}
ATTACKS = [
    rk.attacks.ALittleIsEnough(2, z=1.0), rk.attacks.SignFlip(2), rk.attacks.SignFlip(2, redraw=True),
    rk.attacks.Noise(2), rk.attacks.Mimic(2, redraw=True),
]  # fmt: skip


def agree(attack: Any, method: Any, engines: list[str]) -> None:
    """With lost replies, a cohort, and a rule with a state."""
    what = job(method, ragged("SingleLevel"))
    faults = rk.Faults(dropout=0.2, attack=attack)
    what = dataclasses.replace(what, cohort=4, channel=rk.centered_clipping(0.5), faults=faults)
    here = runs.outcome(rk.Simulation(), what, 3)
    # Noise is drawn in float32: its last bit depends on what XLA computes it together with.
    tolerance = 1e-6 if isinstance(attack, rk.attacks.Noise) else 1e-10
    for name in engines:
        runs.agree(here, runs.outcome(ENGINES[name], what, 3), tolerance)


@pytest.mark.parametrize("attack", ATTACKS[:2], ids=["knows all", "alone"])
def test_two_engines_agree(attack: Any) -> None:
    agree(attack, rk.FedAvg(step=0.05, local_steps=2), ["federation"])


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
def test_all_engines_agree(attack: Any) -> None:
    agree(attack, rk.FedSVRG(step=0.05, local_steps=2, batch_size=2), list(ENGINES))


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
def test_rows_on_the_host_change_nothing(attack: Any) -> None:
    """The engine that streams them."""
    data, sizes = np.repeat(CENTERS, 2, axis=0), [2] * M
    run = lambda placement: rk.solve(
        PROBLEM, rk.Clients.from_arrays(data, sizes, placement=placement), METHOD, np.zeros(3), 4, cohort=4,
        channel=rk.median(), faults=rk.Faults(attack=attack),
    ).x  # fmt: skip
    np.testing.assert_allclose(run("host"), run("device"), rtol=1e-12)


def test_a_gather_is_attacked_as_well() -> None:
    it = case("SingleLevel")
    run = lambda faults: rk.solve(it.problem, it.clients(), rk.CoBo(step=0.05), it.init, 2, faults=faults).x
    assert np.max(np.abs(run(rk.Faults()) - run(rk.Faults(attack=rk.attacks.InnerProduct(1, 5.0))))) > 1e-3


# Labels.


def labelled(flip: bool, placement: str = "device") -> rk.Clients:
    rng = np.random.default_rng(3)
    sizes = [1, 3, 4, 20]
    data = {"a": rng.normal(size=(28, 2)), "label": rng.integers(0, 10, 28).astype(np.int32)}
    if flip:  # clients 1 and 3
        lies = np.repeat([False, True, False, True], sizes)
        data["label"] = np.where(lies, 9 - data["label"], data["label"])
    return rk.Clients.from_arrays(data, sizes, placement=placement)


FLIP = rk.attacks.LabelFlip((1, 3), lambda rows: {**rows, "label": 9 - rows["label"]})


@pytest.mark.parametrize("placement", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_flipped_labels_are_those_of_the_attackers(placement: str) -> None:
    problem = rk.SingleLevel(lambda x, b: jnp.mean((b["a"] @ x - b["label"]) ** 2))
    run = lambda clients, faults: (
        rk.solve(problem, clients, rk.FedAvg(step=0.05, batch_size=2), np.zeros(2), 3, faults=faults).x
    )
    by_hand = run(labelled(flip=True, placement=placement), rk.Faults())
    np.testing.assert_array_equal(run(labelled(False, placement), rk.Faults(attack=FLIP)), by_hand)
    assert np.max(np.abs(run(labelled(False, placement), rk.Faults()) - by_hand)) > 1e-3


# What is refused.


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rk.attacks.SignFlip(-1), ValueError, r"SignFlip: attackers must be a number of clients, .*got -1"),
        (lambda: rk.attacks.NaN(1.5), ValueError, r"got 1.5"),
        (lambda: rk.attacks.NaN((1, 1)), ValueError, r"got \(1, 1\)"),
        (lambda: rk.attacks.NaN((1,), redraw=True), ValueError, r"redraw must be False if attackers are clients'"),
        (lambda: rk.attacks.SignFlip(1, "a"), ValueError, r"rk.attacks.SignFlip: scale must be a number; got 'a'"),
        (lambda: rk.attacks.LabelFlip(1), TypeError, r"flip must be a function"),
        (lambda: rk.attacks.LabelFlip(1, lambda rows: rows, redraw=True), ValueError, r"redraw must be False, because"),
        (lambda: rk.Faults(attack=2), TypeError, r"Faults: attack must be an attack such as .*got 2"),
        (lambda: rk.Faults(attack=rk.attacks.NaN), TypeError, r"Faults: attack must be an attack such as"),
    ],
)  # fmt: skip
def test_bad_attacks(make: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("attack", "given", "message"),
    [
        (rk.attacks.NaN((0, 6)), {}, r"attackers must be among the 6 clients, 0 to 5; got \(0, 6\)"),
        (rk.attacks.NaN(7), {}, r"attackers must be among the 6 clients"),
        (rk.attacks.NaN(1), {"channel": rk.private(8, 1e-5)}, r"faults: attack must be None in a private run"),
        (rk.attacks.NaN(1), {"channel": rk.quantize(8)}, r"must be tried without compression and secure sums"),
        (rk.attacks.Mimic(1), {"channel": SECURE}, r"must be tried without compression and secure sums"),
        (rk.attacks.LabelFlip(1, lambda rows: rows[:1]), {}, r"flip must return rows of the same shapes and types"),
    ],
)
def test_where_attacks_are_refused(attack: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rk.solve(PROBLEM, CLIENTS, METHOD, np.zeros(3), 1, faults=rk.Faults(attack=attack), **given)


@pytest.mark.parametrize("attack", [rk.attacks.Mimic(1), rk.attacks.NaN(1, redraw=True)], ids=["knows all", "redrawn"])
def test_over_a_network_a_site_lies_by_itself_or_not_at_all(attack: Any) -> None:
    shape = rk.Clients.like(upper=np.zeros(3), n=3)
    network = rk.Federation(address="localhost:9", sites=("a", "b", "c"), insecure=True)
    with pytest.raises(ValueError, match=r"faults: attack must be one that a site can make by itself.*SignFlip"):
        rk.solve(PROBLEM, shape, METHOD, np.zeros(3), 1, faults=rk.Faults(attack=attack), engine=network)


def test_every_attack_is_public() -> None:
    assert set(attacks.__all__) == {
        name for name, value in vars(attacks).items()
        if isinstance(value, type) and issubclass(value, attacks._Attack) and not name.startswith("_")
    }  # fmt: skip
