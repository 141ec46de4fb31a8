"""Run the model on batches of preprocessed images, in parts that fit into memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from gradcam.batch.read_items import ReadItem, receive
from gradcam.errors import GradcamError, ImageError, describe_failure
from gradcam.hooks.memory import is_out_of_memory
from gradcam.models.device import check_device
from gradcam.models.preprocess import Prepared
from gradcam.options import count_cores

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class BatchFunction(Protocol[ResultT_co]):
    """A function that runs the model on a batch of images of equal size, and returns a result or an error for each."""

    def __call__(
        self, pictures: Sequence[Prepared], *, classes: Sequence[int] | None
    ) -> Sequence[ResultT_co | GradcamError]: ...


class LogEvent(Protocol):
    """A callback that receives the name and the details of an event, for the log."""

    def __call__(self, event: str, **details: Any) -> None: ...


class BatchExplainer(Generic[ResultT]):
    """Explains batches in parts that fit into memory. If a part does not fit, all later parts are smaller."""

    def __init__(
        self, run_batch: BatchFunction[ResultT], device: torch.device, *, max_size: int, log_event: LogEvent
    ) -> None:
        self._run_batch, self._device, self._max_size, self._log_event = run_batch, device, max_size, log_event
        self._cores = count_cores()

    def explain(self, batch: Sequence[ReadItem]) -> list[ResultT | GradcamError]:
        """Return a result or an error for each image, in the order of the batch."""
        # Group the images that can be stacked. Images with a requested class are separate from images without one.
        groups: dict[object, list[ReadItem]] = {}
        for read in batch:
            if isinstance(read.picture, Prepared):
                image = read.picture.image
                groups.setdefault((image.shape, image.dtype, read.wanted is None), []).append(read)
        results: dict[ReadItem, ResultT | GradcamError] = {}
        with contextlib.ExitStack() as stack:
            if (before := torch.get_num_threads()) > self._cores:  # PyTorch ignores container CPU quotas.
                torch.set_num_threads(self._cores)
                stack.callback(torch.set_num_threads, before)
            for group in groups.values():
                group_results: list[ResultT | GradcamError] = []
                while len(group_results) < len(group):
                    group_results += self._run_part(group[len(group_results) : len(group_results) + self._max_size])
                results.update(zip(group, group_results))
        return [results[read] if read in results else cast(GradcamError, read.picture) for read in batch]

    def _run_part(self, part: Sequence[ReadItem]) -> list[ResultT | GradcamError]:
        """Return the results of one part of a batch, or an empty list if it does not fit into memory.

        The caller then continues with smaller parts.
        """
        try:
            images = [receive(read.picture, self._device) for read in part if isinstance(read.picture, Prepared)]
            # Within a group, either all images request a class or none does.
            classes = [read.wanted for read in part if read.wanted is not None]
            results = self._run_batch(images, classes=classes or None)
            return [
                _to_error(read, result) if isinstance(result, GradcamError) else result
                for read, result in zip(part, results)
            ]
        except (Exception, SystemExit) as error:
            check_device(self._device, error)
            lacks_memory = is_out_of_memory(error)
            failure = _to_error(part[0], error) if len(part) == 1 else None
        # Free memory outside the except block, because the error's traceback keeps tensors alive.
        if lacks_memory:
            gc.collect()
            torch.cuda.empty_cache()  # Does nothing without CUDA.
        if failure is not None:
            return [failure]
        if lacks_memory:
            self._max_size = len(part) // 2
            self._log_event("out of memory", pictures=len(part), from_now_on=self._max_size)
            return []
        # Run the images one by one, so that only the image at fault fails.
        return [result for read in part for result in self._run_part([read])]


def _to_error(read: ReadItem, error: BaseException) -> GradcamError:
    """Return a new error that names the image. The traceback of the original error would keep tensors alive."""
    name = read.fetched.item.name
    if is_out_of_memory(error):
        advice = "use a smaller model, a layer or method that needs less memory, or a device with more memory"
        return ImageError(f"{name}: does not fit into memory, even at batch size 1: {advice}")
    return GradcamError(describe_failure(name, error))
