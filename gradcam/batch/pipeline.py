"""Many pictures through one model: reading ahead and finishing behind in threads, the model in the caller's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from gradcam.batch.compute import BatchExplainer, Find, Found, Tell
from gradcam.batch.pool import LATER, URGENT, Cut, Pool, cut, one_opencv_thread
from gradcam.batch.read import Fetched, Read, find_upload, read_item
from gradcam.errors import GradcamError, shorten
from gradcam.models.classifier import Classifier
from gradcam.sources.contents import Item

T = TypeVar("T")

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
) -> Generator[T, None, None]:
    """What `finish` makes of each picture that is needed, in the order of the items, as soon as it and all before are
    done. Batches are cut at fixed positions, whatever is needed of them, so that the same items give the same numbers.
    `finish` runs in one of the `workers` threads, as reading does; what it raises ends the generator. `audit`: have the
    SHA-256 of what was read. `late` gets what was finished and not taken when this ended early. No thread is left
    then."""
    check_count("batch_size", batch_size, "pictures to explain at once")
    check_count("workers", workers, "threads")
    tell = tell or (lambda event, **details: None)
    explainer = BatchExplainer(find, classifier.device, largest=batch_size, tell=tell)
    read = partial(read_item, classifier, audit=audit, upload=find_upload(classifier.device))
    finishing: deque[Future[T]] = deque()
    try:
        with one_opencv_thread(), Pool(workers) as pool:
            started = (
                (batch, [pool.submit(LATER, partial(read, item)) for item in batch.items])
                for batch in cut(items, batch_size, is_needed)
            )
            for batch, reading in _look_ahead(started):
                yield from _take(finishing, most=BEHIND * batch_size, until=reading)
                start = perf_counter()
                finishing.extend(pool.submit(URGENT, task) for task in _explain(explainer, batch, reading, finish))
                tell("batch", start=batch.start, pictures=len(batch.items), seconds=perf_counter() - start)
            yield from _take(finishing, most=0)
    except BaseException:  # the generator's end, too
        while late is not None and finishing:
            each = finishing.popleft()
            if each.done() and each.exception() is None:
                late(each.result())
        raise


def _look_ahead(each: Iterator[T]) -> Iterator[T]:
    window: deque[T] = deque()
    for one in each:
        window.append(one)
        if len(window) > AHEAD:
            yield window.popleft()
    yield from window


def _explain(
    explainer: BatchExplainer[Found],
    batch: Cut,
    reading: list[Future[Read]],
    finish: Callable[[Fetched, Found | GradcamError], T],
) -> list[Callable[[], T]]:
    pictures = [each.result() for each in reading]
    reading.clear()  # or they would still be held while more are read
    found = zip(pictures, explainer.explain(pictures), batch.needed)
    return [partial(finish, picture.fetched, it) for picture, it, needed in found if needed]


def _take(results: deque[Future[T]], *, most: int, until: Sequence[Future[Any]] = ()) -> Iterator[T]:
    """Results in order, as they are done, while there are more than `most`, or `until` is not all done."""
    while True:
        while results and results[0].done():
            yield results.popleft().result()
        pending = [each for each in until if not each.done()]
        if not pending and len(results) <= most:
            return
        wait([*pending, *list(results)[:1]], return_when=FIRST_COMPLETED)


def check_count(name: str, value: Any, what: str) -> int:
    """The value. Raises `GradcamError` for what is no count."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GradcamError(f"{name} is {shorten(value)}, expected a number of {what}, 1 or more.")
    return value
