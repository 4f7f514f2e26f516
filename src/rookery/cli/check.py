"""`rookery check`: check a task's problem before a run."""

import dataclasses

import typer

import rookery as rk
from rookery.cli.options import AsJson, ClientCount, ConfigFile, Partition, Quiet, Seed, Settings, TaskName
from rookery.cli.program import Command, app
from rookery.cli.request import TaskOptions
from rookery.cli.settings import read_settings
from rookery.cli.terminal import complain, show


@app.command(cls=Command)
def check(
    task: TaskName,
    settings: Settings = None,
    clients: ClientCount = None,
    partition: Partition = None,
    seed: Seed = 0,
    config: ConfigFile = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Check a task's problem before a run: curvature, derivatives, steps to try. Exit code 1 if something is wrong."""
    from rookery.cli.registry import find_task, make_task

    named = find_task(task)
    _, arguments = read_settings(settings or [], named, None)
    options = TaskOptions([], clients, partition, seed).arguments(named)
    made = make_task(named, **arguments | options)
    result = rk.check(made.problem, made.clients, made.init, seed=seed)
    data = {**dataclasses.asdict(result), "task": named.name, "task_settings": arguments}
    show(quiet, json, data, str(result))
    if result.bad:
        complain(f"{named.name}: {'; '.join(line.value for line in result.bad)}.")
        raise typer.Exit(1)
