"""The engine on this machine: the stages, and an output folder that keeps what comes out of them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from gradcam.batch.failures import FailureLimit, TooManyFailuresError
from gradcam.batch.findings import Question
from gradcam.batch.folder import OutputFolder
from gradcam.batch.items import Item
from gradcam.batch.outputs import Saver
from gradcam.batch.pipeline import explain_items
from gradcam.classifiers import Classifier
from gradcam.records import Record


@dataclass(frozen=True)
class Work:
    """What a run is about: pictures, in the order of the manifest, and how they are explained.

    `audit`: whether records have each input's SHA-256.
    """

    classifier: Classifier
    question: Question
    items: Sequence[Item]
    batch_size: int
    workers: int
    audit: bool = False


def explain_into(
    folder: OutputFolder, saver: Saver, work: Work, limit: FailureLimit | None = None
) -> Generator[Record, None, None]:
    """Explain whatever the folder has no record of yet; each record is kept there before it is given.

    Once it is closed, or has raised, no thread writes to the folder any more.
    Raises `TooManyFailuresError` beyond the limit, and `OutputError` where the folder cannot be written.
    """
    failures, most = 0, None if limit is None else limit.count(len(work.items))
    left = sum(item.name not in folder.done for item in work.items)
    outcomes = explain_items(
        work.classifier,
        work.question,
        work.items,
        finish=saver.save,
        is_needed=lambda item: item.name not in folder.done,
        batch_size=work.batch_size,
        workers=work.workers,
        tell=folder.log,
        audit=work.audit,
    )
    with contextlib.closing(outcomes):  # no thread writes any more once this has ended, and the folder may be let go
        for outcome in outcomes:
            record = outcome.record
            folder.append(record)
            folder.log("picture", image=record.image, status=record.status, seconds=outcome.seconds)
            yield record
            failures += record.error is not None
            left -= 1
            if most is not None and failures > most and left:  # behind the last picture there is nothing to stop
                raise TooManyFailuresError(f"Stopped after {failures} failures: --max-failures is {limit}.")
