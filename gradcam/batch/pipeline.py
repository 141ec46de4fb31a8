"""Stream many images through one model.

Worker threads read images and process the results. The model runs in the caller's thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from gradcam.batch.compute import BatchExplainer, BatchFunction, LogEvent, ResultT, drop_event
from gradcam.batch.device import DevicePixels
from gradcam.batch.pool import LATER, URGENT, ItemBatch, Pool, cut_batches, one_opencv_thread
from gradcam.batch.read_items import IMAGE_NOT_LOADED, HashedItem, ReadItem, find_upload, read_item, to_image_error
from gradcam.errors import GradcamError, ImageError, StoreError
from gradcam.models.classifier import Classifier
from gradcam.models.preprocess import Prepared
from gradcam.options import MAX_BATCH_SIZE, MAX_WORKERS, check_count
from gradcam.sources.contents import InputImage, get_store_url
from gradcam.storage.retry import limit_retries

T = TypeVar("T")
Read = Callable[[InputImage], ReadItem]
Finish = Callable[[HashedItem, Any], T]
Futures = list[Future[T]]
LOG = logging.getLogger("gradcam")

# While the model runs on one batch, threads read up to this number of later batches. If the limit were one, the threads
# would be idle after reading the next batch, until the model starts on the next batch.
MAX_BATCHES_AHEAD = 2
# When the model starts on a batch, the results of up to this number of earlier batches may be unfinished.
MAX_BATCHES_BEHIND = 1


def compute_items(
    classifier: Classifier,
    run_batch: BatchFunction[ResultT],
    items: Iterable[InputImage],
    *,
    finish: Callable[[HashedItem, ResultT | GradcamError], T],
    is_needed: Callable[[InputImage], bool] = lambda item: True,
    batch_size: int,
    workers: int,
    log_event: LogEvent = drop_event,
    audit: bool = False,
    on_leftover: Callable[[T], None] | None = None,
    pixels: DevicePixels | None = None,
    skip_slow_stores: bool = True,
    unanswered: list[ItemBatch] | None = None,
) -> Generator[T, None, None]:
    """Yield the output of `finish` for each needed image, in the order of the items, as soon as it is ready.

    An image's results depend slightly on the other images of its batch. Batches are therefore cut at fixed positions,
    even if not all images are needed. `workers` threads read images and run `finish`. If `finish` raises an exception,
    the generator ends. When the generator ends, all threads end. If `audit` is True, the SHA-256 of each input is
    computed. If `pixels` is given, this object processes all images of a batch together on the model's device. If the
    generator ends early, `on_leftover` receives each finished output that was not yielded, and the output that was
    yielded last.

    If an object store does not answer, its images are read again after all other images. If the store still does not
    answer, these images fail. If a list `unanswered` is given, the images are not read again. Instead, the batches of
    these images are appended to the list. If `skip_slow_stores` is False, the first reading waits for slow stores.
    """
    check_count(batch_size, "batch_size", f"a number of images, from 1 to {MAX_BATCH_SIZE}.", most=MAX_BATCH_SIZE)
    check_count(workers, "workers", f"a number of threads, from 1 to {MAX_WORKERS}.", most=MAX_WORKERS)
    explainer = BatchExplainer(run_batch, classifier.device, max_size=batch_size, log_event=log_event)
    upload = find_upload(classifier.device)
    read: Read = partial(read_item, classifier, audit=audit, upload=upload, waits=pixels is not None)
    finishing: deque[Future[T]] = deque()
    reads = [partial(_read_quickly if skip_slow_stores else _read_patiently, read)]
    if unanswered is None:
        reads, unanswered = [*reads, partial(_read_patiently, read)], []
    numbers = itertools.count()
    try:
        with one_opencv_thread(), Pool(workers) as pool:
            for is_retry, read in enumerate(reads):
                if is_retry and unanswered:
                    log_unanswered(sum(sum(batch.needed) for batch in unanswered))
                batches = unanswered if is_retry else cut_batches(items, batch_size, is_needed)
                started_batches = (_StartedBatch(pool, batch, next(numbers), read, pixels) for batch in batches)
                for started_batch in _look_ahead(started_batches):
                    max_results = MAX_BATCHES_BEHIND * batch_size
                    yield from _yield_finished(finishing, max_results=max_results, until=started_batch.reading)
                    start, batch = perf_counter(), started_batch.batch
                    unanswered += started_batch.explain(explainer, finish, finishing)
                    log_event("batch", start=batch.start, pictures=len(batch.items), seconds=perf_counter() - start)
                yield from _yield_finished(finishing, max_results=0)
    except BaseException:  # Closing the generator raises GeneratorExit here.
        while on_leftover is not None and finishing:
            future = finishing.popleft()
            if future.done() and future.exception() is None:
                on_leftover(future.result())
        raise


def log_unanswered(images: int) -> None:
    """Log that some images are read again because their object store did not answer."""
    LOG.warning("Reading %d image(s) again, because their object store did not answer", images)


def _read_quickly(read: Read, item: InputImage) -> ReadItem:
    """Read an item with few retries. If its store does not answer, return an item with the `StoreError`."""
    try:
        with limit_retries():
            return read(item)
    except StoreError as error:
        return ReadItem(HashedItem(item), error)


def _read_patiently(read: Read, item: InputImage) -> ReadItem:
    """Read an item with all retries. If its store does not answer, return an item with an `ImageError`."""
    try:
        return read(item)
    except StoreError as error:
        reason = str(error).removeprefix(f"{get_store_url(item)}: ")
        return ReadItem(HashedItem(item), to_image_error(item.name, ImageError(reason)))


def _look_ahead(items: Iterator[T]) -> Iterator[T]:
    window: deque[T] = deque()
    for item in items:
        window.append(item)
        if len(window) > MAX_BATCHES_AHEAD:
            yield window.popleft()
    yield from window


class _StartedBatch:
    """A batch whose images are being read.

    `reading` holds one future per image. If a device prepares the images, `reading` holds one future for all images.
    """

    def __init__(self, pool: Pool, batch: ItemBatch, number: int, read: Read, pixels: DevicePixels | None) -> None:
        self.batch, self._pool, self._pixels, self._size = batch, pool, pixels, 0
        futures = [pool.submit(LATER, partial(read, item)) for item in batch.items]
        self.reading: list[Future[Any]] = [*futures]
        if pixels is not None:
            self.reading = [Future()]
            _call_when_done(futures, partial(self._prepare, pixels, number, futures))

    def _prepare(self, pixels: DevicePixels, number: int, futures: list[Future[ReadItem]]) -> None:
        """Queue a task that prepares all images on the device. The task starts when there is memory for the images."""
        prepared = self.reading[0]

        def prepare() -> list[ReadItem]:
            reads = [future.result() for future in futures]
            # The futures and their callbacks refer to each other and keep the images alive. Break this reference cycle.
            futures.clear()
            return pixels.prepare(reads)

        def start() -> None:
            with contextlib.suppress(RuntimeError):  # If the pool is shut down, this batch is not needed any more.
                self._pool.submit(URGENT, prepare, prepared)  # Urgent, because the GPU waits for this task.

        failed = any(future.exception() is not None for future in futures)
        pending = [] if failed else [future.result().pending for future in futures]
        self._size = sum(image.size for image in pending if image is not None)
        pixels.memory_gate.enter(number, self._size, start)

    def explain(
        self, explainer: BatchExplainer[ResultT], finish: Finish[T], finishing: deque[Future[T]]
    ) -> list[ItemBatch]:
        """Explain the images, and append a future for the output of `finish` to `finishing`, for each needed image.

        Futures are appended before their tasks start. An interrupted caller therefore finds all finished outputs in
        `finishing`. If the stores of needed images did not answer, the returned list contains this batch, with only
        these images marked as needed. Otherwise the list is empty.
        """
        read_results = [future.result() for future in self.reading]
        reads = read_results if self._pixels is None else read_results[0]
        self.reading.clear()  # Otherwise the images would stay in memory while the next batches are read.
        is_late = [isinstance(read.picture, StoreError) for read in reads]
        unanswered = replace(self.batch, needed=[needed and late for needed, late in zip(self.batch.needed, is_late)])
        needed = [is_needed and not late for is_needed, late in zip(self.batch.needed, is_late)]
        self.batch = replace(self.batch, needed=needed)
        pictures = [read.picture for read in reads]
        has_images = any(is_needed and isinstance(item, Prepared) for is_needed, item in zip(needed, pictures))
        with contextlib.nullcontext() if self._pixels is None else self._pixels.on_stream("model"):
            results = explainer.explain(reads) if has_images else pictures
        futures: list[Future[T]] = [Future() for _ in range(sum(needed))]
        finishing.extend(futures)
        if self._pixels is None:
            self._submit_tasks(reads, results, finish, futures)
        else:
            fetched = [replace(read, picture=IMAGE_NOT_LOADED) for read in reads]
            self._pool.submit(URGENT, partial(self._finish, self._pixels, fetched, results, finish, futures))
        return [unanswered] * any(unanswered.needed)

    def _finish(
        self, pixels: DevicePixels, reads: list[ReadItem], results: list[Any], finish: Finish[T], futures: Futures[T]
    ) -> None:
        try:
            finished = pixels.finish(results)
            results.clear()
            pixels.memory_gate.leave(self._size)
            self._submit_tasks(reads, finished, finish, futures)
        except BaseException as error:  # The caller receives the error from the futures.
            for future in futures:
                if not future.done():
                    future.set_exception(error)

    def _submit_tasks(self, reads: list[ReadItem], results: list[Any], finish: Finish[T], futures: Futures[T]) -> None:
        outcomes = zip(reads, results, self.batch.needed)
        tasks = [partial(finish, read.fetched, result) for read, result, is_needed in outcomes if is_needed]
        for task, future in zip(tasks, futures):
            self._pool.submit(URGENT, task, future)


def _call_when_done(futures: Sequence[Future[Any]], callback: Callable[[], None]) -> None:
    """Call `callback` once, when all futures are done, in the thread that completes the last future."""
    numbers = itertools.count(1)  # `next` is atomic for this iterator, so two threads never receive the same number.

    def count(_: Future[Any]) -> None:
        if next(numbers) == len(futures):
            callback()

    for future in futures:
        future.add_done_callback(count)


def _yield_finished(results: deque[Future[T]], *, max_results: int, until: Sequence[Future[Any]] = ()) -> Iterator[T]:
    """Yield results in order, until the futures of `until` are done and at most `max_results` results remain.

    A result stays in `results` until the caller requests the next result. An interrupted caller therefore still finds
    the result in `results`.
    """
    while True:
        while results and results[0].done():
            yield results[0].result()
            results.popleft()
        pending = [future for future in until if not future.done()]
        if not pending and len(results) <= max_results:
            return
        wait([*pending, *list(results)[:1]], return_when=FIRST_COMPLETED)
