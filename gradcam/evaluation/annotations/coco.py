"""Read objects from a COCO file: boxes, polygons and run-length encodings, with categories matched by name."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradcam.errors import InputError, TargetError, join_names, shorten
from gradcam.evaluation.annotations.match import AnnotatedObject, ImageNames, Mask
from gradcam.evaluation.annotations.tables import check_box
from gradcam.images.files import read_text_file

# (objects by image name, number of images that are not evaluated, categories that are not classes of the model)
CocoFile = tuple[Mapping[str, Sequence[AnnotatedObject]], int, Sequence[str]]


def read_coco(path: str, image_names: ImageNames, find_class: Callable[[str], int]) -> CocoFile:
    """Read the objects of a COCO instances file.

    A category is matched with the class of the same name. Categories without a class are left out, because most models
    do not have COCO's 80 classes. Crowd annotations, and images that are not evaluated, are left out as well. An object
    is read from its `segmentation` (polygons, or RLE with or without compression). If there is no `segmentation`, the
    object is read from its `bbox`. Raise `InputError` if the file is invalid, or if no object remains. The message
    names the annotation.
    """
    content = _load(path)
    images = _by_id(path, "images", content)
    id_by_name: dict[str, Any] = {}
    for key, image in images.items():
        location, file = f"{path}, image {key}", image.get("file_name")
        if not isinstance(file, str):
            raise InputError(f"{location}: there is no file_name.")
        name = image_names.find(file, location)
        if name is not None and id_by_name.setdefault(name, key) != key:
            raise InputError(f"{location}: this image and image {id_by_name[name]} both match {shorten(name)}.")
    names = {key: name for name, key in id_by_name.items()}
    classes = {key: _find_class(category, find_class) for key, category in _by_id(path, "categories", content).items()}
    objects: defaultdict[str, list[AnnotatedObject]] = defaultdict(list)
    for key, annotation in _by_id(path, "annotations", content).items():
        location = f"{path}, annotation {key}"
        image_id, category_id = annotation.get("image_id"), annotation.get("category_id")
        for kind, entry_id, entries in (("image", image_id, images), ("category", category_id, classes)):
            if not isinstance(entry_id, (int, str)) or entry_id not in entries:
                raise InputError(
                    f"{location}: its {kind}_id is {shorten(entry_id)}, but no {kind} in this file has this id."
                )
        index = classes[category_id]
        if image_id in names and index is not None and not annotation.get("iscrowd"):
            objects[names[image_id]].append(_to_object(location, annotation, index, images[image_id]))
    unknown = [str(category.get("name")) for category in content["categories"] if classes[category["id"]] is None]
    if not objects:
        categories = f"{len(classes) - len(unknown)} of its {len(classes)} categories are classes of the model"
        images_given = f"{len(names)} of its {len(images)} images were given"
        raise InputError(f"{path}: there is no object to evaluate ({images_given}, and {categories}).")
    return objects, len(images) - len(names), unknown


def _load(path: str) -> dict[str, Any]:
    try:
        content = json.loads(read_text_file(path).decode("utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: cannot be opened ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # Invalid JSON or UTF-8 raises ValueError.
        raise InputError(f"{path}: is not JSON ({error})") from error
    keys = ("images", "annotations", "categories")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in keys):
        raise InputError(f"{path}: is not a COCO instances file: expected lists of {join_names(keys)}.")
    return content


def _by_id(path: str, kind: str, content: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    entries: dict[Any, dict[str, Any]] = {}
    for position, entry in enumerate(content[kind]):
        key = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(key, (int, str)):
            raise InputError(f"{path}: entry {position} of {kind!r} has no id.")
        if key in entries:
            raise InputError(f"{path}: two entries of {kind!r} have the id {key}.")
        entries[key] = entry
    return entries


def _find_class(category: Mapping[str, Any], find_class: Callable[[str], int]) -> int | None:
    name = category.get("name")
    if not isinstance(name, str) or not name.strip():
        return None
    try:
        # A category name that consists of digits is a name, not a class index.
        return find_class(f"name:{name}" if name.strip().lstrip("+-").isdecimal() else name)
    except TargetError:
        return None


def _to_object(location: str, annotation: Mapping[str, Any], index: int, image: Mapping[str, Any]) -> AnnotatedObject:
    height, width = image.get("height"), image.get("width")
    image_size = (height, width) if isinstance(height, int) and isinstance(width, int) else None
    segmentation, bbox = annotation.get("segmentation"), annotation.get("bbox")
    if segmentation:
        if isinstance(segmentation, list) and image_size is None:
            raise InputError(f"{location}: polygons need the height and width of their image, which are missing.")
        draw = partial(_draw, location, segmentation, image_size)
        return AnnotatedObject(location, index, draw=draw, image_size=image_size)
    try:
        x, y, box_width, box_height = map(float, bbox)  # type: ignore[arg-type]  # the except clause reports it
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{location}: its bbox is {shorten(bbox)}, expected left, top, width and height.") from None
    box = check_box(location, (x, y, x + box_width, y + box_height))
    return AnnotatedObject(location, index, box, image_size=image_size)


def _draw(location: str, segmentation: Any, image_size: tuple[int, int] | None) -> Mask:
    try:
        if isinstance(segmentation, list) and image_size is not None:
            for polygon in segmentation:
                points = np.asarray(polygon, dtype=np.float64)
                if points.ndim != 1 or len(points) < 6 or len(points) % 2 or not np.isfinite(points).all():
                    expected = "expected a list x, y, x, y, ... of at least three points"
                    raise ValueError(f"a polygon is {shorten(polygon)}, {expected}")
            return fill_polygons(segmentation, image_size)
        rows, columns = segmentation["size"]
        if image_size not in (None, (rows, columns)):
            height, width = image_size
            raise ValueError(f"its RLE has {columns} x {rows} pixels, but its image has {width} x {height}")
        runs = segmentation["counts"]
        return fill_runs(unpack_runs(runs) if isinstance(runs, str) else runs, (rows, columns))
    except (TypeError, KeyError, OverflowError):
        expected = "expected polygons, or RLE with counts and size"
        raise InputError(f"{location}: its segmentation is {shorten(segmentation)}, {expected}.") from None
    except ValueError as error:
        raise InputError(f"{location}: its segmentation cannot be drawn: {error}.") from None


def fill_polygons(polygons: Sequence[Sequence[float]], size: tuple[int, int]) -> Mask:
    """Return a mask (H,W) of the pixels whose centres are inside a polygon.

    Each polygon is a list x, y, x, y, ... in pixels. A pixel is inside if an odd number of edges lies to the left of
    its centre (even-odd rule). The masks differ from the masks of pycocotools by a few pixels along the outline, because
    pycocotools draws polygons on a grid that is five times as fine.
    """
    rows, columns = size
    mask = np.zeros(size, dtype=bool)
    for polygon in polygons:
        points = np.asarray(polygon, dtype=np.float64).reshape(-1, 2)
        crossings = np.zeros((rows, columns + 1), dtype=np.int64)
        for (x, y), (next_x, next_y) in zip(points, np.roll(points, -1, axis=0)):
            low, high = np.clip(np.ceil(np.array(sorted((y, next_y))) - 0.5), 0, rows).astype(int)
            if low < high:
                crossed_rows = np.arange(low, high)
                crossing_x = x + (crossed_rows + 0.5 - y) * (next_x - x) / (next_y - y)
                np.add.at(crossings, (crossed_rows, np.clip(np.ceil(crossing_x - 0.5), 0, columns).astype(int)), 1)
        mask |= crossings.cumsum(1)[:, :columns] % 2 == 1
    return mask


def fill_runs(counts: Sequence[int], size: tuple[int, int]) -> Mask:
    """Return the mask (H,W) of a run-length encoding. Runs of background and object alternate, column by column.

    Raise `ValueError` if the runs do not fill the image.
    """
    rows, columns = size
    lengths = np.asarray(counts, dtype=np.int64)
    if (lengths < 0).any() or lengths.sum() != rows * columns:
        raise ValueError(f"its RLE has {lengths.sum()} pixels, expected {rows * columns} ({columns} x {rows})")
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(columns, rows).T


def unpack_runs(text: str) -> list[int]:
    """Return the runs of COCO's compressed RLE; raise `ValueError` if the text is invalid.

    Each character holds five bits of a number, the lowest bits first. The first three numbers are runs. Each further
    number is the difference from the run two positions earlier.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64:
            raise ValueError(f"its RLE contains {character!r}, which is not a valid character")
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:  # This is the last character of a number. The highest of its five bits is the sign.
            value -= (1 << shift) if code & 16 else 0
            counts.append(value + counts[-2] if len(counts) > 2 else value)
            value = shift = 0
    if shift:
        raise ValueError("its RLE ends within a number")
    return counts
