"""Debugging runs: a plan interpreted client by client, without compilation, with every value checked."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base import jaxprs, tree
from rookery.engines import engine
from rookery.engines.interpreter import Interpreter, Mapped
from rookery.engines.simulation import device
from rookery.language.fed import NonFiniteError
from rookery.language.ledger import Amounts
from rookery.language.loops import client_loop
from rookery.plan.calls import CenterCall, GatherCall, LoopCall, Read, ReduceCall


def check_finite(value: Any, where: str) -> None:
    """Raise NonFiniteError if a number in the value is not finite."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.all(jnp.isfinite(leaf))):
            raise NonFiniteError(f"{where}: {tree.path_name(path)} is not finite")


@client_loop.def_impl
def _turn_by_turn(count: Any, *values: Any, body: Any, go_on: Any, carried: int, before: int) -> list[Any]:
    """Compute a client's loop, and check every turn."""
    fixed, carry = values[: len(values) - carried], list(values[len(values) - carried :])
    for i in range(int(count)):
        if go_on is not None and not bool(jaxprs.run(go_on[0], *(fixed[j] for j in go_on[1]), *carry)[0]):
            break
        carry = jaxprs.run(body, *fixed, jnp.int32(i), *carry)
        check_finite(carry, f"local step {before + i + 1} of {before + int(count)}")
    return carry


class Session(device.Session):
    """A run that stops at the first value that is not finite, and says where.

    `data`: a stand-in for the clients, such as `fetched.Fetched`; None: the job's clients.
    """

    def __init__(self, traced: engine.Traced, settings: device.Settings, data: Any = None) -> None:
        super().__init__(traced, settings)
        self._data = self._data if data is None else data

    def init(self) -> Amounts:
        traced = self._traced
        program = _Program(traced.start, self._data, "auto")
        self._carry, report = device.start(
            program, traced.start.consts, self._data, traced.hyper, traced.job.start, traced.seed, traced.noise
        )
        return device.amounts(traced.start, report)

    def measure(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return self._measured(partial(device.measure, _Program(self._traced.measure, self._data, "auto")))

    def advance(self, rounds: int) -> list[Amounts]:
        traced, job, done = self._traced, self._job, []
        program = _Program(traced.round, self._data, "auto")
        for _ in range(rounds):
            try:
                ids, before, after, report = device.one_round(
                    program, job.draw, traced.round.consts, self._data, traced.hyper, self._carry, self.rounds,
                    traced.seed,
                )  # fmt: skip
                check_finite(after.state, "the server, the state after the round")
            except NonFiniteError as error:
                raise NonFiniteError(f"round {self.rounds + 1}, {error}") from None
            if int(report["least"]) < job.minimum:
                self.stopped = engine.too_few(self.rounds, int(report["least"]), job.minimum)
                break
            self._carry = device.put(program, job.clients.n, self._carry, ids, before, after, True)
            done.append(device.amounts(traced.round, report))
            self._note_changed(np.asarray(ids))
            self.rounds += 1
        return done


class _Program(device.Program):
    def interpreter(self, clients: Any) -> Interpreter:
        return _Stepwise(clients, self.axes, self.block)


class _Stepwise(Interpreter):
    """Computes client by client and turn by turn, and checks the results of exchanges."""

    def reduce(self, call: ReduceCall, read: Read) -> list[Any]:
        return _checked(super().reduce(call, read), "the server", call)

    def gather(self, call: GatherCall, read: Read) -> list[Any]:
        return _checked(super().gather(call, read), "the server", call)

    def center(self, call: CenterCall, read: Read) -> list[Any]:
        return _checked(super().center(call, read), "the centre", call)

    def _compute(self, group: list[Mapped], reduced: Any = None) -> list[Any]:
        for mapped in group:
            local = [self._array(v) for v in mapped.local]
            replies = []
            for j, identity in enumerate(np.asarray(mapped.ids)):
                try:
                    reply = self._on_one(mapped, jnp.int32(identity), [a[j] for a in local])
                    check_finite(reply[:-1], "its result")
                except NonFiniteError as error:
                    raise NonFiniteError(f"client {identity}, in the map at {mapped.call.source}, {error}") from None
                replies.append(reply)
            *mapped.rows, counts = [jnp.stack(leaf) for leaf in zip(*replies, strict=True)]
            mapped.rows = mapped.rows or [None]
            self._worked(mapped, mapped.ids, counts)
        return []

    def _on_one(self, mapped: Mapped, identity: Any, local: list[Any]) -> list[Any]:
        leaves = jax.tree.leaves(self._clients.members(identity[None]))
        data = [leaf if axis is None else leaf[0] for leaf, axis in zip(leaves, self._axes, strict=True)]
        own = lambda key: None if key is None else jax.random.fold_in(key, identity)
        noise = own(mapped.noise), mapped.levels
        arguments = mapped.call.arguments(mapped.sent, data, identity, own(mapped.key), local, *noise)
        return jaxprs.run(mapped.call.work, *arguments)

    def _block_of(self, group: list[Mapped]) -> int:
        return 2**30

    def _inside(self) -> Interpreter:
        return _Stepwise(self._clients, self._axes, self._block)

    def loop(self, call: LoopCall, read: Read) -> list[Any]:
        count = int(call.turns(read))
        fixed, carry = ([self._array(value) for value in read(operands)] for operands in (call.fixed, call.carry))
        turns: dict[int, list[Any]] = {}
        for i in range(count):
            inside = self._inside()
            carry = inside.run(call.body, [*fixed, jnp.int32(i), *carry])
            self._worked_in_loops.append(inside.work)
            for number, n in inside.turns.items():
                turns.setdefault(number, []).append(n)
        self.turns.update({number: np.stack(each) for number, each in turns.items()})
        if call.length is None:
            self.turns[call.number] = np.int32(count)
        return carry


def _checked(outputs: list[Any], where: str, call: ReduceCall | GatherCall | CenterCall) -> list[Any]:
    check_finite(outputs, f"{where}, exchange {call.exchange.name!r}")
    return outputs
