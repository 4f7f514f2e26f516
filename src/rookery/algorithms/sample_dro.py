"""Distributionally robust training over samples: FastDRO (Levy et al., NeurIPS 2020), and primal-dual SGD."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rookery.base import tree
from rookery.data.rows import Batch
from rookery.language.fed import BatchSize, Bookkeeping, Client, Fed, Positive, Step
from rookery.problems.problems import SingleLevel
from rookery.problems.risks import chi2_ball_risk, chi2_risk, cvar_risk, kl_risk


def _shares(batch: Batch, losses: Float[Array, " rows"]) -> Float[Array, " rows"]:
    """Each row's share in the batch's mean: 1/n, or 0 for padding."""
    marked = jnp.ones_like(losses) if batch.mask is None else batch.mask.astype(losses.dtype)
    return marked / jnp.sum(marked)


class FastState(NamedTuple):
    """The variable; and the clients' weights, if the worst case is over all clients' batches."""

    x: tree.Tree
    y: tuple[()] = ()
    shares: Any = None


@dataclass(frozen=True)
class FastDRO:
    """SGD on the worst case of a minibatch: the samples' weights p are the worst ones for the batch's losses.

    FastDRO solves single-level problems whose loss on a batch of one sample is that sample's loss. For a large batch it
    minimises the maximum over p of Σ p_i ℓ_i(x), where
        "cvar": every p_i ≤ 1/(αm), which gives the mean over the worst samples, a share α of them (`size`);
        "chi2": ½ mean (m p_i − 1)² ≤ ρ (`size`); or, with a `penalty`, minus λ·½ mean (m p_i − 1)²;
        "kl": minus λ Σ p_i log(m p_i) (`penalty`).

    In each round every client draws a batch, the server computes p from all their losses in closed form, and x ← x − η
    Σ p_i ∇ℓ_i(x), with p held fixed. With `pool=False` each client takes the worst case of its own batch, and the
    server takes the mean of their gradients. That saves an exchange and changes the objective to the mean over clients
    of the worst case within each. A smaller batch has a milder worst case: with n samples the bias falls with n, and
    CVaR needs αn of at least a few.

    Departures from the paper: clients in parallel; a sample of client k has the weight w_k/n_k before the worst case
    (w_k is the client's weight, n_k its batch), whereas the paper has equal weights; plain SGD, whereas the published
    code adds momentum and weight decay and returns an average. Of the paper's other estimators, the dual one is a
    single-level problem in (x, level), which FedAvg solves (`rk.objectives.cvar`, and `chi2` with exact=True). The
    multilevel one has the same mean as the batch of its largest size and draws fewer samples; it is left out, because
    its batches change size from round to round, and each size would need its own program.

    Exchanges per round: 2, the losses (gathered, one number for each sample) and the direction; 1 with pool=False. At
    the start: 1 with pool=True, for the clients' weights. Over a network the pooled batches must have one size: set
    batch_size if clients differ.

    Example:
        >>> import jax.numpy as jnp, rookery as rk
        >>> problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
        >>> clients = rk.Clients(upper=[jnp.array([0.0, 0.1]), jnp.array([0.2, 1.0])])
        >>> run = rk.solve(problem, clients, rk.FastDRO(step=0.01, size=0.25), jnp.zeros(()), rounds=400)
        >>> round(float(run.x), 1)  # the worst quarter is one sample: half-way between the outermost two
        0.5

    Reference: Levy, Carmon, Duchi and Sidford, Large-Scale Methods for Distributionally Robust Optimization, 2020.
    """

    step: Step = 0.01  # η
    objective: Literal["cvar", "chi2", "kl"] = "cvar"
    size: Positive = 0.1  # α of CVaR, at most 1; ρ of χ²; not used with a penalty
    penalty: Positive | None = None  # λ of χ² and KL
    batch_size: BatchSize = None  # of one client; None: all its data
    pool: bool = True  # the worst case over all clients' batches together, or within each client's

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> FastState:
        """Start with the clients' weights, if the batches are pooled."""
        if self.objective == "kl" and self.penalty is None:
            raise ValueError("FastDRO: objective='kl' needs penalty, its λ; got None. Set penalty=….")
        if self.objective == "cvar" and self.penalty is not None:
            raise ValueError(
                "FastDRO: penalty must be left out with objective='cvar', which takes size, its α; got "
                f"{self.penalty!r}."
            )
        if not self.pool:
            return FastState(x)
        place = lambda c, k: jax.nn.one_hot(c.id, fed.n, dtype=jnp.result_type(*jax.tree.leaves(x)))
        mark = Bookkeeping("who it is", 1.0)
        return FastState(x, shares=fed.sum(fed.map(place, key), name="shares", bookkeeping=mark))

    def round(self, fed: Fed, state: FastState, key: Array) -> FastState:
        x = state.x
        if not self.pool:

            def direction(c: Client, k: Array) -> tree.Tree:
                batch = c.samples(k, self.batch_size)
                losses, weighted = c.losses_and_pullback(x, batch)
                return weighted(self.worst(losses, _shares(batch, losses)))

            return self._stepped(fed, state, fed.mean(fed.map(direction, key), name="direction"))

        def evaluate(c: Client, k: Array) -> tuple[Array, Array]:
            batch = c.samples(k, self.batch_size)
            losses = c.losses(x, batch)
            return losses, state.shares[c.id].astype(losses.dtype) * _shares(batch, losses)

        def weighted(c: Client, k: Array, p: Array) -> tree.Tree:
            return c.losses_and_pullback(x, c.samples(k, self.batch_size))[1](p)

        marks = (None, Bookkeeping("the samples' shares", most=1.0))
        losses, shares = fed.gather(fed.map(evaluate, key), name="losses", bookkeeping=marks)
        p = self.worst(losses.ravel(), (shares / jnp.sum(shares)).ravel()).reshape(losses.shape)
        parts = fed.map(weighted, key, fed.scatter(fed.cohort_size * p))  # the same key: the same batch
        return self._stepped(fed, state, fed.mean(parts, name="direction", weights=np.ones(fed.n)))

    def worst(self, losses: Float[Array, " m"], shares: Float[Array, " m"]) -> Float[Array, " m"]:
        """Return p for samples with these shares in the mean."""
        if self.objective == "kl":
            assert self.penalty is not None
            return kl_risk(losses, self.penalty, reference=shares).weights
        if self.objective == "cvar":
            share: Any = jnp.minimum(self.size, 1)
            return cvar_risk(losses, share, reference=shares).weights
        if self.penalty is not None:
            return chi2_risk(losses, self.penalty, reference=shares).weights
        return chi2_ball_risk(losses, self.size, reference=shares).weights

    def _stepped(self, fed: Fed, state: FastState, direction: tree.Tree) -> FastState:
        return state._replace(x=fed.problem.project_upper(tree.step(state.x, self.step, direction)))


class PrimalDualState(NamedTuple):
    """The variable, and the logarithm of the sum of the clients' weights."""

    x: tree.Tree
    y: tuple[()] = ()
    level: Any = None


@dataclass(frozen=True)
class PDSGD:
    """Primal-dual SGD over samples: descent on x, and mirror ascent on one weight for every sample of every client.

    PDSGD solves single-level problems whose loss on a batch of one sample is that sample's loss, as KL-regularised DRO:
    min over x, max over p of Σ p_i ℓ_i(x) − λ Σ p_i log(m p_i).

    With the ratio r_i = m p_i, every client keeps log r_i of its samples. A round, on a minibatch B of n_k of its m_k
    samples, updates both from the old values: x ← x − η mean_B r_i ∇ℓ_i(x), and log r_i ← (1 − γλ) log
    r_i + γ(m_k/n_k)ℓ_i(x)·1[i ∈ B], then normalised so that the mean of r over all samples is 1.

    Departures from the paper:
        uniform draws with the factor r_i, whereas the published code draws i ~ p. The mean is the same. The step on p
        is then unbiased, too, with the factor m_k/n_k that the code leaves out: its γ and λ are our γm_k/n_k and
        λn_k/m_k;
        clients: a sample of client k starts with the weight w_k/m_k instead of 1/m (w_k is the client's weight);
        the normaliser travels with the direction, since both steps start from the old values. A client stores log r_i
        plus the server's `level`, the logarithm of the product of the normalisers, so that clients that sit out are
        normalised with the others. The normaliser is then exactly 1 + Σ w_k (mean r new − mean r old) over the cohort;
        the classical method of this name (Xu 2020, an augmented Lagrangian for many constraints) is a different one.

    Exchanges per round: 1, of the direction and the weights' change.

    Reference: the baseline of this name in Qi et al., Stochastic Constrained DRO, 2022.
    """

    step: Step = 0.01  # η
    dual_step: Step = 0.01  # γ
    penalty: Positive = 1.0  # λ
    batch_size: BatchSize = None  # n_k; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)
    needs: ClassVar[tuple[str, ...]] = ("synchronous rounds",)  # the r_i of a round are normalised by one level

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> PrimalDualState:
        """Start at log r_i = 0 for every sample."""
        kind = jnp.result_type(*jax.tree.leaves(x))
        fed.map_state(lambda c, k, _: ((), jnp.zeros(len(c.places), kind)), key)
        return PrimalDualState(x, level=jnp.zeros((), kind))

    def round(self, fed: Fed, state: PrimalDualState, key: Array) -> PrimalDualState:
        x, level = state.x, state.level

        def both(c: Client, k: Array, stored: Array) -> tuple[tuple[tree.Tree, Array], Array]:
            here, batch = c.places, c.samples(k, self.batch_size)
            mean = lambda log_r: jnp.sum(jnp.exp(log_r), where=here) / jnp.sum(here)
            losses, weighted = c.losses_and_pullback(x, batch)
            shares = _shares(batch, losses)  # 1/n_k
            old = stored - level
            gains = jnp.zeros_like(old).at[batch.places].add(jnp.sum(here) * shares * losses)
            new = (1 - self.dual_step * self.penalty) * old + self.dual_step * gains
            return (weighted(shares * jnp.exp(old[batch.places])), mean(new) - mean(old)), new + level

        marks = (None, Bookkeeping("the change of the mean weight"))
        replies = fed.mean(fed.map_state(both, key), name="direction, weights", heard=True, bookkeeping=marks)
        (direction, change), heard = replies
        direction = tree.scale(fed.n / heard.replies * heard.weight, direction)  # Σ (n/P) w_k d_k
        grown = level + jnp.log1p(heard.weight * change)
        return PrimalDualState(fed.problem.project_upper(tree.step(x, self.step, direction)), level=grown)
