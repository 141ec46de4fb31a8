"""Test keypoints: against autograd by hand, against the models' own postprocessing, and on painted squares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.adapters import find_family
from gradcam.adapters.base import PoseAdapter
from gradcam.hooks.containers import to_batch
from gradcam.targets.keypoints import Keypoint
from tests import detectors
from tests.detectors import ExpectedMaps, explain_by_hand, make_detector, make_pictures, overlap

TOLERANCE = 1e-6
AXES = pytest.mark.parametrize("axis", [None, "x", "y"])
HEIGHT, WIDTH = 48, 32  # the size of ViTPose's images; patches have 8 pixels


def measure_by_hand(heatmap: Tensor, axis: str | None, first: float, step: float, temperature: float = 1.0) -> Tensor:
    """Return the maximum, or the softmax-weighted mean of the cell centres, which begin at `first` and are `step` apart."""
    if axis is None:
        return heatmap.max()
    weights = (heatmap / temperature).exp()
    total = torch.zeros((), dtype=heatmap.dtype)
    for y in range(heatmap.shape[0]):
        for x in range(heatmap.shape[1]):
            total = total + weights[y, x] * (first + step * (x if axis == "x" else y))
    return total / weights.sum()


def place_by_hand(heatmap: Tensor) -> tuple[int, int]:
    """Return the cell with the maximum: across and down."""
    cells = [(float(heatmap[y, x].detach()), x, y) for y in range(heatmap.shape[0]) for x in range(heatmap.shape[1])]
    return max(cells)[1:]


# Keypoint R-CNN: heatmaps over boxes


class Watch:
    """Record the heatmaps of Keypoint R-CNN's predictor, or replace them with the result of `instead`."""

    def __init__(self, model: Any, instead: Callable[[Tensor], Tensor] | None = None) -> None:
        self.heatmaps, self.instead = torch.empty(0), instead
        self.handle = model.roi_heads.keypoint_predictor.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        self.heatmaps = output if self.instead is None else self.instead(output)
        return None if self.instead is None else self.heatmaps


def explain_boxes(
    model: nn.Module, pictures: Sequence[Tensor], numbers: Sequence[int], axis: Any, box: int
) -> ExpectedMaps:
    watch = Watch(model)

    def read(output: Any, recorded: object) -> list[list[Tensor]]:
        scores, begin = [], 0
        for results in output:
            x0, y0, x1, y1 = results["boxes"][box].tolist()
            scores.append([])
            for number in numbers:
                heatmap = watch.heatmaps[begin + box, number]
                start, end, count = (x0, x1, heatmap.shape[1]) if axis == "x" else (y0, y1, heatmap.shape[0])
                step = (end - start) / count
                scores[-1].append(measure_by_hand(heatmap, axis, start + step / 2, step))
            begin += len(results["boxes"])
        return scores

    try:
        return explain_by_hand(model, pictures, read)
    finally:
        watch.handle.remove()


@AXES
@pytest.mark.parametrize("box", [0, 4])
def test_keypoints_in_boxes(axis: str | None, box: int) -> None:
    """Use two images of different sizes in one batch."""
    model, pictures = make_detector("keypointrcnn"), make_pictures()
    explanation = gradcam.explain(model, pictures, target=Keypoint([2, 0], axis, box=box))
    expected = explain_boxes(model, pictures, [2, 0], axis, box)
    assert (explanation.layer, explanation.method) == ("backbone", "hirescam")
    detectors.assert_maps(explanation, expected)


def test_what_each_map_is_of() -> None:
    model, pictures = make_detector("keypointrcnn"), make_pictures()
    watch = Watch(model)
    output = model(pictures)
    begins = [0, len(output[0]["boxes"])]
    explanation = gradcam.explain(model, pictures, target=Keypoint(all, box=1))
    for i, instances in enumerate(explanation.instances or ()):
        assert [item.number for item in instances] == [0, 1, 2]
        x0, y0, x1, y1 = output[i]["boxes"][1].tolist()
        for entry in instances:
            heatmap = watch.heatmaps[begins[i] + 1, entry.number]
            across, down = place_by_hand(heatmap)
            rows, columns = heatmap.shape
            point = (x0 + (across + 0.5) * (x1 - x0) / columns, y0 + (down + 0.5) * (y1 - y0) / rows)
            assert (entry.kind, entry.name, entry.index) == ("keypoint", f"keypoint {entry.number}", None)
            assert entry.box == pytest.approx((x0, y0, x1, y1))
            assert entry.point == pytest.approx(point)
            assert entry.score == pytest.approx(output[i]["scores"][1].item())
    explanation_of_y = gradcam.explain(model, pictures, target=Keypoint(1, "y"))
    assert [instances[0].name for instances in explanation_of_y.instances or ()] == ["keypoint 1, y"] * 2


@pytest.mark.parametrize("axis", ["x", "y"])
def test_places_are_those_of_torchvision(axis: str) -> None:
    """Check the keypoint against torchvision's.

    For a bell-shaped heatmap, its maximum and its mean are in the same place.
    """
    model, pictures = make_detector("keypointrcnn"), make_pictures()

    def put(output: Tensor) -> Tensor:
        generator, bells = torch.Generator().manual_seed(2), []
        for heatmap in output.flatten(0, 1):
            y, x = (int(torch.randint(3, size - 3, (), generator=generator)) for size in heatmap.shape)
            rows, columns = (torch.arange(size) for size in heatmap.shape)
            bells.append(60 * (-((rows[:, None] - y) ** 2 + (columns - x) ** 2) / 20.0).exp())
        return torch.stack(bells).reshape(output.shape) + output / 1000

    watch = Watch(model, put)
    output = model(pictures)
    for box in (0, 3, 6):
        explanation = gradcam.explain(model, pictures, target=Keypoint(all, axis, box=box))
        for i, instances in enumerate(explanation.instances or ()):
            x0, y0, x1, y1 = output[i]["boxes"][box].tolist()
            cells = (x1 - x0) / watch.heatmaps.shape[3], (y1 - y0) / watch.heatmaps.shape[2]
            for item, score in zip(instances, explanation.scores[i].tolist()):
                point = output[i]["keypoints"][box, item.number, :2].tolist()
                assert item.point is not None
                # The model searches the maximum on whole pixels of its upsampled heatmap.
                assert all(abs(item.point[k] - point[k]) <= cells[k] / 2 + 0.5 for k in (0, 1))
                assert score == pytest.approx(item.point["xy".index(axis)], abs=cells["xy".index(axis)] / 20)


def test_the_same_person_in_another_output() -> None:
    """Check that the most similar high-scoring box is used in another output, and the box's centre if there is none."""
    model, pictures = make_detector("keypointrcnn"), make_pictures()
    batch = to_batch(pictures)
    watch = Watch(model)
    for axis in (None, "x"):
        bound = Keypoint(1, axis, box=2).bind(model, batch)
        first = bound.target.score(bound.batch.run(bound.model), 2)
        changed = [picture.flip(2) for picture in pictures]
        again = first.target.score(bound.model(changed), 2)
        begin = 0
        for i, actual in enumerate(model(changed)):
            x0, y0, x1, y1 = first.instances[i][0].box
            alike = overlap(actual["boxes"], (x0, y0, x1, y1)) * actual["scores"]
            best = int(alike.argmax())
            begin, end, heatmap = begin, begin + len(alike), watch.heatmaps[begin + best, 1]
            start, stop = actual["boxes"][best, [0, 2]].tolist()
            step = (stop - start) / heatmap.shape[1]
            expected = measure_by_hand(heatmap, axis, start + step / 2, step)
            assert float(again.values[i, 0].detach()) == pytest.approx(float(expected.detach()), rel=TOLERANCE)
            begin = end
        model.roi_heads.score_thresh, threshold = 1.0, model.roi_heads.score_thresh
        nothing = first.target.score(bound.model(pictures), 2)
        model.roi_heads.score_thresh = threshold
        for i, instances in enumerate(first.instances):
            x0, _, x1, _ = instances[0].box
            assert float(nothing.values[i, 0]) == pytest.approx(0.0 if axis is None else (x0 + x1) / 2)


def test_a_painted_square_in_a_box() -> None:
    """Paint a square on black, which is zero at every layer."""
    model = make_detector("keypointrcnn", is_plain=True)
    pictures, squares = detectors.paint_squares()
    for i, (x0, y0, x1, y1) in enumerate(squares):
        boxes = model([pictures[i]])[0]["boxes"].detach()
        box = int(overlap(boxes, squares[i]).argmax())
        explanation = gradcam.explain(model, [pictures[i]], target=Keypoint(all, "x", box=box), evidence="signed")
        for heatmap in explanation.heatmaps[0]:
            centre = detectors.find_centre(heatmap.abs().double())
            assert x0 - 3 < centre[0] < x1 + 3
            assert y0 - 3 < centre[1] < y1 + 3


# ViTPose: heatmaps over the picture


def make_vitpose(*, classic: bool = False, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "mlp_ratio": 2}
    shape |= {"image_size": [HEIGHT, WIDTH], "patch_size": [8, 8], "out_indices": [3]} | more
    options = {"backbone_config": transformers.VitPoseBackboneConfig(**shape), "use_simple_decoder": not classic}
    torch.manual_seed(0)
    config = transformers.VitPoseConfig(**options, num_labels=4, scale_factor=2)
    model: nn.Module = transformers.VitPoseForPoseEstimation(config).double().eval()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            deviation = 0.2 if parameter.ndim < 2 else 1.0 / math.sqrt(parameter[0].numel())
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * deviation
    return model


def make_people(images: int = 2) -> Tensor:
    return torch.rand(images, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@AXES
@pytest.mark.parametrize("kind", ["simple", "classic", "levels"])
def test_keypoints_over_pictures(kind: str, axis: str | None) -> None:
    """Use two images in one batch. If there are several levels, the head reads the last."""
    model = make_vitpose(classic=kind == "classic", **({"out_indices": [1, 3]} if kind == "levels" else {}))
    pictures, activations = make_people(), []
    explanation = gradcam.explain(model, pictures, target=Keypoint([3, 1], axis), evidence="signed")
    assert explanation.layer == ("backbone.layernorm#1" if kind == "levels" else "backbone.layernorm")
    assert explanation.method == "hirescam"
    handle = model.backbone.layernorm.register_forward_hook(lambda module, args, output: activations.append(output))
    heatmaps = model(pictures).heatmaps
    handle.remove()
    for i in range(2):
        for k, number in enumerate((3, 1)):
            heatmap = heatmaps[i, number]
            side, count = (WIDTH, heatmap.shape[1]) if axis == "x" else (HEIGHT, heatmap.shape[0])
            score = measure_by_hand(heatmap, axis, 0.5, (side - 1) / (count - 1), 0.05)
            (gradient,) = torch.autograd.grad(score, activations[-1], retain_graph=True)
            cells = [float(g @ a) for g, a in zip(gradient[i].detach(), activations[-1][i].detach())]
            expected = np.array(cells).reshape(HEIGHT // 8, WIDTH // 8)
            assert abs(expected).max() > 0
            assert explanation.scores[i, k].item() == pytest.approx(float(score.detach()), rel=TOLERANCE)
            tolerance = TOLERANCE * abs(expected).max()
            np.testing.assert_allclose(explanation.maps[i, k].numpy(), expected, rtol=0, atol=tolerance)


def put_bells(model: Any, places: Sequence[tuple[int, int]], height: float = 1.0) -> None:
    """Replace each heatmap with a bell of this height around a cell, the output that these models are trained for."""

    def put(module: nn.Module, args: object, output: Tensor) -> Tensor:
        rows, columns = (torch.arange(size, dtype=output.dtype) for size in output.shape[2:])
        bells = [height * (-((rows[:, None] - y) ** 2 + (columns - x) ** 2) / (2 * 1.5**2)).exp() for x, y in places]
        return torch.stack(bells) + output * 1e-6

    model.head.register_forward_hook(put)


def test_places_are_those_of_vitpose() -> None:
    """Compare with the processor of ViTPose, for a crop that is the whole image."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("scipy")
    model, places = make_vitpose(), [(2, 2), (5, 9), (3, 5), (5, 2)]
    put_bells(model, places)
    pictures = make_people(1)
    processor = transformers.VitPoseImageProcessor(size={"height": HEIGHT, "width": WIDTH})
    box = (WIDTH * 0.1, HEIGHT * 0.1, WIDTH * 0.8, HEIGHT * 0.8)  # the processor enlarges this box by a quarter
    with torch.no_grad():
        output = model(pictures)
    actual = processor.post_process_pose_estimation(output, boxes=[[box]])
    points = actual[0][0]["keypoints"].double()
    for axis in ("x", "y"):
        explained = gradcam.explain(model, pictures, target=Keypoint(all, axis))
        for k, instance in enumerate((explained.instances or ())[0]):
            side, coordinate = (WIDTH, 0) if axis == "x" else (HEIGHT, 1)
            # The processor scales the distance between the outermost pixel centres to the full size of the image.
            expected = 0.5 + float(points[k, coordinate]) * (side - 1) / side
            assert instance.point is not None
            assert instance.point[coordinate] == pytest.approx(expected, abs=0.15)
            assert explained.scores[0, k].item() == pytest.approx(expected, abs=0.15)
            assert instance.score == pytest.approx(1.0, abs=1e-3)


def test_softmax_of_bells() -> None:
    """Check that at a temperature of 1 the mean is near the centre of the image, wherever the bells are."""
    model = make_vitpose()
    put_bells(model, [(1, 2), (6, 2), (3, 9), (6, 9)])
    pictures = make_people(1)
    sharp = gradcam.explain(model, pictures, target=Keypoint(all, "x")).scores[0]
    flat = gradcam.explain(model, pictures, target=Keypoint(all, "x", temperature=1.0)).scores[0]
    step = (WIDTH - 1) / 7
    assert sharp.tolist() == pytest.approx([0.5 + step * x for x in (1, 6, 3, 6)], abs=0.5)
    assert all(abs(item - WIDTH / 2) < 2.5 for item in flat.tolist())


def test_keypoints_are_called_as_the_model_does() -> None:
    model = make_vitpose()
    assert find_family(model, PoseAdapter).labels is None
    explanation = gradcam.explain(model, make_people(1), target=Keypoint([2]))
    assert [item.name for item in (explanation.instances or ())[0]] == ["keypoint 2"]
    model.config.id2label = {0: "nose", 1: "left eye", 2: "right eye", 3: "tail"}
    explanation = gradcam.explain(model, make_people(1), target=Keypoint([2, 0]))
    assert [item.name for item in (explanation.instances or ())[0]] == ["right eye", "nose"]


def test_a_painted_square() -> None:
    """Use a backbone whose patches do not mix and for which black is zero; each patch begins 2 pixels early."""
    model, pictures = make_vitpose(), torch.zeros(1, 3, HEIGHT, WIDTH, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if any(item in name for item in ("bias", "position", "cls", "attention")):
            parameter.data.zero_()
    pictures[..., 8:22, 16:22] = torch.rand(3, 14, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    explanation = gradcam.explain(model, pictures, target=Keypoint(all, "y"), evidence="signed")
    for raw in explanation.maps[0]:
        assert (raw[1:3, 2] != 0).all()
        raw[1:3, 2] = 0
        assert not raw.any()


# Other models


class Plain(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.body = nn.Conv2d(3, 6, 5, 4, 2, bias=False)
        self.head = nn.Conv2d(6, 3, 3, 1, 1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.wrap = wrap
        self.double().eval()

    def forward(self, images: Tensor) -> Any:
        return self.wrap(self.head(self.body(images).relu()))


WRAPPERS = [lambda item: item, lambda item: {"heatmaps": item}, lambda item: SimpleNamespace(heatmaps=item)]


@AXES
@pytest.mark.parametrize("wrap", WRAPPERS, ids=["tensor", "dict", "object"])
def test_heatmaps_of_any_model(wrap: Callable[[Tensor], Any], axis: str | None) -> None:
    model, pictures, activations = Plain(wrap), make_people(), []
    explanation = gradcam.explain(model, pictures, "body", target=Keypoint([1, 2], axis), evidence="signed")
    assert explanation.method == "hirescam"
    model.body.register_forward_hook(lambda module, args, output: activations.append(output))
    model.wrap = lambda item: item
    heatmaps = model(pictures)
    for i in range(2):
        for k, number in enumerate((1, 2)):
            heatmap = heatmaps[i, number]
            score = measure_by_hand(heatmap, axis, 2.0, 4.0)
            (gradient,) = torch.autograd.grad(score, activations[0], retain_graph=True)
            expected = (gradient[i] * activations[0][i]).sum(0).detach().numpy()
            assert explanation.scores[i, k].item() == pytest.approx(float(score.detach()), rel=TOLERANCE)
            tolerance = TOLERANCE * abs(expected).max()
            np.testing.assert_allclose(explanation.maps[i, k].numpy(), expected, rtol=0, atol=tolerance)
            across, down = place_by_hand(heatmap)
            instance = (explanation.instances or ())[i][k]
            assert instance.point == pytest.approx((across * 4 + 2, down * 4 + 2))
            assert (instance.number, instance.box) == (number, None)
            peak = float(heatmap.detach().max())
            assert instance.score == (pytest.approx(peak) if 0 <= peak <= 1 else None)


def test_the_layer_of_any_model() -> None:
    """Check that the default is the last layer of the coarsest grid: after it, the map resembles one of the heatmaps."""
    torch.manual_seed(0)
    narrow = [nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()]
    model = nn.Sequential(*narrow, nn.ConvTranspose2d(8, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 4, 1)).double().eval()
    explanation = gradcam.explain(model, make_people(), target=Keypoint(0))
    assert (explanation.layer, explanation.method) == ("3", "hirescam")
