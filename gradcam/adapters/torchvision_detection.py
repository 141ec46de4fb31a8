"""Adapters for torchvision's region-based (Faster R-CNN, ...) and anchor-based (RetinaNet, ...) detectors."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.ssd import SSD
from torchvision.models.detection.transform import resize_boxes
from torchvision.ops import MultiScaleRoIAlign, roi_align
from torchvision.ops import boxes as operations

from gradcam.adapters.base import MODEL, Candidates, Detections, DetectorAdapter, LocalGradient, ModelRun
from gradcam.hooks.autograd import list_graph_nodes, list_leaves
from gradcam.hooks.containers import Batch
from gradcam.hooks.pytorch import is_passthrough

HEAD, ANCHORS, TRANSFORM, PREDICTOR = "head", "anchors", "transform", "predictor"
CLASSES, BOXES = "cls_logits", "bbox_regression"  # torchvision's keys in the heads' outputs
SAME_ORDER_ULPS = 8  # tolerance in ULPs (units in the last place) for scores recomputed in the same order
OTHER_ORDER_ULPS = 1024  # tolerance in ULPs for scores recomputed in another order of operations
TF32_TOLERANCE = 2.0**-8  # relative tolerance if the GPU may round factors to TF32
MAX_BOX_DISTANCE = 1e-2  # between the boxes of a detection and its candidate, in pixels


class ImageCandidates(NamedTuple):
    """All candidates of one image.

    `outputs` are the heads' outputs, (M,...) each. `anchors` (M,4) are the boxes that the regression refines. The model
    resizes the image: `original_size` is the size before, and `resized_size` is the size after.
    """

    outputs: Mapping[str, Tensor]
    anchors: Tensor
    resized_size: tuple[int, int]
    original_size: tuple[int, ...]

    def take(self, rows: Tensor) -> ImageCandidates:
        outputs = {key: values[rows] for key, values in self.outputs.items()}
        return self._replace(outputs=outputs, anchors=self.anchors[rows])


class Crop(NamedTuple):
    """A window of one image's feature map at one pyramid level.

    The window starts at row `top` and column `left`. Its `values` (C,h,w) are a leaf tensor that requires gradients.
    """

    level: int
    top: int
    left: int
    values: Tensor


HeadRerun = tuple[list[Crop], Mapping[str, Tensor]]  # the inputs and outputs of heads that run on crops


class TorchvisionDetector(DetectorAdapter):
    """A detector that takes a list of images, and returns a dict of boxes, scores and labels for each image."""

    first_class = 0  # 1 if class 0 is the background
    has_own_scale = True
    own_layer = "backbone"  # The backbone returns the levels of the feature pyramid.

    @property
    def class_count(self) -> int | None:
        if hasattr(self.model, "roi_heads"):
            return getattr(getattr(self.model.roi_heads.box_predictor, "cls_score", None), "out_features", None)
        name = "num_columns" if isinstance(self.model, SSD) else "num_classes"
        return getattr(self.model.head.classification_head, name, None)

    def set_threshold(self, threshold: float) -> None:
        getattr(self.model, "roi_heads", self.model).score_thresh = threshold

    def to_inputs(self, images: Tensor) -> list[Tensor]:
        return list(images)

    def read(self, run: ModelRun, batch: Batch) -> list[Detections]:
        names = ("boxes", "scores", "labels", "masks")
        detections = [Detections(*map(result.get, names)) for result in run.last_output()]
        return [image if image.masks is None else image._replace(masks=image.masks[:, 0]) for image in detections]

    def list_candidates(self, run: ModelRun, batch: Batch, label: int | None) -> list[Candidates]:
        candidates = []
        for image_candidates in self.list_image_candidates(run, batch):
            scores = self.score(image_candidates.outputs)
            labels = scores[:, self.first_class :].argmax(1) + self.first_class
            labels = labels if label is None else torch.full_like(labels, label)
            candidates.append(Candidates(self.decode(image_candidates, labels), _select_labels(scores, labels), labels))
        return candidates

    def differentiate(
        self, run: ModelRun, batch: Batch, detections: Sequence[Detections], edge: int | None, inputs: Sequence[Tensor]
    ) -> list[list[LocalGradient]] | None:
        """Run the heads again on small crops, and return the detections' gradients after one backward pass.

        Each detection comes from one candidate, which depends on a small crop of one pyramid level. The heads are run
        again on the crops only. Each crop affects only the score of its own detection. Therefore, one backward pass
        from the sum of all scores gives the gradient of each score at its crop.
        """
        levels = self.list_levels(run)
        matches = [[i for i, level in enumerate(levels) if _is_unchanged(start, level)] for start in inputs]
        candidates = self.list_image_candidates(run, batch)
        if not all(matches) or any(image.anchors.requires_grad for image in candidates):
            return None
        level_indices = [indices[0] for indices in matches]
        rows = [image_rows for image_rows in map(self._match_rows, candidates, detections) if image_rows is not None]
        if len(rows) < len(candidates) or any(level.dtype.itemsize < 4 for level in levels):
            return None
        with torch.enable_grad():
            rerun = self.rerun_heads(run, levels, rows, CLASSES if edge is None else BOXES)
            if rerun is None:
                return None
            crops, outputs = rerun
            splits = zip(*(values.split([len(image_rows) for image_rows in rows]) for values in outputs.values()))
            detected = [image.take(image_rows) for image, image_rows in zip(candidates, rows)]
            detected = [image._replace(outputs=dict(zip(outputs, split))) for image, split in zip(detected, splits)]
            values = torch.cat([self._read_values(*pair, edge) for pair in zip(detected, detections)])
            total = values.sum()
        expected = torch.cat([image.scores if edge is None else image.boxes[:, edge] for image in detections])
        if not _is_close(values, expected):
            return None  # The values differ, for example because of a hook at a head.
        gradients = torch.autograd.grad(total, [crop.values for crop in crops])
        owners = [(i, k) for i, image_rows in enumerate(rows) for k in range(len(image_rows))]
        local: list[list[LocalGradient]] = [[] for _ in inputs]
        for (i, k), crop, gradient in zip(owners, crops, gradients):
            if crop.level in level_indices:
                local[level_indices.index(crop.level)].append(LocalGradient(i, k, crop.top, crop.left, gradient))
        return local

    def _match_rows(self, candidates: ImageCandidates, detections: Detections) -> Tensor | None:
        """Return the indices of the candidates that became the detections; None if the match is ambiguous."""
        differences = (self.score(candidates.outputs)[:, detections.labels] - detections.scores).abs()
        is_close = differences <= SAME_ORDER_ULPS * torch.finfo(differences.dtype).eps * detections.scores
        matches, detection_indices = is_close.nonzero(as_tuple=True)
        boxes = self.decode(candidates.take(matches), detections.labels[detection_indices])
        is_match = (boxes - detections.boxes[detection_indices]).abs().amax(1) < MAX_BOX_DISTANCE
        matches, detection_indices = matches[is_match], detection_indices[is_match]
        order = detection_indices.argsort()
        return matches[order] if detection_indices[order].tolist() == list(range(len(detections.scores))) else None

    def _read_values(self, candidates: ImageCandidates, detections: Detections, edge: int | None) -> Tensor:
        if edge is None:
            return _select_labels(self.score(candidates.outputs), detections.labels)
        return self.decode(candidates, detections.labels)[:, edge]

    @abstractmethod
    def list_image_candidates(self, run: ModelRun, batch: Batch) -> list[ImageCandidates]:
        """Return all candidates of each image."""

    @abstractmethod
    def score(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Return the scores (M,C) from the outputs of the heads."""

    @abstractmethod
    def decode(self, candidates: ImageCandidates, labels: Tensor) -> Tensor:
        """Return the candidates' boxes (M,4) for the classes `labels`, in pixels of the original image."""

    @abstractmethod
    def list_levels(self, run: ModelRun) -> list[Tensor]:
        """Return the pyramid levels for `rerun_heads`; an empty list if the heads cannot run on crops."""

    @abstractmethod
    def rerun_heads(self, run: ModelRun, levels: list[Tensor], rows: list[Tensor], output: str) -> HeadRerun | None:
        """Return crops around the candidates with indices `rows`, and the outputs of the heads for these crops.

        `output` is the name of the required head output. The result may lack other outputs. If the heads cannot run on
        crops, the result is None.
        """


class RegionDetector(TorchvisionDetector):
    """Faster, Mask and Keypoint R-CNN: each proposal is a candidate, with a box and a score for each class."""

    first_class = 1

    @property
    def heads(self) -> Any:
        return self.model.roi_heads

    def watched(self) -> dict[str, nn.Module]:
        return {MODEL: self.model, HEAD: self.heads, PREDICTOR: self.heads.box_predictor}

    def list_image_candidates(self, run: ModelRun, batch: Batch) -> list[ImageCandidates]:
        _, proposals, sizes = run.calls[HEAD][-1].args[:3]
        lengths = [len(boxes) for boxes in proposals]
        splits = zip(*(values.split(lengths) for values in run.last_output(PREDICTOR)))
        outputs = [{CLASSES: classes, BOXES: deltas} for classes, deltas in splits]
        return list(map(ImageCandidates, outputs, proposals, sizes, batch.sizes))

    def score(self, outputs: Mapping[str, Tensor]) -> Tensor:
        return outputs[CLASSES].softmax(-1)

    def decode(self, candidates: ImageCandidates, labels: Tensor) -> Tensor:
        decoded = self.heads.box_coder.decode(candidates.outputs[BOXES], [candidates.anchors]).flatten(1)
        columns = 4 * labels[:, None] + torch.arange(4, dtype=torch.int64, device=labels.device)
        return _to_original_image(decoded.gather(1, columns), candidates)

    def list_levels(self, run: ModelRun) -> list[Tensor]:
        features, pool = run.calls[HEAD][-1].args[0], self.heads.box_roi_pool
        is_supported = isinstance(pool, MultiScaleRoIAlign)
        return [level for name, level in features.items() if name in pool.featmap_names] if is_supported else []

    def rerun_heads(self, run: ModelRun, levels: list[Tensor], rows: list[Tensor], output: str) -> HeadRerun:
        pool = self.heads.box_roi_pool
        regions = [boxes[image_rows] for boxes, image_rows in zip(run.calls[HEAD][-1].args[1], rows)]
        images = [i for i, image_rows in enumerate(rows) for _ in image_rows]
        level_numbers = pool.map_levels(regions).tolist() if len(levels) > 1 else [0] * len(images)
        crops, pooled = [], []
        for image, level, region in zip(images, level_numbers, torch.cat(regions)):
            scale = pool.scales[level]
            x0, y0, x1, y1 = (region * scale).tolist()
            # RoI align enlarges each region to at least one cell. The interpolation reads one more cell.
            cells = [(math.floor(a), math.ceil(max(b, a + 1)) + 1) for a, b in ((y0, y1), (x0, x1))]
            crop = _cut_window(levels, level, image, *cells)
            shifted = region - region.new_tensor([crop.left, crop.top] * 2) / scale
            crops.append(crop)
            pooled.append(roi_align(crop.values[None], [shifted[None]], pool.output_size, scale, pool.sampling_ratio))
        logits, regression = self.heads.box_predictor(self.heads.box_head(torch.cat(pooled)))
        return crops, {CLASSES: logits, BOXES: regression}


class AnchorDetector(TorchvisionDetector):
    """RetinaNet, FCOS, SSD and SSDlite: each anchor is a candidate, with a box and a score for each class."""

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        super().__init__(model, prefix)
        self.first_class = 1 if isinstance(model, SSD) else 0

    def watched(self) -> dict[str, nn.Module]:
        model = self.model
        return {MODEL: model, HEAD: model.head, ANCHORS: model.anchor_generator, TRANSFORM: model.transform}

    def list_image_candidates(self, run: ModelRun, batch: Batch) -> list[ImageCandidates]:
        head, (images, _) = run.last_output(HEAD), run.last_output(TRANSFORM)
        outputs = [{name: values[i] for name, values in head.items()} for i in range(len(images.image_sizes))]
        return list(map(ImageCandidates, outputs, run.last_output(ANCHORS), images.image_sizes, batch.sizes))

    def score(self, outputs: Mapping[str, Tensor]) -> Tensor:
        if isinstance(self.model, SSD):
            return outputs[CLASSES].softmax(-1)
        scores = outputs[CLASSES].sigmoid()
        return (scores * outputs["bbox_ctrness"].sigmoid()).sqrt() if isinstance(self.model, FCOS) else scores

    def decode(self, candidates: ImageCandidates, labels: Tensor) -> Tensor:
        coder = self.model.box_coder
        decode = coder.decode if isinstance(self.model, FCOS) else coder.decode_single
        return _to_original_image(decode(candidates.outputs[BOXES], candidates.anchors), candidates)

    def list_levels(self, run: ModelRun) -> list[Tensor]:
        return list(run.calls[HEAD][-1].args[0]) if isinstance(self.model.head, RetinaNetHead) else []

    def rerun_heads(self, run: ModelRun, levels: list[Tensor], rows: list[Tensor], output: str) -> HeadRerun | None:
        branch, last_layer = self.model.head.classification_head, CLASSES
        if output == BOXES:
            branch, last_layer = self.model.head.regression_head, "bbox_reg"
        layers = [layer for layer in (*branch.conv.modules(), getattr(branch, last_layer)) if not [*layer.children()]]
        if not all(map(_is_local, layers)):
            return None
        reach = sum(layer.kernel_size[0] // 2 for layer in layers if isinstance(layer, nn.Conv2d))
        cell_counts = [level.shape[2] * level.shape[3] for level in levels]
        anchors_per_cell = run.last_output(HEAD)[output].shape[1] // sum(cell_counts)
        crops, windows, anchor_indices = [], [], []
        for image, row in ((i, row) for i, image_rows in enumerate(rows) for row in image_rows.tolist()):
            cell, anchor = divmod(row, anchors_per_cell)
            level = 0
            while cell >= cell_counts[level]:
                cell, level = cell - cell_counts[level], level + 1
            down, across = divmod(cell, levels[level].shape[3])
            cells = ((centre - reach, centre + reach + 1) for centre in (down, across))
            crop = _cut_window(levels, level, image, *cells)
            height, width = crop.values.shape[1:]
            top, left = crop.top - down + reach, crop.left - across + reach
            padding = [left, 2 * reach + 1 - left - width, top, 2 * reach + 1 - top - height]
            crops.append(crop)
            windows.append([F.pad(values, padding) for values in (crop.values, torch.ones_like(crop.values[:1]))])
            anchor_indices.append(anchor)
        values = _convolve(layers, *map(torch.stack, zip(*windows))).flatten(1).unflatten(1, (anchors_per_cell, -1))
        return crops, {output: values[range(len(values)), anchor_indices]}


def _is_local(layer: nn.Module) -> bool:
    """Return whether a layer works on each cell separately, or is a convolution that keeps the grid's size."""
    if not isinstance(layer, nn.Conv2d):
        return isinstance(layer, (nn.ReLU, nn.BatchNorm2d))
    (height, width), ones = layer.kernel_size, (1, 1)
    is_dense = (layer.stride, layer.dilation, layer.padding_mode) == (ones, ones, "zeros")
    return is_dense and height == width and height % 2 == 1 and layer.padding == (height // 2, width // 2)


def _convolve(layers: Sequence[nn.Module], windows: Tensor, is_inside: Tensor) -> Tensor:
    """Return the layers' output at the centre of windows (B,C,h,w).

    The convolutions on the full pyramid level pad with zeros. Therefore, cells outside the level are set to zero before
    each convolution.
    """
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            windows = F.conv2d(windows * is_inside, layer.weight, layer.bias, groups=layer.groups)
            is_inside = F.pad(is_inside, [-(layer.kernel_size[0] // 2)] * 4)
        else:
            windows = layer(windows)
    return windows


def _cut_window(levels: Sequence[Tensor], level_number: int, image: int, *ranges: tuple[int, int]) -> Crop:
    """Cut a crop from a pyramid level: rows and columns (start, end), clipped to the level; at least one cell."""
    level = levels[level_number]
    limits = [(start, end, length) for (start, end), length in zip(ranges, level.shape[2:])]
    (y0, y1), (x0, x1) = ((min(max(start, 0), length - 1), min(end, length)) for start, end, length in limits)
    return Crop(level_number, y0, x0, level.detach()[image, :, y0:y1, x0:x1].clone().requires_grad_())


def _is_unchanged(start: Tensor, level: Tensor) -> bool:
    """Return whether a pyramid level equals the leaf `start`, because no operation between them changes values."""
    nodes = list_graph_nodes(level)
    return bool(nodes) and all(map(is_passthrough, nodes)) and any(leaf is start for leaf in list_leaves(level))


def _is_close(values: Tensor, expected: Tensor) -> bool:
    tolerance = OTHER_ORDER_ULPS * torch.finfo(values.dtype).eps
    tolerance = max(tolerance, TF32_TOLERANCE) if values.is_cuda and values.dtype == torch.float32 else tolerance
    return bool((values - expected).abs().max() <= tolerance * expected.abs().max())


def _select_labels(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.gather(1, labels[:, None])[:, 0]


def _to_original_image(boxes: Tensor, candidates: ImageCandidates) -> Tensor:
    """Convert boxes from the resized to the original image, and clip the boxes to the image."""
    boxes = operations.clip_boxes_to_image(boxes, candidates.resized_size)
    return resize_boxes(boxes, candidates.resized_size, candidates.original_size)
