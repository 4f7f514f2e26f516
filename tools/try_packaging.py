"""Try what runs a federation as a service: python tools/try_packaging.py dist.

It installs the wheel as the container does, and runs a coordinator and two sites without root and without write access
to the program and the study. It asks the coordinator's health, and has systemd and logrotate check their files, where
they are on this machine.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).parents[1]
PACKAGING = HERE / "packaging"
USER = 10001
SITES = ("north", "south")
STUDY = """
import jax.numpy as jnp, numpy as np, rookery as rk
from rookery.tasks import Task

def task(clients=2):
    return Task(
        name="mean",
        problem=rk.SingleLevel(lambda x, rows: jnp.mean((x - rows) ** 2)),
        clients=rk.Clients.like(upper=np.zeros(()), n=clients),
        init=jnp.zeros(()),
        evaluate=lambda x, y: {"x": x},
        metric="-x",
        rounds=40,
    )
"""
HOSPITAL = """
import os
import numpy as np
from study import task

def data():
    return {"upper": np.arange(3.0) + (os.environ["SITE"] == "north")}
"""


def unprivileged(*words: str | Path) -> list[str]:
    """Return a command that runs without root."""
    drop = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", "--"]
    return [*(drop if os.geteuid() == 0 else []), *map(str, words)]


def environment(state: Path, **more: str) -> dict[str, str]:
    """Return the environment that the container sets."""
    own = {"HOME": str(state), "XDG_CACHE_HOME": str(state / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    return {"PATH": "/usr/bin:/bin", **own, **more}


def health(port: int) -> dict[str, object]:
    """Ask the coordinator's health, as the container's health check does."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            found: dict[str, object] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        sys.exit(f"/health must answer with code 200; got {error.code}.")


def try_federation(program: Path, folder: Path) -> None:
    """Run a coordinator and two sites to the end."""
    study, state = folder / "study", folder / "state"
    for made in (study, state):
        made.mkdir()
    (study / "study.py").write_text(STUDY)
    (study / "hospital.py").write_text(HOSPITAL)
    if os.geteuid() == 0:
        os.chown(state, USER, USER)
    make = (
        "federation",
        "init",
        "--coordinator",
        "localhost:9743",
        "--sites",
        ",".join(SITES),
        "--out",
        state / "kits",
    )
    subprocess.run(unprivileged(program, *make), cwd=study, env=environment(state), check=True, capture_output=True)
    started = []

    def start(name: str, *words: str | Path) -> None:
        log = (folder / f"{name}.log").open("w")
        command = unprivileged(program, *words, "--kit", state / "kits" / name)
        started.append(
            (name, subprocess.Popen(command, cwd=study, env=environment(state, SITE=name), stdout=log, stderr=log))
        )

    try:
        run = ("serve", "study.py:task", "--algorithm", "FedAvg", "--status", "9755", "--out", state / "run")
        start("coordinator", *run)
        for name in SITES:
            start(name, "site", "--module", "hospital.py", "--folder", state / name)
        seen, until = [], time.monotonic() + 300
        while started[0][1].poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError):  # not there yet, or over
                seen.append(health(9755))
            time.sleep(0.1)
        codes = {name: process.wait(60) for name, process in started}
    finally:
        for _, process in started:
            process.kill()
    logs = "\n".join(f"{name}:\n{(folder / f'{name}.log').read_text()[-1500:]}" for name, _ in started)
    assert set(codes.values()) == {0}, f"{codes}\n{logs}"
    assert any(said["state"] == "running" for said in seen), f"{seen[-3:]}\n{logs}"
    assert json.loads((state / "run" / "run.json").read_text())["rounds_done"] == 40
    foreign = [path for path in (*study.rglob("*"), *program.parents[1].rglob("*")) if path.stat().st_uid == USER]
    assert os.geteuid() != 0 or not foreign, foreign
    print(
        f"a coordinator and {len(SITES)} sites, without root; the health check answered {len(seen)} times", flush=True
    )


def try_systemd(program: Path, folder: Path) -> None:
    """Have systemd check the unit, with the program where it was installed."""
    if shutil.which("systemd-analyze") is None:
        print("systemd-analyze: not on this machine")
        return
    unit = folder / "rookery-site@north.service"
    unit.write_text((PACKAGING / "rookery-site@.service").read_text().replace("/opt/rookery/bin/rookery", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    own = [line for line in done.stderr.splitlines() if "rookery" in line]
    assert done.returncode == 0, done.stderr
    assert not own, done.stderr
    print("systemd accepts the unit", flush=True)


def try_logrotate(folder: Path) -> None:
    """Have logrotate rotate a long log, and leave an audit log alone."""
    if shutil.which("logrotate", path="/usr/sbin:/usr/bin") is None or os.geteuid() != 0:
        print("logrotate: not on this machine, or not as root")
        return
    logs = folder / "logs"
    logs.mkdir()
    for name in ("site.log", "audit.jsonl"):
        (logs / name).write_text("a line\n" * 10)
    text = (PACKAGING / "logrotate.conf").read_text().replace("/var/log/rookery", str(logs))
    (folder / "rotate.conf").write_text(text.replace("su rookery rookery", "su root root"))
    (folder / "rotate.conf").chmod(0o644)
    rotate = ["/usr/sbin/logrotate", "--force", "--state", str(folder / "rotated"), str(folder / "rotate.conf")]
    subprocess.run(rotate, check=True)
    assert {path.name: path.stat().st_size for path in logs.iterdir()} == {
        "site.log": 0,
        "site.log.1": 70,
        "audit.jsonl": 70,
    }
    print("logrotate rotates logs, and leaves the audit log alone", flush=True)


def main() -> None:
    """Try the wheel in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that everyone can run")
    options = parser.parse_args()
    wheels = sorted(options.folder.resolve().glob("*.whl"))
    if not wheels:
        sys.exit("The folder must hold a wheel. Run `make dist` first.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        words = ["sh", PACKAGING / "install.sh", folder / "rookery", wheels[-1], HERE / "constraints.txt"]
        subprocess.run(list(map(str, words)), env={**os.environ, "PYTHON": options.python}, check=True)
        program = folder / "rookery" / "bin" / "rookery"
        try_systemd(program, folder)
        try_logrotate(folder)
        try_federation(program, folder)


if __name__ == "__main__":
    main()
