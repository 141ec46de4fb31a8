"""Measure how faithful heatmaps of the models of drawn images are: whether they lie on the explained shape."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.ops import box_iou

import gradcam
from gradcam import targets
from tests.drawn.pictures import (
    COLOURS,
    SHAPES,
    SIZE,
    DrawnShape,
    Scene,
    ShapeSpec,
    draw_scene,
    to_boxes,
    to_classes,
    to_images,
)

MIN_OVERLAP = 0.5  # smallest overlap of a detected box with the shape that it matches
BATCH = 10
FADED_OPACITY = 0.5  # opacity of shapes that a detector misses


@dataclass(frozen=True)
class MapScore:
    """The result of one heatmap.

    `energy` is the share of the map inside the mask. `is_inside` is True if the maximum is inside. `is_right` is True
    if the mask contains more of the map than any other mask does.
    """

    energy: float
    is_inside: bool
    is_right: bool


def score_map(heatmap: Tensor, mask: Tensor, other_masks: Sequence[Tensor] = ()) -> MapScore:
    """Evaluate a map (H,W) with the shape's mask, bool (H,W), and the masks of other shapes.

    A blank map is never right.
    """
    total_mass, inside = float(heatmap.sum()), float(heatmap[mask].sum())
    if total_mass <= 0:
        return MapScore(0.0, False, False)
    is_right = all(float(heatmap[other_mask].sum()) < inside for other_mask in other_masks)
    return MapScore(inside / total_mass, bool(mask.flatten()[int(heatmap.argmax())]), is_right)


def summarise(verdicts: Sequence[MapScore]) -> tuple[float, float]:
    """Return the mean energy, and the share of maxima inside."""
    energy, inside = np.mean([(verdict.energy, verdict.is_inside) for verdict in verdicts], axis=0)
    return float(energy), float(inside)


def compute_accuracy(verdicts: Sequence[MapScore]) -> float:
    """Return the share of maps that have more mass in their mask than in any other."""
    return float(np.mean([verdict.is_right for verdict in verdicts]))


def to_mask(thing: DrawnShape) -> Tensor:
    """Return a mask of the pixels of the shape's box."""
    left, top, right, bottom = thing.box
    mask = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    mask[top:bottom, left:right] = True
    return mask


def judge_boxes(detector: nn.Module, scenes: Sequence[Scene], **options: Any) -> list[MapScore]:
    """Return a verdict for the heatmap of each detected box that matches a shape."""
    verdicts = []
    for batch in _batches([scene for scene in scenes if scene.things]):
        explanation = gradcam.explain(detector, list(to_images(batch)), target=targets.Box(all), **options)
        for scene, heatmaps, instances in zip(batch, explanation.heatmaps, explanation.instances):
            for instance, heatmap in zip(instances, heatmaps):
                thing = match(scene, instance.box, instance.index)
                if thing is not None:
                    verdicts.append(score_map(heatmap, to_mask(thing)))
    return verdicts


def match(scene: Scene, box: Sequence[float], label: int) -> DrawnShape | None:
    """Return the shape that matches this box and label, or None."""
    truth = to_boxes(scene)
    overlaps = box_iou(torch.tensor([box]), truth["boxes"])[0] * (truth["labels"] == label)
    best = int(overlaps.argmax())
    return scene.things[best] if overlaps[best] > MIN_OVERLAP else None


def measure_detection(detector: nn.Module, scenes: Sequence[Scene]) -> tuple[float, float]:
    """Return the share of the shapes that are detected, and the share of the boxes that match one."""
    detected, boxes, matching = 0, 0, 0
    for scene in scenes:
        with torch.no_grad():
            (output,) = detector(list(to_images([scene])))
        pairs = [match(scene, box, label) for box, label in zip(output["boxes"].tolist(), output["labels"].tolist())]
        matched = [thing for thing in pairs if thing is not None]
        detected += len({id(thing) for thing in matched})
        boxes += len(pairs)
        matching += len(matched)
    return detected / sum(len(scene.things) for scene in scenes), matching / boxes


def draw_missed(detector: nn.Module, seed: int, count: int) -> Iterator[Scene]:
    """Yield `count` scenes of three shapes, the first of which is faded so that the detector misses it."""
    number = 0
    while count:
        wishes = [ShapeSpec(opacity=FADED_OPACITY), ShapeSpec(), ShapeSpec()]
        scene = draw_scene(np.random.default_rng([seed, number]), things=wishes)
        number += 1
        with torch.no_grad():
            (output,) = detector(list(to_images([scene])))
        matched = [match(scene, box, label) for box, label in zip(output["boxes"].tolist(), output["labels"].tolist())]
        if len(scene.things) == len(wishes) and all(thing is not scene.things[0] for thing in matched):
            count -= 1
            yield scene


def judge_missed(detector: nn.Module, scenes: Sequence[Scene], **options: Any) -> list[MapScore]:
    """Return a verdict for the first shape of each scene, on the map of the box that the detector missed."""
    verdicts = []
    for scene in scenes:
        target = targets.MissedBox(scene.things[0].box, 1 + scene.things[0].shape)
        explanation = gradcam.explain(detector, list(to_images([scene])), target=target, **options)
        verdicts.append(score_map(explanation.heatmaps[0, 0], to_mask(scene.things[0])))
    return verdicts


def judge_masks(segmenter: nn.Module, scenes: Sequence[Scene], **options: Any) -> list[MapScore]:
    """Return a verdict for each shape that the segmenter segments, on the map of that region."""
    verdicts = []
    for scene in scenes:
        images = to_images([scene])
        with torch.no_grad():
            predicted = segmenter(images)[0].argmax(0)
        for thing in scene.things:
            mask = torch.from_numpy(thing.mask)
            inside = predicted[mask] == 1 + thing.shape
            if inside.float().mean() < MIN_OVERLAP:
                continue
            down, across = (mask & (predicted == 1 + thing.shape)).nonzero()[0].tolist()
            target = targets.Mask(1 + thing.shape, (across, down))
            explanation = gradcam.explain(segmenter, images, target=target, **options)
            verdicts.append(score_map(explanation.heatmaps[0, 0], to_mask(thing)))
    return verdicts


def measure_segmentation(segmenter: nn.Module, scenes: Sequence[Scene]) -> tuple[float, float]:
    """Return the share of pixels that are classified correctly, and the mean intersection over union of the shapes."""
    with torch.no_grad():
        predicted = torch.cat([segmenter(to_images(batch)).argmax(1) for batch in _batches(scenes)])
    truth = torch.stack([to_classes(scene) for scene in scenes])
    classes = range(1, 1 + len(SHAPES))
    unions = [((predicted == k) | (truth == k)).sum() for k in classes]
    shared = [((predicted == k) & (truth == k)).sum() for k in classes]
    return float((predicted == truth).float().mean()), float(np.mean([a / b for a, b in zip(shared, unions)]))


def draw_three(seed: int, count: int, *, alike: bool) -> Iterator[Scene]:
    """Yield `count` scenes of three shapes with different names.

    By default they differ in shape and colour. If `alike`, one of the other two has the first one's shape, and one has
    its colour.
    """
    number = 0
    while count:
        chance = np.random.default_rng([seed, number])
        number += 1
        shapes, colours = chance.permutation(len(SHAPES))[:3], chance.permutation(len(COLOURS))[:3]
        if alike:
            shapes[1], colours[2] = shapes[0], colours[0]
        things = [ShapeSpec(int(shape), int(colour)) for shape, colour in zip(shapes, colours)]
        scene = draw_scene(chance, things=things)
        if len(scene.things) == 3:
            count -= 1
            yield scene


def judge_texts(matcher: nn.Module, scenes: Sequence[Scene], **options: Any) -> list[MapScore]:
    """Return a verdict for each shape of each scene, on the map of its name."""
    verdicts = []
    for scene in scenes:
        target = targets.Text([f"a {thing.name}" for thing in scene.things])
        explanation = gradcam.explain(matcher, to_images([scene]), target=target, **options)
        masks = [to_mask(thing) for thing in scene.things]
        for k, heatmap in enumerate(explanation.heatmaps[0]):
            verdicts.append(score_map(heatmap, masks[k], masks[:k] + masks[k + 1 :]))
    return verdicts


def _batches(scenes: Sequence[Scene]) -> Iterator[Sequence[Scene]]:
    for start in range(0, len(scenes), BATCH):
        yield scenes[start : start + BATCH]
