"""Large pictures in overlapping windows: each is explained by itself, and the maps are joined smoothly."""

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

AT_ONCE = 8  # windows in one batch
OVERLAP = 0.5  # of a window with the next
MOST = 2**16  # windows of one picture
LARGEST = 2**22  # pixels of a heatmap: maps are far coarser


@dataclass(frozen=True, eq=False)
class Tiles:
    """Windows of the network's own size over a picture (H,W) or (H,W,C); the last ones end where the picture does.

    `side`: what a window's longer side covers, in the picture's pixels. The picture is stretched by less than `step`
    pixels of what the network takes, so that the windows lie on one grid of cells.
    """

    image: NDArray[Any]
    own: Preprocessing
    side: int
    step: int

    @property
    def canvas(self) -> tuple[int, int]:
        """The height and width of all windows together, in pixels of what the network takes."""
        height, width = self.image.shape[:2]
        scale = max(max(self.own.size) / self.side, *(need / has for need, has in zip(self.own.size, (height, width))))
        rows, columns = (
            length + max(0, round((side * scale - length) / self.step)) * self.step
            for side, length in zip((height, width), self.own.size)
        )
        return rows, columns

    def check(self) -> None:
        """Raises `ImageError` where there are more windows than anybody waits for."""
        rows, columns = (len(self._spread(length, window)) for length, window in zip(self.canvas, self.own.size))
        if rows * columns > MOST:
            least = math.ceil(self.side * math.sqrt(rows * columns / MOST))
            raise ImageError(
                f"Windows of {self.side} pixels would be {rows * columns} of this picture, expected {MOST} at most: take "
                f"the fit 'tiles:{least}'."
            )

    @property
    def starts(self) -> list[tuple[int, int]]:
        """Where windows begin on the canvas: (top, left)."""
        rows, columns = (self._spread(length, window) for length, window in zip(self.canvas, self.own.size))
        return [(top, left) for top in rows for left in columns]

    def batches(self) -> Iterator[tuple[list[tuple[int, int]], Tensor]]:
        """Some windows at a time: where they begin, and what the network takes, (N,C,h,w)."""
        starts = self.starts
        for first in range(0, len(starts), AT_ONCE):
            some = starts[first : first + AT_ONCE]
            yield some, torch.stack([self._show(*start) for start in some])

    def _spread(self, length: int, window: int) -> list[int]:
        gaps = math.ceil((length - window) / (window * (1 - OVERLAP)))
        ends = np.linspace(0, length - window, gaps + 1)
        return [round(end / self.step) * self.step for end in ends]

    def _show(self, top: int, left: int) -> Tensor:
        scales = [side / length for side, length in zip(self.image.shape, self.canvas)]
        part = [start * scale for start, scale in zip((top, left), scales)]
        size = [length * scale for length, scale in zip(self.own.size, scales)]
        # Only what the window needs is copied: its pixels, and those around it that interpolation takes.
        margins = [math.ceil(4 * max(1, scale)) for scale in scales]
        first = [max(0, math.floor(start) - margin) for start, margin in zip(part, margins)]
        last = [math.ceil(start + length) + margin for start, length, margin in zip(part, size, margins)]
        cut = self.image[first[0] : last[0], first[1] : last[1]]
        # A rounding error must not lie outside of the picture.
        inside = [start - it for start, it in zip(part, first)]
        lengths = [min(length, side - start) for length, side, start in zip(size, cut.shape, inside)]
        return self.own.show(cut, (inside[0], inside[1], lengths[0], lengths[1]))


Explain = Callable[[Tensor], Mapping[tuple[str, str], Explanation]]


def explain_tiles(
    tiles: Tiles, explain: Explain, progress: Callable[[int, int], object] | None
) -> dict[tuple[str, str], Explanation]:
    """The windows' explanations joined: maps are means, by weights that fall to the windows' borders.

    `explain`: of windows (N,C,h,w), all for the same classes, or by the same function. Scores are the windows' mean.
    """
    sums: dict[tuple[str, str], _Sum] = {}
    found: Mapping[tuple[str, str], Explanation] = {}
    done, total = 0, len(tiles.starts)
    for starts, images in tiles.batches():
        found = explain(images)
        for key, explanation in found.items():
            sums.setdefault(key, _Sum.of(explanation, tiles)).add(explanation, starts)
        done += len(starts)
        if progress is not None:
            progress(done, total)
    return {key: _join(explanation, sums[key], tiles.canvas) for key, explanation in found.items()}


def mean_output(tiles: Tiles, run: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean (1,C) of what `run` gives for the windows, (N,C)."""
    return torch.cat([run(images) for _, images in tiles.batches()]).mean(0, keepdim=True)


def stack(found: Sequence[Explanation]) -> Explanation:
    """Explanations of one picture each, of the same size, as one; with the first one's output."""
    classes = [each.classes for each in found if each.classes is not None]
    return replace(
        found[0],
        maps=torch.cat([each.maps for each in found]),
        heatmaps=torch.cat([each.heatmaps for each in found]),
        classes=torch.cat(classes) if classes else None,
        scores=torch.cat([each.scores for each in found]),
    )


@dataclass(eq=False)
class _Sum:
    """Weighted maps on the cells of all windows together, the weights' sum, and the scores' sum with their number."""

    maps: Tensor
    weights: Tensor
    window: Tensor
    lengths: Sequence[int]
    scores: Tensor
    count: int = 0

    @staticmethod
    def of(explanation: Explanation, tiles: Tiles) -> _Sum:
        """Nothing yet, for maps such as these."""
        classes, grid = explanation.maps.shape[1], explanation.maps.shape[2:]
        cells = [round(length * it / side) for length, it, side in zip(tiles.canvas, grid, tiles.own.size)]
        # Weights along each axis of a window: from the most in its middle to a little at its ends.
        places = [torch.arange(length, dtype=torch.float32, device="cpu") + 0.5 for length in grid]
        down, across = (torch.minimum(each, length - each) for each, length in zip(places, grid))
        return _Sum(
            maps=torch.zeros(classes, *cells, dtype=torch.float32, device=explanation.maps.device),
            weights=torch.zeros(cells, dtype=torch.float32, device=explanation.maps.device),
            window=(down[:, None] * across).to(explanation.maps.device),
            lengths=tiles.own.size,
            scores=torch.zeros_like(explanation.scores[0]),
        )

    def add(self, explanation: Explanation, starts: Sequence[tuple[int, int]]) -> None:
        """Lay the maps of windows where these begin."""
        rows, columns = self.window.shape
        for start, maps, scores in zip(starts, explanation.maps, explanation.scores):
            top, left = (
                min(round(it * cells / length), most - cells)
                for it, cells, length, most in zip(start, self.window.shape, self.lengths, self.weights.shape)
            )
            self.maps[:, top : top + rows, left : left + columns] += maps * self.window
            self.weights[top : top + rows, left : left + columns] += self.window
            self.scores += scores
            self.count += 1


def _join(explanation: Explanation, found: _Sum, canvas: tuple[int, int]) -> Explanation:
    maps = (found.maps / found.weights)[None]
    shrink = min(1.0, math.sqrt(LARGEST / math.prod(canvas)))
    size = [max(1, round(length * shrink)) for length in canvas]
    return replace(
        explanation,
        maps=maps,
        heatmaps=to_heatmaps(maps, size, signed=explanation.evidence == "signed"),
        classes=None if explanation.classes is None else explanation.classes[:1],
        scores=(found.scores / found.count)[None],
    )
