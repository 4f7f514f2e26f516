"""How long the lock-step engine takes for rounds of many exchanges: python benchmarks/lockstep.py [windows].

Weighted nodes on the bundled digits, four nodes. A round has two loops of so many windows (16 unless given) and one
exchange more. Prints the seconds of the first round, which compiles, and the median of later ones, for both engines.
"""

import itertools
import statistics
import sys
import time

import rookery as rk


def main(windows: int) -> None:
    """Both engines, one after the other."""
    task = rk.tasks.weighted_nodes(nodes=4, minority=2)
    method = rk.WeightedNodesProx(0.5, 0.05, 0.2, steps=10 * windows, sync_every=10, batch_size=20)
    for engine in (rk.Simulation(), rk.Federation()):
        ends = [time.perf_counter()]
        note = lambda run, ends=ends: ends.append(time.perf_counter())
        how = {"evaluate": task.evaluate, "every": 1, "callbacks": (note,), "engine": engine, "progress": False}
        rk.solve(task.problem, task.clients, method, task.init, 6, **how)
        first, *later = (after - before for before, after in itertools.pairwise(ends))
        print(f"{type(engine).__name__}: {2 * windows + 1} exchanges a round, first {first:.1f} s, then "
              f"{statistics.median(later):.3f} s")  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 16)
