"""Checkpoints: where a run continues, and when it saves."""

import dataclasses
import hashlib
import json
import time
import warnings
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from rookery.base import content
from rookery.data.clients import Clients
from rookery.engines.folders import Folder, is_key
from rookery.language.hyperparameters import is_array, is_optimizer, may_be_schedule

_ROUNDS = (0, 1, 2, 5, 10, 30, 100, 1000, 10000)  # rounds at which two schedules are compared
SHARE = 0.05  # the share of a run's time that saving may take, beyond the first save and the last
_digests: weakref.WeakKeyDictionary[Clients, str] = weakref.WeakKeyDictionary()


def identity(algorithm: Any, clients: Clients, start: Any, seed: int, cohort: int, program: str) -> dict[str, Any]:
    """Return everything that a run's numbers depend on. A checkpoint continues only runs for which this is the same."""
    hyperparameters = {}
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        schedule = callable(value) and may_be_schedule(type(algorithm), field.name)
        hyperparameters[field.name] = [float(value(t)) for t in _ROUNDS] if schedule else _described_value(value)
    if clients not in _digests or clients.placement == "host":  # rows on the host may have changed
        _digests[clients] = clients.digest or content.of_arrays(clients)
    return {
        "algorithm": type(algorithm).__name__,
        **hyperparameters,
        "seed": seed,
        "cohort": cohort,
        "clients": clients.n,
        "center_client": clients.center_client,
        "start": content.of_arrays(start),
        "data": _digests[clients],
        "program (losses, projection, channel or the library's own code)": program,
    }


def _described_value(value: Any) -> str:
    """Return a text that identifies a hyperparameter; arrays by a digest, because their repr leaves numbers out."""
    if is_optimizer(value):  # its numbers are part of the program, and its repr has addresses
        return "an optimizer"
    if is_array(value):
        return f"{np.shape(value)} {content.of_arrays(value)}"
    return content.Content().of(value) if callable(value) else repr(value)


class Keepers(Protocol):
    """Sites that hold memory which a session does not see, and save it themselves."""

    def open(self, folder: Path, run: str) -> dict[str, list[int]]:
        """Name the run; return the rounds of it that each site has saved."""

    def save(self, keep: int | None) -> bool:
        """Begin to save at all sites, deleting all rounds but `keep`; return False if one can't be reached."""

    def wait(self) -> bool:
        """Wait until all sites have written; return False if one can't be reached."""

    def restore(self, done: int) -> None:
        """Continue at all sites from round `done` (-1: from where they are), deleting later rounds."""


class Saved(NamedTuple):
    """What `solve` restores from a checkpoint."""

    extra: dict[str, Any]
    best: Any


class Checkpoint:
    """The checkpoint of a run: this folder holds the server's part, and each keeper holds its own.

    A round counts as saved once the server and all keepers have saved it. Until then, all of them keep the previous
    one.

    Arguments:
        folder: the folder.
        identity: the run's `identity`.
        session: an `engine.Session`, at its start.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any], session: Any) -> None:
        self._folder, self._identity, self._session = Folder(folder, session.processes), identity, session
        self._saved: int | None = None  # the last round that all have saved
        self._begun: int | None = None  # the round being written
        self._skipped = False  # whether the last evaluation has not been saved
        self._since, self._spent = time.perf_counter(), 0.0

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        try:
            self._wait()
            self._folder.close()
        except Exception:
            if kind is None:
                raise

    def resume(self, best: Any, rounds: int) -> Saved | None:
        """Restore the session from the last saved round; return None if there is none."""
        saved, folder, keepers = self._folder.rounds(), self._folder, self._session.keepers
        folder.clean()
        if saved:
            self._check(folder.header(saved[-1]), rounds)
        digest = hashlib.blake2b(json.dumps(self._identity, sort_keys=True).encode(), digest_size=16).hexdigest()
        of_keepers = {} if keepers is None else keepers.open(folder.path, digest)
        done = self._last_common(saved, of_keepers) if saved else -1
        folder.delete([other for other in saved if other > done])
        if keepers is not None:
            keepers.restore(done)
        if not saved:
            return None
        self._saved = done
        extra = folder.header(done)["extra"]
        like = {"carry": self._session.save()}
        if extra["best"] is not None:
            like["best"] = jax.tree.map(lambda a: a if is_key(a) else jax.ShapeDtypeStruct(a.shape, a.dtype), best)
        found = folder.read(done, like)
        self._session.restore(found["carry"], done)
        return Saved(extra, found.get("best"))

    def _check(self, header: dict[str, Any], rounds: int) -> None:
        where = self._folder
        for name, value in self._identity.items():
            its = header.get("identity", {}).get(name)
            if its == value:
                continue
            differs, also, hint = f"its {name} is {its!r}, this run's {value!r}", "", ""
            if isinstance(its, dict) and isinstance(value, dict):
                parts = sorted(part for part in its.keys() | value.keys() if its.get(part) != value.get(part))
                parts = [part for part in parts if part in content.CODE] or parts
                what = "is another function" if parts[0] in content.CODE else "reads other values"
                differ, them = ("differs", "it") if len(parts) == 1 else ("differ", "them")
                differs, also = f"its {name} {what} ({', '.join(parts)} {differ})", f"the same {name}, "
                if parts[0] not in content.CODE:
                    hint = f" If {name} itself changes {them}, do that in a callback instead."
            elif isinstance(its, dict) or isinstance(value, dict):
                differs = f"it was saved {'without' if its is None else 'with'} {name}, and this run has "
                differs, also = differs + ("none" if value is None else "one"), f"the same {name}, "
            raise ValueError(
                f"{where} belongs to another run: {differs}. Give {also}another checkpoint folder, or delete this one."
                f"{hint}"
            )
        if header["round"] > rounds:
            raise ValueError(
                f"rounds must be at least {header['round']}, the rounds saved in {where}; got {rounds}. "
                "Give more rounds, or another folder."
            )

    def _last_common(self, saved: list[int], of_keepers: dict[str, list[int]]) -> int:
        """Return the last round that the coordinator and all keepers have saved."""
        for done in reversed(saved):
            if all(done in rounds for rounds in of_keepers.values()):
                return done
        who = min(of_keepers, key=lambda who: len(set(saved) & set(of_keepers[who])))
        raise ValueError(
            f"{self._folder} can't be resumed: the coordinator has saved the rounds {saved} and {who} "
            f"{of_keepers[who] or 'none'}, so no round is saved by all. Restore what is missing, or delete all "
            "checkpoints to start afresh."
        )

    def save(self, extra: dict[str, Any], best: Any, always: bool = False) -> None:
        """Begin to save the session's current state.

        Unless `always`, nothing is saved while the previous round is still being written, or if saving takes too much
        of the run's time.
        """
        begin = time.perf_counter()
        costly = self._session.processes.broadcast(self._spent > SHARE * (begin - self._since))
        self._skipped = not always and (costly or self._folder.busy())
        if self._skipped:
            return
        self._wait()
        if self._saved == self._session.rounds:  # at most an evaluation is new, which a resumed run drops
            return
        session, arrays = self._session, {"carry": self._session.save()}
        if best is not None:
            arrays["best"] = (best.x, best.y, best.memory)
        if session.keepers is None or session.keepers.save(self._saved):
            header = {"identity": self._identity, "extra": extra}
            self._folder.write(session.rounds, header, arrays, self._saved, session.by_client())
            self._begun = session.rounds
            if always and session.keepers is not None:  # keepers continue, and can go back by only one round
                self._wait()
        else:
            warnings.warn(f"The checkpoint of round {session.rounds} was skipped: not all sites replied.", stacklevel=3)
        self._spent += time.perf_counter() - begin

    def finish(self, extra: dict[str, Any], best: Any) -> None:
        """Save the session if its last evaluation has not been saved, and wait until it is written."""
        if self._skipped:
            self.save(extra, best, always=True)
        self._wait()

    def _wait(self) -> None:
        self._folder.wait()
        keepers = self._session.keepers
        if self._begun is not None and (keepers is None or keepers.wait()):
            self._saved = self._begun
