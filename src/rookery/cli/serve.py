"""`rookery serve`: coordinate a run over a network."""

from __future__ import annotations

import contextlib
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import rookery as rk
from rookery.cli import options as opt
from rookery.cli.execution import RunOptions, execute
from rookery.cli.lookup import find, split_names
from rookery.cli.privacy import Privacy
from rookery.cli.program import Command, app
from rookery.cli.request import TaskOptions, resolve
from rookery.cli.speeds import Speeds
from rookery.cli.terminal import complain, logger

if TYPE_CHECKING:
    from rookery.cli.registry import Named
    from rookery.report.status import StatusPage


@app.command(cls=Command)
def serve(
    task: opt.TaskName,
    algorithm: opt.AlgorithmName = None,
    settings: opt.Settings = None,
    sites: Annotated[str | None, typer.Option(help="The sites' names, a,b,c, in order. Default: the kit's.")] = None,
    kit: opt.KitFolder = None,
    address: opt.Address = None,
    insecure: opt.Insecure = False,
    minimum: opt.Minimum = None,
    deadline: opt.Deadline = 300.0,
    patience: opt.Patience = None,
    asynchronous: opt.Asynchronous = None,
    staleness: opt.Staleness = None,
    oldest: opt.Oldest = None,
    private: opt.Private = None,
    delta: opt.Delta = None,
    unit: opt.Unit = None,
    clip: opt.Clip = None,
    noise: opt.Noise = None,
    secure_sum: opt.SecureSum = False,
    robust: opt.Robust = None,
    compress: opt.Compress = None,
    rounds: opt.Rounds = None,
    cohort: opt.Cohort = None,
    poisson: opt.Poisson = False,
    seed: opt.Seed = 0,
    every: opt.Every = None,
    status: Annotated[int | None, typer.Option(help="Port of a web page that shows the run, on this machine.")] = None,
    status_host: Annotated[
        str, typer.Option(help="Address of that page, to open it from other machines.")
    ] = "127.0.0.1",
    allow_other_study: opt.AllowOtherStudy = False,
    config: opt.ConfigFile = None,
    out: opt.Out = None,
    resume: opt.Resume = False,
    quiet: opt.Quiet = False,
    json: opt.AsJson = False,
) -> None:
    """Run an algorithm on data that stay at sites: wait for the sites, and coordinate them. See `rookery site`."""
    from rookery.engines.federation.heads import FILE as HEADS

    hint = " Continue with --resume, from the last completed round." if out is not None else ""
    with network_errors(hint), _page(status, status_host) as page:
        names = _sites(sites, kit, insecure)
        privacy = Privacy(private, delta, clip, noise, unit, poisson, secure_sum, robust, compress)
        speeds = Speeds(asynchronous=asynchronous, staleness=staleness, oldest=oldest)
        if resume and out is not None:  # before any site is asked
            _check_options(out, privacy.recorded | speeds.recorded, minimum)
        request = privacy.fit(resolve(task, algorithm, TaskOptions(settings or [], len(names), None, seed)))
        if insecure:
            print(INSECURE, file=sys.stderr)
        engine = rk.Federation(
            address if not insecure else address or "127.0.0.1:9443",
            sites=names,
            kit=kit,
            insecure=insecure,
            deadline=deadline,
            patience=patience,
            tell=logger(quiet, *([] if page is None else [page.event])),
            watch=None if page is None else _watcher(page, rounds if rounds is not None else request.task.rounds),
            study=study_of(request.named_task),
            allow_other_study=allow_other_study,
            heads=None if out is None else out / HEADS,
        )
        recorded = {
            "sites": sites, "kit": kit and str(kit), "address": address, "minimum": minimum, "deadline": deadline,
            "patience": patience, "insecure": insecure or None, "allow-other-study": allow_other_study or None,
        }  # fmt: skip
        code = execute(
            request,
            RunOptions(rounds, cohort, every, seed, out, resume, quiet, json, privacy, speeds),
            recorded,
            command="serve",
            engine=engine,
            faults=None if minimum is None else rk.Faults(minimum=minimum),
            callbacks=[] if page is None else [page],
        )
        raise typer.Exit(code)


INSECURE = "rookery: --insecure: nothing is encrypted, and no names are checked."


def _sites(given: str | None, kit: Path | None, insecure: bool) -> tuple[str, ...]:
    """Return the sites' names, in order; raise ValueError if there are none or the kit has others."""
    from rookery.engines.federation.kits import COORDINATOR, load_kit

    names = tuple(split_names(given))
    if kit is None:
        if not insecure:
            raise ValueError(
                "A coordinator needs certificates; got no kit. Give --kit FOLDER, made by `rookery federation init`."
            )
        if not names:
            raise ValueError("Without a kit, a coordinator needs the sites' names; got none. Give --sites a,b,c.")
        return names
    if kit.is_dir() and not (kit / "kit.toml").exists():  # made by `nvflare provision`
        if not names:
            raise ValueError(f"{kit} does not name the sites. Give --sites a,b,c.")
        return names
    loaded = load_kit(kit)
    if loaded.name != COORDINATOR:
        raise ValueError(
            f"--kit must be the coordinator's; {kit} is that of the site {loaded.name}. Give the coordinator's."
        )
    return tuple(find("site", name, dict.fromkeys(loaded.sites))[0] for name in names) or loaded.sites


def study_of(named: Named) -> list[Any]:
    """Return the task's function and its module, which must be the same at all sites."""
    where = named.reference.rpartition(":")[0]
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [named.target, *(m for m in modules if where and where in (m.__name__, getattr(m, "__file__", None)))]


def _check_options(out: Path, given: dict[str, Any], minimum: int | None) -> None:
    """Raise ValueError if the run in the folder began with other options that its rounds depend on."""
    try:
        before = tomllib.loads((out / "run.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # the checkpoint is compared later
    words = lambda value: "" if value is True else f" {value:g}" if isinstance(value, float) else f" {value}"
    shown = lambda name, value: f"without --{name}" if value is None else f"with --{name}{words(value)}"
    for name in ("clip", "noise", "secure-sum", "robust", "compress", "asynchronous", "staleness", "oldest"):
        was, value = before.get(name), given[name]
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
def network_errors(hint: str = "") -> Iterator[None]:
    """Report in one line what ends a run over a network: missing sites, a needed site that leaves, Ctrl-C."""
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


def _watcher(page: StatusPage, rounds: int) -> Callable[[Any], None]:
    last = [0.0]

    def watch(links: Any) -> None:
        if time.monotonic() - last[0] < 0.2 and links.rounds + 1 < rounds:  # the page refreshes every second
            return
        last[0] = time.monotonic()
        names = links.transport.names
        page.sites(
            [
                {"name": name, "state": site.state, "since": site.since, "rounds": links.rounds,
                 "missing": site.missing, "bytes_up": site.received, "bytes_down": site.sent,
                 **({} if site.epsilon is None else {"epsilon": site.epsilon})}
                for name, site in zip(names, links.records, strict=True)
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
