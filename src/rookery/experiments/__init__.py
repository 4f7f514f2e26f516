"""The papers' figures and tables: a folder for each paper, with its words in texts.md; `reproduce` runs one by name."""

from collections.abc import Sequence
from pathlib import Path

from rookery.experiments import asfbo, channels, choice, delay, fedbio, feddro, fednest, flamby, privacy, weighted
from rookery.experiments.machinery.claims import Claim, Finding, Verdict
from rookery.experiments.machinery.experiment import Config, Experiment
from rookery.experiments.machinery.running import run_experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for paper in (fednest, fedbio, asfbo, feddro, weighted, flamby, privacy, choice, channels, delay)
    for experiment in paper.EXPERIMENTS
}


def reproduce(
    name: str,
    out: str | Path,
    quick: bool = False,
    seeds: int | Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> Path:
    """Run an experiment and write its numbers, pictures, claims and summary into the folder `out`.

    Arguments:
        name: one of `EXPERIMENTS`.
        out: the folder; runs that it already holds and that have not changed are not computed again.
        quick: the same code scaled down.
        seeds: which ones, or how many, instead of the experiment's own.
        data_dir: the folder of the data sets; None: `ROOKERY_DATA`, or the user's cache.
        progress: show bars.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"name must be an experiment; got {name!r}. There are: {', '.join(EXPERIMENTS)}.")
    return run_experiment(EXPERIMENTS[name], out, quick, seeds, data_dir, progress)


__all__ = ["EXPERIMENTS", "Claim", "Config", "Experiment", "Finding", "Verdict", "reproduce"]
