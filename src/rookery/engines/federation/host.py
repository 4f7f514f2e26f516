"""The host: what answers at a site, from run to run. Bytes in, bytes out, whatever carries them.

It says what it holds (hello), opens a run, for which it traces the plan itself and compares it with the coordinator's,
hands requests to the run's `Site`, and ends it (finish). It never raises: what it does not do, it refuses, with a
reason, and no word of the data.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rookery.base.jaxprs import digest
from rookery.base.printable import failure, printable
from rookery.data.clients import Clients
from rookery.data.rows import ClientRows
from rookery.engines.checks import check_features, check_means, check_measure, start_values
from rookery.engines.federation import description, wire
from rookery.engines.federation.agreement import Declared, declared, differences
from rookery.engines.federation.audit import Audit
from rookery.engines.federation.dataflow import PlanGuard, Rule, asks_everyone
from rookery.engines.federation.site import Guard, RefusedError, Site
from rookery.engines.federation.store import Store, locked
from rookery.language import hyperparameters
from rookery.plan import trace as plan
from rookery.plan.trace import Plan, Setting
from rookery.problems.problems import Problem

LOG = logging.getLogger("rookery.site")
_NAME = re.compile(r"[0-9a-f]{8,64}")
_WHY = 2000  # characters of a reason that are sent, or shown
_CHANGES = ("number", "done", "store", "wrote")  # what may differ where a run is opened again


@dataclass(frozen=True, eq=False)
class Study:
    """What a site brings to a run: the problem as it was agreed on, and its own data.

    Attributes:
        problem, init: as `solve` takes them; of init only the shapes matter.
        data: its own, as the data of a single client.
        measure: measure(client, x, y, memory) -> {name: number}, or None.
        own: names of its module: classes of methods, and `algorithm` or `channel`, where a coordinator's can't be
            described in words.
        declared: what the study's source declares, which all must agree on; None: what that of `problem` and `measure`
            does.
    """

    problem: Problem
    init: Any
    data: Clients
    measure: Any = None
    own: Mapping[str, Any] = field(default_factory=dict)
    declared: Declared | None = None


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


def sample_of(source: ClientRows) -> list[Any]:
    """What a sample looks like: for each array its name, shape and type."""
    leaves = jax.tree_util.tree_leaves_with_path(source.rows)
    return [[jax.tree_util.keystr(path), list(a.shape[1:]), str(a.dtype)] for path, a in leaves]


class Host:
    """One site.

    Arguments:
        name: what it is called.
        study: what it brings.
        folder: where it keeps what it remembers, locked against other processes; None: nowhere, and a restart loses it.
        guard: guard(opened) -> a further rule for this run's requests, or None; it raises RefusedError for a run that
            the site does not take part in. If it has an `audit`, that is the site's log; without, what was answered is
            noted in memory. If the rule it gives has `evaluation`, that is what the coordinator is told: see `Policy`.
            Whatever it says, the site answers only what the plan says: see `PlanGuard`.
        fitted: fitted(study, algorithm) -> the study as this method takes it.
        allow_other_study: whether it takes part though the coordinator's study declares something else.
    """

    def __init__(
        self,
        name: str,
        study: Study,
        folder: str | Path | None = None,
        guard: Callable[[Opened], Rule | None] = lambda opened: None,
        fitted: Callable[[Study, Any], Study] = lambda study, algorithm: study,
        allow_other_study: bool = False,
    ) -> None:
        self.name, self._given, self._guard, self._fitted = name, study, guard, fitted
        self._study = study
        self._log: Audit = getattr(guard, "audit", None) or Audit()
        self._folder = None if folder is None else Path(folder)
        self._lock = None if folder is None else locked(folder)
        self._run = ""
        self._site: Site | None = None
        self.done = False  # the coordinator has ended the run
        self.reason = ""  # and why, if not because all rounds are done; or why it did not take part
        self._opened: dict[str, Any] = {}
        self._evaluation = "together"
        self._declared = study.declared or declared(study.problem, study.measure)
        self._allows = allow_other_study
        self._apart: list[str] = []  # in what its study differs from the coordinator's, where that is allowed

    def handle(self, request: wire.Message) -> wire.Message:
        """The answer to a request."""
        number, header = -1, dict[str, Any]()
        try:
            header, arrays = wire.decode(request)
            if type(header["number"]) is not int:
                raise wire.WireError("its number is not an integer")
            number, do = header["number"], header["do"]
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
            LOG.warning("A message that is no request: %s", printable(error))
            return _refused(number, "that is no request.")
        except OSError as error:
            why = _not_written(error)
            self._refused(header, why)
            return _refused(number, why)
        except Exception as error:  # nothing that may speak of the data leaves the site
            LOG.error("A request failed.\n%s", failure())  # with words of the coordinator, perhaps
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
        try:
            check_opening(header)
            return self._understand(header)[0]
        except (RefusedError, ValueError) as error:
            raise RefusedError(printable(error, _WHY)) from error

    def _open(self, number: int, header: dict[str, Any]) -> bytes:
        words = {name: value for name, value in header.items() if name not in _CHANGES}
        try:
            check_opening(header)
        except RefusedError as error:  # a run that is open stays open
            why = printable(error, _WHY)
            if self._site is None:
                self._run, self.reason = header["run"] if _is_name(header.get("run")) else "", why
            self._refused(header, why)
            return _refused(number, why)
        self._run, self.reason = header["run"], ""
        try:
            if self._site is None or words != self._opened:
                self._site = None
                opening = digest(json.dumps(words, sort_keys=True))
                if header["run"] in self._log.runs and self._log.runs[header["run"]].opening not in ("", opening):
                    raise RefusedError("it knows this run, which was opened with other words; begin a new one.")
                opened, described = self._understand(header)
                rule = self._guard(opened)
                self._log.opened(header["run"], opening, opened.fingerprint, opened.clients, opened.cohort)
                self._evaluation = getattr(rule, "evaluation", "together")
                everyone = opened.faults is None and opened.cohort == opened.clients and asks_everyone(opened.plans[1])
                whole = PlanGuard(header["client"], self._log, everyone, rule, self._refused)
                self._site = self._make(header, opened, described, whole, opening)
                self._opened = words
            self._go_on(self._site, header)
        except (RefusedError, ValueError, OSError) as error:
            why = _not_written(error) if isinstance(error, OSError) else printable(error, _WHY)
            self._site, self.reason = None, why
            self._refused(header, why)
            return _refused(number, why)
        LOG.info("Run %s is open.", self._run)
        said = {"answer": "opened", "number": number, "evaluation": self._evaluation, "study": self._apart}
        return wire.encode(said, [])

    def _refused(self, header: dict[str, Any], why: str) -> None:
        LOG.warning("Refused: %s", printable(why, _WHY))
        try:
            self._log.refused(header, why)
        except OSError as error:  # it is refused all the same
            LOG.warning("The audit log has no line of that: it can't be written (%s).", error.strerror)

    def _understand(self, header: dict[str, Any]) -> tuple[Opened, Clients]:
        """The plans as everybody traces them; RefusedError if they are not the coordinator's."""
        self._compare(header)
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

    def _compare(self, header: dict[str, Any]) -> None:
        """Refuse a run whose coordinator's study declares something else."""
        self._apart = differences(self._declared, header["study"])
        text = " ".join(self._apart)
        if self._apart and not (self._allows or header["allow_other_study"]):
            raise RefusedError(f"its study is not the coordinator's; use the same, or --allow-other-study. {text}")
        if self._apart:
            LOG.warning("This site's study is not the coordinator's, which --allow-other-study allows. %s", text)

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
        data, n = self._study.data, header["clients"]
        levels = header["levels"]
        if set(levels) != {name for name, source in data.levels().items() if source is not None}:
            raise RefusedError(f"the coordinator has data at the levels {sorted(levels)!r}, this site at others.")

        def of(name: str, source: ClientRows | None) -> ClientRows | None:
            if source is None:
                return None
            widest, narrowest, chunk = levels[name]
            if int(source.sizes[0]) != header["sizes"].get(name):
                raise RefusedError(f"its number of samples ({name}) has changed since it said hello.")
            rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((widest, *a.shape[1:]), a.dtype), source.rows)
            everyone: Any = jax.ShapeDtypeStruct((n,), jnp.int32)
            return ClientRows(rows, everyone, everyone, widest, narrowest, chunk)

        sources = [of(name, source) for name, source in data.levels().items()]
        weights, center = jax.ShapeDtypeStruct((n,), jnp.result_type(float)), header["center"]
        held = None
        if center is not None:
            structure = None if data.center is None else data.center.rows
            rows = _center(center["sample"], center["size"], structure, data)
            one: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
            held = ClientRows(rows, one, one, center["size"], center["size"], None)
        fixed = (header["replace"], header["center_client"])
        return Clients.tree_unflatten(fixed, (*sources, weights, held))

    def _setting(
        self, header: dict[str, Any], clients: Clients, algorithm: Any, channel: Any, faults: Any
    ) -> tuple[Setting, Any]:
        start = start_values(self._study.problem, clients, self._study.init)
        fixed = hyperparameters.split(algorithm).fixed
        products, cohort = header["products"], header["cohort"]
        setting = Setting(self._study.problem, clients, fixed, cohort, channel, faults, False, products)
        return setting, (start, hyperparameters.split(algorithm).traced)

    def _plans(self, header: dict[str, Any], setting: Setting, start: Any) -> tuple[Plan, ...]:
        z, hyper = start
        measure = self._study.measure if header["measures"] else None
        if header["measures"] and measure is None:
            raise RefusedError("the coordinator asks for an evaluation, and its task has no evaluate_client.")
        return plan.plans(setting, z, hyper, measure)

    def _make(self, header: dict[str, Any], opened: Opened, described: Clients, guard: Guard, opening: str) -> Site:
        """The run's site, with plans of its own data's shapes."""
        study = self._study
        own = described.at_site(study.data)
        setting, start = self._setting(
            header, described.site_shapes(own), opened.algorithm, opened.channel, opened.faults
        )
        plans = self._plans(header, setting, start)
        (x, y), sampled = start[0], plans[0].sample_by_sample | plans[1].sample_by_sample
        try:
            check_features(study.problem, study.data, x)
            check_means(study.problem, study.data, x, y, sampled)
            if len(plans) == 3 and "mean" in plans[2].sample_by_sample and _ragged(described):
                check_measure(study.problem, study.data, study.measure, start[0], plans[0].made.carry.memory)
        except ValueError as error:  # it has numbers that were computed from the data
            LOG.warning("%s", printable(error, _WHY))
            why = "a loss or a metric of its task is not a mean over samples, or not finite at the start"
            raise RefusedError(f"{why}; its log says more.") from error
        center = None
        if header["center_client"] == header["client"]:
            if study.data.center is None:
                raise RefusedError("it is to hold the centre's data, and its module gives none.")
            center = study.data.at_center()
        folder = self._folder
        held = "" if folder is None else digest(*jax.tree.leaves(study.data))
        site = Site(header["run"], plans, header["client"], own, center, guard, held)
        if folder is not None:
            agreed = fingerprint(opened.plans[:2])
            site.stores = lambda name: Store(folder / f"{_checked(name)}.memory", held, agreed, opening)
            site.refused = self._refused
        return site

    def _go_on(self, site: Site, header: dict[str, Any]) -> None:
        """Take up what the site remembers of this run, after the rounds that the coordinator says are done."""
        done, remembers = header["done"], header["remembers"]
        if site.stores is not None:
            site.store = site.stores(header["store"])
            if done >= 0:
                site.store.check()
            else:
                site.store.begin()
        if done >= 0 and remembers:
            if site.stores is None and site.remembered(done) == {"memory": [], "client": []}:
                raise RefusedError("it has lost what it remembers of this run, for it has no folder to keep it in.")
            site.go_back(done, header["wrote"])

    def _finish(self, number: int, header: dict[str, Any]) -> bytes:
        if self._run and header.get("run") == self._run:
            if self._site is not None:
                self._site.close()
                if self._site.store is not None and not self._opened["remembers"]:
                    try:
                        self._site.store.delete()
                    except ValueError as error:
                        self._refused(header, str(error))
            self._site, self._run, self._opened = None, "", {}
            self.done, self.reason = True, printable(header.get("why", ""), _WHY) or self.reason
        return wire.encode({"answer": "value", "number": number}, [])


def _center(sample: list[Any], size: int, rows: Any, data: Clients) -> Any:
    """The shapes of the centre's data: with the structure of its own, or of its clients' samples."""
    like = rows if rows is not None else data.lower.rows
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    if [jax.tree_util.keystr(path) for path, _ in leaves] != [name for name, _, _ in sample]:
        raise RefusedError("the centre's samples have other arrays than this site's.")
    try:
        shapes = [jax.ShapeDtypeStruct((size, *shape), jnp.dtype(dtype)) for _, shape, dtype in sample]
    except TypeError as error:
        raise RefusedError("the centre's samples have arrays of a type that is not known here.") from error
    return jax.tree.unflatten(structure, shapes)


def _ragged(clients: Clients) -> bool:
    return any(source.widest != source.narrowest for source in clients.levels().values() if source is not None)


def _checked(name: Any) -> str:
    if not _is_name(name):
        raise RefusedError("a run's name must be 8 to 64 hexadecimal digits.")
    return name


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _not_written(error: OSError) -> str:
    """Why nothing is sent that could not be written down before."""
    return f"it can't write to its folder ({error.strerror}); it goes on when it can."


def _refused(number: int, why: str) -> bytes:
    return wire.encode({"answer": "refused", "number": number, "why": why[:_WHY]}, [])


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**31


def _is_sample(value: Any) -> bool:
    """A description of arrays: see `sample_of`."""
    if not isinstance(value, list):
        return False
    each = [array for array in value if isinstance(array, list) and [type(part) for part in array] == [str, list, str]]
    return len(each) == len(value) and all(_is_count(size, 0) for _, shape, _ in each for size in shape)


def _is_levels(value: Any) -> bool:
    sizes = lambda own: isinstance(own, list) and len(own) == 3 and all(map(_is_count, own[:2]))
    return isinstance(value, dict) and all(
        sizes(own) and (own[2] is None or _is_count(own[2])) for own in value.values()
    )


_TEXT = ("a text", lambda value: isinstance(value, str))
_FLAG = ("true or false", lambda value: isinstance(value, bool))
_OBJECT = ("an object", lambda value: isinstance(value, dict))
_RUN = ("8 to 64 hexadecimal digits", _is_name)
_COUNT = ("an integer of at least 1", _is_count)
_ROUNDS = ("an integer of at least -1", lambda value: _is_count(value, -1))
_CLIENT = ("an integer of at least 0", lambda value: _is_count(value, 0))
_DESCRIBED = ("a description", lambda value: value is None or isinstance(value, dict))
# What `open` says, all of it, and what each part must be.
_OPENING: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "do": _TEXT,
    "number": ("an integer", lambda value: type(value) is int),
    "run": _RUN,
    "store": _RUN,
    "conditions": _OBJECT,
    "jax": _TEXT,
    "algorithm": _DESCRIBED,
    "channel": _DESCRIBED,
    "faults": _DESCRIBED,
    "clients": _COUNT,
    "cohort": _COUNT,
    "client": _CLIENT,
    "sizes": ("numbers of samples", lambda value: isinstance(value, dict) and all(map(_is_count, value.values()))),
    "levels": ("sizes by level", _is_levels),
    "replace": _FLAG,
    "center": (
        "null, or a sample and a size",
        lambda value: (
            value is None
            or (isinstance(value, dict) and _is_sample(value.get("sample")) and _is_count(value.get("size")))
        ),
    ),
    "center_client": ("null, or an integer of at least 0", lambda value: value is None or _is_count(value, 0)),
    "products": _FLAG,
    "measures": _FLAG,
    "study": _OBJECT,
    "allow_other_study": _FLAG,
    "remembers": _FLAG,
    "fingerprint": _TEXT,
    "signatures": ("texts", lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value)),
    "done": _ROUNDS,
    "wrote": _ROUNDS,
}


def check_opening(header: dict[str, Any]) -> None:
    """Raise RefusedError unless a run is opened under this site's conditions, with all words that it takes and no
    others, each of its type."""
    theirs = header.get("conditions")
    apart = description.differences(
        description.conditions(), theirs if isinstance(theirs, dict) else {}, "here", "at the coordinator"
    )
    if apart:
        raise RefusedError(f"it runs under other conditions: {'; '.join(apart)}.")
    missing = [name for name in _OPENING if name not in header]
    if missing:
        raise RefusedError(f"the opening of the run must say {missing[0]!r}.")
    for name, value in header.items():
        if name not in _OPENING:
            raise RefusedError(f"the opening of the run has {printable(name, 50)!r}, which is not known here.")
        what, fits = _OPENING[name]
        if not fits(value):
            raise RefusedError(f"the opening's {name!r} must be {what}; got {printable(json.dumps(value), 100)}.")
    for name, most in (("cohort", 0), ("client", 1), ("center_client", 1)):
        if header[name] is not None and header[name] > header["clients"] - most:
            of = f"at most {header['clients'] - most}, for there are {header['clients']} clients"
            raise RefusedError(f"the opening's {name!r} must be {of}; got {header[name]}.")
