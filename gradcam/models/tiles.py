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
    pixels of what the network takes, so that the windows lie on one grid of cells."""

    image: NDArray[Any]
    own: Preprocessing
    side: int
    step: int

    @property
    def canvas(self) -> tuple[int, int]:
        """The height and width of all windows together, in pixels of what the network takes."""
        pairs = list(zip(self.image.shape, self.own.size))
        scale = max(max(self.own.size) / self.side, *(need / has for has, need in pairs))
        steps = (max(0, round((side * scale - length) / self.step)) for side, length in pairs)
        rows, columns = (length + count * self.step for length, count in zip(self.own.size, steps))
        return rows, columns

    def check(self) -> None:
        """Raises `ImageError` where there are more windows than anybody waits for."""
        count = math.prod(len(self._spread(length, window)) for length, window in zip(self.canvas, self.own.size))
        if count > MOST:
            what = f"Tiles of {self.side} pixels would split this image into {count} tiles, expected at most {MOST}"
            raise ImageError(f"{what}: use the fit 'tiles:{math.ceil(self.side * math.sqrt(count / MOST))}'.")

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
    """The windows' explanations joined: maps are means, by weights that fall to the windows' borders. `explain`: of
    windows (N,C,h,w), all for the same classes, or by the same function. Scores are the windows' mean."""
    sums: dict[tuple[str, str], _Sum] = {}
    found: Mapping[tuple[str, str], Explanation] = {}
    done, total = 0, len(tiles.starts)
    for starts, images in tiles.batches():
        found = explain(images)
        for key, explanation in found.items():
            sums.setdefault(key, _Sum(explanation, tiles)).add(explanation, starts)
        done += len(starts)
        if progress is not None:
            progress(done, total)
    return {key: _join(explanation, sums[key], tiles.canvas) for key, explanation in found.items()}


def stack(found: Sequence[Explanation]) -> Explanation:
    """Explanations of one picture each, of the same size, as one; with the first one's output."""
    names = [name for name in ("maps", "heatmaps", "classes", "scores") if getattr(found[0], name) is not None]
    joined: dict[str, Any] = {name: torch.cat([getattr(each, name) for each in found]) for name in names}
    return replace(found[0], **joined)


class _Sum:
    """Weighted maps on the cells of all windows together, the weights' sum, and the scores' sum with their number."""

    def __init__(self, explanation: Explanation, tiles: Tiles) -> None:
        classes, grid = explanation.maps.shape[1], explanation.maps.shape[2:]
        cells = [round(length * it / side) for length, it, side in zip(tiles.canvas, grid, tiles.own.size)]
        kind, device = torch.float32, explanation.maps.device
        places = [torch.arange(length, dtype=kind, device=device) + 0.5 for length in grid]
        # From the most in a window's middle to a little at its ends.
        down, across = (torch.minimum(place, length - place) for place, length in zip(places, grid))
        self.maps = torch.zeros(classes, *cells, dtype=kind, device=device)
        self.weights = torch.zeros(cells, dtype=kind, device=device)
        self.window, self.lengths = down[:, None] * across, tiles.own.size
        self.scores, self.count = torch.zeros_like(explanation.scores[0]), 0

    def add(self, explanation: Explanation, starts: Sequence[tuple[int, int]]) -> None:
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
