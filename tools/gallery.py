"""Draw the pictures of docs/gallery.md from the examples and tutorials that it shows.

Usage: python tools/gallery.py [NAME...]: writes docs/figures/gallery/NAME.png, for all names if none is given.
"""

import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np

import rookery as rk

ROOT = Path(__file__).parents[1]
GREY, RED, BLUE = "#767676", "#D55E00", "#0072B2"
Names = dict[str, Any]


def example(name: str) -> Names:
    """Run an example in a temporary folder, and return its names."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
        finally:
            os.chdir(here)


def tutorial(name: str) -> Names:
    """Run the cells of a tutorial, and return their names. Its figures remain open."""
    text = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
    names: Names = {}
    plt.close("all")
    plt.show = lambda: None
    for cell in re.findall(r"^```\{code-cell\}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        exec(compile(cell, name, "exec"), names)
    return names


def figure(count: int = 1, **how: Any) -> Any:
    """A new figure with some axes side by side."""
    plt.close("all")
    return plt.subplots(1, count, figsize=(4.8, 3.2), layout="constrained", **how)[1]


def last_figure(name: str, width: float = 7.8, height: float = 5.2) -> None:
    """The last figure of a tutorial, as it draws it."""
    tutorial(name)
    plt.gcf().set_size_inches(width, height)


def hyperparameters() -> None:
    penalties = np.exp(example("hyperparameters")["run"].x)
    ax = figure()
    for part, colour, name in ((slice(0, 30), BLUE, "measurements"), (slice(30, 60), RED, "columns of noise")):
        ax.bar(np.arange(60)[part], np.sort(penalties[part]), color=colour, label=name)
    ax.set(yscale="log", ylabel="learnt penalty", xlabel="columns", xticks=[])
    ax.legend()


def equinox_model() -> None:
    weights = jax.nn.sigmoid(example("equinox_model")["run"].x)
    ax = figure()
    ax.plot(range(4), weights[:4], "o", ms=10, color=RED, label="a third of the labels wrong")
    ax.plot(range(4, 10), weights[4:], "o", ms=10, color=BLUE, label="labels right")
    ax.set(xlabel="client", ylabel="learnt weight, at most 1", xticks=range(10))
    ax.legend(loc="lower right")


def flax_model() -> None:
    names = example("flax_model")
    axes = figure(2)
    for ax, x, title in zip(axes, (names["state"], names["run"].x), ("at the start", "after training"), strict=True):
        network = names["nnx"].merge(names["graph"], x)
        network.set_attributes(deterministic=True)
        features = np.asarray(network(names["images"]))
        features = features - features.mean(axis=0)
        first = np.linalg.svd(features, full_matrices=False)[2][:2]
        ax.scatter(*(features @ first.T).T, c=names["labels"], cmap="tab10", s=2)
        ax.set(title=title, xticks=[], yticks=[])


def maml() -> None:
    names = example("maml")
    t = np.linspace(-3, 3, 200, dtype=np.float32)[:, None]
    one = jax.vmap(lambda row: names["loss"](names["adapted"](names["meta"], row["support"]), row["query"]))
    errors = np.asarray(one(names["unseen"]))
    typical = int(np.argsort(errors)[len(errors) // 2])  # the wave with the median error after a step
    row = jax.tree.map(lambda leaf: leaf[typical], names["unseen"])
    ax = figure()
    every = {key: np.concatenate([row["support"][key], row["query"][key]])[:, 0] for key in ("t", "y")}
    waves = np.column_stack([np.sin(every["t"]), np.cos(every["t"])])
    wave = np.linalg.lstsq(waves, every["y"])[0]
    ax.plot(
        t, np.column_stack([np.sin(t[:, 0]), np.cos(t[:, 0])]) @ wave, color="black", lw=0.8, label="an unseen wave"
    )
    for x, colour, name in ((names["meta"], BLUE, "MAML"), (names["plain"], GREY, "plain training")):
        after = names["adapted"](x, row["support"])
        ax.plot(t, names["model"].apply(after, t), color=colour, label=f"{name}, one step")
    ax.plot(row["support"]["t"], row["support"]["y"], "o", color=RED, ms=4, label="its ten points")
    ax.set(xticks=[], yticks=[])
    ax.margins(y=0.3)
    ax.legend(loc="upper right", ncols=2, fontsize=8)


def phase_retrieval() -> None:
    names = example("phase_retrieval")
    x, signal = np.asarray(names["run"].x), names["signal"]
    ax = figure()
    ax.bar(range(len(signal)), signal, color=GREY, alpha=0.5, label="the signal")
    ax.plot(x * np.sign(x @ signal), "o", color=BLUE, label="recovered, up to its sign")
    ax.set(xlabel="entry", xticks=range(len(signal)), ylim=(None, 1.35 * max(signal)))
    ax.legend(loc="upper left")


def policy_evaluation() -> None:
    names = example("policy_evaluation")
    value = names["phi"] @ names["exact"]
    ax = figure()
    ax.axline((0, 0), slope=1, color="black", lw=0.8)
    ax.plot(value, names["phi"] @ names["squares"], "x", color=GREY, label="squares of single draws")
    ax.plot(value, names["phi"] @ names["run"].x, "o", color=BLUE, ms=5, label="FedNest, no records shared")
    ax.set(xlabel="value of a state, all records at one place", ylabel="estimate")
    ax.legend()


def your_own_model() -> None:
    names = tutorial("your-own-model")
    ax = figure()
    for (name, method), colour in zip(names["methods"].items(), (GREY, BLUE, RED), strict=True):
        given = (names["problem"], names["clients"], method, names["net"])
        history = rk.solve(*given, rounds=40, evaluate=names["accuracy"], every=2).history
        ax.plot(history["round"], history["accuracy"], color=colour, label=name)
    ax.set(xlabel="round", ylabel="accuracy")
    ax.legend()


def your_own_algorithm() -> None:
    names = tutorial("your-own-algorithm")
    task = names["task"]
    ax = figure()
    for method, colour in ((names["FedX"](), RED), (names["fed_nest"], BLUE)):
        given = (task.problem, task.clients, method, task.init)
        history = rk.solve(*given, rounds=400, evaluate=task.evaluate, every=10).history
        ax.semilogy(history["round"], history["distance"], color=colour, label=type(method).__name__)
    ax.set(xlabel="round", ylabel="squared distance to the solution")
    ax.legend()


PICTURES: dict[str, Callable[[], None]] = {
    "hyperparameters": hyperparameters,
    "equinox_model": equinox_model,
    "flax_model": flax_model,
    "maml": maml,
    "phase_retrieval": phase_retrieval,
    "policy_evaluation": policy_evaluation,
    "stories": lambda: last_figure("stories"),
    "your-own-problem": lambda: last_figure("your-own-problem"),
    "your-own-model": your_own_model,
    "your-own-algorithm": your_own_algorithm,
    "what-a-site-reveals": lambda: last_figure("what-a-site-reveals", 9.6, 5.4),
}


def main(names: list[str], folder: Path = ROOT / "docs" / "figures" / "gallery") -> None:
    """Draw the pictures, without the date or the version of Matplotlib in them."""
    for name in names or PICTURES:
        PICTURES[name]()
        plt.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1:])
