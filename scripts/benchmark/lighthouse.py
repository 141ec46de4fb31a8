"""Measure Lighthouse's scores of two pages: the page of one image, and the page of `gradcam ui`."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

import gradcam
from benchmark.cases import PICTURE, ROOT
from benchmark.measuring import Settings, report_progress
from benchmark.page import FLAGS, LAYERS, find_chromium
from benchmark.tables import Table

TITLE = "Lighthouse"
CATEGORIES = ["performance", "accessibility"]
AUDITS = {
    "first-contentful-paint": ("first paint, s", 1000),
    "largest-contentful-paint": ("largest paint, s", 1000),
    "total-blocking-time": ("blocked, ms", 1),
    "cumulative-layout-shift": ("layout shift", 1),
}


def measure_lighthouse(settings: Settings) -> Iterator[Table]:
    """Measure both pages with the desktop preset, over local HTTP. The page of one image is compressed with gzip."""
    program, chromium = shutil.which("lighthouse"), find_chromium()
    if program is None or chromium is None:
        yield Table(
            "lighthouse", TITLE, notes=["Skipped: it needs Chromium, and `npm install --global lighthouse@12`."]
        )
        return
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    rounds, rows, raw = max(settings.rounds.values()), [], []
    for name, serve in {"page of one image, 4 layers": serve_page, "`gradcam ui` with an image": serve_ui}.items():
        with serve() as address:
            results = []
            for i in range(rounds):
                report_progress(TITLE, name, f"round {i + 1} of {rounds}")
                results.append(run_lighthouse(program, chromium, address))
        columns = np.array(results)
        raw.append({"what": name, "results": columns.tolist()})
        scores, audits = np.split(np.median(columns, 0), [len(CATEGORIES)])
        rows.append([name, *(f"{score:.0f}" for score in scores), *(f"{value:.3g}" for value in audits)])
    header = ["", *CATEGORIES, *(title for title, _ in AUDITS.values())]
    notes = [f"Lighthouse {version}, desktop preset, medians of {rounds} runs."]
    yield Table("lighthouse", TITLE, header, rows, notes, raw)


def run_lighthouse(program: str, chromium: str, address: str) -> list[float]:
    """Return the scores from 0 to 100, then the values of the audits, in the units of AUDITS."""
    command = [program, address, "--preset=desktop", f"--only-categories={','.join(CATEGORIES)}", "--output=json"]
    command += [f"--chrome-flags={' '.join(FLAGS)}", "--quiet"]
    environment = os.environ | {"CHROME_PATH": chromium}
    result = json.loads(subprocess.run(command, capture_output=True, check=True, env=environment).stdout)
    scores = [100 * result["categories"][name]["score"] for name in CATEGORIES]
    return scores + [result["audits"][name]["numericValue"] / unit for name, (_, unit) in AUDITS.items()]


@contextmanager
def serve_page() -> Iterator[str]:
    """Serve the page of one image, compressed with gzip, and yield its address."""
    page = gzip.compress(gradcam.page(ROOT / PICTURE, gradcam.load_classifier(), layers=LAYERS).to_html().encode())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            headers = {"content-type": "text/html", "content-encoding": "gzip", "content-length": str(len(page))}
            for header in headers.items():
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@contextmanager
def serve_ui() -> Iterator[str]:
    """Start `gradcam ui` with an image, and yield its address. The image is explained as soon as the page is opened."""
    with tempfile.TemporaryDirectory() as folder:
        image = shutil.copy(ROOT / PICTURE, Path(folder))
        command = [sys.executable, "-m", "gradcam", "ui", image, "--no-browser", "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            yield process.stdout.readline().strip()  # type: ignore[union-attr]
            process.terminate()
