"""Make text that came from elsewhere safe to print: on a terminal, in a log, on a page."""

import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parents[1]
_PYTHON = sysconfig.get_path("stdlib")

MOST = 300  # characters that are shown of one text


def printable(text: Any, most: int = MOST) -> str:
    """Return `text` on one line, with control and format characters escaped, cut after `most` characters.

    Use it for every string that another process sent. Escape sequences, line breaks and characters that reorder text
    would otherwise let the sender write what it likes on the reader's terminal.

    >>> printable("run\\x1b[2J\\nAll sites agreed.")
    'run\\\\x1b[2J\\\\nAll sites agreed.'
    """
    text = str(text)
    cut = text[:most]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in cut)
    return shown if len(text) <= most else f"{shown}… ({len(text):,} characters)"


def failure() -> str:
    """Return the traceback of the exception that is being handled, each line printable and marked with a bar."""
    return "\n".join(f"| {printable(line, 2000)}" for line in traceback.format_exc().splitlines())


def without_address(value: Any) -> str:
    """Return a value's repr without addresses in memory, which differ from run to run.

    >>> without_address([without_address])
    '[<function without_address>]'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def is_own(frame: traceback.FrameSummary) -> bool:
    """Return whether the code of a traceback's frame is the user's: not the library's, a package's or Python's."""
    name = frame.filename
    return not (name.startswith(("<", _PYTHON)) or "site-packages" in name or _HERE in Path(name).parents)


def located(error: BaseException) -> str:
    """Return an error in one line, with the last place in the user's own code; a list in it keeps its lines."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame)] or list(frames[-1:])
    lines = str(error).strip().splitlines()
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError) and error.filename:
        place, lines = f" ({Path(error.filename).name}, line {error.lineno})", [error.msg]
    first, listed = lines[0] if lines else "", [line for line in lines[1:] if line.startswith("- ")]
    if listed:
        first, place = first.removesuffix(":"), f"{place}:"
    return "\n".join([f"{type(error).__name__}: {first}{place}", *listed])
