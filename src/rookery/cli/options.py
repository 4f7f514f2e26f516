"""Arguments and options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.config import config_option, set_with_config


def _complete(kind: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        from rookery.cli.registry import names

        return [name for name in names(kind) if name.lower().startswith(incomplete.lower())]

    return complete


_ALGORITHM = (
    "See `rookery list algorithms`; or your own: fedx.py:FedX, package.module:FedX. Default: FedNest, or one that "
    "solves the task's problem, such as FedAvg."
)
TaskName = Annotated[
    str,
    typer.Argument(
        help="A task (see `rookery list tasks`), or your own: hospital.py:task, package.module:task.",
        autocompletion=_complete("task"),
    ),
]
TaskNames = Annotated[
    list[str],
    typer.Argument(
        metavar="TASK...",
        envvar=[],  # with None, click 8.2 takes no value from --config
        show_envvar=False,
        help="Tasks (see `rookery list tasks`), or your own: hospital.py:task, package.module:task.",
        autocompletion=_complete("task"),
    ),
]
AlgorithmName = Annotated[
    str | None, typer.Option("--algorithm", "-a", help=_ALGORITHM, autocompletion=_complete("algorithm"))
]
AlgorithmNames = Annotated[
    list[str] | None,
    typer.Option("--algorithm", "-a", help=f"{_ALGORITHM} Repeat it for more.", autocompletion=_complete("algorithm")),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        callback=set_with_config,
        help="A hyperparameter of the algorithm, or a setting of the task: upper_step=0.1, batch_size=none, "
        "local_steps=5..15 (a range), local_steps=epochs:2. Repeat it for more.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=config_option,
        is_eager=True,
        help="A TOML file with options of this command; options on the command line win.",
    ),
]
Rounds = Annotated[int | None, typer.Option(help="The number of rounds; the task has a default.")]
Cohort = Annotated[int | None, typer.Option(help="Clients in each round; the task has a default.")]
ClientCount = Annotated[int | None, typer.Option("--clients", help="Clients in all; the task has a default.")]
Partition = Annotated[str | None, typer.Option(help="How to divide the data: iid, shards or dirichlet.")]
Seed = Annotated[int, typer.Option(help="The seed of the task and of the run.")]
Every = Annotated[int | None, typer.Option(help="Rounds from one evaluation to the next.")]
Out = Annotated[Path | None, typer.Option(help="Folder to write to.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
Runs = Annotated[
    list[Path],
    typer.Argument(
        help="Folders of `rookery run --out`, `Run.save` or `rookery reproduce`, JSON-lines files, or CSV files."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output, and nothing else.")]

# Of a channel, and of privacy.
Private = Annotated[
    float | None,
    typer.Option(
        "--private", help="A budget of differential privacy, ε, which all rounds share; exit code 3 if it ends the run."
    ),
]
Delta = Annotated[float | None, typer.Option(help="With --private: δ, below 1 over the number of clients.")]
Unit = Annotated[
    str | None, typer.Option(help="With --private: what is protected, a client (the default) or a record.")
]
Poisson = Annotated[
    bool, typer.Option("--poisson", help="With --private: draw each client with the same chance, --cohort on average.")
]
Clip = Annotated[float | None, typer.Option(help="The largest norm of what a client sends. Default with --private: 1.")]
Noise = Annotated[
    float | None,
    typer.Option(
        help="Noise on each mean, as a multiple of one client's effect under --clip. Default with --private: as much "
        "as the budget needs."
    ),
]
SecureSum = Annotated[
    bool,
    typer.Option(
        "--secure-sum", help="With --clip: show the coordinator only sums over clients, never a single reply."
    ),
]
Robust = Annotated[
    str | None,
    typer.Option(
        help="A robust mean, and the clients that may lie: median:2, trimmed-mean:2, geometric-median:2, krum:2, "
        "nearest-neighbors:2, bucketing:2; or centered-clipping:RADIUS."
    ),
]
Compress = Annotated[
    str | None, typer.Option(help="Compress what clients send: top-k:0.01, random-k:0.01, quantize:8 or low-rank:4.")
]
Attack = Annotated[
    str | None,
    typer.Option(
        help="Clients that lie, by number or share: sign-flip:2, noise:2, a-little-is-enough:2, "
        "inner-product:2, mimic:2 or nan:2."
    ),
]

# Of a simulated clock.
Clock = Annotated[
    str | None,
    typer.Option(
        help="Speeds of clients, for simulated seconds: compute=50 (gradients a second), uplink=1e6 and downlink=1e6 "
        "(bytes a second) and latency=0.1 (seconds), with commas; compute=lognormal:50:1 draws one for each client; "
        "speeds.csv has a column for each speed and a row for each client; compute=trace.csv has a row for each round."
    ),
]
LateReplies = Annotated[
    float | None, typer.Option("--deadline", help="With --clock: leave out replies that take longer, in seconds.")
]
First = Annotated[int | None, typer.Option(help="With --clock: end an exchange after this many replies of the cohort.")]
Correct = Annotated[
    bool, typer.Option("--correct", help="With --deadline or --first: weights that make up for who is heard rarely.")
]

# Of asynchronous rounds.
Asynchronous = Annotated[
    int | None,
    typer.Option(
        metavar="BUFFER",
        help="Asynchronous rounds: clients begin when they are ready, and a round ends after this many replies. A "
        "simulation also needs --clock.",
    ),
]
Staleness = Annotated[
    float | None,
    typer.Option(
        help="With --asynchronous: A in the weight (1 + rounds since the client began)^-A of a reply. Default: 0.5."
    ),
]
Oldest = Annotated[
    int | None, typer.Option(help="With --asynchronous: ignore replies of clients that began more rounds ago.")
]

# Of a run over a network.
Minimum = Annotated[
    int | None,
    typer.Option(help="Replies that an exchange needs; later ones are left out after the deadline. Default: all."),
]
Deadline = Annotated[float, typer.Option(help="Seconds that a site has for a reply.")]
Patience = Annotated[
    float | None, typer.Option(help="Seconds to wait for sites that are needed. Default: until they are back.")
]
Address = Annotated[
    str | None, typer.Option(help="HOST:PORT. Default: the kit's. A coordinator may listen at 0.0.0.0.")
]
KitFolder = Annotated[
    Path | None, typer.Option("--kit", help="Folder of certificates, made by `rookery federation init`.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Use no certificates, on this machine only: to try things out.")
]
AllowOtherStudy = Annotated[
    bool,
    typer.Option("--allow-other-study", help="Continue, with a warning, if a site's study is not the coordinator's."),
]
