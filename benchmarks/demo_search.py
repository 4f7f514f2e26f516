"""Choose the demo's settings: every method of a story has a grid of the same size, and its best point is taken.

`python benchmarks/demo_search.py [story [method …]]` (numbers from 0; default: all) prints the grids. Images in a test
set of one of the demo's seeds are left out; a fifth of the others is held out to judge by. A value is the mean of the
story's metric on them over SEARCH_SEEDS.
"""

import importlib
import sys
import time
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from rookery.cli import demo_stories as demo
from rookery.tasks.images import digit_images

SEARCH_SEEDS = (100, 101)
STORY_SAMPLES = 1340  # training samples in the first story; here there are about half as many


def unseen() -> tuple[np.ndarray, np.ndarray]:
    """Return the images that are in no test set of the demo, and their labels."""
    train, labels, test, test_labels = digit_images(0)
    images, labels = np.concatenate([train, test]), np.concatenate([labels, test_labels])
    tested = {image.tobytes() for seed in range(demo.SEEDS) for image in digit_images(seed)[2]}
    free = [k for k, image in enumerate(images) if image.tobytes() not in tested]
    return images[free], labels[free]


IMAGES, LABELS = unseen()


def held_out(seed: int, data_dir: Any = None) -> tuple[np.ndarray, ...]:
    """Replace `digit_images`: a fifth of the unseen images to judge by, the others to train on."""
    judge, train = np.split(np.random.default_rng(seed).permutation(len(LABELS)), [len(LABELS) // 5])
    return IMAGES[train], LABELS[train], IMAGES[judge], LABELS[judge]


def squares(seed: int, data_dir: Any = None) -> tuple[np.ndarray, ...]:
    """Return the same as 8×8 images."""
    images, labels, judge, judged = held_out(seed)
    return images.reshape(-1, 8, 8), labels, judge.reshape(-1, 8, 8), judged


def hold_out() -> None:
    """Let the tasks use only these images."""
    cleaning, nodes, worst = (
        importlib.import_module(f"rookery.tasks.{name}") for name in ("data_cleaning", "weighted_nodes", "worst_group")
    )
    cleaning.SETTINGS["digits"] = cleaning.SETTINGS["digits"]._replace(images=held_out)
    nodes.SETTINGS["digits"] = nodes.SETTINGS["digits"]._replace(samples=squares)
    worst.digit_images = held_out


def value(story: demo.Story, entry: demo.Entry, point: dict[str, Any]) -> float:
    """Return the story's metric at a point of the grid, the mean over the seeds of the search; NaN if it diverged."""
    if "upper_step" in point:  # proportional to the number of samples
        samples = story.task(entry, SEARCH_SEEDS[0])[0].clients.lower_sizes.sum()
        point = point | {"upper_step": point["upper_step"] * float(samples) / STORY_SAMPLES}
    runs = [demo.train(story, replace(entry, chosen=point), entry.rounds, seed) for seed in SEARCH_SEEDS]
    return float(np.mean([np.nan if run.stopped else run.history[story.metric].iloc[-1] for run in runs]))


def search(story: demo.Story, entry: demo.Entry) -> None:
    """Print the grid and its best point; among equals, the middle one."""
    begin = time.perf_counter()
    grid = entry.searched
    values = np.array([value(story, entry, dict(zip(grid, point, strict=True))) for point in product(*grid.values())])
    best = np.flatnonzero(values == np.nanmax(values))
    print(f"\n{story.name}: {entry.words} ({time.perf_counter() - begin:.0f} s)")
    for name, own in grid.items():
        print(f"  {name}: {', '.join(f'{v:g}' for v in own)}")
    for row in values.reshape(len(next(iter(grid.values()))), -1):
        print("   ", "  ".join(f"{v:.3f}" for v in row))
    points = list(product(*grid.values()))
    print("  best:", [dict(zip(grid, points[k], strict=True)) for k in best], flush=True)


if __name__ == "__main__":
    hold_out()
    wanted = [int(word) for word in sys.argv[1:]]
    for k, story in enumerate(demo.STORIES):
        if story is demo.CLEANING:  # four checked images a client, as in the demo
            story = replace(story, settings=story.settings | {"validation": 0.11})
        for n, entry in enumerate(story.entries):
            if not wanted or (k == wanted[0] and n in (wanted[1:] or [n])):
                search(story, entry)
