"""A site's file of what it remembers."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.federation.processes import FORK, SECONDS, job
from tests.engines.federation.studies import in_memory, responders, study, without_data

from rookery.engines.federation.audit import Audit
from rookery.engines.federation.responder import Responder
from rookery.engines.federation.store import LOCK, Store, locked


def test_other_data_than_those_it_began_with_are_refused(tmp_path: Path) -> None:
    """(A site that comes back with them: test_faults.)"""
    path = tmp_path / "run.memory"
    Store(path, "one").check()  # there is nothing yet
    Store(path, "one").begin()
    Store(path, "one").check()
    with pytest.raises(ValueError, match="its data have changed since it began this run"):
        Store(path, "other").check()
    Store(path, "other").begin()  # does not replace what is there
    with pytest.raises(ValueError, match="its data have changed"):
        Store(path, "other").check()


def _hold(folder: Path, pipe: Any) -> None:
    """Lock the folder, if that can be, and say so."""
    try:
        held = [locked(folder)]
        pipe.send("held")
    except ValueError as error:
        held = []
        pipe.send(str(error))
    pipe.poll(SECONDS if held else 0)


@pytest.mark.xdist_group("processes")
def test_a_folder_has_one_process_at_a_time(tmp_path: Path) -> None:
    """Another one is refused while the first lives, also while it sleeps (SIGSTOP), and not after kill -9."""
    pipe, theirs = FORK.Pipe()
    first = FORK.Process(target=_hold, args=(tmp_path, theirs), daemon=True)
    first.start()
    assert pipe.recv() == "held"
    os.kill(first.pid, signal.SIGSTOP)
    with pytest.raises(ValueError, match=f"{tmp_path} is in use by process {first.pid}, .* Stop that process, or"):
        locked(tmp_path)
    os.kill(first.pid, signal.SIGCONT)
    with pytest.raises(ValueError, match="is in use by process"):
        Audit(tmp_path / "audit.jsonl")
    with pytest.raises(ValueError, match="is in use by process"):
        Responder("anna", study(job("FedAvg"), 0), tmp_path)
    first.kill()
    first.join(SECONDS)
    held = locked(tmp_path)
    assert locked(tmp_path / ".") is held  # within one process it is shared
    assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"
    second = FORK.Process(target=_hold, args=(tmp_path, theirs), daemon=True)
    second.start()
    assert f"is in use by process {os.getpid()}" in pipe.recv()
    second.join(SECONDS)
    assert held is not None


def test_what_could_not_be_written_is_not_taken_for_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the end of a round: that is refused, again and again, until there is space."""
    what = job("Ditto")
    own = responders(what, tmp_path)
    engine, said, full = in_memory(own), [], [True, True, False]
    write, ask = Store.write, engine.transport._ask

    def short(store: Store, versions: Any) -> None:
        if len(versions) > 1 and store.path.parent.name == "1" and full.pop(0):
            raise OSError(28, "No space left on device")
        write(store, versions)

    def again(i: int, message: bytes) -> bytes:
        answer = ask(i, message)
        while b'"refused"' in bytes(answer)[:400]:
            said.append(bytes(answer))
            answer = ask(i, message)
        return answer

    monkeypatch.setattr(Store, "write", short)
    engine.transport._ask = again
    session: Any = engine.open(without_data(what))
    session.init()
    full[3:] = [False] * 10
    session.advance(1)
    assert len(said) == 2
    assert all(b"it can't write to its folder (No space left on device)" in text for text in said)
    for i, responder in enumerate(own):
        assert responder._site is not None
        memory = responder._site.memory
        kept = memory.store.read()[-1].memory["memory"]  # type: ignore[union-attr]
        np.testing.assert_array_equal(kept[0], memory.following["memory"][0], str(i))  # type: ignore[index]
