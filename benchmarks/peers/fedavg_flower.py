"""FedAvg in Flower's simulation, with PyTorch: two clients side by side, each on one thread."""

from functools import cache
from pathlib import Path
from typing import Any

import networks_torch as networks
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

import tasks

client_app, server_app = ClientApp(), ServerApp()


@cache
def load(name: str, folder: str) -> tuple[Any, Any]:
    """Return the clients' data and the test set."""
    parts, test = tasks.digits(Path(folder)) if name == "mlp" else tasks.patterns()
    return [networks.tensors(part) for part in parts], networks.tensors(test)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train on a client's data."""
    torch.set_num_threads(1)
    config: Any = message.content["config"]
    images, labels = load(config["name"], config["data"])[0][context.node_config["partition-id"]]
    model = networks.network(config["name"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=config["step"])
    for index in torch.randperm(len(images)).split(config["batch"]):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[index]), labels[index]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(images)})}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    options = tasks.arguments("mlp", "cnn")
    task = options.task
    torch.set_num_threads(2)
    parts, test = load(options.name, str(options.data))
    model = networks.network(options.name)

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord(clock.lap(lambda: networks.accuracy(model, *test)))

    clock = tasks.Clock(task, skip=True)
    FedAvg(fraction_train=task.cohort / task.clients, fraction_evaluate=0.0, min_available_nodes=task.clients).start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=task.rounds,
        train_config=ConfigRecord(
            {"name": options.name, "data": str(options.data), "step": task.step, "batch": task.batch}
        ),
        evaluate_fn=evaluate,
    )
    clock.print(
        ["flwr", "ray", "torch"],
        parameters=networks.size(model),
        clients=len(parts),
        cohort=task.cohort,
        batch=task.batch,
        steps=len(parts[0][0]) // task.batch,
        rounds=len(clock.seconds),
    )


if __name__ == "__main__":
    from fedavg_flower import client_app, server_app  # by its name, so that the workers import it too

    run_simulation(server_app, client_app, num_supernodes=100, backend_config={"client_resources": {"num_cpus": 1}})
