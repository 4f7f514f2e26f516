"""stocBiO as a plain loop in PyTorch."""

import networks_torch as networks
import torch
from torch.autograd import grad

import tasks

torch.set_num_threads(2)
options = tasks.arguments("stocbio")
task = options.task
data = tasks.covertype(options.data)
train, val, test = (networks.tensors((data[f"x{part}"], data[f"y{part}"])) for part in ("", "_val", "_test"))
x, z = torch.full((7,), -2.0, requires_grad=True), torch.zeros(54, 7, requires_grad=True)


def draw(rows: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a minibatch."""
    index = torch.randint(len(rows[0]), (task.batch,))
    return rows[0][index], rows[1][index]


clock = tasks.Clock(task)
for k in range(task.rounds):
    for _ in range(task.steps):
        z = (z - task.step * grad(networks.lower_loss(x, z, draw(train)), z)[0]).detach().requires_grad_()
    direct = grad(networks.upper_loss(x, z, draw(val)), z)[0]
    term, p = direct, direct
    for _ in range(task.steps):
        gradient = grad(networks.lower_loss(x, z, draw(train)), z, create_graph=True)[0]
        term = term - task.step * grad(gradient, z, term)[0]
        p = p + term
    gradient = grad(networks.lower_loss(x, z, draw(train)), z, create_graph=True)[0]
    implicit = grad(gradient, x, task.step * p)[0]
    x = (x + task.step / task.ratio * implicit).detach().requires_grad_()
    if (k + 1) % task.every == 0:
        clock.lap(lambda: networks.cover_accuracy(z, *test))

clock.print(
    ["torch"],
    parameters=x.numel() + z.numel(),
    clients=1,
    cohort=1,
    batch=task.batch,
    steps=task.steps,
    rounds=k + 1,
)
