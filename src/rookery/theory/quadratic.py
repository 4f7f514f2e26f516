"""The constants of quadratic tasks."""

from typing import Any

import numpy as np

from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task
from rookery.theory.fednest import Constants


def quadratic_constants(task: Task, radius: float | None = None) -> Constants:
    """Return the constants of a `quadratic` task, each the worst over its clients.

    A quadratic's gradient and the noise of its Hessian products are not bounded over the whole space: ℓ_{f,0}, σ_f and
    σ_{g,1} are bounds on a ball around the start. On quadratics, where ℓ_{g,2} = 0, no hyperparameter depends on them.

    Arguments:
        task: made by `rk.tasks.quadratic`, or with data of the same names.
        radius: the radius of the ball; None: twice the distance from the start to the solution.
    """
    start = np.concatenate([np.asarray(part, float) for part in task.init])
    if radius is None:
        closed = solution(task)
        minimisers = np.atleast_2d(closed.y(closed.x))  # one y, or one for each client
        radius = 2 * max(float(np.linalg.norm(np.concatenate([closed.x, y]) - start)) for y in minimisers)
    clients: list[tuple[float, dict[str, Any]]] = []
    for low, up in zip(_clients_rows(task.clients.lower), _clients_rows(task.clients.upper), strict=True):
        blank = np.zeros((len(low["A"]), low["B"].shape[2], low["B"].shape[2]))
        g = np.block([[blank, -low["B"].swapaxes(1, 2)], [-low["B"], low["A"]]])
        g_shift = np.concatenate([np.zeros(blank.shape[:2]), low["b"]], axis=1)
        f = np.block([[up["D"], up["E"]], [up["E"].swapaxes(1, 2), up["C"]]])
        f_shift = np.concatenate([up["d"], up["c"]], axis=1)
        l_f1 = _norm(f.mean(axis=0))
        values = {
            "l_f0": np.linalg.norm(f.mean(axis=0) @ start - f_shift.mean(axis=0)) + l_f1 * radius,
            "l_f1": l_f1,
            "l_g1": _norm(g.mean(axis=0)),
            "sigma_f": _spread(f, f_shift, start, radius),
            "sigma_g1": _spread(g, g_shift, start, radius),
            "sigma_g2": _root_mean_square([_norm(sample) for sample in g - g.mean(axis=0)]),
        }
        clients.append((np.linalg.eigvalsh(low["A"].mean(axis=0))[0], values))
    largest = {name: float(max(values[name] for _, values in clients)) for name in clients[0][1]}
    return Constants(mu_g=float(min(mu for mu, _ in clients)), **largest)


def _clients_rows(source: Any) -> list[dict[str, np.ndarray]]:
    cuts = np.asarray(source.offsets)[1:]
    split = {name: np.split(np.asarray(rows, float), cuts) for name, rows in source.rows.items()}
    return [{name: parts[i] for name, parts in split.items()} for i in range(len(source.sizes))]


def _spread(hessians: np.ndarray, shifts: np.ndarray, start: np.ndarray, radius: float) -> float:
    """Bound the standard deviation of the samples' gradients Hz − s for z in the ball."""
    away, off = hessians - hessians.mean(axis=0), shifts - shifts.mean(axis=0)
    return _root_mean_square(
        [np.linalg.norm(h @ start - s) + _norm(h) * radius for h, s in zip(away, off, strict=True)]
    )


def _norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))


def _root_mean_square(values: list[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
