"""A page that is open in a browser, as the tests here use it."""

import base64
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 20  # seconds, on a busy machine
SCREENSHOTS = os.environ.get("SCREENSHOTS")  # a folder to keep pictures in


def wait(what: Callable[[], Any]) -> None:
    """Wait until it holds."""
    until = time.monotonic() + PATIENCE
    while not what() and time.monotonic() < until:
        time.sleep(0.1)
    assert what()


class Page:
    """A page that is open, and what a test asks of it."""

    def __init__(self, browser: Any, url: str, width: int = 1200, height: int = 900) -> None:
        self.browser = browser
        browser.get_log("browser")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(url)
        self.settle()

    def settle(self) -> None:
        """Wait for two frames: what was asked for is drawn."""
        self.browser.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));"
        )

    def ask(self, script: str) -> Any:
        return self.browser.execute_script(f"return {script}")

    def choose(self, name: str, value: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.find(f"#{name}")).select_by_value(value)
        self.settle()

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def click(self, selector: str) -> None:
        found = self.find(selector)
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", found)
        found.click()
        self.settle()

    def point(self, x: float, y: float, to: tuple[float, float] | None = None, within: str = "#curves") -> None:
        """Point at a place of the first chart there, from 0 to 1 from its left and its top; drag if `to` is given."""
        from selenium.webdriver import ActionChains

        plot = self.find(f"{within} .plot canvas")
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
        wide, tall = plot.size["width"], plot.size["height"]
        moves = ActionChains(self.browser, duration=50).move_to_element_with_offset(
            plot, wide * (x - 0.5), tall * (y - 0.5)
        )
        if to is not None:
            moves = moves.click_and_hold().move_by_offset(wide * (to[0] - x), tall * (to[1] - y)).release()
        moves.perform()
        self.settle()

    def picture(self) -> bytes:
        """The first chart as it is drawn."""
        return self.ask("document.querySelector('#curves canvas').toDataURL()").encode()

    def errors(self) -> list[Any]:
        return [entry for entry in self.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, name: str, whole: bool = True) -> None:
        """Keep the page, or the window, as a picture, where a folder is given."""
        if SCREENSHOTS:
            wide, tall = self.ask("[window.innerWidth, document.documentElement.scrollHeight]")
            clip = {"x": 0, "y": 0, "width": wide, "height": min(tall, 6000), "scale": 1}
            how = {"captureBeyondViewport": True, "clip": clip} if whole else {}
            found = self.browser.execute_cdp_cmd("Page.captureScreenshot", how)
            Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            (Path(SCREENSHOTS) / f"{name}.png").write_bytes(base64.b64decode(found["data"]))
