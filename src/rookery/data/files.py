"""The files of data sets: find, verify, download and cache them."""

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
from typing import Any, BinaryIO

import numpy as np

Arrays = dict[str, np.ndarray]
_PATIENCE = 4.0  # seconds to wait for a server's first answer
_READING = "1"  # raise it when a parser changes, to invalidate the cache


class DataError(ValueError):
    """A data set's file is missing or is not the published one; the message says which, where and the fix."""


@dataclass(frozen=True)
class File:
    """A published file.

    Attributes:
        paths: where it may be below a data folder; downloads go to the first.
        digests: "sha256:…" or "md5:…", any of which is accepted; the first is that of the file at the urls.
        urls: where to download it, mirrors included; empty: it is not downloaded.
    """

    paths: tuple[str, ...]
    digests: tuple[str, ...]
    urls: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file name without folders."""
        return self.paths[0].rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Form:
    """One form in which a data set is published: its files, and how to parse them (file name -> path)."""

    files: tuple[File, ...]
    parse: Callable[[dict[str, Path]], Arrays]
    keep: bool = True  # cache the arrays, because parsing takes longer than reading them

    @property
    def can_be_fetched(self) -> bool:
        """Whether every file has a url."""
        return all(file.urls for file in self.files)


def cache_dir() -> Path:
    """Return the user's cache folder: XDG_CACHE_HOME, or the system's."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "rookery"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rookery"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "rookery" / "Cache"
    return Path.home() / ".cache" / "rookery"


def places(data_dir: str | Path | None) -> list[Path]:
    """Return the folders to search: `data_dir` or that of ROOKERY_DATA, then the cache."""
    folder = data_dir or os.environ.get("ROOKERY_DATA")
    return [*([Path(folder).expanduser()] if folder else []), cache_dir()]


def arrays(name: str, forms: Sequence[Form], data_dir: str | Path | None = None) -> Arrays:
    """Return the data set's arrays from the first form that is complete; download one if none is."""
    where = places(data_dir)
    found = ((form, _present(form, where)) for form in forms)
    complete = next(((form, paths) for form, paths in found if len(paths) == len(form.files)), None)
    form, paths = complete or _fetch(name, forms, where)
    digests = [verify(paths[file.name], file) for file in form.files]
    if not form.keep:
        return form.parse(paths)
    key = hashlib.sha256(" ".join([_READING, *sorted(digests)]).encode()).hexdigest()[:16]
    return _cached(cache_dir() / "parsed" / f"{name}-{key}.npz", lambda: form.parse(paths))


def _present(form: Form, where: Sequence[Path]) -> dict[str, Path]:
    found = {}
    for file in form.files:
        candidates = (place / path for place in where for path in file.paths)
        path = next((path for path in candidates if path.is_file()), None)
        if path is not None:
            found[file.name] = path
    return found


def verify(path: Path, file: File) -> str:
    """Return the file's digest; raise DataError unless it is a published one.

    A verified file is not read again until its size or modification time changes.
    """
    stat = path.stat()
    known = _read_json(cache_dir() / "verified.json")
    entry = [stat.st_size, stat.st_mtime_ns]
    before = known.get(str(path.resolve()), [])
    for digest in file.digests:
        if before == [*entry, digest]:
            return digest
    measured: dict[str, str] = {}
    for digest in file.digests:
        kind, value = digest.split(":")
        if kind not in measured:
            with path.open("rb") as stream:
                measured[kind] = hashlib.file_digest(stream, kind).hexdigest()
        if measured[kind] == value:
            verified = json.dumps(known | {str(path.resolve()): [*entry, digest]}).encode()
            _write(cache_dir() / "verified.json", lambda stream: stream.write(verified))
            return digest
    kind, value = file.digests[0].split(":")
    raise DataError(
        f"{path} is not the published file, and is not used: its {kind} is {measured[kind]}, expected {value} (it has "
        f"{stat.st_size} bytes; an interrupted copy is shorter). Delete it, or put the original in its place."
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _cached(path: Path, make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays stored at path; make and store them if they are missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        made = make()
    _write(path, lambda stream: np.savez(stream, **made))  # type: ignore[arg-type]
    return made


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file of the cache atomically. Errors are ignored: the cache is a convenience."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            write(stream)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


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
    """Return the urls that answer soon, and why the others do not. A name lookup that hangs is given up, too."""
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
    """Download and check one file; return what went wrong, or an empty string."""
    import pooch
    import requests
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    path = folder / file.paths[0]
    pooch.get_logger().setLevel("ERROR")
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        downloader = pooch.HTTPDownloader(progressbar=_Bar(progress, file.name), timeout=(_PATIENCE, 60))
        try:
            pooch.retrieve(url, file.digests[0], fname=path.name, path=path.parent, downloader=downloader)
        except ValueError:
            return f"{url} is not the published file"
        except (OSError, requests.RequestException) as error:
            return f"{_server(url)}: {type(error).__name__}"
    return ""


class _Bar:
    """A progress bar with the methods that pooch calls."""

    def __init__(self, progress: Any, name: str) -> None:
        self._progress, self._task, self.total = progress, progress.add_task(name, total=None), 0

    def update(self, amount: int) -> None:
        self._progress.update(self._task, total=self.total or None, advance=amount)

    def reset(self) -> None:
        self._progress.reset(self._task, total=self.total or None)

    def close(self) -> None:
        pass


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
    """Return the files' paths below a data folder: a/{b, c}."""
    folders: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.paths[0].rpartition("/")
        folders.setdefault(folder, []).append(name)
    each = [
        f"{folder}/{'{' + ', '.join(names) + '}' if len(names) > 1 else names[0]}".removeprefix("/")
        for folder, names in folders.items()
    ]
    return " and ".join(each)
