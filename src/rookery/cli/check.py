"""`rookery check`: a task's problem, looked at before a run."""

import dataclasses

import typer

import rookery as rk
from rookery.cli.asked import ClientCount, ConfigFile, Partition, Seed, Settings, TaskName, own_options, read_settings
from rookery.cli.program import AsJson, Command, Quiet, app, border, complain, say


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
    """Look at a task's problem before a run: curvature, derivatives, steps to try; code 1 if something is bad."""
    from rookery import report
    from rookery.cli.registry import blaming, find_task, make_task

    with border(), blaming():
        named = find_task(task)
        _, arguments = read_settings(settings or [], named, None)
        chosen = make_task(named, **arguments | own_options(named, clients, partition, seed))
        found = rk.check(chosen.problem, chosen.clients, chosen.init, seed=seed)
        if json:
            print(report.to_json({**dataclasses.asdict(found), "task": named.name, "task_settings": arguments}))
        say(quiet, json, str(found))
        if found.bad:
            complain(f"{named.name}: {'; '.join(line.value for line in found.bad)}.")
            raise typer.Exit(1)
