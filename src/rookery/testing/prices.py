"""The price of privacy of all methods, from their plans: python -m rookery.testing.prices docs/privacy-methods.md."""

import dataclasses
import sys
from functools import cache
from pathlib import Path
from typing import Any

from rookery import algorithms
from rookery.channels import private
from rookery.data.clients import Clients
from rookery.data.cohort import Poisson
from rookery.report.methods import KINDS
from rookery.run.explain import explain
from rookery.run.price import Price
from rookery.testing.cases import Case, case, kinds, needs

_CLIENTS, _COHORT, _DELTA = 1000, 50, 1e-5
_EPSILON, _ROUNDS = 8.0, 200

_PAGE = f"""# What privacy costs, method by method

Choose a method for [a private run](privacy.md), which pays for every result that a round releases. A result is a mean
or a sum that one exchange publishes. The table shows, for each method in its default settings, how many results a
round releases, ε after 100 rounds with a noise multiplier of 1, and the multiplier with which
{_ROUNDS} rounds stay below ε = {_EPSILON:g}. The unit is a client; there are {_CLIENTS:,} clients, of which
`rk.Poisson({_COHORT})` draws about {_COHORT} in each round, and δ = 1e-5. `make docs` computes the table from
the methods' plans. `rk.explain(..., private=...)` prints the same for your own problem, settings and cohorts.

| method | for | releases per round | ε after 100 rounds | noise for ε = {_EPSILON:g} |
|---|---|---|---|---|
{{rows}}

Bookkeeping that differs between clients, such as the number of local steps of `SimFBO`, counts as another result. "+ 1"
stands for one result of all clients before the first round. Methods marked with * need a number for `hessian_step`,
because "auto" is refused. Methods marked with † take all clients in every round, so that their price is not lowered by
drawing cohorts.

## Refused

| method | for | why |
|---|---|---|
{{refused}}
"""


def page(names: tuple[str, ...] = tuple(algorithms.__all__)) -> str:
    """Return the page in Markdown, of these methods."""
    prices = {name: price(name) for name in names}
    order = sorted(names, key=lambda name: (prices[name].epsilon(), name.lower()))
    rows = [_row(name, prices[name]) for name in order if prices[name].refused is None]
    refused = [_refused(name, prices[name]) for name in order if prices[name].refused is not None]
    return _PAGE.format(rows="\n".join(rows), refused="\n".join(refused))


@cache
def price(name: str) -> Price:
    """Return the price of privacy with a method, in its default settings if those can be private."""
    method = getattr(algorithms, name)
    return _price(method(hessian_step=0.1) if _needs_step(name) else method())


def _needs_step(name: str) -> bool:
    defaults = {field.name: field.default for field in dataclasses.fields(getattr(algorithms, name))}
    return defaults.get("hessian_step") == "auto"


def _price(method: Any) -> Price:
    it, clients = _case(kinds(method)[0])
    cohort = None if "all clients" in needs(method) else Poisson(_COHORT)
    asked = private(_EPSILON, _DELTA)
    return explain(it.problem, clients, method, it.init, cohort=cohort, private=asked).price


@cache
def _case(kind: str) -> tuple[Case, Clients]:
    it = case(kind, _CLIENTS, 2)
    return it, it.clients()


def _row(name: str, price: Price) -> str:
    start = f" + {price.start.count}" if price.start.count else ""
    mark = "*" * _needs_step(name) + "†" * ("all clients" in needs(getattr(algorithms, name)))
    numbers = f"{price.epsilon():.3g} | {price.noise(_EPSILON, _ROUNDS):.3g}"
    return f"| `{name}`{mark} | {_kind(name)} | {price.count}{start} | {numbers} |"


def _refused(name: str, price: Price) -> str:
    why = (price.refused or "").removeprefix("A private run must have releases that can all be accounted for. ")
    return f"| `{name}` | {_kind(name)} | {why} |"


def _kind(name: str) -> str:
    method = getattr(algorithms, name)
    return KINDS[method.solves[0].__name__, getattr(method, "scope", "global")].lower()


def main(path: str) -> None:
    """Write the page."""
    Path(path).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
