"""Compute one map (one image, one class, one layer) at the cost of a hand-written hook.

The general functions in `maps` loop over layers, methods, images and classes. For a single map, these loops would cost
more than the map itself. The function below does the same computation without them, and reads all values at once. If a
value is unusual, it returns None, and the general functions compute the map again, with all errors and warnings.
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
    """Return the map of a gradient method, as `maps.compute_maps` does; None if that function has to compute it.

    The general functions are needed for several layers, images or classes, for dtypes other than float32, for other
    kinds of methods, and for values that need an error, a warning or the removal of rounding errors.
    """
    method, scored, score = methods[0], recorded.scored, recorded.scored.values
    is_single = len(methods) == 1 and recorded.batch.pieces is None
    is_single = is_single and score.shape == (1, 1) and len(recorded.activations) == 1
    is_plain = isinstance(method, GradientMethod) and method.score is None and not method.assumes_positive
    is_plain = is_plain and isinstance(method.function, str)  # A user's function may fail, which needs a diagnosis.
    if not (is_single and is_plain) or scored.differentiate is not None or recorded.dtypes != {torch.float32}:
        return None
    ((tensor_name, recorded_tensor),) = recorded.activations.items()
    if recorded.has_float16:
        return None
    layout = find_grid(tensor_name, recorded_tensor, recorded, reshape)
    (gradient,) = differentiate(score, [recorded_tensor])
    if gradient is None or gradient.dtype != torch.float32:
        return None
    activations, gradients = layout.to_grid(recorded_tensor.detach()), layout.to_grid(gradient).unsqueeze(1)
    signed_map = method.compute(activations, gradients)
    tensors = (recorded_tensor.detach(), gradients, signed_map)
    values = [value for tensor in tensors for value in torch.aminmax(tensor)] + [score.detach()]
    *limits, score_value = read_values(values)
    lowest_activation, highest_activation, lowest_gradient, highest_gradient, lowest, highest = limits
    steepest = max(-lowest_gradient, highest_gradient)
    if not all(map(math.isfinite, (*limits, score_value))) or steepest < MIN_GRADIENT:
        return None
    # No rounding error of the sum over the channels exceeds this limit.
    error = 2 * recorded.tolerance * activations.shape[1] * max(-lowest_activation, highest_activation) * steepest
    is_beyond = (lowest >= 0 or -lowest > error) and (highest <= 0 or highest > error)
    if not is_beyond and not is_clear(signed_map, recorded.tolerance, activations, (gradients,)):
        return None
    (layer_name,) = recorded.names_by_layer
    return {(layer_name, method.name): Maps([signed_map], score.detach())}
