"""The hyperparameters of FedDRO and DS-FedDRO (Khanduri et al.): Theorems 4.3 and 5.2, orders of magnitude."""

import math
from typing import Any

from rookery.algorithms import DSFedDRO, FedDRO
from rookery.theory.fednest import CompositionalConstants


def feddro(constants: CompositionalConstants, steps: int, clients: int, c: float = 1.0, **others: Any) -> FedDRO:
    """Return FedDRO with the hyperparameters of Theorem 4.3: η = c√(K/T), β = 4B_g⁴L_f²η and I = T^{1/4}/K^{3/4}.

    Raises ValueError if T is so small that β > 1. (The theorem's T_th is in an appendix that we have not seen; this is
    the part of it that can be inferred.)

    Arguments:
        constants: the problem's constants; B_g is ℓ_{r,0} and L_f is ℓ_{f,1}.
        steps: T, the total number of local steps; a run has T/I rounds.
        clients: K.
        c: the factor of η.
        others: FedDRO's other hyperparameters (`batch_size`, …).

    Example:
        >>> method = feddro(CompositionalConstants(l_f0=1, l_f1=1, l_r0=1), steps=10_000, clients=4)
        >>> f"{method.step:.3f}, {method.momentum:.3f}, I = {method.local_steps}"
        '0.020, 0.080, I = 4'
    """
    ratio = 4 * constants.l_r0**4 * constants.l_f1**2
    eta = c * math.sqrt(clients / steps)
    if ratio * eta > 1:
        least = math.ceil(clients * (c * ratio) ** 2)
        raise ValueError(
            f"steps must be at least {least}, so that β = 4B_g⁴L_f²η ≤ 1; got {steps}, and β = {ratio * eta:.3g}. Take "
            "more steps or a smaller c."
        )
    settings: Any = {"step": eta, "momentum": ratio * eta, "local_steps": max(1, round(steps**0.25 / clients**0.75))}
    return FedDRO(**(settings | others))


def ds_feddro(
    steps: int, clients: int, c: float = 1.0, c_beta: float = 1.0, c_gamma: float = 1.0, **others: Any
) -> DSFedDRO:
    """Return DS-FedDRO with Theorem 5.2: η = c/√(IT), β = c_β·η, γ_x = √(KI), γ_y = c_γ·γ_x and I = √(T/K).

    Correction of the printed γ_x: the theorem has γ_x = O(√(K/T)), but then the steps of a whole run, (T/I)·γ_x·ηI, sum
    to at most K^{3/4}T^{−1/4}, and a long run does not leave its start. With √(KI), as in the two-sided FedAvg of Yang
    et al. (2021), γ_x·η is c√(K/T), the step of Theorem 4.3. A round then moves x by about c·∇Φ: c should be below
    1/L_Φ, and c·c_β·c_γ, the weight of the new value in y, at most 1.

    Arguments:
        steps: T, the total number of local steps; a run has T/I rounds.
        clients: K.
        c, c_beta, c_gamma: the factors of η, β and γ_y, which the theorem leaves open.
        others: DSFedDRO's other hyperparameters.
    """
    local = max(1, round(math.sqrt(steps / clients)))
    eta, gamma = c / math.sqrt(local * steps), math.sqrt(clients * local)
    settings: Any = {"step": eta, "momentum": c_beta * eta, "local_steps": local}
    settings |= {"server_step": gamma, "server_inner_step": c_gamma * gamma}
    return DSFedDRO(**(settings | others))
