"""UCI Heart Disease, as it lies in the package."""

import hashlib
from importlib import resources

import numpy as np
import pytest

from rookery.data import heart

MD5 = {  # the originals', as FLamby checks them
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}


@pytest.mark.parametrize("name", MD5)
def test_the_files_are_the_originals(name):
    content = resources.files("rookery.data.heart").joinpath(f"processed.{name}.data").read_bytes()
    assert hashlib.md5(content).hexdigest() == MD5[name]


def test_the_table_has_every_patient_in_order():
    table = heart.table()
    assert list(table.columns) == [*heart.COLUMNS, "hospital", "ill"]
    assert list(dict.fromkeys(table["hospital"])) == ["Cleveland", "Hungary", "Switzerland", "VA"]
    assert table["hospital"].value_counts().to_dict() == {
        "Cleveland": 303,
        "Hungary": 294,
        "Switzerland": 123,
        "VA": 200,
    }
    first = table.groupby("hospital").first()
    assert first["age"].tolist() == [63, 28, 32, 63]
    assert table.loc[0, list(heart.COLUMNS)].tolist() == [63, 1, 1, 145, 233, 1, 2, 150, 0, 2.3, 3, 0, 6]
    assert table.loc[:3, "ill"].tolist() == [0, 1, 1, 0]  # diagnoses 0, 2, 1, 0
    assert np.issubdtype(table["ill"].dtype, np.integer)
    assert set(table["ill"]) == {0, 1}


def test_missing_values_are_nan():
    table = heart.table()
    missing = table.isna().groupby(table["hospital"]).sum()
    assert missing["vessels"].tolist() == [4, 291, 118, 198]
    assert missing["age"].sum() == missing["ill"].sum() == missing["hospital"].sum() == 0
    complete = table.drop(columns=["slope", "vessels", "thal"]).dropna()
    assert complete["hospital"].value_counts().tolist() == [303, 261, 130, 46]


def test_each_call_returns_a_table_of_its_own():
    changed = heart.table()
    changed.loc[0, "age"] = 0
    assert heart.table().loc[0, "age"] == 63
