"""The throughput of asynchronous rounds: python benchmarks/asynchronous.py [--updates 100000]

The papers' network (784-200-10), ten-fold spread of speeds. A synchronous round has a cohort of 10 of 1,000 clients. In
an asynchronous one, a buffer of 10 is filled by 100 clients at work. Both are timed in turn, in calls of 256 rounds.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery.cli.speed import BATCH, CLASSES, INPUTS, WIDTH, layers
from rookery.tasks.hyperrep import representation_problem

CLIENTS, BUFFER, AT_WORK, ROUNDS, SAMPLES = 1000, 10, 100, 256, 64


def main() -> None:
    """Print the updates in a second, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100_000)
    wanted = parser.parse_args().updates
    rng = np.random.default_rng(0)
    shape = CLIENTS * SAMPLES
    data = {
        level: {
            "image": rng.random((shape, INPUTS), np.float32),
            "label": rng.integers(0, CLASSES, shape).astype(np.int32),
        }
        for level in ("upper", "lower")
    }
    cut = lambda rows: [jax.tree.map(lambda a: a[i : i + SAMPLES], rows) for i in range(0, shape, SAMPLES)]
    clients = rk.Clients(upper=cut(data["upper"]), lower=cut(data["lower"]))
    clock = rk.Clock(compute=np.exp(rng.uniform(0, np.log(10), CLIENTS)))
    method = rk.FedBiO(local_steps=5, batch_size=BATCH)
    init = layers(jax.random.key(0), INPUTS, WIDTH, CLASSES)
    late = {"cohort": AT_WORK, "clock": clock, "asynchronous": rk.Asynchronous(buffer=BUFFER)}
    problem = representation_problem(), clients, method, init
    with rk.session(*problem, cohort=BUFFER) as first, rk.session(*problem, **late) as second:
        sessions = {"synchronous": first, "asynchronous": second}
        seconds = dict.fromkeys(sessions, 0.0)
        for session in sessions.values():
            session.advance(2)
        for _ in range(-(-wanted // (BUFFER * ROUNDS))):
            for name, session in sessions.items():
                begin = time.perf_counter()
                session.advance(ROUNDS)
                jax.block_until_ready(session.state)
                seconds[name] += time.perf_counter() - begin
        done = second.rounds * BUFFER
        rates = {name: (session.rounds - 2) * BUFFER / seconds[name] for name, session in sessions.items()}
        for name, rate in rates.items():
            print(f"{name}: {rate:,.0f} updates/s ({1e3 * BUFFER / rate:.2f} ms a round)")
        ratio = rates["asynchronous"] / rates["synchronous"]
        print(f"asynchronous/synchronous: {ratio:.2f}, after {done:,} updates, {jax.devices()[0].device_kind}")
        assert bool(jnp.all(jnp.isfinite(jax.tree.leaves(second.state.x)[0])))


if __name__ == "__main__":
    main()
