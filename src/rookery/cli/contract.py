"""`rookery contract`: check your own method against the contract of the library's methods."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rookery.cli.options import AsJson, Quiet
from rookery.cli.program import Command, app
from rookery.cli.terminal import complain, show

# The checks run a few rounds each, so nearly all the time is spent in the compiler, and most of it in its optimizer.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@app.command(cls=Command)
def contract(
    method: Annotated[str, typer.Argument(metavar="FILE:NAME", help="Your method: fedx.py:FedX, package.module:FedX.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A hyperparameter of the method: upper_step=0.1. Repeat it for more."),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            help="Check one class of problems only: bilevel, minimax, compositional, single-level or weighted-nodes."
        ),
    ] = None,
    exchanges: Annotated[int | None, typer.Option(help="Exchanges per round that the method states.")] = None,
    gradients: Annotated[float | None, typer.Option(help="Gradients that a client computes in a round.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only this check. Repeat it for more.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave out this check. Repeat it for more.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run only the checks that find most mistakes.")] = False,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Check your own method against the contract of the library's methods. Exit code 1 if a check fails."""
    _configure_jax()
    from rookery.cli.registry import find_algorithm
    from rookery.cli.settings import read_settings
    from rookery.testing import Report, checks

    named = find_algorithm(method)
    hyperparameters, _ = read_settings(settings or [], None, named)
    made = named.target(**named.hyperparameters | hyperparameters)
    names: dict[str, Any] = {"only": only or (), "skip": skip or (), "quick": quick}
    chosen = list(checks(made, problem, exchanges=exchanges, gradients=gradients, **names))
    report = Report(named.name, _run(chosen, named.name, quiet or json))
    results = [dataclasses.asdict(result) for result in report.results]
    counts = {ending: len(report.of(ending)) for ending in ("passed", "failed", "skipped")}
    kept = [f"{named.name} keeps the contract: {report.summary}."] if report.ok else []
    show(quiet, json, {"method": named.name, **counts, "checks": results}, _table(report), *kept)
    if not report.ok:
        complain(f"{named.name} fails {len(report.failed)} of {len(report.results)} checks.")
        raise typer.Exit(1)


def _configure_jax() -> None:
    """Compile fast, and have two processors for a mesh, unless JAX has started."""
    import jax

    os.environ.setdefault("XLA_FLAGS", _FLAGS)
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", 2)
        if "JAX_PLATFORMS" not in os.environ:
            jax.config.update("jax_platforms", "cpu")


def _run(checks: Sequence[Any], title: str, hidden: bool) -> tuple[Any, ...]:
    """Run the checks with a progress bar; return their results."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from rookery.base.printing import bar
    from rookery.testing.runner import run_in_order

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    with bar(*columns, show=not hidden and sys.stderr.isatty(), transient=True) as shown:
        task = shown.add_task(title, total=len(checks))
        results = []
        for result in run_in_order(checks):
            results.append(result)
            following = checks[len(results)].name if len(results) < len(checks) else title
            shown.update(task, advance=1, description=following)
        return tuple(results)


def _table(report: Any) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("check", "", "s"):
        table.add_column(name, justify="right" if name == "s" else "left", no_wrap=True)
    table.add_column("")
    colours = {"passed": "green", "failed": "red", "skipped": "yellow"}
    for result in report.results:
        ending = Text(result.outcome, style=colours[result.outcome])
        table.add_row(Text(result.name), ending, f"{result.seconds:.1f}", Text(result.detail))
    return table
