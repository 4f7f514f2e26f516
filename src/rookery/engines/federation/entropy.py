"""A site's own randomness, from a secret that never leaves it."""

import hmac
import os
from pathlib import Path

import numpy as np

FILE = "secret"  # the file's name in a site's folder
_BYTES = 32


class Entropy:
    """Keys for a site's noise.

    A key follows from the secret and from a text that says what the noise hides. The same request therefore has the
    same noise, also after a restart, and its reply reveals nothing new. Nobody without the secret can tell the keys of
    different texts from random numbers.

    Arguments:
        folder: where the secret is kept, in a file that only its owner can read; it is made if there is none. None: the
            secret is only in memory. ValueError if the file can't be used.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._secret = os.urandom(_BYTES) if folder is None else _kept(Path(folder) / FILE)

    def key(self, hides: str) -> np.ndarray:
        """Return the key of the noise that hides this: two words."""
        return np.frombuffer(self._derived(f"noise {hides}")[:8], np.uint32)

    def mark(self, hides: str) -> str:
        """Return a text that identifies this noise and does not lead to it."""
        return self._derived(f"mark {hides}").hex()[:32]

    def _derived(self, text: str) -> bytes:
        return hmac.digest(self._secret, text.encode(), "sha256")


def _kept(path: Path) -> bytes:
    try:
        if not path.exists():
            _make(path)
        if path.stat().st_mode & 0o077:
            raise ValueError(f"{path} must be readable by its owner only. Run chmod 600 on it.")
        secret = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}, the secret of this site's noise, can't be read or written ({error.strerror}). Check the folder's "
            "permissions and space."
        ) from error
    if len(secret) != _BYTES:
        raise ValueError(
            f"{path} must have {_BYTES} bytes; got {len(secret)}. Restore it, or delete it: requests that were "
            "answered before are then charged again."
        )
    return secret


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_suffix(".new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(os.urandom(_BYTES))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
