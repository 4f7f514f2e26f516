"""The Markdown page about one reproduction."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rookery import report
from rookery.base.printable import without_address
from rookery.experiments.machinery.claims import KINDS, REPRODUCED
from rookery.experiments.machinery.experiment import Config, Experiment
from rookery.experiments.machinery.grid import Grid

LONG = 100  # a table of the search with more rows than this is left to its file
SCALED_DOWN = "**Scaled down (`--quick`): a check of the code, not of the paper.**"


def figures_in_words(figures: Mapping[str, Any], number: Callable[[Any], str] = report.number) -> str:
    """A claim's figures, a line each."""
    several = lambda value: ", ".join(map(number, value if isinstance(value, list) else [value]))
    return "<br>".join(f"{name}: {several(value)}" for name, value in figures.items())


def verdict_in_words(row: Mapping[str, Any]) -> str:
    """A claim's verdict with its cause, bold where it is not reproduced."""
    words = row["verdict"] + (f" ({row['cause']})" if row["cause"] else "")
    return words if row["verdict"] == REPRODUCED else f"**{words}**"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    line = lambda cells: f"| {' | '.join(cells)} |"
    return [line(head), "|---" * len(head) + "|", *map(line, rows)]


def claims_table(claims: Sequence[Mapping[str, Any]], figures: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """The claims, what was measured, and the verdicts; figures(figures) is the former in words."""
    where = lambda row: "ours" if row["kind"] == "own" else row["where"]
    rows = [(row["claim"], where(row), figures(row["figures"]), verdict_in_words(row)) for row in claims]
    return table(("claim", "where", "measured", "verdict"), rows)


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
        lines += [SCALED_DOWN, ""]
    for kind, words in KINDS.items():
        those = [row["verdict"] == REPRODUCED for row in claims if row["kind"] == kind]
        if those:
            lines += [f"Claims, {words}: {sum(those)} of {len(those)} reproduced.  "]
    for i, (name, (title, _)) in enumerate(experiment.pictures.items()):
        lines += ["", *([f"{title[0].upper()}{title[1:]}:", ""] if i else []), f"![{title}]({name})"]
    lines += ["", "## Claims", "", *claims_table(claims, figures_in_words), ""]
    lines += [f"- *{row['claim']}* {row['note']}" for row in claims if row["note"]]
    setup = f"At full size, not run here: {experiment.setup}" if quick else experiment.setup
    own = _as_run(experiment.runs(quick), results)
    lines += ["", "## Set-up", "", setup, "", *_configurations(own), ""]
    precision = "double" if all(c.float64 for c in own) else "single"
    count = results.groupby(["run", "seed"]).ngroups
    computing = f"{made['seconds']:.0f} s of computing in all ({made['machine']})."
    lines += [f"{count} runs in {precision} precision, {computing}" + (f" {made['kept']}" if "kept" in made else "")]
    if search is not None:
        lines += ["", "## Search", "", *_searched(experiment.grid, search)]
    if experiment.differences:
        title = "Notes and limits" if experiment.is_ours else "Differences from the paper"
        lines += ["", f"## {title}", "", *(f"- {text}" for text in experiment.differences)]
    return "\n".join(lines) + "\n"


def _as_run(configs: Sequence[Config], results: pd.DataFrame) -> list[Config]:
    """The configurations with results, and the seeds that were run."""
    seeds = results.groupby("run")["seed"].unique()
    return [c.but(seeds=tuple(int(s) for s in seeds[c.name])) for c in configs if c.name in seeds.index]


def _searched(grid: Grid | None, search: pd.DataFrame) -> list[str]:
    """The values that the search chose, those at the edge of its grid, and where its runs ended."""
    lines = []
    if grid is not None:
        edges = grid.edges(search)
        marked = {(edge.key, edge.name) for edge in edges}
        rows = []
        for key, best in grid.best(search).items():
            each = [f"{name} {value:g}{' †' if (key, name) in marked else ''}" for name, value in best.items()]
            rows.append((*map(str, key), ", ".join(each)))
        lines += table((*grid.keys, "best"), rows)
        if edges:
            lines += ["", "† At the edge of what was tried, so that a better one may lie beyond."]
        if edges and grid.fixed:
            lines[-1] += f" The grid of {', '.join(grid.fixed)} is the paper's own, and was not left."
        lines += [""]
    if len(search) > LONG:
        return [*lines, f"How the {len(search)} runs of the search ended is in `search.csv`."]
    labels = search.columns[: search.columns.get_loc("round")]  # the name, the labels and the seed
    columns = ["run", "seed", "round", *report.metrics(search.drop(columns=labels))]
    ends = [list(map(report.number, row)) for row in search[columns].itertuples(index=False)]
    return [*lines, "How the runs of the search ended (`search.csv`):", "", *table(columns, ends)]


def _configurations(configs: Sequence[Config]) -> list[str]:
    """A row for each algorithm and size; configurations that differ only in the task's settings share one."""
    alike: dict[tuple[str, ...], list[Config]] = {}
    for c in configs:
        end = (str(c.rounds), "all" if c.cohort is None else str(c.cohort), _listed(c.seeds))
        alike.setdefault((f"`{short(c.algorithm)}`", *end), []).append(c)
    rows = []
    for (algorithm, *sizes), own in alike.items():
        values = {name: list(dict.fromkeys(repr(c.settings.get(name)) for c in own)) for name in own[0].settings}
        rows.append((algorithm, "; ".join(f"{name} = {', '.join(value)}" for name, value in values.items()), *sizes))
    return table(("algorithm", "task", "rounds", "cohort", "seeds"), rows)


def short(algorithm: Any) -> str:
    """An algorithm and the hyperparameters that differ from its defaults, to six digits: more vary between machines.

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
