"""`rookery new`: a file to start from, which runs as it is."""

import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.program import Command, Quiet, app, border, say

_STARTS = Path(__file__).parent / "starts"
_TASKS = {  # a task to try a method for each class of problems on
    "bilevel": "quadratic",
    "minimax": "minimax-quadratic",
    "compositional": "portfolio",
    "single-level": "hyperrep",
    "weighted-nodes": "weighted-nodes",
}


@app.command(cls=Command)
def new(
    kind: Annotated[str, typer.Argument(help="problem or algorithm.")],
    name: Annotated[str, typer.Argument(help="What it is called: hospital, FedX.")],
    problem: Annotated[
        str | None,
        typer.Option(
            help="What the algorithm is for: bilevel (if left out), minimax, compositional, single-level or "
            "weighted-nodes."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file; NAME.py if left out.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write a file to start your own problem or algorithm from; it runs as it is."""
    from rookery.cli.registry import find

    with border():
        kind, start = find("kind", kind, {"problem": "start", "algorithm": "Start"})
        if kind == "problem" and problem is not None:
            raise ValueError("--problem says what an algorithm is for; leave it out for `rookery new problem`.")
        solved, task = find("class of problems", problem or "bilevel", _TASKS)
        own = name.replace("-", "_")
        if not own.isidentifier() or keyword.iskeyword(own):
            raise ValueError(f"{name!r} can't be a name in Python; take letters, digits and _, as in hospital.")
        path = out or Path(f"{own}.py" if kind == "problem" else f"{own.lower()}.py")
        if path.suffix != ".py":
            raise ValueError(f"--out {path}: the name of a Python file ends in .py.")
        if path.exists():
            raise ValueError(f"{path} is there already; give another name, or another --out.")
        if path.stem in sys.stdlib_module_names or importlib.util.find_spec(path.stem) is not None:
            raise ValueError(
                f"{path.name} would hide the Python module {path.stem}; give another name, or another --out."
            )
        file = kind if kind == "problem" else solved.replace("-", "_")
        text = (_STARTS / f"{file}.py").read_text(encoding="utf-8").replace("  # type: ignore[no-untyped-def]", "")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(rf"\b{start}\b(?=[(:\"])", own, text), encoding="utf-8")
        where = shlex.quote(f"{path}:{own}")
        command = f"{where} --algorithm FedNest" if kind == "problem" else f"{task} --algorithm {where}"
        check = f"\nCheck it:\n  rookery contract {where}" if kind == "algorithm" else ""
        say(quiet, False, f"Written: {path}. Run it:\n  rookery run {command} --rounds 20{check}")
