"""The hyperparameters of the methods for adaptively weighted nodes (anonymous, under review).

Theorems 3 and 4, with (12), (17), (18), (51) and the constants of Lemma 4.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rookery.algorithms import WeightedNodesABA, WeightedNodesProx


@dataclass(frozen=True)
class WeightedConstants:
    """The constants of a weighted-nodes problem, Assumption 1. Each holds for every node."""

    mu: float  # μ: strong convexity of L_k
    l_0: float  # ℓ_0: Lipschitz constant of L_k, a bound on its gradient
    l_1: float  # ℓ_1: of ∇l, sample by sample
    radius: float  # R: the largest ‖θ(w)‖
    nodes: int  # K
    l_2: float = 0.0  # ℓ_2: of ∇²L_k

    @property
    def bend(self) -> float:
        """2ℓ_0ℓ_1/μ + ℓ_2ℓ_0²/μ², in (12) and (50)."""
        return 2 * self.l_0 * self.l_1 / self.mu + self.l_2 * self.l_0**2 / self.mu**2

    @property
    def l_F(self) -> float:
        """ℓ_F of (12), the Lipschitz constant of ∇F."""
        steep = self.l_0 / self.mu
        return self.bend * math.sqrt(self.nodes) * steep + self.nodes * self.l_1 * steep**2

    def gamma_0(self, tau: int, q: float) -> float:
        """γ_0 of (17), the longest step of Local-SVRG."""
        longest = min(3 / (80 * self.l_1), q / (4 * self.mu))
        if tau == 1:
            return longest
        drift = (tau - 1) * (6 * (tau - 1) + 8 + 16 / (1 - q))
        return min(longest, 1 / (self.l_1 * math.sqrt(5 * math.e) * drift))

    def error(self, tau: int, q: float) -> tuple[float, float]:
        """C_1(C_2 + C_3(τ−1)) and C_4(τ−1)² of Lemma 4, to which a hypergradient's error is proportional."""
        gamma, steep = self.gamma_0(tau, q) * self.l_1, self.l_0 / self.mu
        c_2 = 4 + 32 * gamma**2 / (3 * q)
        c_3 = 30 * math.e * gamma**3 * (2 + q) / q
        both = 2 * self.nodes * (self.l_0**2 + self.bend**2)  # (49) and (50), by ‖a + b‖² ≤ 2‖a‖² + 2‖b‖²
        c_1 = both * 2 / self.mu * max(self.radius, steep) ** 2
        c_4 = both * 45 * math.e / self.mu * self.l_1 * (self.l_1 / self.mu + 1) ** 2 * self.l_0**2
        return c_1 * (c_2 + c_3 * (tau - 1)), c_4 * (tau - 1) ** 2


def weighted_nodes(
    constants: WeightedConstants, rounds: int, sync_every: int = 1, refresh: float = 0.5, convex: bool = True,
    **others: Any,
) -> WeightedNodesABA | WeightedNodesProx:  # fmt: skip
    """Return the method for a convex F (Theorem 3: ABA) or any other (Theorem 4: Prox), with η = 1/(3ℓ_F).

    With τ = 1: γ = γ_0 and T_s = ln(C_1C_2(s+1)^p/γ_0)/(γ_0μ), where p is 4 for ABA and 2 for Prox. With τ > 1:
    γ = 1/M_s, with M_s = max{1/γ_0, (s+1)^{p/2}·√(C_1(C_2 + C_3(τ−1)) + C_4(τ−1)²)}, (18) and (51), and T_s = M_s
    ln(M_s³)/μ. Every round takes the T_s of the last round, which is the longest. Local-SVRG returns its average, and
    Prox a random iterate.

    Arguments:
        constants: the problem's constants.
        rounds: S.
        sync_every: τ.
        refresh: q; below 1 if τ > 1.
        convex: whether F is convex.
        others: the method's other hyperparameters (`batch_size`, …).

    Example:
        >>> constants = WeightedConstants(mu=1, l_0=1, l_1=1, radius=1, nodes=4)
        >>> method = weighted_nodes(constants, rounds=100)
        >>> f"{method.weight_step:.3f}, {method.model_step:.4f}, T = {method.steps}"
        '0.042, 0.0375, T = 733'
    """
    if sync_every > 1 and refresh >= 1:
        raise ValueError(f"refresh must be below 1 if sync_every > 1, because (17) has 16/(1 − q); got {refresh}.")
    gamma_0, power = constants.gamma_0(sync_every, refresh), 4 if convex else 2
    noise, drift = constants.error(sync_every, refresh)
    step: Any
    if sync_every == 1:
        step, steps = gamma_0, math.log(noise * rounds**power / gamma_0) / (gamma_0 * constants.mu)
    else:
        root = math.sqrt(noise + drift)
        step = lambda t: 1 / jnp.maximum(1 / gamma_0, (t + 1) ** (power // 2) * root)
        longest = max(1 / gamma_0, rounds ** (power / 2) * root)
        steps = longest * math.log(longest**3) / constants.mu
    settings = {"model_step": step, "linear_step": step, "weight_step": 1 / (3 * constants.l_F)}
    settings |= {"steps": math.ceil(steps), "sync_every": sync_every, "refresh": refresh}
    settings |= {"average": "theory", "strong_convexity": constants.mu}
    if convex:
        return WeightedNodesABA(**(settings | others))
    return WeightedNodesProx(**(settings | {"output": "random"} | others))
