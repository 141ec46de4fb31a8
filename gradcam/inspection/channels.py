"""What each channel of a layer gives on the picture: activation maps, and how strong each of them is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from gradcam.cam.grid import place
from gradcam.errors import ImageError, LayerError, shorten
from gradcam.hooks.nested import to_batch
from gradcam.inspection.extraction import features
from gradcam.inspection.selection import Layers, list_wanted, select_layers
from gradcam.layers.find import Outlet, unwrap
from gradcam.layers.layout import to_reshape


def activations(model: nn.Module, images: Any, layers: Layers, *, reshape: Any = None) -> dict[str, Tensor]:
    """Compute the activations of layers as feature maps (N,C,h,w).

    Tokens and channels-last maps are rearranged to a grid as in `gradcam.explain`; tokens before the grid, such as the
    class token, are left out. The model is left unchanged, and several threads may call this at once.

    Parameters
    ----------
    model : nn.Module
        Any model.
    images : Tensor (N,C,H,W) or (N,C,D,H,W), tuple or dict
        As in `gradcam.explain`.
    layers : str, nn.Module, or a sequence of them
        Dotted names, patterns such as `layer*.conv1`, and modules. A pattern selects the layers that have a grid. If a layer
        runs several times, its first run is used.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`.

    Returns
    -------
    dict of str to Tensor (N,C,h,w)
        The feature maps by dotted name; for volumes (N,C,d,h,w). They have the layer's precision and device, and are
        detached.

    Raises
    ------
    LayerError
        As in `features`. Also if a layer has no grid, such as a fully connected layer, or if no layer that matches a
        pattern has one.
    ImageError
        If the input contains no images (N,C,H,W) or (N,C,D,H,W).

    Examples
    --------
    >>> import torch, torchvision
    >>> from gradcam import inspection
    >>> model = torchvision.models.swin_t(weights=None)
    >>> inspection.activations(model, torch.rand(1, 3, 64, 64), "features.7")["features.7"].shape  # channels last there
    torch.Size([1, 768, 2, 2])
    """
    model, batch, reshape = unwrap(model), to_batch(images), to_reshape(reshape)
    wanted = list_wanted(layers)
    found = features(model, images, wanted)
    grids: dict[str, Tensor] = {}

    def lay_out(name: str, module: nn.Module) -> LayerError | None:
        try:
            layout = place(Outlet(name, module), found[name], batch, model=model, reshape=reshape)
            grids[name] = layout.to_grid(found[name])
        except LayerError as error:
            return error
        return None

    for layer in wanted:
        failed = [lay_out(name, module) for name, module in select_layers(model, layer).items() if name in found]
        if all(failed):  # of a pattern those without a grid are left out
            raise LayerError(f"{failed[0]} `gradcam inspect features` accepts any output.")
    return grids


def measure_strengths(maps: NDArray[Any]) -> NDArray[np.float64]:
    """How strong each of C channels (C,h,w) is: its mean absolute activation, (C,). NaN where there is one in it."""
    return np.asarray(np.abs(maps.astype(np.float64)).mean(axis=(1, 2)))


def order_channels(strengths: NDArray[np.float64], order: str = "strongest") -> list[int]:
    """The channels' numbers in an order of `options.CHANNEL_ORDERS`: the strongest first, or as they are in the layer.
    Before the strongest come those with NaN, which are there to be seen; of equal ones the first comes first."""
    if order == "index":
        return list(range(len(strengths)))
    keys = np.where(np.isnan(strengths), -np.inf, -strengths)
    return [int(channel) for channel in np.argsort(keys, kind="stable")]


def take_maps(given: Any, image: int, name: str) -> NDArray[np.float64]:
    """One image's maps (C,h,w) of what somebody gave for a layer: floats (N,C,h,w), or (C,h,w) of one image. Raises
    `ImageError` for anything else, and for an image that is not there."""
    what = f"The activations of '{name}' are" if name else "The activations are"
    if not isinstance(given, (Tensor, np.ndarray)):
        raise ImageError(f"{what} {shorten(given)}, expected a tensor or an array (C,h,w) or (N,C,h,w).")
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        given = (given.double() if given.is_floating_point() else given).numpy()  # NumPy has no bfloat16
    if given.ndim == 5:
        middle = given.shape[2] // 2
        raise ImageError(f"{what} volumes {given.shape}: pass a slice of them, such as tensor[:, :, {middle}].")
    if given.ndim not in (3, 4) or given.size == 0 or given.dtype.kind != "f":
        raise ImageError(f"{what} {given.dtype} {given.shape}, expected floats (C,h,w) or (N,C,h,w).")
    maps = given if given.ndim == 4 else given[None]
    if isinstance(image, bool) or not isinstance(image, int) or not 0 <= image < len(maps):
        raise ImageError(f"There is no image {shorten(image)}: there are {len(maps)}, counted from 0.")
    return np.asarray(maps[image], np.float64)
