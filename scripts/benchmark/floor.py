"""The floor of a folder's time: what the stages of our pipeline take of the processor, each run alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.pictures import QUALITY


def measure_stages(classifier: Any, files: Sequence[Path], output: Path, batch: int, cores: int) -> dict[str, float]:
    """Seconds of the processor, over all threads, by stage: one after another over all files.

    Those of pixels run in as many threads as there are cores, as the model does: where two cores are really two threads
    of one, what a stage takes is what it takes while both are busy.
    """
    from gradcam.batch.pool import one_opencv_thread

    seconds: dict[str, float] = {}
    with one_opencv_thread(), ThreadPoolExecutor(cores) as pool:

        def run(stage: str, work: Callable[..., Any], *given: Sequence[Any]) -> list[Any]:
            start = time.process_time()
            results = list(pool.map(work, *given))
            seconds[stage] = time.process_time() - start
            return results

        readings = run("read and decode", classifier.reader, files)
        prepared = run("preprocess", classifier.prepare, readings)
        start = time.process_time()
        findings = find_all(classifier, prepared, batch)
        seconds["model"] = time.process_time() - start
        overlays = run("draw", draw, findings)
        run("encode and write", partial(write, output), files, overlays)
    return seconds


def ask(classifier: Any) -> Any:
    """One map of each picture's top class, at the classifier's own layer."""
    from gradcam.batch.findings import Request

    return Request(layers=[classifier.layer])


def find_all(classifier: Any, prepared: Sequence[Any], batch: int) -> list[Any]:
    from gradcam.batch.findings import find

    request = ask(classifier)
    starts = range(0, len(prepared), batch)
    return [found for start in starts for found in find(classifier, request, prepared[start : start + batch])]


def draw(finding: Any) -> Any:
    return finding.results[0].draw()


def write(output: Path, source: Path, overlay: Any) -> None:
    from gradcam.images.files import write_whole
    from gradcam.images.write import encode_image

    write_whole(output / source.name, encode_image(overlay, source.suffix, QUALITY))
