"""The result of an audit: clusters of evidence as text, images and JSON, the most suspicious first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradcam.cam.postprocess import to_heatmaps
from gradcam.errors import GradcamError, format_fields
from gradcam.images.draw import overlay
from gradcam.images.read import Pixels, Region
from gradcam.images.sheets import PanelRow, draw_panel
from gradcam.models.labels import name_class
from gradcam.options import keep_old_names
from gradcam.renames import AUDIT, add_old_keys

SCHEMA = 1
KIND = "gradcam audit"
TYPICAL_IMAGES = 5  # largest number of typical images to draw for each cluster
MAX_SHEET_CLUSTERS = 10
MEAN_MAP_PIXELS = 224  # height and width of the image of a mean heatmap
MAX_HEATMAP_PIXELS = 448  # largest side to which a heatmap is resized
MIN_NINTH_FRACTION, MIN_BAND_FRACTION, MIN_BORDER_FRACTION = 0.5, 0.6, 0.75  # of the evidence, in `describe_place`
ROW_NAMES, COLUMN_NAMES = ("top", "", "bottom"), ("left", "", "right")
BANDS = {"top": "at the top", "bottom": "at the bottom", "left": "on the left", "right": "on the right"}


def describe_place(mean: NDArray[np.floating[Any]]) -> str:
    """Describe the position of the evidence in a map (h,w).

    The image is divided into 3 x 3 parts. If one part holds at least 50 % of the evidence, the position is this part.
    If not, the position is an outer row or column of parts that holds at least 60 %. If there is no such row or column,
    the position is the border if the border holds at least 75 %, and otherwise the whole image.
    """
    # The image is divided into thirds. `rows` and `columns` hold the third (0, 1 or 2) of each row and column of cells.
    rows, columns = (np.minimum((np.arange(length) + 0.5) / length * 3, 2).astype(int) for length in mean.shape)
    fractions = mean / mean.sum()
    ninths = np.array([[fractions[rows == i][:, columns == j].sum() for j in range(3)] for i in range(3)])
    row, column = np.unravel_index(int(ninths.argmax()), (3, 3))
    if ninths[row, column] >= MIN_NINTH_FRACTION:
        if ROW_NAMES[row] and COLUMN_NAMES[column]:
            return f"in the {ROW_NAMES[row]} {COLUMN_NAMES[column]} corner"
        return BANDS.get(ROW_NAMES[row] or COLUMN_NAMES[column], "in the middle")
    for bands, names in ((ninths.sum(1), ROW_NAMES), (ninths.sum(0), COLUMN_NAMES)):
        name = names[int(bands.argmax())]
        if name in BANDS and bands.max() >= MIN_BAND_FRACTION:
            return BANDS[name]
    if min(mean.shape) > 2 and 1 - fractions[1:-1, 1:-1].sum() >= MIN_BORDER_FRACTION:
        return "along the border"
    return "all over the image"


@keep_old_names
@dataclass(frozen=True, eq=False)
class EvidenceCluster:
    """Images of one class whose evidence is at the same position and looks similar.

    Attributes
    ----------
    index : int
        The index of the class.
    label : str or None
        The name of the class.
    image_count : int
        The number of images of the class that have positive evidence.
    members : tuple of str
        The names of the images in the cluster, the most typical first.
    where : str
        The position of the mean heatmap in words, such as "in the top left corner".
    suspicion : float
        A number from 0 to 1, computed from `place` and `apart`. Near 1, other classes have no evidence at this position,
        and similar-looking evidence occurs only inside the cluster.
    place : float
        How rare evidence at this position is in other classes, compared with the cluster's class. 0 means equally
        frequent, and 1 means that other classes have no evidence at this position. The rates in both groups are
        estimated conservatively, by 95 % bounds.
    apart : float
        How rare evidence of similar appearance is outside the cluster, compared with images in the cluster. The value
        is from 0 to 1, and is computed like `place`.
    elsewhere : int
        The number of images of other classes with as much evidence at this position as 80 % of the members.
    other_image_count : int
        The number of images of other classes.
    is_rest : bool
        True if the members are the images of the class that fit into no cluster.
    purity : float
        How much more similar the members are to each other than to images outside the cluster, from 0 to 1. 80 % of the
        members reach the first limit of the cosine similarity to the members' mean features, and 1 % of the other images
        reach the second limit. The value is the first limit minus the second, or 0 if the difference is negative.
    map : array (h,w)
        The mean heatmap of the members on the layer's grid. The sum of the map is 1.
    draw_member : callable
        A function that reads the image of a member by name, and draws the image.

    Examples
    --------
    >>> import gradcam
    >>> result = gradcam.evaluation.audit("labelled/", gradcam.load_classifier())
    >>> worst = result.clusters[0]
    >>> isinstance(worst, gradcam.evaluation.EvidenceCluster), 0 <= worst.suspicion <= 1
    (True, True)
    >>> overlays = worst.draw(count=2)
    """

    index: int
    label: str | None
    image_count: int
    members: tuple[str, ...]
    where: str
    suspicion: float
    place: float
    apart: float
    elsewhere: int
    other_image_count: int
    is_rest: bool
    map: NDArray[np.floating[Any]] = field(repr=False)
    draw_member: Callable[[str], Pixels] = field(repr=False)
    purity: float = 0.0

    __repr__ = format_fields

    @property
    def share(self) -> float:
        """Return the number of members divided by `image_count`, from 0 to 1."""
        return len(self.members) / self.image_count

    @property
    def class_name(self) -> str:
        """Return the class's label, or "class" and its index."""
        return name_class(self.index, self.label)

    def describe(self) -> str:
        """Describe the position of the evidence, and count the images with such evidence in this class and others."""
        verb = "has" if self.elsewhere in (0, 1) else "have"
        return (
            f"{self.where}, in {len(self.members)} of {self.image_count} images of {self.class_name}; "
            f"{self.elsewhere or 'none'} of {self.other_image_count} images of other classes {verb} as much evidence there"
        )

    def draw(self, *, count: int = TYPICAL_IMAGES) -> dict[str, Pixels]:
        """Draw the mean heatmap, and the most typical images with their heatmaps.

        Parameters
        ----------
        count : int, default 5
            The largest number of images. Images that can no longer be read are left out.

        Returns
        -------
        dict of str to array (H,W,3)
            The mean heatmap under "mean map", and the images by name: RGB, uint8.
        """
        grey = np.full((MEAN_MAP_PIXELS, MEAN_MAP_PIXELS, 3), 128, np.uint8)
        images = {"mean map": draw_heatmap(grey, self.map, (0, 0, *grey.shape[:2]))}
        for name in self.members[:count]:
            with contextlib.suppress(GradcamError):  # If a file was deleted, the other images are still drawn.
                images[name] = self.draw_member(name)
        return images

    def to_record(self) -> dict[str, Any]:
        """Return everything except the images, ready for JSON."""
        numbers = ("suspicion", "place", "apart", "purity", "elsewhere", "other_image_count", "is_rest", "where")
        record = {
            "class": {"index": self.index, "label": self.label},
            **{name: getattr(self, name) for name in numbers},
            "image_count": self.image_count,
            "share": self.share,
            "members": list(self.members),
            "map": [[round(float(value), 6) for value in row] for row in self.map],
        }
        return add_old_keys(AUDIT, record)


@dataclass(frozen=True, eq=False)
class Audit:
    """Clusters of evidence within each class, the most suspicious first.

    Attributes
    ----------
    model : str
        The model's name.
    method : str
        The method of the heatmaps.
    layer : str
        The target layer of heatmaps and features.
    source : str
        The source of the classes: a table, the folders' names, or the model's predictions.
    clusters : tuple of EvidenceCluster
        All clusters of all classes, sorted by suspicion.
    blank : tuple of str
        Images without positive evidence for their class, which are in no cluster.
    failures : mapping of str to str
        Images, table lines and classes that were left out, with the reason.
    notes : tuple of str
        Notes on the audit as a whole.
    whole_class : tuple of EvidenceCluster
        The evidence that most images of a class share, one cluster per clustered class, sorted by `share` times
        `purity`. Such evidence is often the object itself, but it can be a cue such as a texture behind every image of
        the class. These images are also in `clusters`.

    Examples
    --------
    >>> import gradcam
    >>> result = gradcam.evaluation.audit("labelled/", gradcam.load_classifier())
    >>> result.source, len(result.failures), sum(len(cluster.members) for cluster in result.clusters)
    ("the folders' names", 0, 24)
    >>> gradcam.write_image("audit.png", result.sheet())
    >>> isinstance(result, gradcam.evaluation.Audit), result.to_record()["schema"]
    (True, 1)
    """

    model: str
    method: str
    layer: str
    source: str
    clusters: tuple[EvidenceCluster, ...]
    blank: tuple[str, ...]
    failures: Mapping[str, str]
    notes: tuple[str, ...]
    whole_class: tuple[EvidenceCluster, ...] = ()

    def __repr__(self) -> str:
        return f"Audit({self.summary})"

    @property
    def summary(self) -> str:
        """Summarise the audit in one line: the numbers of images, classes and clusters, and the first cluster."""
        classes = {cluster.index for cluster in self.clusters}
        image_count = sum(len(cluster.members) for cluster in self.clusters)
        first = self.clusters[0]
        return (
            f"{image_count} images of {len(classes)} classes in {len(self.clusters)} clusters; the most suspicious "
            f"({first.suspicion:.2f}) is {first.describe()}"
        )

    def sheet(self, *, count: int = MAX_SHEET_CLUSTERS, height: int = 160) -> Pixels:
        """Draw the most suspicious clusters, one per row: description, mean heatmap and typical images.

        Parameters
        ----------
        count : int, default 10
            The largest number of clusters.
        height : int, default 160
            The height of each image in pixels.

        Returns
        -------
        array (H,W,3)
            RGB, uint8.

        Raises
        ------
        ImageError
            If `height` is not a positive number of pixels.
        """
        blank = np.full((height if isinstance(height, int) and height > 0 else 1, 1, 3), 255, np.uint8)
        rows = []
        for rank, cluster in enumerate(self.clusters[:count], 1):
            images = [*cluster.draw().values()]
            title = f"{rank}. {cluster.suspicion:.2f}  {cluster.describe()}"
            rows.append(PanelRow(title, [*images, *[blank] * (1 + TYPICAL_IMAGES - len(images))]))
        return draw_panel(["mean heatmap", "typical images", *[""] * (TYPICAL_IMAGES - 1)], rows, height=height)

    def to_record(self) -> dict[str, Any]:
        """Return everything as lists, dicts, strings and numbers, ready for JSON."""
        return {
            "schema": SCHEMA,
            "kind": KIND,
            **{name: getattr(self, name) for name in ("model", "method", "layer", "source")},
            "notes": list(self.notes),
            "clusters": _rank(self.clusters),
            "whole_class": _rank(self.whole_class),
            "blank": list(self.blank),
            "failures": dict(self.failures),
        }


def _rank(clusters: Sequence[EvidenceCluster]) -> list[dict[str, Any]]:
    return [{"rank": i, **cluster.to_record()} for i, cluster in enumerate(clusters, 1)]


def draw_heatmap(image: Pixels, values: NDArray[np.floating[Any]], region: Region) -> Pixels:
    """Draw the map on the region of the image that the model saw."""
    size = [min(length, MAX_HEATMAP_PIXELS) for length in region[2:]]
    heatmap = to_heatmaps(torch.from_numpy(values)[None, None], size)[0, 0]
    return overlay(image, heatmap, region=region)
