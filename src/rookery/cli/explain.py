"""`rookery explain`: show what is exchanged in a round."""

import dataclasses
import sys

import rookery as rk
from rookery.cli import options as opt
from rookery.cli.privacy import Privacy
from rookery.cli.program import Command, app
from rookery.cli.request import TaskOptions, resolve


@app.command(cls=Command)
def explain(
    task: opt.TaskName,
    algorithm: opt.AlgorithmName = None,
    settings: opt.Settings = None,
    cohort: opt.Cohort = None,
    clients: opt.ClientCount = None,
    partition: opt.Partition = None,
    seed: opt.Seed = 0,
    private: opt.Private = None,
    delta: opt.Delta = None,
    unit: opt.Unit = None,
    poisson: opt.Poisson = False,
    clip: opt.Clip = None,
    noise: opt.Noise = None,
    secure_sum: opt.SecureSum = False,
    robust: opt.Robust = None,
    compress: opt.Compress = None,
    rounds: opt.Rounds = None,
    config: opt.ConfigFile = None,
) -> None:
    """Show every exchange of a round: what clients receive, what they keep, what they send. Nothing is run.

    With --private and --delta, show the price of privacy as well: what a round releases, and the noise and the ε that
    follow.
    """
    privacy = Privacy(private, delta, clip, noise, unit, poisson, secure_sum, robust, compress)
    channel = privacy.channel
    request = privacy.fit(resolve(task, algorithm, TaskOptions(settings or [], clients, partition, seed)))
    if request.note:
        print(request.note, file=sys.stderr)
    made = request.task
    how = {"cohort": privacy.cohort(made.cohort if cohort is None else cohort), "channel": channel}
    if private is not None:
        shared = made.rounds if rounds is None else rounds
        how |= {"channel": None, "private": dataclasses.replace(channel, rounds=max(shared, 1))}
    print(rk.explain(made.problem, made.clients, request.method, made.init, **how))
