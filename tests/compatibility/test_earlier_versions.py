"""What earlier versions wrote and sent can still be read, and other versions are told apart in one line."""

import base64
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.compatibility.record import coordinate, site
from tests.compatibility.study import ROUNDS, SITES, START, distance, method, problem

import rookery as rk
from rookery import report
from rookery.engines import checkpoints
from rookery.engines.federation import description, heads, wire
from rookery.engines.federation.audit import Audit, read
from rookery.engines.federation.kits import read_toml
from rookery.engines.federation.policy import Policy
from rookery.engines.federation.store import Store
from rookery.report.html import sources

VERSIONS = sorted(path for path in Path(__file__).parent.iterdir() if path.name[0].isdigit())
pytestmark = pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
Turn = tuple[int, dict[str, Any], list[Any], dict[str, Any], list[Any]]


def turns(version: Path) -> list[Turn]:
    """The recorded requests and answers, in order: site, request and answer."""
    lines = [json.loads(line) for line in (version / "messages.jsonl").read_text().splitlines()]
    decode = lambda text: wire.decode(base64.b64decode(text))
    return [(line["site"], *decode(line["request"]), *decode(line["answer"])) for line in lines]


def plans_of_today() -> dict[str, Any]:
    """The fields of an opening that depend on how this version traces the plan."""
    found: dict[str, Any] = {}
    sites = [site(name) for name in SITES]

    def ask(i: int, request: Any) -> Any:
        header = wire.decode(request)[0]
        found.update({name: header[name] for name in ("fingerprint", "signatures") if name in header})
        return sites[i].handle(request)

    with pytest.raises(Found):
        coordinate(lambda i, request: raised(Found) if found else ask(i, request))
    return found


class Found(Exception):
    """The opening was sent."""


def raised(error: type[Exception]) -> Any:
    raise error


def test_a_site_answers_an_earlier_coordinator(version: Path, tmp_path: Path) -> None:
    plans, sites = plans_of_today(), [site(name, tmp_path / name) for name in SITES]
    for i, request, inputs, expected, arrays in turns(version):
        today = request | plans if request["do"] == "open" else request
        answer, found = wire.decode(sites[i].handle(wire.encode(today, inputs)))
        assert answer["answer"] == expected["answer"], answer
        assert expected.keys() <= answer.keys()
        assert [np.asarray(a).tolist() for a in found] == pytest.approx([a.tolist() for a in arrays], rel=1e-12)


def test_a_coordinator_understands_earlier_sites(version: Path) -> None:
    """It is given the recorded answers, and asks for nothing that the sites did not know."""
    recorded = turns(version)

    def ask(i: int, request: Any) -> bytes:
        header, inputs = wire.decode(request)
        at = next(n for n, turn in enumerate(recorded) if turn[0] == i)
        _, earlier, then, answer, arrays = recorded.pop(at)
        assert header.keys() == earlier.keys(), "an earlier site refuses, or needs, other fields"
        assert header["do"] == earlier["do"]
        assert [(a.shape, a.dtype) for a in inputs] == [(a.shape, a.dtype) for a in then]
        return bytes(wire.encode(answer | {"number": header["number"]}, arrays))

    run = coordinate(ask)
    expected = json.loads((version / "result.json").read_text())
    assert not recorded
    assert float(run.x) == pytest.approx(expected["x"], rel=1e-12)
    assert list(run.history["distance"]) == pytest.approx(expected["distance"], rel=1e-12)


def test_the_memory_of_a_site(version: Path, tmp_path: Path) -> None:
    for name in SITES:
        (file,) = (version / name).glob("*.memory")
        header = wire.decode(file.read_bytes())[0]
        store = Store(shutil.copy(file, tmp_path), header["data"], header["plan"], header["run"])
        store.check()
        moments = store.read()
        assert [version.moment for version in moments] == [(1, ROUNDS - 2), (1, ROUNDS - 1)]
        assert np.shape(moments[-1].memory["memory"][0]) == ()


def test_the_log_of_a_site(version: Path, tmp_path: Path) -> None:
    """It counts what was answered, and goes on."""
    for name in SITES:
        folder = Path(shutil.copytree(version / name, tmp_path / name))
        log = Audit(folder / "audit.jsonl")
        assert (log.counts.rounds, log.counts.exchanges) == (ROUNDS + 1, ROUNDS)  # the start counts as a round
        assert heads.compare(log.path, version / heads.FILE, site=name).wrong == ""
        log.opened("ab" * 16, "", "", 2, 2)
        log.close()
        assert read(log.path)[0].broken is None


def test_the_privacy_account_of_a_site(version: Path, tmp_path: Path) -> None:
    """What was released counts, under the earlier version and under this one."""
    found, log = read(shutil.copytree(version / "account", tmp_path / "account") / "audit.jsonl")
    assert found.broken is None
    expected = json.loads((version / "account.json").read_text())
    assert 1 < expected["epsilon"] < 50
    assert log.spending.epsilon(1e-5) == pytest.approx(expected["epsilon"], rel=1e-6)
    assert [run.delta for run in log.runs.values()] == [1e-5]
    assert list(log.unmasked.values()) == [["a", "b", "c"]] * 2
    assert len(log.charged) == 2


def test_policies_and_kits(version: Path) -> None:
    """They are written by hand and by `rookery federation init`: later versions add such files, and change none."""
    policy = Policy.read(version / "policy.toml")
    written = tomllib.loads((version / "policy.toml").read_text())
    assert {name: getattr(policy, name) for name in written} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in written.items()
    }
    kit = read_toml(version / "kit.toml")
    assert (kit["address"], kit["name"], kit["sites"]) == ("fl.example.org:9443", "coordinator", ["a", "b"])
    assert (kit["revocations"], list(kit["certificates"])) == (2, ["a", "b"])


def test_the_files_of_a_run(version: Path) -> None:
    expected = json.loads((version / "result.json").read_text())
    lines = version / "lines.jsonl"
    (command, saved, tracked), _ = sources.read([version / "command", version / "saved", lines])
    for source in (saved, tracked):
        assert source.seed == 0
        assert source.settings["local_steps"] == 2
        assert list(source.history["distance"]) == pytest.approx(expected["distance"], rel=1e-12)
    assert command.label == "FedNest on quadratic"
    assert report.read_run(version / "command")[0]["hyperparameters"]["lower_rounds"] == 3
    assert rk.load_weights(version / "saved" / "weights.safetensors")["x"] == pytest.approx(expected["x"])
    with np.load(version / "command" / "state.npz") as state:
        assert "x" in state


def test_a_checkpoint(version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read and continued if the program is the same; whether it is, depends on the versions of Python and JAX."""
    expected = json.loads((version / "result.json").read_text())
    folder = Path(shutil.copytree(version / "checkpoint", tmp_path / "checkpoint"))
    compared = list[tuple[dict[str, Any], dict[str, Any]]]()
    seen = lambda self, header, rounds: compared.append((header["identity"], self._identity))
    monkeypatch.setattr(checkpoints.Checkpoint, "_check", seen)
    clients = rk.Clients(upper=[np.array(rows) for rows in SITES.values()])
    run = rk.solve(
        problem, clients, method, jnp.asarray(START), ROUNDS, evaluate=distance, keep_best="distance",
        checkpoint=folder, progress=False,
    )  # fmt: skip
    ((earlier, today),) = compared
    assert today["algorithm"] == "Scaffold"
    differ = {name for name in earlier.keys() | today.keys() if earlier.get(name) != today.get(name)}
    assert {name.partition(" ")[0] for name in differ} <= {"program"}, "the identity of a checkpoint has changed"
    assert float(run.x) == pytest.approx(expected["x"], rel=1e-12)
    assert list(run.history["distance"]) == pytest.approx(expected["distance"], rel=1e-12)
    assert run.history["gradients"].iloc[-1] == 4 * ROUNDS
    assert run.best is not None
    assert run.best.round == ROUNDS


def test_files_of_a_later_version(version: Path, tmp_path: Path) -> None:
    """The run's, a tracker's and a site's: each is refused in one line that says to update."""
    for name, file in (("command", "run.json"), ("saved", "settings.json")):
        folder = Path(shutil.copytree(version / name, tmp_path / name))
        (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), "format": 2}))
        with pytest.raises(ValueError, match=r"must have a format .* up to 1; got 2\. Update Rookery\.$"):
            sources.read([folder])
    first, *others = (version / "lines.jsonl").read_text().splitlines()
    (tmp_path / "lines.jsonl").write_text("\n".join([json.dumps({**json.loads(first), "format": 2}), *others]))
    with pytest.raises(ValueError, match=r"line 1 must have a format .* got 2\. Update Rookery\.$"):
        sources.read([tmp_path / "lines.jsonl"])
    (file,) = (version / "north").glob("*.memory")
    header, arrays = wire.decode(file.read_bytes())
    later = tmp_path / "later.memory"
    later.write_bytes(bytes(wire.encode({**header, "format": 2, "versions": {}}, arrays)))
    with pytest.raises(ValueError, match=r"later.memory must have the format 1 .* got 2\. Update Rookery\.$"):
        Store(later)


def met(protocols: Any, rookery: str) -> tuple[list[str], list[dict[str, Any]]]:
    """What the coordinator says of a site with other versions, and what it sends to open the run."""
    sites, told, openings = [site(name) for name in SITES], list[str](), list[dict[str, Any]]()

    def ask(i: int, request: Any) -> Any:
        header, _ = wire.decode(request)
        if header["do"] == "open":
            openings.append(header)
        if i == 0 or header["do"] != "hello":
            return sites[i].handle(request)
        said, arrays = wire.decode(sites[i].handle(request))
        said |= {"protocols": protocols, "conditions": {**said["conditions"], "rookery": rookery, "protocol": 9}}
        return bytes(wire.encode(said, arrays))

    try:
        coordinate(ask, tell=told.append)
    except ValueError as error:
        told.append(str(error))
    return told, openings


def test_a_newer_site_agrees_on_the_older_protocol(version: Path) -> None:
    told, openings = met([1, 9], "9.0")
    assert f"south has Rookery 9.0, the coordinator {rk.__version__}." in told
    assert [opening["conditions"]["protocol"] for opening in openings] == [1, 1]


def test_the_lower_of_two_ranges(version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "PROTOCOLS", (2, 4))
    agreed = [description.agreed_protocol(theirs) for theirs in ([1, 3], [3, 9], [1, 2], [4, 4], [1, 1], [5, 6])]
    assert agreed == [3, 4, 2, 4, None, None]
    assert description.agreed_protocol("1") is description.agreed_protocol([2]) is None
    assert description.agreed_protocol([None, None]) is None


def test_a_site_without_a_common_protocol(version: Path) -> None:
    told, openings = met([8, 9], "9.0")
    here = f"version 1 (Rookery {rk.__version__}) at the coordinator"
    assert told == [
        f"south runs under other conditions: protocol: {here}, versions 8 to 9 (Rookery 9.0) at south. Use the same on "
        "both sides."
    ]
    assert openings == []


def test_a_coordinator_without_a_common_protocol(version: Path) -> None:
    opening = next(request for _, request, *_ in turns(version) if request["do"] == "open")
    opening["conditions"] |= {"protocol": 7, "rookery": "9.0"}
    answer, _ = wire.decode(site("north").handle(wire.encode(opening, [])))
    assert answer["why"] == (
        f"it runs under other conditions: protocol: version 1 (Rookery {rk.__version__}) here, version 7 (Rookery 9.0) "
        "at the coordinator. Use the same on both sides."
    )


def test_other_versions_are_named_where_plans_differ(version: Path) -> None:
    opening = next(request for _, request, *_ in turns(version) if request["do"] == "open")
    opening["conditions"] |= {"rookery": "9.0"}
    opening |= {"fingerprint": "ab" * 16, "jax": "9.9"}
    answer, _ = wire.decode(site("north").handle(wire.encode(opening, [])))
    assert f"Rookery is {rk.__version__} here, 9.0 there. JAX is " in answer["why"]


def test_a_run_is_finished_with_the_versions_it_began_with(version: Path, tmp_path: Path) -> None:
    opening = (
        next(request for i, request, *_ in turns(version) if request["do"] == "open" and i == 0) | plans_of_today()
    )
    north = site("north", tmp_path)
    ask = lambda request: wire.decode(north.handle(wire.encode(request, [])))[0]
    assert ask(opening)["answer"] == "opened"
    later = {**opening, "conditions": {**opening["conditions"], "rookery": "9.0"}}
    assert "it knows this run, which was opened with a different message" in ask(later)["why"]
    assert ask({**later, "run": "ab" * 16, "store": "cd" * 16})["answer"] == "opened"
