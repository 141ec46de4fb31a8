"""Compute maps from a recorded forward pass: differentiate on the grid, then apply methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradcam.cam.deferred_checks import DeferredChecks, RowRanges
from gradcam.cam.forward import RecordedPass
from gradcam.cam.grid import (
    DependentImagesError,
    GridActivations,
    blind_layer,
    choose_activations,
    warn_of_blind_images,
)
from gradcam.cam.methods.base import ActivationMethod, GradientMethod, Method, compute_checked
from gradcam.cam.plain_maps import Maps
from gradcam.cam.rounding import DenoisedMaps, Key, MethodMaps, denoise_method, mark_rounding
from gradcam.errors import join_names, warn
from gradcam.hooks.autograd import fill_missing_gradients, jacobian

if TYPE_CHECKING:
    from gradcam.cam.methods.attention_capture import AttentionLog
    from gradcam.hooks.memory import RerunBudget
    from gradcam.layers.layout import ReshapeSpec

    Reruns = tuple[RerunBudget, AttentionLog]

# Negative values matter if their sum of squares exceeds this share of the positive values' sum of squares. The outputs
# of SiLU and GELU stay below this share.
MIN_NEGATIVE_ENERGY = 0.2


def has_both_signs(activations: Tensor) -> bool:
    """Return whether negative activations are large enough to matter, as `MIN_NEGATIVE_ENERGY` defines."""
    values = activations.detach().float()
    return bool(values.clamp(max=0).square().sum() > MIN_NEGATIVE_ENERGY * values.clamp(min=0).square().sum())


def warn_of_signs(activations: Mapping[str, Tensor], methods: Sequence[Method]) -> None:
    """Warn if a method assumes non-negative activations, but the activations of a layer have both signs."""
    names = [method.name for method in methods if method.assumes_positive and method.place == "layer"]
    layers = [layer for layer, tensor in activations.items() if names and has_both_signs(tensor)]
    if layers:
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        warn(
            f"The activations of {join_names(layers[:1])}{more} have both signs, but {', '.join(names)} "
            f"assume{'s' if len(names) == 1 else ''} no negative values: heatmaps may be wrong. Choose another method, or a "
            "layer after a ReLU. (In `gradcam layers`, ± marks layers with both signs.)"
        )


def compute_maps(
    recorded: RecordedPass, methods: Sequence[Method], reruns: Reruns | None, *, reshape: ReshapeSpec, join: str | None
) -> dict[Key, Maps]:
    """Compute maps by layer and method, in the order of the methods.

    For a method without a layer, the key has the method's `place` instead of a layer. `reruns` holds the memory budget
    and the attention of the recorded pass, for methods that run the model again. With `join`, all layers are levels of
    one map.
    """
    try:
        sites_by_layer = choose_activations(recorded, reshape, join)
        try:
            return _compute_maps(recorded, sites_by_layer, methods, reruns)
        except DependentImagesError:
            from gradcam.cam.independence import confirm_dependence

            one_by_one = confirm_dependence(recorded)
            return _compute_maps(recorded, sites_by_layer, methods, reruns, one_by_one=one_by_one, check_mixing=False)
    except Exception:
        recorded.checks.flush()  # If an earlier value is NaN, this raises an error that names the true cause.
        raise


def _compute_maps(
    recorded: RecordedPass,
    sites_by_layer: Mapping[str, Sequence[GridActivations]],
    methods: Sequence[Method],
    reruns: Reruns | None,
    *,
    one_by_one: bool = False,
    check_mixing: bool = True,
) -> dict[Key, Maps]:
    # The key None is for the requested scores (N,K). Other keys are for scores that methods define themselves.
    scores: dict[str | None, Tensor] = {None: recorded.scored.values}
    for method in methods:
        if method.score is not None and method.score not in scores:
            from gradcam.cam.other_maps import compute_finer_scores

            scores[method.score] = compute_finer_scores(method.name, recorded.scored)
    # If a level of a feature pyramid is also requested as a layer, compute its maps only once.
    by_name = {site.layer: site for level in sites_by_layer.values() for site in level}
    sites, method_maps = list(by_name.values()), list[MethodMaps]()
    warn_of_signs({site.layer: site.grid for site in sites}, methods)
    first_order = [method for method in methods if isinstance(method, GradientMethod)]
    others = [method for method in methods if not isinstance(method, (ActivationMethod, GradientMethod))]
    check_mixing = check_mixing and len(scores[None]) > 1 and recorded.batch.pieces is None
    for method, site in product(methods, sites):
        if isinstance(method, ActivationMethod):
            class_agnostic = compute_checked(method, site.grid)[:, None]
            repeated = class_agnostic.repeat_interleave(recorded.scored.values.shape[1], 1)
            method_maps.append(MethodMaps(site.layer, method.name, [DenoisedMaps(repeated)]))
    local_gradients = None
    if recorded.scored.differentiate is not None and len(scores) == 1:
        from gradcam.cam.other_maps import apply_local_gradient_methods, differentiate_locally

        local_gradients = differentiate_locally(recorded, sites, methods)
    if local_gradients is not None:
        method_maps += apply_local_gradient_methods(recorded, list(zip(sites, local_gradients)), first_order)
    elif first_order:
        method_maps += _apply_gradient_methods(
            recorded, sites, first_order, scores, one_by_one=one_by_one, check_mixing=check_mixing
        )
    if others:
        from gradcam.cam.other_maps import apply_other_methods

        settings: Any = {"one_by_one": one_by_one, "check_mixing": check_mixing and not first_order}
        method_maps += apply_other_methods(recorded, sites, others, reruns=reruns, **settings)
    maps = _finish_maps(method_maps, _join([*scores.values()]).detach(), recorded.checks)
    _check_blindness(sites_by_layer, method_maps, recorded)
    result = {}
    places = [(layer, [site.layer for site in level]) for layer, level in sites_by_layer.items()]
    for layer, names in (*places, ("input", ["input"]), ("attention", ["attention"])):
        for method in methods:
            if (names[0], method.name) in maps:
                levels, rounding_masks = zip(*(maps[name, method.name] for name in names))
                masks = [mask for mask in rounding_masks if mask is not None]
                rounding_mask = torch.stack(masks).any(0) if masks else None
                result[layer, method.name] = Maps([*levels], scores[method.score].detach().float(), rounding_mask)
    return result


def _finish_maps(
    method_maps: Sequence[MethodMaps], scores: Tensor, checks: DeferredChecks
) -> dict[Key, tuple[Tensor, Tensor | None]]:
    """Run the pending checks, and return each map with its rounding mask, by layer and method."""
    original = _list_pieces(method_maps)
    maps = {key: _join([piece.maps for piece in pieces]) for key, pieces in original.items()}
    _require_ranges(maps, scores, checks)
    current = _list_pieces(method_maps)
    # The checks have run now. If all classes of a map are in one piece, a check may have replaced the piece by a
    # denoised piece.
    changed = {key: pieces for key, pieces in current.items() if pieces[0] is not original[key][0]}
    if changed:
        replaced = {key: _join([piece.maps for piece in pieces]) for key, pieces in changed.items()}
        _require_ranges(replaced, scores, checks)
        maps |= replaced
    return {key: (joined.float(), _join_rounding(current[key])) for key, joined in maps.items()}


def _list_pieces(method_maps: Sequence[MethodMaps]) -> dict[Key, list[DenoisedMaps]]:
    """Return the pieces (a few classes each) of each map, by layer and method. A check may later replace a piece."""
    pieces: dict[Key, list[DenoisedMaps]] = {}
    for part in method_maps:
        pieces.setdefault((part.site, part.method), []).extend(part.pieces)
    return pieces


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)


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
    """Join the rounding masks of all pieces into one mask (N,K,2); None if no rounding errors were removed."""
    if all(piece.rounding_mask is None for piece in pieces):
        return None
    rounding_mask = torch.cat([mark_rounding(piece) for piece in pieces], 1)
    return rounding_mask if rounding_mask.any() else None


def _warn_of_underflow(subject: str, counts: list[float]) -> None:
    if counts[0]:
        problem = f"{counts[0]:.0f} of the {subject} are too small for float32: they lose precision, or are blank"
        warn(f"{problem}. Pass target=, a function that multiplies the score by a large constant.")


def _check_blindness(
    sites_by_layer: Mapping[str, Sequence[GridActivations]], method_maps: Sequence[MethodMaps], recorded: RecordedPass
) -> None:
    """Raise `BlindLayerError` if no layer has a gradient; warn of images and layers without a gradient.

    A layer counts as having a gradient if one of its levels or classes has a gradient. Images without detections have
    no score and are ignored.
    """
    instances = recorded.scored.instances
    has_score = [True] * len(recorded.scored.values) if instances is None else list(map(bool, instances))
    rows: dict[Key, list[list[bool]]] = {}
    for (layer, level), part in product(sites_by_layer.items(), method_maps):
        if part.blind is not None and any(site.layer == part.site for site in level):
            flags = [limits == (0, 0) for limits in part.blind] if isinstance(part.blind, RowRanges) else part.blind
            rows.setdefault((layer, part.method), []).append(flags)
    blind = {key: list(compress(map(all, zip(*rows_of_key)), has_score)) for key, rows_of_key in rows.items()}
    if blind and all(all(flags) for flags in blind.values()):
        errors = [part.error for part in method_maps if part.error is not None]
        raise errors[0] if errors else blind_layer(next(iter(sites_by_layer.values()))[0])
    for layer in sites_by_layer:
        flags_of_layer = [flags for key, flags in blind.items() if key[0] == layer]
        if any(any(flags) for flags in flags_of_layer):
            warn_of_blind_images(layer, all_images=any(all(flags) for flags in flags_of_layer))


def _apply_gradient_methods(
    recorded: RecordedPass,
    sites: Sequence[GridActivations],
    methods: Sequence[GradientMethod],
    scores: dict[str | None, Tensor],
    *,
    one_by_one: bool,
    check_mixing: bool,
) -> Iterator[MethodMaps]:
    """Yield the maps of gradient methods; the scores of all methods share one backward pass."""
    score_keys = list(dict.fromkeys(method.score for method in methods))
    with torch.enable_grad():
        joined = _join([scores[score_key] for score_key in score_keys])
    classes, tolerance = recorded.scored.values.shape[1], recorded.tolerance
    first_class = 0
    if one_by_one:
        from gradcam.cam.independence import compute_separate_gradients

        chunks = compute_separate_gradients(recorded, sites, joined)
    else:
        chunks = _compute_gradients(recorded, sites, joined, scaled=recorded.has_float16, check_mixing=check_mixing)
    for chunk in chunks:
        for site, (on_grid, ranges) in zip(sites, chunk):
            for i, score_key in enumerate(score_keys):
                start = i * classes - first_class
                gradients = on_grid[:, max(start, 0) : max(start + classes, 0)]
                if gradients.shape[1] == 0:
                    continue
                blind = ranges if len(score_keys) == 1 else (~gradients.flatten(1).any(1)).tolist()
                # If the classes come in several chunks, do not defer the checks. Deferred checks would keep the
                # gradients of all chunks in memory.
                checks = recorded.checks if gradients.shape[1] == classes else None
                settings: Any = {"peaks": (site.ranges, ranges), "checks": checks}
                for method in methods:
                    if method.score == score_key:
                        compute = partial(compute_checked, method)
                        pieces = denoise_method(compute, tolerance, site.grid, gradients, **settings)
                        yield MethodMaps(site.layer, method.name, pieces, blind)
        first_class += on_grid.shape[1]


def _compute_gradients(
    recorded: RecordedPass, sites: Sequence[GridActivations], scores: Tensor, *, scaled: bool, check_mixing: bool
) -> Iterator[list[tuple[Tensor, RowRanges]]]:
    """Yield, for a few classes at a time, the gradients (N,k,C,...) at each layer, and their range in each image.

    `scaled` is as in `jacobian`. With `check_mixing`, check that images do not depend on one another.
    """
    inputs = [site.recorded for site in sites]
    for chunk in jacobian(scores, inputs, scaled=scaled, most_classes=recorded.scored.per_pass):
        pairs = zip(sites, fill_missing_gradients(chunk, inputs))
        yield [site.to_grid(gradient, "gradients", recorded.checks) for site, gradient in pairs]
    if check_mixing:
        from gradcam.cam.independence import check_independence

        check_independence(recorded, sites, scores, chunk)
