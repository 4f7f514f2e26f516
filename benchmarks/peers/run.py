"""Measure Rookery and its peers on the same tasks: python benchmarks/peers/run.py [--only NAME ...] [--data PATH].

Makes an environment for each peer in --cache, runs the scripts one after another, each in a process of its own on two
cores, checks that they did the same task, writes results.csv and prints the table. README.md has the details.
"""

import argparse
import csv
import hashlib
import io
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
import tokenize
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from tasks import COMPARED, TASKS, family

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS, PAGE = HERE / "results.csv", ROOT / "docs" / "peers.md"
MACHINE = ("cpu", "cores", "boot", "run")
COLUMNS = (
    "task",
    "peer",
    "versions",
    "first",
    "round",
    "processors",
    "reach",
    "score",
    "memory",
    "lines",
    "status",
    *MACHINE,
)
HARD = "\N{NO-BREAK SPACE}"
MARKS = "<!-- The table, made by benchmarks/peers/run.py. -->", "<!-- The table's end. -->"
Row = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A library.

    Attributes:
        scripts: for each of its scripts, the tasks that it does.
        title: the name in the table.
        code: the option that gives a clone of its code, with the repository and the commit that was measured.
        counted: the scripts whose lines are compared; a script for several methods is not.
    """

    title: str
    scripts: dict[str, tuple[str, ...]]
    code: tuple[str, str, str] | None = None
    counted: tuple[str, ...] = ()


FEDAVG = ("mlp", "cnn")
PEERS = {
    "rookery": Peer(
        "Rookery",
        {
            "fedavg_rookery": FEDAVG, "fednest_rookery": ("fednest",), "bilevel_rookery": ("stocbio",),
            "solvers_rookery": ("soba", "mrbo", "f2sa"),
        },
        counted=("fedavg_rookery", "fednest_rookery", "bilevel_rookery"),
    ),
    "torch": Peer(
        "plain PyTorch", {"fedavg_torch": FEDAVG, "bilevel_torch": ("stocbio",)},
        counted=("fedavg_torch", "bilevel_torch"),
    ),
    "pfl": Peer("pfl", {"fedavg_pfl": FEDAVG}, counted=("fedavg_pfl",)),
    "fedjax": Peer("FedJAX", {"fedavg_fedjax": FEDAVG}, counted=("fedavg_fedjax",)),
    "flower": Peer("Flower", {"fedavg_flower": FEDAVG}, counted=("fedavg_flower",)),
    "tff": Peer("TensorFlow Federated", {"": FEDAVG}),
    "fednest": Peer(
        "FedNest, the authors' code", {"fednest_authors": ("fednest",)},
        ("fednest", "github.com/mc-nya/FedNest", "575d2af61c869ac6891727b0cc3b917e42a45f51"),
    ),
    "benchmark": Peer(
        "benchmark_bilevel", {"bilevel_benchmark": ("stocbio", "soba", "mrbo", "f2sa", "saba")},
        ("benchmark_bilevel", "github.com/benchopt/benchmark_bilevel", "3ad65dccff5cce27a656630a4f98be52920850b4"),
    ),
    "betty": Peer("Betty", {"bilevel_betty": ("stocbio",)}, counted=("bilevel_betty",)),
    "torchopt": Peer("TorchOpt", {"bilevel_torchopt": ("stocbio",)}, counted=("bilevel_torchopt",)),
}  # fmt: skip
NESTED = tuple(name for name in TASKS if name not in FEDAVG)


# Environments and processes.


def environment(name: str, cache: Path) -> Path | str:
    """Make a peer's environment, unless it exists; return its Python, or why it cannot be installed."""
    wanted = HERE / "requirements" / f"{name}.txt"
    digest = hashlib.sha256(wanted.read_bytes()).hexdigest()[:12]
    folder = cache / name
    python, made = folder / "bin" / "python", folder / f"made-{digest}"
    if made.exists():
        return made.read_text(encoding="utf-8") or python
    print(f"Installing {name} ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "-r", str(wanted)]
    done = subprocess.run(install, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        missing = [line for line in errors if "Could not find a version that satisfies" in line] or errors
        why = "does not install: " + missing[-1].removeprefix("ERROR: ").split(" (from")[0]
        made.write_text(why, encoding="utf-8")  # so that it is not tried in every run
        return why
    made.touch()
    return python


def missing_code(peer: Peer, path: Path | None) -> str | None:
    """Return why a clone cannot be used, or None."""
    assert peer.code is not None
    option, source, commit = peer.code
    if path is None:
        return f"not measured: give --{option.replace('_', '-')} PATH, a clone of {source} at {commit[:7]}"
    head = subprocess.run(["git", "-C", str(path), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return None if head == commit else f"not measured: {source} must be at {commit[:7]}; got {head[:7] or 'no clone'}"


def memory_of(root: int) -> int:
    """Return the bytes that a process and its descendants use; what they share counts once."""
    used = 0
    for pid in family(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            used += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        except OSError:
            continue
    return used


def execute(command: Sequence[str], cwd: Path, environ: dict[str, str], limit: float) -> tuple[str, str, int]:
    """Run a script on two cores; return its output, its errors and the most memory that it used."""
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    process = subprocess.Popen(
        command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )  # fmt: skip
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            most[0] = max(most[0], memory_of(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        output, errors = "", f"stopped after {limit:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        ended.set()
        watcher.join()
    return output, errors, most[0]


def measured(name: str, script: str, task: str, python: Path, options: Any, run: str) -> Row:
    """Run a script and return its row."""
    peer, cache = PEERS[name], options.cache
    code = None if peer.code is None else getattr(options, peer.code[0])
    path = [str(HERE), str(ROOT / "src")] if name == "rookery" else [str(HERE)]
    threads = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    environ = {
        **os.environ, **threads, "PYTHONPATH": os.pathsep.join(path), "PEERS_RUN": run, "JAX_PLATFORMS": "cpu",
        "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    command = [
        *shlex.split(options.under),
        str(python),
        str(HERE / f"{script}.py"),
        "--task",
        task,
        "--data",
        str(options.data.resolve()),
    ]
    if task == "f2sa":
        code = options.benchmark_bilevel  # for the problem
    command += [] if code is None else ["--code", str(code.resolve())]
    output, errors, memory = execute(command, cache, environ, options.limit)
    lines = [line for line in output.splitlines() if line.startswith('{"seconds"')]
    if not lines:
        (cache / f"{name}-{task}.log").write_text(output + errors, encoding="utf-8")
        raised = [line for line in errors.splitlines() if re.match(r"\w+(\.\w+)*(Error|Exception|Exit)\b", line)]
        why = (raised or errors.strip().splitlines() or ["it printed nothing"])[-1]
        return {"task": task, "peer": name, "status": f"failed: {why[:200]}"}
    found = json.loads(lines[-1])
    counted = logical_lines(HERE / f"{script}.py") if script in peer.counted else None
    return row(name, task, found, memory, counted)


def row(name: str, task: str, found: Any, memory: int, lines: int | None) -> Row:
    """Return the row of what a script printed."""
    seconds, scores, wanted = found["seconds"], found["scores"], TASKS[task]
    reached = next((i for i, score in enumerate(scores) if score >= wanted.target), None)
    return {
        "task": task,
        "peer": name,
        "versions": ", ".join(f"{package} {version}" for package, version in found["versions"].items()),
        "first": seconds[0],
        "round": statistics.median(seconds[2:]) / wanted.every,
        "processors": statistics.median(found["processors"][2:]) / wanted.every,
        "reach": None if reached is None else sum(seconds[: reached + 1]),
        "score": scores[-1],
        "memory": memory,
        "lines": lines,
        "status": different(found["compared"], task),
        **found["machine"],
    }


def different(compared: dict[str, int], task: str) -> str:
    """Return "measured", or how what a script did differs from the task."""
    for name in COMPARED:
        if compared[name] != getattr(TASKS[task], name):
            return f"another task: {name} must be {getattr(TASKS[task], name)}; got {compared[name]}"
    return "measured"


def check_scores(rows: Sequence[Row]) -> None:
    """Mark the rows whose final score is far from the median of their task."""
    for task in TASKS:
        among = [row for row in rows if row["task"] == task and row["status"] == "measured"]
        if among:
            middle = statistics.median(row["score"] for row in among)
            for row in among:
                if abs(row["score"] - middle) > TASKS[task].near:
                    row["status"] = f"another result: ends at {row['score']:.3f}, the median is {middle:.3f}"


def logical_lines(path: Path) -> int:
    """Return the number of logical lines of a script, without comments and docstrings."""
    count, start = 0, True
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NEWLINE:
            start = True
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            count += start and token.type != tokenize.STRING
            start = False
    return count


# Results and the table.


def ratio(row: Row, other: Row, column: str) -> float:
    """Return row[column] / other[column]. Both must have been measured on one machine, in one run."""
    for name in MACHINE:
        if str(row[name]) != str(other[name]) or not row[name]:
            raise ValueError(
                f"A ratio must be of two measurements from one machine and one run; {row['peer']} and {other['peer']} "
                f"differ in {name}: {row[name]!r} and {other[name]!r}. Run them together."
            )
    return float(row[column]) / float(other[column])


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the results."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def read(path: Path = RESULTS) -> list[Row]:
    """Read the results."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def digits(number: float) -> str:
    """Return a number with two digits."""
    if number <= 0:
        return "0"
    places = 1 - math.floor(math.log10(number))
    return f"{round(number, places):,.{max(0, places)}f}"


def seconds(value: Any) -> str:
    """Return a time with two digits."""
    if value in (None, ""):
        return "–"
    number = float(value)
    return f"{digits(1e3 * number)}{HARD}ms" if number < 1 else f"{digits(number)}{HARD}s"


def table(rows: Sequence[Row]) -> str:
    """Return the tables: a section for each task, with ratios to Rookery, and below them what was not measured."""
    head = (
        "| | a round | × ours | processor time | × ours | first round | to {} | end | memory | lines |\n|---"
        + "|---" * 9
    )
    parts = []
    for name, task in TASKS.items():
        among = [row for row in rows if row["task"] == name]
        if not among:
            continue
        ours = next((row for row in among if row["peer"] == "rookery" and row["status"] == "measured"), None)
        lines = [f"### {task.title}", "", head.format(f"{task.target:g}".replace("-", "−")) + "|"]
        measured = [row for row in among if row["status"] == "measured"]
        for row in sorted(measured, key=lambda row: float(row["round"])):
            title = PEERS[row["peer"]].title
            times = ["–" if ours is None else digits(ratio(row, ours, of)) for of in ("round", "processors")]
            cells = [
                f"{title} ({row['versions']})",
                seconds(row["round"]),
                times[0],
                seconds(row["processors"]),
                times[1],
            ]
            cells += [seconds(row["first"]), seconds(row["reach"]), f"{float(row['score']):.3f}".replace("-", "−")]
            cells += [f"{float(row['memory']) / 1e9:.1f}{HARD}GB", str(row["lines"] or "–")]
            lines.append(f"| {' | '.join(cells)} |")
        without = [f"- {PEERS[row['peer']].title}: {row['status']}" for row in among if row not in measured]
        lines += [""] * bool(without) + without
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def with_table(page: str, rows: Sequence[Row]) -> str:
    """Return the page with the table of these rows between its marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{table(rows)}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> None:
    """Measure, check, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=tuple(PEERS), metavar="NAME", help=", ".join(PEERS))
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=tuple(TASKS), metavar="TASK", help=", ".join(TASKS)
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("ROOKERY_DATA", "data"), help="the data's folder")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "rookery-peers", help="environments")
    parser.add_argument("--fednest", type=Path, help="a clone of the authors' FedNest")
    parser.add_argument("--benchmark-bilevel", type=Path, help="a clone of benchmark_bilevel")
    parser.add_argument("--out", type=Path, help="the results; by default results.csv if everything is measured")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a script is stopped")
    parser.add_argument("--under", default="", metavar="COMMAND", help="to run each script under, such as a lock")
    parser.add_argument("--install", action="store_true", help="only make the environments")
    parser.add_argument("--page", action="store_true", help="only write the table of results.csv into docs/peers.md")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the script under way, too
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed; got one.")
    options.cache = options.cache.resolve()
    options.cache.mkdir(parents=True, exist_ok=True)
    pythons = {name: environment(name, options.cache) for name in options.only}
    if options.install:
        return
    run, rows, begin = uuid.uuid4().hex[:12], [], time.perf_counter()
    for name in options.only:
        peer, python = PEERS[name], pythons[name]
        why = python if isinstance(python, str) else None
        if why is None and peer.code is not None:
            why = missing_code(peer, getattr(options, peer.code[0]))
        for script, names in peer.scripts.items():
            for task in names:
                if task not in options.tasks:
                    continue
                if why is not None:
                    rows.append({"task": task, "peer": name, "status": why})
                    continue
                rows.append(measured(name, script, task, python, options, run))
                write(rows, options.cache / "results.csv")
                print(f"{time.perf_counter() - begin:4.0f} s: {name}, {task}: {rows[-1]['status']}", file=sys.stderr)
    check_scores(rows)
    out = options.out or (RESULTS if set(options.only) == set(PEERS) and set(options.tasks) == set(TASKS) else None)
    if out is not None:
        write(rows, out)
    print(table(rows))


if __name__ == "__main__":
    main()
