"""`--private` and the other options of a channel: what stands between a client's value and the server's mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import rookery as rk

if TYPE_CHECKING:
    from rookery.cli.request import Request

CODE = 3  # the exit code of a run that its budget ended early
_OPTIONS = ("private", "delta", "clip", "noise", "unit", "poisson", "secure-sum", "robust", "compress", "attack")


class Privacy(NamedTuple):
    """The options that bound, compress and hide what a client sends, outvote liars, or keep to a budget of privacy.

    `attack` has some clients of a simulation lie.
    """

    epsilon: float | None = None
    delta: float | None = None
    clip: float | None = None
    noise: float | None = None
    unit: str | None = None
    poisson: bool = False
    secure_sum: bool = False
    robust: str | None = None
    compress: str | None = None
    attack: str | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Privacy:
        """Return the options that `recorded` gave."""
        epsilon, delta, clip, noise, unit, poisson, secure_sum, *named = map(options.get, _OPTIONS)
        return cls(epsilon, delta, clip, noise, unit, bool(poisson), bool(secure_sum), *named)

    @property
    def recorded(self) -> dict[str, Any]:
        """The options for run.toml, None where they were not given."""
        return dict(zip(_OPTIONS, (*self[:5], self.poisson or None, self.secure_sum or None, *self[7:]), strict=True))

    @property
    def channel(self) -> Any:
        """The channel; None without one. Raise ValueError for options that do not belong together."""
        if self.secure_sum and (self.clip is None or self.epsilon is not None):
            raise ValueError(
                "--secure-sum needs --clip, whose bound fixes its integers, and must be given without --private. Give "
                "--clip only, or write rk.private(..., unit='record', then=...) in Python."
            )
        if self.epsilon is None:
            given = {"delta": self.delta, "unit": self.unit, "poisson": self.poisson or None}
            alone = [name for name, value in given.items() if value is not None]
            if alone:
                raise ValueError(
                    f"--{alone[0]} needs --private, the budget ε; got none. Give --private, e.g. --private 8."
                )
            if self.noise is not None and self.clip is None:
                raise ValueError(
                    "--noise needs --clip, which bounds the effect of one client; got none. Give --clip, too."
                )
            from rookery.cli import members  # loads JAX

            chosen = [
                None if self.clip is None else rk.clip(self.clip),
                None if self.compress is None else members.compression(self.compress),
                None if self.robust is None else members.robust(self.robust),
                None if self.noise is None else rk.gaussian(self.noise),
                rk.secure_sum() if self.secure_sum else None,
            ]
            chain = [member for member in chosen if member is not None]
            return rk.chain(*chain) if chain else None
        if self.robust is not None or self.compress is not None:
            name = "compress" if self.robust is None else "robust"
            raise ValueError(
                f"--{name} must be given without --private, which is the whole channel of a run; got both. Leave out "
                "one of the two."
            )
        if self.delta is None:
            raise ValueError(
                "--private needs --delta, the chance that the promise fails, below 1 over the number of clients; got "
                "none. Give --delta, e.g. --delta 1e-5."
            )
        clip = 1.0 if self.clip is None else self.clip
        return rk.private(self.epsilon, self.delta, clip, unit=self.unit or "client", noise=self.noise)

    @property
    def faults(self) -> Any:
        """The faults of `rk.solve`: clients that lie."""
        from rookery.cli import members  # loads JAX

        return None if self.attack is None else rk.Faults(attack=members.attack(self.attack))

    @property
    def public(self) -> dict[str, Any]:
        """The channel and the attack, for run.json; for a private run, `describe` gives its settings instead."""
        without = ("private", "delta", "unit", "poisson") if self.epsilon is None else _OPTIONS[:-1]
        return {name: value for name, value in self.recorded.items() if value is not None and name not in without}

    def cohort(self, size: int | None) -> Any:
        """Return the cohort of `rk.solve` for a number of clients."""
        if self.channel is None or not self.poisson:
            return size
        if size is None:
            raise ValueError(
                "--poisson needs --cohort, the expected number of clients in a round; got none. Give --cohort, too."
            )
        return rk.Poisson(size)

    def describe(self, rounds: int) -> dict[str, Any] | None:
        """Return the entry of run.json for a private run before it starts; None if it is not private."""
        if self.epsilon is None:
            return None
        asked = self.channel
        named = {name: getattr(asked, name) for name in ("epsilon", "delta", "clip", "unit", "noise")}
        return named | {"budget_rounds": rounds if self.noise is None else None}

    def check(self, request: Request, cohort: Any, rounds: int) -> None:
        """Raise ValueError if the run would be refused.

        If the data are at sites, the cost for each record depends on sizes that only the sites know, so the engine and
        the sites check the budget later.
        """
        from rookery.problems.functions import required_arguments
        from rookery.run.arguments import check_publishes_nothing
        from rookery.run.budget import Budget

        task, channel = request.task, self.channel
        if self.epsilon is None:
            return
        asked = dataclasses.replace(channel, rounds=max(rounds, 1))
        sees_memory = task.evaluate is not None and required_arguments(task.evaluate) >= 3
        check_publishes_nothing(asked, task.evaluate_client is not None, sees_memory, None)
        if task.clients.here is not None:
            return
        costs_known = task.clients.held or channel.unit == "client"
        asked = asked if costs_known else dataclasses.replace(asked, noise=1.0)
        how = {"cohort": cohort, "private": asked}
        price = rk.explain(task.problem, task.clients, request.method, task.init, **how).price
        if price.refused is not None:
            raise ValueError(price.refused)
        if costs_known:
            Budget(price.channel, price.chosen, rounds).check()

    def fit(self, request: Request) -> Request:
        """Return the request with weights that may be published, and a note if that changes the problem."""
        task = request.task
        if self.epsilon is None or self.unit == "record" or not task.clients.by_size:
            return request
        note = "The sizes of clients are not public: all clients have the same weight in this private run."
        equal = dataclasses.replace(task, clients=task.clients.weighted(None))
        return request._replace(task=equal, note=" ".join(filter(None, (request.note, note))))


PUBLIC = Privacy()
