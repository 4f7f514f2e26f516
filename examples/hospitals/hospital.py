"""A hospital's own file: its study, and where its table is.

HOSPITAL_STUDY names the study's module: "study", or "heart". HOSPITAL_CSV names the table; without it, patients.csv
beside this file.
"""

import importlib
import os
from pathlib import Path

import pandas as pd

study = importlib.import_module(os.environ.get("HOSPITAL_STUDY") or "study")
task = study.task  # what all have agreed on


def data():
    """This hospital's rows, which stay here."""
    path = Path(os.environ.get("HOSPITAL_CSV") or Path(__file__).with_name("patients.csv"))
    if not path.exists():
        raise ValueError(f"there is no {path}; set HOSPITAL_CSV to the hospital's table")
    return study.levels(pd.read_csv(path))
