"""Whether a layer's cells lie where its layout says: places of the picture are changed, and it is seen which cells answer.

The number of tokens, or the sides of a map, say how many cells there are, and nothing of their order. Where the layout is
right, the cell on a changed place is among those that change most; in another order that is so by chance.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.forward import record_outputs
from gradcam.hooks.nested import Batch, tensors
from gradcam.layers.layout import Layout, is_guess
from gradcam.layers.reshape import IndexLayout

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
