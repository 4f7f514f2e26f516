"""`rk.check`: five kinds of broken problem are named, sound ones pass, and its numbers are those of closed forms."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import rookery as rk
from rookery.cli import app
from rookery.run import hypergradient
from rookery.run.diagnosis import Line
from rookery.tasks.quadratic import solution

RNG = np.random.default_rng(0)
INIT = (np.array([0.3, -0.2]), np.array([0.1, 0.4]))


def rows(count: int) -> dict[str, np.ndarray]:
    return {"a": RNG.normal(size=(count, 2)), "t": RNG.normal(size=count)}


SIZES = (3, 6, 4)
LOWER, UPPER = [rows(k) for k in SIZES], [rows(k + 1) for k in SIZES]
CLIENTS = rk.Clients(LOWER, UPPER, weights="size")
ONE_LEVEL = rk.Clients(upper=UPPER)


def error(y: Any, b: Any) -> Any:
    return jnp.mean((b["a"] @ y - b["t"]) ** 2)


def upper(x: Any, y: Any, b: Any) -> Any:
    return error(y, b) + 0.1 * jnp.sum(x**2)


def lower(x: Any, y: Any, b: Any) -> Any:
    return error(y, b) + jnp.sum(jnp.exp(x) * y**2)


def named(found: rk.Diagnosis, name: str) -> Line:
    (line,) = [line for line in found.lines if line.name == name]
    return line


def bad(problem: Any, clients: Any = CLIENTS, init: Any = INIT) -> tuple[Line, str]:
    """The one line that is bad, and all that is printed."""
    found = rk.check(problem, clients, init)
    (line,) = found.bad
    assert line.advice
    assert "BAD " in str(found)
    assert f"{line.name}: {line.value}" in str(found)
    return line, str(found)


# The five faults, and others.


def test_a_sum_for_a_mean() -> None:
    line, _ = bad(rk.Bilevel(upper, lambda x, y, b: len(b["t"]) * error(y, b) + jnp.sum(jnp.exp(x) * y**2)))
    assert line.name == "means over the batch"
    assert "Bilevel.lower must be a mean over its batch" in line.value
    assert line.advice.startswith("Write it as a mean (jnp.mean over the batch")


def test_a_remedy_for_a_sum_is_one_that_the_clients_do_not_have_yet() -> None:
    summed = rk.SingleLevel(lambda x, b: jnp.sum((b["a"] @ x - b["t"]) ** 2))
    advice = lambda *sizes: bad(summed, rk.Clients(upper=[rows(size) for size in sizes]), INIT[0])[0].advice
    assert advice(4, 4).endswith("e.g. Cox's or one with batch normalisation, give the problem batch_statistic=True.")
    assert advice(4, 5).endswith("; or give all clients the same number of samples, and batches that are not larger.")


def test_a_lower_level_that_is_not_strongly_convex() -> None:
    flat = lambda x, y, b: jnp.mean((b["a"][:, 0] * y[0] - b["t"] - jnp.sum(x)) ** 2)  # y[1] is free
    line, _ = bad(rk.Bilevel(upper, flat))
    assert line.name == "curvature in y"
    assert "μ = 0 to ℓ" in line.value
    assert "not strongly convex, and the upper level feels the flat directions" in line.value
    assert "½·λ·‖y‖²" in line.advice


@pytest.mark.slow
def test_flat_directions_that_the_upper_level_does_not_feel_are_a_note() -> None:
    shifted = lambda x, y, b: jnp.mean((b["a"][:, 0] * (y[0] + y[1]) - b["t"] - jnp.sum(x)) ** 2)
    found = rk.check(rk.Bilevel(shifted, shifted), CLIENTS, INIT)
    assert not found.bad
    assert "does not feel" in named(found, "curvature in y").value
    assert found.numbers["difference"] < 1e-6


@pytest.mark.parametrize("kind", ["bilevel", "minimax"])
def test_the_wrong_sign(kind: str) -> None:
    if kind == "bilevel":
        line, _ = bad(rk.Bilevel(upper, lambda x, y, b: -lower(x, y, b)))
    else:  # y is to maximise
        line, _ = bad(rk.Minimax(lower), ONE_LEVEL)
    assert line.name == "curvature in y"
    assert "negative curvature dominates" in line.value
    assert "wrong sign" in line.advice


def test_a_second_derivative_that_is_not_finite() -> None:
    sharp = lambda x, y, b: lower(x, y, b) + jnp.sum(y**1.5)
    line, _ = bad(rk.Bilevel(upper, sharp), init=(INIT[0], np.zeros(2)))
    assert "the second derivative of the lower level is not finite" in line.value


def test_a_saddle_is_no_lower_level() -> None:
    bent = lambda x, y, b: error(y, b) * 0 + jnp.sum(x) * y[0] + 2 * y[0] ** 2 - y[1] ** 2
    names = {line.name for line in rk.check(rk.Bilevel(upper, bent), CLIENTS, INIT).bad}
    assert names == {"residual of y", "curvature in y"}


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (rk.Bilevel(lambda x, y, b: jnp.mean(b["t"]) * jnp.sum(x**2), lower), "Bilevel.upper does not depend on y"),
        (rk.Bilevel(upper, lambda x, y, b: jnp.mean(b["t"]) * jnp.sum(x**2)), "Bilevel.lower does not depend on y"),
        (rk.Bilevel(upper, lambda x, y, b: error(y, b)), "the lower level has no x"),
        (rk.Minimax(lambda x, y, b: jnp.mean(b["t"]) * jnp.sum(x**2)), "Minimax.objective does not depend on y"),
    ],
)
def test_a_variable_that_is_not_used(problem: Any, message: str) -> None:
    line, _ = bad(problem, ONE_LEVEL)
    assert line.name == "y is used"
    assert message in line.value


@pytest.mark.parametrize(
    "problem",
    [
        rk.SingleLevel(lambda x, b: error(x["w"], b)),
        rk.Bilevel(lambda x, y, b: upper(x["w"], y, b), lambda x, y, b: lower(x["w"], y, b)),
    ],
    ids=["single-level", "bilevel"],
)
def test_a_part_of_x_that_no_loss_uses(problem: Any) -> None:
    x = {"bias": np.ones(3), "w": INIT[0]}
    line, _ = bad(problem, ONE_LEVEL, x if isinstance(problem, rk.SingleLevel) else (x, INIT[1]))
    assert line.name == "x is used"
    assert line.value == "no loss depends on x['bias']: the gradient is 0"


@pytest.mark.parametrize("what", ["it", "its gradient"])
def test_a_value_that_is_not_finite(what: str) -> None:
    level = [{"a": own["a"], "t": np.abs(own["t"])} for own in LOWER]
    level[1]["t"][5] = 0.0  # the last of the largest client
    clients = rk.Clients(level, UPPER)
    clients.schema = rk.Clients.from_frame({"by": ["east", "north", "south"], "v": [1, 2, 3]}, "by").schema
    of = jnp.log if what == "it" else lambda t: jnp.where(t > 0, jnp.sqrt(t), 0)
    broken = lambda x, y, b: lower(x, y, b) + jnp.mean(of(b["t"] * jnp.sum(y**2)))
    line, _ = bad(rk.Bilevel(upper, broken), clients)
    assert line.name == "finite values"
    assert f"Bilevel.lower: {what} is not finite on samples of client north (1 of 5 batches)" in line.value


def test_a_wrong_derivative() -> None:
    cut = lambda x, y, b: error(y, b) + jnp.sum(jnp.exp(jax.lax.stop_gradient(x)) * y**2 + 0.01 * x * y)
    line, _ = bad(rk.Bilevel(upper, cut))
    assert line.name == "derivatives"
    assert "stop_gradient" in line.advice
    line, _ = bad(rk.SingleLevel(lambda x, b: error(jax.lax.stop_gradient(x) * x, b)), ONE_LEVEL, INIT[0])
    assert line.name == "derivatives"
    line, _ = bad(rk.SingleLevel(lambda x, b: jnp.mean(b["t"] ** 2) + 0 * jnp.sum(x)), ONE_LEVEL, INIT[0])
    assert line.name == "x is used"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["single", "bilevel"])
def test_at_a_stationary_point_rounding_is_no_wrong_derivative(kind: str, seed: int) -> None:
    """There the gradient and the differences are rounding errors, whose ratio means nothing."""
    values = RNG.normal(size=(3, 4, 2)) + 10
    mean = values.mean(axis=(0, 1))
    clients = rk.Clients(upper=list(values))
    far = lambda z, b: 100 * jnp.mean(jnp.sum((z - b) ** 2, axis=1))
    problem: Any = rk.SingleLevel(far)
    if kind == "bilevel":
        problem = rk.Bilevel(lambda x, y, b: far(y, b) + jnp.sum(x) - jnp.sum(y), lambda x, y, b: jnp.sum((y - x) ** 2))
    found = rk.check(problem, clients, mean if kind == "single" else (mean, mean), seed=seed)
    assert not found.bad, str(found)
    assert "derivatives" in {line.name for line in found.lines}


def test_a_term_that_appears_above_two_samples_is_seen() -> None:
    late = lambda x, b: error(x, b) + jnp.where(len(b["t"]) > 3, 1.0, 0.0) * jnp.sum(x**2)
    line, _ = bad(rk.SingleLevel(late), rk.Clients(upper=[rows(8)] * 2), INIT[0])
    assert "SingleLevel.loss must be a mean over its batch; on 5 samples" in line.value


@pytest.mark.parametrize("quartic", [pytest.param(0.0, marks=pytest.mark.slow), 1e-7])
def test_a_lower_level_that_curves_down_a_little(quartic: float) -> None:
    """300 gradient steps hardly move along the direction that has no minimum; Newton's method does, by far."""
    bends = jnp.array([1.0, -0.002])
    bent = lambda x, y, b: 0.5 * jnp.sum(bends * y**2) + jnp.sum(x) * jnp.sum(y) - quartic * jnp.sum(y**4)
    line, _ = bad(rk.Bilevel(upper, bent), init=(INIT[0], np.ones(2)))
    assert line.name == "curvature in y"
    assert "it is not convex, and no minimum was found: ‖∇_y g‖ went from" in line.value


@pytest.mark.parametrize("kind", ["minimax", "bilevel"])
def test_a_level_that_is_linear_in_y(kind: str) -> None:
    linear = lambda x, y, b: jnp.mean(b["t"]) * jnp.sum(x * y) + jnp.sum(x**2)
    line, _ = bad(rk.Minimax(linear) if kind == "minimax" else rk.Bilevel(upper, linear), ONE_LEVEL)
    assert "is linear in y, without a " + ("maximum" if kind == "minimax" else "minimum") in line.value
    assert "½·λ·‖y‖²" in line.advice


def test_what_is_suggested_for_weighted_nodes_are_settings_of_their_methods() -> None:
    clients = rk.Clients(lower=[rows(4), rows(4)], center=rows(3))
    found = rk.check(rk.WeightedNodes(lambda y, b: error(y, b) + 0.1 * jnp.sum(y**2)), clients, INIT[1])
    assert {"model_step", "linear_step"} <= found.suggested.keys()
    for method in (rk.WeightedNodesProx, rk.WeightedNodesABA):
        method(**found.suggested)


def test_one_sample_each_is_not_checked() -> None:
    found = rk.check(rk.SingleLevel(error), rk.Clients(upper=[rows(1)] * 2), INIT[0])
    assert named(found, "means over the batch").value == "not checked: every client has one sample"


def test_samples_are_counted_once() -> None:
    """Batches overlap where a client's samples are no multiple of a batch, and two levels may share their data."""
    several = sum(map(len, (own["t"] for own in UPPER)))
    for problem, init in ((rk.SingleLevel(error), INIT[0]), (rk.Bilevel(upper, lower), INIT)):
        assert named(rk.check(problem, ONE_LEVEL, init), "finite values").value.endswith(f" on {several} samples")


def test_a_start_that_is_rounded_is_noted() -> None:
    with jax.enable_x64(False):
        found = rk.check(rk.SingleLevel(error), rk.Clients(upper=UPPER), INIT[0])
    assert "init is float64, and runs compute in float32" in named(found, "precision").value
    assert not any(line.name == "precision" for line in rk.check(rk.SingleLevel(error), ONE_LEVEL, INIT[0]).lines)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="samples must be an integer of at least 1; got 0"):
        rk.check(rk.Bilevel(upper, lower), CLIENTS, INIT, samples=0)
    with pytest.raises(ValueError, match="must be a pair"):
        rk.check(rk.Bilevel(upper, lower), CLIENTS, INIT[0])
    with pytest.raises(ValueError, match="needs clients with one data set, and these have two"):
        rk.check(rk.Minimax(upper), CLIENTS, INIT)
    with pytest.raises(ValueError, match="judges the model on the centre's data"):
        rk.check(rk.WeightedNodes(error), ONE_LEVEL, INIT[1])
    with pytest.raises(ValueError, match=r"clients must hold data; got the clients of rk\.Clients\.like"):
        rk.check(rk.SingleLevel(error), rk.Clients.like(upper={"a": np.zeros(2), "t": np.zeros(())}, n=2), INIT[0])


# Numbers.


@pytest.mark.parametrize("scope", ["global", pytest.param("client", marks=pytest.mark.slow)])
def test_the_numbers_are_those_of_the_closed_forms(scope: Any) -> None:
    task = rk.tasks.quadratic(clients=3, sizes=[2, 2, 2], noise=0.2, weights=[1, 2, 3], scope=scope)
    found = rk.check(task.problem, task.clients, task.init)
    assert not found.bad
    closed, x = solution(task), task.init[0]
    own = [closed] if scope == "global" else closed.clients
    weights = [1.0] if scope == "global" else closed.p
    curved = np.concatenate([np.linalg.eigvalsh(each.A) for each in own])
    assert found.numbers["mu"] == pytest.approx(curved.min(), rel=1e-8)
    assert found.numbers["smoothness"] == pytest.approx(curved.max(), rel=1e-8)
    assert found.suggested["hessian_step"] == pytest.approx(1 / curved.max(), rel=0.06)
    implicit = sum(p * (each.B.T @ each.p(x, each.y(x))) for p, each in zip(weights, own, strict=True))
    direct = closed.hypergradient(x) - implicit
    share = np.linalg.norm(implicit) / (np.linalg.norm(implicit) + np.linalg.norm(direct))
    assert found.numbers["implicit_share"] == pytest.approx(share, rel=1e-8)
    assert found.numbers["difference"] < 1e-7
    slope = closed.hypergradient(x)
    directed = float(named(found, "derivatives").value.split(": ")[1].split(" and ")[0])
    assert 0 < directed <= 1.001 * np.linalg.norm(slope)


def test_curvature_and_solution_of_a_matrix() -> None:
    rng = np.random.default_rng(1)
    for values in (np.array([2.0, 2, 2, -3, 5]), np.linspace(0.5, 4, 300), np.zeros(3)):
        basis, _ = np.linalg.qr(rng.normal(size=(values.size, values.size)))
        matrix = basis @ np.diag(values) @ basis.T
        low, high = hypergradient.curvature(lambda v: matrix @ v, values.size, rng)
        np.testing.assert_allclose([low, high], [values.min(), values.max()], atol=1e-3 if values.size > 100 else 1e-9)
        if values.min() > 0:
            b = rng.normal(size=values.size)
            p, left = hypergradient.solve_symmetric(lambda v: matrix @ v, b, 200)
            np.testing.assert_allclose(p, np.linalg.solve(matrix, b), rtol=1e-6)
            assert left < 1e-8


@pytest.mark.slow
def test_in_single_precision_the_same_is_found() -> None:
    with jax.enable_x64(False):
        clients = rk.Clients(LOWER, UPPER, weights="size")
        assert clients.lower.rows["a"].dtype == jnp.float32
        found = rk.check(rk.Bilevel(upper, lower), clients, INIT)
    wide = rk.check(rk.Bilevel(upper, lower), CLIENTS, INIT)
    assert not found.bad
    assert not wide.bad
    assert found.suggested == wide.suggested
    for name, value in wide.numbers.items():
        if name != "difference":
            assert found.numbers[name] == pytest.approx(value, rel=1e-4), name
    assert max(found.numbers["difference"], wide.numbers["difference"]) < 1e-6


@pytest.mark.parametrize("kind", ["one data set", "scope", "conditional", "own outer"])
def test_compositional_problems(kind: str) -> None:
    inner: Any = lambda x, b: jnp.mean(b["a"], axis=0) * x
    outer: Any = lambda value: jnp.sum(jnp.exp(value))
    more: dict[str, Any] = {"extra": lambda x, b: jnp.mean(b["t"]) * x[0]}
    if kind == "scope":
        more["inner_scope"] = "client"
    elif kind == "conditional":
        inner = lambda x, b, row: jnp.mean(b["a"], axis=0) * x * row["t"]
        outer = lambda value, b: jnp.sum(value**2) * jnp.mean(b["t"])
        more["inner_scope"] = "client"
    elif kind == "own outer":
        outer = lambda value, b: jnp.sum(value**2) * jnp.mean(b["t"])
    found = rk.check(rk.Compositional(inner, outer, **more), CLIENTS, INIT[0])
    assert not found.bad
    assert found.numbers["difference"] < 1e-6


def test_multi_level_problems() -> None:
    """The gradient is that of the means put into each other, and a level that is no mean is named."""
    first: Any = lambda x, b: jnp.mean(b["a"], axis=0) * x
    second: Any = lambda v, b: jnp.mean(jnp.tanh(b["a"] * v), axis=0)
    found = rk.check(rk.MultiLevel((first, second), lambda v: v @ v, lambda x, b: x @ x), CLIENTS, INIT[0])
    assert not found.bad
    assert found.numbers["difference"] < 1e-6
    found = rk.check(rk.MultiLevel((first, lambda v, b: jnp.sum(b["a"], axis=0) * v), jnp.sum), CLIENTS, INIT[0])
    assert any("MultiLevel.inner[1] must be a mean" in line.value for line in found.bad)


# The built-in tasks.


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("minimax_quadratic", {"clients": 3, "dim": 3}),
        ("portfolio", {"clients": 3, "assets": 3, "samples": 8}),
        pytest.param("fed_heart", {}, marks=pytest.mark.slow),
        pytest.param("composition", {"clients": 3}, marks=pytest.mark.slow),
        pytest.param("hyperparameters", {"clients": 3, "noise": 2}, marks=pytest.mark.slow),
        pytest.param("weighted_nodes", {"nodes": 4, "minority": 2}, marks=pytest.mark.slow),
        pytest.param("hyperrep", {"clients": 10, "width": 16}, marks=pytest.mark.slow),
        pytest.param("hyperrep", {"clients": 10, "width": 16, "scope": "client"}, marks=pytest.mark.slow),
        pytest.param("loss_tuning", {"clients": 4}, marks=pytest.mark.slow),
        pytest.param("data_cleaning", {"clients": 4}, marks=pytest.mark.slow),
        pytest.param("few_shot", {"clients": 4}, marks=pytest.mark.slow),
        pytest.param("group_weights", {"clients": 4}, marks=pytest.mark.slow),
        pytest.param("fairness", {"clients": 4, "data": "synthetic"}, marks=pytest.mark.slow),
        pytest.param("dro_imbalanced", {"clients": 4}, marks=pytest.mark.slow),
        pytest.param("dro_imbalanced", {"clients": 4, "objective": "chi2"}, marks=pytest.mark.slow),
        pytest.param("worst_group", {"clients": 4}, marks=pytest.mark.slow),
    ],
)
def test_no_problems_are_found_in_the_built_in_tasks(name: str, given: dict[str, Any]) -> None:
    task = getattr(rk.tasks, name)(**given)
    found = rk.check(task.problem, task.clients, task.init)
    assert not found.bad, str(found)
    assert "no problems found" in str(found)
    assert math.isfinite(found.numbers.get("difference", 0))


@pytest.mark.slow
def test_what_is_suggested_converges() -> None:
    task = rk.tasks.quadratic(clients=3)
    found = rk.check(task.problem, task.clients, task.init)
    method = rk.LFedNest(upper_step=0.05, **found.suggested)
    run = rk.solve(task.problem, task.clients, method, task.init, 60, evaluate=task.evaluate, every=60)
    assert run.history["lower_gap"].iloc[-1] < 0.05 * run.history["lower_gap"].iloc[0]


# The command line.


def test_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    call = lambda *words: CliRunner().invoke(app, ["check", *words])
    done = call("minimax-quadratic", "--clients", "3", "--set", "dim=2")
    assert done.exit_code == 0, done.output
    assert "Minimax, looked at 3 of 3 clients: no problems found." in done.stdout
    assert "Try: lower_local_steps=1, lower_step=1.0" in done.stdout
    told = json.loads(call("minimax-quadratic", "--clients", "3", "--json").stdout)
    assert told["numbers"]["mu"] == pytest.approx(1)
    assert told["lines"][1]["verdict"] == "good"
    refused = call("minimax-quadratic", "--set", "depth=2")
    assert refused.exit_code == 2
    assert "The task minimax-quadratic has no setting 'depth'" in refused.stderr
    found = rk.Diagnosis("Bilevel", (Line("y is used", "not at all", "bad", "use it"),))
    monkeypatch.setattr(rk, "check", lambda *args, **given: found)
    done = call("minimax-quadratic")
    assert done.exit_code == 1
    assert "rookery: minimax-quadratic: not at all." in done.stderr
