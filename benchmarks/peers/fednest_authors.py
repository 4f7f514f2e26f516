"""FedNest's own authors' code, from a clone: the rounds of its main_hr.py, without its evaluations."""

import sys
from types import SimpleNamespace

import networks_torch as networks
import numpy as np
import torch

import tasks

options = tasks.arguments("fednest")
task = options.task
sys.path.insert(0, str(options.code))
from core.ClientManage_hr import ClientManageHR  # noqa: E402
from core.function import assign_hyper_gradient  # noqa: E402
from models.ModelBuilder import build_model  # noqa: E402

torch.set_num_threads(2)
parts, test = tasks.shards(options.data)
images = np.concatenate([rows for part in parts for rows in part[::2]])
labels = np.concatenate([rows for part in parts for rows in part[1::2]])
data = torch.utils.data.TensorDataset(*networks.tensors((images.reshape(-1, 28, 28, 1), labels)))
users = {k: range(600 * k, 600 * k + 480) for k in range(len(parts))}
users |= {-k - 1: range(600 * k + 480, 600 * k + 600) for k in range(len(parts))}
test = networks.tensors((test[0].reshape(-1, 28, 28, 1), test[1]))

args = SimpleNamespace(
    dataset="mnist", model="mlp", img_size=(1, 28, 28), num_classes=10, num_users=len(parts), local_ep=5,
    local_bs=task.batch, lr=task.step, hlr=task.step, neumann=5, outer_tau=1, optim="svrg", hvp_method="global_batch",
    all_clients=False, momentum=0, verbose=False, device="cpu",
)  # fmt: skip

model = build_model(args)
named = list(model.named_parameters())
upper = [value for name, value in named if "header" not in name]
optimizer = torch.optim.SGD(upper, lr=1)


def manager() -> ClientManageHR:
    """Return a manager of a fresh cohort."""
    cohort = rng.choice(task.clients, task.cohort, replace=False)
    return ClientManageHR(args, model, cohort, data, users, upper)


def score() -> float:
    """Return the test accuracy, without dropout."""
    model.eval()
    return networks.accuracy(model, *test)


rng = np.random.default_rng(0)
clock = tasks.Clock(task)
for _ in range(task.rounds):
    model.load_state_dict(manager().fed_in()[0])
    gradient, _ = manager().fed_out()
    assign_hyper_gradient(upper, gradient)
    optimizer.step()
    clock.lap(score)

clock.print(
    ["torch"], parameters=networks.size(model), clients=args.num_users, cohort=task.cohort, batch=args.local_bs,
    steps=args.local_ep * (len(users[0]) // args.local_bs + 1), rounds=len(clock.seconds),
)  # fmt: skip
