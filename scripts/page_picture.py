"""Take the pictures that the documents show: of the page, from a server that is running, and of a report.

dflash-mlx serve --pair demo
.venv/bin/python scripts/page_picture.py http://127.0.0.1:8080 docs/pictures/page.webp

dflash-mlx bench --pair demo --out report
.venv/bin/python scripts/page_picture.py report/report.html docs/pictures/report.webp

Needs selenium (the extra `dev`), and Chromium or Chrome with chromedriver. `--dark` and `--width 390` take others.
"""

import argparse
import base64
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/server"))

from browser import Browser, open_browser

QUESTION = "Write a Python function that checks whether a string is a palindrome, and explain how it works."
TOKENS = 60  # an answer that is half there, with its newest blocks in colour


def main() -> None:
    parser = argparse.ArgumentParser(description="Take a picture of the server's page, or of a report.")
    parser.add_argument("what", help="the server's address, or a report.html")
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=700)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with open_browser() as browser:
        browser.look(width=options.width, height=options.height, dark=options.dark, scale=1.5)
        if options.what.endswith(".html"):
            browser.driver.get(Path(options.what).resolve().as_uri())
        else:
            ask(browser, options.what)
        form = {"format": "webp", "quality": 80}
        picture = browser.driver.execute_cdp_cmd("Page.captureScreenshot", form)["data"]
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_bytes(base64.b64decode(picture))
    print(f"{options.file}: {options.file.stat().st_size / 1000:.0f} kB")


def ask(browser: Browser, address: str) -> None:
    """Open the page, and wait until an answer is half there."""
    browser.driver.get(address)
    browser.until(lambda: browser.text("#model-line"))
    browser.find("#input").send_keys(QUESTION + "\ue007")
    browser.until(lambda: len(browser.text(".content").split()) >= TOKENS or browser.is_idle())


if __name__ == "__main__":
    main()
