"""What ASFBO's figures on MNIST share: the hyper-representation task, its methods and its set-up in words."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rookery.algorithms import ASFBO, LAASFBO, FedNest, LFedNest, ShroFBO, SimFBO
from rookery.experiments.machinery import Config, Grid
from rookery.experiments.machinery.numbers import SPLITS
from rookery.language.fed import Algorithm, Epochs
from rookery.tasks import hyperrep

OURS, BASE, NESTED = ("ASFBO", "LA-ASFBO"), ("SimFBO", "ShroFBO"), ("FedNest", "LFedNest")
SINGLE_LOOP: dict[str, Any] = {"ASFBO": ASFBO, "LA-ASFBO": LAASFBO, "SimFBO": SimFBO, "ShroFBO": ShroFBO}
METHODS: dict[str, Any] = {**SINGLE_LOOP, "FedNest": FedNest, "LFedNest": LFedNest}
SERVER = {"server_upper_step": 0.03, "server_lower_step": 0.03, "server_linear_step": 0.05}  # γ of the paper
FAMILY = "asfbo-mnist"
ROUNDS = 500
L1 = 1e-5
FACTORS = (0.1, 0.3, 0.6, 1.0, 1.7, 3.0, 5.0, 10.0)  # of γ, in the searches
SEARCH_SEEDS = (8, 9)


def algorithm(method: str, quick: bool, scale: float = 1.0, **given: Any) -> Algorithm:
    """A method of Fig. 1; `scale` is the factor of γ, or the rate, that the paper does not give."""
    batch = 8 if quick else 64
    if method in NESTED:
        rate = 0.1 if quick else scale
        own: dict[str, Any] = {"upper_step": rate, "lower_step": rate, "hessian_step": 0.01, "neumann_terms": 5}
        return METHODS[method](**own, lower_local_steps=Epochs(5), batch_size=batch)
    gamma = {name: scale * value for name, value in SERVER.items()} if method in BASE else {}
    return METHODS[method](**{"local_steps": (5, 15), "batch_size": batch, **gamma, **given})


def representation(quick: bool, method: str, split: str, own: Algorithm, **changes: Any) -> Config:
    """One method on the hyper-representation task of App. D.2."""
    small: dict[str, Any] = {"data": "digits", "clients": 20, "width": 32, "equal": True}
    settings = {"train": 0.75, "l1": L1, "penalty": 1e-3, "train_metrics": True}
    return Config(
        name=f"{method}, {split}",
        labels={"method": method, "split": split},
        task=hyperrep,
        settings={**(small if quick else {"data": "mnist"}), **settings, "partition": SPLITS[split]},
        algorithm=own,
        cohort=10,
        rounds=30 if quick else ROUNDS,
        every=5 if quick else 10,
        seeds=(0,) if quick else (0, 1, 2),
    ).but(**changes)


def scale_grid(keys: tuple[str, str], score: str, tried: Callable[..., Config]) -> Grid:
    """The grid of a search for the factor of γ, or for a rate; runs that are not finite count as 0."""
    return Grid(
        r"(?:γ times (?P<factor>\S+)|rate (?P<rate>\S+))$",
        keys,
        lambda search: search[score].where(np.isfinite(search["loss"]), 0.0),
        wider=lambda key, values: [tried(False, *key, *values.values())],
    )
