"""The primitives evaluated right away, under any trace: for testing a part of an algorithm by itself."""

from typing import Any

from jaxtyping import Array

from rookery.base import jaxprs
from rookery.data.clients import Clients
from rookery.engines.interpreter import Interpreter
from rookery.language.fed import Fed
from rookery.language.tracing import Threaded, Tracing
from rookery.plan.calls import body_of


class EvaluatedFed(Fed):
    """The cohort `ids` of these clients. `memory` is what they remember, a row for each."""

    def __init__(self, problem: Any, clients: Clients, ids: Array, memory: Any = None) -> None:
        super().__init__(problem, clients, clients.weights, ids, Tracing(threaded=Threaded(memory)))

    def _bind(self, primitive: Any, *args: Any, **params: Any) -> list[Any]:
        traced, _ = jaxprs.trace(lambda *a: primitive.bind(*a, **params), *args)
        interpreter = Interpreter(self._clients, self._clients.client_axes(), 128)  # it keeps rows from call to call
        return interpreter.run(body_of(jaxprs.open_up(traced)), [*traced.consts, *args])
