"""From what a forward pass left to maps: derivatives on the grid, and methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, groupby, product
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradcam.cam.forward import Recorded, warn_of_dependence
from gradcam.cam.grid import (
    GridActivations,
    at_least_float32,
    blind_layer,
    choose_activations,
    warn_of_blind_images,
)
from gradcam.cam.methods.attention_capture import AttentionLog
from gradcam.cam.methods.base import Method, OfActivations, OfAttention, OfCurvatures, OfGradients, OfInput, OfReruns
from gradcam.cam.readings import Ranges, Readings, check_ranges
from gradcam.cam.rounding import Settled, settle_method, undoubted
from gradcam.errors import BlindLayerError, GradcamError, TargetError, join_names, shorten, warn
from gradcam.families.base import LocalGradient
from gradcam.hooks.autograd import curvatures, jacobian
from gradcam.hooks.memory import RerunBudget
from gradcam.layers.layout import Layout, Reshape
from gradcam.targets.base import Scored
from gradcam.targets.classes import FINER_SHARE, RepeatedTarget, difference, find_nearest

Kind = TypeVar("Kind", bound=Method)
Key = tuple[str, str]  # of a site and a method, or of a layer and one

ROUNDING = 256  # units of the last place, by which another image's gradient may differ from zero
MOST_OTHERS = 64  # times as much rounding is allowed of a map's own gradient as of those of other images
SMALL = 0.2  # of the positive values' energy: SiLU and GELU, which dip below zero, leave less to negative ones


def has_both_signs(activations: Tensor) -> bool:
    """Whether negative activations count beside positive ones: the sums of their squares are compared."""
    values = activations.detach().float()
    return bool(values.clamp(max=0).square().sum() > SMALL * values.clamp(min=0).square().sum())


def warn_of_signs(activations: Mapping[str, Tensor], methods: Sequence[Method]) -> None:
    """Say where a method that assumes activations that are not negative meets a layer, by name, of both signs."""
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
    """What a method gave at a layer, values (N,K,...) of either sign in float32, and the scores (N,K) that it
    explained. `levels`: one, or as many as are added up once it is chosen what they are evidence for. `was_rounding`:
    where zeros have taken the place of rounding, (N,K,2), as in `Settled`; None where nowhere."""

    levels: list[Tensor]
    scores: Tensor
    was_rounding: Tensor | None = None


@dataclass(frozen=True)
class _Values:
    """What is computed, by site and method: pieces (N,k,...) along the classes, and which images nothing reaches there.
    Of either, lists that may be filled or changed until the readings are read. `errors`: what there is to say if nothing
    reaches any of them."""

    pieces: dict[Key, list[list[Settled]]] = field(default_factory=dict)
    blind: dict[Key, list[list[bool] | Ranges]] = field(default_factory=dict)
    errors: list[BlindLayerError] = field(default_factory=list)

    def add(self, site: str, method: Method, pieces: list[Settled], blind: list[bool] | Ranges | None = None) -> None:
        """Add pieces; `blind`: by image, of what may be so, or the ranges of gradients, which are zero then. An image is
        blind where it is in all pieces."""
        key = site, method.name
        self.pieces.setdefault(key, []).append(pieces)
        if blind is not None:
            self.blind.setdefault(key, []).append(blind)

    def list_blind(self, site: str, method: str) -> list[list[bool]]:
        """List the blind images of each addition, once the readings are read."""
        found = self.blind[site, method]
        return [[each == (0, 0) for each in rows] if isinstance(rows, Ranges) else rows for rows in found]

    def joined(self, key: Key) -> list[Settled]:
        """The pieces as they are now."""
        return [piece for pieces in self.pieces[key] for piece in pieces]


def compute_maps(
    recorded: Recorded,
    methods: Sequence[Method],
    budget: RerunBudget,
    log: AttentionLog,
    *,
    reshape: Reshape = None,
    join: str | None = None,
) -> dict[Key, Maps]:
    """Maps by layer and method, the methods in their order; those of no layer have their `place` for one. `log`: of
    the attentions in the recorded pass, for methods that follow them. `join`: all layers are levels of one."""
    try:
        try:
            return _compute_maps(recorded, methods, budget, log, reshape=reshape, join=join)
        except _DependentImagesError:
            is_dependent = _confirm_dependence(recorded)
            if is_dependent:
                warn_of_dependence(recorded.modules)
            return _compute_maps(
                recorded, methods, budget, log, reshape=reshape, join=join, one_by_one=is_dependent, checked=False
            )
    except Exception:
        recorded.readings.read()  # NaN further up is the reason, where there is any
        raise


class _DependentImagesError(Exception):
    """The score of one image depends on another's activations."""


def _compute_maps(
    recorded: Recorded,
    methods: Sequence[Method],
    budget: RerunBudget,
    log: AttentionLog,
    *,
    reshape: Reshape,
    join: str | None,
    one_by_one: bool = False,
    checked: bool = True,
) -> dict[Key, Maps]:
    chosen = choose_activations(recorded, reshape, join=join)
    # The scores (N,K) that were asked for, and those that methods choose themselves, by their key.
    scores: dict[str | None, Tensor] = {None: recorded.scored.values}
    for method in methods:
        if method.score is not None and method.score not in scores:
            scores[method.score] = _finer_scores(method.name, recorded.scored)
    by_name = {site.layer: site for level in chosen.values() for site in level}  # a level may be named, too
    sites, values = list(by_name.values()), _Values()
    warn_of_signs({site.layer: site.grid for site in sites}, methods)
    first, second = _of(OfGradients, methods), _of(OfCurvatures, methods)
    shorter = None if second or len(scores) > 1 else _differentiate_locally(recorded, sites, first)
    checked = checked and len(scores[None]) > 1
    for of_activations, site in product(_of(OfActivations, methods), sites):
        found_maps = _checked(of_activations, site.grid)[:, None].repeat_interleave(recorded.scored.values.shape[1], 1)
        values.add(site.layer, of_activations, [undoubted(found_maps)])
    if shorter is None:
        _use_gradients(recorded, sites, first, scores, values, one_by_one=one_by_one, checked=checked)
    else:
        _use_local_gradients(recorded, list(zip(sites, shorter)), first, values)
    if second and checked and not first:
        _check_all(recorded, sites, scores[None])
    _use_curvatures(recorded, sites, second, values, one_by_one=one_by_one)
    if any(not isinstance(method, (OfActivations, OfGradients, OfCurvatures)) for method in methods):
        recorded.readings.read()  # before what takes long
    _run_again(recorded, sites, _of(OfReruns, methods), values, budget)
    for of_input in _of(OfInput, methods):
        values.add("input", of_input, [of_input.compute(recorded, budget)])
    for of_attention in _of(OfAttention, methods):
        values.add("attention", of_attention, [undoubted(of_attention.compute(recorded, log, budget))])
    maps = _put_together(values, _join_scores(list(scores.values())).detach(), recorded.readings)
    _judge_blindness(chosen, values, recorded)
    found = {}
    for method in methods:
        explained = scores[method.score].detach().float()
        places = {layer: [site.layer for site in level] for layer, level in chosen.items()}
        for layer, names in (places if method.place == "layer" else {method.place: [method.place]}).items():
            levels, was_rounding = zip(*(maps[name, method.name] for name in names))
            was = [each for each in was_rounding if each is not None]
            found[layer, method.name] = Maps([*levels], explained, torch.stack(was).any(0) if was else None)
    return {key: found[key] for layer in (*chosen, "input", "attention") for key in found if key[0] == layer}


def _check_independence(
    recorded: Recorded, sites: Sequence[GridActivations], scores: Tensor, plain: Sequence[Tensor | None]
) -> None:
    """Check, once the readings are read, that no image's score depends on another's activations.

    `plain` are the gradients (N,...) of the sum of scores (N,1). If images are independent, a random weight for each
    image scales its gradient. This takes one backward pass. The check raises `_DependentImagesError`.
    """
    weights = _random_weights(len(scores), scores)
    with torch.enable_grad():
        weighted = scores * weights[:, None]
    inputs = [site.recorded for site in sites]
    for site, before, after in zip(sites, plain, next(jacobian(weighted, inputs, scaled=recorded.has_float16))):
        if before is None or after is None:
            continue
        gradients, others = (site.layout.to_grid(tensor).flatten(1) for tensor in (before, after[0]))
        errors = (others - gradients * weights.to(gradients)[:, None]).abs().amax(1)
        largest = gradients.abs().amax(1)
        # Where a softmax subtracts the largest value of a whole batch, rounding is left of the other images' gradients.
        limits = recorded.slack * (largest + largest.amax() / MOST_OTHERS)
        recorded.readings.ask(_require_independence, (errors > limits).any())


def _confirm_dependence(recorded: Recorded) -> bool:
    """Return whether an image's scores have a gradient at another image's activations, beyond rounding.

    It takes a backward pass for each image, and is asked only where `_check_independence` failed: terms that cancel, or
    a part of the model in less precision, round more than it allows.
    """
    layouts = recorded.layouts
    placed = [(layouts[name], tensor) for name, tensor in recorded.activations.items() if name in layouts]
    for image in range(len(recorded.scored.values)):
        with torch.enable_grad():
            own = recorded.scored.values[image : image + 1].sum(1, keepdim=True)
        for (layout, _), gradient in zip(
            placed, next(jacobian(own, [it for _, it in placed], scaled=recorded.has_float16))
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


def _random_weights(count: int, like: Tensor) -> Tensor:
    """Return real numbers from 0.5 to 1.5: signs would miss half of the dependent pairs, since equal ones cancel."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.rand(count, generator=generator, dtype=torch.float32, device="cpu").to(like) + 0.5


def _put_together(values: _Values, scores: Tensor, readings: Readings) -> dict[Key, tuple[Tensor, Tensor | None]]:
    """The maps of each site and method, and where rounding was taken out of them, once all is read."""
    before = {key: values.joined(key) for key in values.pieces}
    maps = {key: _join(pieces) for key, pieces in before.items()}
    _require_ranges(maps, scores, readings)
    after = {key: values.joined(key) for key in before}
    changed = {
        key: _join(pieces) for key, pieces in after.items() if list(map(id, pieces)) != list(map(id, before[key]))
    }
    if changed:  # where terms cancel
        _require_ranges(changed, scores, readings)
    return {key: (found.float(), _join_rounding(after[key])) for key, found in (maps | changed).items()}


def _join(pieces: Sequence[Settled]) -> Tensor:
    return pieces[0].maps if len(pieces) == 1 else torch.cat([piece.maps for piece in pieces], 1)


def _require_ranges(maps: Mapping[Key, Tensor], scores: Tensor, readings: Readings) -> None:
    readings.ask_range(scores, "The scores are")
    for (site, name), values in maps.items():
        readings.ask_range(values.float(), f"The {name} maps at layer '{site}', in float32, are")
        if values.dtype == torch.float64:
            peaks = values.flatten(2).abs().amax(2)
            is_lost = (peaks > 0) & (peaks < torch.finfo(torch.float32).tiny)
            readings.ask(partial(_warn_of_underflow, f"{name} maps at layer '{site}'"), is_lost.sum())
    readings.read()


def _join_rounding(pieces: Sequence[Settled]) -> Tensor | None:
    """Return where rounding was taken out of maps, (N,K,2); None if nowhere."""
    if all(piece.was_rounding is None for piece in pieces):
        return None
    was_rounding = torch.cat([_mark_rounding(piece) for piece in pieces], 1)
    return was_rounding if was_rounding.any() else None


def _mark_rounding(piece: Settled) -> Tensor:
    nowhere = piece.maps.new_zeros((*piece.maps.shape[:2], 2), dtype=torch.bool)
    return nowhere if piece.was_rounding is None else piece.was_rounding


def _warn_of_underflow(subject: str, counts: list[float]) -> None:
    if counts[0]:
        warn(
            f"{counts[0]:.0f} of the {subject} are too small for float32: they lose precision, or are blank. Pass target=, "
            "a function that multiplies the score by a large constant."
        )


def _judge_blindness(chosen: Mapping[str, Sequence[GridActivations]], values: _Values, recorded: Recorded) -> None:
    """Raises `BlindLayerError` where nothing reaches any layer; warns of images, and of layers, that nothing reaches.
    Of a layer's levels one that is reached is enough; an image in which nothing was found has no score."""
    instances = recorded.scored.instances
    has_score = [True] * len(recorded.scored.values) if instances is None else list(map(bool, instances))
    blind: dict[Key, list[bool]] = {
        (layer, name): list(
            compress(
                map(all, zip(*(rows for site in level for rows in values.list_blind(site.layer, name)))), has_score
            )
        )
        for layer, level in chosen.items()
        for name in {name for _, name in values.blind}
    }
    if blind and all(all(images) for images in blind.values()):
        raise values.errors[0] if values.errors else blind_layer(next(iter(chosen.values()))[0])
    for layer in chosen:
        of_layer = [images for key, images in blind.items() if key[0] == layer]
        if any(any(images) for images in of_layer):
            warn_of_blind_images(layer, all_of_them=any(all(images) for images in of_layer))


def _of(kind: type[Kind], methods: Sequence[Method]) -> list[Kind]:
    return [method for method in methods if isinstance(method, kind)]


def _checked(method: OfActivations | OfGradients | OfCurvatures, *given: Tensor) -> Tensor:
    """The method's maps (N,K,...), or (N,...) of activations alone. Raises `GradcamError` for what is no such thing."""
    maps: Any = method.compute(*given)
    if isinstance(method.function, str):
        return maps  # our own
    expected, grid = given[-1].shape[: len(given[1:2]) + 1], given[0].shape[2:]
    form = f"{str(given[0].dtype).removeprefix('torch.')} {(*expected, *grid)} on {given[0].device}"
    if not isinstance(maps, Tensor):
        raise GradcamError(f"The method {method.name} returned {shorten(maps)}, expected a tensor {form}.")
    kinds = [(it.dtype, it.device, it.layout) for it in (maps, given[0])]
    if maps.shape != (*expected, *grid) or kinds[0] != kinds[1]:
        kind = f"{str(maps.dtype).removeprefix('torch.')} {tuple(maps.shape)} on {maps.device}"
        kind += "" if maps.layout == torch.strided else f", {str(maps.layout).removeprefix('torch.')}"
        raise GradcamError(f"The method {method.name} returned a tensor {kind}, expected {form}.")
    if not maps.isfinite().all():
        raise GradcamError(f"The method {method.name} returned maps that are NaN or infinite in places.")
    return maps


def _use_gradients(
    recorded: Recorded,
    sites: Sequence[GridActivations],
    methods: Sequence[OfGradients],
    scores: dict[str | None, Tensor],
    values: _Values,
    *,
    one_by_one: bool,
    checked: bool,
) -> None:
    """One backward pass for all kinds of scores, their classes one after another."""
    if not methods:
        return
    kinds = list(dict.fromkeys(method.score for method in methods))
    with torch.enable_grad():
        joined = _join_scores([scores[kind] for kind in kinds])
    classes, slack, scaled = recorded.scored.values.shape[1], recorded.slack, recorded.has_float16
    first = 0
    all_pieces = _gradients(recorded, sites, joined, scaled=scaled, one_by_one=one_by_one, checked=checked)
    for pieces in all_pieces:
        for site, (on_grid, ranges) in zip(sites, pieces):
            for kind in kinds:
                start = kinds.index(kind) * classes - first
                mine = on_grid[:, max(start, 0) : max(start + classes, 0)]
                if mine.shape[1] == 0:
                    continue
                blind = ranges if len(kinds) == 1 else (~mine.flatten(1).any(1)).tolist()
                for method in methods:
                    if method.score == kind:
                        is_all = mine.shape[1] == classes  # or the gradients of all would be kept until they are read
                        readings = recorded.readings if is_all else None
                        peaks = (site.ranges, ranges)
                        found = settle_method(
                            partial(_checked, method), slack, site.grid, mine, peaks=peaks, readings=readings
                        )
                        values.add(site.layer, method, found, blind)
        first += on_grid.shape[1]


def _differentiate_locally(
    recorded: Recorded, sites: Sequence[GridActivations], methods: Sequence[OfGradients]
) -> list[list[LocalGradient]] | None:
    """At each site the gradients of scores that depend on a small part of it alone; None where these are not known, or a
    method needs all of the grid."""
    differentiate = recorded.scored.differentiate
    is_plain = all(isinstance(it.layout, Layout) and it.layout.kind == "channels first" for it in sites)
    if differentiate is None or not methods or not is_plain or not all(method.is_local for method in methods):
        return None
    return differentiate([site.recorded for site in sites])


def _use_local_gradients(
    recorded: Recorded,
    found: Sequence[tuple[GridActivations, list[LocalGradient]]],
    methods: Sequence[OfGradients],
    values: _Values,
) -> None:
    """Those of one size at a time, each with the part of the activations that it is of."""
    shape = recorded.scored.values.shape
    for (site, own), method in product(found, methods):
        nothing = Settled(site.grid.new_zeros(*shape, *site.grid.shape[2:]))
        maps, was_rounding = nothing.maps, _mark_rounding(nothing)
        is_blind = [True] * len(maps)
        for size, same in groupby(sorted(own, key=_size), key=_size):
            each = list(same)
            gradients = torch.stack([it.values for it in each])
            for it, (low, high) in zip(each, check_ranges(gradients, f"The gradients at layer '{site.layer}' are")):
                is_blind[it.image] &= low == high == 0
            windows = [(slice(it.top, it.top + size[0]), slice(it.left, it.left + size[1])) for it in each]
            parts = torch.stack([site.grid[it.image, :, rows, columns] for it, (rows, columns) in zip(each, windows)])
            given = parts, at_least_float32(gradients)[:, None]
            (settled,) = settle_method(partial(_checked, method), recorded.slack, *given)
            for it, (rows, columns), one, was in zip(each, windows, settled.maps, _mark_rounding(settled)):
                maps[it.image, it.score, rows, columns], was_rounding[it.image, it.score] = one[0], was[0]
        values.add(site.layer, method, [Settled(maps, was_rounding)], is_blind)


def _size(gradient: LocalGradient) -> tuple[int, ...]:
    return tuple(gradient.values.shape[1:])


def _check_all(recorded: Recorded, sites: Sequence[GridActivations], scores: Tensor) -> None:
    """As `_check_independence`, of scores (N,K) whose gradients are not there."""
    with torch.enable_grad():
        total = scores @ _random_weights(scores.shape[1], scores)[:, None]
    plain = next(jacobian(total, [site.recorded for site in sites], scaled=recorded.has_float16))
    _check_independence(recorded, sites, total, [None if gradient is None else gradient[0] for gradient in plain])


def _gradients(
    recorded: Recorded,
    sites: Sequence[GridActivations],
    scores: Tensor,
    *,
    scaled: bool,
    one_by_one: bool,
    checked: bool,
) -> Iterator[list[tuple[Tensor, Ranges]]]:
    """For a few classes at a time, at each site the gradients (N,k,C,...), and which images' are zero. Where images
    depend on one another, each has the gradient of its own scores, of all classes at a time. `checked`: whether it is
    to be checked that they do not."""
    inputs, readings = [site.recorded for site in sites], recorded.readings
    if not one_by_one:
        for chunk in jacobian(scores, inputs, scaled=scaled):
            pairs = zip(sites, _with_zeros(chunk, inputs))
            yield [site.to_grid(gradient, "gradients", readings) for site, gradient in pairs]
        if checked and scores.shape[1] == 1:
            _check_independence(recorded, sites, scores, [None if it is None else it[0] for it in chunk])
        elif checked:
            _check_all(recorded, sites, scores)
        return
    rows: list[list[Tensor]] = [[] for _ in sites]
    for image in range(len(scores)):
        with torch.enable_grad():
            own = scores[image : image + 1]
        chunks = [_with_zeros(it, inputs) for it in jacobian(own, inputs, scaled=scaled)]
        for site, found, gradients in zip(sites, rows, zip(*chunks)):
            on_grid = [site.to_grid(it, "gradients")[0][image : image + 1] for it in gradients]
            found.append(torch.cat(on_grid, 1))
    joined = [torch.cat(found) for found in rows]
    yield [(each, Ranges(check_ranges(each, "The gradients are"))) for each in joined]


def _with_zeros(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Zeros where no path leads to one of several layers; where none leads to any, that is an error as it is."""
    count = next((len(it) for it in gradients if it is not None), None)
    if count is None:
        return gradients
    return [tensor.new_zeros(count, *tensor.shape) if it is None else it for it, tensor in zip(gradients, inputs)]


def _use_curvatures(
    recorded: Recorded,
    sites: Sequence[GridActivations],
    methods: Sequence[OfCurvatures],
    values: _Values,
    *,
    one_by_one: bool,
) -> None:
    """Two backward passes for each class and layer, and for each image where they depend on one another."""
    if not methods:
        return
    scores, slack = recorded.scored.values, recorded.slack
    groups = [slice(image, image + 1) for image in range(len(scores))] if one_by_one else [slice(None)]
    with torch.enable_grad():
        of_groups = [scores[images] for images in groups] if one_by_one else [scores]
    for site in sites:
        found = [curvatures(own, site.recorded, scaled=recorded.has_float16) for own in of_groups]
        for of_class in zip(*found):
            first, second = (
                [site.to_grid(pair[order], what) for pair in of_class]
                for order, what in enumerate(("gradients", "second derivatives"))
            )
            gradient, curvature = (
                torch.cat([each[images] for (each, _), images in zip(pairs, groups)]) for pairs in (first, second)
            )
            blind = [each == (0, 0) for (_, ranges), images in zip(first, groups) for each in ranges[images]]
            for method in methods:
                found_maps = settle_method(partial(_checked, method), slack, site.grid, gradient, curvature)
                values.add(site.layer, method, found_maps, blind)


def _run_again(
    recorded: Recorded,
    sites: Sequence[GridActivations],
    methods: Sequence[OfReruns],
    values: _Values,
    budget: RerunBudget,
) -> None:
    for method, site in product(methods, sites):
        try:
            found = method.compute(recorded, site, budget)
        except BlindLayerError as error:
            values.errors.append(error)
            found = undoubted(site.grid.new_zeros(*recorded.scored.values.shape, *site.grid.shape[2:]))
        # A method that is judged by what it changes: nothing was, though there was something to change.
        has_map = found.maps.flatten(1).any(1) | _mark_rounding(found).flatten(1).any(1)
        blind = site.grid.flatten(1).any(1) & ~has_map.to(site.grid.device)
        values.add(site.layer, method, [found], blind.tolist() if method.is_signed else None)


def _join_scores(scores: Sequence[Tensor]) -> Tensor:
    return scores[0] if len(scores) == 1 else torch.cat(list(scores), 1)


def _finer_scores(name: str, scored: Scored) -> Tensor:
    """Each class's logit against those nearest to it, of the same classes in all views of an image."""
    if scored.logits is None or scored.classes is None:
        raise TargetError(f"{name} compares classes, but the target is a function: pass class indices as target=.")
    target, views = scored.target, 1
    if isinstance(target, RepeatedTarget):
        target, views = target.target, target.blocks
    if target.score != "logit":
        raise TargetError(f"{name} defines its own score, but score={target.score!r} was requested: leave score= out.")
    images = len(scored.logits) // views
    rivals = find_nearest(scored.logits[:images].detach(), scored.classes[:images]).repeat(views, 1, 1)
    with torch.enable_grad():
        return difference(scored.logits, scored.classes, rivals, FINER_SHARE)
