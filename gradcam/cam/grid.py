"""Arrange a layer's activations as a grid on the image, and detect problems with the activations."""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradcam.cam.deferred_checks import DeferredChecks, RowRanges
from gradcam.cam.forward import RecordedPass, record_outputs, warn_of_dependence
from gradcam.cam.measure_layout import MIN_RESPONSES, MisplacedError, PlacedLayer, Probe, count_responses, run_changed
from gradcam.errors import BlindLayerError, LayerError, warn
from gradcam.hooks.autograd import find_dependence, no_dependence_error
from gradcam.hooks.containers import Batch, to_batch
from gradcam.hooks.model_facts import ModelFacts
from gradcam.layers.find import LayerRef, find_layer
from gradcam.layers.layout import (
    MAX_PREFIX_OF_GIVEN_GRID,
    AxisResolver,
    IndexLayout,
    Layout,
    ReshapeSpec,
    find_patches,
    find_rival_layouts,
    is_guess,
    list_token_layouts,
    order_key,
    probe_layout,
    take_image,
)

TEXT_TOKENS = (
    "of text tokens, or of text and image tokens together, which form no grid on the image. Choose a layer of the image "
    "encoder."
)
JOINS = ("sum",)
# Models in which a layout was wrong and has been corrected. Other layouts may be wrong too, so layers that the user
# names are measured like default layers.
_corrected_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
MIN_GRADIENT = 1e-35  # Float32 ends at 1e-38, so products with smaller gradients have few digits.
ORDER_MEASURED = "a token order was measured"  # A key of `ModelFacts`.
ATTENTION_WEIGHTS = (
    "whose rows sum to 1: attention weights between tokens, not a feature map. Choose the block around this layer, "
    "or an attention method such as 'rollout'."
)


@dataclass(frozen=True)
class GridActivations:
    """The activations of a layer, as recorded and as a grid (N,C,...), and the layout that maps one to the other."""

    layer: str
    recorded: Tensor
    layout: Layout | IndexLayout
    grid: Tensor
    ranges: RowRanges

    def to_grid(
        self, derivatives: Tensor | None, quantity: str, checks: DeferredChecks | None = None
    ) -> tuple[Tensor, RowRanges]:
        """Return derivatives as (N,k,C,...), at least float32, and their range in each image.

        `derivatives` are k tensors of the recorded activations' shape, stacked. With `checks`, the ranges are empty
        until `checks.flush`. Raises `LayerError` if there are no derivatives, and `ModelError` if they are not finite.
        """
        if derivatives is None:
            raise no_dependence_error([self.layer])
        on_grid = self.layout.stack_to_grid(at_least_float32(derivatives)).transpose(0, 1)
        pending, skips_underflow = checks or DeferredChecks(), quantity != "gradients" or on_grid.dtype == torch.float64
        min_magnitude = 0 if skips_underflow else MIN_GRADIENT
        ranges = pending.add_row_ranges(
            on_grid, f"The {quantity} at layer '{self.layer}' are", min_magnitude=min_magnitude
        )
        if checks is None:
            pending.flush()
        return on_grid, ranges


def find_activations(layer: str, recorded: RecordedPass, reshape: ReshapeSpec = None) -> GridActivations:
    """Return the activations of a recorded layer, on their grid; raise `LayerError` if there is no grid.

    Flushing `recorded.checks` raises `ModelError` for NaN and infinity.
    """
    tensor = recorded.activations[layer]
    layout = find_grid(layer, tensor, recorded, reshape)
    grid = layout.to_grid(at_least_float32(tensor.detach()))
    ranges = recorded.checks.add_range(tensor.detach(), f"The activations of layer '{layer}' are")
    return GridActivations(layer, tensor, layout, grid, ranges)


def find_grid(
    layer: str, activations: Tensor, recorded: RecordedPass, reshape: ReshapeSpec = None
) -> Layout | IndexLayout:
    """Return the layout of a recorded layer's activations on the image. Raises as `find_output_layout` does."""
    if layer not in recorded.layouts:
        layout = find_output_layout(
            recorded.outlets[layer],
            activations,
            recorded.batch,
            model=recorded.model,
            reshape=reshape,
            facts=recorded.facts,
            find_route=lambda: recorded.tail.route,
        )
        is_token_row = reshape is None and isinstance(layout, Layout) and layout.kind.startswith("tokens")
        measured = (
            recorded.facts.get(order_key(layout, activations.shape, recorded.batch.size)) if is_token_row else None
        )
        recorded.layouts[layer] = measured or layout
    return recorded.layouts[layer]


def find_output_layout(
    outlet: LayerRef,
    activations: Tensor,
    batch: Batch,
    *,
    model: nn.Module,
    reshape: ReshapeSpec = None,
    facts: ModelFacts | None = None,
    find_route: Callable[[], Hashable] = lambda: None,
) -> Layout | IndexLayout:
    """Return the layout of a layer's output on the image.

    If the output's shape is ambiguous, the model runs again to measure the layout. Raises `LayerError` if there is no
    grid, or if the layout stays ambiguous. `find_route` returns the data flow from the layer to the score in this pass;
    a cached layout is used only for the same data flow.
    """
    layer, module, facts = outlet.name, outlet.module, facts or ModelFacts(model)
    if callable(reshape):
        return probe_layout(reshape, layer, activations.detach(), batch.images, len(batch.size))
    shape = tuple(activations.shape)
    axes = AxisResolver(model, batch, find_patches(model.modules()) if len(shape) == 3 else (), facts)
    layout = axes.find_layout(shape, module, reshape)
    if layout is None and reshape is None:
        key = ("layout", layer, shape, batch.size, find_route())
        layout = facts.remember(key, lambda: (choose_layout_by_response(shape, outlet, batch, model),))[0]
    if layout is None:
        is_text = reshape is None and axes.holds_text(shape, module)
        is_folded = reshape is None and not axes.image_axes(shape, module)
        reason = (
            TEXT_TOKENS
            if is_text
            else _explain_folded_batch(batch)
            if is_folded
            else _explain_missing_grid(shape, batch, reshape)
        )
        raise LayerError(f"Layer '{layer}' gives {shape} {reason}")
    if (
        reshape is None
        and len(shape) > 3
        and is_guess(layout, module, shape, batch.size)
        and are_attention_weights(activations)
    ):
        raise LayerError(f"Layer '{layer}' gives {shape} {ATTENTION_WEIGHTS}")
    return layout


def are_attention_weights(activations: Tensor) -> bool:
    """Return whether the rows sum to 1, as after a softmax: such attention weights are not a feature map."""
    if activations.is_meta or activations.shape[-1] == 1:
        return False
    tolerance = 2e-2 if activations.dtype in (torch.bfloat16, torch.float16) else 1e-4
    rows = activations.detach().float()
    return bool((rows >= 0).all() and ((rows.sum(-1) - 1).abs() < tolerance).all())


def choose_layout_by_response(
    shape: tuple[int, ...], outlet: LayerRef, batch: Batch, model: nn.Module
) -> Layout | None:
    """Return the layout of an output whose cells respond in the right places; None unless exactly one is best."""
    if shape[0] != batch.images or batch.pictures.is_meta:
        return None
    patches = find_patches(model.modules()) if len(shape) == 3 else ()
    layouts = find_rival_layouts(shape, outlet.module, batch.size, patches)
    layouts = [layout for layout in layouts if PlacedLayer(outlet, shape, layout).is_measurable(batch)]
    placed = {str(number): PlacedLayer(outlet, shape, layout) for number, layout in enumerate(layouts)}
    counts = [count or 0 for count in (count_responses(model, batch, placed).values() if placed else ())]
    best = [layout for layout, count in zip(layouts, counts) if count >= MIN_RESPONSES and count == max(counts)]
    return best[0] if len(best) == 1 else None


def verify_places(recorded: RecordedPass, reshape: ReshapeSpec = None, *, includes_certain: bool = False) -> str | None:
    """Measure whether the cells of the recorded layers lie where their layouts say, and correct the layouts.

    Return the problem of a layer for which no layout fits, or None. Each layer is measured once. Layers whose layout is
    certain are measured only if `includes_certain` is True.
    """
    includes_certain = includes_certain or recorded.facts.model in _corrected_models
    for layer, names in recorded.names_by_layer.items():
        # Not every tensor of a layer has to have a grid.
        for name in names if len(names) == 1 or includes_certain else ():
            activations = recorded.activations[name]
            try:
                layout = find_grid(name, activations, recorded, reshape)
            except LayerError:
                if len(names) == 1:
                    raise
                continue
            outlet, shape = recorded.outlets[name], tuple(activations.shape)
            is_certain = isinstance(layout, Layout) and not is_guess(layout, outlet.module, shape, recorded.batch.size)
            if is_certain and not includes_certain:
                continue
            placed = PlacedLayer(outlet, shape, layout, reshape is not None)
            measured = _recall_layout(placed, activations, recorded, recorded.tail.route)
            if isinstance(measured, str):
                return describe_misplacement(layer, measured)
            recorded.layouts[name] = measured
    return None


def find_order(outlet: LayerRef, layout: Layout, activations: Tensor, recorded: RecordedPass) -> tuple[int, ...] | None:
    """Return the indices of the tokens that are cells, in the order of the cells; warn if no order fits.

    The order is measured once. None means that the cells are consecutive tokens, as the layout assumes.
    """
    key = order_key(layout, activations.shape, recorded.batch.size)
    measured: Layout | IndexLayout | str | None = recorded.facts.get(key)
    if measured is None and recorded.frame is None and not recorded.images_changed:
        measured = _recall_layout(PlacedLayer(outlet, tuple(activations.shape), layout), activations, recorded)
        if isinstance(measured, str):
            warn(describe_misplacement(outlet.name, measured))
    return measured.order if isinstance(measured, Layout) else layout.order


def warn_of_mixed_images(recorded: RecordedPass) -> None:
    """Warn if a layer's output for one image depends on the other images of the batch.

    A backward pass to the layer does not show this dependence. So each image runs alone, once for each model and its
    layers, and again for larger batches.
    """
    batch = recorded.batch
    if batch.images == 1 or not recorded.outlets or recorded.frame is not None or recorded.images_changed:
        return
    key = ("mixed", tuple(recorded.outlets), batch.size)
    # The cache holds the largest number of images so far that did not depend on one another.
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
            if axis is None or together.shape[:axis] + together.shape[axis + 1 :] != (
                activations.shape[:axis] + activations.shape[axis + 1 :]
            ):
                continue  # The rows of this output are not the images.
            difference = (together.select(axis, image) - activations.select(axis, 0)).abs().amax()
            if difference > tolerance * activations.abs().amax():
                return not _is_random(recorded, take_image(batch, image), outlets, alone)
    return False


def _is_random(recorded: RecordedPass, batch: Batch, outlets: list[LayerRef], outputs: Mapping[str, Tensor]) -> bool:
    """Return whether the outputs depend on random numbers, which are different for an image that runs alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        repeated = run_changed(recorded.model, batch, outlets, recorded.autocast)
    return any(name in repeated and not torch.equal(tensor, repeated[name]) for name, tensor in outputs.items())


def _recall_layout(
    placed: PlacedLayer, activations: Tensor, recorded: RecordedPass, route: Hashable = None
) -> Layout | IndexLayout | str:
    """Return the measured layout, or a description of the problem if no layout fits.

    The result is cached. A corrected layout is also used for other layers with as many tokens.
    """
    if not placed.is_measurable(recorded.batch):
        return placed.layout

    def measure() -> Layout | IndexLayout | str | None:
        try:
            probe = Probe(placed, activations, recorded.batch, recorded.model, recorded.autocast)
            layout = probe.measure_layout()
        except MisplacedError as error:
            return str(error)
        return None if layout is placed.layout else layout

    measured = recorded.facts.remember(placed.cache_key(recorded.batch, route), lambda: (measure(),))[0]
    if measured is not None and not isinstance(measured, str):
        _corrected_models.add(recorded.facts.model)
        recorded.facts.set(order_key(placed.layout, placed.shape, recorded.batch.size), measured)
        recorded.facts.set(ORDER_MEASURED, True)
    return measured or placed.layout


def find_placed_layer(
    model: nn.Module, batch: Batch, names: Sequence[str], facts: ModelFacts, autocast: torch.dtype | None
) -> str | None:
    """Return the first of these layers whose cells respond where the image changes; None if there is none."""
    outlets = [find_layer(model, name) for name in names]
    outputs = run_changed(model, batch.copy(), outlets, autocast)
    for outlet in outlets:
        with contextlib.suppress(LayerError, MisplacedError, KeyError):
            activations = outputs[outlet.name]
            layout = find_output_layout(outlet, activations, batch, model=model, facts=facts)
            placed = PlacedLayer(outlet, tuple(activations.shape), layout)
            if placed.is_measurable(batch):
                Probe(placed, activations, batch, model, autocast).measure_layout()
                return outlet.name
    return None


def describe_misplacement(layer: str, problem: str) -> str:
    """Return the warning about a map whose cells do not respond in the right places."""
    return (
        f"The heatmap at layer '{layer}' may be misplaced: {problem}. Choose another layer, or pass the grid of this "
        "layer's output with reshape=."
    )


def find_misplacement(model: nn.Module, images: Tensor, layer: str, reshape: ReshapeSpec = None) -> str | None:
    """Return a warning if a layer's cells do not respond in the right places, for images (N,C,H,W); None otherwise.

    Raises as `find_output_layout` does.
    """
    batch, outlet = to_batch(images), find_layer(model, layer)
    activations = record_outputs(model, batch, [outlet])[outlet.name]
    layout = find_output_layout(outlet, activations, batch, model=model, reshape=reshape)
    placed = PlacedLayer(outlet, tuple(activations.shape), layout)
    if not placed.is_measurable(batch) or not placed.is_guess(batch):
        return None
    try:
        Probe(placed, activations, batch, model).measure_layout()
    except MisplacedError as error:
        return describe_misplacement(layer, str(error))
    return None


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
        f"for {batch.images} image(s): its first axis is not the batch, so no heatmap can be assigned to an image. Choose a "
        "layer outside the part of the model that reshapes the batch."
    )


def _suggest_reshape(shape: tuple[int, ...], batch: Batch) -> str:
    cells = ", ".join("dhw"[-len(batch.size) :])
    function = f"a function that returns (N, C, {cells})"
    if len(shape) != 3:
        return f"pass reshape='channels first' or 'channels last', or {function}."
    tokens = shape[1] if shape[0] == batch.images else shape[0]
    # Of the grids with about the image's aspect ratio, suggest the one that leaves the fewest extra tokens.
    aspect = [length / min(batch.size) for length in batch.size]
    grids = {tuple(round(cells * ratio) for ratio in aspect) for cells in range(1, math.isqrt(tokens) + 1)}
    grid = min(
        ((candidate.prefix, candidate.grid) for candidate in list_token_layouts(tokens, grids)), default=(0, None)
    )[1]
    example = f", such as reshape={grid}" if grid else ""
    return (
        f"pass the grid of its {tokens} tokens, reshape=({cells}){example} (up to {MAX_PREFIX_OF_GIVEN_GRID} extra tokens "
        f"may precede the grid), or {function}."
    )


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own dtype if that is more precise."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def warn_of_blind_images(layer: str, *, all_images: bool) -> None:
    """Warn that a layer's maps are blank because its gradient is zero."""
    consequence = "its heatmaps are blank" if all_images else "their heatmaps are blank"
    scope = "" if all_images else " for some of the images"
    warn(f"The gradient at layer '{layer}' is exactly zero{scope}: {consequence}. Choose another layer or score.")


class BlindPatchesError(BlindLayerError):
    """The gradient is zero at all patch tokens, although the score may read other tokens.

    The message recommends no layer: the caller adds the recommendation.
    """


def blind_layer(site: GridActivations) -> BlindLayerError:
    """Return the error for a layer whose gradient is exactly zero on the entire grid."""
    if "tokens" in site.layout.kind:
        return BlindPatchesError(
            f"The gradient at layer '{site.layer}' is exactly zero on every patch: no patch of this layer reaches the score."
        )
    return BlindLayerError(
        f"The gradient at layer '{site.layer}' is exactly zero, so the layer cannot change the score. Possible causes: a "
        "dead unit, a probability of exactly 0 or 1, or a factor of zero. Choose another layer, or explain the logit."
    )


def choose_activations(
    recorded: RecordedPass, reshape: ReshapeSpec = None, *, join: str | None = None
) -> dict[str, list[GridActivations]]:
    """Return the activations to explain, by layer: one tensor, or all levels of a pyramid.

    With `join`, all layers form one entry. If a layer has several tensors, only those count that have a grid and affect
    the score. If the grids of these tensors differ, as in a pyramid, all are used; otherwise, only the first. Raises
    `LayerError` if there are none.
    """
    sites_by_layer = {
        layer: _choose_tensors(layer, names, recorded, reshape) for layer, names in recorded.names_by_layer.items()
    }
    if join is None or not sites_by_layer:
        return sites_by_layer
    # A tensor that two layers share counts once.
    sites = {site.layer: site for site in itertools.chain.from_iterable(sites_by_layer.values())}
    return {" + ".join(sites_by_layer): list(sites.values())}


def _choose_tensors(
    layer: str, names: Sequence[str], recorded: RecordedPass, reshape: ReshapeSpec
) -> list[GridActivations]:
    if len(names) == 1:
        return [find_activations(names[0], recorded, reshape)]
    are_reached = find_dependence(recorded.scored.values, [recorded.activations[name] for name in names])
    names = [name for name, is_reached in zip(names, are_reached) if is_reached]
    if not names:
        raise no_dependence_error([layer])
    sites: list[GridActivations] = []
    for name in names:
        with contextlib.suppress(LayerError):
            sites.append(find_activations(name, recorded, reshape))
    if not sites:
        return [find_activations(names[0], recorded, reshape)]  # This raises the reason why there is no grid.
    is_pyramid = len({site.grid.shape[2:] for site in sites}) == len(sites)
    return sites if is_pyramid else sites[:1]
