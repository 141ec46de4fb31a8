"""What each channel of a layer gives on the picture: activation maps, and how strong each of them is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from gradcam.errors import ImageError, LayerError, shorten
from gradcam.inspection.extraction import features
from gradcam.inspection.selection import Layers, select_layers
from gradcam.layers import unwrap
from gradcam.recording import to_batch
from gradcam.reshaping import to_reshape
from gradcam.sites import place

ORDERS = ("strongest", "index")


def activations(model: nn.Module, images: Any, layers: Layers, *, reshape: Any = None) -> dict[str, Tensor]:
    """What layers give for images, as grids (N,C,h,w) by the layers' dotted names: a channel's map lies on the picture.

    Tokens and channels-last maps are laid out as `gradcam.explain` does it; tokens before the grid, such as the class token,
    are left out. Of volumes it is (N,C,d,h,w). Values are the layer's own, in its precision and on its device, detached.
    `images`, `reshape`: as in `gradcam.explain`. `layers`: a dotted name, a pattern (`layer*.conv1`), a module, or several.
    Of a layer that runs several times it is the first run; the model is left as it was, as `features` leaves it.

    Raises `LayerError` as `features` does, and for a layer without a grid, such as a fully connected one.
    """
    model, batch, reshape = unwrap(model), to_batch(images), to_reshape(reshape)
    chosen = select_layers(model, layers)
    found = features(model, images, list(chosen))
    grids = {}
    for name, module in chosen.items():
        try:
            layout = place(name, found[name], module, batch, model.modules(), reshape)
        except LayerError as error:
            raise LayerError(f"{error} What it gives, whatever its shape, is had by inspection.features.") from None
        grids[name] = layout.to_grid(found[name])
    return grids


def measure_strengths(maps: NDArray[Any]) -> NDArray[np.float64]:
    """How strong each of C channels (C,h,w) is: its mean absolute activation, (C,). NaN where there is one in it."""
    return np.abs(maps.astype(np.float64)).mean(axis=(1, 2))


def order_channels(strengths: NDArray[np.float64], order: str = "strongest") -> list[int]:
    """The channels' numbers, one of `ORDERS`: the strongest first, or as they are in the layer.

    Before the strongest come those with NaN, which are there to be seen; of equal ones the first comes first.
    """
    if order == "index":
        return list(range(len(strengths)))
    keys = np.where(np.isnan(strengths), -np.inf, -strengths)
    return [int(channel) for channel in np.argsort(keys, kind="stable")]


def take_maps(given: Any, image: int, name: str) -> NDArray[np.float64]:
    """One image's maps (C,h,w) of what somebody gave for a layer: floats (C,h,w) of one image, or (N,C,h,w).

    Raises `ImageError` for anything else, and for an image that is not there.
    """
    what = f"The activations of {name!r} are" if name else "The activations are"
    if not isinstance(given, (Tensor, np.ndarray)):
        raise ImageError(f"{what} {shorten(given)}, expected a tensor or an array (C,h,w) or (N,C,h,w).")
    if isinstance(given, Tensor):
        given = given.detach().cpu().double().numpy() if given.is_floating_point() else given.detach().cpu().numpy()
    shape = "x".join(map(str, given.shape))
    if given.ndim == 5:
        raise ImageError(f"{what} of volumes, {shape}: choose a slice of them, such as tensor[:, :, {given.shape[2] // 2}].")
    if given.ndim not in (3, 4) or given.size == 0 or given.dtype.kind != "f":
        raise ImageError(f"{what} {given.dtype} {given.shape}, expected floats (C,h,w) or (N,C,h,w).")
    maps = given if given.ndim == 4 else given[None]
    if isinstance(image, bool) or not isinstance(image, int) or not 0 <= image < len(maps):
        raise ImageError(f"There is no image {shorten(image)}: there are {len(maps)}, from 0.")
    return np.asarray(maps[image], np.float64)
