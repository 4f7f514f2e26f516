"""FLamby's two tabular benchmarks: heart disease at four hospitals, and survival of breast cancer in six regions."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rookery.base.arguments import check_seed
from rookery.data import heart, load
from rookery.data.clients import Clients
from rookery.problems.problems import SingleLevel
from rookery.problems.survival import concordance, cox_losses
from rookery.tasks.linear import binary_scores, log_losses
from rookery.tasks.task import Task, choice, take

Rows = dict[str, np.ndarray]
Metric = Callable[[Any, Any], Float[Array, ""]]


class Parts(NamedTuple):
    """The training and the test rows of a client, or of all."""

    train: Rows
    test: Rows


def hospitals() -> tuple[dict[str, Parts], Parts]:
    """Return the patients of each hospital, standardised by its own training rows, and of all, standardised together.

    A feature that is constant in training becomes 0.
    """
    table = heart.table().drop(columns=["slope", "vessels", "thal"]).dropna()
    coded = {"chest_pain": (2, 3, 4), "ecg": (1, 2)}  # as 0/1 columns, without the lowest value
    numbers = [name for name in heart.COLUMNS if name in table and name not in coded]
    dummies = [table[name] == value for name, values in coded.items() for value in values]
    features = np.column_stack([table[numbers], *dummies]).astype(np.float32)
    label = table["ill"].to_numpy(np.float32)
    split = [_split(label, np.flatnonzero(table["hospital"] == name)) for name in heart.HOSPITALS]
    raw = {"features": features, "label": label}
    each = [_standardised(raw, *index) for index in split]
    together = [np.concatenate(index) for index in zip(*split, strict=True)]
    return dict(zip(map(str.lower, heart.HOSPITALS), each, strict=True)), _standardised(raw, *together)


def _split(label: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return FLamby's training and test rows of a hospital, in the file's order."""
    from sklearn.model_selection import train_test_split

    own = label[rows]
    balanced = own if np.bincount(own.astype(int), minlength=2).min() > 2 else None
    sizes: dict[str, Any] = {"train_size": 0.66, "test_size": 1.0 - 0.66}
    parts = train_test_split(np.arange(len(rows)), **sizes, random_state=43, stratify=balanced)
    return rows[np.sort(parts[0])], rows[np.sort(parts[1])]


def _standardised(raw: Rows, train: np.ndarray, test: np.ndarray) -> Parts:
    known = raw["features"][train].astype(float)
    mean, deviation = known.mean(axis=0), known.std(axis=0, ddof=1) + 1e-9
    scaled = raw | {"features": ((raw["features"] - mean) / deviation).astype(np.float32)}
    return Parts(take(scaled, train), take(scaled, test))


def regions(data_dir: str | Path | None) -> tuple[dict[str, Parts], Parts]:
    """Return the patients of each region, and of all; the features are as published."""
    data = load("tcga-brca", data_dir)

    def rows(features: np.ndarray, event: np.ndarray, part: str) -> Rows:
        return {"features": features, "event": event.astype(np.float32), "time": data.extra[f"{part}_time"]}

    every = Parts(rows(data.train, data.train_labels, "train"), rows(data.test, data.test_labels, "test"))
    own = lambda k: [take(getattr(every, part), data.extra[f"{part}_region"] == k) for part in Parts._fields]
    return {str(name): Parts(*own(k)) for k, name in enumerate(data.extra["regions"])}, every


def _cox(x: Any, rows: Any) -> Float[Array, ""]:
    """Return Cox's loss of a batch, divided by all its rows, or weighted by the rows' shares.

    Subtracting the first row's features does not change the loss. A feature that is constant in the batch then has the
    gradient 0 and not a rounding error, from which Adam would make full steps.
    """
    shifted = rows | {"features": rows["features"] - rows["features"][:1]}
    losses = cox_losses(binary_scores(x, shifted), rows["event"], rows["time"])
    return jnp.sum(rows["share"] * losses) if "share" in rows else jnp.mean(losses)


_HEART = SingleLevel(lambda x, rows: jnp.mean(log_losses(x, rows)))  # one object: tasks then share compiled programs
_TCGA = SingleLevel(_cox, batch_statistic=True)


def _padded(rows: Rows, size: int) -> Rows:
    """Append rows that are in nobody's risk set, and add a column that holds 1/n, the share of an original row."""
    n = len(rows["time"])
    longer = {name: np.concatenate([a, np.zeros((size - n, *a.shape[1:]), a.dtype)]) for name, a in rows.items()}
    longer["time"][n:] = -1
    return longer | {"share": np.full(size, 1 / n, np.float32)}


def fed_heart(train: str = "clients", seed: int = 0) -> Task:
    """Predict heart disease with one logistic regression for four hospitals: Fed-Heart-Disease of FLamby.

    The data are UCI's, bundled with the package: 740 patients without a missing value in 13 features, of which 254 are
    the test set, by FLamby's fixed split. Each hospital's features are standardised by its own training rows. In
    training .46, .38, 1.0 and .78 of the patients are ill (Cleveland, Hungary, Switzerland, VA Long Beach).

    Arguments:
        train: who trains: "clients", the four hospitals; "pooled", one client with all rows; or one hospital alone:
            "cleveland", "hungary", "switzerland" or "va". The test rows are the same.
        seed: seed of the start, which is FLamby's for this seed.

    `Task.evaluate` returns `accuracy`, the mean over the hospitals; `accuracy_cleveland`, … on each one's test rows;
    and `pooled_accuracy` on all test rows, which are then standardised by the training rows of all hospitals together,
    as in FLamby. With "pooled", training uses these features, too. Always predicting the commoner class has the
    accuracies .538, .629, .938 and .778. The defaults are FLamby's settings.

    Reference: du Terrail et al., FLamby, NeurIPS 2022 Datasets and Benchmarks; Janosi, Steinbrunn, Pfisterer and
    Detrano, Heart Disease, UCI, 1989.
    """
    sets, pooled = hospitals()
    return Task(
        name="fed-heart",
        problem=_HEART,
        rounds=15,
        defaults={
            "step": 0.001,
            "local_steps": 100,
            "batch_size": 4,
            "FedProx": {"proximal": 0.01},
            "FineTuned": {"step": 0.00316227, "personal_step": 0.00316227, "personal_steps": 100},
        },
        **_common(sets, pooled, train, seed, "accuracy", _accuracy),
    )


def fed_tcga(train: str = "clients", whole: bool = False, seed: int = 0, data_dir: str | Path | None = None) -> Task:
    """Rank breast-cancer patients by risk with one Cox regression for six regions: Fed-TCGA-BRCA of FLamby.

    1,088 patients with 39 features, the age in years and 38 zeros and ones; 151 of them died while observed. A fixed
    222 are the test set. The score is linear in the features, and the loss is Cox's on the minibatch, divided by its
    number of rows. It is not a mean over rows, because a patient is compared with others of the minibatch: the problem
    has `batch_statistic=True`. Methods therefore need a `batch_size` of at most the smallest client's number of rows,
    or `whole=True`.

    Arguments:
        train: who trains: "clients", the six regions; "pooled", one client with all rows; or one region alone:
            "northeast", "south", "west", "midwest", "europe" or "canada". The test rows are the same.
        whole: for methods that use all of a client's data at once (`batch_size=None`): all clients are padded to one
            size with rows that change nothing. Do not use minibatches with it.
        seed: seed of the start, which is FLamby's for this seed.
        data_dir: the folder that holds `tcga-brca/`, with brca.csv, centers.csv and train_test_split.csv as in FLamby's
            repository (flamby/datasets/fed_tcga_brca and its dataset_creation_scripts); see `rookery.data.load`. These
            files are open clinical data of The Cancer Genome Atlas: no attempt may be made to identify patients.

    `Task.evaluate` returns `concordance`, the C-index's mean over the regions; `concordance_northeast`, … on each one's
    test rows; and `pooled_concordance` on all of them. A region's index rests on 358, 44, 108, 48, 47 and 3 comparable
    pairs: Canada's is 0, 1/3, 2/3 or 1. The defaults are FLamby's settings.

    Reference: du Terrail et al., FLamby, NeurIPS 2022 Datasets and Benchmarks; The Cancer Genome Atlas.
    """
    sets, pooled = regions(data_dir)
    return Task(
        name="fed-tcga",
        problem=_TCGA,
        rounds=5,
        every=1,
        defaults={
            "step": 0.1,
            "local_steps": 100,
            "batch_size": None if whole else 8,
            "FedProx": {"proximal": 0.1},
            "Scaffold": {"step": 0.01},
        },
        **_common(sets, pooled, train, seed, "concordance", _concordance, whole),
    )


def _common(
    sets: Mapping[str, Parts], pooled: Parts, train: str, seed: int, name: str, metric: Metric, whole: bool = False
) -> dict[str, Any]:
    """Return the attributes that both tasks make alike; `name` is that of the metric."""
    one = {client: [own] for client, own in sets.items()}
    chosen = choice("train", train, {"clients": [*sets.values()], "pooled": [pooled], **one})
    check_seed(seed)
    rows, weights = [own.train for own in chosen], [len(own.train["features"]) for own in chosen]
    if whole:
        rows = [_padded(own, max(weights)) for own in rows]
    tests = jax.tree.map(jnp.asarray, {client: own.test for client, own in {**sets, "pooled": pooled}.items()})
    return {
        "clients": Clients(upper=rows, weights=weights, test=[own.test for own in chosen]),
        "init": _start(seed, pooled.train["features"].shape[1]),
        "evaluate": lambda x, _: _measured(name, metric, tests, x),
        "metric": name,
    }


def _start(seed: int, features: int) -> dict[str, np.ndarray]:
    """Return a linear model as torch starts it: uniform in ±1/√d, weights before the intercept."""
    generator = np.random.RandomState(seed % 2**32)  # torch's Mersenne Twister
    words = np.frombuffer(generator.bytes(4 * (features + 1)), "<u4")
    uniform = (words & 0xFFFFFF) / 2**24
    values = ((2 * uniform - 1) / features**0.5).astype(np.float32)
    return {"w": values[:-1], "b": values[-1]}


@partial(jax.jit, static_argnums=(0, 1))
def _measured(name: str, metric: Metric, tests: dict[str, Any], x: Any) -> dict[str, Array]:
    values = {client: metric(x, rows) for client, rows in tests.items()}
    pooled = values.pop("pooled")
    each = {f"{name}_{client}": value for client, value in values.items()}
    return {name: jnp.mean(jnp.stack([*values.values()])), f"pooled_{name}": pooled, **each}


def _accuracy(x: Any, rows: Any) -> Float[Array, ""]:
    return jnp.mean((binary_scores(x, rows) > 0) == (rows["label"] > 0))


def _concordance(x: Any, rows: Any) -> Float[Array, ""]:
    return concordance(binary_scores(x, rows), rows["event"], rows["time"])
