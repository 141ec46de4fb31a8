"""What maps are judged on: pictures, a model, and how probable it finds the explained classes in variants of them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.batch.shortage import is_out_of_memory
from gradcam.classifiers.explanation import to_probabilities
from gradcam.errors import ImageError, ModelError, TargetError, shorten
from gradcam.indices import check_classes
from gradcam.isolation import undisturbed
from gradcam.layers import unwrap

BATCH = 32  # variants in one pass of the model, halved where they do not fit


class Subject:
    """N images, a model, and one class of each: what the maps of any method, of any library, are judged on.

    `images`: (N,C,H,W), preprocessed. `classes`: an int for all, N ints, or None for each image's most probable one.
    `activation`: how logits become probabilities, a key of `choices.ACTIVATIONS`. `batch_size`: images in one pass.
    What all methods share, the probabilities of the images themselves, is computed once, here.

    `all_probabilities`: float32 (N,C) of all classes; `classes`: int64 (N,); `probabilities`: float32 (N,), of those.
    All are on the images' device. The model runs in evaluation mode and is left as it was.

    Raises `ImageError` for images of another form, `TargetError` for classes that do not fit, `ModelError` where the
    output is NaN.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        classes: Any = None,
        *,
        activation: str = "auto",
        batch_size: int = BATCH,
    ) -> None:
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point() or not len(images):
            raise ImageError(f"The images are {_describe(images)}, expected a floating tensor (N,C,H,W), preprocessed.")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ImageError(
                f"batch_size is {shorten(batch_size)}, expected how many images to compute at once, 1 or more."
            )
        self.model = unwrap(model)
        self.images = images.detach()
        self.activation = activation
        self._batch_size = batch_size
        with undisturbed(self.model), torch.no_grad():
            parts = [self._probabilities(part) for part in self.images.split(batch_size)]
        self.all_probabilities = torch.cat(parts)
        self.classes = self._choose(classes)
        self.probabilities = self.all_probabilities.gather(1, self.classes[:, None])[:, 0]

    @property
    def size(self) -> tuple[int, int, int]:
        """(N,H,W), which is the shape of the images' heatmaps."""
        return (len(self.images), *self.images.shape[2:])

    def score(self, variants: Iterable[Tensor]) -> Tensor:
        """The classes' probabilities in V variants of the images, each (N,C,H,W): float32 (V,N).

        Variants are taken as they are needed, and computed in batches.
        """
        found: list[Tensor] = []
        waiting: list[Tensor] = []
        rows = 0
        with undisturbed(self.model), torch.no_grad():
            for variant in variants:
                for part in variant.split(self._batch_size):
                    if waiting and rows + len(part) > self._batch_size:
                        found.append(self._run(waiting))
                        waiting, rows = [], 0
                    waiting.append(part)
                    rows += len(part)
            if waiting:
                found.append(self._run(waiting))
        if not found:
            return self.probabilities.new_empty(0, len(self.images))
        probabilities = torch.cat(found)
        classes = self.classes.repeat(len(probabilities) // len(self.images))
        return probabilities.gather(1, classes[:, None]).reshape(-1, len(self.images))

    def _run(self, parts: Sequence[Tensor]) -> Tensor:
        return self._probabilities(torch.cat(list(parts)) if len(parts) > 1 else parts[0])

    def _probabilities(self, images: Tensor) -> Tensor:
        """All classes' probabilities; where memory is short, of smaller parts from now on."""
        try:
            found = to_probabilities(self.model(images), len(images), self.activation).float()
        except Exception as error:
            if not is_out_of_memory(error) or len(images) == 1:
                raise
            self._batch_size = len(images) // 2
        else:
            if not found.isfinite().all():
                raise ModelError(
                    "The model's output is NaN or infinite in places: look at its weights, and the images."
                )
            return found
        # Outside of the handler: the error's traceback keeps tensors alive.
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no CUDA
        return torch.cat([self._probabilities(part) for part in images.split(self._batch_size)])

    def _choose(self, classes: Any) -> Tensor:
        if classes is None:
            return self.all_probabilities.argmax(1)
        found = check_classes(classes, *self.all_probabilities.shape)
        if found.shape[1] != 1:
            raise TargetError(f"There are {found.shape[1]} classes of each image, expected one: judge them one by one.")
        return found[:, 0].to(self.images.device)


def _describe(images: object) -> str:
    return f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else shorten(images)
