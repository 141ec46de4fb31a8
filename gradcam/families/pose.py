"""Models that find keypoints, each by a heatmap: over the whole picture, or over each person's box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from gradcam.errors import TargetError
from gradcam.families.base import MODEL, PoseFinder, Poses, Seen
from gradcam.hooks.nested import Batch

HEATMAPS = "heatmaps"


class KeypointRcnn(PoseFinder):
    """torchvision's Keypoint R-CNN: logits over each box that it found, trained as a softmax over the places in it."""

    @property
    def own_layer(self) -> str:
        return "backbone"  # whose output are the levels of the feature pyramid

    @property
    def has_own_scale(self) -> bool:
        return True

    def to_inputs(self, images: Tensor) -> list[Tensor]:
        return list(images)

    def watched(self) -> dict[str, nn.Module]:
        return {MODEL: self.model, HEATMAPS: cast("Any", self.model).roi_heads.keypoint_predictor}

    def find(self, seen: Seen, batch: Batch) -> list[Poses]:
        found = seen.last()
        heatmaps: Sequence[Tensor] = seen.last(HEATMAPS).split([len(each["boxes"]) for each in found])
        # Where a box lies is taken as it is: features are cut out at it by an operation without a gradient for its place,
        # so that a box that moves would seem to take its keypoints along.
        return [Poses(own, each["boxes"].detach(), each["scores"].detach()) for own, each in zip(heatmaps, found)]


class VitPose(PoseFinder):
    """Hugging Face's ViTPose: heatmaps over the whole picture, trained as bells of height 1."""

    # At 1 the softmax of such a heatmap is flat: thousands of cells near 0 outweigh a few near 1, and its mean is the
    # middle of the picture. At this one a bell stays a bell, and the rest of the map weighs nothing.
    temperature = 0.05

    def rate(self, peak: float) -> float:
        return min(max(peak, 0.0), 1.0)

    @property
    def own_layer(self) -> str | None:
        # Behind the norm, not the block before it: there, gradient times activation sums up to zero.
        backbone = cast("Any", self.model).backbone
        if not hasattr(backbone, "layernorm"):
            return None
        levels = len(backbone.out_features)
        return "backbone.layernorm" if levels == 1 else f"backbone.layernorm#{levels - 1}"

    @property
    def own_labels(self) -> Sequence[str] | None:
        names = [str(name) for _, name in sorted(cast("Any", self.model).config.id2label.items())]
        return None if any(name.startswith("LABEL_") for name in names) else names

    def find(self, seen: Seen, batch: Batch) -> list[Poses]:
        heatmaps = seen.last().heatmaps
        height, width = batch.size
        rows, columns = heatmaps.shape[2:]
        # Its processor puts the centres of the outermost cells on those of the outermost pixels.
        down, across = (height - 1) / max(rows - 1, 1), (width - 1) / max(columns - 1, 1)
        left, top = 0.5 - across / 2, 0.5 - down / 2
        return _over_pictures(heatmaps, (left, top, left + columns * across, top + rows * down))


class PlainPose(PoseFinder):
    """A model whose output is heatmaps (N,P,h,w) over the whole picture, or has them as `heatmaps`."""

    def find(self, seen: Seen, batch: Batch) -> list[Poses]:
        output = seen.last()
        found: Any = output.get(HEATMAPS) if isinstance(output, Mapping) else getattr(output, HEATMAPS, output)
        is_usable = isinstance(found, Tensor) and found.is_floating_point() and found.ndim == 4
        if not is_usable or len(found) != batch.images or 0 in found.shape:
            what = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else type(output).__name__
            raise TargetError(
                f"{type(self.model).__name__} returned {what}, expected keypoint heatmaps ({batch.images},P,h,w), or an "
                "output that has them as `heatmaps`."
            )
        return _over_pictures(found, (0, 0, batch.size[1], batch.size[0]))


def _over_pictures(heatmaps: Tensor, region: Sequence[float]) -> list[Poses]:
    regions = heatmaps.detach().new_tensor([list(region)])
    return [Poses(own, regions) for own in heatmaps.split(1)]
