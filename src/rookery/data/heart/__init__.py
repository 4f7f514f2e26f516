"""UCI Heart Disease: patients of four hospitals; the files are part of the package (ATTRIBUTION.md)."""

from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

HOSPITALS = {"Cleveland": "cleveland", "Hungary": "hungarian", "Switzerland": "switzerland", "VA": "va"}
COLUMNS = (
    "age", "sex", "chest_pain", "resting_pressure", "cholesterol", "fasting_sugar", "ecg", "max_heart_rate",
    "exercise_angina", "st_depression", "slope", "vessels", "thal",
)  # fmt: skip


def table() -> "pd.DataFrame":
    """Return the 920 patients of four hospitals (Cleveland, Hungary, Switzerland, VA Long Beach) in the files' order.

    The 13 attributes are floats, coded as by UCI, and missing values are NaN. The column `hospital` names the
    hospital, and `ill` is 1 if the diagnosis is any heart disease, otherwise 0. A cholesterol of 0, which all patients
    in Switzerland and 49 of VA have, also stands for a missing value.

    >>> table().groupby("hospital")["ill"].mean().round(2).to_dict()
    {'Cleveland': 0.46, 'Hungary': 0.36, 'Switzerland': 0.93, 'VA': 0.74}
    """
    import pandas as pd

    tables = []
    for hospital, name in HOSPITALS.items():
        with resources.files(__name__).joinpath(f"processed.{name}.data").open(encoding="ascii") as file:
            rows = pd.read_csv(file, header=None, names=[*COLUMNS, "diagnosis"], na_values="?", dtype=float)
        ill = (rows.pop("diagnosis") > 0).astype(int)
        tables.append(rows.assign(hospital=hospital, ill=ill))
    return pd.concat(tables, ignore_index=True)
