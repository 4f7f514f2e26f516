"""A site: one client's data and memory, and the plan. Bytes in, bytes out.

A request names run, plan, phase, round and the functions to compute, with the inputs that the site has not got. Asking
twice changes nothing; a site that forgot asks for the inputs again; it holds no seed, and no other client's values.
A request for a checkpoint has the site open the folder of its own, save, wait or restore there, and replies with the
rounds that it has saved: what it remembers stays with it. A site on a network has a store instead, in which it writes
whenever it remembers something new.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base import jaxprs
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.checkpoints import Folder
from rookery.engines.engine import PROGRAMS
from rookery.engines.federation import wire
from rookery.engines.federation.store import Memory, Moment, Store, Version
from rookery.language import ledger
from rookery.plan.calls import Call, CenterCall, WorkCall
from rookery.plan.trace import Plan


def _after(rounds: int) -> Moment:
    """The last moment of a run of that many rounds."""
    return (1, rounds - 1) if rounds else (0, 0)


def _rounds(moment: Moment) -> int:
    """How many rounds are done after that moment."""
    return moment[0] * (moment[1] + 1)


class RefusedError(Exception):
    """The site does not do what it is asked."""


class Sent(NamedTuple):
    """Of a reply all that a guard sees: the bytes of its arrays, and their SHA-256."""

    bytes: int
    digest: str


class Guard(Protocol):
    """What stands between a request and a site's answer."""

    def check(self, plan: Plan, moment: Moment, header: dict[str, Any]) -> None:
        """Raise RefusedError, with the reason, for a request that is not to be answered."""

    def admit(self, plan: Plan, moment: Moment, header: dict[str, Any], request: str) -> None:
        """All inputs are there, and nothing is computed yet; RefusedError if nothing is to be.

        `request` is a digest of all that the reply depends on: functions, inputs, keys, memory and data. Two requests
        with the same digest have the same reply.
        """

    def replied(self, plan: Plan, moment: Moment, header: dict[str, Any], request: str, sent: Sent) -> None:
        """The answer is ready, and is sent now; RefusedError or OSError if it must not be."""


class Site:
    """One client.

    Arguments:
        run: the run's name; requests of other runs are refused.
        plans: of the start, of a round and, if there is one, of an evaluation, as this site has traced them.
        identity: its number in the federation.
        data: what it holds: see `Clients.site`.
        center: the centre's data, if it holds them.
        guard: what looks at requests and replies.
        held: a digest of its data, or "" where the data can't change while it is remembered what was answered.
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
    ) -> None:
        self._run, self._plans, self._identity = run, plans, jnp.int32(identity)
        leaves = jax.tree.leaves(data)
        self._data, self._center = leaves, None if center is None else jax.tree.leaves(center)
        self._guard, self._held = guard, held
        self._memory: Memory = {"memory": [], "client": []}  # as it was before the moment
        self._since: Moment = (-1, 0)  # when it was written
        self._next: Memory | None = None  # and as it will be after it
        self._shown = self._memory  # that which the request under way reads
        self._moment: Moment = (-1, 0)
        self._values: dict[int, Any] = {}  # what it was sent in this moment
        self._sums: dict[int, str] = {}  # and digests of that
        self._kept: dict[int, list[Any]] = {}  # what it has computed in this moment, by the number of the map
        self._origins: dict[int, str] = {}  # digests of what each of these depends on
        self._work: dict[int, list[int]] = {}
        self.folder: Folder | None = None  # for checkpoints
        self._name = ""  # of the run in them
        self.stores: Callable[[str], Store] | None = None  # or the stores of runs, by name
        self.store: Store | None = None
        self.refused: Callable[[dict[str, Any], str], None] = lambda header, why: None  # told what was not saved

    def handle(self, request: wire.Message) -> wire.Message:
        """Answer a request; WireError for what is no request."""
        return self.answer(*wire.decode(request))

    def answer(self, header: dict[str, Any], arrays: list[Any]) -> wire.Message:
        """The same, of a message that is decoded."""
        try:
            return self._answer(header, arrays)
        except RefusedError as error:
            return wire.encode({"answer": "refused", "number": header["number"], "why": str(error)}, [])
        except (KeyError, IndexError, TypeError) as error:
            raise wire.WireError(f"not a request: {type(error).__name__}: {error}") from error

    def remembered(self, rounds: int) -> Any:
        """What it remembers after that many rounds: not what a round wrote that was not completed."""
        if self._moment > _after(rounds):
            return self._memory
        return self._next or self._memory

    def close(self) -> None:
        """Finish what is being written."""
        if self.folder is not None:
            self.folder.close()

    def go_back(self, done: int, wrote: int = -1) -> None:
        """Go on with what it remembered after that many rounds, from the store if it has one.

        `wrote`: after how many rounds it has last written, as far as the coordinator knows; ValueError if what it has
        is from before.
        """
        versions = [v for v in self._versions() if v.moment <= _after(done)]
        if not versions or (wrote >= 0 and versions[-1].moment < _after(wrote)):
            last = f"after round {wrote}" if wrote >= 0 else "of this run"
            raise ValueError(f"it has lost what it remembered {last}; put back its folder.")
        self._since, self._memory = versions[-1]
        self._next, self._moment = None, _after(done)
        self.forget()

    def _versions(self) -> list[Version]:
        if self.store is not None:
            self.store.check()
            return self.store.read()
        ahead = [] if self._next is None else [Version(self._moment, self._next)]
        return [v for v in (Version(self._since, self._memory), *ahead) if v.moment >= (0, 0)]

    def _write(self, following: Memory | None) -> None:
        """Write to the store what it remembers and what it will."""
        if self.store is not None and following is not None and any(following.values()):
            before = [Version(self._since, self._memory)] if self._since >= (0, 0) else []
            self.store.write([*before, Version(self._moment, following)])

    def _in_store(self, asked: dict[str, Any]) -> list[int]:
        """Do what is asked with the store; the first of the rounds that it can go back to, or that it went back to."""
        assert self.stores is not None
        match asked["what"]:
            case "open":
                before, following = self.store, self.stores(asked["name"])
                if before is not None and before.path != following.path:
                    before.delete()
                self.store = following
            case "restore" if asked["round"] < 0:
                self._write(self._next)
            case "restore":
                self.go_back(asked["round"])
                return [_rounds(self._since)]
        assert self.store is not None
        moments = [v.moment for v in self.store.read()]
        return [_rounds(moments[0])] if moments else []

    def _save(self, asked: dict[str, Any]) -> list[int]:
        """Do what is asked with the saved rounds; those that are there then, or are being written."""
        if self.stores is not None:
            return self._in_store(asked)
        if self.folder is None:
            raise ValueError("it has no folder for checkpoints.")
        match asked["what"]:
            case "open":
                self._name = asked["name"]
                self._check_run(self.folder)
            case "save":
                done, name = asked["round"], {"run": self._name}
                self.folder.write(done, name, {"memory": self.remembered(done)}, asked["keep"])
            case "wait":
                self.folder.wait()
            case "restore":
                self._restore(self.folder, asked["round"])
        return self.folder.rounds()

    def _check_run(self, folder: Folder) -> None:
        folder.clean()
        for done in folder.rounds():
            if folder.header(done).get("run") != self._name:
                raise ValueError(f"{folder} holds what another run's client remembers; delete it, or name another.")

    def _restore(self, folder: Folder, done: int) -> None:
        """Go on with what it remembered after that many rounds (-1: with what it remembers), and delete later ones."""
        if done >= 0:
            self._memory = folder.read(done, {"memory": self._next or self._memory})["memory"]
            self._next, self._moment = None, _after(done)
            self.forget()
        folder.delete([other for other in folder.rounds() if other > done])

    def forget(self) -> None:
        """Forget what was sent and computed in this moment: all but data and memory."""
        self._values, self._sums, self._kept, self._work, self._origins = {}, {}, {}, {}, {}

    def _answer(self, header: dict[str, Any], arrays: list[Any]) -> wire.Message:
        of = header["number"]
        answer = lambda what, arrays=(), **told: wire.encode_each(
            {"answer": what, "number": of, **told}, list(arrays), [[]]
        )[0]
        if header["run"] != self._run:
            return answer("refused", why="it has another run open.")
        if header["do"] == "save":
            try:
                return answer("value", rounds=self._save(header), onwards=self.stores is not None)
            except (OSError, ValueError, RefusedError) as error:
                self.refused(header, str(error))
                return answer("value", why=str(error))
        moment: Moment = (int(header["phase"]), int(header["round"]))
        between = moment[0] == 2  # two rounds, and the next may have begun: nothing moves on
        if self._moment > (1, moment[1]) if between else moment < self._moment:
            return answer("stale")
        plan = self._plans[moment[0]]
        if self._guard is not None:
            self._guard.check(plan, moment, header)
        if not between and moment > self._moment:
            if self._next is not None:
                self._memory, self._since, self._next = self._next, self._moment, None
            self._moment = moment
            self.forget()
        self._shown = self.remembered(moment[1]) if between else self._memory
        self._values.update(zip(header["values"], arrays[: len(header["values"])], strict=True))
        if self._guard is not None:
            self._sums.update((number, jaxprs.digest(self._values[number])) for number in header["values"])
        rest = iter(arrays[len(header["values"]) :])
        asked = []
        for number, call, sent, with_key, own in header["maps"]:
            inputs = [["v", v] if isinstance(v, int) else v for v in sent]
            key = next(rest) if with_key else None
            rows = [next(rest) if ref == "row" else ref for ref in own]
            asked.append((number, call, inputs, key, rows))
        wanted = [*header["reply"], *header.get("memory", ()), *header.get("client", ())]
        coming = {number for number, *_ in asked}
        needed = [ref for number, _, inputs, _, own in asked if number not in self._kept for ref in (*inputs, *own)]
        if not all(self._has(ref, coming) for ref in (*needed, *wanted)):
            return answer("resync")
        request = ""
        if self._guard is not None:
            request = self._request(asked, header)
            self._guard.admit(plan, moment, header, request)
        for number, call, inputs, key, own in asked:
            if number not in self._kept:
                self._compute(plan, number, plan.calls[call], inputs, key, own)
        work = [[number, self._work[number]] for number, *_ in asked]
        reply = [np.asarray(self._read(plan, ref)) for ref in header["reply"]]
        if "memory" in header and self._next is None:
            following = {name: [self._read(plan, ref) for ref in header[name]] for name in ("memory", "client")}
            self._write(following)
            self._next = following
        keep = set(header["keep"])
        self._kept = {number: out for number, out in self._kept.items() if number in keep}
        self._work = {number: own for number, own in self._work.items() if number in keep}
        self._origins = {number: origin for number, origin in self._origins.items() if number in keep}
        held = set(header["held"])
        self._values = {number: value for number, value in self._values.items() if number in held}
        self._sums = {number: digest for number, digest in self._sums.items() if number in held}
        told = {"finite": self._finite()} if "memory" in header else {}
        if self._guard is not None:
            sent = Sent(sum(a.nbytes for a in reply), jaxprs.digest(*reply))
            self._guard.replied(plan, moment, header, request, sent)
        return answer("value", reply, work=work, **told)

    def _request(self, asked: list[Any], header: dict[str, Any]) -> str:
        """The digest of all that the reply depends on, whichever part of it came with this request."""
        for number, call, inputs, key, own in asked:
            if number not in self._kept:
                keyed = "" if key is None else jaxprs.digest(key)
                given = [*map(self._origin, inputs), keyed, *map(self._origin, own)]
                self._origins[number] = jaxprs.digest(str(call), str(len(inputs)), *given)
        kinds = ("reply", "memory", "client")
        wanted = [f"{kind} {self._origin(ref)}" for kind in kinds for ref in header.get(kind, ())]
        return jaxprs.digest(self._held, str(header["call"]), *wanted)

    def _origin(self, ref: Any) -> str:
        """What a value depends on, as a text."""
        if not isinstance(ref, list):
            return jaxprs.digest(ref)
        kind, number = ref[0], ref[1]
        if kind == "v":
            return self._sums[number]
        if kind == "c":
            return f"constant {number}"
        if kind == "m":
            return f"{self._origins[number]} {ref[2]}"
        return f"{kind} {jaxprs.digest(self._shown[kind][number])}"

    def _finite(self) -> list[bool]:
        """For each leaf of what it will remember that is real, whether it is finite: all that anybody is told of it."""
        assert self._next is not None
        return [bool(jnp.all(jnp.isfinite(leaf))) for _, leaf in engine.real_leaves(self._next["memory"])]

    def _has(self, ref: Any, coming: Any = ()) -> bool:
        if not isinstance(ref, list):
            return True
        kind, number = ref[0], ref[1]
        if kind == "v":
            return number in self._values
        if kind == "m":
            return number in self._kept or number in coming
        return True

    def _read(self, plan: Plan, ref: Any) -> Any:
        if not isinstance(ref, list):
            return ref
        kind, number = ref[0], ref[1]
        if kind == "v":
            return self._values[number]
        if kind == "c":
            return plan.consts[number]
        if kind == "m":
            return self._kept[number][ref[2]]
        return self._shown[kind][number]

    def _compute(self, plan: Plan, number: int, call: Call, sent: list[Any], key: Any, own: list[Any]) -> None:
        assert isinstance(call, WorkCall)
        at_center = isinstance(call, CenterCall)
        data = self._center if at_center else self._data
        assert data is not None
        identity = jnp.int32(plan.given.weights.shape[0]) if at_center else self._identity
        given, local = ([self._read(plan, ref) for ref in refs] for refs in (sent, own))
        *out, counts = client_program(plan, call)(*call.arguments(given, data, identity, key, local))
        self._kept[number], self._work[number] = out, ledger.as_integers(counts)


def client_program(plan: Plan, call: WorkCall) -> Any:
    """A client's function, compiled once for all plans that have it. Keys go in and come out as words."""
    held = plan.derived.setdefault("client programs", {})
    if call.number not in held:
        work = call.work

        def run(*given: Any) -> list[Any]:
            typed = [_wrapped(a) if _is_key(v.aval) else a for a, v in zip(given, work.invars, strict=True)]
            return [jax.random.key_data(a) if _is_key(a) else a for a in jaxprs.run(work, *typed)]

        held[call.number] = PROGRAMS.find(("client", jaxprs.identified(work)), lambda: jax.jit(run))
    return held[call.number]


def _is_key(a: Any) -> bool:
    return bool(jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key))


def _wrapped(words: Any) -> Any:
    return words if _is_key(words) else jax.random.wrap_key_data(words)
