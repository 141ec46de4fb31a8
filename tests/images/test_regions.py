"""Test boxes and masks of heatmaps: against slow flood fills, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradcam
from gradcam.errors import GradcamError, ImageError
from gradcam.images.regions import encode_mask, find_mask
from gradcam.options import BOX_THRESHOLD
from tests.helpers import tiny_model

Photo = Callable[[str], Path]
Pixel = tuple[int, int]


def flood_slowly(mask: np.ndarray) -> list[set[Pixel]]:
    """Return the components of a mask, the largest first, then the topmost, then the leftmost."""
    unvisited = {(int(row), int(column)) for row, column in np.argwhere(mask)}
    parts = []
    while unvisited:
        edge, part = [unvisited.pop()], set[Pixel]()
        while edge:
            row, column = edge.pop()
            part.add((row, column))
            for near in [(row + down, column + across) for down in (-1, 0, 1) for across in (-1, 0, 1)]:
                if near in unvisited:
                    unvisited.remove(near)
                    edge.append(near)
        parts.append(part)
    return sorted(parts, key=lambda part: (-len(part), min(part)[0], min(column for _, column in part)))


def bound_slowly(part: set[Pixel]) -> tuple[int, int, int, int]:
    rows, columns = zip(*part)
    return min(columns), min(rows), max(columns) + 1, max(rows) + 1


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.6, 0.9, 1.0])
def test_boxes_are_those_of_a_slow_flood_fill(threshold: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(8):
        heatmap = rng.normal(size=(19, 27)).astype(np.float32)
        mask = np.maximum(heatmap, 0) >= threshold * heatmap.max()
        parts = flood_slowly(mask & (heatmap > 0))
        boxes = gradcam.find_boxes(heatmap, threshold=threshold, method="components")
        assert [box.edges for box in boxes] == [bound_slowly(part) for part in parts]
        assert [box.score for box in boxes] == [max(float(heatmap[pixel]) for pixel in part) for part in parts]
        assert gradcam.find_boxes(heatmap, threshold=threshold) == boxes[:1]
        assert np.array_equal(find_mask(heatmap, threshold=threshold), mask & (heatmap > 0))


def test_a_pixel_at_the_threshold_belongs_to_the_region() -> None:
    heatmap = np.array([[0.0, 0.5, 1.0, 0.499]])
    (box,) = gradcam.find_boxes(heatmap, threshold=0.5)
    assert (box.edges, box.score) == ((1, 0, 3, 1), 1.0)


def test_corners_connect_pixels() -> None:
    assert [box.edges for box in gradcam.find_boxes(np.eye(4), method="components")] == [(0, 0, 4, 4)]


def test_the_largest_region_may_not_have_the_maximum() -> None:
    heatmap = np.zeros((6, 6))
    heatmap[0, 0], heatmap[2:5, 2:6] = 1, 0.6
    (box,) = gradcam.find_boxes(heatmap)
    assert (box.edges, box.score) == ((2, 2, 6, 5), pytest.approx(0.6))
    assert [other.edges for other in gradcam.find_boxes(heatmap, method="components")] == [(2, 2, 6, 5), (0, 0, 1, 1)]


@pytest.mark.parametrize("heatmap", [np.zeros((4, 5)), -np.ones((4, 5))])
def test_without_positive_evidence_there_is_no_box(heatmap: np.ndarray) -> None:
    assert gradcam.find_boxes(heatmap) == gradcam.find_boxes(heatmap, method="components") == []
    assert not find_mask(heatmap).any()


def test_tensors_and_integers_are_heatmaps_too() -> None:
    heatmap = torch.zeros(5, 5, dtype=torch.bfloat16)
    heatmap[1:3, 2:4] = 7
    assert [box.edges for box in gradcam.find_boxes(heatmap)] == [(2, 1, 4, 3)]
    assert gradcam.find_boxes(heatmap.int().numpy()) == gradcam.find_boxes(heatmap)


@pytest.mark.parametrize(
    "heatmap", [np.zeros((2, 4, 5)), np.zeros((0, 5)), np.full((2, 2), np.nan), np.array([["a"]]), np.ones((2, 2)) * 1j]
)
def test_other_arrays_are_refused(heatmap: Any) -> None:
    with pytest.raises(ImageError, match=r"The heatmap is .*, expected one map: finite numbers \(H,W\)."):
        gradcam.find_boxes(heatmap)


@pytest.mark.parametrize("threshold", [0, -0.1, 1.1, float("nan"), True, "0.3"])
def test_a_threshold_out_of_range_is_refused(threshold: Any) -> None:
    with pytest.raises(GradcamError, match="expected a share of the heatmap's maximum, above 0 and at most 1"):
        gradcam.find_boxes(np.ones((2, 2)), threshold=threshold)
    with pytest.raises(GradcamError, match="expected one of 'largest', 'components'"):
        gradcam.find_boxes(np.ones((2, 2)), method="all")


def test_a_mask_is_a_grey_png(tmp_path: Path) -> None:
    from PIL import Image

    mask = np.eye(5, dtype=bool)
    (tmp_path / "mask.png").write_bytes(encode_mask(mask))
    with Image.open(tmp_path / "mask.png") as image:
        assert image.mode == "L"
        assert np.array_equal(np.asarray(image), np.where(mask, 255, 0))


# Explanations


@pytest.fixture(scope="module")
def explanation(classifier: gradcam.Classifier, photo: Photo) -> Any:
    images = [photo("cat_and_espresso.jpg"), photo("koala.webp")]
    return classifier.explain(images, target=[["Egyptian cat", "espresso"]] * 2)


@pytest.mark.parametrize("threshold", [BOX_THRESHOLD, 0.5])
def test_boxes_and_masks_are_in_pixels_of_the_image(explanation: Any, threshold: float) -> None:
    import cv2

    for i in range(2):
        height, width = explanation.images[i].shape[:2]
        y0, x0, rows, columns = explanation.regions[i]
        masks = explanation.masks(i, threshold=threshold)
        assert (masks.shape, masks.dtype) == ((2, height, width), bool)
        for k in range(2):
            values = cv2.resize(explanation.heatmaps[i][k].numpy(), (columns, rows), interpolation=cv2.INTER_CUBIC)
            expected = np.zeros((height, width), bool)
            values = np.clip(values, 0, 1)
            expected[y0 : y0 + rows, x0 : x0 + columns] = values >= np.float32(threshold) * values.max()
            assert (masks[k] != expected).mean() < 1e-4
            assert np.array_equal(explanation.masks(i, k, threshold=threshold), masks[k : k + 1])
            boxes = explanation.boxes(i, k, threshold=threshold, method="components")
            assert {box.edges for box in boxes} == {bound_slowly(part) for part in flood_slowly(masks[k])}
            assert all(x0 <= box.left < box.right <= x0 + columns for box in boxes)
            assert all(y0 <= box.top < box.bottom <= y0 + rows for box in boxes)


def test_boxes_name_the_class(explanation: Any) -> None:
    boxes = explanation.boxes(0)
    assert [(box.index, box.label) for box in boxes] == [(285, "Egyptian cat"), (967, "espresso")]
    assert explanation.boxes(0, 1) == boxes[1:]
    assert explanation.boxes() == boxes


def test_there_is_no_third_image_or_map(explanation: Any) -> None:
    for arguments in ((2,), (0, 2)):
        with pytest.raises(ImageError, match="There is no map"):
            explanation.boxes(*arguments)
        with pytest.raises(ImageError, match="There is no map"):
            explanation.masks(*arguments)


def test_signed_evidence_gives_boxes_of_positive_evidence(classifier: gradcam.Classifier, photo: Photo) -> None:
    path = photo("cat_and_espresso.jpg")
    signed, positive = (classifier.explain(path, target="espresso", evidence=name) for name in ("signed", "positive"))
    mask = signed.masks()[0]
    (box,) = signed.boxes()
    (other,) = positive.boxes()
    assert signed.heatmaps.min() < -0.1
    assert np.logical_and(mask, positive.masks()[0]).sum() / np.logical_or(mask, positive.masks()[0]).sum() > 0.95
    assert np.abs(np.subtract(box.edges, other.edges)).max() <= 20


@pytest.mark.parametrize("fit", ["whole", "tiles:256"])
def test_other_parts_of_the_image_give_boxes_there(classifier: gradcam.Classifier, photo: Photo, fit: str) -> None:
    explanation = classifier.explain(photo("cat_and_espresso.jpg"), target="Egyptian cat", fit=fit)
    (box,) = explanation.boxes(threshold=0.5)
    assert box.left < 120  # outside the centre crop
    assert box.right < 560
    assert explanation.masks(threshold=0.5)[0, :, :120].any()


def test_a_blank_map_has_no_box(explanation: Any) -> None:
    from dataclasses import replace

    blank = replace(explanation, heatmaps=torch.zeros_like(explanation.heatmaps))
    assert blank.boxes() == []
    assert blank.masks().sum() == 0


def test_an_image_without_detections_has_no_box_and_no_mask(explanation: Any) -> None:
    empty = replace(explanation, instances=[[] for _ in explanation.images])
    assert empty.boxes() == []
    assert empty.masks().shape == (0, *explanation.images[0].shape[:2])
    assert empty.masks().dtype == bool


def test_a_function_has_boxes_without_a_class(classifier: gradcam.Classifier, photo: Photo) -> None:
    explanation = classifier.explain(photo("coffee.jpg"), target=lambda output: output[:, 967] - output[:, 968])
    assert [(box.index, box.label) for box in explanation.boxes()] == [(None, None)]


def test_the_plain_function_takes_the_heatmap_of_any_model() -> None:
    explanation = gradcam.explain(tiny_model(), torch.rand(1, 3, 24, 32), "3", target=0)
    heatmap = explanation.heatmaps[0, 0]
    boxes = gradcam.find_boxes(heatmap, method="components")
    assert {box.edges for box in boxes} == {bound_slowly(part) for part in flood_slowly(find_mask(heatmap))}
