"""Data sets: found, checked, fetched and kept; their variants, and how they are divided among clients."""

import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import socket
import struct
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from rookery import data
from rookery.data import datasets, files, formats
from rookery.data.files import DataError, File, Form

_SIBLING = Path(__file__).resolve().parents[3] / "shared" / "data"
REAL = Path(os.environ.get("ROOKERY_DATA") or _SIBLING)


def idx(array):
    """A gzipped IDX file of bytes."""
    array = np.asarray(array, np.uint8)
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes(), mtime=0)


IMAGES = np.arange(5 * 4 * 4).reshape(5, 4, 4) % 251
CONTENT = {
    "train-images-idx3-ubyte.gz": idx(IMAGES),
    "train-labels-idx1-ubyte.gz": idx([3, 1, 4, 1, 5]),
    "t10k-images-idx3-ubyte.gz": idx(IMAGES[:2]),
    "t10k-labels-idx1-ubyte.gz": idx([9, 2]),
}


def source(content, urls=()):
    """A data set like MNIST with these files."""
    return (
        Form(
            tuple(
                File(
                    (f"tiny/{name}",),
                    (f"sha256:{hashlib.sha256(blob).hexdigest()}",),
                    tuple(url + name for url in urls),
                )
                for name, blob in content.items()
            ),
            formats.mnist(tuple("0123456789")),
        ),
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache and no data folder but what a test gives."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ROOKERY_DATA", raising=False)
    monkeypatch.setattr(files, "_PATIENCE", 1.0)
    return tmp_path / "cache" / "rookery"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with a small data set in it, known as "tiny"."""
    monkeypatch.setitem(datasets.SOURCES, "tiny", source(CONTENT, ("http://127.0.0.1:9/",)))
    folder = tmp_path / "data"
    (folder / "tiny").mkdir(parents=True)
    for name, blob in CONTENT.items():
        (folder / "tiny" / name).write_bytes(blob)
    return folder


# Finding and checking.


def test_files_are_read_from_the_folder_given_or_named_by_the_environment(tiny, monkeypatch):
    loaded = data.load("tiny", tiny)
    assert loaded.train.tolist() == IMAGES.tolist()
    assert (loaded.train.dtype, loaded.train_labels.dtype) == (np.uint8, np.int32)
    assert loaded.train_labels.tolist() == [3, 1, 4, 1, 5]
    assert loaded.test_labels.tolist() == [9, 2]
    monkeypatch.setenv("ROOKERY_DATA", str(tiny))
    assert data.load("tiny").test.tolist() == IMAGES[:2].tolist()


def test_what_was_read_is_kept_and_not_checked_again(tiny, monkeypatch):
    first = data.load("tiny", tiny)
    monkeypatch.setattr(files.hashlib, "file_digest", lambda *_: pytest.fail("checked again"))
    monkeypatch.setattr(formats, "idx", lambda *_: pytest.fail("read again"))
    second = data.load("tiny", tiny)
    assert np.array_equal(first.train, second.train)
    assert first.names == second.names


def test_a_damaged_cache_is_made_again(tiny, cache):
    data.load("tiny", tiny)
    (kept,) = (cache / "parsed").iterdir()
    kept.write_bytes(kept.read_bytes()[:-40])
    (cache / "verified.json").write_text("{")
    assert data.load("tiny", tiny).train.tolist() == IMAGES.tolist()


def test_a_cache_that_cannot_be_written_does_no_harm(tiny, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in the way")
    assert data.load("tiny", tiny).train.tolist() == IMAGES.tolist()


@pytest.mark.parametrize("name", list(CONTENT))
def test_a_corrupt_file_is_named_and_not_used(tiny, name):
    data.load("tiny", tiny)  # it was good before
    blob = bytearray(CONTENT[name])
    blob[len(blob) // 2] ^= 1
    (tiny / "tiny" / name).write_bytes(blob)
    with pytest.raises(DataError, match=rf"{name} is not the published file, and is not used.*expected"):
        data.load("tiny", tiny)


def test_a_truncated_file_is_named_and_not_used(tiny):
    path = tiny / "tiny" / "train-images-idx3-ubyte.gz"
    path.write_bytes(CONTENT[path.name][:-7])
    with pytest.raises(DataError, match=rf"{path.name} is not the published file.*an interrupted copy is shorter"):
        data.load("tiny", tiny)


def test_a_file_that_has_the_right_hash_and_the_wrong_format_is_refused(tmp_path):
    for blob, reason in (
        (b"no gzip", "cut short"),
        (idx(IMAGES)[:-9], "cut short"),
        (gzip.compress(b"abcdefgh"), "IDX"),
    ):
        path = tmp_path / "file.gz"
        path.write_bytes(blob)
        with pytest.raises(DataError, match=reason):
            formats.idx(path)


def test_a_missing_file_gives_one_clear_error_soon(tiny, cache):
    (tiny / "tiny" / "t10k-labels-idx1-ubyte.gz").unlink()
    begin = time.monotonic()
    with pytest.raises(DataError) as caught:
        data.load("tiny", tiny)
    assert time.monotonic() - begin < 4
    message = str(caught.value)
    assert "127.0.0.1:9 cannot be reached" in message
    assert "only t10k-labels-idx1-ubyte.gz is missing" in message
    assert str(tiny) in message
    assert str(cache) in message
    assert "ROOKERY_DATA=FOLDER, or data_dir" in message


def test_a_server_that_never_answers_is_given_up_soon(tiny, monkeypatch):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
        monkeypatch.setitem(datasets.SOURCES, "tiny", source(CONTENT, (url,)))
        begin = time.monotonic()
        with pytest.raises(DataError, match="could not be downloaded"):
            data.load("tiny")
        assert time.monotonic() - begin < 4


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(DataError, match="no data set 'mnsit'; there are: digits, mnist"):
        data.load("mnsit")


def test_every_data_set_is_described_and_has_an_address():
    assert set(data.DATASETS) == {"digits", *datasets.SOURCES}
    fetched = {name for name, forms in datasets.SOURCES.items() if any(form.can_be_fetched for form in forms)}
    assert datasets.SOURCES.keys() - fetched == {"tcga-brca"}  # clinical data, which users get themselves


# Fetching.


@pytest.fixture
def server(tmp_path):
    """A web server on this machine; its folder and its address."""
    folder = tmp_path / "published"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()


def test_missing_files_are_downloaded_once(server, tmp_path, monkeypatch):
    folder, url = server
    for name, blob in CONTENT.items():
        (folder / name).write_bytes(blob)
    monkeypatch.setitem(datasets.SOURCES, "tiny", source(CONTENT, ("http://127.0.0.1:9/", url)))
    place = tmp_path / "new"
    assert data.load("tiny", place).train.tolist() == IMAGES.tolist()
    assert {path.name for path in (place / "tiny").iterdir()} == set(CONTENT)
    monkeypatch.setattr(files, "_download", lambda *_: pytest.fail("downloaded again"))
    data.load("tiny", place)


def test_a_download_that_is_not_the_published_file_is_not_kept(server, tmp_path, monkeypatch):
    folder, url = server
    for name in CONTENT:
        (folder / name).write_bytes(b"something else")
    monkeypatch.setitem(datasets.SOURCES, "tiny", source(CONTENT, (url,)))
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte.gz could not be downloaded .*is not the published file"
    ):
        data.load("tiny", tmp_path / "new")
    assert not list((tmp_path / "new").rglob("*.gz"))


# CIFAR's pickles.


class _Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_that_would_run_code_is_refused(tmp_path, protocol):
    trap = tmp_path / "sprung"
    content = pickle.dumps({"labels": [1, _Payload(trap)]}, protocol=protocol)
    with pytest.raises(DataError, match=r"names (posix|nt).system, and only arrays are read"):
        formats.arrays_only(content, "data_batch_1")
    assert not trap.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "numpy.load", "numpy.core.multiarray.scalar", "os.system"])
def test_only_what_arrays_need_is_admitted(name):
    module, _, attribute = name.rpartition(".")
    with pytest.raises(DataError, match=f"names {name}"):
        formats.arrays_only(f"c{module}\n{attribute}\n.".encode(), "file")


def test_a_damaged_pickle_is_refused():
    with pytest.raises(DataError, match="test_batch is not read"):
        formats.arrays_only(pickle.dumps({"data": np.zeros(100)})[:-20], "test_batch")


def test_cifar_files_are_read_in_the_published_layout():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (6, 2, 3072), dtype=np.uint8)
    files_of = {f"data_batch_{i + 1}": {"data": rows[i], "labels": [i, 9 - i]} for i in range(5)}
    files_of |= {"test_batch": {"data": rows[5], "labels": [7, 8]}, "batches.meta": {"label_names": list("abcdefghij")}}
    arrays = formats.cifar10(lambda name: pickle.dumps(files_of[name], protocol=3))
    assert arrays["train"].shape == (10, 32, 32, 3)
    assert arrays["train"][2, 5, 7].tolist() == [rows[1, 0, 1024 * c + 32 * 5 + 7] for c in range(3)]
    assert arrays["train_labels"].tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert arrays["test_labels"].tolist() == [7, 8]


def test_a_script_that_changed_is_not_run(tmp_path):
    script = tmp_path / "unpack_cifar.py"
    script.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    packed = tmp_path / "cifar-10.packed.npz"
    packed.write_bytes(b"")
    unpack = formats.from_packed(formats.cifar10, packed.name, "cifar-10-batches-py", {})
    with pytest.raises(DataError, match="not run"):
        unpack({script.name: script, packed.name: packed})
    assert not (tmp_path / "sprung").exists()
    place = tmp_path / "data"
    (place / "cifar-10").mkdir(parents=True)
    script.rename(place / script.name)
    packed.rename(place / "cifar-10" / packed.name)
    with pytest.raises(DataError, match=r"packed.npz is not the published file"):
        data.load("cifar-10", place)


# The real files, where they are.

real = pytest.mark.skipif(not (REAL / "mnist").is_dir(), reason="the real files are not here")


@real
def test_mnist():
    loaded = data.load("mnist", REAL)
    assert loaded.train.shape == (60000, 28, 28)
    assert loaded.test.shape == (10000, 28, 28)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(loaded.train_labels).tolist() == counts
    assert loaded.train.mean() / 255 == pytest.approx(0.13066, abs=1e-5)
    assert loaded.train.std() / 255 == pytest.approx(0.30811, abs=1e-5)
    begin = time.perf_counter()
    data.load("mnist", REAL)
    assert time.perf_counter() - begin < 0.5


@real
def test_long_tailed_mnist():
    labels = data.load("mnist", REAL).train_labels
    kept = data.long_tailed(labels)
    assert np.bincount(labels[kept]).tolist() == [5923, 3597, 2156, 1293, 775, 465, 278, 167, 100, 60]


@real
def test_fashion_mnist():
    loaded = data.load("fashion-mnist", REAL)
    assert np.bincount(loaded.train_labels).tolist() == [6000] * 10
    assert loaded.train.mean() / 255 == pytest.approx(0.28604, abs=1e-5)
    assert loaded.names[9] == "Ankle boot"


@real
def test_adult():
    loaded = data.load("adult", REAL)
    assert np.bincount(loaded.train_labels).tolist() == [24720, 7841]
    assert np.bincount(loaded.test_labels).tolist() == [12435, 3846]
    sex = [loaded.columns.index(f"sex={name}") for name in ("Female", "Male")]
    assert (loaded.train[:, sex].sum(axis=1) == 1).all()
    assert loaded.train[0, loaded.columns.index("age")] == 39
    assert loaded.train[0, loaded.columns.index("education=Bachelors")] == 1
    categories = [i for i, name in enumerate(loaded.columns) if "=" in name]
    assert (loaded.test[:, categories].sum(axis=1) == 8).all()


@real
def test_covtype():
    loaded = data.load("covtype", REAL)
    assert np.bincount(loaded.train_labels).tolist() == [211840, 283301, 35754, 2747, 9493, 17367, 20510]
    assert loaded.train[:, 0].mean() == pytest.approx(2959.37, abs=0.01)
    assert (loaded.train[:, 14:].sum(axis=1) == 1).all()
    assert len(loaded.test) == 0


@real
def test_omniglot_and_its_original_archives(tmp_path):
    from PIL import Image

    loaded = data.load("omniglot", REAL)
    assert loaded.train.shape == (19280, 105, 105)
    assert loaded.test.shape == (13180, 105, 105)
    assert np.bincount(loaded.train_labels).tolist() == [20] * 964
    assert loaded.test_labels.min() == 964
    assert len(loaded.names) == 1623
    # The same images, as the authors' archives hold them.
    paths = {}
    for part, name in (("train", "images_background"), ("test", "images_evaluation")):
        labels, images = getattr(loaded, f"{part}_labels"), getattr(loaded, part)
        paths[f"{name}.zip"] = tmp_path / f"{name}.zip"
        with zipfile.ZipFile(paths[f"{name}.zip"], "w") as archive:
            for i in range(60):
                stream = io.BytesIO()
                Image.fromarray(images[i] == 0).convert("1").save(stream, "png")
                drawer = loaded.extra[f"{part}_drawer"][i]
                archive.writestr(f"{name}/{loaded.names[labels[i]]}/0001_{drawer:02d}.png", stream.getvalue())
    arrays = formats.omniglot_zips(paths)
    order = np.lexsort((loaded.extra["train_drawer"][:60], loaded.train_labels[:60]))
    assert np.array_equal(arrays["train"], loaded.train[:60][order])
    assert arrays["train_labels"].tolist() == [0] * 20 + [1] * 20 + [2] * 20
    assert arrays["test_labels"].tolist() == [3] * 20 + [4] * 20 + [5] * 20
    assert arrays["names"][:3].tolist() == list(loaded.names[:3])


@real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "means"), [("cifar-10", (0.49140, 0.48216, 0.44653)), ("cifar-100", (0.50708, 0.48655, 0.44092))]
)
def test_cifar(name, means):
    loaded = data.load(name, REAL)
    assert loaded.train.shape == (50000, 32, 32, 3)
    assert loaded.train.mean(axis=(0, 1, 2)) / 255 == pytest.approx(means, abs=1e-5)
    assert len(set(np.bincount(loaded.train_labels))) == 1


# Variants.


def test_long_tailed_counts():
    labels = np.repeat(np.arange(10), 6000)
    counts = np.bincount(labels[data.long_tailed(labels, seed=3)])
    assert counts.tolist() == [6000, 3597, 2156, 1293, 775, 465, 278, 167, 100, 60]
    assert not np.array_equal(data.long_tailed(labels, seed=0), data.long_tailed(labels, seed=1))
    with pytest.raises(ValueError, match=r"ratio in \(0, 1\]; got 6000 and 0"):
        data.long_tailed(labels, ratio=0)


def test_noisy_labels():
    labels = np.repeat(np.arange(5), 1000)
    noisy = data.noisy_labels(labels, 0.4, seed=0)
    assert (noisy != labels).sum() == 2000
    assert labels.tolist() == np.repeat(np.arange(5), 1000).tolist()
    shares = np.bincount(noisy[(labels == 2) & (noisy != labels)], minlength=5)
    assert shares[2] == 0
    assert shares[[0, 1, 3, 4]].min() > 60  # of about 100 each
    assert np.array_equal(noisy, data.noisy_labels(labels, 0.4, seed=0))
    assert not np.array_equal(noisy, data.noisy_labels(labels, 0.4, seed=1))
    with pytest.raises(ValueError, match=r"fraction must be between 0 and 1; got 1\.5"):
        data.noisy_labels(labels, 1.5, seed=0)


# Partitions.

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))


@pytest.mark.parametrize("name", list(data.PARTITIONS))
@pytest.mark.parametrize("clients", [1, 7, 20])
def test_parts_are_disjoint_and_cover_everything(name, clients):
    parts = data.PARTITIONS[name](LABELS, clients, seed=1)
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert all((np.diff(part) > 0).all() for part in parts)


def test_sizes():
    for parts in (data.iid(LABELS, 7), data.shards(LABELS, 20)):
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    assert min(map(len, data.dirichlet(LABELS, 50, alpha=0.01, least=5))) == 5


def test_a_client_of_shards_has_two_labels():
    labels = [len(np.unique(LABELS[part])) for part in data.shards(LABELS, 20)]  # shards of 150, classes of 600
    assert max(labels) == 2
    assert np.mean(labels) > 1.7


def test_the_skew_of_dirichlet_grows_as_alpha_falls():
    def skew(alpha):
        parts = data.dirichlet(LABELS, 20, seed=0, alpha=alpha)
        shares = np.stack([np.bincount(LABELS[part], minlength=10) / len(part) for part in parts])
        return np.abs(shares - 0.1).sum(axis=1).mean()

    skews = [skew(alpha) for alpha in (100.0, 1.0, 0.1, 0.01)]
    assert skews == sorted(skews)
    assert skews[0] < 0.2
    assert skews[-1] > 1.2


def test_seeds_decide_and_bad_input_is_refused():
    for name, divide in data.PARTITIONS.items():
        first, again, other = (divide(LABELS, 5, seed=seed) for seed in (0, 0, 1))
        assert all(map(np.array_equal, first, again)), name
        assert not all(map(np.array_equal, first, other)), name
        with pytest.raises(ValueError, match="use fewer clients"):
            divide(LABELS[:3], 5)


def test_the_picture_of_a_partition(tmp_path):
    path = data.partition_picture(LABELS, data.shards(LABELS, 20), tmp_path / "parts.png")
    assert path.read_bytes().startswith(b"\x89PNG")
