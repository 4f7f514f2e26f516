"""The study against plain training, on all tables at once: possible here, where nobody's data are secret.

python compare.py [SEEDS]: a table of means and standard deviations over the seeds of make_data.py (0 to 9).
"""

import sys

import jax.numpy as jnp
import make_data
import numpy as np
import pandas as pd
import study

import rookery as rk

METHODS = {
    "FedAvg, rows to train on": "train",
    "FedAvg, checked rows": "check",
    "FedAvg, both": "both",
    "FedAvg, without billing, had one known": "known",
}


def plain(y, rows):
    """Every row counts alike."""
    return study.upper(None, y, rows) + study.PENALTY / 2 * (jnp.sum(y["w"] ** 2) + y["b"] ** 2)


def nested(levels):
    """The study, by FedBiO."""
    task = study.task()
    clients = rk.Clients(**levels, weights="size")
    return task, (task.problem, clients, task.algorithm(rk.FedBiO), task.init), study.measure


def fedavg(levels, rows):
    """FedAvg with local steps, on those rows."""
    task = study.task()
    train, check = levels["lower"], levels["upper"]
    chosen = {
        "train": train,
        "check": check,
        "both": [{k: np.concatenate([a[k], b[k]]) for k in a} for a, b in zip(train, check, strict=True)],
        "known": [{k: a[k][a["source"] != study.SOURCES.index("billing")] for k in a} for a in train],
    }
    clients = rk.Clients(upper=chosen[rows], test=levels["test"], weights="size")
    measure = lambda client, y, _: study.measure(client, None, y)
    return task, (rk.SingleLevel(plain), clients, rk.FedAvg(step=0.4, local_steps=5), task.init[1]), measure


def main() -> None:
    """Run all, and print the table."""
    found: dict[str, list[dict]] = {}
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 10):
        tables = make_data.tables(seed)
        by_hospital = [study.levels(table) for table in tables.values()]
        levels = {level: [own[level] for own in by_hospital] for level in study.USES}
        runs = {"the study (FedBiO)": nested(levels)}
        runs |= {name: fedavg(levels, rows) for name, rows in METHODS.items()}
        for name, (task, given, measure) in runs.items():
            run = rk.solve(*given, rounds=task.rounds, every=task.rounds, evaluate_client=measure, progress=False)
            last = run.history.iloc[-1]
            own = dict(zip(study.SOURCES, np.asarray(study.trust(run.x)), strict=True)) if "study" in name else {}
            found.setdefault(name, []).append({"accuracy": last["accuracy"], "missed": last["missed"], **own})
    each = {name: pd.DataFrame(rows) for name, rows in found.items()}
    shown = {
        name: {column: f"{100 * rows[column].mean():.1f} ± {100 * rows[column].std(ddof=0):.1f}" for column in rows}
        for name, rows in each.items()
    }
    print(pd.DataFrame(shown).T.fillna("").to_string())


if __name__ == "__main__":
    main()
