"""`explain`: the plan of a round, to be read."""

from typing import Any

from rookery.data.clients import Clients
from rookery.engines.checks import check_run, start_values
from rookery.engines.engine import Job, traced
from rookery.language.channel import Faults, check_kind
from rookery.plan.trace import Plan
from rookery.problems.variables import taken


def explain(
    problem: Any,
    clients: Clients,
    algorithm: Any,
    init: Any,
    *,
    cohort: int | None = None,
    channel: Any = None,
    faults: Faults | None = None,
) -> Plan:
    """The plan of a round: `print` it to see what is exchanged. Nothing is run. The arguments are those of `solve`.

    >>> import numpy as np, rookery as rk
    >>> problem = rk.SingleLevel(lambda x, b: ((x - b) ** 2).mean())
    >>> clients = rk.Clients(upper=[np.ones((3, 5))] * 8)
    >>> print(rk.explain(problem, clients, rk.FedAvg(), np.zeros(5), cohort=4))  # doctest: +ELLIPSIS
    FedAvg.round, 4 of 8 clients
      #1 clients at single_level.py:...
           are sent: step, x (... bytes)
           keep: (5)
         mean "x" of #1: each sends (5) (... bytes), aggregated before anyone sees it
    """
    check_kind(channel)
    if faults is not None and not isinstance(faults, Faults):
        raise TypeError(f"faults must be rk.Faults(dropout=...) or None; got {faults!r}.")
    models = taken(problem, init)
    problem = models.problem
    x, y = start_values(problem, clients, models.init)
    size = check_run(problem, clients, algorithm, x, y, 0, cohort, 1, 0)
    return traced(Job(problem, clients, algorithm, (x, y), size, 0, channel, faults)).round
