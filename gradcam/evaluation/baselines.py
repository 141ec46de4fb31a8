"""What stands where a picture's pixels are hidden."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.errors import GradcamError, join_names, nearest, shorten

BASELINES = ("blur", "mean", "zero")
RADIUS = 5  # of the blur in a picture of `SIDE` pixels: 11 x 11, with a standard deviation of 5, as in RISE's code
SIDE = 224


def make_baseline(images: Tensor, kind: str) -> Tensor:
    """What the pixels of images (N,C,H,W) are replaced with: the same shape, type and device.

    "blur": the image, blurred by a Gaussian that is cut off at one standard deviation: 5 pixels where the shorter side is
    224, as RISE does it (Petsiuk et al., BMVC 2018), in proportion for other sizes, and one pixel at least. Borders are
    mirrored, where RISE's code has them fade to zero. "mean": each image's own mean per channel. "zero": zero, which after
    the usual preprocessing is the training pictures' mean colour, or a grey.
    Raises `GradcamError` for another kind.
    """
    if not isinstance(kind, str) or kind not in BASELINES:
        offers = nearest(kind, BASELINES) if isinstance(kind, str) else []
        raise GradcamError(f"There is no baseline {shorten(kind)}: choose one of {join_names(offers or BASELINES)}.")
    if kind == "blur":
        return _blur(images)
    if kind == "mean":
        mean = images.mean((2, 3), keepdim=True, dtype=torch.promote_types(images.dtype, torch.float32))
        return torch.zeros_like(images) + mean.to(images.dtype)
    return torch.zeros_like(images)


def _blur(images: Tensor) -> Tensor:
    """A Gaussian as one convolution down and one across, at least in float32."""
    values = images.to(torch.promote_types(images.dtype, torch.float32))
    radius = max(1, int(RADIUS * min(images.shape[2:]) / SIDE + 0.5))
    for axis in (2, 3):
        reach = min(radius, images.shape[axis] - 1)  # no further can be mirrored
        places = torch.arange(-reach, reach + 1, device=images.device, dtype=values.dtype)
        weights = torch.exp(-places.square() / (2 * radius**2))
        shape = [1, 1, 1, 1]
        shape[axis] = len(weights)
        kernel = (weights / weights.sum()).reshape(shape).expand(images.shape[1], -1, -1, -1)
        border = (0, 0, reach, reach) if axis == 2 else (reach, reach, 0, 0)
        values = F.conv2d(F.pad(values, border, mode="reflect"), kernel, groups=images.shape[1])
    return values.to(images.dtype)
