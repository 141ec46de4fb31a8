"""Compute the maps of one class per image at one layer, at little more than the cost of a hand-written hook.

The general functions in `maps` loop over layers, methods and classes. For a single class, these loops would cost more
than the maps. The function below does the same computation without them, and reads all values at once. If a value is
unusual, it returns None, and the general functions compute the maps again, with all errors and warnings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradcam.cam.deferred_checks import read_values
from gradcam.cam.grid import MIN_GRADIENT, find_grid
from gradcam.cam.methods.base import GradientMethod, Method
from gradcam.cam.rounding import Key, is_clear
from gradcam.hooks.pytorch import differentiate

if TYPE_CHECKING:
    from torch import Tensor

    from gradcam.cam.forward import RecordedPass
    from gradcam.layers.layout import ReshapeSpec


@dataclass(frozen=True)
class Maps:
    """The maps of a method at a layer, signed (N,K,...) in float32, and the scores (N,K) that they explain.

    `levels` holds one tensor of maps, or one for each level of a pyramid. First the evidence (positive or negative) is
    selected in each level, and then the levels are added. `rounding_mask` (N,K,2) marks maps in which rounding errors
    were replaced by zeros, as in `DenoisedMaps`; None if there are no such maps.
    """

    levels: list[Tensor]
    scores: Tensor
    rounding_mask: Tensor | None = None


def compute_plain_maps(
    recorded: RecordedPass, methods: Sequence[Method], reshape: ReshapeSpec
) -> dict[Key, Maps] | None:
    """Return the maps of a gradient method, as `maps.compute_maps` does; None if that function has to compute them.

    The general functions are needed for several layers or classes, for dtypes other than float32, for other kinds of
    methods, and for values that need an error, a warning or the removal of rounding errors.
    """
    method, scored, scores = methods[0], recorded.scored, recorded.scored.values
    has_one_map = len(methods) == 1 and recorded.batch.pieces is None
    has_one_map = has_one_map and scores.ndim == 2 and scores.shape[1] == 1 and len(recorded.activations) == 1
    is_plain = isinstance(method, GradientMethod) and method.score is None and not method.assumes_positive
    is_plain = is_plain and isinstance(method.function, str)  # A user's function may fail, which needs a diagnosis.
    if not (has_one_map and is_plain) or scored.differentiate is not None or recorded.dtypes != {torch.float32}:
        return None
    ((tensor_name, tensor),) = recorded.activations.items()
    if recorded.has_float16:
        return None
    layout = find_grid(tensor_name, tensor, recorded, reshape)
    images = len(scores)
    with torch.enable_grad():
        total = scores if images == 1 else scores.sum()
    (gradient,) = differentiate(total, [tensor])
    if gradient is None or gradient.dtype != torch.float32:
        return None
    activations, gradients = layout.to_grid(tensor.detach()), layout.to_grid(gradient).unsqueeze(1)
    signed_maps = method.compute(activations, gradients)
    if len(signed_maps) != images:
        return None
    readings = [*torch.aminmax(tensor.detach()), *_find_limits(gradients), *_find_limits(signed_maps), scores.detach()]
    if images > 1:
        from gradcam.cam.independence import OWN_GRADIENT_FACTOR, measure_dependence

        readings.append(measure_dependence(scores, tensor, layout, gradients))
    lowest, highest, *rows = read_values(readings)
    if not all(map(math.isfinite, (lowest, highest, *rows))):
        return None
    gradient_lows, gradient_highs, lows, highs = (rows[i * images : (i + 1) * images] for i in range(4))
    slopes = [max(-low, high) for low, high in zip(gradient_lows, gradient_highs)]
    if min(slopes) < MIN_GRADIENT:
        return None
    if images > 1:
        margin = max(slopes) / OWN_GRADIENT_FACTOR
        errors = zip(rows[5 * images :], slopes)
        if any(error > recorded.tolerance * (slope + margin) for error, slope in errors):
            return None
    # No rounding error of the sum over the channels exceeds this factor times the largest gradient.
    factor = 2 * recorded.tolerance * activations.shape[1] * max(-lowest, highest)
    limits = [factor * slope for slope in slopes]
    are_beyond = all(low >= 0 or -low > limit for low, limit in zip(lows, limits))
    are_beyond = are_beyond and all(high <= 0 or high > limit for high, limit in zip(highs, limits))
    if not are_beyond and not is_clear(signed_maps, recorded.tolerance, activations, (gradients,)):
        return None
    (layer_name,) = recorded.names_by_layer
    return {(layer_name, method.name): Maps([signed_maps], scores.detach())}


def _find_limits(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum of each row."""
    if len(tensor) == 1:
        return torch.aminmax(tensor)
    axes = tuple(range(1, tensor.ndim))
    return tensor.amin(axes), tensor.amax(axes)
