"""A site: one's own data, which take part in a federation over a network and stay where they are."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rookery.base.arguments import kind_of
from rookery.data.clients import Clients
from rookery.engines.federation.agreement import declared
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
    """What a site brings to a run.

    Arguments:
        problem, init, evaluate_client: as `solve` takes them, the same at the coordinator and at every site.
        data: the site's own: {"lower": rows, "upper": rows, "test": rows, "center": rows}, those that there are, each a
            pytree of arrays whose leading axis counts samples; and "replace", as in `Clients`.
        own: names that a coordinator's method or channel may refer to: classes, and `algorithm` or `channel` for what
            can't be described in words, such as an optimizer.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f'A site\'s data are {kind_of(data)}; give {{"lower": rows, "upper": rows}}.')
    known = ("lower", "upper", "test", "center", "replace")
    strange = [name for name in data if name not in known]
    if strange:
        raise ValueError(f"A site's data have {strange[0]!r}; there are: {', '.join(known)}.")
    each: dict[str, Any] = {name: rows if name in ("center", "replace") else [rows] for name, rows in data.items()}
    brings = described(problem, init, evaluate_client)
    agreed = declared(problem, evaluate_client)
    return replace(brings, data=Clients(**each), names=own or {}, declared=agreed)


def described(problem: Problem, init: Any, evaluate_client: Evaluate | None = None) -> Study:
    """The same without data."""
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
    """Take part in a run, until the coordinator says that it is over.

    Arguments:
        address: where the coordinator listens: "host:port".
        name: this site's.
        brings: see `study`.
        kit: its folder of certificates, made by `rookery federation init`. None: without, on this machine alone.
        folder: where it keeps what it remembers from round to round, and finds it again after a restart.
        guard, fitted: see `Responder`.
        enough: whether it has seen enough, and leaves.
        tell: told what happens to the connection.
        patience: the seconds without a connection after which it gives up; None: never.
        allow_other_study: whether it takes part though the coordinator's study differs from its own; it is told.
    """
    hooks = {word: hook for word, hook in {"guard": guard, "fitted": fitted}.items() if hook is not None}
    responder = Responder(name, brings, folder, **hooks, allow_other_study=allow_other_study)
    own = kit if isinstance(kit, Kit) or kit is None else load_kit(Path(kit), address)
    grpc_site.join(responder.handle, lambda: responder.done or enough(), name, address, own, tell, patience=patience)
    return responder
