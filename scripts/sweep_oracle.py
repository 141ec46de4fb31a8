"""Measure whether the cells of a map answer to changes of the image in the places where the map draws them.

One cell-sized part of the image at a time is replaced by noise. The cells whose activations change are compared with the
cell that is drawn there. Nothing of the package's own checks is used: activations are read through a user-defined method,
which receives them on the grid on which the map is drawn.
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
MAX_PARTS = 4  # of a long cell
DRAWS = (2, 6)  # changes of each place, each with noise of its own; the second where the first say nothing
MAX_SHIFT = 12  # tokens by which a row of them may be off
MIN_CORRELATION = 0.4  # of the response's centre with the changed place, along each axis
# The correlation of the responses to two draws of noise, and the largest response of a place by its mean one. Below, the
# noise decides which cell responds most, or all cells change alike.
MANY_CELLS, FEW_CELLS = (0.5, 1.25), (0.8, 2.0)
MIN_MANY_PLACES = 9
SURE_AGREEMENT, SURE_CONTRAST = 0.8, 2.5  # from which on cells that follow no place are taken to lie elsewhere
MIN_STEADY_SHARE = 0.5  # of the places where the strongest cell is the same for both draws
MAX_DEAD_SHARE = 0.2  # of the places that change no cell at all
MIN_EXACT_SHARE = 0.5  # of the places whose own cell responds most
STRANGE_SHARE = 0.3  # of the strongest response, below which the own cell does not take part in it
MAX_STRANGE_PLACES = 0.25  # share of the places whose own cell, of maps also its neighbours, takes no part
MIN_RIVAL_FIT, RIVAL_MARGIN = 0.5, 0.1  # how well another order has to explain the responses, and how much better

Grid = Tensor  # activations (C,*cells) of one image
ReadGrids = Callable[[Any], list[Grid]]


@dataclass(frozen=True)
class Placement:
    """Verdict on one grid: "follows", "misplaced", "independent" or "global", and the figures that it rests on."""

    verdict: str
    grid: tuple[int, ...]
    detail: str


class GridReader:
    """Reads the activations of a layer on the grid on which they are drawn, by a method that records its argument."""

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
        # The package may call a method again with rounded numbers, after the plain ones.
        for activations in self.grids:
            grids.setdefault(tuple(activations.shape[2:]), activations[0])
        if len(grids) == 1 and tuple(explanation.maps.shape[2:]) not in grids:  # The map shows a part of the grid.
            return [explanation.maps[0, :1]], explanation
        return list(grids.values()), explanation


def find_pixels(images: Any, size: Sequence[int]) -> Tensor:
    """Return the tensor of the images in what a model takes."""
    values = images.values() if isinstance(images, Mapping) else images if isinstance(images, tuple) else [images]
    return next(
        value for value in values
        if isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape[2:]) == tuple(size)
    )  # fmt: skip


def replace_pixels(images: Any, pixels: Tensor, changed: Tensor) -> Any:
    """Return what the model takes, with other images."""
    if isinstance(images, Mapping):
        return {name: changed if value is pixels else value for name, value in images.items()}
    if isinstance(images, tuple):
        return tuple(changed if value is pixels else value for value in images)
    return changed


def place_maps(read_grids: ReadGrids, images: Any, size: Sequence[int], *, are_tokens: bool) -> list[Placement]:
    """Return the verdict on each grid that `read_grids` gives for the images."""
    plain = read_grids(images)
    return [
        place_grid(lambda changed, i=i: read_grids(changed)[i], grid, images, size, are_tokens=are_tokens)
        for i, grid in enumerate(plain)
    ]


def place_grid(
    read_grid: Callable[[Any], Grid], plain: Grid, images: Any, size: Sequence[int], *, are_tokens: bool
) -> Placement:
    """Return the verdict on one grid. Where nothing can be said of a few draws of noise, more are taken."""
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
    """Return into how many parts along each axis cells are divided that are much longer than wide, such as whole rows.

    Each part has to change its cell. In an axis of one cell nothing else could tell a row from a column.
    """
    sides = [length / count for count, length in zip(cells, size)][-2:]
    parts = [min(MAX_PARTS, round(side / min(sides))) for side in sides]
    return [*[1] * (len(cells) - 2), *parts]


def choose_places(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all parts of a coarse division of the image, or some of a fine one, in no symmetry."""
    everywhere = list(itertools.product(*map(range, counts)))
    order = torch.randperm(len(everywhere), generator=torch.Generator().manual_seed(7)).tolist()
    return [everywhere[i] for i in sorted(order[:MAX_PLACES])]


def change_part(pixels: Tensor, place: Sequence[int], counts: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return the images with noise in one part of a division into so many parts along each axis."""
    changed = pixels.clone()
    window: list[Any] = [slice(None), slice(None)]
    for index, count, length in zip(place, counts, pixels.shape[2:]):
        start = math.floor(index * length / count)
        window.append(slice(start, max(start + 1, math.ceil((index + 1) * length / count))))
    part = changed[tuple(window)]
    part.copy_(torch.randn(part.shape, generator=generator))
    return changed


def list_folds(cells: Sequence[int]) -> list[tuple[int, int]]:
    """Return other grids of as many cells as an image's grid has, of which this one may be the row of cells."""
    count = math.prod(cells)
    pairs = [(height, count // height) for height in range(1, count + 1) if count % height == 0]
    return [pair for pair in pairs if len(cells) == 2 and pair != tuple(cells)]


def find_cell(place: Sequence[int], counts: Sequence[int], fold: Sequence[int]) -> int:
    """Return the number of the cell of another grid that a part of the image lies in."""
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
    """Return the verdict on responses (places, cells), measured twice. `folds`: by other grids, the cells that respond."""
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
    """The figures that a verdict rests on.

    `places`: how many are changed. `dead`: share of those that change no cell. `exact`, `near`: share of those whose
    strongest cell is the right one, or next to it. `elsewhere`: share of those in whose response the right cell takes no
    part. `steady`: share of those with the same strongest cell in both draws. `fit`, `rival_fit`: how well the drawn
    order, and the best of `list_orders`, explains the responses. `agreement`: correlation of two draws. `contrast`: a
    place's largest response by its mean one.
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
        """Return True if places change different cells, and the noise does not decide which."""
        # With few cells, some order fits the mixing by random weights by chance.
        agreement, contrast = MANY_CELLS if self.places >= MIN_MANY_PLACES else FEW_CELLS
        is_clear = self.agreement >= agreement and self.contrast >= contrast
        return is_clear and self.steady >= MIN_STEADY_SHARE

    @property
    def follows(self) -> bool:
        """Return True if the response moves with the changed place."""
        is_correlated = min(self.correlations, default=0.0) >= MIN_CORRELATION
        return is_correlated or (self.is_local and self.exact >= MIN_EXACT_SHARE)

    def find_fault(self) -> str | None:
        """Return what is wrong with the placement, None if nothing is."""
        if self.dead > MAX_DEAD_SHARE:
            return f"{self.dead:.0%} of the places change no cell"
        if self.is_local and self.rival_fit > max(MIN_RIVAL_FIT, self.fit + RIVAL_MARGIN):
            return f"{self.rival} (fit {self.rival_fit:.2f})"
        if self.is_local and self.elsewhere > MAX_STRANGE_PLACES:
            return "no known order"
        if not self.follows and self.agreement >= SURE_AGREEMENT and self.contrast >= SURE_CONTRAST:
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
    answers = scores if are_tokens else spread_to_neighbours(scores, cells)
    strange = steady & (answers.gather(1, targets[:, None])[:, 0] < STRANGE_SHARE * scores.amax(1))
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
        elsewhere=measure_share(strange),
        steady=measure_share(steady),
        correlations=correlate_centres(scores, places, cells),
        fit=fit,
        rival=rival,
        rival_fit=fits[rival],
        agreement=measure_agreement([standardise(draw) for draw in draws]),
        contrast=(relative.amax(1) / (relative.mean(1) + 1e-30)).mean().item(),
    )


def measure_share(mask: Tensor) -> float:
    """Return the share of places for which this is true."""
    return mask.float().mean().item()


def spread_to_neighbours(scores: Tensor, cells: Sequence[int]) -> Tensor:
    """Return the largest score of each cell and its neighbours."""
    maps = scores.unflatten(1, tuple(cells))
    for axis in range(1, maps.ndim):
        padded = torch.cat([maps.narrow(axis, 0, 1), maps, maps.narrow(axis, maps.shape[axis] - 1, 1)], axis)
        maps = padded.unfold(axis, 3, 1).amax(-1)
    return maps.flatten(1)


def relate(responses: Tensor) -> Tensor:
    """Return the responses of each cell relative to its usual one."""
    usual = responses.mean(0)
    return responses / (usual + 0.5 * usual.mean() + 1e-30)


def standardise(responses: Tensor) -> Tensor:
    """Return each place's responses in standard deviations. Cells that respond to every place count less."""
    relative = relate(responses)
    centred = relative - relative.mean(1, keepdim=True)
    return centred / (centred.std(1, keepdim=True, correction=0) + 1e-12)


def measure_agreement(draws: Sequence[Tensor]) -> float:
    """Return the mean correlation of the scores of two draws of noise."""
    return (draws[0] * draws[1]).mean(1).mean().item()


def correlate_centres(scores: Tensor, places: Sequence[tuple[int, ...]], cells: Sequence[int]) -> list[float]:
    """Return the correlation of the centre of the responses with the place, along each axis of several cells."""
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
    """Return the mean score of one cell for each place."""
    return scores.gather(1, cells[:, None]).mean().item()


def list_orders(cells: Sequence[int], *, are_tokens: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield orders of cells: for each cell of the image the one that would respond."""
    count = math.prod(cells)
    plain = torch.arange(count).reshape(*cells)
    yield "plain", plain.flatten()
    axes = [axis for axis, length in enumerate(cells) if length > 1]
    for order in itertools.permutations(range(len(cells))):
        # Cells that were put in a row with their axes in another order, and are drawn as if in this one.
        rows = torch.arange(count).reshape([cells[axis] for axis in order])
        turned = rows.permute([order.index(axis) for axis in range(len(cells))])
        for mirrored in itertools.chain.from_iterable(itertools.combinations(axes, k) for k in range(len(axes) + 1)):
            if mirrored or list(order) != sorted(order):
                yield f"axes {order}, mirrored {mirrored}", turned.flip(mirrored).flatten()
    if are_tokens:
        for shift in (shift for shift in range(-MAX_SHIFT, MAX_SHIFT + 1) if shift and abs(shift) < count):
            yield f"shifted by {shift} tokens", plain.flatten().roll(-shift)


def flatten_index(place: Sequence[int], cells: Sequence[int]) -> int:
    """Return the number of a cell, row by row."""
    number = 0
    for index, length in zip(place, cells):
        number = number * length + index
    return number
