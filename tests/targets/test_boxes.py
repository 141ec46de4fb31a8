"""Test boxes and places as targets: which boxes they select, the messages without a match, and D-RISE."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.adapters.base import Candidates
from gradcam.adapters.torchvision_detection import AnchorDetector
from gradcam.errors import TargetError
from gradcam.hooks.containers import to_batch
from gradcam.targets import Box, Instance, MissedBox
from gradcam.targets.boxes import NoBoxError
from tests.detectors import make_detector, make_pictures, overlap, run, weigh_by_hand
from tests.helpers import tiny_model
from tests.perturbation_oracles import enlarge

FIRST = make_pictures()[:1]


@pytest.fixture(scope="module")
def detector() -> nn.Module:
    return make_detector("retinanet")


def explain(model: nn.Module, target: Any, pictures: Sequence[Tensor] = FIRST, **options: Any) -> gradcam.Explanation:
    return gradcam.explain(model, list(pictures), target=target, **options)


@pytest.mark.parametrize("number", [all, "all", range(12), list(range(12)), tuple(range(12))])
def test_several_boxes(detector: nn.Module, number: Any) -> None:
    explanation = explain(detector, Box(number))
    assert [item.number for item in (explanation.instances or ())[0]] == list(range(12))
    for k in (0, 7):
        torch.testing.assert_close(explanation.maps[:, k], explain(detector, Box(k)).maps[:, 0])
        assert explanation.scores[0, k] == explanation.output[0]["scores"][k].float()


def test_boxes_of_one_class_alone(detector: nn.Module) -> None:
    output = detector(FIRST)[0]
    label = int(output["labels"][1])
    numbers = (output["labels"] == label).nonzero()[:, 0].tolist()
    explanation = explain(detector, Box(all, class_=label))
    assert [item.number for item in (explanation.instances or ())[0]] == numbers
    assert 0 < len(numbers) < len(output["labels"])


@pytest.mark.parametrize("kind", ["fasterrcnn", "retinanet", "ssd"])
@pytest.mark.parametrize("fewer", [3, 0])
def test_a_picture_with_fewer_boxes_has_blank_maps_behind_them(kind: str, fewer: int) -> None:
    model: Any = make_detector(kind)
    pictures = make_pictures()
    scores = [item["scores"].detach() for item in model(pictures)]
    few = min((0, 1), key=lambda i: float(scores[i][fewer]))
    getattr(model, "roi_heads", model).score_thresh = float(scores[few][fewer])
    output = model(pictures)
    explanation = explain(model, Box(all), pictures)
    counts = [len(item["scores"]) for item in output]
    assert counts[few] == fewer < counts[1 - few] == explanation.maps.shape[1]
    for i, count in enumerate(counts):
        assert len((explanation.instances or ())[i]) == count
        torch.testing.assert_close(explanation.scores[i, :count], output[i]["scores"].float())
        assert explanation.scores[i, count:].isnan().all()
        assert (explanation.classes[i, count:] == -1).all()  # type: ignore[index]  # boxes have classes
        assert not explanation.maps[i, count:].any()
        assert not explanation.heatmaps[i][count:].any()
        assert explanation.maps[i, :count].any() or not count


def test_no_box_above_the_threshold_lists_the_best_candidates() -> None:
    model: Any = make_detector("retinanet")
    model.score_thresh = 1.0
    output, recorded = run(model, FIRST)
    assert len(output[0]["scores"]) == 0
    ((boxes, scores),) = weigh_by_hand(model, recorded, FIRST)
    boxes, scores = boxes.detach(), scores.detach()
    best = scores.max(1).values.argsort(descending=True)[:3]
    for number in (all, 0):
        with pytest.raises(TargetError, match="No box was found in the image: no score is above") as caught:
            explain(model, Box(number))
        message = str(caught.value)
        for row in best.tolist():
            label = int(scores[row].argmax())
            sides = ",".join(f"{side:.0f}" for side in boxes[row, label].tolist())
            assert f"class {label} {float(scores[row, label]):.2g} at {sides}" in message
        assert "--missed" in message
        assert "MissedBox" in message


def test_each_listed_candidate_is_a_box_that_can_be_explained() -> None:
    """Check that candidates may extend beyond the image, although the place of a missed box may not."""
    boxes = [(-3.4, 2.0, 20.0, 18.6), (-9.0, 2.0, -1.0, 8.0), (5.0, -2.0, 9.0, 7.0)]
    candidates = [Instance("box", f"class {i}", i, box=box, score=0.5) for i, box in enumerate(boxes)]
    message = str(NoBoxError.of("No box was found", 0, candidates))
    assert "class 0 0.5 at 0,2,20,19; class 2 0.5 at 5,0,9,7." in message
    assert "class 1" not in message, "it is outside the image"
    for text in re.findall(r"at ([\d,]+)", message):
        MissedBox(tuple(map(int, text.split(","))))


MISTAKES: list[tuple[Any, str]] = [
    (lambda: Box(12), "There is no box 12 in the image: the numbers are 0 to 11"),
    (lambda: Box([0, 99]), "There is no box 99 in the image"),
    (lambda: Box(-1), "The box is -1, expected a number from 0"),
    (lambda: Box(True), "The box is True, expected a number"),
    (lambda: Box("first"), "The box is 'first', expected a number"),
    (lambda: Box(0, edge="upper"), "There is no edge 'upper': choose one of left, top, right, bottom"),
    (lambda: MissedBox((50, 60, 90, 90), 1), r"The box \(50.0, 60.0, 90.0, 90.0\) is outside the image, 56 x 40 pixels"),
    (lambda: MissedBox((9, 8, 5, 20)), r"The box is \(9, 8, 5, 20\), expected left, top, right, bottom in pixels"),
    (lambda: MissedBox((1, 2, 3)), r"expected left, top, right, bottom"),
    (lambda: MissedBox(7), r"expected left, top, right, bottom"),
    (lambda: MissedBox((1, 2, 30, 30), "person"), "has no class names: pass the index of 'person'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_what_cannot_be(detector: nn.Module, make: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        explain(detector, make())


def test_which_picture_lacks_the_box() -> None:
    model: Any = make_detector("retinanet")
    pictures = make_pictures()
    last = [float(item["scores"][-1].detach()) for item in model(pictures)]
    fewer = int(last[1] < last[0])
    model.score_thresh = last[fewer]
    with pytest.raises(TargetError, match=f"There is no box 11 in image {fewer}: the numbers are"):
        explain(model, Box(11), pictures)


def test_a_classifier_has_no_boxes() -> None:
    for target in (Box(0), MissedBox((1, 2, 8, 9))):
        with pytest.raises(TargetError, match="Sequential is not a supported detector. Pass target="):
            gradcam.explain(tiny_model(), torch.rand(1, 3, 16, 16), target=target)


@pytest.mark.parametrize("target", [Box(0), MissedBox((10, 10, 30, 30))])
def test_other_views_have_the_place_elsewhere(detector: nn.Module, target: Any) -> None:
    with pytest.raises(TargetError, match="leave augmentation= out"):
        explain(detector, target, augmentation="flip")


def test_where_no_candidate_is() -> None:
    """Use a model whose anchors of one level all lie in the upper left corner."""
    model: Any = make_detector("fasterrcnn")
    model.rpn._pre_nms_top_n = {"training": 1, "testing": 1}
    model.rpn._post_nms_top_n = {"training": 1, "testing": 1}
    model.roi_heads.box_predictor.bbox_pred.weight.data.zero_()
    model.roi_heads.box_predictor.bbox_pred.bias.data.zero_()
    (actual,) = explain(model, Box(0)).instances[0]  # type: ignore[index]  # of one picture
    left, top, right, bottom = actual.box or ()  # All candidates have this box, because there is a single proposal.
    corner = (right + 1, bottom + 1, 56, 40) if right < 50 and bottom < 34 else (0, 0, left - 1, top - 1)
    with pytest.raises(TargetError, match="No candidate box of the model overlaps this box"):
        explain(model, MissedBox(corner, 1))


def test_several_places_at_once(detector: nn.Module) -> None:
    places = [(4.0, 4.0, 20.0, 24.0), (30.0, 10.0, 50.0, 30.0)]
    both = explain(detector, MissedBox(places, 1))
    assert [item.box for item in (both.instances or ())[0]] == places
    for k, place in enumerate(places):
        torch.testing.assert_close(both.maps[:, k], explain(detector, MissedBox(place, 1)).maps[:, 0])


def draw_mask(seed: int, size: Sequence[int], cells: int) -> np.ndarray:
    """Make a mask by section 3.2 of the RISE paper, resized by OpenCV, with half of the cells open."""
    generator = torch.Generator().manual_seed(seed)
    is_open = (torch.rand(cells, cells, generator=generator) < 0.5).double().numpy()
    cell = [math.ceil(length / cells) for length in size]
    large = enlarge(is_open, ((cells + 1) * cell[0], (cells + 1) * cell[1]))
    top, left = (int(torch.randint(length, (1,), generator=generator)) for length in cell)
    return large[top : top + size[0], left : left + size[1]]


@pytest.mark.parametrize("kind", ["fasterrcnn", "retinanet"])
@pytest.mark.parametrize("is_missed", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_drise(kind: str, is_missed: bool, count: int) -> None:
    """Use one image, then two of different sizes. Each image gets the corner of the mask that has its size."""
    masks, model, pictures = 9, make_detector(kind), make_pictures()[:count]
    first = model(pictures)
    place = (10.0, 8.0, 30.0, 26.0)
    target = MissedBox(place, 2) if is_missed else Box(1)
    method = gradcam.METHODS["drise"].using(masks=masks)
    explanation = explain(model, target, pictures, method=method, evidence="signed")
    assert (explanation.layer, explanation.method) == ("input", "drise")
    size = [max(picture.shape[axis] for picture in pictures) for axis in (1, 2)]
    drawn = [torch.from_numpy(draw_mask(seed, size, 16)) for seed in range(masks)]
    scores: list[list[float]] = []
    for mask in drawn:
        masked_pictures = [picture * mask[: picture.shape[1], : picture.shape[2]] for picture in pictures]
        _, recorded = run(model, masked_pictures)
        scores.append([])
        for (boxes, values), output in zip(weigh_by_hand(model, recorded, masked_pictures), first):
            box = place if is_missed else output["boxes"][1].tolist()
            label = 2 if is_missed else int(output["labels"][1])
            scores[-1].append(float((values[:, label] * overlap(boxes[:, label], box)).max().detach()))
    for i, picture in enumerate(pictures):
        mean = sum(score[i] for score in scores) / masks
        expected = sum((mask_scores[i] - mean) * mask for mask_scores, mask in zip(scores, drawn)) / (masks * 0.5)
        assert isinstance(expected, Tensor)
        expected = expected[: picture.shape[1], : picture.shape[2]]
        if count == 1:
            np.testing.assert_allclose(explanation.maps[i, 0].numpy(), expected.numpy(), rtol=0, atol=1e-6)
        heatmap = explanation.heatmaps[i][0].double()
        assert heatmap.shape == expected.shape
        # The map was computed at the size of the larger image.
        assert np.corrcoef(heatmap.flatten(), expected.flatten())[0, 1] > 0.998


@pytest.mark.parametrize("target", [Box(0), MissedBox((10.0, 8.0, 30.0, 26.0), 1)])
@pytest.mark.parametrize("candidate_count", [1, 0])
def test_a_masked_picture_without_a_candidate_scores_nothing(
    target: Any, candidate_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that this is not an error, although it would be one for the unmasked image."""
    model = make_detector("ssd")
    explained = explain(model, target)
    passes = 0

    def list_candidates(*_: Any) -> list[Candidates]:
        nonlocal passes
        passes += 1
        corner = torch.tensor([[0.0, 0.0, 1.0, 1.0]] * candidate_count, dtype=torch.float64).reshape(candidate_count, 4)
        return [
            Candidates(
                corner, torch.ones(candidate_count, dtype=torch.float64), torch.ones(candidate_count, dtype=torch.int64)
            )
        ]

    bound = target.bind(model, to_batch(FIRST))
    again = bound.target.score(bound.batch.run(bound.model), 1).target
    monkeypatch.setattr(AnchorDetector, "list_candidates", list_candidates)
    assert again.score(None, 1).values.tolist() == [[0.0]]
    assert passes == 1
    assert explained.scores[0, 0] > 0
