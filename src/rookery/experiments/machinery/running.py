"""Run an experiment: compute the missing runs, and write results, pictures, claims and summary."""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pandas as pd

from rookery import report
from rookery.experiments.machinery import one_run
from rookery.experiments.machinery.claims import judge
from rookery.experiments.machinery.experiment import Config, Experiment
from rookery.experiments.machinery.one_run import fingerprint, is_complete, read_run, run_path, runs_folder, write
from rookery.experiments.machinery.summary import SCALED_DOWN, summary

WIDENINGS = 2  # of a search's grid, at most
Stored = Mapping[tuple[str, int], Path]  # by configuration and seed


def run_experiment(
    experiment: Experiment,
    out: str | Path,
    quick: bool = False,
    seeds: int | Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> Path:
    """Compute what is missing and write `results.csv`, the pictures, `claims.json` and `summary.md` into `out`.

    A search adds `search.csv`; `made.json` records the computing time and the machine. The claims are checked on the
    contents of `results.csv`, so that they can be checked again from it.

    Every finished run is stored under `out/runs` (for an experiment of a family: in the folder `FAMILY-runs` next to
    `out`, if it exists), named by a fingerprint of its settings and of the code it depends on. A second call computes
    only what is missing or has changed. Ctrl-C raises KeyboardInterrupt and loses only the run under way.
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
            raise ValueError(f"seeds must name at least one seed; got {seeds!r}.")
        configs = [config.but(seeds=chosen) for config in configs]
    searched = [] if experiment.search is None else experiment.search(quick)
    names = [config.name for config in (*searched, *configs)]
    assert len(set(names)) == len(names), "two configurations share a name"

    folder = runs_folder(experiment, out)
    compute = lambda wanted: _compute(experiment.name, folder, wanted, data_dir, progress)
    stored = compute([*searched, *configs])
    results = pd.concat([read_run(stored[c.name, s], c, s) for c in configs for s in c.seeds], ignore_index=True)
    kept = results if experiment.thinned is None else experiment.thinned(results)
    write(out / "results.csv", kept.to_csv(index=False, float_format="%.10g"))
    if searched:
        search = _widened(experiment, searched, stored, compute, progress)
        write(out / "search.csv", search.to_csv(index=False, float_format="%.10g"))
    seconds = round(float(results.groupby(["run", "seed"])["seconds"].max().sum()), 1)
    made = {"seconds": seconds, "machine": f"JAX {jax.__version__}, {jax.devices()[0].device_kind}"}
    write(out / "made.json", json.dumps(made, indent=2) + "\n")
    results = read_results(out)
    for name, (_, draw) in experiment.pictures.items():
        report.save(draw(results), out / name)
    write_down(experiment, out, results, quick, whole=not quick and seeds is None)
    return out


def _check_scale(out: Path, quick: bool) -> None:
    """Refuse to write results of one scale over those of the other."""
    page = out / "summary.md"
    if page.exists() and (SCALED_DOWN in page.read_text(encoding="utf-8")) is not quick:
        here, there = ("scaled down", "full") if quick else ("full", "scaled down")
        raise ValueError(f"{out} holds {there} results, and these are {here}. Give another folder.")


def _compute(
    title: str, folder: Path, configs: Sequence[Config], data_dir: str | Path | None, progress: bool
) -> dict[tuple[str, int], Path]:
    """Compute the runs that are missing; return where each one is stored."""
    wanted = [(c, s) for c in configs for s in c.seeds]
    stored = {(c.name, s): run_path(folder, c, s, fingerprint(c, s)) for c, s in wanted}
    missing = [(c, s) for c, s in wanted if not is_complete(stored[c.name, s], c)]
    before = {one_run.unmarked(path) for path in folder.glob("*.csv")}
    changed = sum(one_run.unmarked(stored[c.name, s]) in before for c, s in missing)
    if changed and progress:
        print(f"{changed} runs are stored with other settings or other code: they are computed again.", file=sys.stderr)
    there = len(stored) - len(missing)
    with report.bars(title, len(stored), there, progress) as bars:
        for done, (config, seed) in enumerate(missing):
            name = f"{config.name}, seed {seed}"
            with _warnings_of(name):
                run = one_run.run(config, seed, data_dir, bars(name, config.rounds))
            if run.interrupted:
                count = f"{there + done} of {len(stored)}"
                raise KeyboardInterrupt(f"{count} runs are stored in {folder}; the same call continues from them.")
            write(stored[config.name, seed], run.history.to_csv(index=False))
    return stored


@contextmanager
def _warnings_of(name: str) -> Iterator[None]:
    """Put the name of the run before its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for warning in caught:
        warnings.warn(f"{name}: {warning.message}", warning.category, stacklevel=3)


def _widened(
    experiment: Experiment,
    searched: Sequence[Config],
    stored: Stored,
    compute: Callable[[Sequence[Config]], Stored],
    progress: bool,
) -> pd.DataFrame:
    """Where the runs of the search ended, with runs beyond the grid where a best value is at its edge."""
    ends = lambda configs, paths: [read_run(paths[c.name, s], c, s).tail(1) for c in configs for s in c.seeds]
    search, grid = pd.concat(ends(searched, stored), ignore_index=True), experiment.grid
    if grid is None or grid.wider is None:
        return search
    for _ in range(WIDENINGS):
        best = grid.best(search)
        edges = [edge for edge in grid.edges(search) if edge.name not in grid.fixed and edge.beyond != edge.value]
        more = [c for e in edges for c in grid.wider(e.key, best[e.key] | {e.name: e.beyond})]
        more = [config for config in more if config.name not in set(search["run"])]
        if not more:
            break
        if progress:
            words = "; ".join(edge.words() for edge in edges)
            print(f"At the edge of their grid, which is widened: {words}.", file=sys.stderr)
        search = pd.concat([search, *ends(more, compute(more))], ignore_index=True)
    return search


def read_results(folder: Path) -> pd.DataFrame:
    """The `results.csv` of a folder."""
    return pd.read_csv(folder / "results.csv", low_memory=False)


def write_down(
    experiment: Experiment, out: Path, results: pd.DataFrame, quick: bool = False, whole: bool = True
) -> list[dict[str, Any]]:
    """Check the claims on the results and write `claims.json` and `summary.md` into `out`.

    The folder must hold `made.json`, and `search.csv` if there was a search. Returns the claims. `whole` is as in
    `judge`.
    """
    search = pd.read_csv(out / "search.csv", low_memory=False) if (out / "search.csv").exists() else None
    made = json.loads((out / "made.json").read_text(encoding="utf-8"))
    claims = [judge(claim, results, whole, experiment.reasons.get(claim.text)) for claim in experiment.claims]
    write(out / "claims.json", json.dumps(claims, indent=2, ensure_ascii=False) + "\n")
    write(out / "summary.md", summary(experiment, results, claims, made, quick, search))
    return claims
