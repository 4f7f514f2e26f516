"""Learn a start from which one step is enough: MAML (Finn et al. 2017) on sine waves, different ones at each client.

A task is a wave a·sin(t + b) seen at ten points; the model takes one gradient step on them and is judged on ten others.
We learn its start: min over x of the mean over tasks of loss_query(x − α∇loss_support(x)). The inner function belongs
to the task, so nothing has to be tracked from step to step: automatic differentiation goes through it.
"""

import jax
import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery.problems.models import MLP

STEP, POINTS = 0.1, 10
rng = np.random.default_rng(0)
model = MLP((1, 40, 40, 1))


def waves(tasks, amplitudes):
    """Return tasks in rows, each with points to adapt to and points to be judged on."""
    a, b = rng.uniform(*amplitudes, size=(tasks, 1, 1)), rng.uniform(0, np.pi, size=(tasks, 1, 1))
    t = rng.uniform(-3, 3, size=(tasks, 2 * POINTS, 1))
    y = a * np.sin(t + b)
    halves = {"t": t[:, :POINTS], "y": y[:, :POINTS]}, {"t": t[:, POINTS:], "y": y[:, POINTS:]}
    return jax.tree.map(lambda leaf: leaf.astype(np.float32), dict(zip(("support", "query"), halves, strict=True)))


clients = rk.Clients(upper=[waves(100, (0.2 + 0.4 * i, 0.6 + 0.4 * i)) for i in range(5)])  # from quiet to loud
unseen = waves(200, (0.2, 2.2))

loss = lambda x, points: jnp.mean((model.apply(x, points["t"]) - points["y"]) ** 2)
adapted = lambda x, points: jax.tree.map(lambda p, g: p - STEP * g, x, jax.grad(loss)(x, points))
after = lambda x, rows: jnp.mean(jax.vmap(lambda row: loss(adapted(x, row["support"]), row["query"]))(rows))
before = lambda x, rows: jnp.mean(jax.vmap(lambda row: loss(x, row["query"]))(rows))

method = rk.FedAvg(step=0.05, local_steps=10, batch_size=8)
start = model.init(jax.random.key(0))
meta = rk.solve(rk.SingleLevel(after), clients, method, start, rounds=80).x
plain = rk.solve(rk.SingleLevel(before), clients, method, start, rounds=80).x

errors = {
    name: [float(jax.jit(at)(x, unseen)) for at in (before, after)] for name, x in (("MAML", meta), ("plain", plain))
}
for name, (without, one) in errors.items():
    print(f"{name:>5} training: error on unseen waves {without:.2f}, after one step {one:.2f}")
