"""`explain`: the plan of a round."""

from dataclasses import replace
from typing import Any

from rookery.channels.private import Budgeted
from rookery.data.clients import Clients
from rookery.data.cohort import Poisson
from rookery.engines.engine import Job, traced
from rookery.language.asynchronous import Asynchronous
from rookery.language.channel import Faults
from rookery.plan.trace import Plan
from rookery.problems.variables import adapt
from rookery.run.arguments import checked
from rookery.run.price import explained


def explain(
    problem: Any,
    clients: Clients,
    algorithm: Any,
    init: Any,
    *,
    cohort: int | Poisson | None = None,
    channel: Any = None,
    faults: Faults | None = None,
    private: Budgeted | None = None,
    asynchronous: Asynchronous | None = None,
) -> Plan:
    """Return the plan of a round, without running it; print it to see every exchange. The arguments are as in `solve`.

    With `private=rk.private(8, 1e-5, rounds=200)`, `Plan.price` says what privacy costs with this method: the results
    that a round releases, ε after 100 rounds with a noise multiplier of 1, and the noise that keeps to the budget; or
    why such a run is refused. The price is printed below the plan.

    >>> import numpy as np, rookery as rk
    >>> problem = rk.SingleLevel(lambda x, b: ((x - b) ** 2).mean())
    >>> clients = rk.Clients(upper=[np.ones((3, 5))] * 8)
    >>> print(rk.explain(problem, clients, rk.FedAvg(), np.zeros(5), cohort=4))  # doctest: +ELLIPSIS
    FedAvg.round, 4 of 8 clients
      #1 clients at single_level.py:...
           are sent: step, x (... bytes)
           keep: (5)
         mean "x" of #1: each sends (5) (... bytes), aggregated: only the result is used
    """
    models = adapt(problem, init)
    job = Job(models.problem, clients, algorithm, models.init, cohort, channel=channel, faults=faults)
    job = replace(job, asynchronous=asynchronous)
    if private is not None:
        if not isinstance(private, Budgeted) or channel is not None:
            got = f"got {private!r}" if channel is None else "got both"
            raise ValueError(f"private must be rk.private(...), without another channel; {got}.")
        plan, price = explained(job, private)
        return replace(plan, price=price)
    return traced(checked(job)).round
