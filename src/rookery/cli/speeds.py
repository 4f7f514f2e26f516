"""`--clock`, `--deadline`, `--asynchronous`, ...: the simulated speeds of clients, and which replies are waited for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import rookery as rk
from rookery.cli.lookup import find

_RATES = ("compute", "uplink", "downlink", "latency")


class Speeds(NamedTuple):
    """The options of a simulated clock and of asynchronous rounds; None where they were not given."""

    clock: str | None = None
    deadline: float | None = None
    first: int | None = None
    correct: bool = False
    asynchronous: int | None = None
    staleness: float | None = None
    oldest: int | None = None

    @property
    def recorded(self) -> dict[str, Any]:
        """The options for run.toml, None where they were not given."""
        return self._asdict() | {"correct": self.correct or None}

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given, for run.json."""
        return {name: value for name, value in self.recorded.items() if value is not None}

    def solve_options(self, faults: Any = None) -> dict[str, Any]:
        """Return the arguments of `rk.solve`: `clock`, `faults`, and `asynchronous` if it was given.

        `faults`: other faults, to which late replies are added.
        """
        how = self._asynchronous()
        late = {name: self.given[name] for name in ("deadline", "first", "correct") if name in self.given}
        if self.clock is None:
            if late:
                raise ValueError(
                    f"--{next(iter(late))} needs --clock, the speeds of clients; got none. Give --clock, e.g. --clock "
                    "compute=50."
                )
            return {"faults": faults, **how}
        if late:
            faults = dataclasses.replace(faults or rk.Faults(), **late)
        return {"clock": read_clock(self.clock), "faults": faults, **how}

    def _asynchronous(self) -> dict[str, rk.Asynchronous]:
        given: dict[str, Any] = {name: self.given[name] for name in ("staleness", "oldest") if name in self.given}
        if self.asynchronous is not None:
            return {"asynchronous": rk.Asynchronous(self.asynchronous, **given)}
        for name in given:
            raise ValueError(
                f"--{name} needs --asynchronous, the replies in a round; got none. Give --asynchronous, e.g. "
                "--asynchronous 10."
            )
        return {}

    def check(self, clients: Any) -> None:
        """Raise ValueError if the clock has speeds for another number of clients."""
        clock = self.solve_options().get("clock")
        if clock is not None:
            clock.at(clients)


UNTIMED = Speeds()


def read_clock(text: str) -> rk.Clock:
    """Return the clock that `--clock` describes.

    >>> read_clock("compute=50,latency=0.1")
    Clock(compute=50.0, uplink=inf, downlink=inf, latency=0.1, seed=0)
    """
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        fresh = {_field(name): _speed(part, value)} if sign else _table(name)
        twice = [name for name in fresh if name in given]
        if twice:
            raise ValueError(f"--clock must give {twice[0]} once; got {text!r}.")
        given |= fresh
    return rk.Clock(**given)


def _field(name: str) -> str:
    return find("speed of --clock called", name, dict.fromkeys((*_RATES, "seed")))[0]


def _speed(part: str, value: str) -> Any:
    """Return a number, the numbers of a file, or a distribution."""
    word, *numbers = value.split(":")
    try:
        if word == "lognormal":
            from scipy.stats import lognorm  # slow to import

            median, spread = map(float, numbers)
            if not (median > 0 and spread > 0):
                raise ValueError
            return lognorm(spread, scale=median)
        if value.lower().endswith(".csv"):
            return _numbers(value)
        return int(value) if part.strip().startswith("seed") else float(value)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError):
            raise ValueError(f"--clock {part}: {value} cannot be read: {error.strerror or 'no such file'}.") from None
        raise ValueError(
            "--clock must have parts such as compute=50, compute=lognormal:MEDIAN:SPREAD, compute=FILE.csv (a row for "
            f"each round, without a header) or FILE.csv (a row for each client, with a header); got {part.strip()!r}."
        ) from None


def _numbers(path: str) -> Any:
    """Return the numbers of a CSV file without a header, a row for each round and a column for each client."""
    import numpy as np

    return np.loadtxt(path, delimiter=",", ndmin=2)


def _table(path: str) -> dict[str, Any]:
    """Return the columns of a CSV file with a row for each client."""
    import pandas as pd

    if not Path(path).is_file():
        raise ValueError(f"--clock must have parts such as compute=50, or name a CSV file; {path!r} is neither.")
    try:
        frame = pd.read_csv(path)
    except ValueError as error:
        raise ValueError(f"--clock {path} must be a CSV file: {error}") from None
    return {_field(str(name).strip()): frame[name].to_numpy() for name in frame}
