"""Measure a lower bound of the time for a folder of images: the CPU time of each stage of our pipeline, run alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.pictures import QUALITY


def measure_stages(classifier: Any, files: Sequence[Path], output: Path, batch: int, cores: int) -> dict[str, float]:
    """Run each stage alone over all files, and return the CPU seconds of each stage in all threads.

    If two cores are threads of one physical core, each core is slower while the other core is busy. All stages
    therefore use one thread per core.
    """
    from gradcam.batch.pool import one_opencv_thread

    seconds: dict[str, float] = {}
    with one_opencv_thread(), ThreadPoolExecutor(cores) as pool:

        def run(stage: str, work: Callable[..., Any], *inputs: Sequence[Any]) -> list[Any]:
            start = time.process_time()
            results = list(pool.map(work, *inputs))
            seconds[stage] = time.process_time() - start
            return results

        images = run("read and decode", classifier.reader, files)
        prepared = run("preprocess", classifier.prepare, images)
        start = time.process_time()
        explanations = explain_all(classifier, prepared, batch)
        seconds["model"] = time.process_time() - start
        overlays = run("draw", draw, explanations)
        run("encode and write", partial(write, output), files, overlays)
    return seconds


def make_request(classifier: Any) -> Any:
    """Return a request for one map of each image's top class, at the classifier's default layer."""
    from gradcam.batch.image_results import ExplainRequest

    return ExplainRequest(layers=[classifier.layer])


def explain_all(classifier: Any, prepared: Sequence[Any], batch: int) -> list[Any]:
    from gradcam.batch.image_results import explain_batch

    request = make_request(classifier)
    starts = range(0, len(prepared), batch)
    return [
        finding for start in starts for finding in explain_batch(classifier, request, prepared[start : start + batch])
    ]


def draw(finding: Any) -> Any:
    return finding.results[0].draw()


def write(output: Path, source: Path, overlay: Any) -> None:
    from gradcam.images.files import write_atomically
    from gradcam.images.write import encode_image

    write_atomically(output / source.name, encode_image(overlay, source.suffix, QUALITY))
