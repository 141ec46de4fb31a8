"""Masks: why a model for segmentation sees a class in some of a picture's pixels."""

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

from gradcam.errors import ImageError, TargetError, shorten, show_fields
from gradcam.families import find_family
from gradcam.families.base import Seen, Segmenter
from gradcam.families.segmentation import PlainSegmenter
from gradcam.hooks.nested import Batch
from gradcam.images.opencv import cv2
from gradcam.images.read import read_image, read_numbers, to_numpy
from gradcam.layers.frames import find_frame
from gradcam.options import check_choice
from gradcam.targets.base import LOCAL, Bound, Box4, Instance, Reader, Scored, Target, to_label
from gradcam.targets.classes import check_range, probabilities, to_two_classes

REDUCTIONS = ("mean", "sum")
FORMS = (
    "a point (x, y), a box (left, top, right, bottom), an array (H,W) of bools or integers, the path of an image, or None "
    "for the pixels predicted as the class"
)
LOSSY = (".jpg", ".jpeg")  # whose black is not quite black
NEIGHBOURS = 8  # of a pixel in a region: thin things that run diagonally stay whole
SHOWN = 5  # classes in a message


@dataclass(frozen=True, eq=False)
class Mask(Target):
    """A class in some pixels of an image: explain its logit there, for segmentation models.

    The score is the mean, or the sum, of the class's logits y over the pixels of the mask M:
    ``1 / |M| * sum(y[i, j] for i, j in M)``. y is resized to the image's size as in the model's own postprocessing. Maps are
    relu(sum over channels of gradient x activation) at each cell (Seg-XRes-CAM with a window of one cell), so they explain
    this region. With ``method="gradcam"`` the gradients are pooled, and the map shows the class everywhere in the image
    (Seg-Grad-CAM). A model that returns masks with classes, such as Mask2Former, has no logit per pixel: its semantic score
    is used instead. A single logit is two classes: 1 is positive, 0 is the background.

    The default layer is the last stage of the backbone or encoder. The closer a layer is to the output, the more its map
    becomes the mask itself.

    Parameters
    ----------
    class_ : int, str, or sequence of these, default None
        The class, by its index or, if the model has class names, by name; several give one map each. None is the class
        predicted at the point. Without a point, it is the most frequent predicted class within the mask or the image,
        other than the background.
    mask : sequence, array, Tensor or path, default None
        The pixels. None takes all pixels predicted as the class. A point (x, y), in pixels of the image, takes those
        pixels of the class that are connected to the point by edges or corners. A box is (left, top, right, bottom). An
        array (H,W) of bools or integers has the size of the model's input image, or is (N,H,W) for one mask per image;
        non-zero pixels are inside. A path is that of an image file with labels, grey values or colours: every pixel that
        is not black is inside.
    reduction : str, default "mean"
        "mean" or "sum" of the logits over the mask.

    Raises
    ------
    TargetError
        If the reduction is unknown, or the mask is invalid. When used with a model: if the model is not a segmentation
        model, or if the class does not exist or is predicted at no pixel. Also if a mask is empty or does not have the
        input image's size, or if the point is outside the image.
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
    AAAI 2020, which takes the sum.
    """

    class_: Any = None
    mask: Any = None
    reduction: str = field(default="mean", kw_only=True)

    __repr__ = show_fields

    def __post_init__(self) -> None:
        check_choice(self.reduction, "reduction", REDUCTIONS, TargetError)
        _ = self.kind
        for each in self.classes or ():
            if not isinstance(each, str) and not _is_integer(each):
                raise TargetError(
                    f"The class is {shorten(self.class_)}, expected its index or its label, or several of them."
                )

    @property
    def kind(self) -> str:
        """The form of the mask: "predicted", "point", "box", "array" or "file". Raises `TargetError` for any other form."""
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
                raise TargetError(
                    f"The box is {tuple(mask)}, expected left, top, right and bottom, such as (4, 6, 22, 40)."
                )
            return "point" if len(mask) == 2 else "box"
        raise TargetError(f"The mask is {shorten(mask)}, expected {FORMS}.")

    @property
    def classes(self) -> list[Any] | None:
        """All classes as a list. None stands for each image's own class."""
        if self.class_ is None:
            return None
        found = self.class_.tolist() if isinstance(self.class_, (Tensor, np.ndarray)) else self.class_
        return list(found) if isinstance(found, (list, tuple, range)) and len(found) else [found]

    def bind(self, model: nn.Module, batch: Batch) -> Bound:
        if len(batch.size) != 2:
            raise TargetError(
                f"The images are {tuple(batch.pictures.shape)}, but a mask needs images (N,C,H,W). For a volume, pass "
                "a function of the output, such as target=lambda output: output[:, 1].flatten(1).mean(1)."
            )
        family = find_family(model, Segmenter) or PlainSegmenter(model)
        visible = find_visible(batch)
        if self.kind == "point":
            for seen in visible:
                check_point(self.mask, find_box(seen))
        reader = MaskReader(family, batch, self, visible, _find_given(self, batch, visible))
        return Bound(
            family.wrap(model),
            batch,
            reader,
            family.layer,
            LOCAL,
            own_output=lambda seen: seen.output,
            list_found=reader.list_classes,
            has_places=True,
        )


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)


def find_visible(batch: Batch) -> list[Tensor]:
    """For each picture where it lies on what the model is given, bool (H,W): all of that, but for what was added around
    it."""
    frame = find_frame(batch, [])
    found = []
    for i in range(batch.images):
        top, left, height, width = (0, 0, *batch.size) if frame is None else frame.windows[i]
        rows, columns = (slice(round(max(0, a)), round(a + length)) for a, length in ((top, height), (left, width)))
        seen = torch.zeros(*batch.size, dtype=torch.bool, device=batch.device)
        seen[rows, columns] = True
        found.append(seen)
    return found


def _find_given(wanted: Mask, batch: Batch, visible: Sequence[Tensor]) -> list[Tensor] | None:
    """For each picture the pixels that are inside, bool (H,W); None where they are to be predicted. Raises `TargetError`
    where there are none, and for another size."""
    if wanted.kind in ("predicted", "point"):
        return None
    if wanted.kind == "box":
        given = _lay_box(wanted.mask, batch.size)
    else:
        values = read_mask(wanted.mask) if wanted.kind == "file" else to_numpy(wanted.mask)
        given = torch.from_numpy(values != 0)
    if tuple(given.shape[-2:]) != tuple(batch.size):
        height, width = given.shape[-2:]
        raise TargetError(
            f"The mask is {width} pixels wide and {height} high, but the model's input is {batch.size[1]} wide and "
            f"{batch.size[0]} high: resize the mask like the image, without interpolation."
        )
    if given.ndim == 3 and len(given) != batch.images:
        raise TargetError(f"There are {len(given)} masks for {batch.images} image(s): pass one mask, or one per image.")
    each = given if given.ndim == 3 else given.expand(batch.images, -1, -1)
    masks = [mask.to(batch.device) & seen for mask, seen in zip(each, visible)]
    if not all(mask.any() for mask in masks):
        what = os.fspath(wanted.mask) if wanted.kind == "file" else shorten(wanted.mask)
        raise TargetError(f"The mask {what} is empty: it contains no pixel of the image.")
    return masks


def check_point(point: Sequence[float], box: Box4) -> None:
    """Raises `TargetError` for a point outside of a picture, which lies in this box."""
    left, top, right, bottom = box
    if not (left <= point[0] < right and top <= point[1] < bottom):
        where = f" and begins at {(int(left), int(top))}" if left or top else ""
        size = f"{right - left:.0f} pixels wide and {bottom - top:.0f} high"
        raise TargetError(f"The point {tuple(point)} is outside the image, which is {size}{where}.")


def _lay_box(box: Sequence[float], size: Sequence[int]) -> Tensor:
    """The pixels whose middle is inside a box."""
    left, top, right, bottom = box
    down, across = (torch.arange(length, dtype=torch.float64, device="cpu") + 0.5 for length in size)
    return ((down >= top) & (down < bottom))[:, None] & ((across >= left) & (across < right))


def read_mask(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Read which of a picture's pixels are not zero, bool (H,W): as labels, or as colours of any channel that are not
    transparent. Raises `ImageError` for what is no picture, and for one whose compression changes zeros."""
    try:
        return read_numbers(path).astype(bool)
    except ImageError:
        if os.fspath(path).lower().endswith(LOSSY):
            raise
    inside = np.asarray(read_image(path).any(axis=2))
    with Image.open(path) as picture:
        if not picture.has_transparency_data:
            return inside
        return inside & (np.asarray(ImageOps.exif_transpose(picture).convert("RGBA"))[..., 3] > 0)


@dataclass(frozen=True, eq=False)
class MaskReader(Reader):
    """What a mask asks for, in a model's output. `visible`: where each picture lies. `given`: for each picture the pixels,
    None where they are those of a class or a region that the model predicts."""

    family: Segmenter
    batch: Batch
    wanted: Mask
    visible: Sequence[Tensor]
    given: Sequence[Tensor] | None

    def score(self, output: Seen, images: int) -> Scored:
        """Raises `TargetError` where the model predicts no such pixels."""
        batch = self.batch.take(images)
        read = self.family.read(output, batch)
        with torch.no_grad():
            found = [self._find(read[i : i + 1].detach(), i, images) for i in range(images)]
        classes = torch.tensor([[it.index for it in row] for row in found], dtype=torch.int64, device=read.device)
        masks = torch.stack([torch.stack([it.mask for it in row]) for row in found])  # type: ignore[misc]  # each has one
        chosen = ChosenPixels(self.family, self.batch, classes, masks, self.wanted.reduction)
        return Scored(chosen.reduce(read), classes, None, chosen, found)

    def list_classes(self, output: Seen) -> list[list[Instance]]:
        """The classes that are predicted in each picture, with the share of it that each covers for a score."""
        read = self.family.read(output, self.batch).detach()
        found = []
        for i in range(len(read)):
            own = self._predict(read[i : i + 1], i, len(read))
            counts = own.count(own.predicted)
            shares = (counts / counts.sum()).tolist()
            order = sorted((index for index, share in enumerate(shares) if share), key=lambda index: -shares[index])
            found.append([Instance("mask", own.name(index), index, shares[index]) for index in order])
        return found

    def _predict(self, read: Tensor, i: int, images: int) -> Prediction:
        logits = enlarge(to_classes(read), self.batch.size)[0]
        where = f"image {i}: " if images > 1 else ""
        return Prediction(self.family, logits, self.visible[i], read.shape[1] == 1, where)

    def _find(self, read: Tensor, i: int, images: int) -> list[Instance]:
        """What is to be explained in picture i."""
        own = self._predict(read, i, images)
        given = None if self.given is None else self.given[i]
        point = (float(self.wanted.mask[0]), float(self.wanted.mask[1])) if self.wanted.kind == "point" else None
        at = None if point is None else (math.floor(point[1]), math.floor(point[0]))
        wanted, found = self.wanted.classes, []
        for index in [own.choose(given, at)] if wanted is None else [own.to_index(it) for it in wanted]:
            mask = own.find_mask(index, at) if given is None else given
            score = own.measure(index, mask)
            found.append(Instance("mask", own.name(index), index, score, box=find_box(mask), mask=mask, point=point))
        return found


@dataclass(frozen=True, eq=False)
class ChosenPixels(Reader):
    """The same classes (N,K) in the same pixels (N,K,H,W) of any output."""

    family: Segmenter
    batch: Batch
    classes: Tensor
    masks: Tensor
    reduction: str

    def score(self, output: Seen, images: int) -> Scored:
        values = self.reduce(self.family.read(output, self.batch.take(images)))
        return Scored(values, self.classes[:images], None, self)

    def reduce(self, read: Tensor) -> Tensor:
        """The scores (N,K) of what a family read."""
        logits, classes, masks = to_classes(read), self.classes[: len(read)], self.masks[: len(read)]
        own = torch.stack([each[chosen] for each, chosen in zip(logits, classes)])
        total = enlarge(own, self.batch.size).where(masks, 0).sum((2, 3))
        return total if self.reduction == "sum" else total / masks.sum((2, 3))


def to_classes(read: Tensor) -> Tensor:
    """Logits (N,C,h,w), at least float32, and of two classes where a model gives a single one."""
    logits = read.to(torch.promote_types(read.dtype, torch.float32))
    return to_two_classes(logits, "sigmoid") if logits.shape[1] == 1 else logits


def enlarge(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Logits (N,C,h,w) at the size of the pictures, as the models' own postprocessing gives them."""
    if tuple(logits.shape[2:]) == tuple(size):
        return logits
    return functional.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)


def find_box(mask: Tensor) -> Box4:
    """The least box (left, top, right, bottom) around a mask that is not empty."""
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says of one picture: the logits (C,H,W), of which the picture is where it is `visible` (H,W).
    `is_single`: whether the model gave one logit, of which two classes were made. `where`: the picture, in a message."""

    family: Segmenter
    logits: Tensor
    visible: Tensor
    is_single: bool
    where: str = ""

    @cached_property
    def predicted(self) -> Tensor:
        """The class (H,W) of each pixel, -1 outside of the picture."""
        return self.logits.argmax(0).masked_fill(~self.visible, -1)

    @property
    def labels(self) -> Sequence[str] | None:
        """The names of as many classes as there are, None where they are not known."""
        labels, count = self.family.labels, len(self.logits)
        if self.is_single and labels is not None and len(labels) == 1:
            return [f"not {labels[0]}", labels[0]]
        return labels if labels is not None and len(labels) == count else None

    def name(self, index: int) -> str:
        """What people call a class."""
        return f"class {index}" if self.labels is None else self.labels[index]

    def describe(self, index: int) -> str:
        """The same with its index, for a message."""
        return self.name(index) if self.labels is None else f"{self.labels[index]} ({index})"

    def to_index(self, wanted: Any) -> int:
        """A class by its index or its label. Raises `TargetError` where there is no such class."""
        index = to_label(wanted, self.labels) if isinstance(wanted, str) else int(wanted)
        check_range([index], len(self.logits))  # type: ignore[list-item]  # only no class has none
        return index  # type: ignore[return-value]

    def choose(self, inside: Tensor | None, at: tuple[int, int] | None) -> int:
        """The class predicted at a point, or most often in some pixels, or in all of them."""
        if at is not None:
            return int(self.predicted[at])
        counts = self.count(self.predicted if inside is None else self.predicted[inside])
        background = 0 if self.is_single else self.family.background
        others = counts.clone()
        if background is not None and background < len(others):
            others[background] = 0
        return int((others if others.any() else counts).argmax())

    def count(self, pixels: Tensor) -> Tensor:
        """How many of these pixels are predicted to be of each class."""
        return pixels[pixels >= 0].cpu().bincount(minlength=len(self.logits))

    def find_mask(self, index: int, at: tuple[int, int] | None) -> Tensor:
        """The pixels (H,W) predicted to be of a class, all, or those connected to a point. Raises `TargetError` where
        there are none."""
        same = self.predicted == index
        if at is not None and not same[at]:
            raise TargetError(
                f"{self.where}At the point {at[::-1]} the model predicts {self.describe(int(self.predicted[at]))}, not "
                f"{self.describe(index)}: leave the class out, or pass another point."
            )
        if at is not None:
            _, numbered = cv2.connectedComponents(same.cpu().numpy().astype(np.uint8), connectivity=NEIGHBOURS)
            return torch.from_numpy(numbered == numbered[at]).to(same.device)
        if not same.any():
            counts = self.count(self.predicted)
            shares = counts / counts.sum()
            there = [(int(it), float(shares[it])) for it in shares.argsort(descending=True)[:SHOWN] if shares[it]]
            said = ", ".join(f"{self.describe(it)} {100 * share:.1f} %" for it, share in there)
            raise TargetError(
                f"{self.where}No pixel is predicted as {self.describe(index)}. Predicted: {said} of the image. "
                "Choose one of these, or pass the expected region: mask=(left, top, right, bottom)."
            )
        return same

    def measure(self, index: int, mask: Tensor) -> float:
        """The class's mean probability in a mask."""
        inside = self.logits[None][..., mask][..., None]  # (1,C,P,1)
        each = probabilities(inside, "sigmoid") if self.is_single else self.family.to_probabilities(inside)
        return float(each[0, index].mean())
