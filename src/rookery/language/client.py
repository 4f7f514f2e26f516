"""The client inside `fed.map`: its data, the oracles on them, loops, and counts of its work."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from rookery.base import draws, jaxprs, tree
from rookery.base.arguments import check_counts
from rookery.data.clients import Clients
from rookery.data.rows import Batch, Chunks, Count, Rows
from rookery.language import ledger, means
from rookery.language.epochs import Epochs
from rookery.language.ledger import WORK
from rookery.language.loops import fixed_loop, rarely, stepwise
from rookery.language.means import Data
from rookery.language.records import Block, Drawn, Records
from rookery.problems.problems import Problem, call

C = TypeVar("C")

_RANDOM_LOSS = 0x6C6F7373  # separates a loss's keys from those of the minibatches


class Client:
    """One client inside `fed.map`: its data, the oracles on them, and a loop that counts its work.

    The oracles are named as in the papers and evaluated at (x, y) on a batch: `f`, `f_x`, `f_y` of the upper loss; `g`,
    `g_x`, `g_y` of the lower loss; the products `g_yy(…, v)` = ∇²_y g · v and `g_xy(…, v)` = ∇_x⟨∇_y g, v⟩, which never
    form a Hessian. A compositional problem's inner function has `r` and `r_x(…, v)` = ∇r(x)ᵀv. A single-level problem
    has `losses`, sample by sample, on batches of `samples`.
    """

    def __init__(
        self, problem: Problem, clients: Clients, row: Count | None, identity: Count, debug: bool = False,
        products: bool = False, records: Records | None = None,
    ) -> None:  # fmt: skip
        self._debug, self._products = debug, products  # see trace.Setting
        self._records = records  # for oracles that are private for each record
        self._key: Array | None = None  # for data taken without a key
        self.problem = problem
        self.id = identity
        self._counts: list[Count] = [0] * len(WORK)  # of work outside loops, or in one turn of a loop
        self._looped: Any = None  # of work in loops, as wide numbers
        self.sample_by_sample: set[str] = set()  # the losses that were evaluated row by row
        if row is None:  # the centre, whose data are those of the upper level
            self._views = {"upper": clients.view("center", 0)}
        else:
            self._views = {"lower": clients.view("lower", row), "upper": clients.view("upper", row)}
            if clients.test is not None:
                self._views["test"] = clients.view("test", row)
        self._origin = (clients, row)
        self._bounds: list[tuple[Array, int]] = []  # numbers of steps, each with an upper bound
        self._wholes: dict[str, Data] = {}
        self._replace = clients.replace

    def with_key(self, key: Array) -> "Client":
        """The same client, with a key for data taken without one."""
        client = copy(self)
        client._key = key
        return client

    # The data.

    def lower(
        self, key: Array | None = None, size: int | None = None, step: Count = 0, seen: Rows | None = None
    ) -> Data:
        """The step-th minibatch of the lower data, in an order that the key determines; all data if size is None.

        `seen`, from `self.seen(x)`, replaces the data in problems that have features.
        """
        return self._draw("lower", key, size, step, seen)

    def upper(self, key: Array | None = None, size: int | None = None, step: Count = 0) -> Data:
        """The step-th minibatch of the upper data; see `lower`."""
        return self._draw("upper", key, size, step, None)

    def test(self) -> Data:
        """All test data, which no method sees."""
        if "test" not in self._views:
            raise ValueError("client.test(): the clients have no test data. Give rk.Clients(..., test=[...]).")
        return self._keyed(self._all("test"), None, 0)

    def samples(self, key: Array | None = None, size: int | None = None, step: Count = 0) -> Batch:
        """A minibatch of the upper data for methods that weight single samples: in one piece, with their places."""
        self._refuse_records("samples")
        view = self._views["upper"]
        batch = view.at_once() if size is None else view.draw(_required(key), size, step, self._replace)
        self._count("samples_upper", means.count_of(batch))
        return self._keyed(batch, key, step)

    @property
    def places(self) -> Bool[Array, " widest"]:
        """Whether the client has a sample, for each place of the upper data: as many as the largest client has."""
        self._refuse_records("places")
        view = self._views["upper"]
        return jnp.arange(view.widest) < view.size

    def _all(self, level: str) -> Data:
        """All data of a level. `loop` calls it first, so that they are taken outside its body."""
        if level not in self._wholes:
            self._wholes[level] = self._views[level].all()
        return self._wholes[level]

    def _draw(
        self, level: Literal["lower", "upper"], key: Array | None, size: int | None, step: Count, seen: Any
    ) -> Data:
        view, records = self._views[level], self._records
        if records is not None:
            if size is not None:
                check_counts(**{f"client.{level}: size": size})
            drawn = records.all(view, level) if size is None else records.minibatch(view, level, size, key, step)
            self._count(f"samples_{level}", drawn.expected)  # how many were drawn stays here
            return self._keyed(drawn, key, step)
        if size is not None:
            check_counts(**{f"client.{level}: size": size})
            batch: Data = view.draw(_required(key), size, step, self._replace, seen)
        elif seen is not None:
            whole = self._all(level)
            assert isinstance(whole, Batch)
            batch = Batch(seen, whole.mask, seen=True)
        else:
            batch = self._all(level)
        self._count(f"samples_{level}", means.count_of(batch))
        return self._keyed(batch, key, step)

    def _keyed(self, batch: Any, key: Array | None, step: Count) -> Any:
        """The batch with a key for losses, if one of them is random."""
        if not self.problem.random:
            return batch
        stream = jax.random.fold_in(_required(self._key if key is None else key), _RANDOM_LOSS)
        of_batch = jax.random.fold_in(stream, step)
        if isinstance(batch, Drawn):
            return replace(batch, key=of_batch)
        if isinstance(batch, Batch):
            return batch._replace(key=of_batch)
        return batch._replace(get=lambda i: batch.get(i)._replace(key=jax.random.fold_in(of_batch, i)))

    def seen(self, x: tree.Tree, uses: int | None = None) -> Rows | None:
        """The features of all lower data at x. They are constant while only y moves, so worth computing once.

        Returns None if the problem has no features, if fewer samples than a whole data set will be used (`uses`), or if
        the clients' sizes differ so much that padding would waste the work.
        """
        if self._records is not None:
            return None
        whole = self._all("lower")
        if self.problem.features is None or isinstance(whole, Chunks):
            return None
        if uses is not None and uses < self._views["lower"].widest:
            return None
        return self.problem.features(x, whole.rows)

    def steps(self, local_steps: Any, key: Array, size: int | None, level: Literal["lower", "upper"]) -> Count:
        """This client's number of local steps, from an int, a range (low, high), `Epochs`, or an entry per client."""
        if isinstance(local_steps, int):
            return local_steps
        if isinstance(local_steps, tuple):
            low, high = local_steps
            return self._at_most(high, draws.integers(key, (), low, high + 1))
        if isinstance(local_steps, Epochs):
            most, count = local_steps.steps(size, self._views[level])
            return count if isinstance(count, int) else self._at_most(most, count)
        return jnp.asarray(local_steps)[self.id]

    def _at_most(self, most: int, count: Array) -> Array:
        """Note a bound on a count, with which a loop of that length can draw ahead, and return the count."""
        self._bounds.append((count, most))
        return count

    # The oracles.

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
        matrix product forward and one back instead of two, and writes x's gradient once.
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

    def r(self, x: tree.Tree, batch: Data) -> tree.Tree:
        """The value of the inner function. Like f and g, it counts by its samples only."""
        return self._mean("r", self._inner, batch, lambda r: r(x), Block("r"))

    def r_x(self, x: tree.Tree, batch: Data, v: tree.Tree) -> tree.Tree:
        """∇r(x)ᵀv."""
        self._count("products")
        return self._mean("r", self._inner, batch, lambda r: jax.vjp(r, x)[1](v)[0], Block("r_x", v))

    def r_and_pullback(self, x: tree.Tree, batch: Data) -> tuple[tree.Tree, Callable[[tree.Tree], tree.Tree]]:
        """r(x), and v ↦ ∇r(x)ᵀv, which does not evaluate r again (unless the data come in pieces)."""
        if isinstance(batch, Chunks | Drawn):
            return self.r(x, batch), lambda v: self.r_x(x, batch, v)
        value, pullback = jax.vjp(lambda x: self.r(x, batch), x)

        def product(v: tree.Tree) -> tree.Tree:
            self._count("products")
            return pullback(v)[0]

        return value, product

    def r_and_jacobian(self, x: tree.Tree, batch: Data) -> tuple[tree.Tree, tree.Tree]:
        """r(x) and ∇r(x), a tree like x with a leading axis for the d entries of r. It costs d products."""
        if isinstance(batch, Drawn):
            entries = lambda r: lambda x: ravel_pytree(r(x))[0]
            both = lambda r: (r(x), jax.jacrev(entries(r))(x))
            value, jacobian = self._mean("r", self._inner, batch, both, Block("r"), Block("r_x"))
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

    @property
    def _inner(self) -> Callable[..., Any]:
        return lambda x, rows, key: call(self.problem.inner, x, rows, key=key)  # type: ignore[union-attr]

    def _lower_loss(self, batch: Data) -> Callable[..., Any]:
        whole = self._lower_in_x()
        seen = isinstance(batch, Batch) and batch.seen
        return self.problem.g_seen if seen else whole  # type: ignore[union-attr]

    def _lower_in_x(self) -> Callable[..., Any]:
        """The lower loss on rows, as a function of x and y."""
        if not hasattr(self.problem, "g"):
            raise TypeError(f"A {type(self.problem).__name__} problem has no lower level g; use client.f_x.")
        return self.problem.g

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"A client has no {name!r}. Its oracles are {', '.join(_ORACLES)}; its data are lower, upper, samples and "
            "test; and it has loop, when, steps, mean and id."
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

    def _refuse_records(self, what: str) -> None:
        if self._records is not None:
            raise ValueError(
                f"A method must use only means over samples in a run that is private for each record; this one uses "
                f"client.{what}, single samples."
            )

    # Loops and counting.

    def loop(
        self, n: Any, body: Callable[[Any, C], C], carry: C, before: int = 0, go_on: Callable[[C], Any] | None = None,
        most: int | None = None,
    ) -> C:  # fmt: skip
        """Compute carry = body(i, carry) for i = 0, …, n − before − 1 on this client, and count the work.

        n may differ by client. `before` is the number of steps taken before the loop. With `go_on` the loop ends as
        soon as go_on(carry) is false. `most`: a bound on n, if n is drawn: the account of a private run needs it.
        """
        bound, most = most, n if isinstance(n, int) else next((m for count, m in self._bounds if count is n), None)
        bound = most if bound is None else bound
        count, most = n - before, None if most is None else most - before
        if most is not None and most <= 0:
            return carry
        for level in self._views if self._records is None else ():
            self._all(level)
        outside = self._counts, self._looped
        turn = jaxprs.LoopBody(lambda i, carry: self._one_turn(body, i, carry, bound), carry)
        self._counts, self._looped = outside
        carry = turn.carry
        if self._debug:
            carry, done = stepwise(turn, count, before, go_on, carry)
            self._looped = done if self._looped is None else ledger.add(self._looped, done)
            return carry
        per_turn = None if go_on is not None else turn.constants_of_aux()  # the work of a turn, if all do the same
        if per_turn is not None:
            drawn = turn.before(most)
            carry = fixed_loop(count, lambda i, carry: turn(i, carry, drawn(i))[0], carry)
            done = ledger.times(per_turn, jnp.maximum(count, 0))
        else:

            def step(i: Any, state: tuple[C, Array]) -> tuple[C, Array]:
                carry, added = turn(i, state[0], drawn(i))
                return carry, ledger.add(state[1], added)

            start = (carry, jnp.zeros((2, len(WORK)), jnp.uint32))
            if go_on is None:
                drawn = turn.before(most)
                carry, done = fixed_loop(count, step, start)
            else:
                drawn = lambda i: []
                more = lambda s: (s[0] < count) & go_on(s[1][0])
                _, (carry, done) = jax.lax.while_loop(more, lambda s: (s[0] + 1, step(*s)), (jnp.int32(0), start))
        self._looped = done if self._looped is None else ledger.add(self._looped, done)
        return carry

    def _one_turn(self, body: Callable[[Any, C], C], i: Any, carry: C, most: int | None) -> tuple[C, Array]:
        self._counts, self._looped = [0] * len(WORK), None
        if self._records is None:
            carry = body(i, carry)
            return carry, self.counts
        before = self._records.enter(i, most)
        carry = body(i, carry)
        self._records.leave(before)
        return carry, self.counts

    def when(self, condition: Any, compute: Callable[["Client"], C], otherwise: C) -> C:
        """Return compute(client) if the condition holds, else `otherwise`: for work that is rare and long.

        Vectorised over clients, a plain `lax.cond` computes both branches, so that every client does the work. Here the
        clients for which the condition holds do it one by one, and the others cost nothing. `compute` takes its data
        from the client that it is given.
        """
        clients, row = self._origin

        def both() -> tuple[C, Array]:
            client = Client(self.problem, clients, row, self.id, self._debug, self._products, self._records)
            value = compute(client)
            self.sample_by_sample |= client.sample_by_sample
            return value, client.counts

        start = (otherwise, jnp.zeros((2, len(WORK)), jnp.uint32))
        value, work = rarely(condition, both, start, self._products)
        self._looped = work if self._looped is None else ledger.add(self._looped, work)
        return value

    @property
    def counts(self) -> ledger.Wide:
        """The work of this client so far, in the order of WORK, as wide numbers."""
        counts = ledger.wide_row(self._counts)
        return counts if self._looped is None else ledger.add(counts, self._looped)

    @property
    def work(self) -> Int[Array, " 4"]:
        """The same counts as plain integers, below 2³¹."""
        return self.counts[0].astype(jnp.int32)

    def _count(self, what: str, amount: Count = 1) -> None:
        self._counts[WORK.index(what)] += amount


_ORACLES = (
    "f", "f_x", "f_y", "f_x_and_y", "g", "g_x", "g_y", "g_x_and_y", "g_yy", "g_xy", "g_y_and_products", "f_and_g", "r",
    "r_x", "r_and_pullback", "r_and_jacobian", "losses", "losses_and_pullback",
)  # fmt: skip


def _required(key: Array | None) -> Array:
    if key is None:
        raise ValueError("A minibatch, or a batch for a random loss, is drawn by a key. Give a key.")
    return key


def _real(value: Any) -> Any:
    """The value as real numbers, which can be averaged."""
    value = jnp.asarray(value)
    return value if jnp.issubdtype(value.dtype, jnp.inexact) else value.astype(float)
