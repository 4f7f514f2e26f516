"""The status page in a real browser, while a run goes on; see `make browser`."""

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rookery.report.status import StatusPage

from .opened import Page, wait

pytestmark = pytest.mark.browser


@pytest.fixture
def status() -> Iterator[StatusPage]:
    status = StatusPage(0)
    yield status
    status.close()


def sites(now: float, **states: str) -> list[dict[str, Any]]:
    names = {"st_vincent": "connected", "charite": "connected", "north-clinic-with-a-rather-long-name": "connected"}
    return [
        {"name": name, "state": state, "since": now - 100 * k, "rounds": 40 - k, "missing": 3 * k}
        | {"bytes_up": 48_000 * (6 - k), "bytes_down": 96_000 * (6 - k)}
        for k, (name, state) in enumerate((names | states).items())
    ]


def feed(status: StatusPage, rounds: range) -> None:
    for k in rounds:
        loss, accuracy = 3 * math.exp(-k / 9) + 1e-3, 0.92 - 0.5 * math.exp(-k / 12)
        bands = {f"accuracy_q{q}": accuracy + (q - 50) / 800 for q in (0, 10, 50, 90, 100)}
        costs = {"exchanges": 8 * k, "bytes_up": 48_000 * k, "bytes_down": 96_000 * k, "missing": k // 9}
        extra = {"gradient_norm": 2 / (k + 1)}
        status.row({"round": k, **costs, "seconds": 0.1 * k, "loss": loss, "accuracy": accuracy, **bands, **extra})


def begin(status: StatusPage, rounds: int) -> None:
    hyperparameters = {"upper_step": 0.01, "lower_step": 0.1, "lower_steps": [1, 5]}
    told = {"algorithm": "FedNest", "seed": 0, "cohort": 3, "rounds": 60, "every": 1}
    status.start(told | {"hyperparameters": hyperparameters})
    status.sites(sites(time.time()))
    for text in ("charite connected", "st_vincent connected", "round 7: charite came too late and was left out"):
        status.event(text)
    feed(status, range(rounds))


def words(page: Page, selector: str) -> str:
    return str(page.ask(f"document.querySelector('{selector}').textContent"))


def points(page: Page) -> Any:
    """How many the curve of the loss has."""
    return page.ask("window.status_page.charts.get('loss')?.series[0].x.length")


def theme(browser: Any, name: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": name}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.mark.parametrize(("name", "width"), [("wide", 1200), ("narrow", 390)])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_it_opens_without_errors_and_fits(
    browser: Any, status: StatusPage, name: str, width: int, colours: str
) -> None:
    theme(browser, colours)
    begin(status, 41)
    status.sites(sites(time.time(), charite="late", zurich="gone", lyon="refused"))
    page = Page(browser, status.url, width)
    wait(lambda: points(page) == 41)
    page.settle()
    page.screenshot(f"status-{name}-{colours}")
    assert page.errors() == []
    assert page.ask("document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than the window"
    background = page.ask("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (colours == "light")
    theme(browser, "light")


def test_it_follows_a_run_without_reload(browser: Any, status: StatusPage) -> None:
    page = Page(browser, status.url)
    wait(lambda: words(page, "#title") == "Waiting for a run")
    page.ask("window.same = true")
    begin(status, 5)
    wait(lambda: words(page, "#state") == "running" and points(page) == 5)
    page.settle()
    before = page.ask("document.querySelector('#metrics canvas').toDataURL()")
    assert page.ask("[...document.querySelectorAll('#sites .state')].map(s => s.textContent)") == ["connected"] * 3
    feed(status, range(5, 30))
    status.sites(sites(time.time(), charite="gone"))
    status.event("charite is gone")
    wait(lambda: points(page) == 30 and "charite is gone" in words(page, "#events"))
    page.settle()
    assert page.ask("document.querySelector('#metrics canvas').toDataURL()") != before
    states = page.ask("[...document.querySelectorAll('#sites .state')].map(s => s.textContent)")
    assert states == ["connected", "gone", "connected"]
    assert "charite is gone" in words(page, "#events li:first-child")
    tiles = words(page, "#tiles")
    for part in ("sites connected2 of 3", "rounds29 of 60", "exchanges232", "bytes up1.392 MB", "missing replies9"):
        assert part in tiles
    assert page.ask("document.getElementById('bar').getAttribute('aria-valuenow')") == "29"
    status.end(None)
    wait(lambda: words(page, "#state") == "broke off")
    assert page.ask("window.same")
    assert page.errors() == []


def test_pointing_shows_values_that_stay(browser: Any, status: StatusPage) -> None:
    begin(status, 10)
    page = Page(browser, status.url)
    wait(lambda: points(page) == 10)
    page.settle()
    page.point(0.5, 0.5, within="#metrics")
    tip = page.find("#metrics .tip")
    wait(tip.is_displayed)
    assert "loss" in tip.text
    assert "rounds" in tip.text
    first = tip.text
    page.screenshot("status-hover", whole=False)
    feed(status, range(10, 40))
    wait(lambda: points(page) == 40)
    page.settle()
    assert tip.is_displayed()
    assert tip.text != first
    assert page.errors() == []


def test_names_are_shown_as_text(browser: Any, status: StatusPage) -> None:
    evil = "<script>window.evil=1</script><img src=x onerror='window.evil=1'>"
    status.start({"algorithm": evil, "hyperparameters": {evil: evil}})
    status.sites([{"name": evil, "state": "connected", "since": evil}])
    status.event(evil)
    for k in range(3):
        status.row({"round": k, evil: 1.0 * k, "__proto__": 1.0})
    page = Page(browser, status.url)
    wait(lambda: evil in words(page, "#events"))
    page.settle()
    page.point(0.5, 0.5, within="#metrics")
    for selector in ("#title", "#sites", "#settings", "#metrics figcaption", "#metrics .tip"):
        assert evil in words(page, selector), selector
    assert page.ask("window.evil === undefined && document.querySelectorAll('img').length === 0")
    assert page.errors() == []


def test_a_coordinator_that_is_gone_and_comes_back(browser: Any, status: StatusPage) -> None:
    begin(status, 10)
    page = Page(browser, status.url)
    wait(lambda: points(page) == 10)
    assert page.ask("document.getElementById('lost').hidden")
    assert page.errors() == []
    status.close()
    wait(lambda: not page.ask("document.getElementById('lost').hidden"))
    assert words(page, "#lost").startswith("No connection to the coordinator. What is shown is from")
    page.screenshot("status-lost", whole=False)
    again = StatusPage(status.port)
    begin(again, 20)
    wait(lambda: page.ask("document.getElementById('lost').hidden") and points(page) == 20)
    again.close()
