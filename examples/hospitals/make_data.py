"""The hospitals' files: python make_data.py [study|heart] [--seed 0].

For study.py they are three, from the breast-cancer data that come with scikit-learn. Each row is a patient: thirty
measurements of cell nuclei, the diagnosis, where the diagnosis was taken from (`source`), and what the row is for
(`use`): "train"; "check", for which two people have looked at the diagnosis again; or "test", checked likewise and kept
for the end. Diagnoses of the source "billing" are often wrong in the rows to train on: codes are sent out before the
laboratory's answer is there, so that seven of ten cancers are filed as benign.

For heart.py they are four real hospitals' files, from UCI's data, which come with Rookery. A third of a hospital's ill
patients are for the test, and a third of the healthy ones.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer

from rookery.data import heart

SOURCES = ("laboratory", "letter", "billing")
MISSED = np.array([0.0, 0.05, 0.7])  # of the cancers, those that the source has as benign
HOSPITALS = {  # how many patients, and how often each source
    "general": (260, (0.1, 0.1, 0.8)),
    "riverside": (200, (0.4, 0.4, 0.2)),
    "university": (109, (0.7, 0.3, 0.0)),
}
CHECKED = 8  # rows of each hospital, beside those for the test
TEST = 0.4


def tables(seed: int = 0) -> dict[str, pd.DataFrame]:
    """The hospitals' tables."""
    bunch = load_breast_cancer(as_frame=True)
    columns = bunch.data.rename(columns=lambda name: name.replace(" ", "_")).round(5)
    rng = np.random.default_rng(seed)
    rest, made = rng.permutation(len(columns)), {}
    for name, (count, mix) in HOSPITALS.items():
        own, rest = rest[:count], rest[count:]
        cancer = bunch.target.to_numpy()[own] == 0
        tested = round(TEST * count)
        use = np.repeat(["test", "check", "train"], [tested, CHECKED, count - tested - CHECKED])
        source = rng.choice(len(SOURCES), count, p=mix)
        wrong = cancer & (use == "train") & (rng.random(count) < MISSED[source])
        said = np.where(cancer & ~wrong, "malignant", "benign")
        what = {"diagnosis": said, "source": np.array(SOURCES)[source], "use": use}
        made[name] = columns.iloc[own].reset_index(drop=True).assign(**what).sample(frac=1, random_state=seed)
    return made


def heart_tables(seed: int = 0) -> dict[str, pd.DataFrame]:
    """The tables of the heart study, with UCI's columns, rows and missing values."""
    rng, made = np.random.default_rng(seed), {}
    for name, own in heart.table().groupby("hospital"):
        own = own.drop(columns="hospital").reset_index(drop=True)
        order = own.assign(chance=rng.random(len(own))).groupby("ill")["chance"].rank(pct=True)
        made[name.lower()] = own.assign(use=np.where(order <= 1 / 3, "test", "train"))
    return made


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(description="Make the hospitals' files.")
    parser.add_argument("study", choices=["study", "heart"], nargs="?", default="study")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("data"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made = heart_tables(options.seed) if options.study == "heart" else tables(options.seed)
    for name, table in made.items():
        path = options.out / f"{name}.csv"
        table.to_csv(path, index=False)
        counts = ", ".join(f"{count} to {use}" for use, count in table["use"].value_counts().items())
        print(f"{path}: {len(table)} patients ({counts})")


if __name__ == "__main__":
    main()
