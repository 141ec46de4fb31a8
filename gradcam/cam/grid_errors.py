"""Describe why a layer's output has no grid on the image."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gradcam.errors import LayerError
from gradcam.hooks.containers import Batch
from gradcam.hooks.model_facts import ModelFacts
from gradcam.layers.axes import AxisResolver
from gradcam.layers.find import LayerRef
from gradcam.layers.layout import Layout
from gradcam.layers.token_layout import MAX_PREFIX_OF_GIVEN_GRID, find_patches, list_token_layouts

TEXT_TOKENS = "with text tokens, which form no grid on the image. Choose a layer of the image encoder."


ATTENTION_WEIGHTS = (
    "with rows that sum to 1. Such rows are attention weights between tokens, not a feature map. Choose the block around "
    "this layer, or an attention method such as 'rollout'."
)


def are_attention_weights(activations: Tensor) -> bool:
    """Return whether activations look like attention weights: non-negative, and with a sum of 1 over the last axis."""
    if activations.is_meta or activations.shape[-1] == 1:
        return False
    tolerance = 2e-2 if activations.dtype in (torch.bfloat16, torch.float16) else 1e-4
    rows = activations.detach().float()
    return bool((rows >= 0).all() and ((rows.sum(-1) - 1).abs() < tolerance).all())


def require_grid(
    layout: Layout | None,
    outlet: LayerRef,
    activations: Tensor,
    batch: Batch,
    *,
    reshape: str | tuple[int, ...] | None,
    model: nn.Module,
    facts: ModelFacts,
) -> Layout:
    """Return the layout. Raise `LayerError` if there is no layout, or if the output is attention weights."""
    shape = tuple(activations.shape)
    if layout is not None:
        if not are_attention_weights(activations):
            return layout
        reason = ATTENTION_WEIGHTS
    elif reshape is not None:
        reason = _explain_missing_grid(shape, batch, reshape)
    else:
        axes = AxisResolver(model, batch, find_patches(model.modules()) if len(shape) == 3 else (), facts)
        if axes.holds_text(shape, outlet.module):
            reason = TEXT_TOKENS
        elif not axes.image_axes(shape, outlet.module):
            reason = _explain_folded_batch(batch)
        else:
            reason = _explain_missing_grid(shape, batch, None)
    raise LayerError(f"Layer '{outlet.name}' returns {shape} {reason}")


def _explain_missing_grid(shape: tuple[int, ...], batch: Batch, reshape: str | tuple[int, ...] | None) -> str:
    size = " x ".join(map(str, batch.size))
    if reshape is not None:
        misfit = f"but reshape={reshape!r} does not fit this output"
        return f"for {batch.images} image(s) of {size}, {misfit}: {_suggest_reshape(shape, batch)}"
    if batch.images not in shape[:2] or (batch.images != shape[0] and len(shape) != 3):
        return _explain_folded_batch(batch)
    if len(shape) == 3 or (len(shape) == len(batch.size) + 2 and max(shape[2:]) > 1):
        return (
            f"for images of {size}, but the spatial grid of this output is ambiguous: {_suggest_reshape(shape, batch)}"
        )
    return f"for images of {size}, but this output has no spatial grid: choose a layer before pooling and flattening."


def _explain_folded_batch(batch: Batch) -> str:
    return (
        f"for {batch.images} image(s): its first axis is not the batch, so heatmaps cannot be assigned to images. Choose a "
        "layer outside the part of the model that reshapes the batch."
    )


def _suggest_reshape(shape: tuple[int, ...], batch: Batch) -> str:
    cells = ", ".join("dhw"[-len(batch.size) :])
    function = f"a function that returns (N, C, {cells})"
    if len(shape) != 3:
        return f"pass reshape='channels first' or 'channels last', or {function}."
    tokens = shape[1] if shape[0] == batch.images else shape[0]
    # Among the grids with about the image's aspect ratio, suggest the grid that leaves the fewest extra tokens.
    aspect = [length / min(batch.size) for length in batch.size]
    grids = {tuple(round(cells * ratio) for ratio in aspect) for cells in range(1, math.isqrt(tokens) + 1)}
    layout = min(list_token_layouts(tokens, grids), key=lambda layout: (layout.prefix, layout.grid), default=None)
    example = f", such as reshape={layout.grid}" if layout else ""
    return (
        f"pass the grid of its {tokens} tokens, reshape=({cells}){example}, or {function}. Up to "
        f"{MAX_PREFIX_OF_GIVEN_GRID} extra tokens may precede the grid."
    )
