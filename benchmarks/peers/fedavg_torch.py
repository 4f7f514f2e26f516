"""FedAvg as a plain loop in PyTorch."""

import copy

import networks_torch as networks
import torch

import tasks

torch.set_num_threads(2)
options = tasks.arguments("mlp", "cnn")
task = options.task
parts, test = tasks.digits(options.data) if options.name == "mlp" else tasks.patterns()
clients, test = [networks.tensors(part) for part in parts], networks.tensors(test)
model = networks.network(options.name)
clock = tasks.Clock(task)

for _ in range(task.rounds):
    updated = []
    for i in torch.randperm(len(clients))[: task.cohort]:
        images, labels = clients[i]
        local = copy.deepcopy(model)
        optimizer = torch.optim.SGD(local.parameters(), lr=task.step)
        for index in torch.randperm(len(images)).split(task.batch):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(local(images[index]), labels[index]).backward()
            optimizer.step()
        updated.append(local.state_dict())
    model.load_state_dict({name: torch.stack([w[name] for w in updated]).mean(0) for name in updated[0]})
    clock.lap(lambda: networks.accuracy(model, *test))

clock.print(
    ["torch"],
    parameters=networks.size(model),
    clients=len(clients),
    cohort=len(updated),
    batch=len(index),
    steps=len(images) // task.batch,
    rounds=task.rounds,
)
