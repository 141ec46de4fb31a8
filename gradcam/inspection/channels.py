"""Compute activation maps, one per channel of a layer's output, and the strength of each channel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from gradcam.cam.grid import find_output_layout
from gradcam.errors import ImageError, LayerError, shorten
from gradcam.hooks.containers import to_batch
from gradcam.inspection.extraction import features
from gradcam.inspection.selection import Layers, select_layers, to_layer_list
from gradcam.layers.find import LayerRef, unwrap
from gradcam.layers.layout import to_reshape


def activations(model: nn.Module, images: Any, layers: Layers, *, reshape: Any = None) -> dict[str, Tensor]:
    """Compute the activations of layers as feature maps (N,C,h,w).

    Tokens and channels-last maps are rearranged to a grid (N,C,h,w), as in `gradcam.explain`. The class token and other
    tokens that are not part of the grid are left out. The model is left unchanged. Several threads may call this
    function at once.

    Parameters
    ----------
    model : nn.Module
        Any model.
    images : Tensor (N,C,H,W) or (N,C,D,H,W), tuple or dict
        As in `gradcam.explain`.
    layers : str, nn.Module, or a sequence of them
        Dotted names, patterns such as `layer*.conv1`, and modules. A pattern selects the
        matching layers whose output has a grid. If a layer runs several times, its first run is used.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`.

    Returns
    -------
    dict of str to Tensor (N,C,h,w)
        The detached feature maps by dotted name, with the layer's dtype and device. For volumes, (N,C,d,h,w).

    Raises
    ------
    LayerError
        As in `features`. Also if the output of a layer has no grid, as for a fully connected layer, or if a pattern
        matches only such layers.
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
    requested = to_layer_list(layers)
    outputs = features(model, images, requested)
    grids: dict[str, Tensor] = {}

    def lay_out(name: str, module: nn.Module) -> LayerError | None:
        try:
            layout = find_output_layout(LayerRef(name, module), outputs[name], batch, model=model, reshape=reshape)
            grids[name] = layout.to_grid(outputs[name])
        except LayerError as error:
            return error
        return None

    for layer in requested:
        errors = [lay_out(name, module) for name, module in select_layers(model, layer).items() if name in outputs]
        if all(errors):  # A pattern causes an error only if none of its layers has a grid.
            raise LayerError(f"{errors[0]} `gradcam inspect features` accepts any output.")
    return grids


def measure_strengths(maps: NDArray[Any]) -> NDArray[np.float64]:
    """Return the mean absolute activation (C,) of channels (C,h,w); NaN for a channel that contains NaN."""
    return np.asarray(np.abs(maps.astype(np.float64)).mean(axis=(1, 2)))


def order_channels(strengths: NDArray[np.float64], order: str = "strongest") -> list[int]:
    """Return the channel indices in one of `options.CHANNEL_ORDERS`: by strength, or by index.

    By strength, channels that contain NaN come first, so that users notice NaN. The strongest channels follow. Ties are
    ordered by index.
    """
    if order == "index":
        return list(range(len(strengths)))
    keys = np.where(np.isnan(strengths), -np.inf, -strengths)
    return [int(channel) for channel in np.argsort(keys, kind="stable")]


def take_maps(activations: Any, image: int, name: str) -> NDArray[np.float64]:
    """Return the maps (C,h,w) of one image from floating-point activations (N,C,h,w) or (C,h,w).

    Raises `ImageError` for other activations, and for an image index out of range.
    """
    subject = f"The activations of '{name}' are" if name else "The activations are"
    if not isinstance(activations, (Tensor, np.ndarray)):
        raise ImageError(f"{subject} {shorten(activations)}, expected a tensor or an array (C,h,w) or (N,C,h,w).")
    if isinstance(activations, Tensor):
        tensor = activations.detach().cpu()
        activations = (tensor.double() if tensor.is_floating_point() else tensor).numpy()  # NumPy has no bfloat16.
    if activations.ndim == 5:
        index = activations.shape[2] // 2
        raise ImageError(f"{subject} volumes {activations.shape}: pass one slice, such as tensor[:, :, {index}].")
    if activations.ndim not in (3, 4) or activations.size == 0 or activations.dtype.kind != "f":
        raise ImageError(f"{subject} {activations.dtype} {activations.shape}, expected floats (C,h,w) or (N,C,h,w).")
    maps = activations if activations.ndim == 4 else activations[None]
    if isinstance(image, bool) or not isinstance(image, int) or not 0 <= image < len(maps):
        raise ImageError(
            f"There is no image {shorten(image)}: the number of images is {len(maps)}, and the first is 0."
        )
    return np.asarray(maps[image], np.float64)
