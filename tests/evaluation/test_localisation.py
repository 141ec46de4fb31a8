"""The box around what a map marks: against slow flood fills, torchvision, and values worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor

from gradcam.errors import GradcamError, ImageError
from gradcam.evaluation import localisation

Box = tuple[int, int, int, int]


def flood_slowly(heatmap: Tensor, share: float) -> Box:
    """The box around the largest part above a share of the maximum; of equal ones the topmost, then the leftmost."""
    values = heatmap.double().clamp(min=0)
    waiting = {(int(row), int(column)) for row, column in (values > share * values.max()).nonzero()}
    parts = []
    while waiting:
        edge, part = [waiting.pop()], set()
        while edge:
            row, column = edge.pop()
            part.add((row, column))
            for near in [(row + down, column + across) for down in (-1, 0, 1) for across in (-1, 0, 1)]:
                if near in waiting:
                    waiting.remove(near)
                    edge.append(near)
        rows, columns = zip(*part)
        parts.append((-len(part), min(rows), min(columns), max(rows) + 1, max(columns) + 1))
    _, top, left, bottom, right = min(parts)
    return left, top, right, bottom


def overlap_slowly(one: Box, other: Box) -> float:
    """By counting pixels, of boxes in whole pixels."""
    first, second = (
        {(x, y) for x in range(item[0], item[2]) for y in range(item[1], item[3])} for item in (one, other)
    )
    return len(first & second) / len(first | second)


@pytest.mark.parametrize("share", [0.0, 0.15, 0.5, 0.8, 0.97])
def test_the_box_is_that_of_a_slow_flood_fill(share: float) -> None:
    generator = torch.Generator().manual_seed(3)
    heatmaps = torch.rand(12, 23, 31, generator=generator) - 0.2
    actual = localisation(heatmaps, [[[2, 3, 12, 20]]] * 12, share=share)
    expected = [flood_slowly(heatmap, share) for heatmap in heatmaps]
    assert actual.boxes.tolist() == [list(map(float, box)) for box in expected]
    assert actual.iou.tolist() == pytest.approx([overlap_slowly(box, (2, 3, 12, 20)) for box in expected], rel=1e-6)


def test_the_threshold_of_the_paper_by_hand() -> None:
    """Above 15 % of the maximum, which is 2: 0.31 is, and 0.3 and 0.29 are not."""
    heatmaps = torch.zeros(1, 6, 8)
    heatmaps[0, 2] = torch.tensor([0.29, 0.30, 0.31, 1.0, 2.0, 0.31, 0.29, 0.0])
    actual = localisation(heatmaps, [[[2, 2, 6, 4]]])
    assert actual.boxes.tolist() == [[2, 2, 6, 3]]
    assert actual.iou.tolist() == [0.5]
    assert actual.errors.tolist() == [0]


def test_right_wrong_constant_and_blank_maps_by_hand() -> None:
    heatmaps = torch.zeros(5, 10, 10)
    heatmaps[0, 2:6, 1:9] = 0.4
    heatmaps[1, 7:, 1:9] = 0.4
    heatmaps[2] = 3
    heatmaps[3] = 0
    heatmaps[4] = -1
    actual = localisation(heatmaps, [[[1, 2, 9, 6]]] * 5)
    assert actual.boxes.tolist() == [[1, 2, 9, 6], [1, 7, 9, 10], [0, 0, 10, 10], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert actual.iou.tolist() == pytest.approx([1, 0, 0.32, 0, 0])
    assert actual.errors.tolist() == [0, 1, 1, 1, 1]
    assert {item.dtype for item in (actual.boxes, actual.iou, actual.errors)} == {torch.float32}


def test_the_largest_part_is_taken_not_the_brightest() -> None:
    heatmaps = torch.zeros(1, 10, 10)
    heatmaps[0, 0:2, 0:2] = 1
    heatmaps[0, 5:9, 5:8] = 0.2
    assert localisation(heatmaps, [[[0, 0, 1, 1]]]).boxes.tolist() == [[5, 5, 8, 9]]


def test_of_several_largest_parts_the_topmost_then_the_leftmost() -> None:
    heatmaps = torch.zeros(2, 12, 12)
    for top, left in [(8, 0), (1, 8), (1, 4), (5, 5)]:
        heatmaps[0, top : top + 2, left : left + 2] = 1
    heatmaps[1, 4:6, 0:2] = 1
    heatmaps[1, 3:7, 5] = 1  # as large, and higher up
    assert localisation(heatmaps, [[[0, 0, 1, 1]]] * 2).boxes.tolist() == [[4, 1, 6, 3], [5, 3, 6, 7]]


def test_pixels_that_meet_at_a_corner_are_connected() -> None:
    heatmaps = torch.eye(6)[None]
    assert localisation(heatmaps, [[[0, 0, 6, 6]]]).iou.tolist() == [1]


def test_right_and_bottom_are_not_inside() -> None:
    """A single pixel in the last corner is the box from 7, 5 to 8, 6 in a picture of 8 x 6."""
    heatmaps = torch.zeros(1, 6, 8)
    heatmaps[0, 5, 7] = 1
    actual = localisation(heatmaps, [[[7, 5, 8, 6], [0, 0, 8, 6]]])
    assert actual.boxes.tolist() == [[7, 5, 8, 6]]
    assert actual.iou.tolist() == [1]


def test_the_overlap_is_torchvisions_with_the_best_of_several_objects() -> None:
    generator = torch.Generator().manual_seed(5)
    heatmaps = torch.rand(8, 20, 20, generator=generator) ** 3
    starts = torch.rand(8, 4, 2, generator=generator) * 12
    boxes = torch.cat([starts, starts + 1 + torch.rand(8, 4, 2, generator=generator) * 7], dim=2)
    counts = [1, 2, 3, 4, 4, 3, 2, 1]
    objects = [entry[:count] for entry, count in zip(boxes, counts)]
    actual = localisation(heatmaps, objects, share=0.4)
    expected = [torchvision.ops.box_iou(box[None], entry).max() for box, entry in zip(actual.boxes, objects)]
    assert actual.iou.tolist() == pytest.approx([float(item) for item in expected], rel=1e-5)
    assert len({round(item, 3) for item in actual.iou.tolist()}) > 4


def test_an_overlap_of_one_half_is_no_error_and_below_is() -> None:
    heatmaps = torch.ones(3, 10, 10)
    actual = localisation(heatmaps, [[[0, 0, 10, 5]], [[0, 0, 10, 4.99]], [[0, 0, 1, 1], [0, 0, 10, 9]]])
    assert actual.errors.tolist() == [0, 1, 0]


def test_boxes_may_be_of_any_kind() -> None:
    heatmaps = torch.ones(1, 4, 4)
    for boxes in ([[[0, 0, 2, 4]]], [np.array([[0, 0, 2, 4]])], torch.tensor([[[0, 0, 2, 4]]]), [((0, 0, 2, 4),)]):
        assert localisation(heatmaps.numpy(), boxes).iou.tolist() == [0.5]  # type: ignore[arg-type]


def test_maps_with_a_channel_are_taken() -> None:
    assert localisation(torch.ones(2, 1, 4, 6), [[[0, 0, 6, 4]]] * 2).iou.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([[[0, 0, 2, 2]]], r"\(2, 4, 4\), expected \(1, 4, 4\)"),
        ([[[0, 0, 2, 2]], []], "The boxes of image 1 are .*, expected an array .* of one or more boxes"),
        ([[0, 0, 2, 2], [0, 0, 2, 2]], "The boxes of image 0 are"),
        ([[[0, 0, 2, 2]], [[0, 0, 2]]], "The boxes of image 1 are"),
        ([[[0, 0, 2, 2]], [["a", 0, 2, 2]]], "The boxes of image 1 are"),
        ([[[0, 0, 2, 2]], [[0, 0, 2, 2], [3, 0, 3, 2]]], "image 1 are .*: right must be greater than left"),
        ([[[0, 0, 2, 2]], [[0, 2, 2, 1]]], "image 1 are .*bottom than top"),
        ([[[0, 0, 2, 2]], [[0, 0, math.nan, 1]]], "image 1 are"),
        ([], r"The boxes are \[\], expected one or more boxes per image"),
        (None, "The boxes are None"),
    ],
)
def test_boxes_that_are_none(boxes: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        localisation(torch.ones(2, 4, 4), boxes)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [-0.1, 1, 15, math.nan, "0.15", True])
def test_a_share_out_of_range(share: object) -> None:
    with pytest.raises(GradcamError, match="share is .*, expected a share of the maximum"):
        localisation(torch.ones(1, 4, 4), [[[0, 0, 2, 2]]], share=share)  # type: ignore[arg-type]
