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
        bool, True in the pixels of any of the objects.
    boxes : sequence of one Tensor (B,4)
        float64, a row for each object: left, top, right, bottom, measured at the pixels' edges.

    Examples
    --------
    >>> import gradcam
    >>> from pathlib import Path
    >>> _ = Path("boxes.csv").write_text("image,left,top,right,bottom\\nphoto.jpg,400,0,800,640\\n")
    >>> annotations = gradcam.evaluation.read_annotations("boxes.csv", names=["photo.jpg"], find_class=int)
    >>> truth = annotations.truth("photo.jpg", region=(40, 120, 560, 560), size=(224, 224))
    >>> truth.masks.shape, truth.masks.float().mean().item()  # half of what the network sees
    (torch.Size([1, 224, 224]), 0.5)
    >>> truth.boxes[0].tolist()
    [[112.0, 0.0, 224.0, 224.0]]
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
        The file or folder that the annotations are from.
    names : sequence of str
        The pictures that have annotations, in the order in which pictures were given.
    notes : sequence of str
        What was left out, a sentence each.
    find : callable
        A function from a picture's name to its objects, in the picture's own pixels.

    Examples
    --------
    >>> import gradcam
    >>> from pathlib import Path
    >>> _ = Path("boxes.csv").write_text("image,left,top,right,bottom,class\\nphoto.jpg,400,0,800,640,espresso\\n")
    >>> classifier = gradcam.load_classifier()
    >>> names = ["photo.jpg", "other.png"]
    >>> found = gradcam.evaluation.read_annotations("boxes.csv", names=names, find_class=classifier.find_class)
    >>> found.path, found.names, found.notes, len(found.find("photo.jpg"))
    ('boxes.csv', ['photo.jpg'], (), 1)
    >>> found.classes("photo.jpg")
    [967]
    >>> region = classifier.region(640, 800)
    >>> found.truth("photo.jpg", region, size=(224, 224), index=285) is None  # nobody marked the cat
    True
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
            The picture, as `names` has it.
        region : (int, int, int, int)
            The pixels of the picture that the network sees: top, left, height, width, as `Classifier.region` gives
            them.
        size : (int, int)
            Height and width of the network's input.
        index : int, default None
            The class. Objects without a class count for each; None takes the objects of all classes.
        picture : (int, int), default None
            Height and width of the upright picture. Where it is given, annotations of another size are refused.

        Returns
        -------
        Truth or None
            The objects; None where the network sees none of them.

        Raises
        ------
        InputError
            For a box that is not in the picture (a pixel apart from rounding), for a mask that cannot be read or drawn,
            and for a mask, or annotations, of another size. The message names the file and the line, or the annotation.
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
        """List the classes of a picture's objects, each once, sorted.

        Parameters
        ----------
        name : str or path
            The picture, as `names` has it.

        Returns
        -------
        list of int
            The classes' indices. Objects without a class add none.

        Raises
        ------
        InputError
            For a mask that cannot be read.
        """
        return sorted({it.index for it in self.find(os.fspath(name)) if it.index is not None})


def read_annotations(
    path: str | os.PathLike[str], *, names: Iterable[str | os.PathLike[str]], find_class: Callable[[str], int]
) -> Annotations:
    """Read where objects are in pictures: from a CSV of boxes, a folder of label masks, or a COCO file of instances.

    All pixels are those of the upright picture, as `gradcam.read_image` gives it: with the orientation in its EXIF data
    applied. Boxes and outlines are measured at pixels' edges: the whole picture is from 0, 0 to its width and height,
    and right and bottom are not inside.

    Parameters
    ----------
    path : str or path
        One of these:

        - A ``.csv`` or ``.tsv`` of boxes, a row each, with a header. Its columns, in any order and case: image (or
          path, file, filename); left, top, right, bottom (or xmin, ymin, xmax, ymax; or x, y, width, height); and, if
          wanted, class (or label, target). Other columns are passed over. An object without a class counts for
          whichever class is explained.
        - A folder of label masks, each named as its picture is, with any suffix of a picture. They hold a palette's
          indices or grey integers. 0 is background. 255 is ignored, unless it is the only other number or has a class.
          Every other number is an object of whichever class is explained. Where the folder has a ``classes.csv``, with
          the columns value and class, it says which class each number is.
        - A ``.json`` file of COCO's instances. A category is the class of that name. Categories that are no class, and
          crowds, are left out. An object is its segmentation, of polygons or runs; without one, its bbox.

    names : iterable of str or path
        All pictures that are evaluated. The annotations may call them by longer or shorter paths: two paths are of one
        picture where one of them ends in the other. Masks and COCO's pictures beside these are left out.
    find_class : callable
        A function from a label, or an index in digits, to a class, such as `Classifier.find_class`.

    Returns
    -------
    Annotations
        The objects of each picture, and notes on what was left out.

    Raises
    ------
    InputError
        For a path that is none of these; for a file that is broken, or that says one thing twice; for a table with a
        picture that is not among `names`, or with a label that is no class; for a name that several pictures may have;
        and where nothing is left.

    Examples
    --------
    >>> import gradcam
    >>> from pathlib import Path
    >>> _ = Path("boxes.csv").write_text("image,left,top,right,bottom,class\\nphoto.jpg,400,0,800,640,espresso\\n")
    >>> classifier = gradcam.load_classifier()
    >>> found = gradcam.evaluation.read_annotations("boxes.csv", names=["photo.jpg"], find_class=classifier.find_class)
    >>> found.names, found.classes("photo.jpg")
    (['photo.jpg'], [967])
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
