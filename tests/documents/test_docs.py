"""The code on the pages runs, and so do the README's commands."""

import ast
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from rookery import cli
from rookery.channels.account import Account, Draws
from rookery.report import html

ROOT = Path(__file__).parents[2]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


@pytest.mark.slow
def test_the_page_on_adding_an_algorithm(tmp_path: Path) -> None:
    page, held_to = blocks("docs/add-an-algorithm.md", "python")
    use = """
import jax.numpy as jnp
problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
clients = rk.Clients(upper=[jnp.array([1.0]), jnp.array([3.0])])
for engine in (None, rk.Federation(), rk.Simulation(debug=True)):
    run = rk.solve(problem, clients, FedSGD(), jnp.zeros(()), rounds=60, engine=engine)
    assert abs(float(run.x) - 2) < 1e-4 and run.history["exchanges"].iloc[-1] == 60
"""
    script = tmp_path / "page.py"
    script.write_text(f"{page}{use}import pytest\n{held_to}")
    with jax.enable_x64(False):  # as a user runs it
        runpy.run_path(str(script))


def test_the_page_on_engines_shows_the_plan_as_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Exchanges, shapes and bytes are the same; line numbers are left out on the page."""
    explained, *_ = blocks("docs/engines.md", "python")
    (shown,) = blocks("docs/engines.md", "text")
    with jax.enable_x64(False):
        exec(compile(explained, "engines.md", "exec"), {})
    assert shown == re.sub(r"py:\d+", "py:…", capsys.readouterr().out)


def test_the_engine_and_the_transport_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, interpreter, engine, transport = blocks("docs/engines.md", "python")
    with jax.enable_x64(False):
        exec(compile(interpreter + engine, "engines.md", "exec"), {})
        *exchanges, last = capsys.readouterr().out.splitlines()
        assert exchanges == [f"mean {name!r} of 3 clients" for name in ("q", "y", "p", "Hp", "h", "x")]
        assert last == "True True"
    exec(compile(transport, "engines.md", "exec"), {})  # in threads, which do not see enable_x64
    here, there = map(float, capsys.readouterr().out.split()[-2:])
    assert here == pytest.approx(there, rel=1e-6)


def test_the_page_on_checkpoints_and_channels(capsys: pytest.CaptureFixture[str]) -> None:
    _, channel, second, session = blocks("docs/checkpoints-and-channels.md", "python")
    names: dict[str, Any] = {}  # the second channel uses those of the first
    with jax.enable_x64(False):
        exec(compile(channel, "checkpoints-and-channels.md", "exec"), names)
        assert capsys.readouterr().out.splitlines() == ["2.000 400", "2.000 200"]
        exec(compile(second, "checkpoints-and-channels.md", "exec"), names)
        assert capsys.readouterr().out.splitlines() == ["0.00 6400", "0.15 2400"]
        exec(compile(session, "checkpoints-and-channels.md", "exec"), {})
    rounds, x, exchanges = capsys.readouterr().out.split()
    assert abs(float(x) - 2) < 0.01
    assert rounds == exchanges


def test_the_page_on_the_clock() -> None:
    names: dict[str, Any] = {}
    for program in blocks("docs/clock.md", "python"):
        exec(compile(program, "clock.md", "exec"), names)
    run, early = names["run"], names["early"]
    assert early.history["clock"].iloc[-1] < run.history["clock"].iloc[-1]
    assert early.history["missing"].iloc[-1] == 50
    assert early.x > run.x  # towards the data of fast clients
    late, of_run = names["late"].history.iloc[-1], run.history.iloc[-1]
    assert late["bytes_up"] == of_run["bytes_up"]
    assert (round(late["clock"]), round(of_run["clock"])) == (19, 48)


def test_the_page_on_secure_sums(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks("docs/secure-sums.md", "python")
    exec(compile(program, "secure-sums.md", "exec"), {})
    assert capsys.readouterr().out == "[0.583 0.583]\n" * 2


@pytest.mark.slow
def test_the_page_on_compression(capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes are those of the table; the accuracies, too, up to rounding on another machine."""
    (page,) = blocks("docs/compression.md", "python")
    with jax.enable_x64(False):
        exec(compile(page, "compression.md", "exec"), {})
    found = re.findall(r"(.*) kB up, (.*) kB down, accuracy (.*)", capsys.readouterr().out)
    text = (ROOT / "docs" / "compression.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| .* \| (\S+) kB \| .* % \| (\S+) kB \| (\S+) \|$", text, flags=re.MULTILINE)
    assert len(found) == len(table) == 8
    for (up, down, accuracy), (shown_up, shown_down, shown) in zip(found, table, strict=True):
        assert (up, down) == (shown_up, shown_down)
        assert float(accuracy) == pytest.approx(float(shown), abs=0.03)


@pytest.mark.slow
def test_the_page_on_privacy(capsys: pytest.CaptureFixture[str]) -> None:
    """The budgets are kept exactly; the accuracies are those of the page, up to rounding on another machine."""
    names: dict[str, object] = {}
    (spent, price), (accuracies, shown) = (blocks("docs/privacy.md", kind) for kind in ("python", "text"))
    with jax.enable_x64(False):
        exec(compile(spent, "privacy.md", "exec"), names)
        found = re.findall(r"ε = (.*): accuracy (.*)", capsys.readouterr().out)
        exec(compile(price, "privacy.md", "exec"), names)
    assert capsys.readouterr().out == shown
    expected = re.findall(r"ε = (.*): accuracy (.*)", accuracies)
    assert [epsilon for epsilon, _ in found] == [epsilon for epsilon, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert float(one) == pytest.approx(float(other), abs=0.03)


@pytest.mark.slow
def test_the_numbers_of_the_page_on_privacy() -> None:
    """Noise for cohorts of each kind, and ε by the number of results."""
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    drawn = {"`rk.Poisson(50)`": (None, 0.05, 50), "50": ((1000, 50), 0.05, 50), "all 1,000": ((1000, 1000), 1.0, 1000)}
    for cohort, (fixed, chance, size) in drawn.items():
        noise = Account((), (Draws(1, 1, chance),), fixed).noise(8, 1e-5, 200)
        assert f"| {cohort} | {noise:.2g} | {noise / size:.2g} |" in text
    one, three, ten = (Account((), (Draws(1, k, 0.05),)).epsilon(1.0, 1e-5, 100) for k in (1, 3, 10))
    assert f"100 rounds with one result cost ε = {one:.2g}, with three {three:.2g}, with ten {ten:.2g}." in text


@pytest.mark.slow
def test_the_page_on_robust_and_fair_training(capsys: pytest.CaptureFixture[str]) -> None:
    (page,) = blocks("docs/robust-and-fair.md", "python")
    exec(compile(page, "robust-and-fair.md", "exec"), {})
    value, weight = map(float, capsys.readouterr().out.split())
    assert 1 < value < 2  # the variance of t is 1
    assert 1 / 400 < weight < 0.1


@pytest.mark.slow
def test_the_page_on_clients_that_lie(capsys: pytest.CaptureFixture[str]) -> None:
    """The accuracies are those of the page, up to rounding on another machine."""
    (page,), (shown,) = (blocks("docs/robust.md", kind) for kind in ("python", "text"))
    with jax.enable_x64(False):
        exec(compile(page, "robust.md", "exec"), {})
    lines = [line.rsplit(" ", 1) for line in capsys.readouterr().out.splitlines()]
    expected = [line.rsplit(" ", 1) for line in shown.splitlines()]
    assert [name for name, _ in lines] == [name for name, _ in expected]
    for (_, one), (_, other) in zip(lines, expected, strict=True):
        assert float(one) == pytest.approx(float(other), abs=0.03)


@pytest.mark.slow
def test_the_page_on_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for page in blocks("docs/demo.md", "python"):
        exec(compile(page, "demo.md", "exec"), names)
    assert capsys.readouterr().out.splitlines() == ["(80,)", "(6,)", "['good', 'bad']"]


def test_the_commands_of_the_demo_are_on_its_page() -> None:
    from rookery.cli import demo_stories as demo

    (shown,) = [block for block in blocks("docs/demo.md", "console") if "rookery run" in block]
    lines = shown.replace("\\\n    ", "").splitlines()
    assert lines == [f"$ {story.command(story.entries[-1])}" for story in demo.STORIES]


@pytest.mark.slow
def test_the_page_on_models(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for page in blocks("docs/models.md", "python"):
        exec(compile(page, "models.md", "exec"), names)
    assert capsys.readouterr().out.split() == ["MLP", "True"]
    weights = {"conv.weight": np.ones((8, 3, 5, 4)), "linear.weight": np.ones((10, 6))}
    found = names["from_torch"](weights | {"conv.bias": np.ones(8), "linear.bias": np.ones(10)})  # type: ignore[operator]
    assert found["Conv_0"]["kernel"].shape == (5, 4, 3, 8)
    assert found["Dense_0"]["kernel"].shape == (6, 10)


@pytest.mark.slow
def test_the_page_on_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    (page,) = blocks("docs/optimizers.md", "python")
    exec(compile(page, "optimizers.md", "exec"), {})
    assert f"# {', '.join(capsys.readouterr().out.split())}\n" in page


@pytest.mark.slow
def test_the_page_on_tables(capsys: pytest.CaptureFixture[str]) -> None:
    page, weighing, measuring, benchmark = blocks("docs/data.md", "python")
    shown, learnt = blocks("docs/data.md", "text")
    names: dict[str, Any] = {}
    exec(compile(weighing, "data.md", "exec"), names)
    found, expected = (ast.literal_eval(text) for text in (capsys.readouterr().out, learnt))
    assert found == pytest.approx(expected, abs=0.02)
    assert names["baseline"].x.shape == (2,)
    exec(compile(measuring, "data.md", "exec"), names)
    history = names["run"].history
    assert (history["accuracy_q0"] < history["accuracy_q100"]).iloc[-1]
    exec(compile(benchmark, "data.md", "exec"), names)
    assert 0.68 < names["run"].history["accuracy"].iloc[-1] < 0.77  # FLamby's mean is .726 ± .014
    capsys.readouterr()
    exec(compile(page, "data.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith(shown)
    weights = ast.literal_eval(printed.splitlines()[-1])
    assert min(weights["age"], weights["pressure"]) > 0.3 > abs(weights["sex=f"])


def test_the_page_on_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (page,), (shown,) = blocks("docs/partitions.md", "python"), blocks("docs/partitions.md", "text")
    exec(compile(page, "partitions.md", "exec"), {})
    assert capsys.readouterr().out == shown
    assert Path("clients.png").exists()


def test_the_readme_example_is_the_example_that_is_run() -> None:
    (shown, *_) = blocks("README.md", "python")
    code = (ROOT / "examples" / "hyperparameters.py").read_text()
    for line in filter(None, shown.splitlines()):
        assert line in code, line


@pytest.mark.slow
def test_the_page_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first commands run; every command, and every file that a run writes, is described."""
    monkeypatch.chdir(tmp_path)
    (shown,) = blocks("docs/command-line.md", "console")
    for line in shown.splitlines():
        result = CliRunner().invoke(cli.app, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert all(f"`{path.name}`" in page for path in (tmp_path / "runs" / "first").iterdir())
    assert {name for name in cli.program.COMMANDS if f"\n| `{name}" not in page} == set()


SHOWN = [c for block in blocks("README.md", "console") for c in block.splitlines()]


def arguments_of(command: str) -> list[str]:
    program, *arguments = shlex.split(command.split("#")[0].removeprefix("$ "))
    assert program == "rookery"
    return arguments


@pytest.mark.parametrize(
    "command", [c for c in SHOWN if not any(word in c for word in ("reproduce", "tune", "--seeds"))]
)
def test_readme_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short ones, within this process."""
    monkeypatch.chdir(tmp_path)
    with jax.enable_x64(False):
        result = CliRunner().invoke(cli.app, arguments_of(command))
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.parametrize("command", SHOWN)
def test_readme_commands_in_a_process_of_their_own(command: str, tmp_path: Path) -> None:
    """Every command shown runs (the long ones are shown with their options for a short run)."""
    arguments = arguments_of(command)
    subprocess.run([sys.executable, "-m", "rookery.cli", *arguments], check=True, cwd=tmp_path, capture_output=True)


def test_the_page_on_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks("docs/report.md", "python")), "report.md", "exec"), {})
    assert Path("distance.png").exists()
    assert Path("first/weights.safetensors").exists()
    html.write([Path("runs.jsonl")], Path("report.html"))
    assert Path("report.html").read_text().count('"seed":') >= 3


@pytest.mark.slow
def test_the_page_on_joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command, (page,) = blocks("docs/join.md", "sh")[0], blocks("docs/join.md", "python")
    result = CliRunner().invoke(cli.app, [*shlex.split(command)[1:], "--splits", "2"])
    assert result.exit_code == 0, result.output
    assert Path("join/worth.html").exists()
    page = page.replace('"ecg"])', '"ecg"], splits=2)')
    assert "splits=2" in page
    exec(compile(page, "join.md", "exec"), {})
    named = re.search(r'result.save\("worth"\)  # (.*)', page)
    assert named is not None
    assert sorted(path.name for path in Path("worth").iterdir()) == sorted(named[1].split(", "))


@pytest.mark.slow
def test_the_page_on_steps() -> None:
    (page,) = blocks("docs/choosing-steps.md", "python")
    exec(compile(page, "choosing-steps.md", "exec"), {})


def test_the_code_of_other_libraries_parses() -> None:
    assert len([ast.parse(code) for code in blocks("docs/coming-from.md", "py")]) == 5


@pytest.mark.slow
def test_the_page_on_coming_from_another_library(capsys: pytest.CaptureFixture[str]) -> None:
    """Our part runs, with the numbers that the page says both have."""
    names: dict[str, Any] = {}
    runs, printed = [], []
    with jax.enable_x64(False):
        for page in blocks("docs/coming-from.md", "python"):
            exec(compile(page, "coming-from.md", "exec"), names)
            runs.append(names.get("run"))
            printed.append(capsys.readouterr().out)
    _, plain, adam, private, penalties, soba = zip(runs, printed, strict=True)
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    assert float(names["accuracy"](plain[0].x, ())["accuracy"]) == pytest.approx(0.933, abs=0.004)
    assert adam[0].history["accuracy"].iloc[-1] == pytest.approx(0.943, abs=0.004)
    assert private[0].history["accuracy"].iloc[-1] == pytest.approx(0.93, abs=0.03)
    assert private[0].history["epsilon"].iloc[-1] <= 8
    assert float(penalties[1]) == pytest.approx(0.4419, abs=2e-4)
    assert soba[0].history["distance"].iloc[-1] < 1e-6
    assert all(number in text for number in ("of 0.933", "of 0.943", "about .93", "of 0.4419"))
