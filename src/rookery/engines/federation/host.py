"""The host: what answers at a site, from run to run. Bytes in, bytes out, whatever carries them.

It says what it holds (hello), opens a run, for which it traces the plan itself and compares it with the coordinator's,
hands requests to the run's `Site`, and ends it (finish). It never raises: what it does not do, it refuses, with a
reason, and no word of the data.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rookery import hyperparameters, plan
from rookery.checks import check_features, check_means, check_measure, start_values
from rookery.clients import Clients
from rookery.engines.federation import description, wire
from rookery.engines.federation.dataflow import PlanGuard
from rookery.engines.federation.site import Guard, RefusedError, Site
from rookery.engines.federation.store import Store
from rookery.jaxprs import digest
from rookery.plan import Plan, Setting
from rookery.problems import Problem
from rookery.source import Source

LOG = logging.getLogger("rookery.site")
_NAME = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True, eq=False)
class Study:
    """What a site brings to a run: the problem as it was agreed on, and its own data.

    Attributes:
        problem, init: as `solve` takes them; of init only the shapes matter.
        data: its own, as the data of a single client.
        measure: measure(client, x, y, memory) -> {name: number}, or None.
        own: names of its module: classes of methods, and `algorithm` or `channel`, where a coordinator's can't be
            described in words.
    """

    problem: Problem
    init: Any
    data: Clients
    measure: Any = None
    own: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Opened:
    """A run as a site understands it, before it agrees: what a policy looks at.

    Attributes:
        header: what the coordinator said.
        plans: of the start, of a round and, if there is one, of an evaluation.
        fingerprint: of the program that they are.
        channel: what stands between the site's values and the coordinator, or None.
        clients, cohort: how many there are, and how many take part in a round.
        algorithm: the method.
        faults: how replies may be missing, or None.
    """

    header: dict[str, Any]
    plans: tuple[Plan, ...]
    fingerprint: str
    channel: Any
    clients: int
    cohort: int
    algorithm: Any = None
    faults: Any = None


def fingerprint(plans: tuple[Plan, ...]) -> str:
    """Of the plans and of all numbers that they close over."""
    return digest(*(p.fingerprint for p in plans), *(c for p in plans for c in p.consts))[:32]


def sample_of(source: Source) -> list[Any]:
    """What a sample looks like: for each array its name, shape and type."""
    leaves = jax.tree_util.tree_leaves_with_path(source.rows)
    return [[jax.tree_util.keystr(path), list(a.shape[1:]), str(a.dtype)] for path, a in leaves]


class Host:
    """One site.

    Arguments:
        name: what it is called.
        study: what it brings.
        folder: where it keeps what it remembers; None: nowhere, and a restart loses it.
        guard: guard(opened) -> what looks at this run's requests and replies, or None; it raises RefusedError for a run
            that the site does not take part in. If it has `refused(header, why)`, it is told of all that is refused;
            if the guard it gives has `evaluation`, that is what the coordinator is told: see `Policy`. Whatever it
            says, the site answers only what the plan says: see `PlanGuard`.
        fitted: fitted(study, algorithm) -> the study as this method takes it.
    """

    def __init__(
        self,
        name: str,
        study: Study,
        folder: str | Path | None = None,
        guard: Callable[[Opened], Guard | None] = lambda opened: None,
        fitted: Callable[[Study, Any], Study] = lambda study, algorithm: study,
    ) -> None:
        self.name, self._given, self._guard, self._fitted = name, study, guard, fitted
        self._study = study
        self._tell = getattr(guard, "refused", lambda header, why: None)
        self._folder = None if folder is None else Path(folder)
        self._run = ""
        self._site: Site | None = None
        self.done = False  # the coordinator has ended the run
        self.reason = ""  # and why, if not because all rounds are done; or why it did not take part
        self._opened: dict[str, Any] = {}
        self._evaluation = "together"

    def handle(self, request: wire.Message) -> wire.Message:
        """The answer to a request."""
        number = -1
        try:
            header, arrays = wire.decode(request)
            number, do = header["number"], header["do"]
            if type(number) is not int:
                raise wire.WireError("its number is none")
            match do:
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
            LOG.warning("A message that is no request: %s", error)
            return _refused(number, "that is no request.")
        except Exception as error:  # nothing that may speak of the data leaves the site
            LOG.exception("A request failed.")
            return _refused(number, f"it failed ({type(error).__name__}); its log says more.")

    def hello(self) -> dict[str, Any]:
        """What the coordinator is told before a run."""
        data = self._study.data
        levels = {name: source for name, source in data.levels().items() if source is not None}
        return {
            "name": self.name,
            "conditions": description.conditions(),
            "jax": jax.__version__,
            "sizes": {name: int(source.sizes[0]) for name, source in levels.items()},
            "samples": {name: sample_of(source) for name, source in levels.items()},
            "center": None if data.center is None else data.center.widest,
        }

    def explain(self, header: dict[str, Any]) -> Opened:
        """What a run would be that the coordinator opens with these words; RefusedError if it can't be."""
        return self._understand(header)[0]

    def _open(self, number: int, header: dict[str, Any]) -> bytes:
        words = {name: value for name, value in header.items() if name not in ("number", "done", "store", "wrote")}
        self.reason = ""
        try:
            if self._site is None or words != self._opened:
                self._site, self._run = None, header["run"]
                opened, described = self._understand(header)
                guard = self._guard(opened)
                self._evaluation = getattr(guard, "evaluation", "together")
                whole = PlanGuard(int(header["client"]), guard, self._refused)
                self._site = self._make(header, opened, described, whole)
                self._opened = words
            self._go_on(self._site, header)
        except (RefusedError, ValueError) as error:
            self._site, self.reason = None, str(error)
            self._refused(header, str(error))
            return _refused(number, str(error))
        LOG.info("Run %s is open.", self._run)
        return wire.encode({"answer": "opened", "number": number, "evaluation": self._evaluation}, [])

    def _refused(self, header: dict[str, Any], why: str) -> None:
        LOG.warning("Refused: %s", why)
        self._tell(header, why)

    def _understand(self, header: dict[str, Any]) -> tuple[Opened, Clients]:
        """The plans as everybody traces them; RefusedError if they are not the coordinator's."""
        apart = description.differences(description.conditions(), header["conditions"], "here", "at the coordinator")
        if apart:
            raise RefusedError(f"it runs under other conditions: {'; '.join(apart)}.")
        classes = description.known(self._study.own)
        algorithm = self._built("algorithm", header["algorithm"], classes)
        self._study = self._fitted(self._given, algorithm)
        channel = self._built("channel", header["channel"], classes)
        faults = description.build(header["faults"], classes)
        clients = self._described(header)
        setting, start = self._setting(header, clients, algorithm, channel, faults)
        plans = self._plans(header, setting, start)
        own = fingerprint(plans)
        if own != header["fingerprint"]:
            theirs, differ = header["signatures"], []
            for p, signature in zip(plans, theirs, strict=False):
                differ += [p.title] if p.signature != signature else []
            what = f"already in shapes or exchanges of {', '.join(differ)}" if differ else "in what clients compute"
            other = (
                "" if header["jax"] == jax.__version__ else f" JAX is {jax.__version__} here, {header['jax']} there."
            )
            raise RefusedError(
                f"its plan is another one ({own} here, {header['fingerprint']} at the coordinator), {what}: problem, "
                f"method, evaluation or constants differ.{other}"
            )
        opened = Opened(header, plans, own, channel, header["clients"], header["cohort"], algorithm, faults)
        return opened, clients

    def _built(self, word: str, described: Any, classes: Mapping[str, type]) -> Any:
        if described == {"own": True}:
            if word not in self._study.own:
                raise RefusedError(f"the coordinator's {word} can't be described in words, and the module has none.")
            return self._study.own[word]
        try:
            return description.build(described, classes)
        except ValueError as error:
            raise RefusedError(f"the coordinator's {word}: {error}") from error

    def _described(self, header: dict[str, Any]) -> Clients:
        """The federation as it was told: shapes, no data."""
        data, n = self._study.data, int(header["clients"])
        levels = header["levels"]
        if set(levels) != {name for name, source in data.levels().items() if source is not None}:
            raise RefusedError(f"the coordinator has data at the levels {sorted(levels)}, this site at others.")

        def of(name: str, source: Source | None) -> Source | None:
            if source is None:
                return None
            widest, narrowest, chunk = levels[name]
            if int(source.sizes[0]) != header["sizes"][name]:
                raise RefusedError(f"its number of samples ({name}) has changed since it said hello.")
            rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((widest, *a.shape[1:]), a.dtype), source.rows)
            everyone: Any = jax.ShapeDtypeStruct((n,), jnp.int32)
            return Source(rows, everyone, everyone, widest, narrowest, chunk)

        sources = [of(name, source) for name, source in data.levels().items()]
        weights, center = jax.ShapeDtypeStruct((n,), jnp.result_type(float)), header["center"]
        held = None
        if center is not None:
            structure = None if data.center is None else data.center.rows
            rows = _center(center["sample"], int(center["size"]), structure, data)
            one: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
            held = Source(rows, one, one, int(center["size"]), int(center["size"]), None)
        fixed = (bool(header["replace"]), header["center_client"])
        return Clients.tree_unflatten(fixed, (*sources, weights, held))

    def _setting(
        self, header: dict[str, Any], clients: Clients, algorithm: Any, channel: Any, faults: Any
    ) -> tuple[Setting, Any]:
        start = start_values(self._study.problem, clients, self._study.init)
        fixed = hyperparameters.split(algorithm).fixed
        products = bool(header["products"])
        setting = Setting(self._study.problem, clients, fixed, int(header["cohort"]), channel, faults, False, products)
        return setting, (start, hyperparameters.split(algorithm).traced)

    def _plans(self, header: dict[str, Any], setting: Setting, start: Any) -> tuple[Plan, ...]:
        z, hyper = start
        measure = self._study.measure if header["measures"] else None
        if header["measures"] and measure is None:
            raise RefusedError("the coordinator asks for an evaluation, and its task has no evaluate_client.")
        return plan.plans(setting, z, hyper, measure)

    def _make(self, header: dict[str, Any], opened: Opened, described: Clients, guard: Guard) -> Site:
        """The run's site, with plans of its own data's shapes."""
        study = self._study
        own = described.holding(study.data)
        setting, start = self._setting(
            header, described.seen_by_site(own), opened.algorithm, opened.channel, opened.faults
        )
        plans = self._plans(header, setting, start)
        (x, y), sampled = start[0], plans[0].sample_by_sample | plans[1].sample_by_sample
        try:
            check_features(study.problem, study.data, x)
            check_means(study.problem, study.data, x, y, sampled)
            if len(plans) == 3 and "mean" in plans[2].sample_by_sample and _ragged(described):
                check_measure(study.problem, study.data, study.measure, start[0], plans[0].made.carry.memory)
        except ValueError as error:  # it has numbers that were computed from the data
            LOG.warning("%s", error)
            raise RefusedError("a loss or a metric of its task is no mean over samples; its log says more.") from error
        center = None
        if header["center_client"] == header["client"]:
            if study.data.center is None:
                raise RefusedError("it is to hold the centre's data, and its module gives none.")
            center = study.data.at_center()
        site = Site(header["run"], plans, int(header["client"]), own, center, guard)
        folder = self._folder
        if folder is not None:
            held = digest(*jax.tree.leaves(study.data))
            site.stores = lambda name: Store(folder / f"{_checked(name)}.memory", held)
        return site

    def _go_on(self, site: Site, header: dict[str, Any]) -> None:
        """Take up what the site remembers of this run, after the rounds that the coordinator says are done."""
        done, remembers = int(header["done"]), bool(header["remembers"])
        if site.stores is not None:
            site.store = site.stores(header["store"])
            if done >= 0:
                site.store.check()
            else:
                site.store.begin()
        if done >= 0 and remembers:
            if site.stores is None and site.remembered(done) == {"memory": [], "client": []}:
                raise RefusedError("it has lost what it remembers of this run, for it has no folder to keep it in.")
            site.go_back(done, int(header["wrote"]))

    def _finish(self, number: int, header: dict[str, Any]) -> bytes:
        if self._run and header.get("run") == self._run:
            if self._site is not None:
                self._site.close()
                if self._site.store is not None and not self._opened["remembers"]:
                    self._site.store.delete()
            self._site, self._run, self._opened = None, "", {}
            self.done, self.reason = True, str(header.get("why", ""))[:2000] or self.reason
        return wire.encode({"answer": "value", "number": number}, [])


def _center(sample: list[Any], size: int, rows: Any, data: Clients) -> Any:
    """The shapes of the centre's data: with the structure of its own, or of its clients' samples."""
    like = rows if rows is not None else data.lower.rows
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    if [jax.tree_util.keystr(path) for path, _ in leaves] != [name for name, _, _ in sample]:
        raise RefusedError("the centre's samples have other arrays than this site's.")
    shapes = [jax.ShapeDtypeStruct((size, *shape), jnp.dtype(dtype)) for _, shape, dtype in sample]
    return jax.tree.unflatten(structure, shapes)


def _ragged(clients: Clients) -> bool:
    return any(source.widest != source.narrowest for source in clients.levels().values() if source is not None)


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RefusedError("a run's name is none.")
    return name


def _refused(number: int, why: str) -> bytes:
    return wire.encode({"answer": "refused", "number": number, "why": why[:2000]}, [])
