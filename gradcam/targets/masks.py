"""Targets for segmentation models: a class within a mask."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional

from gradcam.adapters import find_family
from gradcam.adapters.base import ModelRun, SegmenterAdapter
from gradcam.adapters.segmentation import GenericSegmenter
from gradcam.errors import ImageError, TargetError, format_fields, shorten
from gradcam.hooks.containers import Batch, at_least_float32
from gradcam.images.opencv import cv2
from gradcam.images.read import read_image, read_label_mask, to_numpy
from gradcam.layers.frames import find_frame
from gradcam.options import argument_error, check_choice
from gradcam.targets.base import LOCAL_METHOD, BoundTarget, Box4, Instance, ScoreExtractor, Target, TargetScores
from gradcam.targets.classes import check_class_range, probabilities, to_two_classes
from gradcam.targets.object_choice import to_label

REDUCTIONS = ("mean", "sum")
FORMS = (
    "a point (x, y), a box (left, top, right, bottom), an array (H,W) of bools or integers, the path of an image, or None "
    "for the pixels predicted as the class"
)
LOSSY_SUFFIXES = (".jpg", ".jpeg")  # Lossy compression may turn black pixels into dark grey ones.
# The number of neighbours of a pixel: diagonal neighbours count, so that thin diagonal structures stay connected.
CONNECTIVITY = 8
MAX_CLASSES_IN_MESSAGE = 5


@dataclass(frozen=True, eq=False)
class Mask(Target):
    """A class in a region of an image: explain the class's logit in this region, for segmentation models.

    The score is the mean or the sum of the class's logits y over the mask M. The mean is
    ``1 / |M| * sum(y[i, j] for i, j in M)``. y is resized to the image's size, as in the model's own postprocessing.

    At each cell, the map is relu(sum over channels of gradient x activation), so the map shows the evidence for this
    region only (Seg-XRes-CAM with a window of one cell). With ``method="gradcam"``, the gradients are pooled, and the
    map shows the class everywhere in the image (Seg-Grad-CAM).

    A model that returns masks with classes, such as Mask2Former, has no logit per pixel. Its score is the class
    probability times the mask probability, summed over the masks. A single logit counts as two classes: 1 is positive,
    0 is the background.

    The default layer is the last stage of the backbone or encoder. The closer a layer is to the output, the more its
    map resembles the mask itself.

    Parameters
    ----------
    class_ : int, str, or sequence of these, default None
        The class: an index or, if the model has class names, a name. Each class gives one map. If `mask` is a point,
        None means the class predicted at this point. Otherwise, None means the most frequent predicted class in the
        mask or the image, other than the background.
    mask : sequence, array, Tensor or path, default None
        The pixels. None selects all pixels predicted as the class. A point (x, y), in pixels of the image, selects the
        pixels of the class that are connected to the point by edges or corners. A box is (left, top, right, bottom). An
        array of bools or integers is one mask (H,W), or one mask per image (N,H,W). Masks have the size of the model's
        input. Non-zero pixels are inside the mask. A path names an image file with labels, grey values or colours. All
        pixels that are not black are inside the mask.
    reduction : str, default "mean"
        "mean" or "sum" of the logits over the mask.

    Raises
    ------
    TargetError
        If the reduction is unknown, or the mask is invalid. When used with a model: if the model is not a segmentation
        model, or if the class does not exist or is predicted at no pixel. The error is also raised if a mask is empty
        or does not have the input image's size, or if the point is outside the image.
    ImageError
        When used with a model: if the mask file cannot be read.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> from gradcam.targets import Mask
    >>> model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
    ...     weights=None, weights_backbone=None, num_classes=4
    ... ).eval()
    >>> explanation = gradcam.explain(model, torch.rand(1, 3, 64, 64), target=Mask(2, (8, 16, 24, 32)))
    >>> explanation.layer, explanation.instances[0][0].box
    ('backbone:high', (8.0, 16.0, 24.0, 32.0))

    References
    ----------
    Hasany et al., "Seg-XRes-CAM: Explaining Spatially Local Regions in Image Segmentation", CVPR Workshops 2023;
    Vinogradova et al., "Towards Interpretable Semantic Segmentation via Gradient-weighted Class Activation Mapping",
    AAAI 2020 (with the sum).
    """

    class_: Any = None
    mask: Any = None
    reduction: str = field(default="mean", kw_only=True)

    __repr__ = format_fields

    def __post_init__(self) -> None:
        check_choice(self.reduction, "reduction", REDUCTIONS, TargetError)
        _ = self.kind
        for class_ in self.classes or ():
            if not isinstance(class_, str) and not _is_integer(class_):
                expected = "its index or its label, or several of them."
                raise argument_error(self.class_, "The class", expected, TargetError)

    @property
    def kind(self) -> str:
        """Return the form of the mask: "predicted", "point", "box", "array" or "file".

        Raises `TargetError` for any other form.
        """
        mask = self.mask
        if mask is None:
            return "predicted"
        if isinstance(mask, (str, os.PathLike)):
            return "file"
        if isinstance(mask, (Tensor, np.ndarray)) and mask.ndim in (2, 3):
            if to_numpy(mask).dtype.kind in "biu":
                return "array"
            raise TargetError(f"The mask is {mask.dtype}, expected bools or integers: pass mask > 0.5, for example.")
        if isinstance(mask, (tuple, list)) and len(mask) in (2, 4) and all(map(_is_number, mask)):
            if len(mask) == 4 and (mask[0] >= mask[2] or mask[1] >= mask[3]):
                expected = "left, top, right and bottom, such as (4, 6, 22, 40)."
                raise argument_error(tuple(mask), "The box", expected, TargetError)
            return "point" if len(mask) == 2 else "box"
        raise argument_error(mask, "The mask", f"{FORMS}.", TargetError)

    @property
    def classes(self) -> list[Any] | None:
        """Return the classes as a list; None if the class is chosen by the model's prediction for each image."""
        if self.class_ is None:
            return None
        classes = self.class_.tolist() if isinstance(self.class_, (Tensor, np.ndarray)) else self.class_
        return list(classes) if isinstance(classes, (list, tuple, range)) and len(classes) else [classes]

    def bind(self, model: nn.Module, batch: Batch) -> BoundTarget:
        if len(batch.size) != 2:
            raise TargetError(
                f"The images are {tuple(batch.pictures.shape)}, but a mask needs images (N,C,H,W). For a volume, pass "
                "a function of the output, such as target=lambda output: output[:, 1].flatten(1).mean(1)."
            )
        family = find_family(model, SegmenterAdapter) or GenericSegmenter(model)
        visible = find_image_areas(batch)
        for visible_mask in visible if self.kind == "point" else ():
            check_point(self.mask, find_box(visible_mask))
        extractor = MaskScoreExtractor(family, batch, self, visible, _find_fixed_masks(self, batch, visible))
        return BoundTarget(
            family.wrap(model), batch, extractor, family.layer, LOCAL_METHOD, has_places=True,
            own_output=lambda run: run.output, list_found=extractor.list_classes,
        )  # fmt: skip


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)


def find_image_areas(batch: Batch) -> list[Tensor]:
    """Return a mask (H,W) per image: True where the model's input contains the image, False where it is padding."""
    frame = find_frame(batch, [])
    visible = torch.zeros(batch.images, *batch.size, dtype=torch.bool, device=batch.device)
    for i, visible_mask in enumerate(visible):
        y0, x0, height, width = (0, 0, *batch.size) if frame is None else frame.windows[i]
        visible_mask[round(max(0, y0)) : round(y0 + height), round(max(0, x0)) : round(x0 + width)] = True
    return list(visible)


def _find_fixed_masks(target: Mask, batch: Batch, visible: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the mask (H,W) of each image, bool; None if the model's prediction determines the masks.

    Raises `TargetError` for an empty mask, and for a mask that does not have the size of the model's input.
    """
    if target.kind in ("predicted", "point"):
        return None
    if target.kind == "box":
        mask_pixels = _fill_box(target.mask, batch.size)
    else:
        values = read_mask(target.mask) if target.kind == "file" else to_numpy(target.mask)
        mask_pixels = torch.from_numpy(values != 0)
    height, width = mask_pixels.shape[-2:]
    if (height, width) != tuple(batch.size):
        raise TargetError(
            f"The mask is {width} pixels wide and {height} high, but the model's input is {batch.size[1]} wide and "
            f"{batch.size[0]} high: resize the mask like the image, without interpolation."
        )
    if mask_pixels.ndim == 3 and len(mask_pixels) != batch.images:
        problem = f"There are {len(mask_pixels)} masks for {batch.images} image(s)"
        raise TargetError(f"{problem}: pass one mask, or one per image.")
    image_masks = mask_pixels if mask_pixels.ndim == 3 else mask_pixels.expand(batch.images, -1, -1)
    masks = [mask.to(batch.device) & visible_mask for mask, visible_mask in zip(image_masks, visible)]
    if not all(mask.any() for mask in masks):
        name = os.fspath(target.mask) if target.kind == "file" else shorten(target.mask)
        raise TargetError(f"The mask {name} is empty: it contains no pixel of the image.")
    return masks


def check_point(point: Sequence[float], box: Box4) -> None:
    """Raise `TargetError` if the point is outside `box`, the box of the image in the model's input."""
    x0, y0, x1, y1 = box
    if not (x0 <= point[0] < x1 and y0 <= point[1] < y1):
        origin = f" and begins at {(int(x0), int(y0))}" if x0 or y0 else ""
        size = f"{x1 - x0:.0f} pixels wide and {y1 - y0:.0f} high"
        raise TargetError(f"The point {tuple(point)} is outside the image, which is {size}{origin}.")


def _fill_box(box: Sequence[float], size: Sequence[int]) -> Tensor:
    """Return a mask of the pixels whose centres are inside a box."""
    x0, y0, x1, y1 = box
    rows, columns = (torch.arange(length, dtype=torch.float64, device="cpu") + 0.5 for length in size)
    return ((rows >= y0) & (rows < y1))[:, None] & ((columns >= x0) & (columns < x1))


def read_mask(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Read a mask file as bool (H,W): label 0, black and transparent pixels are False, all other pixels are True.

    Raises `ImageError` if the file is not an image, or if the compression of its format changes black pixels.
    """
    try:
        return read_label_mask(path).astype(bool)
    except ImageError:
        if os.fspath(path).lower().endswith(LOSSY_SUFFIXES):
            raise
    inside = np.asarray(read_image(path).any(axis=2))
    with Image.open(path) as image:
        if not image.has_transparency_data:
            return inside
        return inside & (np.asarray(ImageOps.exif_transpose(image).convert("RGBA"))[..., 3] > 0)


@dataclass(frozen=True, eq=False)
class MaskScoreExtractor(ScoreExtractor):
    """Extracts the scores of masks.

    For each image, `visible` is True where the model's input is not padding. If the prediction determines the masks,
    `fixed_masks` is None.
    """

    family: SegmenterAdapter
    batch: Batch
    target: Mask
    visible: Sequence[Tensor]
    fixed_masks: Sequence[Tensor] | None

    def score(self, output: ModelRun, images: int) -> TargetScores:
        """Return the scores. Raise `TargetError` if the model predicts the class at no pixel."""
        logits = self.family.read(output, self.batch.take(images))
        with torch.no_grad():
            instances = [self._find_instances(logits[i : i + 1].detach(), i, images) for i in range(images)]
        indices = [[instance.index for instance in row] for row in instances]
        classes = torch.tensor(indices, dtype=torch.int64, device=logits.device)
        masks = torch.stack([torch.stack([instance.mask for instance in row]) for row in instances])  # type: ignore[misc]  # set above
        pixels = PixelScoreExtractor(self.family, self.batch, classes, masks, self.target.reduction)
        return TargetScores(pixels.reduce_logits(logits), classes, None, pixels, instances)

    def list_classes(self, output: ModelRun) -> list[list[Instance]]:
        """Return the predicted classes of each image. The score of a class is the fraction of its pixels."""
        logits = self.family.read(output, self.batch).detach()
        instances = []
        for i in range(len(logits)):
            prediction = self._predict(logits[i : i + 1], i, len(logits))
            shares = prediction.list_shares()
            instances.append([Instance("mask", prediction.name(index), index, share) for index, share in shares])
        return instances

    def _predict(self, output: Tensor, i: int, images: int) -> ImagePrediction:
        class_logits = resize_logits(to_class_logits(output), self.batch.size)[0]
        prefix = f"image {i}: " if images > 1 else ""
        return ImagePrediction(self.family, class_logits, self.visible[i], output.shape[1] == 1, prefix)

    def _find_instances(self, logits: Tensor, i: int, images: int) -> list[Instance]:
        """Return the explained classes and masks of image i."""
        prediction = self._predict(logits, i, images)
        fixed_mask = None if self.fixed_masks is None else self.fixed_masks[i]
        point = (float(self.target.mask[0]), float(self.target.mask[1])) if self.target.kind == "point" else None
        pixel = None if point is None else (math.floor(point[1]), math.floor(point[0]))
        classes, instances, form = self.target.classes, [], self.target.kind
        for class_ in [None] if classes is None else classes:
            index = prediction.choose(fixed_mask, pixel) if class_ is None else prediction.to_index(class_)
            mask = prediction.find_mask(index, pixel) if fixed_mask is None else fixed_mask
            name, score = prediction.name(index), prediction.measure(index, mask)
            area: dict[str, Any] = {"box": find_box(mask), "mask": mask, "point": point}
            instances.append(Instance("mask", name, index, score, **area, form=form))
        return instances


@dataclass(frozen=True, eq=False)
class PixelScoreExtractor(ScoreExtractor):
    """Extracts scores for fixed classes (N,K) and masks (N,K,H,W), which do not depend on the model's output."""

    family: SegmenterAdapter
    batch: Batch
    classes: Tensor
    masks: Tensor
    reduction: str

    def score(self, output: ModelRun, images: int) -> TargetScores:
        values = self.reduce_logits(self.family.read(output, self.batch.take(images)))
        return TargetScores(values, self.classes[:images], None, self)

    def reduce_logits(self, output: Tensor) -> Tensor:
        """Return the scores (N,K): the mean or sum of the class's logits over each mask."""
        logits, classes, masks = to_class_logits(output), self.classes[: len(output)], self.masks[: len(output)]
        class_logits = torch.stack([image_logits[indices] for image_logits, indices in zip(logits, classes)])
        total = resize_logits(class_logits, self.batch.size).where(masks, 0).sum((2, 3))
        return total if self.reduction == "sum" else total / masks.sum((2, 3))


def to_class_logits(output: Tensor) -> Tensor:
    """Return logits (N,C,h,w), at least float32; a single logit becomes two classes."""
    logits = at_least_float32(output)
    return to_two_classes(logits, "sigmoid") if logits.shape[1] == 1 else logits


def resize_logits(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Resize logits (N,C,h,w) to the size of the images, as the models' own postprocessing does."""
    if tuple(logits.shape[2:]) == tuple(size):
        return logits
    return functional.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)


def find_box(mask: Tensor) -> Box4:
    """Return the bounding box (left, top, right, bottom) of a mask that is not empty."""
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


@dataclass(frozen=True, eq=False)
class ImagePrediction:
    """A model's prediction for one image.

    `logits` (C,H,W) cover the model's input, and `visible` (H,W) is False where the input is padding. `is_single` is
    True if the model has a single logit, which was converted to the logits of two classes. `message_prefix` names the
    image in messages.
    """

    family: SegmenterAdapter
    logits: Tensor
    visible: Tensor
    is_single: bool
    message_prefix: str = ""

    @cached_property
    def predicted(self) -> Tensor:
        """Return the predicted class (H,W) of each pixel; -1 outside the image."""
        return self.logits.argmax(0).masked_fill(~self.visible, -1)

    @property
    def labels(self) -> Sequence[str] | None:
        """Return the class names; None if they are unknown, or their number does not match the logits."""
        labels, count = self.family.labels, len(self.logits)
        if self.is_single and labels is not None and len(labels) == 1:
            return [f"not {labels[0]}", labels[0]]
        return labels if labels is not None and len(labels) == count else None

    def name(self, index: int) -> str:
        """Return the name of a class."""
        return f"class {index}" if self.labels is None else self.labels[index]

    def describe(self, index: int) -> str:
        """Return the name and index of a class, for a message."""
        return self.name(index) if self.labels is None else f"{self.labels[index]} ({index})"

    def to_index(self, class_: Any) -> int:
        """Return the index of a class, given by index or name. Raise `TargetError` if the class is unknown."""
        index = to_label(class_, self.labels) if isinstance(class_, str) else int(class_)
        check_class_range([index], len(self.logits))  # type: ignore[list-item]  # Only None has no index.
        return index  # type: ignore[return-value]

    def choose(self, mask: Tensor | None, pixel: tuple[int, int] | None) -> int:
        """Return the class predicted at `pixel`, or the most frequent class in the mask or image if `pixel` is None.

        The background counts only if there is no other class.
        """
        if pixel is not None:
            return int(self.predicted[pixel])
        counts = self.count(self.predicted if mask is None else self.predicted[mask])
        background = 0 if self.is_single else self.family.background
        foreground_counts = counts.clone()
        if background is not None and background < len(foreground_counts):
            foreground_counts[background] = 0
        return int((foreground_counts if foreground_counts.any() else counts).argmax())

    def count(self, pixels: Tensor) -> Tensor:
        """Return the number of pixels that are predicted as each class."""
        return pixels[pixels >= 0].cpu().bincount(minlength=len(self.logits))

    def list_shares(self) -> list[tuple[int, float]]:
        """Return (class, fraction of the image's pixels) for each predicted class, largest fractions first."""
        counts = self.count(self.predicted)
        shares = enumerate((counts / counts.sum()).tolist())
        return sorted((entry for entry in shares if entry[1]), key=lambda entry: -entry[1])

    def find_mask(self, index: int, pixel: tuple[int, int] | None) -> Tensor:
        """Return a mask (H,W) of the pixels predicted as a class or, with `pixel`, of the region connected to it.

        Raises `TargetError` if no pixel is predicted as the class, or if `pixel` is predicted as another class.
        """
        is_class = self.predicted == index
        if pixel is not None and not is_class[pixel]:
            predicted = self.describe(int(self.predicted[pixel]))
            raise TargetError(
                f"{self.message_prefix}At the point {pixel[::-1]} the model predicts {predicted}, not "
                f"{self.describe(index)}: leave the class out, or pass another point."
            )
        if pixel is not None:
            _, regions = cv2.connectedComponents(is_class.cpu().numpy().astype(np.uint8), connectivity=CONNECTIVITY)
            return torch.from_numpy(regions == regions[pixel]).to(is_class.device)
        if not is_class.any():
            shares = self.list_shares()[:MAX_CLASSES_IN_MESSAGE]
            summary = ", ".join(f"{self.describe(i)} {100 * share:.1f} %" for i, share in shares)
            raise TargetError(
                f"{self.message_prefix}No pixel is predicted as {self.describe(index)}. Predicted: {summary} of the image. "
                "Choose one of these classes, or pass the expected region: mask=(left, top, right, bottom)."
            )
        return is_class

    def measure(self, index: int, mask: Tensor) -> float:
        """Return the mean probability of a class in a mask."""
        inside = self.logits[None][..., mask][..., None]  # (1,C,P,1)
        values = probabilities(inside, "sigmoid") if self.is_single else self.family.to_probabilities(inside)
        return float(values[0, index].mean())
