"""torchvision's detectors: those that look again at regions (the R-CNNs), and those that decide at anchors."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.ssd import SSD
from torchvision.ops import boxes as operations

from gradcam.families.base import MODEL, Candidates, Detections, Detector, Seen
from gradcam.hooks.nested import Batch

HEAD, ANCHORS, TRANSFORM, PREDICTOR = "head", "anchors", "transform", "predictor"


class TorchvisionDetector(Detector):
    """What all of them share: a list of pictures goes in, and a dict with boxes, scores and labels comes out for each."""

    @property
    def own_layer(self) -> str:
        return "backbone"  # whose output are the levels of the feature pyramid

    def to_inputs(self, images: Tensor) -> list[Tensor]:
        return list(images)

    def read(self, seen: Seen, batch: Batch) -> list[Detections]:
        return [
            Detections(found["boxes"], found["scores"], found["labels"], _only(found.get("masks")))
            for found in seen.last()
        ]


def _only(masks: Tensor | None) -> Tensor | None:
    return None if masks is None else masks[:, 0]


class RegionDetector(TorchvisionDetector):
    """Faster, Mask and Keypoint R-CNN: the candidates are all proposals, each with a box and a score for each class."""

    def watched(self) -> dict[str, nn.Module]:
        heads = cast("Any", self.model).roi_heads
        return {MODEL: self.model, HEAD: heads, PREDICTOR: heads.box_predictor}

    def weigh(self, seen: Seen, batch: Batch, label: int | None) -> list[Candidates]:
        _, proposals, sizes = seen.calls[HEAD][-1].args[:3]
        logits, regression = seen.last(PREDICTOR)
        heads = cast("Any", self.model).roi_heads
        counts = [len(boxes) for boxes in proposals]
        decoded = heads.box_coder.decode(regression, proposals).split(counts)
        found = []
        for boxes, scores, inner, outer in zip(decoded, logits.softmax(-1).split(counts), sizes, batch.sizes):
            column, chosen = _choose(scores, label, first=1)
            own = boxes[torch.arange(len(boxes), device=boxes.device), chosen]
            found.append(Candidates(_to_picture(own, inner, outer), column, chosen))
        return found


class AnchorDetector(TorchvisionDetector):
    """RetinaNet, FCOS, SSD and SSDlite: the candidates are all anchors, each with a box and a score for each class."""

    def watched(self) -> dict[str, nn.Module]:
        model = cast("Any", self.model)
        return {MODEL: model, HEAD: model.head, ANCHORS: model.anchor_generator, TRANSFORM: model.transform}

    def weigh(self, seen: Seen, batch: Batch, label: int | None) -> list[Candidates]:
        head, anchors, (images, _) = seen.last(HEAD), seen.last(ANCHORS), seen.last(TRANSFORM)
        found = []
        for i, (inner, outer) in enumerate(zip(images.image_sizes, batch.sizes)):
            scores = self._score({name: values[i] for name, values in head.items()})
            column, chosen = _choose(scores, label, first=1 if isinstance(self.model, SSD) else 0)
            boxes = self._decode(head["bbox_regression"][i], anchors[i])
            found.append(Candidates(_to_picture(boxes, inner, outer), column, chosen))
        return found

    def _score(self, head: dict[str, Tensor]) -> Tensor:
        if isinstance(self.model, SSD):
            return head["cls_logits"].softmax(-1)
        scores = head["cls_logits"].sigmoid()
        return (scores * head["bbox_ctrness"].sigmoid()).sqrt() if isinstance(self.model, FCOS) else scores

    def _decode(self, regression: Tensor, anchors: Tensor) -> Tensor:
        coder = cast("Any", self.model).box_coder
        found: Tensor = (coder.decode if isinstance(self.model, FCOS) else coder.decode_single)(regression, anchors)
        return found


def _choose(scores: Tensor, label: int | None, first: int) -> tuple[Tensor, Tensor]:
    """Of scores (M,C) those of one class, or each row's best from the first class on; and which class that is."""
    if label is not None:
        return scores[:, label], torch.full((len(scores),), label, dtype=torch.int64, device=scores.device)
    best = scores[:, first:].max(1)
    return best.values, best.indices + first


def _to_picture(boxes: Tensor, inner: tuple[int, int], outer: tuple[int, ...]) -> Tensor:
    """Boxes in pixels of the resized picture in those of the picture itself, within it."""
    down, across = (float(big) / small for big, small in zip(outer, inner))
    return operations.clip_boxes_to_image(boxes, inner) * boxes.new_tensor([across, down, across, down])
