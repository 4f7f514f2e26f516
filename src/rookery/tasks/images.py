"""Images for several tasks, as (training images, training labels, test images, test labels)."""

from functools import cache
from typing import Any

import numpy as np

from rookery.data import load

Images = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
MNIST_MEAN, MNIST_DEVIATION = 0.1307, 0.3081


def digit_images(seed: int, data_dir: Any = None) -> Images:
    """Return scikit-learn's digits, 8×8 and scaled to [0, 1], with 360 test images drawn by the seed."""
    images, labels = _digits()
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:360], order[360:]
    return images[train], labels[train], images[test], labels[test]


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits  # slow to import, and only this function needs it

    images, labels = load_digits(return_X_y=True)
    return (images / 16.0).astype(np.float32), labels.astype(np.int32)


def mnist_images(seed: int = 0, data_dir: Any = None) -> Images:
    """Return MNIST with its published split, normalised by its mean and deviation."""
    images, labels, test_images, test_labels = published_images("mnist", data_dir)
    levels = ((np.arange(256) / 255 - MNIST_MEAN) / MNIST_DEVIATION).astype(np.float32)
    flat = lambda images: levels[images.reshape(len(images), -1)]
    return flat(images), labels, flat(test_images), test_labels


def published_images(name: str, data_dir: Any) -> Images:
    """Return a data set of `rookery.data.load` with its published split."""
    data = load(name, data_dir)
    return data.train, data.train_labels, data.test, data.test_labels
