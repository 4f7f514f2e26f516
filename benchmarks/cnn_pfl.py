"""Time the round of `benchmarks/cnn.py` in pfl 0.6 with PyTorch, in a separate environment:

python -m venv pfl && pfl/bin/pip install pfl torch==2.13.0 && pfl/bin/python benchmarks/cnn_pfl.py
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel

CLIENTS, COHORT, IMAGES, BATCH = 100, 10, 50, 10


class CNN(torch.nn.Module):
    """The network of pfl's CIFAR-10 benchmark."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, images: Any) -> Any:
        """The scores."""
        return self.layers(images)

    def loss(self, images: Any, labels: Any, is_eval: bool = False) -> Any:
        """The cross-entropy."""
        return torch.nn.functional.cross_entropy(self(images), labels.long().reshape(-1))

    @torch.no_grad()
    def metrics(self, images: Any, labels: Any) -> dict[str, Any]:
        """Return the loss in pfl's form."""
        return {"loss": Weighted(float(self.loss(images, labels)) * len(labels), len(labels))}


class Timed(TrainingProcessCallback):
    """Records when each round ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.used: list[float] = []

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
        """Record the end of a round."""
        from pfl.metrics import Metrics

        self.ends.append(time.perf_counter())
        self.used.append(time.process_time())
        return False, Metrics()


def main() -> None:
    """Time a round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    rows = {
        k: (torch.tensor(rng.normal(size=(IMAGES, 3, 32, 32)), dtype=torch.float32),
            torch.tensor(rng.integers(0, 10, IMAGES)))
        for k in range(CLIENTS)
    }  # fmt: skip
    users = list(rows)
    data = FederatedDataset(lambda k: Dataset(rows[k], user_id=str(k)), get_user_sampler("random", users))
    module = CNN()
    model = PyTorchModel(
        module, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(module.parameters(), 1.0)
    )
    timed = Timed()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds + 1, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(local_learning_rate=0.01, local_num_epochs=1, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[timed],
    )
    used = np.mean(np.diff(timed.used))
    print(f"pfl: {min(np.diff(timed.ends)):.3f} s a round, {used:.3f} s of the processors")


if __name__ == "__main__":
    main()
