"""`rookery run`: an algorithm on a task, and the folder that it is saved in."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

import rookery as rk
from rookery.cli.asked import (
    AlgorithmNames,
    Asked,
    ClientCount,
    Cohort,
    ConfigFile,
    Partition,
    Rounds,
    Seed,
    Settings,
    TaskNames,
    ask,
    default_of,
    optimizer_of,
    value_of,
)
from rookery.cli.distributed import Coordinator, Distributed, Process, Processes, join
from rookery.cli.program import AsJson, Command, Out, Quiet, app, border
from rookery.cli.running import execute


@app.command(cls=Command)
def run(
    task: TaskNames,
    algorithm: AlgorithmNames = None,
    settings: Settings = None,
    rounds: Rounds = None,
    cohort: Cohort = None,
    clients: ClientCount = None,
    partition: Partition = None,
    server_optimizer: Annotated[
        str | None,
        typer.Option(help="An optimizer that takes the server's step on x, and its step size: adam:0.001 (FedAdam)."),
    ] = None,
    seed: Seed = 0,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Run this many seeds, from --seed on. With --seeds, several tasks or several algorithms, each run has "
            "a folder of its own in --out."
        ),
    ] = None,
    every: Annotated[int | None, typer.Option(help="Rounds from one evaluation to the next.")] = None,
    config: ConfigFile = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    mesh: Annotated[
        str | None, typer.Option(help="Divide the clients among devices: all, or how many; --distributed means all.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of the losses: bfloat16, or float32 (in full, also on GPUs).")
    ] = None,
    remat: Annotated[bool, typer.Option("--remat", help="Less memory for the derivatives, more arithmetic.")] = False,
    distributed: Distributed = False,
    coordinator: Coordinator = None,
    processes: Processes = None,
    process: Process = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Slowly, client by client; name the place of the first NaN.")
    ] = False,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Run algorithms on tasks. Several runs end with a table of means and standard errors, and a picture."""
    from rookery.cli.registry import blaming

    with border(), blaming():
        if join(distributed, coordinator, processes, process):
            mesh = mesh or "all"
        divided = value_of(mesh) if mesh is not None else None
        engine = rk.Simulation(debug=debug, mesh=divided, precision=precision, remat=remat)
        also = {"server-optimizer": server_optimizer, "mesh": mesh, "precision": precision, "remat": remat or None}

        def made(task: str, algorithm: str | None, settings: list[str], seed: int) -> tuple[Asked, Any, dict[str, Any]]:
            asked = ask(task, algorithm, settings, clients, partition, seed)
            hyper = {f.name: getattr(asked.method, f.name) for f in dataclasses.fields(asked.method)}
            if server_optimizer is None:
                return asked, asked.method, hyper
            method = rk.with_server_optimizer(asked.method, upper=optimizer_of(server_optimizer))
            return asked, method, hyper | {"server_optimizer": server_optimizer}

        if len(task) == len(algorithm or [None]) == 1 and seeds is None:
            one = made(task[0], algorithm[0] if algorithm else None, settings or [], seed)
            done = execute(*one, rounds, cohort, every, seed, out, resume, quiet, json, also, engine=engine)
            raise typer.Exit(done)
        if distributed or coordinator:
            raise ValueError("--distributed takes one task, one algorithm and no --seeds.")
        from rookery.cli.several import several

        pairs = [(own, name) for own in task for name in algorithm or []]
        pairs = pairs or [(own, default_of(own, settings or [], clients, partition, seed)) for own in task]
        plan = (pairs, settings or [], seed, 1 if seeds is None else seeds)
        raise typer.Exit(several(*plan, made, rounds, cohort, every, out, resume, quiet, json, also, engine))
