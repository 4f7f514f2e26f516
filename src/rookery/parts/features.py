"""Features of the clients' lower data at a fixed x, computed once per round."""

from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import Fed, PerClient


def seen(fed: Fed, x: tree.Tree, key: Array, uses: int | None = None) -> PerClient | None:
    """Return each client's features (see `Client.seen`), to be passed to later maps; None if the problem has none."""
    return None if fed.problem.features is None else fed.map(lambda c, k: c.seen(x, uses), key)
