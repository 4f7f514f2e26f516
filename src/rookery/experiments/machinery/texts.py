"""Read the words of the experiments: `texts.md` in the folder of a paper.

It begins with the paper's name and what to know about it. Each experiment has a section `## NAME: TITLE`: the
reference, then `### Set-up`, `### Differences` from the paper (a list) and `### Not reproduced`, the verdict and the
reason for each claim that does not hold. `{word}` stands for the section `## word`, a passage that several of them
share, or for a value that the code gives, as in `str.format`.
"""

import re
import string
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rookery.experiments.machinery.claims import FAILURES, Verdict

FOLDER = Path(__file__).parents[1]
PLACE = re.compile(r"\{([A-Za-z][\w.\[\]]*)(?::([^{}]*))?\}")


class Texts(NamedTuple):
    """A paper's short name, what to know before reading its table, and the sections by their headings."""

    name: str
    about: str
    sections: dict[str, str]


@cache
def paper_texts(folder: str) -> Texts:
    """The texts in the folder of a paper, whose name begins the names of its experiments."""
    head, sections = _split((FOLDER / folder / "texts.md").read_text(encoding="utf-8"), "##")
    name, about = head.split("\n", 1)
    return Texts(name.removeprefix("# "), _joined(about), sections)


def description(name: str, names: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """The words of an experiment, as arguments of `Experiment`.

    Arguments:
        name: the experiment.
        names: values that the texts may use: the `globals()` of the experiment's module.
        values: more values, which all must have a place in the texts.
    """
    sections, placed = paper_texts(name.partition("-")[0]).sections, set()

    def in_place(match: re.Match[str]) -> str:
        word, form = match.groups("")
        if word in sections:
            return PLACE.sub(in_place, sections[word].strip())
        value, key = string.Formatter().get_field(word, (), {**names, **values})
        placed.add(key)
        return format(value, form)

    [heading] = [each for each in sections if each.startswith(f"{name}: ")]
    reference, parts = _split(PLACE.sub(in_place, sections[heading]), "###")
    assert placed.issuperset(values), f"{name} has no place for {sorted(values.keys() - placed)}"
    return {
        "name": name,
        "title": heading.removeprefix(f"{name}: "),
        "paper": _joined(reference),
        "setup": _joined(parts["Set-up"]),
        "differences": _items(parts.get("Differences", "")),
        "reasons": dict(map(_reason, _items(parts.get("Not reproduced", "")))),
    }


def _split(text: str, mark: str) -> tuple[str, dict[str, str]]:
    """What stands before the first heading of this level, and what stands under each."""
    head, *parts = re.split(rf"^{mark} (.+)$", text, flags=re.MULTILINE)
    return head, dict(zip(parts[::2], parts[1::2], strict=True))


def _joined(text: str) -> str:
    """The paragraphs, each on one line."""
    return "\n\n".join(re.sub(r"\s*\n\s*", " ", part) for part in text.strip().split("\n\n"))


def _items(text: str) -> tuple[str, ...]:
    """The items of a list."""
    return tuple(map(_joined, re.split(r"^- ", text, flags=re.MULTILINE)[1:]))


def _reason(item: str) -> tuple[str, Verdict]:
    """A claim, and the verdict if it does not hold: `(set-up) *The claim.* The reason.`"""
    [(failure, claim, why)] = re.findall(r"^\((.+?)\) \*(.+?[.…])\* (.+)$", item)
    return claim, FAILURES[failure]._replace(why=why)
