"""Text for people: short, and safe to print on a terminal, in a log or on a page."""

import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parents[1]
_PYTHON = sysconfig.get_path("stdlib")

MOST = 300  # characters shown of one text


def printable(text: Any, most: int = MOST) -> str:
    """Return `text` on one line, with control and format characters escaped, cut after `most` characters.

    Use it for every string that another process sent: escape sequences, line breaks and characters that reorder text
    would let the sender write anything on the reader's terminal.

    >>> printable("run\\x1b[2J\\nAll sites agreed.")
    'run\\\\x1b[2J\\\\nAll sites agreed.'
    """
    text = str(text)
    cut = text[:most]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in cut)
    return shown if len(text) <= most else f"{shown}… ({len(text):,} characters)"


def failure() -> str:
    """Return the traceback of the current exception, each line printable and marked with a bar."""
    return "\n".join(f"| {printable(line, 2000)}" for line in traceback.format_exc().splitlines())


def without_address(value: Any) -> str:
    """Return a value's repr without memory addresses, which differ from run to run.

    >>> without_address([without_address])
    '[<function without_address>]'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def is_own(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame of a traceback is in the user's code, not in this library, a package or Python."""
    name = frame.filename
    return not (name.startswith(("<", _PYTHON)) or "site-packages" in name or _HERE in Path(name).parents)


def located(error: BaseException) -> str:
    """Return an error in one line, with the last place in the user's code; a list in the message keeps its lines."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if is_own(frame)] or list(frames[-1:])
    lines = str(error).strip().splitlines()
    place = f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})" if user_frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        place, lines = f" ({Path(error.filename).name}, line {error.lineno})", [error.msg]
    first, listed = lines[0] if lines else "", [line for line in lines[1:] if line.startswith("- ")]
    if listed:
        first, place = first.removesuffix(":"), f"{place}:"
    return "\n".join([f"{type(error).__name__}: {first}{place}", *listed])


def first_few(names: Sequence[str]) -> str:
    """Return names as a text, and of many names only the first four.

    >>> first_few(["a", "b"]), first_few(list("abcdef"))
    ('a, b', 'a, b, c, d and 2 more')
    """
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
