"""Run the model in actors (worker processes), which send replies to the driver (the main process).

The driver stores the records. All messages between the driver and the actors can be pickled.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import time
import traceback
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradcam._version import __version__
from gradcam.batch.compute import LogEvent
from gradcam.batch.end_processes import register_process
from gradcam.batch.engine import BatchWork, IsNeeded, OnLeftover, Reports, explain_locally
from gradcam.batch.pipeline import log_unanswered
from gradcam.batch.pool import ItemBatch, cut_batches
from gradcam.batch.save import Saver, describe_weights
from gradcam.errors import ClusterError, DeviceError, GradcamError, OutputError, StoreError, describe_unexpected
from gradcam.models.classifier import Classifier
from gradcam.storage.output import DiskWriter
from gradcam.storage.records import ImageOutcome

# The type of a picklable function that takes a device name, and returns the model loaded on that device.
Load = Callable[[str], Classifier]

# Large blocks save time, because Ray needs about a millisecond per block. The size is limited, because Ray repeats the
# entire block if an actor dies.
MAX_BATCHES_PER_BLOCK = 32
# Each actor gets about this number of blocks. With fewer blocks, some actors would finish much later than others.
BLOCKS_PER_ACTOR = 12


@dataclass(frozen=True)
class ActorJob:
    """The settings of a run that an actor needs for every block.

    An actor checks that its model has the SHA-256 `weights`, and that its machine has the `shared_folders`. `work` and
    `saver` are copies of the driver's objects, without the model, the images and the stems. If `work.workers` is 0, an
    actor uses one thread per core.
    """

    load: Load
    weights: str
    work: BatchWork
    saver: Saver
    device: str
    folder: Path
    shared_folders: Sequence[Path]
    version: str = __version__
    run: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Block:
    """Consecutive batches for an actor to explain.

    `stems` maps the name of each image to the common beginning of its result names. If `skip_slow_stores` is True, the
    actor leaves out images whose object store does not answer quickly.
    """

    batches: list[ItemBatch]
    stems: dict[str, str]
    skip_slow_stores: bool = True


@dataclass(frozen=True)
class ActorReply:
    """A message from an actor to the driver: the reports of one batch, or the error that stops the run.

    `events` holds names and details for the log. `unanswered` holds the names of images whose object stores did not
    answer.
    """

    outcomes: Sequence[ImageOutcome] = ()
    events: Sequence[tuple[str, Mapping[str, Any]]] = ()
    error: GradcamError | None = None
    traceback: str = ""
    unanswered: Sequence[str] = ()


# The type of a function that explains blocks, and yields the replies in the order of the blocks.
Stream = Callable[[list[bytes]], Generator[ActorReply, None, None]]


def explain_blocks(
    work: BatchWork, saver: Saver, blocks: list[bytes], stream: Stream, *, log_event: LogEvent, on_leftover: OnLeftover
) -> Reports:
    """Explain the images of all blocks, and yield their reports.

    If the object store of an image does not answer, the image is tried again after all other images.
    """
    unanswered: set[str] = set()
    while blocks:
        with contextlib.closing(stream(blocks)) as replies:
            for reply in replies:
                yield from _yield_reports(reply, log_event, on_leftover)
                unanswered.update(reply.unanswered)
        if unanswered:
            log_unanswered(len(unanswered))
        actors = len(work.items)  # With this number of actors, `pack_blocks` puts only one batch into each block.
        blocks = pack_blocks(work, saver, lambda item: item.name in unanswered, actors, skip_slow_stores=False)
        unanswered.clear()


def _yield_reports(reply: ActorReply, log_event: LogEvent, on_leftover: OnLeftover) -> Reports:
    """Log the events of a reply, and yield its reports. Raises the error of the reply, if there is one."""
    for event, details in reply.events:
        log_event(event, **details)
    if reply.error is not None:
        raise reply.error
    outcomes = deque(reply.outcomes)
    try:
        while outcomes:
            yield outcomes.popleft()
    finally:
        while on_leftover is not None and outcomes:
            on_leftover(outcomes.popleft())


def pack_blocks(
    work: BatchWork, saver: Saver, is_needed: IsNeeded, actors: int, *, skip_slow_stores: bool = True
) -> list[bytes]:
    """Cut the items into batches, and return pickled and compressed blocks of consecutive batches.

    All blocks are in memory before the first block runs. Compression saves memory, because image names are similar.
    """
    batches = list(cut_batches(work.items, work.batch_size, is_needed))
    size = max(1, min(MAX_BATCHES_PER_BLOCK, len(batches) // (BLOCKS_PER_ACTOR * actors)))
    packed = []
    for start in range(0, len(batches), size):
        part = batches[start : start + size]
        stems = {item.name: saver.stems[item.name] for batch in part for item in batch.items}
        block = pickle.dumps(Block(part, stems, skip_slow_stores), pickle.HIGHEST_PROTOCOL)
        packed.append(zlib.compress(block, 1))
    return packed


def to_job(load: Load, work: BatchWork, saver: Saver, device: str, workers: int | None) -> ActorJob:
    """Return the settings that each actor of this run receives."""
    unset: Any = None  # The job has no model, because each actor loads the model.
    paths = (item.content.path for item in work.items)
    folders = [path.parent for path in itertools.islice(filter(None, paths), 1)]
    if isinstance(saver.place, DiskWriter) and saver.place.temporary is not None:
        # Each actor checks that it can access the output folder of this run. Another disk may have a folder with the
        # same path. Actors therefore look for the subfolder for incomplete files, which exists only during a run.
        folders.insert(0, saver.place.temporary)
    weights = describe_weights(work.classifier)["sha256"]
    shared_folders = [folder.absolute() for folder in folders if folder.is_dir()]
    work = replace(work, classifier=unset, items=(), workers=workers or 0)
    saver = replace(saver, classifier=unset, stems={})
    return ActorJob(load, weights, work, saver, device, Path.cwd(), shared_folders)


def list_needed(batches: Iterable[ItemBatch]) -> set[str]:
    """Return the names of the items whose results are needed."""
    return {item.name for batch in batches for item, is_needed in zip(batch.items, batch.needed) if is_needed}


class Actor:
    """Loads the model once in a worker process, and explains blocks.

    An error is sent to the driver as a reply. If an actor raised the error, Ray would retry the block and print a
    traceback.
    """

    def __init__(self, job: bytes, cores: int) -> None:
        self._cores = cores
        self._location = {"node": socket.gethostname(), "actor": os.getpid()}
        self._failure: ActorReply | None = None
        self._events: list[tuple[str, Mapping[str, Any]]] = []
        start = time.perf_counter()
        try:
            self._job: ActorJob = pickle.loads(job)
            self._registration = register_process(self._job.run)
            self._go_to_folder()
            self._classifier = self._load()
            self._log_event("actor", seconds=time.perf_counter() - start, ready=time.time())
        except (Exception, SystemExit) as error:
            self._failure = self._fail(error)

    def __call__(self, rows: Mapping[str, Any]) -> Iterator[dict[str, list[bytes]]]:
        """Yield a reply for each batch of the given blocks, as soon as all images of the batch are done."""
        for packed in rows["block"]:
            try:
                failures = [] if self._failure is None else [self._failure]
                for reply in failures or self._explain(pickle.loads(zlib.decompress(packed))):
                    yield {"answer": [pickle.dumps(reply)]}
            except Exception as error:  # noqa: PERF203  (an error ends only its own block)
                yield {"answer": [pickle.dumps(self._fail(error))]}

    def _explain(self, block: Block) -> Iterator[ActorReply]:
        items = [item for batch in block.batches for item in batch.items]
        work = replace(self._job.work, classifier=self._classifier, items=items)
        work = replace(work, workers=work.workers or self._cores)
        saver = replace(self._job.saver, stems=block.stems, classifier=self._classifier)

        def log_event(event: str, **details: Any) -> None:
            if "start" in details:  # Replace the position in the block by the position in the input.
                details["start"] = block.batches[details["start"] // work.batch_size].start
            self._log_event(event, **details)

        needed = list_needed(block.batches)
        unanswered: list[ItemBatch] = []
        options: Any = {"log_event": log_event, "skip_slow_stores": block.skip_slow_stores, "unanswered": unanswered}
        outcomes = explain_locally(work, saver, is_needed=lambda item: item.name in needed, **options)
        with contextlib.closing(outcomes):
            for batch in block.batches:
                reports = list(itertools.islice(outcomes, sum(batch.needed)))
                yield ActorReply(reports, tuple(self._events))
                self._events.clear()
        if unanswered:
            yield ActorReply(unanswered=tuple(list_needed(unanswered)))

    def _log_event(self, event: str, **details: Any) -> None:
        self._events.append((event, details | self._location))

    def _go_to_folder(self) -> None:
        """Change to the driver's current folder.

        Raises `ClusterError` if this machine lacks a folder of the run, or has another version of gradcam.
        """
        job, node = self._job, self._location["node"]
        if job.version != __version__:
            versions = f"version {__version__} on {node}, but version {job.version} on the machine that started the run"
            raise ClusterError(f"gradcam is {versions}: install the same version.")
        for folder in (job.folder, *job.shared_folders) if job.shared_folders else ():
            if not folder.is_dir():
                advice = "use a folder that all machines share, or a store"
                raise ClusterError(f"{folder} does not exist on {node}: {advice}.")
        with contextlib.suppress(OSError):
            os.chdir(job.folder)

    def _load(self) -> Classifier:
        import torch

        torch.set_num_threads(min(self._cores, torch.get_num_threads()))  # Keep a lower limit from OMP_NUM_THREADS.
        classifier = replace(self._job.load(self._job.device), **self._job.work.resumed_layers)
        if describe_weights(classifier)["sha256"] != self._job.weights:
            problem = f"The model's weights on {self._location['node']} differ from the weights on the machine"
            advice = "Give a checkpoint with --weights, or make the model's code deterministic"
            raise ClusterError(f"{problem} that started the run. {advice}.")
        return classifier

    def _fail(self, error: BaseException) -> ActorReply:
        """Return a reply with an error, which the driver raises. The message of an unexpected error names this machine."""
        lines = traceback.format_exception(error)
        if not isinstance(error, (ClusterError, DeviceError, OutputError, StoreError)):
            reason = str(error) if isinstance(error, GradcamError) else describe_unexpected(error)
            error = ClusterError(f"The actor on {self._location['node']} failed: {reason}")
        return ActorReply(error=error, traceback="".join(lines))
