"""The part of the work that is done in an actor: a process of Ray's that holds a model, on a device of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from gradcam._version import __version__
from gradcam.batch.cluster.ending import sign_in
from gradcam.batch.cluster.messages import Answer, Block, Failure, Job, unpack
from gradcam.batch.output.outputs import Saver
from gradcam.batch.pipeline import explain_items
from gradcam.batch.weights import describe_weights
from gradcam.classifiers import Classifier
from gradcam.errors import ClusterError, GradcamError, OutputError, StoreError, describe_unexpected


class Actor:
    """Loads the model once, and explains block after block.

    What goes wrong is an answer: Ray would do the same again, and end with a traceback.
    """

    def __init__(self, job: bytes, cores: int) -> None:
        self._cores = cores
        self._where = {"node": socket.gethostname(), "actor": os.getpid()}
        self._failure: Failure | None = None
        self._news: list[tuple[str, Mapping[str, Any]]] = []
        start = time.perf_counter()
        try:
            self._job: Job = pickle.loads(job)
            self._signed_in = sign_in(self._job.run)
            self._go_to_folder()
            self._classifier = self._load()
            self._tell("actor", seconds=time.perf_counter() - start, ready=time.time())
        except (Exception, SystemExit) as error:
            self._failure = self._describe(error)

    def __call__(self, rows: Mapping[str, Any]) -> Iterator[dict[str, list[bytes]]]:
        """An answer for each batch of the block that is in the row, as soon as all its pictures are done."""
        for packed in rows["block"]:
            for answer in self._answer(packed):
                yield {"answer": [pickle.dumps(answer)]}

    def _answer(self, packed: bytes) -> Iterator[Answer]:
        if self._failure is not None:
            yield Answer(error=self._failure)
            return
        try:
            yield from self._explain(unpack(packed))
        except Exception as error:
            yield Answer(error=self._describe(error))

    def _explain(self, block: Block) -> Iterator[Answer]:
        job = self._job

        def tell(event: str, **details: Any) -> None:
            if "start" in details:  # among all pictures, not among these
                details["start"] = block.batches[details["start"] // job.batch_size].start
            self._tell(event, **details)

        needed = {item.name for batch in block.batches for item, it in zip(batch.items, batch.needed) if it}
        outcomes = explain_items(
            self._classifier,
            job.question,
            [item for batch in block.batches for item in batch.items],
            finish=Saver(job.place, block.stems, job.saving, self._classifier, job.question, job.draw_views).save,
            is_needed=lambda item: item.name in needed,
            batch_size=job.batch_size,
            workers=job.workers or self._cores,
            tell=tell,
            audit=job.audit,
        )
        with contextlib.closing(outcomes):
            for batch in block.batches:
                done = list(itertools.islice(outcomes, sum(batch.needed)))
                yield Answer(done, tuple(self._news))
                self._news.clear()

    def _tell(self, event: str, **details: Any) -> None:
        """For the log, with the next answer."""
        self._news.append((event, details | self._where))

    def _go_to_folder(self) -> None:
        """Go where the driver is. Raises `ClusterError` where this machine does not see what the driver sees."""
        job, node = self._job, self._where["node"]
        if job.version != __version__:
            raise ClusterError(
                f"gradcam is {__version__} on {node}, and {job.version} where the run was started: install the same there."
            )
        for folder in (job.folder, *job.seen) if job.seen else ():
            if not folder.is_dir():
                raise ClusterError(f"{folder} is not on {node}: give a folder that all machines share, or a store.")
        with contextlib.suppress(OSError):
            os.chdir(job.folder)

    def _load(self) -> Classifier:
        """Raises `ClusterError` where the weights are not the driver's."""
        import torch

        torch.set_num_threads(min(self._cores, torch.get_num_threads()))  # OMP_NUM_THREADS may say less
        classifier = self._job.load(self._job.device)
        if describe_weights(classifier)["sha256"] != self._job.weights:
            raise ClusterError(
                f"The model's weights on {self._where['node']} are not those where the run was started: give a file of them "
                "with --weights, or have the model's code make the same each time."
            )
        return classifier

    def _describe(self, error: BaseException) -> Failure:
        """As the driver is to raise it. A line on this machine says more than the kind of an error elsewhere."""
        place = "".join(traceback.format_exception(error))
        if isinstance(error, (ClusterError, OutputError, StoreError)):
            return Failure(type(error).__name__, str(error), place)
        reason = str(error) if isinstance(error, GradcamError) else describe_unexpected(error)
        return Failure("ClusterError", f"The actor on {self._where['node']} cannot work: {reason}", place)
