"""The data sets: their files, and `load`, which returns their arrays."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rookery.data import formats
from rookery.data.files import Arrays, DataError, File, Form, arrays


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set as published: not scaled, in the original order.

    Attributes:
        name: as in `load`.
        train, test: the inputs, one row per sample (images are uint8, without or with a last axis for colour).
        train_labels, test_labels: int32, counted from 0.
        names: the names of the classes.
        columns: the names of the inputs' columns, for tables.
        extra: other arrays, by name.
    """

    name: str
    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    names: tuple[str, ...]
    columns: tuple[str, ...] = ()
    extra: dict[str, np.ndarray] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name}: {len(self.train)} to train, {len(self.test)} to test, samples of shape "
            f"{self.train.shape[1:]}, {len(self.names)} classes)"
        )


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Load a data set by name: one of `DATASETS`.

    Looks for its files in `data_dir` (by default the folder named by ROOKERY_DATA), then in the user's cache, and
    downloads them if needed. Files are checked against the published hashes; one that differs is refused. The arrays
    are kept in the cache, so that the second time is fast.

    >>> load("digits")
    Dataset(digits: 1437 to train, 360 to test, samples of shape (8, 8), 10 classes)
    """
    if name == "digits":
        return _dataset(name, _digits())
    if name not in SOURCES:
        raise DataError(f"There is no data set {name!r}; there are: {', '.join(DATASETS)}.")
    return _dataset(name, arrays(name, SOURCES[name], data_dir))


def _dataset(name: str, of: Arrays) -> Dataset:
    return Dataset(
        name,
        of["train"],
        of["train_labels"],
        of["test"],
        of["test_labels"],
        tuple(map(str, of["names"])),
        tuple(map(str, of.get("columns", ()))),
        {key.removeprefix("extra."): value for key, value in of.items() if key.startswith("extra.")},
    )


def _digits() -> Arrays:
    """Return the digits of scikit-learn; the last 360 images, by other writers, are the test set."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = images.reshape(-1, 8, 8).astype(np.uint8), labels.astype(np.int32)
    return {
        "train": images[:-360],
        "train_labels": labels[:-360],
        "test": images[-360:],
        "test_labels": labels[-360:],
        "names": np.array(list("0123456789")),
    }


DATASETS: dict[str, str] = {
    "digits": "handwritten digits, 8×8, bundled with scikit-learn",
    "mnist": "handwritten digits, 28×28",
    "fashion-mnist": "articles of clothing, 28×28",
    "cifar-10": "colour photographs, 32×32, 10 classes",
    "cifar-100": "colour photographs, 32×32, 100 classes (and 20 coarse ones)",
    "adult": "UCI Adult: does a person earn more than 50,000 dollars a year",
    "covtype": "UCI Covertype: the kind of forest on a patch of land; no test set",
    "omniglot": "characters of 50 alphabets, 105×105, 20 drawings each; other alphabets to test",
    "tcga-brca": "clinical data of breast cancer patients in six regions, from FLamby; not downloaded",
}


_CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
_OMNIGLOT = "https://github.com/brendenlake/omniglot/raw/master/python/"


def _files(folder: str, digests: dict[str, str], *urls: str) -> tuple[File, ...]:
    """Return the files of one folder, by name with their SHA-256 or MD5; each can be downloaded from every url."""
    kind = lambda digest: "md5" if len(digest) == 32 else "sha256"
    return tuple(
        File((f"{folder}/{name}",), (f"{kind(digest)}:{digest}",), tuple(url + name for url in urls))
        for name, digest in digests.items()
    )


def _cifar(
    name: str, parse: Callable[[formats.Read], Arrays], folder: str, md5: dict[str, str], packed: str, archive: str
) -> tuple[Form, ...]:
    originals = tuple(
        File((f"{name}/{folder}/{file}", f"{folder}/{file}"), (f"md5:{digest}",)) for file, digest in md5.items()
    )
    script = File(("unpack_cifar.py", f"{name}/unpack_cifar.py"), (f"sha256:{formats.UNPACK_SHA256}",))
    tar, npz = f"{name}-python.tar.gz", f"{name}.packed.npz"
    url = f"https://www.cs.toronto.edu/~kriz/{tar}"
    return (
        Form(originals, formats.from_folder(parse)),
        Form((File((f"{name}/{tar}", tar), (f"sha256:{archive}",), (url,)),), formats.from_archive(parse, tar, folder)),
        Form((*_files(name, {npz: packed}), script), formats.from_packed(parse, npz, folder, md5)),
    )


SOURCES: dict[str, tuple[Form, ...]] = {
    "mnist": (
        Form(
            _files(
                "mnist",
                {
                    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                },
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
            ),
            formats.mnist(tuple("0123456789")),
        ),
    ),
    "fashion-mnist": (
        Form(
            _files(
                "fashion-mnist",
                {
                    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                },
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            ),
            formats.mnist(_CLOTHES),
        ),
    ),
    "cifar-10": _cifar(
        "cifar-10",
        formats.cifar10,
        "cifar-10-batches-py",
        {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
            "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
        },
        packed="aba7307062e65a30f98b9278fd0bbecbb84d8cf19e7bf6586c65b453b60bc0fb",
        archive="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    ),
    "cifar-100": _cifar(
        "cifar-100",
        formats.cifar100,
        "cifar-100-python",
        {
            "train": "16019d7e3df5f24257cddd939b257f8d",
            "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
            "meta": "7973b15100ade9c7d40fb424638fde48",
        },
        packed="53ee8232c4a4868d04b36e96b47f683f3af966dca846d2126401441a74c9c9bd",
        archive="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    ),
    "adult": (
        Form(
            _files(
                "adult",
                {
                    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
                    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
                },
                f"{_UCI}/adult/",
            ),
            formats.adult,
        ),
    ),
    "covtype": (
        Form(
            (
                File(
                    ("covtype/covtype.data.gz",),
                    (
                        "sha256:614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
                        "sha256:b22ca13b51814b12ef7fec2fc96a623903e35dab1469a4d1213fe9911d92912c",  # compressed again
                    ),
                    ("https://ndownloader.figshare.com/files/5976039", f"{_UCI}/covtype/covtype.data.gz"),
                ),
            ),
            formats.covtype,
        ),
    ),
    "omniglot": (
        Form(
            _files("omniglot", {"omniglot.npz": "847cc69347058298a5ccc355a5c5f5a4ad0c07cbcde180616f19d005704196ad"}),
            formats.omniglot,
            keep=False,
        ),
        Form(
            _files(
                "omniglot",
                {
                    "images_background.zip": "68d2efa1b9178cc56df9314c21c6e718",
                    "images_evaluation.zip": "6b91aef0f799c5bb55b94e3f2daec811",
                },
                _OMNIGLOT,
            ),
            formats.omniglot_zips,
        ),
    ),
    "tcga-brca": (
        Form(
            _files(
                "tcga-brca",
                {
                    "brca.csv": "07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020",
                    "centers.csv": "d610df2dae0203ea229c9579747ed3eb8d28e137c5378f55acc6fe6b4632bb1d",
                    "train_test_split.csv": "1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990",
                },
            ),
            formats.tcga_brca,
            keep=False,
        ),
    ),
}
