"""Install the wheel as a user does, away from the repository, and try it: python tools/try_wheel.py dist.

For each Python that Rookery supports and this machine has, it makes an empty environment, installs the wheel, and tries
the public names, every method, the command line and the demo. On the first Python it also installs each extra alone,
and checks what is said where an extra is missing.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SUPPORTED = ("3.11", "3.12", "3.13")
LARGEST = 2_000_000  # bytes of the wheel
IMPORT, FIRST_USE = 0.3, 4.0  # seconds of processor time, the best of three
EXTRAS = {
    "federation": ("cryptography", "grpc"),
    "privacy": ("dp_accounting",),
    "nvflare": ("nvflare",),
}

NAMES = """
import inspect
import rookery as rk

for name in rk.__all__:
    value = getattr(rk, name)
    assert inspect.getdoc(value), f"rk.{name} has no docstring"
assert rk.theory.__doc__ and rk.tasks.quadratic and rk.trackers.JsonLines
import rookery.fed, rookery.status, rookery.testing
print(f"{len(rk.__all__)} public names")
"""
METHODS = """
import rookery as rk
from rookery import algorithms
from rookery.testing import cases

for name in algorithms.__all__:
    method = getattr(algorithms, name)()
    for kind in cases.kinds(method):
        it = cases.case(kind)
        print(name, kind, rk.explain(it.problem, it.clients(), method, it.init))
"""
RUN = """
import jax.numpy as jnp, numpy as np, rookery as rk

clients = rk.Clients(lower=[np.ones(3)] * 4, upper=[np.zeros(2)] * 4)
problem = rk.Bilevel(lambda x, y, b: jnp.mean((x + y - b) ** 2), lambda x, y, b: jnp.mean((y - x - b) ** 2))
run = rk.solve(problem, clients, rk.FedBiO(upper_step=0.1, lower_step=0.2), (0.0, 0.0), rounds=200, progress=False)
assert abs(float(run.x) + 0.5) < 1e-3, run.x  # y = x + 1, so that x + y = 0 at x = -1/2
"""
PRIVATE = """
import jax.numpy as jnp, numpy as np, rookery as rk

clients = rk.Clients(upper=[np.ones(3)] * 20)
problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
run = rk.solve(problem, clients, rk.FedAvg(0.1), jnp.zeros(()), 2, channel=rk.private(8, 1e-3), progress=False)
assert 0 < run.history["epsilon"].iloc[-1] <= 8
"""
CERTIFICATES = ("federation", "init", "--coordinator", "localhost", "--sites", "north,south")


class Environment:
    """An empty virtual environment with the wheel, in a folder of its own."""

    def __init__(self, python: str, folder: Path, requirement: str) -> None:
        self.folder, self.bin = folder, folder / "env" / "bin"
        subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
        words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
        self.succeeds(self.bin / "python", *words)

    def tries(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder, without anything of this process's environment that Python reads."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            list(map(str, words)), cwd=self.folder, env=own, capture_output=True, text=True, check=False
        )

    def succeeds(self, *words: str | Path) -> str:
        """Run a command that must succeed. Return what it prints."""
        done = self.tries(*words)
        if done.returncode:
            shown = " ".join(map(str, words))[:200]
            sys.exit(f"{shown}\nended with code {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout

    def runs(self, program: str) -> str:
        """Run a Python program, which must succeed. Return what it prints."""
        return self.succeeds(self.bin / "python", "-c", program)

    def rookery(self, *words: str) -> str:
        """Run the command, which must succeed. Return what it prints."""
        return self.succeeds(self.bin / "rookery", *words)

    def refuses(self, text: str, *words: str | Path) -> None:
        """Check that a command fails, and that the last line of what it prints contains this text."""
        done = self.tries(*words)
        last = "".join((done.stdout + done.stderr).strip().splitlines()[-1:])
        if not done.returncode or text not in last:
            sys.exit(f"The error must say {text!r}; got {last!r}.")


def seconds(environment: Environment, program: str) -> float:
    """Return the processor time of a program, the best of three."""
    timed = f"import time\n{program}\nprint(time.process_time())"
    return min(float(environment.runs(timed)) for _ in range(3))


def interpreters(wanted: list[str]) -> dict[str, str]:
    """Return the supported Pythons of this machine by version: those on the path, and pyenv's."""
    found = {}
    for version in wanted:
        pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")
        for path in (shutil.which(f"python{version}"), *map(str, pyenv)):
            if path and not subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode:
                found[version] = path
                break
        else:
            print(f"Python {version}: not on this machine", flush=True)
    return found


def try_wheel(version: str, python: str, wheel: Path) -> None:
    """Try the wheel in an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(python, Path(folder), str(wheel))
        installed = environment.runs("import jax; print('JAX', jax.__version__)").strip()
        print(f"Python {version}, {installed}:", environment.runs(NAMES).strip(), flush=True)
        plans = sum(not line.startswith(" ") for line in environment.runs(METHODS).splitlines())
        print(f"  {plans} plans of methods and problems", flush=True)
        environment.runs(RUN)
        assert "FedBiO" in environment.rookery("list")
        environment.rookery("run", "quadratic", "--algorithm", "FedBiO", "--rounds", "5", "--quiet", "--out", "runs")
        environment.rookery("demo", "--quiet", "--out", "demo")
        print("  the command line and the demo run", flush=True)
        times = seconds(environment, "import rookery"), seconds(environment, "import rookery as rk; rk.solve")
        print(f"  import rookery: {times[0]:.2f} s; first use: {times[1]:.2f} s of processor time", flush=True)
        if times[0] > IMPORT or times[1] > FIRST_USE:
            sys.exit(f"Importing must take at most {IMPORT} s, and the first use {FIRST_USE} s.")


def try_extras(python: str, wheel: Path) -> None:
    """Check what is said without the extras, and install each one alone."""
    with tempfile.TemporaryDirectory() as folder:
        bare = Environment(python, Path(folder), str(wheel))
        bare.refuses("Install rookery[privacy].", bare.bin / "python", "-c", PRIVATE)
        bare.refuses("pip install 'rookery[federation]'", bare.bin / "rookery", *CERTIFICATES)
        print("without the extras, the errors say which one to install", flush=True)
    for extra, modules in EXTRAS.items():
        with tempfile.TemporaryDirectory() as folder:
            environment = Environment(python, Path(folder), f"{wheel}[{extra}]")
            environment.runs("\n".join(f"import {name}" for name in ("rookery", *modules)))
            environment.runs(PRIVATE if extra == "privacy" else RUN)
            if extra == "federation":
                environment.rookery(*CERTIFICATES)
            print(f"rookery[{extra}] works by itself", flush=True)


def main() -> None:
    """Try the newest wheel of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="append", choices=SUPPORTED, help="only this version")
    options = parser.parse_args()
    wheels = sorted(options.folder.resolve().glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        sys.exit(f"{options.folder} must hold a wheel. Run `make dist` first.")
    wheel = wheels[-1]
    if wheel.stat().st_size > LARGEST:
        sys.exit(f"The wheel must have at most {LARGEST:,} bytes; got {wheel.stat().st_size:,}.")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
    pythons = interpreters(options.python or list(SUPPORTED))
    if not pythons:
        sys.exit(f"One of Python {', '.join(SUPPORTED)} must be on this machine.")
    for version, python in pythons.items():
        try_wheel(version, python, wheel)
    try_extras(next(iter(pythons.values())), wheel)


if __name__ == "__main__":
    main()
