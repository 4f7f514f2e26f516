"""A site's policy: which runs it takes part in, and the guard that holds runs to it."""

import dataclasses
import difflib
import importlib.util
import math
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rookery.base.arguments import check_amounts, check_counts, check_positive, is_number
from rookery.channels.compression import Compression
from rookery.channels.downlink import Broadcast
from rookery.channels.privacy import Clip, Gaussian
from rookery.channels.private import PrivateRecords
from rookery.channels.robust import RULES
from rookery.channels.secure import SecureSum
from rookery.engines.federation.audit import Audit
from rookery.engines.federation.dataflow import exchange_of, is_fixed
from rookery.engines.federation.guard import Rule
from rookery.engines.federation.responder import Opened
from rookery.engines.federation.site import NO_EXCHANGE, RefusedError
from rookery.engines.federation.spending import Budget, Release, bare
from rookery.engines.federation.store import Moment
from rookery.language import channel as channels
from rookery.plan.calls import CenterCall, ExchangeCall, ReduceCall
from rookery.plan.trace import Plan

EVALUATIONS = ("none", "together", "own")
_SHOWN_FOR = 10.0  # seconds for which a computed ε is shown
LIMITS = {"rounds": "rounds", "evaluations": "evaluations", "exchanges": "exchanges", "bytes_up": "bytes sent"}


@dataclass(frozen=True)
class Policy:
    """The rules for runs. Every rule is optional; a run that breaks one is refused before data are touched.

    Enforced at this site, regardless of what the coordinator does: the plan is an approved one, which this site traced
    itself; what is sent is what the plan sends, clipped where the plan clips; and the limits.

    Promised by the coordinator: the number of clients; that replies are averaged before anybody looks at them, and with
    which weights; that it draws the noise and adds it; and that nobody is shown a site's own evaluation. The
    coordinator's process sees every reply, except those to secure sums. Nor does a policy bound how much a reply, or a
    sum, reveals of the data: read the plan (`in_words_for_a_site`).

    Arguments:
        plans: the fingerprints of the approved plans; None: all are. The fingerprint covers the code, whole numbers and
            the channel; step sizes and other real numbers are sent with a request.
        rounds, evaluations, exchanges, bytes_up: the most over the life of the audit log, in all runs together; None:
            no limit. See `Counts` for what counts, and `PlanGuard` for what is answered within a round. A resumed run
            is a new one, whose rounds count anew; a new log counts from 0. With `rounds` and without `evaluations`,
            there may be one evaluation more than rounds. With `rounds` and without `exchanges`, a plan whose rounds
            have no fixed number of exchanges is refused, and so is an asynchronous run, whose rounds may ask a site
            several times.
        minimum_cohort: the fewest clients in a round, and in the federation; with faults, also the fewest replies. With
            2 or more, asynchronous runs are refused: all replies of a round may be those of one client.
        aggregated: True: no exchange may be seen alone; or a list of the exchanges that may not be seen alone. An
            exchange is seen alone if the server gathers single replies, if a channel reduces them in its own way, or if
            this site holds the centre's data. Evaluations have their own rule.
        least_noise: the smallest multiplier of `rk.gaussian` on every exchange; 0: no noise is needed.
        clip: the largest bound of `rk.clip` on every exchange; None: no clipping is needed.
        evaluation: "none": the site is not evaluated; "together": it sends its numbers, and results show means, and
            quantiles of five sites or more; "own": results may show its numbers.
        epsilon, delta: the budget of differential privacy for each of the site's records, over the life of the audit
            log, in all runs together; None: there is no budget. With it, a run must hide single records
            (`rk.private(..., unit="record")`). The site draws the noise itself, and stops answering when the budget is
            spent.
        show_epsilon: whether each reply shows the coordinator how much of the budget is spent.
        secure_sum: whether every exchange must be a secure sum (`rk.secure_sum`), so that the coordinator never sees a
            reply of this site. Plans with evaluations are refused, too.
    """

    plans: tuple[str, ...] | None = None
    rounds: int | None = None
    evaluations: int | None = None
    exchanges: int | None = None
    bytes_up: int | None = None
    minimum_cohort: int = 1
    aggregated: bool | tuple[str, ...] = False
    least_noise: float = 0.0
    clip: float | None = None
    evaluation: str = "together"
    epsilon: float | None = None
    delta: float | None = None
    show_epsilon: bool = False
    secure_sum: bool = False

    def __post_init__(self) -> None:
        texts = lambda value: isinstance(value, tuple | list) and all(isinstance(text, str) for text in value)
        if self.plans is not None and not texts(self.plans):
            raise ValueError(f"plans must be a list of fingerprints; got {self.plans!r}.")
        if not isinstance(self.aggregated, bool) and not texts(self.aggregated):
            raise ValueError(f"aggregated must be true, false or a list of exchanges; got {self.aggregated!r}.")
        check_counts(**{name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None})
        check_counts(minimum_cohort=self.minimum_cohort)
        check_amounts(least_noise=self.least_noise)
        if self.clip is not None:
            check_positive(clip=self.clip)
        if (self.epsilon is None) != (self.delta is None):
            missing = "delta" if self.delta is None else "epsilon"
            raise ValueError(f"epsilon and delta must be given together; {missing} is missing.")
        if self.epsilon is not None:
            check_positive(epsilon=self.epsilon)
        if self.delta is not None and not (is_number(self.delta) and 0 < self.delta < 1):
            raise ValueError(f"delta must be a number between 0 and 1, such as 1e-5; got {self.delta!r}.")
        for name in ("show_epsilon", "secure_sum"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false; got {getattr(self, name)!r}.")
        if self.show_epsilon and self.epsilon is None:
            raise ValueError("show_epsilon must be false without epsilon and delta; got true.")
        if self.evaluation not in EVALUATIONS:
            raise ValueError(f"evaluation must be one of {', '.join(map(repr, EVALUATIONS))}; got {self.evaluation!r}.")

    @classmethod
    def read(cls, path: str | Path) -> "Policy":
        """Read a policy from a TOML file; ValueError if it is not one."""
        try:
            with Path(path).open("rb") as file:
                found = tomllib.load(file)
            known = [field.name for field in dataclasses.fields(cls)]
            for name in found:
                if name not in known:
                    near = difflib.get_close_matches(name, known, 1)
                    meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
                    raise ValueError(f"there is no rule {name!r}; {meant}")
            rules: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
            return cls(**rules)
        except OSError as error:
            raise ValueError(f"A policy must be a TOML file that can be read; {path}: {error.strerror}.") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @property
    def limits(self) -> dict[str, int]:
        """The limits, by what they count."""
        limits = {name: getattr(self, name) for name in LIMITS}
        if self.rounds is not None and self.evaluations is None:
            limits["evaluations"] = self.rounds + 1
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def budget(self) -> Budget | None:
        """The privacy budget; None if there is none."""
        return None if self.epsilon is None or self.delta is None else Budget(self.epsilon, self.delta)

    def check(self, opened: Opened) -> None:
        """Raise RefusedError, with the reason, for a run that the policy does not allow."""
        if self.plans is not None and opened.fingerprint not in self.plans:
            raise RefusedError(
                f"its policy does not approve this plan, whose fingerprint is {opened.fingerprint}. Its owner can "
                "add it to plans."
            )
        self._check_size(opened)
        for seen in exchanges(opened):
            if seen.alone and (self.aggregated is True or (self.aggregated and seen.name in self.aggregated)):
                raise RefusedError(
                    f"its policy wants {'every exchange' if self.aggregated is True else 'this exchange'} aggregated, "
                    f"and {seen.name!r} of {seen.title} sends {seen.shape} that is seen alone."
                )
            if self.secure_sum and not seen.secure:
                raise RefusedError(
                    f"its policy wants secure sums only, and the coordinator would see the replies to {seen.name!r} of "
                    f"{seen.title}. Give rk.chain(rk.clip(...), rk.secure_sum())."
                )
            self._check_channel(seen, channels.chosen(opened.channel, seen.name))
        if self.evaluation == "none" and len(opened.plans) > 2:
            raise RefusedError("its policy does not allow evaluations. Leave evaluate_client out.")
        if self.secure_sum and len(opened.plans) > 2:
            raise RefusedError(
                "its policy wants secure sums only, and the coordinator sees evaluations. Leave evaluate_client out."
            )
        if self.rounds is not None and self.exchanges is None:
            for plan in opened.plans:
                if not is_fixed(plan):
                    raise RefusedError(
                        f"its policy limits rounds and not exchanges, and {plan.title} has an exchange that happens as "
                        "often as the run draws. Its owner can add a limit of exchanges."
                    )
            if opened.asynchronous:
                raise RefusedError(
                    "its policy limits rounds and not exchanges, and an asynchronous run may ask it several times in a "
                    "round. Its owner can add a limit of exchanges."
                )
        if self.epsilon is not None:
            self._check_privacy(opened)

    def _check_privacy(self, opened: Opened) -> None:
        where = bare(opened.plans, opened.described, opened.header["client"])
        if where is not None and opened.prices is None:
            raise RefusedError(
                "its policy has a privacy budget, so the run must hide single records. Use "
                'rk.private(..., unit="record").'
            )
        if where is not None:
            raise RefusedError(f"its policy has a privacy budget, and {where} uses its records without noise.")
        most = 0 if opened.prices is None else max(opened.prices.sizes.values())
        if self.delta is not None and most and self.delta >= 1 / most:
            raise RefusedError(
                f"its policy's delta must be below 1/n for its n = {most} records; got {self.delta:g}. Its owner can "
                "lower it."
            )

    def _check_size(self, opened: Opened) -> None:
        least, wanted = self.minimum_cohort, f"its policy wants at least {self.minimum_cohort} clients"
        if opened.asynchronous and least > 1:
            raise RefusedError(f"{wanted} in a round; got asynchronous rounds, whose replies may all be one client's.")
        if opened.clients < least or opened.cohort < least:
            raise RefusedError(f"{wanted}; got {opened.clients}, of which {opened.cohort} are in a round.")
        if opened.faults is not None and opened.faults.minimum < least:
            raise RefusedError(
                f"{wanted}; got a run that goes on with {opened.faults.minimum}. Give Faults(minimum={least})."
            )

    def _check_channel(self, seen: "Seen", channel: Any) -> None:
        name, (bound, noise) = seen.name, bound_and_noise(channel)
        if self.clip is not None and not bound <= self.clip:
            found = "it is not clipped, as far as can be told" if bound == math.inf else f"its bound is {bound:g}"
            raise RefusedError(f"its policy wants {name!r} clipped to {self.clip:g}; {found}.")
        if seen.unbounded and (self.clip is not None or self.least_noise):
            raise RefusedError(
                f"its policy wants {name!r} clipped or hidden, and it carries bookkeeping without a bound "
                f"({seen.unbounded}), which no channel touches."
            )
        if noise < self.least_noise:
            raise RefusedError(
                f"its policy wants noise of at least {self.least_noise:g} times the clip's bound on {name!r}; it has "
                f"{noise:g}."
            )


class Seen(NamedTuple):
    """An exchange of the start or of a round, as this site takes part in it."""

    title: str  # of the plan
    name: str
    kind: str
    shape: str
    alone: bool  # whether the site's reply is seen as it is
    unbounded: str  # the bookkeeping in it that has no bound
    secure: bool  # whether it is a secure sum


def exchanges(opened: Opened) -> list[Seen]:
    """Return the exchanges of the start and of a round that this site takes part in."""
    found = []
    for plan in opened.plans[:2]:
        for call in plan.body.calls:
            center = isinstance(call, CenterCall) and call.holder == opened.header["client"]
            if center or isinstance(call, ExchangeCall):
                exchange = exchange_of(plan, call.number)
                unbounded = ", ".join(what for what, _, most, _ in exchange.beside if most is None)
                alone = not isinstance(call, ReduceCall)
                found.append(
                    Seen(
                        plan.title, exchange.name, exchange.kind, exchange.shape, alone, unbounded, exchange.secure > 0
                    )
                )
    return found


def bound_and_noise(channel: Any) -> tuple[float, float]:
    """Return the norm that values are clipped to, and the noise's standard deviation in multiples of it.

    They are infinity and 0 if there is no clip, or if a member of the channel is not part of this library.
    """
    members, plain = members_of(channel), (Clip, Gaussian, SecureSum, channels.Plain, Broadcast, *RULES)
    keeps_norm = lambda member: isinstance(member, Compression) and member.keeps_norm
    if not all(type(member) in plain or keeps_norm(member) for member in members):
        return math.inf, 0.0
    bound = min((float(member.bound) for member in members if isinstance(member, Clip)), default=0.0)
    if bound <= 0:
        return math.inf, 0.0
    noises = [member for member in members if isinstance(member, Gaussian)]
    return bound, max((float(n.multiplier) * float(n.received or 0) / bound for n in noises), default=0.0)


def members_of(channel: Any) -> list[Any]:
    """Return the single members of a channel."""
    if channel is None:
        return []
    if isinstance(channel, PrivateRecords):
        return members_of(channel.then)
    if isinstance(channel, channels.Chain):
        return [inner for member in channel.members for inner in members_of(member)]
    return [channel]


class PolicyGuard:
    """Keep a site to its policy: `guard` of a `Responder`.

    Arguments:
        policy: the site's policy.
        audit: the site's log. A policy with limits or a privacy budget needs it, because they are counted there.
    """

    def __init__(self, policy: Policy, audit: Audit | None = None) -> None:
        if (policy.limits or policy.budget) and audit is None:
            raise ValueError(
                "A policy with limits needs an audit log, where they are counted; got none. Give the site a folder."
            )
        if policy.budget and importlib.util.find_spec("dp_accounting") is None:
            raise ValueError("A policy with epsilon needs dp-accounting, which computes ε. Install rookery[privacy].")
        self._budget = policy.budget
        self._shown, self._shown_at = 0.0, -math.inf
        self._policy, self.audit, self.evaluation = policy, audit, policy.evaluation

    def __call__(self, opened: Opened) -> Rule:
        """Return the rule for requests of this run; RefusedError if the policy does not allow the run."""
        self._policy.check(opened)
        return self

    def check(self, plan: Plan, moment: Moment, header: dict[str, Any]) -> None:
        """Raise RefusedError if the request would exceed a limit: see `Rule`."""
        if self.audit is None:
            return
        counts, new = self.audit.counts, self.audit.answered.is_new(moment)
        finish = header["call"] == NO_EXCHANGE
        after = {
            "rounds": counts.rounds + (new and moment[0] < 2),
            "evaluations": counts.evaluations + (new and moment[0] == 2),
            "exchanges": counts.exchanges + (not finish),
            "bytes_up": counts.bytes_up + (0 if finish else exchange_of(plan, header["call"]).reply_bytes),
        }
        for name, limit in self._policy.limits.items():
            if after[name] > limit:
                raise RefusedError(f"its policy's limit of {limit} {LIMITS[name]} is reached. Its owner can raise it.")

    def afford(self, data: str, releases: Mapping[Release, int]) -> None:
        """Raise RefusedError if this would exceed the privacy budget: see `Rule`."""
        if self._budget is not None and self.audit is not None:
            self._budget.check(self.audit.spending.counts(data), releases)

    def fields(self) -> dict[str, Any]:
        """Return what is spent, if the coordinator may know it; ε is computed anew every ten seconds."""
        if not self._policy.show_epsilon or self.audit is None or self._budget is None:
            return {}
        if time.monotonic() - self._shown_at >= _SHOWN_FOR:
            self._shown, self._shown_at = self.audit.spending.epsilon(self._budget.delta), time.monotonic()
        return {"epsilon": self._shown}
