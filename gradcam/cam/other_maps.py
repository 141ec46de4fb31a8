"""Compute maps of the less common kinds: local gradients, second derivatives, and methods that run the model again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, product

import torch
from torch import Tensor

from gradcam.adapters.base import LocalGradient
from gradcam.cam.deferred_checks import read_row_ranges
from gradcam.cam.forward import RecordedPass
from gradcam.cam.grid import GridActivations
from gradcam.cam.methods.attention_capture import AttentionLog
from gradcam.cam.methods.base import (
    AttentionMethod,
    CurvatureMethod,
    GradientMethod,
    InputMethod,
    Method,
    RerunMethod,
    WordMethod,
    compute_checked,
)
from gradcam.cam.rounding import DenoisedMaps, MethodMaps, denoise_method, mark_rounding
from gradcam.errors import BlindLayerError, TargetError
from gradcam.hooks.containers import at_least_float32
from gradcam.hooks.memory import RerunBudget
from gradcam.hooks.second_order import hessian_products
from gradcam.layers.layout import Layout
from gradcam.targets.base import TargetScores
from gradcam.targets.classes import FINER_RIVAL_WEIGHT, compute_contrast, find_nearest_rivals
from gradcam.targets.repeated import RepeatedTarget

# In the maps of these methods, a cell depends only on the same cell of the layer. If that cell's gradient is zero, the
# map is zero at the cell.
LOCAL_FUNCTIONS = ("one_pass:hirescam", "one_pass:elementwise_gradcam", "one_pass:layercam")


def differentiate_locally(
    recorded: RecordedPass, sites: Sequence[GridActivations], methods: Sequence[Method]
) -> list[list[LocalGradient]] | None:
    """Return each layer's gradients as small windows of nonzero values; None if only autograd can compute them.

    Such windows exist if each score depends on only a few cells of a layer, as the score of a detected box does.
    """
    methods = [method for method in methods if isinstance(method, (GradientMethod, CurvatureMethod))]
    differentiate = recorded.scored.differentiate
    is_plain = all(isinstance(site.layout, Layout) and site.layout.kind == "channels first" for site in sites)
    is_local = all(method.function in LOCAL_FUNCTIONS and method.join is None for method in methods)
    if differentiate is None or not (methods and is_plain and is_local):
        return None
    return differentiate([site.recorded for site in sites])


def apply_local_gradient_methods(
    recorded: RecordedPass,
    gradients_by_site: Sequence[tuple[GridActivations, list[LocalGradient]]],
    methods: Sequence[GradientMethod],
) -> Iterator[MethodMaps]:
    """Yield the maps of gradient methods from local gradients and the matching parts of the activations."""
    shape = recorded.scored.values.shape
    for (site, local_gradients), method in product(gradients_by_site, methods):
        blank = DenoisedMaps(site.grid.new_zeros(*shape, *site.grid.shape[2:]))
        maps, rounding_mask = blank.maps, mark_rounding(blank)
        is_blind = [True] * len(maps)
        for size, group in groupby(sorted(local_gradients, key=_size), key=_size):
            images, scores, tops, lefts, values = zip(*group)
            gradients = torch.stack(values)
            ranges = read_row_ranges(gradients, f"The gradients at layer '{site.layer}' are")
            rows = [slice(top, top + size[0]) for top in tops]
            columns = [slice(left, left + size[1]) for left in lefts]
            parts = torch.stack([site.grid[image, :, y, x] for image, y, x in zip(images, rows, columns)])
            inputs = parts, at_least_float32(gradients)[:, None]
            (denoised,) = denoise_method(partial(compute_checked, method), recorded.tolerance, *inputs)
            masks = mark_rounding(denoised)
            for i, (image, score) in enumerate(zip(images, scores)):
                is_blind[image] &= ranges[i] == (0, 0)
                maps[image, score, rows[i], columns[i]] = denoised.maps[i, 0]
                rounding_mask[image, score] = masks[i, 0]
        yield MethodMaps(site.layer, method.name, [DenoisedMaps(maps, rounding_mask)], is_blind)


def _size(gradient: LocalGradient) -> tuple[int, ...]:
    return tuple(gradient.values.shape[1:])


def apply_other_methods(
    recorded: RecordedPass,
    sites: Sequence[GridActivations],
    methods: Sequence[Method],
    *,
    reruns: tuple[RerunBudget, AttentionLog] | None,
    one_by_one: bool,
    check_mixing: bool,
) -> Iterator[MethodMaps]:
    """Yield the maps of all methods that need more than activations and first derivatives.

    The arguments are as in `maps.compute_maps`. `one_by_one` is True if images depend on one another. With
    `check_mixing`, check that images do not depend on one another.
    """
    second_order = [method for method in methods if isinstance(method, CurvatureMethod)]
    if second_order:
        if check_mixing:
            from gradcam.cam.independence import check_independence

            check_independence(recorded, sites, recorded.scored.values)
        yield from _apply_curvature_methods(recorded, sites, second_order, one_by_one=one_by_one)
    for site, method in product(sites, methods):
        if isinstance(method, WordMethod):
            yield MethodMaps(site.layer, method.name, [DenoisedMaps(method.compute(recorded, site))])
    if reruns is None:
        return
    budget, log = reruns
    recorded.checks.flush()  # Report problems before the slow methods run.
    for method in methods:
        if isinstance(method, RerunMethod):
            yield from (_apply_rerun_method(recorded, site, method, budget) for site in sites)
        elif isinstance(method, InputMethod):
            yield MethodMaps("input", method.name, [method.compute(recorded, budget)])
        elif isinstance(method, AttentionMethod):
            yield MethodMaps("attention", method.name, [DenoisedMaps(method.compute(recorded, log, budget))])


def _apply_curvature_methods(
    recorded: RecordedPass, sites: Sequence[GridActivations], methods: Sequence[CurvatureMethod], *, one_by_one: bool
) -> Iterator[MethodMaps]:
    """Yield the maps of second-order methods, with two backward passes per class and layer.

    If images depend on one another (`one_by_one`), this takes two passes per class, layer and image.
    """
    scores, tolerance = recorded.scored.values, recorded.tolerance
    groups = [slice(image, image + 1) for image in range(len(scores))] if one_by_one else [slice(None)]
    with torch.enable_grad():
        grouped_scores = [scores[images] for images in groups] if one_by_one else [scores]
    for site in sites:
        derivatives = [hessian_products(group, site.recorded, scaled=recorded.has_float16) for group in grouped_scores]
        for derivatives_of_class in zip(*derivatives):
            first, second = (
                [site.to_grid(pair[order], quantity) for pair in derivatives_of_class]
                for order, quantity in enumerate(("gradients", "second derivatives"))
            )
            gradient, curvature = (
                torch.cat([on_grid[images] for (on_grid, _), images in zip(pairs, groups)]) for pairs in (first, second)
            )
            blind = [limits == (0, 0) for (_, ranges), images in zip(first, groups) for limits in ranges[images]]
            for method in methods:
                pieces = denoise_method(partial(compute_checked, method), tolerance, site.grid, gradient, curvature)
                yield MethodMaps(site.layer, method.name, pieces, blind)


def _apply_rerun_method(
    recorded: RecordedPass, site: GridActivations, method: RerunMethod, budget: RerunBudget
) -> MethodMaps:
    blind_error = None
    try:
        denoised = method.compute(recorded, site, budget)
    except BlindLayerError as error:
        blind_error = error
        denoised = DenoisedMaps(site.grid.new_zeros(*recorded.scored.values.shape, *site.grid.shape[2:]))
    # A zero map shows that changes of the activations did not change the score, unless all activations are zero.
    has_map = denoised.maps.flatten(1).any(1) | mark_rounding(denoised).flatten(1).any(1)
    blind = site.grid.flatten(1).any(1) & ~has_map.to(site.grid.device)
    flags = blind.tolist() if method.is_signed else None
    return MethodMaps(site.layer, method.name, [denoised], flags, blind_error)


def compute_finer_scores(name: str, scored: TargetScores) -> Tensor:
    """Return Finer-CAM's scores: each class's logit minus a share of the mean logit of similar classes.

    All augmented views of an image have the same similar classes.
    """
    if scored.logits is None or scored.classes is None:
        raise TargetError(f"{name} compares classes, but the target is a function: pass class indices as target=.")
    target, views = scored.target, 1
    if isinstance(target, RepeatedTarget):
        target, views = target.target, target.blocks
    target = getattr(target, "target", target)  # For images in pieces, a target wraps the class target.
    if target.score != "logit":
        raise TargetError(f"{name} defines its own score, but score={target.score!r} was requested: leave score= out.")
    images = len(scored.logits) // views
    rivals = find_nearest_rivals(scored.logits[:images].detach(), scored.classes[:images]).repeat(views, 1, 1)
    with torch.enable_grad():
        return compute_contrast(scored.logits, scored.classes, rivals, FINER_RIVAL_WEIGHT)
