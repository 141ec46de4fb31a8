"""Compute maps from a recorded forward pass: differentiate on the grid, then apply methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, groupby, product
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradcam.adapters.base import LocalGradient
from gradcam.cam.deferred_checks import DeferredChecks, RowRanges, read_row_ranges
from gradcam.cam.forward import RecordedPass, warn_of_dependence
from gradcam.cam.grid import GridActivations, at_least_float32, blind_layer, choose_activations, warn_of_blind_images
from gradcam.cam.methods.attention_capture import AttentionLog
from gradcam.cam.methods.base import (
    ActivationMethod,
    AttentionMethod,
    CurvatureMethod,
    GradientMethod,
    InputMethod,
    Method,
    RerunMethod,
)
from gradcam.cam.rounding import DenoisedMaps, denoise_method, keep_all
from gradcam.errors import BlindLayerError, GradcamError, TargetError, join_names, shorten, warn
from gradcam.hooks.autograd import hessian_products, jacobian
from gradcam.hooks.memory import RerunBudget
from gradcam.layers.layout import Layout, ReshapeSpec
from gradcam.targets.base import TargetScores
from gradcam.targets.classes import FINER_RIVAL_WEIGHT, RepeatedTarget, compute_contrast, find_nearest_rivals

MethodKind = TypeVar("MethodKind", bound=Method)
Key = tuple[str, str]  # (layer, method), or (place, method) for a method without a layer.

ROUNDING = 256  # Units in the last place. Gradients up to this size at another image count as zero.
OWN_GRADIENT_FACTOR = 64  # An image's own gradient may cause this many times the rounding errors of another one's.
# Negative values matter if their sum of squares exceeds this share of the positive values'. SiLU and GELU stay below
# it.
MIN_NEGATIVE_ENERGY = 0.2


def has_both_signs(activations: Tensor) -> bool:
    """Return whether negative activations matter, from the sums of squares of both signs."""
    values = activations.detach().float()
    return bool(values.clamp(max=0).square().sum() > MIN_NEGATIVE_ENERGY * values.clamp(min=0).square().sum())


def warn_of_signs(activations: Mapping[str, Tensor], methods: Sequence[Method]) -> None:
    """Warn if a method that assumes non-negative activations is used at layers (by name) with both signs."""
    names = [method.name for method in methods if method.assumes_positive and method.place == "layer"]
    layers = [layer for layer, tensor in activations.items() if names and has_both_signs(tensor)]
    if layers:
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        warn(
            f"The activations of {join_names(layers[:1])}{more} have both signs, but {', '.join(names)} "
            f"assume{'s' if len(names) == 1 else ''} no negative values: heatmaps may be wrong. Choose a layer after a ReLU "
            "(`gradcam layers` marks layers of both signs with ±), or another method."
        )


@dataclass(frozen=True)
class Maps:
    """The maps of a method at a layer, signed (N,K,...) in float32, and the scores (N,K) that they explain.

    `levels`: one map, or several to be added once the evidence (positive or negative) is selected. `rounding_mask`
    (N,K,2): where rounding errors were replaced by zeros, as in `DenoisedMaps`; None if nowhere.
    """

    levels: list[Tensor]
    scores: Tensor
    rounding_mask: Tensor | None = None


@dataclass(frozen=True)
class _MapCollector:
    """Collects maps by site and method: pieces (N,k,...) for a few classes each, and the images without gradient.

    Until deferred checks are flushed, they may still change both. `errors`: the first is raised if no site has a
    gradient.
    """

    pieces: dict[Key, list[list[DenoisedMaps]]] = field(default_factory=dict)
    blind: dict[Key, list[list[bool] | RowRanges]] = field(default_factory=dict)
    errors: list[BlindLayerError] = field(default_factory=list)

    def add(
        self, site: str, method: Method, pieces: list[DenoisedMaps], blind: list[bool] | RowRanges | None = None
    ) -> None:
        """Add pieces of maps. An image is blind (without gradient) if it is blind in all additions.

        `blind`: one flag per image, or the ranges of its gradients, which are zero for a blind image.
        """
        key = site, method.name
        self.pieces.setdefault(key, []).append(pieces)
        if blind is not None:
            self.blind.setdefault(key, []).append(blind)

    def list_blind(self, site: str, method: str) -> list[list[bool]]:
        """List the blind images of each addition; call this after the checks are flushed."""
        additions = self.blind[site, method]
        return [[limits == (0, 0) for limits in rows] if isinstance(rows, RowRanges) else rows for rows in additions]

    def list_pieces(self, key: Key) -> list[DenoisedMaps]:
        """Return the current pieces."""
        return [piece for pieces in self.pieces[key] for piece in pieces]


def compute_maps(
    recorded: RecordedPass,
    methods: Sequence[Method],
    budget: RerunBudget,
    log: AttentionLog,
    *,
    reshape: ReshapeSpec = None,
    join: str | None = None,
) -> dict[Key, Maps]:
    """Compute maps by layer and method, in the order of the methods.

    For methods without a layer, the key has their `place` instead. `log` holds the attention of the recorded pass. With
    `join`, all layers are levels of one map.
    """
    try:
        try:
            return _compute_maps(recorded, methods, budget, log, reshape=reshape, join=join)
        except _DependentImagesError:
            is_dependent = _confirm_dependence(recorded)
            if is_dependent:
                warn_of_dependence(recorded.modules)
            return _compute_maps(
                recorded, methods, budget, log, reshape=reshape, join=join, one_by_one=is_dependent, check_mixing=False
            )
    except Exception:
        recorded.checks.flush()  # If an earlier value is NaN, that is the true cause.
        raise


class _DependentImagesError(Exception):
    """The score of one image depends on the activations of another image."""


def _compute_maps(
    recorded: RecordedPass,
    methods: Sequence[Method],
    budget: RerunBudget,
    log: AttentionLog,
    *,
    reshape: ReshapeSpec,
    join: str | None,
    one_by_one: bool = False,
    check_mixing: bool = True,
) -> dict[Key, Maps]:
    sites_by_layer = choose_activations(recorded, reshape, join=join)
    # The key None is for the requested scores (N,K). Other keys are for scores that methods define themselves.
    scores: dict[str | None, Tensor] = {None: recorded.scored.values}
    for method in methods:
        if method.score is not None and method.score not in scores:
            scores[method.score] = _compute_finer_scores(method.name, recorded.scored)
    # A level of a pyramid may also be requested by name, but is computed once.
    by_name = {site.layer: site for level in sites_by_layer.values() for site in level}
    sites, collector = list(by_name.values()), _MapCollector()
    warn_of_signs({site.layer: site.grid for site in sites}, methods)
    first_order, second_order = (_select_methods(GradientMethod, methods), _select_methods(CurvatureMethod, methods))
    local_gradients = None if second_order or len(scores) > 1 else _differentiate_locally(recorded, sites, first_order)
    check_mixing = check_mixing and len(scores[None]) > 1
    for activation_method, site in product(_select_methods(ActivationMethod, methods), sites):
        class_agnostic = _compute_checked(activation_method, site.grid)[:, None].repeat_interleave(
            recorded.scored.values.shape[1], 1
        )
        collector.add(site.layer, activation_method, [keep_all(class_agnostic)])
    if local_gradients is None:
        _apply_gradient_methods(
            recorded, sites, first_order, scores, collector, one_by_one=one_by_one, check_mixing=check_mixing
        )
    else:
        _apply_local_gradient_methods(recorded, list(zip(sites, local_gradients)), first_order, collector)
    if second_order and check_mixing and not first_order:
        _check_independence_of_classes(recorded, sites, scores[None])
    _apply_curvature_methods(recorded, sites, second_order, collector, one_by_one=one_by_one)
    if any(not isinstance(method, (ActivationMethod, GradientMethod, CurvatureMethod)) for method in methods):
        recorded.checks.flush()  # Report problems before the slow methods run.
    _apply_rerun_methods(recorded, sites, _select_methods(RerunMethod, methods), collector, budget)
    for input_method in _select_methods(InputMethod, methods):
        collector.add("input", input_method, [input_method.compute(recorded, budget)])
    for attention_method in _select_methods(AttentionMethod, methods):
        collector.add("attention", attention_method, [keep_all(attention_method.compute(recorded, log, budget))])
    maps = _finish_maps(collector, _join_scores(list(scores.values())).detach(), recorded.checks)
    _check_blindness(sites_by_layer, collector, recorded)
    result = {}
    for method in methods:
        explained_scores = scores[method.score].detach().float()
        places = {layer: [site.layer for site in level] for layer, level in sites_by_layer.items()}
        for layer, names in (places if method.place == "layer" else {method.place: [method.place]}).items():
            levels, rounding_mask = zip(*(maps[name, method.name] for name in names))
            masks = [mask for mask in rounding_mask if mask is not None]
            result[layer, method.name] = Maps([*levels], explained_scores, torch.stack(masks).any(0) if masks else None)
    return {key: result[key] for layer in (*sites_by_layer, "input", "attention") for key in result if key[0] == layer}


def _check_independence(
    recorded: RecordedPass, sites: Sequence[GridActivations], scores: Tensor, unweighted: Sequence[Tensor | None]
) -> None:
    """Add a check that raises `_DependentImagesError` if an image's score depends on another image's activations.

    `unweighted`: the gradients (N,...) of the sum of `scores` (N,1). The scores are multiplied by a random weight for
    each image. If images are independent, this multiplies each image's gradient by its weight. The check takes one
    backward pass.
    """
    weights = _sample_weights(len(scores), scores)
    with torch.enable_grad():
        weighted = scores * weights[:, None]
    inputs = [site.recorded for site in sites]
    for site, gradient, weighted_gradient in zip(
        sites, unweighted, next(jacobian(weighted, inputs, scaled=recorded.has_float16))
    ):
        if gradient is None or weighted_gradient is None:
            continue
        gradients, weighted_gradients = (
            site.layout.to_grid(tensor).flatten(1) for tensor in (gradient, weighted_gradient[0])
        )
        errors = (weighted_gradients - gradients * weights.to(gradients)[:, None]).abs().amax(1)
        largest = gradients.abs().amax(1)
        # If a softmax subtracts the maximum of the whole batch, other images' gradients leave rounding errors.
        limits = recorded.tolerance * (largest + largest.amax() / OWN_GRADIENT_FACTOR)
        recorded.checks.add(_require_independence, (errors > limits).any())


def _confirm_dependence(recorded: RecordedPass) -> bool:
    """Return whether an image's scores have a gradient at another image's activations, beyond rounding.

    This takes one backward pass per image, so it runs only after `_check_independence` failed. That check also fails if
    terms cancel, or if a part of the model has lower precision.
    """
    layouts = recorded.layouts
    placed = [(layouts[name], tensor) for name, tensor in recorded.activations.items() if name in layouts]
    for image in range(len(recorded.scored.values)):
        with torch.enable_grad():
            image_scores = recorded.scored.values[image : image + 1].sum(1, keepdim=True)
        for (layout, _), gradient in zip(
            placed, next(jacobian(image_scores, [tensor for _, tensor in placed], scaled=recorded.has_float16))
        ):
            if gradient is not None:
                largest = layout.to_grid(gradient[0]).nan_to_num(0, 0, 0).flatten(1).abs().amax(1)
                is_reached = largest > ROUNDING * torch.finfo(gradient.dtype).eps * largest[image]
                is_reached[image] = False
                if bool(is_reached.any()):
                    return True
    return False


def _require_independence(is_dependent: list[float]) -> None:
    if any(is_dependent):
        raise _DependentImagesError


def _sample_weights(count: int, like: Tensor) -> Tensor:
    """Return random weights from 0.5 to 1.5; random signs would often be equal, which would hide a dependence."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.rand(count, generator=generator, dtype=torch.float32, device="cpu").to(like) + 0.5


def _finish_maps(
    collector: _MapCollector, scores: Tensor, checks: DeferredChecks
) -> dict[Key, tuple[Tensor, Tensor | None]]:
    """Run the pending checks; return the maps by site and method, each with a mask of where rounding was removed."""
    original = {key: collector.list_pieces(key) for key in collector.pieces}
    maps = {key: _join(pieces) for key, pieces in original.items()}
    _require_ranges(maps, scores, checks)
    current = {key: collector.list_pieces(key) for key in original}
    changed = {
        key: _join(pieces) for key, pieces in current.items() if list(map(id, pieces)) != list(map(id, original[key]))
    }
    if changed:  # A check has replaced these maps, because terms may cancel in them.
        _require_ranges(changed, scores, checks)
    return {key: (joined.float(), _join_rounding(current[key])) for key, joined in (maps | changed).items()}


def _join(pieces: Sequence[DenoisedMaps]) -> Tensor:
    return pieces[0].maps if len(pieces) == 1 else torch.cat([piece.maps for piece in pieces], 1)


def _require_ranges(maps: Mapping[Key, Tensor], scores: Tensor, checks: DeferredChecks) -> None:
    checks.add_range(scores, "The scores are")
    for (site, name), values in maps.items():
        checks.add_range(values.float(), f"The {name} maps at layer '{site}', in float32, are")
        if values.dtype == torch.float64:
            peaks = values.flatten(2).abs().amax(2)
            is_lost = (peaks > 0) & (peaks < torch.finfo(torch.float32).tiny)
            checks.add(partial(_warn_of_underflow, f"{name} maps at layer '{site}'"), is_lost.sum())
    checks.flush()


def _join_rounding(pieces: Sequence[DenoisedMaps]) -> Tensor | None:
    """Return a mask (N,K,2) of where rounding was removed from maps; None if nowhere."""
    if all(piece.rounding_mask is None for piece in pieces):
        return None
    rounding_mask = torch.cat([_mark_rounding(piece) for piece in pieces], 1)
    return rounding_mask if rounding_mask.any() else None


def _mark_rounding(piece: DenoisedMaps) -> Tensor:
    nowhere = piece.maps.new_zeros((*piece.maps.shape[:2], 2), dtype=torch.bool)
    return nowhere if piece.rounding_mask is None else piece.rounding_mask


def _warn_of_underflow(subject: str, counts: list[float]) -> None:
    if counts[0]:
        warn(
            f"{counts[0]:.0f} of the {subject} are too small for float32: they lose precision, or are blank. Pass target=, "
            "a function that multiplies the score by a large constant."
        )


def _check_blindness(
    sites_by_layer: Mapping[str, Sequence[GridActivations]], collector: _MapCollector, recorded: RecordedPass
) -> None:
    """Raise `BlindLayerError` if no layer has a gradient; warn of images and layers without one.

    One level with a gradient is enough for a layer. Images without detections have no score and do not count.
    """
    instances = recorded.scored.instances
    has_score = [True] * len(recorded.scored.values) if instances is None else list(map(bool, instances))
    blind: dict[Key, list[bool]] = {
        (layer, name): list(
            compress(
                map(all, zip(*(rows for site in level for rows in collector.list_blind(site.layer, name)))), has_score
            )
        )
        for layer, level in sites_by_layer.items()
        for name in {name for _, name in collector.blind}
    }
    if blind and all(all(flags) for flags in blind.values()):
        raise collector.errors[0] if collector.errors else blind_layer(next(iter(sites_by_layer.values()))[0])
    for layer in sites_by_layer:
        flags_of_layer = [flags for key, flags in blind.items() if key[0] == layer]
        if any(any(flags) for flags in flags_of_layer):
            warn_of_blind_images(layer, all_images=any(all(flags) for flags in flags_of_layer))


def _select_methods(kind: type[MethodKind], methods: Sequence[Method]) -> list[MethodKind]:
    return [method for method in methods if isinstance(method, kind)]


def _compute_checked(method: ActivationMethod | GradientMethod | CurvatureMethod, *inputs: Tensor) -> Tensor:
    """Return the method's maps (N,K,...), or (N,...) from activations alone; raise `GradcamError` for other results."""
    maps: Any = method.compute(*inputs)
    if isinstance(method.function, str):
        return maps  # The package's own methods are tested.
    expected, grid = inputs[-1].shape[: len(inputs[1:2]) + 1], inputs[0].shape[2:]
    form = f"{str(inputs[0].dtype).removeprefix('torch.')} {(*expected, *grid)} on {inputs[0].device}"
    if not isinstance(maps, Tensor):
        raise GradcamError(f"The method {method.name} returned {shorten(maps)}, expected a tensor {form}.")
    properties = [(tensor.dtype, tensor.device, tensor.layout) for tensor in (maps, inputs[0])]
    if maps.shape != (*expected, *grid) or properties[0] != properties[1]:
        description = f"{str(maps.dtype).removeprefix('torch.')} {tuple(maps.shape)} on {maps.device}"
        description += "" if maps.layout == torch.strided else f", {str(maps.layout).removeprefix('torch.')}"
        raise GradcamError(f"The method {method.name} returned a tensor {description}, expected {form}.")
    if not maps.isfinite().all():
        raise GradcamError(f"The method {method.name} returned maps that are NaN or infinite in places.")
    return maps


def _apply_gradient_methods(
    recorded: RecordedPass,
    sites: Sequence[GridActivations],
    methods: Sequence[GradientMethod],
    scores: dict[str | None, Tensor],
    collector: _MapCollector,
    *,
    one_by_one: bool,
    check_mixing: bool,
) -> None:
    """Apply gradient methods; the scores of all methods share one backward pass."""
    if not methods:
        return
    score_keys = list(dict.fromkeys(method.score for method in methods))
    with torch.enable_grad():
        joined = _join_scores([scores[score_key] for score_key in score_keys])
    classes, tolerance, scaled = recorded.scored.values.shape[1], recorded.tolerance, recorded.has_float16
    first_class = 0
    chunks = _compute_gradients(
        recorded, sites, joined, scaled=scaled, one_by_one=one_by_one, check_mixing=check_mixing
    )
    for chunk in chunks:
        for site, (on_grid, ranges) in zip(sites, chunk):
            for score_key in score_keys:
                start = score_keys.index(score_key) * classes - first_class
                gradients = on_grid[:, max(start, 0) : max(start + classes, 0)]
                if gradients.shape[1] == 0:
                    continue
                blind = ranges if len(score_keys) == 1 else (~gradients.flatten(1).any(1)).tolist()
                for method in methods:
                    if method.score == score_key:
                        # With deferred checks, all chunks' gradients would stay in memory until the flush.
                        has_all_classes = gradients.shape[1] == classes
                        checks = recorded.checks if has_all_classes else None
                        peaks = (site.ranges, ranges)
                        pieces = denoise_method(
                            partial(_compute_checked, method),
                            tolerance,
                            site.grid,
                            gradients,
                            peaks=peaks,
                            checks=checks,
                        )
                        collector.add(site.layer, method, pieces, blind)
        first_class += on_grid.shape[1]


def _differentiate_locally(
    recorded: RecordedPass, sites: Sequence[GridActivations], methods: Sequence[GradientMethod]
) -> list[list[LocalGradient]] | None:
    """Return the local gradients at each site, of scores that read small parts of it; None if they do not suffice."""
    differentiate = recorded.scored.differentiate
    is_plain = all(isinstance(site.layout, Layout) and site.layout.kind == "channels first" for site in sites)
    if differentiate is None or not methods or not is_plain or not all(method.is_local for method in methods):
        return None
    return differentiate([site.recorded for site in sites])


def _apply_local_gradient_methods(
    recorded: RecordedPass,
    gradients_by_site: Sequence[tuple[GridActivations, list[LocalGradient]]],
    methods: Sequence[GradientMethod],
    collector: _MapCollector,
) -> None:
    """Apply gradient methods to local gradients and the matching parts of the activations, in groups of equal size."""
    shape = recorded.scored.values.shape
    for (site, local_gradients), method in product(gradients_by_site, methods):
        blank = DenoisedMaps(site.grid.new_zeros(*shape, *site.grid.shape[2:]))
        maps, rounding_mask = blank.maps, _mark_rounding(blank)
        is_blind = [True] * len(maps)
        for size, group in groupby(sorted(local_gradients, key=_size), key=_size):
            equal_sized = list(group)
            gradients = torch.stack([local.values for local in equal_sized])
            for local, (low, high) in zip(
                equal_sized, read_row_ranges(gradients, f"The gradients at layer '{site.layer}' are")
            ):
                is_blind[local.image] &= low == high == 0
            windows = [
                (slice(local.top, local.top + size[0]), slice(local.left, local.left + size[1]))
                for local in equal_sized
            ]
            parts = torch.stack(
                [site.grid[local.image, :, rows, columns] for local, (rows, columns) in zip(equal_sized, windows)]
            )
            inputs = parts, at_least_float32(gradients)[:, None]
            (denoised,) = denoise_method(partial(_compute_checked, method), recorded.tolerance, *inputs)
            for local, (rows, columns), part_maps, part_mask in zip(
                equal_sized, windows, denoised.maps, _mark_rounding(denoised)
            ):
                maps[local.image, local.score, rows, columns], rounding_mask[local.image, local.score] = (
                    part_maps[0],
                    part_mask[0],
                )
        collector.add(site.layer, method, [DenoisedMaps(maps, rounding_mask)], is_blind)


def _size(gradient: LocalGradient) -> tuple[int, ...]:
    return tuple(gradient.values.shape[1:])


def _check_independence_of_classes(recorded: RecordedPass, sites: Sequence[GridActivations], scores: Tensor) -> None:
    """Add the check of `_check_independence` for scores (N,K), after differentiating a weighted sum of the classes."""
    with torch.enable_grad():
        total = scores @ _sample_weights(scores.shape[1], scores)[:, None]
    chunk = next(jacobian(total, [site.recorded for site in sites], scaled=recorded.has_float16))
    _check_independence(recorded, sites, total, [None if gradient is None else gradient[0] for gradient in chunk])


def _compute_gradients(
    recorded: RecordedPass,
    sites: Sequence[GridActivations],
    scores: Tensor,
    *,
    scaled: bool,
    one_by_one: bool,
    check_mixing: bool,
) -> Iterator[list[tuple[Tensor, RowRanges]]]:
    """Yield, for a few classes at a time, the gradients (N,k,C,...) at each site, and their range in each image.

    If images depend on one another (`one_by_one`), each image gets the gradient of its own scores, for all classes at
    once. `check_mixing`: check that images do not depend on one another.
    """
    inputs, checks = [site.recorded for site in sites], recorded.checks
    if not one_by_one:
        for chunk in jacobian(scores, inputs, scaled=scaled):
            pairs = zip(sites, _fill_missing_gradients(chunk, inputs))
            yield [site.to_grid(gradient, "gradients", checks) for site, gradient in pairs]
        if check_mixing and scores.shape[1] == 1:
            _check_independence(
                recorded, sites, scores, [None if gradient is None else gradient[0] for gradient in chunk]
            )
        elif check_mixing:
            _check_independence_of_classes(recorded, sites, scores)
        return
    rows: list[list[Tensor]] = [[] for _ in sites]
    for image in range(len(scores)):
        with torch.enable_grad():
            image_scores = scores[image : image + 1]
        chunks = [
            _fill_missing_gradients(gradient, inputs) for gradient in jacobian(image_scores, inputs, scaled=scaled)
        ]
        for site, image_rows, gradients in zip(sites, rows, zip(*chunks)):
            on_grid = [site.to_grid(gradient, "gradients")[0][image : image + 1] for gradient in gradients]
            image_rows.append(torch.cat(on_grid, 1))
    joined = [torch.cat(image_rows) for image_rows in rows]
    yield [(gradients, RowRanges(read_row_ranges(gradients, "The gradients are"))) for gradients in joined]


def _fill_missing_gradients(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Replace missing gradients by zeros, unless all layers lack a path to the score: then `to_grid` raises."""
    count = next((len(gradient) for gradient in gradients if gradient is not None), None)
    if count is None:
        return gradients
    return [
        tensor.new_zeros(count, *tensor.shape) if gradient is None else gradient
        for gradient, tensor in zip(gradients, inputs)
    ]


def _apply_curvature_methods(
    recorded: RecordedPass,
    sites: Sequence[GridActivations],
    methods: Sequence[CurvatureMethod],
    collector: _MapCollector,
    *,
    one_by_one: bool,
) -> None:
    """Apply second-order methods, with two backward passes per class and layer.

    If images depend on one another (`one_by_one`), this takes two passes per class, layer and image.
    """
    if not methods:
        return
    scores, tolerance = recorded.scored.values, recorded.tolerance
    groups = [slice(image, image + 1) for image in range(len(scores))] if one_by_one else [slice(None)]
    with torch.enable_grad():
        grouped_scores = [scores[images] for images in groups] if one_by_one else [scores]
    for site in sites:
        derivatives = [
            hessian_products(group_scores, site.recorded, scaled=recorded.has_float16)
            for group_scores in grouped_scores
        ]
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
                pieces = denoise_method(partial(_compute_checked, method), tolerance, site.grid, gradient, curvature)
                collector.add(site.layer, method, pieces, blind)


def _apply_rerun_methods(
    recorded: RecordedPass,
    sites: Sequence[GridActivations],
    methods: Sequence[RerunMethod],
    collector: _MapCollector,
    budget: RerunBudget,
) -> None:
    for method, site in product(methods, sites):
        try:
            denoised = method.compute(recorded, site, budget)
        except BlindLayerError as error:
            collector.errors.append(error)
            denoised = keep_all(site.grid.new_zeros(*recorded.scored.values.shape, *site.grid.shape[2:]))
        # An image with activations but an empty map is blind: changes of the activations had no effect.
        has_map = denoised.maps.flatten(1).any(1) | _mark_rounding(denoised).flatten(1).any(1)
        blind = site.grid.flatten(1).any(1) & ~has_map.to(site.grid.device)
        collector.add(site.layer, method, [denoised], blind.tolist() if method.is_signed else None)


def _join_scores(scores: Sequence[Tensor]) -> Tensor:
    return scores[0] if len(scores) == 1 else torch.cat(list(scores), 1)


def _compute_finer_scores(name: str, scored: TargetScores) -> Tensor:
    """Return each class's logit minus a share of its rivals' logits; all views of an image have the same rivals."""
    if scored.logits is None or scored.classes is None:
        raise TargetError(f"{name} compares classes, but the target is a function: pass class indices as target=.")
    target, views = scored.target, 1
    if isinstance(target, RepeatedTarget):
        target, views = target.target, target.blocks
    if target.score != "logit":
        raise TargetError(f"{name} defines its own score, but score={target.score!r} was requested: leave score= out.")
    images = len(scored.logits) // views
    rivals = find_nearest_rivals(scored.logits[:images].detach(), scored.classes[:images]).repeat(views, 1, 1)
    with torch.enable_grad():
        return compute_contrast(scored.logits, scored.classes, rivals, FINER_RIVAL_WEIGHT)
