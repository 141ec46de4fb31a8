"""How faithful maps of the models of drawn pictures are: whether they lie on what was asked for."""

from __future__ import annotations

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
    Scene,
    Thing,
    Wish,
    draw_scene,
    draw_scenes,
    to_boxes,
    to_classes,
    to_images,
)

OVERLAP = 0.5  # of a box that was found with that of a shape: less is another one
BATCH = 10
FADED = 0.5  # opacity of shapes that a detector misses


@dataclass(frozen=True)
class Verdict:
    """`energy`: the share of a map that lies where it should. `is_inside`: whether its maximum does. `is_right`: whether
    more of it lies there than in any other place that it might be of."""

    energy: float
    is_inside: bool
    is_right: bool


def judge(heatmap: Tensor, mask: Tensor, others: Sequence[Tensor] = ()) -> Verdict:
    """A map (H,W), where it should be, bool (H,W), and other places. A blank one is nowhere."""
    total, own = float(heatmap.sum()), float(heatmap[mask].sum())
    if total <= 0:
        return Verdict(0.0, False, False)
    is_right = all(float(heatmap[other].sum()) < own for other in others)
    return Verdict(own / total, bool(mask.flatten()[int(heatmap.argmax())]), is_right)


def summarise(verdicts: Sequence[Verdict]) -> tuple[float, float]:
    """The mean energy, and the share of maxima inside."""
    return float(np.mean([verdict.energy for verdict in verdicts])), float(
        np.mean([verdict.is_inside for verdict in verdicts])
    )


def share_right(verdicts: Sequence[Verdict]) -> float:
    """The share of maps of which more lies in the right place than in any other."""
    return float(np.mean([verdict.is_right for verdict in verdicts]))


def to_mask(thing: Thing) -> Tensor:
    """The pixels of its box."""
    left, top, right, bottom = thing.box
    mask = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    mask[top:bottom, left:right] = True
    return mask


def judge_boxes(detector: nn.Module, scenes: Sequence[Scene], **options: Any) -> list[Verdict]:
    """A verdict for each shape that was found, on the map of its box."""
    verdicts = []
    for batch in _batches([scene for scene in scenes if scene.things]):
        explanation = gradcam.explain(detector, list(to_images(batch)), target=targets.Box(all), **options)
        for scene, heatmaps, actual in zip(batch, explanation.heatmaps, explanation.instances):
            for instance, heatmap in zip(actual, heatmaps):
                thing = match(scene, instance.box, instance.index)
                if thing is not None:
                    verdicts.append(judge(heatmap, to_mask(thing)))
    return verdicts


def match(scene: Scene, box: Sequence[float], label: int) -> Thing | None:
    """The shape that was found by this box and label, None where that is wrong."""
    truth = to_boxes(scene)
    overlaps = box_iou(torch.tensor([box]), truth["boxes"])[0] * (truth["labels"] == label)
    best = int(overlaps.argmax())
    return scene.things[best] if overlaps[best] > OVERLAP else None


def share_found(detector: nn.Module, scenes: Sequence[Scene]) -> tuple[float, float]:
    """The share of the shapes that are found, and of the boxes that are right."""
    actual, boxes, right = 0, 0, 0
    for scene in scenes:
        with torch.no_grad():
            (output,) = detector(list(to_images([scene])))
        pairs = [match(scene, box, label) for box, label in zip(output["boxes"].tolist(), output["labels"].tolist())]
        matched = [thing for thing in pairs if thing is not None]
        actual, boxes, right = actual + len({id(thing) for thing in matched}), boxes + len(pairs), right + len(matched)
    return actual / sum(len(scene.things) for scene in scenes), right / boxes


def draw_missed(detector: nn.Module, seed: int, count: int) -> Iterator[Scene]:
    """So many scenes of three shapes, the first of which is faded so that the detector misses it."""
    number = 0
    while count:
        wishes = [Wish(opacity=FADED), Wish(), Wish()]
        scene = draw_scene(np.random.default_rng([seed, number]), things=wishes)
        number += 1
        with torch.no_grad():
            (output,) = detector(list(to_images([scene])))
        actual = [match(scene, box, label) for box, label in zip(output["boxes"].tolist(), output["labels"].tolist())]
        if len(scene.things) == len(wishes) and all(thing is not scene.things[0] for thing in actual):
            count -= 1
            yield scene


def judge_missed(detector: nn.Module, scenes: Sequence[Scene], **options: Any) -> list[Verdict]:
    """A verdict for the first shape of each scene, on the map of the place where nothing was found."""
    verdicts = []
    for scene in scenes:
        target = targets.MissedBox(scene.things[0].box, 1 + scene.things[0].shape)
        explanation = gradcam.explain(detector, list(to_images([scene])), target=target, **options)
        verdicts.append(judge(explanation.heatmaps[0, 0], to_mask(scene.things[0])))
    return verdicts


def judge_masks(segmenter: nn.Module, scenes: Sequence[Scene], **options: Any) -> list[Verdict]:
    """A verdict for each shape of which a region was found, on the map of that region."""
    verdicts = []
    for scene in scenes:
        images = to_images([scene])
        with torch.no_grad():
            predicted = segmenter(images)[0].argmax(0)
        for thing in scene.things:
            mask = torch.from_numpy(thing.mask)
            inside = predicted[mask] == 1 + thing.shape
            if inside.float().mean() < OVERLAP:
                continue
            down, across = (mask & (predicted == 1 + thing.shape)).nonzero()[0].tolist()
            target = targets.Mask(1 + thing.shape, (across, down))
            explanation = gradcam.explain(segmenter, images, target=target, **options)
            verdicts.append(judge(explanation.heatmaps[0, 0], to_mask(thing)))
    return verdicts


def share_of_pixels(segmenter: nn.Module, scenes: Sequence[Scene]) -> tuple[float, float]:
    """The share of pixels that are classified right, and the mean over shapes of intersection over union."""
    with torch.no_grad():
        predicted = torch.cat([segmenter(to_images(batch)).argmax(1) for batch in _batches(scenes)])
    truth = torch.stack([to_classes(scene) for scene in scenes])
    classes = range(1, 1 + len(SHAPES))
    unions = [((predicted == k) | (truth == k)).sum() for k in classes]
    shared = [((predicted == k) & (truth == k)).sum() for k in classes]
    return float((predicted == truth).float().mean()), float(np.mean([a / b for a, b in zip(shared, unions)]))


def draw_three(seed: int, count: int, *, alike: bool) -> Iterator[Scene]:
    """So many scenes of three shapes, whose names differ: in shape and colour, or, if they are to be alike, one of the
    others has the first one's shape and one has its colour."""
    number = 0
    while count:
        chance = np.random.default_rng([seed, number])
        number += 1
        shapes, colours = chance.permutation(len(SHAPES))[:3], chance.permutation(len(COLOURS))[:3]
        if alike:
            shapes[1], colours[2] = shapes[0], colours[0]
        scene = draw_scene(chance, things=[Wish(int(shape), int(colour)) for shape, colour in zip(shapes, colours)])
        if len(scene.things) == 3:
            count -= 1
            yield scene


def judge_texts(matcher: nn.Module, scenes: Sequence[Scene], **options: Any) -> list[Verdict]:
    """A verdict for each shape of each scene, on the map of its name."""
    verdicts = []
    for scene in scenes:
        target = targets.Text([f"a {thing.name}" for thing in scene.things])
        explanation = gradcam.explain(matcher, to_images([scene]), target=target, **options)
        masks = [to_mask(thing) for thing in scene.things]
        for k, heatmap in enumerate(explanation.heatmaps[0]):
            verdicts.append(judge(heatmap, masks[k], masks[:k] + masks[k + 1 :]))
    return verdicts


def _batches(scenes: Sequence[Scene]) -> Iterator[Sequence[Scene]]:
    for start in range(0, len(scenes), BATCH):
        yield scenes[start : start + BATCH]


__all__ = [
    "Verdict", "draw_missed", "draw_scenes", "draw_three", "judge", "judge_boxes", "judge_masks", "judge_missed",
    "judge_texts", "share_found", "share_of_pixels", "share_right", "summarise",
]  # fmt: skip
