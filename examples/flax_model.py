"""Train a Flax NNX network: twelve clients learn a common representation, and each has its own last layer.

The upper level is the state of an `nnx.Module` with dropout: its parameters are tuned, its keys and counters are kept.
The lower level is a linear layer for each client, fitted to its few training images, and it never leaves the client.
`python examples/flax_model.py` prints the accuracy before and after.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import rookery as rk

ROUNDS = 60
rng = np.random.default_rng(0)
digits = load_digits()
images, labels = digits.data.astype(np.float32) / 16, digits.target
lower, upper = [], []
for _ in range(12):
    pair = rng.choice(10, 2, replace=False)  # every client distinguishes two digits
    own = rng.permutation(np.flatnonzero(np.isin(labels, pair)))[:80]
    rows = {"image": images[own], "label": (labels[own] == pair[1]).astype(np.int32)}
    lower.append({name: a[:20] for name, a in rows.items()})
    upper.append({name: a[20:] for name, a in rows.items()})
clients = rk.Clients(lower=lower, upper=upper)


class Representation(nnx.Module):
    """Two layers with dropout between them."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, images):
        return nnx.tanh(self.second(self.dropout(nnx.relu(self.first(images)))))


graph, state = nnx.split(Representation(nnx.Rngs(0)))


def loss(x, y, batch, key=None):
    """Return the loss; with a key, the dropout is on."""
    network = nnx.merge(graph, x)
    network.set_attributes(deterministic=key is None)
    if key is not None:
        network.dropout.rngs = nnx.Rngs(dropout=key)
    scores = network(batch["image"]) @ y["w"] + y["b"]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(scores, batch["label"]))


problem = rk.Bilevel(
    upper=loss,
    lower=lambda x, y, batch: loss(x, y, batch) + 0.05 * jnp.sum(y["w"] ** 2),
    lower_scope="client",
)
method = rk.FedBiOLocal(upper_step=0.5, lower_step=0.5, local_steps=4, neumann_terms=5, hessian_step=0.5)


@jax.jit
def accuracy(x):
    """Return the mean over the clients, each with a layer fitted to its training images."""

    def one(rows, exam):
        step = lambda _, y: jax.tree.map(lambda a, g: a - 0.5 * g, y, jax.grad(problem.lower, 1)(x, y, rows))
        y = jax.lax.fori_loop(0, 50, step, head)
        network = nnx.merge(graph, x)
        network.set_attributes(deterministic=True)
        return jnp.mean((network(exam["image"]) @ y["w"] + y["b"] > 0) == exam["label"])

    together = lambda each: jax.tree.map(lambda *a: jnp.stack(a), *each)
    return jnp.mean(jax.vmap(one)(together(lower), together(upper)))


head = {"w": np.zeros(8, np.float32), "b": np.float32(0)}
run = rk.solve(
    problem, clients, method, (state, head), ROUNDS, evaluate=lambda x, y: {"accuracy": accuracy(x)}, every=ROUNDS
)
print(run.history[["round", "exchanges", "accuracy"]].to_string(index=False))
assert isinstance(nnx.merge(graph, run.x), Representation)
