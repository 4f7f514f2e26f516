"""stocBiO, SOBA and MRBO on covertype, and F2SA on the quadratics, in Rookery with a single client."""

import jax.numpy as jnp
import networks_jax as networks
import numpy as np

import rookery as rk
import tasks

options = tasks.arguments("stocbio", "soba", "mrbo", "f2sa")
task = options.task
falling = lambda size, power: lambda k: size / (k + 1.0) ** power
lower, upper = task.step, task.step / task.ratio
if options.name == "stocbio":
    method = rk.StocBiO(
        upper, lower, lower_rounds=task.steps, neumann_terms=task.steps, hessian_step=lower, batch_size=task.batch
    )
elif options.name == "soba":
    method = rk.FedBiO(
        upper_step=falling(upper, 0.5), lower_step=falling(lower, 0.5), linear_step=falling(lower, 0.5),
        local_steps=1, shared_batch=True, batch_size=task.batch,
    )  # fmt: skip
elif options.name == "mrbo":
    method = rk.MRBO(
        upper, lower, delta=1.0, offset=1.0, c_upper=0.5, c_lower=0.5, neumann_terms=10, hessian_step=lower,
        batch_size=task.batch,
    )  # fmt: skip

data = tasks.covertype(options.data)
problem = rk.Bilevel(upper=networks.upper_loss, lower=networks.lower_loss)
clients = rk.Clients(lower=[{"x": data["x"], "y": data["y"]}], upper=[{"x": data["x_val"], "y": data["y_val"]}])
start = jnp.full(7, -2.0), jnp.zeros((54, 7))
score = lambda x, z: {"score": networks.cover_accuracy(z, data["x_test"], data["y_test"])}

clock = tasks.Clock(task)
run = rk.solve(problem, clients, method, start, rounds=task.rounds, every=task.every, evaluate=score)
clock.read(run.history, "score")
print(run.history)
clock.print(
    ["jax"],
    parameters=np.size(run.x) + np.size(run.y),
    clients=clients.n,
    cohort=1,
    batch=method.batch_size,
    steps=task.steps,
    rounds=run.rounds,
)
