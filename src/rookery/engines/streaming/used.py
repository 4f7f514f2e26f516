"""Which rows the rounds of a job read."""

from typing import Any, NamedTuple

import jax

from rookery.base.compat import Var
from rookery.engines.engine import Traced
from rookery.engines.streaming import fetched
from rookery.engines.streaming.fetched import Level
from rookery.engines.streaming.rowless import Rowless, with_rows
from rookery.plan.calls import Body, LoopCall, MapCall
from rookery.plan.trace import Plan


class Used(NamedTuple):
    """The arrays of a level that rounds read, and how many of its rows fit on the device."""

    name: str
    level: Level
    arrays: tuple[int, ...]  # by their number at this level
    capacity: int

    @property
    def row_bytes(self) -> int:
        """The bytes of a sample."""
        return sum(self.level.arrays[j].row_bytes for j in self.arrays)


def used_levels(traced: Traced, data: Rowless) -> list[Used]:
    """The levels and arrays that a job's rounds read, with capacities of 0."""
    levels = fetched.levels_of(traced.job.clients)
    marked = with_rows(data.rowless, lambda k, j, spec: ("row", k, j), data.specs)
    leaves = jax.tree.leaves(marked, is_leaf=lambda a: isinstance(a, tuple) and a[:1] == ("row",))
    read = {i for call in traced.round.body.of(MapCall) for i in call.data}
    arrays = {leaves[i][1:] for i in read if isinstance(leaves[i], tuple)}
    return [
        Used(name, levels[name], tuple(sorted(j for level, j in arrays if level == k)), 0)
        for k, name in enumerate(data.rowless.levels())
        if any(level == k for level, _ in arrays)
    ]


def uses_own_cohort(plan: Plan) -> bool:
    """Return whether only the round's own cohort works in a round, which draws no other."""

    def holds(body: Body, cohort: set[Any]) -> bool:
        loops = [step for step in body.steps if isinstance(step, LoopCall)]
        within = lambda loop: {
            inner
            for outer, inner in zip(loop.fixed, loop.body.inputs, strict=False)
            if isinstance(outer, Var) and outer in cohort
        }
        mapped = [step for step in body.steps if isinstance(step, MapCall)]
        return all(call.ids in cohort for call in mapped) and all(holds(loop.body, within(loop)) for loop in loops)

    return holds(plan.body, {plan.inputs.ids})
