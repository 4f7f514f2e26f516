"""A run in words for the owner of a site's data: what is asked, what comes in, and what goes out."""

import dataclasses
import textwrap
from typing import Any

import jax

from rookery.base.printable import printable
from rookery.channels.compression import Compression
from rookery.channels.downlink import Broadcast
from rookery.channels.privacy import Clip, Gaussian
from rookery.engines.federation.policy import bound_and_noise, members_of
from rookery.engines.federation.responder import Opened
from rookery.engines.federation.spending import Budget, Spending, epsilon, plus
from rookery.language import channel as channels
from rookery.language import ledger
from rookery.language.channel import is_private_for_records
from rookery.plan import words
from rookery.plan.trace import Plan
from rookery.plan.words import Exchanged, in_bytes

_LINE = 10_000  # characters of a line, before it is wrapped


def in_words_for_a_site(opened: Opened, budget: Budget | None = None, spending: Spending | None = None) -> str:
    """Describe a run that a coordinator wants to open, before anything is computed: see `Responder.explain`.

    Arguments:
        opened: the run.
        budget: the site's privacy budget, if it has one.
        spending: what the site has spent of it.
    """
    found = opened.fingerprint
    lines = [
        *_who(opened),
        *_method(opened.algorithm),
        *_channel(opened),
        *_privacy(opened, budget, spending or Spending()),
        "",
        "Names are the method's own: x and y are the model's parameters, a key is a random number.",
        "",
        *_phase(opened, opened.plans[0], f"At the start, once, all {opened.clients} clients"),
        "",
        *_phase(opened, opened.plans[1], _round(opened)),
        "",
        *_memory(opened.plans[1]),
        *_evaluation(opened),
        "With every reply: the coordinator is told how many samples, gradients and products were computed for it, and "
        "at the end of a round whether the numbers that stay here are finite.",
        "",
        f"Fingerprint: {found}",
        "To approve this plan, write in the policy file:",
        f'  plans = ["{found}"]',
        "It covers what is computed and sent, as written above, and not the values that come in: step sizes and other "
        "real numbers are the coordinator's, and may change.",
    ]
    # Escaped line by line, so that the coordinator's words can't add a line.
    return "\n".join(text for line in lines for text in (_wrapped(printable(line, _LINE)) if line else [""]))


def _wrapped(line: str) -> list[str]:
    begin = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line.lstrip(), 100, initial_indent=begin, subsequent_indent=begin + "  ", break_long_words=False
    )


def _round(opened: Opened) -> str:
    if opened.asynchronous:
        return f"In every round, which ends after {opened.cohort} replies, each client that is ready"
    return f"In every round, {opened.cohort} of {opened.clients} clients"


def _who(opened: Opened) -> list[str]:
    of_round = f"{opened.cohort} of them take part in a round."
    if opened.asynchronous:
        of_round = f"A round ends after {opened.cohort} replies, of which several may be one client's."
    lines = [
        f"Run {printable(opened.header['run'])}",
        f"This site would be client {opened.header['client']} of {opened.clients}, counted from 0. {of_round} (The "
        "coordinator says so; it can't be checked here.)",
    ]
    if opened.faults is not None:
        lines.append(f"A round goes on without clients that do not reply, as long as {opened.faults.minimum} do.")
        if opened.faults.attack is not None:
            attack = printable(repr(opened.faults.attack))
            lines.append(f"To test the federation, some clients send something else than their replies: {attack}.")
    return lines


def _method(algorithm: Any) -> list[str]:
    fields = dataclasses.fields(algorithm) if dataclasses.is_dataclass(algorithm) else ()
    settings = ", ".join(f"{field.name} = {printable(getattr(algorithm, field.name))}" for field in fields)
    return [f"Method: {type(algorithm).__name__}{f', with {settings}' if settings else ''}"]


def _channel(opened: Opened) -> list[str]:
    names = list(dict.fromkeys(name for plan in opened.plans[:2] for name in plan.exchanges))
    each = {name: _of_channel(channels.chosen(opened.channel, name)) for name in names}
    down = channels.down(opened.channel)
    comes = [] if down is None else [f"What comes in during a round is {down.in_words}, from arrays of some length on."]
    if len(set(each.values())) <= 1:
        return [f"Before a reply is sent: {next(iter(each.values()), _of_channel(None))}", *comes]
    return ["Before a reply is sent:", *(f'  "{name}": {text}' for name, text in each.items()), *comes]


def _of_channel(channel: Any) -> str:
    if channel is None:
        return "nothing is done to it; it is sent as it was computed."
    if is_private_for_records(channel):
        if channel.then is None:
            return "nothing more is done to it; the noise is in it already."
        return f"the noise is in it already; {_of_channel(channel.then)}"
    members = members_of(channel)
    rest = tuple(member for member in members if not isinstance(member, Compression | Broadcast))
    if len(rest) == len(members):
        return _of_members(channel)
    said = [_of_members(channels.Chain(rest))] if rest else []
    compressed = [f"it is compressed here: {member.in_words}" for member in members if isinstance(member, Compression)]
    return " Then ".join([*said, *compressed]) or _of_channel(None)


def _of_members(channel: Any) -> str:
    bound, noise = bound_and_noise(channel)
    rules = channels.rules(channel)
    named = "; ".join(type(rule).__name__ for rule in rules)
    judged = f" The coordinator sees each reply, and combines them by a rule ({named})." if rules else ""
    if bound == float("inf"):
        members = getattr(channel, "members", (channel,))
        others = [member for member in members if not isinstance(member, Clip | Gaussian) and member not in rules]
        if not others:
            return f"nothing is done to it; it is sent as it was computed.{judged}"
        known = "; ".join(type(member).__name__ for member in others)
        return f"it passes a channel ({known or 'without a bound'}) of which this text can't say what it does."
    clipped = f"it is clipped here: scaled down, if need be, to a norm of {bound:g}."
    if getattr(channel, "secure", None) is not None:
        clipped += " Then it is rounded to integers and hidden under masks, which cancel only in the sum."
    if noise == 0:
        return clipped + judged
    return (
        f"{clipped} The coordinator adds noise to the result, {noise:g} times what one client can move it by. (The "
        "coordinator draws the noise; it can't be checked here.)"
    )


def _privacy(opened: Opened, budget: Budget | None, spending: Spending) -> list[str]:
    if opened.prices is None:
        return []
    noise = ", ".join(f"{level:.3g} for the {name} data" for name, level in opened.prices.noise.items())
    lines = [f"Private for each record: this site clips what each record contributes, and adds noise ({noise})."]
    if budget is None:
        return lines
    start, each = (opened.prices.plan(plan) for plan in opened.plans[:2])
    before, delta = spending.counts(), budget.delta
    one = epsilon(plus(Spending().counts(), each), delta)
    rounds = budget.rounds(before, start, each)
    allowed = {None: "100,000 rounds or more", -1: "nothing of this run"}.get(rounds, f"{rounds} rounds")
    return [
        *lines,
        f"A single round costs ε = {one:.3g} at δ = {delta:g}; further ones cost less each. Spent so far is ε = "
        f"{epsilon(before, delta):.3g} of {budget.epsilon:g}, and the rest allows {allowed}.",
    ]


def _phase(opened: Opened, plan: Plan, title: str) -> list[str]:
    found, rest, down = words.exchanges(plan, opened.header["client"])
    lines = [f"{title}: {'' if found else 'nothing is sent by a client.'}".rstrip()]
    for i, exchange in enumerate(found, 1):
        lines += _exchange(i, exchange)
    if rest:
        lines.append(f"  Then comes in, for what stays here: {rest} ({in_bytes(down)})")
    return lines


def _exchange(i: int, exchange: Exchanged) -> list[str]:
    often = {1: "once", 2: "twice", None: "as often as the run draws"}.get(exchange.times, f"{exchange.times} times")
    comes = f"{exchange.sent} ({in_bytes(exchange.down)})" if exchange.sent else "nothing"
    summed = (
        "summed securely: the coordinator never sees your reply, only the sum of those of at least "
        f"{exchange.secure} sites"
    )
    seen = (
        summed
        if exchange.secure
        else (
            "SEEN ALONE: the coordinator sees this site's reply as it is"
            if exchange.alone
            else "aggregated: the coordinator adds it to the others' replies, and uses the sum or mean alone"
        )
    )
    return [
        f'  {i}. "{exchange.name}" ({exchange.kind}), {often}',
        f"     comes in: {comes}",
        f"     goes out: {_shape(exchange.shape)}, {in_bytes(exchange.up)}{exchange.compressed}",
        *(f"     {line}" for line in exchange.beside),
        f"     {seen}",
    ]


def _shape(shape: str) -> str:
    """The shapes of a reply as numbers.

    >>> _shape("(3) + () + (2, 4) + 2 more")
    '3 numbers and one number and 2 x 4 numbers and 2 more arrays'
    """

    def said(part: str) -> str:
        sizes = part.strip("()").replace(", ", " x ").strip(",")
        return f"{part} arrays" if part.endswith(" more") else f"{sizes} numbers" if sizes else "one number"

    return " and ".join(map(said, shape.split(" + ")))


def _memory(plan: Plan) -> list[str]:
    kept = plan.made.carry
    leaves = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in jax.tree.leaves((kept.memory, kept.client))]
    if not leaves:
        return ["From round to round stays here: nothing."]
    size = in_bytes(ledger.nbytes(leaves))
    return [f"From round to round stays here: {_shape(ledger.shape_of(leaves))}, {size}."]


def _evaluation(opened: Opened) -> list[str]:
    if len(opened.plans) < 3:
        return ["Evaluation: none."]
    names = ", ".join(f'"{name}"' for name in opened.plans[2].made.carry.state)
    return [
        f"Evaluation, of every client between rounds: goes out: {names}, one number each. The coordinator's process "
        "receives this site's own numbers; unless every site's policy has evaluation = \"own\", its results show "
        "means, and quantiles only where five clients or more reply.",
    ]
