"""Objects from a folder of label masks: pictures of numbers, one beside each picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gradcam.batch.inputs.folders import is_picture, walk_folder
from gradcam.errors import ImageError, InputError, shorten
from gradcam.evaluation.annotations.box_lists import find_index, read_rows
from gradcam.evaluation.annotations.markings import Marking, Mask
from gradcam.evaluation.annotations.matching import Pictures
from gradcam.images import read_numbers

CLASS_FILE = "classes.csv"
IGNORED = 255  # what VOC draws around objects


@dataclass(frozen=True, eq=False)
class LabelMasks:
    """The masks of a folder: `paths`, by the pictures' names, and the classes of their numbers, None where nobody says so.

    0 is background. 255 is neither object nor background, and counts as background, unless it is the only other number, as
    in masks that are black and white, or has a class.
    """

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
        return [
            Marking(path, self._find_class(path, number), draw=partial(_draw, numbers, number))
            for number in self._list_objects(numbers)
        ]

    def _list_objects(self, numbers: NDArray[np.int64]) -> list[int]:
        found = [int(number) for number in np.unique(numbers) if number != 0]
        has_border = len(found) > 1 and IGNORED in found and IGNORED not in (self.classes or ())
        return [number for number in found if not (has_border and number == IGNORED)]

    def _find_class(self, path: str, number: int) -> int | None:
        if self.classes is None:
            return None
        if number not in self.classes:
            raise InputError(f"{path}: has the number {number}, and {CLASS_FILE} no class for it.")
        return self.classes[number]


def read_label_masks(folder: str, pictures: Pictures, find_class: Callable[[str], int]) -> LabelMasks:
    """The masks in a folder and below, each called as its picture is, with any suffix of a picture.

    Of `cats/a.jpg` it is `cats/a.png`, say. They hold numbers: a palette's indices, or grey integers, at the size of the
    upright picture. 0 is background, 255 ignored as `LabelMasks` says. Every other number is an object of whichever class
    is explained; where the folder has a `classes.csv`, a table with the columns value and class, numbers are classes: by
    it, a label or an index.
    A mask of a picture that was not given is left out: such folders are often those of a whole data set.

    Raises `InputError` where no mask is of a picture that was given, for two masks of one picture, a picture that it may be
    several of, and a `classes.csv` that is no such table or names an unknown class.
    """
    found: dict[str, str] = {}
    left_out = 0
    for part in walk_folder(folder, set()):
        for file in filter(is_picture, part.files):
            path = os.path.join(part.path, file)
            name = pictures.find(part.name + file, path)
            if name is None:
                left_out += 1
            elif name in found:
                raise InputError(
                    f"{path}: is a second mask of {shorten(name)}, beside {found[name]}; keep one of them."
                )
            else:
                found[name] = path
    if not found:
        raise InputError(
            f"{folder}: has {left_out} masks, and none of them is called as one of the {len(pictures.names)} pictures, such "
            f"as {shorten(pictures.names[0]) if pictures.names else 'none'}."
        )
    return LabelMasks(found, _read_classes(os.path.join(folder, CLASS_FILE), find_class), left_out)


def _draw(numbers: NDArray[np.int64], number: int) -> Mask:
    return numbers == number


def _read_classes(path: str, find_class: Callable[[str], int]) -> dict[int, int] | None:
    if not os.path.exists(path):
        return None
    rows = read_rows(path)
    where, header = next(rows)
    names = [name.lower() for name in header]
    if sorted(names) != ["class", "value"]:
        raise InputError(f"{where}: has the columns {shorten(header)}, expected value and class.")
    found: dict[int, int] = {}
    for where, row in rows:
        value, label = row[names.index("value")], row[names.index("class")]
        if not value.isdecimal() or int(value) == 0 or int(value) in found:
            raise InputError(f"{where}: the value is {shorten(value)}, expected an integer above 0, each once.")
        found[int(value)] = find_index(where, label, find_class)
    return found
