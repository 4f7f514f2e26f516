"""Partitioners: pure functions of (labels, clients, seed) that return the indices of each client's samples."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from rookery.base.arguments import check_counts, check_positive, check_seed

Parts = list[Int[np.ndarray, " samples"]]


def iid(labels: Sequence[int] | np.ndarray, clients: int, seed: int = 0) -> Parts:
    """Split at random into parts of equal size, up to one sample.

    >>> [len(part) for part in iid(range(10), clients=3)]
    [4, 3, 3]
    """
    _check(labels, clients, clients=clients, seed=seed)
    return [np.sort(part) for part in np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients)]


def shards(labels: Sequence[int] | np.ndarray, clients: int, seed: int = 0, per_client: int = 2) -> Parts:
    """Split as in McMahan et al. (2017), the pathological non-i.i.d. case: sort by label, cut into shards, deal them.

    Most clients then hold `per_client` labels (two by default).
    """
    _check(labels, clients * per_client, clients=clients, per_client=per_client, seed=seed)
    rng = np.random.default_rng(seed)
    by_label = np.argsort(np.asarray(labels), kind="stable")
    pieces = np.array_split(by_label, clients * per_client)
    dealt = rng.permutation(len(pieces)).reshape(clients, per_client)
    return [np.sort(np.concatenate([pieces[j] for j in hand])) for hand in dealt]


def dirichlet(
    labels: Sequence[int] | np.ndarray, clients: int, seed: int = 0, alpha: float = 0.5, least: int = 2
) -> Parts:
    """Split with the label skew of Hsu et al. (2019): each class is divided in proportions drawn from Dir(alpha).

    A small alpha makes the clients differ more. Clients with fewer than `least` samples receive some from the largest.
    """
    _check(labels, clients * least, clients=clients, least=least, seed=seed)
    check_positive(alpha=alpha)
    labels = np.asarray(labels)
    rng = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        samples = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(samples)
        for part, piece in zip(parts, np.split(samples, cuts.astype(int)), strict=True):
            part.extend(piece.tolist())
    while min(map(len, parts)) < least:
        smallest, largest = min(parts, key=len), max(parts, key=len)
        smallest.append(largest.pop(rng.integers(len(largest))))
    return [np.sort(np.asarray(part)) for part in parts]


def _check(labels: Any, needed: int, seed: int, **counts: int) -> None:
    """Raise ValueError unless there is one label for each sample, and enough samples."""
    check_counts(**counts)
    check_seed(seed)
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ValueError(f"labels must have one entry for each sample; got an array of shape {array.shape}.")
    import pandas as pd

    if pd.isna(array).any():
        raise ValueError(f"labels must not have missing values; got {int(pd.isna(array).sum())}.")
    if len(array) < needed:
        raise ValueError(f"{len(array)} samples cannot be divided into {needed} parts; use fewer clients or more data.")


PARTITIONS: dict[str, Callable[..., Parts]] = {"iid": iid, "shards": shards, "dirichlet": dirichlet}


def partition_picture(labels: Sequence[int] | np.ndarray, parts: Parts, path: str | Path) -> Path:
    """Draw each client's samples per class: clients across, classes down, darker for more samples."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    from rookery.base import drawing

    labels = np.asarray(labels)
    counts = np.stack([np.bincount(labels[part], minlength=int(labels.max()) + 1) for part in parts], axis=1)
    classes, clients = counts.shape
    width, height = min(12.0, max(5.0, 2.5 + 0.09 * clients)), min(8.0, 1.8 + 0.22 * classes)
    fig, axes = drawing.figure(1, 1, width=width, height=height)
    ax = axes[0, 0]
    ax.grid(visible=False)
    scale = PowerNorm(0.5, vmin=0, vmax=counts.max())  # so that small shares are visible next to large ones
    image = ax.imshow(counts, cmap="Blues", norm=scale, aspect="auto", interpolation="nearest")
    sizes = counts.sum(axis=0)
    each = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    drawing.label(ax, "client", "class", f"{clients} clients, {each} samples each")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if classes <= 20:
        ax.set_yticks(range(classes))
    fig.colorbar(image, ax=ax, label="samples", pad=0.01)
    return drawing.save(fig, path)
