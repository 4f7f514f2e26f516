"""What an algorithm is written in: the client as seen from inside a map, the primitives, and what they count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from rookery import tree
from rookery.clients import Batch, Chunks, Clients, Count, Rows
from rookery.problems import Problem

C = TypeVar("C")
Data = Batch | Chunks
Schedule = Callable[[Count], Any]
if TYPE_CHECKING:
    Step = Any
else:
    Step = float | Schedule  # a number or a schedule, which is a number again inside a round
Steps = Any  # int | (low, high) | Epochs | one number for each client: see Client.steps

WORK = ("samples_upper", "samples_lower", "gradients", "products")  # what a client counts of its own work


@dataclass(frozen=True)
class Epochs:
    """A number of local steps given as passes over the client's data: τ_i = ⌈passes · size_i / batch⌉."""

    passes: float


class Client:
    """One client, from inside `fed.map`: its data, the oracles on them, and a loop that counts what is done.

    The oracles are named as in the papers, all at (x, y) on a batch: `f`, `f_x`, `f_y` of the upper loss; `g`, `g_y` of
    the lower one; `g_yy(…, v)` = ∇²_y g · v and `g_xy(…, v)` = ∇_x⟨∇_y g, v⟩, products that never form a Hessian.
    Of a compositional problem's inner function: `r`, and `r_x(…, v)` = ∇r(x)ᵀv. Of a single-level problem, sample by
    sample: `losses`, on batches of `samples`.
    """

    def __init__(
        self, problem: Problem, clients: Clients, place: Count | None, identity: Count, debug: bool = False
    ) -> None:
        self.problem = problem
        self.id = identity
        self._done: list[Count] = [0] * len(WORK)
        self._looped: Any = np.zeros(len(WORK), np.int32)
        if place is None:  # the centre, whose data serve the upper level
            self._views = {"upper": clients.view("center", 0)}
        else:
            self._views = {"lower": clients.view("lower", place), "upper": clients.view("upper", place)}
        self._where = (clients, place)
        self._all = {level: view.all() for level, view in self._views.items()}  # outside any local loop
        self._replace = clients.replace
        self._debug = debug

    # The data.

    def lower(self, key: Array, size: int | None = None, step: Count = 0, seen: Rows | None = None) -> Data:
        """The step-th minibatch of the lower data in the order that key stands for; all of the data if size is None.

        `seen`, from `self.seen(x)`, takes the place of the data in problems that have features.
        """
        return self._draw("lower", key, size, step, seen)

    def upper(self, key: Array, size: int | None = None, step: Count = 0) -> Data:
        """The same of the upper data."""
        return self._draw("upper", key, size, step, None)

    def samples(self, key: Array, size: int | None = None, step: Count = 0) -> Batch:
        """The same for methods that weigh the samples one by one: never in pieces, and the batch knows their places."""
        view = self._views["upper"]
        batch = view.at_once() if size is None else view.draw(key, size, step, self._replace)
        self._count("samples_upper", _samples(batch))
        return batch

    @property
    def places(self) -> Bool[Array, " widest"]:
        """Whether there is a sample, for each place of the upper data: as many as the largest client needs."""
        view = self._views["upper"]
        return jnp.arange(view.widest) < view.size

    def _draw(self, level: Literal["lower", "upper"], key: Array, size: int | None, step: Count, seen: Any) -> Data:
        view = self._views[level]
        if size is not None:
            batch: Data = view.draw(key, size, step, self._replace, seen)
        elif seen is not None:
            whole = self._all[level]
            assert isinstance(whole, Batch)
            batch = Batch(seen, whole.mask, seen=True)
        else:
            batch = self._all[level]
        self._count(f"samples_{level}", _samples(batch))
        return batch

    def seen(self, x: tree.Tree, uses: int | None = None) -> Rows | None:
        """What the losses see of all the lower data at x: constant while only y moves, so worth computing once.

        None if the problem has no features, if fewer than a whole data set of samples will be used (`uses`), or if the
        clients' sizes differ so much that padding would waste the work.
        """
        whole = self._all["lower"]
        if self.problem.features is None or isinstance(whole, Chunks):
            return None
        if uses is not None and uses < self._views["lower"].widest:
            return None
        return self.problem.features(x, whole.rows)

    def steps(self, local_steps: Steps, key: Array, size: int | None, level: Literal["lower", "upper"]) -> Count:
        """This client's number of local steps: an int; (low, high), drawn; `Epochs`; or an array with an entry each."""
        if isinstance(local_steps, int):
            return local_steps
        if isinstance(local_steps, tuple):
            low, high = local_steps
            return jax.random.randint(key, (), low, high + 1)
        if isinstance(local_steps, Epochs):
            view = self._views[level]
            if size is None:
                return -int(-local_steps.passes // 1)
            passes = local_steps.passes * jnp.asarray(view.size, jnp.float32) / jnp.minimum(size, view.size)
            if view.widest == view.narrowest:
                return int(-(-local_steps.passes * view.widest // min(size, view.widest)))
            return jnp.ceil(passes).astype(jnp.int32)
        return jnp.asarray(local_steps)[self.id]

    # The oracles.

    def f(self, x: tree.Tree, y: tree.Tree, batch: Data) -> Float[Array, ""]:
        """The upper loss."""
        return self._mean(self.problem.f, batch, lambda f: f(x, y))

    def g(self, x: tree.Tree, y: tree.Tree, batch: Data) -> Float[Array, ""]:
        """The lower loss."""
        return self._mean(self._lower_loss(batch), batch, lambda g: g(x, y))

    def f_x(self, x: tree.Tree, y: tree.Tree, batch: Data) -> tree.Tree:
        """∇_x f."""
        self._count("gradients")
        return self._mean(self.problem.f, batch, lambda f: jax.grad(f)(x, y))

    def f_y(self, x: tree.Tree, y: tree.Tree, batch: Data) -> tree.Tree:
        """∇_y f."""
        self._count("gradients")
        return self._mean(self.problem.f, batch, lambda f: jax.grad(f, 1)(x, y))

    def f_x_and_y(self, x: tree.Tree, y: tree.Tree, batch: Data) -> tuple[tree.Tree, tree.Tree]:
        """∇_x f and ∇_y f on one batch, in one evaluation."""
        self._count("gradients")
        return self._mean(self.problem.f, batch, lambda f: jax.grad(f, (0, 1))(x, y))

    def g_y(self, x: tree.Tree, y: tree.Tree, batch: Data) -> tree.Tree:
        """∇_y g."""
        self._count("gradients")
        return self._mean(self._lower_loss(batch), batch, lambda g: jax.grad(g, 1)(x, y))

    def g_yy(self, x: tree.Tree, y: tree.Tree, batch: Data, v: tree.Tree) -> tree.Tree:
        """∇²_y g · v."""
        self._count("products")

        def product(g: Callable[..., Any]) -> tree.Tree:
            return jax.jvp(lambda y: jax.grad(g, 1)(x, y), (y,), (v,))[1]

        return self._mean(self._lower_loss(batch), batch, product)

    def g_xy(self, x: tree.Tree, y: tree.Tree, batch: Data, v: tree.Tree) -> tree.Tree:
        """∇²_xy g · v = ∇_x⟨∇_y g(x, y), v⟩. The batch must not be one of `seen`: x moves."""
        self._count("products")

        def product(g: Callable[..., Any]) -> tree.Tree:
            return jax.grad(lambda x: jax.jvp(lambda y: g(x, y), (y,), (v,))[1])(x)

        return self._mean(self.problem.g, batch, product)  # type: ignore[union-attr]

    def g_y_and_products(
        self, x: tree.Tree, y: tree.Tree, batch: Data, v: tree.Tree
    ) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
        """∇_y g, ∇²_y g · v and ∇²_xy g · v on one batch, in one evaluation: ∇g and its derivative along (0, v)."""
        self._count("gradients")
        self._count("products", 2)

        def all_three(g: Callable[..., Any]) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
            (_, g_y), (g_xy, g_yy) = jax.jvp(lambda y: jax.grad(g, (0, 1))(x, y), (y,), (v,))
            return g_y, g_yy, g_xy

        return self._mean(self.problem.g, batch, all_three)  # type: ignore[union-attr]

    def r(self, x: tree.Tree, batch: Data) -> tree.Tree:
        """The inner function's value; a value alone counts by its samples, as those of f and g do."""
        return self._mean(self._inner, batch, lambda r: r(x))

    def r_x(self, x: tree.Tree, batch: Data, v: tree.Tree) -> tree.Tree:
        """∇r(x)ᵀv."""
        self._count("products")
        return self._mean(self._inner, batch, lambda r: jax.vjp(r, x)[1](v)[0])

    def r_and_pullback(self, x: tree.Tree, batch: Data) -> tuple[tree.Tree, Callable[[tree.Tree], tree.Tree]]:
        """r(x), and v ↦ ∇r(x)ᵀv without evaluating r again (unless the data come in pieces)."""
        if isinstance(batch, Chunks):
            return self.r(x, batch), lambda v: self.r_x(x, batch, v)
        value, pullback = jax.vjp(lambda x: self.r(x, batch), x)

        def product(v: tree.Tree) -> tree.Tree:
            self._count("products")
            return pullback(v)[0]

        return value, product

    def r_and_jacobian(self, x: tree.Tree, batch: Data) -> tuple[tree.Tree, tree.Tree]:
        """r(x) and ∇r(x): a tree like x with a leading axis for the d entries of r, which costs d products."""
        value, product = self.r_and_pullback(x, batch)
        flat, like_value = ravel_pytree(value)
        self._count("products", flat.size - 1)
        return value, jax.vmap(lambda row: product(like_value(row)))(jnp.eye(flat.size, dtype=flat.dtype))

    def losses(self, x: tree.Tree, batch: Batch) -> Float[Array, " rows"]:
        """The loss of each sample by itself; a row that is not marked has a loss, too, and it means nothing."""
        if getattr(getattr(self.problem, "loss", None), "whole_batches", False):
            raise ValueError(
                "This method weighs samples one by one, and the loss looks at a batch as a whole (batch normalisation, "
                "say): take a model whose loss is a mean over single samples."
            )
        return jax.vmap(lambda row: self.problem.f(x, (), jax.tree.map(lambda a: a[None], row)))(batch.rows)

    def losses_and_pullback(self, x: tree.Tree, batch: Batch) -> tuple[Array, Callable[[Array], tree.Tree]]:
        """The losses, and w ↦ Σ w_i ∇ℓ_i(x) over all rows, one backward pass without evaluating the losses again."""
        losses, pullback = jax.vjp(lambda x: self.losses(x, batch), x)

        def weighted(w: Float[Array, " rows"]) -> tree.Tree:
            self._count("gradients")
            return pullback(w.astype(losses.dtype))[0]

        return losses, weighted

    @property
    def _inner(self) -> Callable[..., Any]:
        return self.problem.inner  # type: ignore[union-attr]

    def _lower_loss(self, batch: Data) -> Callable[..., Any]:
        seen = isinstance(batch, Batch) and batch.seen
        return self.problem.g_seen if seen else self.problem.g  # type: ignore[union-attr]

    def _mean(self, loss: Callable[..., Any], batch: Data, of: Callable[[Callable[..., Any]], C]) -> C:
        """`of` the batch's mean loss; `of` is linear in it (a value, a gradient, a product)."""
        if isinstance(batch, Batch):
            if batch.mask is None:
                return of(lambda *z: loss(*z, batch.rows))
            _check_single_samples(self.problem)
            return _over(of(_sum_of_marked(loss, batch)), jnp.sum(batch.mask))
        _check_single_samples(self.problem)
        piece = lambda i: of(_sum_of_marked(loss, batch.get(i)))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(piece, 0))
        total = jax.lax.fori_loop(0, batch.pieces, lambda i, total: tree.add(total, piece(i)), zeros)
        return _over(total, batch.total)

    # Counting.

    def loop(
        self, n: Count, body: Callable[[Any, C], C], carry: C, before: int = 0, go_on: Callable[[C], Any] | None = None
    ) -> C:
        """n times carry = body(i, carry), on this client; n may differ by client. Work done inside is counted.

        With `go_on` it ends earlier, as soon as go_on(carry) does not hold. `before` is the number of steps taken
        before the loop, for the messages of a debugging run.
        """
        if self._debug:
            for i in range(int(n)):
                if go_on is not None and not go_on(carry):
                    break
                carry = body(i, carry)
                check_finite(carry, f"local step {before + i + 1} of {before + int(n)}")
            return carry
        done, looped, nothing = self._done, self._looped, np.zeros(len(WORK), np.int32)

        def step(i: Array, state: tuple[C, Array]) -> tuple[C, Array]:
            carry, work = state
            self._done, self._looped = [0] * len(WORK), nothing
            carry = body(i, carry)
            return carry, work + self.work

        start = (carry, jnp.asarray(nothing))
        if go_on is None:
            carry, work = jax.lax.fori_loop(0, n, step, start)
        else:
            more = lambda s: (s[0] < n) & go_on(s[1][0])
            _, (carry, work) = jax.lax.while_loop(more, lambda s: (s[0] + 1, step(*s)), (jnp.int32(0), start))
        self._done, self._looped = done, looped + work
        return carry

    def when(self, condition: Any, compute: Callable[["Client"], C], otherwise: C) -> C:
        """compute(client) where the condition holds, else `otherwise`: for work that is rare and long.

        A plain `lax.cond` becomes a choice between two computed values once clients are vectorised, so that all of them
        would do the work whenever one has to, or none. Here those for whom the condition holds do it one by one, and
        the others cost nothing. `compute` is given the client anew, and takes its data from there.
        """
        clients, place = self._where
        if self._debug and not condition:
            return otherwise

        def both() -> tuple[C, Array]:
            client = Client(self.problem, clients, place, self.id, self._debug)
            value = compute(client)
            return value, client.work

        nothing = jnp.zeros(len(WORK), jnp.int32)
        value, work = both() if self._debug else _rarely(condition, both, (otherwise, nothing))
        self._looped = self._looped + work
        return value

    @property
    def work(self) -> Int[Array, " 4"]:
        """What this client has done so far, in the order of WORK."""
        if all(isinstance(done, int) for done in self._done):
            return jnp.asarray(np.array(self._done, np.int32) + self._looped)
        return jnp.stack([jnp.asarray(done, jnp.int32) for done in self._done]) + self._looped

    def _count(self, what: str, amount: Count = 1) -> None:
        self._done[WORK.index(what)] += amount


def _rarely(condition: Any, compute: Callable[[], C], otherwise: C) -> C:
    """compute() if the condition holds, else `otherwise`; vectorised, one by one where it holds."""
    closed = jax.make_jaxpr(compute)()  # what it closes over becomes an argument, that a batching rule can see
    leaves, structure = jax.tree.flatten(otherwise)

    @jax.custom_batching.custom_vmap
    def choose(condition: Any, inputs: list[Any], otherwise: list[Any]) -> list[Any]:
        return jax.lax.cond(condition, lambda: jax.core.eval_jaxpr(closed.jaxpr, inputs), lambda: otherwise)

    @choose.def_vmap
    def one_by_one(size: int, batched: Any, condition: Any, inputs: list[Any], otherwise: list[Any]) -> Any:
        per_client = lambda a, own: a if own else jnp.broadcast_to(a, (size, *a.shape))
        holds = per_client(condition, batched[0])
        first = jnp.argsort(~holds)  # those for whom it holds, then the others

        def of_one(i: Array, values: list[Any]) -> list[Any]:
            j = first[i]
            own = [a[j] if per else a for a, per in zip(inputs, batched[1], strict=True)]
            new = jax.core.eval_jaxpr(closed.jaxpr, own)
            return [value.at[j].set(one) for value, one in zip(values, new, strict=True)]

        start = [per_client(a, own) for a, own in zip(otherwise, batched[2], strict=True)]
        return jax.lax.fori_loop(0, jnp.sum(holds), of_one, start), [True] * len(start)

    return jax.tree.unflatten(structure, choose(condition, closed.consts, leaves))


def _over(total: C, count: Int[Array, ""]) -> C:
    return jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), total)


def _samples(batch: Data) -> Count:
    if isinstance(batch, Chunks):
        return batch.total
    return jax.tree.leaves(batch.rows)[0].shape[0] if batch.mask is None else jnp.sum(batch.mask, dtype=jnp.int32)


def _check_single_samples(problem: Problem) -> None:
    """Refuse to take the samples one by one where the loss says that it looks at a batch as a whole."""
    if getattr(getattr(problem, "loss", None), "whole_batches", False):
        raise ValueError(
            "This loss looks at a batch as a whole (batch normalisation, say), and is no mean over single samples. "
            "Clients of unequal sizes, and those with fewer samples than batch_size, would be taken sample by sample: "
            "give all clients as many samples, and a batch_size that is not larger."
        )


def _sum_of_marked(loss: Callable[..., Any], batch: Batch) -> Callable[..., Any]:
    """The sum over the marked rows of the loss (or inner value) on each of them alone."""

    def total(*z: tree.Tree) -> Any:
        alone = jax.vmap(lambda row: loss(*z, jax.tree.map(lambda a: a[None], row)))(batch.rows)
        marked = lambda a: jnp.reshape(batch.mask, (-1,) + (1,) * (a.ndim - 1))  # type: ignore[arg-type]
        return jax.tree.map(lambda a: jnp.sum(a, axis=0, where=marked(a)), alone)

    return total


class NonFiniteError(FloatingPointError):
    """A value became infinite or not a number; the message says where."""


def check_finite(value: PyTree[Any], where: str) -> None:
    """Raise NonFiniteError if a number in value is not finite."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) and not bool(jnp.all(jnp.isfinite(leaf))):
            raise NonFiniteError(f"{where}: {tree.path_name(path)} is not finite")


class Exchange(NamedTuple):
    """An exchange as it was traced: what it is called, how it reduces, and what each client sends and is sent back."""

    order: int  # its place among the round's exchanges
    name: str
    kind: Literal["mean", "sum", "gather", "center", "finish"]
    shape: str
    reply_bytes: int
    result_bytes: int


def describe(value: PyTree[Any]) -> str:
    """The shapes in a value, for the list of exchanges: `(200, 10) + (10)`."""
    shapes = ["(" + ", ".join(map(str, leaf.shape)) + ")" for leaf in jax.tree.leaves(value)]
    return " + ".join(shapes) if len(shapes) <= 4 else f"{' + '.join(shapes[:3])} + {len(shapes) - 3} more"


class PerClient(Protocol):
    """A value that every client of the cohort has and nobody else sees: what `fed.map` gives."""


class Fed(Protocol):
    """The primitives, as an engine provides them to an algorithm's `init` and `round`."""

    problem: Any  # one of those that the algorithm says it solves
    n: int  # clients in the federation
    cohort_size: int  # P, clients in this round

    def map(self, fn: Callable[..., Any], key: Array, *values: PerClient | None) -> PerClient:
        """fn(client, key, *values) on every client of the cohort; `values` are the client's own of earlier maps."""

    def map_state(self, fn: Callable[..., Any], key: Array, *values: PerClient | None) -> PerClient:
        """The same, for fn(client, key, memory, *values) -> (value, memory), where memory stays with the client."""

    def mean(self, value: PerClient, name: str = "mean", weights: Array | None = None) -> Any:
        """One exchange: Σ p_i v_i / Σ p_i over the cohort; `weights`, one for each client, take the place of p."""

    def sum(self, value: PerClient, name: str = "sum") -> Any:
        """One exchange: Σ (n/P) p_i v_i over the cohort, unbiased for the sum over all clients."""

    def gather(self, value: PerClient, name: str = "gather") -> Any:
        """One exchange: the replies themselves, stacked; small, and not aggregated."""

    def center(self, fn: Callable[..., Any], key: Array, name: str = "center") -> Any:
        """fn(client, key) on the centre's data, which are `client.upper`; the result is then known to all.

        Where the server holds the data this is no exchange, and the result goes out with the next broadcast, as all
        results do. Where a client does, it is one, in which that client alone is asked. The centre's samples and
        oracles count as the clients' do.
        """

    def scatter(self, rows: Any) -> PerClient:
        """Row j of what the server holds, to the j-th client of the cohort. (Every client is sent all the rows.)"""

    def loop(self, n: Count, body: Callable[[Any, C], C], carry: C) -> C:
        """n times carry = body(i, carry), where the body exchanges."""

    def resample(self, key: Array, chances: Array | None = None) -> "Fed":
        """The same federation with a fresh cohort of the same size, for one exchange of its own.

        Drawn uniformly, without repetition; or, with each client's chance given, independently: a client that is drawn
        twice does its work once, and its reply counts twice.
        """


class Algorithm(Protocol):
    """An algorithm: a frozen record of hyperparameters with two pure methods.

    `init` makes the state from x and y; the state is a NamedTuple whose fields include x (and y). `round` takes it one
    round further. Methods whose clients remember something between rounds have a third, `memory(x, y)`: what a client
    remembers before its first round. (What has the shape of the client's data is first written by `init`'s map_state.)
    """

    solves: ClassVar[tuple[type, ...]]

    def init(self, fed: Fed, x: Any, y: Any, key: Array) -> Any:
        """The first state; may exchange, and then reaches every client."""

    def round(self, fed: Fed, state: Any, key: Array) -> Any:
        """The state after one more round."""
