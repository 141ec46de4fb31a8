"""Draw attributions as images on a grey background, the usual style for guided backpropagation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import ImageError, shorten
from gradcam.images.draw import resize
from gradcam.images.read import Pixels, Region, crop

if TYPE_CHECKING:
    from torch import Tensor


# The percentile of the absolute values that is drawn as white or black, chosen by eye on photographs. At the 97th
# percentile, fur and feathers are overexposed. At the 99.5th, all parts of an animal except its eyes fade to grey.
PERCENTILE = 99
GREY = 128


def draw_attribution(values: NDArray[Any] | Tensor) -> Pixels:
    """Draw one attribution as an image: grey (128) is zero, brighter is positive, darker is negative.

    Three channels are drawn as red, green and blue. Any other number of channels is summed and drawn in grey. White and
    black stand for plus and minus the 99th percentile of the non-zero absolute values, so that a few outliers do not
    turn all other pixels grey. If all values are zero, the image is grey.

    Parameters
    ----------
    values : Tensor or array (C,H,W)
        Signed values.

    Returns
    -------
    array (H,W,3)
        RGB, uint8.

    Raises
    ------
    ImageError
        If the values are not floats (C,H,W), or contain NaN or infinite values.

    Examples
    --------
    >>> import torch
    >>> from gradcam.attributions import draw_attribution
    >>> draw_attribution(torch.zeros(3, 2, 2))[0, 0].tolist()
    [128, 128, 128]
    """
    array = _to_array(values)
    if len(array) != 3:
        array = array.sum(axis=0, keepdims=True).repeat(3, axis=0)
    magnitudes = np.abs(array[array != 0])
    largest = np.percentile(magnitudes, PERCENTILE) if magnitudes.size else 1.0
    levels = GREY + np.clip(array / largest, -1, 1) * (GREY - 1)
    return np.ascontiguousarray(np.rint(levels).astype(np.uint8).transpose(1, 2, 0))


def place_in_image(picture: Pixels, region: Region, height: int, width: int) -> Pixels:
    """Return a grey image (H,W,3) with `picture` resized to a region (top, left, height, width)."""
    result = np.full((height, width, 3), GREY, np.uint8)
    crop(result, region)[...] = resize(picture, *region[2:])
    return result


def _to_array(values: Any) -> NDArray[np.float64]:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values  # NumPy has no bfloat16
    if not hasattr(values, "__array__"):
        raise ImageError(f"The attribution is {shorten(values)}, expected an array or a tensor (C,H,W).")
    array = np.asarray(values)
    if array.ndim != 3 or array.size == 0 or array.dtype.kind != "f":
        expected = "floats (C,H,W) of one image and one score, such as attribution.values[0, 0]"
        raise ImageError(f"The attribution is {array.dtype} {array.shape}, expected {expected}.")
    if not np.isfinite(array).all():
        raise ImageError("The attribution contains NaN or infinite values.")
    return array.astype(np.float64)
