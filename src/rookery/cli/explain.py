"""`rookery explain`: what is exchanged in a round."""

import sys

import rookery as rk
from rookery.cli.asked import AlgorithmName, ClientCount, Cohort, ConfigFile, Partition, Seed, Settings, TaskName, ask
from rookery.cli.program import Command, app, border


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
    """Show every exchange of a round: what clients are sent, what they keep, what they send. Nothing is run."""
    from rookery.cli.registry import blaming

    with border(), blaming():
        asked = ask(task, algorithm, settings or [], clients, partition, seed)
        if asked.note:
            print(asked.note, file=sys.stderr)
        chosen = asked.task
        size = chosen.cohort if cohort is None else cohort
        print(rk.explain(chosen.problem, chosen.clients, asked.method, chosen.init, cohort=size))
