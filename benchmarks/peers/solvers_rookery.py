"""SOBA and MRBO on covertype and F2SA on the quadratics, in Rookery with a single client.

Steps fall as in benchmark_bilevel, whose recursions these are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import networks_jax as networks
import numpy as np

import rookery as rk
import tasks

options = tasks.arguments("soba", "mrbo", "f2sa")
task = options.task
lower, upper, batch = task.step, task.step / task.ratio, task.batch
falling = lambda size, power: lambda k: size / (k + 1.0) ** power
if options.name == "soba":
    steps = {name: falling(lower, 0.5) for name in ("lower_step", "linear_step")}
    method: Any = rk.FedBiO(upper_step=falling(upper, 0.5), **steps, local_steps=1, shared_batch=True, batch_size=batch)
elif options.name == "mrbo":
    method = rk.MRBO(upper, lower, 1.0, 1.0, 0.5, 0.5, neumann_terms=10, hessian_step=lower, batch_size=batch)
else:
    grown = jnp.cumsum(jnp.r_[1.0, 0.01 / jnp.arange(1.0, task.rounds + 1) ** (1 / 7)])
    multiplier = lambda k: grown[jnp.asarray(k, int)]
    method = rk.F2SA(
        upper_step=falling(upper, 4 / 7), lower_step=lambda k: falling(lower, 5 / 7)(k) * multiplier(k),
        auxiliary_step=falling(lower, 4 / 7), multiplier=multiplier, lower_rounds=task.steps, batch_size=batch,
    )  # fmt: skip

if options.name == "f2sa":
    inner, outer, score = tasks.quadratics(options.code)

    def quadratic(x: Any, z: Any, rows: Any) -> Any:
        """Return the mean of quadratic functions of z and x."""
        one = lambda r: 0.5 * z @ r[0] @ z + 0.5 * x @ r[1] @ x + x @ r[2] @ z + r[3] @ z + r[4] @ x
        return jnp.mean(jax.vmap(one)(rows))

    problem = rk.Bilevel(upper=quadratic, lower=quadratic)
    clients = rk.Clients(lower=[inner], upper=[outer])
    start = jnp.full(10, -2.0), jnp.zeros(100)
else:
    data = tasks.covertype(options.data)
    problem = rk.Bilevel(upper=networks.upper_loss, lower=networks.lower_loss)
    clients = rk.Clients(lower=[{"x": data["x"], "y": data["y"]}], upper=[{"x": data["x_val"], "y": data["y_val"]}])
    start = jnp.full(7, -2.0), jnp.zeros((54, 7))
    score = lambda x, z: networks.cover_accuracy(z, data["x_test"], data["y_test"])

clock = tasks.Clock(task, skip=True)
run = rk.solve(
    problem, clients, method, start, rounds=task.rounds, every=task.every,
    evaluate=lambda x, z: clock.lap(lambda: score(x, z)),
)  # fmt: skip
clock.print(
    ["jax"],
    parameters=np.size(run.x) + np.size(run.y),
    clients=clients.n,
    cohort=1,
    batch=batch,
    steps=task.steps,
    rounds=run.rounds,
)
