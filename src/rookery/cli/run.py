"""`rookery run`: run algorithms on tasks, and save the runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

import rookery as rk
from rookery.cli import options as opt
from rookery.cli.distributed import Coordinator, Distributed, Process, Processes, join
from rookery.cli.execution import RunOptions, execute
from rookery.cli.privacy import Privacy
from rookery.cli.program import Command, app
from rookery.cli.request import Request, TaskOptions, default_algorithm_of, resolve
from rookery.cli.settings import parse_value
from rookery.cli.speeds import Speeds


@app.command(cls=Command)
def run(
    task: opt.TaskNames,
    algorithm: opt.AlgorithmNames = None,
    settings: opt.Settings = None,
    rounds: opt.Rounds = None,
    cohort: opt.Cohort = None,
    clients: opt.ClientCount = None,
    partition: opt.Partition = None,
    server_optimizer: Annotated[
        str | None,
        typer.Option(help="An optimizer for the server's step on x, with its step size: adam:0.001 (FedAdam)."),
    ] = None,
    seed: opt.Seed = 0,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Run this many seeds, starting with --seed. With --seeds, several tasks or several algorithms, each "
            "run has its own folder in --out."
        ),
    ] = None,
    every: opt.Every = None,
    private: opt.Private = None,
    delta: opt.Delta = None,
    unit: opt.Unit = None,
    poisson: opt.Poisson = False,
    clip: opt.Clip = None,
    noise: opt.Noise = None,
    secure_sum: opt.SecureSum = False,
    robust: opt.Robust = None,
    compress: opt.Compress = None,
    attack: opt.Attack = None,
    clock: opt.Clock = None,
    deadline: opt.LateReplies = None,
    first: opt.First = None,
    correct: opt.Correct = False,
    asynchronous: opt.Asynchronous = None,
    staleness: opt.Staleness = None,
    oldest: opt.Oldest = None,
    config: opt.ConfigFile = None,
    out: opt.Out = None,
    resume: opt.Resume = False,
    mesh: Annotated[
        str | None,
        typer.Option(help="Divide the clients among devices: all, or a number; --distributed implies all."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Precision of the losses: bfloat16, or float32 (full, also on GPUs).")
    ] = None,
    remat: Annotated[
        bool, typer.Option("--remat", help="Use less memory for derivatives, at the cost of more arithmetic.")
    ] = False,
    distributed: Distributed = False,
    coordinator: Coordinator = None,
    processes: Processes = None,
    process: Process = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Run slowly, client by client, and name the place of the first NaN.")
    ] = False,
    quiet: opt.Quiet = False,
    json: opt.AsJson = False,
) -> None:
    """Run algorithms on tasks. Several runs end with a table of means and standard errors, and a picture."""
    if join(distributed, coordinator, processes, process):
        mesh = mesh or "all"
    engine = rk.Simulation(
        debug=debug, mesh=None if mesh is None else parse_value(mesh), precision=precision, remat=remat
    )
    recorded = {"server-optimizer": server_optimizer, "mesh": mesh, "precision": precision, "remat": remat or None}
    privacy = Privacy(private, delta, clip, noise, unit, poisson, secure_sum, robust, compress, attack)
    speeds = Speeds(clock, deadline, first, correct, asynchronous, staleness, oldest)
    options = RunOptions(rounds, cohort, every, seed, out, resume, quiet, json, privacy, speeds)
    settings = settings or []

    def request(task: str, algorithm: str | None, settings: Sequence[str], seed: int) -> Request:
        options = TaskOptions(settings, clients, partition, seed)
        return privacy.fit(resolve(task, algorithm, options, server_optimizer))

    if len(task) == len(algorithm or [None]) == 1 and seeds is None:
        single = request(task[0], algorithm[0] if algorithm else None, settings, seed)
        raise typer.Exit(execute(single, options, recorded, engine=engine))
    if distributed or coordinator:
        raise ValueError("--distributed takes one task, one algorithm and no --seeds.")
    from rookery.cli.grid import run_grid

    task_options = TaskOptions(settings, clients, partition, seed)
    pairs = [(name, method) for name in task for method in algorithm or [default_algorithm_of(name, task_options)]]
    raise typer.Exit(run_grid(pairs, settings, 1 if seeds is None else seeds, request, options, recorded, engine))
