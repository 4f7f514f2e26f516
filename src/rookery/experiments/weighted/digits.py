"""The set-up of the paper on weighted nodes on scikit-learn's digits, which runs anywhere."""

from functools import partial

from rookery.experiments.machinery.claims import Claims
from rookery.experiments.machinery.experiment import Config, Experiment
from rookery.experiments.papers import WEIGHTED_PAPER
from rookery.experiments.weighted import nodes, table3


def digits_runs(quick: bool) -> list[Config]:
    """Five methods, four settings, on the bundled digits; nothing was chosen on these seeds."""
    settings, seeds = ((2,), (3,)) if quick else (nodes.FOUR, (3, 4, 5))
    return [config for setting in settings for config in nodes.all_methods(quick, "digits", setting, seeds=seeds)]


claim = Claims()
claim(table3.MINORITY)(partial(nodes.best, center="minority"))
claim(table3.DROP)(table3.personal_drop)
claim(table3.TRUSTED)(nodes.similar_trusted)

digits = Experiment(
    name="weighted-digits",
    title="whom to learn from, on the bundled digits",
    paper=f"{WEIGHTED_PAPER}: the set-up of Section 5, on other data.",
    setup=(
        "15 nodes, 5 of the minority; 60 images each of scikit-learn's digits, 100 at the centre, 1,000 test draws; "
        "multi-class logistic regression; b = 1/3. Settings: 1, class distributions; 2, the majority's labels permuted "
        "as well; 3, its images turned; 4, both. Bi-level (Alg. 3): γ = .5, γ_h = .05, η = .2, T_s = 20, τ = 10, "
        "batches of 20, 60 outer iterations; the others as many exchanges, with steps and λ chosen by the validation "
        f"accuracy of seeds 0 to 2; seeds 3 to 5 here. {nodes.SCORED}"
    ),
    runs=digits_runs,
    picture=table3.table_picture,
    more={"the nodes' weights": nodes.weights_picture},
    claims=tuple(claim),
    differences=("Not the paper's data: a version that runs anywhere, and three seeds.",),
)
