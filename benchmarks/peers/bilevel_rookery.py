"""stocBiO in Rookery, with a single client."""

import jax.numpy as jnp
import networks_jax as networks
import numpy as np

import rookery as rk
import tasks

options = tasks.arguments("stocbio")
task = options.task
data = tasks.covertype(options.data)
problem = rk.Bilevel(upper=networks.upper_loss, lower=networks.lower_loss)
clients = rk.Clients(lower=[{"x": data["x"], "y": data["y"]}], upper=[{"x": data["x_val"], "y": data["y_val"]}])
method = rk.StocBiO(
    upper_step=task.step / task.ratio, lower_step=task.step, lower_rounds=task.steps, neumann_terms=task.steps,
    hessian_step=task.step, batch_size=task.batch,
)  # fmt: skip
start = jnp.full(7, -2.0), jnp.zeros((54, 7))
score = lambda x, z: clock.lap(lambda: networks.cover_accuracy(z, data["x_test"], data["y_test"]))

clock = tasks.Clock(task, skip=True)
run = rk.solve(problem, clients, method, start, rounds=task.rounds, every=task.every, evaluate=score)
clock.print(
    ["jax"],
    parameters=np.size(run.x) + np.size(run.y),
    clients=clients.n,
    cohort=1,
    batch=method.batch_size,
    steps=method.lower_rounds,
    rounds=run.rounds,
)
