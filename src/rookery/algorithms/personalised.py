"""Baselines for weighted nodes: single-level methods with a model for each client, and training at the centre only."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import AtLeastOne, BatchSize, Bookkeeping, Client, Fed, Positive, Share, Step, Steps
from rookery.parts import local_svrg
from rookery.parts.local import descend, sgd
from rookery.parts.state import State
from rookery.problems.problems import SingleLevel


def _local(c: Client, key: Array, x: tree.Tree, step: Any, local_steps: Steps, batch_size: int | None) -> tree.Tree:
    """FedAvg's local steps from x."""
    gradient = lambda x, batch: c.f_x(x, (), batch)
    return descend(c, gradient, x, key, level="upper", step=step, local_steps=local_steps, batch_size=batch_size)


@dataclass(frozen=True)
class _Personalised:
    """Methods in which each client remembers a model of its own."""

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        return State(x)

    def memory(self, x: tree.Tree, y: tuple[()]) -> tree.Tree:
        """A client's memory: its own model, at first x."""
        return x


@dataclass(frozen=True)
class Ditto(_Personalised):
    """FedAvg, together with a model v_k of each client that stays near the common one.

    Ditto solves single-level problems: w minimises mean F_k, and v_k minimises F_k(v) + λ/2‖v − w‖². `Run.x` is w, and
    `Run.memory` holds the v_k, which start at w^0.

    In round t (Alg. 2) each client of the cohort takes r steps w_k ← w_k − η_g ∇F_k(w_k) from w^t, and s steps
    v_k ← v_k − η_l(∇F_k(v_k) + λ(v_k − w^t)) from its last v_k. Then w^(t+1) is the mean of the w_k.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; the mean has the
    clients' weights; the two runs of steps use separate minibatches.

    Exchanges per round: 1, which carries only w_k.

    Reference: Li, Hu, Beirami and Smith, Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.
    """

    step: Step = 0.01  # η_g
    local_steps: Steps = 10  # r
    personal_step: Step = 0.01  # η_l
    personal_steps: AtLeastOne = 25  # s
    proximal: Positive = 0.1  # λ
    batch_size: BatchSize = None  # None: all the client's data

    def round(self, fed: Fed, state: State, key: Array) -> State:
        def local(c: Client, k: Array, v_k: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
            common, order = jax.random.split(k)

            def direction(v: tree.Tree, i: Any) -> tree.Tree:
                pull = tree.scale(self.proximal, tree.sub(v, state.x))
                return tree.add(c.f_x(v, (), c.upper(order, self.batch_size, i)), pull)

            v_k = sgd(c, direction, v_k, self.personal_step, self.personal_steps)
            return _local(c, common, state.x, self.step, self.local_steps, self.batch_size), v_k

        return State(fed.problem.project_upper(fed.mean(fed.map_state(local, key), name="x", around=state.x)))


@dataclass(frozen=True)
class PFedMe(_Personalised):
    """Descent on the Moreau envelopes of the clients' losses, whose minimisers are the clients' models.

    pFedMe solves single-level problems as min over w of mean_k min over θ of F_k(θ) + λ/2‖θ − w‖². `Run.x` is w, and
    `Run.memory` holds the θ_k.

    In round t (Alg. 1) each client of the cohort starts at w_k = w^t and, R times, draws a minibatch, finds
    θ_k ≈ argmin of its loss + λ/2‖θ − w_k‖², and steps w_k ← w_k − ηλ(w_k − θ_k). Then w^(t+1) = (1 − β)w^t + β·mean
    w_k.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; the mean has the
    clients' weights; only the cohort works, whereas in the paper all clients work and some of their results are used.
    θ_k comes from at most `inner_steps` gradient steps of size `inner_step` on one minibatch. They start at w^t the
    first time and then at the last θ_k, which is our choice, and end when the gradient's norm is at most λδ. If the
    loss is convex, θ_k is then within δ of the minimiser.

    Exchanges per round: 1.

    Reference: T. Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.
    """

    step: Step = 0.01  # η
    local_steps: Steps = 10  # R
    proximal: Positive = 15.0  # λ
    server_step: Step = 1.0  # β
    accuracy: Positive = 0.005  # δ
    inner_step: Step = 0.05  # of the gradient steps to θ_k; below 2/(λ + the loss's smoothness)
    inner_steps: AtLeastOne = 20  # their number, at most
    batch_size: BatchSize = None  # None: all the client's data

    def _attain(self, c: Client, theta: tree.Tree, w: tree.Tree, batch: Any) -> tree.Tree:
        """Return θ near the minimiser of the loss on the batch + λ/2‖θ − w‖²."""

        def descend(_: Any, carry: tuple[tree.Tree, Any]) -> tuple[tree.Tree, Any]:
            theta, _ = carry
            gradient = tree.add(c.f_x(theta, (), batch), tree.scale(self.proximal, tree.sub(theta, w)))
            far = tree.norm(gradient) > self.proximal * self.accuracy
            moved = tree.step(theta, self.inner_step, gradient)
            return jax.tree.map(lambda new, old: jnp.where(far, new, old), moved, theta), far

        return c.loop(self.inner_steps, descend, (theta, jnp.array(True)), go_on=lambda carry: carry[1])[0]

    def round(self, fed: Fed, state: State, key: Array) -> State:
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
class FineTuned(_Personalised):
    """FedAvg, together with a copy of its model that each client trains further on its own data.

    The method solves single-level problems. `Run.x` is FedAvg's model, and `Run.memory` holds the clients' copies.

    Each round begins with a round of FedAvg. Then each client of the cohort sets v_k to the new model and takes s steps
    v_k ← v_k − η_l ∇F_k(v_k). The copies can thus be inspected after every round. They never enter the common model. A
    client that is not in the cohort keeps its last copy.

    Departures from the paper: fine-tuning has no paper of its own; here it happens in every round, not only after the
    last.

    Exchanges per round: 1. The new model is sent to the cohort immediately, not with the next round's broadcast.

    Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017;
    fine-tuned as in Wang et al., Federated Evaluation of On-device Personalization, 2019.
    """

    step: Step = 0.01  # η
    local_steps: Steps = 10  # τ_i
    personal_step: Step = 0.01  # η_l
    personal_steps: AtLeastOne = 25  # s
    batch_size: BatchSize = None  # None: all the client's data

    def round(self, fed: Fed, state: State, key: Array) -> State:
        k1, k2 = jax.random.split(key)
        local = lambda c, k: _local(c, k, state.x, self.step, self.local_steps, self.batch_size)
        x = fed.problem.project_upper(fed.mean(fed.map(local, k1), name="x", around=state.x))

        def tune(c: Client, k: Array, _: tree.Tree) -> tuple[tuple[()], tree.Tree]:
            return (), _local(c, k, x, self.personal_step, self.personal_steps, self.batch_size)

        fed.map_state(tune, k2)
        return State(x)


class AloneState(NamedTuple):
    """The model, and SVRG's reference point at the centre."""

    x: tree.Tree
    y: tuple[()]
    reference: local_svrg.Reference


@dataclass(frozen=True)
class LocalTrain:
    """SVRG on the centre's data only: what the centre can achieve without the clients.

    The method solves single-level problems, min L_0(x) with L_0 the loss on `Clients(..., center=rows)`.

    Each round takes `local_steps` steps x ← x − γ(∇L_{0,B}(x) − ∇L_{0,B}(r) + ∇L_0(r)). With probability q, r then
    becomes the x from before the step. These are the steps of `LocalSVRG` with one node. ∇L_0(r) is computed only when
    r has moved.

    Departures from the paper: the reference point moves at random times (the paper says only SVRG, and gives q);
    minibatches are drawn without replacement within a round unless `Clients(replace=True)`.

    Exchanges per round: 0, or 1 if a client holds the centre's data.

    Reference: Local-train in Federated Learning on Adaptively Weighted Nodes by Bilevel Optimization, Section 5.
    """

    step: Step = 0.01  # γ
    local_steps: AtLeastOne = 10  # τ
    refresh: Share = 0.02  # q
    batch_size: BatchSize = None  # |B|; None: all the centre's data

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)
    needs: ClassVar[tuple[str, ...]] = ("center",)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> AloneState:
        return AloneState(x, (), local_svrg.start(x))

    def round(self, fed: Fed, state: AloneState, key: Array) -> AloneState:
        loss, pace = local_svrg.upper_loss(self.batch_size), local_svrg.pace(self.step, self.refresh, "last", None)

        def steps(c: Client, k: Array) -> tuple[Any, local_svrg.Reference]:
            return local_svrg.steps(c, loss, (state.x, None), state.reference, k, pace, self.local_steps, 0, 0)

        point, gradient, _ = state.reference
        around = (state.x, None), (point, gradient, None)
        marks = None, (None, None, Bookkeeping("whether the reference point moved", 1.0))
        (x, _), reference = fed.center(steps, key, name="x", around=around, bookkeeping=marks)
        return AloneState(fed.problem.project_upper(x), (), reference)
