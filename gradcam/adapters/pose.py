"""Adapters for models that predict a heatmap per keypoint, over the whole image or over each person's box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gradcam.adapters.base import MODEL, ModelRun, PoseAdapter, Poses
from gradcam.adapters.huggingface_segmentation import find_labels
from gradcam.errors import TargetError
from gradcam.hooks.containers import Batch

HEATMAPS = "heatmaps"


class KeypointRcnn(PoseAdapter):
    """torchvision's Keypoint R-CNN. A heatmap contains the logits of a softmax over all positions in a box."""

    has_own_scale = True
    own_layer = "backbone"  # The backbone returns the levels of the feature pyramid.

    def to_inputs(self, images: Tensor) -> list[Tensor]:
        return list(images)

    def watched(self) -> dict[str, nn.Module]:
        return {MODEL: self.model, HEATMAPS: self.model.roi_heads.keypoint_predictor}

    def find_poses(self, run: ModelRun, batch: Batch) -> list[Poses]:
        results = run.last_output()
        heatmaps = run.last_output(HEATMAPS).split([len(result["boxes"]) for result in results])
        # Detach the boxes. RoI align has no gradient for box coordinates. With attached boxes, the gradient would
        # therefore include the movement of a box, but not the effect of this movement on the pooled features.
        pairs = zip(heatmaps, results)
        return [Poses(maps, result["boxes"].detach(), result["scores"].detach()) for maps, result in pairs]


class VitPose(PoseAdapter):
    """Hugging Face's ViTPose. A heatmap covers the full image. The targets in training are Gaussians of height 1."""

    # At temperature 1, the softmax is nearly uniform, because thousands of cells near 0 outweigh a few cells near 1.
    # The mean position is then the image centre. At 0.05, almost all weight is at the peak.
    temperature = 0.05

    def to_confidence(self, peak: float) -> float:
        return min(max(peak, 0.0), 1.0)

    @property
    def own_layer(self) -> str | None:
        # Use the norm after the last block. Before the norm, gradient times activation would sum to zero, because the
        # norm is scale-invariant.
        backbone = self.model.backbone
        if not hasattr(backbone, "layernorm"):
            return None
        levels = len(backbone.out_features)
        return "backbone.layernorm" if levels == 1 else f"backbone.layernorm#{levels - 1}"

    @property
    def own_labels(self) -> Sequence[str] | None:
        return find_labels(self.model.config)

    def find_poses(self, run: ModelRun, batch: Batch) -> list[Poses]:
        heatmaps = run.last_output().heatmaps
        height, width = batch.size
        rows, columns = heatmaps.shape[2:]
        # ViTPose's processor aligns the centres of the outermost cells with the centres of the outermost pixels.
        row_step, column_step = (height - 1) / max(rows - 1, 1), (width - 1) / max(columns - 1, 1)
        x0, y0 = 0.5 - column_step / 2, 0.5 - row_step / 2
        return _cover_images(heatmaps, (x0, y0, x0 + columns * column_step, y0 + rows * row_step))


class GenericPoseFinder(PoseAdapter):
    """A model that returns heatmaps (N,P,h,w) over the whole image, alone or under the name `heatmaps`."""

    def find_poses(self, run: ModelRun, batch: Batch) -> list[Poses]:
        output = run.last_output()
        heatmaps: Any = output.get(HEATMAPS) if isinstance(output, Mapping) else getattr(output, HEATMAPS, output)
        is_usable = isinstance(heatmaps, Tensor) and heatmaps.is_floating_point() and heatmaps.ndim == 4
        if not is_usable or len(heatmaps) != batch.images or 0 in heatmaps.shape:
            description = f"a tensor {tuple(heatmaps.shape)}" if isinstance(heatmaps, Tensor) else type(output).__name__
            expected = f"keypoint heatmaps ({batch.images},P,h,w), or an output that has them as `heatmaps`."
            raise TargetError(f"{type(self.model).__name__} returned {description}, expected {expected}")
        return _cover_images(heatmaps, (0, 0, batch.size[1], batch.size[0]))


def _cover_images(heatmaps: Tensor, region: Sequence[float]) -> list[Poses]:
    regions = heatmaps.detach().new_tensor([list(region)])
    return [Poses(image_heatmaps, regions) for image_heatmaps in heatmaps.split(1)]
