"""Measure the page of `gradcam ui`: the response times to a dropped image and to a brush, and the idle memory."""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.cases import MEGABYTE, PICTURE, ROOT
from benchmark.measuring import STATUS, Settings, report_progress
from benchmark.page import FLAGS, find_chromium
from benchmark.tables import Table

TITLE = "The local page"
SETTLE_SECONDS = 2  # The wait after the last response, before memory is read.
# Each JavaScript function returns the milliseconds from an event to the update of the page.
DROP = """async (text) => {
    const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0)), carried = new DataTransfer();
    carried.items.add(new File([bytes], `${Math.random()}.jpg`));
    const start = performance.now(), before = document.getElementById("title").textContent;
    document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true }));
    while (document.getElementById("title").textContent === before) await new Promise((next) => setTimeout(next, 1));
    document.body.getBoundingClientRect();
    return performance.now() - start;
}"""
BRUSH = """async (i) => {
    const canvas = document.getElementById("cover"), box = canvas.getBoundingClientRect();
    const told = document.getElementById("brushed");
    const x = box.left + box.width * (0.2 + 0.006 * (i % 100)), y = box.top + box.height * (0.3 + 0.004 * (i % 100));
    told.textContent = "";
    const start = performance.now();
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
    while (!told.textContent) await new Promise((next) => setTimeout(next, 1));
    document.body.getBoundingClientRect();
    return performance.now() - start;
}"""
LOAD_MODEL = "import sys, gradcam; classifier = gradcam.load_classifier(); print('here', flush=True); sys.stdin.read()"


def measure_ui(settings: Settings) -> Iterator[Table]:
    """Measure the page with the embedded model."""
    chromium = find_chromium()
    if chromium is None or not STATUS.exists():
        yield Table("ui", TITLE, notes=["Skipped: it needs Playwright, Chromium and Linux's /proc."])
        return
    from playwright.sync_api import sync_playwright

    rounds = max(settings.rounds.values())
    report_progress(TITLE, "loading the model")
    with subprocess.Popen([sys.executable, "-c", LOAD_MODEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()  # type: ignore[union-attr]
        loaded = _find_memory(process.pid)
    command = [sys.executable, "-m", "gradcam", "ui", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().strip()  # type: ignore[union-attr]
        initial = _find_memory(process.pid)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
            times = dict(_time(browser, address, rounds))
            browser.close()
        time.sleep(SETTLE_SECONDS)
        final = _find_memory(process.pid)
        process.terminate()
    rows = [[name, *_format(np.array(milliseconds))] for name, milliseconds in times.items()]
    sizes = {
        "a process that has only loaded the model": loaded,
        "the server before the first image": initial,
        "the server afterwards, idle": final,
    }
    rows += [[name, f"{size / MEGABYTE:.0f} MB", f"{size / loaded:.2f} x"] for name, size in sizes.items()]
    yield Table("ui", TITLE, ["", "median", "quartiles"], rows, [], [times, sizes])


def _time(browser: Any, address: str, rounds: int) -> Iterator[tuple[str, list[float]]]:
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    tab.goto(address)
    photo = base64.b64encode((ROOT / PICTURE).read_bytes()).decode()
    report_progress(TITLE, "drops")
    first = tab.evaluate(DROP, photo)
    yield "first image, from its drop", [first]
    yield "later images, from the drop", [tab.evaluate(DROP, photo) for _ in range(rounds)]
    report_progress(TITLE, "brush")
    tab.locator("#tools input[value='window']").check(force=True)
    yield "scores after a brush move", [tab.evaluate(BRUSH, i) for i in range(rounds + 3)][3:]


def _find_memory(process: int) -> int:
    """Return the resident bytes of a process."""
    text = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS:"))


def _format(values: np.ndarray[Any, Any]) -> list[str]:
    low, high = np.percentile(values, (25, 75))
    return [f"{np.median(values):.0f} ms", f"{low:.0f} to {high:.0f} ms"]
