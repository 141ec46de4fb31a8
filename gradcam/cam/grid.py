"""How a layer's activations lie on the image, as a grid, and what may be wrong with them."""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradcam.cam.forward import Recorded, record_outlets, warn_of_dependence
from gradcam.cam.places import MIN_ANSWERS, MisplacedError, PlacedLayer, Probe, count_answers, run_changed
from gradcam.cam.readings import Ranges, Readings
from gradcam.errors import BlindLayerError, LayerError, warn
from gradcam.hooks.autograd import no_dependence, reached
from gradcam.hooks.facts import Facts
from gradcam.hooks.nested import Batch, to_batch
from gradcam.layers.find import Outlet, find_layer
from gradcam.layers.layout import (
    MOST_NAMED_PREFIX,
    Axes,
    IndexLayout,
    Layout,
    Reshape,
    candidates,
    find_patches,
    find_rivals,
    is_guess,
    one_image,
    order_question,
    pick,
)

TEXT = (
    "of text tokens, or of text and image tokens together, which form no grid on the image. Choose a layer of the image "
    "encoder."
)
JOINS = ("sum",)
# Models of which a layout was corrected: of these, named layers are measured like default ones.
_corrected_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
MIN_GRADIENT = 1e-35  # in float32, which ends at 1e-38: products with less have few digits
ORDERED = "a token order was measured"  # the key of that fact
SHARES = (
    "whose rows sum to 1: attention weights between tokens, not a feature map. Choose the block around this layer, "
    "or an attention method such as 'rollout'."
)


@dataclass(frozen=True)
class GridActivations:
    """A layer's activations: as recorded, as a grid (N,C,...), and how the one becomes the other."""

    layer: str
    recorded: Tensor
    layout: Layout | IndexLayout
    grid: Tensor
    ranges: Ranges

    def to_grid(self, derivatives: Tensor | None, what: str, readings: Readings | None = None) -> tuple[Tensor, Ranges]:
        """Derivatives, k of the recorded activations' shape, as (N,k,C,...), at least float32; and their range in each
        image, with `readings` once these are read. Raises `LayerError` where there are none, `ModelError` where they
        are not finite."""
        if derivatives is None:
            raise no_dependence([self.layer])
        on_grid = self.layout.stack_to_grid(at_least_float32(derivatives)).transpose(0, 1)
        later, is_large = readings or Readings(), what != "gradients" or on_grid.dtype == torch.float64
        least = 0 if is_large else MIN_GRADIENT
        ranges = later.ask_ranges(on_grid, f"The {what} at layer '{self.layer}' are", least=least)
        if readings is None:
            later.read()
        return on_grid, ranges


def find_activations(layer: str, recorded: Recorded, reshape: Reshape = None) -> GridActivations:
    """A recorded layer's site. Raises `LayerError` where there is no grid, `ModelError` for NaN and infinity."""
    tensor = recorded.activations[layer]
    layout = find_grid(layer, tensor, recorded, reshape)
    grid = layout.to_grid(at_least_float32(tensor.detach()))
    ranges = recorded.readings.ask_range(tensor.detach(), f"The activations of layer '{layer}' are")
    return GridActivations(layer, tensor, layout, grid, ranges)


def find_grid(layer: str, activations: Tensor, recorded: Recorded, reshape: Reshape = None) -> Layout | IndexLayout:
    """Return how a recorded layer's activations lie on the image. Raises as `place` does."""
    if layer not in recorded.layouts:
        layout = place(
            recorded.outlets[layer],
            activations,
            recorded.batch,
            model=recorded.model,
            reshape=reshape,
            facts=recorded.facts,
            find_route=lambda: recorded.tail.route,
        )
        is_row = reshape is None and isinstance(layout, Layout) and layout.kind.startswith("tokens")
        measured = (
            recorded.facts.get(order_question(layout, activations.shape, recorded.batch.size)) if is_row else None
        )
        recorded.layouts[layer] = measured or layout
    return recorded.layouts[layer]


def place(
    outlet: Outlet,
    activations: Tensor,
    batch: Batch,
    *,
    model: nn.Module,
    reshape: Reshape = None,
    facts: Facts | None = None,
    find_route: Callable[[], Hashable] = lambda: None,
) -> Layout | IndexLayout:
    """Return how what a layer of the model gave lies on the image. The model is run again where its shape alone does not
    tell. Raises `LayerError` where it does not, or nobody can tell. `find_route`: of what leads to the score in this
    pass, with which remembered answers have to agree."""
    layer, module, facts = outlet.name, outlet.module, facts or Facts(model)
    if callable(reshape):
        return pick(reshape, layer, activations.detach(), batch.images, len(batch.size))
    shape = tuple(activations.shape)
    axes = Axes(model, batch, find_patches(model.modules()) if len(shape) == 3 else (), facts)
    layout = axes.find_layout(shape, module, reshape)
    if layout is None and reshape is None:
        question = ("layout", layer, shape, batch.size, find_route())
        layout = facts.remember(question, lambda: (try_all(shape, outlet, batch, model),))[0]
    if layout is None:
        is_text = reshape is None and axes.holds_text(shape, module)
        is_folded = reshape is None and not axes.image_axes(shape, module)
        why = TEXT if is_text else _folded(batch) if is_folded else _why_not(shape, batch, reshape)
        raise LayerError(f"Layer '{layer}' gives {shape} {why}")
    if reshape is None and len(shape) > 3 and is_guess(layout, module, shape, batch.size) and are_shares(activations):
        raise LayerError(f"Layer '{layer}' gives {shape} {SHARES}")
    return layout


def are_shares(activations: Tensor) -> bool:
    """Whether its rows are shares of a whole, as a softmax gives them: such a matrix of attention is no picture."""
    if activations.is_meta or activations.shape[-1] == 1:
        return False
    tolerance = 2e-2 if activations.dtype in (torch.bfloat16, torch.float16) else 1e-4
    rows = activations.detach().float()
    return bool((rows >= 0).all() and ((rows.sum(-1) - 1).abs() < tolerance).all())


def try_all(shape: tuple[int, ...], outlet: Outlet, batch: Batch, model: nn.Module) -> Layout | None:
    """Of several layouts that an output may have the one whose cells answer in their places; None where no one does best."""
    if shape[0] != batch.images or batch.pictures.is_meta:
        return None
    patches = find_patches(model.modules()) if len(shape) == 3 else ()
    layouts = find_rivals(shape, outlet.module, batch.size, patches)
    layouts = [layout for layout in layouts if PlacedLayer(outlet, shape, layout).is_measurable(batch)]
    placed = {str(number): PlacedLayer(outlet, shape, layout) for number, layout in enumerate(layouts)}
    counts = [count or 0 for count in (count_answers(model, batch, placed).values() if placed else ())]
    best = [layout for layout, count in zip(layouts, counts) if count >= MIN_ANSWERS and count == max(counts)]
    return best[0] if len(best) == 1 else None


def verify_places(recorded: Recorded, reshape: Reshape = None, *, includes_certain: bool = False) -> str | None:
    """Measure whether the cells of the recorded layers lie where their layouts say, and correct the layouts.

    Return what is wrong with a layer for which no layout fits. Each layer is measured once, and only if its layout is a
    guess, or `includes_certain`.
    """
    includes_certain = includes_certain or recorded.facts.model in _corrected_models
    for layer, parts in recorded.parts.items():
        for part in parts if len(parts) == 1 or includes_certain else ():  # not all of several parts need have a grid
            activations = recorded.activations[part]
            try:
                layout = find_grid(part, activations, recorded, reshape)
            except LayerError:
                if len(parts) == 1:
                    raise
                continue
            outlet, shape = recorded.outlets[part], tuple(activations.shape)
            is_certain = isinstance(layout, Layout) and not is_guess(layout, outlet.module, shape, recorded.batch.size)
            if is_certain and not includes_certain:
                continue
            placed = PlacedLayer(outlet, shape, layout, reshape is not None)
            measured = _recall_layout(placed, activations, recorded, recorded.tail.route)
            if isinstance(measured, str):
                return tell_misplaced(layer, measured)
            recorded.layouts[part] = measured
    return None


def find_order(outlet: Outlet, layout: Layout, activations: Tensor, recorded: Recorded) -> tuple[int, ...] | None:
    """Return which tokens are the cells, measured once, or None where the layout says that; warn where no order fits."""
    question = order_question(layout, activations.shape, recorded.batch.size)
    measured: Layout | IndexLayout | str | None = recorded.facts.get(question)
    if measured is None and recorded.frame is None and not recorded.images_changed:
        measured = _recall_layout(PlacedLayer(outlet, tuple(activations.shape), layout), activations, recorded)
        if isinstance(measured, str):
            warn(tell_misplaced(outlet.name, measured))
    return measured.order if isinstance(measured, Layout) else layout.order


def warn_of_mixed_images(recorded: Recorded) -> None:
    """Warn if what the layers give for an image depends on the other images, which a backward pass does not show.

    Each image is run alone, once for a model and layers, and again for more images.
    """
    batch = recorded.batch
    if batch.images == 1 or not recorded.outlets or recorded.frame is not None or recorded.images_changed:
        return
    question = ("mixed", tuple(recorded.outlets), batch.size)
    if batch.images <= (recorded.facts.get(question) or 1):  # images among which none depended on another
        return
    if recorded.facts.remember((*question, batch.images), lambda: _are_mixed(recorded)):
        warn_of_dependence(recorded.modules)
    else:
        recorded.facts.set(question, batch.images)


def _are_mixed(recorded: Recorded) -> bool:
    batch, slack, outlets = recorded.batch, 8 * recorded.slack, list(recorded.outlets.values())
    for image in range(batch.images):
        alone = run_changed(recorded.model, one_image(batch, image), outlets, recorded.autocast)
        for name, activations in alone.items():
            together = recorded.activations[name].detach()
            axis = next((axis for axis in (0, 1) if together.shape[axis : axis + 1] == (batch.images,)), None)
            if axis is None or together.shape[:axis] + together.shape[axis + 1 :] != (
                activations.shape[:axis] + activations.shape[axis + 1 :]
            ):
                continue  # its rows are not the images
            difference = (together.select(axis, image) - activations.select(axis, 0)).abs().amax()
            if difference > slack * activations.abs().amax():
                return not _is_random(recorded, one_image(batch, image), outlets, alone)
    return False


def _is_random(recorded: Recorded, batch: Batch, outlets: list[Outlet], outputs: Mapping[str, Tensor]) -> bool:
    """Return whether the outputs are others with other random numbers, so that an image alone gets other ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        again = run_changed(recorded.model, batch, outlets, recorded.autocast)
    return any(name in again and not torch.equal(tensor, again[name]) for name, tensor in outputs.items())


def _recall_layout(
    placed: PlacedLayer, activations: Tensor, recorded: Recorded, route: Hashable = None
) -> Layout | IndexLayout | str:
    """Return the measured layout, which is kept for other layers with as many tokens, or what is wrong with it."""
    if not placed.is_measurable(recorded.batch):
        return placed.layout

    def measure() -> Layout | IndexLayout | str | None:
        try:
            probe = Probe(placed, activations, recorded.batch, recorded.model, recorded.autocast)
            layout = probe.measure_layout()
        except MisplacedError as error:
            return str(error)
        return None if layout is placed.layout else layout

    measured = recorded.facts.remember(placed.question(recorded.batch, route), lambda: (measure(),))[0]
    if measured is not None and not isinstance(measured, str):
        _corrected_models.add(recorded.facts.model)
        recorded.facts.set(order_question(placed.layout, placed.shape, recorded.batch.size), measured)
        recorded.facts.set(ORDERED, True)
    return measured or placed.layout


def find_placed_layer(
    model: nn.Module, batch: Batch, names: Sequence[str], facts: Facts, autocast: torch.dtype | None
) -> str | None:
    """Return the first of these layers whose cells respond where the image changes; None if there is none."""
    outlets = [find_layer(model, name) for name in names]
    outputs = run_changed(model, batch.copy(), outlets, autocast)
    for outlet in outlets:
        with contextlib.suppress(LayerError, MisplacedError, KeyError):
            activations = outputs[outlet.name]
            layout = place(outlet, activations, batch, model=model, facts=facts)
            placed = PlacedLayer(outlet, tuple(activations.shape), layout)
            if placed.is_measurable(batch):
                Probe(placed, activations, batch, model, autocast).measure_layout()
                return outlet.name
    return None


def tell_misplaced(layer: str, problem: str) -> str:
    """Return what there is to say of a map whose cells do not respond in their places."""
    return (
        f"The heatmap at layer '{layer}' may be misplaced: {problem}. Choose another layer, or pass the grid of this "
        "layer's output with reshape=."
    )


def find_doubt(model: nn.Module, images: Tensor, layer: str, reshape: Reshape = None) -> str | None:
    """Return what there is to say of a layer whose cells do not respond in their places, for images (N,C,H,W), or None.

    Raises as `place` does.
    """
    batch, outlet = to_batch(images), find_layer(model, layer)
    activations = record_outlets(model, batch, [outlet])[outlet.name]
    layout = place(outlet, activations, batch, model=model, reshape=reshape)
    placed = PlacedLayer(outlet, tuple(activations.shape), layout)
    if not placed.is_measurable(batch) or not placed.is_guess(batch):
        return None
    try:
        Probe(placed, activations, batch, model).measure_layout()
    except MisplacedError as error:
        return tell_misplaced(layer, str(error))
    return None


def _why_not(shape: tuple[int, ...], batch: Batch, reshape: str | tuple[int, ...] | None) -> str:
    size = " x ".join(map(str, batch.size))
    if reshape is not None:
        misfit = f"but reshape={reshape!r} does not fit this output"
        return f"for {batch.images} image(s) of {size}, {misfit}: {_options(shape, batch)}"
    if batch.images not in shape[:2] or (batch.images != shape[0] and len(shape) != 3):
        return _folded(batch)
    if len(shape) == 3 or (len(shape) == len(batch.size) + 2 and max(shape[2:]) > 1):
        return f"for images of {size}, but the spatial grid of this output is ambiguous: {_options(shape, batch)}"
    return f"for images of {size}, but this output has no spatial grid: choose a layer before pooling and flattening."


def _folded(batch: Batch) -> str:
    return (
        f"for {batch.images} image(s): its first axis is not the batch, so no heatmap can be assigned to an image. Choose a "
        "layer outside the part of the model that reshapes the batch."
    )


def _options(shape: tuple[int, ...], batch: Batch) -> str:
    cells = ", ".join("dhw"[-len(batch.size) :])
    function = f"a function that returns (N, C, {cells})"
    if len(shape) != 3:
        return f"pass reshape='channels first' or 'channels last', or {function}."
    tokens = shape[1] if shape[0] == batch.images else shape[0]
    # The largest grid of so many tokens, or of a few less, that has the picture's aspect, more or less.
    shares = [length / min(batch.size) for length in batch.size]
    grids = {tuple(round(cells * share) for share in shares) for cells in range(1, math.isqrt(tokens) + 1)}
    grid = min(((it.prefix, it.grid) for it in candidates(tokens, grids)), default=(0, None))[1]
    such = f", such as reshape={grid}" if grid else ""
    return (
        f"pass the grid of its {tokens} tokens, reshape=({cells}){such} (up to {MOST_NAMED_PREFIX} extra tokens may "
        f"precede the grid), or {function}."
    )


def at_least_float32(tensor: Tensor) -> Tensor:
    """In its own precision, or in float32 if that is more."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def warn_of_blind_images(layer: str, *, all_of_them: bool) -> None:
    """Say that a layer's maps are blank because nothing there can change the score."""
    whose = "its heatmaps are blank" if all_of_them else "their heatmaps are blank"
    some = "" if all_of_them else " for some of the images"
    warn(f"The gradient at layer '{layer}' is exactly zero{some}: {whose}. Choose another layer or score.")


class BlindPatchesError(BlindLayerError):
    """One at tokens, of which the score may well read others; it ends without the advice which layer to choose."""


def blind_layer(site: GridActivations) -> BlindLayerError:
    """The error for a layer whose gradient is exactly zero all over the grid."""
    if "tokens" in site.layout.kind:
        return BlindPatchesError(
            f"The gradient at layer '{site.layer}' is exactly zero on every patch: no patch of this layer reaches the score."
        )
    return BlindLayerError(
        f"The gradient at layer '{site.layer}' is exactly zero, so the layer cannot change the score. Possible causes: a "
        "dead unit, a probability of exactly 0 or 1, or a factor of zero. Choose another layer, or explain the logit."
    )


def choose_activations(
    recorded: Recorded, reshape: Reshape = None, *, join: str | None = None
) -> dict[str, list[GridActivations]]:
    """For each layer the sites to be explained: one, or all levels of a pyramid; with `join` those of all layers as
    one. Of several tensors that a layer gave these are the ones that have a grid and that the score depends on. All of
    them if no two have the same grid, as the levels of a pyramid do; else the first. Raises `LayerError` where there is
    none."""
    chosen = {layer: _choose(layer, names, recorded, reshape) for layer, names in recorded.parts.items()}
    if join is None or not chosen:
        return chosen
    sites = {site.layer: site for site in itertools.chain.from_iterable(chosen.values())}  # each counts once
    return {" + ".join(chosen): list(sites.values())}


def _choose(layer: str, names: Sequence[str], recorded: Recorded, reshape: Reshape) -> list[GridActivations]:
    if len(names) == 1:
        return [find_activations(names[0], recorded, reshape)]
    on_the_way = reached(recorded.scored.values, [recorded.activations[name] for name in names])
    names = [name for name, is_reached in zip(names, on_the_way) if is_reached]
    if not names:
        raise no_dependence([layer])
    sites: list[GridActivations] = []
    for name in names:
        with contextlib.suppress(LayerError):
            sites.append(find_activations(name, recorded, reshape))
    if not sites:
        return [find_activations(names[0], recorded, reshape)]  # which says why there is no grid
    is_pyramid = len({site.grid.shape[2:] for site in sites}) == len(sites)
    return sites if is_pyramid else sites[:1]
