"""Made-up runs for the report in a browser: no training, and all that a report can show."""

from typing import Any

import numpy as np
import pandas as pd

from rookery.report.html import Claims, Source

METHODS = {"FedNest": 0.93, "LFedNest": 0.9, "FedAvg": 0.84}


def history(rounds: int, rng: np.random.Generator, end: float, cost: int, clients: int = 0) -> pd.DataFrame:
    """An accuracy that rises to `end`, with quantiles over the clients; a loss that falls by orders of magnitude."""
    place = np.linspace(0, 1, rounds)
    accuracy = end - (end - 0.1) * np.exp(-6 * place) + 0.004 * rng.normal(size=rounds)
    low = np.array([0.35, 0.15, 0.0, -0.06, -0.1])
    names = [f"accuracy_q{q}" for q in (0, 10, 50, 90, 100)]
    quantiles = {name: np.clip(accuracy - by * (0.3 + place), 0, 1) for name, by in zip(names, low, strict=True)}
    at = np.arange(rounds) * 5
    weights = {f"weight_{k}": 1 / clients + (0.6 - k / clients) * place / clients for k in range(clients)}
    counts = {
        "exchanges": at * cost,
        "bytes_up": at * cost * 63_600,
        "bytes_down": at * cost * 127_200,
        "samples_upper": at * 640,
        "samples_lower": at * 3200,
    }
    measured = {"accuracy": accuracy, **quantiles, "loss": 2.3 * np.exp(-9 * place) + 1e-4 * rng.random(rounds)}
    return pd.DataFrame({"round": at, **counts, "seconds": at * 0.013 * cost, **measured, **weights})


def runs(seeds: int = 3, rounds: int = 60) -> list[Source]:
    """Three methods, a few seeds each; the first learns weights."""
    found = []
    for k, (method, end) in enumerate(METHODS.items()):
        for seed in range(seeds):
            rng = np.random.default_rng([k, seed])
            clients = 12 if k == 0 else 0
            groups = ["clean"] * 8 + ["wrong"] * 4
            frame = history(rounds, rng, end + 0.01 * rng.normal(), 11 - 5 * k, clients)
            weights = (
                pd.DataFrame({"group": groups, "weight": frame.filter(like="weight_").iloc[-1]}) if clients else None
            )
            found.append(
                Source(
                    name=f"runs/{method}-{seed}",
                    label=method,
                    seed=seed,
                    history=frame,
                    settings=settings(method, seed, k),
                    metric="accuracy",
                    exchanges=exchanges(k),
                    weights=weights,
                )
            )
    return found


def settings(method: str, seed: int, k: int) -> dict[str, Any]:
    told = {"task": "hyperrep", "algorithm": method, "cohort": 10, "rounds": 295, "seed": seed}
    return {**told, "task.partition": "shards", "upper_step": [0.01, 0.02, None][k]}


def exchanges(k: int) -> list[dict[str, Any]]:
    names = ["lower: step", "lower: correction", "hypergradient", "upper: step"][: 4 - k]
    sizes = {"bytes_up": 636_000, "bytes_down": 1_272_000}
    return [{"name": name, "kind": "mean", "shape": "(784, 200) + (200)", "count": 2, **sizes} for name in names]


def many(lines: int = 50, rounds: int = 1000) -> list[Source]:
    """As many runs of one method, one seed each."""
    found = []
    for k in range(lines):
        step = 0.001 * 1.12**k
        frame = history(rounds, np.random.default_rng(k), 0.95 - 0.4 * abs(k / lines - 0.5), 3)
        told = {**settings("FedBiO", 0, 0), "upper_step": step}
        found.append(Source(f"runs/{k}", f"FedBiO, upper_step={step:.3g}", 0, frame, told, metric="accuracy"))
    return found


CLAIMS = Claims(
    "fednest-fig0",
    [
        {"claim": "FedNest converges.", "where": "Fig. 0", "kind": "experiment", "verdict": "reproduced", "cause": "",
         "figures": {"rate": 0.36}},
        {"claim": "FedAvg stalls.", "where": "Sec. 0", "kind": "own", "verdict": "differs, ours", "cause": "budget",
         "note": "It does </script> not."},
    ],
)  # fmt: skip
