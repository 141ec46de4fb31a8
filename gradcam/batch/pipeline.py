"""Many pictures through one model: reading ahead and finishing behind in threads, the model in the caller's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from gradcam.batch.compute import Explainer, Find, Found, Tell
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
    """What `finish` makes of each picture that is needed, in the order of the items, as soon as it and all before are done.

    Batches are cut at fixed positions, whatever is needed of them, and one without any needed picture is passed over; a
    picture that cannot be read drops out of its batch. So the same items give the same numbers, also in a second run for
    what the first did not come to. `items` are taken as they are needed, and only a few batches are in memory.

    `find`: what runs the model. `finish`: from what was read and found, or the `GradcamError` that names the picture, to a
    result; called in one of the `workers` threads, as reading is. What it raises ends the generator in that picture's
    place. `tell` hears, in the caller's thread, of each "batch", and of "out of memory". `audit`: have the SHA-256 of what
    was read. `late` gets, in order, what was finished and not taken when this ended early, whatever ended it.
    The model runs in the thread that asks for results. However this ends, no thread is left.
    """
    check_count("batch_size", batch_size, "pictures to explain at once")
    check_count("workers", workers, "threads")
    tell = tell or _tell_nobody
    explainer = Explainer(find, classifier.device, largest=batch_size, tell=tell)
    read = partial(read_item, classifier, audit=audit, upload=find_upload(classifier.device))
    finishing: deque[Future[T]] = deque()
    try:
        with one_opencv_thread(), Pool(workers) as pool:
            for batch, reading in _read_ahead(pool, read, cut(items, batch_size, is_needed)):
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


def _read_ahead(
    pool: Pool, read: Callable[[Item], Read], batches: Iterable[Cut]
) -> Iterator[tuple[Cut, list[Future[Read]]]]:
    """Each batch with its pictures, which may still be being read, as those of the next ones are."""
    window: deque[tuple[Cut, list[Future[Read]]]] = deque()
    for batch in batches:
        window.append((batch, [pool.submit(LATER, partial(read, item)) for item in batch.items]))
        if len(window) > AHEAD:
            yield window.popleft()
    while window:
        yield window.popleft()


def _explain(
    explainer: Explainer[Found],
    batch: Cut,
    reading: list[Future[Read]],
    finish: Callable[[Fetched, Found | GradcamError], T],
) -> list[Callable[[], T]]:
    """Run the model on a batch; what is left to do for each picture that is needed."""
    pictures = [each.result() for each in reading]
    reading.clear()  # or they would still be held while more are read
    found = explainer.explain(pictures)
    return [
        partial(finish, picture.fetched, it) for picture, it, needed in zip(pictures, found, batch.needed) if needed
    ]


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


def _tell_nobody(event: str, **details: Any) -> None:
    pass
