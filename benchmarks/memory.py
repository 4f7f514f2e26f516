"""Measure the memory of a large cohort: FedAvg, 1,000 clients a round, 10 million parameters, in blocks of 8.

    python benchmarks/memory.py

Values that are only averaged are never held for the whole cohort: the replies would take 40 GB.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery.engines import engine
from rookery.engines.simulation import device as simulation

CLIENTS, WIDTH, BLOCK = 1000, 3162, 8


def main() -> None:
    """Compile a round and print the memory it needs; run it if there is an accelerator."""
    rng = np.random.default_rng(0)
    data = [{"a": rng.random((2, WIDTH), np.float32), "t": rng.random((2, WIDTH), np.float32)} for _ in range(CLIENTS)]
    problem = rk.SingleLevel(lambda x, b: jnp.mean((b["a"] @ x - b["t"]) ** 2))
    clients = rk.Clients(upper=data)
    start = jnp.zeros((WIDTH, WIDTH), jnp.float32)
    session = rk.Simulation(block=BLOCK).open(
        engine.Job(problem, clients, rk.FedAvg(local_steps=2), (start, ()), CLIENTS)
    )
    session.init()
    traced = session._traced
    program = simulation.Program(traced.round, clients, BLOCK)
    compiled = jax.jit(partial(simulation.advance, program, CLIENTS, 0, 4, simulation.together()), donate_argnums=3)
    arguments = (traced.round.consts, clients, traced.hyper, session.save(), 0, 1, True, traced.seed)
    needs = compiled.lower(*arguments).compile().memory_analysis()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(clients))
    print(
        f"the model: {start.nbytes / 1e9:.2f} GB; all replies: {CLIENTS * start.nbytes / 1e9:.0f} GB; "
        f"the data: {held / 1e9:.2f} GB"
    )
    print(f"the round needs {needs.temp_size_in_bytes / 1e9:.2f} GB beside its inputs and outputs")
    if jax.default_backend() != "cpu":
        session.advance(1)
        jax.block_until_ready(session.state)
        peak = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]
        print(f"at its peak the device held {peak / 1e9:.2f} GB, {(peak - held) / 1e9:.2f} GB beyond the data")


if __name__ == "__main__":
    main()
