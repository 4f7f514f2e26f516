"""`rookery new`: a file to start from, which runs as it is."""

import keyword
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.program import Command, Quiet, app, border, say

_STARTS = Path(__file__).parent / "starts"


@app.command(cls=Command)
def new(
    kind: Annotated[str, typer.Argument(help="problem or algorithm.")],
    name: Annotated[str, typer.Argument(help="What it is called: hospital, FedX.")],
    out: Annotated[Path | None, typer.Option(help="The file; NAME.py if left out.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write a file to start your own problem or algorithm from; it runs as it is."""
    from rookery.registry import find

    with border():
        kind, start = find("kind", kind, {"problem": "start", "algorithm": "Start"})
        own = name.replace("-", "_")
        if not own.isidentifier() or keyword.iskeyword(own):
            raise ValueError(f"{name!r} can't be a name in Python; take letters, digits and _, as in hospital.")
        path = out or Path(f"{own}.py" if kind == "problem" else f"{own.lower()}.py")
        if path.suffix != ".py":
            raise ValueError(f"--out {path}: the name of a Python file ends in .py.")
        if path.exists():
            raise ValueError(f"{path} is there already; give another name, or another --out.")
        text = (_STARTS / f"{kind}.py").read_text(encoding="utf-8").replace("  # type: ignore[no-untyped-def]", "")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(rf"\b{start}\b(?=[(:\"])", own, text), encoding="utf-8")
        where = shlex.quote(f"{path}:{own}")
        command = f"{where} --algorithm FedNest" if kind == "problem" else f"quadratic --algorithm {where}"
        say(quiet, False, f"Written: {path}. Run it:\n  rookery run {command} --rounds 20")
