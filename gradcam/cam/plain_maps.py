"""Compute the maps of one class per image at one layer, at little more than the cost of a hand-written hook.

The general functions in `maps` loop over layers, methods and classes. For a single class, these loops would cost more
than the maps. `compute_plain_maps` does the same computation without them, and reads all values at once. It returns
None for several layers or classes, for dtypes other than float32, for other kinds of methods, and for values that need
an error, a warning or the removal of rounding errors. Then the general functions compute the maps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from gradcam.cam.deferred_checks import read_values
from gradcam.cam.grid import MIN_GRADIENT, OWN_GRADIENT_FACTOR, find_grid
from gradcam.cam.methods.base import GradientMethod, Method
from gradcam.cam.rounding import Key, are_clear
from gradcam.hooks.pytorch import differentiate

if TYPE_CHECKING:
    from torch import Tensor

    from gradcam.cam.forward import RecordedPass
    from gradcam.layers.layout import ReshapeSpec

MAX_LIMIT_TOLERANCE = 1e-3  # Above this relative tolerance, few maps exceed the limit of the rounding errors.


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
    """Return the maps of a gradient method, as `maps.compute_maps` does; None if that function has to compute them."""
    if not _are_supported(recorded, methods):
        return None
    ((tensor_name, tensor),) = recorded.activations.items()
    scores, tolerance, method = recorded.scored.values, recorded.tolerance, methods[0]
    images, layout = len(scores), find_grid(tensor_name, tensor, recorded, reshape)
    (gradient,) = differentiate(scores if images == 1 else _add(scores), [tensor])
    if gradient is None or gradient.dtype != torch.float32:
        return None
    activations, gradients = layout.to_grid(tensor.detach()), layout.to_grid(gradient).unsqueeze(1)
    signed_maps = method.compute(activations, gradients)
    test_rounding = partial(are_clear, signed_maps, tolerance, activations, (gradients,))
    readings = [*torch.aminmax(tensor.detach()), *_find_limits(gradients), *_find_limits(signed_maps), scores.detach()]
    if images > 1:
        from gradcam.cam.independence import measure_dependence

        readings.append(measure_dependence(scores, tensor, layout, gradients))
    # With a high tolerance, as on a GPU, maps rarely exceed the limit below. In this case, the exact test is computed
    # before the values are read, because each reading waits for the device.
    tests = [test_rounding()] if tolerance > MAX_LIMIT_TOLERANCE else []
    lowest, highest, *rows = read_values([*readings, *tests])
    gradient_lows, gradient_highs, lows, highs, _, errors = (rows[i * images : (i + 1) * images] for i in range(6))
    slopes = [max(-low, high) for low, high in zip(gradient_lows, gradient_highs)]
    if not all(map(math.isfinite, (lowest, highest, *rows))) or min(slopes) < MIN_GRADIENT:
        return None
    margin = max(slopes) / OWN_GRADIENT_FACTOR
    if images > 1 and any(error > tolerance * (slope + margin) for error, slope in zip(errors, slopes)):
        return None  # The images depend on one another.
    # No rounding error of the sum over the channels exceeds this factor times the largest gradient.
    factor = 2 * tolerance * activations.shape[1] * max(-lowest, highest)
    is_beyond = all(low >= 0 or -low > factor * slope for low, slope in zip(lows, slopes))
    is_beyond = is_beyond and all(high <= 0 or high > factor * slope for high, slope in zip(highs, slopes))
    if not is_beyond and not (rows[-1] if tests else test_rounding()):
        return None
    (layer_name,) = recorded.names_by_layer
    return {(layer_name, method.name): Maps([signed_maps], scores.detach())}


def _are_supported(recorded: RecordedPass, methods: Sequence[Method]) -> bool:
    """Return True for one gradient method, one layer and one class per image, all in float32."""
    method, scored, scores = methods[0], recorded.scored, recorded.scored.values
    is_single = len(methods) == 1 and len(recorded.activations) == 1 and scores.shape[1:] == (1,)
    is_gradient = isinstance(method, GradientMethod) and method.score is None and not method.assumes_positive
    # A user's function may fail, which needs a diagnosis.
    is_plain = is_gradient and isinstance(method.function, str) and scored.differentiate is None
    is_float32 = recorded.dtypes == {torch.float32} and not recorded.has_float16
    return is_single and is_plain and is_float32 and recorded.batch.pieces is None


def _add(scores: Tensor) -> Tensor:
    with torch.enable_grad():
        return scores.sum()


def _find_limits(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum of each row."""
    if len(tensor) == 1:
        return torch.aminmax(tensor)
    axes = tuple(range(1, tensor.ndim))
    return tensor.amin(axes), tensor.amax(axes)
