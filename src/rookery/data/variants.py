"""Variants of a data set, as pure functions of its labels: long-tailed classes, and labels with noise."""

import numpy as np
from jaxtyping import Int


def long_tailed(
    labels: Int[np.ndarray, " n"], largest: int = 6000, ratio: float = 0.01, seed: int = 0
) -> Int[np.ndarray, " kept"]:
    """The samples that are kept, in ascending order, when the classes' sizes fall geometrically.

    Class k of K keeps min(its size, round(largest · ratio^{k/(K−1)})) samples, drawn at random.

    >>> labels = np.repeat(np.arange(3), 100)
    >>> np.bincount(labels[long_tailed(labels, largest=80, ratio=0.25)]).tolist()
    [80, 40, 20]
    """
    labels = np.asarray(labels)
    classes = int(labels.max()) + 1
    if not 0 < ratio <= 1 or largest < 1:
        raise ValueError(f"largest={largest!r} is not at least 1, or ratio={ratio!r} not in (0, 1].")
    rng = np.random.default_rng(seed)
    kept = []
    for k in range(classes):
        own = np.flatnonzero(labels == k)
        count = round(largest * ratio ** (k / max(classes - 1, 1)))
        kept.append(rng.permutation(own)[: min(len(own), count)])
    return np.sort(np.concatenate(kept))


def noisy_labels(
    labels: Int[np.ndarray, " n"], fraction: float, seed: int, classes: int | None = None
) -> Int[np.ndarray, " n"]:
    """The labels with round(fraction · n) of them, drawn at random, changed to another class, each equally likely.

    Every label that is drawn does change: `noisy != labels` are the corrupted ones.

    >>> labels = np.zeros(10, int)
    >>> int((noisy_labels(labels, 0.4, seed=0, classes=10) != labels).sum())
    4
    """
    labels = np.asarray(labels)
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction={fraction!r} is not between 0 and 1.")
    classes = int(labels.max()) + 1 if classes is None else classes
    if classes < 2:
        raise ValueError("There is one class only: give classes, at least 2.")
    rng = np.random.default_rng(seed)
    wrong = rng.permutation(len(labels))[: round(fraction * len(labels))]
    noisy = labels.copy()
    noisy[wrong] = (labels[wrong] + rng.integers(1, classes, size=len(wrong))) % classes
    return noisy
