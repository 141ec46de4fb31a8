"""Explain images in several worker processes of this machine, on one or more devices.

The main process writes the manifest. If the CPU decodes images for a GPU, several processes are faster, because the
threads of one process would wait for Python's global interpreter lock. If the model runs on the CPU, one process is
faster, because all cores share the work on each layer.
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

# The maximum number of unfinished blocks per process. With two blocks, a process never waits for its next block.
MAX_BLOCKS_PER_PROCESS = 2
# Replies are yielded in the order of the blocks, so replies of fast processes may wait in memory for a slow process.
# Until all replies to the first unfinished block have arrived, at most this number of blocks per process is sent.
MAX_BLOCKS_AHEAD = 8
# The maximum wait for a terminated process to exit.
EXIT_TIMEOUT_SECONDS = 10
INTERRUPT_SIGNALS = {signal.SIGINT}
END_OF_BLOCK = b""  # A worker process sends this value after its last reply to a block.


@dataclass(frozen=True)
class ProcessEngine:
    """An `Engine` that runs one worker process for each item of `devices`.

    A device may be listed several times. Reports are yielded in the order of the images. `load` is a function that
    takes a device name and returns the model. `workers` is the number of threads per model. None divides the cores
    equally between the processes. Raises `DeviceError` if a process ends unexpectedly.
    """

    load: Load
    devices: Sequence[str]
    workers: int | None = None

    def __call__(
        self, work: BatchWork, saver: Saver, *, is_needed: IsNeeded, log_event: LogEvent, on_leftover: OnLeftover = None
    ) -> Reports:
        """Explain images as an `Engine` does.

        If the run stops early, the reports that have not reached this process are lost. A resumed run explains their
        images again.
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
    """A worker process, and the numbers of its unfinished blocks."""

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
            worker_end.close()  # If this process kept its copy open, `recv_bytes` would not fail when the worker ends.
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
    """Pickle the job. Raises `GradcamError` if the job needs cloudpickle, but cloudpickle is not installed.

    Without cloudpickle, functions are pickled by name. Pickling by name fails for lambdas, inner functions, and
    functions of scripts and notebooks. Pickling by name also fails for functions that the decorator `gradcam.method`
    has replaced by a method.
    """
    with contextlib.suppress(ImportError):
        import cloudpickle

        return bytes(cloudpickle.dumps(job))
    file, remedy = io.BytesIO(), to_pip_command("processes")
    try:
        _Pickler(file).dump(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        problem = "To run your own code in several processes, install cloudpickle"
        raise GradcamError(f"{problem}: {remedy} ({error})") from None
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler that rejects objects of scripts and notebooks, because worker processes have another `__main__`."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (FunctionType, type)) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in __main__")
        return NotImplemented


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl+C (SIGINT) while a process is spawned. The new process inherits the block.

    The new process can ignore Ctrl+C only after its imports, which take seconds.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    # When multiprocessing's resource tracker starts, it unblocks signals. Start the tracker before blocking signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPT_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stream_replies(processes: Sequence[_Worker], blocks: Sequence[bytes]) -> Generator[ActorReply, None, None]:
    """Send the blocks to the worker processes, and yield the replies in the order of the blocks."""
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
    """Explain blocks in a worker process, and send the replies, until the connection closes."""
    # Ignore Ctrl+C, because the parent process also receives Ctrl+C, and terminates this process.
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
