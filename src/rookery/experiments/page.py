"""The page that gathers the reproductions: every experiment's claims, figures and picture, from the files they wrote.

`make docs` writes docs/reproduction.md from what lies under docs/reproduction/.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rookery import report

_HEAD = """# Reproductions

Every figure and table is one named experiment, and one command:

    rookery reproduce fednest-fig4                  # at full size
    rookery reproduce fednest-fig4 --quick          # the same code scaled down, to try it

It writes into `runs/NAME` (or `--out DIR`): `results.csv`, every run, seed and evaluation; `NAME.png`, the picture,
means and bands over the seeds; `claims.json`, what the paper says about it, each statement with the figures measured
and whether it holds; `summary.md`, all of this on one page, with the set-up and every known difference from the
paper. Finished runs are stored one by one, so an interrupted reproduction goes on where it was, and only what is
missing or has changed is computed again.

A claim that does not hold is reported so, with the reason where it is known. This page is generated from those files
by `make docs`.
"""


def write(folder: Path, page: Path) -> None:
    """Write the page from the experiments under the folder."""
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/claims.json"))}
    lines = [_HEAD, "| experiment | the paper's claims that hold | our own that hold |", "|---|---|---|"]
    for name, content in found.items():
        held = ["–", "–"]
        for place, ours in enumerate((False, True)):
            own = [claim for claim in content if _is_ours(claim) == ours]
            if own:
                held[place] = f"{sum(claim['holds'] for claim in own)} of {len(own)}"
        lines.append(f"| [{name}](#{name}) | {held[0]} | {held[1]} |")
    for name, content in found.items():
        lines += ["", *_section(folder / name, name, content, page)]
    page.write_text("\n".join(lines) + "\n")


def _section(folder: Path, name: str, content: list[dict[str, Any]], page: Path) -> list[str]:
    place = folder.relative_to(page.parent).as_posix()
    summary = (folder / "summary.md").read_text()
    title = summary.splitlines()[0].removeprefix("# ").removeprefix(f"{name}: ")
    lines = [f"## {name}", "", f"{title[:1].upper()}{title[1:]}. [Set-up and all runs]({place}/summary.md).", ""]
    lines += [f"![{title}]({place}/{name}.png)", "", "| claim | where | measured | holds |", "|---|---|---|---|"]
    notes = []
    for claim in content:
        figures = "<br>".join(f"{key}: {_figure(value)}" for key, value in claim["figures"].items())
        where = "ours" if _is_ours(claim) else claim["where"]
        lines.append(f"| {claim['claim']} | {where} | {figures} | {'yes' if claim['holds'] else '**no**'} |")
        if claim.get("note"):
            notes.append(f"- *{claim['claim']}* {claim['note']}")
    if notes:
        lines += ["", *notes]
    _, _, differences = summary.partition("## Differences from the paper")
    if differences.strip():
        beside = differences.strip().replace("](../", f"]({folder.parent.relative_to(page.parent).as_posix()}/")
        lines += ["", "Differences from the paper:", "", beside]
    return lines


def _figure(value: Any) -> str:
    return ", ".join(report.number(v) for v in value) if isinstance(value, list) else report.number(value)


def _is_ours(claim: dict[str, Any]) -> bool:
    return bool(claim.get("ours")) or claim["where"] == "ours"


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
