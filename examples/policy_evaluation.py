"""Estimate the value of a policy: ten sites saw it act, some longer than others, and share none of their records.

The value of state s is estimated as φ(s)ᵀw. The Bellman residual of s, φ(s)ᵀw − E[r + γ φ(s')ᵀw | s], has a mean inside
the square that is minimised, so the problem is a composition, f(mean g). Squaring single draws of s' instead is another
problem with another solution, as the last line shows. The exact solution is least squares on the mean.
"""

import jax.numpy as jnp
import numpy as np

import rookery as rk

STATES, FEATURES, DISCOUNT = 20, 5, 0.9
rng = np.random.default_rng(0)
phi = rng.normal(size=(STATES, FEATURES))
chance = rng.dirichlet(np.full(STATES, 0.5), size=STATES)  # P(s' | s) under the policy
reward = (phi @ rng.normal(size=FEATURES))[:, None] + rng.normal(size=(STATES, STATES))


def record(samples):
    """Return rows with one transition out of every state: where it led, and its reward."""
    to = np.stack([rng.choice(STATES, size=samples, p=chance[s]) for s in range(STATES)], axis=1)
    return {"next": phi[to], "reward": reward[np.arange(STATES), to]}


sites = [record(int(samples)) for samples in rng.integers(20, 60, size=10)]
clients = rk.Clients(upper=sites, weights="size")

residuals = lambda w, rows: phi @ w - rows["reward"] - DISCOUNT * rows["next"] @ w  # for each row and state
problem = rk.Compositional(
    inner=lambda w, rows: jnp.mean(residuals(w, rows), axis=0),  # for each state, the mean over all records
    outer=lambda mean: jnp.mean(mean**2) / 2,
)
method = rk.FedNest(upper_step=0.5, lower_step=1.0)
run = rk.solve(problem, clients, method, (np.zeros(FEATURES), None), rounds=200)

pooled = {name: np.concatenate([site[name] for site in sites]) for name in sites[0]}
slope, target = phi - DISCOUNT * pooled["next"].mean(axis=0), pooled["reward"].mean(axis=0)
exact = np.linalg.lstsq(slope, target)[0]
each = (phi - DISCOUNT * pooled["next"]).reshape(-1, FEATURES)
squares = np.linalg.lstsq(each, pooled["reward"].reshape(-1))[0]  # the mean of the squares of single draws
error = float(np.linalg.norm(run.x - exact) / np.linalg.norm(exact))
print(f"Relative distance to the exact solution: {error:.1e}")
print(f"Without the mean inside the square it would be: {np.linalg.norm(squares - exact) / np.linalg.norm(exact):.2f}")
