"""Open pages in a real browser: Chromium from the system's packages, driven by Playwright."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    expect = sync_playwright = None

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
SECONDS = 20  # the longest wait for a condition
if expect is not None:
    expect.set_options(timeout=1000 * SECONDS)
WRONG = ("error", "warning")
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
# Without motion, no screenshot shows an image that is half faded in.
STILL = {"viewport": DESKTOP, "reduced_motion": "reduce"}
needs_browser = pytest.mark.skipif(
    sync_playwright is None or CHROMIUM is None,
    reason="there is no Playwright, or no Chromium (Debian: apt-get install chromium)",
)


class Visit:
    """An open page, with a record of its errors and network requests."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**(STILL | options))
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * SECONDS)
        self.wrongs: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.wrongs.append(message.text) if message.type in WRONG else None)
        self.page.on("pageerror", lambda error: self.wrongs.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrongs.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, folder: Path, state: str = "") -> Any:
        self.page.goto("about:blank")  # A new fragment alone would not reload the page.
        self.page.goto((folder / "index.html").as_uri() + (f"#{state}" if state else ""))
        return self.page


def wait_until(page: Any, script: str, argument: Any = None) -> None:
    """Wait until a script returns true.

    Playwright's own wait evaluates a string inside the page repeatedly. The page's security policy forbids that, and
    the failure is intermittent.
    """
    deadline = time.monotonic() + SECONDS
    while not page.evaluate(script, argument):
        assert time.monotonic() < deadline, f"this did not become true: {script}"
        page.wait_for_timeout(20)


def is_remembered(page: Any, holds: Callable[[], bool]) -> bool:
    """Return whether `holds` becomes true after reloading.

    Chromium writes a page's storage in another process, so the next page may load before the write has arrived.
    """
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        page.reload()
        if holds():
            return True
    return False
