"""The table of all methods, made from their docstrings: python -m rookery.report.methods docs/methods.md."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from rookery import algorithms

KINDS = {  # a heading for each kind of problem, in the order of the page
    ("Bilevel", "global"): "Bilevel",
    ("Bilevel", "client"): "Bilevel, with a lower level per client",
    ("Minimax", "global"): "Minimax",
    ("Compositional", "global"): "Compositional",
    ("Compositional", "client"): "Compositional, with an inner function per client",
    ("WeightedNodes", "global"): "Weighted nodes",
    ("SingleLevel", "global"): "Single level",
}

_INTRODUCTION = """# The methods

{count} methods, each with the exchanges that a round takes. A docstring (`help(rk.FedNest)`) has every departure from
the paper, and `rookery list FedNest` shows the hyperparameters with the paper's symbols.
[The reference](reference/methods.md) has both. This page is made from them by `make docs`.
[Which bilevel method for which problem](which-method.md) compares fourteen of them.

T is the number of inner iterations (`lower_rounds`), N the terms of the inverse-Hessian series (`neumann_terms`; N'
and N_j are drawn below it), I the steps of a round (`local_steps`), T_s the steps of a call of Local-SVRG (`steps`)
and τ those between two of its exchanges (`sync_every`). `rk.with_server_optimizer(method, upper=optax.adam(1e-3))`
gives any of them [an optimizer at the server](optimizers.md). Not in scope: SMD (Rafique et al.) and decentralised
bilevel methods (Chen et al. 2022).
"""


def page() -> str:
    """Return the page in Markdown."""
    methods = [getattr(algorithms, name) for name in algorithms.__all__]
    parts = [_INTRODUCTION.format(count=len(methods))]
    for kind, title in KINDS.items():
        rows = [_row(method) for method in sorted(methods, key=lambda m: m.__name__.lower()) if _kind(method) == kind]
        head = "| method | | also solves | exchanges per round | reference |\n|---|---|---|---|---|"
        mathematics = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind[0]).lower()  # weighted-nodes
        slug = title.lower().replace(",", "").replace(" ", "-")
        links = f"[Their mathematics](mathematics/{mathematics}.md), [their reference](reference/methods.md#{slug}).\n"
        parts.append("\n".join([f"## {title}\n", links, head, *rows, ""]))
    return "\n".join(parts)


def _kind(method: Any) -> tuple[str, str]:
    return method.solves[0].__name__, getattr(method, "scope", "global")


def _row(method: Any) -> str:
    text = inspect.getdoc(method) or ""
    title, others = text.splitlines()[0], ", ".join(cls.__name__ for cls in method.solves[1:])
    exchanges = re.split(r"\.(?:\s|$)", _paragraph(text, "Exchanges per round"))[0]
    cells = (f"`{method.__name__}`", title, others, exchanges, _paragraph(text, "Reference").removesuffix("."))
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _paragraph(text: str, heading: str) -> str:
    """Return the paragraph of a docstring after a heading, in one line."""
    found = re.search(rf"{heading}:(.*?)(?=\n\s*\n|\n[A-Z][\w ]*:|\Z)", text, re.DOTALL)
    return " ".join(found.group(1).split()) if found else ""


def main(path: str) -> None:
    """Write the page."""
    Path(path).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
