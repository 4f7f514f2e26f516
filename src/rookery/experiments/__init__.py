"""Experiments: one file per paper, its figures and tables, their claims checked. `reproduce` runs one by name."""

from collections.abc import Sequence
from pathlib import Path

from rookery.experiments.asfbo import EXPERIMENTS as _ASFBO
from rookery.experiments.asfbo_mnist import EXPERIMENTS as _ASFBO_MNIST
from rookery.experiments.claims import Claim, Finding, Verdict
from rookery.experiments.experiment import Config, Experiment, run_experiment
from rookery.experiments.fedbio import EXPERIMENTS as _FEDBIO
from rookery.experiments.fedbio_rates import EXPERIMENTS as _FEDBIO_RATES
from rookery.experiments.feddro import EXPERIMENTS as _FEDDRO
from rookery.experiments.feddro_adult import EXPERIMENTS as _FEDDRO_ADULT
from rookery.experiments.feddro_theory import EXPERIMENTS as _FEDDRO_THEORY
from rookery.experiments.fednest import EXPERIMENTS as _FEDNEST
from rookery.experiments.fednest_light import EXPERIMENTS as _FEDNEST_LIGHT
from rookery.experiments.fednest_mnist import EXPERIMENTS as _FEDNEST_MNIST
from rookery.experiments.fednest_rates import EXPERIMENTS as _FEDNEST_RATES
from rookery.experiments.fednest_tuning import EXPERIMENTS as _FEDNEST_TUNING
from rookery.experiments.weighted import EXPERIMENTS as _WEIGHTED
from rookery.experiments.weighted_more import EXPERIMENTS as _WEIGHTED_MORE
from rookery.experiments.weighted_theory import EXPERIMENTS as _WEIGHTED_THEORY

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for family in (
        _FEDNEST,
        _FEDNEST_MNIST,
        _FEDNEST_LIGHT,
        _FEDNEST_TUNING,
        _FEDNEST_RATES,
        _FEDBIO,
        _FEDBIO_RATES,
        _ASFBO_MNIST,
        _ASFBO,
        _FEDDRO_THEORY,
        _FEDDRO,
        _FEDDRO_ADULT,
        _WEIGHTED_THEORY,
        _WEIGHTED,
        _WEIGHTED_MORE,
    )
    for experiment in family
}


def reproduce(
    name: str,
    out: str | Path,
    quick: bool = False,
    seeds: int | Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> Path:
    """Run an experiment and write its numbers, picture, claims and summary into the folder `out`.

    Arguments:
        name: one of `EXPERIMENTS`.
        out: where to; runs that are there already and have not changed are not computed again.
        quick: the same code scaled down.
        seeds: which ones, or how many, instead of the experiment's own.
        data_dir: where the data sets are; None: `ROOKERY_DATA`, or the user's cache.
        progress: show bars.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"There is no experiment {name!r}; there are: {', '.join(EXPERIMENTS)}.")
    return run_experiment(EXPERIMENTS[name], out, quick, seeds, data_dir, progress)


__all__ = ["EXPERIMENTS", "Claim", "Config", "Experiment", "Finding", "Verdict", "reproduce"]
