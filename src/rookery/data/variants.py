"""Variants of a data set as pure functions of its labels: long-tailed classes and noisy labels."""

import numpy as np
from jaxtyping import Int


def long_tailed(
    labels: Int[np.ndarray, " n"], largest: int = 6000, ratio: float = 0.01, seed: int = 0
) -> Int[np.ndarray, " kept"]:
    """Return the samples to keep, in ascending order, so that class sizes fall geometrically.

    Class k of K keeps min(its size, round(largest · ratio^{k/(K−1)})) samples, drawn at random.

    >>> labels = np.repeat(np.arange(3), 100)
    >>> np.bincount(labels[long_tailed(labels, largest=80, ratio=0.25)]).tolist()
    [80, 40, 20]
    """
    labels = np.asarray(labels)
    classes = int(labels.max()) + 1
    if not 0 < ratio <= 1 or largest < 1:
        raise ValueError(f"largest must be at least 1 and ratio in (0, 1]; got {largest!r} and {ratio!r}.")
    rng = np.random.default_rng(seed)
    kept = []
    for k in range(classes):
        samples = np.flatnonzero(labels == k)
        count = round(largest * ratio ** (k / max(classes - 1, 1)))
        kept.append(rng.permutation(samples)[:count])
    return np.sort(np.concatenate(kept))


def noisy_labels(
    labels: Int[np.ndarray, " n"], fraction: float, seed: int, classes: int | None = None
) -> Int[np.ndarray, " n"]:
    """Change round(fraction · n) of the labels, drawn at random, to another class, each equally likely.

    Every drawn label does change: `noisy != labels` marks the corrupted ones.

    >>> labels = np.zeros(10, int)
    >>> int((noisy_labels(labels, 0.4, seed=0, classes=10) != labels).sum())
    4
    """
    labels = np.asarray(labels)
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be between 0 and 1; got {fraction!r}.")
    classes = int(labels.max()) + 1 if classes is None else classes
    if classes < 2:
        raise ValueError(f"classes must be at least 2; got {classes!r}.")
    rng = np.random.default_rng(seed)
    wrong = rng.permutation(len(labels))[: round(fraction * len(labels))]
    noisy = labels.copy()
    noisy[wrong] = (labels[wrong] + rng.integers(1, classes, size=len(wrong))) % classes
    return noisy
