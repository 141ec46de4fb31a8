"""The result of a comparison of two models: numbers, images and JSON records."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcam.cam.postprocess import resize
from gradcam.errors import ImageError, format_fields
from gradcam.evaluation.metrics.soundness import rank_correlation
from gradcam.evaluation.snapshots.gate import CONDITION_NAMES, Gate, check_conditions
from gradcam.evaluation.snapshots.snapshot import Origin, SnapshotEntry
from gradcam.evaluation.subject import count_pixels, rank_pixels, scale_to_unit
from gradcam.images.draw import overlay
from gradcam.images.read import Pixels, Region, crop
from gradcam.images.sheets import PanelRow, draw_panel
from gradcam.models.labels import name_class
from gradcam.options import keep_old_names
from gradcam.renames import DIFF, DRAWN_DIFF, OldKeys, add_old_keys
from gradcam.storage.records import Prediction

POINTS_PER_SIDE = 224  # Heatmaps are resampled to this height and width for the comparison.
TOP_FRACTION = 0.3  # The overlap compares this fraction of each heatmap's pixels: the pixels with the highest values.
CHANGES = ("map", "class", "none")  # the most important change first


@keep_old_names
@dataclass(frozen=True, eq=False)
class ImageDiff:
    """The comparison of two models on one image.

    Attributes
    ----------
    image : str
        The image's name.
    old : Prediction
        The old model's top class: `index`, `label` and `probability`. Both heatmaps explain this class.
    new : Prediction
        The new model's top class.
    old_class_probability : float
        The new model's probability of the old model's top class, from 0 to 1.
    correlation : float
        The rank correlation of the two heatmaps, from -1 to 1. The correlation of two constant heatmaps is 1. The
        correlation of a constant and a varying heatmap is 0.
    overlap : float
        The overlap of the two heatmaps' top 30 % of pixels, from 0 to 1. Chance is 0.3.
    moved : float
        The distance between the centres of mass, as a share of the diagonal of the common region, from 0 to 1. The centre
        of mass of a blank heatmap is the middle of the region.
    change : str
        "class" if the predictions differ; "map" if the predictions agree, but the correlation is below `alike`;
        otherwise "none".
    entries : (SnapshotEntry, SnapshotEntry)
        The result of each model, with its heatmap on the layer's grid.
    read : callable
        A function that reads the image again, for drawing.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> (row,) = gradcam.evaluation.diff(classifier, classifier, "photo.jpg").rows
    >>> row.image, row.old.label, row.agree, row.correlation, row.overlap, row.moved, row.change
    ('photo.jpg', 'Egyptian cat', True, 1.0, 1.0, 0.0, 'none')
    >>> gradcam.write_image("photo-diff.png", row.panel())
    """

    image: str
    old: Prediction
    new: Prediction
    old_class_probability: float
    correlation: float
    overlap: float
    moved: float
    change: str
    entries: tuple[SnapshotEntry, SnapshotEntry] = field(repr=False)
    read: Callable[[], Pixels] = field(repr=False)

    __repr__ = format_fields

    @property
    def agree(self) -> bool:
        """Return True if both models predict the same class."""
        return self.old.index == self.new.index

    @property
    def drop(self) -> float:
        """Return how much the probability of the old model's top class drops in the new model, from -1 to 1."""
        return self.old.probability - self.old_class_probability

    @property
    def values(self) -> dict[str, float]:
        """Return the numbers of this image, by the names in `CONDITION_NAMES`."""
        return {name: float(getattr(self, name)) for name in CONDITION_NAMES}

    def draw(self) -> dict[str, Pixels]:
        """Draw the common region of both models: the image, both heatmaps, and their difference.

        Each heatmap is divided by its own maximum. The difference is red where the new heatmap is stronger, and blue
        where the old heatmap is stronger. The image is read again.

        Returns
        -------
        dict of str to array (H,W,3)
            "image", "old", "new" and "difference": RGB, uint8.

        Raises
        ------
        ImageError
            If the image can no longer be read.
        """
        maps, region = align_maps(*self.entries)
        image, (old, new) = crop(self.read(), region), scale_to_unit(maps)
        draw = partial(overlay, region=(0, 0, *image.shape[:2]))
        grey = np.repeat(image.mean(2, keepdims=True), 3, 2).astype(np.uint8)  # Faint red and blue are visible on grey.
        difference = draw(grey, new - old, signed=True, alpha=0.8)
        images = {"image": image, "old": draw(image, old), "new": draw(image, new), "difference": difference}
        return OldKeys(DRAWN_DIFF, images)

    def panel(self, *, height: int = 224) -> Pixels:
        """Draw the image, both heatmaps and their difference side by side, with names and numbers.

        Parameters
        ----------
        height : int, default 224
            The height of each image in pixels.

        Returns
        -------
        array (H,W,3)
            RGB, uint8.

        Raises
        ------
        ImageError
            If `height` is not a positive number of pixels. Also as in `draw`.
        """
        old, new = (f"{name_class(top.index, top.label)} {100 * top.probability:.0f} %" for top in (self.old, self.new))
        row = PanelRow(f"{self.image}: {self.describe()}", list(self.draw().values()))
        columns = ["image", f"old: {old}", f"new: {new}", "red: stronger in new, blue: in old"]
        return draw_panel(columns, [row], height=height)

    def describe(self) -> str:
        """Return the numbers as one line of text."""
        name = name_class(self.old.index, self.old.label)
        return (
            f"heatmaps of {name}: correlation {self.correlation:.3f}, "
            f"{100 * self.overlap:.0f} % overlap of the top 30 %, centre moved by {100 * self.moved:.0f} %"
        )

    def to_record(self) -> dict[str, Any]:
        """Return everything except the heatmaps, ready for JSON."""
        names = ("index", "label", "probability")
        old, new = ({name: getattr(top, name) for name in names} for top in (self.old, self.new))
        new = add_old_keys(DIFF, {**new, "old_class_probability": self.old_class_probability})
        numbers = {name: value for name, value in self.values.items() if name != "agree"}
        return {"old": old, "new": new, "agree": self.agree, "change": self.change, **numbers}


@keep_old_names
@dataclass(frozen=True, eq=False)
class Diff:
    """The comparison of two models on the same images, largest differences first.

    Attributes
    ----------
    old : Origin
        The old model, its method and its layer.
    new : Origin
        The new model, its method and its layer.
    rows : tuple of ImageDiff
        First the images with the same prediction and different heatmaps, then the images with different predictions,
        then all others. Within each group, the lowest correlation comes first.
    failures : mapping of str to str
        Images that could not be compared, with the reason.
    notes : tuple of str
        Notes on the comparison as a whole.
    alike : float
        Two heatmaps count as alike if their correlation is at least this number.

    Examples
    --------
    >>> import gradcam
    >>> new = gradcam.load_classifier(precision="bf16")
    >>> result = gradcam.evaluation.diff(gradcam.load_classifier(), new, "photos/")
    >>> len(result.rows), result.first_row.correlation > 0.99, round(result.means["agree"])
    (2, True, 1)
    >>> result.gate(["correlation<0.9", "mean agree<1"]).is_met
    False
    """

    old: Origin
    new: Origin
    rows: tuple[ImageDiff, ...]
    failures: Mapping[str, str]
    notes: tuple[str, ...]
    alike: float

    def __repr__(self) -> str:
        return f"Diff({self.summary})"

    @property
    def first_row(self) -> ImageDiff | None:
        """Return the first of `rows`, not always the row with the lowest correlation; None without rows."""
        return self.rows[0] if self.rows else None

    @property
    def means(self) -> dict[str, float]:
        """Return the mean of each number over images, by name; {} without images."""
        values = [row.values for row in self.rows]
        return {name: sum(numbers[name] for numbers in values) / len(values) for name in values[0]} if values else {}

    @property
    def summary(self) -> str:
        """Summarise the comparison in one line: how many predictions and heatmaps differ, and the correlation."""
        if not self.rows:
            return "no image could be compared"
        changes = [row.change for row in self.rows]
        lowest = min(row.correlation for row in self.rows)
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return (
            f"{len(changes)} image{'' if len(changes) == 1 else 's'}{failed}: "
            f"{changes.count('map')} with the same class and a different heatmap, "
            f"{changes.count('class')} with a different class, {changes.count('none')} alike; "
            f"correlation {self.means['correlation']:.3f} on average, lowest {lowest:.3f}"
        )

    def gate(self, conditions: Sequence[str]) -> Gate:
        """Check conditions, as `gradcam diff --fail-if` does.

        Parameters
        ----------
        conditions : sequence of str
            "NAME<NUMBER" and "NAME>NUMBER" are conditions on each image. "mean NAME<NUMBER" and "mean NAME>NUMBER" are
            conditions on the mean over images. The names are "agree" (1 or 0), "correlation", "overlap",
            "moved" and "drop".

        Returns
        -------
        Gate
            `is_met` is True if any condition is met, and `to_junit()` returns JUnit XML.

        Raises
        ------
        GradcamError
            If a condition does not have this form.
        """
        return check_conditions(conditions, {row.image: row.values for row in self.rows}, self.means, self.failures)

    def to_record(self) -> dict[str, Any]:
        """Return everything as lists, dicts, strings and numbers, ready for JSON."""
        names = [field.name for field in fields(Origin) if field.name != "labels"]
        old, new = ({name: getattr(origin, name) for name in names} for origin in (self.old, self.new))
        images = [{"image": row.image, **row.to_record()} for row in self.rows]
        record = {"old": old, "new": new, "alike": self.alike, "means": self.means, "notes": list(self.notes)}
        return add_old_keys(DIFF, record | {"images": images, "failures": dict(self.failures)})


def compare_entries(
    old: SnapshotEntry, new: SnapshotEntry, origins: tuple[Origin, Origin], alike: float, read: Callable[[], Pixels]
) -> ImageDiff:
    """Compare two results on one image. Raise `ImageError` as `align_maps` does."""
    maps, region = align_maps(old, new)
    correlation = float(rank_correlation(maps[:1], maps[1:]))
    top = rank_pixels(maps) < count_pixels(TOP_FRACTION, POINTS_PER_SIDE**2)
    centres = _find_centres(maps) * torch.tensor(region[2:], dtype=maps.dtype, device="cpu")
    # If only one model knows the class names, they hold for both: `diff` requires the same classes.
    labelled = next((origin for origin in origins if origin.labels is not None), origins[0])
    old_prediction, new_prediction = (
        Prediction(entry.predicted, labelled.label(entry.predicted), entry.probability) for entry in (old, new)
    )
    return ImageDiff(
        image=new.name,
        old=old_prediction,
        new=new_prediction,
        old_class_probability=new.explained_probability,
        correlation=correlation,
        overlap=float((top[0] & top[1]).sum() / top[0].sum()),
        moved=float((centres[0] - centres[1]).norm()) / math.hypot(*region[2:]),
        change="class" if old_prediction.index != new_prediction.index else "map" if correlation < alike else "none",
        entries=(old, new),
        read=read,
    )


def align_maps(old: SnapshotEntry, new: SnapshotEntry) -> tuple[Tensor, Region]:
    """Resample both heatmaps to the region that both models see; return the heatmaps (2,P,P) and the region.

    Raise `ImageError` if the regions do not overlap, or if the image had different sizes for the two models.
    """
    if old.size != new.size:
        (old_height, old_width), (height, width) = old.size, new.size
        sizes = f"{old_width} x {old_height} pixels for OLD and {width} x {height} for NEW"
        raise ImageError(f"has {sizes}: give both models a --reader that returns the same size")
    top, left = (max(old.region[i], new.region[i]) for i in (0, 1))
    bottom, right = (min(entry.region[i] + entry.region[i + 2] for entry in (old, new)) for i in (0, 1))
    if bottom <= top or right <= left:
        raise ImageError("the parts of the image that OLD and NEW see do not overlap")
    region = top, left, bottom - top, right - left
    return torch.cat([_resample(entry, region) for entry in (old, new)]), region


def _resample(entry: SnapshotEntry, region: Region) -> Tensor:
    """Return the heatmap (1,P,P) of `region`, which is a part of the region that the model saw."""
    values, size = torch.from_numpy(entry.map.astype(np.float32))[None, None], (POINTS_PER_SIDE, POINTS_PER_SIDE)
    if region == entry.region:
        return resize(values, size)[0]
    top, left, height, width = entry.region
    y_scale, x_scale = values.shape[2] / height, values.shape[3] / width  # in cells per pixel
    start = ((region[0] - top) * y_scale, (region[1] - left) * x_scale)
    return resize(values, size, part=(start, (region[2] * y_scale, region[3] * x_scale)))[0]


def _find_centres(maps: Tensor) -> Tensor:
    """Return the centres of mass (N,2) as (y, x) from 0 to 1. The centre of a blank map is the middle."""
    positions = (torch.arange(POINTS_PER_SIDE, dtype=maps.dtype, device="cpu") + 0.5) / POINTS_PER_SIDE
    mass = maps.sum((1, 2))
    sums = torch.stack([(maps.sum(2) * positions).sum(1), (maps.sum(1) * positions).sum(1)], 1)
    return torch.where(mass[:, None] > 0, sums / mass.clamp(min=1e-12)[:, None], 0.5)
