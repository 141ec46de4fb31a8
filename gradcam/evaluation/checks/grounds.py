"""Where a map is tried: the picture among others, in each of four places, or the picture by itself.

Among others it is known where a class's evidence is: on the cell that shows the picture. The four places are exchangeable: a
map that knows nothing of the picture is as often on any of them. Nothing of this is measured on another model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.evaluation.subject import Subject, count_pixels, rank_pixels
from gradcam.hooks.memory import is_out_of_memory

CELLS = 4
SMALLEST = 8  # pixels of a cell's sides
QUARTER = (1 / CELLS,) * CELLS  # of a mosaic, as large as a cell
SHARES = (0.1, 0.2, 0.35, 0.5)  # of a picture by itself
BLUR = 8  # cells of the blurred picture, along each side
RADIUS = 3  # of inpainting, in pixels
SURE = 1e-6  # as far as a probability is taken to be from 0 and 1


@dataclass(frozen=True, eq=False)
class Ground:
    """Four trials: an image each (4,C,H,W), the share of it that is covered, and a filling. `cells`: bool (4,4,H,W), of
    each mosaic its cells, the picture's own first; None of a picture by itself."""

    subject: Subject
    shares: Sequence[float]
    patch: Tensor
    cells: Tensor | None = None

    @property
    def images(self) -> Tensor:
        return self.subject.images

    @property
    def all_cells(self) -> Tensor:
        """The cells; none of a picture by itself."""
        return (
            self.images.new_zeros(CELLS, 0, *self.images.shape[2:], dtype=torch.bool)
            if self.cells is None
            else self.cells
        )

    def measure(self, *marked: Tensor) -> Tensor:
        """How much each of several masks, bool (4,H,W), matters in each trial: (masks, 4). The class's log-odds with
        nothing but what is marked, less those without it."""
        variants = itertools.chain.from_iterable(self.cover(each) for each in marked)
        # Which do not saturate as probabilities do.
        log_odds = torch.logit(self.subject.score(variants).cpu().double(), eps=SURE)
        kept, removed = log_odds.unflatten(0, (-1, 2)).unbind(1)
        return kept - removed

    def mark(self, heatmaps: Tensor) -> Tensor:
        """The most relevant part of heatmaps (4,H,W), as large as each trial's share."""
        ranks, pixels = rank_pixels(heatmaps), heatmaps[0].numel()
        return torch.stack([own < count_pixels(share, pixels) for own, share in zip(ranks, self.shares)])

    def order(self, heatmaps: Tensor) -> Tensor:
        """Whether heatmaps (4,H,W) mark each cell above the three others: the area under the ROC curve (4,4), of each
        trial its cells, the picture's own first. 1/2 is chance, as of a constant map."""
        ranks = torch.stack([rank_evenly(each) for each in heatmaps])[:, None]
        cells = self.all_cells
        sizes, pixels = cells.sum((2, 3)), ranks[0].numel()
        means = (ranks * cells).sum((2, 3)) / sizes
        return (means - (sizes - 1) / 2) / (pixels - sizes)

    @property
    def whole(self) -> Tensor:
        """What holds all evidence: the picture's own cell, or all of a picture by itself."""
        everything = torch.ones_like(self.images[:, 0], dtype=torch.bool)
        return everything if self.cells is None else self.cells[:, 0]

    def cover(self, marked: Tensor) -> tuple[Tensor, Tensor]:
        """The images with what is marked alone, and without it; each trial has a filling of its own."""
        both = []
        for mask in (~marked, marked):
            filled = [fill(image, hole, self.patch) for fill, image, hole in zip(FILLINGS, self.images, mask)]
            both.append(torch.where(mask[:, None], torch.stack(filled), self.images))
        return both[0], both[1]


def rank_evenly(heatmap: Tensor) -> Tensor:
    """Each pixel's place among all, from the least relevant one; equal ones have the mean of theirs."""
    ordered, places = heatmap.flatten().sort()
    _, counts = ordered.unique_consecutive(return_counts=True)
    through = counts.cumsum(0)  # of each value, how many are not above it
    means = ((2 * through - counts - 1).float() / 2).repeat_interleave(counts)
    return torch.empty_like(means).scatter_(0, places, means).reshape(heatmap.shape)


def count_as_good(order: Tensor) -> float:
    """How probable it is that a map which knows nothing of the picture is so often on its cell: the share of the 24 ways
    to lay four places on four trials that score as much. `order`: (4,4), as `Ground.order` gives it."""
    by_place = torch.stack([order[i, [own_first(i).index(place) for place in range(CELLS)]] for i in range(CELLS)])
    scores = [by_place[range(CELLS), ways].sum() for ways in map(list, itertools.permutations(range(CELLS)))]
    return sum(bool(score >= scores[0] - SURE) for score in scores) / len(scores)


def own_first(place: int) -> list[int]:
    """A mosaic's cells, that of its own picture before the others."""
    return [place, *(it for it in range(CELLS) if it != place)]


def fill_mean(image: Tensor, hole: Tensor, patch: Tensor) -> Tensor:
    """The image's mean colour."""
    return image.mean((1, 2), keepdim=True).expand_as(image)


def fill_blur(image: Tensor, hole: Tensor, patch: Tensor) -> Tensor:
    """The image, so blurred that no object is left."""
    small = F.interpolate(image[None].float(), (BLUR, BLUR), mode="area")
    return F.interpolate(small, image.shape[1:], mode="bicubic", align_corners=False)[0].to(image.dtype)


def fill_patch(image: Tensor, hole: Tensor, patch: Tensor) -> Tensor:
    """Another picture."""
    return resize(patch, image.shape[1:])[0]


def fill_inpainted(image: Tensor, hole: Tensor, patch: Tensor) -> Tensor:
    """What the colours around the hole make likely there; all of an image is filled with its mean."""
    from gradcam.images.opencv import cv2

    if hole.all():
        return fill_mean(image, hole, patch)
    low, high = image.amin((1, 2), keepdim=True).float(), image.amax((1, 2), keepdim=True).float()
    span = (high - low).clamp(min=1e-12)
    bytes_ = ((image.float() - low) / span * 255).round().to("cpu", torch.uint8).numpy()
    mask = hole.to("cpu", torch.uint8).numpy()
    parts = [bytes_] if len(bytes_) == 3 else bytes_[:, None]  # OpenCV takes one channel, or three
    tried = [cv2.inpaint(np.moveaxis(part, 0, 2).copy(), mask, RADIUS, cv2.INPAINT_NS) for part in parts]
    filled = np.concatenate([np.atleast_3d(part).transpose(2, 0, 1) for part in tried])
    return (torch.from_numpy(filled).to(low) / 255 * span + low).to(image.dtype)


Filling = Callable[[Tensor, Tensor, Tensor], Tensor]
FILLINGS: tuple[Filling, ...] = (fill_mean, fill_blur, fill_patch, fill_inpainted)  # one for each trial


def resize(images: Tensor, size: Sequence[int]) -> Tensor:
    """Images (N,C,H,W) at another height and width."""
    how: dict[str, Any] = {"mode": "bilinear", "antialias": True, "align_corners": False}
    return images if tuple(images.shape[2:]) == tuple(size) else F.interpolate(images.float(), size, **how).to(images)


def make_alone(subject: Subject, others: Tensor) -> Ground:
    """The picture of a subject by itself, four times."""
    images = subject.images.expand(CELLS, -1, -1, -1)
    return Ground(_of_images(subject, images), SHARES, others[:1])


def make_mosaics(subject: Subject, others: Tensor, *, is_large: bool = False) -> Ground:
    """The image of a subject in each cell of a square of four, beside three others (3,C,H,W). Each is halved, or at its
    own size in a square that is twice as large."""
    height, width = subject.images.shape[2:]
    rows, columns = ((height, height), (width, width)) if is_large else (_halve(height), _halve(width))
    images, cells = [], []
    for place in range(CELLS):
        shown = [*others[:place], subject.images[0], *others[place:]]
        sizes = itertools.product(rows, columns)
        parts = [resize(each[None], size)[0] for each, size in zip(shown, sizes)]
        images.append(torch.cat([torch.cat(parts[:2], 2), torch.cat(parts[2:], 2)], 1))
        cells.append(torch.stack([_mark_cell(it, rows, columns) for it in own_first(place)]))
    device = subject.images.device
    return Ground(_of_images(subject, torch.stack(images)), QUARTER, others[:1], torch.stack(cells).to(device))


def _halve(length: int) -> tuple[int, int]:
    return length // 2, length - length // 2


def _mark_cell(place: int, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    cell = torch.zeros(sum(rows), sum(columns), dtype=torch.bool, device="cpu")
    down, across = divmod(place, 2)
    cell[down * rows[0] : down * rows[0] + rows[down], across * columns[0] : across * columns[0] + columns[across]] = (
        True
    )
    return cell


def _of_images(subject: Subject, images: Tensor) -> Subject:
    return Subject(subject.model, images, [int(subject.classes)] * len(images), activation=subject.activation)


def find_ground(subject: Subject, others: Tensor) -> Ground | None:
    """Mosaics in which the class is seen on its picture's cell, at half its size or at its own; None where in neither.
    It is seen where no other cell matters as much, in all four places: for a network that sees nothing, one in 256."""
    if min(subject.images.shape[2:]) < 2 * SMALLEST:
        return None
    for is_large in (False, True):
        try:
            ground = make_mosaics(subject, others, is_large=is_large)
        except Exception as error:  # whatever it raises otherwise is its way to refuse an image of this size
            if is_out_of_memory(error) or not is_large:
                raise
            return None
        own, *rest = ground.measure(*ground.all_cells.unbind(1))
        if bool((own > torch.stack([torch.zeros_like(own), *rest]).amax(0)).all()):
            return ground
    return None


@functools.cache
def read_others() -> tuple[np.ndarray[Any, Any], ...]:
    """The photographs that come with the package, RGB."""
    from gradcam.images.read import read_image

    folder = resources.files(__package__).joinpath("pictures")
    names = sorted(it.name for it in folder.iterdir() if it.name.endswith(".jpg"))
    return tuple(read_image(folder.joinpath(name).read_bytes()) for name in names)
