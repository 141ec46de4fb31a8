"""Find the layers that are candidates for the default layer."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from gradcam.errors import LayerError, ModelError
from gradcam.hooks.containers import QUANTISED_ADVICE, Batch, detach_input, is_quantised
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.axes import AxisResolver, reject_frames_first, take_image
from gradcam.layers.find import find_layer
from gradcam.layers.grids import list_layers_with_grid
from gradcam.layers.token_layout import find_patches


def find_layers_with_grid(model: nn.Module, batch: Batch, reshape: str | tuple[int, ...] | None = None) -> list[str]:
    """Return the names of the layers whose output is a grid, in the order of `list_layers_with_grid`."""
    names: list[str] = []
    if batch.images > 1:
        # One image is enough. If the model rejects a single image, search with the entire batch, and raise its errors.
        with contextlib.suppress(Exception):
            names = search_batch_for_layers(model, take_image(batch), reshape)
    names = names or search_batch_for_layers(model, batch, reshape)
    if not names:
        if is_quantised(model):
            raise ModelError(f"{type(model).__name__} computes with {QUANTISED_ADVICE}")
        is_graph = isinstance(model, torch.fx.GraphModule)
        hint = " For an exported program, explain torch.export.unflatten(program)." if is_graph else ""
        raise LayerError(
            f"No default layer with a spatial grid{'' if reshape is None else f' that fits reshape={reshape!r}'} was found "
            f"in {type(model).__name__}. Name the layer to explain, with reshape= if its output is not (N,C,h,w).{hint}"
        )
    return names


def search_batch_for_layers(model: nn.Module, batch: Batch, reshape: str | tuple[int, ...] | None = None) -> list[str]:
    """Return the names of the layers whose output is a grid, from one pass of this batch; [] if there are none.

    If the batch contains texts, further passes with texts of other lengths find the layers that return text tokens.
    These layers are left out.
    """
    with preserve_state(model) as modules:
        if len(batch.size) == 3:
            reject_frames_first(batch, modules)
        names = list_layers_with_grid(model, batch.copy(detach_input), reshape)
    axes = AxisResolver(model, batch, find_patches(model.modules()))
    if reshape is not None or not axes.text_lengths:
        return names
    shapes, layers = axes.plain, {name: find_layer(model, name).module for name in names}
    return [name for name in names if not axes.holds_text(shapes.get(layers[name], [()])[0], layers[name])]
