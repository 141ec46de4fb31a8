"""Measure where the cells of a layer lie: change parts of the image, and record which cells respond.

The shape of an output gives the number of cells, but not the order of the cells. `measure_layout` usually takes one
more pass, in which all images are changed at once.

Tokens respond to local changes. So each image is changed at randomly chosen cells. For every possible layout, the
responses are correlated with the changed cells. If the result is not clear, six points are changed one by one. The cell
at each changed point has to be among the cells that respond most.

A cell of a convolution's map responds to changes in a large area. So a corner is changed. The centre of the responses
has to move towards this corner, and the strongest responses have to lie near the corner. If the result is not clear,
the quadrants of the image follow, and then the other corners. The corners show whether the model crops, pads or
rearranges the image.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.hooks import pytorch
from gradcam.hooks.containers import Batch, detach_input, floating_tensors_by_keys, list_tensors
from gradcam.hooks.hooks import Hooks, grad_mode_off
from gradcam.hooks.memory import is_out_of_memory
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import LayerRef
from gradcam.layers.layout import Layout, is_guess
from gradcam.layers.reshape import IndexLayout, probe_layout
from gradcam.layers.token_layout import find_patches, find_rival_layouts

AnyLayout = Layout | IndexLayout

# The points to change, as shares of the depth, the height and the width. The points have no symmetry, so that a
# mirrored grid is detected.
TEST_POINTS = (
    (0.33, 0.14, 0.21), (0.71, 0.23, 0.67), (0.12, 0.42, 0.38), (0.88, 0.55, 0.88), (0.47, 0.79, 0.13),
    (0.60, 0.86, 0.59),
)  # fmt: skip
MIN_RESPONSES = 4  # A layout is accepted if the right cell responds at this many of the six test points, or more.
MIN_TOKENS, MIN_CELLS = 6, 9  # Minimum grid of tokens, and of a map. In smaller grids, cells respond by chance.
MAX_RESPONDING = 0.15  # A cell responds if its change is among the largest changes, which are this share of all cells.
CELL_OFFSET, PATCH_SIDE = 3 / 8, 3 / 4  # Centre and side of a changed patch, as shares of a cell's side.
CHANGED_SHARE = 0.4  # The share of the cells that are changed in one pass.
MIN_CORRELATION = 0.55  # The minimum correlation of the responses with the changed cells.
# The minimum correlation, in standard deviations of a random correlation. If MIN_CORRELATION is larger, it applies
# instead.
MIN_DEVIATIONS = 2.5
# If the correlation exceeds both limits, MIN_RESPONSES - 1 responses are enough.
LIKELY_CORRELATION, LIKELY_DEVIATIONS = 0.35, 1.5
MIN_MARGIN = 0.1  # To replace the assumed layout, another layout must have a correlation that is larger by this margin.
# Each quadrant has a half (0 or 1) on each of the last two axes. The first two quadrants are tested first, because
# mirroring and transposing both move these quadrants.
QUADRANTS = ((0, 1), (1, 0), (0, 0), (1, 1))
QUADRANT_START, QUADRANT_SIDE = (0.08, 0.52), 0.4  # Shares of the image's sides.
CORNER_START, CORNER_SIDE = (0.0, 0.8), 0.2
# Cells are near a changed corner if their distance from its centre, along each axis, is at most this share of the side.
MAX_CORNER_DISTANCE = 0.3
# The layer does not respond at a changed corner if the cells near the corner change by less than this share of the mean
# change. At half of the corners or more, this means that the model crops, pads or rearranges the image.
MIN_CORNER_CHANGE, MAX_SILENT_CORNERS = 0.5, 0.5
# The minimum distance between the centre of the responses and the grid's centre, as a share of the side.
MIN_OFFSET = 0.02
# If the centre of the responses moves by more than this share of the side, its direction must be right.
MIN_MOVEMENT = 0.1
MIN_ALIGNMENT = 0.3  # The minimum of the sum of signed offsets, as a share of the sum of their magnitudes.
MAX_SEARCHED_CELLS = 400  # In grids with more cells, only the usual positions of extra tokens are tried.
MAX_COMPARED_IMAGES = 8


class MisplacedError(Exception):
    """The cells of a layer do not respond where the image was changed. The message describes the responses."""


@dataclass(frozen=True)
class PlacedLayer:
    """A layer's output: the layer, the output's shape for a batch, and the output's assumed layout."""

    outlet: LayerRef
    shape: tuple[int, ...]
    layout: AnyLayout
    is_fixed: bool = False  # The user has set the layout.

    @property
    def grid(self) -> tuple[int, ...]:
        return self.layout.grid if isinstance(self.layout, Layout) else tuple(self.layout.indices.shape[2:])

    def is_measurable(self, batch: Batch) -> bool:
        """Return whether the grid has enough cells, and is not finer than the image's pixels."""
        is_finer_than_pixels = all(cells > length for cells, length in zip(self.grid, batch.size))
        min_cells = MIN_TOKENS if self.layout.kind.startswith("tokens") else MIN_CELLS
        return not is_finer_than_pixels and math.prod(self.grid) >= min_cells

    def is_guess(self, batch: Batch) -> bool:
        """Return whether the layout is inferred from the number of tokens or the aspect ratio alone."""
        return not isinstance(self.layout, Layout) or is_guess(self.layout, self.outlet.module, self.shape, batch.size)

    def cache_key(self, batch: Batch, route: Hashable) -> Hashable:
        """Return the cache key of the measured layout. `route` is the data flow from the layer to the score."""
        layout: Any = self.layout
        if isinstance(layout, IndexLayout):
            layout = (layout.indices.device, hash(layout.indices.cpu().numpy().tobytes()))
        return (self.outlet.name, self.shape, batch.size, layout, route)


@dataclass(frozen=True)
class Probe:
    """A layer to watch while the image changes, and its output for the unchanged image."""

    placed: PlacedLayer
    activations: Tensor
    batch: Batch
    model: nn.Module
    autocast: torch.dtype | None = None

    def measure_layout(self) -> AnyLayout:
        """Return the layout in which cells respond where the image changes; the assumed layout if this is unclear.

        Raises `MisplacedError` if no layout fits.
        """
        return self._measure_tokens() if self.placed.is_guess(self.batch) else self._measure_orientation()

    def _measure_tokens(self) -> AnyLayout:
        assumed, grid = self.placed.layout, self.placed.grid
        codes = _sample_cells(grid, self.batch.images)
        changes = self._respond(F.interpolate(codes[:, None], self.batch.size, mode="nearest"))
        if changes is None:
            return assumed
        usual, unusual = ([], []) if self.placed.is_fixed else list_layouts(assumed, self.placed.shape)
        layouts = [assumed, *usual, *unusual]
        responses = changes.float().norm(dim=-1, keepdim=True) if assumed.kind.startswith("tokens") else changes
        scores = [_correlate(layout.to_grid(responses), codes) for layout in layouts]
        scores[1 + len(usual) :] = [score - MIN_MARGIN / 2 for score in scores[1 + len(usual) :]]
        best = max(range(len(layouts)), key=scores.__getitem__)
        min_score = max(MIN_CORRELATION, MIN_DEVIATIONS / math.sqrt(codes.numel()))
        is_better = scores[best] - scores[0] >= MIN_MARGIN
        if scores[0] >= min_score and not is_better:
            return assumed
        placed = {str(i): replace(self.placed, layout=layouts[i]) for i in (0, best if is_better else 0)}
        counts = [*count_responses(self.model, self.batch, placed, self.autocast).values()]
        responding, best_responding = counts[0], counts[-1]
        if responding is None or best_responding is None:
            return assumed
        is_likely = scores[0] >= max(LIKELY_CORRELATION, LIKELY_DEVIATIONS / math.sqrt(codes.numel()))
        is_confirmed = best_responding >= MIN_RESPONSES and (scores[best] >= min_score or best_responding > responding)
        if is_better and is_confirmed:
            return layouts[best]
        if responding < MIN_RESPONSES - (is_likely and not is_better):
            raise MisplacedError(
                f"{len(TEST_POINTS)} places of the image were changed one by one, and the layer responded at "
                f"{responding} of them, expected at least {MIN_RESPONSES}"
            )
        return assumed

    def _measure_orientation(self) -> AnyLayout:
        """Measure the layout of a convolution's map. Its rows and columns may be swapped or mirrored."""
        assumed, images = self.placed.layout, self.batch.images
        is_clear, silent = self._change_corners(0)
        if is_clear:
            return assumed
        offsets, transposed = [], []
        for shift in range(len(QUADRANTS)):
            quadrants = _list_quadrants(images, shift)
            changes = self._respond(_cut_windows(quadrants, self.batch.size, QUADRANT_START, QUADRANT_SIDE))
            if changes is None:
                return assumed
            responses = assumed.to_grid(changes).float().norm(dim=1)
            offsets.append(_find_offsets(responses, quadrants))
            transposed.append(_find_offsets(responses.mT, quadrants))
            if shift == 0 and min(offsets[0]) > MIN_OFFSET:
                break
        is_flat = len(self.batch.size) == 2 and not self.placed.is_fixed
        if not (is_flat and _follows(transposed)) and _hardly_moves(offsets):
            return assumed
        if _follows(offsets):
            # Test the other corners only if a corner was silent, because each test takes a pass.
            silent += sum(self._change_corners(shift)[1] for shift in range(1, len(QUADRANTS))) if silent else 0
            if silent >= MAX_SILENT_CORNERS * images * len(QUADRANTS):
                raise MisplacedError(
                    "the corners of the image were changed one by one, and the layer did not respond there, as if the "
                    "model cropped, padded or rearranged the image"
                )
            return assumed
        if is_flat and _follows(transposed):
            name, rows = self.placed.outlet.name, torch.zeros_like(self.activations, dtype=torch.float32)
            return probe_layout(lambda rows: assumed.to_grid(rows).mT, name, rows, images, 2)
        raise MisplacedError("when one side of the image was changed, the layer did not respond on this side")

    def _change_corners(self, shift: int) -> tuple[bool, int]:
        """Change a corner of each image. Return whether the strong responses are there, and count the silent corners."""
        quadrants = _list_quadrants(self.batch.images, shift)
        try:
            changes = self._respond(_cut_windows(quadrants, self.batch.size, CORNER_START, CORNER_SIDE))
        except MisplacedError:  # No cell depends on these corners.
            return False, self.batch.images
        if changes is None:
            return False, 0
        responses = self.placed.layout.to_grid(changes).float().norm(dim=1)
        is_near, silent = _compare_corners(responses, quadrants)
        return is_near and min(_find_offsets(responses, quadrants)) > MIN_OFFSET, silent

    def _respond(self, mask: Tensor) -> Tensor | None:
        """Put noise into the images where `mask` (N,1,...) is set; return the change of the output, or None if unknown.

        Raises `MisplacedError` if the output does not depend on the images.
        """
        outlet, batch = self.placed.outlet, self.batch.copy(pictures=_put_noise(self.batch.pictures, mask))
        changed = run_changed(self.model, batch, [outlet], self.autocast).get(outlet.name)
        if changed is None:
            return None
        if changed.shape != self.activations.shape:
            if changed.ndim == self.activations.ndim and len(changed) == len(self.activations):
                raise MisplacedError("the number of the layer's cells depends on the content of the image")
            return None
        changes = changed.detach() - self.activations.detach()
        if bool(changes.any()):
            return changes
        cells = self.placed.layout.to_grid(changed).flatten(2)
        if has_other_images(self.batch) or bool((cells == cells[..., :1]).all()):
            return None
        raise MisplacedError("the layer does not depend on the image")


def run_changed(
    model: nn.Module, batch: Batch, outlets: Sequence[LayerRef], autocast: torch.dtype | None
) -> Mapping[str, Tensor]:
    """Return the outputs of these layers for a batch, by name; an empty dict if the model fails.

    Out-of-memory errors are raised.
    """
    try:
        with pytorch.autocast(batch.device.type, autocast):
            return record_outputs(model, batch, outlets)
    except Exception as error:  # The model may raise any error in a second run.
        if is_out_of_memory(error):
            raise
        return {}


def has_other_images(batch: Batch) -> bool:
    """Return whether the inputs hold further images, which stay unchanged, such as SlowFast's second pathway."""
    shape = batch.pictures.shape
    inputs = list_tensors((batch.args, batch.kwargs))
    return sum(tensor.ndim == len(shape) and tensor.shape[:2] == shape[:2] for tensor in inputs) > 1


def list_layouts(assumed: AnyLayout, shape: Sequence[int]) -> list[list[AnyLayout]]:
    """Return the alternatives to an output's assumed layout: a list of usual and a list of unusual layouts.

    In usual layouts, the extra tokens are at the start, at the end, at both, or in the middle of the sequence. In
    unusual layouts, the extra tokens are at other positions between the cells. The grid's axes can have any order.
    """
    if not isinstance(assumed, Layout) or not assumed.kind.startswith("tokens"):
        return [[], []]
    tokens, cells = shape[1 - assumed.image_axis], math.prod(assumed.grid)
    indices, extra = list(range(tokens)), tokens - cells
    usual_rows = [indices[before : before + cells] for before in range(extra + 1)]
    middle = cells // 2
    usual_rows += [indices[:middle] + indices[middle + extra :]] if extra else []
    gaps = range(1, cells) if extra and cells <= MAX_SEARCHED_CELLS else ()
    unusual_rows = [indices[:start] + indices[start + extra :] for start in gaps if start != middle]
    numbers = torch.arange(tokens, dtype=torch.int64, device="cpu")
    assumed_order = tuple(numbers[assumed.list_cells()].tolist())
    permutations = [
        numbers[:cells].reshape([assumed.grid[axis] for axis in axes]).permute([axes.index(i) for i in sorted(axes)])
        for axes in itertools.permutations(range(len(assumed.grid)))
    ]
    return [
        [
            replace(assumed, order=order)
            for row, permutation in itertools.product(rows, permutations)
            if (order := tuple(row[index] for index in permutation.flatten().tolist())) != assumed_order
        ]
        for rows in (usual_rows, unusual_rows)
    ]


def count_responses(
    model: nn.Module, batch: Batch, layers: Mapping[str, PlacedLayer], autocast: torch.dtype | None = None
) -> dict[str, int | None]:
    """Count, for each layer, the test points (of six) whose cell responds; None if no response can be observed.

    One pass runs the unchanged batch. Further passes run six changed images, one for each point. The count is None for
    a layer with the same values everywhere, and for a layer that depends only on unchanged inputs. If the model fails,
    all counts are None.
    """
    outlets = list({layer.outlet.name: layer.outlet for layer in layers.values()}.values())
    coarsest = min((layer.grid for layer in layers.values()), key=math.prod)
    # Move each test point well inside a cell of the coarsest grid.
    points = [
        tuple((int(share * cells) + CELL_OFFSET) / cells for share, cells in zip(place[-len(batch.size) :], coarsest))
        for place in TEST_POINTS
    ]

    def run(images: Tensor) -> dict[str, Tensor]:
        outputs = run_changed(model, batch.copy(pictures=images.clone()), outlets, autocast)
        return {key: layer.layout.to_grid(outputs[layer.outlet.name]) for key, layer in layers.items()}

    counts, unobserved = dict.fromkeys(layers, 0), set(layers) if has_other_images(batch) else set()
    try:
        images = batch.pictures
        if not bool(images.amax() > images.amin()):  # In a uniform image, all cells are alike, so use noise instead.
            generator = torch.Generator("cpu").manual_seed(1)
            images = torch.randn(images.shape, generator=generator, dtype=torch.float32, device="cpu").to(images)
        unchanged = run(images)
        for first in range(0, len(points), batch.images):
            changed_points = points[first : first + batch.images]
            for key, grid in run(_change_patches(images, changed_points, coarsest)).items():
                changes = (grid - unchanged[key]).float().norm(dim=1)
                counts[key] += sum(map(_responds_at, changes, changed_points))
                if changes.any():
                    unobserved.discard(key)
    except Exception as error:  # The model may raise any error in a second run.
        if is_out_of_memory(error):
            raise
        return dict.fromkeys(layers)
    cells = {key: grid.flatten(2) for key, grid in unchanged.items()}
    # If all cells of a layer are equal, no response can be observed.
    unobserved |= {key for key, values in cells.items() if bool((values == values[..., :1]).all())}
    return {key: None if key in unobserved else count for key, count in counts.items()}


def _put_noise(images: Tensor, mask: Tensor) -> Tensor:
    """Return the images with noise where the mask (N,1,...) is set; the noise has each image's range of values."""
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.rand(images.shape, generator=generator, dtype=torch.float32, device="cpu").to(images)
    axes = tuple(range(1, images.ndim))
    low, high = images.amin(axes, keepdim=True), images.amax(axes, keepdim=True)
    high = torch.where(high > low, high, low + 1)
    return torch.where(mask.to(images.device) > 0, low + (high - low) * noise, images)


def _change_patches(images: Tensor, points: Sequence[tuple[float, ...]], grid: Sequence[int]) -> Tensor:
    """Return the images with noise in a patch around each image's point."""
    mask = images.new_zeros((len(images), 1, *images.shape[2:]))
    for row, point in zip(mask, points):
        window: list[Any] = [slice(None)]
        for share, cells, length in zip(point, grid, images.shape[2:]):
            side = max(1, round(PATCH_SIDE * length / cells))
            start = min(max(0, round(share * length - side / 2)), length - side)
            window.append(slice(start, start + side))
        row[tuple(window)] = 1
    return _put_noise(images, mask)


def _responds_at(changes: Tensor, point: Sequence[float]) -> bool:
    response = changes[tuple(int(share * cells) for share, cells in zip(point, changes.shape))]
    return bool(response > 0) and int((changes >= response).sum()) <= math.ceil(MAX_RESPONDING * changes.numel())


@functools.lru_cache(maxsize=16)
def _sample_cells(grid: tuple[int, ...], images: int) -> Tensor:
    """Choose the cells to change in each image at random; return 1 for these cells and 0 for others (N,*grid)."""
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.rand(images, math.prod(grid), generator=generator, dtype=torch.float32, device="cpu")
    ranks = numbers.argsort(1).argsort(1)
    return (ranks < CHANGED_SHARE * ranks.shape[1]).float().unflatten(1, grid)


def _list_quadrants(images: int, shift: int) -> list[tuple[int, int]]:
    """Return a quadrant for each image. Four different shifts return all quadrants for each image."""
    return [QUADRANTS[(image + shift) % len(QUADRANTS)] for image in range(images)]


def _cut_windows(
    quadrants: Sequence[Sequence[int]], size: Sequence[int], starts: tuple[float, float], width: float
) -> Tensor:
    """Return masks (N,1,...) of a square in each quadrant. `starts` and `width` are shares of the image's sides."""
    mask = torch.zeros(len(quadrants), 1, *size, dtype=torch.float32, device="cpu")
    for row, quadrant in zip(mask, quadrants):
        window: list[Any] = [...]
        for side, length in zip(quadrant, size[-2:]):
            start = int(starts[side] * length)
            window.append(slice(start, start + max(1, int(width * length))))
        row[tuple(window)] = 1
    return mask


def _correlate(changes: Tensor, codes: Tensor) -> float:
    """Rank cells by the `changes` (N,C,*grid) of their output; return the ranks' mean correlation with `codes`."""
    responses = changes[:MAX_COMPARED_IMAGES].float().norm(dim=1).flatten(1).cpu()
    ranks = responses.argsort(1).argsort(1).float()
    codes = codes[:MAX_COMPARED_IMAGES].flatten(1)
    ranks, codes = ranks - ranks.mean(1, keepdim=True), codes - codes.mean(1, keepdim=True)
    return float(F.cosine_similarity(ranks, codes).mean())


def _follows(offsets: Sequence[Sequence[float]]) -> bool:
    """Return whether the centre of the responses moves to the changed quadrants on both axes."""
    return all(sum(axis) > MIN_ALIGNMENT * sum(map(abs, axis)) for axis in zip(*offsets))


def _hardly_moves(offsets: Sequence[Sequence[float]]) -> bool:
    """Return whether the centre of the responses moves too little to show where the cells lie, in any direction."""
    return all(
        sum(map(abs, axis)) < MIN_MOVEMENT * len(axis) and sum(axis) > -MIN_OFFSET * len(axis) for axis in zip(*offsets)
    )


def _compare_corners(responses: Tensor, quadrants: Sequence[Sequence[int]]) -> tuple[bool, int]:
    """Return whether each image's strongest responses (N,*grid) are near its changed corner; count the silent corners."""
    values = responses.flatten(1, -3).sum(1) if responses.ndim > 3 else responses
    is_near = torch.ones_like(values, dtype=torch.bool)
    for axis in (1, 2):
        indices = torch.arange(values.shape[axis], dtype=values.dtype, device=values.device)
        positions = (indices + 0.5) / values.shape[axis]
        centres = [CORNER_START[quadrant[axis - 1]] + CORNER_SIDE / 2 for quadrant in quadrants]
        distances = (positions - positions.new_tensor(centres)[:, None]).abs()
        is_near &= (distances <= MAX_CORNER_DISTANCE).unsqueeze(3 - axis)
    near, values = is_near.flatten(1), values.flatten(1)
    strongest, cells = values.topk(max(1, int(CORNER_SIDE**2 * values.shape[1])))
    # A change may reach fewer cells than the strongest. The other cells do not count.
    is_placed = bool((near.gather(1, cells) | (strongest == 0)).all() & (strongest[:, 0] > 0).all())
    silent = (values * near).sum(1) < MIN_CORNER_CHANGE * values.mean(1) * near.sum(1)
    return is_placed, int((silent | (strongest[:, 0] == 0)).sum())


def _find_offsets(responses: Tensor, quadrants: Sequence[Sequence[int]]) -> list[float]:
    """Return, per axis, how far the centre of the responses (N,*grid) is shifted towards the changed quadrant."""
    values = responses.flatten(1, -3).sum(1) if responses.ndim > 3 else responses
    values = values / values.sum((1, 2), keepdim=True).clamp(min=1e-30)
    offsets = []
    for axis in (1, 2):
        indices = torch.arange(values.shape[axis], dtype=values.dtype, device=values.device)
        positions = (indices + 0.5) / values.shape[axis] - 0.5
        centres = values.sum(3 - axis) @ positions
        signs = centres.new_tensor([2 * quadrant[axis - 1] - 1 for quadrant in quadrants])
        offsets.append(float((centres * signs).mean()))
    return offsets


def record_outputs(model: nn.Module, batch: Batch, outlets: Sequence[LayerRef]) -> dict[str, Tensor]:
    """Return one output tensor of each layer for a batch, by name.

    If a layer returns several tensors, the first floating-point tensor is recorded.
    """
    outputs: dict[str, Tensor] = {}
    runs: Counter[nn.Module] = Counter()

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for outlet in outlets:
            if outlet.module is module and outlet.run in (None, runs[module]):
                tensors_by_keys = floating_tensors_by_keys(output)
                keys = next((keys for keys in tensors_by_keys if keys[: len(outlet.keys)] == outlet.keys), None)
                if keys is not None:
                    # Clone, because the next layer may change the tensor in place.
                    outputs[outlet.name] = tensors_by_keys[keys].clone()
        runs[module] += 1

    with preserve_state(model), grad_mode_off(), Hooks() as hooks:
        for module in {outlet.module for outlet in outlets}:
            hooks.after_forward(module, record)
        batch.copy(detach_input).run(model)
    return outputs


def choose_layout_by_response(
    shape: tuple[int, ...], outlet: LayerRef, batch: Batch, model: nn.Module
) -> Layout | None:
    """Return the layout whose cells respond at the most test points; None unless exactly one layout is best."""
    if shape[0] != batch.images or batch.pictures.is_meta:
        return None
    patches = find_patches(model.modules()) if len(shape) == 3 else ()
    layouts = find_rival_layouts(shape, outlet.module, batch.size, patches)
    layouts = [layout for layout in layouts if PlacedLayer(outlet, shape, layout).is_measurable(batch)]
    placed = {str(number): PlacedLayer(outlet, shape, layout) for number, layout in enumerate(layouts)}
    counts = [count or 0 for count in (count_responses(model, batch, placed).values() if placed else ())]
    best = [layout for layout, count in zip(layouts, counts) if count >= MIN_RESPONSES and count == max(counts)]
    return best[0] if len(best) == 1 else None
