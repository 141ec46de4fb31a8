"""Make the augmented views of a batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradcam.cam.postprocess import Views, resize
from gradcam.hooks.containers import Batch
from gradcam.layers.frames import Frame
from gradcam.options import AUGMENTATIONS
from gradcam.targets.repeated import RepeatedTarget


def make_views(batch: Batch, augmentation: str, target: Any) -> Views:
    """Return the batch in all views of this augmentation.

    The scale factors apply only to the image tensor. In mirrored views, the image tensor is mirrored, and so are all
    tensors of the same size, such as masks. Other tensors with a row per image are repeated.
    """
    views = AUGMENTATIONS[augmentation]

    def mirror(tensor: Tensor) -> Tensor:
        if batch.listed is None:
            return tensor.flip(-1)
        mirrored = tensor.clone()  # Each image is mirrored within its own area, so that the padding stays in place.
        for image, (height, width) in zip(mirrored, batch.listed):
            image[..., :height, :width] = image[..., :height, :width].flip(-1)
        return mirrored

    def repeat_views(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > 0 and len(tensor) == batch.images
        if not has_rows or (tensor.numel() == 1 and batch.images == 1):  # A single value applies to all views.
            return tensor
        is_in_space = tensor.ndim == batch.pictures.ndim and tensor.shape[2:] == batch.pictures.shape[2:]
        views_of_tensor = [mirror(tensor) if mirrored and is_in_space else tensor for _, mirrored in views]
        if tensor is batch.pictures:
            views_of_tensor = [view * factor for view, (factor, _) in zip(views_of_tensor, views)]
        return torch.cat(views_of_tensor)

    with torch.no_grad():
        view_batch = batch.copy(repeat_views).repeat(len(views))
    if batch.windows is not None:
        windows = [
            (top, batch.size[-1] - left - columns if mirrored else left, rows, columns)
            for _, mirrored in views
            for top, left, rows, columns in batch.windows
        ]
        view_batch = replace(view_batch, windows=tuple(windows))
    return Views(view_batch, views, RepeatedTarget(target, batch.images, len(views)))


def crop_to_windows(maps: Tensor, frame: Frame) -> Tensor:
    """Crop maps (N,K,h,w) of the canvas (the padded images) to the windows of the images.

    All images get as many cells as the largest image covers, so that the maps stay one tensor.
    """
    # The number of cells per pixel of the canvas, along each axis.
    down, across = (length / side for length, side in zip(maps.shape[2:], frame.canvas))
    parts = [
        ((top * down, left * across), (rows * down, columns * across)) for top, left, rows, columns in frame.windows
    ]
    size = [math.ceil(max(lengths) - 1e-6) for lengths in zip(*(part[1] for part in parts))]
    if len(set(parts)) == 1:
        return resize(maps, size, signed=True, part=parts[0])
    return torch.cat([resize(maps[i : i + 1], size, signed=True, part=part) for i, part in enumerate(parts)])
