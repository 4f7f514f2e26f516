"""The command line: reads what is asked, hands it to the library, shows the answer; one clear line for bad input."""

import dataclasses
import hashlib
import inspect
import os
import platform
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import pandas as pd
import typer
from rich.console import Console

import rookery as rk
from rookery import checks, report
from rookery import demo as demonstration
from rookery.arguments import is_number
from rookery.data import DATASETS, PARTITIONS
from rookery.data.files import cache_dir
from rookery.metrics import Direction, direction
from rookery.problems import Bilevel, SingleLevel
from rookery.registry import ALGORITHMS, TASKS, find, key
from rookery.tasks.task import Task
from rookery.tune import CANDIDATES, step_sizes

app = typer.Typer(
    help="Federated nested optimization: bilevel, minimax and compositional problems whose data stays with clients. "
    "Compiled programs are kept in the user's cache folder; ROOKERY_CACHE=off keeps none.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
Out = Annotated[Path | None, typer.Option(help="Folder to write to.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to standard output, and nothing else there.")
]


def main() -> None:
    """The entry point. What typer itself refuses is told in one line too."""
    if sys.argv[1:2] != ["bench"]:  # it measures compilation
        _keep_compiled()
    try:
        status = app(args=sys.argv[1:] or ["--help"], prog_name="rookery", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        _complain(error.format_message())
        status = 2
    sys.exit(status or 0)


def _keep_compiled() -> None:
    """Let JAX keep compiled programs on disk, so that a command compiles nothing a second time.

    A variable of JAX's own, such as JAX_COMPILATION_CACHE_DIR, wins; ROOKERY_CACHE=off leaves all of JAX's settings.
    """
    if os.environ.get("ROOKERY_CACHE", "").lower() == "off":
        return
    settings: dict[str, Any] = {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            folder = cache_dir() / "jax" / _processor()
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # the second: there is no home
            return
        if not os.access(folder, os.W_OK):
            return
        settings["jax_compilation_cache_dir"] = str(folder)
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def _processor() -> str:
    """A name of this kind of processor: a program compiled for one may not run on another that shares the folder."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    told = sorted(set(re.findall(r"^(?:model name|flags|Features)\b.*", text, re.MULTILINE))) or text
    return f"{platform.machine()}-{hashlib.sha256(repr(told).encode()).hexdigest()[:8]}"


@contextmanager
def _border() -> Iterator[None]:
    """Bad input ends in one line and code 2; numbers that are not finite, in one line and code 1."""
    try:
        yield
    except rk.NonFiniteError as error:
        _complain(f"The run broke down: {error}. Smaller steps may help.")
        raise typer.Exit(1) from None
    except (ValueError, OSError) as error:
        _complain(str(error))
        raise typer.Exit(2) from None


@contextmanager
def _told_below() -> Iterator[None]:
    """Hide the warning about values that are not finite, where a line at the end of the command says the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rk.NonFiniteWarning)
        yield


def _complain(message: str) -> None:
    print("rookery: " + " ".join(message.split()), file=sys.stderr)


def _say(quiet: bool, as_json: bool, *what: Any) -> None:
    if not (quiet or as_json):
        console = Console(width=None if sys.stdout.isatty() else 120)
        for item in what:
            console.print(item, highlight=False, markup=False, soft_wrap=isinstance(item, str))


def _version(asked: bool) -> None:
    if asked:
        print(rk.__version__)
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Options of the program itself; the help text is that of `app`."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("rookery-demo"),
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """What nesting is for, in three stories on handwritten digits: a table and a picture, in about a minute."""
    with _border():
        with _told_below():
            result = demonstration.demo(out, progress=not (quiet or json))
        if json:
            print(report.to_json(result.numbers()))
        _say(quiet, json, result.table(), *result.lines(), f"The picture: {result.picture}")
        if result.stopped:
            _complain(f"Runs stopped early: {'; '.join(result.stopped)}")
            raise typer.Exit(1)


@app.command("list")
def list_names(
    what: Annotated[
        str | None,
        typer.Argument(help="algorithms, tasks, experiments or datasets; or the name of one algorithm or task."),
    ] = None,
    json: AsJson = False,
) -> None:
    """What there is to run; of one algorithm or task, what can be set."""
    with _border():
        kinds: dict[str, Callable[[], pd.DataFrame]] = {
            "algorithms": _algorithm_names,
            "tasks": _task_names,
            "experiments": _experiment_names,
            "datasets": _dataset_names,
        }
        if what is None:
            frames = {kind: make() for kind, make in kinds.items()}
        else:
            single = {name: partial(_parameters, thing) for name, thing in [*ALGORITHMS.items(), *TASKS.items()]}
            kind, make = find("list of", what, kinds | single)
            frames = {kind: make()}
        if json:
            print(report.to_json({kind: frame.to_dict("records") for kind, frame in frames.items()}))
            return
        for kind, frame in frames.items():
            title = kind.capitalize() if kind in kinds else kind
            _say(False, False, report.table(frame, title) if len(frame) else f"There are no {kind}.")


def _algorithm_names() -> pd.DataFrame:
    rows = [
        {"name": name, "solves": ", ".join(kind.__name__ for kind in cls.solves), "what it is": _first_line(cls)}  # type: ignore[attr-defined]
        for name, cls in ALGORITHMS.items()
    ]
    return pd.DataFrame(rows)


def _task_names() -> pd.DataFrame:
    rows = [
        {"name": name, "settings": ", ".join(inspect.signature(make).parameters), "what it is": _first_line(make)}
        for name, make in TASKS.items()
    ]
    return pd.DataFrame(rows)


def _experiment_names() -> pd.DataFrame:
    from rookery.experiments import EXPERIMENTS  # it is large, and only two commands need it

    rows = [{"name": name, "what it is": _about(entry)} for name, entry in EXPERIMENTS.items()]
    return pd.DataFrame(rows)


def _dataset_names() -> pd.DataFrame:
    return pd.DataFrame([{"name": name, "what it is": about} for name, about in DATASETS.items()])


def _parameters(thing: Any) -> pd.DataFrame:
    """What can be set of an algorithm or a task: each name with its default."""
    parameters = inspect.signature(thing).parameters.values()
    return pd.DataFrame([{"setting": p.name, "default": str(p.default)} for p in parameters])


def _about(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    for name in ("about", "title", "description"):
        if isinstance(getattr(entry, name, None), str):
            return getattr(entry, name)
    return _first_line(entry)


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


@app.command()
def run(
    task: Annotated[str, typer.Argument(help="A task; see `rookery list tasks`.")],
    algorithm: Annotated[str, typer.Option("--algorithm", "-a", help="See `rookery list algorithms`.")] = "FedNest",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A hyperparameter of the algorithm, or a setting of the task: upper_step=0.1, batch_size=none, "
            "local_steps=5..15 (a range), local_steps=epochs:2. Repeat it for more.",
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="How many; the task has a default.")] = None,
    cohort: Annotated[int | None, typer.Option(help="Clients in each round; the task has a default.")] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in all; the task has a default.")] = None,
    partition: Annotated[str | None, typer.Option(help="How data are dealt out: iid, shards or dirichlet.")] = None,
    server_optimizer: Annotated[
        str | None,
        typer.Option(help="An optimizer that takes the server's step on x, and its step size: adam:0.001 (FedAdam)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the task and of the run.")] = 0,
    every: Annotated[int | None, typer.Option(help="Rounds from one evaluation to the next.")] = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Slowly, client by client; name the place of the first NaN.")
    ] = False,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Run an algorithm on a task."""
    with _border():
        asked = _ask(task, algorithm, settings or [], clients, partition, seed)
        task_name, algorithm_name, arguments, chosen, method, note = asked
        hyper = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
        if server_optimizer is not None:
            hyper["server_optimizer"] = server_optimizer
            method = rk.with_server_optimizer(method, upper=optimizer_of(server_optimizer))
        rounds, every = rounds if rounds is not None else chosen.rounds, every if every is not None else chosen.every
        size = _check_run(chosen, method, rounds, chosen.cohort if cohort is None else cohort, every, seed)
        goal = direction(chosen.metric)
        description: dict[str, Any] = {
            "task": task_name,
            "task_settings": arguments,
            "algorithm": algorithm_name,
            "hyperparameters": hyper,
            "seed": seed,
            "cohort": size,
            "rounds": rounds,
            "version": rk.__version__,
        }
        if note and not quiet:
            print(note, file=sys.stderr)
        _prepare_folder(out, resume, description)
        with np.errstate(all="ignore"), _told_below():
            result = rk.solve(
                chosen.problem,
                chosen.clients,
                method,
                chosen.init,
                rounds,
                cohort=size,
                seed=seed,
                evaluate=chosen.evaluate,
                evaluate_client=chosen.evaluate_client,
                every=every,
                engine=rk.Simulation(debug=True) if debug else None,
                checkpoint=None if out is None else out / "checkpoint",
                keep_best=chosen.metric if goal.higher_is_better else f"-{goal.name}",
                progress=False if quiet or json else None,
            )
        description["stopped"] = result.stopped
        trusted = _trusted(chosen, result)
        if out is not None:
            report.write_run(out, description, result, chosen.metric)
            if trusted is not None:
                exact = np.asarray(result.weights, float)
                trusted.assign(weight=exact).to_csv(out / "weights.csv", index=False)
                title = f"{algorithm_name} on {task_name}"
                report.save(report.weights_picture(result.history, chosen.groups, title), out / "weights.png")
        if json:
            said = {**description, **report.summary(result), "metric": chosen.metric, "out": out}
            print(report.to_json(said if trusted is None else said | {"weights": trusted.to_dict("records")}))
        _say(quiet, json, *_tables(description, result))
        if trusted is not None:
            _say(quiet, json, report.table(trusted, "Who was trusted"))
        if result.stopped is not None:
            _complain(f"The run stopped: {result.stopped.rstrip('.')}. {_ADVICE}")
            raise typer.Exit(1)
        _warn(result, goal.name)
        if result.interrupted:
            _complain(f"Stopped after round {result.rounds}." + (" Go on with --resume." if out else ""))
            raise typer.Exit(130)


class _Asked(NamedTuple):
    """What a task and an algorithm on the command line stand for."""

    task_name: str
    algorithm_name: str
    arguments: dict[str, Any]  # of the task
    task: Task
    method: Any
    note: str  # a line for the user, or ""


def _ask(
    task: str, algorithm: str, settings: list[str], clients: int | None, partition: str | None, seed: int
) -> _Asked:
    task_name, make = find("task", task, TASKS)
    algorithm_name, cls = find("algorithm", algorithm, ALGORITHMS)
    given, arguments = _settings(settings, algorithm_name, cls, task_name, make)
    arguments |= _options(task_name, make, clients, partition, seed)
    local = ""
    if getattr(cls, "scope", "global") == "client" and "scope" in inspect.signature(make).parameters.keys() - arguments:
        arguments["scope"] = "client"
        local = f"{algorithm_name} gives every client a lower level of its own: {task_name} has scope=client."
    chosen, note = _fit(make(**arguments), cls)
    note = local or note
    return _Asked(task_name, algorithm_name, arguments, chosen, chosen.algorithm(cls, **given), note)


def _options(
    task: str, make: Callable[..., Task], clients: int | None, partition: str | None, seed: int
) -> dict[str, Any]:
    """The settings of a task that have an option of their own."""
    given = {"clients": clients, "partition": partition, "seed": seed}
    for name, value in given.items():
        if value is not None:
            _check_argument(task, make, name, value)
    return {name: value for name, value in given.items() if value is not None}


def _fit(task: Task, cls: Any) -> tuple[Task, str]:
    """The task as this algorithm can take it, and a line to say so where that is not how it was stated."""
    kind = type(task.problem)
    if kind in cls.solves:
        return task, ""
    if SingleLevel in cls.solves and task.single_level is not None:
        return task.single_level, ""
    if Bilevel in cls.solves and hasattr(task.problem, "as_bilevel"):
        init = checks.start_values(task.problem, task.clients, task.init)
        note = f"{cls.__name__} solves bilevel problems: the {kind.__name__.lower()} problem is handed over as one."
        return dataclasses.replace(task, problem=task.problem.as_bilevel(), init=init), note
    return task, ""  # solve says why not


def _check_run(task: Task, method: Any, rounds: int, cohort: int | None, every: int, seed: int) -> int:
    """What `solve` would refuse, before a folder is made; the cohort's size."""
    start = checks.start_values(task.problem, task.clients, task.init)
    return checks.check_run(task.problem, task.clients, method, *start, rounds, cohort, every, seed)


def _prepare_folder(out: Path | None, resume: bool, description: dict[str, Any]) -> None:
    """Refuse to write over a run, or to go on with another one; then mark the folder as this run's."""
    if out is None:
        if resume:
            raise ValueError("--resume needs --out DIR: the folder of the run to go on with.")
        return
    saved, old = out / "run.json", out / "checkpoint.npz"
    if old.exists():
        raise ValueError(f"{old} is of an earlier version, and can't be read: delete it, or give another --out.")
    if saved.exists() or (out / "checkpoint").exists():
        if not resume:
            raise ValueError(f"{out} holds a run already: go on with --resume, or give another --out.")
        before = report.read_description(out)
        now = report.plain(description)
        for name in ("task", "task_settings", "algorithm", "hyperparameters", "seed", "cohort"):
            if before.get(name) != now[name]:
                raise ValueError(
                    f"{out} holds another run: its {name.replace('_', ' ')} is {before.get(name)}, here it is "
                    f"{now[name]}. Give the same settings, or another --out."
                )
        return  # run.json stays as it is until there is something new to say
    report.write_description(out, description)


def _tables(description: dict[str, Any], result: rk.Run) -> list[Any]:
    short = report.summary(result)
    rows: list[dict[str, Any]] = [
        {"": name, "first": short["first"][name], "last": short["last"][name]} for name in short["last"]
    ]
    up, down = short["bytes_up_per_round"], short["bytes_down_per_round"]
    costs = {
        "exchanges per round": short["exchanges_per_round"],
        "sent per round": f"{report.size(up)} up, {report.size(down)} down",
        "seconds": short["seconds"],
    }
    rows += [{"": name, "first": "", "last": report.number(value)} for name, value in costs.items()]
    what = f"{description['algorithm']} on {description['task']}"
    title = f"{what}, {result.rounds} rounds of {description['cohort']} clients"
    exchanges = result.exchanges.assign(
        bytes_up=result.exchanges["bytes_up"].map(report.size),
        bytes_down=result.exchanges["bytes_down"].map(report.size),
    ).rename(columns={"bytes_up": "up", "bytes_down": "down"})
    return [report.table(pd.DataFrame(rows), title), report.table(exchanges, "The exchanges of a round")]


def _trusted(task: Task, result: rk.Run) -> pd.DataFrame | None:
    """Each client's weight and group, where the task knows the groups and the method learns weights; else None."""
    if not task.groups or not hasattr(result.state, "weights"):
        return None
    weights = np.asarray(result.weights, float)
    return pd.DataFrame({"client": range(len(weights)), "group": task.groups, "weight": weights.round(4)})


_ADVICE = "Try smaller steps; --debug names the client and the step where it begins."


def _warn(result: rk.Run, metric: str) -> None:
    """Say where the main metric is not finite although all variables are."""
    bad = result.history[~np.isfinite(result.history[metric])]
    if len(bad):
        _complain(f"{metric} is not finite from round {int(bad['round'].iloc[0])} on. {_ADVICE}")


@app.command()
def check(
    task: Annotated[str, typer.Argument(help="A task; see `rookery list tasks`.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the task, as in `rookery run`.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in all; the task has a default.")] = None,
    partition: Annotated[str | None, typer.Option(help="How data are dealt out: iid, shards or dirichlet.")] = None,
    seed: Annotated[int, typer.Option(help="Of the task and of the check.")] = 0,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Look at a task's problem before a run: curvature, derivatives, steps to try; code 1 if something is bad."""
    with _border():
        name, make = find("task", task, TASKS)
        _, arguments = _settings(settings or [], "", None, name, make)
        chosen = make(**arguments | _options(name, make, clients, partition, seed))
        found = rk.check(chosen.problem, chosen.clients, chosen.init, seed=seed)
        if json:
            print(report.to_json({**dataclasses.asdict(found), "task": name, "task_settings": arguments}))
        _say(quiet, json, str(found))
        if found.bad:
            _complain(f"{name}: {'; '.join(line.value for line in found.bad)}.")
            raise typer.Exit(1)


# What --set understands.


def value_of(text: str) -> Any:
    """The value that a text on the command line stands for.

    >>> [value_of(text) for text in ("3", "0.1", "1e-3", "true", "none", "auto", "5..15", "5,15")]
    [3, 0.1, 0.001, True, None, 'auto', (5, 15), (5, 15)]
    >>> value_of("epochs:2")
    Epochs(passes=2.0)
    """
    text = text.strip()
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    pair = re.fullmatch(r"([^,]+?)(?:\.\.|,)([^,]+)", text)
    if pair:
        return (value_of(pair[1]), value_of(pair[2]))
    if text.lower().startswith("epochs:"):
        passes = value_of(text[len("epochs:") :])
        if not isinstance(passes, int | float):
            raise ValueError(f"{text!r}: epochs: is followed by a number, as in epochs:5.")
        return rk.Epochs(float(passes))
    return text


_OPTIMIZERS = ("adam", "yogi", "adagrad", "sgd", "momentum")


def optimizer_of(text: str) -> Any:
    """The optimizer of optax's that a text on the command line stands for; momentum is sgd with momentum=0.9.

    >>> hasattr(optimizer_of("adam:0.001"), "update")
    True
    """
    import optax

    word, _, size = text.partition(":")
    name, _ = find("server optimizer", word.strip(), dict.fromkeys(_OPTIMIZERS))
    step: Any = value_of(size)
    if not is_number(step) or step <= 0:
        raise ValueError(f"--server-optimizer {text!r}: give a positive step size after the name, as in {name}:0.001.")
    return optax.sgd(step, momentum=0.9) if name == "momentum" else getattr(optax, name)(step)


def _settings(
    given: list[str], algorithm: str, cls: Any, task: str, make: Callable[..., Task]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is set of the algorithm, if there is one, and what of the task."""
    of_algorithm = [] if cls is None else [field.name for field in dataclasses.fields(cls)]
    of_task = [name for name in inspect.signature(make).parameters if name not in ("clients", "partition", "seed")]
    hyper: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for entry in given:
        name, sign, text = entry.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or not name or not text.strip():
            raise ValueError(f"--set {entry!r} is not of the form key=value, as in --set upper_step=0.1.")
        if name in ("clients", "partition", "seed", "rounds", "cohort", "every"):
            raise ValueError(f"--set {entry!r}: that has an option of its own, --{name} {text}.")
        key(f"{algorithm} on {task}" if cls else f"The task {task}", name, [*of_algorithm, *of_task])
        value = value_of(text)
        if name in of_algorithm:
            hyper[name] = value
        else:
            _check_argument(task, make, name, value)
            arguments[name] = value
    return hyper, arguments


def _check_argument(task: str, make: Callable[..., Task], name: str, value: Any) -> None:
    """The task's function has such an argument, and the value is of its default's type."""
    parameters = inspect.signature(make).parameters
    if name not in parameters:
        if name == "seed":
            return
        raise ValueError(f"The task {task} has no {name}; its settings are: {', '.join(parameters)}.")
    default = parameters[name].default
    kinds: dict[type, tuple[Any, str]] = {
        bool: (bool, "true or false"),
        int: (int, "a whole number"),
        float: (int | float, "a number"),
        str: (str, "a word"),
    }
    kind, expected = kinds.get(type(default), (object, ""))
    if not isinstance(value, kind) or (isinstance(value, bool) and type(default) is not bool and kind is not object):
        raise ValueError(f"{task}: {name}={value!r} is not {expected}.")
    if name == "partition":
        find("partition", value, PARTITIONS)
    if name == "clients" and value < 1:
        raise ValueError(f"{task}: clients={value} is not a whole number, at least 1.")


@app.command()
def tune(
    task: Annotated[str, typer.Argument(help="A task; see `rookery list tasks`.")],
    algorithm: Annotated[str, typer.Option("--algorithm", "-a", help="See `rookery list algorithms`.")] = "FedNest",
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="A step size to search, and its range: upper_step=0.001:1; without a range, a tenth to ten times its "
            "value. Repeat it for more. Left out: all step sizes that --set does not give.",
        ),
    ] = None,
    candidates: Annotated[int, typer.Option(help="How many to try, at most.")] = CANDIDATES,
    metric: Annotated[
        str | None,
        typer.Option(help="What decides (+name: higher is better, -name: lower); the task's main metric if left out."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A hyperparameter or a setting of the task, as in `rookery run`."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Of the best candidates; the task has a default.")] = None,
    cohort: Annotated[int | None, typer.Option(help="Clients in each round; the task has a default.")] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in all; the task has a default.")] = None,
    partition: Annotated[str | None, typer.Option(help="How data are dealt out: iid, shards or dirichlet.")] = None,
    seed: Annotated[int, typer.Option(help="Of the task and of the runs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; runs/tune-TASK-ALGORITHM if left out.")] = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Find an algorithm's step sizes: many at once, the worse half stopped early; the best, a picture, a command."""
    with _border():
        asked = _ask(task, algorithm, settings or [], clients, partition, seed)
        chosen, method = asked.task, asked.method
        folder = out or Path("runs") / f"tune-{asked.task_name}-{asked.algorithm_name}"
        if folder.is_file():
            raise ValueError(f"--out {folder} is a file; give a folder.")
        rounds_asked = chosen.rounds if rounds is None else rounds
        given = [entry.partition("=")[0].strip().replace("-", "_") for entry in settings or []]
        search = _search(over, method, given)
        if asked.note and not quiet:
            print(asked.note, file=sys.stderr)
        found = rk.tune(
            chosen.problem,
            chosen.clients,
            method,
            chosen.init,
            rounds_asked,
            evaluate=chosen.evaluate,
            evaluate_client=chosen.evaluate_client,
            metric=chosen.metric if metric is None else metric,
            search=search,
            candidates=candidates,
            cohort=chosen.cohort if cohort is None else cohort,
            seed=seed,
            progress=False if quiet or json else None,
        )
        if found.interrupted and found.best is None:
            _complain("Stopped before any candidates were compared.")
            raise typer.Exit(130)
        options = {"clients": clients, "partition": partition, "cohort": cohort, "rounds": rounds, "seed": seed or None}
        kept = [entry for entry, name in zip(settings or [], given, strict=True) if name not in found.search]
        base = [f"{asked.task_name} --algorithm {asked.algorithm_name}"]
        base += [f"--{name} {value}" for name, value in options.items() if value is not None]
        base += [f"--set {shlex.quote(entry)}" for entry in kept]
        more = [] if metric is None else [f"--metric {metric}"]
        more += [] if candidates == CANDIDATES else [f"--candidates {candidates}"]
        told = _told(asked, found, base, more, folder)
        folder.mkdir(parents=True, exist_ok=True)
        found.table.to_csv(folder / "candidates.csv", index=False)
        (folder / "tuning.json").write_text(report.to_json(told) + "\n")
        title = f"{asked.algorithm_name} on {asked.task_name}: {found.metric} by step size"
        picture = report.save(found.picture(title), folder / "landscape.png")
        if json:
            print(report.to_json({**told, "candidates": found.table.to_dict("records")}))
        _say(quiet, json, *_tuned(found, asked, told, picture))
        if found.best is None:
            _complain(f"All {len(found.table)} candidates diverged. Search smaller steps: {told['next']}")
            raise typer.Exit(1)
        if not (found.value > found.start if found.higher_is_better else found.value < found.start):
            _complain(f"No candidate is better than the start, where {found.metric} is {report.number(found.start)}.")
        if found.interrupted:
            _complain("Stopped early: this is the best so far.")
            raise typer.Exit(130)


def _search(over: list[str] | None, method: Any, given: list[str]) -> dict[str, tuple[float, float] | None] | None:
    """The step sizes to search, each with its range if it has one; None if there are none."""
    if over is None:
        names = [name for name in step_sizes(method) if name not in given]
        if not names and step_sizes(method):
            raise ValueError(
                f"--set gives every step size of {type(method).__name__}; name those to search with --over."
            )
        return dict.fromkeys(names) or None
    ranges: dict[str, tuple[float, float] | None] = {}
    for entry in over:
        name, sign, text = entry.partition("=")
        name = name.strip().replace("-", "_")
        key(type(method).__name__, name, [field.name for field in dataclasses.fields(method)])
        try:
            low, high = (float(end) for end in text.split(":")) if sign else (0.0, 0.0)
        except ValueError:
            raise ValueError(f"--over {entry!r} is not of the form name=low:high, as in upper_step=0.001:1.") from None
        ranges[name] = (low, high) if sign else None
    return ranges


def _told(asked: _Asked, found: rk.Tuning, base: list[str], more: list[str], folder: Path) -> dict[str, Any]:
    """What a search has come to, and what to run next, as JSON holds it."""
    best = {} if found.best is None else {name: getattr(found.best, name) for name in found.search}
    run = " ".join(["rookery run", *base, *(f"--set {name}={value!r}" for name, value in best.items())])
    ranges = found.moved()
    if found.best is None:
        ranges = {name: (low / 100, low) for name, (low, _) in ranges.items()}
    windows = [f"--over {name}={low:.3g}:{high:.3g}" for name, (low, high) in ranges.items()]
    again = " ".join(["rookery tune", *base, *more, *windows])
    return {
        "task": asked.task_name,
        "task_settings": asked.arguments,
        "algorithm": asked.algorithm_name,
        "rounds": found.rounds,
        "metric": found.metric,
        "search": found.search,
        "best": best,
        "value": found.value,
        "edges": found.edges,
        "diverged": found.diverged,
        "tried": len(found.table),
        "seconds": found.seconds,
        "compiling": found.compiling,
        "interrupted": found.interrupted,
        "run": run if best else None,
        "next": again if found.edges or found.diverged == len(found.table) else None,
        "out": folder,
    }


def _tuned(found: rk.Tuning, asked: _Asked, told: dict[str, Any], picture: Path) -> list[Any]:
    """A search for the terminal: the best candidates and the one that was set, how it went, and what to do next."""
    names, rungs = list(found.search), [name for name in found.table.columns if name.startswith("round ")]
    columns: dict[str, list[Any]] = {"": [*names, *rungs]}
    for place, row in enumerate(found.table.to_dict("records")):
        lost = row["status"] == "diverged"
        words = ["best" if place == 0 else str(place + 1)] if place < 5 and not lost else []
        if all(row[name] == getattr(asked.method, name) for name in names):
            words.append("as set: diverged" if lost else "as set")
        if words:
            columns[", ".join(words)] = ["" if pd.isna(row[name]) else row[name] for name in [*names, *rungs]]
    seconds = f"{found.seconds:.0f} s, {found.compiling:.0f} of them compiling"
    tried = f"{found.diverged} of {len(found.table)} diverged. It took {seconds}."
    title = f"{asked.algorithm_name} on {asked.task_name}: {found.metric}, the best of {len(found.table)} candidates"
    said = [report.table(pd.DataFrame(columns), title), tried, f"The picture: {picture}"]
    if told["run"]:
        said.append(f"Run the best:\n  {told['run']}")
    for name, end in found.edges.items():
        low, high = found.search[name]
        said.append(f"{name} is best at the {end} end of its range, {low:.3g} to {high:.3g}.")
    if found.edges:
        said.append(f"Look further there:\n  {told['next']}")
    return said


@app.command()
def reproduce(
    experiment: Annotated[str, typer.Argument(help="See `rookery list experiments`.")],
    quick: Annotated[bool, typer.Option("--quick", help="The same code, scaled down to minutes or less.")] = False,
    out: Out = None,
    seeds: Annotated[int | None, typer.Option(help="How many; the experiment has a default.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data sets are, or are to be put.")] = None,
    quiet: Quiet = False,
) -> None:
    """Reproduce a figure or a table of a paper: numbers, a picture, and its claims, checked."""
    from rookery import experiments

    with _border():
        name, _ = find("experiment", experiment, experiments.EXPERIMENTS)
        if seeds is not None and seeds < 1:
            raise ValueError(f"--seeds {seeds} is not a whole number, at least 1.")
        folder = experiments.reproduce(name, out or Path("runs") / name, quick, seeds, data_dir, not quiet)
        _say(quiet, False, f"Written to {folder}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `rookery run --out` wrote.")],
    by: Annotated[str, typer.Option(help="rounds, exchanges, bytes, samples or seconds.")] = "rounds",
    metric: Annotated[str | None, typer.Option(help="Which one; the first run's main metric if left out.")] = None,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("comparison.png"),
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Show saved runs side by side: a table and a picture. Runs that differ in the seed alone share a line."""
    with _border():
        by = find("measure", by, report.ACROSS)[0]
        saved = [report.read_run(folder) for folder in runs]
        common = [m for m in report.metrics(saved[0][1]) if all(m in history for _, history in saved)]
        if not common:
            raise ValueError("These runs have no metric in common.")
        asked = saved[0][0]["metric"] if metric is None else metric
        sign = asked[:1] if asked.startswith(("+", "-")) else ""
        goal = direction(sign + find("common metric", asked.removeprefix(sign), dict.fromkeys(common))[0])
        labels = report.labels([description for description, _ in saved])
        frame = pd.concat(
            report.across(history).assign(label=label, seed=description["seed"], run=str(folder))
            for label, folder, (description, history) in zip(labels, runs, saved, strict=True)
        )
        if out.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise ValueError(f"--out {out}: a picture's name ends in .png, .pdf or .svg.")
        rows = pd.DataFrame([_row(own, goal) for _, own in frame.groupby("run", sort=False)])
        report.save(report.compared(frame, by, goal.signed), out)
        if json:
            print(report.to_json({"by": by, "metric": goal.name, "runs": rows.to_dict("records"), "picture": str(out)}))
        shown = rows.assign(bytes=rows["bytes"].map(report.size))
        tasks = ", ".join(dict.fromkeys(description["task"] for description, _ in saved))
        _say(quiet, json, report.table(shown, f"{goal.name} on {tasks}"), f"The picture: {out}")


def _row(own: pd.DataFrame, goal: Direction) -> dict[str, Any]:
    last, values = own.iloc[-1], own[goal.name]
    return {
        "run": last["run"],
        "method": last["label"],
        "seed": int(last["seed"]),
        "last": float(values.iloc[-1]),
        "best": float(values.max() if goal.higher_is_better else values.min()),
        "rounds": int(last["round"]),
        "exchanges": int(last["exchanges"]),
        "bytes": int(last["bytes_up"] + last["bytes_down"]),
        "samples": int(last["samples"]),
        "seconds": float(last["seconds"]),
    }


@app.command("report")
def report_page(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of `rookery run --out` or `rookery reproduce`, or JSON-lines files.")
    ],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Its heading; the tasks' names if left out.")] = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Write runs into one HTML page that opens offline: curves, costs, settings, weights, a reproduction's claims."""
    from rookery import html

    with _border():
        html.write(runs, out, title)
        if json:
            print(report.to_json({"report": str(out), "runs": [str(path) for path in runs]}))
        _say(quiet, json, f"The report: {out}")


@app.command()
def bench(quiet: Quiet = False, json: AsJson = False) -> None:
    """Measure the speed of this machine on fixed work."""
    from rookery import bench as benchmark

    with _border():
        result = benchmark.run()
        if json:
            print(report.to_json(result))
        flat = pd.json_normalize(report.plain(result), sep=" ").iloc[0]
        _say(quiet, json, report.table(pd.DataFrame({"": flat.index, "value": flat.to_list()})))


if __name__ == "__main__":
    main()
