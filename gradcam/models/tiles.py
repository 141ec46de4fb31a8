"""Explain large images in overlapping tiles, and blend the maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
MAX_HEATMAP_PIXELS = 2**22  # maps are far coarser, so more pixels would add no detail


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles over an image (H,W) or (H,W,C), each of the network's input size; the last tiles end at the border.

    `side` is the length of a tile's longer side, in pixels of the image. The image is stretched by less than `step`
    input pixels, so that all tiles lie on one grid of cells.
    """

    image: NDArray[Any]
    preprocess: Preprocessing
    side: int
    step: int

    @property
    def canvas(self) -> tuple[int, int]:
        """Return the height and width of all tiles together, in pixels of the network's input."""
        pairs = list(zip(self.image.shape, self.preprocess.size))
        scale = max(max(self.preprocess.size) / self.side, *(length / side for side, length in pairs))
        steps = (max(0, round((side * scale - length) / self.step)) for side, length in pairs)
        rows, columns = (length + count * self.step for length, count in zip(self.preprocess.size, steps))
        return rows, columns

    def check(self) -> None:
        """Raise `ImageError` if there are too many tiles."""
        count = math.prod(
            len(self._spread(length, window)) for length, window in zip(self.canvas, self.preprocess.size)
        )
        if count > MAX_TILES_PER_IMAGE:
            problem = (
                f"Tiles of {self.side} pixels would split this image into {count} tiles, "
                f"expected at most {MAX_TILES_PER_IMAGE}"
            )
            raise ImageError(
                f"{problem}: use the fit 'tiles:{math.ceil(self.side * math.sqrt(count / MAX_TILES_PER_IMAGE))}'."
            )

    @property
    def starts(self) -> list[tuple[int, int]]:
        """Return the corner of each tile on the canvas: (top, left)."""
        rows, columns = (self._spread(length, window) for length, window in zip(self.canvas, self.preprocess.size))
        return [(top, left) for top in rows for left in columns]

    def batches(self) -> Iterator[tuple[list[tuple[int, int]], Tensor]]:
        """Yield batches of tiles: their corners, and the network's input (N,C,h,w)."""
        starts = self.starts
        for first in range(0, len(starts), TILES_PER_BATCH):
            batch = starts[first : first + TILES_PER_BATCH]
            yield batch, torch.stack([self._read_tile(*start) for start in batch])

    def _spread(self, length: int, window: int) -> list[int]:
        gaps = math.ceil((length - window) / (window * (1 - OVERLAP)))
        ends = np.linspace(0, length - window, gaps + 1)
        return [round(end / self.step) * self.step for end in ends]

    def _read_tile(self, top: int, left: int) -> Tensor:
        scales = [side / length for side, length in zip(self.image.shape, self.canvas)]
        corner = [start * scale for start, scale in zip((top, left), scales)]
        size = [length * scale for length, scale in zip(self.preprocess.size, scales)]
        # Only the pixels of this tile, and the margin that interpolation reads, are copied.
        margins = [math.ceil(4 * max(1, scale)) for scale in scales]
        first = [max(0, math.floor(start) - margin) for start, margin in zip(corner, margins)]
        last = [math.ceil(start + length) + margin for start, length, margin in zip(corner, size, margins)]
        pixels = self.image[first[0] : last[0], first[1] : last[1]]
        # Rounding must not push the tile past the border of the image.
        offsets = [start - margin_start for start, margin_start in zip(corner, first)]
        lengths = [min(length, side - start) for length, side, start in zip(size, pixels.shape, offsets)]
        return self.preprocess.transform_part(pixels, (offsets[0], offsets[1], lengths[0], lengths[1]))


Explain = Callable[[Tensor], Mapping[tuple[str, str], Explanation]]


def explain_tiles(
    tiles: Tiles, explain: Explain, progress: Callable[[int, int], object] | None
) -> dict[tuple[str, str], Explanation]:
    """Explain all tiles, blend their maps with weights that fall towards the tile borders, and average the scores.

    `explain` takes tiles (N,C,h,w), and must explain the same classes, or the same function, for all of them.
    """
    sums: dict[tuple[str, str], _BlendedSum] = {}
    explanations: Mapping[tuple[str, str], Explanation] = {}
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
    """Concatenate explanations of single images of the same size; the output is the first explanation's."""
    names = [name for name in ("maps", "heatmaps", "classes", "scores") if getattr(explanations[0], name) is not None]
    joined: dict[str, Any] = {
        name: torch.cat([getattr(explanation, name) for explanation in explanations]) for name in names
    }
    return replace(explanations[0], **joined)


class _BlendedSum:
    """Weighted sums of maps on the grid of all tiles, with the sum of weights, the sum of scores and the tile count."""

    def __init__(self, explanation: Explanation, tiles: Tiles) -> None:
        classes, grid = explanation.maps.shape[1], explanation.maps.shape[2:]
        cells = [
            round(length * cell_count / side)
            for length, cell_count, side in zip(tiles.canvas, grid, tiles.preprocess.size)
        ]
        dtype, device = torch.float32, explanation.maps.device
        positions = [torch.arange(length, dtype=dtype, device=device) + 0.5 for length in grid]
        # Weights are highest in the middle of a tile and lowest at its border.
        down, across = (torch.minimum(position, length - position) for position, length in zip(positions, grid))
        self.maps = torch.zeros(classes, *cells, dtype=dtype, device=device)
        self.weights = torch.zeros(cells, dtype=dtype, device=device)
        self.window, self.lengths = down[:, None] * across, tiles.preprocess.size
        self.scores, self.count = torch.zeros_like(explanation.scores[0]), 0

    def add(self, explanation: Explanation, starts: Sequence[tuple[int, int]]) -> None:
        rows, columns = self.window.shape
        for start, maps, scores in zip(starts, explanation.maps, explanation.scores):
            top, left = (
                min(round(offset * cells / length), total - cells)
                for offset, cells, length, total in zip(start, self.window.shape, self.lengths, self.weights.shape)
            )
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
        heatmaps=to_heatmaps(maps, size, signed=explanation.evidence == "signed"),
        classes=None if explanation.classes is None else explanation.classes[:1],
        scores=(blended.scores / blended.count)[None],
    )
