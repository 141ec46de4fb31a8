"""Test ultralytics' networks if that is installed: against its own suppression, and autograd by hand.

The letterbox tests need only this package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import gradcam
from gradcam import adapters
from gradcam.adapters.base import Detections, DetectorAdapter
from gradcam.adapters.yolo import Letterbox, load_yolo
from gradcam.errors import ModelError
from gradcam.hooks.containers import list_tensors, to_batch
from gradcam.targets.boxes import Box, MissedBox

CLASSES, SIZE = 4, (64, 96)
EXTRA = {"Segment": ["nc", 8, 16], "Pose": ["nc", [5, 3]]}
# Each head, and whether its boxes come from the branch that needs no suppression.
CASES = [("Detect", False), ("v10Detect", False), ("v10Detect", True), ("Segment", False), ("Pose", False)]


@pytest.fixture
def ultralytics() -> Any:
    return pytest.importorskip("ultralytics")


def configure(head: str) -> dict[str, Any]:
    """Return the configuration of a backbone with three levels, and the top-down path to the second level."""
    backbone = [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]], [-1, 1, "C2f", [16, True]]]
    backbone += [[-1, 1, "Conv", [16, 3, 2]], [-1, 1, "Conv", [24, 3, 2]], [-1, 1, "Conv", [32, 3, 2]]]
    upward = [[-1, 1, "nn.Upsample", [None, 2, "nearest"]], [[-1, 4], 1, "Concat", [1]], [-1, 1, "C2f", [24]]]
    ending = [[[3, 8, 5], 1, head, EXTRA.get(head, ["nc"])]]
    return {"nc": CLASSES, "kpt_shape": [5, 3], "backbone": backbone, "head": upward + ending}


def build(head: str = "Detect", *, end_to_end: bool = False) -> Any:
    tasks = importlib.import_module("ultralytics.nn.tasks")
    kinds = {"Segment": "SegmentationModel", "Pose": "PoseModel"}
    model = getattr(tasks, kinds.get(head, "DetectionModel"))(configure(head), verbose=False).double().eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 4 and "dfl" not in name:
                parameter.normal_(0, 1.5 / parameter[0].numel() ** 0.5)
            elif parameter.ndim == 1:
                parameter.normal_(0 if name.endswith("bias") else 1, 0.3)
    if hasattr(model.model[-1], "one2one_cv2"):
        model.model[-1].end2end = end_to_end
    return model


def make_pictures() -> Tensor:
    return torch.rand(2, 3, *SIZE, dtype=torch.float64)


def find(model: nn.Module) -> Any:
    return adapters.find_family(model, DetectorAdapter)


def read(model: Any, pictures: Tensor) -> list[Detections]:
    family, batch = find(model), to_batch(pictures)
    return family.read(batch.run(family.wrap(model)), batch)


def explain(model: Any, pictures: Tensor, target: Any) -> gradcam.Explanation:
    return gradcam.explain(model, pictures, target=target)


def suppress(model: Any, output: Any, threshold: float) -> list[Tensor]:
    """Return rows of corners, score and label as ultralytics computes them from the output of a network."""
    is_new = importlib.util.find_spec("ultralytics.utils.nms") is not None
    module = importlib.import_module(f"ultralytics.utils.{'nms' if is_new else 'ops'}")
    rows = list_tensors(output)[0].detach().clone()
    return module.non_max_suppression(rows, threshold, 0.7, nc=CLASSES)


@pytest.mark.parametrize(("head", "end_to_end"), CASES)
def test_boxes_are_those_of_ultralytics(ultralytics: Any, head: str, end_to_end: bool) -> None:
    model, pictures = build(head, end_to_end=end_to_end), make_pictures()
    everything = read(model, pictures)
    middle = min(actual.scores.median().item() for actual in everything) + 1e-6
    for threshold in (0.25, middle):
        find(model).set_threshold(threshold)
        actual, expected = read(model, pictures), suppress(model, model(pictures), threshold)
        for image_detections, rows in zip(actual, expected, strict=True):
            assert len(rows) > 0
            assert torch.equal(image_detections.labels, rows[:, 5].long())
            assert torch.allclose(image_detections.scores, rows[:, 4].double(), rtol=1e-6)
            assert torch.allclose(image_detections.boxes, rows[:, :4].double(), rtol=1e-6, atol=1e-4)
    counts = [
        sum(len(image_detections.scores) for image_detections in detections) for detections in (actual, everything)
    ]
    assert counts[0] < counts[1]


def list_by_hand(model: Any, output: Any, threshold: float) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the score and the corners of each box of each image, with their graph.

    The box is the candidate whose score ultralytics itself reports.
    """
    rows, actual = list_tensors(output)[0], []
    for i, image_boxes in enumerate(suppress(model, output, threshold)):
        candidates = []
        for *_, score, label in image_boxes[:, :6].tolist():
            if model.model[-1].end2end:
                row = rows[i, int((rows[i, :, 4] - score).abs().argmin())]
                candidates.append((row[4], row[:4]))
            else:
                place = int((rows[i, 4 + int(label)] - score).abs().argmin())
                x, y, width, height = rows[i, :4, place]
                corners = torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
                candidates.append((rows[i, 4 + int(label), place], corners))
        actual.append(candidates)
    return actual


def by_hand(model: Any, pictures: Tensor, number: int, edge: int | None, run: Callable[[Tensor], Any]) -> Tensor:
    """Compute relu(sum over channels of gradient x activation) at each level that the head reads, resized and added."""
    level_outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        level_outputs.append(output.clone())
        return level_outputs[-1]

    handles = [model.model[index].register_forward_hook(keep) for index in sorted(model.model[-1].f)]
    try:
        output = run(pictures.clone().requires_grad_())
    finally:
        for handle in handles:
            handle.remove()
    maps = []
    for i, candidates in enumerate(list_by_hand(model, output, 0.25)):
        value = candidates[number][0] if edge is None else candidates[number][1][edge]
        gradients = torch.autograd.grad(value, level_outputs, retain_graph=True, allow_unused=True)
        levels = [(a * g)[i].sum(0).relu() for a, g in zip(level_outputs, gradients) if g is not None]
        finest = (SIZE[0] // 8, SIZE[1] // 8)
        resized = [interpolate(level[None, None], finest, mode="bicubic").clamp(min=0) for level in levels]
        maps.append(torch.cat(resized).sum((0, 1)))
    return torch.stack(maps)


def assert_alike(maps: Tensor, expected: Tensor) -> None:
    assert expected.flatten(1).any(1).all()
    assert torch.allclose(maps.double(), expected, rtol=1e-6, atol=1e-6 * expected.max().item())


@pytest.mark.parametrize("edge", [None, "right"])
@pytest.mark.parametrize(("head", "end_to_end"), CASES)
def test_maps_are_autograd_by_hand(ultralytics: Any, head: str, end_to_end: bool, edge: str | None) -> None:
    model, pictures = build(head, end_to_end=end_to_end), make_pictures()
    if end_to_end:
        detach(model)  # older versions do this anyway
        by_itself = build(head, end_to_end=True)
        by_itself.load_state_dict(model.state_dict())
        connect(by_itself)
    else:
        by_itself = model
    explanation = explain(model, pictures, Box([0, 1], edge))
    for k in (0, 1):
        expected = by_hand(by_itself, pictures, k, None if edge is None else 2, by_itself)
        assert_alike(explanation.maps[:, k], expected)


def detach(model: Any) -> None:
    """Make the head detach the input of its one-to-one branch, as versions up to 8.3 do."""
    head = model.model[-1]
    run = head.forward
    head.forward = lambda levels: run([level.detach() for level in levels])


def connect(model: Any) -> None:
    """Make the head compute its one-to-one branch without detaching, by a loop."""
    head = model.model[-1]

    def run(levels: list[Tensor]) -> Any:
        branches = zip(levels, head.one2one_cv2, head.one2one_cv3)
        joined = [torch.cat([box(level), label(level)], 1).flatten(2) for level, box, label in branches]
        sides, logits = torch.cat(joined, 2).split([joined[0].shape[1] - CLASSES, CLASSES], 1)
        distances = head.dfl(sides)
        strides = [(int(stride), *level.shape[2:]) for level, stride in zip(levels, head.stride)]
        places = [(x + 0.5, y + 0.5, s) for s, rows, columns in strides for y in range(rows) for x in range(columns)]
        x, y, stride = torch.tensor(places, dtype=torch.float64).unbind(1)
        left, top, right, bottom = distances.unbind(1)
        corners = torch.stack([x - left, y - top, x + right, y + bottom], -1) * stride[:, None]
        scores, labels = logits.sigmoid().mT.flatten(1).topk(min(300, len(places)))
        rows = (labels // CLASSES)[..., None].expand(-1, -1, 4)
        return torch.cat([corners.gather(1, rows), scores[..., None], (labels % CLASSES)[..., None]], -1)

    head.forward = run


def test_model_is_as_before(ultralytics: Any) -> None:
    model, pictures = build("v10Detect", end_to_end=True), make_pictures()
    detach(model)
    with torch.inference_mode():
        model(pictures)  # Predict without gradients first: the values that the head caches then have no gradient.
    head = model.model[-1]
    before = (head.shape, head.anchors, head.strides)
    assert head.anchors.is_inference()
    explain(model, pictures, Box(0))
    assert list(map(id, before)) == list(map(id, (head.shape, head.anchors, head.strides)))
    head.shape = None
    output = list_tensors(model(pictures.requires_grad_()))[0]
    assert torch.autograd.grad(output.sum(), pictures, allow_unused=True) == (None,)


def test_head_that_has_not_run_has_no_cache_then(ultralytics: Any) -> None:
    model = build()
    head = model.model[-1]
    before = set(vars(head))
    explain(model, make_pictures()[:, :, :32], Box(0))
    assert set(vars(head)) == before


@pytest.mark.parametrize("label", [None, 2])
@pytest.mark.parametrize("head", ["Detect", "v10Detect"])
def test_candidates_are_all_that_the_head_has(ultralytics: Any, head: str, label: int | None) -> None:
    """Check the candidates of both heads.

    Without suppression, the one-to-many head returns them all. With equal branches, the one-to-one head returns the
    same, without the limit of 300.
    """
    model, pictures = build(head), make_pictures()
    family, batch = find(model), to_batch(pictures)
    x, y, width, height, *scores = list_tensors(model(pictures))[0].unbind(1)
    corners = torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], -1)
    of_class = torch.stack(scores[:CLASSES], -1)
    if head == "v10Detect":
        layers = model.model[-1]
        layers.one2one_cv2.load_state_dict(layers.cv2.state_dict())
        layers.one2one_cv3.load_state_dict(layers.cv3.state_dict())
        layers.end2end = True
    for i, actual in enumerate(family.list_candidates(batch.run(family.wrap(model)), batch, label)):
        assert torch.allclose(actual.boxes, corners[i], rtol=1e-9, atol=1e-9)
        expected = of_class[i].max(1).values if label is None else of_class[i, :, label]
        assert torch.allclose(actual.scores, expected, rtol=1e-9)
        assert torch.equal(actual.labels, of_class[i].argmax(1) if label is None else torch.full((126,), label))


def test_missed_box(ultralytics: Any) -> None:
    """Compute the largest product of score and overlap by a loop."""
    model, pictures = build(), make_pictures()
    box = (20, 10, 70, 50)
    explanation = explain(model, pictures, MissedBox(box, 1))
    rows = list_tensors(model(pictures))[0]
    for i in range(2):
        best = 0.0
        for x, y, width, height, *scores in rows[i].T.tolist():
            across = min(x + width / 2, 70) - max(x - width / 2, 20)
            down = min(y + height / 2, 50) - max(y - height / 2, 10)
            shared = max(across, 0) * max(down, 0)
            best = max(best, scores[1] * shared / (width * height + 50 * 40 - shared))
        assert explanation.scores[i, 0].item() == pytest.approx(best, rel=1e-6)


@gradcam.method("altered", summary="how far activations are from those of the first picture")
def altered(activations: Tensor) -> Tensor:
    return (activations - activations[:1]).norm(dim=1)


def test_painted_square_is_where_it_was_painted(ultralytics: Any) -> None:
    """Check the full network on a letterboxed image, at each level and at all levels."""
    tasks = importlib.import_module("ultralytics.nn.tasks")
    torch.manual_seed(0)
    model = tasks.DetectionModel("yolov8n.yaml", verbose=False).eval()
    picture = np.full((120, 240, 3), 100, np.uint8)
    painted = picture.copy()
    painted[60:100, 30:70] = 255
    letterbox = Letterbox(256)
    pictures = torch.stack([letterbox(picture), letterbox(painted)])
    top, left, _, width = letterbox.window(120, 240)
    scale = width / 240
    first, last = round(top + 60 * scale), round(top + 100 * scale)
    begin, end = round(left + 30 * scale), round(left + 70 * scale)
    layers = find(model).own_layers
    target = MissedBox((begin, first, end, last))
    for target_layers in (layers, *([layer] for layer in layers)):
        explanation = gradcam.explain(model, pictures, layers=target_layers, join="sum", target=target, method=altered)
        energy = explanation.heatmaps[1, 0].square()
        down, across = divmod(int(energy.argmax()), 256)
        assert first < down < last
        assert begin < across < end
        if target_layers != layers[-1:]:  # the last level has pooled over the full image
            assert energy[first - 32 : last + 32, begin - 32 : end + 32].sum() > 0.9 * energy.sum()


def test_layers_and_labels(ultralytics: Any) -> None:
    model = build()
    model.names = {1: "dog", 0: "cat", 2: "cup", 3: "car"}
    family = find(model)
    assert family.own_layers == ["model.3", "model.8", "model.5"]
    assert family.layer == "model.3"
    assert family.labels == ["cat", "dog", "cup", "car"]
    assert explain(model, make_pictures(), Box(0)).layer == "model.3 + model.8 + model.5"


def test_boxes_that_are_turned(ultralytics: Any) -> None:
    tasks = importlib.import_module("ultralytics.nn.tasks")
    settings = configure("OBB")
    model = tasks.OBBModel({**settings, "head": [*settings["head"][:-1], [[3, 8, 5], 1, "OBB", ["nc", 1]]]})
    with pytest.raises(ModelError, match="OBB, the head of this OBBModel, is not supported"):
        explain(model.eval(), make_pictures().float(), Box(0))


def test_checkpoint(ultralytics: Any, tmp_path: Path) -> None:
    model = build().float()
    model.names = dict(enumerate(["cat", "dog", "cup", "car"]))
    model.args, model.task = {}, "detect"
    torch.save({"model": model, "train_args": {}}, tmp_path / "best.pt")
    loaded, labels = load_yolo(tmp_path / "best.pt")
    assert labels == ["cat", "dog", "cup", "car"]
    assert not loaded.training
    pictures = make_pictures().float()
    assert torch.equal(list_tensors(loaded(pictures))[0], list_tensors(model(pictures))[0])


@pytest.mark.parametrize("content", [None, b"no checkpoint"])
def test_file_that_is_no_checkpoint(ultralytics: Any, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "best.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match="There is no file" if content is None else "ultralytics cannot read it"):
        load_yolo(path)


def test_without_ultralytics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ultralytics", None)
    with pytest.raises(ModelError, match="which is not installed"):
        load_yolo(tmp_path / "best.pt")


@pytest.mark.parametrize(
    ("size", "window"),
    [((100, 200), (16, 0, 32, 64)), ((200, 100), (0, 16, 64, 32)), ((64, 64), (0, 0, 64, 64)), ((10, 7), (0, 9, 64, 45)),
     ((3, 1000), (31, 0, 1, 64))],
)  # fmt: skip
def test_window(size: tuple[int, int], window: tuple[int, int, int, int]) -> None:
    assert Letterbox(64).window(*size) == window
    image = np.zeros((*size, 3), np.uint8)
    grey = Letterbox(64)(image) == 114 / 255
    top, left, height, width = window
    assert not grey[:, top : top + height, left : left + width].any()
    assert int((~grey).sum()) == 3 * height * width


@pytest.mark.parametrize("size", [(100, 200), (37, 23), (200, 150), (64, 64)])
def test_letterbox_is_that_of_ultralytics(ultralytics: Any, size: tuple[int, int]) -> None:
    """Compare up to the last bit, because ultralytics computes in integers."""
    augment = importlib.import_module("ultralytics.data.augment")
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    expected = augment.LetterBox((96, 96), auto=False)(image=image)
    actual = (Letterbox(96)(image) * 255).permute(1, 2, 0).numpy()
    assert np.abs(actual - expected.astype(float)).max() <= 1.001
