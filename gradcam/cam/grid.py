"""Arrange a layer's activations as a grid on the image, and detect problems with the activations."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradcam.cam.deferred_checks import DeferredChecks, RowRanges
from gradcam.errors import BlindLayerError, LayerError, warn
from gradcam.hooks.autograd import find_dependence, no_dependence_error
from gradcam.hooks.containers import Batch, at_least_float32
from gradcam.hooks.model_facts import ModelFacts
from gradcam.layers.find import LayerRef
from gradcam.layers.layout import Layout, find_map_layout, is_guess

if TYPE_CHECKING:
    from gradcam.cam.forward import RecordedPass
    from gradcam.layers.layout import ReshapeSpec
    from gradcam.layers.reshape import IndexLayout

JOINS = ("sum",)
ZERO_CAUSES = (
    "Possible causes: a head with zero weights, or a probability of exactly 0 or 1. Choose another score or class."
)
MIN_GRADIENT = 1e-35  # Float32 loses digits below 1e-38, so products with smaller gradients are inexact.
# Rounding may explain a difference between an image's gradients in two backward passes, up to `tolerance` times a sum:
# the image's largest gradient, plus the batch's largest gradient divided by this factor.
OWN_GRADIENT_FACTOR = 64
# Models in which the assumed layout of a layer was wrong. Other layouts of these models may be wrong too, so the
# layouts of all layers are measured.
corrected_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(frozen=True)
class GridActivations:
    """The activations of a layer: `recorded` in the layer's own layout, and `grid` (N,C,...) on the image."""

    layer: str
    recorded: Tensor
    layout: Layout | IndexLayout
    grid: Tensor
    ranges: RowRanges

    def to_grid(
        self, derivatives: Tensor | None, quantity: str, checks: DeferredChecks | None = None
    ) -> tuple[Tensor, RowRanges]:
        """Return derivatives on the grid (N,k,C,...), in at least float32, and each image's minimum and maximum.

        `derivatives` are k stacked tensors of the shape of `recorded`. If `checks` are passed, the ranges stay empty
        until `checks.flush` runs. Raises `LayerError` if `derivatives` is None. Raises `ModelError` if a value is not
        finite.
        """
        if derivatives is None:
            raise no_dependence_error([self.layer])
        on_grid = self.layout.stack_to_grid(at_least_float32(derivatives)).transpose(0, 1)
        pending, subject = checks or DeferredChecks(), f"The {quantity} at layer '{self.layer}' are"
        min_magnitude = MIN_GRADIENT if quantity == "gradients" and on_grid.dtype != torch.float64 else 0
        ranges = pending.add_row_ranges(on_grid, subject, min_magnitude=min_magnitude)
        if checks is None:
            pending.flush()
        return on_grid, ranges


def find_views(name: str, recorded: RecordedPass) -> list[GridActivations]:
    """Return the activations of a recorded tensor on the grid of each view, for images that reach the model in pieces.

    Raises `LayerError` if the tensor has no cells of these pieces.
    """
    tensor, sites = recorded.activations[name], []
    ranges = recorded.checks.add_range(tensor.detach(), f"The activations of layer '{name}' are")
    for k, layout in enumerate(recorded.batch.pieces.find_layouts(name, tensor)):
        view = f"{name} (view {k + 1})" if k else name
        recorded.layouts[view] = layout
        sites.append(GridActivations(view, tensor, layout, layout.to_grid(at_least_float32(tensor.detach())), ranges))
    return sites


def find_activations(layer: str, recorded: RecordedPass, reshape: ReshapeSpec = None) -> GridActivations:
    """Return the activations of a recorded layer on the grid; raise `LayerError` if there is no grid.

    `recorded.checks.flush` later raises `ModelError` if an activation is NaN or infinite.
    """
    tensor = recorded.activations[layer]
    layout = find_grid(layer, tensor, recorded, reshape)
    grid = layout.to_grid(at_least_float32(tensor.detach()))
    ranges = recorded.checks.add_range(tensor.detach(), f"The activations of layer '{layer}' are")
    return GridActivations(layer, tensor, layout, grid, ranges)


def find_grid(layer: str, activations: Tensor, recorded: RecordedPass, reshape: ReshapeSpec) -> Layout | IndexLayout:
    """Return the layout of a recorded layer's activations on the image. Raises as `find_output_layout` does."""
    if layer not in recorded.layouts:
        outlet, batch, facts = recorded.outlets[layer], recorded.batch, recorded.facts
        layout, is_certain = _find_output_layout(
            outlet,
            activations,
            batch,
            recorded.model,
            reshape=reshape,
            facts=facts,
            find_route=lambda: recorded.tail.route,
        )
        if is_certain:
            recorded.certain_layouts.add(layer)
        measured = None
        if reshape is None and isinstance(layout, Layout) and layout.kind.startswith("tokens"):
            measured = facts.get(order_key(layout, activations.shape, batch.size))
        recorded.layouts[layer] = measured or layout
    return recorded.layouts[layer]


def find_output_layout(
    outlet: LayerRef,
    activations: Tensor,
    batch: Batch,
    model: nn.Module,
    reshape: ReshapeSpec = None,
    *,
    facts: ModelFacts | None = None,
    find_route: Callable[[], Hashable] = lambda: None,
) -> Layout | IndexLayout:
    """Return the layout of a layer's output on the image.

    If the output's shape is ambiguous, the model runs again to measure the layout. Raises `LayerError` if there is no
    grid, or if the layout stays ambiguous. `find_route` returns the data flow from the layer to the score in this pass.
    If the data flow has changed, a cached layout is not used.
    """
    settings: Any = {"reshape": reshape, "facts": facts or ModelFacts(model), "find_route": find_route}
    return _find_output_layout(outlet, activations, batch, model, **settings)[0]


def _find_output_layout(
    outlet: LayerRef,
    activations: Tensor,
    batch: Batch,
    model: nn.Module,
    *,
    reshape: ReshapeSpec,
    facts: ModelFacts,
    find_route: Callable[[], Hashable],
) -> tuple[Layout | IndexLayout, bool]:
    """Return the layout, and whether the shape and the module determine it without doubt."""
    layer, module = outlet.name, outlet.module
    if callable(reshape):
        from gradcam.layers.reshape import probe_layout

        return probe_layout(reshape, layer, activations.detach(), batch.images, len(batch.size)), False
    shape = tuple(activations.shape)
    if len(shape) == 3 or batch.kwargs or len(batch.args) > 1:  # The tokens may represent the image, a text, or both.
        from gradcam.layers.axes import AxisResolver
        from gradcam.layers.token_layout import find_patches

        patches = find_patches(model.modules()) if len(shape) == 3 else ()
        layout = AxisResolver(model, batch, patches, facts).find_layout(shape, module, reshape)
    else:
        layout = find_map_layout(shape, batch.size, module, batch.images, reshape=reshape)
    if layout is None and reshape is None:
        from gradcam.cam.measure_layout import choose_layout_by_response

        key = ("layout", layer, shape, batch.size, find_route())
        layout = facts.remember(key, lambda: (choose_layout_by_response(shape, outlet, batch, model),))[0]
    is_certain = layout is not None and len(shape) > 3 and not is_guess(layout, module, shape, batch.size)
    if layout is None or (reshape is None and len(shape) > 3 and not is_certain):
        from gradcam.cam.grid_errors import require_grid

        layout = require_grid(layout, outlet, activations, batch, reshape=reshape, model=model, facts=facts)
    return layout, is_certain


def list_unverified(
    recorded: RecordedPass, reshape: ReshapeSpec = None, *, includes_certain: bool = False
) -> list[tuple[str, str, Layout | IndexLayout]]:
    """List the recorded tensors whose layout has to be measured, as (layer, tensor name, layout).

    If a layout is certain, the tensor is listed only if `includes_certain` is True, or if another layout of this model
    was wrong.
    """
    includes_certain = includes_certain or recorded.facts.model in corrected_models
    unverified = []
    for layer, names in recorded.names_by_layer.items():
        # If a layer has several tensors, list the tensors that have a grid, but only if `includes_certain` is True.
        for name in names if len(names) == 1 or includes_certain else ():
            activations = recorded.activations[name]
            try:
                layout = find_grid(name, activations, recorded, reshape)
            except LayerError:
                if len(names) == 1:
                    raise
                continue
            if includes_certain or name not in recorded.certain_layouts:
                unverified.append((layer, name, layout))
    return unverified


def warn_of_blind_images(layer: str, *, all_images: bool) -> None:
    """Warn that a layer's maps are blank because its gradient is zero."""
    scope = ": its" if all_images else " for some of the images: their"
    warn(f"The gradient at layer '{layer}' is exactly zero{scope} heatmaps are blank. Choose another layer or score.")


class BlindPatchesError(BlindLayerError):
    """The gradient is exactly zero at all patch tokens. The score may depend on other tokens, such as a class token.

    The message names no better layer, because the caller adds this advice.
    """


def blind_layer(site: GridActivations) -> BlindLayerError:
    """Return the error for a layer whose gradient is exactly zero on the entire grid."""
    if "tokens" in site.layout.kind:
        problem = f"The gradient at layer '{site.layer}' is exactly zero on every patch"
        return BlindPatchesError(f"{problem}: the score does not depend on the patches.")
    if site.layout.kind == "pieces":
        return BlindLayerError(
            f"The gradient at layer '{site.layer}' is exactly zero on every patch. In the last layer of a text model, only "
            "the tokens of the text change the score: choose an earlier layer."
        )
    return BlindLayerError(
        f"The gradient at layer '{site.layer}' is exactly zero, so the layer cannot change the score. Possible causes: a "
        "dead unit, a probability of exactly 0 or 1, or a factor of zero. Choose another layer, or explain the logit."
    )


def choose_activations(
    recorded: RecordedPass, reshape: ReshapeSpec, join: str | None
) -> dict[str, list[GridActivations]]:
    """Return the activations to explain, by layer: one tensor, or all levels of a pyramid.

    If `join` is set, all layers form one entry. If a layer has several tensors, tensors without a grid or without an
    effect on the score are left out. If the grids of the remaining tensors all differ, as in a pyramid, all remaining
    tensors are used. Otherwise, only the first is used. If images reach the model in pieces, the last tensor is used,
    which a vision tower passes to the projector. Raises `LayerError` if no tensor is left.
    """
    sites_by_layer = {layer: _choose_tensors(layer, recorded, reshape) for layer in recorded.names_by_layer}
    if join is None or not sites_by_layer:
        return sites_by_layer
    # If two layers return the same tensor, its map must be added only once.
    sites = {site.layer: site for site in itertools.chain.from_iterable(sites_by_layer.values())}
    return {" + ".join(sites_by_layer): list(sites.values())}


def _choose_tensors(layer: str, recorded: RecordedPass, reshape: ReshapeSpec) -> list[GridActivations]:
    names = recorded.names_by_layer[layer]
    has_pieces = recorded.batch.pieces is not None
    if len(names) == 1:
        return find_views(names[0], recorded) if has_pieces else [find_activations(names[0], recorded, reshape)]
    are_reached = find_dependence(recorded.scored.values, [recorded.activations[name] for name in names])
    names = [name for name, is_reached in zip(names, are_reached) if is_reached]
    if not names:
        raise no_dependence_error([layer])
    if has_pieces:
        return find_views(names[-1], recorded)
    sites: list[GridActivations] = []
    for name in names:
        with contextlib.suppress(LayerError):
            sites.append(find_activations(name, recorded, reshape))
    if not sites:
        return [find_activations(names[0], recorded, reshape)]  # Raises the error that explains why there is no grid.
    is_pyramid = len({site.grid.shape[2:] for site in sites}) == len(sites)
    return sites if is_pyramid else sites[:1]


class DependentImagesError(Exception):
    """The score of one image depends on the activations of another image."""


def order_key(layout: Layout | IndexLayout, shape: Sequence[int], size: Sequence[int]) -> Hashable:
    """Return the cache key for the measured order of a layer's tokens."""
    return ("order", shape[1 - layout.image_axis], tuple(size), layout)
