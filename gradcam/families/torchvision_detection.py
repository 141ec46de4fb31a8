"""torchvision's detectors: those that look again at regions (the R-CNNs), and those that decide at anchors."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign, roi_align
from torchvision.ops import boxes as operations

from gradcam.families.base import MODEL, Candidates, Detections, Detector, LocalGradient, Seen
from gradcam.hooks.autograd import graph_of, leaves
from gradcam.hooks.nested import Batch
from gradcam.hooks.pytorch import passes_on

HEAD, ANCHORS, TRANSFORM, PREDICTOR = "head", "anchors", "transform", "predictor"
CLASSES, BOXES = "cls_logits", "bbox_regression"  # of what heads give, as torchvision calls it
ROUNDING = 8  # units in the last place of a score that is computed again in the same way,
SLACK = 1024  # and of one that is computed in another order,
TF32 = 2.0**-8  # where the GPU rounds the terms themselves
MOST_OFF = 1e-2  # pixels that a box may be from that of the same candidate


class Rows(NamedTuple):
    """What the heads gave for all candidates of one picture, each (M,...), the boxes (M,4) that those are changes of, and
    the sizes of the picture, resized and as it was given."""

    outputs: Mapping[str, Tensor]
    anchors: Tensor
    inner: tuple[int, int]
    outer: tuple[int, ...]

    def take(self, rows: Tensor) -> Rows:
        outputs = {key: values[rows] for key, values in self.outputs.items()}
        return self._replace(outputs=outputs, anchors=self.anchors[rows])


class Crop(NamedTuple):
    """A window (C,h,w) of one picture's level of a pyramid, from a row and a column on: a leaf that requires gradients."""

    level: int
    top: int
    left: int
    values: Tensor


Again = tuple[list[Crop], Mapping[str, Tensor]]


class TorchvisionDetector(Detector):
    """What all of them share: a list of pictures goes in, and a dict with boxes, scores and labels comes out for each."""

    first_class = 0  # that is none of the background

    @property
    def own_layer(self) -> str:
        return "backbone"  # whose output are the levels of the feature pyramid

    @property
    def class_count(self) -> int | None:
        model = cast("Any", self.model)
        if hasattr(model, "roi_heads"):
            return getattr(getattr(model.roi_heads.box_predictor, "cls_score", None), "out_features", None)
        return getattr(model.head.classification_head, "num_columns" if isinstance(model, SSD) else "num_classes", None)

    @property
    def has_own_scale(self) -> bool:
        return True

    def set_threshold(self, threshold: float) -> None:
        model = cast("Any", self.model)
        getattr(model, "roi_heads", model).score_thresh = threshold

    def to_inputs(self, images: Tensor) -> list[Tensor]:
        return list(images)

    def read(self, seen: Seen, batch: Batch) -> list[Detections]:
        return [
            Detections(
                found["boxes"], found["scores"], found["labels"], found["masks"][:, 0] if "masks" in found else None
            )
            for found in seen.last()
        ]

    def weigh(self, seen: Seen, batch: Batch, label: int | None) -> list[Candidates]:
        found = []
        for rows in self.list_rows(seen, batch):
            scores = self.score(rows.outputs)
            labels = scores[:, self.first_class :].argmax(1) + self.first_class
            labels = labels if label is None else torch.full_like(labels, label)
            found.append(Candidates(self.decode(rows, labels), _pick(scores, labels), labels))
        return found

    def differentiate(
        self, seen: Seen, batch: Batch, found: Sequence[Detections], edge: int | None, inputs: Sequence[Tensor]
    ) -> list[list[LocalGradient]] | None:
        """A box depends on one candidate, and that on a small part of one level. So the heads run again on these parts
        alone, and one backward pass from the sum of all scores leads to all of them."""
        levels = self.list_levels(seen)
        places = [next((i for i, it in enumerate(levels) if _is_passed_on(start, it)), None) for start in inputs]
        pictures = self.list_rows(seen, batch)
        is_known = None not in places and not any(it.anchors.requires_grad for it in pictures)
        rows = [own for own in map(self._find_rows, pictures, found) if own is not None] if is_known else []
        if len(rows) < len(pictures) or any(it.dtype.itemsize < 4 for it in levels):
            return None
        with torch.enable_grad():
            again = self.run_again(seen, levels, rows, CLASSES if edge is None else BOXES)
            if again is None:
                return None
            crops, outputs = again
            divided = zip(*(values.split([len(own) for own in rows]) for values in outputs.values()))
            parts = [dict(zip(outputs, each)) for each in divided]
            values = torch.cat(
                [
                    self._read_values(picture.take(own)._replace(outputs=part), each.labels, edge)
                    for picture, own, part, each in zip(pictures, rows, parts, found)
                ]
            )
            total = values.sum()
        expected = torch.cat([each.scores if edge is None else each.boxes[:, edge] for each in found])
        if not _is_close(values, expected):
            return None  # the heads are no longer what they were made, or a hook has its way with them
        gradients = torch.autograd.grad(total, [crop.values for crop in crops])
        owners = [(i, k) for i, own in enumerate(rows) for k in range(len(own))]
        local: list[list[LocalGradient]] = [[] for _ in inputs]
        for (i, k), crop, gradient in zip(owners, crops, gradients):
            if crop.level in places:
                local[places.index(crop.level)].append(LocalGradient(i, k, crop.top, crop.left, gradient))
        return local

    def _find_rows(self, rows: Rows, wanted: Detections) -> Tensor | None:
        """Which candidates the detections are, by their scores and boxes; None where that is not certain."""
        off = (self.score(rows.outputs)[:, wanted.labels] - wanted.scores).abs()
        is_close = off <= ROUNDING * torch.finfo(off.dtype).eps * wanted.scores
        candidates, which = is_close.nonzero(as_tuple=True)
        boxes = self.decode(rows.take(candidates), wanted.labels[which])
        is_same = (boxes - wanted.boxes[which]).abs().amax(1) < MOST_OFF
        candidates, which = candidates[is_same], which[is_same]
        order = which.argsort()
        return candidates[order] if which[order].tolist() == list(range(len(wanted.scores))) else None

    def _read_values(self, rows: Rows, labels: Tensor, edge: int | None) -> Tensor:
        return _pick(self.score(rows.outputs), labels) if edge is None else self.decode(rows, labels)[:, edge]

    @abstractmethod
    def list_rows(self, seen: Seen, batch: Batch) -> list[Rows]:
        """All candidates of each picture."""

    @abstractmethod
    def score(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """The scores (M,C) of what the heads gave."""

    @abstractmethod
    def decode(self, rows: Rows, labels: Tensor) -> Tensor:
        """The candidates' boxes (M,4) for these classes, in pixels of the picture as it was given."""

    @abstractmethod
    def list_levels(self, seen: Seen) -> list[Tensor]:
        """The levels that `run_again` reads, in their order; none where it cannot."""

    @abstractmethod
    def run_again(self, seen: Seen, levels: Sequence[Tensor], rows: Sequence[Tensor], output: str) -> Again | None:
        """What each picture's candidates of these numbers depend on, and what the heads give for that, this output at
        least."""


class RegionDetector(TorchvisionDetector):
    """Faster, Mask and Keypoint R-CNN: the candidates are all proposals, each with a box and a score for each class."""

    first_class = 1

    @property
    def heads(self) -> Any:
        return self.model.roi_heads

    def watched(self) -> dict[str, nn.Module]:
        return {MODEL: self.model, HEAD: self.heads, PREDICTOR: self.heads.box_predictor}

    def list_rows(self, seen: Seen, batch: Batch) -> list[Rows]:
        _, proposals, sizes = seen.calls[HEAD][-1].args[:3]
        logits, regression = (it.split([len(own) for own in proposals]) for it in seen.last(PREDICTOR))
        outputs = [{CLASSES: each, BOXES: changes} for each, changes in zip(logits, regression)]
        return list(map(Rows, outputs, proposals, sizes, batch.sizes))

    def score(self, outputs: Mapping[str, Tensor]) -> Tensor:
        return outputs[CLASSES].softmax(-1)

    def decode(self, rows: Rows, labels: Tensor) -> Tensor:
        decoded = self.heads.box_coder.decode(rows.outputs[BOXES], [rows.anchors]).flatten(1)
        first = 4 * labels[:, None] + torch.arange(4, dtype=torch.int64, device=labels.device)
        return _to_picture(decoded.gather(1, first), rows)

    def list_levels(self, seen: Seen) -> list[Tensor]:
        features, pool = seen.calls[HEAD][-1].args[0], self.heads.box_roi_pool
        is_known = isinstance(pool, MultiScaleRoIAlign)
        return [level for name, level in features.items() if name in pool.featmap_names] if is_known else []

    def run_again(self, seen: Seen, levels: Sequence[Tensor], rows: Sequence[Tensor], output: str) -> Again:
        pool = self.heads.box_roi_pool
        regions = [boxes[own] for boxes, own in zip(seen.calls[HEAD][-1].args[1], rows)]
        images = [i for i, own in enumerate(rows) for _ in own]
        numbers = pool.map_levels(regions).tolist() if len(levels) > 1 else [0] * len(images)
        crops, pooled = [], []
        for image, number, region in zip(images, numbers, torch.cat(regions)):
            scale = pool.scales[number]
            left, top, right, bottom = (region * scale).tolist()
            # What is pooled is at least a cell wide and high; between its last cell and the next one values are mixed.
            cells = [(math.floor(a), math.ceil(max(b, a + 1)) + 1) for a, b in ((top, bottom), (left, right))]
            crop = _cut(levels, number, image, *cells)
            moved = region - region.new_tensor([crop.left, crop.top] * 2) / scale
            crops.append(crop)
            pooled.append(roi_align(crop.values[None], [moved[None]], pool.output_size, scale, pool.sampling_ratio))
        logits, regression = self.heads.box_predictor(self.heads.box_head(torch.cat(pooled)))
        return crops, {CLASSES: logits, BOXES: regression}


class AnchorDetector(TorchvisionDetector):
    """RetinaNet, FCOS, SSD and SSDlite: the candidates are all anchors, each with a box and a score for each class."""

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        super().__init__(model, prefix)
        self.first_class = 1 if isinstance(model, SSD) else 0

    def watched(self) -> dict[str, nn.Module]:
        model = cast("Any", self.model)
        return {MODEL: model, HEAD: model.head, ANCHORS: model.anchor_generator, TRANSFORM: model.transform}

    def list_rows(self, seen: Seen, batch: Batch) -> list[Rows]:
        head, (images, _) = seen.last(HEAD), seen.last(TRANSFORM)
        outputs = [{name: values[i] for name, values in head.items()} for i in range(len(images.image_sizes))]
        return list(map(Rows, outputs, seen.last(ANCHORS), images.image_sizes, batch.sizes))

    def score(self, outputs: Mapping[str, Tensor]) -> Tensor:
        if isinstance(self.model, SSD):
            return outputs[CLASSES].softmax(-1)
        scores = outputs[CLASSES].sigmoid()
        return (scores * outputs["bbox_ctrness"].sigmoid()).sqrt() if isinstance(self.model, FCOS) else scores

    def decode(self, rows: Rows, labels: Tensor) -> Tensor:
        coder = cast("Any", self.model).box_coder
        decode = coder.decode if isinstance(self.model, FCOS) else coder.decode_single
        return _to_picture(decode(rows.outputs[BOXES], rows.anchors), rows)

    def list_levels(self, seen: Seen) -> list[Tensor]:
        is_known = isinstance(cast("Any", self.model).head, RetinaNetHead)
        return list(seen.calls[HEAD][-1].args[0]) if is_known else []

    def run_again(self, seen: Seen, levels: Sequence[Tensor], rows: Sequence[Tensor], output: str) -> Again | None:
        head = cast("Any", self.model).head
        own, last = (head.classification_head, CLASSES) if output == CLASSES else (head.regression_head, "bbox_reg")
        layers = [it for it in (*own.conv.modules(), getattr(own, last)) if not [*it.children()]]
        if not all(map(_is_local, layers)):
            return None
        reach = sum(it.kernel_size[0] // 2 for it in layers if isinstance(it, nn.Conv2d))
        cells = [level.shape[2] * level.shape[3] for level in levels]
        anchors = seen.last(HEAD)[output].shape[1] // sum(cells)
        crops, windows, numbers = [], [], []
        for image, row in ((i, row) for i, each in enumerate(rows) for row in each.tolist()):
            place, number = divmod(row, anchors)
            level = 0
            while place >= cells[level]:
                place, level = place - cells[level], level + 1
            down, across = divmod(place, levels[level].shape[3])
            crop = _cut(levels, level, image, *((it - reach, it + reach + 1) for it in (down, across)))
            height, width = crop.values.shape[1:]
            before = crop.top - down + reach, crop.left - across + reach
            around = [before[1], 2 * reach + 1 - before[1] - width, before[0], 2 * reach + 1 - before[0] - height]
            crops.append(crop)
            windows.append([F.pad(it, around) for it in (crop.values, torch.ones_like(crop.values[:1]))])
            numbers.append(number)
        found = _convolve(layers, *map(torch.stack, zip(*windows))).flatten(1).unflatten(1, (anchors, -1))
        return crops, {output: found[range(len(found)), numbers]}


def _is_local(layer: nn.Module) -> bool:
    """Whether it is a convolution that leaves the size as it is, or looks at no other places."""
    if not isinstance(layer, nn.Conv2d):
        return isinstance(layer, (nn.ReLU, nn.BatchNorm2d))
    (height, width), ones = layer.kernel_size, (1, 1)
    is_dense = (layer.stride, layer.dilation, layer.padding_mode) == (ones, ones, "zeros")
    return is_dense and height == width and height % 2 == 1 and layer.padding == (height // 2, width // 2)


def _convolve(layers: Sequence[nn.Module], windows: Tensor, is_inside: Tensor) -> Tensor:
    """What layers give in the middle of windows (B,C,h,w). Before each convolution, what is not inside the level is zero,
    as its padding is there."""
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            windows = F.conv2d(windows * is_inside, layer.weight, layer.bias, groups=layer.groups)
            is_inside = F.pad(is_inside, [-(layer.kernel_size[0] // 2)] * 4)
        else:
            windows = layer(windows)
    return windows


def _cut(levels: Sequence[Tensor], number: int, image: int, rows: tuple[int, int], columns: tuple[int, int]) -> Crop:
    """From one row or column to before another, as far as there are any, of one at least."""
    level = levels[number]
    (top, left), (bottom, right) = (
        [min(max(start, 0), length - 1) for (start, _), length in zip((rows, columns), level.shape[2:])],
        [min(end, length) for (_, end), length in zip((rows, columns), level.shape[2:])],
    )
    return Crop(number, top, left, level.detach()[image, :, top:bottom, left:right].clone().requires_grad_())


def _is_passed_on(start: Tensor, level: Tensor) -> bool:
    """Whether a level of the pyramid is this tensor, and nothing was done to it in between."""
    nodes = graph_of(level)
    return bool(nodes) and all(map(passes_on, nodes)) and any(it is start for it in leaves(level))


def _is_close(values: Tensor, expected: Tensor) -> bool:
    slack = SLACK * torch.finfo(values.dtype).eps
    slack = max(slack, TF32) if values.is_cuda and values.dtype == torch.float32 else slack
    return bool((values - expected).abs().max() <= slack * expected.abs().max())


def _pick(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.gather(1, labels[:, None])[:, 0]


def _to_picture(boxes: Tensor, rows: Rows) -> Tensor:
    """Boxes in pixels of the resized picture in those of the picture itself, within it."""
    outer, inner = (torch.tensor(it, dtype=torch.float32, device=boxes.device) for it in (rows.outer, rows.inner))
    ratios = (outer / inner).flip(0).repeat(2)  # in float32 whatever the boxes are, as torchvision has it
    return operations.clip_boxes_to_image(boxes, rows.inner) * ratios
