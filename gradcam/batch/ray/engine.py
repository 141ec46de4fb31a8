"""The engine on Ray: Ray Data streams blocks of batches through a pool of actors, and returns replies in order."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradcam.batch import actor
from gradcam.batch.actor import Actor, ActorJob, ActorReply
from gradcam.batch.compute import LogEvent
from gradcam.batch.end_processes import end_local_processes
from gradcam.batch.engine import BatchWork, IsNeeded, OnLeftover, Reports
from gradcam.batch.ray.session import ActorLayout, shows_tracebacks
from gradcam.batch.save import Saver
from gradcam.errors import ClusterError, describe_unexpected, shorten
from gradcam.plugins import USER_MODULE_PREFIX

# If an actor dies, Ray retries its block up to this number of times. Without a limit, an image that crashes the process
# would be retried forever.
MAX_RETRIES = 3
# The maximum number of unfinished blocks per actor. With two blocks, an actor never waits for its next block.
MAX_BLOCKS_PER_ACTOR = 2
REMOTE_TIMEOUT_SECONDS = 30  # The maximum wait for other machines to end their processes.


@dataclass(frozen=True)
class RayEngine:
    """An `Engine` on a Ray cluster that this process has joined.

    `load` is a picklable function that takes a device name and returns the model. `workers` is the number of threads
    per model. None means one thread per core of the actor. Raises `ClusterError`.
    """

    ray: Any
    layout: ActorLayout
    load: actor.Load
    workers: int | None = None

    def __call__(
        self, work: BatchWork, saver: Saver, *, is_needed: IsNeeded, log_event: LogEvent, on_leftover: OnLeftover = None
    ) -> Reports:
        """Explain images as an `Engine` does.

        If the run stops early, the reports that have not reached this process are lost. A resumed run explains their
        images again.
        """
        blocks = actor.pack_blocks(work, saver, is_needed, self.layout.actors)
        if not blocks:
            return
        job = actor.to_job(self.load, work, saver, self.layout.device, self.workers)
        log_event("engine", engine="ray", actors=self.layout.actors, cores=self.layout.cores, gpus=self.layout.gpus)
        stream = partial(self._stream_replies, job)
        yield from actor.explain_blocks(work, saver, blocks, stream, log_event=log_event, on_leftover=on_leftover)

    def _stream_replies(self, job: ActorJob, blocks: list[bytes]) -> Generator[ActorReply, None, None]:
        try:
            with contextlib.closing(self._run_actors(blocks, pickle_job(self.ray, job))) as replies:
                for reply in map(pickle.loads, replies):
                    if shows_tracebacks():
                        sys.stderr.write(reply.traceback)
                    yield reply
        except Exception as error:  # An actor sends its errors as replies, so this error comes from Ray itself.
            raise ClusterError(_describe_ray_error(self.ray, error)) from error
        finally:
            end_all_processes(self.ray, job.run)

    def _run_actors(self, blocks: list[bytes], job: bytes) -> Generator[bytes, None, None]:
        context = self.ray.data.DataContext.get_current()  # The context applies to datasets that are created later.
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.execution_options.preserve_order = True
        context.target_max_block_size = 1  # A block size of one byte makes Ray deliver each reply immediately.
        # By default, Ray restarts actors and retries blocks without limit. Set a limit if this version of Ray has the
        # options for a limit.
        parameters = inspect.signature(self.ray.data.Dataset.map_batches).parameters.values()
        takes_options = inspect.Parameter.VAR_KEYWORD in {parameter.kind for parameter in parameters}
        retries = {"max_restarts": -1, "max_task_retries": MAX_RETRIES} if takes_options else {}
        rows = self.ray.data.from_items([{"block": block} for block in blocks], override_num_blocks=len(blocks))
        actors = min(self.layout.actors, len(blocks))
        strategy = self.ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=MAX_BLOCKS_PER_ACTOR)
        options = {"compute": strategy, "num_cpus": self.layout.cores, "num_gpus": self.layout.gpus, **retries}
        arguments = (job, self.layout.threads)
        replies = rows.map_batches(Actor, fn_constructor_args=arguments, batch_size=1, **options)
        batches = replies.iter_batches(batch_size=None, prefetch_batches=0, batch_format="numpy")
        with contextlib.closing(iter(batches)) as row_batches:
            for batch in row_batches:
                yield from batch["answer"]


def end_all_processes(ray: Any, run: str) -> None:
    """End the processes of the run on all machines of the cluster that can be reached."""
    end_local_processes(run)
    with contextlib.suppress(ray.exceptions.RayError):
        this_node = ray.get_runtime_context().get_node_id()
        other_nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != this_node]
        if other_nodes:
            node_affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            end_remotely = ray.remote(num_cpus=0, max_retries=0)(end_local_processes)
            strategies = [node_affinity(node, soft=False) for node in other_nodes]
            calls = [end_remotely.options(scheduling_strategy=strategy).remote(run) for strategy in strategies]
            # A crashed machine does not answer, but has no running processes either. The timeout ends the wait.
            ray.wait(calls, num_returns=len(calls), timeout=REMOTE_TIMEOUT_SECONDS)


def pickle_job(ray: Any, job: ActorJob) -> bytes:
    """Pickle the job with the code of user files, because other processes cannot import user files by name."""
    for module in [module for name, module in sys.modules.items() if name.startswith(USER_MODULE_PREFIX)]:
        ray.cloudpickle.register_pickle_by_value(module)
    return bytes(ray.cloudpickle.dumps(job))


def _describe_ray_error(ray: Any, error: BaseException) -> str:
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    if "No module named 'gradcam" in str(error):
        remedy = 'On every machine, run in a clone of gradcam: pip install ".[ray]"'
        return f"gradcam is missing on a machine of the cluster. {remedy}"
    actor_errors = (ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError, ray.exceptions.OutOfMemoryError)
    if isinstance(error, actor_errors):
        causes = "a lost machine, too little memory, or an image that crashes the process"
        reason = shorten(lines[0] if lines else error)
        return f"A Ray actor crashed again after {MAX_RETRIES} retries. Possible causes: {causes} (Ray: {reason})."
    cause = getattr(error, "cause", None)  # Prefer the message of the cause: Ray's message ends in general advice.
    last_line = lines[-1] if lines else type(error).__name__
    return f"Ray stopped the run: {describe_unexpected(cause) if isinstance(cause, Exception) else last_line}"
