"""Read object annotations (boxes, label masks, COCO files), and map them to the pixels of the model's input."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gradcam.errors import InputError, format_fields, join_names, shorten
from gradcam.evaluation.annotations.coco import read_coco
from gradcam.evaluation.annotations.match import AnnotatedObject, ImageNames, ModelView
from gradcam.evaluation.annotations.tables import find_masks, read_box_list
from gradcam.images.read import Region
from gradcam.options import keep_old_names

FindObjects = Callable[[str], Sequence[AnnotatedObject]]
MAX_LISTED_CATEGORIES = 5  # largest number of unknown categories that a note names


@dataclass(frozen=True, eq=False)
class Truth:
    """The objects of one class in one image, in pixels of the model's input, for the localisation metrics.

    Attributes
    ----------
    masks : Tensor (1,H,W)
        bool, True at each pixel of an object.
    boxes : sequence of one Tensor (B,4)
        float64, one row per object: left, top, right, bottom. Coordinates refer to the edges of pixels.

    Examples
    --------
    >>> import gradcam
    >>> from pathlib import Path
    >>> _ = Path("boxes.csv").write_text("image,left,top,right,bottom\\nphoto.jpg,400,0,800,640\\n")
    >>> annotations = gradcam.evaluation.read_annotations("boxes.csv", names=["photo.jpg"], find_class=int)
    >>> truth = annotations.truth("photo.jpg", region=(40, 120, 560, 560), size=(224, 224))
    >>> truth.masks.shape, truth.masks.float().mean().item()  # half of the model's view
    (torch.Size([1, 224, 224]), 0.5)
    >>> truth.boxes[0].tolist()
    [[112.0, 0.0, 224.0, 224.0]]
    """

    masks: Tensor
    boxes: Sequence[Tensor]

    __repr__ = format_fields


@keep_old_names
@dataclass(frozen=True, eq=False)
class Annotations:
    """Annotated objects in images, as read by `read_annotations`.

    Attributes
    ----------
    path : str
        The file or folder of the annotations.
    names : sequence of str
        The images with annotations, in the order of the input.
    notes : sequence of str
        Sentences that report how many annotations were left out, and why.
    find : callable
        A function from an image's name to its objects, in pixels of the image.

    Examples
    --------
    >>> import gradcam
    >>> from pathlib import Path
    >>> _ = Path("boxes.csv").write_text("image,left,top,right,bottom,class\\nphoto.jpg,400,0,800,640,espresso\\n")
    >>> classifier = gradcam.load_classifier()
    >>> names = ["photo.jpg", "other.png"]
    >>> annotations = gradcam.evaluation.read_annotations("boxes.csv", names=names, find_class=classifier.find_class)
    >>> annotations.path, annotations.names, annotations.notes, len(annotations.find("photo.jpg"))
    ('boxes.csv', ['photo.jpg'], (), 1)
    >>> annotations.classes("photo.jpg")
    [967]
    >>> region = classifier.region(640, 800)
    >>> annotations.truth("photo.jpg", region, size=(224, 224), index=285) is None  # the cat is not annotated
    True
    """

    path: str
    names: Sequence[str]
    notes: Sequence[str] = ()
    find: FindObjects = field(default=lambda name: (), repr=False)

    __repr__ = format_fields

    def truth(
        self,
        name: str | os.PathLike[str],
        region: Region,
        size: Sequence[int],
        index: int | None = None,
        *,
        image_size: Sequence[int] | None = None,
    ) -> Truth | None:
        """Find the objects of a class in the part of an image that the model sees.

        Objects outside the region are left out, and objects across its border are cropped.

        Parameters
        ----------
        name : str or path
            The image, as in `names`.
        region : (int, int, int, int)
            The pixels that the model sees: top, left, height, width, as in `Classifier.region`.
        size : (int, int)
            Height and width of the model's input.
        index : int, default None
            The class. Class-agnostic objects count for every class. None selects the objects of all classes.
        image_size : (int, int), default None
            Height and width of the upright image. If given, an annotation of a different size raises an error.

        Returns
        -------
        Truth or None
            The objects; None if the model sees no object of the class.

        Raises
        ------
        InputError
            If a box exceeds the image by more than one pixel, if a mask cannot be read or drawn, or if an annotation's
            size differs from the image's. The message names the file and the line, or the annotation.
        """
        view = ModelView(region, (size[-2], size[-1]), None if image_size is None else (image_size[0], image_size[1]))
        objects = [obj for obj in self.find(os.fspath(name)) if index is None or obj.index in (None, index)]
        projected = [projection for obj in objects if (projection := obj.project(view)) is not None]
        if not projected:
            return None
        mask = np.logical_or.reduce([mask for mask, _ in projected])
        boxes = torch.tensor([box for _, box in projected], dtype=torch.float64, device="cpu")
        return Truth(torch.from_numpy(mask)[None], [boxes])

    def classes(self, name: str | os.PathLike[str]) -> list[int]:
        """List the classes of an image's objects, sorted, without duplicates.

        Parameters
        ----------
        name : str or path
            The image, as in `names`.

        Returns
        -------
        list of int
            The class indices. Class-agnostic objects are left out.

        Raises
        ------
        InputError
            If a mask cannot be read.
        """
        return sorted({obj.index for obj in self.find(os.fspath(name)) if obj.index is not None})


def read_annotations(
    path: str | os.PathLike[str], *, names: Iterable[str | os.PathLike[str]], find_class: Callable[[str], int]
) -> Annotations:
    """Read object annotations from a CSV of boxes, a folder of label masks, or a COCO instances file.

    Pixels are counted in the upright image (EXIF orientation applied), as in `gradcam.read_image`. Coordinates of boxes
    and outlines refer to the edges of pixels: a box around the whole image has left 0, top 0, and the image's width
    and height as right and bottom.

    Parameters
    ----------
    path : str or path
        One of these:

        - A ``.csv`` or ``.tsv`` file of boxes, one per row, with a header. Columns, in any order and case: image (or
          path, file, filename); left, top, right, bottom (or xmin, ymin, xmax, ymax; or x, y, width, height); and
          optionally class (or label, target). Other columns are ignored. An object without a class is class-agnostic:
          it counts for every explained class.
        - A folder of label masks, each named like its image, with any image suffix. Masks contain palette indices or grey
          integers. 0 is background. 255 is ignored, unless 255 has a class or is the only value besides 0. Each
          remaining value is a class-agnostic object. A ``classes.csv`` in the folder, with the columns value and class,
          assigns classes to values.
        - A ``.json`` file of COCO instances. A category is matched with the class of the same name. Categories that are
          not classes of the model are left out. Crowd annotations are left out as well. Objects are read from their
          segmentation (polygons or RLE), or from their bbox if they have no segmentation.

    names : iterable of str or path
        All images to evaluate. The annotations may use longer or shorter paths: two paths match if the longer path ends
        in the shorter path. Masks and COCO images that do not match a name are left out.
    find_class : callable
        A function that takes a label, or an index written in digits, and returns the class index, such as
        `Classifier.find_class`.

    Returns
    -------
    Annotations
        The objects of each image, and notes on what was left out.

    Raises
    ------
    InputError
        If the format of the path is unknown, if a file is broken, if a name is duplicate or ambiguous, or if no
        annotation remains. For a table, also if an image is not in `names` or a class is unknown.

    Examples
    --------
    >>> import gradcam
    >>> from pathlib import Path
    >>> _ = Path("boxes.csv").write_text("image,left,top,right,bottom,class\\nphoto.jpg,400,0,800,640,espresso\\n")
    >>> classifier = gradcam.load_classifier()
    >>> find_class = classifier.find_class
    >>> annotations = gradcam.evaluation.read_annotations("boxes.csv", names=["photo.jpg"], find_class=find_class)
    >>> annotations.names, annotations.classes("photo.jpg")
    (['photo.jpg'], [967])
    """
    path = os.fspath(path)
    suffix = os.path.splitext(path)[1].lower()
    if os.path.isdir(path):
        image_names = ImageNames(names, keep_suffix=False)
        masks, left_out = find_masks(path, image_names, find_class)
        notes = [f"{left_out} masks were left out, because their images were not given."] if left_out else []
        return Annotations(path, image_names.sort(masks), notes, lambda name: masks[name]() if name in masks else ())
    if not os.path.exists(path):
        raise InputError(f"{path}: does not exist, expected annotations.")
    image_names, notes = ImageNames(names), []
    if suffix in (".csv", ".tsv"):
        objects = read_box_list(path, image_names, find_class)
    elif suffix == ".json":
        objects, left_out, unknown = read_coco(path, image_names, find_class)
        if left_out:
            notes.append(f"{left_out} images in the file were left out, because they were not given.")
        if unknown:
            more = ", ..." if len(unknown) > MAX_LISTED_CATEGORIES else ""
            categories = join_names(unknown[:MAX_LISTED_CATEGORIES]) + more
            notes.append(
                f"{len(unknown)} categories were left out, because the model has no such classes: {categories}."
            )
    else:
        expected = "a .csv or .tsv file of boxes, a COCO .json file, or a folder of label masks"
        raise InputError(f"{path}: unknown suffix {shorten(suffix)}, expected {expected}.")
    return Annotations(path, image_names.sort(objects), notes or (), lambda name: objects.get(name, ()))
