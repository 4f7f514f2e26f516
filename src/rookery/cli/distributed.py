"""Options and start of a command that several processes run together, started by SLURM or by hand."""

import os
import signal
import subprocess
import sys
from typing import Annotated

import typer

from rookery.cli.terminal import complain

Distributed = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="Run as one of several processes, on all their devices: started under SLURM, or with the three options "
        "below.",
    ),
]
Coordinator = Annotated[str | None, typer.Option(help="The address of process 0, HOST:PORT.")]
Processes = Annotated[int | None, typer.Option(help="The number of processes.")]
Process = Annotated[int | None, typer.Option(help="The number of this process, from 0.")]
_WORKER = "ROOKERY_WORKER"


def join(distributed: bool, coordinator: str | None, processes: int | None, process: int | None) -> bool:
    """Join the other processes if this run is distributed; return whether it is.

    The work is done in a child process: JAX kills it if another process dies, and this one remains to report it.
    """
    given = [value is not None for value in (coordinator, processes, process)]
    if not (distributed or any(given)):
        return False
    if any(given) and not all(given):
        raise ValueError("--coordinator, --processes and --process must be given together; got only some of them.")
    if coordinator is not None and processes is not None and process is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"--coordinator must be HOST:PORT, e.g. node1:9480; got {coordinator!r}.")
        if processes < 1 or not 0 <= process < processes:
            raise ValueError(f"--process must be from 0 to --processes - 1; got --process {process} of {processes}.")
    if os.environ.get(_WORKER) == "1":
        from rookery.base.processes import start

        start(coordinator, processes, process)
        return True
    raise typer.Exit(_run_child())


def _run_child() -> int:
    """Run the same command in a child process; return its exit code."""
    child = subprocess.Popen([sys.executable, "-m", "rookery.cli", *sys.argv[1:]], env={**os.environ, _WORKER: "1"})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child receives it, too
    # JAX intercepts SIGTERM in the child; SIGINT, like Ctrl-C, ends the run with a checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGINT))
    code = child.wait()
    if code < 0:
        complain(
            f"This process of the run was ended ({signal.Signals(-code).name}), most likely because another one died: "
            "see its last message. With --out, resume the run from its last checkpoint with --resume."
        )
        return 1
    return code
