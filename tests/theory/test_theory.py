"""The papers' step sizes: the formulas by hand, and runs that converge with them on quadratics."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery import theory
from rookery.tasks.quadratic import solution

ROUNDS = 8_000


@pytest.fixture(scope="module")
def task():
    return rk.tasks.quadratic(
        clients=3, upper_dim=2, lower_dim=2, samples=8, noise=0.1, heterogeneity=0.1, seed=0, replace=True
    )


def solve(task, method, rounds=ROUNDS, every=500):
    return rk.solve(
        task.problem, task.clients, method, task.init, rounds, every=every, evaluate=task.evaluate, progress=False
    ).history


def test_bilevel_constants_by_hand():
    """(18) and (56) with round numbers: κ = 2, η = M_f/L_y."""
    s = theory.Constants(mu_g=1, l_f0=3, l_f1=1, l_g1=2, l_g2=1, sigma_f=1, sigma_g2=2).smoothness()
    assert s.l_y == 2
    assert s.l_yx == (1 + 2) / 1 + 2 / 1 * (1 + 2)
    assert s.m_f == 1 + 2 + 3 * (1 + 2)
    assert s.l_f == 1 + 2 * (1 + 12) + 3 * (1 + 2)
    assert s.sigma**2 == pytest.approx(1 + 3 * ((1 + 9) * (4 + 2 * 4) + 4))
    assert s.d_f**2 == pytest.approx((3 + 2 * 3 + 2 * 3) ** 2 + s.sigma**2)  # the larger of ℓ_{f,0} and ℓ_{f,1}
    eta = 12 / 2
    assert (s.eta_l_yx, s.l_yx_eta) == (pytest.approx(eta * 9), pytest.approx(9 / eta))

    found = theory.steps(theory.Constants(mu_g=1, l_f0=3, l_f1=1, l_g1=2), rounds=10**4)  # M_f = 3, L_f = 9
    assert found.alpha_1 == pytest.approx(1 / (2 * 9 + 4 * 3 * 2))
    assert found.beta_bar == pytest.approx(11 * 3 * 2 + 3 * 2 * found.alpha_1 / 2)
    assert found.lower_rounds == 16
    assert found.alpha_2 == pytest.approx(16 / (8 * 2 * found.beta_bar))
    assert found.alpha_3 == pytest.approx(1 / (216 * 9 + 15))
    assert found.alpha_bar == pytest.approx(2**-2.5)
    assert found.alpha == min(found.alpha_1, found.alpha_2, found.alpha_3, found.alpha_bar / 100)
    assert found.beta == pytest.approx(found.beta_bar * found.alpha / 16)


def test_the_other_classes_by_hand():
    minimax = theory.steps(theory.MinimaxConstants(mu_f=1, l_f0=1, l_f1=2, l_f2=1, sigma_f=1), rounds=100)
    assert minimax.alpha_1 == pytest.approx(1 / (2 * 6 + 4 * 2 * 2 + 2 * 2 * 9 / 2))  # (65b): L_yx = 9
    assert minimax.beta_bar == pytest.approx(11 * 2 * 2 + 9 * 2 * minimax.alpha_1 + 2 * minimax.alpha_1)
    assert (minimax.lower_rounds, minimax.alpha_bar) == (2, 0.5)

    constants = theory.CompositionalConstants(l_f0=1, l_f1=2, l_r0=3, l_r1=1, sigma_f=1, sigma_r1=1)
    compositional = theory.steps(constants, rounds=100)
    assert compositional.alpha_1 == pytest.approx(1 / (2 * 1 * 1 + 6 * 2 * 9 + 2 * 2 * 1))  # (73b)
    assert compositional.beta_bar == pytest.approx(11 * 18 + 2 * 10 * compositional.alpha_1 + 9 * compositional.alpha_1)
    assert compositional.alpha_2 == pytest.approx(1 / (8 * 3 * compositional.beta_bar))
    assert compositional.alpha_3 == pytest.approx(1 / (216 * 36 + 30))
    assert (compositional.lower_rounds, compositional.alpha_bar) == (1, 1)

    assert theory.fedsvrg(theory.SingleLevelConstants(l_f=2), rounds=1).step == pytest.approx(1 / (6 * 17))
    assert theory.fedsvrg(theory.SingleLevelConstants(l_f=2), rounds=10**6).step == pytest.approx(1e-3)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_lower_step_is_stable_at_every_scale(size):
    """β < min(1/(6ℓ_{g,1}), 1) of Lemma C.3, also where the printed (56) and (73b) do not see to it."""
    bilevel = theory.Constants(mu_g=size, l_f0=1, l_f1=1, l_g1=2 * size)
    minimax = theory.MinimaxConstants(mu_f=size, l_f0=1, l_f1=2 * size)
    compositional = theory.CompositionalConstants(l_f0=1, l_f1=1, l_r0=size)
    for constants, lower in ((bilevel, 2 * size), (minimax, 2 * size), (compositional, 1.0)):
        assert theory.steps(constants, rounds=1).beta <= min(1 / (6 * lower), 1) * (1 + 1e-12)


def test_neumann_terms_make_the_bias_small():
    constants = theory.Constants(mu_g=1, l_f0=5, l_f1=1, l_g1=10)
    for rounds in (10, 1000, 10**5):
        assert constants.bias(constants.neumann_terms(rounds)) <= 10 * 5 / rounds
    assert theory.fednest(constants, 1000, neumann="sum").neumann_terms == constants.neumann_terms(1000) - 1


@pytest.mark.slow
def test_quadratic_constants_are_bounds(task):
    """Random points of the ball and pairs of points, all clients, by automatic differentiation."""
    found = theory.quadratic_constants(task)
    start = np.concatenate(task.init)
    closed = solution(task)
    radius = 2 * np.linalg.norm(np.concatenate([closed.x, closed.y(closed.x)]) - start)
    rng = np.random.default_rng(0)
    worst = dict.fromkeys(("l_f0", "l_f1", "l_g1", "sigma_f", "sigma_g1"), 0.0)
    for i in range(task.clients.n):
        own = task.clients.client_data(i)
        f = lambda z, rows: task.problem.f(z[:2], z[2:], rows)
        g = lambda z, rows: task.problem.g(z[:2], z[2:], rows)
        for _ in range(5):
            z = start + radius * _unit(rng)
            up, low = own["upper"][0], own["lower"][0]
            f_z, g_z = _gradients(f, z, up), _gradients(g, z, low)
            other = _unit(rng)
            for name, gradients, fn, rows in (("l_f1", f_z, f, up), ("l_g1", g_z, g, low)):
                change = _gradients(fn, z + other, rows).mean(axis=0) - gradients.mean(axis=0)
                worst[name] = max(worst[name], float(np.linalg.norm(change)))
            worst["l_f0"] = max(worst["l_f0"], float(np.linalg.norm(f_z.mean(axis=0))))
            for name, gradients in (("sigma_f", f_z), ("sigma_g1", g_z)):
                spread = math.sqrt(np.mean(np.sum((gradients - gradients.mean(axis=0)) ** 2, axis=1)))
                worst[name] = max(worst[name], spread)
    for name, value in worst.items():
        assert 0.1 * getattr(found, name) < value <= getattr(found, name), name


def _unit(rng):
    z = rng.normal(size=4)
    return z / np.linalg.norm(z)


def _gradients(fn, z, rows):
    """Of each sample, by central differences, which are exact on quadratics."""
    count = len(next(iter(rows.values())))
    one = lambda s: {name: value[s : s + 1] for name, value in rows.items()}
    return np.array([[float(fn(z + e, one(s)) - fn(z - e, one(s))) / 2 for e in np.eye(len(z))] for s in range(count)])


def test_full_batch_converges(task):
    """With the theorem's steps ‖∇Φ‖² falls at every look, to less than a twentieth."""
    constants = theory.quadratic_constants(task)
    method = theory.fednest(constants, ROUNDS, lower_rounds=2, neumann="sum", upper_local_steps=np.array([1, 2, 3]))
    assert method.scale_steps
    assert method.hessian_step == 1 / constants.l_g1
    gradient = solve(task, method)["gradient"].to_numpy()
    assert (np.diff(gradient) < 0).all()
    assert gradient[-1] < gradient[0] / 20


@pytest.mark.slow
def test_stochastic_converges(task):
    """Likewise with one sample a step and the random FedIHGP, on the whole: quarter by quarter."""
    constants = theory.quadratic_constants(task)
    history = solve(task, theory.fednest(constants, ROUNDS, lower_rounds=2, batch_size=1), every=100)
    quarters = [part.mean() for part in np.array_split(history["gradient"].to_numpy(), 4)]
    assert (np.diff(quarters) < 0).all()
    assert quarters[-1] < history["gradient"].iloc[0] / 10


def test_minimax_converges():
    task = rk.tasks.minimax_quadratic(clients=4, dim=3, penalty=1.0)
    constants = theory.MinimaxConstants(mu_f=1.0, l_f0=50.0, l_f1=1.1)
    history = solve(task, theory.fednest(constants, 3_000), rounds=3_000)
    assert (np.diff(history["distance"]) < 0).all()
    assert history["distance"].iloc[-1] < 1e-3 * history["distance"].iloc[0]


def _composed():
    """f's target is the shift of r, so that x* = 0."""
    inner = lambda x, b: jnp.mean(b["r"], axis=0) * x + jnp.mean(b["s"], axis=0)
    problem = rk.Compositional(inner, lambda y, b: 0.05 * jnp.sum((y - jnp.mean(b["s"], axis=0)) ** 2))
    rng = np.random.default_rng(0)
    rows = [{"r": rng.uniform(0.8, 1.0, size=(1, 3)), "s": rng.normal(size=(1, 3))} for _ in range(3)]

    def evaluate(x, y):
        return {"distance": float(np.sum(np.asarray(x) ** 2))}

    return problem, rk.Clients(rows), (np.ones(3), np.zeros(3)), evaluate


@pytest.mark.slow
def test_compositional_converges_whatever_the_local_steps():
    """α_i = α/τ_i: with no direct gradient the local steps add up to exactly α·h, and unequal τ_i change nothing."""
    problem, clients, init, evaluate = _composed()
    method = theory.fednest(theory.CompositionalConstants(l_f0=0.3, l_f1=0.1, l_r0=1.0), 8_000, alpha_bar=100.0)
    uneven = dataclasses.replace(method, upper_local_steps=np.array([1, 3, 7]))
    runs = [
        rk.solve(problem, clients, m, init, 8_000, evaluate=evaluate, every=1000, progress=False)
        for m in (method, uneven)
    ]
    assert runs[0].history["distance"].iloc[-1] < 1e-3
    np.testing.assert_allclose(runs[1].x, runs[0].x, rtol=0, atol=1e-12)


def test_single_level_converges():
    clients = rk.Clients(upper=[np.full((1, 3), v) for v in (1.0, 2.0, 6.0)])
    problem = rk.SingleLevel(lambda x, b: 0.5 * jnp.sum((x - jnp.mean(b, axis=0)) ** 2))
    method = theory.fedsvrg(theory.SingleLevelConstants(l_f=1.0), 1_000, 100.0, local_steps=np.array([1, 2, 5]))
    run = rk.solve(problem, clients, method, np.zeros(3), rounds=1_000, progress=False)
    np.testing.assert_allclose(run.x, 3.0, atol=1e-6)


def test_feddro_by_hand():
    constants = theory.CompositionalConstants(l_f0=1, l_f1=2, l_r0=0.5)
    method = theory.feddro(constants, steps=10**8, clients=16, c=0.5, batch_size=3)
    assert (method.step, method.batch_size) == (pytest.approx(0.5 * 4e-4), 3)
    assert method.momentum == pytest.approx(4 * 0.5**4 * 2**2 * method.step)
    assert method.local_steps == 12  # 100/8 = 12.5, to the even
    with pytest.raises(ValueError, match=r"steps must be at least 102400.*; got 100, and β = 32. Take"):
        theory.feddro(theory.CompositionalConstants(l_f0=1, l_f1=1, l_r0=2), steps=100, clients=25)

    two_sided = theory.ds_feddro(steps=10**6, clients=4, c=0.5, c_beta=3, c_gamma=2)
    assert two_sided.local_steps == 500
    assert two_sided.step * two_sided.server_step == pytest.approx(0.5 * math.sqrt(4 / 10**6))  # √(K/T), as in FedDRO
    assert two_sided.momentum == pytest.approx(3 * two_sided.step)
    assert two_sided.server_inner_step == pytest.approx(2 * two_sided.server_step)


@pytest.mark.slow
def test_feddro_converges():
    """f(g(x)) + h(x), all quadratic, one sample a step: the steps of both theorems bring ‖∇Φ‖² down."""
    rng = np.random.default_rng(0)
    n, samples, steps = 4, 6, 10_000
    data = [
        {
            "a": 0.8 * np.eye(2) + 0.1 * rng.normal(size=(1, 2, 2)) + 0.1 * rng.normal(size=(samples, 2, 2)),
            "b": 0.3 * rng.normal(size=(1, 2)) + 0.2 * rng.normal(size=(samples, 2)),
        }
        for _ in range(n)
    ]
    inner = lambda x, b: jnp.mean(b["a"] @ x + b["b"], axis=0)
    outer = lambda v: 0.5 * jnp.sum((v - 1) ** 2)
    extra = lambda x, b: 0.5 * jnp.mean(jnp.sum((x + b["b"]) ** 2, axis=-1))
    problem, clients = rk.Compositional(inner, outer, extra), rk.Clients(lower=data, replace=True)
    a, b = (np.mean([np.mean(own[name], axis=0) for own in data], axis=0) for name in "ab")
    gradient = lambda x: a.T @ (a @ x + b - 1) + x + b
    watch = lambda x, y: {"gradient": float(np.sum(gradient(np.asarray(x)) ** 2))}
    lipschitz = max(np.linalg.norm(sample, 2) for own in data for sample in own["a"])
    constants = theory.CompositionalConstants(l_f0=5.0, l_f1=1.0, l_r0=float(lipschitz))
    for method in (theory.feddro(constants, steps, n, batch_size=1), theory.ds_feddro(steps, n, c=0.5, batch_size=1)):
        rounds = steps // method.local_steps
        run = rk.solve(
            problem, clients, method, (np.array([3.0, -2.0]), None), rounds, evaluate=watch, every=rounds // 50
        )
        seen = run.history["gradient"].to_numpy()
        assert seen[1 + len(seen) // 2 :].mean() < seen[0] / 1000


def test_asfbo_by_hand():
    """(161) with round numbers: r = 2, L_R² = 2, L_Φ = 4, L_y = 1, L_z = 2, K_y = 808, K_z = 6."""
    constants = theory.Constants(mu_g=1, l_f0=2, l_f1=0.5, l_g1=1)
    terms = theory.asfbo_terms(constants, 2, 1, 1, momentum=0.25, most=4)
    expected = [1 / 12, 1 / 144, 1 / 72, 1 / 48, 1 / 4, 4, 4, 1 / 96, 1 / 72, math.inf, math.inf, 1 / 6656]
    assert terms == pytest.approx(expected)
    curved = dataclasses.replace(constants, l_g2=1)  # L_yx = 4, L_zx > 0
    alpha = (1 - 0.75**4) / 0.25 / 0.25
    assert theory.asfbo_terms(curved, 2, 3, 1, 0.25, 4)[9] == pytest.approx(3 / (4 * 4 * (4 + 4 * (1 + alpha) ** 2)))

    method = theory.asfbo(constants, 100, 2, 1, 1, spread=5, local_steps=[2, 4], batch_size=3)
    assert (method.radius, method.batch_size) == (2, 3)
    most = 1 / 6656 / 4
    assert method.bounds == (
        pytest.approx((most / 5, most)), pytest.approx((most / 25, most / 5)), pytest.approx((most / 25, most / 5))
    )  # fmt: skip
    assert method.upper_step == pytest.approx(1 / (3 * 10))
    assert theory.asfbo(constants, 1, 2, 1, 1, local_steps=[2, 4]).lower_step == 1 / 4  # (163), where T is small
    assert theory.asfbo(constants, 10**12, 2, 1, 1, local_steps=1).bounds[0][1] == pytest.approx(math.sqrt(2) / 10**6)
    best = theory.asfbo(constants, 100, 2, local_steps=[2, 4]).bounds[0][1]
    assert best > 5 * most
    assert best >= max(min(theory.asfbo_terms(constants, 2, 2**j, 2**k, 0.25, 4)) / 4 for j in (3, 6) for k in (0, 2))


@pytest.mark.parametrize("given", [{}, pytest.param({"direction": "storm", "batch_size": 1}, marks=pytest.mark.slow)])
def test_asfbo_converges(given):
    task = rk.tasks.quadratic(
        clients=3, upper_dim=2, lower_dim=1, samples=8, noise=0.1, heterogeneity=0.1, seed=7, replace=True
    )
    constants = theory.quadratic_constants(task)
    method = theory.asfbo(constants, 10_000, 3, local_steps=np.array([1, 2, 3]), **given)
    gradient = solve(task, method, 10_000)["gradient"].to_numpy()
    assert (np.diff(gradient) < 0).all()
    assert gradient[-1] < gradient[0] / 100


def test_fedbio_by_hand():
    """L = 2, κ = 2 and L̃ = 2 but where ℓ_{g,2} counts; T = 1000, so ε = 1/100."""
    constants = theory.Constants(mu_g=1, l_f0=3, l_f1=1, l_g1=2)
    found = theory.fedbio(constants, steps=1000, clients=5, local_steps=3)
    assert found.lower_step == found.linear_step == pytest.approx(1 / 48)
    assert found.upper_step == pytest.approx(1 / 48 / 4)
    assert (found.upper_batch, found.lower_batch) == (20, 320)
    longer = theory.fedbio(constants, steps=10**6, clients=5, local_steps=3, batch_size=7)
    assert longer.lower_step == pytest.approx(0.01)  # c T^{-1/3}
    assert (longer.upper_batch, longer.lower_batch, longer.batch_size) == (None, None, 7)
    curved = theory.fedbio(dataclasses.replace(constants, l_g2=1.0), steps=1000, clients=5)
    assert curved.lower_step == pytest.approx(1 / (8 * math.sqrt(4 + 2 * 9)))

    local = theory.fedbio(constants, steps=1000, clients=5, scope="client")
    assert (local.lower_step, local.hessian_step) == (0.25, 0.5)
    assert local.upper_step == pytest.approx(min(1 / 9, 0.25 / (2 * 3)))  # L_f = 9 and M_f = 3, as above
    assert (local.upper_batch, local.lower_batch, local.neumann_terms) == (20, 3200, math.ceil(2 * math.log(200)))


def test_fedbio_acc_by_hand():
    """The same constants; b and I as the communication of order ε^{-1} wants them, and for a given b."""
    constants = theory.Constants(mu_g=1, l_f0=3, l_f1=1, l_g1=2)
    found = theory.fedbio_acc(constants, steps=2000, clients=5)
    assert (found.batch_size, found.local_steps) == (100, 1)  # √(MT); 2^{10/9}·5^{-2/3} = 0.7
    assert found.lower_step == found.linear_step == 0.25
    assert found.upper_step == pytest.approx(0.25 / 4)
    assert found.c_upper == pytest.approx(1 / 500 + 2 / 500**2)
    assert found.c_lower == found.c_linear == pytest.approx(4 / 500 + 2 / 500**2)
    assert found.delta == pytest.approx(500 ** (2 / 3) / 2 ** (1 / 3))
    assert found.offset == pytest.approx(500**2 * 4)

    fixed = theory.fedbio_acc(constants, steps=200_000, clients=5, batch_size=1)  # ε = 10^{-4}
    assert fixed.local_steps == round(2 ** (10 / 9) * 5 ** (-2 / 3) * 10 ** (4 / 3))
    assert fixed.first_batch == math.ceil(fixed.local_steps**1.5)
    assert fixed.delta / fixed.offset ** (1 / 3) <= 1 / (2 * fixed.local_steps**1.5) * (1 + 1e-12)
    assert fixed.c_lower * (fixed.delta / fixed.offset ** (1 / 3)) ** 2 <= 1

    local = theory.fedbio_acc(constants, steps=2000, clients=5, scope="client")
    assert (local.batch_size, local.lower_batch) == (100, 500)
    assert local.neumann_terms == math.ceil(2 * math.log(2 * 500 * 10**4))
