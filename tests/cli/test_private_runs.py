"""`--private` on the command line: what it prints and writes, what ends a run, and what is refused."""

import json

import pandas as pd
import pytest
from typer.testing import CliRunner

import rookery as rk
from rookery import cli, report
from rookery.cli import members
from rookery.cli.privacy import Privacy
from rookery.report import html

TASK = ["quadratic", "--clients", "12"]
FEDBIO, COMMFEDBIO = [*TASK, "--algorithm", "FedBiO"], [*TASK, "--algorithm", "CommFedBiO"]
SMALL = [*FEDBIO, "--cohort", "4", "--poisson"]
BUDGET = ["--private", "3", "--delta", "1e-3"]
CHANNEL = Privacy(clip=1.0, robust="trimmed-mean:2", attack="sign-flip:2")


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def refused(*arguments):
    """The one line on standard error of a call that must end with code 2."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run whose budget ends it early, and its folder."""
    folder = tmp_path_factory.mktemp("runs") / "ended"
    result = invoke("run", *SMALL, *BUDGET, "--noise", 1, "--rounds", 9, "--every", 1, "--out", folder)
    return result, folder


def test_a_budget_ends_the_run_with_code_3_and_one_line(ended):
    result, folder = ended
    assert result.exit_code == 3, result.output
    (line,) = result.stderr.splitlines()
    described, history = json.loads((folder / "run.json").read_text()), pd.read_csv(folder / "history.csv")
    done = described["rounds_done"]
    assert 1 <= done < 9
    assert f"FedBiO on quadratic: the budget of ε = 3 at δ = 0.001 is spent after round {done} of 9." in line
    assert described["spent"] is True
    assert history["round"].iloc[-1] == done
    assert history["epsilon"].iloc[0] == 0 < history["epsilon"].iloc[-1] <= 3
    assert "ε at δ = 0.001" in result.stdout
    assert f"{done} rounds of about 4 clients" in result.stdout
    assert "Private for each client" in result.stdout


def test_a_resumed_run_does_not_reset_the_account(ended):
    """With more rounds it is still spent; with another budget, or with none, it is another run."""
    _, folder = ended
    before = pd.read_csv(folder / "history.csv")
    more = ["run", *SMALL, "--noise", 1, "--every", 1, "--out", folder, "--resume", "--rounds", 30]
    assert invoke(*more, *BUDGET).exit_code == 3
    pd.testing.assert_frame_equal(pd.read_csv(folder / "history.csv"), before)
    assert "its epsilon is 3.0, here it is 30.0" in refused(*more, "--private", 30, "--delta", 1e-3)
    assert "holds another run" in refused("run", *FEDBIO, "--out", folder, "--resume", "--rounds", 30)


def test_the_file_that_repeats_a_run_has_its_budget(ended):
    """Its options are those of the run, also for another command that takes them."""
    _, folder = ended
    text = (folder / "run.toml").read_text()
    for line in ("private = 3.0", "delta = 0.001", "noise = 1.0", "poisson = true", "cohort = 4"):
        assert f"\n{line}\n" in text
    told = invoke("explain", "--config", folder / "run.toml", "--rounds", 9)
    assert told.exit_code == 2  # it has options that explain does not
    short = folder.parent / "explain.toml"
    short.write_text('task = "quadratic"\nalgorithm = "FedBiO"\nclients = 12\nprivate = 3\ndelta = 1e-3\nnoise = 1\n')
    shown = invoke("explain", "--config", short)
    assert "a noise multiplier of 1, 100% of what a round reveals" in shown.stdout, shown.output


def test_the_noise_of_a_budget_is_for_its_rounds(tmp_path):
    """More rounds of the same budget would need other noise, in all rounds."""
    given = ["run", *FEDBIO, *BUDGET, "--clip", 0.5, "--out", tmp_path / "r", "--quiet", "--rounds"]
    assert invoke(*given, 2).exit_code == 0
    described = json.loads((tmp_path / "r" / "run.json").read_text())
    assert described["private"] == {
        "epsilon": 3.0, "delta": 1e-3, "clip": 0.5, "unit": "client", "noise": None, "budget_rounds": 2,
    }  # fmt: skip
    assert described["epsilon"] == pytest.approx(3, rel=1e-3)
    assert described["best"] is None  # a choice by a metric would reveal something
    assert "its budget_rounds is 2, here it is 4" in refused(*given, 4, "--resume")


def test_the_report_and_the_comparison_show_the_budget(ended, tmp_path):
    """ε is an axis and a column, never a metric."""
    _, folder = ended
    sources, _ = html.read([folder])
    told = html.payload(sources)
    assert "epsilon" not in [metric["name"] for metric in told["metrics"]]
    assert "epsilon" in [axis["name"] for axis in told["across"]]
    (run,) = told["runs"]
    assert run["data"]["epsilon"] == pytest.approx(pd.read_csv(folder / "history.csv")["epsilon"].tolist())
    shown = {name: run["settings"][f"privacy.{name}"] for name in ("unit", "epsilon", "delta", "noise.x, y, u")}
    assert shown == {"unit": "client", "epsilon": 3.0, "delta": 1e-3, "noise.x, y, u": 1.0}
    table = invoke("compare", folder, "--by", "epsilon", "--out", tmp_path / "a.png")
    assert table.exit_code == 0, table.output
    assert " ε " in table.stdout
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--private", 0, "--delta", 1e-3], "epsilon must be a positive number; got 0.0"),
        (["--private", 8], "--private needs --delta"),
        (["--delta", 1e-3], "--delta needs --private"),
        (["--unit", "record"], "--unit needs --private"),
        (["--poisson"], "--poisson needs --private"),
        (["--noise", 1], "--noise needs --clip"),
        (["--private", 8, "--delta", 0.5], "delta must be below 1/n"),
        ([*BUDGET, "--clip", -1], "clip must be a positive number; got -1.0"),
        ([*BUDGET, "--unit", "row"], "unit must be"),
        ([*BUDGET, "--noise", 0.01], "epsilon must be large enough for one round; got 3"),
        ([*BUDGET, "--poisson", "--cohort", 12], "cohort must be rk.Poisson of less than 12"),
        ([*BUDGET, "--robust", "median:2"], "--robust must be given without --private"),
        (["--robust", "medain:2"], "There is no --robust 'medain'; did you mean median?"),
        (["--robust", "centered-clipping"], "--robust centered-clipping needs its radius; got none."),
        (["--robust", "median:6"], "rk.median tolerates at most 5 of the 12 clients"),
        (["--robust", "krum:few"], "attackers must be an integer of at least 0, or a share"),
        (["--compress", "top-k"], "--compress top-k needs its share; got none."),
        (["--compress", "top-k:.1:2"], "--compress must be NAME or NAME:NUMBER; got 'top-k:.1:2'"),
        (["--attack", "sign-flip:13"], "attackers must be among the 12 clients"),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_written(arguments, said, tmp_path):
    assert said in refused("run", *FEDBIO, *arguments, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_poisson_cohorts_need_a_size():
    assert "--poisson needs --cohort" in refused("run", *FEDBIO, *BUDGET, "--poisson")


def test_a_search_is_refused():
    assert "--private must be left out of a search, in which each candidate" in refused(
        "tune", "quadratic", *BUDGET[:2]
    )


def test_several_runs_are_all_checked_before_the_first(tmp_path):
    given = ["run", *FEDBIO, "-a", "CommFedBiO", *BUDGET, "--out", tmp_path / "r"]
    assert "releases that can all be accounted for" in refused(*given)
    assert not (tmp_path / "r").exists()


def test_the_price_is_printed_below_the_plan():
    shown = invoke("explain", *FEDBIO, *BUDGET, "--rounds", 5).stdout
    assert shown.startswith("FedBiO.round, 12 of 12 clients")
    assert "ε after 5 rounds with the noise below: 3" in shown
    assert "is refused: A private run" in invoke("explain", *COMMFEDBIO, *BUDGET).stdout


def test_weights_by_size_become_equal_and_said_so():
    request = cli.request.resolve("hyperparameters", "FedBiO", cli.request.TaskOptions(clients=5))
    assert request.task.clients.by_size
    fitted = Privacy(8, 1e-3).fit(request)
    assert fitted.task.clients.weights.tolist() == pytest.approx([0.2] * 5)
    assert "all clients have the same weight" in fitted.note
    assert Privacy(clip=1.0).fit(request) is request
    assert Privacy(8, 1e-3, unit="record").fit(request) is request  # sizes are public there


def test_options_are_read_as_they_were_recorded():
    for given in (Privacy(), Privacy(8, 1e-5, None, 1.0, "record", True), Privacy(clip=1.0, noise=1.0), CHANNEL):
        assert Privacy.read(given.recorded) == given


def test_a_robust_mean_is_that_of_python_and_part_of_a_runs_name(tmp_path):
    liars = ["run", *FEDBIO, "--rounds", 3, "--attack", "sign-flip:2"]
    assert invoke(*liars, "--clip", 1, "--robust", "trimmed-mean:2", "--out", tmp_path / "a").exit_code == 0
    task = rk.tasks.quadratic(clients=12)
    channel, faults = rk.chain(rk.clip(1.0), rk.trimmed_mean(2)), rk.Faults(attack=rk.attacks.SignFlip(2))
    run = rk.solve(
        task.problem, task.clients, task.algorithm(rk.FedBiO), task.init, 3, evaluate=task.evaluate, channel=channel,
        faults=faults,
    )  # fmt: skip
    described, history = report.read_run(tmp_path / "a")
    assert history[task.metric].iloc[-1] == pytest.approx(run.history[task.metric].iloc[-1], rel=1e-12)
    assert described["channel"] == {"clip": 1.0, "robust": "trimmed-mean:2", "attack": "sign-flip:2"}
    other = {**described, "channel": {"attack": "sign-flip:2"}}
    assert report.labels([described, other]) == ["FedBiO, clip=1.0, robust=trimmed-mean:2", "FedBiO"]
    assert "its robust is trimmed-mean:2, here it is None" in refused(
        *liars, "--clip", 1, "--out", tmp_path / "a", "--resume"
    )


def test_every_name_of_a_channel_makes_one():
    for known, make in ((members.ROBUST, members.robust), (members.COMPRESS, members.compression)):
        for name in known:
            assert rk.chain(make(f"{name}:{8 if name == 'quantize' else 1 if name == 'low-rank' else 0.1}"))
    assert members.robust("nearest-neighbors:2") == rk.nearest_neighbors(rk.trimmed_mean(2))
    assert members.compression("top-k:.25") == rk.top_k(0.25)
    assert {type(members.attack(f"{name}:2")).__name__ for name in members.ATTACKS} == set(rk.attacks.__all__) - {
        "LabelFlip"
    }


def test_a_record_is_the_unit(tmp_path):
    given = [
        "run",
        *FEDBIO,
        "--private",
        8,
        "--delta",
        1e-3,
        "--unit",
        "record",
        "--rounds",
        2,
        "--out",
        tmp_path / "r",
    ]
    result = invoke(*given)
    assert result.exit_code == 0, result.output
    assert "Private for each record: ε = 8 at δ = 0.001 after 2 rounds" in result.stdout
    described = json.loads((tmp_path / "r" / "run.json").read_text())
    assert described["privacy"]["unit"] == described["private"]["unit"] == "record"
    assert '\nunit = "record"\n' in (tmp_path / "r" / "run.toml").read_text()
