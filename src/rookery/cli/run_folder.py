"""The folder of a run: its description, the file that repeats it, and the lock while it runs."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rookery as rk
from rookery.cli.config import to_toml
from rookery.cli.privacy import PUBLIC, Privacy
from rookery.cli.settings import format_value, parameters_of, parse_value
from rookery.cli.speeds import UNTIMED, Speeds
from rookery.cli.terminal import writable

if TYPE_CHECKING:
    from rookery.cli.request import Request

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def describe(
    request: Request,
    rounds: int | None,
    cohort: int | None,
    every: int | None,
    seed: int,
    privacy: Privacy = PUBLIC,
    speeds: Speeds = UNTIMED,
) -> dict[str, Any]:
    """Return the contents of run.json before a run starts; raise the errors that `solve` would."""
    from rookery.engines import checks

    task = request.task
    rounds, cohort = task.rounds if rounds is None else rounds, task.cohort if cohort is None else cohort
    every = task.every if every is None else every
    start = checks.start_values(task.problem, task.clients, task.init)
    sampled = privacy.cohort(cohort)
    fixed = None if privacy.poisson else cohort
    size = checks.check_run(task.problem, task.clients, request.method, *start, rounds, fixed, every, seed)
    privacy.check(request, sampled, rounds)
    speeds.check(task.clients)
    return {
        "task": request.named_task.name,
        "task_settings": request.arguments,
        "algorithm": request.named_algorithm.name,
        "hyperparameters": request.hyperparameters,
        "seed": seed,
        "cohort": f"Poisson({sampled.expected:g})" if privacy.poisson else size,
        "rounds": rounds,
        "private": privacy.describe(rounds),
        "channel": privacy.public | speeds.given,
        "version": rk.__version__,
    }


def repeating_config(request: Request, options: dict[str, Any], changed: dict[str, Any], command: str = "run") -> str:
    """Return the TOML file that repeats a run by `--config`, with the defaults used.

    Hyperparameters that `--set` cannot express are left out: they come from the task or the algorithm.
    """
    with_option = ("clients", "partition")
    named: dict[str, Any] = {"task": request.named_task.reference, "algorithm": request.named_algorithm.reference}
    if command == "run":  # a coordinator counts its sites
        named |= {name: request.arguments.get(name) for name in with_option}
    arguments = {name: value for name, value in request.arguments.items() if name not in (*with_option, "seed")}
    fields = {name: getattr(request.algorithm, name) for name in parameters_of(request.named_algorithm)}
    texts = {name: format_value(value) for name, value in (arguments | fields | changed).items()}
    settings = {name: _toml_value(text) for name, text in texts.items() if text is not None}
    return to_toml(named | options, settings, f"Repeat it: rookery {command} --config THIS_FILE --out OTHER_FOLDER")


def _toml_value(text: str) -> Any:
    """Return the value itself if TOML has such values, otherwise the text."""
    value = parse_value(text)
    return value if isinstance(value, bool | int | float) else text


def first_schedule(out: Path | None) -> tuple[int | None, list[str]]:
    """Return the --every that the run in this folder began with, and the comments of run.toml about later ones."""
    try:
        text = (out / "run.toml").read_text(encoding="utf-8") if out is not None else ""
        return tomllib.loads(text).get("every"), [line for line in text.splitlines() if line.startswith("# Resumed")]
    except (OSError, ValueError):
        return None, []


@contextmanager
def run_folder(out: Path | None, resume: bool, description: dict[str, Any], config: str) -> Iterator[None]:
    """Claim the folder for a run while it lasts; refuse to overwrite a run or to continue a different one.

    A new run that is refused before its first checkpoint leaves nothing behind.
    """
    if out is None:
        if resume:
            raise ValueError("--resume needs --out DIR, the folder of the run to continue.")
        yield
        return
    from rookery import report

    writable(out)
    old = out / "checkpoint.npz"
    if old.exists():
        raise ValueError(f"{old} is of an earlier version, and can't be read. Delete it, or give another --out.")
    exists = (out / "run.json").exists() or (out / "checkpoint").exists()
    if exists and not resume:
        raise ValueError(f"{out} holds a run already. Continue it with --resume, or give another --out.")
    if resume and not exists:
        raise ValueError(f"{out} holds no run to continue. Leave out --resume to start one.")
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with locked(out):
            if exists:
                check_same(out, description)  # run.json is rewritten when there are new results
            else:
                report.write_description(out, description)
            (out / "run.toml").write_text(config, encoding="utf-8")
            try:
                yield
            except ValueError:
                if not exists and not (out / "checkpoint").exists():
                    for name in ("run.json", "run.toml"):
                        (out / name).unlink()
                raise
    finally:
        if made:
            with suppress(OSError):  # unless it is empty
                out.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process; the system releases the lock however the process ends."""
    if fcntl is None:
        yield
        return
    path = folder / ".lock"
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            process = lock.read().strip() or "unknown"
            raise ValueError(
                f"{folder}: this run is under way, in process {process}. Wait for it, or stop it."
            ) from None
        except OSError:  # a file system without locks
            pass
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def check_same(out: Path, description: dict[str, Any]) -> None:
    """Raise ValueError if the folder's run is a different one, or has more rounds than asked for."""
    from rookery import report

    before, now = report.read_description(out), report.plain(description)
    for name in ("task", "algorithm", "seed", "cohort", "private", "channel", "task_settings", "hyperparameters"):
        old, new = before.get(name), now[name]
        if name == "channel":  # runs of earlier versions don't tell
            old = new if old is None else old
        pairs = [(name, old, new)]
        if isinstance(old, dict) and isinstance(new, dict):
            pairs = [(entry, old.get(entry), new.get(entry)) for entry in {**old, **new}]
        differing = [f"its {entry} is {a}, here it is {b}" for entry, a, b in pairs if a != b]
        if differing:
            raise ValueError(
                f"{out} holds another run: {'; '.join(differing)}. Give the same settings, or another --out."
            )
    done = before.get("rounds_done")
    if isinstance(done, int) and done > description["rounds"]:
        raise ValueError(
            f"--rounds must be at least {done}, the rounds that {out} has already; got {description['rounds']}."
        )
