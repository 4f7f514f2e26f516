"""The examples of a language model and of its adapters, and their page."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import rookery as rk
from rookery.plan.costs import costs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both modules, and tiny sizes with their text."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import adapters
    import language_model as lm

    tiny = lm.Sizes(8, 2, 2, 8, 6, (2, 6), 2, cohort=3, local_steps=2, batch=2, rounds=1)
    monkeypatch.setitem(lm.CHOSEN, tiny, lm.CHOSEN[lm.SMALL])
    monkeypatch.setitem(adapters.STEPS, tiny, adapters.STEPS[lm.SMALL])
    return lm, adapters, tiny, lm.make(tiny, 0)


def count(parts: Any) -> int:
    return sum(a.size for a in jax.tree.leaves(parts))


def test_clients_send_adapters_and_nothing_of_the_base(examples: Any) -> None:
    """x and two copies of the adapters; the base is rounded, and divided among the devices."""
    lm, adapters, tiny, data = examples
    shapes = jax.eval_shape(lambda: lm.transformer(jax.random.key(0), tiny))
    base = adapters.frozen(jax.tree.map(lambda a: np.zeros(a.shape, np.float32), shapes))
    with jax.enable_x64(False):
        made = adapters.setting(adapters.NESTED, base, tiny, data, 0)
        (entry,) = costs(rk.explain(*made[:4], cohort=3), []).values()
    assert entry.up == 4 * (tiny.clients + 2 * count(made.init[1]))
    assert {a.dtype for a in jax.tree.leaves(base)} == {jnp.dtype(jnp.bfloat16)}
    assert len(base["layers"]["up"].sharding.device_set) == jax.device_count() > 1


@pytest.mark.slow
def test_adapters_change_nothing_at_first(examples: Any) -> None:
    lm, adapters, tiny, data = examples
    base = adapters.frozen(lm.transformer(jax.random.key(0), tiny))
    thin = adapters.adapters(jax.random.key(1), base, adapters.RANK)
    rows = jnp.asarray(data.test[:2])
    losses = lambda model: lm.losses(model, rows, tiny.heads)
    np.testing.assert_array_equal(losses(adapters.adapted(base, thin)), losses(base))


def test_equal_weights_at_first(examples: Any) -> None:
    lm, _, _, data = examples
    clients = rk.Clients(lower=data.training, upper=data.checked, weights="size")
    np.testing.assert_allclose(lm.weights(jnp.zeros(clients.n), clients), 0.5**0.25)
    x = np.linspace(-5, 3, clients.n)
    learnt = lm.weights_of(x, data)
    assert np.average(learnt["weight"], weights=learnt["pieces"]) == pytest.approx(1)
    ratios = learnt["weight"] / lm.weights(x, clients)
    np.testing.assert_allclose(ratios, ratios[0])


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> pd.DataFrame:
    """Run an example at its small size; return the histories."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [name, "--small", "--seeds", "2", "--out", str(folder), *options])
    with jax.enable_x64(False):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return pd.read_csv(folder / "histories.csv")


@pytest.mark.slow
def test_the_language_model_learns_whose_text_to_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = run("language_model.py", tmp_path, monkeypatch).groupby("method")["perplexity"].last()
    assert ends["F2SA, learnt weights"] < 0.95 * ends["FedAvg, all text"]
    weights = pd.read_csv(tmp_path / "weights.csv").groupby("kind")["weight"]
    assert weights.max()[["shuffled", "random", "backwards"]].max() < 0.3 < weights.min()["clean"]
    assert (tmp_path / "language-model.png").stat().st_size > 10_000


@pytest.mark.slow
def test_adapters_learn_whose_text_to_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = run("adapters.py", tmp_path, monkeypatch, "--rounds", "60")
    ends = history.groupby("method")["perplexity"].last()
    assert ends["F2SA, learnt weights"] < ends["FedAvg, all text"] < 0.5 * history["base"].min()
    weights = pd.read_csv(tmp_path / "weights.csv").groupby("kind")["weight"].mean()
    assert weights[["shuffled", "random", "backwards"]].max() < 0.5 < weights["clean"]


def test_the_page_shows_the_examples() -> None:
    code = "".join((ROOT / "examples" / f"{name}.py").read_text() for name in ("language_model", "adapters"))
    page = (ROOT / "docs" / "language-model.md").read_text()
    for shown in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        for line in filter(None, map(str.strip, shown.splitlines())):
            assert line.removeprefix("problem = ") in code, line
