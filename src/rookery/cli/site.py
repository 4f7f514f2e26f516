"""`rookery site`: take part in a run over a network with data that stay here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rookery.base.printable import printable
from rookery.cli.options import Address, AllowOtherStudy, Insecure, KitFolder, Quiet
from rookery.cli.program import Command, app
from rookery.cli.request import fit
from rookery.cli.serve import INSECURE, network_errors
from rookery.cli.terminal import complain, logger

if TYPE_CHECKING:
    from rookery.engines.federation.policy import Policy
    from rookery.engines.federation.responder import Opened, Study
    from rookery.engines.federation.spending import Spending
    from rookery.tasks.task import Task

_LINE_LENGTH = 3000  # the longest line of text from the coordinator


@app.command(cls=Command)
def site(
    module: Annotated[
        Path, typer.Option(help="A file with `task`, which all sites share, and `data()`, this site's data.")
    ],
    kit: KitFolder = None,
    name: Annotated[str | None, typer.Option(help="This site's name. Default: the kit's.")] = None,
    address: Address = None,
    insecure: Insecure = False,
    folder: Annotated[Path | None, typer.Option(help="Folder for the memory between rounds, and for the log.")] = None,
    patience: Annotated[
        float | None, typer.Option(help="Seconds without a connection before giving up. Default: never give up.")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="A TOML file: in which runs this site takes part, and its privacy budget."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print what the run asks of this site, without taking part.")
    ] = False,
    allow_other_study: AllowOtherStudy = False,
    quiet: Quiet = False,
) -> None:
    """Take part in a run with data that stay here, until the coordinator ends the run."""
    from rookery.engines.federation.audit import FILE, Audit, read
    from rookery.engines.federation.kits import COORDINATOR, load_kit
    from rookery.engines.federation.policy import Policy, PolicyGuard
    from rookery.engines.federation.transports.grpc_site import JoinError
    from rookery.run import join as sites

    with network_errors():
        loaded = None if kit is None else load_kit(kit, address)
        if loaded is None and not insecure:
            raise ValueError(
                "A site needs certificates; got no kit. Give --kit FOLDER, made by `rookery federation init`."
            )
        name = name or (loaded.name if loaded else None)
        if name is None:
            raise ValueError("Without a kit, a site needs a name; got none. Give --name NAME.")
        if loaded is not None and name != loaded.name:
            raise ValueError(
                f"--name must be that of the kit, {loaded.name}; got {name}. Leave out --name, or give its own kit."
            )
        if loaded is not None and loaded.name == COORDINATOR:
            raise ValueError(f"--kit must be a site's; {kit} is the coordinator's. Give this site's own.")
        if insecure:
            print(INSECURE, file=sys.stderr)
        rules = Policy() if policy is None else Policy.read(policy)
        task, study, names = read_module(module)
        tell = logger(quiet, longest=_LINE_LENGTH)
        fit_to = fitting(task, names)

        def fitted(study: Study, algorithm: Any) -> Study:
            tell(f"The coordinator opens a run of {type(algorithm).__name__}.")
            return fit_to(study, algorithm)

        spent = None if folder is None or not explain else read(folder / FILE)[1].spending
        folder = None if explain else folder
        audit = None if folder is None else Audit(folder / FILE)
        reading = Reading(rules, spent)
        if explain:
            tell("Waiting for the coordinator, which opens the run when all sites are connected.")
        try:
            responder = sites.join(
                loaded.address if loaded else address or "127.0.0.1:9443",
                name,
                study,
                kit=loaded,
                folder=folder,
                guard=reading if explain else PolicyGuard(rules, audit),
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
    """A guard that prints what a run asks, and refuses to take part."""

    def __init__(self, rules: Policy, spent: Spending | None = None) -> None:
        self._rules, self._spent, self.done = rules, spent, False

    def __call__(self, opened: Opened) -> None:
        """Print the plan and the policy's verdict."""
        from rookery.engines.federation.in_words import in_words_for_a_site
        from rookery.engines.federation.site import RefusedError

        print(in_words_for_a_site(opened, self._rules.budget, self._spent))
        try:
            self._rules.check(opened)
            print("This site's policy allows it.")
        except RefusedError as error:
            print(f"This site's policy does not allow it: {printable(error, _LINE_LENGTH)}")
        self.done = True
        raise RefusedError("its owner is reading the plan, and has yet to take part.")


def read_module(path: Path) -> tuple[Task, Study, dict[str, Any]]:
    """Load a site's file; return the task, the site's study, and all names of the file."""
    from rookery.cli.own_code import load_file
    from rookery.engines.federation.agreement import declared
    from rookery.run import join as sites
    from rookery.tasks.task import Task

    module = load_file(path)
    task, data = getattr(module, "task", None), getattr(module, "data", None)
    task = task() if callable(task) and not isinstance(task, Task) else task
    if not isinstance(task, Task):
        raise ValueError(
            f"{path} must define task, a Task or a function returning one, the same at all sites; it does not."
        )
    if not callable(data):
        raise ValueError(
            f'{path} must define data(), a function that returns the site\'s data: {{"lower": rows, "upper": rows}}.'
        )
    names = {name: thing for name, thing in vars(module).items() if not name.startswith("_")}
    study = sites.study(task.problem, task.init, data(), task.evaluate_client, names)
    agreed = declared(*_defining(module), task.problem, task.evaluate_client, private=module)
    return task, dataclasses.replace(study, declared=agreed), names


def _defining(module: ModuleType) -> list[Any]:
    """Return the task of a site's file, and all other modules that have it: one of them defines it."""
    task = module.task
    others = [other for other in list(sys.modules.values()) if isinstance(other, ModuleType) and other is not module]
    return [task, *(other for other in others if any(thing is task for thing in list(vars(other).values())))]


def fitting(task: Task, names: dict[str, Any]) -> Callable[[Study, Any], Study]:
    """Return a function that fits a site's study to a method: the same data, the task in the method's form."""
    from rookery.engines.federation.responder import Study
    from rookery.run import join as sites

    def fitted(before: Study, algorithm: Any) -> Study:
        form, _ = fit(task, type(algorithm))
        described = sites.described(form.problem, form.init, form.evaluate_client)
        return Study(described.problem, described.init, before.data, described.measure, names)

    return fitted
