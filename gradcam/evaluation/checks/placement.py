"""Make the test images of a check: the image in each cell of a 2 x 2 grid with three other images, or alone.

In a grid, the evidence for the class is known to lie in the cell that contains the image. The four cells are exchangeable:
a heatmap that ignores the image marks each cell equally often. All measurements use the checked model only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.evaluation.metrics.localisation import measure_order
from gradcam.evaluation.subject import Subject, count_pixels, rank_pixels
from gradcam.hooks.memory import is_out_of_memory

CELLS = 4
MIN_CELL_PIXELS = 8  # height and width of the smallest cell
GRID_SHARES = (1 / CELLS,) * CELLS  # In a grid, a mask marks as many pixels as a cell has.
SINGLE_IMAGE_SHARES = (0.1, 0.2, 0.35, 0.5)
BLUR_CELLS = 8  # For the blurred filling, an image is first reduced to this height and width.
INPAINT_RADIUS_PIXELS = 3
EPSILON = 1e-6  # Probabilities are clamped to [EPSILON, 1 - EPSILON]. Scores that differ by less count as equal.


@dataclass(frozen=True, eq=False)
class PlacementGrid:
    """Four test images (4,C,H,W): the image in each cell of a grid, or four times the image alone.

    In test image i, the mask marks `shares[i]` of the pixels, and `FILLINGS[i]` fills in missing pixels. `cells`
    (4,H,W), bool, are the masks of the cells; test image i has the checked image in cell i. If the image is alone, each
    cell covers all of the image.
    """

    subject: Subject
    shares: Sequence[float]
    patch: Tensor
    cells: Tensor
    is_alone: bool

    @property
    def images(self) -> Tensor:
        return self.subject.images

    def measure(self, *masks: Tensor) -> Tensor:
        """Return the evidence (M,4) on each of M masks, bool (4,H,W), in each test image.

        Evidence is the difference in the class's log-odds between the image with only the marked pixels and the image
        without the marked pixels.
        """
        variants = itertools.chain.from_iterable(self.cover(mask) for mask in masks)
        # Probabilities saturate near 0 and 1. Log-odds do not.
        log_odds = torch.logit(self.subject.score(variants).cpu().double(), eps=EPSILON)
        only_marked, without_marked = log_odds.unflatten(0, (-1, 2)).unbind(1)
        return only_marked - without_marked

    def mark(self, heatmaps: Tensor) -> Tensor:
        """Return masks (4,H,W) of the most relevant pixels: mask i marks `shares[i]` of the pixels of heatmap i."""
        ranks, pixels = rank_pixels(heatmaps), heatmaps[0].numel()
        return torch.stack([rank < count_pixels(share, pixels) for rank, share in zip(ranks, self.shares)])

    def order(self, heatmaps: Tensor) -> Tensor:
        """Return the area under the ROC curve (4,4) of heatmap i as a detector of cell j; chance is 1/2."""
        return torch.stack([measure_order(heatmaps, cell.expand_as(heatmaps)) for cell in self.cells], 1)

    def mean_order(self, heatmaps: Tensor) -> float | None:
        """Return the mean of `order` over the cells with the checked image; None if the image is alone."""
        return None if self.is_alone else float(measure_order(heatmaps, self.cells).mean())

    def cover(self, marked: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images with only the marked pixels, and with only the other pixels. Fill in missing pixels."""
        variants = []
        for holes in (~marked, marked):
            filled = [fill(image, hole, self.patch) for fill, image, hole in zip(FILLINGS, self.images, holes)]
            variants.append(torch.where(holes[:, None], torch.stack(filled), self.images))
        return variants[0], variants[1]


def compute_placement_chance(order: Tensor) -> float:
    """Return the p-value of a permutation test: the chance that a heatmap that ignores the image scores at least as well.

    `order` (4,4) is the result of `PlacementGrid.order`. If a heatmap ignores the image, the four positions are
    exchangeable. The result is therefore the share of the 24 permutations of positions that score at least as well as
    the true positions.
    """
    scores = [order[range(CELLS), positions].sum() for positions in itertools.permutations(range(CELLS))]
    return sum(bool(score >= scores[0] - EPSILON) for score in scores) / len(scores)


def fill_mean(image: Tensor, hole: Tensor, patch: Tensor) -> Tensor:
    """Return an image of the same size, filled with the mean colour of `image`."""
    return image.mean((1, 2), keepdim=True).expand_as(image)


def fill_blur(image: Tensor, hole: Tensor, patch: Tensor) -> Tensor:
    """Return the image, blurred so strongly that no object is recognisable."""
    small = F.interpolate(image[None].float(), (BLUR_CELLS, BLUR_CELLS), mode="area")
    return F.interpolate(small, image.shape[1:], mode="bicubic", align_corners=False)[0].to(image.dtype)


def fill_patch(image: Tensor, hole: Tensor, patch: Tensor) -> Tensor:
    """Return another image, `patch`, resized to the image's size."""
    return resize(patch, image.shape[1:])[0]


def fill_inpainted(image: Tensor, hole: Tensor, patch: Tensor) -> Tensor:
    """Return the image with the hole inpainted; if the hole covers the image, fill it with the mean colour."""
    from gradcam.images.opencv import cv2

    if hole.all():
        return fill_mean(image, hole, patch)
    low, high = image.amin((1, 2), keepdim=True).float(), image.amax((1, 2), keepdim=True).float()
    span = (high - low).clamp(min=1e-12)
    bytes_ = ((image.float() - low) / span * 255).round().to("cpu", torch.uint8).numpy()
    mask = hole.to("cpu", torch.uint8).numpy()
    # OpenCV inpaints only images of one or three channels.
    parts = [np.moveaxis(part, 0, 2).copy() for part in ([bytes_] if len(bytes_) == 3 else bytes_[:, None])]
    inpainted = [cv2.inpaint(part, mask, INPAINT_RADIUS_PIXELS, cv2.INPAINT_NS) for part in parts]
    filled = np.concatenate([np.atleast_3d(part).transpose(2, 0, 1) for part in inpainted])
    return (torch.from_numpy(filled).to(low) / 255 * span + low).to(image.dtype)


FILLINGS = (fill_mean, fill_blur, fill_patch, fill_inpainted)  # one for each test image


def resize(images: Tensor, size: Any) -> Tensor:
    """Resize images (N,C,H,W) to another height and width."""
    if images.shape[2:] == tuple(size):
        return images
    return F.interpolate(images.float(), size, mode="bilinear", antialias=True, align_corners=False).to(images)


def place_alone(subject: Subject, other_images: Tensor) -> PlacementGrid:
    """Return test images without a grid: four copies of the subject's image."""
    images = subject.images.expand(CELLS, -1, -1, -1)
    cells = torch.ones_like(images[:, 0], dtype=torch.bool)
    return PlacementGrid(replace_images(subject, images), SINGLE_IMAGE_SHARES, other_images[:1], cells, is_alone=True)


def place_in_grid(subject: Subject, other_images: Tensor, *, is_large: bool = False) -> PlacementGrid:
    """Return four grids with the subject's image in different cells; `other_images` (3,C,H,W) fill the other cells.

    Images are resized to half their height and width. If `is_large`, images keep their size, and the grid has twice the
    height and width of an image.
    """
    height, width = (length * (1 + is_large) for length in subject.images.shape[2:])
    rows, columns = ((slice(length // 2), slice(length // 2, length)) for length in (height, width))
    images = subject.images.new_empty(CELLS, subject.images.shape[1], height, width)
    cells = images.new_zeros(CELLS, height, width, dtype=torch.bool)
    for cell, (row, column) in enumerate(itertools.product(rows, columns)):
        cells[cell, row, column] = True
        for position in range(CELLS):
            sources = [*other_images[:position], subject.images[0], *other_images[position:]]
            images[position, :, row, column] = resize(sources[cell][None], images[0, 0, row, column].shape)[0]
    return PlacementGrid(replace_images(subject, images), GRID_SHARES, other_images[:1], cells, is_alone=False)


def replace_images(subject: Subject, images: Tensor) -> Subject:
    """Return a subject with the same model and class, but other images (M,C,H,W)."""
    return Subject(subject.model, images, int(subject.classes), activation=subject.activation)


def find_recognised_grid(subject: Subject, other_images: Tensor) -> PlacementGrid | None:
    """Return grids in which the model recognises the class; None if the model does not recognise the class.

    Grids with small cells are tried first, then grids with large cells. The class is recognised if, in all four grids,
    the cell with the checked image has positive evidence, and more evidence than every other cell. For a network that
    ignores the image, the probability of this result is at most 1/256.
    """
    if min(subject.images.shape[2:]) < 2 * MIN_CELL_PIXELS:
        return None
    for is_large in (False, True):
        try:
            grid = place_in_grid(subject, other_images, is_large=is_large)
        except Exception as error:  # A model may refuse an image size with any error.
            if is_out_of_memory(error) or not is_large:
                raise
            return None
        # In each test image, `grid.cells` marks the cell of the checked image. Rolling `grid.cells` marks another cell.
        # The other cells are measured one after another, and only until one of them has as much evidence.
        evidence = grid.measure(grid.cells)[0]
        other_evidence = (grid.measure(grid.cells.roll(i, 0))[0] for i in range(1, CELLS))
        if bool((evidence > 0).all()) and all(bool((evidence > other).all()) for other in other_evidence):
            return grid
    return None


@functools.cache
def read_bundled_images() -> tuple[np.ndarray[Any, Any], ...]:
    """Return the five photographs that come with the package, RGB."""
    from gradcam.images.read import read_image

    folder = resources.files(__package__).joinpath("pictures")
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(".jpg"))
    return tuple(read_image(folder.joinpath(name).read_bytes()) for name in names)
