"""What maps are judged on: pictures, a model, and how probable it finds the explained classes in variants of them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.batch.shortage import is_out_of_memory
from gradcam.classifiers.explanation import to_probabilities
from gradcam.errors import ImageError, ModelError, TargetError, shorten
from gradcam.evaluation.baselines import make_baseline
from gradcam.indices import check_classes
from gradcam.isolation import undisturbed
from gradcam.layers import unwrap
from gradcam.perturbation.options import check_integer

# In one pass of the model. On a processor larger batches take longer, since what lies between two layers leaves its caches.
PIXELS = 32 * 224 * 224
PIXELS_ON_CPU = 4 * 224 * 224


class Subject:
    """N images, a model, and one class of each: what the maps of any method, of any library, are judged on.

    `images`: (N,C,H,W), preprocessed. `classes`: an int for all, N ints, or None for each image's most probable one.
    `activation`: how logits become probabilities, a key of `choices.ACTIVATIONS`. `batch_size`: images in one pass, None for
    as many as are fast; halved where they do not fit into memory.
    What all methods share, the probabilities of the images and of baselines, is computed once, here.

    `all_probabilities`: float32 (N,C) of all classes; `classes`: int64 (N,); `probabilities`: float32 (N,), of those.
    All are on the images' device. The model runs in evaluation mode and is left as it was.

    Raises `ImageError` for images of another form, `TargetError` for classes that do not fit, `ModelError` where the
    output is NaN or infinite, and `GradcamError` for a batch size that is none.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        classes: Any = None,
        *,
        activation: str = "auto",
        batch_size: int | None = None,
    ) -> None:
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point() or not len(images):
            raise ImageError(f"The images are {_describe(images)}, expected a floating tensor (N,C,H,W), preprocessed.")
        if batch_size is not None:
            check_integer("Subject", "batch_size", batch_size, 1)
        self.model = unwrap(model)
        self.images = images.detach()
        self.activation = activation
        self._batch_size = _fit_batch(images) if batch_size is None else batch_size
        self._baselines: dict[str, Tensor] = {}
        self._of_baselines: dict[str, Tensor] = {}
        with undisturbed(self.model), torch.no_grad():
            parts = list(self._run([self.images]))
        self.all_probabilities = _require_finite(torch.cat(parts))
        self.classes = self._choose(classes)
        self.probabilities = self.all_probabilities.gather(1, self.classes[:, None])[:, 0]

    @property
    def size(self) -> tuple[int, int, int]:
        """(N,H,W), which is the shape of the images' heatmaps."""
        return (len(self.images), *self.images.shape[2:])

    def baseline(self, kind: str) -> Tensor:
        """What hides the images' pixels (N,C,H,W), as `make_baseline` makes it, which says what it raises; made once."""
        if not isinstance(kind, str) or kind not in self._baselines:
            self._baselines[kind] = make_baseline(self.images, kind)
        return self._baselines[kind]

    def baseline_probabilities(self, kind: str) -> Tensor:
        """The classes' probabilities in the baseline alone: float32 (N,); computed once. Raises as `baseline` does."""
        baseline = self.baseline(kind)
        if kind not in self._of_baselines:
            (self._of_baselines[kind],) = self.score([baseline])
        return self._of_baselines[kind]

    def score(self, variants: Iterable[Tensor]) -> Tensor:
        """The classes' probabilities in V variants of the images, each (N,C,H,W): float32 (V,N).

        Variants are taken as they are needed, and computed in batches. Raises `ImageError` for one of another shape, and
        `ModelError` where a probability is NaN.
        """
        classes = cycle(self.classes.split(1))
        with undisturbed(self.model), torch.no_grad():
            parts = [
                probabilities.gather(1, torch.cat(list(islice(classes, len(probabilities))))[:, None])
                for probabilities in self._run(variants)
            ]
        found = torch.cat(parts) if parts else self.probabilities[:0]
        return _require_finite(found).reshape(-1, len(self.images))

    def _run(self, variants: Iterable[Tensor]) -> Iterator[Tensor]:
        """All classes' probabilities, batch by batch, whichever variants the rows of a batch are of."""
        rows = (row for variant in variants for row in self._check(variant).split(1))
        while batch := list(islice(rows, self._batch_size)):
            yield self._probabilities(torch.cat(batch))  # a copy: what a model changes in place is nobody's

    def _probabilities(self, images: Tensor) -> Tensor:
        """All classes' probabilities; where memory is short, of smaller parts from now on."""
        try:
            found = to_probabilities(self.model(images), len(images), self.activation)
            return found.to(self.images.device, torch.float32)  # a model may lie on several devices
        except Exception as error:
            if not is_out_of_memory(error) or len(images) == 1:
                raise
            self._batch_size = len(images) // 2
        # Outside of the handler: the error's traceback keeps tensors alive.
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no CUDA
        return torch.cat([self._probabilities(part) for part in images.split(self._batch_size)])

    def _check(self, variant: Tensor) -> Tensor:
        if variant.shape != self.images.shape:
            raise ImageError(
                f"A variant is {_describe(variant)}, expected the images' shape {tuple(self.images.shape)}."
            )
        return variant

    def _choose(self, classes: Any) -> Tensor:
        if classes is None:
            return self.all_probabilities.argmax(1)
        found = check_classes(classes, *self.all_probabilities.shape)
        if found.shape[1] != 1:
            raise TargetError(f"There are {found.shape[1]} classes of each image, expected one: judge them one by one.")
        return found[:, 0].to(self.images.device)


def _fit_batch(images: Tensor) -> int:
    pixels = images.shape[2] * images.shape[3]
    return max(1, (PIXELS_ON_CPU if images.device.type == "cpu" else PIXELS) // max(1, pixels))


def _require_finite(probabilities: Tensor) -> Tensor:
    if not probabilities.isfinite().all():
        raise ModelError("The model's output is NaN or infinite in places: look at its weights, and the images.")
    return probabilities


def _describe(images: object) -> str:
    return f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else shorten(images)
