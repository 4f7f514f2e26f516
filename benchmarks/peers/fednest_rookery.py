"""FedNest in Rookery."""

import jax
import jax.numpy as jnp
import networks_jax as networks
import numpy as np

import rookery as rk
import tasks

options = tasks.arguments("fednest")
task = options.task
parts, test = tasks.shards(options.data)


def loss(x, y, batch):
    """Return the cross-entropy of a hidden layer x and a classifier y."""
    return jnp.mean(networks.losses(networks.scores({"hidden": x, "last": y}, batch["image"]), batch["label"]))


def penalised(x, y, batch):
    """Return the same plus the authors' penalty on y."""
    return loss(x, y, batch) + 0.05 * sum(jnp.linalg.norm(value) for value in y.values())


clients = rk.Clients(
    lower=[{"image": part[0], "label": part[1]} for part in parts],
    upper=[{"image": part[2], "label": part[3]} for part in parts],
)
epochs = rk.Epochs(5)
method = rk.FedNest(
    upper_step=task.step, lower_step=task.step, hessian_step=task.step, lower_local_steps=epochs, neumann_terms=5,
    batch_size=task.batch,
)  # fmt: skip
start = networks.init("mlp")

clock = tasks.Clock(task, skip=True)
run = rk.solve(
    rk.Bilevel(upper=loss, lower=penalised), clients, method, (start["hidden"], start["last"]), rounds=task.rounds,
    cohort=task.cohort, evaluate=lambda x, y: clock.lap(lambda: networks.accuracy({"hidden": x, "last": y}, *test)),
)  # fmt: skip
clock.print(
    ["jax"], parameters=sum(map(np.size, jax.tree.leaves((run.x, run.y)))), clients=clients.n, cohort=task.cohort,
    batch=method.batch_size, steps=5 * -(-480 // method.batch_size), rounds=run.rounds,
)  # fmt: skip
