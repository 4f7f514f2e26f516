"""A command that several processes run together: each started by SLURM, or by hand with its number."""

import os
import signal
import subprocess
import sys
from typing import Annotated

import typer

from rookery.cli.program import complain

Distributed = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="This is one of several processes that run it together, on all their devices: started under SLURM, or "
        "with the three options below.",
    ),
]
Coordinator = Annotated[str | None, typer.Option(help="The address of process 0 for --distributed, HOST:PORT.")]
Processes = Annotated[int | None, typer.Option(help="How many processes there are.")]
Process = Annotated[int | None, typer.Option(help="Which one this is, from 0.")]
_WORKER = "ROOKERY_WORKER"


def join(distributed: bool, coordinator: str | None, processes: int | None, process: int | None) -> bool:
    """Join the other processes, if there are any to join; whether there are.

    The work is done by a process of its own: JAX ends it in its own way when another one dies, and somebody must be
    left to say so.
    """
    given = [value is not None for value in (coordinator, processes, process)]
    if not (distributed or any(given)):
        return False
    if any(given) and not all(given):
        raise ValueError("Give --coordinator HOST:PORT, --processes N and --process I, all three.")
    if coordinator is not None and processes is not None and process is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"--coordinator must be HOST:PORT, as in node1:9480; got {coordinator!r}.")
        if processes < 1 or not 0 <= process < processes:
            raise ValueError(f"--process must be from 0 to --processes - 1; got --process {process} of {processes}.")
    if os.environ.get(_WORKER) == "1":
        from rookery.base.processes import start

        start(coordinator, processes, process)
        return True
    raise typer.Exit(_supervised())


def _supervised() -> int:
    """The exit code of the same command in a process of its own."""
    worker = subprocess.Popen([sys.executable, "-m", "rookery.cli", *sys.argv[1:]], env={**os.environ, _WORKER: "1"})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker hears it, too
    # JAX keeps SIGTERM from a worker: it is told as by Ctrl-C, and ends with a checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: worker.send_signal(signal.SIGINT))
    code = worker.wait()
    if code < 0:
        complain(
            f"This process of the run was ended ({signal.Signals(-code).name}), most likely because another one is "
            "gone: see what that one said last. With --out, the run goes on from its last checkpoint with --resume."
        )
        return 1
    return code
