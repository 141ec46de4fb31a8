"""The engine on Ray: Ray Data streams blocks of batches through a pool of actors, and answers come back in order."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from gradcam.batch.compute import Tell
from gradcam.batch.engine import Late, Needed, Reports, Work
from gradcam.batch.ray.actor import Actor, ActorJob, Answer, Load, pack, pack_again, pass_on, to_blocks, to_job
from gradcam.batch.ray.ending import end_everywhere
from gradcam.batch.ray.session import ActorLayout, is_loud
from gradcam.batch.save import Saver
from gradcam.errors import ClusterError, describe_unexpected, shorten
from gradcam.plugins import PREFIX

TRIES = 3  # of a block whose actor dies, beside the first: a picture that kills it would do so for ever
AT_ONCE = 2  # blocks that an actor has, so that it need not wait for the next


@dataclass(frozen=True)
class RayEngine:
    """An `Engine` on Ray, which has been joined. `load`: the model, on the device of a name; it is sent to the actors.
    `workers`: beside each model; None for one on each core of its actor. Raises `ClusterError`."""

    ray: Any
    layout: ActorLayout
    load: Load
    workers: int | None = None

    def __call__(self, work: Work, saver: Saver, *, is_needed: Needed, tell: Tell, late: Late = None) -> Reports:
        """See `Engine`; what actors finished, and nobody here has heard of yet, is done again by whoever goes on."""
        blocks = [pack(block) for block in to_blocks(work, saver.stems, is_needed, self.layout.actors)]
        if not blocks:
            return
        job = to_job(self.load, work, saver, self.layout.device, self.workers)
        tell("engine", engine="ray", actors=self.layout.actors, cores=self.layout.cores, gpus=self.layout.gpus)
        unanswered: set[str] = set()
        while blocks:
            with contextlib.closing(self._stream(blocks, job)) as answers:
                for answer in answers:
                    if answer.error is not None and is_loud():
                        sys.stderr.write(answer.error.traceback)
                    yield from pass_on(answer, tell, late, unanswered)
            blocks = pack_again(work, saver, unanswered)
            unanswered.clear()

    def _stream(self, blocks: list[bytes], job: ActorJob) -> Generator[Answer, None, None]:
        try:
            with contextlib.closing(self._run(blocks, dump(self.ray, job))) as answers:
                for answer in answers:
                    yield pickle.loads(answer)
        except Exception as error:  # Ray's own; what actors have to say are answers
            raise ClusterError(_word(self.ray, error)) from error
        finally:
            end_everywhere(self.ray, job.run)

    def _run(self, blocks: list[bytes], job: bytes) -> Generator[bytes, None, None]:
        context = self.ray.data.DataContext.get_current()  # of what is made from now on
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.execution_options.preserve_order = True
        context.target_max_block_size = 1  # byte: each answer comes as soon as it is there
        # Ray's own default is to restart and to repeat without end. Later versions will not let themselves be told.
        kinds = [each.kind for each in inspect.signature(self.ray.data.Dataset.map_batches).parameters.values()]
        tries = {"max_restarts": -1, "max_task_retries": TRIES} if inspect.Parameter.VAR_KEYWORD in kinds else {}
        rows = self.ray.data.from_items([{"block": block} for block in blocks], override_num_blocks=len(blocks))
        actors = min(self.layout.actors, len(blocks))
        answers = rows.map_batches(
            Actor,
            fn_constructor_args=(job, self.layout.threads),
            compute=self.ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=AT_ONCE),
            batch_size=1,
            num_cpus=self.layout.cores,
            num_gpus=self.layout.gpus,
            **tries,
        )
        batches = answers.iter_batches(batch_size=None, prefetch_batches=0, batch_format="numpy")
        with contextlib.closing(iter(batches)) as each:
            for batch in each:
                yield from batch["answer"]


def dump(ray: Any, job: ActorJob) -> bytes:
    """The job, to be sent, with the code of the user's own files, which other processes cannot import by a name."""
    for module in [module for name, module in sys.modules.items() if name.startswith(PREFIX)]:
        ray.cloudpickle.register_pickle_by_value(module)
    packed: bytes = ray.cloudpickle.dumps(job)
    return packed


def _word(ray: Any, error: BaseException) -> str:
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    if "No module named 'gradcam" in str(error):
        return (
            "gradcam is missing on a machine of the cluster. On every machine, run in a clone of gradcam: "
            'pip install ".[ray]"'
        )
    ended = (ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError, ray.exceptions.OutOfMemoryError)
    if isinstance(error, ended):
        return (
            f"An actor still ended after {TRIES} retries. Possible causes: a lost machine, too little memory, or an image "
            f"that crashes the process (Ray: {shorten(lines[0] if lines else error)})."
        )
    cause = getattr(error, "cause", None)  # of what was raised elsewhere; below it, Ray has advice of its own
    own = lines[-1] if lines else type(error).__name__
    return f"Ray stopped the run: {describe_unexpected(cause) if isinstance(cause, Exception) else own}"
