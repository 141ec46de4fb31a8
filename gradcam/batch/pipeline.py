"""Many pictures through one model: reading ahead and finishing behind in threads, the model in the caller's."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from gradcam.batch.compute import BatchExplainer, Find, Found, Tell
from gradcam.batch.device import DevicePixels
from gradcam.batch.pool import LATER, URGENT, Cut, Pool, cut, one_opencv_thread
from gradcam.batch.read import NOT_HERE, Fetched, Read, fail, find_upload, read_item
from gradcam.errors import GradcamError, ImageError, StoreError
from gradcam.models.classifier import Classifier
from gradcam.models.preprocess import Prepared
from gradcam.options import MAX_BATCH_SIZE, MAX_WORKERS, check_count
from gradcam.sources.contents import Item, find_url
from gradcam.storage.retry import hurrying

T = TypeVar("T")
LOG = logging.getLogger("gradcam")

# Batches that are read, or being read, besides the one in the model. With one alone, threads would have nothing to do
# between its last picture and the start of the model.
AHEAD = 2
BEHIND = 1  # batches whose pictures may still wait to be finished when the model starts on another


def compute_items(
    classifier: Classifier,
    find: Find[Found],
    items: Iterable[Item],
    *,
    finish: Callable[[Fetched, Found | GradcamError], T],
    is_needed: Callable[[Item], bool] = lambda item: True,
    batch_size: int,
    workers: int,
    tell: Tell | None = None,
    audit: bool = False,
    late: Callable[[T], None] | None = None,
    pixels: DevicePixels | None = None,
    hurries: bool = True,
    unanswered: list[Cut] | None = None,
) -> Generator[T, None, None]:
    """What `finish` makes of each picture that is needed, in the order of the items, as soon as it and all before are
    done. Batches are cut at fixed positions, whatever is needed of them, so that the same items give the same numbers.
    `finish` runs in one of the `workers` threads, as reading does; what it raises ends the generator. `audit`: have the
    SHA-256 of what was read. `late` gets what was finished and not taken when this ended early, the last result that was
    given among it. No thread is left then. `pixels`: where they are on the model's device; of each batch they are in
    flight together.

    Images of a store that does not answer come last: they are read again once all others are done, and fail if it still
    does not. With `unanswered` they are added there and not read again. `hurries=False`: waits for stores from the start.
    """
    at_once, threads = (
        f"a number of images, from 1 to {MAX_BATCH_SIZE}.",
        f"a number of threads, from 1 to {MAX_WORKERS}.",
    )
    check_count(batch_size, "batch_size", at_once, most=MAX_BATCH_SIZE)
    check_count(workers, "workers", threads, most=MAX_WORKERS)
    tell = tell or (lambda event, **details: None)
    explainer = BatchExplainer(find, classifier.device, largest=batch_size, tell=tell)
    upload = find_upload(classifier.device)
    read: Callable[[Item], Read] = partial(read_item, classifier, audit=audit, upload=upload, waits=pixels is not None)
    finishing: deque[Future[T]] = deque()
    reads = [partial(_read_hurrying if hurries else _read_last, read)]
    if unanswered is None:
        reads, unanswered = [*reads, partial(_read_last, read)], []
    numbers = itertools.count()
    try:
        with one_opencv_thread(), Pool(workers) as pool:
            for is_again, read in enumerate(reads):
                if is_again and unanswered:
                    say_unanswered(sum(sum(batch.needed) for batch in unanswered))
                batches = unanswered if is_again else cut(items, batch_size, is_needed)
                started = (_Started(pool, batch, next(numbers), read, pixels) for batch in batches)
                for begun in _look_ahead(started):
                    yield from _take(finishing, most=BEHIND * batch_size, until=begun.reading)
                    start, batch = perf_counter(), begun.batch
                    unanswered += begun.explain(explainer, finish, finishing)
                    tell("batch", start=batch.start, pictures=len(batch.items), seconds=perf_counter() - start)
                yield from _take(finishing, most=0)
    except BaseException:  # the generator's end, too
        while late is not None and finishing:
            each = finishing.popleft()
            if each.done() and each.exception() is None:
                late(each.result())
        raise


def say_unanswered(images: int) -> None:
    """Log that images of stores that did not answer are read again."""
    LOG.warning("Reading %d image(s) again, because their object store did not answer", images)


def _read_hurrying(read: Callable[[Item], Read], item: Item) -> Read:
    """Read an item. The error of a store that does not answer soon is in the place of its picture."""
    try:
        with hurrying():
            return read(item)
    except StoreError as error:
        return Read(Fetched(item), error)


def _read_last(read: Callable[[Item], Read], item: Item) -> Read:
    """Read an item as patiently as can be. A store that does not answer is a failure of the item."""
    try:
        return read(item)
    except StoreError as error:
        reason = str(error).removeprefix(f"{find_url(item)}: ")
        return Read(Fetched(item), fail(item.name, ImageError(reason)))


def _look_ahead(each: Iterator[T]) -> Iterator[T]:
    window: deque[T] = deque()
    for one in each:
        window.append(one)
        if len(window) > AHEAD:
            yield window.popleft()
    yield from window


class _Started:
    """A batch that is being read. `reading`: what its pictures come from, each of these some of them."""

    def __init__(
        self, pool: Pool, batch: Cut, number: int, read: Callable[[Item], Read], pixels: DevicePixels | None
    ) -> None:
        self.batch, self._pool, self._pixels, self._size = batch, pool, pixels, 0
        each = [pool.submit(LATER, partial(read, item)) for item in batch.items]
        self.reading: list[Future[Any]] = [*each]
        if pixels is not None:
            self.reading = [Future()]
            _when_done(each, partial(self._prepare, pixels, number, each, self.reading[0]))

    def _prepare(self, pixels: DevicePixels, number: int, each: list[Future[Read]], prepared: Future[Any]) -> None:
        """Have them prepared, all at once, as soon as there is room for them."""

        def prepare() -> list[Read]:
            reads = [one.result() for one in each]
            each.clear()  # these hold what calls this, and that holds what is prepared
            return pixels.prepare(reads)

        def start() -> None:
            with contextlib.suppress(RuntimeError):  # the pool takes no more, and nobody waits for this
                self._pool.submit(URGENT, prepare, prepared)  # a GPU waits for it

        failed = any(one.exception() is not None for one in each)
        waiting = [] if failed else [one.result().waiting for one in each]
        self._size = sum(it.size for it in waiting if it is not None)
        pixels.gate.enter(number, self._size, start)

    def explain(
        self,
        explainer: BatchExplainer[Found],
        finish: Callable[[Fetched, Found | GradcamError], T],
        finishing: deque[Future[T]],
    ) -> list[Cut]:
        """Explain the pictures, and add what `finish` will have made of each that is needed to `finishing`. Return the
        batch of those that are needed and whose store did not answer, if there are any.

        Each is added before its task may begin: whoever is interrupted in between still knows of what is finished.
        """
        results = [each.result() for each in self.reading]
        pictures = results if self._pixels is None else results[0]
        self.reading.clear()  # or they would still be held while more are read
        needed = self.batch.needed
        has_answer = [not isinstance(each.picture, StoreError) for each in pictures]
        left = replace(self.batch, needed=[it and not answer for it, answer in zip(needed, has_answer)])
        self.batch = replace(self.batch, needed=[it and answer for it, answer in zip(needed, has_answer)])
        has_images = any(it and isinstance(each.picture, Prepared) for it, each in zip(self.batch.needed, pictures))
        if self._pixels is None:
            found = explainer.explain(pictures) if has_images else [each.picture for each in pictures]
            for task in self._list_tasks(pictures, found, finish):
                finishing.append(Future())
                self._pool.submit(URGENT, task, finishing[-1])
            return [left] * any(left.needed)
        with self._pixels.on("model"):
            found = explainer.explain(pictures)
        futures: list[Future[T]] = [Future() for needed in self.batch.needed if needed]
        finishing.extend(futures)
        fetched = [replace(each, picture=NOT_HERE) for each in pictures]
        self._pool.submit(URGENT, partial(self._finish, self._pixels, fetched, found, finish, futures))
        return [left] * any(left.needed)

    def _finish(
        self,
        pixels: DevicePixels,
        pictures: Sequence[Read],
        found: list[Any],
        finish: Callable[[Fetched, Any], T],
        futures: Sequence[Future[T]],
    ) -> None:
        try:
            done = pixels.finish(found)
            found.clear()
            pixels.gate.leave(self._size)
            for task, future in zip(self._list_tasks(pictures, done, finish), futures):
                self._pool.submit(URGENT, task, future)
        except BaseException as error:  # for whoever asks for the results
            for future in futures:
                if not future.done():
                    future.set_exception(error)

    def _list_tasks(
        self, pictures: Sequence[Read], found: Sequence[Any], finish: Callable[[Fetched, Any], T]
    ) -> list[Callable[[], T]]:
        each = zip(pictures, found, self.batch.needed)
        return [partial(finish, picture.fetched, it) for picture, it, needed in each if needed]


def _when_done(futures: Sequence[Future[Any]], then: Callable[[], None]) -> None:
    """Call it in whichever thread is the last to be done with one of them."""
    left, lock = [len(futures)], threading.Lock()

    def count(_: Future[Any]) -> None:
        with lock:
            left[0] -= 1
            is_last = left[0] == 0
        if is_last:
            then()

    for future in futures:
        future.add_done_callback(count)


def _take(results: deque[Future[T]], *, most: int, until: Sequence[Future[Any]] = ()) -> Iterator[T]:
    """Results in order, as they are done, while there are more than `most`, or `until` is not all done. Each is taken
    out once the caller comes back for the next: one that is interrupted while it has it finds it here still."""
    while True:
        while results and results[0].done():
            yield results[0].result()
            results.popleft()
        pending = [each for each in until if not each.done()]
        if not pending and len(results) <= most:
            return
        wait([*pending, *list(results)[:1]], return_when=FIRST_COMPLETED)
