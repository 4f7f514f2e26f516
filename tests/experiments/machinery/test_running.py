"""The machinery of reproduction: what is stored, what is computed again, and what an interruption leaves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from rookery import Simulation, report
from rookery.algorithms import FedNest
from rookery.engines.engine import PROGRAMS
from rookery.experiments import Claim, Config, Experiment, Finding, reproduce
from rookery.experiments.machinery import one_run, running
from rookery.run.result import NonFiniteWarning
from rookery.tasks import quadratic

METHOD = FedNest(upper_step=0.1, lower_step=0.2, hessian_step=0.2)


def picture(results):
    fig, axes = report.figure()
    report.band(axes[0, 0], results, "round", "distance", label="FedNest")
    return fig


def improves(results):
    ends = results.groupby("seed")["distance"].agg(["first", "last"])
    return Finding(
        bool((ends["last"] < ends["first"]).all()), {"end": float(ends["last"].mean()), "each": list(ends["last"])}
    )


def experiment(rounds=2, method=METHOD, **changes):
    config = Config(
        "FedNest", quadratic, method, rounds, {"clients": 2}, labels={"method": "FedNest"}, seeds=(0, 1), **changes
    )
    return Experiment(
        "small",
        "a small one",
        "No paper.",
        "Two clients.",
        lambda quick: [config],
        picture,
        (Claim("It improves.", "ours", improves, "own"),),
    )


@pytest.fixture
def computed(monkeypatch):
    """The seeds of the runs that are computed."""
    seeds, solve = [], one_run.solve

    def counting(*args, **kwargs):
        seeds.append(kwargs["seed"])
        return solve(*args, **kwargs)

    monkeypatch.setattr(one_run, "solve", counting)
    return seeds


def run(small, out, **options):
    return running.run_experiment(small, out, progress=False, **options)


def test_a_second_call_computes_nothing_and_writes_the_same(tmp_path, computed):
    run(experiment(), tmp_path)
    assert computed == [0, 1]
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert set(first) == {"results.csv", "small.png", "claims.json", "made.json", "summary.md"}
    run(experiment(), tmp_path)
    assert computed == [0, 1]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == first
    results = pd.read_csv(tmp_path / "results.csv")
    assert list(results.columns[:4]) == ["run", "method", "seed", "round"]
    assert {"exchanges", "bytes_up", "bytes_down", "seconds", "distance"} <= set(results.columns)
    assert len(results) == 2 * 3


def test_a_scaled_down_page_describes_what_was_run(tmp_path):
    small = experiment()
    small = dataclasses.replace(small, setup="A thousand clients, 500 rounds.")
    run(small, tmp_path / "quick", quick=True, seeds=1)
    page = (tmp_path / "quick" / "summary.md").read_text()
    assert "At full size, not run here: A thousand clients, 500 rounds." in page
    assert "| clients = 2 | 2 | all | 0 |" in page  # the task, rounds, cohort, seeds
    run(small, tmp_path / "full", seeds=1)
    assert "## Set-up\n\nA thousand clients" in (tmp_path / "full" / "summary.md").read_text()


def test_only_what_is_missing_or_changed_is_computed(tmp_path, computed):
    run(experiment(), tmp_path)
    run(experiment(), tmp_path, seeds=3)
    assert computed == [0, 1, 2]
    run(experiment(method=dataclasses.replace(METHOD, upper_step=0.05)), tmp_path, seeds=[1])
    assert computed == [0, 1, 2, 1]
    run(experiment(), tmp_path, seeds=3)  # the runs of the other configuration did not replace these
    assert computed == [0, 1, 2, 1]
    for path in (tmp_path / "runs").glob("*.seed2.*"):
        path.write_text("round,distance\n0,")
    run(experiment(), tmp_path, seeds=3)
    assert computed == [0, 1, 2, 1, 2]


def test_an_interrupted_run_is_not_stored_and_the_finished_ones_are(tmp_path, monkeypatch):
    solve = one_run.solve

    def interrupted(*args, **kwargs):
        return dataclasses.replace(solve(*args, **kwargs), interrupted=kwargs["seed"] == 1)

    monkeypatch.setattr(one_run, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt, match="1 of 2 runs are stored"):
        run(experiment(), tmp_path)
    assert [path.name.split(".")[1] for path in (tmp_path / "runs").iterdir()] == ["seed0"]
    assert not (tmp_path / "results.csv").exists()
    monkeypatch.setattr(one_run, "solve", solve)
    run(experiment(), tmp_path)
    assert (tmp_path / "summary.md").exists()


@pytest.mark.parametrize("around", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_has_its_own_precision_and_leaves_the_process_its(tmp_path, around):
    with jax.enable_x64(around):
        run(experiment(float64=True), tmp_path / "double", seeds=1)
        run(experiment(float64=False), tmp_path / "single", seeds=1)
        assert jnp.ones(1).dtype == (jnp.float64 if around else jnp.float32)
    double, single = (pd.read_csv(tmp_path / name / "results.csv") for name in ("double", "single"))
    assert (double["bytes_up"] == 2 * single["bytes_up"]).all()
    assert double["distance"].to_numpy() == pytest.approx(single["distance"].to_numpy(), rel=1e-3)


def test_all_runs_of_a_shape_share_one_compiled_program(tmp_path):
    run(experiment(rounds=4, every=2), tmp_path, seeds=1)
    before = PROGRAMS.made
    run(experiment(rounds=4, every=2), tmp_path, seeds=4)
    run(experiment(rounds=6, every=3), tmp_path, seeds=4)
    assert PROGRAMS.made == before


def _schedule(t, start):
    return start / (t + 1)


def test_a_fingerprint_tells_schedules_apart_and_refuses_what_it_cannot():
    def of(step):
        config = Config("a", quadratic, dataclasses.replace(METHOD, upper_step=step), 1)
        return one_run.fingerprint(config, 0)

    assert of(functools.partial(_schedule, start=0.1)) == of(functools.partial(_schedule, start=0.1))
    assert of(functools.partial(_schedule, start=0.1)) != of(functools.partial(_schedule, start=0.2))
    with pytest.raises(TypeError, match="named function"):
        of(lambda t: 0.1)


def test_a_fingerprint_covers_the_package_but_not_the_engine(monkeypatch):
    config = Config("a", quadratic, METHOD, 1)
    first = one_run.fingerprint(config, 0)
    assert one_run.fingerprint(config.but(engine=Simulation(block=2)), 0) == first
    monkeypatch.setattr(one_run, "_package", lambda: "other code")
    assert one_run.fingerprint(config, 0) != first


def test_stored_runs_of_other_code_are_announced(tmp_path, capsys):
    run(experiment(), tmp_path, seeds=1)
    (stored,) = (tmp_path / "runs").iterdir()
    stored.rename(stored.with_name("fednest.seed0.0123456789ab.csv"))
    running.run_experiment(experiment(), tmp_path, seeds=2)
    assert "1 runs are stored with other settings or other code" in capsys.readouterr().err
    running.run_experiment(experiment(), tmp_path, seeds=2)
    assert "other code" not in capsys.readouterr().err


def test_a_run_that_is_not_finite_goes_on_and_is_named(tmp_path):
    method = dataclasses.replace(METHOD, upper_step=1e200)
    with pytest.warns(NonFiniteWarning, match="FedNest, seed 0: "):
        run(experiment(rounds=4, method=method), tmp_path, seeds=1)
    results = pd.read_csv(tmp_path / "results.csv")
    assert results["round"].iloc[-1] == 4
    assert not np.isfinite(results["distance"].iloc[-1])


def test_bad_names_and_seeds_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must be an experiment; got 'fig5'"):
        reproduce("fig5", tmp_path)
    with pytest.raises(ValueError, match="at least one seed"):
        run(experiment(), tmp_path, seeds=[])
    with pytest.raises(ValueError, match="data_dir must be a folder that exists; got"):
        run(experiment(), tmp_path, data_dir=tmp_path / "nowhere")
