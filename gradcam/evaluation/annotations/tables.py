"""Read objects from a CSV file of boxes, one per row, and from a folder of label masks, one file per image."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from gradcam.errors import ImageError, InputError, TargetError, shorten
from gradcam.evaluation.annotations.match import AnnotatedObject, Box, ImageNames
from gradcam.images.files import read_text_file
from gradcam.images.read import read_label_mask
from gradcam.sources.folders import has_image_suffix, walk_folder
from gradcam.sources.list_files import CLASS_COLUMNS, IMAGE_COLUMNS, decode_text, read_cells

XYWH = ("x", "y", "width", "height")  # Without x and y, width and height may be the size of the image, not of a box.
BOX_KINDS = (("left", "top", "right", "bottom"), ("xmin", "ymin", "xmax", "ymax"), XYWH)
CLASS_FILE = "classes.csv"
IGNORED_VALUE = 255  # PASCAL VOC masks mark outlines by this value.

FindClass = Callable[[str], int]  # takes a label, or an index written in digits
Columns = tuple[int, list[int], bool, int | None]  # (image column, box columns, True for XYWH columns, class column)


def read_box_list(path: str, image_names: ImageNames, find_class: FindClass) -> Mapping[str, Sequence[AnnotatedObject]]:
    """Read the objects of each image from a ``.csv`` or ``.tsv`` file in the format that `read_annotations` describes.

    Coordinates refer to the edges of pixels, so the pixels at `right` and `bottom` are outside the box. Raise
    `InputError` if the table is invalid. The message names the line.
    """
    rows = read_rows(path)
    columns = _find_columns(*next(rows))
    objects: defaultdict[str, list[AnnotatedObject]] = defaultdict(list)
    lines: dict[tuple[str, int | None, Box | None], str] = {}
    for location, cells in rows:
        obj, image_path = _to_object(location, cells, columns, find_class)
        name = image_names.find(image_path, location)
        if name is None:
            raise InputError(f"{location}: the image {shorten(image_path)} is not among the evaluated images.")
        line, key = location.rpartition(", ")[2], (name, obj.index, obj.box)
        if lines.setdefault(key, line) != line:
            raise InputError(
                f"{location}: the object of {shorten(image_path)} is already in {lines[key]}. Remove one of these lines."
            )
        objects[name].append(obj)
    if not objects:
        raise InputError(f"{path}: there are no boxes below the header.")
    return objects


def read_rows(path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the location and the cells of each row that is not blank. Raise `InputError` if rows differ in length."""
    try:
        text = decode_text(read_text_file(path), path)
    except OSError as error:
        raise InputError(f"{path}: cannot be opened ({error.strerror})") from error
    columns = 0
    for line, row in read_cells(text, "\t" if path.lower().endswith(".tsv") else ",", path):
        location = f"{path}, line {line}"
        columns = columns or len(row)
        if len(row) != columns:
            raise InputError(f"{location}: this line has {len(row)} columns, but the header has {columns}.")
        yield location, [cell.strip() for cell in row]
    if not columns:
        raise InputError(f"{path}: is empty, expected a header and one row per object.")


def _find_columns(location: str, header: list[str]) -> Columns:
    names = [cell.strip('"').lower() for cell in header]
    box_kinds = [kind for kind in BOX_KINDS if all(name in names for name in kind)]
    has_duplicates = any(names.count(name) > 1 for kind in box_kinds for name in kind)
    images = [number for number, name in enumerate(names) if name in IMAGE_COLUMNS]
    labels = [number for number, name in enumerate(names) if name in CLASS_COLUMNS]
    if len(box_kinds) != 1 or has_duplicates or len(images) != 1 or len(labels) > 1:
        raise InputError(
            f"{location}: the columns are {shorten(header)}, expected one column for the image "
            f"({', '.join(sorted(IMAGE_COLUMNS))}), four for the box ({'; or '.join(map(', '.join, BOX_KINDS))}), and at "
            f"most one for the class ({', '.join(sorted(CLASS_COLUMNS))})."
        )
    return images[0], [names.index(name) for name in box_kinds[0]], box_kinds[0] == XYWH, labels[0] if labels else None


def _to_object(location: str, cells: list[str], columns: Columns, find_class: FindClass) -> tuple[AnnotatedObject, str]:
    image_column, box_columns, has_sides, class_column = columns
    image_path = cells[image_column]
    if not image_path:
        raise InputError(f"{location}: the image name is empty.")
    numbers = [cells[column] for column in box_columns]
    try:
        first, second, third, fourth = map(float, numbers)
    except ValueError:
        raise InputError(f"{location}: the box is {', '.join(map(shorten, numbers))}, expected four numbers.") from None
    box = (first, second, first + third, second + fourth) if has_sides else (first, second, third, fourth)
    label = "" if class_column is None else cells[class_column]
    index = find_index(location, label, find_class) if label else None
    return AnnotatedObject(location, index, check_box(location, box)), image_path


def find_index(location: str, label: str, find_class: FindClass) -> int:
    """Return the class index of a label, or of an index written in digits. Raise `InputError` for unknown classes."""
    try:
        return find_class(label)
    except TargetError as error:
        raise InputError(f"{location}: {error}") from None


def check_box(location: str, box: Box) -> Box:
    """Return the box unchanged. Raise `InputError` if the box is empty or not finite."""
    x0, y0, x1, y1 = box
    if not all(map(math.isfinite, box)) or x1 <= x0 or y1 <= y0:
        corners = f"left {x0:g}, top {y0:g} to right {x1:g}, bottom {y1:g}"
        raise InputError(f"{location}: the box from {corners} is empty.")
    return box


def find_masks(
    folder: str, image_names: ImageNames, find_class: FindClass
) -> tuple[Mapping[str, Callable[[], Sequence[AnnotatedObject]]], int]:
    """Find the masks in a folder and its subfolders. `read_annotations` describes the format.

    Return a mapping and the number of masks that are left out. For each image, the mapping has a function that reads the
    objects from the mask. Masks of images that are not evaluated are left out, because the folder often contains the
    masks of a complete data set. A mask has the name of its image, with any image suffix: `cats/a.png` for `cats/a.jpg`.
    Raise `InputError` if no mask remains, if an image has two masks, or if `classes.csv` is invalid.
    """
    paths: dict[str, str] = {}
    left_out = 0
    for subfolder in walk_folder(folder, set()):
        for file in filter(has_image_suffix, subfolder.files):
            path = os.path.join(subfolder.path, file)
            name = image_names.find(subfolder.name + file, path)
            if name is None:
                left_out += 1
            elif (first := paths.setdefault(name, path)) != path:
                raise InputError(f"{path}: {shorten(name)} has a second mask, {first}. Remove one of the two masks.")
    if not paths:
        example = shorten(image_names.names[0]) if image_names.names else "none"
        expected = f"one of the {len(image_names.names)} images, such as {example}"
        raise InputError(f"{folder}: there are {left_out} masks, but none has the name of {expected}.")
    path = os.path.join(folder, CLASS_FILE)
    classes = _read_classes(path, find_class) if os.path.exists(path) else None
    return {name: partial(_read_mask, path, classes) for name, path in paths.items()}, left_out


def _read_mask(path: str, classes: Mapping[int, int] | None) -> Sequence[AnnotatedObject]:
    """Return the objects of a mask, one per value. Raise `InputError` if the mask cannot be read.

    `classes` is None if the folder has no `classes.csv`. 0 is background. 255 is ignored, unless 255 has a class or is
    the only value besides 0, as in a black and white mask.
    """
    try:
        pixels = read_label_mask(path)
    except ImageError as error:
        raise InputError(str(error)) from None
    values, index_of = {*np.unique(pixels).tolist()} - {0}, classes or {}
    if len(values) > 1 and IGNORED_VALUE not in index_of:
        values -= {IGNORED_VALUE}
    unknown = sorted(values - index_of.keys())
    if unknown and classes is not None:
        raise InputError(f"{path}: the pixel value {unknown[0]} has no class in {CLASS_FILE}.")
    return [AnnotatedObject(path, index_of.get(k), draw=partial(np.equal, pixels, k)) for k in sorted(values)]


def _read_classes(path: str, find_class: FindClass) -> dict[int, int]:
    rows = read_rows(path)
    location, header = next(rows)
    names = [name.lower() for name in header]
    if sorted(names) != ["class", "value"]:
        raise InputError(f"{location}: the columns are {shorten(header)}, expected 'value' and 'class'.")
    classes: dict[int, int] = {}
    for location, row in rows:
        value, label = row[names.index("value")], row[names.index("class")]
        if not value.isdecimal() or int(value) == 0 or int(value) in classes:
            expected = "an integer above 0 that no earlier line has"
            raise InputError(f"{location}: the value is {shorten(value)}, expected {expected}.")
        classes[int(value)] = find_index(location, label, find_class)
    return classes
