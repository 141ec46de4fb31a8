"""What an audit found: clusters of evidence in words, in pictures and as data, the most suspicious first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradcam.cam.postprocess import to_heatmaps
from gradcam.errors import GradcamError, show_fields
from gradcam.images.draw import overlay
from gradcam.images.read import Pixels, Region
from gradcam.images.sheets import PanelRow, draw_panel
from gradcam.models.labels import name_class
from gradcam.options import keep_old_names
from gradcam.renames import AUDIT, add_old_keys

SCHEMA = 1
KIND = "gradcam audit"
TYPICAL = 5  # pictures of a cluster that are drawn
SHOWN = 10  # clusters on a sheet
SIDE = 224  # pixels of a cluster's mean map, drawn by itself
FINEST = 448  # rows and columns that a map is resized to, at most
CORNER, BAND, BORDER = 0.5, 0.6, 0.75  # shares of a map from which on it is said to lie there
DOWN, ACROSS = ("top", "", "bottom"), ("left", "", "right")


def describe_place(mean: NDArray[np.floating[Any]]) -> str:
    """Where a map (h,w) lies, in words: the ninth of the picture with half of it, a third with three fifths, the outermost
    cells with three quarters, or all over the picture."""
    rows, columns = (_find_thirds(length) for length in mean.shape)
    share = mean / mean.sum()
    ninths = np.array([[share[rows == i][:, columns == j].sum() for j in range(3)] for i in range(3)])
    row, column = np.unravel_index(int(ninths.argmax()), (3, 3))
    if ninths[row, column] >= CORNER:
        words = [word for word in (DOWN[row], ACROSS[column]) if word]
        return f"in the {' '.join(words)} corner" if len(words) == 2 else _describe_band(words)
    down, across = ninths.sum(1), ninths.sum(0)
    for bands, names in ((down, DOWN), (across, ACROSS)):
        if bands.max() >= BAND and names[int(bands.argmax())]:
            return _describe_band([names[int(bands.argmax())]])
    if min(mean.shape) > 2 and 1 - share[1:-1, 1:-1].sum() >= BORDER:
        return "along the border"
    return "all over the image"


def _find_thirds(length: int) -> NDArray[np.int64]:
    """Which third of the picture the middle of each cell lies in."""
    found: NDArray[np.int64] = np.minimum((np.arange(length) + 0.5) / length * 3, 2).astype(np.int64)
    return found


def _describe_band(words: list[str]) -> str:
    side = words[0] if words else "middle"
    return {"left": "on the left", "right": "on the right", "middle": "in the middle"}.get(side, f"at the {side}")


@keep_old_names
@dataclass(frozen=True, eq=False)
class EvidenceCluster:
    """Images of one class whose evidence lies in the same place and looks alike.

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
        From 0 to 1, computed from `place` and `apart`. Near 1, the evidence lies where other classes have none, and
        does not look like evidence outside the cluster.
    place : float
        From 0 to 1: how much less often other classes have evidence in this place than the cluster's class. 0 means
        equally often, and 1 means that other classes have no evidence there. Each of the two rates is the conservative
        end of its 95 % interval.
    apart : float
        From 0 to 1, computed like `place`: how much less often similar evidence occurs in images outside the cluster
        than in images inside it.
    elsewhere : int
        The number of images of other classes with enough evidence in this place: as much as 80 % of the members have.
    other_image_count : int
        The number of images of other classes.
    is_rest : bool
        True if the members are the images of the class that fit no cluster.
    map : array (h,w)
        The mean heatmap of the members on the layer's grid. Its sum is 1.
    draw_member : callable
        A function that draws a member by name. It reads the image again.

    Examples
    --------
    >>> import gradcam
    >>> found = gradcam.evaluation.audit("labelled/", gradcam.load_classifier())
    >>> worst = found.clusters[0]
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

    __repr__ = show_fields

    @property
    def share(self) -> float:
        """The number of members divided by `image_count`, from 0 to 1."""
        return len(self.members) / self.image_count

    @property
    def class_name(self) -> str:
        """The class's label, or "class" and its index."""
        return name_class(self.index, self.label)

    def describe(self) -> str:
        """Describe where the evidence lies, and how many images of this class and of other classes have evidence there."""
        some = (
            f"{self.elsewhere} of {self.other_image_count}" if self.elsewhere else f"none of {self.other_image_count}"
        )
        verb = "has" if self.elsewhere in (0, 1) else "have"
        return (
            f"{self.where}, in {len(self.members)} of {self.image_count} images of {self.class_name}; {some} images of "
            f"other classes {verb} as much evidence there"
        )

    def draw(self, *, count: int = TYPICAL) -> dict[str, Pixels]:
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
        grey = np.full((SIDE, SIDE, 3), 128, np.uint8)
        drawn = {"mean map": draw_marked(grey, self.map, (0, 0, SIDE, SIDE))}
        for name in self.members[:count]:
            try:
                drawn[name] = self.draw_member(name)
            except GradcamError:  # noqa: PERF203  (gone meanwhile: the others are still worth looking at)
                continue
        return drawn

    def to_record(self) -> dict[str, Any]:
        """Return everything except the images, ready for JSON."""
        numbers = ("suspicion", "place", "apart", "elsewhere", "other_image_count", "is_rest", "where", "image_count")
        record = {
            "class": {"index": self.index, "label": self.label},
            **{name: getattr(self, name) for name in numbers},
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

    Examples
    --------
    >>> import gradcam
    >>> found = gradcam.evaluation.audit("labelled/", gradcam.load_classifier())
    >>> found.source, len(found.failures), sum(len(cluster.members) for cluster in found.clusters)
    ("the folders' names", 0, 24)
    >>> gradcam.write_image("audit.png", found.sheet())
    >>> isinstance(found, gradcam.evaluation.Audit), found.to_record()["schema"]
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

    def __repr__(self) -> str:
        return f"Audit({self.summary})"

    @property
    def summary(self) -> str:
        """One line: the numbers of images, classes and clusters, and the first cluster."""
        classes = {cluster.index for cluster in self.clusters}
        pictures = sum(len(cluster.members) for cluster in self.clusters)
        first = self.clusters[0]
        return (
            f"{pictures} images of {len(classes)} classes in {len(self.clusters)} clusters; the most suspicious "
            f"({first.suspicion:.2f}) is {first.describe()}"
        )

    def sheet(self, *, count: int = SHOWN, height: int = 160) -> Pixels:
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
        for number, cluster in enumerate(self.clusters[:count], 1):
            drawn = [*cluster.draw().values()]
            title = f"{number}. {cluster.suspicion:.2f}  {cluster.describe()}"
            rows.append(PanelRow(title, [*drawn, *[blank] * (1 + TYPICAL - len(drawn))]))
        return draw_panel(["mean heatmap", "typical images", *[""] * (TYPICAL - 1)], rows, height=height)

    def to_record(self) -> dict[str, Any]:
        """Return everything as lists, dicts, strings and numbers, ready for JSON."""
        kept = ("model", "method", "layer", "source")
        return {
            "schema": SCHEMA,
            "kind": KIND,
            **{name: getattr(self, name) for name in kept},
            "notes": list(self.notes),
            "clusters": [{"rank": i, **cluster.to_record()} for i, cluster in enumerate(self.clusters, 1)],
            "blank": list(self.blank),
            "failures": dict(self.failures),
        }


def draw_marked(picture: Pixels, values: NDArray[np.floating[Any]], region: Region) -> Pixels:
    """The picture with its map over the pixels that the network saw."""
    size = [min(side, FINEST) for side in region[2:]]
    heatmap = to_heatmaps(torch.from_numpy(values)[None, None], size)[0, 0]
    return overlay(picture, heatmap, region=region)
