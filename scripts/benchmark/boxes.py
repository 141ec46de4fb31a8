"""Compare boxes from heatmaps and centre boxes with the annotated objects of the photographs in assets/."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmark.cases import ROOT
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table

if TYPE_CHECKING:
    import gradcam

ASSETS = ROOT / "assets"
METHODS = ("gradcam", "gradcam-pp", "xgradcam", "hirescam", "layercam", "finercam", "eigencam")
FITS = ("crop", "whole")
CENTRE, WHOLE_IMAGE = "*centre box*", "*box around the whole image*"

AnnotatedObject = tuple[str, str, list[list[int]]]  # The image, the class, and the boxes of the class.


def compare_boxes(settings: Settings) -> Iterator[Table]:
    """Measure CorLoc, the share of located objects. One device is enough, because no time is measured."""
    import gradcam
    from gradcam.evaluation.metrics.localisation import THRESHOLDS, find_held_out_hits
    from gradcam.options import BOX_THRESHOLD

    classifier, objects = gradcam.load_classifier(device=settings.devices[0]), list_objects()
    overlaps: dict[tuple[str, str], NDArray[np.float64]] = {}
    for fit in FITS:
        report_progress("boxes", settings.devices[0], f"{len(METHODS)} methods, {len(objects)} objects, fit {fit}")
        for method in METHODS:
            overlaps[method, fit] = np.array([measure_heatmap(classifier, item, method, fit) for item in objects])
    sizes = [gradcam.read_image(ASSETS / name).shape[:2] for name, _, _ in objects]
    boxes_per_object = [boxes for _, _, boxes in objects]
    overlaps[CENTRE, ""] = np.array(
        [
            [find_best_overlap(make_centre_box(*size, share), boxes) for share in THRESHOLDS]
            for size, boxes in zip(sizes, boxes_per_object)
        ]
    )
    whole = [find_best_overlap(make_centre_box(*size, 1), boxes) for size, boxes in zip(sizes, boxes_per_object)]
    overlaps[WHOLE_IMAGE, ""] = np.array(whole)[:, None].repeat(len(THRESHOLDS), 1)
    default = THRESHOLDS.index(BOX_THRESHOLD)
    rows, raw = [], []
    for (name, fit), iou in overlaps.items():
        hits, has_threshold = find_held_out_hits(iou), fit != ""
        best = (iou >= 0.5).sum(0)
        cells = [f"{best[default]} of {len(iou)}", f"{iou[:, default].mean():.2f}"] if has_threshold else ["-", "-"]
        rows.append([name, fit or "-", format_share(hits), f"{best.max()} of {len(iou)}", *cells])
        raw.append({"name": name, "fit": fit, "iou": iou.tolist(), "hits": hits.tolist()})
    header = [
        *("method", "part of the image", "CorLoc, held-out threshold (95 % interval)", "CorLoc, best threshold"),
        *(f"CorLoc at {BOX_THRESHOLD}", f"mean IoU at {BOX_THRESHOLD}"),
    ]
    notes = [
        f"{len(objects)} objects in {len({name for name, *_ in objects})} images of boxes.csv, {classifier.name}, "
        f"{classifier.layer}, the annotated class, IoU of at least 0.5 with the object in the whole image.",
        "Held-out: the threshold (for the centre box: its size as a share of each side) is the best one of the other half.",
    ]
    yield Table("boxes", "Boxes from heatmaps", header, rows, notes, raw)


def list_objects() -> list[AnnotatedObject]:
    objects: dict[tuple[str, str], list[list[int]]] = defaultdict(list)
    with (ASSETS / "boxes.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            box = [int(row[side]) for side in ("left", "top", "right", "bottom")]
            objects[row["image"], row["class"]].append(box)
    rows = sorted((name, label, boxes) for (name, label), boxes in objects.items())
    # Even and odd rows form two halves. Put the first two objects into the same half, because their image is the same.
    rows[1], rows[2] = rows[2], rows[1]
    return rows


def measure_heatmap(classifier: gradcam.Classifier, item: AnnotatedObject, method: str, fit: str) -> list[float]:
    """Return, for each threshold, the best IoU of the first box from the heatmap with the annotated boxes."""
    from gradcam.evaluation.metrics.localisation import THRESHOLDS

    name, label, boxes = item
    explanation = classifier.explain(ASSETS / name, target=label, method=method, fit=fit)
    found_boxes = [explanation.boxes(threshold=threshold) for threshold in THRESHOLDS]
    return [find_best_overlap(row[0].edges, boxes) if row else 0.0 for row in found_boxes]


def make_centre_box(height: int, width: int, share: float) -> tuple[float, float, float, float]:
    x, y = width * (1 - share) / 2, height * (1 - share) / 2
    return x, y, width - x, height - y


def find_best_overlap(box: Any, boxes: list[list[int]]) -> float:
    import torch

    from gradcam.targets.object_choice import find_overlaps

    return float(find_overlaps(torch.tensor(boxes, dtype=torch.float64), box).max())


def format_share(hits: NDArray[np.float64]) -> str:
    from gradcam.evaluation import mean_interval

    interval = mean_interval(hits)
    return f"{interval.mean:.2f} ({interval.low:.2f} to {interval.high:.2f})"
