"""What stands where a picture's pixels are hidden."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.errors import GradcamError, join_names, nearest, shorten

BASELINES = ("blur", "mean", "zero")
RADIUS = 5  # of the blur in a picture of `SIDE` pixels: 11 x 11, with a standard deviation of 5, as in RISE's code
SIDE = 224
CUT = 4  # standard deviations, as SciPy's filter has it


def make_baseline(images: Tensor, kind: str) -> Tensor:
    """What the pixels of images (N,C,H,W) are replaced with: the same shape, type and device.

    "blur": the image, blurred by the very kernel of RISE's code (Petsiuk et al., BMVC 2018) where the shorter side is 224:
    `scipy.ndimage.gaussian_filter` of one pixel in 11 x 11, with a standard deviation of 5; what of the Gaussian lies
    outside is mirrored back into it, so that it is nearly a mean of these. For other sizes it is in proportion, 3 x 3 at
    least. Around the image is zero, as there. "mean": each image's own mean per channel. "zero": zero, which after the
    usual preprocessing is the training pictures' mean colour, or a grey.
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
    """The kernel as one convolution down and one across, at least in float32."""
    values = images.to(torch.promote_types(images.dtype, torch.float32))
    radius = max(1, int(RADIUS * min(images.shape[2:]) / SIDE + 0.5))
    weights = _make_weights(radius).to(values)
    for shape in ((1, 1, -1, 1), (1, 1, 1, -1)):
        kernel = weights.reshape(shape).expand(images.shape[1], -1, -1, -1)
        values = F.conv2d(values, kernel, padding="same", groups=images.shape[1])
    return values.to(images.dtype)


def _make_weights(radius: int) -> Tensor:
    """A row of the kernel, float64 (2 radius + 1,): a Gaussian whose standard deviation is the radius, mirrored."""
    width = 2 * radius + 1
    offsets = torch.arange(-CUT * radius, CUT * radius + 1, dtype=torch.int64, device="cpu")
    gaussian = torch.exp(-offsets.double().square() / (2 * radius**2))
    places = (offsets + radius) % (2 * width)
    inside = torch.minimum(places, 2 * width - 1 - places)
    return torch.zeros(width, dtype=torch.float64, device="cpu").index_add(0, inside, gaussian / gaussian.sum())
