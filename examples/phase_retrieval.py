"""Recover a signal from intensities only: eight stations emit it through their gratings, and one detector sees the sum.

The detector's j-th reading is b_j = mean_k ⟨a_kj, x⟩² over the stations k. No station knows another's grating a_k, and
none can fit a reading alone, since a reading is a mean over stations. The problem is therefore a composition,
f(mean g_k(x)), where g_k are the intensities behind a station's grating and f is the squared misfit. Its solutions are
x and −x: the sign cannot be recovered.
"""

import jax.numpy as jnp
import numpy as np

import rookery as rk

STATIONS, LENGTH, READINGS = 8, 10, 400
rng = np.random.default_rng(0)
signal = rng.normal(size=LENGTH)
signal /= np.linalg.norm(signal)
gratings = rng.normal(size=(STATIONS, READINGS, LENGTH))
readings = np.mean((gratings @ signal) ** 2, axis=0)

clients = rk.Clients(upper=[{"a": own[None]} for own in gratings])
problem = rk.Compositional(
    inner=lambda x, rows: jnp.mean((rows["a"] @ x) ** 2, axis=0),  # the intensities behind the station's grating
    outer=lambda intensities: jnp.mean((intensities - readings) ** 2) / 4,
)
# A start that points the right way: the first eigenvector of Σ_j b_j Σ_k a_kj a_kjᵀ, a sum over stations.
_, vectors = np.linalg.eigh(np.einsum("j,kji,kjl->il", readings - readings.mean(), gratings, gratings))
start = 0.5 * vectors[:, -1]
error = lambda x, y: {"error": min(np.linalg.norm(x - signal), np.linalg.norm(x + signal))}
method = rk.FedDRO(step=0.2, momentum=0.5, local_steps=2)
run = rk.solve(problem, clients, method, (start, None), rounds=200, evaluate=error, every=50)

print(run.history[["round", "exchanges", "error"]].to_string(index=False))
