"""`rookery site`: one's own data in a federation over a network."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rookery.base.printable import printable
from rookery.cli.asked import fit
from rookery.cli.program import Command, Quiet, app, border, complain
from rookery.cli.serve import Address, AllowOtherStudy, Insecure, KitFolder, told

if TYPE_CHECKING:
    from rookery.engines.federation.policy import Policy
    from rookery.engines.federation.responder import Opened, Study
    from rookery.tasks.task import Task

_LINE = 3000  # characters of a line about the run, some of which may be the coordinator's


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
    policy: Annotated[Path | None, typer.Option(help="A TOML file: which runs this site takes part in.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what the run asks of this site, and take no part in it.")
    ] = False,
    allow_other_study: AllowOtherStudy = False,
    quiet: Quiet = False,
) -> None:
    """Take part in a run with data that stay here. It ends when the coordinator ends the run."""
    from rookery.cli.registry import blaming
    from rookery.engines.federation.audit import FILE, Audit
    from rookery.engines.federation.kits import COORDINATOR, load_kit
    from rookery.engines.federation.policy import Policy, guard_of
    from rookery.engines.federation.transports.grpc_site import JoinError
    from rookery.run import join as sites

    with border(), blaming(), told():
        own = None if kit is None else load_kit(kit, address)
        if own is None and not insecure:
            raise ValueError("A site needs certificates: --kit FOLDER, made by `rookery federation init`.")
        called = name or (own.name if own else None)
        if called is None:
            raise ValueError("Without a kit a site needs --name.")
        if own is not None and called != own.name:
            raise ValueError(f"{kit} is the kit of {own.name}, not of {called}; leave out --name, or give its own kit.")
        if own is not None and own.name == COORDINATOR:
            raise ValueError(f"{kit} is the coordinator's kit; a site has one of its own.")
        if insecure:
            print("rookery: --insecure: nothing is encrypted, and nobody's name is checked.", file=sys.stderr)
        rules = Policy() if policy is None else Policy.read(policy)
        task, brings, names = read_module(module)
        tell = _teller(quiet)
        fit_to = fitting(task, names)

        def fitted(study: Study, algorithm: Any) -> Study:
            tell(f"The coordinator opens a run of {type(algorithm).__name__}.")
            return fit_to(study, algorithm)

        folder = None if explain else folder
        audit = None if folder is None else Audit(folder / FILE)
        reading = Reading(rules)
        if explain:
            tell("Waiting for the coordinator to open the run, which it does when all sites are connected.")
        try:
            responder = sites.join(
                own.address if own else address or "127.0.0.1:9443",
                called,
                brings,
                kit=own,
                folder=folder,
                guard=reading if explain else guard_of(rules, audit),
                fitted=fitted,
                enough=lambda: reading.done,
                tell=tell,
                patience=patience,
                allow_other_study=allow_other_study,
            )
        except JoinError as error:
            complain(str(error))
            raise typer.Exit(1) from None
        finally:
            if audit is not None:
                audit.close()
        if explain:
            return
        if responder.reason:
            complain(f"The coordinator has ended the run: {responder.reason}")
            raise typer.Exit(1)
        tell("The run is over.")


class Reading:
    """A guard that says what a run asks, and lets no run be opened."""

    def __init__(self, rules: Policy) -> None:
        self._rules, self.done = rules, False

    def __call__(self, opened: Opened) -> None:
        """Print it."""
        from rookery.engines.federation.in_words import in_words_for_a_site
        from rookery.engines.federation.site import RefusedError

        print(in_words_for_a_site(opened))
        try:
            self._rules.check(opened)
            print("This site's policy allows it.")
        except RefusedError as error:
            print(f"This site's policy does not allow it: {printable(error, _LINE)}")
        self.done = True
        raise RefusedError("its owner is reading the plan, and has yet to take part.")


def read_module(path: Path) -> tuple[Task, Study, dict[str, Any]]:
    """A site's file: the task, what the site brings, and all its names."""
    from rookery.cli.registry import load_file
    from rookery.engines.federation.agreement import declared
    from rookery.run import join as sites
    from rookery.tasks.task import Task

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
    agreed = declared(*_defining(module), task.problem, task.evaluate_client, private=module)
    return task, dataclasses.replace(brings, declared=agreed), names


def _defining(module: ModuleType) -> list[Any]:
    """The task of a site's file, and the modules that have it under a name of their own: one of them defines it."""
    task = module.task
    others = [other for other in list(sys.modules.values()) if isinstance(other, ModuleType) and other is not module]
    return [task, *(other for other in others if any(thing is task for thing in list(vars(other).values())))]


def fitting(task: Task, names: dict[str, Any]) -> Callable[[Study, Any], Study]:
    """What makes of a site's study the same data for its task as a method takes it."""
    from rookery.engines.federation.responder import Study
    from rookery.run import join as sites

    def fitted(before: Study, algorithm: Any) -> Study:
        own, _ = fit(task, type(algorithm))
        found = sites.described(own.problem, own.init, own.evaluate_client)
        return Study(found.problem, found.init, before.data, found.measure, names)

    return fitted


def _teller(quiet: bool) -> Callable[[str], None]:
    def tell(text: str) -> None:
        if not quiet:
            print(time.strftime("%H:%M:%S"), printable(text, _LINE), file=sys.stderr, flush=True)

    return tell
