"""`--robust`, `--compress` and `--attack`: members of a channel, and attacks, by name: `trimmed-mean:2`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import rookery as rk
from rookery.cli.lookup import find

ROBUST: dict[str, Callable[..., Any]] = {
    "median": rk.median,
    "trimmed-mean": rk.trimmed_mean,
    "geometric-median": rk.geometric_median,
    "krum": rk.krum,
    "centered-clipping": rk.centered_clipping,
    "nearest-neighbors": lambda attackers=0.2: rk.nearest_neighbors(rk.trimmed_mean(attackers)),
    "bucketing": lambda attackers=0.2: rk.bucketing(rk.median(attackers)),
}
COMPRESS: dict[str, Callable[..., Any]] = {
    "top-k": rk.top_k,
    "random-k": rk.random_k,
    "quantize": rk.quantize,
    "low-rank": rk.low_rank,
}
ATTACKS: dict[str, Callable[..., Any]] = {  # LabelFlip needs a function
    "sign-flip": rk.attacks.SignFlip,
    "noise": rk.attacks.Noise,
    "a-little-is-enough": rk.attacks.ALittleIsEnough,
    "inner-product": rk.attacks.InnerProduct,
    "mimic": rk.attacks.Mimic,
    "nan": rk.attacks.NaN,
}
_REQUIRED = {"top-k", "random-k"}  # their number may be left out in Python, where k stands for it


def robust(text: str) -> Any:
    """Return the robust mean that `--robust` names."""
    return _made("robust", text, ROBUST)


def compression(text: str) -> Any:
    """Return the compression that `--compress` names."""
    return _made("compress", text, COMPRESS)


def attack(text: str) -> Any:
    """Return the attack that `--attack` names."""
    return _made("attack", text, ATTACKS)


def _made(option: str, text: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    given, *rest = text.split(":")
    name, make = find(f"--{option}", given, known)
    what = next(iter(inspect.signature(make).parameters.values()))
    if not rest and (what.default is what.empty or name in _REQUIRED):
        raise ValueError(f"--{option} {name} needs its {what.name}; got none. Give --{option} {name}:NUMBER.")
    if len(rest) > 1:
        raise ValueError(f"--{option} must be NAME or NAME:NUMBER; got {text!r}. Give one number.")
    return make(*map(_number, rest))


def _number(text: str) -> Any:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text  # refused by what takes it, in its own words
