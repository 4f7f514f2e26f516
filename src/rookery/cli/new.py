"""`rookery new`: write a file to start from."""

import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.lookup import find
from rookery.cli.options import Quiet
from rookery.cli.program import Command, app
from rookery.cli.terminal import show

_STARTS = Path(__file__).parent / "starts"
_TASKS = {  # to try a method for each class of problems
    "bilevel": "quadratic",
    "minimax": "minimax-quadratic",
    "compositional": "portfolio",
    "multi-level": "composition",
    "single-level": "hyperrep",
    "weighted-nodes": "weighted-nodes",
}


@app.command(cls=Command)
def new(
    kind: Annotated[str, typer.Argument(help="problem or algorithm.")],
    name: Annotated[str, typer.Argument(help="Its name: hospital, FedX.")],
    problem: Annotated[
        str | None,
        typer.Option(
            help="What the algorithm solves: bilevel (default), minimax, compositional, multi-level, single-level or "
            "weighted-nodes."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file. Default: NAME.py.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write a file to start your own problem or algorithm from; it runs as it is."""
    kind, start = find("kind", kind, {"problem": "start", "algorithm": "Start"})
    if kind == "problem" and problem is not None:
        raise ValueError(
            "--problem must be left out of `rookery new problem`, because it names the problem that a new algorithm "
            f"solves; got {problem!r}."
        )
    solved, task = find("class of problems", problem or "bilevel", _TASKS)
    identifier = name.replace("-", "_")
    if not identifier.isidentifier() or keyword.iskeyword(identifier):
        raise ValueError(f"NAME must be a name in Python, of letters, digits and _, e.g. hospital; got {name!r}.")
    path = out or Path(f"{identifier}.py" if kind == "problem" else f"{identifier.lower()}.py")
    if path.suffix != ".py":
        raise ValueError(f"--out must end in .py; got {path}.")
    if path.exists():
        raise ValueError(f"{path} exists already. Give another name, or another --out.")
    if path.stem in sys.stdlib_module_names or importlib.util.find_spec(path.stem) is not None:
        raise ValueError(f"{path.name} would hide the Python module {path.stem}. Give another name, or another --out.")
    file = kind if kind == "problem" else solved.replace("-", "_")
    text = (_STARTS / f"{file}.py").read_text(encoding="utf-8").replace("  # type: ignore[no-untyped-def]", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(rf"\b{start}\b(?=[(:\"])", identifier, text), encoding="utf-8")
    where = shlex.quote(f"{path}:{identifier}")
    command = f"{where} --algorithm FedNest" if kind == "problem" else f"{task} --algorithm {where}"
    check = f"\nCheck it:\n  rookery contract {where}" if kind == "algorithm" else ""
    show(quiet, False, None, f"Written: {path}. Run it:\n  rookery run {command} --rounds 20{check}")
