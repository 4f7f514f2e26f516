"""A hospital's own file: where its table is. HOSPITAL_CSV names the file; without it, patients.csv beside this one."""

import os
from pathlib import Path

import pandas as pd
from study import USES, rows
from study import task as task  # what all have agreed on


def data():
    """This hospital's rows, which stay here."""
    path = Path(os.environ.get("HOSPITAL_CSV") or Path(__file__).with_name("patients.csv"))
    if not path.exists():
        raise ValueError(f"there is no {path}; set HOSPITAL_CSV to the hospital's table")
    table = pd.read_csv(path)
    return {level: rows(table[table["use"] == use]) for level, use in USES.items()}
