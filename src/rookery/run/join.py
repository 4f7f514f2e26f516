"""`join`: take part in a federation over a network with a site's own data."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rookery.base.arguments import kind_of
from rookery.data.clients import Clients
from rookery.engines.federation.agreement import declared
from rookery.engines.federation.heads import Receipts
from rookery.engines.federation.kits import Kit, load_kit
from rookery.engines.federation.responder import Responder, Study
from rookery.engines.federation.transports import grpc_site
from rookery.problems.problems import Problem
from rookery.problems.variables import adapt
from rookery.run.evaluation import Evaluate, measuring


def study(
    problem: Problem,
    init: Any,
    data: Mapping[str, Any],
    evaluate_client: Evaluate | None = None,
    own: Mapping[str, Any] | None = None,
) -> Study:
    """Describe a site's part of a run.

    Arguments:
        problem, init, evaluate_client: as `solve` takes them, the same at the coordinator and at every site.
        data: the site's data, {"lower": rows, "upper": rows, "test": rows, "center": rows}, some or all of them, each a
            pytree of arrays whose leading axis counts samples; and "replace", as in `Clients`.
        own: names that a coordinator's method or channel may refer to: classes, and `algorithm` or `channel` for what
            a message cannot describe, such as an optimizer.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f'data must be a dict of rows, such as {{"lower": rows, "upper": rows}}; got {kind_of(data)}.')
    known = ("lower", "upper", "test", "center", "replace")
    unknown = [name for name in data if name not in known]
    if unknown:
        raise ValueError(f"data must have keys among {', '.join(known)}; got {unknown[0]!r}.")
    lists: dict[str, Any] = {name: rows if name in ("center", "replace") else [rows] for name, rows in data.items()}
    brings = described(problem, init, evaluate_client)
    agreed = declared(problem, evaluate_client)
    return replace(brings, data=Clients(**lists), names=own or {}, declared=agreed)


def described(problem: Problem, init: Any, evaluate_client: Evaluate | None = None) -> Study:
    """Describe a site's part of a run without its data."""
    models = adapt(problem, init)
    return Study(models.problem, models.init, None, measuring(models, evaluate_client))  # type: ignore[arg-type]


def join(
    address: str,
    name: str,
    brings: Study,
    *,
    kit: str | Path | Kit | None = None,
    folder: str | Path | None = None,
    guard: Any = None,
    fitted: Any = None,
    enough: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = print,
    patience: float | None = None,
    allow_other_study: bool = False,
) -> Responder:
    """Take part in a run until the coordinator ends it.

    Arguments:
        address: where the coordinator listens: "host:port".
        name: this site's name.
        brings: see `study`.
        kit: its folder of certificates, made by `rookery federation init`. None: no certificates, only on this machine.
        folder: where it saves its memory from round to round, to continue after a restart.
        guard, fitted: see `Responder`.
        enough: called between requests; the site leaves when it returns True.
        tell: called with a line about each change of the connection.
        patience: seconds without a connection after which it gives up; None: never.
        allow_other_study: take part even if the coordinator's study differs from its own, with a message.
    """
    hooks = {word: hook for word, hook in {"guard": guard, "fitted": fitted}.items() if hook is not None}
    responder = Responder(name, brings, folder, **hooks, allow_other_study=allow_other_study)
    own = kit if isinstance(kit, Kit) or kit is None else load_kit(Path(kit), address)
    done, log, more = lambda: responder.done or enough(), getattr(guard, "audit", None), dict[str, Any]()
    if log is not None and log.path is not None and own is not None:
        log.kit, more = own, {"receipts": Receipts(log, tell)}
    grpc_site.join(responder.handle, done, name, address, own, tell, patience=patience, **more)
    return responder
