"""The client inside `fed.map`: its data, the oracles on them, loops, and counts of its work."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from rookery.base import draws, jaxprs, tree
from rookery.base.arguments import check_counts
from rookery.data.clients import Clients
from rookery.data.rows import Batch, Chunks, Count, Rows
from rookery.language import ledger, means
from rookery.language.epochs import Epochs
from rookery.language.ledger import WORK
from rookery.language.loops import fixed_loop, rarely, stepwise
from rookery.language.means import Data
from rookery.language.oracles import ORACLES, Oracles
from rookery.language.records import Drawn, Records
from rookery.problems.problems import Problem

C = TypeVar("C")

_RANDOM_LOSS = 0x6C6F7373  # separates a loss's keys from those of the minibatches


class Client(Oracles):
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
        super().__init__(problem, records)
        self._debug, self._products = debug, products  # see trace.Setting
        self._key: Array | None = None  # for data taken without a key
        self.id = identity
        self._looped: Any = None  # of work in loops, as wide numbers
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
        """The same client, with a key for random losses on data that are taken without a key."""
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
        """Whether the client has a sample at each place of the upper data; the largest client fills all places."""
        self._refuse_records("places")
        view = self._views["upper"]
        return jnp.arange(view.widest) < view.size

    def _all(self, level: str) -> Data:
        """All data of a level. `loop` calls this first, so that the data are taken outside its body."""
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
        after = lambda bound: None if bound is None else bound - before
        count, most, bound = n - before, after(most), after(bound)
        if most is not None and most <= 0:
            return carry
        for level in self._views if self._records is None else ():
            self._all(level)
        outside = self._counts, self._looped
        turn = jaxprs.LoopBody(lambda i, carry: self._one_turn(body, i, carry, bound), carry)
        every = None if self._debug else self._known  # the counts of every turn, if tracing tells
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
            if every is not None and isinstance(count, int):
                known = [a + count * b for a, b in zip(self._counts, every, strict=True) if isinstance(a, int)]
                if len(known) == len(WORK) and max(known) < 2**31:  # else they are counted in wide numbers
                    self._counts = [*known]
                    return carry
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

    @property
    def _known(self) -> list[int] | None:
        """The counts so far as Python integers; None if they depend on values."""
        known = self._looped is None and all(isinstance(count, int) for count in self._counts)
        return cast(list[int], self._counts) if known else None

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"A client has no {name!r}. Its oracles are {', '.join(ORACLES)}; its data are lower, upper, samples and "
            "test; and it has loop, when, steps, mean and id."
        )


def _required(key: Array | None) -> Array:
    if key is None:
        raise ValueError("A minibatch, or a batch for a random loss, needs a key; got None. Give a key.")
    return key
