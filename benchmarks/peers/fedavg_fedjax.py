"""FedAvg in FedJAX."""

import fedjax
import jax
import networks_jax as networks
import numpy as np

import tasks

options = tasks.arguments("mlp", "cnn")
task = options.task
parts, test = tasks.digits(options.data) if options.name == "mlp" else tasks.patterns()

data = fedjax.InMemoryFederatedData({str(k): {"x": images, "y": labels} for k, (images, labels) in enumerate(parts)})
model = fedjax.Model(
    init=lambda key: networks.init(options.name),
    apply_for_train=lambda params, batch, key: networks.scores(params, batch["x"]),
    apply_for_eval=lambda params, batch: networks.scores(params, batch["x"]),
    train_loss=lambda batch, scores: networks.losses(scores, batch["y"]),
    eval_metrics={},
)
algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    fedjax.model_grad(model),
    client_optimizer=fedjax.optimizers.sgd(task.step),
    server_optimizer=fedjax.optimizers.sgd(1.0),
    client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=task.batch, num_epochs=1),
)
sampler = fedjax.client_samplers.UniformGetClientSampler(data, num_clients=task.cohort, seed=0)

clock = tasks.Clock(task)
state = algorithm.init(model.init(jax.random.PRNGKey(0)))
for _ in range(task.rounds):
    clients = sampler.sample()
    state, _ = algorithm.apply(state, clients)
    jax.block_until_ready(state.params)
    clock.lap(lambda: networks.accuracy(state.params, *test))

clock.print(
    ["fedjax", "jax"],
    parameters=sum(map(np.size, jax.tree.leaves(state.params))),
    clients=data.num_clients(),
    cohort=len(clients),
    batch=task.batch,
    steps=len(parts[0][0]) // task.batch,
    rounds=len(clock.seconds),
)
