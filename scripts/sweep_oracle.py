"""Measure whether the cells of a map respond to changes of the image in the places where the map draws them.

The script replaces one cell-sized part of the image at a time by noise, and compares the cells whose activations change
with the cell that is drawn there. It uses none of the package's own checks: it reads activations through a user-defined
method, which receives them on the grid on which the map is drawn.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gradcam

MAX_PLACES = 16  # changed parts of the image
MAX_PARTS = 4  # into which a long cell is divided
DRAWS = (2, 6)  # changes of each place, each with new noise; the second number is used if the first shows nothing
MAX_SHIFT = 12  # tokens by which a sequence may be shifted
MIN_CORRELATION = 0.4  # of the centre of the response with the changed place, along each axis
# The correlation of the responses to two draws of noise, and the ratio of the largest response of a place to its mean
# response. Below these limits, the noise decides which cell responds most, or all cells change alike.
MANY_CELLS, FEW_CELLS = (0.5, 1.25), (0.8, 2.0)
MIN_MANY_PLACES = 9
CLEAR_AGREEMENT, CLEAR_CONTRAST = 0.8, 2.5  # from these values on, cells that follow no place are regarded as misplaced
MIN_STEADY_SHARE = 0.5  # of the places whose strongest cell is the same for both draws
MAX_DEAD_SHARE = 0.2  # of the places that change no cell
MIN_EXACT_SHARE = 0.5  # of the places whose own cell responds most
MIN_OWN_SHARE = 0.3  # of the strongest response; below it, the place's own cell takes no part in the response
# Of the places whose own cell takes no part in the response; for maps, neither do its neighbours.
MAX_ELSEWHERE_SHARE = 0.25
MIN_RIVAL_FIT, RIVAL_MARGIN = 0.5, 0.1  # minimum fit of another order to the responses, and its minimum margin

Grid = Tensor  # activations (C,*cells) of one image
ReadGrids = Callable[[Any], list[Grid]]


@dataclass(frozen=True)
class Placement:
    """The verdict on one grid ("follows", "misplaced", "independent" or "global"), and its figures."""

    verdict: str
    grid: tuple[int, ...]
    detail: str


class GridReader:
    """Reads the activations of a layer on the grid that is drawn, through a method that records its argument."""

    def __init__(self) -> None:
        self.grids: list[Tensor] = []

        @gradcam.method("sweep-probe", summary="energy of the activations, which are recorded")
        def record(activations: Tensor, gradients: Tensor) -> Tensor:
            self.grids.append(activations.detach().clone())
            energy = activations.square().sum(1)[:, None]
            return energy.expand(*gradients.shape[:2], *energy.shape[2:]).clone()

        self.method = record

    def read(self, model: nn.Module, images: Any, layer: str | None, **options: Any) -> tuple[list[Grid], Any]:
        """Return the grids of the first image, one for each size, and the explanation."""
        self.grids.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            explanation = gradcam.explain(model, images, layer, method=self.method, **options)
        grids: dict[tuple[int, ...], Tensor] = {}
        # The package may call a method a second time, with rounded values.
        for activations in self.grids:
            grids.setdefault(tuple(activations.shape[2:]), activations[0])
        if len(grids) == 1 and tuple(explanation.maps.shape[2:]) not in grids:  # The map covers a part of the grid.
            return [explanation.maps[0, :1]], explanation
        return list(grids.values()), explanation


def find_pixels(images: Any, size: Sequence[int]) -> Tensor:
    """Return the image tensor in a model's input."""
    values = images.values() if isinstance(images, Mapping) else images if isinstance(images, tuple) else [images]
    return next(
        value for value in values
        if isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape[2:]) == tuple(size)
    )  # fmt: skip


def replace_pixels(images: Any, pixels: Tensor, changed: Tensor) -> Any:
    """Return a model's input with other images."""
    if isinstance(images, Mapping):
        return {name: changed if value is pixels else value for name, value in images.items()}
    if isinstance(images, tuple):
        return tuple(changed if value is pixels else value for value in images)
    return changed


def place_maps(read_grids: ReadGrids, images: Any, size: Sequence[int], *, are_tokens: bool) -> list[Placement]:
    """Return the verdict on each grid that `read_grids` returns for the images."""
    plain = read_grids(images)
    return [
        place_grid(lambda changed, i=i: read_grids(changed)[i], grid, images, size, are_tokens=are_tokens)
        for i, grid in enumerate(plain)
    ]


def place_grid(
    read_grid: Callable[[Any], Grid], plain: Grid, images: Any, size: Sequence[int], *, are_tokens: bool
) -> Placement:
    """Return the verdict on one grid; use more draws of noise if the first ones show nothing."""
    cells = tuple(plain.shape[1:])
    parts = divide_cells(cells, size)
    places = choose_places([count * split for count, split in zip(cells, parts)])
    fine = [count * split for count, split in zip(cells, parts)]
    owners = [tuple(index // split for index, split in zip(place, parts)) for place in places]
    folds = {
        f"cells of a grid {fold}": torch.tensor([find_cell(place, fine, fold) for place in places])
        for fold in list_folds(cells)
    }
    pixels, generator = find_pixels(images, size), torch.Generator().manual_seed(100)
    draws: list[Tensor] = []
    for count in DRAWS:
        while len(draws) < count:
            rows = []
            for place in places:
                changed = change_part(pixels, place, fine, generator)
                grid = read_grid(replace_pixels(images, pixels, changed))
                rows.append((grid - plain).float().square().sum(0).flatten())
            draws.append(torch.stack(rows))
        halves = [torch.stack(draws[start::2]).mean(0).sqrt() for start in (0, 1)]
        placement = evaluate_responses(halves, owners, cells, folds, are_tokens=are_tokens)
        if placement.verdict != "global":
            break
    return placement


def divide_cells(cells: Sequence[int], size: Sequence[int]) -> list[int]:
    """Return the number of parts, along each axis, of cells that are much longer than wide, such as whole rows.

    Each part has to change its cell. Along an axis of one cell, nothing else distinguishes a row from a column.
    """
    cell_sizes = [length / count for count, length in zip(cells, size)][-2:]
    parts = [min(MAX_PARTS, round(side / min(cell_sizes))) for side in cell_sizes]
    return [*[1] * (len(cells) - 2), *parts]


def choose_places(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all parts of a coarse division of the image, or a random selection of the parts of a fine one."""
    all_places = list(itertools.product(*map(range, counts)))
    order = torch.randperm(len(all_places), generator=torch.Generator().manual_seed(7)).tolist()
    return [all_places[i] for i in sorted(order[:MAX_PLACES])]


def change_part(pixels: Tensor, place: Sequence[int], counts: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return the images with noise in one part, `place`, of a division with `counts` parts along each axis."""
    changed = pixels.clone()
    window: list[Any] = [slice(None), slice(None)]
    for index, count, length in zip(place, counts, pixels.shape[2:]):
        start = math.floor(index * length / count)
        window.append(slice(start, max(start + 1, math.ceil((index + 1) * length / count))))
    part = changed[tuple(window)]
    part.copy_(torch.randn(part.shape, generator=generator))
    return changed


def list_folds(cells: Sequence[int]) -> list[tuple[int, int]]:
    """Return other grids with as many cells as an image's grid, in whose order its cells may be."""
    count = math.prod(cells)
    pairs = [(height, count // height) for height in range(1, count + 1) if count % height == 0]
    return [pair for pair in pairs if len(cells) == 2 and pair != tuple(cells)]


def find_cell(place: Sequence[int], counts: Sequence[int], fold: Sequence[int]) -> int:
    """Return the index of the cell of another grid that contains a part of the image."""
    corner = [int((index + 0.5) / count * length) for index, count, length in zip(place, counts, fold)]
    return flatten_index(corner, fold)


def evaluate_responses(
    draws: Sequence[Tensor],
    places: Sequence[tuple[int, ...]],
    cells: tuple[int, ...],
    folds: Mapping[str, Tensor],
    *,
    are_tokens: bool,
) -> Placement:
    """Return the verdict on responses (places, cells) to two draws; `folds` has the cells expected by other grids."""
    responses = torch.stack(list(draws)).mean(0)
    if not bool(responses.any()):
        return Placement("independent", cells, "no cell changes")
    if responses.shape[1] == 1:
        return Placement("global", cells, "one cell")
    figures = measure_responses(responses, draws, places, cells, folds, are_tokens=are_tokens)
    fault = figures.find_fault()
    if fault is not None:
        return Placement("misplaced", cells, f"{fault}, {figures}")
    return Placement("follows" if figures.follows else "global", cells, str(figures))


@dataclass(frozen=True)
class Figures:
    """The figures behind a verdict.

    `places`: number of changed places. `dead`: share of places that change no cell. `exact`, `near`: share whose
    strongest cell is the right one, or next to it. `elsewhere`: share whose right cell takes no part in the response.
    `steady`: share with the same strongest cell in both draws. `fit`, `rival_fit`: how well the drawn order, and the
    best of `list_orders`, explain the responses. `agreement`: correlation of two draws. `contrast`: ratio of a place's
    largest response to its mean response.
    """

    places: int
    dead: float
    exact: float
    near: float
    elsewhere: float
    steady: float
    correlations: Sequence[float]
    fit: float
    rival: str
    rival_fit: float
    agreement: float
    contrast: float

    @property
    def is_local(self) -> bool:
        """Return True if places change different cells, and the noise does not decide which ones."""
        # With few cells, some order fits the mixing by random weights by accident.
        agreement, contrast = MANY_CELLS if self.places >= MIN_MANY_PLACES else FEW_CELLS
        is_clear = self.agreement >= agreement and self.contrast >= contrast
        return is_clear and self.steady >= MIN_STEADY_SHARE

    @property
    def follows(self) -> bool:
        """Return True if the response moves with the changed place."""
        is_correlated = min(self.correlations, default=0.0) >= MIN_CORRELATION
        return is_correlated or (self.is_local and self.exact >= MIN_EXACT_SHARE)

    def find_fault(self) -> str | None:
        """Return the fault of the placement, None if there is none."""
        if self.dead > MAX_DEAD_SHARE:
            return f"{self.dead:.0%} of the places change no cell"
        if self.is_local and self.rival_fit > max(MIN_RIVAL_FIT, self.fit + RIVAL_MARGIN):
            return f"{self.rival} (fit {self.rival_fit:.2f})"
        if self.is_local and self.elsewhere > MAX_ELSEWHERE_SHARE:
            return "no known order"
        if not self.follows and self.agreement >= CLEAR_AGREEMENT and self.contrast >= CLEAR_CONTRAST:
            return "spread over the map"
        return None

    def __str__(self) -> str:
        correlations = " ".join(f"{value:.2f}" for value in self.correlations)
        return (
            f"exact {self.exact:.2f}, near {self.near:.2f}, elsewhere {self.elsewhere:.2f}, correlation {correlations}, "
            f"fit {self.fit:.2f}, agreement {self.agreement:.2f}, contrast {self.contrast:.1f}"
        )


def measure_responses(
    responses: Tensor,
    draws: Sequence[Tensor],
    places: Sequence[tuple[int, ...]],
    cells: tuple[int, ...],
    folds: Mapping[str, Tensor],
    *,
    are_tokens: bool,
) -> Figures:
    """Compare the cells that respond to each place with the cell that is drawn there."""
    scores, relative = standardise(responses), relate(responses)
    targets = torch.tensor([flatten_index(place, cells) for place in places])
    peaks = scores.argmax(1)
    corners = torch.stack(torch.unravel_index(peaks, cells), 1)
    steady = torch.stack([standardise(draw).argmax(1) for draw in draws]).eq(peaks).all(0)
    neighbour_scores = scores if are_tokens else spread_to_neighbours(scores, cells)
    is_elsewhere = steady & (neighbour_scores.gather(1, targets[:, None])[:, 0] < MIN_OWN_SHARE * scores.amax(1))
    peak = scores.amax(1).mean().item()
    orders = {name: order[targets] for name, order in list_orders(cells, are_tokens=are_tokens)} | folds
    fits = {name: fit_order(scores, order) / peak for name, order in orders.items()}
    fit = fits.pop("plain")
    rival = max(fits, key=lambda name: fits[name])
    return Figures(
        places=len(places),
        dead=measure_share(responses.amax(1) == 0),
        exact=measure_share(peaks == targets),
        near=measure_share((corners - torch.tensor(places)).abs().amax(1) <= 1),
        elsewhere=measure_share(is_elsewhere),
        steady=measure_share(steady),
        correlations=correlate_centres(scores, places, cells),
        fit=fit,
        rival=rival,
        rival_fit=fits[rival],
        agreement=measure_agreement([standardise(draw) for draw in draws]),
        contrast=(relative.amax(1) / (relative.mean(1) + 1e-30)).mean().item(),
    )


def measure_share(mask: Tensor) -> float:
    """Return the share of places for which the mask is true."""
    return mask.float().mean().item()


def spread_to_neighbours(scores: Tensor, cells: Sequence[int]) -> Tensor:
    """Return the largest score of each cell and its neighbours."""
    maps = scores.unflatten(1, tuple(cells))
    for axis in range(1, maps.ndim):
        padded = torch.cat([maps.narrow(axis, 0, 1), maps, maps.narrow(axis, maps.shape[axis] - 1, 1)], axis)
        maps = padded.unfold(axis, 3, 1).amax(-1)
    return maps.flatten(1)


def relate(responses: Tensor) -> Tensor:
    """Return the responses of each cell relative to its mean response."""
    mean_response = responses.mean(0)
    return responses / (mean_response + 0.5 * mean_response.mean() + 1e-30)


def standardise(responses: Tensor) -> Tensor:
    """Return each place's responses in standard deviations; cells that respond to every place have a lower weight."""
    relative = relate(responses)
    centred = relative - relative.mean(1, keepdim=True)
    return centred / (centred.std(1, keepdim=True, correction=0) + 1e-12)


def measure_agreement(draws: Sequence[Tensor]) -> float:
    """Return the mean correlation of the scores of two draws of noise."""
    return (draws[0] * draws[1]).mean(1).mean().item()


def correlate_centres(scores: Tensor, places: Sequence[tuple[int, ...]], cells: Sequence[int]) -> list[float]:
    """Return the correlation of the centre of the responses with the place, along each axis with more than one cell."""
    weights = scores.clamp(min=0).square()
    weights = weights / (weights.sum(1, keepdim=True) + 1e-12)
    correlations = []
    for axis, count in enumerate(cells):
        true = torch.tensor([place[axis] for place in places], dtype=torch.float32)
        if count == 1 or true.min() == true.max():
            continue
        positions = torch.arange(count, dtype=torch.float32)
        shape = [1] * len(cells)
        shape[axis] = -1
        centres = (weights * positions.reshape(shape).expand(*cells).reshape(-1)).sum(1)
        pair = torch.stack([true, centres])
        correlations.append(torch.corrcoef(pair)[0, 1].nan_to_num(0.0).item())
    return correlations


def fit_order(scores: Tensor, cells: Tensor) -> float:
    """Return the mean score of the expected cell of each place."""
    return scores.gather(1, cells[:, None]).mean().item()


def list_orders(cells: Sequence[int], *, are_tokens: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield orders of cells: for each cell of the image, the cell that would respond."""
    count = math.prod(cells)
    plain = torch.arange(count).reshape(*cells)
    yield "plain", plain.flatten()
    axes = [axis for axis, length in enumerate(cells) if length > 1]
    for order in itertools.permutations(range(len(cells))):
        # Cells that were flattened with their axes in another order, but are drawn in this order.
        rows = torch.arange(count).reshape([cells[axis] for axis in order])
        turned = rows.permute([order.index(axis) for axis in range(len(cells))])
        for mirrored in itertools.chain.from_iterable(itertools.combinations(axes, k) for k in range(len(axes) + 1)):
            if mirrored or list(order) != sorted(order):
                yield f"axes {order}, mirrored {mirrored}", turned.flip(mirrored).flatten()
    if are_tokens:
        for shift in (shift for shift in range(-MAX_SHIFT, MAX_SHIFT + 1) if shift and abs(shift) < count):
            yield f"shifted by {shift} tokens", plain.flatten().roll(-shift)


def flatten_index(place: Sequence[int], cells: Sequence[int]) -> int:
    """Return the index of a cell, row by row."""
    number = 0
    for index, length in zip(place, cells):
        number = number * length + index
    return number
