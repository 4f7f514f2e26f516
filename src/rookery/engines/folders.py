"""The files of checkpoints: folders of saved rounds, each a JSON header and arrays, written by orbax."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base.placement import duplicate
from rookery.base.processes import ONE_PROCESS, Processes

_FORMATS = (4, 5)  # the oldest and the newest format that this version of Rookery reads; 5 is for rows stored apart
_IDS = "clients"  # the name of the array that says whose rows are stored
_NAME = re.compile(r"round_(\d+)")
APART = 2**22  # bytes from which the clients' memory is stored apart, so that only the rows that changed are written
_CHAIN = 64  # the most rounds that are read to restore one: one with all rows, and later ones with changed rows


class ByClient(NamedTuple):
    """Which arrays of a carry have a row for each client, and which rows have to be written.

    Attributes:
        leaves: the numbers of these arrays among the carry's leaves.
        changed: the clients whose rows differ from those of the last save; None: perhaps all.
    """

    leaves: range
    changed: np.ndarray | None


class Folder:
    """A folder of saved rounds, each in its own folder, which is either complete or absent.

    A round with changed rows alone is read together with earlier rounds, which are kept as long as that round.

    If several processes run together, all see the folder: each writes its part of the arrays, and the lead process
    writes the rest.
    """

    def __init__(self, path: str | Path, processes: Processes = ONE_PROCESS) -> None:
        self.path, self._processes = Path(path).absolute(), processes
        self._orbax: Any = None
        self._begun: int | None = None  # the round being written
        self._apart: dict[int, dict[str, Any]] = {}  # by round, the header's entry on rows stored apart

    def __str__(self) -> str:
        return str(self.path)

    def place(self, done: int) -> Path:
        """Return the folder of the run after `done` rounds."""
        return self.path / f"round_{done}"

    def rounds(self) -> list[int]:
        """Return the saved rounds in increasing order."""
        return self._processes.on_lead(self._listed)

    def _listed(self) -> list[int]:
        if self.path.is_file():
            raise ValueError(
                f"checkpoint must be a folder; {str(self)!r} is a file, maybe of an earlier version, which cannot be "
                "read. Delete it to start afresh, or name a folder."
            )
        names = [_NAME.fullmatch(place.name) for place in self.path.iterdir()] if self.path.exists() else []
        return sorted(int(name[1]) for name in names if name)

    def header(self, done: int) -> dict[str, Any]:
        """Read the header of a round."""
        try:
            header = self._checkpointer().restore(
                self.place(done), args=_args().Composite(header=_args().JsonRestore())
            )
            header = dict(header.header)
            written = int(header["format"])
        except Exception as error:
            raise self._damaged(done) from error
        oldest, newest = _FORMATS
        if not oldest <= written <= newest:
            which = f"the format {newest}" if oldest == newest else f"one of the formats {oldest} to {newest}"
            fix = "Update Rookery, or choose" if written > newest else "Choose"
            raise ValueError(
                f"{self.place(done)} must have {which} of this version; got {written}. {fix} another checkpoint folder."
            )
        return header

    def read(self, done: int, like: dict[str, Any]) -> dict[str, Any]:
        """Read the arrays of a round, with the structures, shapes and types of `like`.

        Where `like` has a `jax.Array`, the result has one with the same sharding, if that is committed; where it has a
        NumPy array or a `jax.ShapeDtypeStruct`, the result has a NumPy array.
        """
        if self.header(done)["arrays"] != {name: _described(value) for name, value in like.items()}:
            raise ValueError(
                f"{self.place(done)} belongs to another run: its arrays have other shapes or types. "
                "Choose another checkpoint folder, or delete this one."
            )
        item = {name: _stored(value, _abstract) for name, value in like.items()}
        apart = {name: item["carry"].pop(name) for name in self._part(done).get("leaves", [])}
        try:
            found = self._restored(done, "arrays", item)
        except Exception as error:
            raise self._damaged(done) from error
        if apart:
            rows = self._rows(done, apart)
            found["carry"] |= {name: _placed(rows[name], leaf) for name, leaf in apart.items()}
        return {name: _filled(value, found[name]) for name, value in like.items()}

    def _restored(self, done: int, name: str, item: Any) -> Any:
        """Read a part of a round: its "arrays", or its "rows"."""
        args = _args().PyTreeRestore(item, restore_args=jax.tree.map(_restored_as, item))
        return getattr(self._checkpointer().restore(self.place(done), args=_args().Composite(**{name: args})), name)

    def _part(self, done: int) -> dict[str, Any]:
        """The header's entry on rows stored apart; empty if there are none."""
        if done not in self._apart:
            self._apart[done] = self.header(done).get("apart", {})
        return self._apart[done]

    def _chain(self, done: int) -> list[int]:
        """The rounds with the rows of a round: the round itself, and those before it back to one with all rows."""
        chain = [done]
        while (before := self._part(chain[-1]).get("since")) is not None:
            if before not in self._apart and not self.place(before).exists():
                raise self._damaged(done, before)
            chain.append(before)
        return chain

    def _rows(self, done: int, like: dict[str, Any]) -> dict[str, np.ndarray]:
        """Read the rows that are stored apart."""
        whole: dict[str, np.ndarray] = {}
        for at in reversed(self._chain(done)):
            part = self._part(at)
            item = {name: jax.ShapeDtypeStruct((part["rows"], *a.shape[1:]), a.dtype) for name, a in like.items()}
            if part["since"] is not None:
                item[_IDS] = jax.ShapeDtypeStruct((part["rows"],), np.int32)
            try:
                found = self._restored(at, "rows", item)
            except Exception as error:
                raise self._damaged(done, at) from error
            if part["since"] is None:
                whole = {name: np.array(a) for name, a in found.items()}
            for name, rows in whole.items() if part["since"] is not None else ():
                rows[found[_IDS]] = found[name]
        return whole

    def write(
        self, done: int, header: dict[str, Any], arrays: dict[str, Any], keep: int | None,
        by_client: ByClient | None = None,
    ) -> None:  # fmt: skip
        """Begin to write a round, and delete all others but `keep` and those that are read with it.

        The arrays may be donated afterwards. Of large arrays with a row for each client, only the changed rows are
        written if `keep` has the others.
        """
        self.wait()
        rounds = self.rounds()
        before = self._chain(keep) if keep in rounds else []
        self.delete([other for other in rounds if other not in before])
        described = {name: _described(value) for name, value in arrays.items()}
        header = {"format": _FORMATS[0], "round": done, **header, "arrays": described}
        items = {name: _stored(value, lambda leaf: leaf) for name, value in arrays.items()}
        apart, rows = self._divided(items, before, by_client)
        leaves = {name: {i: _snapshot(leaf) for i, leaf in part.items()} for name, part in items.items()}
        what = {"arrays": _args().PyTreeSave(leaves)}
        if apart:
            header |= {"format": _FORMATS[1], "apart": apart}
            what["rows"] = _args().PyTreeSave(rows)
        self._apart[done] = apart
        what = _args().Composite(**what, header=_args().JsonSave(header))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._checkpointer().save(self.place(done), args=what)
        except Exception as error:
            raise self._unwritten(error) from error
        self._begun = done

    def _divided(
        self, items: dict[str, dict[str, Any]], before: list[int], by_client: ByClient | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Take from the carry the rows that are stored apart. Returns the header's entry on them, and copies to write.

        `before`: the rounds on which this one can build; see `_chain`.
        """
        names = [] if by_client is None else [str(i) for i in by_client.leaves if str(i) in items["carry"]]
        if by_client is None or sum(_numbers(items["carry"][name]).nbytes for name in names) < APART:
            return {}, {}
        rows = {name: items["carry"].pop(name) for name in names}
        count, changed = len(rows[names[0]]), by_client.changed
        since_all = sum(self._part(other).get("rows", count) for other in before[:-1])  # rows written since all were
        builds = before and self._part(before[0]) and len(before) < _CHAIN
        if not builds or changed is None or not 0 < len(changed) < count - since_all:
            return {"leaves": names, "since": None, "rows": count}, {name: _snapshot(a) for name, a in rows.items()}
        taken = {name: _taken(_numbers(a), changed) for name, a in rows.items()}
        return {"leaves": names, "since": before[0], "rows": len(changed)}, {**taken, _IDS: changed.astype(np.int32)}

    def busy(self) -> bool:
        """Return whether a round is still being written."""
        try:
            if self._orbax is not None:
                self._orbax.check_for_errors()
        except Exception as error:
            raise self._unwritten(error) from error
        begun = self._begun
        return begun is not None and self._processes.on_lead(lambda: not self.place(begun).exists())

    def wait(self) -> None:
        """Wait until the round that was begun is written."""
        self._begun = None
        try:
            if self._orbax is not None:
                self._orbax.wait_until_finished()
        except Exception as error:
            raise self._unwritten(error) from error

    def delete(self, rounds: list[int]) -> None:
        """Delete rounds; each is renamed first, so that none is left incomplete under its name."""
        for done in rounds if self._processes.lead else []:
            shutil.rmtree(self.place(done).replace(self.path / f"round_{done}.deleted"))

    def clean(self) -> None:
        """Delete what a killed process left half-written or half-deleted."""
        for place in self.path.iterdir() if self._processes.lead and self.path.exists() else []:
            if re.fullmatch(r"round_\d+\..*", place.name):
                shutil.rmtree(place)

    def close(self) -> None:
        """Wait until all is written, and release the threads."""
        self.wait()
        if self._orbax is not None:
            self._orbax.close()
        self._orbax = None

    def _checkpointer(self) -> Any:
        if self._orbax is None:
            import orbax.checkpoint as ocp  # slow to import

            options = ocp.options.AsyncOptions(create_directories_asynchronously=False)  # raises errors here
            handler = ocp.CompositeCheckpointHandler("arrays", "rows", "header")
            self._orbax = ocp.AsyncCheckpointer(handler, async_options=options)
        return self._orbax

    def _damaged(self, done: int, part: int | None = None) -> ValueError:
        """The error for a round that cannot be read; `part`: the damaged round on which it builds."""
        before = [other for other in self._listed() if other < (done if part is None else part)]
        which = "it" if part in (None, done) else f"round_{part} and all later rounds"
        advice = f"delete {which} to go on from round {before[-1]}" if before else f"delete {self} to start afresh"
        what = "is not a checkpoint of this program, or is damaged"
        if part not in (None, done):
            what = f"builds on round_{part}, which is missing or damaged"
        return ValueError(f"{self.place(done)} {what}; {advice}.")

    def _unwritten(self, error: Exception) -> OSError:
        return OSError(f"The checkpoint {self} can't be written ({type(error).__name__}: {error}).")


@dataclasses.dataclass(frozen=True)
class Padded:
    """An array whose rows after the first `rows` are padding: a leaf that is saved without them.

    It can be restored with another amount of padding, e.g. on another number of devices.
    """

    array: Any
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        return (self.rows, *self.array.shape[1:])

    @property
    def size(self) -> int:
        """The size without padding."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> Any:
        """The array's type."""
        return self.array.dtype


def _args() -> Any:
    import orbax.checkpoint as ocp

    return ocp.args


def _described(value: Any) -> list[Any]:
    """Return shapes and types as JSON values."""
    return [[list(np.shape(leaf)), str(leaf.dtype)] for leaf in jax.tree.leaves(value)]


def _stored(value: Any, convert: Any) -> dict[str, Any]:
    """Return the converted leaves by their numbers, without empty arrays, which orbax does not take."""
    return {str(i): convert(leaf) for i, leaf in enumerate(jax.tree.leaves(value)) if np.size(leaf)}


def is_key(leaf: Any) -> bool:
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _numbers(leaf: Any) -> Any:
    """Return the array that is stored: for random keys, their data."""
    leaf = leaf.array if isinstance(leaf, Padded) else leaf
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _snapshot(leaf: Any) -> Any:
    """Return an array that orbax may read while the run continues and donates its buffers.

    From an accelerator orbax copies before it returns; on a CPU it reads the array itself.
    """
    leaf = _numbers(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    on_host = isinstance(leaf, jax.Array) and next(iter(leaf.devices())).platform == "cpu"
    return duplicate(leaf) if on_host else leaf


def _taken(array: Any, ids: np.ndarray) -> np.ndarray:
    """Copy rows of an array to the host. A program is compiled for each power of two, not for each number of rows."""
    if isinstance(array, np.ndarray):
        return array[ids]
    padded = np.pad(ids, (0, 2 ** (len(ids) - 1).bit_length() - len(ids)), mode="edge")
    return np.asarray(_gather(array, padded))[: len(ids)]


_gather = jax.jit(lambda array, ids: array[ids])


def _placed(rows: np.ndarray, leaf: jax.ShapeDtypeStruct) -> Any:
    """Return rows as `_abstract` describes them: with its padding and sharding, if it has any."""
    if leaf.sharding is None:
        return rows
    padding = np.zeros((leaf.shape[0] - len(rows), *rows.shape[1:]), rows.dtype)
    padded = np.concatenate([rows, padding]) if len(padding) else rows
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: padded[index])


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and type to restore, with the sharding if it is committed."""
    leaf = _numbers(leaf)
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _restored_as(leaf: jax.ShapeDtypeStruct) -> Any:
    import orbax.checkpoint as ocp

    if leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False)


def _filled(like: Any, found: dict[str, Any]) -> Any:
    leaves, structure = jax.tree.flatten(like)

    def fill(i: int, leaf: Any) -> Any:
        if not np.size(leaf):
            return leaf
        value = found[str(i)]
        if not isinstance(leaf, Padded) and leaf.ndim and len(value) > len(leaf):  # it was padded
            value = value[: len(leaf)]
        if isinstance(leaf, jax.ShapeDtypeStruct | np.ndarray):
            return value
        value = value if isinstance(value, jax.Array) else jnp.array(value)
        leaf = leaf.array if isinstance(leaf, Padded) else leaf
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf)) if is_key(leaf) else value

    return jax.tree.unflatten(structure, [fill(i, leaf) for i, leaf in enumerate(leaves)])
