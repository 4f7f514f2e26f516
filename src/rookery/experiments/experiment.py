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
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.base.printable import without_address
from rookery.experiments.claims import KINDS, REPRODUCED, Claim, judge
from rookery.experiments.grid import Edge, Grid
from rookery.experiments.sources import Sources, package
from rookery.language.fed import Algorithm
from rookery.run.result import Run
from rookery.run.solve import solve
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


class Headline(NamedTuple):
    """A number of a figure or table: what it is, the paper's (in words; empty where there is none), ours by seed."""

    what: str
    paper: str
    ours: Sequence[float] | np.ndarray


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
        grid: how the best of them are found; values at the edge of what was tried are marked, or the search goes on
            beyond them.
        headlines: the numbers that the page of all reproductions shows.
        thinned: thinned(results) gives what `results.csv` is to hold, where all of it would be too large; None: all.
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
    grid: Grid | None = None
    headlines: Callable[[pd.DataFrame], list["Headline"]] | None = None
    more: Mapping[str, Callable[[pd.DataFrame], Figure]] = field(default_factory=dict)
    thinned: Callable[[pd.DataFrame], pd.DataFrame] | None = None

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

    An experiment with a search writes `search.csv`, too. `made.json` holds what the summary says of the computing. The
    claims are checked on what `results.csv` holds, so that they can be checked again from it.

    Every finished (configuration, seed) is stored at once under `out/runs` (for an experiment of a family: in the
    folder `FAMILY-runs` beside `out`, if there is one), named by a fingerprint of its settings and of the code that it
    depends on, so a second call computes only what is missing or has changed. Ctrl-C raises KeyboardInterrupt and loses
    only the run under way.
    """
    out = Path(out)
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ValueError(f"data_dir must be a folder that exists; got {str(data_dir)!r}.")
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
    stored = _compute(experiment.name, folder, [*searched, *configs], data_dir, progress)
    results = pd.concat([_read(stored[c.name, s], c, s) for c in configs for s in c.seeds], ignore_index=True)
    written = results if experiment.thinned is None else experiment.thinned(results)
    _write(out / "results.csv", written.to_csv(index=False, float_format="%.10g"))
    if searched:
        compute = lambda more: _compute(experiment.name, folder, more, data_dir, progress)
        search = _widened(experiment, searched, stored, compute, progress)
        _write(out / "search.csv", search.to_csv(index=False, float_format="%.10g"))
    machine = f"JAX {jax.__version__}, {jax.devices()[0].device_kind}"
    made: dict[str, Any] = {"seconds": _seconds(results), "machine": machine}
    if quick:
        made["data"] = _data_of(configs, data_dir)
    _write(out / "made.json", json.dumps(made, indent=2) + "\n")
    results = pd.read_csv(out / "results.csv", low_memory=False)
    for name, (_, draw) in experiment.pictures.items():
        report.save(draw(results), out / name)
    write_down(experiment, out, quick, whole=not quick and seeds is None)
    return out


def _compute(
    title: str, folder: Path, configs: Sequence[Config], data_dir: str | Path | None, progress: bool
) -> dict[tuple[str, int], Path]:
    """Where each run is stored, once those that are missing are computed."""
    wanted = [(c, s) for c in configs for s in c.seeds]
    stored = {(c.name, s): _path(folder, c, s) for c, s in wanted}
    missing = [(c, s) for c, s in wanted if not _is_complete(stored[c.name, s], c)]
    before = {_unmarked(path) for path in folder.glob("*.csv")}
    changed = sum(_unmarked(stored[c.name, s]) in before for c, s in missing)
    if changed and progress:
        print(f"{changed} runs are stored with other settings or other code: they are computed again.", file=sys.stderr)
    with report.bars(title, len(stored), len(stored) - len(missing), progress) as bars:
        for done, (config, seed) in enumerate(missing):
            name = f"{config.name}, seed {seed}"
            with _warnings_of(name):
                run = _run(config, seed, data_dir, bars(name, config.rounds))
            if run.interrupted:
                there = len(stored) - len(missing) + done
                raise KeyboardInterrupt(f"{there} of {len(stored)} runs are stored in {folder}; the same call goes on.")
            _write(stored[config.name, seed], run.history.to_csv(index=False))
    return stored


WIDENED = 2  # times, at most


def _widened(
    experiment: Experiment,
    searched: Sequence[Config],
    stored: Mapping[tuple[str, int], Path],
    compute: Callable[[Sequence[Config]], Mapping[tuple[str, int], Path]],
    progress: bool,
) -> pd.DataFrame:
    """How the runs of the search ended; where a best value is at the edge of its grid, with runs beyond it."""
    ends = lambda configs, paths: [_read(paths[c.name, s], c, s).tail(1) for c in configs for s in c.seeds]
    found, grid = pd.concat(ends(searched, stored), ignore_index=True), experiment.grid
    for _ in range(WIDENED if grid is not None and grid.wider is not None else 0):
        assert grid is not None
        assert grid.wider is not None
        best = grid.best(found)
        edges = [edge for edge in grid.edges(found) if edge.name not in grid.fixed and edge.beyond != edge.value]
        more = [c for e in edges for c in grid.wider(e.key, best[e.key] | {e.name: e.beyond})]
        more = [config for config in more if config.name not in set(found["run"])]
        if not more:
            break
        if progress:
            print(f"At the edge of their grid, which is widened: {_edge_words(edges)}.", file=sys.stderr)
        found = pd.concat([found, *ends(more, compute(more))], ignore_index=True)
    return found


def _edge_words(edges: Sequence[Edge]) -> str:
    return "; ".join(edge.words() for edge in edges)


def write_down(
    experiment: Experiment, out: str | Path, quick: bool = False, whole: bool = True
) -> list[dict[str, Any]]:
    """Write `claims.json` and `summary.md` from the `results.csv` (and `search.csv`) that lie in `out`.

    Returns the claims. `whole` is as in `judge`.
    """
    out = Path(out)
    results = pd.read_csv(out / "results.csv", low_memory=False)
    search = pd.read_csv(out / "search.csv", low_memory=False) if (out / "search.csv").exists() else None
    made = json.loads((out / "made.json").read_text(encoding="utf-8"))
    found = [judge(claim, results, whole) for claim in experiment.claims]
    _write(out / "claims.json", json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    _write(out / "summary.md", summary(experiment, results, found, made, quick, search))
    return found


def _data_of(configs: Sequence[Config], data_dir: str | Path | None) -> list[dict[str, Any]]:
    """Return what each task of the configurations is: its settings, its clients and their samples."""
    found: dict[str, dict[str, Any]] = {}
    for config in configs:
        key = json.dumps([describe(config.task), describe(config.settings)], sort_keys=True)
        if key not in found:
            task = _task(config, config.seeds[0], data_dir)
            sizes = {"lower": task.clients.lower_sizes, "upper": task.clients.upper_sizes}
            samples = {name: int(np.sum(own)) for name, own in sizes.items()}
            function = config.task.func if isinstance(config.task, functools.partial) else config.task
            found[key] = {
                "task": getattr(function, "__name__", task.name),
                "settings": {name: repr(value) for name, value in config.settings.items()},
                "clients": int(task.clients.n),
                "samples": {"all": samples["upper"]} if task.clients.one_data_set else samples,
            }
    return list(found.values())


def _task(config: Config, seed: int, data_dir: str | Path | None) -> Task:
    given = {"data_dir": data_dir} if "data_dir" in inspect.signature(config.task).parameters else {}
    with jax.enable_x64(config.float64):
        return config.task(seed=seed, **config.settings, **given)


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


def _seconds(results: pd.DataFrame) -> float:
    """Of computing, in all runs."""
    return round(float(results.groupby(["run", "seed"])["seconds"].max().sum()), 1)


def figures_in_words(figures: Mapping[str, Any], number: Callable[[Any], str] = report.number) -> str:
    """A claim's figures, a line each."""
    several = lambda value: ", ".join(map(number, value if isinstance(value, list) else [value]))
    return "<br>".join(f"{name}: {several(value)}" for name, value in figures.items())


def verdict_in_words(row: Mapping[str, Any]) -> str:
    """A claim's verdict with its cause, bold where it is not reproduced."""
    words = row["verdict"] + (f" ({row['cause']})" if row["cause"] else "")
    return words if row["verdict"] == REPRODUCED else f"**{words}**"


def summary(
    experiment: Experiment,
    results: pd.DataFrame,
    claims: Sequence[Mapping[str, Any]],
    made: Mapping[str, Any],
    quick: bool,
    search: pd.DataFrame | None = None,
) -> str:
    """The Markdown page about one reproduction."""
    lines = [f"# {experiment.name}: {experiment.title}", "", experiment.paper, ""]
    if quick:
        lines += [_SCALED_DOWN, ""]
    for kind, words in KINDS.items():
        those = [row["verdict"] == REPRODUCED for row in claims if row["kind"] == kind]
        if those:
            lines += [f"Claims, {words}: {sum(those)} of {len(those)} reproduced.  "]
    for i, (name, (title, _)) in enumerate(experiment.pictures.items()):
        lines += ["", *([f"{title[0].upper()}{title[1:]}:", ""] if i else []), f"![{title}]({name})"]
    lines += ["", "## Claims", "", "| claim | where | measured | verdict |", "|---|---|---|---|"]
    for row in claims:
        where = "ours" if row["kind"] == "own" else row["where"]
        lines.append(f"| {row['claim']} | {where} | {figures_in_words(row['figures'])} | {verdict_in_words(row)} |")
    notes = [f"- *{row['claim']}* {row['note']}" for row in claims if row["note"]]
    lines += ["", *notes, "", "## Set-up", ""]
    lines += [*_scaled_down(made.get("data", [])), ""] if quick else [experiment.setup, ""]
    own = _as_run(experiment.runs(quick), results)
    lines += ["| algorithm | task | rounds | cohort | seeds |", "|---|---|---|---|---|", *_rows(own)]
    precision = "double" if all(c.float64 for c in own) else "single"
    lines += [
        "",
        f"{results.groupby(['run', 'seed']).ngroups} runs in {precision} precision, {made['seconds']:.0f} s of ",
    ]
    lines[-1] += f"computing in all ({made['machine']})." + (f" {made['kept']}" if "kept" in made else "")
    if quick:
        lines += ["", "## Set-up at full size", "", f"Not run here. {experiment.setup}"]
    if search is not None:
        lines += ["", "## Search", "", *_searched(experiment.grid, search)]
    if experiment.differences:
        lines += ["", "## Differences from the paper", "", *(f"- {text}" for text in experiment.differences)]
    return "\n".join(lines) + "\n"


def _scaled_down(data: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what a scaled-down reproduction computes with."""
    lines = ["Scaled down. What was run here:", "", "| task | clients | samples | settings |", "|---|---|---|---|"]
    for own in data:
        samples = ", ".join(
            f"{count:,}{'' if level == 'all' else f' {level}'}" for level, count in own["samples"].items()
        )
        settings = ", ".join(f"{name} = {value}" for name, value in own["settings"].items())
        lines.append(f"| `{own['task']}` | {own['clients']} | {samples} | {settings} |")
    return lines


def _as_run(configs: Sequence[Config], results: pd.DataFrame) -> list[Config]:
    """The configurations that there are results of, with the seeds that were run."""
    seeds = results.groupby("run")["seed"].unique()
    there = [config for config in configs if config.name in seeds.index]
    return [dataclasses.replace(config, seeds=tuple(int(s) for s in seeds[config.name])) for config in there]


def _searched(grid: Grid | None, search: pd.DataFrame) -> list[str]:
    """What the search chose, what of it is at the edge of its grid, and how its runs ended."""
    lines = []
    if grid is not None:
        edges = grid.edges(search)
        marked = {(edge.key, edge.name) for edge in edges}
        lines += [f"| {' | '.join(grid.keys)} | best |", "|---" * (len(grid.keys) + 1) + "|"]
        for key, best in grid.best(search).items():
            each = [f"{name} {value:g}{' †' if (key, name) in marked else ''}" for name, value in best.items()]
            lines.append(f"| {' | '.join(map(str, key))} | {', '.join(each)} |")
        if edges:
            lines += ["", "† At the edge of what was tried, so that a better one may lie beyond."]
        if edges and grid.fixed:
            lines[-1] += f" The grid of {', '.join(grid.fixed)} is the paper's own, and was not left."
        lines += [""]
    columns = ["run", "seed", "round", *report.metrics(search.drop(columns=_labels(search)))]
    if len(search) > LONG:
        return [*lines, f"How the {len(search)} runs of the search ended is in `search.csv`."]
    rows = [" | ".join(report.number(value) for value in row) for row in search[columns].itertuples(index=False)]
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*lines, "How the runs of the search ended (`search.csv`):", "", *head, *(f"| {row} |" for row in rows)]


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
    """An algorithm with the hyperparameters that are not its defaults, to six digits: more differ between machines.

    >>> from rookery.algorithms import FedNest
    >>> short(FedNest(upper_step=0.1 + 1e-15, lower_rounds=1, lower_local_steps=np.array([1, 2])))
    'FedNest(upper_step=0.1, lower_local_steps=[1, 2])'
    """
    changed = [f for f in dataclasses.fields(algorithm) if not _same(getattr(algorithm, f.name), f.default)]
    return f"{type(algorithm).__name__}({', '.join(f'{f.name}={_brief(getattr(algorithm, f.name))}' for f in changed)})"


def _brief(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return _brief(value.tolist())
    if isinstance(value, list):
        return f"[{', '.join(map(_brief, value))}]"
    return repr(float(f"{value:.6g}")) if isinstance(value, float) else without_address(value)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(np.all(a == b))


def _listed(seeds: Sequence[int]) -> str:
    whole = len(seeds) > 2 and tuple(seeds) == tuple(range(seeds[0], seeds[0] + len(seeds)))
    return f"{seeds[0]}–{seeds[-1]}" if whole else ", ".join(map(str, seeds))
