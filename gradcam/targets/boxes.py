"""Targets for detectors: detected boxes, and boxes around objects that the detector missed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradcam.adapters import find_family
from gradcam.adapters.base import Candidates, Detections, DetectorAdapter, Family, ModelRun
from gradcam.errors import TargetError, shorten
from gradcam.hooks.containers import Batch, at_least_float32
from gradcam.options import EDGES, argument_error
from gradcam.targets.base import LOCAL_METHOD, BoundTarget, Box4, Instance, ScoreExtractor, Target, TargetScores
from gradcam.targets.object_choice import find_overlaps, is_valid_index, to_label

MAX_CANDIDATES_IN_MESSAGE = 3
AnyFamily = TypeVar("AnyFamily", bound=Family)


@dataclass(frozen=True)
class Box(Target):
    """A detected box: explain its score, or the position of one of its edges.

    Boxes are numbered after the model's own postprocessing. Postprocessing only selects among candidate boxes, so the
    gradient of a selected score is unchanged. Each level of the feature pyramid has a map: relu(sum over channels of
    gradient x activation). These maps are resized and added. The resulting map shows only the explained object. Pooled
    gradients, as in Grad-CAM, would show all objects of the class.

    Parameters
    ----------
    number : int, sequence of int, or all, default 0
        The boxes to explain, by number: box 0 has the highest score. The builtin `all`, or "all", means all boxes of
        each image.
    edge : str, default None
        "left", "top", "right" or "bottom": explain this edge's position in pixels instead of the score. Positive
        evidence moves the edge to the right or down.
    class_ : int or str, default None
        Consider only boxes of this class. The class is an index or, if the model has class names, a name.
    threshold : float, default None
        Consider only boxes with at least this score. None means the model's own threshold.

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
        _ = self.numbers

    @property
    def numbers(self) -> Sequence[Any] | None:
        """Return the numbers of the boxes to explain; None if all boxes are explained."""
        return list_numbers(self.number, "The box")

    def bind(self, model: nn.Module, batch: Batch) -> BoundTarget:
        family = require_family(model, DetectorAdapter, "detector")
        if self.threshold is not None and hasattr(family, "threshold"):
            family.threshold = self.threshold
        extractor = BoxScoreExtractor(family, batch, self, to_label(self.class_, family.labels))
        return _bind(family, model, batch, extractor)


@dataclass(frozen=True)
class MissedBox(Target):
    """A missed object: explain the evidence for an object that the detector did not find in a given box.

    All of the model's boxes before postprocessing are candidates. The class score of each candidate is multiplied by
    its intersection over union with the given box, as in D-RISE. The explained score is the largest product.

    Parameters
    ----------
    box : (float, float, float, float), or a sequence of such tuples
        Left, top, right and bottom, in pixels of the image.
    class_ : int or str, default None
        The expected class: an index or, if the model has class names, a name. None means the most probable class of
        each candidate.

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
        if not shapes or set(shapes) != {4} or any(box[0] >= box[2] or box[1] >= box[3] for box in self.boxes):
            raise TargetError(
                f"The box is {shorten(self.box)}, expected left, top, right, bottom in pixels, such as (40, 60, 220, 400)."
            )

    @property
    def boxes(self) -> list[Box4]:
        """Return all boxes as a list."""
        has_several = isinstance(self.box[0], (list, tuple))
        return [tuple(map(float, box)) for box in (self.box if has_several else [self.box])]  # type: ignore[misc]  # of four

    def bind(self, model: nn.Module, batch: Batch) -> BoundTarget:
        family = require_family(model, DetectorAdapter, "detector")
        label = to_label(self.class_, family.labels)
        for y, x, height, width in batch.windows or [(0, 0, *size) for size in batch.sizes]:
            visible_boxes = [(x1 - x, y1 - y, x2 - x, y2 - y) for x1, y1, x2, y2 in self.boxes]
            check_inside(visible_boxes, (round(height), round(width)))
        name = name_class(family, label)
        instances = [[Instance("missed", name, label, box=box) for box in self.boxes]] * batch.images
        return _bind(family, model, batch, PlaceScoreExtractor(family, batch, instances))


def list_numbers(number: Any, name: str) -> Sequence[Any] | None:
    """Return the numbers that a target selects; None for all. Raise `TargetError` for an empty or invalid selection."""
    if number is all or number == "all":
        return None
    numbers = list(number) if isinstance(number, (list, tuple, range)) else [number]
    if not numbers or not all(map(is_valid_index, numbers)):
        raise argument_error(number, name, "a number from 0, several numbers, or 'all'.", TargetError)
    return numbers


class NoBoxError(TargetError):
    """The error for an image without the requested box.

    `candidates` are the highest-scoring boxes below the threshold, in pixels of the model's input.
    """

    subject: str
    image: int
    candidates: Sequence[Instance]

    @classmethod
    def of(cls, subject: str, image: int, candidates: Sequence[Instance]) -> NoBoxError:
        """Create the error and its message.

        The constructor itself takes only a message, so that errors can be pickled.
        """
        descriptions = []
        for candidate in candidates:
            edges = [f"{max(edge, 0):.0f}" for edge in candidate.box or (0, 0, 0, 0)]
            x0, y0, x1, y1 = map(float, edges)
            if x0 < x1 and y0 < y1:  # Suggest no empty box, because `MissedBox` rejects empty boxes.
                descriptions.append(f"{candidate.name} {candidate.score:.2g} at {','.join(edges)}")
        error = cls(
            f"{subject}: no score is above the model's threshold. Best candidates: {'; '.join(descriptions) or 'none'}. "
            "To explain a missed object, use targets.MissedBox((left, top, right, bottom), class) "
            "(--missed LEFT,TOP,RIGHT,BOTTOM)."
        )
        error.subject, error.image, error.candidates = subject, image, candidates
        return error


def name_image(batch: Batch, i: int) -> str:
    """Return how a message names image i of a batch."""
    return "the image" if batch.images == 1 else f"image {i}"


def check_inside(boxes: Sequence[Box4], size: Sequence[int]) -> None:
    """Raise `TargetError` if a box is outside the image, whose (height, width) is `size`."""
    height, width = size
    for x0, y0, x1, y1 in boxes:
        if x0 >= width or y0 >= height or x1 <= 0 or y1 <= 0:
            raise TargetError(f"The box {(x0, y0, x1, y1)} is outside the image, {width} x {height} pixels.")


def require_family(model: nn.Module, adapter: type[AnyFamily], kind: str) -> AnyFamily:
    """Return the adapter for a model. Raise `TargetError` if the package has no adapter of this type for the model."""
    family = find_family(model, adapter)
    if family is None:
        problem = f"{type(model).__name__} is not a supported {kind}"
        raise TargetError(f"{problem}. Pass target=, a function from the model's output to one score per image.")
    return family


def name_class(family: DetectorAdapter, label: int | None) -> str:
    """Return a class's name for messages and instances."""
    if label is None:
        return "anything"
    return family.labels[label] if family.labels and label < len(family.labels) else f"class {label}"


def _bind(family: DetectorAdapter, model: nn.Module, batch: Batch, extractor: ScoreExtractor) -> BoundTarget:
    def list_found(run: ModelRun) -> list[list[Instance]]:
        return [[describe(family, image, k) for k in range(len(image.scores))] for image in family.read(run, batch)]

    # As in ODAM, each level of the feature pyramid (`family.layers`) is explained with the same method.
    return BoundTarget(
        family.wrap(model), batch, extractor, family.layer, LOCAL_METHOD, own_output=lambda run: run.output,
        list_found=list_found, has_places=True, layers=family.layers, reshape=family.reshape(batch),
    )  # fmt: skip


def describe(family: DetectorAdapter, detections: Detections, k: int, edge: str | None = None) -> Instance:
    """Describe the k-th detection of an image."""
    label, score = int(detections.labels[k]), float(detections.scores[k].detach())
    mask = None if detections.masks is None else detections.masks[k].detach() > 0.5
    x0, y0, x1, y1 = detections.boxes[k].detach().tolist()
    return Instance("box", name_class(family, label), label, score, k, (x0, y0, x1, y1), edge, mask)


@dataclass(frozen=True)
class BoxScoreExtractor(ScoreExtractor):
    """Extracts the scores of detected boxes, or the position of one edge of each box."""

    family: DetectorAdapter
    batch: Batch
    target: Box
    label: int | None = None

    def score(self, output: ModelRun, images: int) -> TargetScores:
        detections = self.family.read(output, self.batch)
        box_numbers = [self._select_boxes(i, image, output) for i, image in enumerate(detections)]
        if not any(box_numbers):
            raise self._make_no_box_error(0, output)
        edge = None if self.target.edge is None else EDGES.index(self.target.edge)
        values, instances, explained = [], [], []
        for image, numbers in zip(detections, box_numbers):
            values.append([image.scores[k] if edge is None else image.boxes[k, edge] for k in numbers])
            instances.append([describe(self.family, image, k, self.target.edge) for k in numbers])
            explained.append(Detections(image.boxes[numbers], image.scores[numbers], image.labels[numbers]))
        places = PlaceScoreExtractor(self.family, self.batch, instances, edge, allows_no_candidate=True)
        differentiate = functools.partial(self.family.differentiate, output, self.batch, explained, edge)
        return replace(pad_scores(values, instances, places), differentiate=differentiate)

    def _select_boxes(self, i: int, detections: Detections, output: ModelRun) -> list[int]:
        boxes, threshold = zip(detections.labels.tolist(), detections.scores.tolist()), self.target.threshold or 0.0
        matches = [k for k, (label, score) in enumerate(boxes) if self.label in (None, label) and score >= threshold]
        if self.target.numbers is None:
            return matches
        if missing := [number for number in self.target.numbers if number >= len(matches)]:
            if not matches:
                raise self._make_no_box_error(i, output)
            problem = f"There is no {self._object_name} {missing[0]} in {name_image(self.batch, i)}"
            raise TargetError(f"{problem}: the numbers are 0 to {len(matches) - 1}.")
        return [matches[number] for number in self.target.numbers]

    @property
    def _object_name(self) -> str:
        return "box" if self.label is None else name_class(self.family, self.label)

    def _make_no_box_error(self, i: int, output: ModelRun) -> NoBoxError:
        candidates = self.family.list_candidates(output, self.batch, self.label)[i]
        scores, indices = candidates.scores.detach().topk(min(MAX_CANDIDATES_IN_MESSAGE, len(candidates.scores)))
        detections = Detections(candidates.boxes[indices], scores, candidates.labels[indices])
        instances = [describe(self.family, detections, k) for k in range(len(scores))]
        return NoBoxError.of(f"No {self._object_name} was found in {name_image(self.batch, i)}", i, instances)


@dataclass(frozen=True)
class PlaceScoreExtractor(ScoreExtractor):
    """Extracts scores for given boxes and classes (`instances`). If a class is None, candidates of any class are used.

    For each box, the best candidate has the largest product of class score and overlap with the box. This product is
    the score. If `edge` is set, the position of the candidate's edge is the score instead. If
    `allows_no_candidate` is True (for modified images), a box that overlaps no candidate is not an error.
    """

    family: DetectorAdapter
    batch: Batch
    instances: Sequence[Sequence[Instance]]
    edge: int | None = None
    allows_no_candidate: bool = False

    def score(self, output: ModelRun, images: int) -> TargetScores:
        labels = {instance.index for row in self.instances for instance in row}
        candidates = {label: self.family.list_candidates(output, self.batch, label) for label in labels}
        values, instances = [], []
        for i, row in enumerate(self.instances):
            best = [self._find_best(candidates[instance.index][i], instance.box) for instance in row]
            values.append([value for value, _ in best])
            # Describe a detected box by the score that the detector reported, and a missed box by the candidate's
            # score.
            scores = [score if instance.kind == "missed" else instance.score for instance, (_, score) in zip(row, best)]
            instances.append([replace(instance, score=score) for instance, score in zip(row, scores)])
        return pad_scores(values, instances, replace(self, allows_no_candidate=True))

    def _find_best(self, candidates: Candidates, box: Any) -> tuple[Tensor, float]:
        overlaps = find_overlaps(candidates.boxes, box)
        values = candidates.scores * overlaps
        best = int(values.detach().argmax()) if len(values) else -1
        if best < 0 or not float(overlaps[best].detach()) > 0:
            if self.allows_no_candidate:
                return values.new_tensor(0.0 if self.edge is None else box[self.edge]), 0.0
            problem = "No candidate box of the model overlaps this box, so there is nothing to explain"
            raise TargetError(f"{problem}. Pass a larger box.")
        score = float(candidates.scores[best].detach())
        return (values[best] if self.edge is None else candidates.boxes[best, self.edge]), score


def pad_scores(
    values: Sequence[Sequence[Tensor]], instances: Sequence[Sequence[Instance]], target: ScoreExtractor
) -> TargetScores:
    """Stack the scores of images as (N,K). Images with fewer than K objects are padded with score 0 and class -1."""
    zero = next(value for row in values for value in row).detach().new_zeros(())
    scores = torch.stack([torch.stack(column) for column in zip_longest(*values, fillvalue=zero)], 1)
    indices = [[-1 if instance.index is None else instance.index for instance in row] for row in instances]
    indices = [row + [-1] * (scores.shape[1] - len(row)) for row in indices]
    scores = at_least_float32(scores)
    classes = torch.tensor(indices, dtype=torch.int64, device=scores.device)
    return TargetScores(scores, classes, None, target, instances)
