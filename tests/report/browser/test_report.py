"""The report in a real browser, from file://: what is drawn, switched, pointed at and zoomed; see `make browser`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rookery.report import html

from . import made_up
from .opened import Page

pytestmark = pytest.mark.browser
MOST_MS = 250  # for a redraw of 50 lines with 1000 points each; a few on a desktop machine


@pytest.fixture(scope="module")
def file(tmp_path_factory: Any) -> Path:
    """Three methods with three seeds each."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(html.render(made_up.runs(), [made_up.CLAIMS], "Made up"), encoding="utf-8")
    return file


@pytest.mark.parametrize(("name", "width"), [("wide", 1200), ("narrow", 390)])
def test_it_opens_without_errors_and_fits(browser: Any, file: Path, name: str, width: int) -> None:
    page = Page(browser, file.as_uri(), width)
    page.screenshot(name)
    assert page.errors() == []
    titles = [found.text for found in browser.find_elements("css selector", "h2")]
    assert titles == ["Curves", "Clients", "Weights", "Ledger", "Settings", "Claims"]
    assert page.ask("document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than the window"
    assert page.ask("[...document.querySelectorAll('.plot canvas:first-child')].every(c => c.width > 200)")
    assert page.ask("performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length") == 0


def test_axes_and_metrics_are_switched(browser: Any, file: Path) -> None:
    page = Page(browser, file.as_uri())
    seen = {page.picture()}
    for name in ("exchanges", "bytes", "samples", "seconds"):
        page.choose("across", name)
        assert page.ask("window.report.curves.x.label").startswith(name)
        seen.add(page.picture())
    assert len(seen) == 5
    options = page.ask("[...document.getElementById('metric').options].map(o => o.value)")
    assert options == ["accuracy", "loss"]  # the quantiles have a chart of their own
    page.choose("metric", "loss")
    assert page.ask("window.report.curves.y") == {"label": "loss", "kind": None, "log": True}
    assert page.ask("document.getElementById('ylog').checked")
    before = page.picture()
    page.click("#ylog")
    assert page.picture() != before
    assert not page.ask("window.report.curves.y.log")
    page.click("#xlog")
    assert page.ask("window.report.curves.x.log")
    assert page.errors() == []


def test_the_line_is_the_mean_of_the_seeds(browser: Any, file: Path) -> None:
    page = Page(browser, file.as_uri())
    frames = [run.history for run in made_up.runs()[:3]]
    line = page.ask("window.report.curves.series[0]")
    assert line["x"] == frames[0]["round"].tolist()
    values = [[frame["accuracy"][i] for frame in frames] for i in range(len(frames[0]))]
    assert line["y"] == pytest.approx([sum(own) / 3 for own in values], rel=1e-12)
    assert line["low"] == [min(own) for own in values]
    assert line["high"] == [max(own) for own in values]
    page.choose("seeds", "each")
    each = page.ask("window.report.curves.series")
    assert [own["y"] for own in each[:3]] == [frame["accuracy"].tolist() for frame in frames]


def test_runs_of_different_length_count_up_to_the_shortest(browser: Any, tmp_path: Path) -> None:
    runs = made_up.runs()[:2]
    file = tmp_path / "report.html"
    file.write_text(html.render([replace(runs[0], history=runs[0].history[:10]), runs[1]]), encoding="utf-8")
    page = Page(browser, file.as_uri())
    line = page.ask("window.report.curves.series[0]")
    assert line["x"] == runs[0].history["round"][:10].tolist()
    assert "count up to the end of the shortest" in page.find("#curves").text
    assert page.errors() == []


def test_pointing_shows_values(browser: Any, file: Path) -> None:
    page = Page(browser, file.as_uri())
    assert page.ask("window.report.curves.tip.hidden")
    page.point(0.7, 0.3)
    tip = page.find("#curves .tip")
    assert tip.is_displayed()
    near = page.find("#curves .tip .near").text
    assert any(method in near for method in made_up.METHODS)
    assert "0." in near
    assert "rounds" in tip.text
    page.screenshot("hover", whole=False)
    assert page.errors() == []


def test_tapping_shows_values(browser: Any, file: Path) -> None:
    page = Page(browser, file.as_uri(), width=390, height=800)
    box = page.ask("document.querySelector('#curves .plot').getBoundingClientRect().toJSON()")
    place = {"x": box["x"] + 0.6 * box["width"], "y": box["y"] + 0.4 * box["height"]}
    for kind, points in (("touchStart", [place]), ("touchEnd", [])):
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    page.settle()
    assert page.find("#curves .tip .near").is_displayed()
    tip = page.ask("document.querySelector('#curves .tip').getBoundingClientRect().toJSON()")
    assert box["left"] <= tip["left"] < tip["right"] <= box["right"] + 1
    page.screenshot("tap", whole=False)


def test_dragging_zooms_and_the_button_resets(browser: Any, file: Path) -> None:
    page = Page(browser, file.as_uri())
    whole = page.picture()
    assert not page.find("#curves .controls button").is_enabled()
    page.point(0.3, 0.5, to=(0.6, 0.5))
    low, high = page.ask("window.report.curves.zoom.x")
    assert 0 < low < high < 295
    assert page.ask("window.report.curves.zoom.y") is None
    page.point(0.05, 0.02)  # away from the lines
    assert page.picture() != whole
    page.click("#curves .controls button")
    assert page.ask("window.report.curves.zoom") is None
    assert page.picture() == whole
    page.point(0.3, 0.2, to=(0.6, 0.7))
    assert len(page.ask("window.report.curves.zoom.y")) == 2
    assert page.errors() == []


def test_the_legend_switches_lines(browser: Any, file: Path) -> None:
    page = Page(browser, file.as_uri())
    assert page.ask("window.report.curves.visible.length") == 3
    page.click(".legend button[data-line='1']")
    assert page.ask("window.report.curves.visible.map(s => s.label)") == ["FedNest", "FedAvg"]
    assert page.find(".legend button[data-line='1']").get_attribute("aria-pressed") == "false"
    page.click(".legend .all button:last-child")
    assert page.ask("window.report.curves.visible.length") == 0
    assert "Nothing is switched on" in page.find("#curves .note").text
    page.click(".legend .all button:first-child")
    assert page.ask("window.report.curves.visible.length") == 3
    assert page.errors() == []


def test_every_chart_has_a_table(browser: Any, file: Path) -> None:
    page = Page(browser, file.as_uri())
    charts = page.ask("document.querySelectorAll('figure').length")
    assert charts == 4
    for place in range(charts):
        page.ask(f"document.querySelectorAll('figure details')[{place}].open = true")
    page.settle()
    assert page.ask(
        "[...document.querySelectorAll('figure')].every(f => f.querySelector('canvas').getAttribute('aria-label'))"
    )
    rows = page.ask("[...document.querySelectorAll('figure')].map(f => f.querySelectorAll('tbody tr').length)")
    assert rows == [3, 6, 12, 2]
    assert page.find("#curves figure tbody td:last-child").text.startswith("0.9")


def test_tables_say_what_differs_what_it_cost_and_what_holds(browser: Any, file: Path) -> None:
    page = Page(browser, file.as_uri())
    marked = page.ask("[...document.querySelectorAll('#settings tr.differs th')].map(c => c.textContent)")
    assert marked == ["≠\u00a0algorithm", "≠\u00a0upper_step"]
    page.click("#differs")
    names = page.ask("[...document.querySelectorAll('#settings tbody th')].map(c => c.textContent)")
    assert "task" in names
    assert "seed" in names
    ledger = page.ask("[...document.querySelectorAll('#ledger tbody th')].map(c => c.textContent)")
    assert ledger[:3] == ["lower: step", "lower: correction", "hypergradient"]
    assert "5.088 MB" in page.find("#ledger tfoot").text  # 4 × 1.272 MB down
    assert [found.text for found in browser.find_elements("css selector", ".verdict")] == [
        "✓ reproduced",
        "differs, ours (budget)",
    ]
    assert "</script>" in page.find("#claims").text


def test_fifty_runs_stay_fluent(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "many.html"
    file.write_text(html.render(made_up.many(), title="Fifty runs"), encoding="utf-8")
    page = Page(browser, file.as_uri())
    page.screenshot("many")
    took = page.ask("[0, 1, 2, 3, 4].map(() => { window.report.curves.draw(); return window.report.curves.took })")
    print("a redraw:", took)
    assert sorted(took)[2] < MOST_MS
    page.find("#only").send_keys("0.00112")
    page.settle()
    assert page.ask("window.report.curves.visible.map(s => s.label)") == ["FedBiO, upper_step=0.00112"]
    page.click(".legend .all button:first-child")
    assert page.find("#only").get_attribute("value") == ""
    assert page.ask("window.report.curves.visible.length") == 50
    page.point(0.5, 0.5)
    over = page.ask(
        "(() => { const t = performance.now(); window.report.curves.hover(400, 200); return performance.now() - t })()"
    )
    switched = page.ask(
        "(() => { const t = performance.now(); window.report.state.x = 'bytes'; window.report.update(); "
        "window.report.curves.draw(); return performance.now() - t })()"
    )
    print("pointing:", over, "switching:", switched)
    assert over < MOST_MS
    assert switched < 3 * MOST_MS
    assert page.errors() == []
