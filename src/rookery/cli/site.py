"""`rookery site`: one's own data in a federation over a network."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rookery import site as sites
from rookery.cli.asked import fit
from rookery.cli.program import Command, Quiet, app, border, complain
from rookery.cli.serve import Address, Insecure, KitFolder
from rookery.engines.federation.host import Study
from rookery.engines.federation.kits import load_kit
from rookery.engines.federation.transports.grpc import JoinError
from rookery.registry import blaming, load_file
from rookery.tasks.task import Task


@app.command(cls=Command)
def site(
    module: Annotated[Path, typer.Option(help="A file with `task`, what was agreed on, and `data()`, the site's own.")],
    kit: KitFolder = None,
    name: Annotated[str | None, typer.Option(help="This site's name; the kit has it.")] = None,
    address: Address = None,
    insecure: Insecure = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where it keeps what it remembers from round to round, and its log.")
    ] = None,
    patience: Annotated[
        float | None, typer.Option(help="Seconds without a connection after which it gives up; without it, never.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Take part in a run with data that stay here. It ends when the coordinator ends the run."""
    with border(), blaming():
        own = None if kit is None else load_kit(kit, address)
        if own is None and not insecure:
            raise ValueError("A site needs certificates: --kit FOLDER, made by `rookery federation init`.")
        called = name or (own.name if own else None)
        if called is None:
            raise ValueError("Without a kit a site needs --name.")
        if insecure:
            print("rookery: --insecure: nothing is encrypted, and nobody's name is checked.", file=sys.stderr)
        task, brings, names = read_module(module)
        try:
            host = sites.join(
                own.address if own else address or "127.0.0.1:9443",
                called,
                brings,
                kit=own,
                folder=folder,
                fitted=fitting(task, names),
                tell=_teller(quiet),
                patience=patience,
            )
        except JoinError as error:
            complain(str(error))
            raise typer.Exit(1) from None
        if host.reason:
            complain(f"The coordinator has ended the run: {host.reason}")
            raise typer.Exit(1)
        _teller(quiet)("The run is over.")


def read_module(path: Path) -> tuple[Task, Study, dict[str, Any]]:
    """A site's file: the task, what the site brings, and all its names."""
    module = load_file(path)
    task, data = getattr(module, "task", None), getattr(module, "data", None)
    task = task() if callable(task) and not isinstance(task, Task) else task
    if not isinstance(task, Task):
        raise ValueError(f"{path} has no task; it is a Task, or a function returning one, the same at all sites.")
    if not callable(data):
        raise ValueError(
            f'{path} has no function data(); it returns the site\'s own: {{"lower": rows, "upper": rows}}.'
        )
    names = {name: thing for name, thing in vars(module).items() if not name.startswith("_")}
    brings = sites.study(task.problem, task.init, data(), task.evaluate_client, names)
    return task, brings, names


def fitting(task: Task, names: dict[str, Any]) -> Callable[[Study, Any], Study]:
    """What makes of a site's study the same data for its task as a method takes it."""

    def fitted(before: Study, algorithm: Any) -> Study:
        own, _ = fit(task, type(algorithm))
        found = sites.described(own.problem, own.init, own.evaluate_client)
        return Study(found.problem, found.init, before.data, found.measure, names)

    return fitted


def _teller(quiet: bool) -> Callable[[str], None]:
    def tell(text: str) -> None:
        if not quiet:
            print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)

    return tell
