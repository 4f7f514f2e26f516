"""Docstrings as plain text with `names` in it; the hyperparameters of a method from the comments beside its fields."""

import inspect
import re
from typing import Any

_FIELD = re.compile(r"^    (\w+): .*  # (.*)$", re.MULTILINE)
_SECTION = re.compile(r"(Arguments|Attributes|Examples?|Returns|Raises):$")
_MARKS = re.compile(r"(`[^`]*`)|([*|\\])|(?<=\w)_(?!\w)")


def _plain(line: str) -> str:
    """A line of a docstring whose asterisks, bars and underscores mean themselves."""
    return _MARKS.sub(lambda found: found[1] or "\\" + found[0], line)


def _fields(cls: type) -> list[str]:
    """The hyperparameters of a method, each with the comment beside it."""
    said: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        said.update(_FIELD.findall(inspect.getsource(base)))
    said = {name: text for name, text in said.items() if name in getattr(cls, "__dataclass_fields__", {})}
    lines = [f"- `{name}`: {_plain(text)}" for name, text in said.items()]
    return ["", "Hyperparameters:", "", *lines, ""] if lines else []


def _lines(text: list[str]) -> list[str]:
    """Indented lines outside of a section, such as a method's steps, keep their ends where a step ends."""
    done: list[str] = []
    section = inside = False
    for line in text:
        indented = line.startswith("    ")
        if line.strip() and not indented:
            section = bool(_SECTION.match(line))
        here = indented and not section
        if here != inside and line.strip():
            done.append("")
        starts = not inside or done[-1].endswith((",", ";", ".", ":"))
        done.append(("| " if starts else "  ") + line.strip() if here else line)
        inside = here or (inside and not line.strip())
    return done


def _docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """A docstring as plain text, but for its examples; of a method, with its hyperparameters."""
    example = False
    for i, line in enumerate(lines):
        example = line.lstrip().startswith((">>>", "...")) or (example and bool(line.strip()))
        lines[i] = line if example else _plain(line)
    lines[:] = _lines(lines)
    if what == "class" and hasattr(thing, "solves"):
        at = next((i for i, line in enumerate(lines) if line.startswith(("Example:", "Reference:"))), len(lines))
        lines[at:at] = _fields(thing)


def _skip(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """The fields of named tuples say nothing of themselves."""
    return True if (inspect.getdoc(thing) or "").startswith("Alias for field number") else None


def setup(app: Any) -> dict[str, bool]:
    """Docstrings are changed before napoleon reads them."""
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-docstring", _docstring, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
