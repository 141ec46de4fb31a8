"""Where objects are: boxes, label masks and COCO files, in the network's own pixels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gradcam.errors import InputError, shorten, show_fields
from gradcam.evaluation.annotations.coco import read_coco
from gradcam.evaluation.annotations.match import Marking, Pictures, View
from gradcam.evaluation.annotations.tables import read_box_list, read_label_masks
from gradcam.images.read import Region

Find = Callable[[str], Sequence[Marking]]
MOST_NAMED = 5  # categories in a note


@dataclass(frozen=True, eq=False)
class Truth:
    """Where the objects of one class are in one picture, in pixels of the network's input, as the metrics take it.

    Attributes
    ----------
    masks : Tensor (1,H,W)
        bool, the pixels of any of them.
    boxes : sequence of one Tensor (B,4)
        float64, a row for each object: left, top, right, bottom, measured at the pixels' edges.

    Examples
    --------
    >>> import gradcam
    >>> from pathlib import Path
    >>> _ = Path("boxes.csv").write_text("image,left,top,right,bottom\\nphoto.jpg,400,0,800,640\\n")
    >>> annotations = gradcam.evaluation.read_annotations("boxes.csv", names=["photo.jpg"], find_class=int)
    >>> truth = annotations.truth("photo.jpg", region=(40, 120, 560, 560), size=(224, 224))
    >>> truth.masks.shape, truth.masks.float().mean().item()
    (torch.Size([1, 224, 224]), 0.5)
    """

    masks: Tensor
    boxes: Sequence[Tensor]

    __repr__ = show_fields


@dataclass(frozen=True, eq=False)
class Annotations:
    """What somebody marked in pictures; `read_annotations` makes it.

    Attributes
    ----------
    path : str
        Where it is from.
    names : sequence of str
        Of the pictures that have annotations, in the order in which pictures were given.
    notes : sequence of str
        What was left out, a sentence each.
    find : callable
        The objects of a picture by its name, in the picture's own pixels.

    Examples
    --------
    >>> import gradcam
    >>> from pathlib import Path
    >>> _ = Path("boxes.csv").write_text("image,left,top,right,bottom\\nphoto.jpg,400,0,800,640\\n")
    >>> annotations = gradcam.evaluation.read_annotations("boxes.csv", names=["photo.jpg"], find_class=int)
    >>> annotations.truth("photo.jpg", region=(40, 120, 560, 560), size=(224, 224)).boxes[0].tolist()
    [[112.0, 0.0, 224.0, 224.0]]
    """

    path: str
    names: Sequence[str]
    notes: Sequence[str] = ()
    find: Find = field(default=lambda name: (), repr=False)

    __repr__ = show_fields

    def truth(
        self,
        name: str | os.PathLike[str],
        region: Region,
        size: Sequence[int],
        index: int | None = None,
        *,
        picture: Sequence[int] | None = None,
    ) -> Truth | None:
        """Find the objects of a class in what the network sees of a picture.

        An object outside of the region is left out, and one across its border is cut there.

        Parameters
        ----------
        name : str or path
            The picture.
        region : (int, int, int, int)
            The pixels that the network sees, as `Classifier.region` gives them: top, left, height, width.
        size : (int, int)
            Height and width of the network's input.
        index : int, default None
            The class; objects without one count for each, and None takes those of all classes.
        picture : (int, int), default None
            Height and width of the upright picture, so that annotations of another size are told.

        Returns
        -------
        Truth or None
            None where the network sees none of them.

        Raises
        ------
        InputError
            For a box that is not in the picture (a pixel apart from rounding), and for annotations of another size.
        """
        view = View(region, (size[-2], size[-1]), None if picture is None else (picture[0], picture[1]))
        wanted = [it for it in self.find(os.fspath(name)) if index is None or it.index in (None, index)]
        seen = [found for marking in wanted if (found := marking.project(view)) is not None]
        if not seen:
            return None
        mask = np.logical_or.reduce([mask for mask, _ in seen])
        boxes = torch.tensor([box for _, box in seen], dtype=torch.float64, device="cpu")
        return Truth(torch.from_numpy(mask)[None], [boxes])

    def classes(self, name: str | os.PathLike[str]) -> list[int]:
        """List the classes of a picture's objects, each once. Raises as `truth` does for a mask that cannot be read."""
        return sorted({it.index for it in self.find(os.fspath(name)) if it.index is not None})


def read_annotations(
    path: str | os.PathLike[str], *, names: Iterable[str | os.PathLike[str]], find_class: Callable[[str], int]
) -> Annotations:
    """Read where objects are in pictures: from a CSV of boxes, a folder of label masks, or a COCO file of instances.

    All pixels are those of the upright picture, as `gradcam.read_image` gives it. Boxes and outlines are measured at
    pixels' edges: the whole picture is from 0, 0 to its width and height.

    Parameters
    ----------
    path : str or path
        A ``.csv`` or ``.tsv`` with the columns image, left, top, right, bottom and perhaps class; a folder of label masks
        (0 is background, 255 ignored, `classes.csv` maps values to classes); or a ``.json`` file of COCO's.
    names : iterable of str or path
        All pictures that are evaluated; the annotations may call them by longer or shorter paths.
    find_class : callable
        From a label, or an index in digits, to a class, such as `Classifier.find_class`.

    Returns
    -------
    Annotations
        With the objects of each picture.

    Raises
    ------
    InputError
        For a path that is none of these, and for annotations that are broken or of other pictures.

    Examples
    --------
    >>> import gradcam
    >>> from pathlib import Path
    >>> _ = Path("boxes.csv").write_text("image,left,top,right,bottom,class\\nphoto.jpg,400,0,800,640,espresso\\n")
    >>> classifier = gradcam.load_classifier()
    >>> found = gradcam.evaluation.read_annotations("boxes.csv", names=["photo.jpg"], find_class=classifier.find_class)
    >>> found.classes("photo.jpg")
    [967]
    """
    path = os.fspath(path)
    suffix = os.path.splitext(path)[1].lower()
    if os.path.isdir(path):
        pictures = Pictures(names, keep_suffix=False)
        masks = read_label_masks(path, pictures, find_class)
        notes = _count_left_out(masks.left_out, "masks", "are of pictures that are not evaluated")
        return Annotations(path, pictures.sort(masks.paths), notes, masks.find)
    if not os.path.exists(path):
        raise InputError(f"{path}: does not exist; expected annotations.")
    pictures = Pictures(names)
    if suffix in (".csv", ".tsv"):
        boxes = read_box_list(path, pictures, find_class)
        return Annotations(path, pictures.sort(boxes), (), lambda name: boxes.get(name, ()))
    if suffix == ".json":
        objects, left_out, unknown = read_coco(path, pictures, find_class)
        notes = _count_left_out(left_out, "pictures in the file", "are not evaluated")
        if unknown:
            named = ", ".join(f"'{name}'" for name in unknown[:MOST_NAMED])
            more = ", ..." if len(unknown) > MOST_NAMED else ""
            notes.append(f"{len(unknown)} categories are no class of the model, and left out: {named}{more}.")
        return Annotations(path, pictures.sort(objects), notes, lambda name: objects.get(name, ()))
    raise InputError(
        f"{path}: annotations are a .csv or .tsv file of boxes, a .json file as COCO has it, or a folder of label masks, "
        f"and {shorten(suffix)} is none of these."
    )


def _count_left_out(count: int, what: str, why: str) -> list[str]:
    return [f"{count} {what} {why}, and left out."] if count else []
