"""A site: one client's data and memory, and the plan. Bytes in, bytes out.

A request names the run, the phase, the round and the functions to compute, with the inputs that the site does not have
yet. Asking twice changes nothing, and a site that has forgotten its inputs asks for them again. A site holds no seed
and no values of other clients. Noise that hides its records comes from its own secret, and has the multipliers of the
channel that it agreed to; no request can change either.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base import jaxprs
from rookery.base.jaxprs import is_key
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.engine import PROGRAMS
from rookery.engines.federation import description, wire
from rookery.engines.federation.dataflow import exchange_of
from rookery.engines.federation.entropy import Entropy
from rookery.engines.federation.site_memory import SiteMemory
from rookery.engines.federation.store import Moment
from rookery.language import ledger
from rookery.plan.calls import CenterCall, WorkCall
from rookery.plan.trace import Plan

NO_EXCHANGE = -1  # the call of a request that asks for no reply: the last of a phase


class RefusedError(Exception):
    """The site refuses a request."""


class ForgottenError(Exception):
    """The site does not have the keys of an agreement on masks: it was restarted, or has other ones by now."""


class SpentError(RefusedError):
    """The site refuses this and all further requests of its kind, until its owner allows more."""


class Sent(NamedTuple):
    """What a guard sees of a reply: the bytes of its arrays, and their SHA-256."""

    bytes: int
    digest: str


class Guard(Protocol):
    """Decides which requests a site answers."""

    def check(self, plan: Plan, moment: Moment, header: dict[str, Any]) -> None:
        """Raise RefusedError, with the reason, for a request that is not to be answered."""

    def admit(
        self, plan: Plan, moment: Moment, header: dict[str, Any], request: str, hiding: "Hiding | None" = None
    ) -> None:
        """Raise RefusedError if the request must not be computed. By now the site has all inputs of the request.

        `request` is a digest of everything that the reply depends on: functions, inputs, keys, memory and data. Two
        requests with the same digest have the same reply. `hiding` has the functions to be computed that release
        something of the site's records.
        """

    def replied(
        self, plan: Plan, moment: Moment, header: dict[str, Any], request: str, sent: Sent
    ) -> dict[str, Any] | None:
        """Note that the answer is about to be sent; RefusedError or OSError if it must not be.

        Returns further fields of the answer.
        """


class Hiding(NamedTuple):
    """The functions of a request that release something of a site's records.

    Attributes:
        data: a text that identifies the data, and says nothing of them.
        calls: their numbers in the plan, by a text that identifies the noise. With the same noise a function has the
            same values.
    """

    data: str
    calls: dict[str, int]


class Noise(NamedTuple):
    """How a site hides its records.

    Attributes:
        entropy: the source of its keys.
        levels: the noise multipliers of the lower and of the upper data.
        seeded: whether keys come with the requests instead, for a simulation with a `noise_seed`.
    """

    entropy: Entropy
    levels: np.ndarray
    seeded: bool = False


class _Function(NamedTuple):
    """A function that a request asks for."""

    number: int
    call: int  # its number in the plan
    sent: list[Any]  # references to the server's values
    key: Any
    local: list[Any]  # references to the client's values, or rows of the server's
    seeded: Any  # the key of its noise, if that comes from a `noise_seed`


class Site:
    """One client.

    Arguments:
        run: the run's name; requests of other runs are refused.
        plans: the plans of the start, of a round and, if there is one, of an evaluation, as this site has traced them.
        identity: its number in the federation.
        data: its data: see `Clients.site`.
        center: the centre's data, if it holds them.
        guard: looks at requests and replies.
        held: a digest of its data, or "" if they can't change while the guard remembers what was answered.
        noise: how it hides its records, if the plans release something of them; None: they don't.
        masking: its part in secure sums, a `masking.Masking`; None: it takes part in none.

    Attributes:
        memory: what it remembers from round to round, and its checkpoints.
        refused: refused(header, why), called if nothing is saved.
    """

    def __init__(
        self,
        run: str,
        plans: tuple[Plan, ...],
        identity: int,
        data: Clients,
        center: Clients | None = None,
        guard: Guard | None = None,
        held: str = "",
        noise: Noise | None = None,
        masking: Any = None,
    ) -> None:
        self._run, self._plans, self._identity = run, plans, jnp.int32(identity)
        self._data, self._center = jax.tree.leaves(data), None if center is None else jax.tree.leaves(center)
        self._guard, self._held, self._noise = guard, held, noise
        self._masking = masking
        self._traces = any(
            part is not None for part in (guard, noise, masking)
        )  # whether it needs to know what results depend on
        self._hidden: dict[int, str] = {}  # by phase: a digest of what all noise depends on
        self.memory = SiteMemory()
        self._shown = self.memory.present  # the memory that the present request reads
        self._values: dict[int, tuple[Any, str]] = {}  # what it was sent in this moment, with digests for the guard
        self._results: dict[int, tuple[list[Any], list[int]]] = {}  # what it has computed, with counts of the work
        self._origins: dict[int, str] = {}  # digests of what each function's results depend on
        self.refused: Callable[[dict[str, Any], str], None] = lambda header, why: None

    def handle(self, request: wire.Message) -> wire.Message:
        """Answer a request; WireError if it is not a request."""
        return self.answer(*wire.decode(request))

    def answer(self, header: dict[str, Any], arrays: list[Any]) -> wire.Message:
        """Answer a decoded request."""
        try:
            if header["run"] != self._run:
                raise RefusedError("it has another run open.")
            match header["do"]:
                case "save":
                    return self._answer_save(header)
                case "keys" | "shares" | "unmask":
                    return self._answer_masking(header, arrays)
            return self._answer_work(header, arrays)
        except ForgottenError:
            return _message(header, "value", work=[], forgotten=True)
        except RefusedError as error:
            return _message(header, "refused", why=str(error), final=isinstance(error, SpentError))
        except (KeyError, IndexError, TypeError) as error:
            raise wire.WireError(f"not a request: {type(error).__name__}: {error}") from error

    def go_back(self, done: int, wrote: int = -1) -> None:
        """Continue as it was after `done` rounds: see `SiteMemory.go_back`."""
        self.memory.go_back(done, wrote)
        self.forget()

    def forget(self) -> None:
        """Forget what was sent and computed in this moment: everything except data and memory."""
        self._values, self._results, self._origins = {}, {}, {}

    def _answer_save(self, header: dict[str, Any]) -> wire.Message:
        try:
            rounds = self.memory.save(header)
            if header["what"] == "restore" and header["round"] >= 0:
                self.forget()
            return _message(header, "value", rounds=rounds, onwards=self.memory.stores is not None)
        except (OSError, ValueError, RefusedError) as error:
            self.refused(header, str(error))
            return _message(header, "value", why=str(error))

    def _answer_masking(self, header: dict[str, Any], arrays: list[Any]) -> wire.Message:
        """Answer a request of the protocol of secure sums, which computes nothing from the data."""
        if self._masking is None:
            raise RefusedError("it takes part in no secure sums, because the plan has none.")
        match header["do"]:
            case "keys":
                fields, parts = self._masking.announce(header)
                return _message(header, "value", parts, **fields)
            case "shares":
                return _message(header, "value", self._masking.share(header, arrays))
        return _message(header, "value", self._masking.reveal(header, arrays))

    def _masked(self, plan: Plan, moment: Moment, header: dict[str, Any], request: str, reply: list[Any]) -> list[Any]:
        """Return a reply as it leaves the site: under masks, if the plan says that it is part of a secure sum."""
        call = header["call"]
        threshold = 0 if call == NO_EXCHANGE else exchange_of(plan, call).secure
        if not threshold:
            return reply
        if self._masking is None or "masks" not in header:
            raise RefusedError("its reply is part of a secure sum by the plan, and must be asked for as such.")
        return self._masking.hide(moment, call, threshold, header["masks"], request, reply)

    def _answer_work(self, header: dict[str, Any], arrays: list[Any]) -> wire.Message:
        moment: Moment = (int(header["phase"]), int(header["round"]))
        evaluation = moment[0] == 2  # between two rounds, of which the next may have begun
        memory = self.memory
        if memory.moment > (1, moment[1]) if evaluation else moment < memory.moment:
            return _message(header, "stale")
        plan, guard = self._plans[moment[0]], self._guard
        if guard is not None:
            guard.check(plan, moment, header)
        if not evaluation and moment > memory.moment:
            memory.begin(moment)
            self.forget()
        self._shown = memory.after(moment[1]) if evaluation else memory.present
        functions = self._take_inputs(header, arrays)
        new = [function for function in functions if function.number not in self._results]
        if not self._has_all(functions, new, header):
            return _message(header, "resync")
        request = self._digest(new, header) if self._traces else ""
        if guard is not None:
            guard.admit(plan, moment, header, request, self._hiding(moment[0], new))
        for function in functions:
            if function.number not in self._results:
                self._compute(moment[0], function)
        work = [[function.number, self._results[function.number][1]] for function in functions]
        reply = [np.asarray(self._read(plan, ref)) for ref in header["reply"]]
        reply = self._masked(plan, moment, header, request, reply)
        finite = self._remember(plan, header)
        keep, held = set(header["keep"]), set(header["held"])
        self._results = {number: result for number, result in self._results.items() if number in keep}
        self._origins = {number: origin for number, origin in self._origins.items() if number in keep}
        self._values = {number: value for number, value in self._values.items() if number in held}
        fields = {}
        if guard is not None:
            sent = Sent(sum(a.nbytes for a in reply), jaxprs.digest(*reply))
            fields = guard.replied(plan, moment, header, request, sent) or {}
        return _message(header, "value", reply, work=work, **finite, **fields)

    def _take_inputs(self, header: dict[str, Any], arrays: list[Any]) -> list[_Function]:
        """Take the values that come with a request, and return the functions that it asks for."""
        numbers = header["values"]
        digest = jaxprs.digest if self._traces else (lambda array: "")
        values = zip(numbers, arrays[: len(numbers)], strict=True)
        self._values.update({number: (array, digest(array)) for number, array in values})
        rest, functions = iter(arrays[len(numbers) :]), []
        for number, call, sent, with_key, local, *seeded in header["maps"]:
            if seeded and not (self._noise and self._noise.seeded):
                raise RefusedError("its noise must be its own; the request sends some.")
            refs = [["v", ref] if isinstance(ref, int) else ref for ref in sent]
            key = next(rest) if with_key else None
            rows = [next(rest) if ref == "row" else ref for ref in local]
            functions.append(_Function(number, call, refs, key, rows, next(rest) if seeded else None))
        return functions

    def _has_all(self, functions: list[_Function], new: list[_Function], header: dict[str, Any]) -> bool:
        """Return whether all inputs of the new functions, and all results that are wanted, are here or computed now."""
        computed = self._results.keys() | {function.number for function in functions}
        wanted = [*header["reply"], *header.get("memory", ()), *header.get("client", ())]
        refs = [*(ref for function in new for ref in (*function.sent, *function.local)), *wanted]
        there = {"v": self._values, "m": computed}
        return all(ref[1] in there[ref[0]] for ref in refs if isinstance(ref, list) and ref[0] in there)

    def _remember(self, plan: Plan, header: dict[str, Any]) -> dict[str, list[bool]]:
        """Remember what the request says. Returns whether it is finite, which is all that leaves the site."""
        if "memory" not in header:
            return {}
        following = self.memory.following
        if following is None:
            following = {kind: [self._read(plan, ref) for ref in header[kind]] for kind in ("memory", "client")}
            self.memory.end(following)
        leaves = engine.real_leaves(following["memory"])
        return {"finite": [bool(jnp.all(jnp.isfinite(leaf))) for _, leaf in leaves]}

    def _digest(self, new: list[_Function], header: dict[str, Any]) -> str:
        """Return a digest of everything that the reply depends on, even if it came with an earlier request."""
        for function in new:
            key = "" if function.key is None else jaxprs.digest(function.key)
            inputs = [*map(self._origin, function.sent), key, *map(self._origin, function.local)]
            self._origins[function.number] = jaxprs.digest(str(function.call), str(len(function.sent)), *inputs)
        kinds = ("reply", "memory", "client")
        wanted = [f"{kind} {self._origin(ref)}" for kind in kinds for ref in header.get(kind, ())]
        return jaxprs.digest(self._held, str(header["call"]), *wanted)

    def _origin(self, ref: Any) -> str:
        """Return a text that identifies what a value depends on."""
        if not isinstance(ref, list):
            return jaxprs.digest(ref)
        kind, number = ref[0], ref[1]
        if kind == "v":
            return self._values[number][1]
        if kind == "c":
            return f"constant {number}"
        if kind == "m":
            return f"{self._origins[number]} {ref[2]}"
        return f"{kind} {jaxprs.digest(self._shown[kind][number])}"

    def _read(self, plan: Plan, ref: Any) -> Any:
        if not isinstance(ref, list):
            return ref
        kind, number = ref[0], ref[1]
        if kind == "v":
            return self._values[number][0]
        if kind == "c":
            return plan.consts[number]
        if kind == "m":
            return self._results[number][0][ref[2]]
        return self._shown[kind][number]

    def _entropy(self) -> Entropy:
        if self._noise is None:
            raise RefusedError("its plan hides records by noise, and it has no source of noise.")
        return self._noise.entropy

    def _hiding(self, phase: int, new: list[_Function]) -> Hiding | None:
        """Return which of these functions release something of the site's records; None if none does."""
        hiding = [function for function in new if _work(self._plans[phase], function.call).noise is not None]
        if not hiding:
            return None
        mark = self._entropy().mark
        return Hiding(mark(f"data {self._held}"), {mark(self._hides(phase, f)): f.call for f in hiding})

    def _hides(self, phase: int, function: _Function) -> str:
        """Return a digest of everything that the values of a function depend on, except the site's secret.

        Two functions with the same noise must have the same values: their difference would show the data without any.
        """
        if phase not in self._hidden:
            assert self._noise is not None
            plan, machine = self._plans[phase], jax.devices()[0].device_kind
            fixed = self._held, str(self._identity), plan.fingerprint, *plan.consts, self._noise.levels
            self._hidden[phase] = jaxprs.digest(*fixed, str(description.conditions()), jax.__version__, machine)
        return jaxprs.digest(self._hidden[phase], self._origins[function.number])

    def _compute(self, phase: int, function: _Function) -> None:
        plan = self._plans[phase]
        call = _work(plan, function.call)
        at_center = isinstance(call, CenterCall)
        data = self._center if at_center else self._data
        assert data is not None
        identity = jnp.int32(plan.given.weights.shape[0]) if at_center else self._identity
        sent, local = ([self._read(plan, ref) for ref in refs] for refs in (function.sent, function.local))
        noise = levels = None
        if call.noise is not None:
            entropy, levels = self._entropy(), self._noise.levels if self._noise else None
            noise = entropy.key(self._hides(phase, function)) if function.seeded is None else function.seeded
        arguments = call.arguments(sent, data, identity, function.key, local, noise, levels)
        if call.noise is not None and not _fit(call, arguments):
            raise RefusedError(
                f"function {call.number} must be given arrays of the plan's shapes and types; got others."
            )
        *out, counts = client_program(plan, call)(*arguments)
        self._results[function.number] = out, ledger.as_integers(counts)


def _work(plan: Plan, number: int) -> WorkCall:
    call = plan.calls[number]
    assert isinstance(call, WorkCall)
    return call


def _fit(call: WorkCall, arguments: list[Any]) -> bool:
    """Return whether arguments have the shapes and types that the function was traced with."""
    given = [jax.random.key_data(a) if is_key(a) else a for a in arguments]
    traced: list[Any] = [
        jax.eval_shape(jax.random.key_data, v.aval) if is_key(v.aval) else v.aval for v in call.work.invars
    ]
    return [(a.shape, a.dtype) for a in given] == [(v.shape, v.dtype) for v in traced]


def _message(request: dict[str, Any], answer: str, arrays: list[Any] | tuple[()] = (), **fields: Any) -> wire.Message:
    header = {"answer": answer, "number": request["number"], **fields}
    return wire.encode_each(header, list(arrays), [[]])[0]


def client_program(plan: Plan, call: WorkCall) -> Any:
    """Return a client's function, compiled once for all plans that have it. Keys go in and come out as integers."""
    programs = plan.derived.setdefault("client programs", {})
    if call.number not in programs:
        work = call.work
        key = lambda value: value if is_key(value) else jax.random.wrap_key_data(value)

        def run(*inputs: Any) -> list[Any]:
            typed = [key(a) if is_key(v.aval) else a for a, v in zip(inputs, work.invars, strict=True)]
            return [jax.random.key_data(a) if is_key(a) else a for a in jaxprs.run(work, *typed)]

        programs[call.number] = PROGRAMS.find(("client", jaxprs.identified(work)), lambda: jax.jit(run))
    return programs[call.number]
