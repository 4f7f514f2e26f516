"""From problem to picture: ten hospitals learn together which columns of their records to trust, and share no record.

A linear model tells benign tumours from malignant ones. Thirty columns are real measurements, thirty are pure noise.
Each column has its own penalty. The lower level fits the model to training records; the upper level tunes the sixty
penalties on validation records, along the hypergradient: the derivative of the validation loss by the penalties,
through the fitted model. `python examples/hyperparameters.py` writes the picture, hyperparameters.png.
"""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer

import rookery as rk

rng = np.random.default_rng(0)
columns, benign = load_breast_cancer(return_X_y=True)
columns = np.hstack([(columns - columns.mean(0)) / columns.std(0), rng.normal(size=columns.shape)])
parts = [{"a": columns[i], "t": 2.0 * benign[i] - 1} for i in np.array_split(rng.permutation(len(benign)), 20)]
clients = rk.Clients(lower=parts[:10], upper=parts[10:])  # ten hospitals, each with training and validation records

loss = lambda x, y, batch: jnp.mean(jnp.logaddexp(0, -batch["t"] * (batch["a"] @ y)))
penalised = lambda x, y, batch: loss(x, y, batch) + jnp.sum(jnp.exp(x) * y**2) / 2  # exp(x): a penalty per column
problem = rk.Bilevel(upper=loss, lower=penalised, project_upper=lambda x: jnp.clip(x, jnp.log(0.01), 0))
# The upper step is large because the validation loss hardly changes with the logarithm of one penalty. The linear
# system in the hypergradient is solved by conjugate gradients (cg).
method = rk.FedNest(upper_step=30.0, lower_step=0.3, lower_local_steps=10, neumann="cg")
watch = lambda x, y: {"loss": loss(x, y, clients.upper.rows)}
run = rk.solve(problem, clients, method, (np.full(60, np.log(0.1)), np.zeros(60)), rounds=150, evaluate=watch)

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=[1, 1.8], layout="constrained")
left.plot(run.history["round"][10:], run.history["loss"][10:], color="black")
left.set(title="The model errs less and less …", xlabel="round", ylabel="loss on validation records")
for i, colour in ((slice(0, 30), "tab:blue"), (slice(30, 60), "tab:orange")):
    right.bar(np.arange(60)[i], np.sort(np.exp(run.x[i])) - 0.1, bottom=0.1, color=colour)
right.set(title="… as it learns which columns to trust", ylabel="penalty of each column", yscale="log")
right.set(xticks=[14.5, 44.5], xticklabels=["30 real measurements", "30 columns of noise"])
right.set(yticks=[0.01, 0.1, 1], yticklabels=["0.01\n(trusted)", "0.1\n(start)", "1\n(ignored)"])
fig.savefig("hyperparameters.png", dpi=150)
