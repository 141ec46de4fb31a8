"""Measure whether the cells of recorded layers lie where their layouts say, and correct the layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from gradcam.cam.forward import RecordedPass
from gradcam.cam.grid import corrected_models, find_output_layout, order_key
from gradcam.cam.measure_layout import MisplacedError, PlacedLayer, Probe, record_outputs, run_changed
from gradcam.errors import LayerError, warn
from gradcam.hooks.containers import Batch, to_batch
from gradcam.hooks.model_facts import ModelFacts
from gradcam.layers.find import LayerRef, find_layer
from gradcam.layers.layout import Layout, ReshapeSpec
from gradcam.layers.reshape import IndexLayout

ORDER_MEASURED = "a token order was measured"  # A key of `ModelFacts`.


def verify_places(
    recorded: RecordedPass,
    unverified: Sequence[tuple[str, str, Layout | IndexLayout]],
    *,
    is_user_layout: bool,
    strict: bool = False,
) -> None:
    """Measure whether the cells of recorded tensors lie where their layouts say, and correct the layouts.

    `unverified` is the result of `grid.list_unverified`. Measured layouts are cached. `is_user_layout` is True if the
    user set the layouts. If no layout fits, warn; with `strict`, raise `MisplacedError`.
    """
    for layer, name, layout in unverified:
        activations = recorded.activations[name]
        placed = PlacedLayer(recorded.outlets[name], tuple(activations.shape), layout, is_user_layout)
        measured = _recall_layout(placed, activations, recorded, recorded.tail.route)
        if isinstance(measured, str):
            problem = describe_misplacement(layer, measured)
            if strict:
                raise MisplacedError(problem)
            warn(problem)
            return
        recorded.layouts[name] = measured


def find_order(outlet: LayerRef, layout: Layout, activations: Tensor, recorded: RecordedPass) -> tuple[int, ...] | None:
    """Return the index of each cell's token, in the order of the cells; warn if no order fits.

    None means that the cells are consecutive tokens, as the layout assumes. The measured order is cached.
    """
    key = order_key(layout, activations.shape, recorded.batch.size)
    measured: Layout | IndexLayout | str | None = recorded.facts.get(key)
    if measured is None and recorded.frame is None and not recorded.images_changed:
        measured = _recall_layout(PlacedLayer(outlet, tuple(activations.shape), layout), activations, recorded)
        if isinstance(measured, str):
            warn(describe_misplacement(outlet.name, measured))
    return measured.order if isinstance(measured, Layout) else layout.order


def _recall_layout(
    placed: PlacedLayer, activations: Tensor, recorded: RecordedPass, route: Hashable = None
) -> Layout | IndexLayout | str:
    """Return the measured layout, or a description of the problem if no layout fits.

    If the layout cannot be measured, return the assumed layout. The result is cached. A corrected layout is also used
    for other layers with the same number of tokens.
    """
    if not placed.is_measurable(recorded.batch):
        return placed.layout

    def measure() -> Layout | IndexLayout | str | None:
        try:
            layout = Probe(placed, activations, recorded.batch, recorded.model, recorded.autocast).measure_layout()
        except MisplacedError as error:
            return str(error)
        return None if layout is placed.layout else layout

    measured = recorded.facts.remember(placed.cache_key(recorded.batch, route), lambda: (measure(),))[0]
    if measured is not None and not isinstance(measured, str):
        corrected_models.add(recorded.facts.model)
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
            layout = find_output_layout(outlet, activations, batch, model, facts=facts)
            placed = PlacedLayer(outlet, tuple(activations.shape), layout)
            if placed.is_measurable(batch):
                Probe(placed, activations, batch, model, autocast).measure_layout()
                return outlet.name
    return None


def describe_misplacement(layer: str, problem: str) -> str:
    """Return the warning about a layer whose cells do not respond where the image changes."""
    return (
        f"The heatmap at layer '{layer}' may be misplaced: {problem}. Choose another layer, or pass the grid of this "
        "layer's output with reshape=."
    )


def find_misplacement(model: nn.Module, images: Tensor, layer: str, reshape: ReshapeSpec = None) -> str | None:
    """Return a warning if a layer's cells do not respond where images (N,C,H,W) change; None otherwise.

    Raises as `find_output_layout` does.
    """
    batch, outlet = to_batch(images), find_layer(model, layer)
    activations = record_outputs(model, batch, [outlet])[outlet.name]
    layout = find_output_layout(outlet, activations, batch, model, reshape)
    placed = PlacedLayer(outlet, tuple(activations.shape), layout)
    if not placed.is_measurable(batch) or not placed.is_guess(batch):
        return None
    try:
        Probe(placed, activations, batch, model).measure_layout()
    except MisplacedError as error:
        return describe_misplacement(layer, str(error))
    return None
