"""`explain`: the plan of a round."""

from typing import Any

from rookery.data.clients import Clients
from rookery.engines.engine import Job, traced
from rookery.language.channel import Faults
from rookery.plan.trace import Plan
from rookery.problems.variables import adapt
from rookery.run.arguments import checked


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
    """Return the plan of a round, without running it; print it to see every exchange. The arguments are as in `solve`.

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
    return traced(checked(job)).round
