"""What the clients see of their lower data at a fixed x, where the problem has features: computed once for a round."""

from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import Fed, PerClient


def seen(fed: Fed, x: tree.Tree, key: Array, uses: int | None = None) -> PerClient | None:
    """Each client's own (see `Client.seen`), to be handed on to its maps; None without features."""
    return None if fed.problem.features is None else fed.map(lambda c, k: c.seen(x, uses), key)
