"""Run the model on batches of preprocessed images, in parts that fit into memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from gradcam.batch.read_items import ReadItem, receive
from gradcam.errors import GradcamError, ImageError, describe_failure
from gradcam.hooks.memory import is_out_of_memory
from gradcam.models.device import check_device
from gradcam.models.preprocess import Prepared
from gradcam.options import count_cores

ItemT = TypeVar("ItemT")
OutputT = TypeVar("OutputT")
ResultT = TypeVar("ResultT")
Process = Callable[[Sequence[ItemT]], Sequence[OutputT]]
Fallback = Callable[[ItemT, BaseException], OutputT]


# The type of a function with the parameters (pictures, classes=None). The function runs the model on images of equal
# size, and returns a result or an error for each image.
BatchFunction = Callable[..., Sequence[ResultT | GradcamError]]
LogEvent = Callable[..., None]  # The type of a function (event, **details) that writes an event to the log.


def drop_event(event: str, **details: Any) -> None:
    """Ignore the event."""


@dataclass
class Stage:
    """A processing step that divides its items into parts that fit into the device's memory.

    If a single item does not fit, or if its processing fails, a fallback function computes its output. If the stage has
    a `name`, each use of the fallback is logged.
    """

    name: str
    device: torch.device
    log_event: LogEvent
    max_images: int = 2**10  # The maximum number of images per part.
    max_bytes: int = 2**28  # The maximum number of bytes of pixels per part.

    def run(
        self,
        process: Process[ItemT, OutputT],
        items: Sequence[ItemT],
        fallback: Fallback[ItemT, OutputT],
        count_bytes: Callable[[ItemT], int] = lambda item: 0,
    ) -> list[OutputT]:
        """Return one output per item. If `process` fails for an item, `fallback` computes the output.

        `count_bytes` returns the number of bytes of an item. Raises `DeviceError` if the device is lost.
        """
        outputs: list[OutputT] = []
        while len(outputs) < len(items):
            start = len(outputs)
            size = min(self.max_images, max(1, self.max_bytes // max(1, count_bytes(items[start]))))
            outputs += self._run_part(process, items[start : start + size], fallback)
        return outputs

    def _run_part(
        self, process: Process[ItemT, OutputT], part: Sequence[ItemT], fallback: Fallback[ItemT, OutputT]
    ) -> Sequence[OutputT]:
        names = {"stage": self.name} if self.name else {}
        try:
            return process(part)
        except (Exception, SystemExit) as error:
            check_device(self.device, error)
            lacks_memory = is_out_of_memory(error)
            outputs = [fallback(part[0], error)] if len(part) == 1 else []
        # Free memory after the except block, because the error's traceback keeps tensors alive inside the block.
        if lacks_memory:
            gc.collect()
            torch.cuda.empty_cache()  # Does nothing without CUDA.
        if outputs and self.name:
            self.log_event("moved to the CPU", **names, why="out of memory" if lacks_memory else "refused")
        elif lacks_memory and not outputs:
            self.max_images = len(part) // 2
            self.log_event("out of memory", **names, pictures=len(part), from_now_on=self.max_images)
            return self._run_part(process, part[: self.max_images], fallback)
        # If the part failed for another reason, process each item alone, so that only the faulty item fails.
        return outputs or [output for item in part for output in self._run_part(process, [item], fallback)]


class BatchExplainer(Generic[ResultT]):
    """Explains batches in parts that fit into memory. If a part does not fit, all later parts are smaller."""

    def __init__(
        self, run_batch: BatchFunction[ResultT], device: torch.device, *, max_size: int, log_event: LogEvent
    ) -> None:
        self._run_batch, self._device, self._cores = run_batch, device, count_cores()
        self._stage = Stage("", device, log_event, max_size)

    def explain(self, batch: Sequence[ReadItem]) -> list[ResultT | GradcamError]:
        """Return a result or an error for each image, in the order of the batch."""
        images = [read for read in batch if isinstance(read.picture, Prepared)]
        with contextlib.ExitStack() as stack:
            if (before := torch.get_num_threads()) > self._cores:  # PyTorch ignores container CPU quotas.
                torch.set_num_threads(self._cores)
                stack.callback(torch.set_num_threads, before)
            outputs = map_groups(images, _find_group, lambda group: self._stage.run(self._run_part, group, _to_error))
        results = dict(zip(images, outputs))
        return [results[read] if read in results else cast(GradcamError, read.picture) for read in batch]

    def _run_part(self, part: Sequence[ReadItem]) -> list[ResultT | GradcamError]:
        images = [receive(cast(Prepared, read.picture), self._device) for read in part]
        # In each group, all images request a class, or no image requests a class.
        classes = [read.wanted for read in part if read.wanted is not None]
        pairs = zip(part, self._run_batch(images, classes=classes or None))
        return [_to_error(read, result) if isinstance(result, GradcamError) else result for read, result in pairs]


def map_groups(items: Sequence[ItemT], key: Callable[[ItemT], Any], process: Process[ItemT, OutputT]) -> list[OutputT]:
    """Return one output per item, in order. Call `process` once for each group of items with equal keys."""
    groups: dict[object, list[int]] = {}
    for position, item in enumerate(items):
        groups.setdefault(key(item), []).append(position)
    outputs: dict[int, OutputT] = {}
    for positions in groups.values():
        outputs.update(zip(positions, process([items[position] for position in positions])))
    return [outputs[position] for position in range(len(items))]


def _find_group(read: ReadItem) -> object:
    """Return a key that is equal for images that can share a batch.

    Images with a requested class do not share a batch with images without a requested class.
    """
    image = cast(Prepared, read.picture).image
    return image.shape, image.dtype, read.wanted is None


def _to_error(read: ReadItem, error: BaseException) -> GradcamError:
    """Return a new error that names the image, because the traceback of `error` would keep tensors alive."""
    name = read.fetched.item.name
    if is_out_of_memory(error):
        advice = "use a smaller model, a layer or method that needs less memory, or a device with more memory"
        return ImageError(f"{name}: does not fit into memory, even at batch size 1: {advice}")
    return GradcamError(describe_failure(name, error))
