"""Record what this version of Rookery writes and sends, for later versions to read.

Run it before a release, with the folder of the version: python -m tests.compatibility.record tests/compatibility/0.2
Then copy policy.toml and kit.toml from the folder of the version before, and add to policy.toml the rules that are new.
"""

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.compatibility.study import ROUNDS, SITES, START, distance, method, problem

import rookery as rk
from rookery.engines.federation.audit import Audit
from rookery.engines.federation.policy import Policy, PolicyGuard
from rookery.engines.federation.responder import Responder, Study
from rookery.engines.federation.transports.memory import Memory


def site(name: str, folder: Path | None = None) -> Responder:
    """Return a site with its data, and with its log and memory if there is a folder."""
    data = rk.Clients(upper=[np.array(SITES[name])])
    guard = PolicyGuard(Policy(), None if folder is None else Audit(folder / "audit.jsonl"))
    return Responder(name, Study(problem, jnp.asarray(START), data), folder, guard)


def coordinate(ask: Any, **more: Any) -> rk.Run:
    """Run the study with sites that answer by `ask(number, request)`."""
    clients = rk.Clients.like(upper=np.zeros(()), n=len(SITES))
    transport = Memory(len(SITES), ask, list(SITES))
    engine = rk.Federation(transport=transport, patience=0.0, **more)
    return rk.solve(
        problem, clients, method, jnp.asarray(START), ROUNDS, evaluate=distance, engine=engine, progress=False
    )


def record_messages(folder: Path) -> None:
    """Record what coordinator and sites say to each other, and what they keep."""
    sites = [site(name, folder / name) for name in SITES]
    spoken: list[dict[str, Any]] = []

    def ask(i: int, request: Any) -> Any:
        answer = sites[i].handle(request)
        texts = {"request": bytes(request), "answer": bytes(answer)}
        spoken.append({"site": i, **{name: base64.b64encode(text).decode() for name, text in texts.items()}})
        return answer

    run = coordinate(ask, heads=folder / "heads.jsonl")
    (folder / "messages.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in spoken))
    (folder / "result.json").write_text(json.dumps({"x": float(run.x), "distance": list(run.history["distance"])}))
    for name in SITES:
        for unused in ("lock", "secret"):
            (folder / name / unused).unlink()


def record_account(folder: Path) -> None:
    """Record the log of a site that has released something of its records, and taken part in a secure sum."""
    rows = [np.linspace(0.0, n, n) for n in (20, 30, 40)]
    audit = Audit(folder / "account" / "audit.jsonl")
    policy = Policy(epsilon=50.0, delta=1e-5)
    study = [Study(problem, jnp.asarray(START), rk.Clients(upper=[own])) for own in rows]
    first = Responder("a", study[0], folder / "account", PolicyGuard(policy, audit))
    sites = [first, *(Responder(name, brings) for name, brings in zip("bc", study[1:], strict=True))]
    engine = rk.Federation(transport=Memory(3, lambda i, request: sites[i].handle(request), list("abc")), patience=0.0)
    clients = rk.Clients.like(upper=np.zeros(()), n=3)
    private = rk.private(noise=5.0, delta=1e-5, clip=1.0, unit="record", then=rk.chain(rk.clip(100.0), rk.secure_sum()))
    rk.solve(
        problem, clients, rk.FedAvg(step=0.1), jnp.asarray(START), 2, channel=private, engine=engine, progress=False
    )
    (folder / "account.json").write_text(json.dumps({"epsilon": audit.spending.epsilon(1e-5)}))
    audit.close()
    for unused in ("lock", "secret"):
        (folder / "account" / unused).unlink()


def record_run(folder: Path) -> None:
    """Record the files of a run in this process: of `Run.save`, a tracker and a checkpoint."""
    clients = rk.Clients(upper=[np.array(rows) for rows in SITES.values()])
    tracker = rk.trackers.JsonLines(folder / "lines.jsonl")
    solve = lambda rounds, **more: rk.solve(
        problem, clients, method, jnp.asarray(START), rounds, evaluate=distance, keep_best="distance", progress=False,
        **more,
    )  # fmt: skip
    solve(ROUNDS - 1, checkpoint=folder / "checkpoint")
    shutil.rmtree(folder / "checkpoint" / f"round_{ROUNDS - 2}")
    for path in (folder / "checkpoint").rglob("commit_success.txt"):  # unused on a local disk, and has this path
        path.unlink()
    solve(ROUNDS, callbacks=[tracker]).save(folder / "saved")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    target = Path(sys.argv[1])
    target.mkdir(parents=True)
    record_messages(target)
    record_account(target)
    record_run(target)
    words = ["run", "quadratic", "--algorithm", "FedNest", "--rounds", "2", "--quiet", "--out", str(target / "command")]
    subprocess.run([sys.executable, "-m", "rookery.cli", *words], check=True)
    shutil.rmtree(target / "command" / "checkpoint")
    (target / "command" / "picture.png").unlink()
