"""What goes between the driver, which keeps records, and the actors, which explain: all of it can be sent."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import socket
import time
import traceback
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradcam import errors
from gradcam._version import __version__
from gradcam.batch.compute import Tell
from gradcam.batch.device import open_pixels
from gradcam.batch.engine import Late, Reports, Work
from gradcam.batch.findings import find
from gradcam.batch.pipeline import compute_items, say_unanswered
from gradcam.batch.pool import Cut, cut
from gradcam.batch.ray.ending import sign_in
from gradcam.batch.save import Saver, describe_weights
from gradcam.errors import ClusterError, DeviceError, GradcamError, OutputError, StoreError, describe_unexpected
from gradcam.models.classifier import Classifier
from gradcam.sources.contents import Item
from gradcam.storage.output import Disk
from gradcam.storage.records import Report

Load = Callable[[str], Classifier]  # the model on the device of that name; it can be sent to another process

LONGEST = 32  # batches in a block: Ray takes a millisecond for each, and repeats one whose actor died
SHARES = 12  # blocks that each actor has about, so that none waits long for the others at the end


@dataclass(frozen=True)
class ActorJob:
    """What is the same for all blocks, with what tells an actor that it sees the same as the driver: the weights'
    SHA-256, and folders. `work`, `saver`: the driver's, without its model, pictures and stems; `workers` are 0 for one
    on each of the actor's cores."""

    load: Load
    weights: str
    work: Work
    saver: Saver
    device: str
    folder: Path
    seen: Sequence[Path]
    version: str = __version__
    run: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Block:
    """Some batches, one after another, with what the names of their pictures' results begin with. `hurries`: leaves out
    images of stores that do not answer soon."""

    batches: list[Cut]
    stems: dict[str, str]
    hurries: bool = True


def pass_on(answer: Answer, tell: Tell, late: Late, unanswered: set[str]) -> Reports:
    """What came of a block, told and yielded as an `Engine` does; names of images that it left out are added to
    `unanswered`. Raises the error that ended it."""
    unanswered.update(answer.unanswered)
    for event, details in answer.events:
        tell(event, **details)
    if answer.error is not None:
        raise getattr(errors, answer.error.kind)(answer.error.text)
    outcomes = deque(answer.outcomes)
    try:
        while outcomes:
            yield outcomes.popleft()
    finally:
        while late is not None and outcomes:
            late(outcomes.popleft())


def pack(block: Block) -> bytes:
    """To be sent. All of them are there before the first is done: names have much in common, and are compressed."""
    return zlib.compress(pickle.dumps(block, pickle.HIGHEST_PROTOCOL), 1)


def pack_again(work: Work, saver: Saver, names: Collection[str]) -> list[bytes]:
    """Pack the batches of images whose stores did not answer, each in a block of its own."""
    if names:
        say_unanswered(len(names))
    actors = len(work.items)  # so that no block has to wait for another
    return [pack(it) for it in to_blocks(work, saver.stems, lambda item: item.name in names, actors, hurries=False)]


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
    """What became of a batch, or the error that stops all; `events`: names and details, for the log. `unanswered`: names
    of images whose stores did not answer."""

    outcomes: Sequence[Report] = ()
    events: Sequence[tuple[str, Mapping[str, Any]]] = ()
    error: Failure | None = None
    unanswered: Sequence[str] = ()


def to_job(load: Load, work: Work, saver: Saver, device: str, workers: int | None) -> ActorJob:
    """The job of these pictures."""
    none: Any = None  # in place of the model, which each actor loads for itself
    paths = (item.content.path for item in work.items)
    folders = [path.parent for path in itertools.islice(filter(None, paths), 1)]
    if isinstance(saver.place, Disk) and saver.place.temporary is not None:
        # Of results, the one for files that are not whole yet: on another disk there may be a folder of the other's name.
        folders.insert(0, saver.place.temporary)
    return ActorJob(
        load=load,
        weights=describe_weights(work.classifier)["sha256"],
        work=replace(work, classifier=none, items=(), workers=workers or 0),
        saver=replace(saver, classifier=none, stems={}),
        device=device,
        folder=Path.cwd(),
        seen=[folder.absolute() for folder in folders if folder.is_dir()],
    )


def to_blocks(
    work: Work, stems: Mapping[str, str], is_needed: Callable[[Item], bool], actors: int, *, hurries: bool = True
) -> Iterator[Block]:
    """What is needed, cut into batches at the places where every engine cuts, several of them in a block."""
    batches = list(cut(work.items, work.batch_size, is_needed))
    size = max(1, min(LONGEST, len(batches) // (SHARES * actors)))
    for start in range(0, len(batches), size):
        block = batches[start : start + size]
        yield Block(block, {item.name: stems[item.name] for batch in block for item in batch.items}, hurries)


def list_needed(batches: Iterable[Cut]) -> set[str]:
    """List the names of the items whose results are wanted."""
    return {item.name for batch in batches for item, it in zip(batch.items, batch.needed) if it}


class Actor:
    """Loads the model once, and explains block after block. What goes wrong is an answer: Ray would do the same again,
    and end with a traceback."""

    def __init__(self, job: bytes, cores: int) -> None:
        self._cores = cores
        self._where = {"node": socket.gethostname(), "actor": os.getpid()}
        self._failure: Failure | None = None
        self._news: list[tuple[str, Mapping[str, Any]]] = []
        start = time.perf_counter()
        try:
            self._job: ActorJob = pickle.loads(job)
            self._signed_in = sign_in(self._job.run)
            self._go_to_folder()
            self._classifier = self._load()
            self._tell("actor", seconds=time.perf_counter() - start, ready=time.time())
        except (Exception, SystemExit) as error:
            self._failure = self._describe(error)

    def __call__(self, rows: Mapping[str, Any]) -> Iterator[dict[str, list[bytes]]]:
        """An answer for each batch of the block that is in the row, as soon as all its pictures are done."""
        for packed in rows["block"]:
            try:
                failed = None if self._failure is None else [Answer(error=self._failure)]
                for answer in failed or self._explain(unpack(packed)):
                    yield {"answer": [pickle.dumps(answer)]}
            except Exception as error:  # noqa: PERF203  (it is of this block)
                yield {"answer": [pickle.dumps(Answer(error=self._describe(error)))]}

    def _explain(self, block: Block) -> Iterator[Answer]:
        work = self._job.work

        def tell(event: str, **details: Any) -> None:
            if "start" in details:  # among all pictures, not among these
                details["start"] = block.batches[details["start"] // work.batch_size].start
            self._tell(event, **details)

        needed = list_needed(block.batches)
        unanswered: list[Cut] = []
        outcomes = compute_items(
            self._classifier,
            functools.partial(find, self._classifier, work.request),
            [item for batch in block.batches for item in batch.items],
            finish=replace(self._job.saver, stems=block.stems, classifier=self._classifier).save,
            is_needed=lambda item: item.name in needed,
            batch_size=work.batch_size,
            workers=work.workers or self._cores,
            tell=tell,
            audit=work.audit,
            pixels=open_pixels(work.pixels, self._classifier, work.request, tell=tell, saving=self._job.saver.saving),
            hurries=block.hurries,
            unanswered=unanswered,
        )
        with contextlib.closing(outcomes):
            for batch in block.batches:
                done = list(itertools.islice(outcomes, sum(batch.needed)))
                yield Answer(done, tuple(self._news))
                self._news.clear()
        if unanswered:
            yield Answer(unanswered=tuple(list_needed(unanswered)))

    def _tell(self, event: str, **details: Any) -> None:
        self._news.append((event, details | self._where))

    def _go_to_folder(self) -> None:
        """Go where the driver is. Raises `ClusterError` where this machine does not see what the driver sees."""
        job, node = self._job, self._where["node"]
        if job.version != __version__:
            raise ClusterError(
                f"gradcam is version {__version__} on {node}, but version {job.version} on the machine that started the "
                "run: install the same version."
            )
        for folder in (job.folder, *job.seen) if job.seen else ():
            if not folder.is_dir():
                raise ClusterError(
                    f"{folder} does not exist on {node}: use a folder that all machines share, or a store."
                )
        with contextlib.suppress(OSError):
            os.chdir(job.folder)

    def _load(self) -> Classifier:
        import torch

        torch.set_num_threads(min(self._cores, torch.get_num_threads()))  # OMP_NUM_THREADS may say less
        classifier = replace(self._job.load(self._job.device), **self._job.work.resumed_layers)
        if describe_weights(classifier)["sha256"] != self._job.weights:
            raise ClusterError(
                f"The model's weights on {self._where['node']} differ from those on the machine that started the run: give "
                "a checkpoint with --weights, or make the model's code deterministic."
            )
        return classifier

    def _describe(self, error: BaseException) -> Failure:
        """As the driver is to raise it. A line on this machine says more than the kind of an error elsewhere."""
        kind, text = type(error).__name__, str(error)
        if not isinstance(error, (ClusterError, DeviceError, OutputError, StoreError)):
            reason = text if isinstance(error, GradcamError) else describe_unexpected(error)
            kind, text = "ClusterError", f"The actor on {self._where['node']} failed: {reason}"
        return Failure(kind, text, "".join(traceback.format_exception(error)))
