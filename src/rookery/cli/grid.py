"""Several runs in one command: tasks × algorithms × seeds, each in its own folder, and their means."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rookery import report
from rookery.base.arguments import check_counts
from rookery.cli.compare import collect, comparison_table
from rookery.cli.execution import BAD_START, RunOptions, bad_from_start, execute
from rookery.cli.privacy import CODE
from rookery.cli.registry import find_algorithm, find_task
from rookery.cli.request import Request
from rookery.cli.run_folder import check_same
from rookery.cli.settings import known_settings
from rookery.cli.terminal import complain, folder_name, show, writable
from rookery.language.metrics import direction
from rookery.report import html

Resolve = Callable[[str, str, Sequence[str], int], Request]  # of a task, an algorithm, settings and a seed


class _Planned(NamedTuple):
    folder: Path
    task: str
    algorithm: str
    settings: list[str]
    seed: int


def run_grid(
    pairs: Sequence[tuple[str, str]],
    settings: Sequence[str],
    seeds: int,
    resolve: Resolve,
    options: RunOptions,
    recorded: dict[str, Any],
    engine: Any,
) -> int:
    """Run each (task, algorithm) with every seed, skip finished runs and show the means; return the exit code.

    Everything is checked before the first run starts.
    """
    check_counts(seeds=seeds)
    out = options.out
    if out is None:
        raise ValueError("--out must be given for several runs; each has its own folder in it.")
    for task, algorithm in pairs:
        if pairs.count((task, algorithm)) > 1:
            raise ValueError(f"On {task}, {algorithm} is given twice. Give it once.")
    writable(out)
    by_pair = {pair: known_settings(settings, find_task(pair[0]), find_algorithm(pair[1])) for pair in pairs}
    for entry in settings:
        if not any(entry in known for known in by_pair.values()):
            resolve(*pairs[0], [entry], options.seed)  # raises the error for an unknown setting
    folders: dict[str, list[Path]] = {}
    planned = []
    for (task, algorithm), known in by_pair.items():
        request = resolve(task, algorithm, known, options.seed)
        options.describe(request)
        if request.note and not options.quiet:
            print(request.note, file=sys.stderr)
        for seed in range(options.seed, options.seed + seeds):
            folder = out / folder_name(f"{request.named_task.name}-{request.named_algorithm.name}-seed{seed}")
            folders.setdefault(request.named_task.name, []).append(folder)
            planned.append(_Planned(folder, task, algorithm, known, seed))
    existing = sum((run.folder / "run.json").exists() for run in planned)
    if existing and not options.resume:
        raise ValueError(
            f"{out} holds {existing} of these runs already. Continue with --resume, or give another --out."
        )
    if options.resume and not existing:
        raise ValueError(f"{out} holds no run to continue. Leave out --resume to start.")
    progress = not (options.quiet or options.json) and sys.stderr.isatty()
    with report.bars(str(out), len(planned), 0, progress) as start:
        for count, run in enumerate(planned):
            request = resolve(run.task, run.algorithm, run.settings, run.seed)
            rounds = request.task.rounds if options.rounds is None else options.rounds
            done = start(f"{request.title}, seed {run.seed}", rounds)
            resume = (run.folder / "run.json").exists()
            run_options = options._replace(seed=run.seed, out=run.folder, resume=resume, quiet=True, json=False)
            if resume and _is_finished(request, run_options):
                done(None)
            elif execute(request, run_options, recorded, engine=engine, callbacks=(done,)) == 130:
                complain(f"{count} of {len(planned)} runs are finished. Continue with --resume.")
                return 130
    return _show_means(folders, out, options.quiet, options.json)


def _is_finished(request: Request, options: RunOptions) -> bool:
    """Return whether the folder holds this run, complete or ended by its budget or by values that are not finite."""
    description = options.describe(request)
    assert options.out is not None
    check_same(options.out, description)
    before = report.read_description(options.out)
    ended = before.get("stopped") is not None or before.get("spent")
    return bool(ended) or before.get("rounds_done") == description["rounds"]


def _show_means(folders: dict[str, list[Path]], out: Path, quiet: bool, json: bool) -> int:
    """Write the picture and the report, show a table for each task, and return the exit code."""
    panels, tables, rows, histories = [], [], [], []
    for task, of_task in folders.items():
        sources, _ = html.read(of_task)
        goal = direction(sources[0].metric or "", otherwise=False)
        frame, runs, notes = collect(sources, goal)
        panels.append((task, frame, goal.signed))
        histories += [source.history for source in sources]
        tables += [comparison_table(runs, f"{goal.name} on {task}"), *notes]
        rows += [{"task": task, "metric": goal.name, **run} for run in runs]
    all_folders = [folder for of_task in folders.values() for folder in of_task]
    picture = report.save(report.compared(panels, report.cost(*histories)), out / "comparison.png")
    page = html.write(all_folders, out / "report.html")
    data = {"runs": rows, "picture": picture, "report": page}
    show(quiet, json, data, *tables, f"The picture: {picture}; the report: {page}")
    bad = [run for run in map(report.read_description, all_folders) if run.get("stopped") or run.get("diverged")]
    if bad:
        names = ", ".join(f"{run['algorithm']} on {run['task']}, seed {run['seed']}" for run in bad)
        advice = BAD_START if all(map(bad_from_start, bad)) else "Try smaller steps."
        complain(f"{len(bad)} of {len(all_folders)} runs diverged: {names}. {advice}")
    spent = any(report.read_description(folder).get("spent") for folder in all_folders)
    return 1 if bad else CODE if spent else 0
