"""Several runs in one command: algorithms × tasks × seeds, each in a folder of its own, and what they come to."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rookery import report
from rookery.base.arguments import check_counts
from rookery.cli.asked import Asked
from rookery.cli.compare import gathered, lines
from rookery.cli.program import complain, say, writable
from rookery.cli.registry import find_algorithm, find_task
from rookery.cli.running import START, check_same, described, execute, from_the_start
from rookery.language.metrics import direction
from rookery.report import html

Made = Callable[[str, str, list[str], int], tuple[Asked, Any, dict[str, Any]]]  # asked, the method, its hyperparameters


def several(
    pairs: Sequence[tuple[str, str]],
    settings: Sequence[str],
    seed: int,
    seeds: int,
    made: Made,
    rounds: int | None,
    cohort: int | None,
    every: int | None,
    out: Path | None,
    resume: bool,
    quiet: bool,
    json: bool,
    also: dict[str, Any],
    engine: Any,
) -> int:
    """Run each pair of a task and an algorithm with every seed, skip what is finished, show the means; the exit code.

    `made(task, algorithm, settings, seed)` makes a run. Everything is checked before the first run starts.
    """
    check_counts(seeds=seeds)
    if out is None:
        raise ValueError("--out must be given for several runs; each has a folder of its own in it.")
    for pair in pairs:
        if pairs.count(pair) > 1:
            raise ValueError(f"On {pair[0]}, {pair[1]} is given twice; give it once.")
    writable(out)
    own_settings = {pair: _known(settings, *pair) for pair in pairs}
    for entry in settings:
        if not any(entry in known for known in own_settings.values()):
            made(*pairs[0], [entry], seed)  # says what is wrong with it
    folders: dict[str, list[Path]] = {}
    planned = []
    for (task, algorithm), known in own_settings.items():
        asked, method, hyper = made(task, algorithm, known, seed)
        described(asked, method, hyper, rounds, cohort, asked.task.every if every is None else every, seed)
        if asked.note and not quiet:
            print(asked.note, file=sys.stderr)
        for own in range(seed, seed + seeds):
            plain = re.sub(r"[^A-Za-z0-9-]+", "-", f"{asked.named.name}-{asked.algorithm.name}-seed{own}")
            folders.setdefault(asked.named.name, []).append(out / plain)
            planned.append((out / plain, task, algorithm, known, own))
    there = sum((folder / "run.json").exists() for folder, *_ in planned)
    if there and not resume:
        raise ValueError(f"{out} holds {there} of these runs already: go on with --resume, or give another --out.")
    if resume and not there:
        raise ValueError(f"{out} holds no run to go on with; leave out --resume to start.")
    show = not (quiet or json) and sys.stderr.isatty()
    with report.bars(str(out), len(planned), 0, show) as start:
        for count, (folder, task, algorithm, known, own) in enumerate(planned):
            asked, method, hyper = made(task, algorithm, known, own)
            done = start(f"{asked.title}, seed {own}", asked.task.rounds if rounds is None else rounds)
            if _is_finished(folder, asked, method, hyper, rounds, cohort, every, own):
                done(None)
                continue
            going = (folder / "run.json").exists()
            given = (rounds, cohort, every, own, folder, going, True, False, also)
            if execute(asked, method, hyper, *given, engine=engine, callbacks=(done,)) == 130:
                complain(f"{count} of {len(planned)} runs are finished. Go on with --resume.")
                return 130
    return _shown(folders, out, quiet, json)


def _known(settings: Sequence[str], task: str, algorithm: str) -> list[str]:
    """Return the settings that this task or this algorithm has."""
    fields = {field.name for field in dataclasses.fields(find_algorithm(algorithm).thing)}
    names = fields | {*inspect.signature(find_task(task).thing).parameters}
    return [entry for entry in settings if entry.partition("=")[0].strip().replace("-", "_") in names]


def _is_finished(
    folder: Path,
    asked: Asked,
    method: Any,
    hyper: dict[str, Any],
    rounds: int | None,
    cohort: int | None,
    every: int | None,
    seed: int,
) -> bool:
    """Return whether the folder holds this run, whole or stopped by values that are not finite."""
    if not (folder / "run.json").exists():
        return False
    description = described(asked, method, hyper, rounds, cohort, asked.task.every if every is None else every, seed)
    check_same(folder, description)
    before = report.read_description(folder)
    return before.get("stopped") is not None or before.get("rounds_done") == description["rounds"]


def _shown(folders: dict[str, list[Path]], out: Path, quiet: bool, json: bool) -> int:
    """Write the picture and the report, show a table for each task, and return the exit code."""
    panels, tables, rows = [], [], []
    for task, own in folders.items():
        sources, _ = html.read(own)
        goal = direction(sources[0].metric or "", otherwise=False)
        frame, each, notes = gathered(sources, goal)
        panels.append((task, frame, goal.signed))
        tables += [lines(each, f"{goal.name} on {task}"), *notes]
        rows += [{"task": task, "metric": goal.name, **row} for row in each]
    picture = report.save(report.compared(panels, "exchanges"), out / "comparison.png")
    page = html.write([folder for own in folders.values() for folder in own], out / "report.html")
    if json:
        print(report.to_json({"runs": rows, "picture": picture, "report": page}))
    say(quiet, json, *tables, f"The picture: {picture}; the report: {page}")
    all_runs = [folder for own in folders.values() for folder in own]
    bad = [d for d in map(report.read_description, all_runs) if d.get("stopped") or d.get("diverged")]
    if bad:
        names = ", ".join(f"{d['algorithm']} on {d['task']}, seed {d['seed']}" for d in bad)
        cure = f" {START}" if all(map(from_the_start, bad)) else " Try smaller steps."
        complain(f"{len(bad)} of {len(all_runs)} runs diverged: {names}.{cure}")
    return 1 if bad else 0
