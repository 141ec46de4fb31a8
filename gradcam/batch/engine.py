"""Explain the images of a run with an engine, and store the results.

An engine is a function that decides where the model runs. The default engine runs the model in this process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradcam.batch.compute import LogEvent
from gradcam.batch.device import open_device_pixels
from gradcam.batch.formats import OpenRun
from gradcam.batch.image_results import ExplainRequest, explain_batch
from gradcam.batch.pipeline import compute_items
from gradcam.batch.save import Saver
from gradcam.errors import OutputError, StoreError
from gradcam.models.classifier import Classifier
from gradcam.sources.contents import InputImage
from gradcam.sources.shards import FailureLimit, TooManyFailuresError
from gradcam.storage.disk import delay_signals
from gradcam.storage.records import ImageOutcome, Record


@dataclass(frozen=True)
class BatchWork:
    """The images of a run, in the order of the manifest, and the settings for explaining them.

    `workers` is the number of threads per model. `device` is the name of the device that runs the models. None means
    the device of `classifier`. `pixels` is one of `options.PIXEL_DEVICES`. `resolved` is as in `RunSettings`. A resumed
    run uses the default layers of the earlier run. `resumed_layers` holds the fields of `classifier` that select these
    layers.
    """

    classifier: Classifier
    request: ExplainRequest
    items: Sequence[InputImage]
    batch_size: int
    workers: int
    audit: bool = False
    device: str | None = None
    pixels: str = "cpu"
    resolved: Mapping[str, Any] = field(default_factory=dict)
    resumed_layers: Mapping[str, Any] = field(default_factory=dict)


IsNeeded = Callable[[InputImage], bool]
OnLeftover = Callable[[ImageOutcome], None] | None
Reports = Generator[ImageOutcome, None, None]


# The type of a function (work, saver, is_needed=..., log_event=..., on_leftover=None). An engine explains the needed
# images, and yields their reports in the order of the items. After the generator is closed or has raised an error,
# nothing more is written. If the generator ends early, `on_leftover` receives each finished report that was not read.
Engine = Callable[..., Reports]


def explain_locally(work: BatchWork, saver: Saver, is_needed: IsNeeded, log_event: LogEvent, **options: Any) -> Reports:
    """Explain images in this process. `options` are passed to `compute_items`.

    Worker threads read images in advance and write results. The model runs in the caller's thread.
    """
    classifier, request = work.classifier, work.request
    pixels = open_device_pixels(work.pixels, classifier, request, log_event=log_event, saving=saver.saving)
    options |= {"batch_size": work.batch_size, "workers": work.workers, "audit": work.audit, "pixels": pixels}
    options |= {"finish": saver.save, "is_needed": is_needed, "log_event": log_event}
    return compute_items(classifier, partial(explain_batch, classifier, request), work.items, **options)


def explain_to_run(
    results: OpenRun, saver: Saver, work: BatchWork, limit: FailureLimit | None = None, engine: Engine = explain_locally
) -> Generator[Record, None, None]:
    """Explain the images that have no finished result, and yield each record after it is stored.

    An image that failed in an earlier run is retried. If the image fails again, the failure does not count towards
    `limit`. Raises `TooManyFailuresError` if more than `limit` images fail.
    """
    failures, max_failures = 0, None if limit is None else limit.count(len(work.items))
    remaining = sum(item.name not in results.done for item in work.items)
    leftovers: list[ImageOutcome] = []
    last_stored: ImageOutcome | None = None

    def store(report: ImageOutcome) -> Record:
        nonlocal last_stored
        with delay_signals():
            record = results.append(report.record, report.files)
            last_stored = report
        results.log("picture", image=record.image, status=record.status, seconds=report.seconds)
        return record

    callbacks: Any = {"log_event": results.log, "on_leftover": leftovers.append}
    reports = engine(work, saver, is_needed=lambda item: item.name not in results.done, **callbacks)
    try:
        # Close the engine before the caller closes `results`, because the engine's threads may still write results.
        with contextlib.closing(reports):
            for report in reports:
                record = store(report)
                yield record
                failures += record.error is not None and record.image not in results.failed
                remaining -= 1
                # If no images remain, the run is complete, so there is nothing to stop.
                if limit and max_failures is not None and failures > max_failures and remaining:
                    times = "1 failure" if failures == 1 else f"{failures} failures"
                    share = f" ({max_failures} of {len(work.items)} images)" if limit.is_share else ""
                    advice = "A resumed run retries the failed images, and does not count their failures again."
                    problem = f"Stopped after {times}: --max-failures is {limit}{share}"
                    raise TooManyFailuresError(f"{problem}. Use --resume to continue. {advice}")
    except BaseException as error:
        records = []
        # If the output cannot be written, storing the leftovers fails as well. `error` already reports this problem.
        with contextlib.suppress(OutputError, StoreError):
            records = [store(report) for report in leftovers if report is not last_stored]
        if not isinstance(error, GeneratorExit):
            yield from records
        if not isinstance(error, TooManyFailuresError) or len(records) < remaining:
            raise
