"""Preprocess full images instead of the default crop, and adapt networks to the resulting input sizes."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.errors import ImageError, ModelError
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import unwrap
from gradcam.layers.token_layout import find_patches
from gradcam.models.preprocess import Preprocess, Preprocessing

DEFAULT_STEP_PIXELS = 32  # pixels per cell of the last feature map in most networks
MAX_AREA_FACTOR = 16  # maximum input area with the fit "whole", relative to the area of the network's own input
MAX_RESIZED_COPIES = 8  # number of cached copies of a model, one for each input size

_resized_copies: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], nn.Module]] = weakref.WeakKeyDictionary()
_any_size_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that have run successfully on enlarged images


def find_step(model: nn.Module) -> int:
    """Return the step for input sides, in pixels: 32, or the patch size if the patch size does not divide 32.

    If an input side is a multiple of the step, the input contains no incomplete patches or cells.
    """
    strides = {max(patch.stride) for patch in find_patches(model.modules()) if patch.kernel == patch.stride}
    return next((stride for stride in strides if DEFAULT_STEP_PIXELS % stride), DEFAULT_STEP_PIXELS)


def get_steps(preprocess: Preprocess) -> Preprocessing:
    """Return the preprocessing as resize, crop and normalisation; raise `ModelError` for custom preprocessing."""
    steps = getattr(preprocess, "plain", preprocess)
    if not isinstance(steps, Preprocessing):
        raise ModelError("This model has custom preprocessing, which supports only the fit 'crop'.")
    return steps


def show_whole(image: NDArray[Any], preprocess: Preprocessing, step: int) -> Tensor:
    """Resize the full image to the default scale and to multiples of `step`, normalise it, and return (C,H,W)."""
    shorter = preprocess.resize if isinstance(preprocess.resize, int) else min(preprocess.resize)
    rows, columns = image.shape[:2]
    height, width = (max(1, round(side * (shorter / min(rows, columns)) / step)) * step for side in (rows, columns))
    if height * width > MAX_AREA_FACTOR * math.prod(preprocess.size):
        problem = f"With the fit 'whole', the model's input would be {width} x {height} pixels, which is too large"
        raise ImageError(f"The image is {columns} x {rows}. {problem}. Use the fit 'tiles'.")
    return replace(preprocess, size=(height, width), resize=(height, width))(image)


def check_sizes(model: nn.Module, images: Tensor, step: int) -> None:
    """Run the model on an enlarged version of `images` (N,C,H,W); raise `ModelError` if the model fails."""
    if model in _any_size_models:
        return
    height, width = images.shape[2:]
    larger = F.interpolate(images.float(), (height + step, width + 2 * step)).to(images)
    try:
        resized, inputs = take_size(model, larger, (height, width))
        with preserve_state(unwrap(resized)), torch.no_grad():
            resized(**inputs) if isinstance(inputs, dict) else resized(inputs)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or "no message"
        problem = f"The model takes only {width} x {height} pixels, so the fit 'whole' does not work"
        raise ModelError(f"{problem} ({type(error).__name__}: {reason}). Use the fit 'tiles' or 'crop'.") from error
    _any_size_models.add(model)


def take_size(model: nn.Module, images: Tensor, native_size: Sequence[int]) -> tuple[nn.Module, Any]:
    """Return a model that takes images (N,C,H,W) of this size, and the input for this model.

    If a vision transformer of timm or torchvision was built for another size, the result is a copy with interpolated
    position embeddings. The copy shares all other weights with the original model.
    """
    size = tuple(images.shape[2:])
    unwrapped = unwrap(model)
    if size == tuple(native_size):
        return model, images
    if "interpolate_pos_encoding" in inspect.signature(unwrapped.forward).parameters:  # as in transformers
        return model, {"pixel_values": images, "interpolate_pos_encoding": True}
    is_timm = callable(getattr(unwrapped, "set_input_size", None))
    if not is_timm and type(unwrapped).__module__ != "torchvision.models.vision_transformer":
        return model, images  # Convolutional networks take any size.
    tensors = [*unwrapped.parameters(), *unwrapped.buffers()]
    key = (*size, *((tensor.data_ptr(), tensor._version, tensor.dtype, tensor.device) for tensor in tensors))
    copies = _resized_copies.setdefault(unwrapped, {})
    if key not in copies:
        if len(copies) >= MAX_RESIZED_COPIES:
            copies.pop(next(iter(copies)))
        shared = {id(tensor): tensor for tensor in tensors}
        resized: Any = copy.deepcopy(unwrapped, shared)
        if is_timm:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # timm warns that resizing is slow.
                resized.set_input_size(img_size=size)
        else:
            _resize_torchvision(resized, size)
        copies[key] = resized
    return copies[key], images


def _resize_torchvision(model: Any, size: Sequence[int]) -> None:
    embedding = model.encoder.pos_embedding
    side = model.image_size // model.patch_size
    grid = embedding[:, -(side**2) :].mT.unflatten(2, (side, side))
    cells = [length // model.patch_size for length in size]
    grid = F.interpolate(grid.float(), cells, mode="bicubic", antialias=True).to(embedding).flatten(2).mT
    resized = torch.cat([embedding[:, : -(side**2)], grid], 1)
    model.encoder.pos_embedding = nn.Parameter(resized.detach(), requires_grad=False)
    # torchvision's `_process_input` accepts only square images of the model's own size. Replace this method.
    model._process_input = lambda images: model.conv_proj(images).flatten(2).mT
