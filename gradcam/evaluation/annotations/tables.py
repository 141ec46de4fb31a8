"""Objects from a CSV file of boxes, a row for each, and from a folder of label masks, a picture for each."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gradcam.errors import ImageError, InputError, TargetError, shorten
from gradcam.evaluation.annotations.match import Box, Marking, Pictures
from gradcam.images.files import read_text_file
from gradcam.images.read import read_numbers
from gradcam.sources.folders import is_picture, walk_folder
from gradcam.sources.lists import CLASS_COLUMNS, IMAGE_COLUMNS, decode_text, read_cells

CORNERS = (("left", "top", "right", "bottom"), ("xmin", "ymin", "xmax", "ymax"))
SIDES = ("x", "y", "width", "height")  # of the box; other tables have these two of the picture

CLASS_FILE = "classes.csv"
IGNORED = 255  # what VOC draws around objects

FindClass = Callable[[str], int]  # from a label, or an index in digits
Columns = tuple[int, list[int], bool, int | None]  # of the picture, the box, whether that has sides, and of the class


def read_box_list(path: str, pictures: Pictures, find_class: FindClass) -> Mapping[str, Sequence[Marking]]:
    """The objects of each picture, by its name, from a ``.csv`` or ``.tsv`` file with a header. Columns, in any order and
    any case, others are passed over: image, path, file or filename; left, top, right, bottom, or xmin, ymin, xmax,
    ymax, or x, y, width, height, in pixels of the upright picture, measured at the pixels' edges, so that right and
    bottom are not inside; and, if wanted, class, label or target: a label or an index. An object without a class counts
    for whichever is explained. Raises `InputError`, with the line, for what is no such table, or is wrong in it."""
    rows = read_rows(path)
    columns = _find_columns(*next(rows))
    found: defaultdict[str, list[Marking]] = defaultdict(list)
    places: dict[tuple[str, int | None, Box | None], str] = {}
    for where, cells in rows:
        marking, wanted = _to_marking(where, cells, columns, find_class)
        name = pictures.find(wanted, where)
        if name is None:
            raise InputError(f"{where}: the image {shorten(wanted)} is not among the evaluated images.")
        line, key = where.rpartition(", ")[2], (name, marking.index, marking.box)
        if places.setdefault(key, line) != line:
            raise InputError(f"{where}: duplicates {places[key]}, the same object of {shorten(wanted)}.")
        found[name].append(marking)
    if not found:
        raise InputError(f"{path}: has no boxes below its header.")
    return found


def read_rows(path: str) -> Iterator[tuple[str, list[str]]]:
    """The rows of a table that are not blank, with where they are. Raises `InputError`, also for another length."""
    try:
        text = decode_text(read_text_file(path), path)
    except OSError as error:
        raise InputError(f"{path}: cannot be opened ({error.strerror})") from error
    columns = 0
    for line, row in read_cells(text, "\t" if path.lower().endswith(".tsv") else ",", path):
        where = f"{path}, line {line}"
        columns = columns or len(row)
        if len(row) != columns:
            raise InputError(f"{where}: has {len(row)} columns, but the header has {columns}.")
        yield where, [cell.strip() for cell in row]
    if not columns:
        raise InputError(f"{path}: is empty, expected a header and one row per object.")


def _find_columns(where: str, header: list[str]) -> Columns:
    names = [cell.strip('"').lower() for cell in header]
    kinds = [kind for kind in (*CORNERS, SIDES) if all(name in names for name in kind)]
    images = [number for number, name in enumerate(names) if name in IMAGE_COLUMNS]
    labels = [number for number, name in enumerate(names) if name in CLASS_COLUMNS]
    if len(kinds) != 1 or len(images) != 1 or len(labels) > 1 or any(names.count(name) > 1 for name in kinds[0]):
        raise InputError(
            f"{where}: has the columns {shorten(header)}, expected one column for the image "
            f"({', '.join(sorted(IMAGE_COLUMNS))}), four for the box ({', '.join(CORNERS[0])}; or {', '.join(CORNERS[1])}; "
            f"or {', '.join(SIDES)}), and at most one for the class ({', '.join(sorted(CLASS_COLUMNS))})."
        )
    numbers = [names.index(name) for name in kinds[0]]
    return images[0], numbers, kinds[0] == SIDES, labels[0] if labels else None


def _to_marking(where: str, cells: list[str], columns: Columns, find_class: FindClass) -> tuple[Marking, str]:
    image, corners, has_sides, column = columns
    wanted = cells[image]
    if not wanted:
        raise InputError(f"{where}: the image name is empty.")
    numbers = [cells[it] for it in corners]
    try:
        first, second, third, fourth = map(float, numbers)
    except ValueError:
        raise InputError(f"{where}: the box is {', '.join(map(shorten, numbers))}, expected four numbers.") from None
    box = (first, second, first + third, second + fourth) if has_sides else (first, second, third, fourth)
    label = "" if column is None else cells[column]
    return Marking(where, find_index(where, label, find_class) if label else None, check_box(where, box)), wanted


def find_index(where: str, label: str, find_class: FindClass) -> int:
    """The index of a class by its label, or its index in digits. Raises `InputError`, with where, for an unknown one."""
    try:
        return find_class(label)
    except TargetError as error:
        raise InputError(f"{where}: {error}") from None


def check_box(where: str, box: Box) -> Box:
    """The box, if it has an inside. Raises `InputError`, with where, if not."""
    left, top, right, bottom = box
    if not all(map(math.isfinite, box)) or right <= left or bottom <= top:
        said = f"the box from left {left:g}, top {top:g} to right {right:g}, bottom {bottom:g}"
        raise InputError(f"{where}: {said} is empty.")
    return box


@dataclass(frozen=True, eq=False)
class LabelMasks:
    """The masks of a folder: `paths`, by the pictures' names, and the classes of their numbers, None where there are
    none. 0 is background, and so is 255, unless it is the only other number, as in black and white, or has a class."""

    paths: Mapping[str, str]
    classes: Mapping[int, int] | None
    left_out: int  # masks of pictures that were not given

    def find(self, name: str) -> Sequence[Marking]:
        """The objects of a picture: each number of its mask is one. Raises `InputError` for a mask that cannot be read."""
        path = self.paths.get(name)
        if path is None:
            return ()
        try:
            numbers = read_numbers(path)
        except ImageError as error:
            raise InputError(str(error)) from None
        found = [int(number) for number in np.unique(numbers) if number != 0]
        if len(found) > 1 and IGNORED not in (self.classes or ()):
            found = [number for number in found if number != IGNORED]
        for number in found:
            if self.classes is not None and number not in self.classes:
                raise InputError(f"{path}: contains the value {number}, which has no class in {CLASS_FILE}.")
        classes = self.classes or {}
        return [Marking(path, classes.get(it), draw=partial(np.equal, numbers, it)) for it in found]


def read_label_masks(folder: str, pictures: Pictures, find_class: FindClass) -> LabelMasks:
    """The masks in a folder and below, each called as its picture is, with any suffix of a picture. Of `cats/a.jpg` it
    is `cats/a.png`, say. They hold numbers: a palette's indices, or grey integers, at the size of the upright picture.
    0 is background, 255 ignored as `LabelMasks` says. Every other number is an object of whichever class is explained;
    where the folder has a `classes.csv`, a table with the columns value and class, numbers are classes: by it, a label
    or an index. A mask of a picture that was not given is left out: such folders are often those of a whole data set.
    Raises `InputError` where none is left, for two masks of one picture, and a `classes.csv` that is no such table."""
    found: dict[str, str] = {}
    left_out = 0
    for part in walk_folder(folder, set()):
        for file in filter(is_picture, part.files):
            path = os.path.join(part.path, file)
            name = pictures.find(part.name + file, path)
            if name is None:
                left_out += 1
            elif found.setdefault(name, path) != path:
                other = found[name]
                raise InputError(f"{path}: is a second mask of {shorten(name)}, beside {other}. Remove one of them.")
    if not found:
        raise InputError(
            f"{folder}: has {left_out} masks, but none is named like one of the {len(pictures.names)} images, such as "
            f"{shorten(pictures.names[0]) if pictures.names else 'none'}."
        )
    path = os.path.join(folder, CLASS_FILE)
    return LabelMasks(found, _read_classes(path, find_class) if os.path.exists(path) else None, left_out)


def _read_classes(path: str, find_class: FindClass) -> dict[int, int]:
    rows = read_rows(path)
    where, header = next(rows)
    names = [name.lower() for name in header]
    if sorted(names) != ["class", "value"]:
        raise InputError(f"{where}: has the columns {shorten(header)}, expected value and class.")
    found: dict[int, int] = {}
    for where, row in rows:
        value, label = row[names.index("value")], row[names.index("class")]
        if not value.isdecimal() or int(value) == 0 or int(value) in found:
            raise InputError(
                f"{where}: the value is {shorten(value)}, expected an integer above 0 that is not yet used."
            )
        found[int(value)] = find_index(where, label, find_class)
    return found
