"""`rookery serve`: the coordinator of a federation over a network."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import rookery as rk
from rookery.cli.asked import AlgorithmName, Cohort, ConfigFile, Rounds, Seed, Settings, TaskName, ask
from rookery.cli.program import AsJson, Command, Out, Quiet, app, border, complain
from rookery.cli.running import execute

if TYPE_CHECKING:
    from rookery.cli.registry import Found
    from rookery.report.status import StatusPage

Address = Annotated[str | None, typer.Option(help="HOST:PORT; the kit has it. A coordinator may listen at 0.0.0.0.")]
KitFolder = Annotated[Path | None, typer.Option("--kit", help="Its folder of certificates: rookery federation init.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Without certificates, on this machine alone: to try things out.")
]

Minimum = Annotated[
    int | None,
    typer.Option(help="Replies that an exchange needs; others are left out after the deadline. Without it, all."),
]
Deadline = Annotated[float, typer.Option(help="Seconds that a site has for a reply.")]
Patience = Annotated[
    float | None, typer.Option(help="Seconds to wait for sites that are needed; without it, until they are back.")
]
Clip = Annotated[float | None, typer.Option(help="The largest norm that a site's reply may have.")]
AllowOtherStudy = Annotated[
    bool, typer.Option("--allow-other-study", help="Go on though a site's study is not the coordinator's, and say so.")
]
Noise = Annotated[float | None, typer.Option(help="Noise on each mean, times what --clip lets one site do.")]


@app.command(cls=Command)
def serve(
    task: TaskName,
    algorithm: AlgorithmName = None,
    settings: Settings = None,
    sites: Annotated[str | None, typer.Option(help="The sites' names, a,b,c, in order; the kit has them.")] = None,
    kit: KitFolder = None,
    address: Address = None,
    insecure: Insecure = False,
    minimum: Minimum = None,
    deadline: Deadline = 300.0,
    patience: Patience = None,
    clip: Clip = None,
    noise: Noise = None,
    rounds: Rounds = None,
    cohort: Cohort = None,
    seed: Seed = 0,
    every: Annotated[int | None, typer.Option(help="Rounds from one evaluation to the next.")] = None,
    status: Annotated[int | None, typer.Option(help="Port of a page that shows the run, on this machine.")] = None,
    status_host: Annotated[str, typer.Option(help="Address of that page, for others to see it.")] = "127.0.0.1",
    allow_other_study: AllowOtherStudy = False,
    config: ConfigFile = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Run an algorithm on data that are at sites: wait for them, and coordinate. See `rookery site`."""
    from rookery.cli.registry import blaming

    stopped = " Go on with --resume, from the last completed round." if out is not None else ""
    with border(), blaming(), told(stopped), _page(status, status_host) as page:
        names = _sites(sites, kit, insecure)
        if resume and out is not None:  # before any site is asked
            _check_options(out, {"clip": clip, "noise": noise}, minimum)
        asked = ask(task, algorithm, settings or [], len(names), None, seed)
        if insecure:
            print("rookery: --insecure: nothing is encrypted, and nobody's name is checked.", file=sys.stderr)
        hyper = {f.name: getattr(asked.method, f.name) for f in dataclasses.fields(asked.method)}
        engine = rk.Federation(
            address if not insecure else address or "127.0.0.1:9443",
            sites=names,
            kit=kit,
            insecure=insecure,
            deadline=deadline,
            patience=patience,
            tell=_teller(quiet, page),
            watch=None if page is None else _watcher(page, rounds if rounds is not None else asked.task.rounds),
            study=study_of(asked.named),
            allow_other_study=allow_other_study,
        )
        options = {
            "sites": sites, "kit": kit and str(kit), "address": address, "minimum": minimum, "deadline": deadline,
            "patience": patience, "clip": clip, "noise": noise, "insecure": insecure or None,
            "allow-other-study": allow_other_study or None,
        }  # fmt: skip
        code = execute(
            asked,
            asked.method,
            hyper,
            rounds,
            cohort,
            every,
            seed,
            out,
            resume,
            quiet,
            json,
            options,
            command="serve",
            engine=engine,
            channel=channel_of(clip, noise),
            faults=None if minimum is None else rk.Faults(minimum=minimum),
            callbacks=[] if page is None else [page],
        )
        raise typer.Exit(code)


def _sites(given: str | None, kit: Path | None, insecure: bool) -> tuple[str, ...]:
    """The sites' names, in order; ValueError if they are not those of the kit, or there is none."""
    from rookery.cli.registry import find
    from rookery.engines.federation.kits import COORDINATOR, load_kit

    names = tuple(name.strip() for name in (given or "").split(",") if name.strip())
    if kit is None:
        if not insecure:
            raise ValueError("A coordinator needs certificates: --kit FOLDER, made by `rookery federation init`.")
        if not names:
            raise ValueError("Without a kit a coordinator needs the sites' names: --sites a,b,c.")
        return names
    if kit.is_dir() and not (kit / "kit.toml").exists():  # of `nvflare provision`
        if not names:
            raise ValueError(f"{kit} does not say which sites there are: --sites a,b,c.")
        return names
    own = load_kit(kit)
    if own.name != COORDINATOR:
        raise ValueError(f"{kit} is the kit of the site {own.name}; the coordinator has one of its own.")
    return tuple(find("site", name, dict.fromkeys(own.sites))[0] for name in names) or own.sites


def study_of(named: Found) -> list[Any]:
    """The task's function, and the module that it was found in: what all sites must have the same."""
    where = named.reference.rpartition(":")[0]
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [named.thing, *(m for m in modules if where and where in (m.__name__, getattr(m, "__file__", None)))]


def _check_options(out: Path, given: dict[str, float | None], minimum: int | None) -> None:
    """Raise ValueError if the run in the folder was begun with other options that its rounds depend on."""
    try:
        before = tomllib.loads((out / "run.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # the checkpoint is compared later
    shown = lambda name, value: f"without --{name}" if value is None else f"with --{name} {value:g}"
    for name, value in given.items():
        was = before.get(name)
        if was != value:
            raise ValueError(
                f"{out} was begun {shown(name, was)}, and is resumed {shown(name, value)}. Give the same, or another "
                "--out."
            )
    if ("minimum" in before) != (minimum is not None):
        raise ValueError(
            f"{out} was begun {shown('minimum', before.get('minimum'))}, and is resumed {shown('minimum', minimum)}. "
            "Give --minimum in both, or in neither, or another --out."
        )


@contextlib.contextmanager
def told(hint: str = "") -> Iterator[None]:
    """What ends a run in one line: sites that are not there, one that leaves where it can't go on without, Ctrl-C."""
    try:
        yield
    except RuntimeError as error:
        from rookery.engines.federation.links import SiteError

        if not isinstance(error, rk.RoundFailedError | SiteError) and not isinstance(error.__cause__, SiteError):
            raise
        complain(f"{str(error).rstrip('.')}.")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        complain(f"Stopped.{hint}")
        raise typer.Exit(130) from None


def channel_of(clip: float | None, noise: float | None) -> Any:
    """What --clip and --noise ask for; None if they do not."""
    if noise is not None and clip is None:
        raise ValueError("--noise hides what one site can do, which --clip bounds: give --clip, too.")
    if clip is None:
        return None
    return rk.chain(rk.clip(clip), *([] if noise is None else [rk.gaussian(noise)]))


def _teller(quiet: bool, page: StatusPage | None) -> Callable[[str], None]:
    def tell(text: str) -> None:
        if not quiet:
            print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
        if page is not None:
            page.event(text)

    return tell


def _watcher(page: StatusPage, rounds: int) -> Callable[[Any], None]:
    last = [0.0]

    def watch(links: Any) -> None:
        if time.monotonic() - last[0] < 0.2 and links.rounds + 1 < rounds:  # the page looks every second
            return
        last[0] = time.monotonic()
        names = links.transport.names
        page.sites(
            [
                {"name": name, "state": own.state, "since": own.since, "rounds": links.rounds, "missing": own.missing,
                 "bytes_up": own.received, "bytes_down": own.sent}
                for name, own in zip(names, links.records, strict=True)
            ]
        )  # fmt: skip
        page.progress(links.rounds, rounds, links.exchanges, links.received, links.sent)

    return watch


@contextlib.contextmanager
def _page(port: int | None, host: str) -> Iterator[StatusPage | None]:
    if port is None:
        yield None
        return
    from rookery.report.status import StatusPage

    page = StatusPage(port, host)
    print(f"The run can be watched at {page.url}", file=sys.stderr, flush=True)
    try:
        yield page
    finally:
        page.close()
