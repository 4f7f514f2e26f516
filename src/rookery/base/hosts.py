"""Several processes that run one program together, on one host or on many (`jax.distributed`).

Their arrays meet in the devices' own sums; here is what they tell each other beside that, as JSON, through the service
that JAX's processes share: what was decided, whether they agree, and that one of them has failed.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from rookery.base.compat import shared_service

_FAILED = "rookery/failed"
_made = itertools.count()  # groups: all processes make the same ones in the same order
_patience = 600.0  # seconds


class HostError(RuntimeError):
    """Another process has failed, does not answer, or disagrees about the run."""


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    patience: float = 600,
) -> None:
    """Join the other processes; before anything is computed.

    Arguments:
        coordinator: the address of process 0, "host:port". None, with the other two: as the environment says (SLURM,
            Open MPI and others that JAX knows).
        processes: how many there are.
        process: which one this is, from 0.
        patience: seconds to wait for a word of another one, before giving up: longer than an evaluation takes.
    """
    global _patience
    given = coordinator, processes, process
    if any(value is not None for value in given) and any(value is None for value in given):
        raise ValueError(
            "Give coordinator, processes and process, all three; or none of them, under SLURM and the like."
        )
    if processes is not None and process is not None and not 0 <= process < processes:
        raise ValueError(f"process={process} of {processes}: they are counted from 0 to {processes - 1}.")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(f"coordinator={coordinator!r} is not of the form host:port.")
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
        raise HostError(f"The other processes can't be joined: {why}") from error
    before = sys.excepthook

    def hook(kind: Any, error: Any, traceback: Any) -> None:
        failed(f"{kind.__name__}: {error}")
        before(kind, error, traceback)

    sys.excepthook = hook


def lead() -> bool:
    """Whether this is the process that prints, draws and writes."""
    return shared_service() is None or jax.process_index() == 0


def share(n: int) -> range:
    """Which of n clients live on this process's devices, if they are divided among all devices of all processes."""
    if shared_service() is None or jax.process_count() == 1:
        return range(n)
    if n < jax.device_count():
        raise ValueError(f"{n} clients can't be divided among the {jax.device_count()} devices of all processes.")
    each = -(-n // jax.device_count())
    own = [i for i, device in enumerate(jax.devices()) if device.process_index == jax.process_index()]
    return range(min(own[0] * each, n), min((own[-1] + 1) * each, n))


def failed(message: str) -> None:
    """Tell the others that this process will not go on."""
    service = shared_service()
    if service is None:
        return
    try:
        service.key_value_set(_FAILED, f"process {jax.process_index()}: {' '.join(message.split())}")
    except Exception:  # somebody else has failed before, or nobody is there any more
        return


class Hosts:
    """The processes of one run.

    Arguments:
        together: whether there are others; alone, everything that is said is heard by oneself.
    """

    def __init__(self, together: bool = False) -> None:
        self.count = jax.process_count() if together else 1
        self.index = jax.process_index() if together else 0
        self._group, self._turn = (next(_made) if together else 0), 0

    @property
    def lead(self) -> bool:
        """Whether this is the process that evaluates, prints and writes."""
        return self.index == 0

    def gathered(self, value: Any) -> list[Any]:
        """What each process says, in their order."""
        if self.count == 1:
            return [value]
        service, self._turn = shared_service(), self._turn + 1
        place = lambda turn, i: f"rookery/{self._group}/{turn}/{i}"
        service.key_value_set(place(self._turn, self.index), json.dumps(value))
        said = [json.loads(self._heard(place(self._turn, i), i)) for i in range(self.count)]
        if self._turn > 1:  # all have spoken since, so all have heard it
            service.key_value_delete(place(self._turn - 1, self.index))
        return said

    def told(self, value: Any) -> Any:
        """What the first process says."""
        return self.gathered(value if self.lead else None)[0]

    def first(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on the first process, which alone calls it."""
        return self.told(make() if self.lead else None)

    def agree(self, described: dict[str, Any]) -> None:
        """Raise on all processes if one of them describes something otherwise than the first."""
        each = self.gathered(described)
        for i, other in enumerate(each):
            for name, value in each[0].items():
                if other.get(name) != value:
                    raise HostError(
                        f"process {i} does not agree with process 0: its {name} is {other.get(name)!r}, there it is "
                        f"{value!r}. All processes run the same program on the same data, with the same versions."
                    )

    def _heard(self, key: str, who: int) -> str:
        service, begin = shared_service(), time.monotonic()
        while True:
            try:
                return service.blocking_key_value_get(key, 1000)
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise HostError(f"process {who} is gone ({str(error).splitlines()[0]}).") from error
            try:
                why = service.key_value_try_get(_FAILED)
            except Exception:  # there is no such word
                why = None
            if why is not None:
                raise HostError(f"{why.removesuffix('.')}.")
            if time.monotonic() - begin > _patience:
                raise HostError(f"process {who} has said nothing for {_patience:.0f} seconds.")


ALONE = Hosts()
