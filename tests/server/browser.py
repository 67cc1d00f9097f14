"""A headless Chromium or Chrome for tests of the page, where this machine has one with its driver."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def find_browser() -> str | None:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    return found or (str(MAC) if MAC.exists() else None)


def find_driver() -> str | None:
    """In the path, or where GitHub's machines say that it is."""
    own = Path(os.environ.get("CHROMEWEBDRIVER", "/nowhere")) / "chromedriver"
    return shutil.which("chromedriver") or (str(own) if own.exists() else None)


class Browser:
    """A window, and what tests ask of it. Elements are named by CSS selectors."""

    def __init__(self, driver: Any) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        self.driver = driver
        self._wait = WebDriverWait(driver, 60, poll_frequency=0.03)
        self.requests: list[str] = []

    def look(self, *, width: int = 1280, height: int = 800, dark: bool = False, scale: float = 1) -> None:
        """How wide the window is, and which colours the system has."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        colours = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": colours})

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def run_async(self, script: str, *values: Any) -> Any:
        """The value of an async function's body; an error in it fails the test."""
        wrapped = "const done = arguments[arguments.length - 1], values = [...arguments].slice(0, -1);"
        wrapped += f"(async () => {{ {script} }})().then((v) => done([v, null]), (e) => done([null, String(e.stack)]))"
        value, error = self.driver.execute_async_script(wrapped, *values)
        assert error is None, error
        return value

    def find(self, selector: str) -> Any:
        return self.until(lambda: next(iter(self.all(selector)), None))

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def type(self, *keys: str) -> None:
        """Into whatever has the focus, as a keyboard does."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def until(self, condition: Any) -> Any:
        """Wait until `condition()` is true; its value."""
        return self._wait.until(lambda _: condition())

    def is_idle(self) -> bool:
        return self.run("return !document.body.classList.contains('busy') && !document.querySelector('.pending')")

    def complaints(self) -> list[str]:
        """What the console says since the last call: errors, and what the content security policy refused."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def addresses(self) -> list[str]:
        """Every address that was asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Skips the test where there is no browser."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[dev]'")
    program, driver_program = find_browser(), find_driver()
    if program is None or driver_program is None:
        pytest.skip("needs Chromium or Chrome, and chromedriver (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("headless=new", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars", "window-size=1280,800"):
        options.add_argument(f"--{argument}")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chrome's sandbox does not work for root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_program))
    try:
        driver.set_script_timeout(60)
        yield Browser(driver)
    finally:
        driver.quit()
