"""Measure the gallery of a report in a browser: the time per frame while scrolling, and the time of a search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.cases import PICTURE, ROOT
from benchmark.measuring import Settings, report_progress
from benchmark.page import FLAGS, find_chromium
from benchmark.tables import Table

TITLE = "The gallery of 10,000 images"
RECORDS = 10_000
FRAMES = 300  # Each frame scrolls by SCROLL pixels.
SCROLL = 60
SCROLLING = f"""async () => {{
    const times = [];
    let last = await new Promise(requestAnimationFrame);
    for (let i = 0; i < {FRAMES}; i++) {{
        scrollBy(0, {SCROLL});
        const now = await new Promise(requestAnimationFrame);
        times.push(now - last);
        last = now;
    }}
    return times;
}}"""
SEARCH = """() => ["0", "01", "012", "", "9", "99", "class", "class 5", ""].map((text) => {
    const search = document.getElementById("search");
    search.value = text;
    const start = performance.now();
    search.dispatchEvent(new Event("input", { bubbles: true }));
    document.body.getBoundingClientRect();
    return performance.now() - start;
})"""


def measure_gallery(settings: Settings) -> Iterator[Table]:
    """Measure the gallery of a report that lists one explained image under 10,000 names."""
    rounds, chromium = max(settings.rounds.values()), find_chromium()
    if chromium is None:
        yield Table("gallery", TITLE, notes=["Skipped: Playwright or Chromium is missing."])
        return
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        report_progress(TITLE, "writing")
        folder = Path(name)
        write_gallery(folder)
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.goto((folder / "index.html").as_uri())
        tab.wait_for_timeout(1500)
        session = tab.context.new_cdp_session(tab)
        session.send("Performance.enable")
        frames, busy, searches = [], [], []
        for i in range(rounds):
            report_progress(TITLE, f"round {i + 1} of {rounds}")
            before = _read_busy_seconds(session)
            frames += tab.evaluate(SCROLLING)
            busy.append(1000 * (_read_busy_seconds(session) - before) / FRAMES)
            searches += tab.evaluate(SEARCH)
        browser.close()
    times = {
        f"frame, while scrolling by {SCROLL} pixels a frame": frames,
        "busy time of the main thread per frame": busy,
        "search, from a key to the new list": searches,
    }
    rows = [[name, *_format(np.array(milliseconds))] for name, milliseconds in times.items()]
    yield Table("gallery", TITLE, ["", "median, ms", "quartiles, ms", "95th percentile, ms"], rows, [], [times])


def write_gallery(folder: Path) -> None:
    """Write a report of one image, whose record and views are repeated under other names."""
    command = [sys.executable, "-m", "gradcam"]
    subprocess.run([*command, "batch", ROOT / PICTURE, "-o", folder, "--report", "--quiet"], check=True)
    manifest, stem = folder / "manifest.jsonl", Path(PICTURE).stem
    line, views = manifest.read_text(), list((folder / "report/views").glob(f"{stem}.*"))
    lines = []
    for i in range(RECORDS):
        name = f"{i // 100:03}/{i:05}"
        record = json.loads(line.replace(stem, name))
        record["predictions"][0] |= {"index": i % 1000, "label": f"class {i % 1000}", "probability": (i % 101) / 101}
        lines.append(json.dumps(record) + "\n")
        (folder / "report/views" / name).parent.mkdir(exist_ok=True)
        for view in views:
            os.link(view, folder / "report/views" / f"{name}{view.name.removeprefix(stem)}")
    manifest.write_text("".join(lines))
    subprocess.run([*command, "report", folder, "--quiet"], check=True)


def _read_busy_seconds(session: Any) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def _format(values: np.ndarray[Any, Any]) -> list[str]:
    low, high, slowest = np.percentile(values, (25, 75, 95))
    return [f"{np.median(values):.1f}", f"{low:.1f} to {high:.1f}", f"{slowest:.1f}"]
