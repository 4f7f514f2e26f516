"""The files of data sets: where they are looked for, how they are checked and fetched, and what is kept of them."""

import hashlib
import json
import os
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
_PATIENCE = 4.0  # seconds to wait for the first answer of a server
_READING = "1"  # to be raised when a parser changes: what was kept before is then not used


class DataError(ValueError):
    """A data set's file is missing, or is not what was published; the message says which, where and the fix."""


@dataclass(frozen=True)
class File:
    """A published file.

    Attributes:
        paths: where it may lie below a data folder; the first is where it is put.
        digests: "sha256:…" or "md5:…", any of which it may have; the first is that of the file at the urls.
        urls: where it is to be had, mirrors included; none: it is not downloaded.
    """

    paths: tuple[str, ...]
    digests: tuple[str, ...]
    urls: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name without folders."""
        return self.paths[0].rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Form:
    """One way in which a data set is published: its files, and how arrays are made of them (file name -> path)."""

    files: tuple[File, ...]
    parse: Callable[[dict[str, Path]], Arrays]
    keep: bool = True  # keep the arrays, because making them takes longer than reading them

    @property
    def can_be_fetched(self) -> bool:
        """Whether every file has an address."""
        return all(file.urls for file in self.files)


def cache_dir() -> Path:
    """The user's cache: XDG_CACHE_HOME, or what the system has for it."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "rookery"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rookery"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "rookery" / "Cache"
    return Path.home() / ".cache" / "rookery"


def places(data_dir: str | Path | None) -> list[Path]:
    """The folders that data are looked for in: the one given, or that of ROOKERY_DATA; then the cache."""
    given = data_dir or os.environ.get("ROOKERY_DATA")
    return [*([Path(given).expanduser()] if given else []), cache_dir()]


def arrays(name: str, forms: Sequence[Form], data_dir: str | Path | None = None) -> Arrays:
    """The data set's arrays, from the first form that is there; fetched if none is."""
    where = places(data_dir)
    form, paths = _find(forms, where) or _fetch(name, forms, where)
    digests = [verify(paths[file.name], file) for file in form.files]
    if not form.keep:
        return form.parse(paths)
    key = hashlib.sha256(" ".join([_READING, *sorted(digests)]).encode()).hexdigest()[:16]
    return _kept(cache_dir() / "parsed" / f"{name}-{key}.npz", lambda: form.parse(paths))


def _find(forms: Sequence[Form], where: Sequence[Path]) -> tuple[Form, dict[str, Path]] | None:
    for form in forms:
        paths = _present(form, where)
        if len(paths) == len(form.files):
            return form, paths
    return None


def _present(form: Form, where: Sequence[Path]) -> dict[str, Path]:
    found = {}
    for file in form.files:
        candidates = (place / path for place in where for path in file.paths)
        path = next((path for path in candidates if path.is_file()), None)
        if path is not None:
            found[file.name] = path
    return found


# Checking.


def verify(path: Path, file: File) -> str:
    """The file's digest, if it is one of those published; DataError if not.

    A file that was found to be good is not read again until its size or its time of change differs.
    """
    stat = path.stat()
    known = _read_json(cache_dir() / "verified.json")
    entry = [stat.st_size, stat.st_mtime_ns]
    before = known.get(str(path.resolve()), [])
    for digest in file.digests:
        if before == [*entry, digest]:
            return digest
    measured = {kind: _digest(path, kind) for kind in {digest.split(":")[0] for digest in file.digests}}
    for digest in file.digests:
        kind, value = digest.split(":")
        if measured[kind] == value:
            _write(cache_dir() / "verified.json", json.dumps(known | {str(path.resolve()): [*entry, digest]}))
            return digest
    kind, value = file.digests[0].split(":")
    raise DataError(
        f"{path} is not the published file, and is not used: its {kind} is {measured[kind]}, expected {value} (it has "
        f"{stat.st_size} bytes; an interrupted copy is shorter). Delete it, or put the original in its place."
    )


def _digest(path: Path, kind: str) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, kind).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


# Keeping.


def _kept(path: Path, make: Callable[[], Arrays]) -> Arrays:
    """The arrays stored at path; made and stored if they are not there or damaged."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        made = make()
    beside = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as stream:
            np.savez(stream, **made)  # type: ignore[arg-type]
        beside.replace(path)
    except OSError:  # no room, or a cache that may not be written to: the arrays are there all the same
        with suppress(OSError):
            beside.unlink()
    return made


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text)
        beside.replace(path)
    except OSError:  # the cache is a convenience
        with suppress(OSError):
            beside.unlink()


# Fetching.


def _fetch(name: str, forms: Sequence[Form], where: Sequence[Path]) -> tuple[Form, dict[str, Path]]:
    form = next((form for form in forms if form.can_be_fetched), None)
    if form is None:
        raise DataError(_missing(name, forms, where, "it is not downloaded by this program"))
    paths = _present(form, where)
    lacking = [file for file in form.files if file.name not in paths]
    answering, reason = _answering(lacking[0].urls)
    if not answering:
        raise DataError(_missing(name, forms, where, f"it could not be downloaded ({reason})"))
    folder = next((place for place in where if _writable(place)), None)
    if folder is None:
        raise DataError(_missing(name, forms, where, "none of these folders may be written to"))
    servers = [_server(url) for url in answering]
    for file in lacking:
        trouble = ""
        for url in sorted(file.urls, key=lambda url: _server(url) not in servers):
            trouble = _download(url, file, folder)
            if not trouble:
                paths[file.name] = folder / file.paths[0]
                break
        else:
            raise DataError(_missing(name, forms, where, f"{file.name} could not be downloaded ({trouble})"))
    return form, paths


def _answering(urls: Sequence[str]) -> tuple[list[str], str]:
    """Those of the addresses that answer soon, and why the others do not. Also a lookup that hangs ends in time."""
    import requests

    replies: dict[str, str] = {}

    def ask(url: str) -> None:
        try:
            with requests.get(url, stream=True, timeout=_PATIENCE) as reply:
                replies[url] = "" if reply.ok else f"{_server(url)} answers {reply.status_code}"
        except requests.RequestException:
            replies[url] = f"{_server(url)} cannot be reached"

    threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return (
        [url for url in urls if replies.get(url) == ""],
        "; ".join(replies.get(url, f"{_server(url)} does not answer in {_PATIENCE:g} s") for url in urls),
    )


def _server(url: str) -> str:
    return url.split("/")[2]


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _download(url: str, file: File, folder: Path) -> str:
    """Fetch and check one file; the trouble, if there is any."""
    import pooch
    import requests

    path = folder / file.paths[0]
    pooch.get_logger().setLevel("ERROR")
    with _Bar(file.name) as bar:
        downloader = pooch.HTTPDownloader(progressbar=bar, timeout=(_PATIENCE, 60))
        try:
            pooch.retrieve(url, file.digests[0], fname=path.name, path=path.parent, downloader=downloader)
        except ValueError:
            return f"{url} is not the published file"
        except (OSError, requests.RequestException) as error:
            return f"{_server(url)}: {type(error).__name__}"
    return ""


class _Bar:
    """A progress bar as pooch wants one: `total`, `update`, `reset`, `close`."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(name, total=None)
        self.total = 0

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, amount: int) -> None:
        """More bytes."""
        self._progress.update(self._task, total=self.total or None, advance=amount)

    def reset(self) -> None:
        """From the start."""
        self._progress.reset(self._task, total=self.total or None)

    def close(self) -> None:
        """The last byte is here."""


def _missing(name: str, forms: Sequence[Form], where: Sequence[Path], why: str) -> str:
    needed = []
    for form in forms:
        there = _present(form, where)
        lacking = ", ".join(file.name for file in form.files if file.name not in there)
        needed.append(_listed(form.files) + (f" (of which only {lacking} is missing)" if there else ""))
    sources = dict.fromkeys(url.rsplit("/", 1)[0] for form in forms for file in form.files for url in file.urls)
    published = f" They are published at {' and '.join(sources)}." if sources else ""
    return (
        f"The data set {name} is not here, and {why}.\n"
        f"It needs {'; or '.join(needed)}.\n"
        f"Looked for in {' and '.join(map(str, where))}.\n"
        "Put the files into one of these folders, or name your own: ROOKERY_DATA=FOLDER, or data_dir "
        f"(`rookery run --set data_dir=FOLDER`).{published}"
    )


def _listed(files: Sequence[File]) -> str:
    """The files' places below a data folder: a/{b, c}."""
    folders: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.paths[0].rpartition("/")
        folders.setdefault(folder, []).append(name)
    each = [
        f"{folder}/{'{' + ', '.join(names) + '}' if len(names) > 1 else names[0]}".removeprefix("/")
        for folder, names in folders.items()
    ]
    return " and ".join(each)
