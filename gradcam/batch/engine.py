"""The engines' common part: what comes out of them is kept, counted and given on. And the engine on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from gradcam.batch.compute import Tell
from gradcam.batch.device import open_pixels
from gradcam.batch.findings import Request, find
from gradcam.batch.formats import OpenRun
from gradcam.batch.pipeline import compute_items
from gradcam.batch.save import Saver
from gradcam.errors import OutputError, StoreError
from gradcam.models.classifier import Classifier
from gradcam.sources.contents import Item
from gradcam.sources.shards import FailureLimit, TooManyFailuresError
from gradcam.storage.disk import uninterrupted
from gradcam.storage.records import Record, Report


@dataclass(frozen=True)
class Work:
    """What a run is about: pictures, in the order of the manifest, and how they are explained. `workers`: threads
    beside each model. `device`: of models, where that is not `classifier`'s. `pixels`: one of `options.PIXELS`.
    `resolved`: as in `Run`. `resumed_layers`: the layer fields of `classifier` that an earlier version chose."""

    classifier: Classifier
    request: Request
    items: Sequence[Item]
    batch_size: int
    workers: int
    audit: bool = False
    device: str | None = None
    pixels: str = "cpu"
    resolved: Mapping[str, Any] = field(default_factory=dict)
    resumed_layers: Mapping[str, Any] = field(default_factory=dict)


Needed = Callable[[Item], bool]
Late = Callable[[Report], None] | None
Reports = Generator[Report, None, None]


class Engine(Protocol):
    """What does the work: a report for each picture that is needed, in the order of the items. Once it is closed, or
    has raised, nothing is written any more, and `late` has got what was finished and not taken."""

    def __call__(self, work: Work, saver: Saver, *, is_needed: Needed, tell: Tell, late: Late = None) -> Reports: ...


def explain_here(work: Work, saver: Saver, *, is_needed: Needed, tell: Tell, late: Late = None) -> Reports:
    """The engine in this process: threads read ahead and write behind, and the model is in the caller's."""
    return compute_items(
        work.classifier,
        partial(find, work.classifier, work.request),
        work.items,
        finish=saver.save,
        is_needed=is_needed,
        batch_size=work.batch_size,
        workers=work.workers,
        tell=tell,
        audit=work.audit,
        late=late,
        pixels=open_pixels(work.pixels, work.classifier, work.request, tell=tell, saving=saver.saving),
    )


def explain_into(
    results: OpenRun, saver: Saver, work: Work, limit: FailureLimit | None = None, *, engine: Engine = explain_here
) -> Generator[Record, None, None]:
    """Explain whatever there is no record of yet; each record is kept before it is given. What an earlier run recorded
    as failed is tried again, and does not count once more towards `limit`. Raises `TooManyFailuresError`."""
    failures, most = 0, None if limit is None else limit.count(len(work.items))
    left = sum(item.name not in results.done for item in work.items)
    late: list[Report] = []
    last: Report | None = None  # with a record

    def keep(report: Report) -> Record:
        nonlocal last
        with uninterrupted():
            record = results.append(report.record, report.files)
            last = report
        results.log("picture", image=record.image, status=record.status, seconds=report.seconds)
        return record

    reports = engine(
        work, saver, is_needed=lambda item: item.name not in results.done, tell=results.log, late=late.append
    )
    try:
        with contextlib.closing(reports):  # nobody writes any more once this has ended, and the results may be let go
            for report in reports:
                record = keep(report)
                yield record
                failures += record.error is not None and record.image not in results.failed
                left -= 1
                if limit and most is not None and failures > most and left:  # behind the last there is nothing to stop
                    times = "1 failure" if failures == 1 else f"{failures} failures"
                    share = f" ({most} of {len(work.items)} images)" if limit.is_share else ""
                    raise TooManyFailuresError(
                        f"Stopped after {times}: --max-failures is {limit}{share}. Use --resume to continue. The "
                        "run then retries the failed images, and does not count them again."
                    )
    except BaseException as error:
        records = []
        with contextlib.suppress(OutputError, StoreError):  # of the same place, which `error` says more about
            records = [keep(report) for report in late if report is not last]
        if not isinstance(error, GeneratorExit):
            yield from records
        if not isinstance(error, TooManyFailuresError) or len(records) < left:
            raise
