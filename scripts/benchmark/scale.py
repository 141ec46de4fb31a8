"""Measure many files: the peak memory, and the time per file of all steps that need no pixels."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmark.cases import MEGABYTE
from benchmark.loops import run_pipeline
from benchmark.measuring import STATUS, call_in_fresh_process, read_memory, report_progress
from benchmark.pictures import link_image_files, make_image_files
from benchmark.tables import Table, format_spread

COUNTS = (200, 2000)
SMALL_SIZE = (320, 240)  # The width and height.
FILES = 64  # The number of distinct files. All other files are links.
LISTED_FILES = 10_000


def tabulate_memory(counts: tuple[int, ...] = COUNTS) -> Table:
    """Measure the peak resident memory of a run for each number of images. Each run has a separate process."""
    title = "Memory of a folder (cpu)"
    if not STATUS.exists():
        return Table("folder memory", title, notes=["Skipped: it needs Linux's /proc."])
    peaks = {}
    for count in counts:
        report_progress("folder", "memory", f"{count} images")
        peaks[count] = call_in_fresh_process(measure_run, count)
    cells = [f"{peak / MEGABYTE:.0f} MB" for peak in peaks.values()]
    ratio = peaks[counts[-1]] / peaks[counts[0]]
    header = ["", *(f"{count:,} images" for count in counts), "ratio"]
    notes = [
        "Peak resident memory of a separate process, including Python and the libraries. Images of "
        f"{SMALL_SIZE[0]} x {SMALL_SIZE[1]}, the embedded model."
    ]
    return Table("folder memory", title, header, [["gradcam", *cells, f"{ratio:.2f}"]], notes, [{"bytes": peaks}])


def measure_run(count: int) -> int:
    """Return the peak memory of a run in bytes. Call this in a new process."""
    import gradcam

    classifier = gradcam.load_classifier(device="cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_image_files(folder / "some", FILES, SMALL_SIZE)
        link_image_files(folder / "some", folder / "pictures", count)
        (folder / "output").mkdir()
        run_pipeline(classifier, folder / "pictures", folder / "output", batch=8)
    return read_memory("VmHWM")


def measure_listing(rounds: int, count: int = LISTED_FILES) -> Table:
    """Time the steps that read no images. These steps find files, choose the names of results, and write records."""
    report_progress("folder", "listing", f"{count} files")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(count):
            path = folder / f"pictures/{number // 1000:02}/{number:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"small")
        steps = [time_steps(folder / "pictures", folder / f"manifest-{number}.jsonl") for number in range(rounds)]
    cells = [format_spread([1000 * step_seconds[name] / count for step_seconds in steps], 4) for name in steps[0]]
    total = format_spread([1000 * sum(step_seconds.values()) / count for step_seconds in steps], 4)
    header = [f"{count:,} small files", *steps[0], "total"]
    notes = [f"Milliseconds per file: medians (with quartiles) over {rounds} rounds."]
    return Table("folder listing", "Time per file without its image", header, [["gradcam", *cells, total]], notes)


def time_steps(source: Path, manifest: Path) -> dict[str, float]:
    """Run each step for all files, and return its seconds."""
    from gradcam.batch.result_names import plan_stems
    from gradcam.sources.collect import list_inputs
    from gradcam.storage.manifest import ManifestWriter

    times = [time.perf_counter()]
    items = list_inputs([source]).items
    times.append(time.perf_counter())
    stems = plan_stems(items)
    times.append(time.perf_counter())
    writer = ManifestWriter(manifest)
    for item in items:
        writer.append(make_record(item.name, stems[item.name]))
    writer.close()
    times.append(time.perf_counter())
    return dict(zip(("list", "plan names", "write the manifest"), np.diff(times).tolist()))


def make_record(image: str, stem: str) -> object:
    """Return a typical record of an image with one explained class."""
    from gradcam.storage.records import Explained, Prediction, Record

    predictions = [Prediction(index, f"class {index}", 0.2) for index in range(5)]
    overlay = f"{stem}-gradcam.jpg"
    explained = [Explained(0, "class 0", 12.345678, "layer4", "gradcam", overlay=overlay, blank=False)]
    return Record(
        image, "resnet50", predictions=predictions, explained=explained, size=(768, 1024), region=(0, 0, 768, 1024)
    )
