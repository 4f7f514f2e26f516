"""FLamby's table of Fed-TCGA-BRCA."""

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from rookery.experiments.flamby import tables
from rookery.experiments.machinery import Experiment, Finding, description
from rookery.experiments.machinery.numbers import keyed
from rookery.tasks.flamby import fed_tcga

TCGA = tables.Benchmark(
    task=fed_tcga,
    metric="concordance",
    clients={client: client.capitalize() for client in ("northeast", "south", "west", "midwest", "europe", "canada")},
    rows={"northeast": 248, "south": 156, "west": 164, "midwest": 129, "europe": 129, "canada": 40},
    batch=8,
    rounds=5,
    epochs=30,
    adam=0.1,
    local={
        "FedAvg": 0.1, "FedProx": 0.1, "Scaffold": 0.01, "FedAdam": 0.01, "FedYogi": 0.01, "FedAdagrad": 0.01,
        "Cyclic": 0.01,
    },
    proximal=0.1,
    server={"FedAdam": 0.1, "FedYogi": 0.1, "FedAdagrad": 1.0},
    published=keyed(Path(__file__).with_name("tcga.csv"), 2),
)  # fmt: skip

claim = tables.claims(TCGA, "Fed-TCGA-BRCA", "seven")
claim(
    "Of the 91 means without Cyclic, at least 83 are within one of FLamby's standard deviations.",
    benchmark=TCGA,
    least=83,
)(tables.nearly_all)


@claim("Canada's C-index is 0, 1/3, 2/3 or 1 in all runs: it rests on three pairs of patients.")
def three_pairs(results: pd.DataFrame) -> Finding:
    thirds = 3 * np.unique(np.concatenate([own for (_, test), own in TCGA.ends(results).items() if test == "canada"]))
    return Finding(bool(np.all(np.abs(thirds - np.round(thirds)) < 1e-3)), {"values": thirds / 3})


tcga = Experiment(
    **description("flamby-tcga", globals()),
    runs=TCGA.runs,
    picture=partial(tables.picture, benchmark=TCGA, baseline={}),
    claims=tuple(claim),
    headlines=partial(tables.headlines, benchmark=TCGA),
)
