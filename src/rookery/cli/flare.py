"""`rookery flare submit`: run on an NVIDIA FLARE federation; and the parts that its server and sites run."""

from __future__ import annotations

import inspect
import logging
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import rookery as rk
from rookery.base.printable import printable
from rookery.cli import options as opt
from rookery.cli.execution import RunOptions, execute, spent
from rookery.cli.lookup import split_names
from rookery.cli.privacy import CODE, Privacy
from rookery.cli.program import Command, app
from rookery.cli.request import TaskOptions, resolve
from rookery.cli.run_folder import locked
from rookery.cli.serve import study_of
from rookery.cli.site import fitting, read_module
from rookery.cli.speeds import Speeds
from rookery.cli.terminal import complain, locating_errors, show, writable

if TYPE_CHECKING:
    from rookery.engines.federation.transports import nvflare

flare = typer.Typer(no_args_is_help=True)
app.add_typer(flare, name="flare")

_LINE_LENGTH = 3000  # the longest line of text from the server


@flare.callback()
def _group() -> None:
    """Run on an NVIDIA FLARE federation."""


@flare.command(cls=Command)
def submit(
    task: Annotated[str, typer.Argument(help="package.module:task, as installed at the server; no code is sent.")],
    admin: Annotated[Path, typer.Option(help="The folder of your administrator's kit, which contains startup/.")],
    out: Annotated[Path, typer.Option(help="Folder to write results to.")],
    sites: Annotated[
        str | None,
        typer.Option(help="The sites' names, a,b,c, in the order of the task's clients. Default: all, sorted."),
    ] = None,
    algorithm: opt.AlgorithmName = None,
    settings: opt.Settings = None,
    rounds: opt.Rounds = None,
    cohort: opt.Cohort = None,
    seed: opt.Seed = 0,
    every: opt.Every = None,
    run: Annotated[
        str | None,
        typer.Option(help="The run's name; if given again, the run continues from its checkpoint at the server."),
    ] = None,
    minimum: opt.Minimum = None,
    deadline: opt.Deadline = 300.0,
    patience: opt.Patience = None,
    asynchronous: opt.Asynchronous = None,
    staleness: opt.Staleness = None,
    oldest: opt.Oldest = None,
    private: opt.Private = None,
    delta: opt.Delta = None,
    unit: opt.Unit = None,
    poisson: opt.Poisson = False,
    clip: opt.Clip = None,
    noise: opt.Noise = None,
    again: Annotated[int, typer.Option(help="How often to resubmit a lost job.")] = 3,
    allow_other_study: opt.AllowOtherStudy = False,
    config: opt.ConfigFile = None,
    quiet: opt.Quiet = False,
    json: opt.AsJson = False,
) -> None:
    """Run an algorithm on the sites of a FLARE federation; wait for it, and fetch the results."""
    from rookery import report
    from rookery.engines.federation import supervisor
    from rookery.engines.federation.transports import nvflare
    from rookery.run.result import metrics_of

    writable(out)
    if (out / "run.json").exists():
        raise ValueError(f"{out} holds a run already. Give another --out.")
    name = run or f"{re.sub(r'[^A-Za-z0-9]+', '-', task).strip('-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    privacy = Privacy(private, delta, clip, noise, unit, poisson)
    privacy.channel  # noqa: B018  raises for options that do not belong together
    late: dict[str, Any] = {"asynchronous": asynchronous, "staleness": staleness, "oldest": oldest}
    Speeds(**late).solve_options()  # the same
    options: dict[str, Any] = {
        "task": task, "algorithm": algorithm, "set": settings or [], "rounds": rounds, "cohort": cohort,
        "seed": seed, "every": every, "run": check_name(name), "minimum": minimum, "deadline": deadline,
        "patience": patience, "allow_other_study": allow_other_study, **late, **privacy.recorded,
    }  # fmt: skip
    _check_files(options)
    logging.basicConfig(handlers=[logging.NullHandler()])  # hides the log of FLARE's client
    tell = lambda text: None if quiet else print(printable(text, _LINE_LENGTH), file=sys.stderr)
    try:
        connect = lambda: supervisor.session(admin)
        names = split_names(sites) or _connected(connect)
        tell(f"The run is called {name}; its sites are {', '.join(names)}.")
        with tempfile.TemporaryDirectory() as folder:
            job = nvflare.write_job(Path(folder) / name, options, names, name=name)
            supervisor.supervise(connect, job, out, again=again, tell=tell)
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None
    except supervisor.JobFailedError as error:
        complain(str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        complain(f"The job was aborted. The same command with --run {name} continues from its checkpoint.")
        raise typer.Exit(130) from None
    description, history = report.read_run(out)
    shown = history[metrics_of(history)].iloc[[0, -1]].T.set_axis(["first", "last"], axis=1)
    title = f"{description['algorithm']} on {description['task']}, {int(history['round'].iloc[-1])} rounds"
    table = report.table(shown.rename(printable).reset_index(names=""), printable(title))
    show(quiet, json, {**description, "out": out}, table, f"Written to {out}.")
    if description.get("stopped"):
        complain(f"The run stopped: {description['stopped']}")
        raise typer.Exit(1)
    if description.get("spent"):
        complain(printable(f"{title}: {spent(description, int(history['round'].iloc[-1]))}"))
        raise typer.Exit(CODE)


def check_name(name: str) -> str:
    """Return a run's name if it can name a folder at the server."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(f"--run must be at most 100 letters, digits, '.', '-' and '_'; got {name!r}.")
    return name


def _connected(connect: Any) -> list[str]:
    session = connect()
    try:
        names = sorted(client.name for client in session.get_connected_client_list())
    finally:
        session.close()
    if not names:
        raise ValueError("No site is connected to FLARE's server. Start the sites, or name them with --sites.")
    return names


def _wait_for(folder: Path, seconds: float = 60.0) -> None:
    """Wait until no other job runs in this folder: the process of a lost job may take a while to end."""
    end = time.monotonic() + seconds
    while folder.exists():
        try:
            with locked(folder):
                return
        except ValueError:
            if time.monotonic() > end:
                raise
        time.sleep(1)


def _check_references(options: dict[str, Any], own: nvflare.Settings) -> None:
    """Raise ValueError unless the server's settings list the job's task, or list no tasks and its name is plain.

    Without this, package.module:name could call anything: `os:system` would run a command.
    """
    from rookery.cli.own_code import is_reference
    from rookery.engines.federation.transports import nvflare

    _check_files(options)
    task = options["task"]
    if task not in own.values.get("tasks", [] if is_reference(task) else [task]):
        raise ValueError(
            f"A job's task must be one that the server's {nvflare.SETTINGS} lists; got {printable(task)}. "
            "Add it there, to tasks = [...]."
        )


def _check_files(options: dict[str, Any]) -> None:
    for kind in ("task", "algorithm"):
        if options[kind] is not None and (".py" in options[kind] or "/" in options[kind]):
            raise ValueError(
                f"The {kind} of a job must be in a module, package.module:{kind}; got the file {options[kind]}."
            )


def responder(own: nvflare.Settings, name: str) -> Any:
    """Return the responder that answers at a site, by the site's own settings."""
    from rookery.engines.federation.audit import FILE, Audit
    from rookery.engines.federation.policy import Policy, PolicyGuard
    from rookery.engines.federation.responder import Responder
    from rookery.engines.federation.transports import nvflare

    if "module" not in own.values:
        raise ValueError(f'{nvflare.SETTINGS} must name a module; it does not. Add module = "local/hospital.py".')
    task, study, names = read_module(own.root / own.values["module"])
    folder = own.folder("folder", "rookery/memory")
    rules = Policy.read(own.root / own.values["policy"]) if "policy" in own.values else Policy()
    return Responder(name, study, folder, PolicyGuard(rules, Audit(folder / FILE)), fitting(task, names))


def coordinate(options: dict[str, Any], calls: nvflare.Calls, out: Path, own: nvflare.Settings) -> None:
    """Coordinate the run in the job's process at FLARE's server.

    Arguments:
        options: the options of `submit`, and the names of the sites.
        calls: the transport to the sites.
        out: the folder for results; the run has its own folder, and continues there if it exists.
        own: the server's settings.
    """
    from rookery.cli.registry import find_task

    _check_references(options, own)
    sys.path.extend(path for path in own.paths("path") if path not in sys.path)
    folder = own.folder("runs", "rookery/runs") / check_name(options["run"])
    _wait_for(folder)
    with locating_errors():
        parameters = inspect.signature(find_task(options["task"]).target).parameters
        clients = len(options["sites"]) if "clients" in parameters else None
        task_options = TaskOptions(options["set"], clients, None, options["seed"])
        privacy = Privacy.read(options)
        request = privacy.fit(resolve(options["task"], options["algorithm"], task_options))
        numbers = {name: options[name] for name in ("rounds", "cohort", "every", "seed")}
        late: dict[str, Any] = {name: options.get(name) for name in ("asynchronous", "staleness", "oldest")}
        execute(
            request,
            RunOptions(
                **numbers, out=folder, resume=folder.exists(), quiet=True, privacy=privacy, speeds=Speeds(**late)
            ),
            {name: options[name] for name in ("minimum", "deadline", "patience")},
            command="flare submit",
            engine=rk.Federation(
                transport=calls,
                deadline=options["deadline"],
                patience=options["patience"],
                tell=calls.say,
                watch=calls.follow,
                study=study_of(request.named_task),
                allow_other_study=options.get("allow_other_study", False),
            ),
            faults=None if options["minimum"] is None else rk.Faults(minimum=options["minimum"]),
        )
    for path in folder.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, out)
