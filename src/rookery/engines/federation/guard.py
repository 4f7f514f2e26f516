"""The guard that holds a coordinator to the plan."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rookery.engines.federation.audit import Audit
from rookery.engines.federation.dataflow import SENT, Operands, Source, Sources, exchange_of, sources
from rookery.engines.federation.heads import signed_head
from rookery.engines.federation.site import NO_EXCHANGE, Hiding, RefusedError, Sent
from rookery.engines.federation.spending import Prices, Release
from rookery.engines.federation.store import Moment
from rookery.plan.calls import CenterCall, ReduceCall, WorkCall
from rookery.plan.trace import Plan

_UNKNOWN = ("unknown",)  # the source of a value of a function that this site does not know


class Rule(Protocol):
    """A further rule about requests, such as a policy's limits."""

    def check(self, plan: Plan, moment: Moment, header: dict[str, Any]) -> None:
        """Raise RefusedError, with the reason, for a request that is not to be answered."""

    def afford(self, data: str, releases: Mapping[Release, int]) -> None:
        """Raise RefusedError, with the reason, if these releases of the site's records are not allowed."""

    def fields(self) -> dict[str, Any]:
        """Return further fields of a reply."""


class PlanGuard:
    """Refuse what the plan does not do: other functions, operands, replies or memory, and more replies.

    A site kept to its plan sends what the plan sends, computed as the plan computes it from this site's data. Nothing
    else can be checked here: the coordinator chooses the values that the server sends, and so the points at which a
    function is evaluated, and it decides what to do with a reply.

    What was answered is looked up in the log, which outlives this object. Rounds and evaluations of a run do not go
    back. Within one of them the site answers each exchange as often as it occurs in the plan (in a round, `begins`
    times as often), if the requests differ; the same request, by its digest, is answered again. Where every client
    takes part in every round, the site refuses an evaluation after rounds that it has not seen.

    Arguments:
        client: the site's number in the federation.
        log: where every answer is noted before it is sent. Its last run is the one that is guarded.
        everyone: whether the site must have replied in every round of the run.
        also: a further rule for what the plan allows.
        refused: refused(header, why), called with every refusal.
        prices: what the plan's functions release of the site's records, if the run is private for each of them.
        begins: how often the site may begin in a round: in an asynchronous run, as often as the round has replies.
    """

    def __init__(
        self,
        client: int,
        log: Audit,
        everyone: bool = False,
        also: Rule | None = None,
        refused: Callable[[dict[str, Any], str], None] = lambda header, why: None,
        prices: Prices | None = None,
        begins: int = 1,
    ) -> None:
        self._client, self._log, self._everyone, self._also, self._refused = client, log, everyone, also, refused
        self._prices, self._begins = prices, begins
        self._sources: dict[int, Sources] = {}  # by phase
        # The moment and the call of each function's number; it has at least those whose results the site holds.
        self._functions: dict[int, tuple[Moment, int]] = {}

    def check(self, plan: Plan, moment: Moment, header: dict[str, Any]) -> None:
        """See `Guard`. A refused request leaves nothing behind."""
        before, self._functions = self._functions, dict(self._functions)
        try:
            self._check(plan, moment, header)
            if self._also is not None:
                self._also.check(plan, moment, header)
        except RefusedError as error:
            self._functions = before
            self._refused(header, str(error))
            raise

    def admit(
        self, plan: Plan, moment: Moment, header: dict[str, Any], request: str, hiding: Hiding | None = None
    ) -> None:
        """See `Guard`. The same request may come again, as its reply may get lost.

        What it releases of the site's records is charged now, unless it was charged before with the same noise.
        """
        call = header["call"]
        times = 1 if call == NO_EXCHANGE else self._sources[moment[0]].times[call]
        different = self._log.answered.asked(moment, call) | {request}
        times = None if times is None else times * (self._begins if moment[0] == 1 else 1)
        if times is not None and len(different) > times:
            what = "to end a round" if call == NO_EXCHANGE else f"for {_name(plan, call)}"
            why = f"it is asked {what} more often than in the plan."
            self._refused(header, why)
            raise RefusedError(why)
        if hiding is not None:
            self._charge(plan, header, hiding)

    def _charge(self, plan: Plan, header: dict[str, Any], hiding: Hiding) -> None:
        new = {noise: call for noise, call in hiding.calls.items() if noise not in self._log.charged}
        if not new:
            return
        assert self._prices is not None
        releases: Counter[Release] = Counter()
        for number in new.values():
            call = plan.calls[number]
            assert isinstance(call, WorkCall)
            releases += self._prices.call(call)
        if self._also is not None:
            try:
                self._also.afford(hiding.data, releases)
            except RefusedError as error:
                self._refused(header, str(error))
                raise
        self._log.spent(hiding.data, list(new), releases)

    def replied(self, plan: Plan, moment: Moment, header: dict[str, Any], request: str, sent: Sent) -> dict[str, Any]:
        """See `Guard`."""
        call = header["call"]
        name, kind, aggregated = "finish", "finish", False
        if call != NO_EXCHANGE:
            exchange, aggregated = exchange_of(plan, call), isinstance(plan.calls[call], ReduceCall)
            name, kind = exchange.name, exchange.kind
        self._log.replied(moment, call, name, kind, aggregated, request, sent)
        keep = set(header["keep"])
        self._functions = {number: known for number, known in self._functions.items() if number in keep}
        fields = {} if self._also is None else self._also.fields()
        if self._log.path is None:
            return fields
        return {**fields, "head": signed_head(self._log.kit, header["run"], *self._log.show_head())}

    def _check(self, plan: Plan, moment: Moment, header: dict[str, Any]) -> None:
        phase, t = moment
        if phase not in (0, 1, 2):
            raise RefusedError(f"the phase must be 0, 1 or 2; got {phase}.")
        if phase not in self._sources:
            self._sources[phase] = sources(plan)
        self._check_order(phase, t)
        found = self._sources[phase]
        try:
            for number, call, sent, with_key, local in header["maps"]:
                self._check_function(plan, found, header["call"], call, with_key)
                self._check_operands(found, moment, call, sent, local)
                if self._functions.setdefault(number, (moment, call)) != (moment, call):
                    raise RefusedError(f"it is asked to compute two functions under the number {number}.")
            if "memory" in header or "client" in header:
                self._check_memory(found, moment, header)
            self._check_reply(plan, found, moment, header)
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError(
                "a request must have the fields of the protocol; one is missing, or of the wrong type."
            ) from error

    def _check_order(self, phase: int, t: int) -> None:
        """Check that rounds and evaluations of the run go forward, even if it was opened again in between."""
        seen = self._log.answered
        last = f"it has answered round {seen.moment[1]} of this run" if seen.moment[0] == 1 else "the start is over"
        if seen.moment > ((1, t) if phase == 2 else (phase, t)):
            raise RefusedError(f"{last}, and it does not go back. Begin a new run.")
        if phase == 2 and t < seen.evaluated:
            raise RefusedError(
                f"it was evaluated after {seen.evaluated} rounds, and it does not go back to {t}. Begin a new run."
            )
        reached = seen.moment[1] + 1 if seen.moment[0] == 1 else seen.evaluated
        if phase == 2 and self._everyone and reached >= 0 and t > reached:
            raise RefusedError(f"it is asked for an evaluation after {t} rounds, but has seen only {reached}.")

    def _check_function(self, plan: Plan, found: Sources, wanted: Any, call: Any, with_key: Any) -> None:
        if type(call) is not int or call not in found.sent:
            raise RefusedError("it is asked to compute something that is not a client's function in the plan.")
        work = plan.calls[call]
        assert isinstance(work, WorkCall)
        if isinstance(work, CenterCall) and (work.holder != self._client or wanted != call):
            raise RefusedError(
                f"{_name(plan, call)} must be computed by the site with the centre's data, on its own request."
            )
        if with_key is not (work.key is not None):
            raise RefusedError(
                f"function {call} must be given {'no key' if work.key is None else 'a key'}, as in the plan."
            )

    def _check_operands(self, found: Sources, moment: Moment, call: int, sent: Any, local: Any) -> None:
        given = [SENT if type(ref) is int else self._source(moment, ref) for ref in sent]
        if not _allowed(given, found.sent[call]):
            raise RefusedError(f"function {call} must be sent the plan's server values; got others.")
        if not _allowed([self._source(moment, ref) for ref in local], found.local[call]):
            raise RefusedError(f"function {call} must be given the plan's client values; got others.")

    def _check_memory(self, found: Sources, moment: Moment, header: dict[str, Any]) -> None:
        if header["call"] != NO_EXCHANGE or moment[0] == 2:
            raise RefusedError("it is asked to remember something at a time other than the end of a round.")
        for kind in ("memory", "client"):
            if not _allowed([self._source(moment, ref) for ref in header[kind]], found.remembered[kind]):
                raise RefusedError("it is asked to remember something that is not in the plan.")

    def _check_reply(self, plan: Plan, found: Sources, moment: Moment, header: dict[str, Any]) -> None:
        call, reply = header["call"], header["reply"]
        if call == NO_EXCHANGE and not reply:
            return
        if type(call) is not int or call not in found.replies:
            raise RefusedError("it is asked for a reply to something that is not an exchange of the plan.")
        work = plan.calls[call]
        if isinstance(work, CenterCall) and work.holder != self._client:
            raise RefusedError(f"{_name(plan, call)} must be sent by the site with the centre's data.")
        if not _allowed([self._source(moment, ref) for ref in reply], found.replies[call]):
            raise RefusedError(f"the reply to {_name(plan, call)} must have the plan's values; others are asked for.")

    def _source(self, moment: Moment, ref: Any) -> Source:
        """Return the source that a reference stands for; None for a value that is not of this moment.

        A site that was restarted knows no numbers: it does not have the values either, and asks for everything.
        """
        if not isinstance(ref, list):
            return ref
        if ref[0] != "m":
            return tuple(ref)
        _, number, output = ref
        if number not in self._functions:
            return _UNKNOWN
        when, call = self._functions[number]
        return ("m", call, output) if when == moment else None


def _allowed(given: list[Source], operands: Operands) -> bool:
    each = zip(given, operands, strict=False)
    return len(given) == len(operands) and all(ref == _UNKNOWN or ref in allowed for ref, allowed in each)


def _name(plan: Plan, call: int) -> str:
    return repr(exchange_of(plan, call).name)
