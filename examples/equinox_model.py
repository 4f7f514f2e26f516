"""Train an Equinox network with dropout: ten clients classify handwritten digits, and some of their labels are wrong.

Four of ten clients have a third of their labels wrong. Each client has a weight in the training loss of a network with
a convolution; the weights are tuned against a small clean set, a part of which every client holds. The network itself
is the lower variable; the upper variable is one number for each client. `python examples/equinox_model.py` prints the
weights, and saves the network as model.safetensors.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import rookery as rk

ROUNDS = 60
rng = np.random.default_rng(0)
digits = load_digits()
images, labels = digits.images[:, None].astype(np.float32) / 16, digits.target
train, clean, test = np.split(rng.permutation(len(labels)), [1200, 1400])
lower, upper = [], []
for client, (own, few) in enumerate(zip(np.array_split(train, 10), np.array_split(clean, 10), strict=True)):
    wrong = rng.random(len(own)) < (1 / 3 if client < 4 else 0)
    given = np.where(wrong, rng.integers(0, 10, len(own)), labels[own])
    lower.append({"image": images[own], "label": given, "client": np.full(len(own), client)})
    upper.append({"image": images[few], "label": labels[few]})
clients = rk.Clients(lower=lower, upper=upper)


class Network(eqx.Module):
    """A convolution, a hidden layer with dropout, and ten scores; for one image."""

    convolution: eqx.nn.Conv2d
    hidden: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        one, two, three = jax.random.split(key, 3)
        self.convolution = eqx.nn.Conv2d(1, 8, 3, stride=2, padding=1, key=one)
        self.hidden = eqx.nn.Linear(8 * 4 * 4, 32, key=two)
        self.dropout = eqx.nn.Dropout(0.2)
        self.last = eqx.nn.Linear(32, 10, key=three)

    def __call__(self, image, key=None):
        values = jax.nn.relu(self.convolution(image)).ravel()
        return self.last(self.dropout(jax.nn.relu(self.hidden(values)), key=key, inference=key is None))


def losses(network, batch, keys=None):
    """Return the cross-entropy of each sample."""
    scores = jax.vmap(network)(batch["image"]) if keys is None else jax.vmap(network)(batch["image"], keys)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"])


def training(weights, network, batch, key):
    """Return the training loss, weighted by client; `key` is for the dropout."""
    keys = jax.random.split(key, len(batch["label"]))
    decay = sum(jnp.sum(a**2) for a in jax.tree.leaves(eqx.filter(network, eqx.is_inexact_array)))
    return jnp.mean(jax.nn.sigmoid(weights[batch["client"]]) * losses(network, batch, keys)) + 5e-4 * decay


problem = rk.Bilevel(upper=lambda weights, network, batch: jnp.mean(losses(network, batch)), lower=training)
method = rk.FedBiO(upper_step=5.0, lower_step=0.3, linear_step=0.3, local_steps=5, batch_size=32)
exam = {"image": jnp.asarray(images[test]), "label": jnp.asarray(labels[test])}


@jax.jit
def accuracy(network):
    """Return the accuracy on images that no client has."""
    return jnp.mean(jnp.argmax(jax.vmap(network)(exam["image"]), axis=1) == exam["label"])


start = (np.zeros(10, np.float32), Network(jax.random.key(0)))
watch = lambda weights, network: {"accuracy": accuracy(network)}
run = rk.solve(problem, clients, method, start, rounds=ROUNDS, evaluate=watch, every=20)
rk.save_weights("model.safetensors", run.y)
again = rk.load_weights("model.safetensors", like=start[1])
print(run)
print("weights of clients with wrong labels:", np.round(jax.nn.sigmoid(run.x[:4]), 2))
print("weights of the others:               ", np.round(jax.nn.sigmoid(run.x[4:]), 2))
print("the saved network:", float(accuracy(again)))
