"""Make small torchvision detectors, and explain their boxes by hand: hooks, autograd through the model, loops."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, KeypointRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.ssd import SSD
from torchvision.models.detection.ssdlite import SSDLiteHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from tests.oracles import cubic_kernel

CLASSES, CHANNELS = 4, 6
SIZES = ((3, 40, 56), (3, 44, 36))  # two image sizes, both smaller than the canvas

Read = Callable[[Any, "RecordedValues"], Sequence[Sequence[Tensor]]]


def make_pictures(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(size, generator=generator, dtype=dtype) for size in SIZES]


class Steps(nn.Module):
    """A backbone without a top-down path: each level is computed from the one before. A black image gives zeros."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.out_channels = list(channels)
        self.first = nn.Conv2d(3, channels[0], 5, stride=4, padding=2, bias=False)
        pairs = itertools.pairwise(channels)
        self.others = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False) for a, b in pairs)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        levels = [self.first(x).relu()]
        for step in self.others:
            levels.append(step(levels[-1]).relu())
        return OrderedDict((str(i), level) for i, level in enumerate(levels))


def make_pyramid(extra: Any = None) -> nn.Module:
    body = nn.Sequential()
    for name, in_channels, stride in (("a", 3, 4), ("b", 5, 2), ("c", 5, 2)):
        body.add_module(name, nn.Sequential(nn.Conv2d(in_channels, 5, 5, stride, padding=2, bias=False), nn.ReLU()))
    return BackboneWithFPN(body, {"a": "0", "b": "1", "c": "2"}, [5] * 3, CHANNELS, extra)


def make_regions(kind: type[nn.Module], *, second: bool = False, **more: Any) -> nn.Module:
    shape = (CHANNELS, 7, 7)
    head = FastRCNNConvFCHead(shape, [5, 5], [16], nn.BatchNorm2d) if second else TwoMLPHead(math.prod(shape), 16)
    anchors = AnchorGenerator(((8,), (16,), (24,), (32,)), ((0.5, 1.0, 2.0),) * 4)
    # This scale of the weights makes boxes of several levels.
    pool = partial(MultiScaleRoIAlign, ["0", "1", "2"], sampling_ratio=2, canonical_scale=20, canonical_level=3)
    return kind(
        make_pyramid(), num_classes=None, min_size=48, max_size=80, rpn_anchor_generator=anchors,
        box_roi_pool=pool(output_size=7), box_head=head, box_predictor=FastRCNNPredictor(16, CLASSES),
        rpn_pre_nms_top_n_test=40, rpn_post_nms_top_n_test=30, box_score_thresh=0.0, box_detections_per_img=12,
        **{name: make(pool) for name, make in more.items()},
    )  # fmt: skip


MASKS = {
    "mask_roi_pool": lambda pool: pool(output_size=4),
    "mask_head": lambda _: MaskRCNNHeads(CHANNELS, [4], 1),
    "mask_predictor": lambda _: MaskRCNNPredictor(4, 4, CLASSES),
}
KEYPOINTS = {
    "keypoint_roi_pool": lambda pool: pool(output_size=4),
    "keypoint_head": lambda _: KeypointRCNNHeads(CHANNELS, [4]),
    "keypoint_predictor": lambda _: KeypointRCNNPredictor(4, 3),
}
MAX_DETECTIONS = {"score_thresh": 0.0, "detections_per_img": 12, "topk_candidates": 40}
RESIZED = {"min_size": 48, "max_size": 80}


def make_retinanet(norm: Any = None) -> nn.Module:
    anchors = AnchorGenerator(tuple((8 * 2**i, 12 * 2**i) for i in range(5)), ((0.5, 1.0),) * 5)
    head = RetinaNetHead(CHANNELS, 4, CLASSES, norm_layer=norm)
    pyramid = make_pyramid(LastLevelP6P7(5, CHANNELS))
    return RetinaNet(pyramid, CLASSES, anchor_generator=anchors, head=head, **RESIZED, **MAX_DETECTIONS)


def make_fcos() -> nn.Module:
    anchors = AnchorGenerator(tuple((8 * 2**i,) for i in range(4)), ((1.0,),) * 4)
    backbone = Steps([32] * 4)  # the group norm of the head has 32 groups
    backbone.out_channels = 32  # type: ignore[assignment]  # as this kind wants it
    return FCOS(backbone, CLASSES, anchor_generator=anchors, **RESIZED, **MAX_DETECTIONS)


def make_ssd(*, lite: bool = False) -> nn.Module:
    channels = [6, 8, 10]
    boxes = DefaultBoxGenerator([[2], [2, 3], [2]], scales=[0.2, 0.4, 0.7, 0.9])
    norm = partial(nn.BatchNorm2d, eps=1e-3)
    head = SSDLiteHead(channels, boxes.num_anchors_per_location(), CLASSES, norm) if lite else None
    return SSD(Steps(channels), boxes, (64, 48), CLASSES, head=head, **MAX_DETECTIONS)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "fasterrcnn": partial(make_regions, FasterRCNN), "fasterrcnn_v2": partial(make_regions, FasterRCNN, second=True),
    "maskrcnn": partial(make_regions, MaskRCNN, **MASKS),
    "keypointrcnn": partial(make_regions, KeypointRCNN, **KEYPOINTS), "retinanet": make_retinanet,
    "retinanet_v2": partial(make_retinanet, partial(nn.GroupNorm, 2)), "fcos": make_fcos, "ssd": make_ssd,
    "ssdlite": partial(make_ssd, lite=True),
}  # fmt: skip


def make_detector(kind: str, *, is_plain: bool = False) -> nn.Module:
    """Make a float64 detector whose scores depend on class and position.

    With `is_plain`, black pixels are zeros to it.
    """
    torch.manual_seed(sum(map(ord, kind)))
    model = KINDS[kind]().double().eval()
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "backbone" not in name and parameter.ndim > 1:
            deviation = 1.5 / math.sqrt(parameter[0].numel())
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * deviation
    if kind == "fcos":  # Boxes of a moderate size, so that their edges depend on the image.
        model.head.regression_head.bbox_reg.weight.data.mul_(0.02)
        model.head.regression_head.bbox_reg.bias.data.fill_(1.0)
    if is_plain:
        model.transform.image_mean, model.transform.image_std = [0.0] * 3, [1.0] * 3
    return model


@dataclass
class RecordedValues:
    """The values that hooks record in one run."""

    levels: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)


def run(
    model: nn.Module, pictures: Any, run_what: nn.Module | None = None, layer: str = "backbone"
) -> tuple[Any, RecordedValues]:
    """Return the output, with its graph from the layer's tensors on, and the recorded values."""
    recorded, handles = RecordedValues(), []

    def cut(module: nn.Module, args: object, output: Any) -> Any:
        for name, level in output.items() if isinstance(output, dict) else [("0", output)]:
            recorded.levels[name] = level.detach().requires_grad_()
        return OrderedDict(recorded.levels) if isinstance(output, dict) else recorded.levels["0"]

    def keep(module: nn.Module, args: Any, output: Any, *, name: str) -> None:
        recorded.inputs[name], recorded.outputs[name] = args, output

    handles.append(model.get_submodule(layer).register_forward_hook(cut))
    for name in ("transform", "head", "anchor_generator", "roi_heads", "roi_heads.box_predictor"):
        if name.partition(".")[0] in dict(model.named_children()):
            handles.append(model.get_submodule(name).register_forward_hook(partial(keep, name=name)))
    try:
        return (run_what or model)(pictures), recorded
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class ExpectedMaps:
    """The expected results per image and score: the map, from -inf to inf, and its heatmap."""

    scores: list[list[float]]
    maps: list[list[np.ndarray]]
    heatmaps: list[list[np.ndarray]]


def explain_by_hand(
    model: nn.Module, pictures: Sequence[Tensor], read: Read, names: Sequence[str] | None = None, **more: Any
) -> ExpectedMaps:
    """Compute ODAM: relu of the channel sum of gradient times activation at each level, added at the finest grid."""
    output, recorded = run(model, pictures, **more)
    images, _ = recorded.outputs["transform"]
    canvas, inner = images.tensors.shape[2:], images.image_sizes
    levels = [recorded.levels[name] for name in names or recorded.levels]
    scores = read(output, recorded)
    actual = ExpectedMaps([[float(item.detach()) for item in score] for score in scores], [], [])
    products: list[list[list[np.ndarray]]] = []
    used: set[int] = set()  # levels that at least one score depends on
    for i, image_values in enumerate(scores):
        products.append([])
        for score in image_values:
            entry = torch.autograd.grad(score, levels, retain_graph=True, allow_unused=True)
            used |= {k for k, gradient in enumerate(entry) if gradient is not None}
            pairs = zip(levels, entry)
            raw = [(0 * a if g is None else a * g)[i].sum(0).detach().numpy() for a, g in pairs]
            products[-1].append(raw)
    finest = tuple(levels[min(used)].shape[2:])
    for i, image_values in enumerate(products):
        actual.maps.append([])
        actual.heatmaps.append([])
        for raw in image_values:
            total = sum(lay(raw[k], inner[i], canvas, inner, finest) for k in sorted(used))
            actual.maps[-1].append(total)
            heatmap = sample(total, pictures[i].shape[1:], (0, 0), total.shape)
            actual.heatmaps[-1].append(heatmap / (heatmap.max() or 1))
    return actual


def lay(
    raw: np.ndarray, image_size: Sequence[int], canvas: Sequence[int], all_sizes: Sequence[Any], finest: Sequence[int]
) -> np.ndarray:
    """Resize a raw map from the canvas to the positive evidence over one image, at the grid of the finest level."""

    def cover(cells: Sequence[int], size: Sequence[int]) -> list[float]:
        return [size[axis] * cells[axis] / canvas[axis] for axis in (0, 1)]

    def count(cells: Sequence[int]) -> list[int]:
        return [math.ceil(max(cover(cells, size)[axis] for size in all_sizes) - 1e-6) for axis in (0, 1)]

    window = cover(raw.shape, image_size)
    sides = [sample(np.maximum(sign * raw, 0), count(raw.shape), (0, 0), window) for sign in (1, -1)]
    return sample(np.maximum(sides[0] - sides[1], 0), count(finest), (0, 0), count(raw.shape))


def sample(values: np.ndarray, size: Sequence[int], start: Sequence[float], extent: Sequence[float]) -> np.ndarray:
    """Resample part of a map by cubic interpolation, clamped at zero; border cells repeat."""
    for axis in (0, 1):
        weights = weigh_cells(values.shape[axis], size[axis], start[axis], extent[axis])
        values = np.moveaxis(np.tensordot(weights, values, (1, axis)), 0, axis)
    return np.maximum(values, 0)


@cache
def weigh_cells(cells: int, length: int, start: float, extent: float) -> np.ndarray:
    weights = np.zeros((length, cells))
    for out in range(length):
        centre = start + (out + 0.5) * extent / length - 0.5
        for cell in range(math.floor(centre) - 1, math.floor(centre) + 3):
            weights[out, min(max(cell, 0), cells - 1)] += cubic_kernel(centre - cell)
    return weights


def weigh_by_hand(
    model: nn.Module, recorded: RecordedValues, pictures: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return all candidates of each image: boxes (M,C,4) in image pixels and scores (M,C) per class."""
    images, _ = recorded.outputs["transform"]
    results = []
    for i, (picture, inner) in enumerate(zip(pictures, images.image_sizes)):
        if "roi_heads" in recorded.outputs:
            proposals = recorded.inputs["roi_heads"][1]
            first = sum(map(len, proposals[:i]))
            outputs = recorded.outputs["roi_heads.box_predictor"]
            logits, regression = (output[first : first + len(proposals[i])] for output in outputs)
            scores = logits.exp() / logits.exp().sum(1, keepdim=True)
            columns = regression.unflatten(1, (-1, 4)).unbind(1)
            boxes = torch.stack([decode(column, proposals[i], (10.0, 10.0, 5.0, 5.0)) for column in columns], 1)
        else:
            head = {key: item[i] for key, item in recorded.outputs["head"].items()}
            anchors = recorded.outputs["anchor_generator"][i]
            logits, regression = head["cls_logits"], head["bbox_regression"]
            scores = 1 / (1 + (-logits).exp())
            if isinstance(model, FCOS):
                scores = (scores / (1 + (-head["bbox_ctrness"]).exp())).sqrt()
                boxes = decode_distances(regression, anchors)
            elif isinstance(model, SSD):
                scores = logits.exp() / logits.exp().sum(1, keepdim=True)
                boxes = decode(regression, anchors, (10.0, 10.0, 5.0, 5.0))
            else:
                boxes = decode(regression, anchors, (1.0,) * 4)
            boxes = boxes[:, None].expand(-1, scores.shape[1], 4)
        scale = boxes.new_tensor([picture.shape[2] / inner[1], picture.shape[1] / inner[0]] * 2)
        most = boxes.new_tensor([inner[1], inner[0]] * 2)
        results.append((torch.minimum(boxes.clamp(min=0), most) * scale, scores))
    return results


def decode(changes: Tensor, anchors: Tensor, weights: Sequence[float]) -> Tensor:
    width, height = anchors[:, 2] - anchors[:, 0], anchors[:, 3] - anchors[:, 1]
    across = anchors[:, 0] + width / 2 + changes[:, 0] / weights[0] * width
    down = anchors[:, 1] + height / 2 + changes[:, 1] / weights[1] * height
    most = math.log(1000 / 16)
    width = width * (changes[:, 2] / weights[2]).clamp(max=most).exp()
    height = height * (changes[:, 3] / weights[3]).clamp(max=most).exp()
    return torch.stack([across - width / 2, down - height / 2, across + width / 2, down + height / 2], 1)


def decode_distances(changes: Tensor, anchors: Tensor) -> Tensor:
    width, height = anchors[:, 2] - anchors[:, 0], anchors[:, 3] - anchors[:, 1]
    across, down = (anchors[:, 0] + anchors[:, 2]) / 2, (anchors[:, 1] + anchors[:, 3]) / 2
    sides = [across - changes[:, 0] * width, down - changes[:, 1] * height]
    return torch.stack([*sides, across + changes[:, 2] * width, down + changes[:, 3] * height], 1)


def overlap(boxes: Tensor, box: Sequence[float]) -> Tensor:
    """Return the intersection over union of boxes (...,4) with one box."""
    sides = [torch.minimum(boxes[..., i + 2], torch.full_like(boxes[..., 0], box[i + 2])) for i in (0, 1)]
    starts = [torch.maximum(boxes[..., i], torch.full_like(boxes[..., 0], box[i])) for i in (0, 1)]
    shared = (sides[0] - starts[0]).clamp(min=0) * (sides[1] - starts[1]).clamp(min=0)
    areas = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    return shared / (areas + (box[2] - box[0]) * (box[3] - box[1]) - shared)


def assert_maps(explanation: Any, expected: ExpectedMaps) -> None:
    """Check scores, maps and heatmaps against the expected ones; maps are float32."""
    assert any(item.any() for image_maps in expected.maps for item in image_maps)
    for i, image_maps in enumerate(expected.maps):
        for k, entry in enumerate(image_maps):
            assert explanation.scores[i, k].item() == pytest.approx(expected.scores[i][k], rel=1e-6)
            np.testing.assert_allclose(explanation.maps[i, k].numpy(), entry, rtol=0, atol=1e-6 * entry.max())
            heatmap = expected.heatmaps[i][k]
            np.testing.assert_allclose(explanation.heatmaps[i][k].numpy(), heatmap, rtol=0, atol=1e-6)


def paint_squares() -> tuple[list[Tensor], Any]:
    """Return two black images with a coloured square each, and the squares: left, top, right, bottom."""
    pictures = [torch.zeros(3, 40, 56, dtype=torch.float64), torch.zeros(3, 44, 36, dtype=torch.float64)]
    squares = ((34, 26, 42, 34), (20, 30, 28, 38))
    for picture, (x0, y0, x1, y1) in zip(pictures, squares):
        picture[:, y0:y1, x0:x1] = torch.tensor([1.0, 0.6, 0.8], dtype=torch.float64)[:, None, None]
    return pictures, squares


def find_centre(energy: Tensor) -> list[float]:
    """Return the weighted mean position: across and down."""
    assert energy.any()
    down, across = (energy.sum(axis) for axis in (1, 0))
    return [float((line * (torch.arange(len(line)) + 0.5)).sum() / energy.sum()) for line in (across, down)]
