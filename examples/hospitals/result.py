"""What a hospital gets from the heart study: python result.py RUN TABLE [TABLE ...] [--picture FILE].

A hospital computes this for itself, from the model that the run has published and its own table. Given the common
weights, its own intercept is the one that fits its own rows best: the lower level of the study.
"""

import argparse
from pathlib import Path

import heart
import jax
import numpy as np
import pandas as pd
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize

LABELS = {"alone": "alone", "fedavg": "FedAvg", "own_intercept": "own intercept"}
COLOURS = ("#767676", "#D55E00", "#0072B2")


def published(run: Path) -> dict:
    """The run's common model."""
    saved = np.load(run / "state.npz")
    return {"weights": saved["x/weights"], "average": {"w": saved["x/average/w"], "b": saved["x/average/b"]}}


def result(x: dict, table: pd.DataFrame) -> dict[str, float]:
    """A hospital's number of test patients, and the accuracy of each model and of the commoner class on them."""
    rows = heart.levels(table)
    start, whole = ravel_pytree(heart.task().init[1])
    objective = jax.jit(jax.value_and_grad(lambda y: heart.lower(x, whole(y), rows["lower"])))
    best = minimize(lambda y: [np.asarray(part, float) for part in objective(y.astype(start.dtype))], start, jac=True)
    models = heart.models(x, whole(np.asarray(best.x, start.dtype)))
    common = rows["lower"]["ill"].mean() > 0.5
    return (
        {"test patients": len(rows["test"]["ill"])}
        | {name: float(heart.accuracy(model, rows["test"])) for name, model in models.items()}
        | {"commoner class": float(np.mean((rows["test"]["ill"] > 0) == common))}
    )


def draw(found: pd.DataFrame, path: Path) -> None:
    """Write a picture: a row for each hospital, a dot for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.6 * len(found) + 1.4), layout="constrained")
    axes = figure.subplots()
    for name, shift, colour in zip(heart.MODELS, (-0.2, 0, 0.2), COLOURS, strict=True):
        axes.plot(found[name], np.arange(len(found)) + shift, "o", color=colour, label=LABELS[name], markersize=7)
    axes.plot(found["commoner class"], range(len(found)), "|", color="black", label="commoner class", markersize=22)
    axes.set_yticks(range(len(found)), [f"{name} ({count:g})" for name, count in found["test patients"].items()])
    axes.set(xlabel="accuracy on test patients", ylim=(len(found) - 0.5, -0.5))
    axes.grid(axis="x", color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Print the table, and draw it if asked."""
    parser = argparse.ArgumentParser(description="What a hospital gets from the heart study.")
    parser.add_argument("run", type=Path, help="the folder of `rookery serve --out`")
    parser.add_argument("tables", type=Path, nargs="+", help="the hospital's table; on one machine, all of them")
    parser.add_argument("--picture", type=Path, help="a file for the picture")
    options = parser.parse_args()
    x = published(options.run)
    found = pd.DataFrame({path.stem: result(x, pd.read_csv(path)) for path in options.tables}).T
    print(found.astype({"test patients": int}).round(3).to_string())
    if options.picture:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
