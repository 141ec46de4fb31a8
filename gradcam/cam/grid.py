"""Where a layer's activations lie on the picture, whether they do lie there, and what may be wrong with them.

The number of tokens, or the sides of a map, say how many cells there are, and nothing of their order. So places of the
picture are changed, and it is seen which cells answer. Where the layout is right, the cell on a changed place is among
those that change most; in another order that is so by chance.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.forward import Recorded, record_outputs
from gradcam.cam.readings import Readings
from gradcam.errors import BlindLayerError, LayerError, warn
from gradcam.hooks.autograd import no_dependence, reached
from gradcam.hooks.nested import Batch, tensors, to_batch
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
    pick,
)

# Shares of the depth, the height and the width; in no symmetry, so that a mirrored grid is seen, too.
PLACES = (
    (0.33, 0.14, 0.21), (0.71, 0.23, 0.67), (0.12, 0.42, 0.38), (0.88, 0.55, 0.88), (0.47, 0.79, 0.13),
    (0.60, 0.86, 0.59),
)  # fmt: skip
ENOUGH = 4  # answered places, from which on cells are taken to lie where they should
FEWEST_CELLS = 25  # of a grid: in fewer, too much answers by chance, and a convolution reaches over all of them
MOST_CHANGED = 0.15  # the share of the cells that one on a changed place has to be among
OFFSET, SIDE = 3 / 8, 3 / 4  # of the coarsest grid's cell: such a place lies well inside it, and inside finer ones

# By module: how many places it answered, by its output's shape, the pictures' size and the layout.
_known: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, int | None]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Laid:
    """A layer, the shape of what it gives for a batch, and how that is taken to lie on the pictures."""

    module: nn.Module
    shape: tuple[int, ...]
    layout: Layout | IndexLayout

    @property
    def grid(self) -> tuple[int, ...]:
        return self.layout.grid if isinstance(self.layout, Layout) else tuple(self.layout.indices.shape[2:])

    def is_doubtful(self, batch: Batch) -> bool:
        """Whether it has to be tried out where its cells lie, and can be."""
        is_finer_than_pixels = all(cells > length for cells, length in zip(self.grid, batch.size))
        if is_finer_than_pixels or math.prod(self.grid) < FEWEST_CELLS:
            return False
        return not isinstance(self.layout, Layout) or is_guess(self.layout, self.module, self.shape, batch.size)

    def key(self, batch: Batch) -> Hashable:
        if isinstance(self.layout, Layout):
            return (self.shape[1 - self.layout.image_axis :], batch.size, self.layout)
        return (self.shape, batch.size, hash(self.layout.indices.cpu().numpy().tobytes()))


def tell_doubt(
    layer: str, laid: Laid, batch: Batch, model: nn.Module, autocast: torch.dtype | None = None
) -> str | None:
    """What there is to say of a map at a layer whose cells answer at too few places; None where nothing is."""
    answers = remember_answers(model, batch, laid, autocast=autocast)[0] if laid.is_doubtful(batch) else None
    if answers is None or answers >= ENOUGH:
        return None
    return (
        f"The map at layer '{layer}' may lie in wrong places: of {len(PLACES)} changed in the picture, its cells answered "
        f"at {answers}, expected {ENOUGH} or more. Choose another layer, or say with reshape= how it lies."
    )


def remember_answers(
    model: nn.Module, batch: Batch, *layers: Laid, autocast: torch.dtype | None = None
) -> list[int | None]:
    """As `count_answers` of some layers, for which the model is run the first time alone."""
    keys = [each.key(batch) for each in layers]
    new = {str(i): each for i, each in enumerate(layers) if keys[i] not in _known.setdefault(each.module, {})}
    for i, answers in (count_answers(model, batch, new, autocast) if new else {}).items():
        _known[layers[int(i)].module][keys[int(i)]] = answers
    return [_known[each.module][key] for each, key in zip(layers, keys)]


def count_answers(
    model: nn.Module, batch: Batch, layers: Mapping[str, Laid], autocast: torch.dtype | None = None
) -> dict[str, int | None]:
    """At how many of the six places the right cell answers, for each layer; None where that cannot be seen. Each place
    is changed in a picture of its own: it takes a pass of the batch as it is, and as many as it takes to show six
    pictures. None is for a layer that is the same everywhere, for one that only other pictures beside these reach, and
    for all of them if the model fails."""
    modules = {each.module for each in layers.values()}
    coarsest = min((each.grid for each in layers.values()), key=math.prod)
    # Points that lie well inside of a cell, as shares of the picture's sides.
    points = [
        tuple((int(share * cells) + OFFSET) / cells for share, cells in zip(place[-len(batch.size) :], coarsest))
        for place in PLACES
    ]

    def run(pictures: Tensor) -> dict[str, Tensor]:
        found = record_outputs(model, batch.copy(pictures=pictures.clone()), modules)
        return {key: each.layout.to_grid(found[each.module]) for key, each in layers.items()}

    counts = dict.fromkeys(layers, 0)
    shape, given = batch.pictures.shape, tensors((batch.args, batch.kwargs))
    unseen = set(layers) if sum(it.ndim == len(shape) and it.shape[:2] == shape[:2] for it in given) > 1 else set()
    try:
        with torch.autocast(batch.device.type, dtype=autocast, enabled=autocast is not None):
            pictures = batch.pictures
            if not bool(pictures.amax() > pictures.amin()):  # of one colour, all cells are alike: noise instead
                generator = torch.Generator("cpu").manual_seed(1)
                pictures = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(pictures)
            plain = run(pictures)
            for first in range(0, len(points), batch.images):
                shown = points[first : first + batch.images]
                for key, grid in run(_change(pictures, shown, coarsest)).items():
                    changes = (grid - plain[key]).float().norm(dim=1)
                    counts[key] += sum(map(_answers, changes, shown))
                    if changes.any():
                        unseen.discard(key)  # else it is of other pictures, as the second pathway of a SlowFast
    except Exception:  # whatever a model raises when it runs once more
        return dict.fromkeys(layers)
    cells = {key: grid.flatten(2) for key, grid in plain.items()}
    unseen |= {key for key, each in cells.items() if bool((each == each[..., :1]).all())}  # the same everywhere
    return {key: None if key in unseen else count for key, count in counts.items()}


def _change(pictures: Tensor, points: Sequence[tuple[float, ...]], grid: Sequence[int]) -> Tensor:
    """The pictures, each with noise around a point, of the picture's own range."""
    generator = torch.Generator("cpu").manual_seed(0)
    changed = pictures.clone()
    for picture, point in zip(changed, points):
        low, high = picture.amin().item(), picture.amax().item()
        window: list[Any] = [slice(None)]
        for share, cells, length in zip(point, grid, picture.shape[1:]):
            side = max(1, round(SIDE * length / cells))
            start = min(max(0, round(share * length - side / 2)), length - side)
            window.append(slice(start, start + side))
        part = picture[tuple(window)]
        part.copy_(low + (high - low) * torch.rand(part.shape, generator=generator, dtype=torch.float32, device="cpu"))
    return changed


def _answers(changes: Tensor, point: Sequence[float]) -> bool:
    own = changes[tuple(int(share * cells) for share, cells in zip(point, changes.shape))]
    return bool(own > 0) and int((changes >= own).sum()) <= math.ceil(MOST_CHANGED * changes.numel())


TEXT = (
    "of text, or of text and picture in one row: its length is the text's, so that its rows are no places. Choose a layer "
    "of the part that sees the picture alone."
)
JOINS = ("sum",)
SHARES = (
    "whose rows add up to 1: shares of attention between tokens, which are no picture. Choose the block around it, or a "
    "method that follows attention, such as 'rollout'."
)


@dataclass(frozen=True)
class GridActivations:
    """A layer's activations: as recorded, as a grid (N,C,...), and how the one becomes the other."""

    layer: str
    recorded: Tensor
    layout: Layout | IndexLayout
    grid: Tensor

    def to_grid(
        self, derivatives: Tensor | None, what: str, readings: Readings | None = None
    ) -> tuple[Tensor, list[bool]]:
        """Derivatives, k of the recorded activations' shape, as (N,k,C,...), at least float32; and which images' are
        zero, with `readings` once these are read. Raises `LayerError` where there are none, `ModelError` where they are
        not finite."""
        if derivatives is None:
            raise no_dependence([self.layer])
        on_grid = self.layout.stack_to_grid(derivatives).transpose(0, 1)
        later = readings or Readings()
        is_zero = later.ask_zeros(on_grid, f"The {what} at layer '{self.layer}' are")
        if readings is None:
            later.read()
        return at_least_float32(on_grid), is_zero


def find_activations(layer: str, recorded: Recorded, reshape: Reshape = None) -> GridActivations:
    """A recorded layer's site. Raises `LayerError` where there is no grid, `ModelError` for NaN and infinity."""
    tensor = recorded.activations[layer]
    layout = find_grid(layer, tensor, recorded, reshape)
    grid = layout.to_grid(tensor.detach())
    recorded.readings.ask_range(tensor.detach(), f"The activations of layer '{layer}' are")
    return GridActivations(layer, tensor, layout, at_least_float32(grid))


def find_grid(layer: str, activations: Tensor, recorded: Recorded, reshape: Reshape = None) -> Layout | IndexLayout:
    """How a recorded layer's activations lie on the picture. Raises as `place` does."""
    if layer not in recorded.layouts:
        module = recorded.outlets[layer].module
        recorded.layouts[layer] = place(
            layer, activations, module, recorded.batch, model=recorded.model, reshape=reshape
        )
    return recorded.layouts[layer]


def place(
    layer: str, activations: Tensor, module: nn.Module, batch: Batch, *, model: nn.Module, reshape: Reshape = None
) -> Layout | IndexLayout:
    """How what a layer of the model gave lies on the picture. The model is run again where its shape alone does not
    tell. Raises `LayerError` where it does not, or nobody can tell."""
    if callable(reshape):
        return pick(reshape, layer, activations.detach(), batch.images, len(batch.size))
    shape = tuple(activations.shape)
    axes = Axes(model, batch, find_patches(model.modules()) if len(shape) == 3 else ())
    layout = axes.find_layout(shape, module, reshape)
    if layout is None and reshape is None:
        layout = try_all(shape, module, batch, model)
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


def try_all(shape: tuple[int, ...], module: nn.Module, batch: Batch, model: nn.Module) -> Layout | None:
    """Of several layouts that an output may have the one whose cells answer in their places; None where no one does best."""
    if shape[0] != batch.images or batch.pictures.is_meta:
        return None
    patches = find_patches(model.modules()) if len(shape) == 3 else ()
    layouts = find_rivals(shape, module, batch.size, patches)
    answers = remember_answers(model, batch, *(Laid(module, shape, layout) for layout in layouts)) if layouts else []
    counts = [count or 0 for count in answers]
    best = [layout for layout, count in zip(layouts, counts) if count >= ENOUGH and count == max(counts)]
    return best[0] if len(best) == 1 else None


def warn_of_places(recorded: Recorded, reshape: Reshape = None) -> None:
    """Warn of recorded layers whose cells do not answer in their places, where it is a guess which these are."""
    for layer, (part, *others) in recorded.parts.items():
        if others:
            continue  # of which not all need have a grid
        activations = recorded.activations[part]
        layout = find_grid(part, activations, recorded, reshape)
        laid = Laid(recorded.outlets[part].module, tuple(activations.shape), layout)
        if doubt := tell_doubt(layer, laid, recorded.batch, recorded.model, recorded.autocast):
            warn(doubt)


def find_doubt(model: nn.Module, images: Tensor, layer: str, reshape: Reshape = None) -> str | None:
    """What `warn_of_places` says of a layer, for images (N,C,H,W). Raises as `place` does."""
    batch, module = to_batch(images), model.get_submodule(layer)
    activations = record_outputs(model, batch, [module])[module]
    layout = place(layer, activations, module, batch, model=model, reshape=reshape)
    return tell_doubt(layer, Laid(module, tuple(activations.shape), layout), batch, model)


def _why_not(shape: tuple[int, ...], batch: Batch, reshape: str | tuple[int, ...] | None) -> str:
    size = " x ".join(map(str, batch.size))
    if reshape is not None:
        fits = f"which reshape={reshape!r} does not fit"
        return f"for {batch.images} image(s) of {size}, {fits}: {_options(shape, batch)}"
    if batch.images not in shape[:2] or (batch.images != shape[0] and len(shape) != 3):
        return _folded(batch)
    if len(shape) == 3 or (len(shape) == len(batch.size) + 2 and max(shape[2:]) > 1):
        return f"for images of {size}, in which it is not certain where their grid lies: {_options(shape, batch)}"
    return f"for images of {size}, in which there is no spatial grid: choose a layer before pooling and flattening."


def _folded(batch: Batch) -> str:
    return (
        f"for {batch.images} image(s): its rows are not the images, so that no map can be assigned to one. Choose a layer "
        "outside the part that folds the batch."
    )


def _options(shape: tuple[int, ...], batch: Batch) -> str:
    cells = ", ".join("dhw"[-len(batch.size) :])
    function = f"a function to (N, C, {cells})"
    if len(shape) != 3:
        return f"pass reshape='channels first' or 'channels last', or {function}."
    tokens = shape[1] if shape[0] == batch.images else shape[0]
    # The largest grid of so many tokens, or of a few less, that has the picture's aspect, more or less.
    shares = [length / min(batch.size) for length in batch.size]
    grids = {tuple(round(cells * share) for share in shares) for cells in range(1, math.isqrt(tokens) + 1)}
    grid = min(((it.prefix, it.grid) for it in candidates(tokens, grids)), default=(0, None))[1]
    such = f", such as reshape={grid}" if grid else ""
    return (
        f"pass the grid of its {tokens} tokens, reshape=({cells}){such} (up to {MOST_NAMED_PREFIX} may come before it), "
        f"or {function}."
    )


def at_least_float32(tensor: Tensor) -> Tensor:
    """In its own precision, or in float32 if that is more."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def warn_of_blind_images(layer: str, *, all_of_them: bool) -> None:
    """Say that a layer's maps are blank because nothing there can change the score."""
    whose = "its maps are blank" if all_of_them else "the maps of those are blank"
    some = "" if all_of_them else " for some of the images"
    warn(f"At layer '{layer}' nothing can change the score{some} (its gradient is exactly zero): {whose}.")


class BlindPatchesError(BlindLayerError):
    """One at tokens, of which the score may well read others; it ends without the advice which layer to choose."""


def blind_layer(site: GridActivations) -> BlindLayerError:
    """The error for a layer whose gradient is exactly zero all over the grid."""
    if "tokens" in site.layout.kind:
        return BlindPatchesError(
            f"The gradient at layer '{site.layer}' is exactly zero on every patch: from there on, none reaches the score."
        )
    return BlindLayerError(
        f"The gradient at layer '{site.layer}' is exactly zero: nothing there can change the score (a unit that is switched "
        "off, a probability that is exactly 0 or 1, a factor of zero). Choose another layer, or the logit for a score."
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
