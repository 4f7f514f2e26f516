"""stocBiO with TorchOpt's implicit differentiation."""

import networks_torch as networks
import torch
import torchopt

import tasks

torch.set_num_threads(2)
options = tasks.arguments("stocbio")
task = options.task
data = tasks.covertype(options.data)
train, val, test = (networks.tensors((data[f"x{part}"], data[f"y{part}"])) for part in ("", "_val", "_test"))
x, z = torch.full((7,), -2.0, requires_grad=True), torch.zeros(54, 7)


def draw(rows: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a minibatch."""
    index = torch.randint(len(rows[0]), (task.batch,))
    return rows[0][index], rows[1][index]


gradient = torch.func.grad(lambda z, x, batch: networks.lower_loss(x, z, batch))
series = torchopt.linear_solve.solve_inv(ns=True, maxiter=task.steps, alpha=task.step)


@torchopt.diff.implicit.custom_root(gradient, argnums=1, solve=series)
def fitted(z: torch.Tensor, x: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the model after the lower level's steps; the series takes the last minibatch."""
    for k in range(task.steps):
        z = z - task.step * gradient(z, x, batch if k == task.steps - 1 else draw(train))
    return z


optimizer = torchopt.SGD([x], lr=task.step / task.ratio)
clock = tasks.Clock(task)
for k in range(task.rounds):
    z = fitted(z, x, draw(train))
    optimizer.zero_grad()
    networks.upper_loss(x, z, draw(val)).backward()
    optimizer.step()
    z = z.detach()
    if (k + 1) % task.every == 0:
        clock.lap(lambda: networks.cover_accuracy(z, *test))

clock.print(
    ["torchopt", "torch"],
    parameters=x.numel() + z.numel(),
    clients=1,
    cohort=1,
    batch=task.batch,
    steps=task.steps,
    rounds=k + 1,
)
