"""FLamby's two tabular benchmarks: rows, splits and starts are its own, and the metrics and losses what they say."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import rookery as rk
from rookery.data import DataError, formats, heart, load
from rookery.experiments.flamby.heart import BASELINE, HEART
from rookery.experiments.flamby.tcga import TCGA
from rookery.problems.survival import concordance, cox_losses
from rookery.tasks import flamby

REAL = os.environ.get("ROOKERY_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"


def column(hospitals, name, part):
    return [getattr(own, part)[name] for own in hospitals.values()]


# Fed-Heart-Disease.


@pytest.fixture(scope="module")
def heart_sets():
    return flamby.hospitals()


def test_the_patients_of_each_hospital(heart_sets):
    sets, pooled = heart_sets
    train, test = (column(sets, "label", part) for part in ("train", "test"))
    assert [len(own) for own in train] == [199, 172, 30, 85] == [HEART.rows[client] for client in sets]
    assert [len(own) for own in test] == [104, 89, 16, 45]
    assert [round(float(own.mean()), 3) for own in train] == [0.457, 0.378, 1.0, 0.776]
    assert [round(float(own.mean()), 3) for own in test] == [0.462, 0.371, 0.938, 0.778]
    assert (len(pooled.train["label"]), len(pooled.test["label"])) == (486, 254)
    for part in ("train", "test"):
        np.testing.assert_array_equal(getattr(pooled, part)["label"], np.concatenate(column(sets, "label", part)))


def test_the_test_rows_are_flambys():
    table = heart.table().drop(columns=["slope", "vessels", "thal"]).dropna()
    first = {
        "Cleveland": [5, 13, 16, 24, 26, 34],
        "Hungary": [3, 7, 16, 21, 25, 26],
        "Switzerland": [5, 6, 7, 8, 13, 14],
        "VA": [1, 5, 6, 9, 12, 26],
    }
    for hospital, places in first.items():
        own = table["hospital"] == hospital
        _, test = flamby._split(table["ill"].to_numpy(np.float32), np.flatnonzero(own))
        assert (test[:6] - np.flatnonzero(own)[0]).tolist() == places


def test_features_are_standardised_by_own_training_rows(heart_sets):
    sets, pooled = heart_sets
    for name, own in {**sets, "pooled": pooled}.items():
        features = own.train["features"].astype(float)
        assert features.shape[1] == 13
        constant = (features == features[0]).all(axis=0)
        assert np.flatnonzero(constant).tolist() == ([3] if name == "switzerland" else [])  # its cholesterol is 0
        assert not features[:, constant].any()
        np.testing.assert_allclose(features.mean(axis=0), 0, atol=1e-6)
        np.testing.assert_allclose(features.std(axis=0, ddof=1), ~constant, atol=1e-6)
    assert not sets["switzerland"].test["features"][:, 3].any()
    raw = heart.table().drop(columns=["slope", "vessels", "thal"]).dropna().iloc[:303]  # Cleveland: all rows are whole
    numbers = ["age", "sex", "resting_pressure", "cholesterol", "fasting_sugar", "max_heart_rate", "exercise_angina"]
    dummies = [raw["chest_pain"] == 2, raw["chest_pain"] == 3, raw["chest_pain"] == 4, raw["ecg"] == 1, raw["ecg"] == 2]
    plain = np.column_stack([raw[[*numbers, "st_depression"]], *dummies]).astype(float)
    train, test = flamby._split(raw["ill"].to_numpy(np.float32), np.arange(303))
    scaled = (plain[test] - plain[train].mean(axis=0)) / plain[train].std(axis=0, ddof=1)
    np.testing.assert_allclose(sets["cleveland"].test["features"], scaled, atol=1e-5)


def test_the_commoner_class():
    """What a constant reaches; the experiment draws it."""
    task = rk.tasks.fed_heart()
    constant = lambda b: task.evaluate({"w": np.zeros(13), "b": b}, ())
    ill, well = constant(1.0), constant(-1.0)
    names = {client: f"accuracy_{client}" for client in HEART.clients} | {"pooled": "pooled_accuracy"}
    for client, accuracy in BASELINE.items():
        assert max(ill[names[client]], well[names[client]]) == pytest.approx(accuracy, abs=1e-5)
    assert ill["accuracy"] == pytest.approx(np.mean([ill[names[client]] for client in HEART.clients]))
    undecided = constant(0.0)  # p = .5 is not above .5
    assert undecided == well


def test_the_start_is_torchs():
    start = rk.tasks.fed_heart(seed=42).init
    assert (start["w"].shape, start["b"].shape, start["w"].dtype) == ((13,), (), np.float32)
    assert start["w"][0] == pytest.approx((2 * 0.88226926 - 1) / 13**0.5, abs=1e-7)
    values = np.append(start["w"], start["b"]) * 13**0.5
    assert (np.abs(values) < 1).all()
    assert not np.array_equal(rk.tasks.fed_heart(seed=43).init["w"], start["w"])


@pytest.mark.parametrize("make", [rk.tasks.fed_heart, lambda **given: rk.tasks.fed_tcga(**given, data_dir=REAL)])
def test_who_trains(make):
    task = made(make)
    benchmark = HEART if task.name == "fed-heart" else TCGA
    assert task.clients.upper_sizes.tolist() == [*benchmark.rows.values()]
    np.testing.assert_allclose(
        task.clients.weights, np.array([*benchmark.rows.values()]) / sum(benchmark.rows.values())
    )
    pooled, last = made(make, train="pooled"), made(make, train=[*benchmark.rows][-1])
    assert pooled.clients.upper_sizes.tolist() == [sum(benchmark.rows.values())]
    assert last.clients.upper_sizes.tolist() == [[*benchmark.rows.values()][-1]]
    assert task.evaluate(task.init, ()) == last.evaluate(task.init, ())
    with pytest.raises(ValueError, match=r"^train must be one of clients, pooled, .*; got 'Paris'\.$"):
        make(train="Paris")
    with pytest.raises(ValueError, match=r"^seed must be an integer"):
        make(seed=-1)


def made(make, **given):
    try:
        return make(**given)
    except DataError:
        pytest.skip("tcga-brca is not at hand")


class Twister:
    """torch's generator: 32-bit words of a Mersenne Twister."""

    def __init__(self, seed):
        self.words = np.random.RandomState(seed % 2**32)

    def word(self):
        return int.from_bytes(self.words.bytes(4), "little")

    def draw(self):
        return (self.word() << 32 | self.word()) % 2**63


def batches(rows, size, generator, seed):
    """FLamby's batches of a client, pass after pass: the first has this seed, each further one takes two draws."""
    while True:
        order, own = list(range(rows)), Twister(seed)
        for i in range(rows - 1):
            j = i + own.word() % (rows - i)
            order[i], order[j] = order[j], order[i]
        yield from (order[i : i + size] for i in range(0, rows, size))
        generator.draw()
        seed = generator.draw()


def test_the_published_numbers_follow_from_these_rows_and_starts(heart_sets):
    """A NumPy transcription of FLamby's FedAdam, with its own batches, gives its five numbers exactly."""
    sets, pooled = heart_sets
    seed, generator = 44, Twister(44)
    with_one = lambda rows: np.column_stack([rows["features"], np.ones_like(rows["label"])])
    train = [(with_one(own.train), own.train["label"]) for own in sets.values()]
    loaders = [None] * 4
    start = rk.tasks.fed_heart(seed=seed).init
    x = np.append(start["w"], start["b"])
    m, v = np.zeros_like(x), np.zeros_like(x)
    for _ in range(15):
        change = np.zeros_like(x)
        for k, (features, label) in enumerate(train):
            loaders[k] = loaders[k] or batches(len(label), 4, generator, generator.draw())  # when first used
            w = x
            for _ in range(100):
                batch = next(loaders[k])
                a = features[batch]
                w = w - np.float32(0.01) * a.T @ (1 / (1 + np.exp(-a @ w)) - label[batch]) / np.float32(len(batch))
            change = change + len(label) / np.float32(486) * (w - x)
        m, v = 0.9 * m + 0.1 * change, 0.999 * v + 0.001 * change**2
        x = x + 0.01 * m / (np.sqrt(v) + 1e-8)
    for client, own in {**sets, "pooled": pooled}.items():
        accuracy = np.mean((with_one(own.test) @ x > 0) == own.test["label"])
        assert accuracy == pytest.approx(HEART.published["FedAdam", client][seed - 42], abs=1e-5)


# Survival.


def with_ties(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=n).round(1), (rng.random(n) < 0.4).astype(float), rng.integers(0, n // 2, n).astype(float)


@pytest.mark.parametrize("n", [1, 40])
def test_coxs_loss_against_sorting(n):
    scores, event, time = with_ties(max(n, 2), n)
    scores, event, time = scores[:n], event[:n], time[:n]
    order = np.argsort(-time, kind="stable")
    log_sums = np.log(np.cumsum(np.exp(scores[order])))
    expected = np.empty(n)
    expected[order] = event[order] * (log_sums - scores[order])
    np.testing.assert_allclose(cox_losses(*map(jnp.asarray, (scores, event, time))), expected, rtol=1e-12, atol=1e-14)
    large = cox_losses(jnp.asarray(scores + 1e4), jnp.asarray(event), jnp.asarray(time))  # exp would overflow
    np.testing.assert_allclose(large, expected, atol=1e-8)


def test_the_c_index_against_all_pairs():
    scores, event, time = with_ties(60)
    right = pairs = 0.0
    for i in range(60):
        for j in range(60):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                right += 1 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0
    assert 0 < right < pairs
    assert float(concordance(*map(jnp.asarray, (scores, event, time)))) == pytest.approx(right / pairs, rel=1e-12)
    of = lambda *values: float(concordance(*map(jnp.array, values)))
    assert of([2.0, 1.0], [1.0, 0.0], [3.0, 3.0]) == 1  # a death and a censoring on one day
    assert np.isnan(of([2.0, 1.0], [1.0, 1.0], [3.0, 3.0]))  # two deaths on one day
    assert np.isnan(of([2.0, 1.0], [0.0, 0.0], [3.0, 4.0]))


# Fed-TCGA-BRCA.


def test_the_parser_of_tcga(tmp_path):
    """In the order of the table, without patients whose part is unknown; NA is the code of a site."""
    (tmp_path / "brca.csv").write_text(
        "pid,age,dummy,E,T\nT-NA-1,40,1,0.0,7.0\nT-AB-2,50,0,1.0,0.0\nT-AB-3,60,1,0.0,9.5\n"
    )
    (tmp_path / "centers.csv").write_text("TSS Code,Region\nAB,Canada\nNA,West\n")
    (tmp_path / "train_test_split.csv").write_text("pid,fold,fold2\nT-AB-2,train,train_5\nT-NA-1,train,train_2\n")
    names = ("brca.csv", "centers.csv", "train_test_split.csv")
    found = formats.tcga_brca({name: tmp_path / name for name in names})
    assert found["train"].tolist() == [[40, 1], [50, 0]]
    assert found["train_labels"].tolist() == [0, 1]
    assert found["extra.train_time"].tolist() == [7, 0]
    assert [found["extra.regions"][k] for k in found["extra.train_region"]] == ["west", "canada"]
    assert len(found["test"]) == 0
    assert found["columns"].tolist() == ["age", "dummy"]


def test_without_the_files_the_error_says_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"tcga-brca is not here.*\n.*tcga-brca/\{brca.csv, centers.csv, train_test"):
        rk.tasks.fed_tcga(data_dir=tmp_path)


@pytest.fixture(scope="module")
def tcga_sets():
    return made(lambda: flamby.regions(REAL))


def test_the_patients_of_each_region(tcga_sets):
    sets, pooled = tcga_sets
    train, test = (column(sets, "event", part) for part in ("train", "test"))
    assert [len(own) for own in train] == [248, 156, 164, 129, 129, 40] == [TCGA.rows[client] for client in sets]
    assert [len(own) for own in test] == [63, 40, 42, 33, 33, 11]
    assert [own.sum() for own in train] == [45, 35, 14, 16, 7, 2]
    assert [own.sum() for own in test] == [14, 4, 8, 3, 2, 1]
    assert (pooled.train["event"].sum(), pooled.test["event"].sum()) == (119, 32)
    rows = {name: np.concatenate([getattr(pooled, part)[name] for part in ("train", "test")]) for name in pooled.train}
    assert (len(rows["time"]), rows["features"].shape[1]) == (1088, 39)
    assert (rows["time"] <= 0).sum() == 12
    assert np.linalg.matrix_rank(rows["features"].astype(float)) == 32
    assert (rows["features"][:, 0].min(), rows["features"][:, 0].max()) == (26, 90)
    assert set(np.unique(rows["features"][:, 1:])) == {0, 1}
    times = pd.Series(rows["time"])
    assert (times.duplicated().sum(), times[rows["event"] > 0].duplicated().sum()) == (263, 5)


def test_regions_agree_with_flambys_own_numbers(tcga_sets):
    split = pd.read_csv(Path(REAL) / "tcga-brca" / "train_test_split.csv")
    assert (split["fold2"].str.rpartition("_")[0] == split["fold"]).all()
    sizes = split["fold2"].value_counts()
    for k, own in enumerate(tcga_sets[0].values()):
        assert (len(own.train["time"]), len(own.test["time"])) == (sizes[f"train_{k}"], sizes[f"test_{k}"])
    data = load("tcga-brca", REAL)
    patients = pd.read_csv(Path(REAL) / "tcga-brca" / "brca.csv")[["pid"]].merge(split, on="pid")
    for part in ("train", "test"):
        numbers = patients["fold2"][patients["fold"] == part].str.rpartition("_")[2].astype(int)
        np.testing.assert_array_equal(data.extra[f"{part}_region"], numbers)


def test_pairs_that_count(tcga_sets):
    def pairs(rows):
        event, time = rows["event"] > 0, rows["time"]
        later = (time[None] > time[:, None]) | ((time[None] == time[:, None]) & ~event[None])
        return int((event[:, None] & later).sum())

    sets, pooled = tcga_sets
    assert [pairs(own.test) for own in sets.values()] == [358, 44, 108, 48, 47, 3]
    assert pairs(pooled.test) == 2730


def test_the_untrained_model_has_the_published_c_indices():
    """FLamby's Cyclic with seed 42 gives the first client no turn: rows, start and C-index are its own."""
    task = made(lambda: rk.tasks.fed_tcga(seed=42, data_dir=REAL))
    found = task.evaluate(task.init, ())
    for client in TCGA.clients:
        assert found[f"concordance_{client}"] == pytest.approx(TCGA.published["Cyclic", client][0], abs=1e-5)
    assert found["pooled_concordance"] == pytest.approx(TCGA.published["Cyclic", "pooled"][0], abs=1e-5)


def test_the_published_c_indices_follow_from_these_rows_and_starts(tcga_sets):
    """A NumPy transcription of FLamby's Cyclic, with its own batches, gives its seven numbers exactly."""
    sets, _ = tcga_sets
    seed, before, generator = 45, Twister(45), Twister(45)
    for _ in range(67):  # what local training and evaluation have drawn before
        before.draw()
    passes = [(before.draw(), before.draw())[1] for _ in sets]
    loaders = [batches(len(own.train["time"]), 8, generator, p) for own, p in zip(sets.values(), passes, strict=True)]
    start = made(lambda: rk.tasks.fed_tcga(seed=seed, data_dir=REAL)).init["w"]
    models, clients = [start] * 6, [*sets.values()]
    for k in np.random.default_rng(seed).permutation(6)[:5]:
        for _ in range(100):
            batch = next(loaders[k])
            rows = {name: a[batch] for name, a in clients[k].train.items()}
            order = np.argsort(-rows["time"], kind="stable")
            a, event = rows["features"][order], rows["event"][order]
            hazard = np.exp(a @ models[k] - np.max(a @ models[k]))[:, None]
            expected = np.cumsum(hazard * a, axis=0) / np.cumsum(hazard, axis=0)
            models[k] = models[k] - np.float32(0.01) * (event @ (expected - a)) / np.float32(len(batch))
    found = rk.tasks.fed_tcga(data_dir=REAL).evaluate({"w": models[0], "b": np.float32(0)}, ())
    columns = {client: f"concordance_{client}" for client in sets} | {"pooled": "pooled_concordance"}
    for client, column in columns.items():
        assert found[column] == pytest.approx(TCGA.published["Cyclic", client][seed - 42], abs=1e-5)


def test_whole_data_without_padding_and_with_it(tcga_sets):
    """The loss and the gradient of padded rows are those of the rows themselves."""
    task = made(lambda: rk.tasks.fed_tcga(whole=True, data_dir=REAL))
    assert set(task.clients.upper_sizes.tolist()) == {248}
    np.testing.assert_allclose(task.clients.weights, np.array([*TCGA.rows.values()]) / 866)
    own = jax.tree.map(jnp.asarray, tcga_sets[0]["canada"].train)
    padded = jax.tree.map(jnp.asarray, task.clients.client_data(5)["upper"][0])
    x = {"w": jnp.linspace(-0.1, 0.1, 39), "b": jnp.array(0.3)}
    of = jax.jit(jax.value_and_grad(flamby._TCGA.loss))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), of(x, own), of(x, padded))
    scores = own["features"].astype(float) @ x["w"]
    expected = np.mean(cox_losses(scores, own["event"], own["time"]))
    assert float(of(x, own)[0]) == pytest.approx(float(expected), abs=1e-6)


def test_a_constant_feature_has_no_gradient(tcga_sets):
    """Not even a rounding error, from which Adam would make steps of full size."""
    own = tcga_sets[0]["canada"].train
    constant = (own["features"] == own["features"][0]).all(axis=0)
    assert constant[24]
    assert own["features"][0, 24] == 1
    rng, x = np.random.default_rng(0), {"w": jnp.linspace(-0.1, 0.1, 39, dtype="f"), "b": jnp.float32(0.3)}
    gradient = jax.jit(jax.grad(flamby._TCGA.loss))
    for _ in range(40):
        drawn = rng.permutation(40)[:8]
        batch = {name: a[drawn] for name, a in own.items()} | {"event": np.ones(8, "f")}
        found = gradient(x, batch)["w"]
        assert not found[constant].any()
        assert found.any()


def test_coxs_loss_is_refused_row_by_row():
    task = made(lambda: rk.tasks.fed_tcga(data_dir=REAL))
    with pytest.raises(ValueError, match="must be evaluated on whole batches, because of batch_statistic=True"):
        rk.solve(task.problem, task.clients, rk.FedAvg(), task.init, 1)
