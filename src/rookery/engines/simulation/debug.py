"""The debugging run: a plan interpreted client by client, not compiled, every value checked."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base import jaxprs, tree
from rookery.engines import engine
from rookery.engines.interpreter import Interpreter
from rookery.engines.simulation import device
from rookery.language import fed
from rookery.language.client import client_loop
from rookery.language.fed import NonFiniteError
from rookery.language.ledger import Amounts
from rookery.plan.trace import Call


def check_finite(value: Any, where: str) -> None:
    """Raise NonFiniteError if a number in value is not finite."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.all(jnp.isfinite(leaf))):
            raise NonFiniteError(f"{where}: {tree.path_name(path)} is not finite")


@client_loop.def_impl
def _stepwise(*given: Any, body: Any, go_on: Any, carried: int, before: int) -> list[Any]:
    """A client's loop, turn by turn."""
    count, fixed, carry = given[0], given[1 : len(given) - carried], list(given[len(given) - carried :])
    for i in range(int(count)):
        if go_on is not None and not bool(jaxprs.run(go_on[0], *(fixed[j] for j in go_on[1]), *carry)[0]):
            break
        carry = jaxprs.run(body, *fixed, jnp.int32(i), *carry)
        check_finite(carry, f"local step {before + i + 1} of {before + int(count)}")
    return carry


class Session(device.Session):
    """A run that stops at the first value that is not finite, and says where.

    `data`: what stands for the clients' data, where it is not the job's own; see `fetched.Fetched`.
    """

    def __init__(self, traced: engine.Traced, settings: device.Settings, data: Any = None) -> None:
        super().__init__(traced, settings)
        self._data = self._data if data is None else data

    def init(self) -> Amounts:
        """See `engine.Session.init`."""
        traced = self._traced
        program = _Program(traced.start, self._data, "auto")
        self._carry, report = device.start(
            program, traced.start.consts, self._data, traced.hyper, traced.job.start, traced.seed, traced.noise
        )
        return device.amounts(traced.start, report)

    def measure(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """See `engine.Session.measure`."""
        return self._measured(partial(device.measure, _Program(self._traced.measure, self._data, "auto")))

    def advance(self, rounds: int) -> list[Amounts]:
        """See `engine.Session.advance`."""
        traced, job, done = self._traced, self._job, []
        program = _Program(traced.round, self._data, "auto")
        for _ in range(rounds):
            try:
                ids, own, after, report = device.one_round(
                    program, job.cohort, traced.round.consts, self._data, traced.hyper, self._carry, self.rounds,
                    traced.seed,
                )  # fmt: skip
                check_finite(after.state, "the server, the state after the round")
            except NonFiniteError as error:
                raise NonFiniteError(f"round {self.rounds + 1}, {error}") from None
            if int(report["least"]) < device.minimum(job):
                self.stopped = engine.too_few(self.rounds, int(report["least"]), device.minimum(job))
                break
            self._carry = device.put(program, job.clients.n, self._carry, ids, own, after, True)
            done.append(device.amounts(traced.round, report))
            self.rounds += 1
        return done


class _Program(device.Program):
    def interpreter(self, clients: Any) -> Interpreter:
        """One that goes client by client."""
        return _Stepwise(clients, self.axes, self.block)


class _Stepwise(Interpreter):
    def call(self, step: Call, given: list[Any], wanted: Any) -> list[Any]:
        """The same, and what the server has then is checked."""
        out = super().call(step, given, wanted)
        if step.eqn.primitive in (fed.reduce, fed.gather, fed.center):
            who = "the centre" if step.eqn.primitive is fed.center else "the server"
            check_finite(out, f"{who}, exchange {step.eqn.params['exchange'].name!r}")
        return out

    def _compute(self, group: list[Any], wanted: Any, reduced: Any = None) -> list[Any]:
        for mapped in group:
            own = [self._array(v) for v in mapped.own]
            replies = []
            for j, identity in enumerate(np.asarray(mapped.ids)):
                try:
                    reply = self._on_one(mapped, jnp.int32(identity), [a[j] for a in own])
                    check_finite(reply[:-1], "its result")
                except NonFiniteError as error:
                    where = mapped.eqn.params["source"]
                    raise NonFiniteError(f"client {identity}, in the map at {where}, {error}") from None
                replies.append(reply)
            *mapped.rows, counts = [jnp.stack(leaf) for leaf in zip(*replies, strict=True)]
            mapped.rows = mapped.rows or [None]
            self._worked(mapped, mapped.ids, counts)
        return []

    def _on_one(self, mapped: Any, identity: Any, own: list[Any]) -> list[Any]:
        inputs = mapped.eqn.params["inputs"]
        axes, data = self._axes, jax.tree.leaves(self._clients.members(identity[None]))
        given = [data[i] if axes[i] is None else data[i][0] for i in inputs.data]
        who = [identity] * inputs.identity
        key = [jax.random.fold_in(mapped.key, identity)] if inputs.key else []
        return jaxprs.run(mapped.eqn.params["work"], *mapped.sent, *given, *who, *key, *own)

    def _block_of(self, group: list[Any]) -> int:
        return 2**30

    def _loop(self, step: Call, given: list[Any]) -> list[Any]:
        body, length = step.body, step.eqn.params["length"]
        assert body is not None
        count = length if length is not None else int(given.pop(0))
        split = len(given) - len(body.outputs)
        fixed, carry = given[:split], given[split:]
        turns: dict[int, list[Any]] = {}
        for i in range(count):
            inside = _Stepwise(self._clients, self._axes, self._block)
            carry = inside.run(body, [*fixed, jnp.int32(i), *carry])
            self._worked_in_loops.append(inside.work)
            for number, n in inside.turns.items():
                turns.setdefault(number, []).append(n)
        self.turns.update({number: np.stack(each) for number, each in turns.items()})
        if length is None:
            self.turns[step.number] = np.int32(count)
        return carry
