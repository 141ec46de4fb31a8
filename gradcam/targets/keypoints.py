"""Targets for pose models: the score or the position of a keypoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.adapters import find_family
from gradcam.adapters.base import ModelRun, PoseAdapter, Poses
from gradcam.adapters.pose import GenericPoseFinder
from gradcam.errors import TargetError, shorten
from gradcam.hooks.containers import Batch, at_least_float32
from gradcam.options import AXES
from gradcam.targets.base import LOCAL_METHOD, BoundTarget, Box4, Instance, ScoreExtractor, Target, TargetScores
from gradcam.targets.boxes import list_numbers, name_image
from gradcam.targets.object_choice import find_overlaps, is_valid_index


@dataclass(frozen=True)
class Keypoint(Target):
    """A keypoint of a pose model: explain its heatmap's maximum, or its position.

    The score is the largest value of the keypoint's heatmap. If `axis` is given, the score is the keypoint's x or y in
    pixels, computed by soft-argmax: the mean of all positions, weighted by the softmax of the heatmap. Positive
    evidence then moves the keypoint to the right or down.

    Parameters
    ----------
    number : int, sequence of int, or all
        The keypoints to explain, counted from 0. The builtin `all`, or "all", means all keypoints.
    axis : str, default None
        The coordinate "x" or "y" to explain instead of the heatmap's maximum.
    box : int, default 0
        The number of the detected box, for models that predict keypoints in each box. Box 0 has the highest score.
    temperature : float, default None
        The divisor of the heatmap before the softmax. None means 0.05 for ViTPose, whose heatmaps peak at 1. For all
        other models, such as Keypoint R-CNN, None means 1, which suits logits.

    Raises
    ------
    TargetError
        If the number, axis, box or temperature is invalid. When used with a model: if the model has no keypoint
        heatmaps, if a keypoint or box does not exist, or if no box is detected in an image.

    Notes
    -----
    Supported models are torchvision's Keypoint R-CNN, Hugging Face's ViTPose, and all models whose output is keypoint
    heatmaps (N,P,h,w), or contains them as `heatmaps`. Coordinates are in pixels of the model's input image, and the
    centre of the first pixel is at 0.5. The position of the box is treated as a constant: a coordinate is explained
    only by the content of the box. The default method is "hirescam" (gradient times activation, element-wise), at each
    level of a feature pyramid.

    Examples
    --------
    >>> import gradcam, torch
    >>> from gradcam.targets import Keypoint
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 4, 1), torch.nn.ReLU(), torch.nn.Conv2d(8, 5, 1))
    >>> explanation = gradcam.explain(model, torch.rand(1, 3, 64, 64), "0", target=Keypoint([0, 3], "x"))
    >>> explanation.heatmaps.shape, explanation.instances[0][1].number
    (torch.Size([1, 2, 64, 64]), 3)

    References
    ----------
    Sun et al., "Integral Human Pose Regression", ECCV 2018, on the expectation of a heatmap.
    """

    number: Any
    axis: str | None = None
    box: int = 0
    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.axis is not None and self.axis not in AXES:
            raise TargetError(f"There is no axis {shorten(self.axis)}: choose x, y, or None for the heatmap's maximum.")
        _ = self.numbers
        if not is_valid_index(self.box):
            raise TargetError(
                f"The box is {shorten(self.box)}, expected the number of a box, such as 0 for the highest-scoring box."
            )
        if self.temperature is not None and not self.temperature > 0:
            raise TargetError(f"The temperature is {shorten(self.temperature)}, expected a number above 0.")

    @property
    def numbers(self) -> Sequence[Any] | None:
        """Return the numbers of the keypoints to explain; None if all keypoints are explained."""
        return list_numbers(self.number, "The keypoint")

    def bind(self, model: nn.Module, batch: Batch) -> BoundTarget:
        family = find_family(model, PoseAdapter) or GenericPoseFinder(model)
        extractor = KeypointScoreExtractor(family, batch, self)
        return BoundTarget(
            family.wrap(model), batch, extractor, family.layer, LOCAL_METHOD, has_places=True,
            own_output=lambda run: run.output,
        )  # fmt: skip


@dataclass(frozen=True)
class KeypointScoreExtractor(ScoreExtractor):
    """Extracts the scores of keypoints.

    In the first forward pass, `boxes` is None, and the target's box number selects a pose in each image. In later
    passes, on modified images, `boxes` has the box that was selected in each image. The pose with the largest product
    of score and overlap with this box is then explained. If no pose overlaps the box, the heatmap is zero.
    """

    family: PoseAdapter
    batch: Batch
    target: Keypoint
    boxes: Sequence[Box4] | None = None

    def score(self, output: ModelRun, images: int) -> TargetScores:
        poses = self.family.find_poses(output, self.batch)
        numbers = self._find_numbers(poses[0].heatmaps.shape[1])
        selected = [self._select_pose(i, image_poses) for i, image_poses in enumerate(poses)]
        values = torch.stack([self._compute_scores(pose)[numbers] for pose in selected])
        instances = [self._describe(pose, numbers) for pose in selected]
        boxes = None if selected[0].scores is None else [to_box(pose) for pose in selected]
        return TargetScores(values, None, None, replace(self, boxes=self.boxes or boxes), instances)

    def _find_numbers(self, count: int) -> list[int]:
        numbers = range(count) if self.target.numbers is None else self.target.numbers
        if missing := [number for number in numbers if number >= count]:
            raise TargetError(f"There is no keypoint {missing[0]}: the numbers are 0 to {count - 1}.")
        return list(numbers)

    def _select_pose(self, i: int, poses: Poses) -> Poses:
        """Select a pose by the target's box number or, in later passes, by score and overlap with the earlier box."""
        number = self.target.box
        if self.boxes is None or poses.scores is None:
            count, image = len(poses.heatmaps), name_image(self.batch, i)
            if not count:
                problem = f"No box with keypoints was found in {image}"
                raise TargetError(f"{problem}: no score is above the model's threshold.")
            if number >= count:
                range_hint = f"the numbers are 0 to {count - 1}"
                if poses.scores is None:
                    range_hint = "the keypoint heatmaps cover the whole image, so pass box=0"
                raise TargetError(f"There is no box {number} in {image}: {range_hint}.")
        else:
            similarities = find_overlaps(poses.regions, self.boxes[i]) * poses.scores
            if not len(similarities) or not float(similarities.max()) > 0:
                empty = poses.heatmaps.new_zeros(1, *poses.heatmaps.shape[1:])
                return Poses(empty, empty.new_tensor([self.boxes[i]]), poses.scores.new_zeros(1))
            number = int(similarities.argmax())
        return Poses._make(None if values is None else values[number : number + 1] for values in poses)

    def _compute_scores(self, pose: Poses) -> Tensor:
        """Return the scores (P,) of all keypoints."""
        heatmaps = pose.heatmaps[0]
        heatmaps = at_least_float32(heatmaps)
        if self.target.axis is None:
            return heatmaps.flatten(1).amax(1)
        temperature = self.family.temperature if self.target.temperature is None else self.target.temperature
        weights = (heatmaps.flatten(1) / temperature).softmax(1).reshape(heatmaps.shape)
        axis = AXES.index(self.target.axis)
        return weights.sum(1 + axis) @ find_centres(pose, axis).to(weights)

    def _describe(self, pose: Poses, numbers: Sequence[int]) -> list[Instance]:
        peaks, indices = pose.heatmaps[0].detach().flatten(1).max(1)
        width, labels = pose.heatmaps.shape[-1], self.family.labels
        across, down = find_centres(pose, 0)[indices % width].tolist(), find_centres(pose, 1)[indices // width].tolist()
        box = None if pose.scores is None else to_box(pose)
        number_of_box = None if box is None else self.target.box
        shared: dict[str, Any] = {"box": box, "axis": self.target.axis, "box_number": number_of_box}
        instances = []
        for number in numbers:
            name = labels[number] if labels and number < len(labels) else f"keypoint {number}"
            name = name if self.target.axis is None else f"{name}, {self.target.axis}"
            peak = float(peaks[number])
            confidence = self.family.to_confidence(peak) if pose.scores is None else float(pose.scores[0])
            point = across[number], down[number]
            instances.append(Instance("keypoint", name, None, confidence, number, point=point, **shared))
        return instances


def find_centres(pose: Poses, axis: int) -> Tensor:
    """Return the centres of a heatmap's columns (axis 0) or rows (axis 1), in pixels of the input image."""
    count = pose.heatmaps.shape[-1 - axis]
    start, end = pose.regions[0, axis], pose.regions[0, axis + 2]
    steps = torch.arange(count, dtype=start.dtype, device=start.device) + 0.5
    return start + steps * (end - start) / count


def to_box(pose: Poses) -> Box4:
    """Return the box of a pose as four numbers."""
    x0, y0, x1, y1 = pose.regions[0].tolist()
    return x0, y0, x1, y1
