"""A site: one client's data and memory, and the plan. Bytes in, bytes out.

A request names run, plan, phase, round and the functions to compute, with the inputs that the site has not got. Asking
twice changes nothing; a site that forgot asks for the inputs again; it holds no seed, and no other client's values.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery import fed, jaxprs, ledger
from rookery.clients import Clients
from rookery.engines.engine import PROGRAMS
from rookery.engines.federation import wire
from rookery.fed import Inputs
from rookery.plan import Plan

Moment = tuple[int, int]  # (0, 0) for the start, (1, t) for round t


class Site:
    """One client.

    Arguments:
        run: the run's name; requests of other runs are refused.
        plans: of the start and of a round, as this site has traced them.
        identity: its number in the federation.
        data: what it holds: see `Clients.site`.
        center: the centre's data, if it holds them.
    """

    def __init__(
        self, run: str, plans: tuple[Plan, Plan], identity: int, data: Clients, center: Clients | None = None
    ) -> None:
        self._run, self._plans, self._identity = run, plans, jnp.int32(identity)
        leaves = jax.tree.leaves(data)
        self._data, self._center = leaves, None if center is None else jax.tree.leaves(center)
        self._memory: dict[str, list[Any]] = {"memory": [], "client": []}  # as it was before the moment
        self._next: dict[str, list[Any]] | None = None  # and as it will be after it
        self._moment: Moment = (-1, 0)
        self._values: dict[int, Any] = {}  # what it was sent in this moment
        self._kept: dict[int, list[Any]] = {}  # what it has computed in this moment, by the number of the map
        self._work: dict[int, list[int]] = {}

    def handle(self, request: bytes) -> bytes:
        """Answer a request; WireError for what is no request."""
        header, arrays = wire.decode(request)
        try:
            return self._answer(header, arrays)
        except (KeyError, IndexError, TypeError) as error:
            raise wire.WireError(f"not a request: {type(error).__name__}: {error}") from error

    def save(self) -> Any:
        """What it remembers."""
        return self._next or self._memory

    def restore(self, saved: Any, rounds: int) -> None:
        """Go on with what it remembered after that many rounds."""
        self._memory, self._next, self._moment = saved, None, (1, rounds - 1) if rounds else (0, 0)
        self.forget()

    def forget(self) -> None:
        """Forget what was sent and computed in this moment: all but data and memory."""
        self._values, self._kept, self._work = {}, {}, {}

    def _answer(self, header: dict[str, Any], arrays: list[Any]) -> bytes:
        moment: Moment = (int(header["phase"]), int(header["round"]))
        if header["run"] != self._run or header["plan"] != [p.signature for p in self._plans][moment[0]]:
            return wire.encode({"answer": "refused", "why": "another run, or another plan"}, [])
        if moment < self._moment:
            return wire.encode({"answer": "stale"}, [])
        if moment > self._moment:
            self._memory, self._next = self._next or self._memory, None
            self._moment = moment
            self.forget()
        self._values.update(zip(header["values"], arrays[: len(header["values"])], strict=True))
        rest = iter(arrays[len(header["values"]) :])
        plan = self._plans[moment[0]]
        asked = []
        for number, eqn, sent, with_key, own in header["maps"]:
            inputs = [["v", v] if isinstance(v, int) else v for v in sent]
            key = next(rest) if with_key else None
            rows = [next(rest) if ref == "row" else ref for ref in own]
            asked.append((number, plan.calls[eqn], inputs, key, rows))
        wanted = [*header["reply"], *header.get("memory", ()), *header.get("client", ())]
        coming = {number for number, *_ in asked}
        needed = [ref for number, _, inputs, _, own in asked if number not in self._kept for ref in (*inputs, *own)]
        if not all(self._has(ref, coming) for ref in (*needed, *wanted)):
            return wire.encode({"answer": "resync"}, [])
        for number, eqn, inputs, key, own in asked:
            if number not in self._kept:
                self._compute(plan, number, eqn, inputs, key, own)
        work = [[number, self._work[number]] for number, *_ in asked]
        reply = [_plain(self._read(plan, ref)) for ref in header["reply"]]
        if "memory" in header and self._next is None:
            self._next = {name: [self._read(plan, ref) for ref in header[name]] for name in ("memory", "client")}
        keep = set(header["keep"])
        self._kept = {number: out for number, out in self._kept.items() if number in keep}
        self._work = {number: own for number, own in self._work.items() if number in keep}
        self._values = {number: value for number, value in self._values.items() if number in set(header["held"])}
        return wire.encode({"answer": "value", "work": work}, reply)

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
        return self._memory[kind][number]

    def _compute(self, plan: Plan, number: int, eqn: Any, sent: list[Any], key: Any, own: list[Any]) -> None:
        inputs: Inputs = eqn.params["inputs"]
        data = self._data if eqn.primitive is fed.client_map else self._center
        assert data is not None
        work = eqn.params["work"]
        program = PROGRAMS.find(("client", _fingerprint(work)), lambda: jax.jit(lambda *a: jaxprs.run(work, *a)))
        who = [self._identity if eqn.primitive is fed.client_map else jnp.int32(plan.given.weights.shape[0])]
        given = [_typed(self._read(plan, ref), v.aval) for ref, v in zip(sent, work.invars, strict=False)]
        held = [data[i] for i in inputs.data]
        keys = [jax.random.wrap_key_data(jnp.asarray(key))] if inputs.key else []
        rest = [self._read(plan, ref) for ref in own]
        *out, counts = program(*given, *held, *who[: inputs.identity], *keys, *rest)
        self._kept[number], self._work[number] = out, ledger.as_integers(counts)


_FINGERPRINTS: dict[int, tuple[Any, str]] = {}


def _fingerprint(work: Any) -> str:
    """Of a client's function, computed once while it lives."""
    held = _FINGERPRINTS.get(id(work))
    if held is None or held[0] is not work:
        if len(_FINGERPRINTS) > 4096:
            _FINGERPRINTS.clear()
        held = _FINGERPRINTS[id(work)] = (work, jaxprs.fingerprint(work))
    return held[1]


def _typed(value: Any, aval: Any) -> Any:
    """A value off the wire in its own type: keys travel as words."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) and not jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        return jax.random.wrap_key_data(jnp.asarray(value))
    return value


def _plain(value: Any) -> Any:
    """A value for the wire."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)
