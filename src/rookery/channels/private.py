"""`private`: a budget of differential privacy for a run, and the noise that keeps to it."""

import math
from collections.abc import Mapping
from typing import Any

from rookery.base.arguments import is_integer, is_number
from rookery.channels.budgeted import Budgeted, ByName
from rookery.channels.private_clients import Private
from rookery.channels.private_records import PrivateRecords
from rookery.language.channel import compresses, is_channel

__all__ = ["Budgeted", "Private", "PrivateRecords", "private"]

_CLIENT, _RECORD = "client", "record"


def private(
    epsilon: float | None = None,
    delta: float | None = None,
    clip: float | Mapping[str, float] = 1.0,
    rounds: int | None = None,
    unit: str = "client",
    noise: float | Mapping[str, float] | None = None,
    quantile: float | None = None,
    then: Any = None,
) -> Budgeted:
    """Keep a run to a budget of differential privacy, (ε, δ), for any method: `channel=rk.private(8, 1e-5)`.

    The noise is the smallest with which all releases of the run, counted in the method's plan, keep to the budget. What
    is not finite counts as zero, and means divide by public numbers.

    **A client is the unit** (the default). A client's update to each exchange is clipped, and the server adds Gaussian
    noise to the result. Cohorts are drawn from the server's own entropy. With `cohort=rk.Poisson(50)` the same ε needs
    less noise than with cohorts of fixed size. The threat is anyone who sees all results that the server computes, and
    knows the data of all clients but one. The server itself is trusted. `Run.memory` and the counts of work and of
    missing replies in the history are not covered: the server should keep them to itself. Methods that gather single
    replies, bookkeeping without a bound, a centre held by a client, and weights from the clients' sizes are refused.

    **A record is the unit** (`unit="record"`). A client clips what each of its records contributes to an oracle (∇_y g,
    ∇²_y g·v, …), adds them up and adds the noise itself, before anything leaves it. All that it sends is made of such
    sums. Minibatches contain each record with the same probability, drawn from the client's own entropy. The threat is
    anyone who sees all that the client sends, the server included, and knows all its records but one. The clients'
    numbers of records are public. A record must be in one client's data once, in the lower or in the upper set (clients
    with one set for both are accounted for). Methods that use single samples are refused. Put terms of a loss without
    data into the problem's `penalty`: elsewhere they are clipped with the records.

    Both refuse `evaluate_client`, `keep_best` and `rk.tune`. `evaluate` must use public data.

    Arguments:
        epsilon: ε. None: there is no budget, and the history shows what the given `noise` costs.
        delta: δ, below 1/n for n clients, or for the n records of the largest client.
        clip: the largest norm of a client's update, or {name of an exchange: norm}. For records, the largest norm of
            what one record contributes to an oracle, or {name of an oracle: norm}; the norm for a product (`g_yy`,
            `g_xy`, `r_x`) is relative to the norm of the vector.
        rounds: the rounds that share the budget; None: those of `rk.solve`. After them the run ends.
        unit: "client" or "record".
        noise: the noise multiplier, or {name of an exchange: multiplier}: the standard deviation divided by the largest
            effect of one client. For records: one, or {"lower": multiplier, "upper": multiplier}. None: the smallest
            that keeps to ε, divided among the exchanges so that their noise together is smallest.
        quantile: let each bound follow this quantile of the updates' norms (Andrew et al., 2021), starting from `clip`.
            A twentieth of the privacy of each exchange pays for it. Clients only. None: fixed bounds.
        then: a channel for the messages, whose values are private already, such as
            `rk.chain(rk.clip(10.0), rk.secure_sum())`. Records only.

    Example:
        >>> import rookery as rk
        >>> rk.private(epsilon=8, delta=1e-5, clip=1.0).unit
        'client'
    """
    if epsilon is None and noise is None:
        raise ValueError("rk.private: epsilon must be given, e.g. epsilon=8, unless `noise` is; got neither.")
    if epsilon is not None:
        _check("epsilon", epsilon)
    if delta is None or not is_number(delta) or not 0 < delta < 1:
        raise ValueError(f"rk.private: delta must be a number between 0 and 1, such as 1e-5; got {delta!r}.")
    if rounds is not None and (not is_integer(rounds) or rounds < 1):
        raise ValueError(f"rk.private: rounds must be an integer of at least 1, or None; got {rounds!r}.")
    if unit not in (_CLIENT, _RECORD):
        raise ValueError(f'rk.private: unit must be "client" or "record"; got {unit!r}.')
    if quantile is not None and not (is_number(quantile) and 0 < quantile < 1):
        raise ValueError(f"rk.private: quantile must be a number between 0 and 1, or None; got {quantile!r}.")
    bounds, levels = _by_name("clip", clip), None if noise is None else _by_name("noise", noise)
    rounds = None if rounds is None else int(rounds)
    fields = None if epsilon is None else float(epsilon), float(delta), bounds, rounds, levels
    fits = unit == _RECORD and is_channel(then) and not hasattr(then, "calibrated") and not compresses(then)
    if then is not None and not fits:
        raise ValueError(
            f'rk.private: then must be a channel such as rk.clip(1.0), and needs unit="record"; got {then!r}.'
        )
    if unit == _CLIENT:
        return Private(*fields, quantile=quantile)
    if quantile is not None:
        raise ValueError("rk.private: quantile must be None for records, whose bounds are fixed; got a number.")
    return PrivateRecords(*fields, then=then)


def _by_name(what: str, given: Any) -> ByName:
    if isinstance(given, Mapping):
        for name, value in given.items():
            _check(f"{what}[{name!r}]", value)
        return tuple((str(name), float(value)) for name, value in given.items())
    _check(what, given)
    return float(given)


def _check(what: str, value: Any) -> None:
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"rk.private: {what} must be a positive number; got {value!r}.")
