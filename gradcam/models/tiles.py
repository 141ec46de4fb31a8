"""Explain large images in overlapping tiles, and blend the maps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcam.cam.explain import Explanation
from gradcam.cam.postprocess import to_heatmaps
from gradcam.errors import ImageError
from gradcam.models.preprocess import Preprocessing

TILES_PER_BATCH = 8
OVERLAP = 0.5  # fraction of a tile that the next tile also covers
MAX_TILES_PER_IMAGE = 2**16
MAX_HEATMAP_PIXELS = 2**22  # Maps are far coarser, so more pixels would not add detail.


@dataclass(frozen=True, eq=False)
class Tiles:
    """Overlapping tiles of an image (H,W) or (H,W,C), each resized to the network's input size.

    `side` is the length of a tile's longer side, in pixels of the image. The last tiles end at the image border. The
    image is stretched by less than `step` input pixels. As a result, the cells of all tiles form one grid.
    """

    image: NDArray[Any]
    preprocess: Preprocessing
    side: int
    step: int

    @property
    def canvas(self) -> tuple[int, int]:
        """Return the size of the canvas (height, width): the image, resized to the scale of the network's input."""
        pairs = list(zip(self.image.shape, self.preprocess.size))
        scale = max(max(self.preprocess.size) / self.side, *(length / side for side, length in pairs))
        steps = (max(0, round((side * scale - length) / self.step)) for side, length in pairs)
        rows, columns = (length + count * self.step for length, count in zip(self.preprocess.size, steps))
        return rows, columns

    def check(self) -> None:
        """Raise `ImageError` if there are too many tiles."""
        count = math.prod(map(len, self._spread_axes()))
        if count > MAX_TILES_PER_IMAGE:
            side = math.ceil(self.side * math.sqrt(count / MAX_TILES_PER_IMAGE))
            problem = f"Tiles of {self.side} pixels would split this image into {count} tiles"
            raise ImageError(f"{problem}, expected at most {MAX_TILES_PER_IMAGE}: use the fit 'tiles:{side}'.")

    @property
    def starts(self) -> list[tuple[int, int]]:
        """Return the upper left corner (top, left) of each tile on the canvas."""
        return list(itertools.product(*self._spread_axes()))  # type: ignore[arg-type]  # two axes

    def batches(self) -> Iterator[tuple[list[tuple[int, int]], Tensor]]:
        """Yield batches of tiles: the corners on the canvas, and the network's input (N,C,h,w)."""
        starts = self.starts
        for first in range(0, len(starts), TILES_PER_BATCH):
            batch = starts[first : first + TILES_PER_BATCH]
            yield batch, torch.stack([self._read_tile(*start) for start in batch])

    def _spread_axes(self) -> Iterator[list[int]]:
        for length, window in zip(self.canvas, self.preprocess.size):
            gaps = math.ceil((length - window) / (window * (1 - OVERLAP)))
            yield [round(start / self.step) * self.step for start in np.linspace(0, length - window, gaps + 1)]

    def _read_tile(self, top: int, left: int) -> Tensor:
        scales = [side / length for side, length in zip(self.image.shape, self.canvas)]
        corner = [start * scale for start, scale in zip((top, left), scales)]
        size = [length * scale for length, scale in zip(self.preprocess.size, scales)]
        # To save memory, cut out the tile and the margin that interpolation reads.
        margins = [math.ceil(4 * max(1, scale)) for scale in scales]
        first = [max(0, math.floor(start) - margin) for start, margin in zip(corner, margins)]
        last = [math.ceil(start + length) + margin for start, length, margin in zip(corner, size, margins)]
        pixels = self.image[first[0] : last[0], first[1] : last[1]]
        # Limit the lengths, because rounding could move the tile's end beyond the image border.
        offsets = [start - margin_start for start, margin_start in zip(corner, first)]
        lengths = [min(length, side - start) for length, side, start in zip(size, pixels.shape, offsets)]
        return self.preprocess.transform_part(pixels, (offsets[0], offsets[1], lengths[0], lengths[1]))


Explanations = dict[tuple[str, str], Explanation]  # by layer name and method name
Explain = Callable[[Tensor], Explanations]


def explain_tiles(tiles: Tiles, explain: Explain, progress: Callable[[int, int], object] | None) -> Explanations:
    """Explain all tiles, blend their maps, and average the scores. Weights decrease towards the tile borders.

    `explain` takes tiles (N,C,h,w), and must explain the same classes, or the same function, for all tiles.
    """
    sums: dict[tuple[str, str], _BlendedSum] = {}
    explanations: Explanations = {}
    finished, total = 0, len(tiles.starts)
    for starts, images in tiles.batches():
        explanations = explain(images)
        for key, explanation in explanations.items():
            sums.setdefault(key, _BlendedSum(explanation, tiles)).add(explanation, starts)
        finished += len(starts)
        if progress is not None:
            progress(finished, total)
    return {key: _join(explanation, sums[key], tiles.canvas) for key, explanation in explanations.items()}


def stack(explanations: Sequence[Explanation]) -> Explanation:
    """Concatenate explanations of single images. The result keeps the model output of the first explanation."""
    names = [name for name in ("maps", "heatmaps", "classes", "scores") if getattr(explanations[0], name) is not None]
    values = {name: [getattr(explanation, name) for explanation in explanations] for name in names}
    joined: dict[str, Any] = {name: torch.cat(tensors) for name, tensors in values.items()}
    return replace(explanations[0], **joined)


class _BlendedSum:
    """The weighted sum of all tiles' maps, the sum of the weights, the sum of the scores, and the number of tiles."""

    def __init__(self, explanation: Explanation, tiles: Tiles) -> None:
        classes, grid = explanation.maps.shape[1], explanation.maps.shape[2:]
        axes = zip(tiles.canvas, grid, tiles.preprocess.size)
        device = explanation.maps.device
        positions = [torch.arange(length, dtype=torch.float32, device=device) + 0.5 for length in grid]
        # Weights are highest in the middle of a tile and lowest at its border.
        down, across = (torch.minimum(position, length - position) for position, length in zip(positions, grid))
        shape = [round(length * cells / side) for length, cells, side in axes]
        self.weights = torch.zeros(shape, dtype=torch.float32, device=device)
        self.maps = torch.zeros(classes, *shape, dtype=torch.float32, device=device)
        self.window, self.lengths = down[:, None] * across, tiles.preprocess.size
        self.scores, self.count = torch.zeros_like(explanation.scores[0]), 0

    def add(self, explanation: Explanation, starts: Sequence[tuple[int, int]]) -> None:
        rows, columns = self.window.shape
        axes = list(zip(self.window.shape, self.lengths, self.weights.shape))
        for start, maps, scores in zip(starts, explanation.maps, explanation.scores):
            corner = zip(start, axes)
            top, left = (min(round(first * cells / side), total - cells) for first, (cells, side, total) in corner)
            self.maps[:, top : top + rows, left : left + columns] += maps * self.window
            self.weights[top : top + rows, left : left + columns] += self.window
            self.scores += scores
            self.count += 1


def _join(explanation: Explanation, blended: _BlendedSum, canvas: tuple[int, int]) -> Explanation:
    maps = (blended.maps / blended.weights)[None]
    shrink = min(1.0, math.sqrt(MAX_HEATMAP_PIXELS / math.prod(canvas)))
    size = [max(1, round(length * shrink)) for length in canvas]
    return replace(
        explanation,
        maps=maps,
        heatmaps=to_heatmaps(maps, size, signed=explanation.evidence == "signed", mode=explanation.interpolation),
        classes=None if explanation.classes is None else explanation.classes[:1],
        scores=(blended.scores / blended.count)[None],
    )
