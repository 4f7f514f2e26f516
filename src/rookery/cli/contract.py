"""`rookery contract`: a method of one's own, checked as the library's methods are."""

import contextlib
import dataclasses
import os
from typing import Annotated, Any

import typer

from rookery.cli.program import AsJson, Command, Quiet, app, border, complain, say

# The programs of the checks run a few rounds each: nearly all their time is the compiler's, and most of that its
# optimizer's.
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
            help="Check one class of problem only: bilevel, minimax, compositional, single-level or weighted-nodes."
        ),
    ] = None,
    exchanges: Annotated[int | None, typer.Option(help="Exchanges a round that the method states.")] = None,
    gradients: Annotated[float | None, typer.Option(help="Gradients a client computes in a round.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run this check only. Repeat it for more.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave this check out. Repeat it for more.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run only the checks that find most mistakes.")] = False,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Check a method of your own against the contract of the library's methods; code 1 if a check fails."""
    with border():
        _prepare()
        from rookery.cli.registry import blaming, find_algorithm
        from rookery.report import to_json
        from rookery.testing import Report, checks

        found = find_algorithm(method)
        with blaming():
            chosen = found.thing(**found.given | _hyperparameters(found, settings or []))
        of = list(
            checks(
                chosen, problem, exchanges=exchanges, gradients=gradients, only=only or (), skip=skip or (), quick=quick
            )
        )
        report = Report(found.name, _run(of, found.name, quiet or json))
    if json:
        results = [dataclasses.asdict(own) for own in report.results]
        count = {how: len(report.of(how)) for how in ("passed", "failed", "skipped")}
        print(to_json({"method": found.name, **count, "checks": results}))
    say(quiet, json, _table(report))
    if not report.ok:
        complain(f"{found.name} fails {len(report.failed)} of {len(report.results)} checks.")
        raise typer.Exit(1)
    say(quiet, json, f"{found.name} keeps the contract: {report.summary}.")


def _prepare() -> None:
    """Compile quickly and have two processors for a mesh, unless JAX has started."""
    import jax

    os.environ.setdefault("XLA_FLAGS", _FLAGS)
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", 2)
        if "JAX_PLATFORMS" not in os.environ:
            jax.config.update("jax_platforms", "cpu")


def _hyperparameters(found: Any, given: list[str]) -> dict[str, Any]:
    """The hyperparameters that are set."""
    from rookery.cli.asked import value_of
    from rookery.cli.registry import key

    chosen: dict[str, Any] = {}
    for entry in given:
        name, sign, text = entry.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or not name or not text.strip():
            raise ValueError(f"--set must be of the form key=value, e.g. --set upper_step=0.1; got {entry!r}.")
        chosen[key(found.name, name, [own.name for own in dataclasses.fields(found.thing)])] = value_of(text)
    return chosen


def _run(of: list[Any], title: str, hidden: bool) -> tuple[Any, ...]:
    """The results, with a bar while the checks run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from rookery.testing.contract import run_in_order

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as bar:
        task = bar.add_task(title, total=len(of))
        results = []
        for result in run_in_order(of):
            results.append(result)
            following = of[len(results)].name if len(results) < len(of) else title
            bar.update(task, advance=1, description=following)
        return tuple(results)


def _table(report: Any) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("check", "", "s"):
        table.add_column(name, justify="right" if name == "s" else "left", no_wrap=True)
    table.add_column("")
    colour = {"passed": "green", "failed": "red", "skipped": "yellow"}
    for own in report.results:
        how = Text(own.outcome, style=colour[own.outcome])
        table.add_row(Text(own.name), how, f"{own.seconds:.1f}", Text(own.detail))
    return table
