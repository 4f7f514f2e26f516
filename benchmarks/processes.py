"""The same rounds in 1, 2 and 4 processes of one host: python benchmarks/processes.py [--cohort 800] [--most 4].

It is the round of `devices.py`. Each process has one device and one core, and their sums go through JAX's collectives
for CPUs (gloo). Efficiency is t(1) / (P · t(P)). Every process makes the data of all clients, 0.6 MB each; there are
twice as many clients as in the cohort.
"""

import argparse
import socket
import subprocess

from devices import cores, doubling, environment, pinned, seconds

from rookery.base.processes import lead, start


def main() -> None:
    """Measure all of them, one after another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cohort", type=int, default=800)
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--member", nargs=3, metavar=("ADDRESS", "PROCESSES", "PROCESS"), help="be one of them")
    options = parser.parse_args()
    if options.member:
        address, processes, process = options.member
        alone = processes == "1"
        if not alone:
            start(address, int(processes), int(process))
        taken = seconds(None if alone else "all", options.cohort)
        if lead():
            print(f"{taken:.6f}", flush=True)
        return
    doubling("processes", options.most, lambda processes: _together(processes, options.cohort))


def _together(processes: int, cohort: int) -> float:
    """Return the seconds of a round in the first of so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    each = [
        subprocess.Popen(
            [
                *pinned(cores()[i : i + 1]),
                __file__,
                f"--cohort={cohort}",
                "--member",
                address,
                str(processes),
                str(i),
            ],
            env=environment(1) | {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    said = [process.communicate()[0] for process in each]
    if any(process.returncode for process in each):
        raise SystemExit(1)  # they have printed why
    return float(said[0].splitlines()[-1])  # after gloo's messages


if __name__ == "__main__":
    main()
