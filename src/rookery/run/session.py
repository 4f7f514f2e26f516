"""`session`: a run that you advance by hand, in your own loop."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rookery.base.arguments import check_counts
from rookery.data.clients import Clients
from rookery.engines.engine import Engine, Job, Session
from rookery.language.asynchronous import Asynchronous
from rookery.language.channel import Channel, Faults
from rookery.language.clock import Clock
from rookery.language.fed import Algorithm
from rookery.language.ledger import Ledger
from rookery.problems.problems import Problem
from rookery.problems.variables import Adapted, adapt
from rookery.run.arguments import checked, checked_engine
from rookery.run.budget import Budget
from rookery.run.record import copied


class Stepped:
    """A run that is advanced by hand; see `rk.session`.

    Attributes:
        rounds: the rounds completed so far.
        stopped: why the run cannot be advanced any further; None if it can.
        counts: the cost of the rounds so far, by the columns of `Run.history`.
        epsilon: the ε that a private run has spent so far; None if the run is not private.
    """

    def __init__(self, models: Adapted, session: Session, cohort: int) -> None:
        self._models, self._session, self._cohort, self._ledger = models, session, cohort, Ledger()
        self._budget, self._spent = Budget.of(session, 1), False
        self._ledger.add([session.init()], session.clients.n)

    def advance(self, rounds: int = 1) -> int:
        """Compute more rounds and return how many were completed: fewer only if the run has stopped."""
        check_counts(0, rounds=rounds)
        rounds = int(rounds)
        if self._budget is not None:
            self._budget.wanted = self.rounds + rounds
            allowed = self._budget.rounds - self.rounds
            rounds, self._spent = allowed, self._spent or allowed < rounds
        costs = self._session.advance(rounds) if rounds and self._session.stopped is None else []
        self._ledger.add(costs, self._cohort)
        return len(costs)

    @property
    def rounds(self) -> int:
        """The rounds completed so far."""
        return self._session.rounds

    @property
    def stopped(self) -> str | None:
        """Why the run cannot be advanced any further; None if it can."""
        if self._session.stopped is None:
            return "The budget of privacy is spent." if self._spent else None
        return self._session.stopped.reason

    @property
    def counts(self) -> dict[str, int]:
        """The cost of the rounds so far."""
        return dict(self._ledger.counts)

    @property
    def epsilon(self) -> float | None:
        """The ε that a private run has spent so far; None if the run is not private."""
        return None if self._budget is None else self._budget.epsilon(self.rounds)

    @property
    def state(self) -> Any:
        """A copy of the algorithm's state, with x and y."""
        return self._models.whole(copied(self._session.state))

    @property
    def memory(self) -> Any:
        """A copy of the clients' memory; see `Run.memory`."""
        return self._models.whole(copied(self._session.memory))

    def close(self) -> None:
        """Release the engine's resources."""
        self._session.close()

    def __enter__(self) -> "Stepped":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def session(
    problem: Problem,
    clients: Clients,
    algorithm: Algorithm,
    init: Any,
    *,
    cohort: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    engine: Engine | None = None,
    channel: "Channel | Mapping[str, Channel] | None" = None,
    faults: Faults | None = None,
    clock: Clock | None = None,
    asynchronous: Asynchronous | None = None,
) -> Stepped:
    """Open a run that you advance by hand, in your own loop.

    `session` takes the arguments of `solve` and gives the same numbers. The run stops before the first round that makes
    a value infinite or NaN, before a round with too few replies, and before a round that a budget of privacy does not
    allow.

    >>> import jax.numpy as jnp, rookery as rk
    >>> problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
    >>> clients = rk.Clients(upper=[jnp.array([1.0]), jnp.array([3.0])])
    >>> with rk.session(problem, clients, rk.FedAvg(step=0.1), jnp.zeros(())) as run:
    ...     while abs(run.state.x - 2) > 0.1:
    ...         completed = run.advance(5)
    >>> run.rounds, run.counts["exchanges"]
    (15, 15)
    """
    models = adapt(problem, init)
    job = Job(models.problem, clients, algorithm, models.init, cohort, seed, channel, faults, noise_seed=noise_seed)
    job = checked(replace(job, clock=clock, asynchronous=asynchronous))
    return Stepped(models, checked_engine(engine).open(job), job.replies)
