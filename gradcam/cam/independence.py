"""Check that the images of a batch do not depend on one another."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradcam.cam.deferred_checks import RowRanges, read_row_ranges
from gradcam.cam.dependence_warnings import warn_of_dependence
from gradcam.cam.forward import RecordedPass
from gradcam.cam.grid import OWN_GRADIENT_FACTOR, DependentImagesError, GridActivations
from gradcam.cam.measure_layout import run_changed
from gradcam.hooks.autograd import fill_missing_gradients, jacobian
from gradcam.hooks.containers import Batch
from gradcam.hooks.known_classes import process_images_alone
from gradcam.hooks.pytorch import differentiate
from gradcam.layers.axes import take_image
from gradcam.layers.find import LayerRef

if TYPE_CHECKING:
    from gradcam.layers.layout import Layout
    from gradcam.layers.reshape import IndexLayout

ROUNDING = 256  # A gradient at another image counts as zero if it is at most this many units in the last place.


def warn_of_mixed_images(recorded: RecordedPass) -> None:
    """Warn if a layer's output for one image depends on the other images of the batch.

    The gradient at the layer does not show a dependence before the layer. So each image also runs alone, and the
    outputs are compared. If the outputs agree, the test is skipped for later batches that are not larger. The test is
    also skipped for models whose classes are known to process each image alone.
    """
    batch = recorded.batch
    if not recorded.outlets or recorded.frame is not None or recorded.images_changed:
        return
    if process_images_alone(recorded.modules):
        return
    key = ("mixed", tuple(recorded.outlets), batch.size)
    # The cached value is the size of the largest batch so far whose images did not depend on one another.
    if batch.images <= (recorded.facts.get(key) or 1):
        return
    if recorded.facts.remember((*key, batch.images), lambda: _are_mixed(recorded)):
        warn_of_dependence(recorded.modules)
    else:
        recorded.facts.set(key, batch.images)


def _are_mixed(recorded: RecordedPass) -> bool:
    batch, tolerance, outlets = recorded.batch, 8 * recorded.tolerance, list(recorded.outlets.values())
    for image in range(batch.images):
        alone = run_changed(recorded.model, take_image(batch, image), outlets, recorded.autocast)
        for name, activations in alone.items():
            together = recorded.activations[name].detach()
            axis = next((axis for axis in (0, 1) if together.shape[axis : axis + 1] == (batch.images,)), None)
            if axis is None:
                continue
            row, row_alone = together.select(axis, image), activations.select(axis, 0)
            if row.shape != row_alone.shape:
                continue  # The axis has the right length, but is not the batch axis.
            difference = (row - row_alone).abs().amax()
            if difference > tolerance * activations.abs().amax():
                return not _is_random(recorded, take_image(batch, image), outlets, alone)
    return False


def _is_random(recorded: RecordedPass, batch: Batch, outlets: list[LayerRef], outputs: Mapping[str, Tensor]) -> bool:
    """Return whether the outputs depend on random numbers: a pass with another seed returns other outputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        repeated = run_changed(recorded.model, batch, outlets, recorded.autocast)
    return any(name in repeated and not torch.equal(tensor, repeated[name]) for name, tensor in outputs.items())


def check_independence(
    recorded: RecordedPass,
    sites: Sequence[GridActivations],
    scores: Tensor,
    gradients: Sequence[Tensor | None] | None = None,
) -> None:
    """Add a check that raises `DependentImagesError` if an image's score depends on another image's activations.

    The scores are differentiated twice. The second time, each image's score is first multiplied by a random weight. If
    images are independent, each image's gradient is then multiplied by the image's weight. If there are several
    classes, a random weighted sum of their scores is used. If `scores` are (N,1), `gradients` may hold the gradients
    (1,N,...) at the layers, if they are known.
    """
    inputs = [site.recorded for site in sites]
    if gradients is None or scores.shape[1] > 1:
        with torch.enable_grad():
            scores = scores @ _sample_weights(scores.shape[1], scores.dtype, scores.device)[:, None]
        gradients = next(jacobian(scores, inputs, scaled=recorded.has_float16))
    weights = _sample_weights(len(scores), scores.dtype, scores.device)
    with torch.enable_grad():
        weighted = scores * weights[:, None]
    weighted_gradients = next(jacobian(weighted, inputs, scaled=recorded.has_float16))
    for site, gradient, weighted_gradient in zip(sites, gradients, weighted_gradients):
        if gradient is None or weighted_gradient is None:
            continue
        plain, reweighted = (site.layout.to_grid(tensor[0]) for tensor in (gradient, weighted_gradient))
        errors, largest = _find_largest_errors(reweighted, plain, weights), plain.flatten(1).abs().amax(1)
        # If a softmax subtracts the maximum of the entire batch, rounding errors depend on other images' gradients.
        limits = recorded.tolerance * (largest + largest.amax() / OWN_GRADIENT_FACTOR)
        recorded.checks.add(_require_independence, (errors > limits).any())


def measure_dependence(scores: Tensor, tensor: Tensor, layout: Layout | IndexLayout, gradients: Tensor) -> Tensor:
    """Return, for each image, how much its gradient at a layer depends on the weights of the other images' scores.

    This is the test of `check_independence` for scores (N,1) and one layer. `gradients` (N,1,C,...) are the gradients of
    the scores on the grid.
    """
    weights = _sample_weights(len(scores), scores.dtype, scores.device)
    with torch.enable_grad():
        weighted = (scores * weights[:, None]).sum()
    (gradient,) = differentiate(weighted, [tensor])
    assert gradient is not None  # The unweighted scores have a gradient at this tensor.
    return _find_largest_errors(layout.to_grid(gradient), gradients[:, 0], weights)


def _find_largest_errors(reweighted: Tensor, plain: Tensor, weights: Tensor) -> Tensor:
    """Return, for each image, the largest difference between its reweighted gradient and weight x plain gradient."""
    factors = weights.to(plain).reshape(-1, *[1] * (plain.ndim - 1))
    return torch.addcmul(reweighted, plain, factors, value=-1).abs_().amax(tuple(range(1, plain.ndim)))


def confirm_dependence(recorded: RecordedPass) -> bool:
    """Return whether an image's scores have a gradient at another image's activations, beyond rounding; warn if so.

    Call this function after `check_independence` has failed. It takes one backward pass per image. `check_independence`
    may fail although images are independent: if terms cancel, or if a part of the model has lower precision.
    """
    layouts = recorded.layouts
    inputs = [recorded.activations[name] for name in layouts]
    for image in range(len(recorded.scored.values)):
        with torch.enable_grad():
            image_scores = recorded.scored.values[image : image + 1].sum(1, keepdim=True)
        gradients = next(jacobian(image_scores, inputs, scaled=recorded.has_float16))
        for layout, gradient in zip(layouts.values(), gradients):
            if gradient is not None:
                largest = layout.to_grid(gradient[0]).nan_to_num(0, 0, 0).flatten(1).abs().amax(1)
                is_reached = largest > ROUNDING * torch.finfo(gradient.dtype).eps * largest[image]
                is_reached[image] = False
                if bool(is_reached.any()):
                    warn_of_dependence(recorded.modules)
                    return True
    return False


def _require_independence(is_dependent: list[float]) -> None:
    if any(is_dependent):
        raise DependentImagesError


@functools.lru_cache(maxsize=64)
def _sample_weights(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random weights from 0.5 to 1.5. Random signs would often be equal, and equal weights hide a dependence."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.rand(count, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype) + 0.5


def compute_separate_gradients(
    recorded: RecordedPass, sites: Sequence[GridActivations], scores: Tensor
) -> Iterator[list[tuple[Tensor, RowRanges]]]:
    """Yield a single list: for each layer, the gradients (N,K,C,...) of each image's own scores, and their ranges."""
    inputs = [site.recorded for site in sites]
    rows: list[list[Tensor]] = [[] for _ in sites]
    for image in range(len(scores)):
        with torch.enable_grad():
            image_scores = scores[image : image + 1]
        gradients_of_classes = jacobian(image_scores, inputs, scaled=recorded.has_float16)
        chunks = [fill_missing_gradients(gradients, inputs) for gradients in gradients_of_classes]
        for site, image_rows, gradients in zip(sites, rows, zip(*chunks)):
            on_grid = [site.to_grid(gradient, "gradients")[0][image : image + 1] for gradient in gradients]
            image_rows.append(torch.cat(on_grid, 1))
    joined = [torch.cat(image_rows) for image_rows in rows]
    yield [(gradients, RowRanges(read_row_ranges(gradients, "The gradients are"))) for gradients in joined]
