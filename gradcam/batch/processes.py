"""The engine in several processes of this machine, on one device or on several; this one keeps the manifest of all.

On a GPU that has its pixels from the processor, threads of one process wait for Python's lock, and these do not. On a
processor it is one process that is faster: its cores work on one layer, and on another batch's pictures."""

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
from multiprocessing.connection import Connection, wait
from types import FunctionType
from typing import Any

from gradcam import plugins
from gradcam.batch.compute import Tell
from gradcam.batch.engine import Late, Needed, Reports, Work
from gradcam.batch.ray.actor import Actor, ActorJob, Load, pack, pack_again, pass_on, to_blocks, to_job
from gradcam.batch.ray.ending import end_here
from gradcam.batch.save import Saver
from gradcam.errors import DeviceError, GradcamError, to_pip_command
from gradcam.options import count_cores

AT_ONCE = 2  # blocks that a process has, so that it need not wait for the next
AHEAD = 8  # blocks for each process that may be done before their turn, as another one is slow
SECONDS = 10  # for a process to end that was told to
INTERRUPTS = {signal.SIGINT}
END = b""  # of a block, among its answers


@dataclass(frozen=True)
class ProcessEngine:
    """An `Engine` of one process for each of these devices, of which one may be there more than once; their answers come
    back in order. `load`: the model, on the device of a name. `workers`: threads beside each model; None for the cores in
    equal shares. Raises `DeviceError` where one of the processes ends."""

    load: Load
    devices: Sequence[str]
    workers: int | None = None

    def __call__(self, work: Work, saver: Saver, *, is_needed: Needed, tell: Tell, late: Late = None) -> Reports:
        """See `Engine`; what was finished, and nobody here has heard of yet, is done again by whoever goes on."""
        blocks = [pack(block) for block in to_blocks(work, saver.stems, is_needed, len(self.devices))]
        if not blocks:
            return
        job = to_job(self.load, work, saver, self.devices[0], self.workers)
        tell("engine", engine="processes", devices=list(self.devices))
        cores = max(1, count_cores() // len(self.devices))
        jobs = [replace(job, device=device) for device in self.devices[: len(blocks)]]
        try:
            with _started(jobs, cores) as processes:
                unanswered: set[str] = set()
                for packed in _stream(processes, blocks):
                    yield from pass_on(pickle.loads(packed), tell, late, unanswered)
                for packed in _stream(processes, pack_again(work, saver, unanswered)):
                    yield from pass_on(pickle.loads(packed), tell, late, set())
        finally:
            end_here(job.run)


@dataclass(eq=False)
class _Process:
    """One of them, and the numbers of the blocks that it has."""

    device: str
    process: Any
    connection: Connection
    blocks: deque[int] = field(default_factory=deque)

    def receive(self) -> bytes:
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            self.process.join(SECONDS)
            code = self.process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
            lost = "a lost GPU, " if self.device.startswith("cuda") else ""
            raise DeviceError(
                f"{self.device}: a worker process ended ({how}). Possible causes: {lost}too little memory, or an image that "
                "crashes the process. Continue with --resume."
            ) from None


@contextlib.contextmanager
def _started(jobs: Sequence[ActorJob], cores: int) -> Iterator[list[_Process]]:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    processes: list[_Process] = []
    try:
        for job in jobs:
            ours, theirs = context.Pipe()
            given = (theirs, dump(job), job.device, cores, plugins.list_files())
            process = context.Process(target=_serve, args=given, daemon=True)
            with _without_interrupts():
                process.start()
            theirs.close()  # or its end would not be noticed
            processes.append(_Process(job.device, process, ours))
        yield processes
    finally:
        for each in processes:
            each.process.terminate()
        for each in processes:
            each.process.join(SECONDS)
            each.process.kill()
            each.process.join()


def dump(job: ActorJob) -> bytes:
    """Pickle the job. Raises `GradcamError` if an object in it needs cloudpickle, which is not installed.

    pickle refers to functions by name, so it cannot send lambdas, inner functions, functions of a script or a notebook, and
    functions whose name is that of the method made from them (`gradcam.method`).
    """
    try:
        import cloudpickle
    except ImportError:
        file = io.BytesIO()
        try:
            _Pickler(file).dump(job)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise GradcamError(
                f"Your own code in several processes needs cloudpickle: {to_pip_command('processes')} ({error})"
            ) from None
        return file.getvalue()
    packed: bytes = cloudpickle.dumps(job)
    return packed


class _Pickler(pickle.Pickler):
    """Refuses what a script or a notebook defines: in another process, `__main__` is another module."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (FunctionType, type)) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in __main__")
        return NotImplemented


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Who is started within hears no Ctrl+C, until it says that it ignores it: importing torch takes seconds."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # which lets them through, when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stream(processes: Sequence[_Process], blocks: Sequence[bytes]) -> Generator[bytes, None, None]:
    """The answers, in the order of the blocks, each as soon as all before are there."""
    answers: list[deque[bytes]] = [deque() for _ in blocks]
    sent = now = 0
    while now < len(blocks):
        for each in processes:
            while sent < len(blocks) and len(each.blocks) < AT_ONCE and sent < now + AHEAD * len(processes):
                each.blocks.append(sent)
                with contextlib.suppress(OSError):  # it has ended, which is noticed below
                    each.connection.send_bytes(blocks[sent])
                sent += 1
        busy = {each.connection: each for each in processes if each.blocks}
        for connection in wait(list(busy)):
            each = busy[connection]  # type: ignore[index]  # it is one of those that were given
            answers[each.blocks[0]].append(each.receive())
            if answers[each.blocks[0]][-1] == END:
                each.blocks.popleft()
        while now < len(blocks) and answers[now]:
            answer = answers[now].popleft()
            if answer == END:
                now += 1
            else:
                yield answer


def _serve(connection: Connection, job: bytes, device: str, cores: int, files: Sequence[str]) -> None:
    """What runs in a process: the answers to each block, until there is nobody to tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this hears of it too, and ends this
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    blocks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, blocks), daemon=True).start()
    plugins.load_files(files)
    if device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(device)
    actor = Actor(job, cores)
    while True:
        for row in actor({"block": [blocks.get()]}):
            connection.send_bytes(row["answer"][0])
        connection.send_bytes(END)


def _listen(connection: Connection, blocks: queue.SimpleQueue[bytes]) -> None:
    """Take what is sent at once, so that nobody waits who has an answer to take; and end with who sends it."""
    try:
        while True:
            blocks.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)
