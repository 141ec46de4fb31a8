"""The one place where the model runs: a batch of pictures that were read, and what is found in each."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from gradcam.batch.read import Read, receive
from gradcam.errors import GradcamError, ImageError, describe_failure
from gradcam.hooks.memory import is_out_of_memory
from gradcam.models.device import check_device
from gradcam.models.preprocess import Prepared
from gradcam.options import count_cores

Found = TypeVar("Found")
Found_co = TypeVar("Found_co", covariant=True)


class Find(Protocol[Found_co]):
    """What runs the model on pictures of one size, in one batch: what is found in each, or why that is nothing."""

    def __call__(
        self, pictures: Sequence[Prepared], *, classes: Sequence[int] | None
    ) -> Sequence[Found_co | GradcamError]: ...


class Tell(Protocol):
    """Somebody who hears of what happens: the name of the event, and its details."""

    def __call__(self, event: str, **details: Any) -> None: ...


class BatchExplainer(Generic[Found]):
    """Explains batches, in parts that fit into memory: once one did not, the parts are smaller from then on."""

    def __init__(self, find: Find[Found], device: torch.device, *, largest: int, tell: Tell) -> None:
        self._find, self._device, self._largest, self._tell = find, device, largest, tell
        self._cores = count_cores()

    def explain(self, batch: Sequence[Read]) -> list[Found | GradcamError]:
        """What is found in each picture, in the batch's order; an error, with its name, for each that has none."""
        groups: dict[object, list[Read]] = {}  # of pictures that fit into one tensor and one question
        for each in batch:
            if isinstance(each.picture, Prepared):
                image = each.picture.image
                groups.setdefault((image.shape, image.dtype, each.wanted is None), []).append(each)
        results: dict[Read, Found | GradcamError] = {}
        with contextlib.ExitStack() as stack:
            if (before := torch.get_num_threads()) > self._cores:  # PyTorch does not know of quotas
                torch.set_num_threads(self._cores)
                stack.callback(torch.set_num_threads, before)
            for group in groups.values():
                found: list[Found | GradcamError] = []
                while len(found) < len(group):
                    found += self._try(group[len(found) : len(found) + self._largest])
                results.update(zip(group, found))
        return [results[each] if each in results else cast(GradcamError, each.picture) for each in batch]

    def _try(self, part: Sequence[Read]) -> list[Found | GradcamError]:
        """What is found in the part; nothing if it does not fit into memory, and smaller parts have to be tried."""
        try:
            pictures = [receive(each.picture, self._device) for each in part if isinstance(each.picture, Prepared)]
            classes = [each.wanted for each in part if each.wanted is not None]  # all of a group, or none
            found = self._find(pictures, classes=classes or None)
            return [_fail(each, it) if isinstance(it, GradcamError) else it for each, it in zip(part, found)]
        except (Exception, SystemExit) as error:
            check_device(self._device, error)
            lacks_memory = is_out_of_memory(error)
            failure = _fail(part[0], error) if len(part) == 1 else None
        # Outside of the handler: the error's traceback keeps tensors alive.
        if lacks_memory:
            gc.collect()
            torch.cuda.empty_cache()  # does nothing where there is no CUDA
        if failure is not None:
            return [failure]
        if lacks_memory:
            self._largest = len(part) // 2
            self._tell("out of memory", pictures=len(part), from_now_on=self._largest)
            return []
        return [found for each in part for found in self._try([each])]  # only whose fault it is fails


def _fail(each: Read, error: BaseException) -> GradcamError:
    """An error for that picture. A new one: one that was raised would keep all that its traceback refers to."""
    name = each.fetched.item.name
    if is_out_of_memory(error):
        advice = "use a smaller model, a layer or method that needs less memory, or a device with more memory"
        return ImageError(f"{name}: does not fit into memory, even at batch size 1: {advice}")
    return GradcamError(describe_failure(name, error))
