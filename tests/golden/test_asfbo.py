"""The ASFBO family: against a NumPy transcription, against Lemma 1, and against the closed forms of quadratics."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q
import transcription as golden
from evaluated import EvaluatedFed

import rookery as rk
from rookery.algorithms import asfbo
from rookery.base import tree
from rookery.data.rows import View
from rookery.language import hyperparameters
from rookery.parts import projection
from rookery.tasks.quadratic import solution

Vector = np.ndarray
STEPS = np.array([3, 1, 2, 4, 1])  # τ_i
NAMES = ["ASFBO", "LAASFBO", "SimFBO", "ShroFBO"]


@dataclass
class Letters:
    """The paper's letters; each of eta, gamma and bounds for x, y and z."""

    direction: str
    reweighted: bool
    adaptive: bool
    eta: Sequence[float] = (0.05, 0.07, 0.06)
    gamma: Sequence[float] = (0.04, 0.06, 0.05)
    beta: float = 0.3
    decay: float = 0.7  # ϱ
    small: float = 0.01  # ρ
    bounds: Sequence[Any] | None = None
    r: float | None = None

    def words(self) -> dict[str, Any]:
        names = ("upper_step", "lower_step", "linear_step")
        given: dict[str, Any] = dict(zip(names, self.eta, strict=True))
        given |= {f"server_{name}": value for name, value in zip(names, self.gamma, strict=True)}
        given |= {"radius": self.r, "local_steps": STEPS}
        if self.direction != "gradient":
            given["momentum"] = self.beta
        if self.adaptive:
            given |= {"decay": self.decay, "floor": self.small, "bounds": self.bounds}
        return given


LETTERS = {
    "ASFBO": Letters("momentum", True, True),
    "LAASFBO": Letters("storm", True, True),
    "SimFBO": Letters("gradient", False, False),
    "ShroFBO": Letters("gradient", True, False),
}
BOUNDS = ((0.02, 0.05), (0.03, 0.06), (0.02, 0.2))


def transcribed(problem: Any, s: Letters, start: Any, who: Any) -> Any:
    """Algorithm 1, letter by letter; yields x, y, z and s_x, s_y, s_z at the start and after each round."""
    x, y = start
    z = np.zeros_like(y)
    norms = [0.0, 0.0, 0.0]
    n = len(problem.p)
    yield x, y, z, tuple(norms)

    def oracle(i: int, at: list[Vector]) -> list[Vector]:
        x, y, z = at
        return [
            problem.f_x(i, x, y) - problem.g_xy(i, x, y) @ z,  # (17)
            problem.g_y(i, x, y),
            problem.g_yy(i, x, y) @ z - problem.f_y(i, x, y),  # (18)
        ]

    for cohort in who:
        gathered = []
        for i in cohort:
            at = [x, y, z]  # (15)
            moving = oracle(i, at)  # (16)
            sums = [np.zeros_like(v) for v in at]
            for _ in range(STEPS[i]):
                sums = [total + m for total, m in zip(sums, moving, strict=True)]  # (22)
                new = [v - eta * m for v, eta, m in zip(at, s.eta, moving, strict=True)]  # (19)
                here, there = oracle(i, new), oracle(i, at)
                if s.direction == "gradient":
                    moving = here
                elif s.direction == "momentum":  # (20)
                    moving = [s.beta * g + (1 - s.beta) * m for g, m in zip(here, moving, strict=True)]
                else:  # (21)
                    moving = [g + (1 - s.beta) * (m - o) for g, m, o in zip(here, moving, there, strict=True)]
                at = new
            gathered.append(sums)
        shares = [n / len(cohort) * problem.p[i] for i in cohort]
        rho = sum(share * STEPS[i] for share, i in zip(shares, cohort, strict=True))
        moved = []
        for j, v in enumerate((x, y, z)):
            if s.reweighted:  # (26)
                h = sum(share * own[j] / STEPS[i] for share, own, i in zip(shares, gathered, cohort, strict=True))
            else:  # (23), as (24) writes it
                h = sum(share * own[j] for share, own in zip(shares, gathered, strict=True)) / rho
            gamma = s.gamma[j]
            if s.adaptive:
                norms[j] = s.decay * norms[j] + (1 - s.decay) * np.linalg.norm(h)  # (27)
                gamma = gamma / (norms[j] + s.small)  # (28)
                if s.bounds is not None and s.bounds[j] is not None:
                    gamma = min(max(gamma, s.bounds[j][0]), s.bounds[j][1])
            moved.append(v - rho * gamma * h)  # (29)
        x, y, z = moved
        if s.r is not None and np.linalg.norm(z) > s.r:  # (30)
            z = s.r / np.linalg.norm(z) * z
        yield x, y, z, tuple(norms)


def compare(method: Any, letters: Letters, cohort: int | None = None, rounds: int = 6) -> tuple[rk.Run, Any, Any]:
    """Runs both and holds one against the other: x and y after every round, z and s at the end."""
    ours, clients = q.bilevel(lower=(2,) * q.N_CLIENTS, upper=(3,) * q.N_CLIENTS)
    who = golden.everyone(ours, rounds) if cohort is None else q.cohorts(q.N_CLIENTS, cohort, rounds, seed=5)
    expected = list(transcribed(ours, letters, q.INIT, who))
    given = {"cohort": cohort, "seed": 5}
    q.assert_same(q.trajectory(q.BILEVEL, clients, method, q.INIT, rounds, **given), [e[:2] for e in expected])
    run = rk.solve(q.BILEVEL, clients, method, q.INIT, rounds, **given)
    np.testing.assert_allclose(run.state.z, expected[-1][2], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(run.state.s, expected[-1][3], rtol=1e-10, atol=1e-10)
    return run, expected, who


def taken(letters: Letters, who: Any) -> int:
    """How often the three directions are evaluated: the last momentum of a round is not."""
    each = 2 * STEPS - 1 if letters.direction == "storm" else STEPS
    return int(sum(each[list(cohort)].sum() for cohort in who))


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_transcription(name: str) -> None:
    """Two of five clients with unequal weights: p̃_i and ρ^t differ from those of all clients.

    z is kept in its ball, and adaptive steps within bounds, except for z's.
    """
    letters = replace(LETTERS[name], r=0.3, bounds=(*BOUNDS[:2], None))
    run, expected, who = compare(getattr(rk, name)(**letters.words()), letters, cohort=2)
    assert any(np.isclose(np.linalg.norm(z), 0.3) for _, _, z, _ in expected)
    calls = taken(letters, who)
    last = run.history.iloc[-1]
    assert (last["gradients"], last["products"]) == (2 * calls, 2 * calls)  # ∇f and ∇_y g; ∇²_y g·z and ∇²_xy g·z
    assert last["exchanges"] == len(who)
    steps = sum(STEPS[list(cohort)].sum() for cohort in who)
    assert (last["samples_upper"], last["samples_lower"]) == (3 * steps, 2 * steps)  # one ξ and one ζ a step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "reweighted", "adaptive"),
    [("storm", False, True), ("momentum", False, False), ("gradient", True, True)],
)
def test_other_combinations(direction: str, reweighted: bool, adaptive: bool) -> None:
    """Each switch apart from the others, as an ablation turns them: everyone takes part, no ball, no bounds."""
    letters = Letters(direction, reweighted, adaptive)
    method = rk.ASFBO(
        direction=direction,  # type: ignore[arg-type]
        aggregation="reweighted" if reweighted else "sum",
        server="adaptive" if adaptive else "fixed",
        **letters.words(),
    )
    compare(method, letters)


def test_other_bounds_compile_nothing() -> None:
    one, other = (hyperparameters.split(rk.ASFBO(bounds=((a, 0.2), None, (0.1, 0.3)))) for a in (0.1, 0.15))
    assert one.fixed == other.fixed
    assert (one.traced["bounds"], other.traced["bounds"][0]) == (((0.1, 0.2), None, (0.1, 0.3)), (0.15, 0.2))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"momentum": 0.0}, "momentum must be a number above 0 and at most 1; got 0.0"),
        ({"decay": 1.0}, "decay must be a number of at least 0 and below 1; got 1.0"),
        ({"bounds": (0.1, 0.2)}, "bounds must be a tuple of three, for x, y and z: a pair"),
        ({"bounds": ((0.2, 0.1), None, None)}, "bounds must be a tuple of three, for x, y and z: a pair"),
        ({"radius": 0}, "radius must be a positive number or None; got 0"),
        ({"direction": "adam"}, "direction must be one of 'gradient', 'momentum', 'storm'; got 'adam'"),
    ],
)
def test_bad_hyperparameters(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        rk.solve(TASK.problem, TASK.clients, rk.ASFBO(**given), TASK.init, 1)


def test_projection() -> None:
    inside, outside = {"a": np.array([0.3, 0.4]), "b": np.array(0.0)}, {"a": np.array([3.0, 0.0]), "b": np.array(4.0)}
    assert projection.ball(inside, 1.0)["a"].tolist() == [0.3, 0.4]
    assert float(tree.norm(projection.ball(outside, 2.0))) == pytest.approx(2)
    assert float(projection.ball(outside, 2.0)["b"]) == pytest.approx(1.6)
    assert float(tree.norm(projection.ball(tree.zeros_like(outside), 2.0))) == 0


# Minibatches.


@pytest.mark.slow
def test_independent_minibatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step then draws two ξ and three ζ, no minibatch twice; STORM's second point draws none."""
    drawn: Counter[tuple[Any, ...]] = Counter()

    def record(offset: Any, key: Any, step: Any) -> None:
        drawn[(int(offset), *key.tolist(), int(step))] += 1

    def spy(self: View, key: Any, size: int, step: Any, replace: bool, seen: Any = None) -> Any:
        jax.debug.callback(record, self.offset, jax.random.key_data(key), step)
        return self.all()

    monkeypatch.setattr(View, "draw", spy)
    task = rk.tasks.quadratic(clients=2, samples=2)  # a problem of its own: the spy must be traced, and nowhere else
    method = rk.LAASFBO(local_steps=3, batch_size=1, shared_batch=False)
    run = rk.solve(task.problem, task.clients, method, task.init, 2)
    jax.effects_barrier()
    assert Counter(drawn.values()) == {1: 2 * 2 * 3 * 5}  # clients, rounds, steps
    last = run.history.iloc[-1]
    assert (last["gradients"], last["products"]) == (2 * 2 * 5 * 3, 2 * 2 * 5 * 2)  # 5 = 2τ − 1


# Lemma 1.


def coefficients(tau: int, beta: float) -> Vector:
    """(89)."""
    return np.array([(1 - (1 - beta) ** tau) / beta, *(1 - (1 - beta) ** (tau - k) for k in range(1, tau))])


@pytest.mark.parametrize("tau", [1, 2, 7, 15])
@pytest.mark.parametrize("beta", [0.1, 0.25, 1.0])
def test_the_coefficients_add_up_to_the_steps(tau: int, beta: float) -> None:
    assert coefficients(tau, beta).sum() == pytest.approx(tau, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["momentum", "storm"])
def test_the_coefficients_are_what_a_client_sends(direction: Any) -> None:
    """The k-th minibatch's gradient is a unit vector of its own, so q_x holds the coefficients a^(k).

    Where gradients do not depend on the point, STORM's two cancel but for β, and Lemma 1 is true of it as well.
    """
    tau, beta = 7, 0.25
    problem = rk.Bilevel(lambda x, y, b: jnp.mean(b["e"] @ x) + y[0], lambda x, y, b: 0.5 * y @ y + jnp.mean(b["t"]))
    clients = rk.Clients([{"t": np.zeros(tau)}], [{"e": np.eye(tau)}])
    method = rk.ASFBO(
        direction=direction, aggregation="sum", server="fixed", server_upper_step=1.0, momentum=beta,
        local_steps=tau, batch_size=1,
    )  # fmt: skip
    sent = -np.asarray(rk.solve(problem, clients, method, (np.zeros(tau), np.zeros(1)), 1).x)
    np.testing.assert_allclose(np.sort(sent), np.sort(coefficients(tau, beta)), rtol=1e-12)


# Quadratics, with exact oracles: where each method ends.

WEIGHTS, UNEQUAL = np.array([0.5, 0.2, 0.3]), np.array([1, 3, 8])  # p_i and τ_i
TASK = rk.tasks.quadratic(clients=3, upper_dim=2, lower_dim=2, heterogeneity=0.4, weights=WEIGHTS, seed=4)


def limit(name: str, step: float, local_steps: Any, rounds: int = 400) -> Vector:
    """x after many rounds. The server's steps do not move the limit, and are long; the adaptive ones end at a bound."""
    names = ("upper_step", "lower_step", "linear_step")
    rho = float(WEIGHTS @ local_steps)
    given: dict[str, Any] = dict.fromkeys(names, step)
    server = dict(zip(names, (0.15 / rho, 0.3 / rho, 0.3 / rho), strict=True))
    given |= {f"server_{word}": size for word, size in server.items()}
    if name in ("ASFBO", "LAASFBO"):
        given["bounds"] = tuple((size / 3, size) for size in server.values())
    method = getattr(rk, name)(local_steps=np.asarray(local_steps), **given)
    run = rk.solve(TASK.problem, TASK.clients, method, TASK.init, rounds, every=rounds)
    return np.asarray(run.x)


BEST = solution(TASK).x


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_where_it_ends(name: str) -> None:
    """Exact with one local step; with more, off by a bias that is proportional to the step; unequal τ_i."""
    np.testing.assert_allclose(limit(name, 0.1, [1, 1, 1]), BEST, atol=1e-8)

    bias = [np.linalg.norm(limit(name, step, [4, 4, 4]) - BEST) for step in (0.004, 0.002)]
    assert bias[1] > 1e-6
    assert 1.8 < bias[0] / bias[1] < 2.2

    skewed = rk.tasks.quadratic(
        clients=3, upper_dim=2, lower_dim=2, heterogeneity=0.4, weights=WEIGHTS * UNEQUAL, seed=4
    )
    other = solution(skewed).x
    apart = np.linalg.norm(other - BEST)
    own, wrong = (other, BEST) if name == "SimFBO" else (BEST, other)
    far = [np.linalg.norm(limit(name, step, UNEQUAL) - own) for step in (0.002, 0.001)]
    assert far[0] < 0.05 * apart
    assert 1.8 < far[0] / far[1] < 2.2
    assert np.linalg.norm(limit(name, 0.001, UNEQUAL) - wrong) > 0.9 * apart


# The error of a direction, at equal batch size.

NOISY = rk.tasks.quadratic(clients=1, upper_dim=2, lower_dim=2, samples=64, noise=0.5, seed=1, replace=True)
HERE = asfbo.State(*map(jnp.asarray, NOISY.init), jnp.array([0.5, -0.5]), (jnp.zeros(()),) * 3)


def sums(direction: Any, step: float, draws: int, *taus: int) -> list[Any]:
    """What a client has gathered after these many local steps, for many keys; one key gives the same minibatches."""
    method = rk.ASFBO(
        direction=direction, upper_step=step, lower_step=step, linear_step=step, batch_size=1, momentum=0.25
    )

    @jax.jit
    def sent(keys: Any, tau: Any) -> Any:
        own = replace(method, local_steps=tau[None])
        fed = EvaluatedFed(NOISY.problem, NOISY.clients, jnp.arange(1))
        one = lambda key: fed.map(lambda c, k: asfbo.local(own, c, HERE, k)[0], key).rows
        return jax.tree.map(lambda v: v[:, 0], jax.vmap(one)(keys))

    keys = jax.random.split(jax.random.key(3), draws)
    return [jax.device_get(sent(keys, jnp.int32(tau))) for tau in taus]


@pytest.mark.slow
def test_momentum_and_storm_reduce_the_error_of_a_direction_but_not_of_their_sum() -> None:
    """Both end less noisy than one minibatch, and only STORM's u follows the point: momentum's lags behind.

    But a round's first minibatch counts 1/β-fold in their sum (Lemma 1), which is noisier than that of plain gradients.
    """
    step, draws, tau = 0.02, 4000, 12
    closed = solution(NOISY)
    error, bias, spread = {}, {}, {}
    for direction in ("gradient", "momentum", "storm"):
        before, after = sums(direction, step, draws, tau - 1, tau)
        x, y, z = (np.asarray(v) - step * own for v, own in zip(HERE[:3], before, strict=True))
        exact = x @ closed.D.T - closed.d + y @ closed.E.T + z @ closed.B  # ∇f̄ where the last step was taken
        off = after[0] - before[0] - exact
        squares = np.sum(off**2, axis=1)
        error[direction] = squares.mean(), squares.std(ddof=1) / np.sqrt(draws)
        bias[direction] = np.abs(off.mean(axis=0) / (off.std(axis=0, ddof=1) / np.sqrt(draws))).max()  # standard errors
        spread[direction] = np.sum(after[0].var(axis=0, ddof=1))
    for less, more in (("storm", "gradient"), ("storm", "momentum"), ("momentum", "gradient")):
        bars = np.hypot(error[less][1], error[more][1])
        assert error[more][0] - error[less][0] > 3 * bars, (less, more, error)
    assert error["storm"][0] < error["gradient"][0] / 3
    assert max(bias["gradient"], bias["storm"]) < 4
    assert bias["momentum"] > 8
    assert min(spread["momentum"], spread["storm"]) > 1.3 * spread["gradient"]  # Σ(a^(k))²/τ is 1.8 here


@pytest.mark.slow
def test_digits_that_differ_by_client() -> None:
    """The task's defaults: far above chance within 40 rounds, and nothing overflows on the way."""
    task = rk.tasks.hyperrep(partition="shards")
    method = task.algorithm(rk.ASFBO)
    run = rk.solve(
        task.problem, task.clients, method, task.init, 40, cohort=task.cohort, evaluate=task.evaluate, every=10
    )
    assert np.isfinite(run.history["loss"]).all()
    assert run.history["accuracy"].iloc[-1] > 0.7
