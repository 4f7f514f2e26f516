"""FedAvg in Rookery."""

import jax
import jax.numpy as jnp
import networks_jax as networks
import numpy as np

import rookery as rk
import tasks

options = tasks.arguments("mlp", "cnn")
task = options.task
parts, test = tasks.digits(options.data) if options.name == "mlp" else tasks.patterns()

loss = lambda x, batch: jnp.mean(networks.losses(networks.scores(x, batch["image"]), batch["label"]))
clients = rk.Clients(upper=[{"image": images, "label": labels} for images, labels in parts])
method = rk.FedAvg(step=task.step, local_steps=task.steps, batch_size=task.batch)
start = networks.init(options.name)

clock = tasks.Clock(task, skip=True)
run = rk.solve(
    rk.SingleLevel(loss), clients, method, start, rounds=task.rounds, cohort=task.cohort,
    evaluate=lambda x, y: clock.lap(lambda: networks.accuracy(x, *test)),
)  # fmt: skip
clock.print(
    ["jax"],
    parameters=sum(map(np.size, jax.tree.leaves(run.x))),
    clients=clients.n,
    cohort=task.cohort,
    batch=method.batch_size,
    steps=method.local_steps,
    rounds=run.rounds,
)
