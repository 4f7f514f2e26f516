"""The responder: the part of a site that answers requests, from run to run. Bytes in, bytes out.

It says what the site holds (hello), opens a run, passes the run's requests on to its `Site`, and ends the run (finish).
To open a run it traces the plan itself and compares it with the coordinator's. It never raises. It refuses what it may
not do, with a reason that reveals nothing of the data.
"""

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

import rookery
from rookery.base.jaxprs import digest
from rookery.base.printable import failure, printable
from rookery.data.clients import Clients
from rookery.engines.checks import check_features, check_means, check_measure, check_whole_batches, start_values
from rookery.engines.federation import description, wire
from rookery.engines.federation.agreement import Declared, declared, differences
from rookery.engines.federation.audit import Audit
from rookery.engines.federation.dataflow import asks_everyone, secure_times
from rookery.engines.federation.entropy import Entropy
from rookery.engines.federation.guard import PlanGuard, Rule
from rookery.engines.federation.identity import Identity
from rookery.engines.federation.opening import check_opening, described_clients, fingerprint, is_run_name, sample_of
from rookery.engines.federation.site import Guard, Noise, RefusedError, Site
from rookery.engines.federation.spending import Prices, multipliers, prices
from rookery.engines.federation.store import Store, locked
from rookery.language import hyperparameters
from rookery.language.channel import is_private_for_records
from rookery.plan import trace as plan
from rookery.plan.trace import Plan, Setting
from rookery.problems.problems import Problem

LOG = logging.getLogger("rookery.site")
_WHY = 2000  # characters of a reason that are sent, or shown
_CHANGES = ("number", "done", "store", "wrote")  # the fields that may differ when a run is opened again


@dataclass(frozen=True, eq=False)
class Study:
    """What a site brings to a run: the problem that was agreed on, and the site's data.

    Attributes:
        problem, init: as `solve` takes them; only the shapes of init matter.
        data: the site's data, as those of a single client.
        measure: measure(client, x, y, memory) -> {name: number}, or None.
        names: the names of the site's module: classes of methods, and `algorithm` or `channel` if the coordinator's
            can't be described in a message.
        declared: what the study's source declares, on which all participants must agree; None: derived from `problem`
            and `measure`.
    """

    problem: Problem
    init: Any
    data: Clients
    measure: Any = None
    names: Mapping[str, Any] = field(default_factory=dict)
    declared: Declared | None = None


@dataclass(frozen=True, eq=False)
class Opened:
    """A run as a site understands it before it agrees: what a policy looks at.

    Attributes:
        header: the coordinator's message.
        plans: the plans of the start, of a round and, if there is one, of an evaluation.
        fingerprint: the fingerprint of these plans.
        channel: the channel between the site's values and the coordinator, or None.
        clients, cohort: the number of clients, and how many of them take part in a round.
        algorithm: the method.
        faults: how replies may be missing, or None.
        described: the federation's clients, as the message describes them.
        prices: what a run that is private for each record releases of this site's; None: it is not private for them.
    """

    header: dict[str, Any]
    plans: tuple[Plan, ...]
    fingerprint: str
    channel: Any
    clients: int
    cohort: int
    algorithm: Any = None
    faults: Any = None
    described: Clients | None = None
    prices: Prices | None = None

    @property
    def asynchronous(self) -> bool:
        """Whether a round ends after `cohort` replies, of which several may be one site's."""
        return "asynchronous" in self.header


class Responder:
    """Answer the requests to one site.

    Arguments:
        name: the site's name.
        study: what the site brings.
        folder: where it keeps what it remembers, locked against other processes; None: a restart loses it.
        guard: guard(opened) -> a further rule for this run's requests, or None; it raises RefusedError for a run that
            the site does not take part in. Its attribute `audit`, if it has one, is the site's log; otherwise answers
            are noted in memory. The rule's attribute `evaluation`, if it has one, is sent to the coordinator: see
            `Policy`. In any case the site answers only what the plan says: see `PlanGuard`.
        fitted: fitted(study, algorithm) -> the study as this method takes it.
        allow_other_study: take part even if the coordinator's study declares something else.
        identity: its certificate, which signs the keys of its masks in secure sums; None: they are not signed.

    Attributes:
        done: whether the coordinator has ended the run.
        reason: why it ended early, or why this site did not take part; "" if all rounds are done.
    """

    def __init__(
        self,
        name: str,
        study: Study,
        folder: str | Path | None = None,
        guard: Callable[[Opened], Rule | None] = lambda opened: None,
        fitted: Callable[[Study, Any], Study] = lambda study, algorithm: study,
        allow_other_study: bool = False,
        identity: Identity | None = None,
    ) -> None:
        self.name, self._unfitted, self._guard, self._fitted = name, study, guard, fitted
        self._identity = identity
        self._study = study
        self._log: Audit = getattr(guard, "audit", None) or Audit()
        self._folder = None if folder is None else Path(folder)
        self._lock = None if folder is None else locked(folder)
        self._entropy = Entropy(folder)
        self._run = ""
        self._site: Site | None = None
        self.done, self.reason = False, ""
        self._opening: dict[str, Any] = {}  # the fields with which the run was opened
        self._evaluation = "together"
        self._declared = study.declared or declared(study.problem, study.measure)
        self._allows = allow_other_study
        self._apart: list[str] = []  # how its study differs from the coordinator's, if that is allowed

    def handle(self, request: wire.Message) -> wire.Message:
        """Return the answer to a request."""
        number, header = -1, dict[str, Any]()
        try:
            header, arrays = wire.decode(request)
            if type(header["number"]) is not int:
                raise wire.WireError("its number must be an integer")
            number = header["number"]
            match header["do"]:
                case "hello":
                    return wire.encode({"answer": "hello", "number": number, **self.hello()}, [])
                case "open":
                    return self._open(number, header)
                case "finish":
                    return self._finish(number, header)
            if self._site is None or header["run"] != self._run:
                return wire.encode({"answer": "closed", "number": number}, [])
            return self._site.answer(header, arrays)
        except (wire.WireError, KeyError) as error:
            LOG.warning("Refused a message that is not a request: %s", printable(error))
            return _refusal(number, "a request must be a message of the protocol; got something else.")
        except OSError as error:
            return self._refuse(number, header, _not_written(error))
        except Exception as error:  # its text may reveal the data, and does not leave the site
            LOG.error("A request failed.\n%s", failure())  # may contain the coordinator's words
            return _refusal(number, f"it failed ({type(error).__name__}); its log says more.")

    def hello(self) -> dict[str, Any]:
        """Return what the coordinator learns before a run."""
        data = self._study.data
        levels = {name: source for name, source in data.levels().items() if source is not None}
        return {
            "name": self.name,
            "conditions": description.conditions(),
            "protocols": list(description.PROTOCOLS),
            "jax": jax.__version__,
            "sizes": {name: int(source.sizes[0]) for name, source in levels.items()},
            "samples": {name: sample_of(source) for name, source in levels.items()},
            "center": None if data.center is None else data.center.widest,
        }

    def explain(self, header: dict[str, Any]) -> Opened:
        """Return the run that this message would open; raise RefusedError if it can't be opened."""
        try:
            check_opening(header)
            return self._understand(header)[0]
        except (RefusedError, ValueError) as error:
            raise RefusedError(printable(error, _WHY)) from error

    def _open(self, number: int, header: dict[str, Any]) -> bytes:
        try:
            check_opening(header)
        except RefusedError as error:  # a run that is open stays open
            why = printable(error, _WHY)
            if self._site is None:
                self._run, self.reason = header["run"] if is_run_name(header.get("run")) else "", why
            return self._refuse(number, header, why)
        self._run, self.reason = header["run"], ""
        try:
            fields = {name: value for name, value in header.items() if name not in _CHANGES}
            if self._site is None or fields != self._opening:
                self._site = None
                self._site = self._agree(header, digest(json.dumps(fields, sort_keys=True)))
                self._opening = fields
            self._resume(self._site, header)
        except (RefusedError, ValueError, OSError) as error:
            why = _not_written(error) if isinstance(error, OSError) else printable(error, _WHY)
            self._site, self.reason = None, why
            return self._refuse(number, header, why)
        LOG.info("Run %s is open.", self._run)
        answer = {"answer": "opened", "number": number, "evaluation": self._evaluation, "study": self._apart}
        return wire.encode(answer, [])

    def _agree(self, header: dict[str, Any], opening: str) -> Site:
        """Return the run's site if the run is known, understood and within the policy; `opening` is its digest."""
        known = self._log.runs.get(header["run"])
        if known is not None and known.opening not in ("", opening):
            raise RefusedError("it knows this run, which was opened with a different message. Begin a new run.")
        opened, described = self._understand(header)
        rule = self._guard(opened)
        delta = None if opened.prices is None else opened.channel.delta
        self._log.opened(header["run"], opening, opened.fingerprint, opened.clients, opened.cohort, delta)
        self._evaluation = getattr(rule, "evaluation", "together")
        everyone = opened.faults is None and opened.cohort == opened.clients and asks_everyone(opened.plans[1])
        everyone, begins = everyone and not opened.asynchronous, opened.cohort if opened.asynchronous else 1
        guard = PlanGuard(header["client"], self._log, everyone, rule, self._note_refusal, opened.prices, begins)
        return self._make_site(opened, described, guard, opening)

    def _refuse(self, number: int, header: dict[str, Any], why: str) -> bytes:
        self._note_refusal(header, why)
        return _refusal(number, why)

    def _note_refusal(self, header: dict[str, Any], why: str) -> None:
        LOG.warning("Refused: %s", printable(why, _WHY))
        try:
            self._log.refused(header, why)
        except OSError as error:  # it is refused all the same
            LOG.warning("The refusal is not in the audit log, which can't be written (%s).", error.strerror)

    def _understand(self, header: dict[str, Any]) -> tuple[Opened, Clients]:
        """Trace the plans as every participant does; RefusedError if they differ from the coordinator's."""
        self._compare_studies(header)
        classes = description.known(self._study.names)
        algorithm = self._build("algorithm", header["algorithm"], classes)
        self._study = self._fitted(self._unfitted, algorithm)
        channel = self._build("channel", header["channel"], classes)
        faults = description.build(header["faults"], classes)
        if is_private_for_records(channel) and channel.levels != ():
            multipliers(channel)
        clients = described_clients(header, self._study.data)
        plans, _ = self._trace(header, clients, algorithm, channel, faults)
        ours, theirs = fingerprint(plans), header["fingerprint"]
        if ours != theirs:
            differ = [p.title for p, other in zip(plans, header["signatures"], strict=False) if p.signature != other]
            what = f"already in shapes or exchanges of {', '.join(differ)}" if differ else "in what clients compute"
            pairs = {
                "Rookery": (rookery.__version__, header["conditions"].get("rookery")),
                "JAX": (jax.__version__, header["jax"]),
            }
            versions = [
                f" {name} is {here} here, {there} there." for name, (here, there) in pairs.items() if here != there
            ]
            raise RefusedError(
                f"its plan differs from the coordinator's ({ours} here, {theirs} there), {what}: problem, method, "
                f"evaluation or constants differ.{''.join(versions)}"
            )
        priced = prices(plans, self._study.data, header["center_client"] == header["client"])
        counts = header["clients"], header["cohort"]
        channel = channel if priced is None else plans[1].channel  # calibrated
        return Opened(header, plans, ours, channel, *counts, algorithm, faults, clients, priced), clients

    def _compare_studies(self, header: dict[str, Any]) -> None:
        self._apart = differences(self._declared, header["study"])
        text = " ".join(self._apart)
        if self._apart and not (self._allows or header["allow_other_study"]):
            raise RefusedError(f"its study is not the coordinator's. {text} Use the same, or --allow-other-study.")
        if self._apart:
            LOG.warning("This site's study is not the coordinator's, which --allow-other-study allows. %s", text)

    def _build(self, kind: str, described: Any, classes: Mapping[str, type]) -> Any:
        if described == {"own": True}:
            if kind not in self._study.names:
                raise RefusedError(
                    f"the coordinator's {kind} can't be sent in a message, so this site's module must define {kind}; "
                    "it does not."
                )
            return self._study.names[kind]
        try:
            return description.build(described, classes, "channel" if kind == "channel" else "method")
        except ValueError as error:
            raise RefusedError(f"the coordinator's {kind}: {error}") from error

    def _trace(
        self, header: dict[str, Any], clients: Clients, algorithm: Any, channel: Any, faults: Any
    ) -> tuple[tuple[Plan, ...], Any]:
        """Return the plans for clients of these shapes, and the values that the run starts from."""
        study, method = self._study, hyperparameters.split(algorithm)
        start = start_values(study.problem, clients, study.init)
        cohort, products = header["cohort"], header["products"]
        setting = Setting(
            study.problem, clients, method.fixed, cohort, channel, faults, False, products, header["chance"],
            asynchronous="asynchronous" in header,
        )  # fmt: skip
        if header["measures"] and study.measure is None:
            raise RefusedError("its task must have evaluate_client, which the coordinator asks for; it has none.")
        measure = study.measure if header["measures"] else None
        return plan.plans(setting, start, plan.with_levels(channel, method.traced), measure), start

    def _make_site(self, opened: Opened, described: Clients, guard: Guard, opening: str) -> Site:
        """Return the run's site, with plans traced for the shapes of its data."""
        study, header = self._study, opened.header
        data = described.at_site(study.data)
        shapes = described.site_shapes(data)
        plans, (x, y) = self._trace(header, shapes, opened.algorithm, opened.channel, opened.faults)
        try:
            check_features(study.problem, study.data, x)
            check_means(study.problem, study.data, x, y, plans[0].sample_by_sample | plans[1].sample_by_sample)
            check_whole_batches(study.problem, plans[-1].sample_by_sample)
            if len(plans) == 3 and "mean" in plans[2].sample_by_sample and _ragged(described):
                check_measure(study.problem, study.data, study.measure, (x, y), plans[0].made.carry.memory)
        except ValueError as error:  # its text has numbers that were computed from the data
            LOG.warning("%s", printable(error, _WHY))
            if opened.prices is None:  # else even a refusal would tell something of single records
                why = "a loss or a metric of its task is not a mean over samples, or not finite at the start"
                raise RefusedError(f"{why}; its log says more.") from error
        center = None
        if header["center_client"] == header["client"]:
            if study.data.center is None:
                raise RefusedError("it must hold the centre's data; its module gives none. Return them from data().")
            center = study.data.at_center()
        folder = self._folder
        levels = plan.with_levels(plans[1].channel, {}).get(plan.LEVELS)
        noise = None if levels is None else Noise(self._entropy, levels)
        held = "" if folder is None and noise is None else digest(*jax.tree.leaves(study.data))
        masking = self._masking(header, plans)
        site = Site(header["run"], plans, header["client"], data, center, guard, held, noise, masking)
        if folder is not None:
            agreed = fingerprint(opened.plans[:2])
            site.memory.stores = lambda name: Store(folder / f"{_checked(name)}.memory", held, agreed, opening)
            site.refused = self._note_refusal
        return site

    def _masking(self, header: dict[str, Any], plans: tuple[Plan, ...]) -> Any:
        """Return this site's part in the run's secure sums; None if it has none."""
        if not any(map(secure_times, plans)):
            return None
        if importlib.util.find_spec("cryptography") is None:
            raise RefusedError("the plan has secure sums, which need cryptography. Install rookery[federation].")
        from rookery.engines.federation.masking import Masking

        unmasked, note = self._log.unmasked, self._log.unmasking
        return Masking(header["run"], header["client"], self._identity, unmasked, note)

    def _resume(self, site: Site, header: dict[str, Any]) -> None:
        """Go on with what the site remembers of this run after the rounds that the coordinator says are done."""
        done, memory = header["done"], site.memory
        if memory.stores is not None:
            memory.store = memory.stores(header["store"])
            if done >= 0:
                memory.store.check()
            else:
                memory.store.begin()
        if done >= 0 and header["remembers"]:
            if memory.stores is None and memory.after(done) == {"memory": [], "client": []}:
                raise RefusedError(
                    "it has lost its memory of this run, because it has no folder to keep it in. Begin a new run."
                )
            site.go_back(done, header["wrote"])

    def _finish(self, number: int, header: dict[str, Any]) -> bytes:
        if self._run and header.get("run") == self._run:
            if self._site is not None:
                store = self._site.memory.store
                self._site.memory.close()
                if store is not None and not self._opening["remembers"]:
                    try:
                        store.delete()
                    except ValueError as error:
                        self._note_refusal(header, str(error))
            self._site, self._run, self._opening = None, "", {}
            self.done, self.reason = True, printable(header.get("why", ""), _WHY) or self.reason
        return wire.encode({"answer": "value", "number": number}, [])


def _ragged(clients: Clients) -> bool:
    return any(source.widest != source.narrowest for source in clients.levels().values() if source is not None)


def _checked(name: Any) -> str:
    if not is_run_name(name):
        raise RefusedError("a run's name must be 8 to 64 hexadecimal digits.")
    return name


def _not_written(error: OSError) -> str:
    """Return the reason for refusing a request whose answer could not be logged first."""
    return f"it can't write to its folder ({error.strerror}); it goes on when it can."


def _refusal(number: int, why: str) -> bytes:
    return wire.encode({"answer": "refused", "number": number, "why": why[:_WHY]}, [])
