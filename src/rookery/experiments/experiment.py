"""The machinery of reproduction: what an experiment is made of, and the code that runs it and writes it down."""

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rookery import report
from rookery.experiments.sources import Sources, package
from rookery.fed import Algorithm
from rookery.solve import Run, solve
from rookery.tasks.task import Task

LONG = 100  # a table of the search with more rows than this is left to its file


@dataclass(frozen=True)
class Config:
    """One configuration, run once for each seed.

    Attributes:
        name: what the results call it; no two configurations of an experiment share one.
        task: task(seed=..., **settings) makes the task; it is given `data_dir` too if it takes it. Tasks of the same
            shape should share one problem object: then they share one compiled program.
        settings: the task's other arguments.
        algorithm, rounds, cohort, every: as in `solve`.
        seeds: of the task and of the run.
        labels: what else the results say about it, a column each (the method, a swept value).
        float64: compute in double precision.
        engine: as in `solve`; its settings must not change the numbers, so only its code is part of the fingerprint.
    """

    name: str
    task: Callable[..., Task]
    algorithm: Algorithm
    rounds: int
    settings: dict[str, Any] = field(default_factory=dict)
    cohort: int | None = None
    every: int = 1
    seeds: tuple[int, ...] = (0, 1, 2)
    labels: dict[str, Any] = field(default_factory=dict)
    float64: bool = False
    engine: Any = None


@dataclass(frozen=True)
class Finding:
    """What a check measured: the figures, whether the claim holds on them, and why not where that is known.

    A figure is a number, or several where its name says what they belong to.
    """

    holds: bool
    figures: dict[str, float | list[float]]
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A statement about an experiment's results, where the paper makes it, and its check on the numbers.

    `ours` marks a statement that is not the paper's.
    """

    text: str
    where: str
    check: Callable[[pd.DataFrame], Finding]
    ours: bool = False


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper: its runs, its picture and its claims.

    Attributes:
        name: `rookery reproduce NAME`.
        title: one line.
        paper: the reference, with the figure or table.
        setup: the set-up in words (Markdown).
        runs: runs(quick) gives the configurations; with quick the same ones, scaled down.
        picture: a figure of the results.
        more: further ones, by their titles.
        claims: what is checked.
        differences: every known difference from the paper, in words.
        family: experiments of one family share their stored runs, so that a run which two of them need is computed
            once.
        search: search(quick) gives the configurations that a value the paper does not give was chosen by; how
            each of them ended is written to `search.csv` and into the summary.
    """

    name: str
    title: str
    paper: str
    setup: str
    runs: Callable[[bool], list[Config]]
    picture: Callable[[pd.DataFrame], Figure]
    claims: tuple[Claim, ...]
    differences: tuple[str, ...] = ()
    family: str | None = None
    search: Callable[[bool], list[Config]] | None = None
    more: Mapping[str, Callable[[pd.DataFrame], Figure]] = field(default_factory=dict)

    @property
    def pictures(self) -> dict[str, tuple[str, Callable[[pd.DataFrame], Figure]]]:
        """All of them: title and drawing, by the file's name."""
        more = {f"{self.name}-{i}.png": pair for i, pair in enumerate(self.more.items(), 2)}
        return {f"{self.name}.png": (self.title, self.picture), **more}


def run_experiment(
    experiment: Experiment,
    out: str | Path,
    quick: bool = False,
    seeds: int | Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> Path:
    """Compute what is missing and write `results.csv`, the picture, `claims.json` and `summary.md` into `out`.

    An experiment with a search writes `search.csv`, too.

    Every finished (configuration, seed) is stored at once under `out/runs` (for an experiment of a family: in the
    folder `FAMILY-runs` beside `out`, if there is one), named by a fingerprint of its settings and of the code that it
    depends on, so a second call computes only what is missing or has changed. Ctrl-C raises KeyboardInterrupt and loses
    only the run under way.
    """
    out = Path(out)
    _check_scale(out, quick)
    out.mkdir(parents=True, exist_ok=True)
    configs = experiment.runs(quick)
    if seeds is not None:
        chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
        if not chosen:
            raise ValueError(f"seeds={seeds!r}: give at least one seed.")
        configs = [dataclasses.replace(config, seeds=chosen) for config in configs]
    searched = [] if experiment.search is None else experiment.search(quick)
    names = [config.name for config in (*searched, *configs)]
    assert len(set(names)) == len(names), "two configurations share a name"

    folder = runs_folder(experiment, out)
    wanted = [(c, s) for c in (*searched, *configs) for s in c.seeds]
    stored = {(c.name, s): _path(folder, c, s) for c, s in wanted}
    missing = [(c, s) for c, s in wanted if not _is_complete(stored[c.name, s], c)]
    before = {_unmarked(path) for path in folder.glob("*.csv")}
    changed = sum(_unmarked(stored[c.name, s]) in before for c, s in missing)
    if changed and progress:
        print(f"{changed} runs are stored with other settings or other code: they are computed again.", file=sys.stderr)
    with _bars(experiment.name, len(stored), len(stored) - len(missing), progress) as bars:
        for done, (config, seed) in enumerate(missing):
            name = f"{config.name}, seed {seed}"
            with _warnings_of(name):
                run = _run(config, seed, data_dir, bars(name, config.rounds))
            if run.interrupted:
                there = len(stored) - len(missing) + done
                raise KeyboardInterrupt(f"{there} of {len(stored)} runs are stored in {folder}; the same call goes on.")
            _write(stored[config.name, seed], run.history.to_csv(index=False))

    results = pd.concat([_read(stored[c.name, s], c, s) for c in configs for s in c.seeds], ignore_index=True)
    findings = [(claim, claim.check(results)) for claim in experiment.claims]
    _write(out / "results.csv", results.to_csv(index=False, float_format="%.10g"))
    for name, (_, draw) in experiment.pictures.items():
        report.save(draw(results), out / name)
    _write(out / "claims.json", json.dumps([_as_json(*pair) for pair in findings], indent=2, ensure_ascii=False) + "\n")
    ends = [_read(stored[c.name, s], c, s).tail(1) for c in searched for s in c.seeds]
    search = pd.concat(ends, ignore_index=True) if ends else None
    if search is not None:
        _write(out / "search.csv", search.to_csv(index=False, float_format="%.10g"))
    _write(out / "summary.md", summary(experiment, configs, results, findings, quick, search))
    return out


def _run(config: Config, seed: int, data_dir: str | Path | None, callback: Callable[[Run], None]) -> Run:
    given = {"data_dir": data_dir} if "data_dir" in inspect.signature(config.task).parameters else {}
    with jax.enable_x64(config.float64):
        task = config.task(seed=seed, **config.settings, **given)
        return solve(
            task.problem,
            task.clients,
            config.algorithm,
            task.init,
            config.rounds,
            cohort=config.cohort,
            seed=seed,
            evaluate=task.evaluate,
            evaluate_client=task.evaluate_client,
            every=config.every,
            engine=config.engine,
            callbacks=(callback,),
            on_nonfinite="warn",  # where a method diverges, in a figure or in a search, the run is whole all the same
            progress=False,
        )


@contextmanager
def _warnings_of(name: str) -> Iterator[None]:
    """Say whose the warnings are."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for warning in caught:
        warnings.warn(f"{name}: {warning.message}", warning.category, stacklevel=3)


# Stored runs.


def fingerprint(config: Config, seed: int, code: Sources | None = None) -> str:
    """Of all that decides a run's numbers: the settings, and the code that the run depends on.

    Comments, docstrings and layout do not count, nor do pictures and claims. `code` is the package's own by default.
    """
    made_of = [_run, *_code([config.task, config.settings, config.algorithm])]
    if config.engine is not None:
        made_of.append(type(config.engine))
    what = {
        "task": describe(config.task),
        "settings": describe(config.settings),
        "algorithm": describe(config.algorithm),
        "run": [config.rounds, config.cohort, config.every, seed, config.float64],
        "code": (code or package()).digests(made_of),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def _code(value: Any) -> Iterator[Any]:
    """The functions and classes in a setting."""
    if isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _code(entry)
    elif isinstance(value, functools.partial):
        yield from _code([value.func, value.args, value.keywords])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        yield from _code([getattr(value, f.name) for f in dataclasses.fields(value)])
    elif callable(value):
        yield value


def describe(value: Any) -> Any:
    """A hyperparameter or setting as JSON, the same in every process.

    Numbers are taken to 12 digits: one that was computed may differ in the last ones from machine to machine.

    >>> describe({"steps": (1, 2), "rate": 0.1 + 0.2, "rule": max})
    {'steps': [1, 2], 'rate': 0.3, 'rule': 'builtins.max'}
    """
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(name): describe(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [describe(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return describe(np.asarray(value).tolist())
    if isinstance(value, functools.partial):
        return [describe(value.func), describe(value.args), describe(value.keywords)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return [f"{type(value).__module__}.{type(value).__qualname__}", fields]
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if callable(value) and "<" not in name and not name.endswith("."):
        return name
    raise TypeError(
        f"{value!r} cannot be told apart from another of its kind; in an experiment use a named function, or a "
        "functools.partial of one."
    )


def runs_folder(experiment: Experiment, out: str | Path) -> Path:
    """Where the runs of an experiment that is written into `out` are stored."""
    out = Path(out)
    shared = out.absolute().parent / f"{experiment.family}-runs"
    return shared if experiment.family is not None and shared.is_dir() else out / "runs"


_SCALED_DOWN = "**Scaled down (`--quick`): a check of the code, not of the paper.**"


def _check_scale(out: Path, quick: bool) -> None:
    """Refuse to write results of one scale over those of the other."""
    page = out / "summary.md"
    if page.exists() and (_SCALED_DOWN in page.read_text(encoding="utf-8")) is not quick:
        here, there = ("scaled down", "full") if quick else ("full", "scaled down")
        raise ValueError(f"{out} holds {there} results, and these are {here}: give another folder.")


def _path(folder: Path, config: Config, seed: int) -> Path:
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", config.name).strip("-").lower()
    return folder / f"{plain}.seed{seed}.{fingerprint(config, seed)}.csv"


def _unmarked(path: Path) -> str:
    """The name of a stored run without its fingerprint."""
    return path.name.rsplit(".", 2)[0]


def _is_complete(path: Path, config: Config) -> bool:
    if not path.exists():
        return False
    try:
        return int(pd.read_csv(path)["round"].iloc[-1]) == config.rounds
    except (ValueError, KeyError, IndexError):
        return False


def _read(path: Path, config: Config, seed: int) -> pd.DataFrame:
    history = pd.read_csv(path)
    return pd.concat(
        [pd.DataFrame({"run": config.name, **config.labels, "seed": seed}, history.index), history], axis=1
    )


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.writing")  # another process may be writing the same run
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


# What is written down.


def _as_json(claim: Claim, finding: Finding) -> dict[str, Any]:
    figures = {name: _plain(value) for name, value in finding.figures.items()}
    row = {"claim": claim.text, "where": claim.where, "ours": claim.ours, "figures": figures}
    return row | {"holds": bool(finding.holds), "note": finding.note}


def _plain(value: float | list[float]) -> Any:
    """A number as strict JSON has it: infinity and NaN are words."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return float(f"{value:.6g}") if np.isfinite(value) else str(float(value))


def _figure(name: str, value: float | list[float]) -> str:
    return f"{name}: {', '.join(map(report.number, value if isinstance(value, list) else [value]))}"


def summary(
    experiment: Experiment,
    configs: Sequence[Config],
    results: pd.DataFrame,
    findings: Sequence[tuple[Claim, Finding]],
    quick: bool,
    search: pd.DataFrame | None = None,
) -> str:
    """The Markdown page about one reproduction."""
    lines = [f"# {experiment.name}: {experiment.title}", "", experiment.paper, ""]
    if quick:
        lines += [_SCALED_DOWN, ""]
    for ours, whose in ((False, "the paper's"), (True, "our own")):
        those = [finding.holds for claim, finding in findings if claim.ours is ours]
        if those:
            lines += [f"Of {whose} {len(those)} claims, {sum(those)} hold.  "]
    for i, (name, (title, _)) in enumerate(experiment.pictures.items()):
        lines += ["", *([f"{title[0].upper()}{title[1:]}:", ""] if i else []), f"![{title}]({name})"]
    lines += [""]
    lines += ["## Claims", "", "| claim | where | measured | holds |", "|---|---|---|---|"]
    for claim, finding in findings:
        figures = "<br>".join(_figure(name, value) for name, value in finding.figures.items())
        lines.append(f"| {claim.text} | {claim.where} | {figures} | {'yes' if finding.holds else '**no**'} |")
    notes = [f"- *{claim.text}* {finding.note}" for claim, finding in findings if finding.note]
    lines += ["", *notes, "", "## Set-up", "", experiment.setup, ""]
    lines += ["| algorithm | task | rounds | cohort | seeds |", "|---|---|---|---|---|", *_rows(configs)]
    seconds = results.groupby(["run", "seed"])["seconds"].max().sum()
    precision = "double" if all(c.float64 for c in configs) else "single"
    lines += ["", f"{results.groupby(['run', 'seed']).ngroups} runs in {precision} precision, {seconds:.0f} s of "]
    lines[-1] += f"computing in all (JAX {jax.__version__}, {jax.devices()[0].device_kind})."
    if search is not None:
        columns = ["run", "seed", "round", *report.metrics(search.drop(columns=_labels(search)))]
        rows = [" | ".join(report.number(value) for value in row) for row in search[columns].itertuples(index=False)]
        lines += ["", "## Search", ""]
        if len(rows) > LONG:
            lines += [f"How the {len(rows)} runs of the search ended is in `search.csv`."]
        else:
            lines += ["How the runs of the search ended (`search.csv`):", ""]
            lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {row} |" for row in rows)]
    if experiment.differences:
        lines += ["", "## Differences from the paper", "", *(f"- {text}" for text in experiment.differences)]
    return "\n".join(lines) + "\n"


def _labels(results: pd.DataFrame) -> list[str]:
    """The columns that a configuration's own name and labels, and the seed, make."""
    return list(results.columns[: results.columns.get_loc("round")])


def _rows(configs: Sequence[Config]) -> list[str]:
    """A row for each algorithm and size; configurations that differ in the task's settings only share one."""
    alike: dict[str, list[Config]] = {}
    for c in configs:
        end = f"{c.rounds} | {'all' if c.cohort is None else c.cohort} | {_listed(c.seeds)} |"
        alike.setdefault(f"| `{short(c.algorithm)}` | TASK | {end}", []).append(c)
    rows = []
    for row, own in alike.items():
        values = {name: list(dict.fromkeys(repr(c.settings.get(name)) for c in own)) for name in own[0].settings}
        rows.append(row.replace("TASK", "; ".join(f"{name} = {', '.join(value)}" for name, value in values.items())))
    return rows


def short(algorithm: Any) -> str:
    """An algorithm with the hyperparameters that are not its defaults.

    >>> from rookery.algorithms import FedNest
    >>> short(FedNest(upper_step=0.1, lower_rounds=1))
    'FedNest(upper_step=0.1)'
    """
    changed = [f for f in dataclasses.fields(algorithm) if not _same(getattr(algorithm, f.name), f.default)]
    return f"{type(algorithm).__name__}({', '.join(f'{f.name}={getattr(algorithm, f.name)!r}' for f in changed)})"


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(np.all(a == b))


def _listed(seeds: Sequence[int]) -> str:
    whole = len(seeds) > 2 and tuple(seeds) == tuple(range(seeds[0], seeds[0] + len(seeds)))
    return f"{seeds[0]}–{seeds[-1]}" if whole else ", ".join(map(str, seeds))


@contextmanager
def _bars(title: str, total: int, done: int, show: bool) -> Iterator[Callable[[str, int], Callable[[Run], None]]]:
    """Two bars: over the runs, and over the rounds of the run under way."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        runs = progress.add_task(f"{title}: runs", total=total, completed=done)
        rounds = progress.add_task("rounds", total=None, visible=False)

        def start(name: str, count: int) -> Callable[[Run], None]:
            progress.reset(rounds, description=name, total=count, visible=True)

            def update(run: Run) -> None:
                progress.update(rounds, completed=run.rounds)
                if run.rounds == count:
                    progress.advance(runs)

            return update

        yield start
        progress.update(rounds, visible=False)
