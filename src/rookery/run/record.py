"""The record of a run: its history as it grows, the best state, and what a checkpoint keeps of them."""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base.placement import duplicate
from rookery.engines.engine import Session
from rookery.language.ledger import Amounts, Ledger
from rookery.language.metrics import check_numbers, direction
from rookery.problems.functions import required_arguments
from rookery.problems.variables import Adapted
from rookery.run.budget import Budget
from rookery.run.evaluation import Evaluate, over_clients
from rookery.run.result import COLUMNS, Best, Run, did_you_mean

_EXCHANGES = ["name", "kind", "shape", "count", "bytes_up", "bytes_down"]


class Record:
    """The history of a run, with a row every `every` rounds and at the end, after `rounds`.

    Arguments:
        models: how variables become the user's models.
        evaluate, keep_best, every, rounds, noise_seed: as in `solve`.
        measures: whether there is an `evaluate_client`.
        called_back: whether callbacks look at the state after each row.
    """

    def __init__(
        self, models: Adapted, evaluate: Evaluate | None, keep_best: str | None, measures: bool, every: int,
        rounds: int, noise_seed: int | None, called_back: bool,
    ) -> None:  # fmt: skip
        self._models, self._evaluate, self._keep_best = models, models.on_variables(evaluate), keep_best
        self._measures, self.every, self.rounds, self.noise_seed = measures, every, rounds, noise_seed
        self.goal = None if keep_best is None else direction(keep_best)
        evaluated = measures or evaluate is not None
        if self.goal is not None and not evaluated:
            raise ValueError(f"keep_best={keep_best!r} needs evaluate=..., or evaluate_client=..., that returns it.")
        self.watched = evaluated or called_back  # if not, one call may go beyond `every` rounds
        self.sees_memory = evaluate is not None and required_arguments(evaluate) >= 3
        self.ledger = Ledger()
        self.budget: Budget | None = None  # of a private run
        self.seconds = 0.0
        self.rows: list[dict[str, Any]] = []
        self.best: Best | None = None  # among the rows that are due every `every` rounds, which a longer run has, too
        self._last: Best | None = None  # the final state, if it is better and due only because the run ends there

    def seen(self, session: Session) -> tuple[Any, Any, Any]:
        """Return x, y and, if `evaluate` takes it, the clients' memory."""
        return session.state.x, session.state.y, session.memory if self.sees_memory else None

    def start(self, cost: Amounts, clients: int, seconds: float) -> None:
        """Count the cost of the start, in which all clients take part."""
        self.ledger.add([cost], clients)
        self.ledger.rounds = 0
        self.seconds += seconds

    @cached_property
    def affordable(self) -> int:
        """The rounds that will be run: all, or those that a budget of privacy allows."""
        return self.rounds if self.budget is None else min(self.rounds, self.budget.rounds)

    def is_due(self, done: int) -> bool:
        """Return whether there is a row after `done` rounds."""
        return done % self.every == 0 or done == self.affordable

    def advance(self, session: Session, costs: list[Amounts], cohort: int, seconds: float) -> bool:
        """Count the rounds of a call and add the rows that are due; return whether there are any."""
        known, done = len(self.rows), session.rounds
        if self.watched:
            self.ledger.add(costs, cohort)
            self.seconds += seconds
        else:
            begin = self.seconds
            for k, cost in enumerate(costs, 1):
                self.ledger.add([cost], cohort)
                self.seconds = begin + seconds * k / len(costs)
                if (done - len(costs) + k) % self.every == 0:
                    self._add(done - len(costs) + k, {})
        if self.is_due(done):
            self.complete(session)
        return len(self.rows) > known

    def complete(self, session: Session) -> bool:
        """Add a row for the session's current state, unless there is one; return whether it was added."""
        if self.rows[-1]["round"] == session.rounds:
            return False
        self.evaluate(session)
        return True

    def _add(self, done: int, metrics: dict[str, float]) -> None:
        privacy = {} if self.budget is None else {"epsilon": self.budget.epsilon(done)}
        self.rows.append({"round": done, **self.ledger.counts, "seconds": self.seconds, **privacy, **metrics})

    def evaluate(self, session: Session) -> None:
        """Add a row for the session's current state."""
        # `evaluate` gets a copy, which it may keep: the next rounds donate the state.
        seen = copied(self.seen(session)[: 3 if self.sees_memory else 2]) if self._evaluate else ()
        metrics = session.processes.on_lead(lambda: self._metrics(seen))
        weights = np.asarray(session.clients.weights, float)
        measured = over_clients(*session.measure(), weights, session.shows_each) if self._measures else {}
        for name in metrics.keys() & measured.keys():
            raise ValueError(f"evaluate and evaluate_client both return {name!r}. Rename it in one of them.")
        metrics |= measured
        for name in COLUMNS:
            if name in metrics:
                raise ValueError(f"evaluate must not return {name!r}, a column of the history. Rename it.")
        self._add(session.rounds, metrics)
        self._compare(session)

    def _metrics(self, seen: tuple[Any, ...]) -> dict[str, float]:
        metrics = {} if self._evaluate is None else self._evaluate(*seen)
        check_numbers("evaluate", metrics)
        return {name: float(value) for name, value in metrics.items()}

    def _compare(self, session: Session) -> None:
        """Keep the state if the last row is due and better than the best. Rows off the schedule never become best."""
        if self.goal is None or not self.is_due(session.rounds):
            return
        metrics = {name: value for name, value in self.rows[-1].items() if name not in COLUMNS}
        if self.goal.name not in metrics:
            known, meant = ", ".join(metrics) or "nothing", did_you_mean(self.goal.name, list(metrics))
            raise ValueError(
                f"keep_best={self._keep_best!r} must name a metric that evaluate returns; it returns {known}.{meant}"
            )
        value = metrics[self.goal.name]
        better = np.isfinite(value) if self.best is None else self.goal.better(value, self.best.value)
        if better:
            copy = jax.tree.map(_to_host, self.seen(session))  # the next rounds donate the state
            best = Best(session.rounds, value, *copy)
            regular = session.rounds % self.every == 0
            self.best, self._last = (best, None) if regular else (self.best, best)

    def run(self, session: Session, interrupted: bool) -> Run:
        """Return the run so far."""
        import pandas as pd  # slow to import

        state, memory = copied((session.state, session.memory))
        whole, best = self._models.whole, self._last or self.best
        if best is not None:
            best = Best(best.round, best.value, *map(whole, (best.x, best.y, best.memory)))
        return Run(
            history=pd.DataFrame(self.rows),
            exchanges=pd.DataFrame(self.ledger.last, columns=_EXCHANGES),
            state=whole(state),
            best=best,
            interrupted=interrupted,
            rounds=session.rounds,
            memory=whole(memory),
            spent=self.affordable <= session.rounds < self.rounds,
        )

    def extra(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: a copy, because it is written while the run continues."""
        best = None if self.best is None else {"round": self.best.round, "value": self.best.value}
        ledger = {"counts": dict(self.ledger.counts), "last": list(self.ledger.last)}
        settings: dict[str, Any] = {"every": self.every, "noise_seed": self.noise_seed}
        if self.budget is not None:
            settings["repeated"] = self.budget.repeated
        return {**ledger, **settings, "seconds": self.seconds, "rows": list(self.rows), "best": best}

    def restore(self, session: Session, extra: dict[str, Any], best: Any) -> None:
        """Continue from a checkpoint, without its last row if that is off this run's schedule."""
        self.ledger.counts, self.ledger.last = extra["counts"], extra["last"]
        self.seconds, self.rows, self.noise_seed = extra["seconds"], extra["rows"], extra.get("noise_seed")
        self.best = None if extra["best"] is None else Best(extra["best"]["round"], extra["best"]["value"], *best)
        if self.budget is not None:  # over a network, a round that others have seen may be computed again
            self.budget.repeated = extra["repeated"] + int(session.durable)
        last = self.rows[-1]["round"]
        if last % extra["every"]:  # the saved run ended or was interrupted there, in the session's state
            if self.is_due(last):
                self._compare(session)
            else:
                self.rows.pop()


def copied(value: Any) -> Any:
    """Return a copy of a pytree of arrays, to keep while the next rounds donate the original."""

    def copy(a: Any) -> Any:
        if isinstance(a, jax.Array):
            return duplicate(a)
        return a.copy() if hasattr(a, "copy") else a

    return jax.tree.map(copy, value)


def _to_host(leaf: Any) -> Any:
    """Return a NumPy copy; random keys, which NumPy cannot hold, stay in JAX."""
    return jnp.copy(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.array(leaf)
