"""Test the box around a map's maximum: against slow flood fills, torchvision, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor

from gradcam.errors import GradcamError, ImageError
from gradcam.evaluation import corloc, localisation
from gradcam.evaluation.metrics.localisation import find_held_out_hits

Box = tuple[int, int, int, int]


def flood_slowly(heatmap: Tensor, share: float) -> Box:
    """Return the box around the largest part above a share of the maximum.

    Of equal ones, take the topmost, then the leftmost.
    """
    values = heatmap.double().clamp(min=0)
    unvisited = {(int(row), int(column)) for row, column in (values > share * values.max()).nonzero()}
    parts = []
    while unvisited:
        edge, part = [unvisited.pop()], set()
        while edge:
            row, column = edge.pop()
            part.add((row, column))
            for near in [(row + down, column + across) for down in (-1, 0, 1) for across in (-1, 0, 1)]:
                if near in unvisited:
                    unvisited.remove(near)
                    edge.append(near)
        rows, columns = zip(*part)
        parts.append((-len(part), min(rows), min(columns), max(rows) + 1, max(columns) + 1))
    _, y0, x0, y1, x1 = min(parts)
    return x0, y0, x1, y1


def overlap_slowly(a: Box, b: Box) -> float:
    """Count pixels to compute the overlap of two boxes in whole pixels."""
    first, second = ({(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])} for box in (a, b))
    return len(first & second) / len(first | second)


@pytest.mark.parametrize("share", [0.0, 0.15, 0.5, 0.8, 0.97])
def test_the_box_is_that_of_a_slow_flood_fill(share: float) -> None:
    generator = torch.Generator().manual_seed(3)
    heatmaps = torch.rand(12, 23, 31, generator=generator) - 0.2
    localised = localisation(heatmaps, [[[2, 3, 12, 20]]] * 12, share=share)
    expected = [flood_slowly(heatmap, share) for heatmap in heatmaps]
    assert localised.boxes.tolist() == [list(map(float, box)) for box in expected]
    assert localised.iou.tolist() == pytest.approx([overlap_slowly(box, (2, 3, 12, 20)) for box in expected], rel=1e-6)


def test_the_threshold_of_the_paper_by_hand() -> None:
    """The threshold is 15 % of the maximum 2: of 0.29, 0.3 and 0.31, only 0.31 is above it."""
    heatmaps = torch.zeros(1, 6, 8)
    heatmaps[0, 2] = torch.tensor([0.29, 0.30, 0.31, 1.0, 2.0, 0.31, 0.29, 0.0])
    localised = localisation(heatmaps, [[[2, 2, 6, 4]]])
    assert localised.boxes.tolist() == [[2, 2, 6, 3]]
    assert localised.iou.tolist() == [0.5]
    assert localised.errors.tolist() == [0]


def test_right_wrong_constant_and_blank_maps_by_hand() -> None:
    heatmaps = torch.zeros(5, 10, 10)
    heatmaps[0, 2:6, 1:9] = 0.4
    heatmaps[1, 7:, 1:9] = 0.4
    heatmaps[2] = 3
    heatmaps[3] = 0
    heatmaps[4] = -1
    localised = localisation(heatmaps, [[[1, 2, 9, 6]]] * 5)
    assert localised.boxes.tolist() == [[1, 2, 9, 6], [1, 7, 9, 10], [0, 0, 10, 10], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert localised.iou.tolist() == pytest.approx([1, 0, 0.32, 0, 0])
    assert localised.errors.tolist() == [0, 1, 1, 1, 1]
    assert {values.dtype for values in (localised.boxes, localised.iou, localised.errors)} == {torch.float32}


def test_the_largest_part_is_taken_not_the_brightest() -> None:
    heatmaps = torch.zeros(1, 10, 10)
    heatmaps[0, 0:2, 0:2] = 1
    heatmaps[0, 5:9, 5:8] = 0.2
    assert localisation(heatmaps, [[[0, 0, 1, 1]]]).boxes.tolist() == [[5, 5, 8, 9]]


def test_of_several_largest_parts_the_topmost_then_the_leftmost() -> None:
    heatmaps = torch.zeros(2, 12, 12)
    for y0, x0 in [(8, 0), (1, 8), (1, 4), (5, 5)]:
        heatmaps[0, y0 : y0 + 2, x0 : x0 + 2] = 1
    heatmaps[1, 4:6, 0:2] = 1
    heatmaps[1, 3:7, 5] = 1  # as large as the other part, and further up
    assert localisation(heatmaps, [[[0, 0, 1, 1]]] * 2).boxes.tolist() == [[4, 1, 6, 3], [5, 3, 6, 7]]


def test_pixels_that_meet_at_a_corner_are_connected() -> None:
    heatmaps = torch.eye(6)[None]
    assert localisation(heatmaps, [[[0, 0, 6, 6]]]).iou.tolist() == [1]


def test_right_and_bottom_are_not_inside() -> None:
    """A single pixel in the last corner of an image of 8 x 6 is the box from 7, 5 to 8, 6."""
    heatmaps = torch.zeros(1, 6, 8)
    heatmaps[0, 5, 7] = 1
    localised = localisation(heatmaps, [[[7, 5, 8, 6], [0, 0, 8, 6]]])
    assert localised.boxes.tolist() == [[7, 5, 8, 6]]
    assert localised.iou.tolist() == [1]


def test_the_overlap_is_torchvisions_with_the_best_of_several_objects() -> None:
    generator = torch.Generator().manual_seed(5)
    heatmaps = torch.rand(8, 20, 20, generator=generator) ** 3
    starts = torch.rand(8, 4, 2, generator=generator) * 12
    boxes = torch.cat([starts, starts + 1 + torch.rand(8, 4, 2, generator=generator) * 7], dim=2)
    counts = [1, 2, 3, 4, 4, 3, 2, 1]
    objects = [entry[:count] for entry, count in zip(boxes, counts)]
    localised = localisation(heatmaps, objects, share=0.4)
    expected = [torchvision.ops.box_iou(box[None], entry).max() for box, entry in zip(localised.boxes, objects)]
    assert localised.iou.tolist() == pytest.approx([float(overlap) for overlap in expected], rel=1e-5)
    assert len({round(overlap, 3) for overlap in localised.iou.tolist()}) > 4


def test_an_overlap_of_one_half_is_no_error_and_below_is() -> None:
    heatmaps = torch.ones(3, 10, 10)
    localised = localisation(heatmaps, [[[0, 0, 10, 5]], [[0, 0, 10, 4.99]], [[0, 0, 1, 1], [0, 0, 10, 9]]])
    assert localised.errors.tolist() == [0, 1, 0]


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


# CorLoc


def choose_slowly(iou: list[list[float]], half: int) -> int:
    """Return the number of the threshold with the most hits in the other half, then the largest mean overlap."""
    others = [row for number, row in enumerate(iou) if number % 2 != half]
    columns = [[row[t] for row in others] for t in range(19)]
    best = max((sum(value >= 0.5 for value in column), math.fsum(column)) for column in columns)
    return next(
        t for t, column in enumerate(columns) if (sum(value >= 0.5 for value in column), math.fsum(column)) == best
    )


def test_corloc_is_that_of_slow_loops() -> None:
    generator = torch.Generator().manual_seed(5)
    heatmaps = torch.nn.functional.interpolate(torch.rand(9, 1, 5, 6, generator=generator), (20, 24), mode="bilinear")[
        :, 0
    ]
    boxes = [[[2, 3, 12, 20]], [[0, 0, 24, 10], [5, 5, 20, 20]], [[3, 3, 22, 18]]] * 3
    result = corloc(heatmaps, boxes)
    thresholds = [0.05 * step for step in range(1, 20)]
    iou = [
        [max(overlap_slowly(flood_slowly(heatmap, t), tuple(box)) for box in objects) for t in thresholds]
        for heatmap, objects in zip(heatmaps, boxes)
    ]
    np.testing.assert_allclose(result.iou, iou, rtol=1e-5)
    chosen = [choose_slowly(iou, half) for half in (0, 1)]
    assert result.hits.tolist() == [float(row[chosen[i % 2]] >= 0.5) for i, row in enumerate(iou)]
    assert len({*result.hits.tolist()}) == 2


def test_a_threshold_that_fits_one_half_is_used_for_the_other() -> None:
    """Even images have a weak rim, which belongs to the object. Odd images have one that does not."""
    heatmaps = torch.zeros(6, 10, 10)
    heatmaps[:, 0:8, 0:8], heatmaps[:, 0:4, 0:4] = 0.42, 1
    boxes = [[[0, 0, 8, 8]], [[0, 0, 4, 4]]] * 3
    result = corloc(heatmaps, boxes)
    assert result.hits.tolist() == [0] * 6  # each half uses the threshold of the other
    assert (result.iou >= 0.5).float().mean(0).max() == 0.5
    assert corloc(heatmaps, [[[0, 0, 8, 8]]] * 6).hits.tolist() == [1] * 6


def test_a_single_image_uses_the_default_threshold() -> None:
    heatmaps = torch.zeros(1, 10, 10)
    heatmaps[:, 0:8, 0:8], heatmaps[:, 0:4, 0:4] = 0.42, 1
    assert corloc(heatmaps, [[[0, 0, 8, 8]]]).hits.tolist() == [1]
    assert corloc(heatmaps, [[[0, 0, 4, 4]]]).hits.tolist() == [0]


def test_blank_maps_never_hit() -> None:
    assert corloc(torch.zeros(3, 8, 8), [[[0, 0, 8, 8]]] * 3).hits.tolist() == [0, 0, 0]


def test_of_thresholds_with_equal_hits_the_largest_overlap_counts() -> None:
    iou = np.zeros((2, 19))
    iou[0, [2, 10]], iou[1, 10] = (0.6, 0.9), 0.5
    assert find_held_out_hits(iou).tolist() == [1, 1]
    iou[1, [2, 10]] = 0.5, 0
    assert find_held_out_hits(iou).tolist() == [1, 0]
