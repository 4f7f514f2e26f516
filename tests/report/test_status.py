"""The status page, asked over HTTP: what it shows, whom it answers, and what it refuses."""

import http.client
import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.report.status import StatusPage
from rookery.run.solve import _metrics_text
from rookery.run.trackers import Tracker


@pytest.fixture
def page() -> Iterator[StatusPage]:
    page = StatusPage(0)
    yield page
    page.close()


def ask(page: StatusPage, path: str = "/status.json", method: str = "GET", host: str | None = "localhost") -> Any:
    """The answer: its code, headers and body."""
    there = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    there.putrequest(method, path, skip_host=True)
    if host is not None:
        there.putheader("Host", host)
    there.endheaders()
    answer = there.getresponse()
    body = answer.read()
    there.close()
    return answer.status, dict(answer.getheaders()), body


def shown(page: StatusPage) -> Any:
    return json.load(urllib.request.urlopen(page.url + "status.json", timeout=10))


def test_it_shows_what_it_is_told(page: StatusPage) -> None:
    assert shown(page)["state"] == "waiting"
    page.start({"algorithm": "FedNest", "rounds": 9, "hyperparameters": {"step": 0.1}})
    page.sites([{"name": "a", "state": "connected", "rounds": 2}, {"name": "b", "state": "late", "missing": 1}])
    page.event("b is late")
    row = {"round": 1, "loss": jnp.float32(0.5), "loss_q10": 0.1, "loss_q90": 0.9, "loss_q50": 0.5, "weight_0": 1.0}
    page.row({**row, "exchanges": 4, "bytes_up": 8, "bytes_down": 16, "missing": 1, "seconds": 3.0})
    page.row({**row, "round": 2, "loss": float("nan"), "accuracy": 1})
    status = shown(page)
    assert status["state"] == "running"
    assert status["settings"] == {"algorithm": "FedNest", "rounds": 9, "hyperparameters.step": 0.1}
    assert [site["name"] for site in status["sites"]] == ["a", "b"]
    assert status["events"][0]["text"] == "b is late"
    assert status["metrics"] == [
        {"name": "loss", "higher": False, "x": [1], "y": [0.5], "low": [0.1], "high": [0.9]},
        {"name": "accuracy", "higher": True, "x": [2], "y": [1]},
    ]
    counted = {"exchanges": 4, "bytes_up": 8, "bytes_down": 16, "missing": 1}
    assert status["progress"] == {"rounds": 9, "rounds_done": 2, **counted}
    page.progress(5, 10, 20, 30, 40)
    assert shown(page)["progress"]["rounds_done"] == 5
    page.start({"algorithm": "FedAvg"})
    assert shown(page)["metrics"] == []
    page.end(None)
    assert shown(page)["state"] == "failed"
    with pytest.raises(ValueError, match="one of connected, gone, late, refused"):
        page.sites([{"name": "a", "state": "asleep"}])


def test_its_health(page: StatusPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a container's or a host's health check asks: 503 only if the run has failed."""
    now = [1000.0]
    monkeypatch.setattr("rookery.report.status.time.time", lambda: now[0])

    def health() -> tuple[int, Any]:
        code, _, body = ask(page, "/health")
        return code, json.loads(body)

    assert health()[1]["state"] == "waiting"
    page.start({"rounds": 9})
    page.sites(
        [{"name": "a", "state": "connected"}, {"name": "b", "state": "late"}, {"name": "c", "state": "connected"}]
    )
    page.progress(1, 9, 2, 3, 4)
    now[0] += 60
    page.progress(1, 9, 3, 3, 4)  # an exchange of the same round
    sites = {"connected": 2, "gone": 0, "late": 1, "refused": 0}
    assert health() == (
        200, {"state": "running", "rounds_done": 1, "seconds_since_last_round": 60.0, "sites": sites}
    )  # fmt: skip
    page.row({"round": 2, "loss": 1.0})
    assert health()[1]["seconds_since_last_round"] == 0
    page.end(None)
    assert health()[0] == 503


def test_it_follows_a_run(page: StatusPage) -> None:
    assert isinstance(page, Tracker)
    problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
    clients = rk.Clients(upper=[jnp.array([1.0]), jnp.array([3.0, 4.0])])
    run = rk.solve(
        problem, clients, rk.FedAvg(), jnp.zeros(()), 3, evaluate=lambda x, y: {"size": abs(x)}, callbacks=[page]
    )
    status = shown(page)
    assert status["state"] == "done"
    (metric,) = status["metrics"]
    assert metric["x"] == run.history["round"].tolist()
    assert metric["y"] == pytest.approx(run.history["size"].tolist(), rel=1e-6)
    last = run.history.iloc[-1]
    for name in ("exchanges", "bytes_up", "bytes_down", "missing"):
        assert status["progress"][name] == last[name]
    assert status["progress"]["rounds_done"] == status["progress"]["rounds"] == 3


def test_it_shows_what_a_private_run_has_spent(page: StatusPage) -> None:
    """ε is a number beside the others, not a curve."""
    clients = rk.Clients(upper=[np.array([1.0, 2.0])] * 4)
    problem = rk.SingleLevel(lambda x, batch: jnp.mean((x - batch) ** 2))
    how: dict[str, Any] = {"channel": rk.private(9, 1e-2, noise=1.0), "evaluate": lambda x, y: {"loss": x}}
    run = rk.solve(problem, clients, rk.FedAvg(), jnp.zeros(()), 20, callbacks=[page], progress=False, **how)
    status = shown(page)
    assert status["progress"]["epsilon"] == pytest.approx(run.history["epsilon"].iloc[-1], rel=1e-6)
    assert [metric["name"] for metric in status["metrics"]] == ["loss"]
    assert status["settings"]["privacy.unit"] == "client"
    assert status["state"] == "spent"
    assert run.plot(x="epsilon").get_xlabel() == "ε"
    assert "ε 9" in _metrics_text({"round": 1, "epsilon": 9.0, "loss": 1.0})


def test_the_page_needs_nothing_else(page: StatusPage) -> None:
    code, headers, body = ask(page, "/")
    text = body.decode()
    assert code == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert not re.search(r"""(src|href)=["'](?!data:)|https?://|@import|url\(""", text)
    assert "{{" not in text.replace("${{", "")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
    assert "Python" not in headers["Server"]
    code, headers, empty = ask(page, "/", "HEAD")
    assert (code, empty, int(headers["Content-Length"])) == (200, b"", len(body))


def test_names_are_data_and_never_part_of_the_page(page: StatusPage) -> None:
    evil = "</script><script>alert(1)</script>\ud800"
    before = ask(page, "/")[2]
    page.start({"algorithm": evil})
    page.sites([{"name": evil, "state": "gone"}])
    page.event(evil)
    page.row({"round": 0, evil: 1.0})
    code, headers, body = ask(page)
    assert code == 200
    assert headers["Content-Type"].startswith("application/json")
    status = json.loads(body)
    assert status["sites"][0]["name"] == status["events"][0]["text"] == status["metrics"][0]["name"] == evil
    assert ask(page, "/")[2] == before


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FOO"])
def test_it_can_only_be_read(page: StatusPage, method: str) -> None:
    code, headers, _ = ask(page, method=method)
    assert (code, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path", ["/status", "/../status.json", "/..%2f", "/status.css", "//etc/passwd", "/page.html", "/status.json/", "x"]
)
def test_there_is_nothing_else(page: StatusPage, path: str) -> None:
    assert ask(page, path)[0] == 404
    assert ask(page, "/?x=1")[0] == 200


def test_the_host_must_be_its_own(page: StatusPage) -> None:
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1234", "[::1]:1"):
        assert ask(page, host=host)[0] == 200, host
    for other in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil@localhost", "10.0.0.7", ""):
        assert ask(page, host=other)[0] == 421, other
        assert ask(page, "/", host=other)[0] == 421, other
    assert ask(page, host=None)[0] == 421


def test_it_listens_elsewhere_only_when_told(page: StatusPage) -> None:
    assert page.url == f"http://127.0.0.1:{page.port}/"
    assert page._server is not None
    assert page._server.server_address[0] == "127.0.0.1"
    everywhere = StatusPage(0, host="0.0.0.0")
    assert ask(everywhere, host="10.0.0.7:80")[0] == 200  # a number is no name that another can point here
    assert ask(everywhere, host=socket.gethostname())[0] == 200
    assert ask(everywhere, host="evil.example")[0] == 421
    everywhere.close()


def test_ports(page: StatusPage) -> None:
    with pytest.raises(ValueError, match=f"port {page.port} at 127.0.0.1 is in use. Give another") as caught:
        StatusPage(page.port)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="from 0 to 65535"):
        StatusPage(70000)
    with pytest.raises(ValueError, match="can't be opened"):
        StatusPage(0, host="no such host")
    page.close()
    page.close()
    again = StatusPage(page.port)
    assert shown(again)["state"] == "waiting"
    again.close()


def test_a_long_history_stays_light(page: StatusPage) -> None:
    page.start({})
    for k in range(20_000):
        page.row({"round": k, "loss": 1 / (k + 1), "accuracy": k / 20_000})
    assert len(page._rows.all()) <= 1001
    for k in range(300):
        page.event(f"{k} " + "x" * 1000)
    body = ask(page)[2]
    assert len(body) < 200_000
    status = json.loads(body)
    for metric in status["metrics"]:
        assert 400 < len(metric["x"]) <= 1002
        assert metric["x"][0] == 0
        assert metric["x"][-1] == 19_999
        steps = {b - a for a, b in zip(metric["x"][:-2], metric["x"][1:-1], strict=True)}
        assert len(steps) == 1
    assert status["metrics"][0]["y"][-1] == pytest.approx(5e-5)
    assert len(status["events"]) == 100
    assert status["events"][-1]["text"].startswith("299")


def test_a_garbage_request_harms_nobody(page: StatusPage) -> None:
    for sent in (b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9.9\r\n\r\n", b"A" * 70_000, b""):
        with socket.create_connection(("127.0.0.1", page.port), timeout=10) as there:
            there.sendall(sent)
    assert shown(page)["state"] == "waiting"
