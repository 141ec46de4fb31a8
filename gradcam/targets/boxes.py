"""Boxes that a detector found, and places where it found nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import TargetError, shorten
from gradcam.families import find_family
from gradcam.families.base import Candidates, Detections, Detector, Seen
from gradcam.hooks.nested import Batch
from gradcam.options import EDGES
from gradcam.targets.base import (
    LOCAL,
    Bound,
    Box4,
    Instance,
    Reader,
    Scored,
    Target,
    find_overlaps,
    is_number,
    to_label,
)

OFFERED = 3  # candidates in a message


@dataclass(frozen=True)
class Box(Target):
    """A detected box: explain its score, or the position of one of its edges.

    The score is that of the k-th box after the model's own postprocessing, which selects candidates and leaves their
    gradients unchanged. Maps are relu(sum over channels of gradient x activation) at each level of the feature pyramid,
    resized and added. They show one object, whereas the pooled gradients of Grad-CAM would show all objects of its class.

    Parameters
    ----------
    number : int, sequence of int, or all, default 0
        The boxes to explain, counted from 0, the highest-scoring first; the builtin `all`, or "all", for all boxes of each
        image.
    edge : str, default None
        "left", "top", "right" or "bottom": explain this edge's position in pixels instead of the score. Positive
        evidence moves the edge to the right or down.
    class_ : int or str, default None
        Count only boxes of this class, given by its index or, if the model has class names, by name.
    threshold : float, default None
        Count only boxes with at least this score. None uses the model's own threshold.

    Raises
    ------
    TargetError
        If the number or edge is invalid. When used with a model: if the model is not a detector, if an image has no
        box, or if a box number does not exist.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> from gradcam.targets import Box
    >>> model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
    ...     weights=None, weights_backbone=None, num_classes=3, score_thresh=0.0
    ... ).eval()
    >>> explanation = gradcam.explain(model, [torch.rand(3, 80, 120)], target=Box([0, 1]))
    >>> explanation.heatmaps.shape, explanation.instances[0][1].number
    (torch.Size([1, 2, 80, 120]), 1)

    References
    ----------
    Zhao and Chan, "ODAM: Gradient-based Instance-Specific Visual Explanations for Object Detection", ICLR 2023.
    """

    number: Any = 0
    edge: str | None = None
    class_: int | str | None = field(default=None, kw_only=True)
    threshold: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.edge is not None and self.edge not in EDGES:
            raise TargetError(f"There is no edge {shorten(self.edge)}: choose one of {', '.join(EDGES)}.")
        if self.numbers is not None and not all(is_number(it) for it in self.numbers):
            raise TargetError(
                f"The box is {shorten(self.number)}, expected its number from 0, several numbers, or 'all'."
            )

    @property
    def numbers(self) -> Sequence[Any] | None:
        """The numbers of the boxes; None for all."""
        if self.number is all or self.number == "all":
            return None
        return list(self.number) if isinstance(self.number, (list, tuple, range)) else [self.number]

    def bind(self, model: nn.Module, batch: Batch) -> Bound:
        family = find_detector(model)
        if self.threshold is not None and hasattr(family, "threshold"):
            family.threshold = self.threshold
        reader = BoxReader(family, batch, self, to_label(self.class_, family.labels))
        return _bind(family, model, batch, reader)


@dataclass(frozen=True)
class MissedBox(Target):
    """A missed detection: explain the evidence for an object in a place where the detector found none.

    Each candidate box before the model's own selection gets its class score times its intersection over union with that
    place, as in the similarity of D-RISE. The explained score is the largest of these products.

    Parameters
    ----------
    box : (float, float, float, float), or a sequence of such
        Left, top, right and bottom, in pixels of the image.
    class_ : int or str, default None
        The expected class, given by its index or, if the model has class names, by name. None for the most probable class
        there.

    Raises
    ------
    TargetError
        If the box is invalid. When used with a model: if the model is not a detector, the class is unknown, the box is
        outside the image, or no candidate overlaps the box.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> from gradcam.targets import MissedBox
    >>> model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
    ...     weights=None, weights_backbone=None, num_classes=3
    ... ).eval()
    >>> explanation = gradcam.explain(model, [torch.rand(3, 80, 120)], target=MissedBox((10, 20, 60, 70), 2))
    >>> explanation.instances[0][0].kind
    'missed'

    References
    ----------
    Petsiuk et al., "Black-box Explanation of Object Detectors via Saliency Maps", CVPR 2021, equation 3.
    """

    box: Any
    class_: int | str | None = None

    def __post_init__(self) -> None:
        try:
            shapes = [len(box) for box in self.boxes]
        except (TypeError, ValueError):
            shapes = [0]
        if not shapes or set(shapes) != {4} or any(it[0] >= it[2] or it[1] >= it[3] for it in self.boxes):
            raise TargetError(
                f"The box is {shorten(self.box)}, expected left, top, right, bottom in pixels, such as (40, 60, 220, 400)."
            )

    @property
    def boxes(self) -> list[Box4]:
        """All boxes, as a list."""
        several = isinstance(self.box[0], (list, tuple))
        return [tuple(map(float, box)) for box in (self.box if several else [self.box])]  # type: ignore[misc]  # of four

    def bind(self, model: nn.Module, batch: Batch) -> Bound:
        family = find_detector(model)
        label = to_label(self.class_, family.labels)
        for top, left, height, width in batch.windows or [(0, 0, *size) for size in batch.sizes]:
            moved = [(x1 - left, y1 - top, x2 - left, y2 - top) for x1, y1, x2, y2 in self.boxes]
            check_inside(moved, (round(height), round(width)))
        wanted = [[(box, label) for box in self.boxes]] * batch.images
        names = [[Instance("missed", name(family, label), label, box=box) for box in self.boxes]] * batch.images
        return _bind(family, model, batch, PlaceReader(family, batch, wanted, names))


class NoBoxError(TargetError):
    """There is no such box in an image. `candidates`: the best below the threshold, in pixels of the model's input."""

    subject: str
    image: int
    candidates: Sequence[Instance]

    @classmethod
    def of(cls, subject: str, image: int, candidates: Sequence[Instance]) -> NoBoxError:
        """Make the error with its message; a constructor of several arguments could not be pickled."""
        listed = []
        for candidate in candidates:
            edges = [f"{max(edge, 0):.0f}" for edge in candidate.box or (0, 0, 0, 0)]
            left, top, right, bottom = map(float, edges)
            if left < right and top < bottom:  # `MissedBox` takes no other box
                listed.append(f"{candidate.name} {candidate.score:.2g} at {','.join(edges)}")
        error = cls(
            f"{subject}: none is above the model's threshold. The best candidates are {'; '.join(listed) or 'none'}. To "
            "explain a missed object, use targets.MissedBox((left, top, right, bottom), class) "
            "(--missed LEFT,TOP,RIGHT,BOTTOM)."
        )
        error.subject, error.image, error.candidates = subject, image, candidates
        return error


def check_inside(boxes: Sequence[Box4], size: Sequence[int]) -> None:
    """Raise `TargetError` for a box outside of an image of this height and width."""
    height, width = size
    for left, top, right, bottom in boxes:
        if left >= width or top >= height or right <= 0 or bottom <= 0:
            raise TargetError(f"The box {(left, top, right, bottom)} is outside the image, {width} x {height} pixels.")


def find_detector(model: nn.Module) -> Detector:
    """What reads a detector's boxes. Raises `TargetError` for a model that is none, or of no known family."""
    family = find_family(model, Detector)
    if family is None:
        raise TargetError(
            f"{type(model).__name__} is not a supported detector. Pass target=, a function from the model's output to one "
            "score per image."
        )
    return family


def name(family: Detector, label: int | None) -> str:
    """What a class is called."""
    if label is None:
        return "anything"
    return family.labels[label] if family.labels and label < len(family.labels) else f"class {label}"


def _bind(family: Detector, model: nn.Module, batch: Batch, reader: Reader) -> Bound:
    def list_found(seen: Seen) -> list[list[Instance]]:
        return [[describe(family, found, k) for k in range(len(found.scores))] for found in family.read(seen, batch)]

    return Bound(
        family.wrap(model),
        batch,
        reader,
        family.layer,
        LOCAL,  # at each level of the pyramid: ODAM
        own_output=lambda seen: seen.output,
        list_found=list_found,
        has_places=True,
        layers=family.layers,
        reshape=family.reshape(batch),
    )


def describe(family: Detector, found: Detections, k: int, edge: str | None = None) -> Instance:
    """What is known of the k-th box of a picture."""
    label, score = int(found.labels[k]), float(found.scores[k].detach())
    mask = None if found.masks is None else found.masks[k].detach() > 0.5
    left, top, right, bottom = found.boxes[k].detach().tolist()
    return Instance("box", name(family, label), label, score, k, (left, top, right, bottom), edge, mask)


@dataclass(frozen=True)
class BoxReader(Reader):
    """The scores, or edges, of a target's boxes in a detector's output."""

    family: Detector
    batch: Batch
    wanted: Box
    label: int | None = None

    def score(self, output: Seen, images: int) -> Scored:
        found = self.family.read(output, self.batch)
        chosen = [self._choose(i, detections, output) for i, detections in enumerate(found)]
        if not any(chosen):
            raise self._nothing(0, output)
        edge = None if self.wanted.edge is None else EDGES.index(self.wanted.edge)
        values = [
            [it.scores[k] if edge is None else it.boxes[k, edge] for k in numbers] for it, numbers in zip(found, chosen)
        ]
        instances = [
            [describe(self.family, it, k, self.wanted.edge) for k in numbers] for it, numbers in zip(found, chosen)
        ]
        places = [[(each.box, each.index) for each in own] for own in instances]
        same = PlaceReader(self.family, self.batch, places, instances, edge, is_again=True)
        mine = [Detections(it.boxes[own], it.scores[own], it.labels[own]) for it, own in zip(found, chosen)]
        shorter = functools.partial(self.family.differentiate, output, self.batch, mine, edge)
        return replace(stack(values, instances, same), differentiate=shorter)

    def _choose(self, i: int, detections: Detections, output: Seen) -> list[int]:
        least, kept = self.wanted.threshold or 0.0, []
        for k, (label, score) in enumerate(zip(detections.labels.tolist(), detections.scores.tolist())):
            if self.label in (None, label) and score >= least:
                kept.append(k)
        if self.wanted.numbers is None:
            return kept
        if missing := [number for number in self.wanted.numbers if number >= len(kept)]:
            if not kept:
                raise self._nothing(i, output)
            there = f"there are {len(kept)}, 0 to {len(kept) - 1}"
            raise TargetError(f"There is no {self._what} {missing[0]} in {self._which(i)}: {there}.")
        return [kept[number] for number in self.wanted.numbers]

    @property
    def _what(self) -> str:
        return "box" if self.label is None else name(self.family, self.label)

    def _which(self, i: int) -> str:
        return "the image" if self.batch.images == 1 else f"image {i}"

    def _nothing(self, i: int, output: Seen) -> NoBoxError:
        candidates = self.family.weigh(output, self.batch, self.label)[i]
        best = candidates.scores.detach().topk(min(OFFERED, len(candidates.scores)))
        found = Detections(candidates.boxes[best.indices], best.values, candidates.labels[best.indices])
        instances = [describe(self.family, found, k) for k in range(len(best.values))]
        return NoBoxError.of(f"No {self._what} was found in {self._which(i)}", i, instances)


@dataclass(frozen=True)
class PlaceReader(Reader):
    """For each place (box and class, None for any) the best candidate's class score times overlap, in any output; or
    where one of its edges is. `instances`: what each is of. `is_again`: whether pictures were changed since, in which
    nothing may be left at a place."""

    family: Detector
    batch: Batch
    places: Sequence[Sequence[tuple[Any, int | None]]]
    instances: Sequence[Sequence[Instance]]
    edge: int | None = None
    is_again: bool = False

    def score(self, output: Seen, images: int) -> Scored:
        labels = {label for own in self.places for _, label in own}
        weighed = {label: self.family.weigh(output, self.batch, label) for label in labels}
        values, instances = [], []
        for i, (places, described) in enumerate(zip(self.places, self.instances)):
            best = [self._find_best(weighed[label][i], box) for box, label in places]
            values.append([value for value, _ in best])
            is_missed = [each.kind == "missed" for each in described]
            scores = [score if missed else each.score for missed, each, (_, score) in zip(is_missed, described, best)]
            instances.append([replace(each, score=score) for each, score in zip(described, scores)])
        return stack(values, instances, replace(self, is_again=True))

    def _find_best(self, candidates: Candidates, box: Box4) -> tuple[Tensor, float]:
        overlaps = find_overlaps(candidates.boxes, box)
        values = candidates.scores * overlaps
        best = int(values.detach().argmax()) if len(values) else -1
        if best < 0 or not float(overlaps[best].detach()) > 0:
            if self.is_again:
                return values.new_tensor(0.0 if self.edge is None else box[self.edge]), 0.0
            raise TargetError(
                "No candidate box of the model overlaps this box, so there is nothing to explain. Pass a larger box."
            )
        score = float(candidates.scores[best].detach())
        return (values[best] if self.edge is None else candidates.boxes[best, self.edge]), score


def stack(values: Sequence[Sequence[Tensor]], instances: Sequence[Sequence[Instance]], target: Reader) -> Scored:
    """Scores (N,K) of as many things in each image as there are; where there are fewer, zero and class -1."""
    most = max(map(len, values))
    some = next(value for own in values for value in own)
    zero = some.detach().new_zeros(())
    rows = [torch.stack([*own, *[zero] * (most - len(own))]) for own in values]
    classes = [[-1 if it.index is None else it.index for it in own] + [-1] * (most - len(own)) for own in instances]
    joined = torch.stack(rows)
    joined = joined.to(torch.promote_types(joined.dtype, torch.float32))
    found = torch.tensor(classes, dtype=torch.int64, device=joined.device)
    return Scored(joined, found, None, target, instances)
