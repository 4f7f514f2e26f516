"""`rookery explain`: show what is exchanged in a round."""

import sys

import rookery as rk
from rookery.cli.options import AlgorithmName, ClientCount, Cohort, ConfigFile, Partition, Seed, Settings, TaskName
from rookery.cli.program import Command, app
from rookery.cli.request import TaskOptions, resolve


@app.command(cls=Command)
def explain(
    task: TaskName,
    algorithm: AlgorithmName = None,
    settings: Settings = None,
    cohort: Cohort = None,
    clients: ClientCount = None,
    partition: Partition = None,
    seed: Seed = 0,
    config: ConfigFile = None,
) -> None:
    """Show every exchange of a round: what clients receive, what they keep, what they send. Nothing is run."""
    request = resolve(task, algorithm, TaskOptions(settings or [], clients, partition, seed))
    if request.note:
        print(request.note, file=sys.stderr)
    made = request.task
    size = made.cohort if cohort is None else cohort
    print(rk.explain(made.problem, made.clients, request.method, made.init, cohort=size))
