"""Estimate a round's memory before it is compiled, and how many clients fit on a device side by side."""

import os
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax

from rookery.base import compat, jaxprs
from rookery.base.compat import Jaxpr, Literal, Var
from rookery.base.processes import Processes
from rookery.engines import engine
from rookery.language import ledger
from rookery.plan.calls import MapCall
from rookery.plan.trace import Plan


class MemoryLimitError(MemoryError):
    """A round needs more memory than the device has."""


def memory_of(device: Any) -> int:
    """The bytes of memory that a device may use; the devices of a CPU share what the process may use."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_cgroup_limits(Path("/"))]) // max(1, jax.local_device_count())


def _cgroup_limits(root: Path) -> list[int]:
    """The memory limits of this process's control groups (v1 and v2) and of their parents.

    Paths that do not exist are skipped: a container may see its own group as the root of /sys/fs/cgroup, under a path
    that names the groups outside.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    limits = []
    for number, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        v1 = [("sys/fs/cgroup/memory", "memory.limit_in_bytes")] if "memory" in controllers.split(",") else []
        v2 = [("sys/fs/cgroup", "memory.max"), ("sys/fs/cgroup/unified", "memory.max")]
        inside = PurePosixPath(path.lstrip("/"))
        for folder, name in v2 if number == "0" else v1:
            for group in (inside, *inside.parents):
                try:
                    limits.append(int((root / folder / group / name).read_text()))
                except (OSError, ValueError):  # no such group, or no limit ("max")
                    continue
    return [limit for limit in limits if limit > 0]


def peak(jaxpr: Jaxpr) -> int:
    """The most bytes of values alive at one time, without the inputs.

    A value that is computed entry by entry and read once counts as fused. All others live until their last reader.
    """
    readers: dict[Var, int] = {}
    last: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        for v in eqn.invars:
            if not isinstance(v, Literal):
                readers[v], last[v] = readers.get(v, 0) + 1, i
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}
    made: dict[Var, int] = {}
    alive = most = 0
    for i, eqn in enumerate(jaxpr.eqns):
        inner = max((peak(each) for each in jaxprs.within(eqn.params)), default=0)
        fused = compat.is_fused(eqn)
        out = 0
        for v in eqn.outvars:
            if v not in last or (fused and readers.get(v, 0) == 1 and last[v] < len(jaxpr.eqns)):
                continue
            made[v] = ledger.nbytes([v.aval])
            out += made[v]
        # A loop's carry exists twice during a turn. The results of other calls are among their inner values.
        both = out + inner if eqn.primitive in compat.LOOPS or not inner else max(out, inner)
        most = max(most, alive + both)
        alive += out
        for v in {v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal)}:
            if last.get(v) == i:
                alive -= made.pop(v, 0)
    return most


def bytes_per_client(plan: Plan, axes: list[int | None]) -> tuple[int, int]:
    """The bytes that one client's work takes in the most demanding map of a plan: an estimate, and a lower bound.

    The estimate includes the client's data, its memory, and all values alive at one time; the bound includes only
    inputs and outputs. Data without a client axis (`Clients.client_axes`) exist once for all clients.
    """
    most = least = 0
    for call in plan.body.of(MapCall):
        shared = [*[True] * len(call.sent), *(axes[i] is None for i in call.data)]
        private = [v for i, v in enumerate(call.work.invars) if i >= len(shared) or not shared[i]]
        inputs = ledger.nbytes([v.aval for v in private])
        outputs = ledger.nbytes([v.aval for v in call.work.outvars])
        most, least = max(most, inputs + peak(call.work)), max(least, inputs + outputs)
    return most, least


def readable(count: float) -> str:
    """Return a human-readable byte count.

    >>> readable(2_100_000_000), readable(35_000)
    ('2.1 GB', '35 kB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2g} {unit}" if count < 10 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} bytes"


ADVICE = (
    'What helps: fewer clients side by side (rk.Simulation(block=1)), smaller batches, remat=True, precision="bfloat16"'
    ', more devices (mesh="all"), or data that stay on the host (rk.Clients.from_arrays(..., placement="host")).'
)


class MemoryEstimate:
    """The memory that a round needs on a device, and how many clients it can compute side by side.

    Arguments:
        limit: the device's bytes.
        data: bytes of the clients' data on the device.
        kept: bytes of the state and of what clients remember.
        plans: the plans of the start, of a round, and so on.
        axes: see `bytes_per_client`.
    """

    def __init__(self, limit: int, data: int, kept: int, plans: list[Plan], axes: list[int | None]) -> None:
        self.limit, self.data, self.kept = limit, data, kept
        self.per_client, least = map(max, zip(*(bytes_per_client(plan, axes) for plan in plans), strict=True))
        # The state exists twice during a round; half of the rest is left to the compiler's own copies.
        self.side_by_side = max(1, (limit - data - 2 * kept) // 2 // max(1, self.per_client))
        if data + kept + least > limit:
            raise MemoryLimitError(f"The device has {readable(limit)}. {self.sizes(1)} {ADVICE}")

    def sizes(self, block: int) -> str:
        """A sentence on the memory that data, state and work need with a block of this size."""
        clients = "one client's work" if block == 1 else f"the work of {block:,} clients side by side"
        return (
            f"The clients' data take {readable(self.data)}, the state and what clients remember {readable(self.kept)}, "
            f"{clients} about {readable(block * self.per_client)}."
        )

    def notes(self, cohort: int) -> list[str]:
        """A note if a cohort of this size does not fit."""
        if self.side_by_side >= cohort:
            return []
        return [
            f"{self.side_by_side:,} of {cohort:,} clients are computed side by side: each takes about "
            f"{readable(self.per_client)}, and the device has {readable(self.limit)}."
        ]


class _Sizes(NamedTuple):
    """The bytes of the clients' data on the device, of the state, and of what clients remember."""

    data: int
    state: int
    remembered: int


def _sizes(traced: engine.Traced) -> _Sizes:
    carry, clients = traced.start.made.carry, traced.job.clients
    state, remembered = (ledger.nbytes(jax.tree.leaves(part)) for part in ((carry.state, carry.server), carry[1:3]))
    on_device = jax.tree.leaves(clients) if clients.placement == "device" else []
    return _Sizes(sum(getattr(leaf, "nbytes", 0) for leaf in on_device), state, remembered)


def fits(traced: engine.Traced, share: float) -> bool:
    """Whether data, state and what clients remember take at most this share of a device."""
    return sum(_sizes(traced)) <= share * memory_of(jax.local_devices()[0])


def memory_estimate(
    traced: engine.Traced, devices: int, processes: Processes, remembered: int | None = None, rows: int = 0
) -> MemoryEstimate:
    """The estimate for the smallest device of all processes, if clients are divided among `devices`.

    `remembered`: the bytes on the device of what clients remember; None: all of it. `rows`: those of rows that come
    from the host.
    """
    clients = traced.job.clients
    data, state, whole = _sizes(traced)
    remembered = whole if remembered is None else remembered
    among = devices if clients.here is None else jax.local_device_count()
    limit = min(processes.gather(memory_of(jax.local_devices()[0])))
    kept, axes = state + -(-remembered // devices), traced.setting.clients.client_axes()
    return MemoryEstimate(limit, rows + -(-data // among), kept, [traced.start, traced.round], axes)
