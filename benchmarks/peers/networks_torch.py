"""The two networks for the scripts that use PyTorch. They are not counted as their lines."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn


def network(name: str) -> nn.Sequential:
    """Return a network with PyTorch's initial parameters."""
    if name == "mlp":
        return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def tensors(arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, with the colours first, and labels."""
    images, labels = arrays
    if images.ndim == 4:
        images = images.transpose(0, 3, 1, 2)
    return torch.tensor(np.ascontiguousarray(images)), torch.tensor(labels, dtype=torch.int64)


@torch.no_grad()
def accuracy(model: Any, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images whose class has the highest score."""
    return float((model(images).argmax(1) == labels).float().mean())


def size(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(values.numel() for values in model.parameters())


def upper_loss(x: torch.Tensor, z: torch.Tensor, batch: Any) -> torch.Tensor:
    """The cross-entropy of the linear model z on forest covers."""
    features, labels = batch
    return nn.functional.cross_entropy(features @ z, labels)


def lower_loss(x: torch.Tensor, z: torch.Tensor, batch: Any) -> torch.Tensor:
    """The same plus a penalty for each class, exp(x)."""
    return upper_loss(x, z, batch) + 0.5 * x.exp() @ (z**2).sum(0)


def cover_accuracy(z: torch.Tensor, features: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of samples whose class has the highest score."""
    return float(((features @ z.detach()).argmax(1) == labels).float().mean())
