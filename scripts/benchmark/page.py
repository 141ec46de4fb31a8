"""Measure the HTML page of one image: the time to make the page, its size, and its response times in a browser."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradcam
from benchmark.cases import PICTURE, ROOT
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table

LAYERS = ["layer4", "layer3", "layer2", "layer1"]
BROWSER_ROUNDS = 100
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu"]
# Each JavaScript function dispatches a user's event, then reads the layout, so that the time includes the layout.
ACTIONS = {
    "switch class": """(i) => {
        const list = document.getElementById("targets");
        list.scrollTop = 32 * ((i * 37) % 900);
        drawRows();
        const row = list.querySelectorAll("[role=option]")[4];
        const start = performance.now();
        row.click();
        document.body.getBoundingClientRect();
        document.getElementById("place").getBoundingClientRect();
        return performance.now() - start;
    }""",
    "search": """(i) => {
        const search = document.getElementById("search");
        const word = ["cat", "dog", "shark", "cup", "bird", "", "s", "water"][i % 8];
        search.value = word.slice(0, 1 + (i % 3));
        const start = performance.now();
        search.dispatchEvent(new InputEvent("input", { bubbles: true }));
        document.body.getBoundingClientRect();
        const milliseconds = performance.now() - start;
        search.value = "";
        search.dispatchEvent(new InputEvent("input", { bubbles: true }));
        return milliseconds;
    }""",
    "hover": """(i) => {
        const stage = document.getElementById("stage"), box = document.getElementById("seen").getBoundingClientRect();
        const x = box.left + box.width * (((i * 13) % 29) + 0.5) / 29;
        const y = box.top + box.height * (((i * 7) % 31) + 0.5) / 31;
        const start = performance.now();
        stage.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
        document.getElementById("place").getBoundingClientRect();
        return performance.now() - start;
    }""",
}


def measure_page(settings: Settings) -> Iterator[Table]:
    """Measure the time to make the page, its size, and its response times by layer."""
    title, rounds = "The HTML page of one image", max(settings.rounds.values())
    report_progress(title, "writing")
    classifier, rows, raw, notes = gradcam.load_classifier(), [], [], []
    picture = classifier.prepare(ROOT / PICTURE)
    images = classifier.batch([picture])

    def run_bare() -> None:
        with torch.no_grad():
            classifier.model(images)

    calls: dict[str, Callable[[], Any]] = {
        "forward pass alone": run_bare,
        "explain, one class, layer4": lambda: classifier.explain(picture, "layer4"),
        "page, 1000 classes, layer4": lambda: gradcam.page(picture, classifier, layers=LAYERS[:1]),
        "page, 1000 classes, 4 layers": lambda: gradcam.page(picture, classifier, layers=LAYERS),
    }
    for name, call in calls.items():
        call()  # Warm up.
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        raw.append({"what": name, "seconds": seconds})
        rows.append([name, *_format(np.array(seconds) * 1000)])
    page = gradcam.page(picture, classifier, layers=LAYERS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        page.save(file)
        size = file.stat().st_size - len(page.to_data()["image"]["source"])
        notes.append(f"Without the image, the file of 1000 classes at 4 layers has {size / 1e6:.3f} MB.")
        for name, times in _time_in_browser(file, notes):
            raw.append({"what": name, "milliseconds": times})
            rows.append([name, *_format(np.array(times))])
    yield Table("page", title, ["", "median, ms", "quartiles, ms", "95th percentile, ms"], rows, notes, raw)


def find_chromium() -> str | None:
    """Return the path of Chromium, or None if Chromium or Playwright is not installed."""
    if importlib.util.find_spec("playwright") is None:
        return None
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _time_in_browser(file: Path, notes: list[str]) -> Iterator[tuple[str, list[float]]]:
    chromium = find_chromium()
    if chromium is None:
        notes.append("Playwright or Chromium is missing: nothing was timed in a browser.")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.goto(file.as_uri())
        for layer in LAYERS:
            report_progress("The HTML page of one image", layer)
            tab.locator(f"#layers input[value='{layer}']").check(force=True)
            for name, script in ACTIONS.items():
                times = [tab.evaluate(script, i) for i in range(BROWSER_ROUNDS + 10)][10:]
                yield f"{name}, {layer}", times
        browser.close()


def _format(values: np.ndarray[Any, Any]) -> list[str]:
    low, high, slowest = np.percentile(values, (25, 75, 95))
    return [f"{np.median(values):.1f}", f"{low:.1f} to {high:.1f}", f"{slowest:.1f}"]
