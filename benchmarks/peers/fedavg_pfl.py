"""FedAvg in pfl's simulation, with PyTorch."""

from typing import Any

import networks_torch as networks
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

import tasks


class Module(torch.nn.Module):
    """A network with the methods that pfl asks for."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Any) -> Any:
        """Return the scores."""
        return self.network(images)

    def loss(self, images: Any, labels: Any, is_eval: bool = False) -> Any:
        """Return the cross-entropy."""
        return torch.nn.functional.cross_entropy(self(images), labels)

    @torch.no_grad()
    def metrics(self, images: Any, labels: Any) -> dict[str, Any]:
        """Return the loss in pfl's form."""
        return {"loss": Weighted(float(self.loss(images, labels)) * len(labels), len(labels))}


class Timed(TrainingProcessCallback):
    """Ends a round of the clock after each iteration."""

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
        """Evaluate and continue."""
        clock.lap(lambda: networks.accuracy(module, *test))
        return False, Metrics()


torch.set_num_threads(2)
options = tasks.arguments("mlp", "cnn")
task = options.task
parts, test = tasks.digits(options.data) if options.name == "mlp" else tasks.patterns()
rows, test = [networks.tensors(part) for part in parts], networks.tensors(test)
module = Module(networks.network(options.name))

data = FederatedDataset(lambda k: Dataset(rows[k], user_id=str(k)), get_user_sampler("random", list(range(len(rows)))))
model = PyTorchModel(
    module, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(module.parameters(), 1.0)
)
clock = tasks.Clock(task)
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=task.rounds,
        evaluation_frequency=10**9,
        train_cohort_size=task.cohort,
        val_cohort_size=0,
    ),
    backend=SimulatedBackend(training_data=data, val_data=None),
    model=model,
    model_train_params=NNTrainHyperParams(
        local_learning_rate=task.step, local_num_epochs=1, local_batch_size=task.batch
    ),
    model_eval_params=NNEvalHyperParams(local_batch_size=None),
    callbacks=[Timed()],
)
clock.print(
    ["pfl", "torch"],
    parameters=networks.size(module),
    clients=len(rows),
    cohort=task.cohort,
    batch=task.batch,
    steps=len(rows[0][0]) // task.batch,
    rounds=len(clock.seconds),
)
