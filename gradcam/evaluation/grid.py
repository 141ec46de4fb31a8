"""The grid pointing game: how much of a class's map is on the class's own picture, in a mosaic of four."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcam.errors import ImageError, shorten, show_fields
from gradcam.evaluation.heatmaps import check_heatmaps, to_unit
from gradcam.explanation import Explanation

CELLS = 4  # of a mosaic: top left, top right, bottom left, bottom right


@dataclass(frozen=True, eq=False)
class GridPointing:
    """Of M mosaics and their four classes: `mass`, the share of each map in its class's cell, and `hits`, of its maxima.

    Both are float32 (M,4), in [0,1], on the heatmaps' device; higher is better, and 1/4 is chance.
    """

    mass: Tensor
    hits: Tensor

    __repr__ = show_fields


def grid_pointing_game(heatmaps: Any) -> GridPointing:
    """Whether maps of a mosaic's four classes are on their own pictures (Böhle et al., CVPR 2021, section 4.2).

    `heatmaps`: (M,4,H,W) of M mosaics, as tensors, arrays, or an `Explanation` of four classes; map k is of the class whose
    picture is in cell k, counted by rows: top left, top right, bottom left, bottom right. The cells meet at H // 2 and
    W // 2, as those of `make_mosaics` do.
    For a map A with its negative values set to zero, and the pixels G_k of its cell,
    mass = sum of A over G_k / sum of A over all, the paper's L_k; hits = 1 where the maximum is in G_k, otherwise 0.
    A blank map scores 0 in both: it points nowhere. Several maxima count by the share of them that is in the cell. So
    a constant map is at chance, 1/4 in both.

    Raises `ImageError` for heatmaps of another form, for cells without a pixel, and for NaN and infinite values.
    """
    maps = to_unit(_to_flat(heatmaps)).unflatten(0, (-1, CELLS))
    mass, hits = _own_share(maps), _own_share((maps == 1).float())
    return GridPointing(mass, hits)


def _to_flat(heatmaps: Any) -> Tensor:
    """Heatmaps (M,4,H,W) as float32 (4M,H,W)."""
    values = heatmaps.heatmaps if isinstance(heatmaps, Explanation) else heatmaps
    if not isinstance(values, (Tensor, np.ndarray)):
        raise ImageError(f"The heatmaps are {shorten(heatmaps)}, expected a tensor or an array (M,4,H,W).")
    shape = tuple(values.shape)
    if len(shape) != 4 or shape[1] != CELLS or min(shape[2:]) < 2:
        raise ImageError(
            f"The heatmaps have the shape {shape}, expected (M,4,H,W): of each mosaic one for each of its four classes, in "
            "the order of its cells, at the mosaic's size."
        )
    return check_heatmaps(values.reshape(-1, *shape[2:]), (shape[0] * CELLS, *shape[2:]))


def _own_share(maps: Tensor) -> Tensor:
    """The share of each of the maps (M,4,H,W), which are not negative, in its own cell: (M,4), 0 where all is zero."""
    row, column = maps.shape[2] // 2, maps.shape[3] // 2
    own = torch.stack(
        [
            maps[:, 0, :row, :column].sum((1, 2)),
            maps[:, 1, :row, column:].sum((1, 2)),
            maps[:, 2, row:, :column].sum((1, 2)),
            maps[:, 3, row:, column:].sum((1, 2)),
        ],
        dim=1,
    )
    total = maps.sum((2, 3))
    return own / torch.where(total > 0, total, 1.0)
