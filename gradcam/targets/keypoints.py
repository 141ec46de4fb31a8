"""Keypoints: where in the picture a model saw what made it place a point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import TargetError, shorten
from gradcam.families import find_family
from gradcam.families.base import PoseFinder, Poses, Seen
from gradcam.families.pose import PlainPose
from gradcam.hooks.nested import Batch
from gradcam.options import AXES
from gradcam.targets.base import LOCAL, Bound, Box4, Instance, Reader, Scored, Target, find_overlaps, is_number


@dataclass(frozen=True)
class Keypoint(Target):
    """A keypoint of a pose model: explain its heatmap's maximum, or its position.

    The score is the largest value of the keypoint's heatmap. With `axis` it is one of the point's coordinates in
    pixels: the mean of all positions, weighted by the softmax of the heatmap (soft-argmax). Positive evidence then
    moves the point to the right or down.

    Parameters
    ----------
    number : int, sequence of int, or all
        The keypoints to explain, counted from 0; the builtin `all`, or "all", for all of them.
    axis : str, default None
        "x" or "y": explain that coordinate instead of the heatmap's maximum.
    box : int, default 0
        The number of the detected box, the highest-scoring first, if the model finds keypoints per box.
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
    heatmaps (N,P,h,w), or contains them as `heatmaps`. Coordinates are in pixels of the model's input image; the centre
    of the first pixel is at 0.5. The position of a box counts as fixed: a coordinate is explained by the content of the
    box alone. Maps are "hirescam" (gradient times activation, element-wise) at each level of a feature pyramid.

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
        if self.numbers is not None and not (self.numbers and all(map(is_number, self.numbers))):
            raise TargetError(
                f"The keypoint is {shorten(self.number)}, expected its number from 0, several numbers, or 'all'."
            )
        if not is_number(self.box):
            raise TargetError(f"The box is {shorten(self.box)}, expected its number from 0, the highest-scoring box.")
        if self.temperature is not None and not self.temperature > 0:
            raise TargetError(f"The temperature is {shorten(self.temperature)}, expected a number above 0.")

    @property
    def numbers(self) -> Sequence[Any] | None:
        """The numbers of the keypoints; None for all."""
        if self.number is all or self.number == "all":
            return None
        return list(self.number) if isinstance(self.number, (list, tuple, range)) else [self.number]

    def bind(self, model: nn.Module, batch: Batch) -> Bound:
        known = find_family(model, PoseFinder) or PlainPose(model)
        reader = KeypointReader(known, batch, self)
        return Bound(
            known.wrap(model), batch, reader, known.layer, LOCAL, own_output=lambda seen: seen.output, has_places=True
        )


@dataclass(frozen=True)
class KeypointReader(Reader):
    """The scores of a target's keypoints in what a model gave. `boxes`: for each picture the one that they are in, once it
    is chosen; in another output that is the one which is most alike and sure, or an empty one."""

    family: PoseFinder
    batch: Batch
    wanted: Keypoint
    boxes: Sequence[Box4] | None = None

    def score(self, output: Seen, images: int) -> Scored:
        found = self.family.find(output, self.batch)
        numbers = self._find_numbers(found[0].heatmaps.shape[1])
        chosen = [self._choose(i, poses) for i, poses in enumerate(found)]
        values = torch.stack([self._measure(each)[numbers] for each in chosen])
        instances = [self._describe(each, numbers) for each in chosen]
        boxes = None if chosen[0].scores is None else [to_box(each) for each in chosen]
        return Scored(values, None, None, replace(self, boxes=self.boxes or boxes), instances)

    def _find_numbers(self, count: int) -> list[int]:
        numbers = range(count) if self.wanted.numbers is None else self.wanted.numbers
        if missing := [number for number in numbers if number >= count]:
            raise TargetError(f"There is no keypoint {missing[0]}: the model has {count}, 0 to {count - 1}.")
        return list(numbers)

    def _choose(self, i: int, poses: Poses) -> Poses:
        """Of what was found in a picture the one that counts, alone."""
        number = self.wanted.box
        if self.boxes is None or poses.scores is None:
            count, which = len(poses.heatmaps), "the image" if self.batch.images == 1 else f"image {i}"
            if not count:
                raise TargetError(f"No box with keypoints was found in {which}: none is above the model's threshold.")
            if number >= count:
                there = (
                    "the keypoint heatmaps cover the whole image, so pass box=0"
                    if poses.scores is None
                    else f"there are {count}, 0 to {count - 1}"
                )
                raise TargetError(f"There is no box {number} in {which}: {there}.")
        else:
            alike = find_overlaps(poses.regions, self.boxes[i]) * poses.scores
            if not len(alike) or not float(alike.max()) > 0:
                blank = poses.heatmaps.new_zeros(1, *poses.heatmaps.shape[1:])
                return Poses(blank, blank.new_tensor([self.boxes[i]]), poses.scores.new_zeros(1))
            number = int(alike.argmax())
        own = slice(number, number + 1)
        return Poses(poses.heatmaps[own], poses.regions[own], None if poses.scores is None else poses.scores[own])

    def _measure(self, found: Poses) -> Tensor:
        """The scores (P,) of all keypoints."""
        heatmaps = found.heatmaps[0]
        heatmaps = heatmaps.to(torch.promote_types(heatmaps.dtype, torch.float32))
        if self.wanted.axis is None:
            return heatmaps.flatten(1).amax(1)
        temperature = self.family.temperature if self.wanted.temperature is None else self.wanted.temperature
        shares = (heatmaps.flatten(1) / temperature).softmax(1).reshape(heatmaps.shape)
        axis = AXES.index(self.wanted.axis)
        return shares.sum(1 + axis) @ find_centres(found, axis).to(shares)

    def _describe(self, found: Poses, numbers: Sequence[int]) -> list[Instance]:
        peaks, places = found.heatmaps[0].detach().flatten(1).max(1)
        rows, columns = (places // found.heatmaps.shape[-1]).tolist(), (places % found.heatmaps.shape[-1]).tolist()
        across, down = find_centres(found, 0).tolist(), find_centres(found, 1).tolist()
        instances = []
        for number in numbers:
            labels, peak = self.family.labels, float(peaks[number])
            name = labels[number] if labels and number < len(labels) else f"keypoint {number}"
            sure = self.family.rate(peak) if found.scores is None else float(found.scores[0])
            box = None if found.scores is None else to_box(found)
            point = (across[columns[number]], down[rows[number]])
            full = name if self.wanted.axis is None else f"{name}, {self.wanted.axis}"
            instances.append(Instance("keypoint", full, None, sure, number, box, point=point))
        return instances


def find_centres(found: Poses, axis: int) -> Tensor:
    """Where the centres of a heatmap's columns (axis 0) or rows (1) are, in pixels of the picture."""
    count = found.heatmaps.shape[-1 - axis]
    first, last = found.regions[0, axis], found.regions[0, axis + 2]
    steps = torch.arange(count, dtype=first.dtype, device=first.device) + 0.5
    return first + steps * (last - first) / count


def to_box(found: Poses) -> Box4:
    """The box that the keypoints are in."""
    left, top, right, bottom = found.regions[0].tolist()
    return left, top, right, bottom
