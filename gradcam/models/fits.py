"""What of a picture the network is shown: the part that its own preprocessing takes, all of it, or windows over it."""

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
from gradcam.layers.layout import find_patches
from gradcam.models.preprocess import Preprocess, Preprocessing

STEP = 32  # pixels: what most networks make one cell of
MOST = 16  # times as many pixels as the network's own input has
KEPT = 8  # models made for other sizes, of each model

_sized: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], nn.Module]] = weakref.WeakKeyDictionary()
_taken: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # which take other sizes than their own


def find_step(model: nn.Module) -> int:
    """Of how many pixels the sides of what a network is shown should be multiples, so that its cells fill them."""
    strides = {max(patch.stride) for patch in find_patches(model.modules()) if patch.kernel == patch.stride}
    return next((stride for stride in strides if STEP % stride), STEP)


def get_steps(preprocess: Preprocess) -> Preprocessing:
    """The preprocessing as steps that can be changed. Raises `ModelError` where it is not made of such."""
    plain = getattr(preprocess, "plain", preprocess)
    if not isinstance(plain, Preprocessing):
        raise ModelError("This model has custom preprocessing, which supports only the fit 'crop'.")
    return plain


def show_whole(image: NDArray[Any], own: Preprocessing, step: int) -> Tensor:
    """All of a picture at the scale of the network's own preprocessing, in its own aspect but for whole steps: (C,H,W)."""
    sides, shorter = image.shape[:2], own.resize if isinstance(own.resize, int) else min(own.resize)
    height, width = (max(1, round(side * (shorter / min(sides)) / step)) * step for side in sides)
    if height * width > MOST * math.prod(own.size):
        raise ImageError(
            f"The image is {sides[1]} x {sides[0]}. With the fit 'whole', the model's input would be {width} x {height} "
            "pixels, which is too large. Use the fit 'tiles'."
        )
    return replace(own, size=(height, width), resize=(height, width))(image)


def check_sizes(model: nn.Module, images: Tensor, step: int) -> None:
    """Raises `ModelError` for a model that takes no images but of the size of these, (N,C,H,W)."""
    if model in _taken:
        return
    height, width = images.shape[2:]
    larger = F.interpolate(images.float(), (height + step, width + 2 * step)).to(images)
    try:
        other, inputs = take_size(model, larger, (height, width))
        with preserve_state(unwrap(other)), torch.no_grad():
            other(**inputs) if isinstance(inputs, dict) else other(inputs)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or "no message"
        raise ModelError(
            f"The model takes only {width} x {height} pixels, so the fit 'whole' does not work ({type(error).__name__}: "
            f"{reason}). Use the fit 'tiles' or 'crop'."
        ) from error
    _taken.add(model)


def take_size(model: nn.Module, images: Tensor, own: Sequence[int]) -> tuple[nn.Module, Any]:
    """The model and its input for images (N,C,H,W) of any size: a transformer's positions are interpolated, in a copy
    with the same weights where they lie in it."""
    size = tuple(images.shape[2:])
    plain = unwrap(model)
    if size == tuple(own):
        return model, images
    if "interpolate_pos_encoding" in inspect.signature(plain.forward).parameters:  # transformers'
        return model, {"pixel_values": images, "interpolate_pos_encoding": True}
    is_timms = callable(getattr(plain, "set_input_size", None))
    if not is_timms and type(plain).__module__ != "torchvision.models.vision_transformer":
        return model, images  # it may take any as it is
    tensors = [*plain.parameters(), *plain.buffers()]
    key = (*size, *((each.data_ptr(), each._version, each.dtype, each.device) for each in tensors))
    sized = _sized.setdefault(plain, {})
    if key not in sized:
        if len(sized) >= KEPT:
            sized.pop(next(iter(sized)))
        shared = {id(tensor): tensor for tensor in tensors}
        other: Any = copy.deepcopy(plain, shared)
        if is_timms:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of speed
                other.set_input_size(img_size=size)
        else:
            _resize_torchvision(other, size)
        sized[key] = other
    return sized[key], images


def _resize_torchvision(model: Any, size: Sequence[int]) -> None:
    tokens = model.encoder.pos_embedding
    side = model.image_size // model.patch_size
    grid = tokens[:, -(side**2) :].mT.unflatten(2, (side, side))
    cells = [length // model.patch_size for length in size]
    grid = F.interpolate(grid.float(), cells, mode="bicubic", antialias=True).to(tokens).flatten(2).mT
    resized = torch.cat([tokens[:, : -(side**2)], grid], 1)
    model.encoder.pos_embedding = nn.Parameter(resized.detach(), requires_grad=False)
    # The model's own function takes squares of one size only.
    model._process_input = lambda images: model.conv_proj(images).flatten(2).mT
