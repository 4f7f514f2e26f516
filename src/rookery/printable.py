"""Make text that came from elsewhere safe to print: on a terminal, in a log, on a page."""

from typing import Any

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
