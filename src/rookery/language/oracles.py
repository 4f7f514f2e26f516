"""The oracles of a client: values, gradients and products of the problem's functions on its data."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from rookery.base import tree
from rookery.data.rows import Batch, Chunks, Count, Rows
from rookery.language import means
from rookery.language.ledger import WORK
from rookery.language.means import Data
from rookery.language.records import Block, Drawn, Records
from rookery.problems.functions import call
from rookery.problems.problems import Problem

C = TypeVar("C")


class Oracles:
    """What a client computes from its data, counted; see `Client`."""

    def __init__(self, problem: Problem, records: Records | None) -> None:
        self.problem = problem
        self._records = records  # for oracles that are private for each record
        self._counts: list[Count] = [0] * len(WORK)  # of work outside loops, or in one turn of a loop
        self.sample_by_sample: set[str] = set()  # the losses that were evaluated row by row

    def mean(self, function: Callable[[Rows], C], batch: Data) -> C:
        """Evaluate function(rows), a number or a tree of numbers that is a mean over its rows, on a batch.

        If the clients' sizes differ, it is evaluated row by row, without the rows of padding.
        """
        one = lambda rows, key: jax.tree.map(_real, function(rows))
        return self._mean("mean", one, batch, lambda mean: mean(), Block("mean"))

    def f(self, x: tree.Tree, y: tree.Tree, batch: Data) -> Float[Array, ""]:
        """The upper loss. It can't be differentiated: its derivatives are separate oracles, which are counted."""
        return means.fixed_value("f", self._mean("f", self.problem.f, batch, lambda f: f(x, y), Block("f")))

    def g(self, x: tree.Tree, y: tree.Tree, batch: Data) -> Float[Array, ""]:
        """The lower loss. It can't be differentiated: its derivatives are separate oracles, which are counted."""
        return means.fixed_value("g", self._mean("g", self._lower_loss(batch), batch, lambda g: g(x, y), Block("g")))

    def f_x(self, x: tree.Tree, y: tree.Tree, batch: Data) -> tree.Tree:
        """∇_x f."""
        self._count("gradients")
        return self._mean("f", self.problem.f, batch, lambda f: jax.grad(f)(x, y), Block("f_x"))

    def f_y(self, x: tree.Tree, y: tree.Tree, batch: Data) -> tree.Tree:
        """∇_y f."""
        self._count("gradients")
        return self._mean("f", self.problem.f, batch, lambda f: jax.grad(f, 1)(x, y), Block("f_y"))

    def f_x_and_y(self, x: tree.Tree, y: tree.Tree, batch: Data) -> tuple[tree.Tree, tree.Tree]:
        """∇_x f and ∇_y f on one batch, in one evaluation."""
        self._count("gradients")
        both = Block("f_x"), Block("f_y")
        return self._mean("f", self.problem.f, batch, lambda f: jax.grad(f, (0, 1))(x, y), *both)

    def g_y(self, x: tree.Tree, y: tree.Tree, batch: Data) -> tree.Tree:
        """∇_y g."""
        self._count("gradients")
        return self._mean("g", self._lower_loss(batch), batch, lambda g: jax.grad(g, 1)(x, y), Block("g_y"))

    def g_x(self, x: tree.Tree, y: tree.Tree, batch: Data) -> tree.Tree:
        """∇_x g. The batch must not come from `seen`, whose features are constant in x."""
        self._count("gradients")
        return self._mean("g", self._lower_in_x(), batch, lambda g: jax.grad(g)(x, y), Block("g_x"))

    def g_x_and_y(self, x: tree.Tree, y: tree.Tree, batch: Data) -> tuple[tree.Tree, tree.Tree]:
        """∇_x g and ∇_y g on one batch, in one evaluation."""
        self._count("gradients")
        both = Block("g_x"), Block("g_y")
        return self._mean("g", self._lower_in_x(), batch, lambda g: jax.grad(g, (0, 1))(x, y), *both)

    def g_yy(self, x: tree.Tree, y: tree.Tree, batch: Data, v: tree.Tree) -> tree.Tree:
        """∇²_y g · v."""
        self._count("products")

        def product(g: Callable[..., Any]) -> tree.Tree:
            return jax.jvp(lambda y: jax.grad(g, 1)(x, y), (y,), (v,))[1]

        return self._mean("g", self._lower_loss(batch), batch, product, Block("g_yy", v))

    def g_xy(self, x: tree.Tree, y: tree.Tree, batch: Data, v: tree.Tree) -> tree.Tree:
        """∇²_xy g · v = ∇_x⟨∇_y g(x, y), v⟩. The batch must not come from `seen`, whose features are constant in x."""
        self._count("products")

        def product(g: Callable[..., Any]) -> tree.Tree:
            return jax.grad(lambda x: jax.jvp(lambda y: g(x, y), (y,), (v,))[1])(x)

        return self._mean("g", self._lower_in_x(), batch, product, Block("g_xy", v))

    def g_y_and_products(
        self, x: tree.Tree, y: tree.Tree, batch: Data, v: tree.Tree
    ) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
        """∇_y g, ∇²_y g · v and ∇²_xy g · v on one batch, in one evaluation: ∇g and its derivative along (0, v)."""
        self._count("gradients")
        self._count("products", 2)

        def all_three(g: Callable[..., Any]) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
            (_, g_y), (g_xy, g_yy) = jax.jvp(lambda y: jax.grad(g, (0, 1))(x, y), (y,), (v,))
            return g_y, g_yy, g_xy

        blocks = Block("g_y"), Block("g_yy", v), Block("g_xy", v)
        return self._mean("g", self._lower_in_x(), batch, all_three, *blocks)

    def f_and_g(
        self, x: tree.Tree, y: tree.Tree, v: tree.Tree, upper: Data, lower: Data
    ) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
        """∇_x f − ∇²_xy g · v, ∇_y g and ∇²_y g · v − ∇_y f, on a batch of each level.

        Small batches of one kind go through the problem's features together, if it has any. A network then needs one
        matrix product forward and one backward instead of two each, and writes x's gradient once.
        """
        if not means.share_features(self.problem, x, upper, lower):
            f_x, f_y = self.f_x_and_y(x, y, upper)
            g_y, g_yy, g_xy = self.g_y_and_products(x, y, lower, v)
            return tree.sub(f_x, g_xy), g_y, tree.sub(g_yy, f_y)
        self._count("gradients", 2)
        self._count("products", 2)
        problem: Any = self.problem
        rows = jax.tree.map(lambda *both: jnp.concatenate(both), upper.rows, lower.rows)
        count = means.count_of(upper)

        def difference(x: tree.Tree, y: tree.Tree, w: tree.Tree) -> Any:  # f(x, y) − ⟨∇_y g(x, w), v⟩, and ∇_y g
            seen = problem.features(x, rows)
            of_f, of_g = (jax.tree.map(lambda a: a[cut], seen) for cut in (slice(count), slice(count, None)))
            g_y = jax.grad(problem.g_seen, 1)(x, w, of_g)
            pairs = zip(*map(jax.tree.leaves, (g_y, v)), strict=True)
            return problem.f_seen(x, y, of_f) - sum(jnp.sum(a * b) for a, b in pairs), g_y

        (d_x, f_y, minus_g_yy), g_y = jax.grad(difference, (0, 1, 2), has_aux=True)(x, y, y)
        return d_x, g_y, tree.scale(-1, tree.add(minus_g_yy, f_y))

    def r(self, x: tree.Tree, batch: Data, level: int = 0) -> tree.Tree:
        """The value of the inner function. Like f and g, it counts as samples, not as a gradient.

        A `MultiLevel` problem has several inner functions: `level` is the number of one, from 0, and x its argument.
        """
        return self._mean("r", self._inner(level), batch, lambda r: r(x), Block("r"))

    def r_x(self, x: tree.Tree, batch: Data, v: tree.Tree, level: int = 0) -> tree.Tree:
        """∇r(x)ᵀv."""
        self._count("products")
        return self._mean("r", self._inner(level), batch, lambda r: jax.vjp(r, x)[1](v)[0], Block("r_x", v))

    def r_and_pullback(
        self, x: tree.Tree, batch: Data, level: int = 0
    ) -> tuple[tree.Tree, Callable[[tree.Tree], tree.Tree]]:
        """r(x), and v ↦ ∇r(x)ᵀv, which does not evaluate r again (unless the data come in pieces)."""
        if isinstance(batch, Chunks | Drawn):
            return self.r(x, batch, level), lambda v: self.r_x(x, batch, v, level)
        value, pullback = jax.vjp(lambda x: self.r(x, batch, level), x)

        def product(v: tree.Tree) -> tree.Tree:
            self._count("products")
            return pullback(v)[0]

        return value, product

    def r_and_jacobian(self, x: tree.Tree, batch: Data) -> tuple[tree.Tree, tree.Tree]:
        """r(x) and ∇r(x), a tree like x with a leading axis for the d entries of r. It costs d products."""
        if isinstance(batch, Drawn):
            entries = lambda r: lambda x: ravel_pytree(r(x))[0]
            both = lambda r: (r(x), jax.jacrev(entries(r))(x))
            value, jacobian = self._mean("r", self._inner(0), batch, both, Block("r"), Block("r_x"))
            self._count("products", ravel_pytree(value)[0].size)
            return value, jacobian
        value, product = self.r_and_pullback(x, batch)
        flat, like_value = ravel_pytree(value)
        self._count("products", flat.size - 1)
        return value, jax.vmap(lambda row: product(like_value(row)))(jnp.eye(flat.size, dtype=flat.dtype))

    def losses(self, x: tree.Tree, batch: Batch) -> Float[Array, " rows"]:
        """The loss of each sample. Entries of padding are meaningless: see the batch's `mask`."""
        self._refuse_records("losses")
        self.sample_by_sample.add("f")
        return means.row_by_row(lambda *z: self.problem.f(x, (), *z), batch, "f" in self.problem.random)

    def losses_and_pullback(self, x: tree.Tree, batch: Batch) -> tuple[Array, Callable[[Array], tree.Tree]]:
        """The losses, and w ↦ Σ w_i ∇ℓ_i(x) over all rows: one backward pass, without evaluating the losses again."""
        losses, pullback = jax.vjp(lambda x: self.losses(x, batch), x)

        def weighted(w: Float[Array, " rows"]) -> tree.Tree:
            self._count("gradients")
            return pullback(w.astype(losses.dtype))[0]

        return losses, weighted

    def _inner(self, level: int) -> Callable[..., Any]:
        return lambda x, rows, key: call(self.problem.chain[level], x, rows, key=key)  # type: ignore[union-attr]

    def _lower_loss(self, batch: Data) -> Callable[..., Any]:
        whole = self._lower_in_x()
        seen = isinstance(batch, Batch) and batch.seen
        return self.problem.g_seen if seen else whole  # type: ignore[union-attr]

    def _lower_in_x(self) -> Callable[..., Any]:
        """The lower loss on rows, as a function of x and y."""
        if not hasattr(self.problem, "g"):
            raise TypeError(f"A {type(self.problem).__name__} problem has no lower level g; use client.f_x.")
        return self.problem.g

    def _count(self, what: str, amount: Count = 1) -> None:
        self._counts[WORK.index(what)] += amount

    def _refuse_records(self, what: str) -> None:
        if self._records is not None:
            raise ValueError(
                f"A method must use only means over samples in a run that is private for each record; this one uses "
                f"client.{what}, single samples."
            )

    def _mean(
        self, name: str, loss: Callable[..., Any], batch: Data, of: Callable[[Callable[..., Any]], C], *blocks: Block
    ) -> C:
        """See `means.evaluate`. `name`: the loss's name. `blocks`: for `Records.mean`."""
        if isinstance(batch, Drawn):
            return self._released(name, loss, batch, of, blocks)
        if not isinstance(batch, Batch | Chunks):
            raise TypeError(
                "A client's oracles must be given a batch such as client.upper(key, size); got a value of type "
                f"{type(batch).__name__}."
            )
        if means.is_row_by_row(batch):
            self.sample_by_sample.add(name)
        return means.evaluate(loss, batch, name in self.problem.random, of)

    def _released(
        self, name: str, loss: Callable[..., Any], drawn: Drawn, of: Callable[..., Any], blocks: tuple[Block, ...]
    ) -> Any:
        """The mean over records, private for each; the loss's terms without data are added as they are."""
        assert self._records is not None
        self.sample_by_sample.add(name)
        free = None if name in ("mean", "r") else self.problem.free(name)
        if free is not None:  # `loss` is that of the problem
            loss = getattr(self.problem.without_penalty, name)
        random = name in self.problem.random
        one = lambda row, key: of(lambda *z: loss(*z, row, key if random else None))
        value = self._records.mean(drawn, one, blocks)
        return value if free is None else tree.add(value, of(free))


ORACLES = (
    "f", "f_x", "f_y", "f_x_and_y", "g", "g_x", "g_y", "g_x_and_y", "g_yy", "g_xy", "g_y_and_products", "f_and_g", "r",
    "r_x", "r_and_pullback", "r_and_jacobian", "losses", "losses_and_pullback",
)  # fmt: skip


def _real(value: Any) -> Any:
    """The value as real numbers, which can be averaged."""
    value = jnp.asarray(value)
    return value if jnp.issubdtype(value.dtype, jnp.inexact) else value.astype(float)
