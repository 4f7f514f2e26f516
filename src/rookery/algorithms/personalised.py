"""Single-level methods with a model for each client, and training alone: the rivals of learning whom to trust."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import AtLeastOne, BatchSize, Bookkeeping, Client, Fed, Positive, Share, Step, Steps
from rookery.parts import local_svrg
from rookery.parts.local import sgd
from rookery.problems.problems import SingleLevel


class State(NamedTuple):
    """The model of all; y is empty. The clients' own models are their memory."""

    x: tree.Tree
    y: tuple[()] = ()


def _local(c: Client, key: Array, x: tree.Tree, step: Any, local_steps: Steps, batch_size: int | None) -> tree.Tree:
    """FedAvg's local steps from x."""
    count, order = jax.random.split(key)
    steps = c.steps(local_steps, count, batch_size, "upper")
    return sgd(c, lambda x, v: c.f_x(x, (), c.upper(order, batch_size, v)), x, step, steps)


@dataclass(frozen=True)
class Ditto:
    """FedAvg, and beside it each client's own model v_k, which is held near the common one.

    Solves single-level problems: w minimises mean F_k, and v_k minimises F_k(v) + λ/2‖v − w‖². `Run.x` is w, and
    `Run.memory` holds the v_k.

    Round t (Alg. 2), on each client of the cohort: w_k ← w_k − η_g ∇F_k(w_k), r times from w^t;
    v_k ← v_k − η_l(∇F_k(v_k) + λ(v_k − w^t)), s times from the v_k of before; then w^(t+1) is the mean of the w_k. The
    v_k start at w^0.

    Departures: unverified, for the paper's algorithm box was not at hand; the mean has the clients' weights; the two
    runs of steps have minibatches of their own.
    Exchanges a round: 1, and it carries w_k alone.

    Reference: Li, Hu, Beirami and Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.
    """

    step: Step = 0.01  # η_g
    local_steps: Steps = 10  # r
    personal_step: Step = 0.01  # η_l
    personal_steps: AtLeastOne = 25  # s
    proximal: Positive = 0.1  # λ
    batch_size: BatchSize = None  # None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        """The start."""
        return State(x)

    def memory(self, x: tree.Tree, y: tuple[()]) -> tree.Tree:
        """What a client remembers: v_k, x at first."""
        return x

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Local steps on both models, then the mean of one."""

        def local(c: Client, k: Array, own: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
            common, order = jax.random.split(k)

            def direction(v: tree.Tree, i: Any) -> tree.Tree:
                pull = tree.scale(self.proximal, tree.sub(v, state.x))
                return tree.add(c.f_x(v, (), c.upper(order, self.batch_size, i)), pull)

            own = sgd(c, direction, own, self.personal_step, self.personal_steps)
            return _local(c, common, state.x, self.step, self.local_steps, self.batch_size), own

        return State(fed.problem.project_upper(fed.mean(fed.map_state(local, key), name="x", around=state.x)))


@dataclass(frozen=True)
class PFedMe:
    """Descent on the Moreau envelopes of the clients' losses; the points where these are attained are their models.

    Solves single-level problems, as min over w of mean_k min over θ of F_k(θ) + λ/2‖θ − w‖². `Run.x` is w, and
    `Run.memory` holds the θ_k.

    Round t (Alg. 1), on each client of the cohort, R times from w_k = w^t: a minibatch, θ_k ≈ argmin of its loss +
    λ/2‖θ − w_k‖², w_k ← w_k − ηλ(w_k − θ_k); then w^(t+1) = (1 − β)w^t + β·mean w_k.

    Departures: unverified, for the paper's algorithm box was not at hand; the mean has the clients' weights; only the
    cohort does local work, where the paper's clients all do and some are heard. θ_k comes from gradient steps of size
    `inner_step`, at most `inner_steps` of them, on one minibatch, the first time from w^t and then from the θ_k of
    before, as we remember its authors' code. They end where the gradient's norm is at most λδ: where the loss is
    convex, θ_k is then within δ of the minimiser.
    Exchanges a round: 1.

    Reference: T. Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.
    """

    step: Step = 0.01  # η
    local_steps: Steps = 10  # R
    proximal: Positive = 15.0  # λ
    server_step: Step = 1.0  # β
    accuracy: Positive = 0.005  # δ
    inner_step: Step = 0.05  # of the gradient steps to θ_k; below 2/(λ + the loss's smoothness)
    inner_steps: AtLeastOne = 20  # how many, at most
    batch_size: BatchSize = None  # None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        """The start."""
        return State(x)

    def memory(self, x: tree.Tree, y: tuple[()]) -> tree.Tree:
        """What a client remembers: θ_k, x at first."""
        return x

    def _attain(self, c: Client, theta: tree.Tree, w: tree.Tree, batch: Any) -> tree.Tree:
        """θ near the minimiser of the loss on the batch + λ/2‖θ − w‖²."""

        def descend(_: Any, carry: tuple[tree.Tree, Any]) -> tuple[tree.Tree, Any]:
            theta, _ = carry
            gradient = tree.add(c.f_x(theta, (), batch), tree.scale(self.proximal, tree.sub(theta, w)))
            far = tree.norm(gradient) > self.proximal * self.accuracy
            moved = tree.step(theta, self.inner_step, gradient)
            return jax.tree.map(lambda new, old: jnp.where(far, new, old), moved, theta), far

        return c.loop(self.inner_steps, descend, (theta, jnp.array(True)), go_on=lambda carry: carry[1])[0]

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """R local rounds, then the mean."""

        def local(c: Client, k: Array, _: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
            count, order = jax.random.split(k)

            def one(r: Any, carry: tuple[tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
                w, theta = carry
                theta = self._attain(c, theta, w, c.upper(order, self.batch_size, r))
                return tree.step(w, self.step * self.proximal, tree.sub(w, theta)), theta

            return c.loop(c.steps(self.local_steps, count, self.batch_size, "upper"), one, (state.x, state.x))

        mean = fed.mean(fed.map_state(local, key), name="x", around=state.x)
        return State(fed.problem.project_upper(tree.step(state.x, self.server_step, tree.sub(state.x, mean))))


@dataclass(frozen=True)
class FineTuned:
    """FedAvg, and of its model a copy that each client trains further on its own data.

    Solves single-level problems. `Run.x` is FedAvg's model, and `Run.memory` holds the clients' copies.

    Round: FedAvg's local steps and mean; then, on each client of the cohort, v_k ← the new model, and s times
    v_k ← v_k − η_l ∇F_k(v_k). So the copies can be looked at after every round, and never enter the common model. Who
    is not in the cohort keeps the copy of before.

    Departures: fine-tuning has no paper of its own; here it takes place in every round, not after the last one alone.
    Exchanges a round: 1. The new model is sent to the cohort at once, not with the next round's broadcast.

    Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017;
    fine-tuned as in Wang et al., Federated Evaluation of On-device Personalization, 2019.
    """

    step: Step = 0.01  # η
    local_steps: Steps = 10  # τ_i
    personal_step: Step = 0.01  # η_l
    personal_steps: AtLeastOne = 25  # s
    batch_size: BatchSize = None  # None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        """The start."""
        return State(x)

    def memory(self, x: tree.Tree, y: tuple[()]) -> tree.Tree:
        """What a client remembers: its copy, x at first."""
        return x

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Local steps, the mean, and the copies."""
        k1, k2 = jax.random.split(key)
        local = lambda c, k: _local(c, k, state.x, self.step, self.local_steps, self.batch_size)
        x = fed.problem.project_upper(fed.mean(fed.map(local, k1), name="x", around=state.x))

        def tune(c: Client, k: Array, _: tree.Tree) -> tuple[tuple[()], tree.Tree]:
            return (), _local(c, k, x, self.personal_step, self.personal_steps, self.batch_size)

        fed.map_state(tune, k2)
        return State(x)


class AloneState(NamedTuple):
    """The model, and what SVRG keeps at the centre."""

    x: tree.Tree
    y: tuple[()]
    reference: local_svrg.Reference


@dataclass(frozen=True)
class LocalTrain:
    """SVRG on the centre's data alone: what the centre can do without the others.

    Solves single-level problems, min L_0(x) with L_0 the loss on `Clients(..., center=rows)`.

    Round: `local_steps` times x ← x − γ(∇L_{0,B}(x) − ∇L_{0,B}(r) + ∇L_0(r)), where r ← x, the value before the step,
    with probability q: the steps of `LocalSVRG` with one node. ∇L_0(r) is computed when r has moved.

    Departures: SVRG with a reference point that moves at random times, where the paper says SVRG and gives q;
    minibatches without replacement within a round unless the clients say so.
    Exchanges a round: 0, and 1 where a client holds the centre's data.

    Reference: Local-train in Federated Learning on Adaptively Weighted Nodes by Bilevel Optimization, Section 5.
    """

    step: Step = 0.01  # γ
    local_steps: AtLeastOne = 10  # τ
    refresh: Share = 0.02  # q
    batch_size: BatchSize = None  # |B|; None: all the centre's data

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)
    needs: ClassVar[tuple[str, ...]] = ("center",)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> AloneState:
        """The start."""
        return AloneState(x, (), local_svrg.start(x))

    def round(self, fed: Fed, state: AloneState, key: Array) -> AloneState:
        """Steps at the centre."""
        loss, pace = local_svrg.upper_loss(self.batch_size), local_svrg.pace(self.step, self.refresh, "last", None)

        def steps(c: Client, k: Array) -> tuple[Any, local_svrg.Reference]:
            return local_svrg.steps(c, loss, (state.x, None), state.reference, k, pace, self.local_steps, 0, 0)

        point, gradient, _ = state.reference
        around = (state.x, None), (point, gradient, None)
        marks = None, (None, None, Bookkeeping("whether the reference point moved", 1.0))
        (x, _), reference = fed.center(steps, key, name="x", around=around, bookkeeping=marks)
        return AloneState(fed.problem.project_upper(x), (), reference)
