"""What a site remembers from round to round, and its checkpoints.

What a site remembers stays with it. A request for a checkpoint has it open a folder, save, wait or restore there, and
reply with the rounds that it has saved. A site on a network has a store instead, and writes to it whenever it has
something new to remember.
"""

from collections.abc import Callable
from typing import Any

from rookery.engines.federation.store import Memory, Moment, Store, Version
from rookery.engines.folders import Folder


def _after(rounds: int) -> Moment:
    """Return the last moment of a run with this many rounds."""
    return (1, rounds - 1) if rounds else (0, 0)


def _rounds(moment: Moment) -> int:
    """Return how many rounds are done after a moment."""
    return moment[0] * (moment[1] + 1)


class SiteMemory:
    """The memory of one site in one run.

    Attributes:
        moment: the present moment.
        present: the memory before this moment.
        following: the memory after it; None until the moment ends.
        folder: the folder of checkpoints.
        stores: instead of a folder: the stores of runs, by name.
        store: the store of this run.
    """

    def __init__(self) -> None:
        self.moment: Moment = (-1, 0)
        self.present: Memory = {"memory": [], "client": []}
        self.following: Memory | None = None
        self._since: Moment = (-1, 0)  # when the present memory was written
        self.folder: Folder | None = None
        self._run = ""  # its name in checkpoints
        self.stores: Callable[[str], Store] | None = None
        self.store: Store | None = None

    def after(self, rounds: int) -> Memory:
        """Return the memory after this many rounds, without the writes of an incomplete round."""
        if self.moment > _after(rounds):
            return self.present
        return self.following or self.present

    def begin(self, moment: Moment) -> None:
        """Go on to a later moment."""
        if self.following is not None:
            self.present, self._since, self.following = self.following, self.moment, None
        self.moment = moment

    def end(self, following: Memory) -> None:
        """Write what is to be remembered after the present moment."""
        self._write(following)
        self.following = following

    def go_back(self, done: int, wrote: int = -1) -> None:
        """Continue with the memory as it was after `done` rounds, from the store if there is one.

        `wrote`: the number of rounds after which it was last written, as far as the coordinator knows. Raises
        ValueError if the memory is older.
        """
        versions = [v for v in self._versions() if v.moment <= _after(done)]
        if not versions or (wrote >= 0 and versions[-1].moment < _after(wrote)):
            last = f"after round {wrote}" if wrote >= 0 else "of this run"
            raise ValueError(f"it has lost its memory {last}. Restore its folder.")
        self._since, self.present = versions[-1]
        self.following, self.moment = None, _after(done)

    def save(self, request: dict[str, Any]) -> list[int]:
        """Open, save, wait or restore, as the request says, and return the rounds that it can go back to.

        A site with a store returns only the first of them, or the round that it went back to.
        """
        return self._save_in_folder(request) if self.stores is None else self._save_in_store(request)

    def close(self) -> None:
        """Finish writing."""
        if self.folder is not None:
            self.folder.close()

    def _save_in_store(self, request: dict[str, Any]) -> list[int]:
        assert self.stores is not None
        match request["what"]:
            case "open":
                before, following = self.store, self.stores(request["name"])
                if before is not None and before.path != following.path:
                    before.delete()
                self.store = following
            case "restore" if request["round"] < 0:
                self._write(self.following)
            case "restore":
                self.go_back(request["round"])
                return [_rounds(self._since)]
        assert self.store is not None
        moments = [v.moment for v in self.store.read()]
        return [_rounds(moments[0])] if moments else []

    def _save_in_folder(self, request: dict[str, Any]) -> list[int]:
        folder = self.folder
        if folder is None:
            raise ValueError("it has no folder for checkpoints.")
        match request["what"]:
            case "open":
                self._run = request["name"]
                folder.clean()
                if any(folder.header(done).get("run") != self._run for done in folder.rounds()):
                    raise ValueError(f"{folder} holds the memory of another run's client. Delete it, or name another.")
            case "save":
                done = request["round"]
                folder.write(done, {"run": self._run}, {"memory": self.after(done)}, request["keep"])
            case "wait":
                folder.wait()
            case "restore":
                done = request["round"]  # -1: go on with the present memory
                if done >= 0:
                    self.present = folder.read(done, {"memory": self.following or self.present})["memory"]
                    self.following, self.moment = None, _after(done)
                folder.delete([other for other in folder.rounds() if other > done])
        return folder.rounds()

    def _versions(self) -> list[Version]:
        if self.store is not None:
            self.store.check()
            return self.store.read()
        ahead = [] if self.following is None else [Version(self.moment, self.following)]
        return [v for v in (Version(self._since, self.present), *ahead) if v.moment >= (0, 0)]

    def _write(self, following: Memory | None) -> None:
        """Write the present and the following memory to the store."""
        if self.store is not None and following is not None and any(following.values()):
            before = [Version(self._since, self.present)] if self._since >= (0, 0) else []
            self.store.write([*before, Version(self.moment, following)])
