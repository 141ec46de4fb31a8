"""Explain in several worker processes of this machine, on one or more devices. The main process writes the manifest.

If the CPU decodes images for a GPU, several processes are faster than one, because the threads of one process would
wait for Python's global lock. If the model runs on the CPU, one process is faster: all cores share the work on each
layer, and meanwhile read the next images.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from types import FunctionType
from typing import Any

from gradcam import plugins
from gradcam.batch.actor import Actor, ActorJob, ActorReply, Load, explain_blocks, pack_blocks, to_job
from gradcam.batch.compute import LogEvent
from gradcam.batch.end_processes import end_local_processes
from gradcam.batch.engine import BatchWork, IsNeeded, OnLeftover, Reports
from gradcam.batch.save import Saver
from gradcam.errors import DeviceError, GradcamError, to_pip_command
from gradcam.options import count_cores

# The number of blocks that are sent to a process in advance, so that it never waits for the next block.
MAX_BLOCKS_PER_PROCESS = 2
# The number of blocks per process that may be sent before the current block is done. It limits the number of replies
# that wait in memory for a slower process.
MAX_BLOCKS_AHEAD = 8
# The time for a terminated process to exit.
EXIT_TIMEOUT_SECONDS = 10
INTERRUPT_SIGNALS = {signal.SIGINT}
END_OF_BLOCK = b""  # Marks the end of a block in the replies.


@dataclass(frozen=True)
class ProcessEngine:
    """An `Engine` with one process per device.

    A device may be listed more than once. Reports come in the order of the items.

    `load` loads the model on the device with the given name. `workers` is the number of threads per model; None divides
    the cores equally. Raises `DeviceError` if a process ends unexpectedly.
    """

    load: Load
    devices: Sequence[str]
    workers: int | None = None

    def __call__(
        self, work: BatchWork, saver: Saver, *, is_needed: IsNeeded, log_event: LogEvent, on_leftover: OnLeftover = None
    ) -> Reports:
        """Explain images as an `Engine` does.

        If the run stops early, a resumed run repeats the images whose reports have not reached this process.
        """
        blocks = pack_blocks(work, saver, is_needed, len(self.devices))
        if not blocks:
            return
        job = to_job(self.load, work, saver, self.devices[0], self.workers)
        log_event("engine", engine="processes", devices=list(self.devices))
        cores = max(1, count_cores() // len(self.devices))
        jobs = [replace(job, device=device) for device in self.devices[: len(blocks)]]
        try:
            with _started_workers(jobs, cores) as processes:
                stream = partial(_stream_replies, processes)
                yield from explain_blocks(work, saver, blocks, stream, log_event=log_event, on_leftover=on_leftover)
        finally:
            end_local_processes(job.run)


@dataclass(eq=False)
class _Worker:
    """A worker process, and the numbers of the blocks that it has received."""

    device: str
    process: Any
    connection: Connection
    blocks: deque[int] = field(default_factory=deque)

    def receive(self) -> bytes:
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            self.process.join(EXIT_TIMEOUT_SECONDS)
            code = self.process.exitcode
            exit_reason = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
            gpu_hint = "a lost GPU, " if self.device.startswith("cuda") else ""
            causes = f"{gpu_hint}too little memory, or an image that crashes the process"
            problem = f"{self.device}: a worker process ended ({exit_reason}). Possible causes: {causes}"
            raise DeviceError(f"{problem}. Continue with --resume.") from None


@contextlib.contextmanager
def _started_workers(jobs: Sequence[ActorJob], cores: int) -> Iterator[list[_Worker]]:
    context = multiprocessing.get_context("spawn")  # A forked process cannot use CUDA.
    processes: list[_Worker] = []
    try:
        for job in jobs:
            own_end, worker_end = context.Pipe()
            arguments = (worker_end, pickle_job(job), job.device, cores, plugins.list_files())
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with _interrupts_blocked():
                process.start()
            worker_end.close()  # Otherwise this process would not notice that the worker has ended.
            processes.append(_Worker(job.device, process, own_end))
        yield processes
    finally:
        for worker in processes:
            worker.process.terminate()
        for worker in processes:
            worker.process.join(EXIT_TIMEOUT_SECONDS)
            worker.process.kill()
            worker.process.join()


def pickle_job(job: ActorJob) -> bytes:
    """Pickle the job. Raises `GradcamError` if the job needs cloudpickle and it is not installed.

    Without cloudpickle, functions are sent by name. This fails for lambdas, inner functions, functions of scripts and
    notebooks, and functions that the decorator `gradcam.method` has replaced by a method.
    """
    with contextlib.suppress(ImportError):
        import cloudpickle

        return bytes(cloudpickle.dumps(job))
    file, remedy = io.BytesIO(), to_pip_command("processes")
    try:
        _Pickler(file).dump(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise GradcamError(f"Your own code in several processes needs cloudpickle: {remedy} ({error})") from None
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler that rejects objects of scripts and notebooks, because worker processes have another `__main__`."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (FunctionType, type)) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in __main__")
        return NotImplemented


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl+C while a process is spawned.

    The process itself ignores Ctrl+C only after its imports, which take seconds.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    # The tracker unblocks the signals when it starts, so it has to run before they are blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPT_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stream_replies(processes: Sequence[_Worker], blocks: Sequence[bytes]) -> Generator[ActorReply, None, None]:
    """Yield the replies in the order of the blocks, each as soon as all earlier ones have been yielded."""
    replies: list[deque[bytes]] = [deque() for _ in blocks]
    sent = current = 0
    while current < len(blocks):
        for worker in processes:
            max_sent = min(len(blocks), current + MAX_BLOCKS_AHEAD * len(processes))
            while sent < max_sent and len(worker.blocks) < MAX_BLOCKS_PER_PROCESS:
                worker.blocks.append(sent)
                with contextlib.suppress(OSError):  # If the process has ended, `receive` raises an error below.
                    worker.connection.send_bytes(blocks[sent])
                sent += 1
        busy = {worker.connection: worker for worker in processes if worker.blocks}
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]  # `wait` returns only connections from its argument.
            replies[worker.blocks[0]].append(worker.receive())
            if replies[worker.blocks[0]][-1] == END_OF_BLOCK:
                worker.blocks.popleft()
        while current < len(blocks) and replies[current]:
            reply = replies[current].popleft()
            if reply == END_OF_BLOCK:
                current += 1
            else:
                yield pickle.loads(reply)


def _serve(connection: Connection, job: bytes, device: str, cores: int, files: Sequence[str]) -> None:
    """Run in a worker process: send the replies to each block until the connection closes."""
    # The parent process receives Ctrl+C as well, and terminates this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPT_SIGNALS)
    blocks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive_blocks, args=(connection, blocks), daemon=True).start()
    plugins.load_files(files)
    if device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(device)
    actor = Actor(job, cores)
    while True:
        for row in actor({"block": [blocks.get()]}):
            connection.send_bytes(row["answer"][0])
        connection.send_bytes(END_OF_BLOCK)


def _receive_blocks(connection: Connection, blocks: queue.SimpleQueue[bytes]) -> None:
    """Receive blocks immediately, so that the sender never waits. Exit the process when the sender has ended."""
    try:
        while True:
            blocks.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)
