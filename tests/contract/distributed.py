"""A program, of which several processes run together: ADDRESS PROCESSES PROCESS FOLDER CASE... What it finds is JSON.

Process 0 writes each method's state and memory into the folder. In the end process 1 can't load its data.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rookery as rk
from rookery.base.processes import HostError, lead, start
from rookery.language.ledger import Ledger

from .cases import HARD, case, job, ragged


def main(address: str, processes: int, process: int, folder: Path, cases: list[str]) -> None:
    """All of it, in this process."""
    start(address, processes, process, patience=100)
    everywhere = rk.Simulation(mesh="all")
    for name, kind in (given.split("-") for given in cases):
        what = job(name, ragged(kind), **HARD)
        session: Any = everywhere.open(what)
        ledger = Ledger()
        ledger.add([session.init()], what.clients.n)
        ledger.add(session.advance(2), what.cohort)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((session.state, session.memory))]
        if lead():
            np.savez(folder / name, *leaves)
            say(method=name, counts=ledger.counts)
    whole_runs(folder, everywhere)
    disagreeing(process, everywhere)
    failing(process)


def say(**what: Any) -> None:
    """A line."""
    print(json.dumps(what), flush=True)


def whole_runs(folder: Path, everywhere: rk.Simulation) -> None:
    """A run whose clients are loaded where they live, with a checkpoint; then one process alone goes on with it."""
    it, loaded = ragged("SingleLevel"), []

    def load(i: int) -> dict[str, Any]:
        loaded.append(i)
        return {"upper": it.data["upper"][i]}

    clients = rk.Clients.from_loader(4, load, weights="size")
    evaluate = lambda x, y: {"norm": float(np.linalg.norm(x))}
    measure = lambda client, x, y: {"loss": client.mean(lambda rows: it.problem.loss(x, rows), client.upper())}
    method = rk.PDSGD(step=0.05, dual_step=0.1, penalty=2.0, batch_size=3)
    run = rk.solve(
        it.problem, clients, method, it.init, 4, cohort=3, every=2, evaluate=evaluate, evaluate_client=measure,
        checkpoint=folder / "checkpoint", keep_best="-norm", engine=everywhere,
    )  # fmt: skip
    say(loaded=loaded, history=run.history.drop(columns="seconds").to_dict("list"), x=np.asarray(run.x).tolist())


def disagreeing(process: int, everywhere: rk.Simulation) -> None:
    """Two processes with other data, another step, another program: each says so, and goes on."""
    it = case("SingleLevel")
    moved = rk.Clients(upper=[{"a": own["a"] + (process == 1), "t": own["t"]} for own in it.data["upper"]])
    for clients, step, batch in ((moved, 0.1, 2), (it.clients(), 0.1 + process, 2), (it.clients(), 0.1, 2 + process)):
        try:
            rk.solve(it.problem, clients, rk.FedAvg(step=step, batch_size=batch), it.init, 1, engine=everywhere)
        except HostError as error:
            say(error=str(error))


def failing(process: int) -> None:
    """One process can't load its data: all end."""

    def load(i: int) -> Any:
        if process == 1:
            raise OSError(f"client {i}: no such file")
        return {"lower": np.zeros(2)}

    try:
        rk.Clients.from_loader(4, load)
    except HostError as error:
        say(error=str(error))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
