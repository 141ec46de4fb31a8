"""Collect the maps of several methods and layers, and check what a method returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcam.cam.deferred_checks import RowRanges
from gradcam.cam.methods.base import ActivationMethod, CurvatureMethod, GradientMethod, Method
from gradcam.cam.rounding import DenoisedMaps
from gradcam.errors import BlindLayerError, GradcamError, shorten

Key = tuple[str, str]  # (layer, method), or (place, method) for a method without a layer.


@dataclass(frozen=True)
class Maps:
    """The maps of a method at a layer, signed (N,K,...) in float32, and the scores (N,K) that they explain.

    `levels`: one map, or several to be added once the evidence (positive or negative) is selected. `rounding_mask`
    (N,K,2): where rounding errors were replaced by zeros, as in `DenoisedMaps`; None if nowhere.
    """

    levels: list[Tensor]
    scores: Tensor
    rounding_mask: Tensor | None = None


@dataclass(frozen=True)
class MapCollector:
    """Collects maps by site and method: pieces (N,k,...) for a few classes each, and the images without gradient.

    Until deferred checks are flushed, they may still change both. `errors`: the first is raised if no site has a
    gradient.
    """

    pieces: dict[Key, list[list[DenoisedMaps]]] = field(default_factory=dict)
    blind: dict[Key, list[list[bool] | RowRanges]] = field(default_factory=dict)
    errors: list[BlindLayerError] = field(default_factory=list)

    def add(
        self, site: str, method: Method, pieces: list[DenoisedMaps], blind: list[bool] | RowRanges | None = None
    ) -> None:
        """Add pieces of maps. An image is blind (without gradient) if it is blind in all additions.

        `blind`: one flag per image, or the ranges of its gradients, which are zero for a blind image.
        """
        key = site, method.name
        self.pieces.setdefault(key, []).append(pieces)
        if blind is not None:
            self.blind.setdefault(key, []).append(blind)

    def list_blind(self, site: str, method: str) -> list[list[bool]]:
        """List the blind images of each addition; call this after the checks are flushed."""
        additions = self.blind[site, method]
        return [[limits == (0, 0) for limits in rows] if isinstance(rows, RowRanges) else rows for rows in additions]

    def list_pieces(self, key: Key) -> list[DenoisedMaps]:
        """Return the current pieces."""
        return [piece for pieces in self.pieces[key] for piece in pieces]


def mark_rounding(piece: DenoisedMaps) -> Tensor:
    """Return the rounding mask of a piece of maps, also if there was no rounding."""
    nowhere = piece.maps.new_zeros((*piece.maps.shape[:2], 2), dtype=torch.bool)
    return nowhere if piece.rounding_mask is None else piece.rounding_mask


def compute_checked(method: ActivationMethod | GradientMethod | CurvatureMethod, *inputs: Tensor) -> Tensor:
    """Return the method's maps (N,K,...), or (N,...) from activations alone; raise `GradcamError` for other results."""
    maps: Any = method.compute(*inputs)
    if isinstance(method.function, str):
        return maps  # The package's own methods are tested.
    expected, grid = inputs[-1].shape[: len(inputs[1:2]) + 1], inputs[0].shape[2:]
    form = f"{str(inputs[0].dtype).removeprefix('torch.')} {(*expected, *grid)} on {inputs[0].device}"
    if not isinstance(maps, Tensor):
        raise GradcamError(f"The method {method.name} returned {shorten(maps)}, expected a tensor {form}.")
    properties = [(tensor.dtype, tensor.device, tensor.layout) for tensor in (maps, inputs[0])]
    if maps.shape != (*expected, *grid) or properties[0] != properties[1]:
        description = f"{str(maps.dtype).removeprefix('torch.')} {tuple(maps.shape)} on {maps.device}"
        description += "" if maps.layout == torch.strided else f", {str(maps.layout).removeprefix('torch.')}"
        raise GradcamError(f"The method {method.name} returned a tensor {description}, expected {form}.")
    if not maps.isfinite().all():
        raise GradcamError(f"The method {method.name} returned maps that are NaN or infinite in places.")
    return maps
