"""Take the picture of the page that the documents show, from a server that is running.

dflash-mlx serve --pair demo
.venv/bin/python scripts/page_picture.py http://127.0.0.1:8080 docs/pictures/page.webp

Needs selenium (the extra `dev`), and Chromium or Chrome with chromedriver. `--dark` and `--width 390` take others.
"""

import argparse
import base64
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/server"))

from browser import open_browser

QUESTION = "Write a Python function that checks whether a string is a palindrome, and explain how it works."
TOKENS = 60  # an answer that is half there, with its newest blocks in colour


def main() -> None:
    parser = argparse.ArgumentParser(description="Take a picture of the server's page.")
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=700)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with open_browser() as browser:
        browser.look(width=options.width, height=options.height, dark=options.dark, scale=1.5)
        browser.driver.get(options.url)
        browser.until(lambda: browser.text("#model-line"))
        browser.find("#input").send_keys(QUESTION + "\ue007")
        browser.until(lambda: len(browser.text(".content").split()) >= TOKENS or browser.is_idle())
        form = {"format": "webp", "quality": 80}
        picture = browser.driver.execute_cdp_cmd("Page.captureScreenshot", form)["data"]
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_bytes(base64.b64decode(picture))
    print(f"{options.file}: {options.file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
