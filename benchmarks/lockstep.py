"""Time the lock-step engine: python benchmarks/lockstep.py.

The sites are of unequal size and run in this process. For each case: the seconds to the end of the first round, with
compilation, and the time of a later exchange without the sites' own computing.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery.engines.engine import Job
from rookery.engines.federation.site import Site


def _data(sizes: list[int], width: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"a": rng.normal(size=(n, width)), "t": rng.normal(size=n)} for n in sizes]


def _fit(y: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((batch["a"] @ y - batch["t"]) ** 2)


def _cases() -> dict[str, Job]:
    single = rk.SingleLevel(_fit)
    many = rk.Clients(upper=_data(list(range(10, 50, 2)), 8))
    ridge = rk.Bilevel(
        upper=lambda x, y, b: _fit(y, b), lower=lambda x, y, b: _fit(y, b) + 0.1 * jnp.sum(jnp.exp(x) * y**2)
    )
    few = _data([12, 20, 31, 8, 45, 27, 16, 38], 8)
    both, zeros = rk.Clients(lower=few, upper=few[::-1]), jnp.zeros(8)
    nested = rk.FedNest(lower_rounds=2, lower_local_steps=3, neumann_terms=20, hessian_step="auto", batch_size=4)
    return {
        "FedSVRG, 20 sites": Job(single, many, rk.FedSVRG(local_steps=3, batch_size=4), (zeros, ()), 20),
        "FedNest, 8 sites, N = 20": Job(ridge, both, nested, (zeros, zeros), 8),
    }


def main() -> None:
    """Time every case."""
    computing = [0.0]
    compute = Site._compute

    def timed(self: Site, *given: object) -> None:
        begin = time.perf_counter()
        compute(self, *given)  # type: ignore[arg-type]
        computing[0] += time.perf_counter() - begin

    Site._compute = timed  # type: ignore[method-assign]
    for name, job in _cases().items():
        begin = time.perf_counter()
        session = rk.Federation().open(job)
        session.init()
        session.advance(1)
        first = time.perf_counter() - begin
        computing[0], begin = 0.0, time.perf_counter()
        costs = session.advance(5)
        seconds = time.perf_counter() - begin - computing[0]
        exchanges = sum(entry.count for cost in costs for entry in cost.exchanges.values())
        print(f"{name}: first round after {first:.1f} s; then {1e3 * seconds / exchanges:.2f} ms an exchange")


if __name__ == "__main__":
    main()
