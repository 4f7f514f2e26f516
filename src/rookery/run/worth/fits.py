"""The losses of logistic and of Cox regression, for many models at once, and the exact models that minimise them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rookery.run.worth.designs import Site

RIDGE = 1e-3  # on the intercept, so that it stays finite where all rows have one class
_NEWTON, _HALVINGS = 60, 30  # iterations, at most
_NOBODY = 1e-30  # a total hazard, relative to the largest, below which single precision sees nobody at risk
_GROWTH = 2.0  # how much Cox's curvature may grow from its value at zero

Models = Float[np.ndarray, "penalties d"]


def probability(scores: np.ndarray) -> np.ndarray:
    """Return 1/(1 + exp(−score)); in this form it does not overflow."""
    return (1 + np.tanh(scores / 2)) / 2


# For methods: in JAX.


@jax.custom_jvp
def logistic_loss(scores: Array) -> Array:
    """Return log(1 + exp(scores)), the loss of each score, the log odds of the positive class, on a negative row."""
    return jnp.maximum(scores, 0) + jnp.log1p(jnp.exp(-jnp.abs(scores)))


logistic_loss.defjvps(lambda tangent, value, scores: jax.nn.sigmoid(scores) * tangent)


def row_losses(scores: Float[Array, "*models n"], sample: Any, used: Bool[Array, "*models n"]) -> Array:
    """Return each row's loss: the logistic loss or, where the rows have events, its part of Cox's.

    Only the rows in use are at risk. The losses of other rows are meaningless.
    """
    if "event" not in sample:
        return logistic_loss(scores) - sample["positive"] * scores
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, where=used, initial=-1e30))
    hazard = jnp.where(used, jnp.exp(jnp.where(used, scores - top, 0)), 0)
    at_risk = jnp.maximum(jnp.cumsum(hazard, axis=-1), _NOBODY)  # rows are in descending order of time
    return sample["event"] * (jnp.log(at_risk) + top - scores)


def total_loss(models: Float[Array, "designs penalties d"], batch: Any, penalties: Array) -> Float[Array, ""]:
    """Return the sum over designs and penalties of the penalised mean losses on their rows."""

    def of_site(sample: Any) -> Float[Array, ""]:
        # One product of all models with the rows.
        mapped = jnp.einsum("ced,cpd->pce", sample["maps"], models)
        scores = (mapped.reshape(-1, mapped.shape[2]) @ sample["rows"].T).reshape(*mapped.shape[:2], -1)
        losses = row_losses(scores, sample, sample["weights"] > 0)
        return jnp.sum(sample["weights"] * jnp.sum(losses, axis=0))

    squares = jnp.sum(models[..., :-1] ** 2, axis=(0, 2)) @ penalties + RIDGE * jnp.sum(models[..., -1] ** 2)
    return jnp.mean(jax.vmap(of_site)(batch)) + squares / 2


# Exact models, and what is chosen by them: in NumPy.


class Rows(NamedTuple):
    """Rows that are compared with each other, in descending order of time if they have times; with weights."""

    features: Float[np.ndarray, "n d"]
    positive: Float[np.ndarray, " n"]
    weights: Float[np.ndarray, " n"]
    time: Float[np.ndarray, " n"]  # zeros if they have none


class _Objective(NamedTuple):
    """A weighted sum of losses, as a function of models [penalties, d]."""

    value: Callable[[Models], np.ndarray]
    derivatives: Callable[[Models], tuple[np.ndarray, np.ndarray]]  # the gradients, and the Hessians


def _logistic(rows: Rows) -> _Objective:
    z, t, a, _ = rows

    def value(w: Models) -> np.ndarray:
        return losses_of(w @ z.T, t, False) @ a

    def derivatives(w: Models) -> tuple[np.ndarray, np.ndarray]:
        p = probability(w @ z.T)
        return (a * (p - t)) @ z, (z.T * (a * p * (1 - p))[:, None, :]) @ z

    return _Objective(value, derivatives)


def _cox(strata: Sequence[Rows]) -> _Objective:
    def value(w: Models) -> np.ndarray:
        return np.sum([losses_of(w @ z.T, t, True) @ a for z, t, a, _ in strata], axis=0)

    def of_stratum(w: Models, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        z, t, a, _ = rows
        scores, event = w @ z.T, t > 0
        hazard = np.exp(scores - scores.max(axis=1, keepdims=True))
        at_risk = np.maximum(np.cumsum(hazard, axis=1), np.finfo(float).tiny)
        shares = np.where(event, a, 0) / at_risk
        counted = hazard * np.cumsum(shares[:, ::-1], axis=1)[:, ::-1]  # over the events at which a row is at risk
        means = np.cumsum(hazard[..., None] * z, axis=1)[:, event] / at_risk[:, event, None]
        spread = (means.swapaxes(1, 2) * a[event]) @ means
        return (counted - a * t) @ z, (z.T * counted[:, None, :]) @ z - spread

    def derivatives(w: Models) -> tuple[np.ndarray, np.ndarray]:
        gradients, hessians = zip(*(of_stratum(w, rows) for rows in strata), strict=True)
        return np.sum(gradients, axis=0), np.sum(hessians, axis=0)

    return _Objective(value, derivatives)


def losses_of(scores: Float[np.ndarray, "*m n"], positive: np.ndarray, survival: bool) -> Float[np.ndarray, "*m n"]:
    """Return the loss of each row; with times, of rows in descending order of time."""
    if survival:
        return positive * (np.logaddexp.accumulate(scores, axis=-1) - scores)
    return np.logaddexp(0, scores) - positive * scores


def minimise(
    sites: Sequence[Site], used: Sequence[np.ndarray], design: int, shares: Sequence[float],
    penalties: Sequence[float], together: bool = False,
) -> Models:  # fmt: skip
    """Return the models that minimise Σ share · mean loss + penalty/2 ‖·‖².

    With times, a row is compared with rows of its own hospital, or with all hospitals' rows if `together`.
    """
    parts = [_rows(sites[k], used[k], design, share) for k, share in enumerate(shares) if share > 0]
    strata = [_joined(parts)] if together else parts
    objective = _cox(strata) if sites[0].survival else _logistic(_joined(parts))
    ridge = np.repeat(np.asarray(penalties, float)[:, None], parts[0].features.shape[1], axis=1)
    ridge[:, -1] = RIDGE
    return _newton(objective, ridge)


def _rows(site: Site, used: np.ndarray, design: int, share: float = 1.0) -> Rows:
    count = used.sum()
    time = np.zeros(count) if site.time is None else site.time[used]
    return Rows(site.features(design, used), site.positive[used].astype(float), np.full(count, share / count), time)


def _joined(parts: Sequence[Rows]) -> Rows:
    """Return all rows, in descending order of time; rows without times keep their order."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(-columns[-1], kind="stable")
    return Rows(*(column[order] for column in columns))


def _newton(objective: _Objective, ridge: np.ndarray) -> Models:
    """Return the models that minimise the objective + Σ ridge·w²/2, by Newton's method with halved steps."""
    w = np.zeros_like(ridge)
    value = lambda w: objective.value(w) + (ridge * w**2).sum(axis=1) / 2
    for _ in range(_NEWTON):
        gradient, hessian = objective.derivatives(w)
        gradient, hessian = gradient + ridge * w, hessian + ridge[:, :, None] * np.eye(w.shape[1])
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        decrement = (gradient * step).sum(axis=1)
        if decrement.max() < 1e-12:
            break
        length, before = np.ones(len(w)), value(w)
        for _ in range(_HALVINGS):
            rises = value(w - length[:, None] * step) > before - length * decrement / 4
            if not rises.any():
                break
            length = np.where(rises, length / 2, length)
        w = w - length[:, None] * step
    return w


def smoothness(site: Site) -> float:
    """Return a bound on the curvature of a hospital's mean loss over all designs; for Cox's loss, an estimate."""
    largest = 0.0
    for design, used in enumerate(site.used):
        rows = _rows(site, used, design)
        if site.survival:
            _, hessian = _cox([rows]).derivatives(np.zeros((1, rows.features.shape[1])))
            found = _GROWTH * np.linalg.norm(hessian[0], 2)
        else:
            found = np.linalg.norm(rows.features, 2) ** 2 / (4 * len(rows.features))
        largest = max(largest, float(found))
    return largest
