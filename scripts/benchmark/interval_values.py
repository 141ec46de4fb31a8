"""Measure metrics of eight methods once, on crops of the photographs in assets/ and on mosaics of these crops.

The simulation in `intervals.py` samples from these values. They are in interval_values.npz; delete the file to measure
them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmark.cases import ROOT
from benchmark.measuring import report_progress

FILE = Path(__file__).with_name("interval_values.npz")
PICTURES = ROOT / "assets" / "evaluation.txt"
LAYER = "layer4"
METHODS = ("gradcam", "gradcam-pp", "layercam", "eigencam", "eigengradcam", "fem", "finercam", "kpcacam")
IMAGE_METRICS = ("average-drop", "sufficiency", "complexity", "increase")
MOSAIC_METRICS = ("grid-order", "grid-mass", "grid-maximum")
CROP_FRACTION = 0.8  # of the height and width of a photograph
MOSAICS = 200


@dataclass(frozen=True)
class IntervalValues:
    """The measured values.

    `classes` (I,) are the images' top classes, and `images` (I,8,4) their metrics. `cells` (M,4,8,3) are the metrics of
    the four cells of M mosaics, and `members` (M,4) are the images in these cells.
    """

    classes: np.ndarray
    images: np.ndarray
    cells: np.ndarray
    members: np.ndarray


def load_values() -> IntervalValues:
    if not FILE.exists():
        np.savez_compressed(FILE, **vars(measure_values()))
    with np.load(FILE) as arrays:
        return IntervalValues(**{name: arrays[name] for name in arrays})


def crop_photographs() -> dict[str, np.ndarray]:
    """Return each photograph, and crops at two corners and in its middle."""
    import gradcam

    crops = {}
    for name in PICTURES.read_text().split():
        image = gradcam.read_image(PICTURES.parent / name)
        height, width = (round(CROP_FRACTION * length) for length in image.shape[:2])
        rows, columns = image.shape[0] - height, image.shape[1] - width
        starts = [(0, 0), (rows, columns), (rows // 2, columns // 2)]
        crops[name] = image
        crops |= {f"{name} {i}": image[y : y + height, x : x + width] for i, (y, x) in enumerate(starts)}
    return crops


def measure_values() -> IntervalValues:
    import gradcam
    from gradcam.evaluation import Subject, complexity, confidence_change, grid_pointing_game, make_mosaics, sufficiency

    classifier = gradcam.load_classifier()
    crops, classes, images, prepared = crop_photographs(), [], [], {}
    for name, crop in crops.items():
        report_progress("intervals", name)
        batch = classifier.batch([classifier.prepare(crop)])
        subject = Subject(classifier.model, batch)
        if float(subject.probabilities) < 0.5:
            continue
        prepared[name] = batch[0]
        classes.append(int(subject.classes))
        explanations = gradcam.compare(classifier.model, batch, layers=[LAYER], methods=METHODS, target=[[classes[-1]]])
        rows = []
        for explanation in explanations.values():
            heatmaps = explanation.heatmaps[:, 0]
            change = confidence_change(subject, heatmaps)
            numbers = change.drop, sufficiency(subject, heatmaps), complexity(heatmaps), change.increase
            rows.append([float(number) for number in numbers])
        images.append(rows)
    names, cells, members = list(prepared), [], []
    for number, mosaic in enumerate(make_mosaics(classifier, prepared, limit=MOSAICS)):
        report_progress("intervals", f"mosaic {number + 1} of {MOSAICS}")
        options = {"layers": [LAYER], "methods": METHODS, "target": [list(mosaic.classes)]}
        explanations = gradcam.compare(classifier.model, mosaic.image[None], **options)
        game = grid_pointing_game(torch.cat([explanation.heatmaps for explanation in explanations.values()]))
        cells.append(torch.stack([game.order, game.mass, game.hits], -1).transpose(0, 1).numpy())
        members.append([names.index(name) for name in mosaic.names])
    return IntervalValues(
        np.array(classes), np.array(images, np.float32), np.array(cells, np.float32), np.array(members)
    )
