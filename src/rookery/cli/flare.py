"""`rookery flare submit`: a run on a federation of NVIDIA FLARE's, and what its server does for it."""

from __future__ import annotations

import dataclasses
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
from rookery.cli.asked import AlgorithmName, Cohort, ConfigFile, Rounds, Seed, Settings, ask
from rookery.cli.program import AsJson, Command, Quiet, app, border, complain, say, writable
from rookery.cli.running import alone, execute
from rookery.cli.serve import AllowOtherStudy, Clip, Deadline, Minimum, Noise, Patience, channel_of, study_of
from rookery.cli.site import fitting, read_module

if TYPE_CHECKING:
    from rookery.engines.federation.transports import nvflare

flare = typer.Typer(no_args_is_help=True)
app.add_typer(flare, name="flare")

_LINE = 3000  # characters of a line, some of which may be the server's


@flare.callback()
def _group() -> None:
    """Run on a federation of NVIDIA FLARE's."""


@flare.command(cls=Command)
def submit(
    task: Annotated[str, typer.Argument(help="package.module:task, as the server has it; no code is sent.")],
    admin: Annotated[Path, typer.Option(help="The folder of your administrator's kit, with startup/ in it.")],
    out: Annotated[Path, typer.Option(help="Folder to write results to.")],
    sites: Annotated[
        str | None, typer.Option(help="The sites' names, a,b,c, in the order of the task's clients; all, sorted.")
    ] = None,
    algorithm: AlgorithmName = None,
    settings: Settings = None,
    rounds: Rounds = None,
    cohort: Cohort = None,
    seed: Seed = 0,
    every: Annotated[int | None, typer.Option(help="Rounds from one evaluation to the next.")] = None,
    run: Annotated[
        str | None, typer.Option(help="The run's name; given again, it goes on from its checkpoint at the server.")
    ] = None,
    minimum: Minimum = None,
    deadline: Deadline = 300.0,
    patience: Patience = None,
    clip: Clip = None,
    noise: Noise = None,
    again: Annotated[int, typer.Option(help="How often to submit again what was lost.")] = 3,
    allow_other_study: AllowOtherStudy = False,
    config: ConfigFile = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Run an algorithm on the sites of a FLARE federation; wait for it, and fetch its results."""
    from rookery import report
    from rookery.engines.federation import supervisor
    from rookery.engines.federation.transports import nvflare
    from rookery.run.result import metrics_of

    with border():
        writable(out)
        if (out / "run.json").exists():
            raise ValueError(f"{out} holds a run already; give another --out.")
        name = run or f"{re.sub(r'[^A-Za-z0-9]+', '-', task).strip('-')}-{time.strftime('%Y%m%d-%H%M%S')}"
        channel_of(clip, noise)
        options: dict[str, Any] = {"task": task, "algorithm": algorithm, "set": settings or [], "rounds": rounds}
        options |= {"cohort": cohort, "seed": seed, "every": every, "run": check_name(name), "minimum": minimum}
        options |= {"deadline": deadline, "patience": patience, "clip": clip, "noise": noise}
        options |= {"allow_other_study": allow_other_study}
        _check_files(options)
        logging.basicConfig(handlers=[logging.NullHandler()])  # FLARE's client logs what is told in one line here
        tell = lambda text: None if quiet else print(printable(text, _LINE), file=sys.stderr)
        try:
            connect = lambda: supervisor.session(admin)
            names = _names(sites) if sites else _connected(connect)
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
            complain(f"The job was aborted; the same command with --run {name} goes on from its checkpoint.")
            raise typer.Exit(130) from None
        description, history = report.read_run(out)
        if json:
            print(report.to_json({**description, "out": out}))
        shown = history[metrics_of(history)].iloc[[0, -1]].T.set_axis(["first", "last"], axis=1)
        title = f"{description['algorithm']} on {description['task']}, {int(history['round'].iloc[-1])} rounds"
        say(quiet, json, report.table(shown.rename(printable).reset_index(names=""), printable(title)))
        say(quiet, json, f"Written to {out}.")
        if description.get("stopped"):
            complain(f"The run stopped: {description['stopped']}")
            raise typer.Exit(1)


def check_name(name: str) -> str:
    """A run's name, which is that of a folder at the server."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(f"--run {name!r}: give letters, digits, '.', '-' and '_', at most 100.")
    return name


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _connected(connect: Any) -> list[str]:
    session = connect()
    try:
        found = sorted(client.name for client in session.get_connected_client_list())
    finally:
        session.close()
    if not found:
        raise ValueError("No site is connected to FLARE's server; start the sites, or name them by --sites.")
    return found


def _wait_for(folder: Path, seconds: float = 60.0) -> None:
    """Until no other job has this run: the process of one that was lost may take a while to end."""
    end = time.monotonic() + seconds
    while folder.exists():
        try:
            with alone(folder):
                return
        except ValueError:
            if time.monotonic() > end:
                raise
        time.sleep(1)


def _check_references(options: dict[str, Any], own: nvflare.Own) -> None:
    """A job names a task that the server's settings list, or, if they list none, one that is known by a plain name.

    What package.module:name refers to is called: `os:system` would run a command.
    """
    from rookery.cli.registry import is_reference
    from rookery.engines.federation.transports import nvflare

    _check_files(options)
    task = options["task"]
    if task not in own.said.get("tasks", [] if is_reference(task) else [task]):
        raise ValueError(
            f"A job's task must be one that the server's {nvflare.SETTINGS} lists; got {printable(task)}. "
            "Add it there, to tasks = [...]."
        )


def _check_files(options: dict[str, Any]) -> None:
    for kind in ("task", "algorithm"):
        if options[kind] is not None and (".py" in options[kind] or "/" in options[kind]):
            raise ValueError(f"The {kind} {options[kind]} is a file; of a job, name a module: package.module:{kind}.")


def responder(own: nvflare.Own, name: str) -> Any:
    """What answers at a site: by the site's own settings alone."""
    from rookery.engines.federation.audit import FILE, Audit
    from rookery.engines.federation.policy import Policy, guard_of
    from rookery.engines.federation.responder import Responder
    from rookery.engines.federation.transports import nvflare

    if "module" not in own.said:
        raise ValueError(f'{nvflare.SETTINGS} names no module; add module = "local/hospital.py".')
    task, brings, names = read_module(own.root / own.said["module"])
    folder = own.folder("folder", "rookery/memory")
    rules = Policy.read(own.root / own.said["policy"]) if "policy" in own.said else Policy()
    return Responder(name, brings, folder, guard_of(rules, Audit(folder / FILE)), fitting(task, names))


def coordinate(options: dict[str, Any], calls: nvflare.Calls, out: Path, own: nvflare.Own) -> None:
    """What the job's process at FLARE's server does: the run, by the options of `submit`.

    Arguments:
        options: those of `submit`, and the names of the sites.
        calls: the way to the sites.
        out: where results go to; the run itself has a folder of its own, and goes on with what is there.
        own: the server's own settings.
    """
    from rookery.cli.registry import blaming, find_task

    _check_references(options, own)
    sys.path.extend(path for path in own.texts("path") if path not in sys.path)
    folder = own.folder("runs", "rookery/runs") / check_name(options["run"])
    _wait_for(folder)
    with blaming():
        takes = inspect.signature(find_task(options["task"]).thing).parameters
        clients = len(options["sites"]) if "clients" in takes else None
        asked = ask(options["task"], options["algorithm"], options["set"], clients, None, options["seed"])
        method = asked.method
        execute(
            asked,
            method,
            {f.name: getattr(method, f.name) for f in dataclasses.fields(method)},
            options["rounds"],
            options["cohort"],
            options["every"],
            options["seed"],
            folder,
            folder.exists(),
            True,
            False,
            {name: options[name] for name in ("minimum", "deadline", "patience", "clip", "noise")},
            command="flare submit",
            engine=rk.Federation(
                transport=calls,
                deadline=options["deadline"],
                patience=options["patience"],
                tell=calls.say,
                watch=calls.follow,
                study=study_of(asked.named),
                allow_other_study=options.get("allow_other_study", False),
            ),
            channel=channel_of(options["clip"], options["noise"]),
            faults=None if options["minimum"] is None else rk.Faults(minimum=options["minimum"]),
        )
    for path in folder.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy2(path, out)
