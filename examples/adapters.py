"""Learn whose text to trust while fine-tuning a frozen language model: for models of which a client trains a part.

The base model is trained on public prose, and then frozen: in bfloat16, divided among all devices, and held once for
all clients. y are low-rank adapters (LoRA), one for each weight matrix of a layer, and x has a number for each client.
Clients and server exchange x, y and F2SA's second copy of y, and nothing of the base. The text, the spoilt clients and
the model are those of `language_model.py`. FedAvg on the adapters, with all text alike, is the yardstick.

`python examples/adapters.py` is for a GPU; with `--small`, it takes a minute or two on a laptop. For a model of your
own, replace `base_model`, and `adapted` if its matrices have other names.
"""

import argparse
import time
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
import language_model as lm
import numpy as np
import optax
import pandas as pd
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rookery as rk

MATRICES = ("qkv", "mix", "up", "down")
RANK = 8
LARGE = lm.LARGE._replace(pieces=(96, 384))
NESTED, ALL = "F2SA, learnt weights", "FedAvg, all text"
STEPS = {  # of the base model, and of the adapters: see lm.Steps
    LARGE: (1e-3, lm.Steps(1e-2, 0.1, weight=0.2, multiplier=1.0)),
    lm.SMALL: (1e-2, lm.Steps(1e-2, 0.1, weight=0.1, multiplier=1.0)),
}


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


def nested_problem(base: dict, sizes: lm.Sizes, clients: rk.Clients) -> rk.Bilevel:
    """The weights of the clients above, the adapters below."""

    def upper(x, y, batch):
        return jnp.mean(lm.losses(adapted(base, y), batch["words"], sizes.heads))

    def lower(x, y, batch):
        own = lm.weights(x, clients)[batch["client"]]
        fit = jnp.mean(own * lm.losses(adapted(base, y), batch["words"], sizes.heads))
        return fit + lm.DECAY / 2 * lm.squares(y)

    return rk.Bilevel(upper, lower, project_upper=lambda x: jnp.clip(x, -5, 3))


def plain_problem(base: dict, sizes: lm.Sizes) -> rk.SingleLevel:
    """Return the problem without weights."""

    def loss(y, batch):
        fit = jnp.mean(lm.losses(adapted(base, y), batch["words"], sizes.heads))
        return fit + lm.DECAY / 2 * lm.squares(y)

    return rk.SingleLevel(loss)


def setting(name: str, base: dict, sizes: lm.Sizes, data: lm.Data, seed: int) -> lm.Setting:
    """Return the problem and the method that trains adapters: with learnt weights, or with all text alike."""
    _, steps = STEPS[sizes]
    adam, thin = optax.inject_hyperparams(optax.adam), adapters(jax.random.key(seed), base, RANK)
    common = {"local_steps": sizes.local_steps // 2, "batch_size": sizes.batch}
    found = lambda y: {"perplexity": lm.perplexity(adapted(base, y), data.test, sizes.heads)}
    if name == NESTED:
        clients = rk.Clients(lower=data.training, upper=data.checked, weights="size")
        problem, init = nested_problem(base, sizes, clients), (np.zeros(clients.n, np.float32), thin)
        method = rk.F2SA(1.0, steps.local, auxiliary_step=steps.local, multiplier=steps.multiplier, **common)
        method = rk.with_server_optimizer(method, upper=adam(steps.weight), lower=adam(steps.model))
        return lm.Setting(problem, clients, method, init, lambda x, y: found(y) | lm.of_kinds(x, data))
    both = zip(data.training, data.checked, strict=True)
    texts = [{"words": np.concatenate([own["words"], few["words"]])} for own, few in both]
    clients = rk.Clients(upper=texts, weights="size")
    method = rk.with_server_optimizer(rk.FedAvg(steps.local, **common), upper=adam(steps.model))
    return lm.Setting(plain_problem(base, sizes), clients, method, thin, lambda y, _: found(y))


def main() -> None:
    """Train the base, freeze it, and fine-tune adapters with both methods."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a base of 32,000 parameters and 16 clients")
    parser.add_argument("--rounds", type=int, help="rounds of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--minutes", type=float, default=np.inf, help="after so many minutes, stop")
    parser.add_argument("--out", type=Path, default=Path("adapters"), help="folder to write to")
    options = parser.parse_args()
    sizes, begin = lm.SMALL if options.small else LARGE, time.perf_counter()
    rounds = options.rounds or (100 if options.small else 300)
    late = lambda: time.perf_counter() - begin > 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)

    base = frozen(base_model(sizes, STEPS[sizes][0], steps=300))
    size = lambda parts: sum(a.size for a in jax.tree.leaves(parts))
    thin = size(jax.eval_shape(lambda: adapters(jax.random.key(0), base, RANK)))
    print(f"base: {size(base):,} parameters, frozen in {base['out'].dtype} on {jax.device_count()} device(s)")
    print(f"adapters: {thin:,} parameters ({100 * thin / size(base):.1f} % of the base)")
    print(f"a client receives and sends back, in a round of F2SA, x, y and z: {sizes.clients} + 2 × {thin:,} numbers")
    finished, learnt = [], []
    for seed in options.seeds:
        data = lm.make(sizes, seed)
        start = float(lm.perplexity(base, data.test, sizes.heads))
        print(f"seed {seed}: perplexity of the base {start:.1f}", flush=True)
        for name in (NESTED, ALL):
            if late():
                break
            made = setting(name, base, sizes, data, seed)
            run = lm.run_rounds(made, sizes, rounds, max(1, rounds // 20), seed, callbacks=[lambda run: late()])
            finished.append(run.history.assign(method=name, seed=seed, base=start))
            pd.concat(finished).to_csv(options.out / "histories.csv", index=False)
            if name == NESTED:
                learnt.append(lm.weights_of(run.x, data).assign(seed=seed))
                pd.concat(learnt).to_csv(options.out / "weights.csv", index=False)
    if not finished:
        return print("No run was finished: give it more minutes.")
    print(lm.table(pd.concat(finished)).to_string(index=False))
    print(pd.concat(learnt).groupby("kind")["weight"].agg(["mean", "min", "max"]).round(3).to_string())
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
