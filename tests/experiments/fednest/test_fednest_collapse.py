"""The claims about LFedNest's failure and about Fig. 5, on curves whose verdict is known."""

import numpy as np
import pandas as pd
import pytest

from rookery.experiments.fednest import collapse
from rookery.experiments.fednest import fig5 as light

ROUNDS = np.arange(0, 501, 10)
LASTS, FAILS = np.full(len(ROUNDS), 0.9), np.where(ROUNDS < 300, 0.9, 0.1)


def frame(ends: dict[tuple[str, str, collapse.Steps], np.ndarray], seeds: int = 3) -> pd.DataFrame:
    """Runs by method, habits and steps; a seed's accuracies are these, a little higher."""
    frames = [
        pd.DataFrame(
            {
                "method": method, "habits": habits, "steps": steps.words(), "seed": seed, "round": ROUNDS,
                "run": f"{method}, {habits}, {steps.words()}", "accuracy": curve + 0.001 * seed,
                "curvature": ROUNDS.astype(float),
            }
        )
        for (method, habits, steps), curve in ends.items()
        for seed in range(seeds)
    ]  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def of_steps(**fails: bool) -> pd.DataFrame:
    """LFedNest with each of the smaller steps, which fail or last."""
    steps = {"OUTER": collapse.OUTER, "LOWER": collapse.LOWER, "SERIES": collapse.SERIES, "UPPER": collapse.UPPER}
    return frame(
        {("LFedNest", h, s): FAILS if fails.get(name) else LASTS for name, s in steps.items() for h in ("none", "all")}
    )


@pytest.mark.parametrize(("outer", "lower", "holds"), [(False, True, True), (True, True, False), (False, False, False)])
def test_the_outer_level_decides_only_if_the_lower_step_does_not(outer: bool, lower: bool, holds: bool) -> None:
    assert collapse.outer_level_decides(of_steps(OUTER=outer, LOWER=lower)).holds is holds


def test_the_authors_script_fails_only_if_every_seed_does_and_is_no_set_of_habits() -> None:
    ours = {("LFedNest", "none", collapse.SCRIPT): FAILS}
    assert collapse.the_script_fails(frame(ours)).holds is None
    lasts = frame({**ours, ("LFedNest", collapse.AUTHORS, collapse.SCRIPT): LASTS})
    assert collapse.the_script_fails(lasts).holds is False
    assert collapse.no_habit_prevents_it(lasts).holds
    assert collapse.the_script_fails(frame({("LFedNest", collapse.AUTHORS, collapse.SCRIPT): FAILS})).holds


def test_a_run_fails_only_after_its_curvature_has_passed_the_limit() -> None:
    late = frame({("LFedNest", "none", collapse.SCRIPT): FAILS})  # the curvature is the round: 200 before 300
    assert collapse.passes_the_limit(late).holds
    early = late.assign(curvature=0.5 * late["curvature"])
    assert not collapse.passes_the_limit(early).holds
    assert not collapse.passes_the_limit(frame({("LFedNest", "none", collapse.SCRIPT): LASTS})).holds


@pytest.mark.parametrize(
    ("light", "svrg", "joint", "holds"),
    [(0.87, 0.9, 0.8, True), (0.85, 0.9, 0.8, False), (0.87, 0.86, 0.8, False), (0.87, 0.9, 0.86, False)],
)
def test_the_figures_come_out_by_level_and_order(light: float, svrg: float, joint: float, holds: bool) -> None:
    ends = {"LFedNest": light, "LFedNestSVRG": svrg, "LFedNestNonAlt": joint}
    results = frame({(m, "all", collapse.OUTER): np.full(len(ROUNDS), end) for m, end in ends.items()})
    assert collapse.as_in_the_figures(results).holds is holds


def of_light(ends: dict[str, float]) -> pd.DataFrame:
    """The three light methods at these accuracies, with their communications a round."""
    each = {"LFedNest": 2, "LFedNestSVRG": 3, "LFedNestNonAlt": 1}
    frames = [
        pd.DataFrame(
            {
                "method": m, "run": m, "seed": seed, "round": ROUNDS,
                "exchanges": each[m] * ROUNDS, "accuracy": np.where(ROUNDS < 200, 0.8, end) + 0.001 * seed,
            }
        )
        for m, end in ends.items()
        for seed in (0, 1, 2)
    ]  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def test_alternating_is_better_only_if_it_is_by_rounds_and_by_communications():
    """With 500 communications LFedNestSVRG has had 150 to 166 rounds, LFedNestNonAlt 450 to 500."""
    found = light.alternating_better(of_light({"LFedNest": 0.91, "LFedNestSVRG": 0.92, "LFedNestNonAlt": 0.89}))
    assert found.holds is False
    assert [own.mean for own in found.figures.values()] == pytest.approx([0.02, -0.09, 0.02, 0.03])
    assert light.alternating_better(of_light({"LFedNest": 0.91, "LFedNestSVRG": 0.92, "LFedNestNonAlt": 0.7})).holds
    tied = light.alternating_better(of_light({"LFedNest": 0.91, "LFedNestSVRG": 0.92, "LFedNestNonAlt": 0.8}))
    assert tied.holds is None
    assert "By rounds it holds" in tied.note
    assert light.alternating_better(of_light(dict.fromkeys(light.LIGHT, 0.8))).holds is None
