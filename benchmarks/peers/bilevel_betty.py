"""stocBiO in Betty: implicit differentiation with the Neumann series."""

from typing import Any

import networks_torch as networks
import torch
from betty.configs import Config, EngineConfig
from betty.engine import Engine
from betty.problems import ImplicitProblem
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import tasks

torch.set_num_threads(2)
options = tasks.arguments("stocbio")
task = options.task
data = tasks.covertype(options.data)
train, val, test = (networks.tensors((data[f"x{part}"], data[f"y{part}"])) for part in ("", "_val", "_test"))


class Variable(torch.nn.Module):
    """A tensor as a module."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(value)

    def forward(self) -> torch.Tensor:
        """Return the tensor."""
        return self.value


class Penalties(ImplicitProblem):
    """The upper level."""

    def training_step(self, batch: Any) -> Any:
        """Return the loss."""
        return networks.upper_loss(self(), self.model(), batch)


class Model(ImplicitProblem):
    """The lower level."""

    def training_step(self, batch: Any) -> Any:
        """Return the loss."""
        return networks.lower_loss(self.penalties(), self(), batch)


class Timed(Engine):
    """Reads the clock where Betty validates."""

    def validation(self) -> None:
        """Evaluate."""
        clock.lap(lambda: networks.cover_accuracy(self.model(), *test))


def level(kind: Any, name: str, rows: Any, value: torch.Tensor, lr: float, **config: Any) -> Any:
    """Return a problem with its data and its optimizer."""
    dataset, module = TensorDataset(*rows), Variable(value)
    batches = BatchSampler(RandomSampler(dataset), task.batch, drop_last=True)
    loader = DataLoader(dataset, sampler=batches, batch_size=None)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    return kind(name, Config(**config), module, optimizer, train_data_loader=loader)


upper = level(Penalties, "penalties", val, torch.full((7,), -2.0), task.step / task.ratio)
lower = level(
    Model, "model", train, torch.zeros(54, 7), task.step,
    type="neumann", unroll_steps=task.steps, neumann_iterations=task.steps, neumann_alpha=task.step,
)  # fmt: skip
engine = Timed(
    [upper, lower],
    EngineConfig(train_iters=task.rounds * task.steps, valid_step=task.every * task.steps),
    {"u2l": {upper: [lower]}, "l2u": {lower: [upper]}},
)
clock = tasks.Clock(task)
engine.run()

clock.print(
    ["betty-ml", "torch"],
    parameters=sum(networks.size(level.module) for level in (upper, lower)),
    clients=1,
    cohort=1,
    batch=task.batch,
    steps=task.steps,
    rounds=upper.count,
)
