"""Parsers of the data sets' file formats: pure functions from published files to named arrays."""

import gzip
import hashlib
import io
import pickle
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rookery.data.files import Arrays, DataError

Paths = dict[str, Path]
Read = Callable[[str], bytes]  # file name -> content


# MNIST and Fashion-MNIST.


def idx(path: Path) -> np.ndarray:
    """Read a gzipped IDX file: two zero bytes, the type 8, the number of axes, their lengths (big-endian), the data."""
    try:
        content = gzip.decompress(path.read_bytes())
        zeros, kind, axes = struct.unpack(">HBB", content[:4])
        shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
        data = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    except (OSError, EOFError, struct.error, ValueError, zlib.error) as error:
        raise DataError(f"{path} is not a gzipped IDX file, or is cut short: {error}.") from error
    if (zeros, kind) != (0, 8) or data.size != np.prod(shape, dtype=int):
        raise DataError(f"{path} is not an IDX file of bytes: {data.size} values for the shape {shape}.")
    return data.reshape(shape)


def mnist(names: tuple[str, ...]) -> Callable[[Paths], Arrays]:
    """Return a parser of the four files of MNIST and of data sets in the same format."""

    def parse(paths: Paths) -> Arrays:
        out: Arrays = {"names": np.array(names)}
        for part, prefix in (("train", "train"), ("test", "t10k")):
            out[part] = idx(paths[f"{prefix}-images-idx3-ubyte.gz"])
            out[f"{part}_labels"] = idx(paths[f"{prefix}-labels-idx1-ubyte.gz"]).astype(np.int32)
        return out

    return parse


# CIFAR.


class _ArraysOnly(pickle.Unpickler):
    """Reads numbers, text, lists, dictionaries and NumPy arrays, and refuses anything that could run code."""

    _allowed = frozenset({"multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"})

    def find_class(self, module: str, name: str) -> Any:
        short = "multiarray" if module in ("numpy.core.multiarray", "numpy._core.multiarray") else module
        if f"{short}.{name}" not in self._allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and only arrays are read")
        return np._core.multiarray._reconstruct if short == "multiarray" else getattr(np, name)  # type: ignore[attr-defined]


def arrays_only(content: bytes, name: str) -> Any:
    """Read a pickle of plain values and arrays; raise DataError for any other."""
    try:
        return _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle fails in many ways
        raise DataError(f"{name} is not read: {error}.") from error


def _rgb(rows: Any) -> np.ndarray:
    """Convert (n, 3072), one colour plane after the other, to (n, 32, 32, 3)."""
    return np.ascontiguousarray(np.asarray(rows, np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def cifar10(read: Read) -> Arrays:
    """Parse the batches of CIFAR-10."""
    batches = [arrays_only(read(f"data_batch_{i}"), f"data_batch_{i}") for i in range(1, 6)]
    test = arrays_only(read("test_batch"), "test_batch")
    return {
        "train": np.concatenate([_rgb(batch["data"]) for batch in batches]),
        "train_labels": np.concatenate([np.array(batch["labels"], np.int32) for batch in batches]),
        "test": _rgb(test["data"]),
        "test_labels": np.array(test["labels"], np.int32),
        "names": np.array(arrays_only(read("batches.meta"), "batches.meta")["label_names"]),
    }


def cifar100(read: Read) -> Arrays:
    """Parse the files of CIFAR-100, with fine and coarse labels."""
    meta = arrays_only(read("meta"), "meta")
    out: Arrays = {
        "names": np.array(meta["fine_label_names"]),
        "extra.coarse_names": np.array(meta["coarse_label_names"]),
    }
    for part in ("train", "test"):
        batch = arrays_only(read(part), part)
        out[part] = _rgb(batch["data"])
        out[f"{part}_labels"] = np.array(batch["fine_labels"], np.int32)
        out[f"extra.{part}_coarse"] = np.array(batch["coarse_labels"], np.int32)
    return out


def from_folder(parse: Callable[[Read], Arrays]) -> Callable[[Paths], Arrays]:
    """Return a parser of the original files."""
    return lambda paths: parse(lambda name: paths[name].read_bytes())


def from_archive(parse: Callable[[Read], Arrays], archive: str, folder: str) -> Callable[[Paths], Arrays]:
    """Return a parser of the original .tar.gz, which is read member by member and not extracted."""

    def of(paths: Paths) -> Arrays:
        with tarfile.open(paths[archive]) as tar:

            def read(name: str) -> bytes:
                stream = tar.extractfile(f"{folder}/{name}")
                assert stream is not None
                return stream.read()

            return parse(read)

    return of


def from_packed(
    parse: Callable[[Read], Arrays], packed: str, folder: str, md5: dict[str, str]
) -> Callable[[Paths], Arrays]:
    """Return a parser of a losslessly packed file; both it and its script are verified before the script runs."""

    def of(paths: Paths) -> Arrays:
        from rich.console import Console

        script = paths["unpack_cifar.py"].read_bytes()
        if hashlib.sha256(script).hexdigest() != UNPACK_SHA256:
            raise DataError(f"{paths['unpack_cifar.py']} has changed since it was checked; it is not run.")
        with tempfile.TemporaryDirectory() as folder_name:
            verified = Path(folder_name) / "unpack_cifar.py"  # run exactly what was verified
            verified.write_bytes(script)
            command = [sys.executable, "-I", str(verified), str(paths[packed].resolve()), folder_name]
            with Console(stderr=True).status(f"Unpacking {packed}, once (one or two minutes)"):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise DataError(f"{paths[packed]} could not be unpacked: {last}.")

            def read(name: str) -> bytes:
                content = (Path(folder_name) / folder / name).read_bytes()
                if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5[name]:
                    raise DataError(f"{paths[packed]} does not unpack to the original {name}.")
                return content

            return parse(read)

    return of


UNPACK_SHA256 = "0e75a93975e18a579ab8ed1c6336e9863cb0e50044e34a92c872b8cb7efe8b70"


# Adult and Covertype.

ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country",
)  # fmt: skip
_ADULT_NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")


def adult(paths: Paths) -> Arrays:
    """Parse Adult: numbers stay as they are; each category, "?" included, becomes a 0/1 column such as `sex=Male`."""
    import pandas as pd

    parts = {}
    for part, name, skip in (("train", "adult.data", 0), ("test", "adult.test", 1)):
        columns = [*ADULT_COLUMNS, "class"]
        parts[part] = pd.read_csv(
            paths[name], names=columns, skiprows=skip, skipinitialspace=True, keep_default_na=False
        )
    both = pd.concat(parts.values())
    columns, blocks = [], []
    for name in ADULT_COLUMNS:
        if name in _ADULT_NUMBERS:
            columns.append(name)
            blocks.append(both[name].to_numpy(np.float32)[:, None])
        else:
            categories = sorted(both[name].unique())
            columns += [f"{name}={category}" for category in categories]
            blocks.append((both[name].to_numpy()[:, None] == np.array(categories)[None]).astype(np.float32))
    features = np.concatenate(blocks, axis=1)
    labels = both["class"].str.startswith(">50K").to_numpy().astype(np.int32)
    cut = len(parts["train"])
    return {
        "train": features[:cut],
        "train_labels": labels[:cut],
        "test": features[cut:],
        "test_labels": labels[cut:],
        "names": np.array(["<=50K", ">50K"]),
        "columns": np.array(columns),
    }


COVTYPE_NUMBERS = (
    "Elevation", "Aspect", "Slope", "Horizontal_Distance_To_Hydrology", "Vertical_Distance_To_Hydrology",
    "Horizontal_Distance_To_Roadways", "Hillshade_9am", "Hillshade_Noon", "Hillshade_3pm",
    "Horizontal_Distance_To_Fire_Points",
)  # fmt: skip
_COVTYPE_NAMES = (
    "Spruce/Fir", "Lodgepole Pine", "Ponderosa Pine", "Cottonwood/Willow", "Aspen", "Douglas-fir", "Krummholz",
)  # fmt: skip
_COVTYPE_SHA256 = "0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945"


def covtype(paths: Paths) -> Arrays:
    """Parse Covertype: all rows are training data, in the original order."""
    import pandas as pd

    path = paths["covtype.data.gz"]
    content = gzip.decompress(path.read_bytes())
    if hashlib.sha256(content).hexdigest() != _COVTYPE_SHA256:
        raise DataError(f"{path} does not hold the original covtype.data.")
    table = pd.read_csv(io.BytesIO(content), header=None, dtype=np.int16).to_numpy()
    columns = [
        *COVTYPE_NUMBERS,
        *(f"Wilderness_Area{i}" for i in range(1, 5)),
        *(f"Soil_Type{i}" for i in range(1, 41)),
    ]
    return {
        "train": np.ascontiguousarray(table[:, :54]),
        "train_labels": table[:, 54].astype(np.int32) - 1,
        "test": np.zeros((0, 54), np.int16),
        "test_labels": np.zeros(0, np.int32),
        "names": np.array(_COVTYPE_NAMES),
        "columns": np.array(columns),
    }


# Breast cancer.

REGIONS = ("northeast", "south", "west", "midwest", "europe", "canada")


def tcga_brca(paths: Paths) -> Arrays:
    """Parse FLamby's table of TCGA-BRCA, the regions of its sites and its split; rows are in the table's order.

    A label is 1 if a death was seen. The regions and the times, in days, are extra arrays.
    """
    import pandas as pd

    table, split, sites = (
        pd.read_csv(paths[name], keep_default_na=False)  # NA is the code of a site
        for name in ("brca.csv", "train_test_split.csv", "centers.csv")
    )
    table = table.merge(split, on="pid")  # patients without a line in the split are left out
    region = dict(zip(sites["TSS Code"], sites["Region"].str.lower(), strict=True))
    number = table["pid"].str.split("-").str[1].map(region).map(REGIONS.index).to_numpy(np.int32)
    features = table.drop(columns=["pid", "E", "T", "fold", "fold2"])
    out: Arrays = {
        "names": np.array(["censored", "died"]),
        "columns": np.array(features.columns, str),
        "extra.regions": np.array(REGIONS),
    }
    for part in ("train", "test"):
        own = (table["fold"] == part).to_numpy()
        out[part] = features.to_numpy(np.float32)[own]
        out[f"{part}_labels"] = table["E"].to_numpy(np.int32)[own]
        out[f"extra.{part}_time"] = table["T"].to_numpy(np.float32)[own]
        out[f"extra.{part}_region"] = number[own]
    return out


# Omniglot: the classes of the evaluation set follow those of the background set.


def omniglot(paths: Paths) -> Arrays:
    """Parse one .npz with packed bits."""
    with np.load(paths["omniglot.npz"], allow_pickle=False) as stored:
        sets = {}
        for part, name in (("train", "background"), ("test", "evaluation")):
            alphabets = stored[f"{name}_alphabets"][stored[f"{name}_character_alphabet"]]
            names = [f"{a}/{c}" for a, c in zip(alphabets, stored[f"{name}_character_name"], strict=True)]
            images = np.unpackbits(stored[name], axis=2)[:, :, :105]
            sets[part] = (images, stored[f"{name}_character"], stored[f"{name}_drawer"], names)
    return _omniglot(sets)


def omniglot_zips(paths: Paths) -> Arrays:
    """Parse the two original archives of PNG files, named ALPHABET/CHARACTER/…_DRAWER.png."""
    from PIL import Image

    sets = {}
    for part, name in (("train", "images_background"), ("test", "images_evaluation")):
        with zipfile.ZipFile(paths[f"{name}.zip"]) as archive:
            files = sorted(f for f in archive.namelist() if re.fullmatch(rf"{name}/[^/]+/[^/]+/[^/]+_\d+\.png", f))
            images = np.stack([np.asarray(Image.open(io.BytesIO(archive.read(f)))) == 0 for f in files])
        characters = [f.split("/", 1)[1].rsplit("/", 1)[0] for f in files]
        names, labels = np.unique(characters, return_inverse=True)
        drawers = np.array([int(f.rsplit("_", 1)[1].removesuffix(".png")) for f in files])
        sets[part] = (images.astype(np.uint8), labels, drawers, names.tolist())
    return _omniglot(sets)


def _omniglot(sets: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]]) -> Arrays:
    out: Arrays = {"names": np.array(sets["train"][3] + sets["test"][3])}
    for part, first in (("train", 0), ("test", len(sets["train"][3]))):
        images, labels, drawers, _ = sets[part]
        out[part], out[f"{part}_labels"] = images, labels.astype(np.int32) + first
        out[f"extra.{part}_drawer"] = drawers.astype(np.int32)
    return out
