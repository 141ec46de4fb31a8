"""Test-time augmentation: the same images in several views, explained in one batch, and the mean of their maps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradcam.arguments import Batch
from gradcam.choices import AUGMENTATIONS
from gradcam.errors import GradcamError, join_names, shorten
from gradcam.targets import RepeatedTarget


@dataclass(frozen=True)
class Views:
    """The views of a batch, as one batch: the images of the first view, then those of the second, and so on."""

    batch: Batch
    views: tuple[tuple[float, bool], ...]

    @property
    def images(self) -> int:
        """How many images there are in each view."""
        return self.batch.images // len(self.views)

    def target(self, target: Any) -> Any:
        """A target for all views that explains what `target` means for the first."""
        return target if len(self.views) == 1 else RepeatedTarget(target, self.images, len(self.views))

    def average(self, maps: Tensor) -> Tensor:
        """Maps (V N,K,...) of all views, put upright, as their mean (N,K,...)."""
        if len(self.views) == 1:
            return maps
        upright = [
            view.flip(-1) if mirrored else view for view, (_, mirrored) in zip(maps.split(self.images), self.views)
        ]
        return torch.stack(upright).mean(0)

    def first(self, rows: Tensor) -> Tensor:
        """What belongs to the images themselves: the first N rows, where there is one row for each image of each view."""
        return rows[: self.images] if rows.shape[:1] == (self.batch.images,) else rows


def check_augmentation(augmentation: str) -> None:
    """Raises `GradcamError` for an unknown one."""
    if not isinstance(augmentation, str) or augmentation not in AUGMENTATIONS:
        raise GradcamError(f"augmentation is {shorten(augmentation)}, expected one of {join_names(AUGMENTATIONS)}.")


def make_views(batch: Batch, augmentation: str) -> Views:
    """The batch in all views of this augmentation.

    The picture tensor is scaled; it and all others of its size, such as masks, are mirrored; others with a row for each
    image are repeated.
    """
    views = AUGMENTATIONS[augmentation]
    if len(views) == 1:
        return Views(batch, views)

    def show(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > 0 and len(tensor) == batch.images
        if not has_rows or (tensor.numel() == 1 and batch.images == 1):  # one number is for all views
            return tensor
        is_in_space = tensor.ndim == batch.pictures.ndim and tensor.shape[2:] == batch.pictures.shape[2:]
        shown = [tensor.flip(-1) if mirrored and is_in_space else tensor for _, mirrored in views]
        if tensor is batch.pictures:
            shown = [view * factor for view, (factor, _) in zip(shown, views)]
        return torch.cat(shown)

    with torch.no_grad():
        return Views(replace(batch.copy(show), images=batch.images * len(views)), views)
