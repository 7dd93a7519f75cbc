"""Chromium for tests of the page and for the scripts that measure and picture it."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Browser", "missing", "started"]


def missing() -> str:
    """Why there is no browser here; nothing where there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install lowtide[dev])"
    if not _program("chromium", "chromium-browser", "google-chrome"):
        return "there is no Chromium"
    return "" if _program("chromedriver") else "there is no chromedriver"


def _program(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def started() -> Iterator[Browser]:
    """A browser without a window, which ends with the block."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _program("chromium", "chromium-browser", "google-chrome") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(_program("chromedriver")))
    try:
        driver.execute_cdp_cmd("Network.enable", {})
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """What tests ask of the page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """The window, and whether the user prefers dark colours."""
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, path: Path) -> None:
        """Open a file, and forget what was said before."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(path.absolute().as_uri())
        self.settle()

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; let n = 0;"
            "const next = () => (++n > 3 ? done() : requestAnimationFrame(next)); setTimeout(next, 30)"
        )

    def tabs(self) -> list[str]:
        """The views of the page."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll('[role=tab]')].map((x) => x.id.slice(4))"
        )
        return found

    def view(self, name: str) -> None:
        """One click on a view."""
        self.click(f"#tab-{name}")

    def click(self, selector: str) -> None:
        """A click on the first element that matches."""
        self.run("document.querySelector(arguments[0]).click()", selector)
        self.settle()

    def colours(self, field: str) -> int:
        """How many different colours a canvas shows; 1 where it is blank, 0 where it is not there."""
        found: int = self.run(
            """
            const canvas = document.querySelector(`[data-field="${arguments[0]}"] canvas.base`);
            if (!canvas || !canvas.width) return 0;
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const seen = new Set();
            for (let k = 0; k < data.length; k += 4 * 7) seen.add(data[k] << 16 | data[k + 1] << 8 | data[k + 2] | (data[k + 3] >> 7) << 24);
            return seen.size;
            """,
            field,
        )
        return found

    def hover(self, field: str, x: float, y: float) -> str:
        """What the page says at a place of a field, which counts from 0 to 1 each way."""
        self.run(
            """
            const canvas = document.querySelector(`[data-field="${arguments[0]}"] canvas.top`);
            canvas.scrollIntoView({ block: "center" });
            const box = canvas.getBoundingClientRect();
            const at = { clientX: box.left + box.width * arguments[1], clientY: box.top + box.height * arguments[2], bubbles: true };
            canvas.dispatchEvent(new PointerEvent("pointermove", at));
            """,
            field,
            x,
            y,
        )
        text: str = self.run(
            "const tip = document.querySelector(`[data-field=\"${arguments[0]}\"] .tip`); return tip.hidden ? '' : tip.textContent",
            field,
        )
        return text

    def said(self) -> list[str]:
        """Errors and warnings of the console."""
        rows = self.driver.get_log("browser")
        return [row["message"] for row in rows if row["level"] in ("SEVERE", "WARNING")]

    def requested(self) -> list[str]:
        """Addresses that were asked for besides the page itself."""
        import json

        found = []
        for row in self.driver.get_log("performance"):
            message = json.loads(row["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [url for url in found if not url.startswith(("file:", "data:", "about:"))]

    def picture(self, *, most: int = 1400) -> bytes:
        """The page as a PNG, as high as it is but for a limit."""
        width, height = self.run("const d = document.documentElement; return [d.clientWidth, d.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, most), "scale": 1}
        found = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
        )
        return base64.b64decode(found["data"])
