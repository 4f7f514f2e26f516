"""Learn whose text to trust while fine-tuning a frozen language model: for models of which a client trains a part.

The base model is trained on public prose, and then frozen: in bfloat16, divided among all devices, and held once for all
clients. y are low-rank adapters (LoRA), one per weight matrix, and x has a weight for each client. Clients and server
exchange only these. The text, the spoilt clients and the model are those of `language_model.py`.

`python examples/adapters.py` takes a minute on a GPU; with `--small`, half a minute on a laptop.
"""

import argparse
from functools import partial
from random import Random

import jax
import jax.numpy as jnp
import language_model as lm
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rookery as rk

MATRICES = ("qkv", "mix", "up", "down")


def public_text(pieces: int, context: int) -> np.ndarray:
    """Return clean prose: what the base model knows. It has seen neither sums nor brackets."""
    rng, rows = Random(-1), []
    while len(rows) < pieces:
        words: list[str] = []
        while len(words) <= context:
            made = lm.sentence(rng)
            words += made if made[1] in lm.CODE and not {"plus", "(", "[", "<"} & set(made) else []
        rows.append([lm.CODE[word] for word in words[: context + 1]])
    return np.array(rows, np.int32)


def base_model(sizes: lm.Sizes, step: float, steps: int) -> dict:
    """Train a base model on public text; with a model of your own, load it here."""
    rows, adam = jnp.asarray(public_text(2048, sizes.context)), optax.adam(step)
    loss = lambda model, batch: jnp.mean(lm.losses(model, batch, sizes.heads))

    @jax.jit
    def train(model):
        def one(carry, key):
            model, moments = carry
            batch = jax.random.choice(key, rows, (64,))
            change, moments = adam.update(jax.grad(loss)(model, batch), moments)
            return (optax.apply_updates(model, change), moments), None

        keys = jax.random.split(jax.random.key(0), steps)
        return jax.lax.scan(one, (model, adam.init(model)), keys)[0][0]

    return train(lm.transformer(jax.random.key(1), sizes))


def frozen(model: dict) -> dict:
    """Round a model to bfloat16, and divide it among all devices along the last axis of its arrays."""
    devices = Mesh(jax.devices(), ("all",))

    def place(a):
        parts = [None] * (a.ndim - 1) + ["all" if a.shape[-1] % jax.device_count() == 0 else None]
        return jax.device_put(a.astype(jnp.bfloat16), NamedSharding(devices, PartitionSpec(*parts)))

    return jax.tree.map(place, model)


def adapters(key: jax.Array, base: dict, rank: int) -> dict:
    """Return two thin matrices for each matrix of a layer; their product is zero at first."""

    def thin(key, a):
        layers, wide, narrow = a.shape
        down = wide**-0.5 * jax.random.normal(key, (layers, wide, rank))
        return {"down": down, "up": jnp.zeros((layers, rank, narrow))}

    keys = jax.random.split(key, len(MATRICES))
    return {name: thin(k, base["layers"][name]) for k, name in zip(keys, MATRICES, strict=True)}


def adapted(base: dict, y: dict) -> dict:
    """Return the model whose matrices are the frozen ones and their adapters."""
    layers = {name: (base["layers"][name], thin["down"], thin["up"]) for name, thin in y.items()}
    return base | {"layers": base["layers"] | layers}


def problem_of(base: dict, sizes: lm.Sizes, clients: rk.Clients) -> rk.Bilevel:
    """The weights of the clients above, the adapters below."""

    def upper(x, y, batch):
        return jnp.mean(lm.losses(adapted(base, y), batch["words"], sizes.heads))

    def lower(x, y, batch):
        weights = jax.nn.sigmoid(x) / jnp.sum(clients.weights * jax.nn.sigmoid(x))  # 1 on average
        fit = jnp.mean(weights[batch["client"]] * lm.losses(adapted(base, y), batch["words"], sizes.heads))
        return fit + lm.DECAY / 2 * lm.squares(y)

    return rk.Bilevel(upper, lower, project_upper=lambda x: jnp.clip(x, -5, 3))


def fine_tune(base: dict, sizes: lm.Sizes, data: lm.Data, steps: dict, rounds: int, seed: int, callbacks=()):
    """Learn adapters and weights."""
    clients = rk.Clients(lower=data.training, upper=data.checked, weights="size")
    adam = optax.inject_hyperparams(optax.adam)
    step = steps["local"]
    method = rk.F2SA(1.0, step, auxiliary_step=step, multiplier=1.0, local_steps=2, batch_size=sizes.batch)
    method = rk.with_server_optimizer(method, upper=adam(steps["weight"]), lower=adam(steps["model"]))
    init = np.zeros(clients.n, np.float32), adapters(jax.random.key(seed), base, rank=8)
    watch = lambda x, y: {"perplexity": lm.perplexity(adapted(base, y), data.test, sizes.heads)}
    run = {"cohort": sizes.cohort, "evaluate": watch, "every": max(1, rounds // 10), "seed": seed}
    engine = rk.Simulation(block=sizes.cohort)
    return rk.solve(problem_of(base, sizes, clients), clients, method, init, rounds, **run, engine=engine, callbacks=callbacks)
