"""Test torchvision's detectors: boxes against autograd by hand through the full model, and on painted squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import gradcam
from gradcam.adapters import find_family
from gradcam.adapters.base import DetectorAdapter
from gradcam.cam import maps
from gradcam.targets import Box, MissedBox
from gradcam.targets.boxes import EDGES
from tests import detectors
from tests.detectors import KINDS, assert_maps, explain_by_hand, make_detector, make_pictures, overlap

PLACE, LABEL = (10.0, 8.0, 30.0, 26.0), 2
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", params=KINDS)
def detector(request: pytest.FixtureRequest) -> nn.Module:
    return make_detector(request.param)


def scores_of(numbers: Sequence[int]) -> Any:
    return lambda output, _: [[item["scores"][k] for k in numbers] for item in output]


@pytest.mark.parametrize("name", torchvision.models.list_models(torchvision.models.detection))
def test_every_model_has_its_reader(name: str) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, weights_backbone=None)
    family = find_family(model, DetectorAdapter)
    assert family is not None
    assert family.layer == "backbone"


def test_scores_of_boxes(detector: nn.Module) -> None:
    """Use two images of different sizes, both smaller than the canvas that the model pads them to."""
    pictures = make_pictures()
    explanation = gradcam.explain(detector, pictures, target=Box([0, 2, 5]))
    assert (explanation.layer, explanation.method) == ("backbone", "hirescam")
    assert_maps(explanation, explain_by_hand(detector, pictures, scores_of([0, 2, 5])))
    for instances, output in zip(explanation.instances or (), detector(pictures)):
        for instance, k in zip(instances, (0, 2, 5)):
            assert (instance.kind, instance.number, instance.index) == ("box", k, int(output["labels"][k]))
            assert instance.box == pytest.approx(output["boxes"][k].tolist())
            assert instance.score == pytest.approx(output["scores"][k].item())


def test_where_an_edge_is(detector: nn.Module) -> None:
    pictures = make_pictures()
    moved = 0
    for number, edge in enumerate(EDGES):
        expected = explain_by_hand(
            detector, pictures, lambda output, _, n=number: [item["boxes"][:4, n] for item in output]
        )
        explanation = gradcam.explain(detector, pictures, target=Box(range(4), edge=edge))
        assert_maps(explanation, expected)
        moved += sum(bool(item.any()) for image_maps in expected.maps for item in image_maps)
    assert moved > 4  # the other boxes touch the border of the image


def missed(model: nn.Module, pictures: Sequence[Tensor], label: int | None) -> Any:
    def read(output: Any, recorded: detectors.RecordedValues) -> list[list[Tensor]]:
        first = 0 if "RetinaNet" in type(model).__name__ or "FCOS" in type(model).__name__ else 1
        values = []
        for boxes, scores in detectors.weigh_by_hand(model, recorded, pictures):
            best = scores[:, first:].argmax(1) + first
            labels = best if label is None else torch.full_like(best, label)
            rows = torch.arange(len(scores))
            values.append([(scores[rows, labels] * overlap(boxes[rows, labels], PLACE)).max()])
        return values

    return read


@pytest.mark.parametrize("label", [LABEL, None])
def test_what_was_missed(detector: nn.Module, label: int | None) -> None:
    pictures = make_pictures()
    expected = explain_by_hand(detector, pictures, missed(detector, pictures, label))
    explanation = gradcam.explain(detector, pictures, target=MissedBox(PLACE, label))
    assert_maps(explanation, expected)
    assert (explanation.instances or ())[1][0].kind == "missed"


def test_one_level_alone(detector: nn.Module) -> None:
    pictures = make_pictures()
    explanation = gradcam.explain(detector, pictures, "backbone:0", target=Box([0, 1, 2, 3]))
    expected = explain_by_hand(detector, pictures, scores_of(range(4)), ["0"])
    assert_maps(explanation, expected)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, images: Any) -> Any:
        return self.inner(images)


@ALL_KINDS
def test_a_model_inside_another(kind: str) -> None:
    detector, pictures = make_detector(kind), make_pictures()
    around = Wrapper(detector)
    explanation = gradcam.explain(around, pictures, target=Box([0, 1]))
    assert explanation.layer == "inner.backbone"
    assert_maps(explanation, explain_by_hand(detector, pictures, scores_of([0, 1]), run_what=around))


LOCAL = ("fasterrcnn", "fasterrcnn_v2", "maskrcnn", "keypointrcnn", "retinanet")


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a backward pass through all of the heads")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hirescam", "layercam", "elementwise-gradcam"])
@pytest.mark.parametrize("edge", [None, "top"])
@pytest.mark.parametrize("kind", LOCAL)
def test_gradients_of_all_boxes_come_from_their_own_parts(
    kind: str, edge: str | None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector, pictures = make_detector(kind), make_pictures()
    target = Box(all, edge=edge)
    expected = gradcam.compare(detector, pictures, layers=["backbone"], methods=[method, "gradcam"], target=target)
    monkeypatch.setattr(maps, "jacobian", refuse)
    with pytest.raises(AssertionError, match="all of the heads"):
        gradcam.explain(detector, pictures, target=target, method="gradcam")
    explanation = gradcam.explain(detector, pictures, target=target, method=method)
    assert explanation.maps.shape[1] > 8
    torch.testing.assert_close(explanation.maps, expected["backbone", method].maps, rtol=1e-6, atol=1e-8)


class Relative(nn.Module):
    """A head that compares regions: each counts by its difference to the others."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, pooled: Tensor) -> Tensor:
        rows: Tensor = self.head(pooled)
        return rows - rows.mean(0)


def change_head(detector: Any) -> None:
    if hasattr(detector, "roi_heads"):
        detector.roi_heads.box_head = Relative(detector.roi_heads.box_head)
    else:
        detector.head.classification_head.conv[1].register_forward_hook(lambda module, args, output: 2 * output)


@pytest.mark.parametrize("kind", ["fasterrcnn", "retinanet"])
def test_where_heads_do_more_the_whole_of_them_is_differentiated(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    detector, pictures = make_detector(kind), make_pictures()[:1]
    change_head(detector)
    explanation = gradcam.explain(detector, pictures, target=Box([0, 1, 2]))
    assert_maps(explanation, explain_by_hand(detector, pictures, scores_of(range(3))))
    monkeypatch.setattr(maps, "jacobian", refuse)
    with pytest.raises(AssertionError, match="all of the heads"):
        gradcam.explain(detector, pictures, target=Box([0, 1, 2]))


@pytest.mark.parametrize("kind", ["fasterrcnn", "retinanet"])
@pytest.mark.parametrize("layer", ["backbone.body.c", "backbone.fpn"])
def test_at_other_layers(kind: str, layer: str) -> None:
    """Check layers before the pyramid levels, whose gradient goes through the pyramid."""
    detector, pictures = make_detector(kind), make_pictures()
    explanation = gradcam.explain(detector, pictures, layer, target=Box([0, 1]))
    assert_maps(explanation, explain_by_hand(detector, pictures, scores_of([0, 1]), layer=layer))


@ALL_KINDS
def test_pictures_of_one_size_may_come_as_a_tensor(kind: str) -> None:
    detector = make_detector(kind).float()
    pictures = torch.stack([make_pictures(torch.float32)[0]] * 2)
    pictures[1] = pictures[1].flip(-1)
    explanation = gradcam.explain(detector, pictures, target=Box([0, 1]))
    listed = gradcam.explain(detector, list(pictures), target=Box([0, 1]))
    assert explanation.heatmaps.any()
    torch.testing.assert_close(explanation.heatmaps, listed.heatmaps)


@ALL_KINDS
def test_the_map_lies_on_a_painted_square(kind: str) -> None:
    """Paint squares on black, which is zero at every layer: activations lie only on the square and within a cell of it.

    A map that covered the padded canvas would lie elsewhere.
    """
    detector = make_detector(kind, is_plain=True)
    pictures, squares = detectors.paint_squares()
    target = MissedBox([tuple(map(float, square)) for square in squares])
    explanation = gradcam.explain(detector, pictures, target=target, evidence="signed")
    for i, (x0, y0, x1, y1) in enumerate(squares):
        energy = explanation.heatmaps[i][i].abs().double()
        centre = detectors.find_centre(energy)

        assert x0 - 2 < centre[0] < x1 + 2
        assert y0 - 2 < centre[1] < y1 + 2
        assert energy[y0 - 8 : y1 + 8, x0 - 8 : x1 + 8].sum() > 0.75 * energy.sum()
