"""The box overlaps that of the largest component of the expected heatmap; a blank map gives None."""

import cv2
import numpy as np
import torch
from common import SmallNet, expect_unchanged, grad_cam, make_scene, pick, record_state, run_check
from torch.nn.functional import interpolate

REGION = (30, 50, 160, 240)
MIN_IOU = 0.8


def check(answer):
    model = SmallNet(6, seed=13).eval()
    with torch.no_grad():
        model.head.weight[5] = -model.head.weight[5].abs()  # no place speaks for class 5
    cases = 0
    for seed in range(80, 86):
        image = make_scene(seed)[0]
        for target in (0, 1, 2):
            expected, is_clear = find_largest(grad_cam(model, "features", [image[None]], pick(target)))
            if not is_clear or cases == 6:
                continue
            cases += 1
            before = record_state(model)
            received = answer.find_box(model, image, target, REGION)
            expect_unchanged(before, model)
            overlap = measure_iou([float(edge) for edge in received], expected)
            assert overlap >= MIN_IOU, f"the box {tuple(received)} has an IoU of {overlap:.2f} with {expected}"
    assert cases == 6
    assert answer.find_box(model, make_scene(80)[0], 5, REGION) is None, "a blank map has a box"


def find_largest(maps):
    """Return the box of the largest component, and whether there is a second component, clearly smaller."""
    if maps.max() <= 0:
        return None, False
    top, left, height, width = REGION
    heat = interpolate(maps[None], (height, width), mode="bicubic", align_corners=False)[0, 0].numpy()
    masks = [(heat >= share * heat.max()).astype(np.uint8) for share in (0.45, 0.5, 0.55)]
    boxes = []
    for mask in masks:
        count, _, statistics, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
        order = np.argsort(-statistics[1:, cv2.CC_STAT_AREA]) + 1
        x, y, w, h, area = statistics[order[0]]
        boxes.append((left + x, top + y, left + x + w, top + y + h))
        is_single = count == 2
        if is_single or statistics[order[1]][cv2.CC_STAT_AREA] > 0.7 * area:
            return None, False
    is_stable = min(measure_iou(boxes[0], boxes[1]), measure_iou(boxes[1], boxes[2])) > 0.8
    return tuple(int(edge) for edge in boxes[1]), is_stable


def measure_iou(a, b):
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


if __name__ == "__main__":
    run_check(check)
