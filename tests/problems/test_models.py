"""Models of any library as variables, and losses that are random, rematerialised or in half precision."""

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import linen, nnx

import rookery as rk
from rookery.problems import variables

ENGINES = {"simulation": rk.Simulation(block=2), "federation": rk.Federation()}
# The federation is a variant here, but for one library.
on_first = pytest.mark.parametrize(
    "engine", [ENGINES["simulation"], pytest.param(ENGINES["federation"], marks=pytest.mark.slow)], ids=ENGINES
)

RNG = np.random.default_rng(0)
SIZES = (3, 5, 4)
ROWS = [{"a": RNG.normal(size=(n, 2)), "t": RNG.normal(size=n)} for n in SIZES]
CLIENTS = rk.Clients(upper=ROWS, weights="size")
WEIGHT = RNG.normal(size=(3, 2))
METHOD = rk.FedAvg(step=0.1, local_steps=2, batch_size=2)
HOW: dict[str, Any] = {"rounds": 2, "cohort": 2, "seed": 5}


def squares(scores: Any, batch: Any) -> Any:
    return jnp.mean((scores - batch["t"]) ** 2)


# The same network, as a dictionary and in three libraries.


def by_hand(x: Any, batch: Any) -> Any:
    return squares(jnp.tanh(batch["a"] @ x["w"].T) @ x["v"], batch)


PLAIN = {"w": WEIGHT, "v": np.ones(3)}


@cache
def plain_run() -> rk.Run:
    """By hand, for all who compare with it."""
    return rk.solve(rk.SingleLevel(by_hand), CLIENTS, METHOD, PLAIN, **HOW)


class Net(eqx.Module):
    """With a function among its leaves, a rate, a counter and a word."""

    first: eqx.nn.Linear
    v: Any
    activation: Any = jnp.tanh
    calls: Any = 7
    rate: Any = 0.5
    name: str = "net"

    def __call__(self, a: Any) -> Any:
        assert (self.calls, self.rate) == (7, 0.5)
        assert self.name == "net"
        return self.activation(self.first(a)) @ self.v


def equinox() -> tuple[Any, Any, Any]:
    net = Net(eqx.nn.Linear(2, 3, use_bias=False, key=jax.random.key(0)), jnp.ones(3))
    net = eqx.tree_at(lambda n: n.first.weight, net, jnp.asarray(WEIGHT))
    return net, lambda x, b: squares(jax.vmap(x)(b["a"]), b), lambda x: {"w": x.first.weight, "v": x.v}


class Linen(linen.Module):
    @linen.compact
    def __call__(self, a: Any) -> Any:
        inner = jnp.tanh(linen.Dense(3, use_bias=False, param_dtype=float)(a))
        return linen.Dense(1, use_bias=False, param_dtype=float)(inner)[:, 0]


def flax_linen() -> tuple[Any, Any, Any]:
    start = {"params": {"Dense_0": {"kernel": WEIGHT.T}, "Dense_1": {"kernel": np.ones((3, 1))}}}
    back = lambda x: {"w": x["params"]["Dense_0"]["kernel"].T, "v": x["params"]["Dense_1"]["kernel"][:, 0]}
    return start, lambda x, b: squares(Linen().apply(x, b["a"]), b), back


class Nnx(nnx.Module):
    """With a dropout that is off, whose keys and counters are in the state."""

    def __init__(self, rate: float = 0.0) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(2, 3, use_bias=False, param_dtype=float, rngs=rngs)
        self.last = nnx.Linear(3, 1, use_bias=False, param_dtype=float, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, a: Any, key: Any = None) -> Any:
        inner = jnp.tanh(self.first(a))
        inner = inner if key is None else self.dropout(inner, rngs=nnx.Rngs(dropout=key))
        return self.last(inner)[:, 0]


def flax_nnx(rate: float = 0.0) -> tuple[Any, Any, Any]:
    net = Nnx(rate)
    net.first.kernel[...] = jnp.asarray(WEIGHT.T)
    net.last.kernel[...] = jnp.ones((3, 1))
    graph, state = nnx.split(net)
    back = lambda x: {"w": nnx.merge(graph, x).first.kernel[...].T, "v": nnx.merge(graph, x).last.kernel[...][:, 0]}
    return state, lambda x, b: squares(nnx.merge(graph, x)(b["a"]), b), back


LIBRARIES = {"equinox": equinox, "linen": flax_linen, "nnx": flax_nnx}
FURTHER = [(engine, library) for engine in ("federation", "simulation") for library in ("linen", "nnx")]


@pytest.mark.parametrize(
    ("engine", "library"),
    [
        pytest.param(own, library, marks=pytest.mark.slow if (name, library) in FURTHER else ())
        for name, own in ENGINES.items()
        for library in LIBRARIES
    ],
)
def test_the_same_network_in_any_library(engine: Any, library: str) -> None:
    expected = plain_run()
    start, loss, back = LIBRARIES[library]()
    seen: list[Any] = []
    look = lambda x, y: seen.append(jax.tree.structure(x)) or {"loss": loss(x, ROWS[0])}
    run = rk.solve(rk.SingleLevel(loss), CLIENTS, METHOD, start, **HOW, engine=engine, evaluate=look, keep_best="loss")
    assert run.best is not None
    for found in (run.x, run.best.x, run.state.x):
        assert jax.tree.structure(found) == jax.tree.structure(start)
    assert set(seen) == {jax.tree.structure(start)}
    for name, value in back(run.x).items():
        np.testing.assert_allclose(value, expected.x[name], rtol=1e-12)
    sent = run.exchanges.set_index("name").loc["x", "bytes_up"]
    assert sent == expected.exchanges.set_index("name").loc["x", "bytes_up"]  # arrays alone are sent


@pytest.mark.slow
@pytest.mark.parametrize("place", ["x", "y"])
def test_a_module_at_either_level(place: str) -> None:
    """And with a set that it is kept in, and in a printed plan."""
    rows = [{"a": r["a"], "t": r["t"]} for r in ROWS]
    clients = rk.Clients(lower=rows, upper=rows[::-1])
    net, _, back = equinox()
    score = lambda z, a: jnp.tanh(a @ z["w"].T) @ z["v"] if isinstance(z, dict) else jax.vmap(z)(a)
    penalty = lambda z: sum(jnp.sum(a**2) for a in jax.tree.leaves(eqx.filter(z, eqx.is_inexact_array)))

    def problem(box: Any) -> Any:
        return rk.Bilevel(
            upper=lambda x, y, b: squares(score(x, b["a"]) + score(y, b["a"]), b),
            lower=lambda x, y, b: squares(score(x, b["a"]) * score(y, b["a"]), b) + penalty(y),
            project_upper=box,
        )

    method = rk.FedNest(upper_step=0.1, lower_step=0.05, neumann_terms=2, hessian_step=0.1, batch_size=2)
    start = (net, PLAIN) if place == "x" else (PLAIN, net)
    clip = lambda z: jax.tree.map(lambda a: jnp.clip(a, -0.9, 0.9) if eqx.is_inexact_array(a) else a, z)
    run = rk.solve(problem(clip), clients, method, start, rounds=2, seed=3)
    plain = rk.solve(problem(clip), clients, method, (PLAIN, PLAIN), rounds=2, seed=3)
    x, y = (back(run.x), run.y) if place == "x" else (run.x, back(run.y))
    for name in PLAIN:
        np.testing.assert_allclose(x[name], plain.x[name], rtol=1e-12)
        np.testing.assert_allclose(y[name], plain.y[name], rtol=1e-12)
    assert max(np.abs(x[name]).max() for name in PLAIN) <= 0.9
    assert "are sent: x, y (144 bytes)" in str(rk.explain(problem(clip), clients, method, start))


def test_penalties_and_chains_take_the_model_too() -> None:
    net = equinox()[0]
    total = lambda z: sum(jnp.sum(a) for a in jax.tree.leaves(eqx.filter(z, eqx.is_inexact_array)))
    loss = lambda z, b: total(z) * jnp.mean(b)
    problems = {
        "x": rk.SingleLevel(loss, penalty=lambda x: total(x) ** 2),
        "xy": rk.Bilevel(*[lambda x, y, b: loss(x, b) + loss(y, b)] * 2, penalty=lambda x, y: total(x) * total(y)),
        "xv": rk.MultiLevel((loss, lambda v, b: v + jnp.mean(b)), lambda v: v**2, extra=loss),
    }
    batch, values = jnp.arange(3.0), (jnp.ones(()), jnp.ones(()))
    for names, problem in problems.items():
        x, y = net, {"x": (), "xy": net, "xv": values}[names]
        adapted = variables.adapt(problem, net if names == "x" else (x, y))
        at = adapted.init if isinstance(adapted.init, tuple) else (adapted.init, ())
        for name in ("f", "g", "r"):
            if hasattr(problem, name):
                ours, plain = getattr(adapted.problem, name)(*at, batch), getattr(problem, name)(x, y, batch)
                np.testing.assert_allclose(ours, plain, err_msg=f"{names}, {name}")


def test_what_is_no_variable_is_kept() -> None:
    key = jax.random.key(1)
    model = {"w": np.ones(2), "f": jnp.tanh, "on": True, "word": "relu", "nothing": None, "key": key}
    taken = variables.adapt(rk.SingleLevel(lambda x, b: x["w"].sum()), model)
    assert isinstance(taken.init, variables.Variables)
    assert taken.init.names == ("['w']",)
    whole = taken.whole({"a": taken.init})["a"]
    assert (whole["f"], whole["on"], whole["word"], whole["nothing"]) == (jnp.tanh, True, "relu", None)
    assert whole["key"] is key


def test_two_models_with_the_same_names_keep_what_is_their_own() -> None:
    net = equinox()[0]
    other = eqx.tree_at(lambda n: n.activation, net, jnp.sin)
    taken = variables.adapt(rk.Bilevel(lambda x, y, b: 0.0, lambda x, y, b: 0.0), (net, other))
    x, y = taken.whole(jax.tree.map(lambda a: 2 * a, taken.init))
    assert (x.activation, y.activation) == (jnp.tanh, jnp.sin)
    np.testing.assert_array_equal(x.v, 2 * np.ones(3))


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (
            {"w": np.array([1, 2]), "v": np.ones(2)},
            r"^init: x\['w'\] must be floating point; its type is int64\. Use \.astype",
        ),
        ({"f": jnp.tanh, "word": "relu"}, "^init: x"),
        ({}, "must have at least one array"),
        (eqx.nn.Lambda(jnp.tanh), "^init: x"),
    ],
)
def test_models_without_variables(start: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rk.solve(rk.SingleLevel(by_hand), CLIENTS, METHOD, start, rounds=1)


# Losses that are random.


def noisy(x: Any, batch: Any, key: Any) -> Any:
    kept = jax.random.bernoulli(key, 0.5, batch["a"].shape)
    return squares((jnp.where(kept, batch["a"], 0) / 0.5) @ x, batch)


RANDOM = {
    "FedAvg": METHOD,
    "whole data": rk.FedAvg(step=0.1, local_steps=2),
    "FedSVRG": rk.FedSVRG(step=0.1, local_steps=2, batch_size=2),
    "sample by sample": rk.FastDRO(step=0.1, batch_size=2),
}


@pytest.mark.parametrize("name", ["FedAvg", *(pytest.param(name, marks=pytest.mark.slow) for name in [*RANDOM][1:])])
def test_a_random_loss_is_the_same_on_every_engine(name: str) -> None:
    run = lambda engine: rk.solve(rk.SingleLevel(noisy), CLIENTS, RANDOM[name], np.ones(2), **HOW, engine=engine)
    here, there = run(rk.Simulation()), run(rk.Federation())
    np.testing.assert_allclose(here.x, there.x, rtol=1e-12)
    assert here.exchanges.equals(there.exchanges)
    if name != "FedAvg":
        np.testing.assert_allclose(here.x, run(rk.Simulation(block=1)).x, rtol=1e-12)
        np.testing.assert_allclose(here.x, run(rk.Simulation(debug=True)).x, rtol=1e-12)


@pytest.mark.slow
def test_another_seed_is_another_mask() -> None:
    run = lambda seed: rk.solve(rk.SingleLevel(noisy), CLIENTS, rk.FedAvg(step=0.1), np.ones(2), 1, seed=seed).x
    still = lambda seed: (
        rk.solve(
            rk.SingleLevel(lambda x, b: squares(b["a"] @ x, b)), CLIENTS, rk.FedAvg(step=0.1), np.ones(2), 1, seed=seed
        ).x
    )
    assert not np.allclose(run(1), run(2))
    np.testing.assert_array_equal(still(1), still(2))


def test_one_batch_has_one_key() -> None:
    """FedSVRG corrects by a gradient on the same minibatch: at the anchor both have the same mask, and cancel."""
    method = lambda size: rk.FedSVRG(step=0.1, local_steps=1, batch_size=size)
    run = lambda size: rk.solve(rk.SingleLevel(noisy), CLIENTS, method(size), np.ones(2), 1, seed=1).x
    np.testing.assert_allclose(run(1), run(2), rtol=1e-14)
    assert not np.allclose(run(1), 1)


def test_the_mean_over_masks_is_the_loss() -> None:
    """With one linear layer, E over masks of the gradient is known: dropout adds Σ a² x on its diagonal."""
    rows = [{"a": np.array([[1.0, -2.0]]), "t": np.array([0.5])}]
    step = 1e-3
    method = rk.FedAvg(step=step, local_steps=4000)
    x = np.zeros(2)
    found = rk.solve(rk.SingleLevel(noisy), rk.Clients(upper=rows), method, x, 1).x
    a, t = rows[0]["a"][0], 0.5
    matrix = np.outer(a, a) + np.diag(a**2)  # E[m mᵀ] for masks of 0 or 2
    best = np.linalg.solve(matrix, a * t)
    np.testing.assert_allclose(found, best, atol=0.05)


@pytest.mark.slow
def test_an_nnx_model_with_dropout_trains() -> None:
    start, _, _ = flax_nnx(0.3)
    graph, _ = nnx.split(Nnx(0.3))
    loss = lambda x, b, key: squares(nnx.merge(graph, x)(b["a"], key), b)
    still = lambda x, y: {"loss": squares(nnx.merge(graph, x)(ROWS[0]["a"]), ROWS[0])}
    run = rk.solve(rk.SingleLevel(loss), CLIENTS, METHOD, start, 40, evaluate=still, every=40)
    assert run.history["loss"].iloc[-1] < 0.7 * run.history["loss"].iloc[0]


@pytest.mark.slow
def test_random_functions_of_every_class() -> None:
    """Each is given a key where it has the parameter; f(value) and g(x, batch) are still told from f(value, batch)."""
    noise = lambda key: 0.01 * jax.random.normal(key, ())
    inner = lambda x, batch, key: jnp.mean(batch["a"], axis=0) * x + noise(key)
    known, own = lambda value, key: jnp.sum(value**2) + noise(key), lambda value, batch: jnp.sum(value**2)
    composed = rk.Compositional(inner, own)
    assert not rk.Compositional(inner, own).inner_is_conditional
    assert rk.Compositional(inner, known).outer_is_known
    assert composed.random == {"g", "r"}
    saddle = rk.Minimax(lambda x, y, batch, key: jnp.mean(batch["a"]) * x @ y - y @ y + x @ x + noise(key) * x[0])
    assert saddle.as_bilevel().random == {"f", "g"}
    assert rk.Minimax(lambda x, y, batch: x @ y).as_bilevel().random == frozenset()
    rows = [{"a": r["a"]} for r in ROWS]
    run = lambda engine: rk.solve(
        saddle, rk.Clients(upper=rows), rk.FedAvgSaddle(upper_step=0.1, lower_step=0.1, batch_size=2),
        (np.ones(2), np.ones(2)), 2, engine=engine,
    ).x  # fmt: skip
    np.testing.assert_allclose(run(rk.Simulation()), run(rk.Federation()), rtol=1e-12)


def test_a_random_problem_of_a_model_is_checked() -> None:
    """With one key: a mask that changed from one evaluation to the next would look like a wrong derivative."""
    net, _, _ = equinox()
    masked = lambda batch, key: {**batch, "a": jnp.where(jax.random.bernoulli(key, 0.5, (2,)), batch["a"], 0)}
    problem = rk.SingleLevel(lambda x, b, key: squares(jax.vmap(x)(masked(b, key)["a"]), b))
    assert not rk.check(problem, CLIENTS, net).bad


# As in plain JAX.


@on_first
def test_rematerialised_losses(engine: Any) -> None:
    plain = plain_run()
    saved = rk.solve(rk.SingleLevel(jax.checkpoint(by_hand)), CLIENTS, METHOD, PLAIN, **HOW, engine=engine)
    for name in PLAIN:
        np.testing.assert_allclose(saved.x[name], plain.x[name], rtol=1e-12)
    random = rk.SingleLevel(jax.checkpoint(noisy))
    assert random.random == {"f"}


@on_first
def test_half_precision(engine: Any) -> None:
    """Data and variables in bfloat16: means are taken in float32, and everything stays what it was."""
    half = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), tree)
    clients = rk.Clients(upper=[half(rows) for rows in ROWS], weights="size")
    run = rk.solve(rk.SingleLevel(by_hand), clients, METHOD, half(PLAIN), **HOW, engine=engine)
    exact = plain_run()
    for name in PLAIN:
        assert run.x[name].dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(run.x[name], float), exact.x[name], atol=0.05)


# Weights in and out.


def test_weights_go_to_a_file_and_back(tmp_path: Any) -> None:
    net, _, _ = equinox()
    other = jax.tree.map(lambda a: 0 * a if eqx.is_inexact_array(a) else a, net)
    rk.save_weights(tmp_path / "w.safetensors", net)
    assert set(rk.load_weights(tmp_path / "w.safetensors")) == {"first.weight", "v"}
    found = rk.load_weights(tmp_path / "w.safetensors", like=other)
    np.testing.assert_array_equal(found.first.weight, net.first.weight)
    assert (found.activation, found.calls) == (net.activation, 7)
    for name, array in safetensors.numpy.load_file(tmp_path / "w.safetensors").items():  # as other libraries read it
        np.testing.assert_array_equal(array, rk.load_weights(tmp_path / "w.safetensors")[name])
    safetensors.numpy.save_file({"n": np.arange(3), "a": np.ones((2, 0))}, tmp_path / "o.safetensors", {"by": "them"})
    assert {n: a.tolist() for n, a in rk.load_weights(tmp_path / "o.safetensors").items()} == {
        "n": [0, 1, 2],
        "a": [[], []],
    }
    half = {"a": jnp.ones((2, 3), jnp.bfloat16), "n": 3}
    rk.save_weights(tmp_path / "half.safetensors", half)
    assert rk.load_weights(tmp_path / "half.safetensors")["a"].dtype == jnp.bfloat16
    assert rk.load_weights(tmp_path / "half.safetensors", like={"a": np.zeros((2, 3)), "n": 3})["a"].dtype == float


def test_every_array_has_a_name_of_its_own(tmp_path: Any) -> None:
    path = tmp_path / "w.safetensors"
    for model in (
        {"a": {"b": np.array([1.0, 2])}, "a.b": np.array([7.0, 8])},
        {"a": {"b": np.array([1.0])}, "a.b": np.array([2.0]), "a\\.b": np.array([3.0]), "a\\": {"b": np.array([4.0])}},
        {"a": [np.array([1.0])], "a.0": np.array([2.0]), "": {"": np.array([3.0])}, ".": np.array([4.0])},
    ):
        rk.save_weights(path, model)
        found = rk.load_weights(path, like=jax.tree.map(np.zeros_like, model))
        assert jax.tree.map(lambda a: a.tolist(), found) == jax.tree.map(lambda a: a.tolist(), model)
        assert len(rk.load_weights(path)) == len(jax.tree.leaves(model))
    rk.save_weights(path, {"layers.0.weight": np.ones(2)})  # names from another library stay as they are
    assert set(rk.load_weights(path)) == {"layers.0.weight"}


def test_weights_need_not_lie_end_to_end(tmp_path: Any) -> None:
    turned = np.arange(6.0).reshape(2, 3).T
    rk.save_weights(tmp_path / "w.safetensors", {"w": turned, "v": turned[::2]})
    found = rk.load_weights(tmp_path / "w.safetensors")
    assert (found["w"].tolist(), found["v"].tolist()) == (turned.tolist(), turned[::2].tolist())


def test_a_weight_may_be_a_scalar(tmp_path: Any) -> None:
    model = {"bias": jnp.asarray(2.5), "w": jnp.ones(1)}
    rk.save_weights(tmp_path / "w.safetensors", model)
    found = rk.load_weights(tmp_path / "w.safetensors", like=jax.tree.map(jnp.zeros_like, model))
    assert jax.tree.map(lambda a: (a.shape, float(a.sum())), found) == {"bias": ((), 2.5), "w": ((1,), 1.0)}


def test_weights_written_by_hand_are_read(tmp_path: Any) -> None:
    """The layout of files from before: a padded header, arrays in the order of the model."""
    text = b'{"b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
    text += b'"a": {"dtype": "BF16", "shape": [], "data_offsets": [8, 10]}}'
    text += b" " * (-len(text) % 8)
    data = np.float32([1, 2]).tobytes() + np.asarray(3, jnp.bfloat16).tobytes()
    (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = rk.load_weights(tmp_path / "w.safetensors", like={"a": np.zeros(()), "b": np.zeros(2)})
    assert (found["a"].item(), found["b"].tolist()) == (3, [1, 2])


def test_weights_without_a_folder_or_a_file(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"^save_weights: .*/none must be an existing folder\. Create it"):
        rk.save_weights(tmp_path / "none" / "w.safetensors", {"w": np.ones(2)})
    with pytest.raises(FileNotFoundError, match=r"^load_weights: .*/w\.safetensors does not exist\.$"):
        rk.load_weights(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("like", "says"),
    [
        ({"w": np.ones(2), "u": np.ones(1)}, r"missing: u; unknown: v\)\. Read it with load_weights\(path\)"),
        ({"w": np.ones(2), "v": np.ones(2)}, r"v must have the model's shape \(2,\); got \(3,\)"),
    ],
)
def test_weights_that_do_not_fit(like: Any, says: str, tmp_path: Any) -> None:
    rk.save_weights(tmp_path / "w.safetensors", {"w": np.ones(2), "v": np.ones(3)})
    with pytest.raises(ValueError, match=says):
        rk.load_weights(tmp_path / "w.safetensors", like=like)


def test_files_and_models_without_weights(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"save_weights: the model \(dict\) must hold floating-point arrays"):
        rk.save_weights(tmp_path / "w.safetensors", {"n": 3})
    header = lambda text: len(text).to_bytes(8, "little") + text
    entry = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}}'
    for data in (b"", b"not weights", header(b"[]"), header(b"{}{"), header(entry), header(b'{"a": 3}')):
        (tmp_path / "w.safetensors").write_bytes(data)
        with pytest.raises(ValueError, match=r"w.safetensors is not a safetensors file"):
            rk.load_weights(tmp_path / "w.safetensors")


# The examples and the page.

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_equinox_example(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with jax.enable_x64(False):  # as a user runs it
        names = runpy.run_path(str(ROOT / "examples" / "equinox_model.py"))
        weights, history = np.asarray(names["run"].x), names["run"].history
        assert history["accuracy"].iloc[-1] > 0.9
        assert weights[:4].max() < weights[4:].min()
        assert float(names["accuracy"](names["again"])) == pytest.approx(history["accuracy"].iloc[-1])


@pytest.mark.slow
def test_the_flax_example(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with jax.enable_x64(False):
        history = runpy.run_path(str(ROOT / "examples" / "flax_model.py"))["run"].history
    assert history["accuracy"].iloc[0] < 0.85
    assert history["accuracy"].iloc[-1] > 0.95
