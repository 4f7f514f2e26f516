"""Write the pages of the reproductions from the files under docs/reproduction, without running anything.

`make docs` checks the claims again on each results.csv and writes every claims.json and summary.md, the pictures that
show something else than the file there, a page for each paper, and docs/reproduction.md, which gathers them, from the
template page.md.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from rookery import report
from rookery.base.drawing import digest
from rookery.experiments import EXPERIMENTS
from rookery.experiments.machinery.claims import KINDS, REPRODUCED, VERDICTS, Kind
from rookery.experiments.machinery.experiment import Headline
from rookery.experiments.machinery.running import read_results, write_down
from rookery.experiments.machinery.summary import claims_table, figures_in_words, table, verdict_in_words
from rookery.experiments.machinery.texts import paper_texts

Claims = Sequence[Mapping[str, Any]]
Rows = Sequence[tuple[str, str, str]]
PAPERS = {folder: paper_texts(folder) for folder in dict.fromkeys(name.split("-")[0] for name in EXPERIMENTS)}
_SHOWN = """Each claim is shown with the one number that decides it, rounded. The other numbers and {} are under
“Set-up and all runs”."""
_HARD = "\N{NO-BREAK SPACE}"


def write(folder: Path, page: Path) -> None:
    """Check all claims again, and write all pages."""
    names = sorted(name for name in EXPERIMENTS if (folder / name / "results.csv").exists())
    found: dict[str, Claims] = {}
    headlines: dict[str, Rows] = {}
    for name in names:
        experiment, results = EXPERIMENTS[name], read_results(folder / name)
        found[name] = write_down(experiment, folder / name, results)
        for file, (_, draw) in experiment.pictures.items():
            redraw(draw(results), folder / name / file)
        headlines[name] = [] if experiment.headlines is None else [_cells(h) for h in experiment.headlines(results)]
    names.sort(key=lambda name: not _count(found[name], "experiment"))  # the papers' figures and tables first
    figures, others = [], []
    for paper in PAPERS:
        own = {name: found[name] for name in names if _paper(name) == paper}
        (folder / f"{paper}.md").write_text("\n".join(_of_paper(paper, own, headlines)) + "\n", encoding="utf-8")
        shown = [name for name in own if headlines[name] and {c["kind"] for c in own[name]} != {"theory"}]
        figures += [_line(name, own[name], headlines[name]) for name in shown]
        if rest := [_other(name, claims) for name, claims in own.items() if name not in shown]:
            others.append(f"- {PAPERS[paper].name}: {'; '.join(rest)}.")
    papers = [f"reproduction/{paper}" for paper in PAPERS]
    parts = {"verdicts": _verdicts(found), "figures": figures, "others": others, "papers": papers}
    whole = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    page.write_text(whole.format_map({name: "\n".join(lines) for name, lines in parts.items()}), encoding="utf-8")


def redraw(fig: Figure, path: Path) -> None:
    """Write a picture unless the file there shows the same already."""
    if not path.exists() or Image.open(path).info.get("Drawn") != digest(fig):
        report.save(fig, path)


def _paper(name: str) -> str:
    return name.split("-")[0]


def _is_ours(paper: str) -> bool:
    """Whether a page has experiments of our own only, which follow no paper."""
    return all(experiment.is_ours for name, experiment in EXPERIMENTS.items() if _paper(name) == paper)


def heading(name: str) -> str:
    """The heading of an experiment on its page: its name or, if it follows no paper, its title."""
    return _title(name) if _is_ours(_paper(name)) else name


def _title(name: str) -> str:
    title = EXPERIMENTS[name].title
    return f"{title[:1].upper()}{title[1:]}"


def _anchor(name: str) -> str:
    """The anchor of an experiment's heading, as MyST makes it.

    >>> _anchor("fednest-fig4"), _anchor("delay")
    ('fednest-fig4', 'accuracy-by-the-clock')
    """
    return re.sub(r"[^\w\- ]", "", heading(name).lower()).replace(" ", "-")


def _count(claims: Iterable[Mapping[str, Any]], kind: Kind) -> Counter[str]:
    return Counter(row["verdict"] for row in claims if row["kind"] == kind)


def _of(count: Counter[str]) -> str:
    """How many are reproduced."""
    return f"{count[REPRODUCED]} of {count.total()}" if count else "–"


def _verdicts(found: Mapping[str, Claims]) -> list[str]:
    """The table of verdicts, by paper."""
    groups = {
        f"[{own.name}](reproduction/{key}.md)": [row for n in found if _paper(n) == key for row in found[n]]
        for key, own in PAPERS.items()
    }
    groups["all"] = [row for claims in found.values() for row in claims]
    rows = [
        (name, *(_of(_count(claims, kind)) for kind in KINDS), _others(_count(claims, "experiment")) or "–")
        for name, claims in groups.items()
    ]
    rows[-1] = tuple(f"**{cell}**" for cell in rows[-1])
    return table(("claims reproduced", *KINDS.values(), "its experiments, not reproduced"), rows)


def _line(name: str, claims: Claims, headlines: Rows) -> str:
    """A figure or table: the first number that the paper gives, too, ours, and how many claims are reproduced."""
    headline = next((row for row in headlines if row[1] != "–"), headlines[0])
    kind: Kind = "experiment" if _count(claims, "experiment") else "own"
    verdict = f"{'our own: ' * (kind == 'own')}{_of(_count(claims, kind))}"
    paper, _, short = name.partition("-")
    words = f"{PAPERS[paper].name}, {short}" if short else PAPERS[paper].name
    return f"| [{words}](reproduction/{paper}.md#{_anchor(name)}) | {' | '.join(headline)} | {verdict} |"


def _other(name: str, claims: Claims) -> str:
    """An experiment that does not follow a figure of the paper."""
    kinds = [f"{words} {_of(_count(claims, kind))}" for kind, words in KINDS.items() if _count(claims, kind)]
    return f"[{name.partition('-')[2]}](reproduction/{_paper(name)}.md#{_anchor(name)}) ({', '.join(kinds)})"


def _others(count: Counter[str]) -> str:
    """The verdicts on those that are not reproduced.

    >>> _others(Counter({"reproduced": 3, "differs, ours": 2, "undecided": 1}))
    '2 differ (ours); 1 undecided'
    """
    parts = []
    for verdict in VERDICTS[1:]:
        if count[verdict]:
            words = verdict.replace("differs, ", "differs (") + ")" * verdict.startswith("differs")
            parts.append(f"{count[verdict]} {words if count[verdict] == 1 else words.replace('differs', 'differ')}")
    return "; ".join(parts)


def _cells(headline: Headline) -> tuple[str, str, str]:
    """The name of a number, the paper's value, and ours: the mean and the standard deviation over the seeds."""
    own = np.asarray(headline.ours, float)
    digits = 4 if abs(own.mean()) < 10 else 0
    spread = f" ± {own.std(ddof=1):.{digits}f}" if len(own) > 1 else ", one seed"
    ours = re.sub(r"\b0\.", ".", f"{own.mean():.{digits}f}{spread}")
    return headline.what, (headline.paper or "–").replace(" ", _HARD), ours.replace(" ", _HARD)


def _rounded(value: Any) -> str:
    """Three digits; claims.json has all of them."""
    if isinstance(value, str):
        return {"inf": "∞", "-inf": "−∞"}.get(value, value)
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}"


def _of_paper(paper: str, own: Mapping[str, Claims], headlines: Mapping[str, Rows]) -> list[str]:
    """The page of one paper."""
    everything = [row for claims in own.values() for row in claims]
    lines = [f"# {PAPERS[paper].name}", "", PAPERS[paper].about, ""]
    for kind, words in KINDS.items():
        if _count(everything, kind):
            count = _count(everything, kind)
            short = "; ".join(filter(None, [_of(count), _others(count)]))
            lines.append(f"- Claims, {words}, reproduced: {short}.")
    more = "the limits of the runs" if _is_ours(paper) else "every difference from the paper"
    lines += ["", _SHOWN.format(more), "", *_not_reproduced(own)]
    for name, claims in own.items():
        lines += ["", *_section(name, claims, headlines[name])]
    toctree = [":hidden:", ":caption: Set-ups and runs", "", *(f"{name}/summary" for name in own)]
    return [*lines, "", "```{toctree}", *toctree, "```"]


def _not_reproduced(own: Mapping[str, Claims]) -> list[str]:
    """The claims of the paper's experiments and theory that are not reproduced, and why."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, claims in own.items():
        for row in claims:
            if row["verdict"] != REPRODUCED and row["kind"] != "own":
                reason = (verdict_in_words(row), row["note"])
                rows.setdefault(reason, []).append(f"[{name}](#{_anchor(name)}): {row['claim']}")
    if not rows:
        return []
    cells = [("<br>".join(claims), verdict, why) for (verdict, why), claims in rows.items()]
    return ["## Not reproduced, and why", "", *table(("claim", "verdict", "why"), cells)]


def _section(name: str, claims: Claims, headlines: Rows) -> list[str]:
    title, more = _title(name), f"[Set-up and all runs]({name}/summary.md)"
    about = f"{more}; made by `rookery reproduce {name}`." if _is_ours(_paper(name)) else f"{title}. {more}."
    lines = [f"## {heading(name)}", "", about, ""]
    lines += [f"![{title}]({name}/{name}.png)", ""]
    if any(paper != "–" for _, paper, _ in headlines):
        lines += [*table(("", "the paper's", "ours"), headlines), ""]
    elif headlines:
        lines += [*table(("", "measured"), [(what, ours) for what, _, ours in headlines]), ""]
    lines += claims_table(claims, lambda figures: figures_in_words(dict(list(figures.items())[:1]), _rounded))
    told = [row for row in claims if row["note"] and (row["verdict"] == REPRODUCED or row["kind"] == "own")]
    return [*lines, *([""] if told else []), *(f"- *{row['claim']}* {row['note']}" for row in told)]


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
