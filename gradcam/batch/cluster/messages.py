"""What goes between the driver, which keeps records, and the actors, which explain: all of it can be sent."""

from __future__ import annotations

import itertools
import pickle
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradcam._version import __version__
from gradcam.batch.batches import Cut, cut
from gradcam.batch.engine import Work
from gradcam.batch.findings import Question
from gradcam.batch.items import Item
from gradcam.batch.output.outputs import Outcome, Saver
from gradcam.batch.output.places import Disk, Place
from gradcam.batch.output.saving import Saving
from gradcam.batch.weights import describe_weights
from gradcam.classifiers import Classifier

Load = Callable[[str], Classifier]  # the model on the device of that name; it can be sent to another process

LONGEST = 32  # batches in a block: Ray takes a millisecond for each, and repeats one whose actor died
SHARES = 12  # blocks that each actor has about, so that none waits long for the others at the end


@dataclass(frozen=True)
class Job:
    """What is the same for all blocks, with what tells an actor that it sees the same as the driver.

    `load`: the model on a device, whose weights have the SHA-256 `weights`. `workers`: threads beside each model, None for
    one on each of the actor's cores. `folder`: where the driver works, which relative names start from; `seen`: folders that
    it sees, and the actor must see as well. `run`: a name that no other run has.
    """

    load: Load
    weights: str
    question: Question
    batch_size: int
    workers: int | None
    audit: bool
    place: Place | None
    saving: Saving
    draw_views: Any
    device: str
    folder: Path
    seen: Sequence[Path]
    version: str = __version__
    run: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Block:
    """Some batches, one after another, with what the names of their pictures' results begin with."""

    batches: list[Cut]
    stems: dict[str, str]


def pack(block: Block) -> bytes:
    """To be sent. All of them are there before the first is done: names have much in common, and are compressed."""
    return zlib.compress(pickle.dumps(block, pickle.HIGHEST_PROTOCOL), 1)


def unpack(packed: bytes) -> Block:
    """What `pack` packed."""
    block: Block = pickle.loads(zlib.decompress(packed))
    return block


@dataclass(frozen=True)
class Failure:
    """An error that cannot be sent as it is: the name of its kind, its text, and where it arose."""

    kind: str
    text: str
    traceback: str


@dataclass(frozen=True)
class Answer:
    """What became of a batch, or the error that stops all; `events`: names and details, for the log."""

    outcomes: Sequence[Outcome] = ()
    events: Sequence[tuple[str, Mapping[str, Any]]] = ()
    error: Failure | None = None


def to_job(load: Load, work: Work, saver: Saver, device: str, workers: int | None) -> Job:
    """The job of these pictures."""
    return Job(
        load=load,
        weights=describe_weights(work.classifier)["sha256"],
        question=work.question,
        batch_size=work.batch_size,
        workers=workers,
        audit=work.audit,
        place=saver.place,
        saving=saver.saving,
        draw_views=saver.draw_views,
        device=device,
        folder=Path.cwd(),
        seen=[folder.absolute() for folder in _find_folders(work, saver) if folder.is_dir()],
    )


def _find_folders(work: Work, saver: Saver) -> Iterator[Path]:
    """Of results, the one for files that are not whole yet: on another disk there may be a folder of the other's name."""
    if isinstance(saver.place, Disk):
        yield saver.place.temporary
    paths = (item.content.path for item in work.items)
    yield from (path.parent for path in itertools.islice(filter(None, paths), 1))


def to_blocks(work: Work, stems: Mapping[str, str], is_needed: Callable[[Item], bool], actors: int) -> Iterator[Block]:
    """What is needed, cut into batches at the places where every engine cuts, several of them in a block."""
    batches = list(cut(work.items, work.batch_size, is_needed))
    size = max(1, min(LONGEST, len(batches) // (SHARES * actors)))
    for start in range(0, len(batches), size):
        block = batches[start : start + size]
        yield Block(block, {item.name: stems[item.name] for batch in block for item in batch.items})
