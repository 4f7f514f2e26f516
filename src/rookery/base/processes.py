"""Coordination of the processes that run one program together on one or several machines (`jax.distributed`).

Arrays are combined by collectives on the devices. Everything else that processes tell each other (decisions, checks
that they agree, failures) goes as JSON through JAX's key-value service.
"""

import atexit
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from rookery.base.compat import shared_service

_FAILED = "rookery/failed"
_group_numbers = itertools.count()  # all processes create the same groups in the same order
_patience = 600.0  # seconds


class HostError(RuntimeError):
    """Another process has failed, does not answer, or disagrees about the run."""


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    patience: float = 600,
) -> None:
    """Join the other processes. Call it before anything is computed.

    Arguments:
        coordinator: the address of process 0, "host:port". Leave out all three under SLURM, Open MPI and other
            launchers that JAX recognises.
        processes: the number of processes.
        process: the index of this process, from 0.
        patience: seconds to wait for a message from another process; must be longer than an evaluation takes.
    """
    global _patience
    arguments = coordinator, processes, process
    if any(value is not None for value in arguments) and any(value is None for value in arguments):
        raise ValueError(
            "coordinator, processes and process must be given together, or all left out under SLURM and the like."
        )
    if processes is not None and process is not None and not 0 <= process < processes:
        raise ValueError(f"process must be from 0 to {processes - 1}; got {process}.")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(f"coordinator must have the form host:port; got {coordinator!r}.")
    _patience = float(patience)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=int(patience),
            heartbeat_timeout_seconds=30,
            shutdown_timeout_seconds=10,
        )
    except Exception as error:
        why = str(error).splitlines()[0]
        raise HostError(f"Cannot join the other processes: {why}") from error
    atexit.register(_report_uncaught)  # runs before JAX's own exit handler, which was registered earlier


def _report_uncaught() -> None:
    error = getattr(sys, "last_value", None)  # the exception that ended the program, if one did
    if error is not None:
        report_failure(f"{type(error).__name__}: {error}")


def report_failure(message: str) -> None:
    """Tell the other processes that this one cannot continue."""
    service = shared_service()
    if service is None:
        return
    try:
        service.key_value_set(_FAILED, f"process {jax.process_index()}: {' '.join(message.split())}")
    except Exception:  # another process has failed before, or the service is gone
        return


def lead() -> bool:
    """Return whether this is the process that prints, draws and writes."""
    return shared_service() is None or jax.process_index() == 0


def share(n: int) -> range:
    """Return which of n clients live on this process's devices, if all devices share them evenly."""
    if shared_service() is None or jax.process_count() == 1:
        return range(n)
    if n < jax.device_count():
        raise ValueError(
            f"n must be at least {jax.device_count()}, the devices of all processes; got {n}. Use fewer devices."
        )
    per_device = -(-n // jax.device_count())
    local = [i for i, device in enumerate(jax.devices()) if device.process_index == jax.process_index()]
    return range(min(local[0] * per_device, n), min((local[-1] + 1) * per_device, n))


class Processes:
    """The processes of one run.

    Arguments:
        together: whether the run uses all processes, or only this one.
    """

    def __init__(self, together: bool = False) -> None:
        self.count = jax.process_count() if together else 1
        self.index = jax.process_index() if together else 0
        self._group, self._turn = (next(_group_numbers) if together else 0), 0

    @property
    def lead(self) -> bool:
        """Whether this is the process that evaluates, prints and writes."""
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in order."""
        if self.count == 1:
            return [value]
        service, self._turn = shared_service(), self._turn + 1
        key = lambda turn, i: f"rookery/{self._group}/{turn}/{i}"
        service.key_value_set(key(self._turn, self.index), json.dumps(value))
        values = [json.loads(self._wait_for(key(self._turn, i), i)) for i in range(self.count)]
        if self._turn > 1:  # every process is past the previous turn, so its value has been read
            service.key_value_delete(key(self._turn - 1, self.index))
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the lead's value."""
        return self.gather(value if self.lead else None)[0]

    def on_lead(self, make: Callable[[], Any]) -> Any:
        """Call `make` on the lead only, and return its result on every process."""
        return self.broadcast(make() if self.lead else None)

    def agree(self, described: dict[str, Any]) -> None:
        """Raise HostError on all processes if one of them describes something differently from the lead."""
        descriptions = self.gather(described)
        for i, other in enumerate(descriptions):
            for name, value in descriptions[0].items():
                if other.get(name) != value:
                    raise HostError(
                        f"process {i} does not agree with process 0: its {name} is {other.get(name)!r}, not {value!r}. "
                        "Run the same program on the same data, with the same versions, in all processes."
                    )

    def _wait_for(self, key: str, process: int) -> str:
        service, begin = shared_service(), time.monotonic()
        while True:
            try:
                return service.blocking_key_value_get(key, 1000)
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise HostError(f"process {process} is gone ({str(error).splitlines()[0]}).") from error
            try:
                failure = service.key_value_try_get(_FAILED)
            except Exception:  # no process has reported a failure
                failure = None
            if failure is not None:
                raise HostError(f"{failure.removesuffix('.')}.")
            if time.monotonic() - begin > _patience:
                raise HostError(f"process {process} has sent nothing for {_patience:.0f} seconds.")


ONE_PROCESS = Processes()
