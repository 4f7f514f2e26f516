"""What the models see: each split's standardised features, and logistic models fitted to many splits at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rookery.run.worth.hospitals import Federation, Hospital, Splits

RIDGE = 1e-3  # on the intercept, so that it stays finite where all rows have one class
_NEWTON, _HALVINGS = 60, 30  # iterations, at most


@dataclass(frozen=True)
class Site:
    """A hospital's rows in every design: a split's rows for fitting (the first designs) or for training (the others).

    A row's features in design d are `rows @ maps[d]`: filled and standardised by the design's own rows, with markers of
    missing values and a one. So all designs share the rows, and a product with all models is one matrix product.
    """

    name: str
    rows: Float[np.ndarray, "n e"]
    maps: Float[np.ndarray, "designs e d"]
    used: Bool[np.ndarray, "designs n"]
    positive: Bool[np.ndarray, " n"]
    splits: Splits

    def features(self, design: int, chosen: Any = slice(None)) -> Float[np.ndarray, "rows d"]:
        """Return the features of the chosen rows."""
        return self.rows[chosen] @ self.maps[design]

    def smoothness(self) -> float:
        """Return a bound on the curvature of the mean logistic loss, over all designs."""
        largest = 0.0
        for design, used in enumerate(self.used):
            features = self.features(design, used)
            largest = max(largest, float(np.linalg.norm(features, 2)) ** 2 / (4 * len(features)))
        return largest


def site(federation: Federation, hospital: Hospital, splits: Splits) -> Site:
    """Prepare a hospital's rows; every statistic comes from its own rows in the design."""
    values, gaps = hospital.values, list(federation.gaps)
    missing = np.isnan(values)
    with np.errstate(invalid="ignore"):
        centre, spread = _statistics(np.where(missing, 0.0, values))  # only for the precision of single floats
    known = np.where(missing, 0.0, (values - centre) / spread)
    count, width = values.shape
    rows = np.concatenate([known, missing[:, gaps], np.ones((count, 1))], axis=1)
    used = np.concatenate([splits.fit, splits.train])
    maps = np.zeros((len(used), rows.shape[1], rows.shape[1]))
    for chosen, own in zip(maps, used, strict=True):
        fill = np.zeros(width)
        for j in gaps:
            seen = known[own & ~missing[:, j], j]
            fill[j] = np.median(seen) if len(seen) else 0.0
        filled = np.concatenate([known + missing * fill, missing[:, gaps]], axis=1)
        mean, deviation = _statistics(filled[own])
        varies = np.ptp(filled[own], axis=0) > 0
        scale = np.where(varies, 1 / deviation, 0.0)  # a column that does not vary becomes zero
        np.fill_diagonal(chosen, [*scale, 1.0])
        for place, j in enumerate(gaps):
            chosen[width + place, j] = fill[j] * scale[j]
        chosen[-1, :-1] = -mean * scale
    return Site(hospital.name, rows, maps, used, hospital.positive, splits)


def _statistics(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each column's mean and its deviation, or 1 for a deviation of zero."""
    deviation = values.std(axis=0)
    return values.mean(axis=0), np.where(deviation > 0, deviation, 1.0)


def samples(sites: Sequence[Site], used: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return each site's data as one sample, all of one shape: its rows, maps, labels, and each design's weights."""
    longest = max(len(each.rows) for each in sites)
    made = []
    for each, chosen in zip(sites, used, strict=True):
        pad = longest - len(each.rows)
        weights = chosen / chosen.sum(axis=1, keepdims=True)
        arrays = {
            "rows": np.pad(each.rows, ((0, pad), (0, 0))),
            "maps": each.maps,
            "positive": np.pad(each.positive, (0, pad)),
            "weights": np.pad(weights, ((0, 0), (0, pad))),
        }
        made.append({name: array[None].astype(np.float32) for name, array in arrays.items()})
    return made


def probability(scores: np.ndarray) -> np.ndarray:
    """Return 1/(1 + exp(−score)); in this form it does not overflow."""
    return (1 + np.tanh(scores / 2)) / 2


@jax.custom_jvp
def logistic_loss(scores: Array) -> Array:
    """Return log(1 + exp(scores)), the loss of each score, the log odds of the positive class, on a negative row."""
    return jnp.maximum(scores, 0) + jnp.log1p(jnp.exp(-jnp.abs(scores)))


logistic_loss.defjvps(lambda tangent, value, scores: jax.nn.sigmoid(scores) * tangent)


def total_loss(models: Float[Array, "designs penalties d"], batch: Any, penalties: Array) -> Float[Array, ""]:
    """Return the sum over designs and penalties of the penalised mean losses on their rows."""

    def of_site(sample: Any) -> Float[Array, ""]:
        # One product of all models with the rows.
        mapped = jnp.einsum("ced,cpd->pce", sample["maps"], models)
        scores = (mapped.reshape(-1, mapped.shape[2]) @ sample["rows"].T).reshape(*mapped.shape[:2], -1)
        losses = logistic_loss(scores) - sample["positive"] * scores
        return jnp.sum(sample["weights"] * jnp.sum(losses, axis=0))

    squares = jnp.sum(models[..., :-1] ** 2, axis=(0, 2)) @ penalties + RIDGE * jnp.sum(models[..., -1] ** 2)
    return jnp.mean(jax.vmap(of_site)(batch)) + squares / 2


def minimise(
    sites: Sequence[Site], used: Sequence[np.ndarray], design: int, shares: Sequence[float], penalties: Sequence[float]
) -> Float[np.ndarray, "penalties d"]:
    """Return the models that minimise Σ share · mean loss + penalty/2 ‖·‖², by Newton's method with halved steps."""
    some = [k for k, share in enumerate(shares) if share > 0]
    z = np.concatenate([sites[k].features(design, used[k]) for k in some])
    t = np.concatenate([sites[k].positive[used[k]] for k in some]).astype(float)
    a = np.concatenate([np.full(used[k].sum(), shares[k] / used[k].sum()) for k in some])
    ridge = np.repeat(np.asarray(penalties, float)[:, None], z.shape[1], axis=1)
    ridge[:, -1] = RIDGE
    w = np.zeros_like(ridge)

    def value(w: np.ndarray) -> np.ndarray:
        scores = w @ z.T
        return (np.logaddexp(0, scores) - t * scores) @ a + (ridge * w**2).sum(axis=1) / 2

    for _ in range(_NEWTON):
        p = probability(w @ z.T)
        gradient = (a * (p - t)) @ z + ridge * w
        hessian = (z.T * (a * p * (1 - p))[:, None, :]) @ z + ridge[:, :, None] * np.eye(z.shape[1])
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
