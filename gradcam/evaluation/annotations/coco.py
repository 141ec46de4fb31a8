"""Objects from a COCO file: boxes, polygons and runs of pixels, with categories by name."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradcam.errors import InputError, TargetError, join_names, shorten
from gradcam.evaluation.annotations.match import Marking, Mask, Pictures
from gradcam.evaluation.annotations.tables import check_box
from gradcam.images.files import read_text_file

# The objects of each picture, by its name; how many pictures were not given, and which categories have no class.
CocoFile = tuple[Mapping[str, Sequence[Marking]], int, Sequence[str]]


def read_coco(path: str, pictures: Pictures, find_class: Callable[[str], int]) -> CocoFile:
    """The objects in a COCO file of instances: its `images`, `annotations` and `categories`. A category is the class
    that is called so; those without one are left out, for COCO's 80 are not those of most models, and so are pictures
    that were not given, and crowds. An object's mask is its `segmentation`, of polygons or of runs, compressed or not,
    and its box is around it; without one, it is its `bbox`. Raises `InputError`, with the annotation: for what is no
    such file, or is wrong in it, and where nothing is left."""
    content = _load(path)
    images = _by_id(path, "images", content)
    named: dict[str, Any] = {}
    for key, each in images.items():
        where, file = f"{path}, image {key}", each.get("file_name")
        if not isinstance(file, str):
            raise InputError(f"{where}: has no file_name.")
        name = pictures.find(file, where)
        if name is not None and named.setdefault(name, key) != key:
            raise InputError(f"{where}: duplicates image {named[name]}, {shorten(name)}.")
    names = {key: name for name, key in named.items()}
    classes = {key: _find_class(each, find_class) for key, each in _by_id(path, "categories", content).items()}
    found: defaultdict[str, list[Marking]] = defaultdict(list)
    for key, annotation in _by_id(path, "annotations", content).items():
        where = f"{path}, annotation {key}"
        image, category = annotation.get("image_id"), annotation.get("category_id")
        for kind, number, known in (("image", image, images), ("category", category, classes)):
            if not isinstance(number, (int, str)) or number not in known:
                raise InputError(f"{where}: has the {kind} id {shorten(number)}, which is not in this file.")
        index = classes[category]
        if image in names and index is not None and not annotation.get("iscrowd"):
            found[names[image]].append(_to_marking(where, annotation, index, images[image]))
    unknown = [str(each.get("name")) for each in content["categories"] if classes[each["id"]] is None]
    if not found:
        raise InputError(
            f"{path}: no object matches ({len(names)} of its {len(images)} images were given, and "
            f"{len(classes) - len(unknown)} of its {len(classes)} categories are classes of the model)."
        )
    return found, len(images) - len(names), unknown


def _load(path: str) -> dict[str, Any]:
    try:
        content = json.loads(read_text_file(path).decode("utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: cannot be opened ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # of JSON, and of UTF-8
        raise InputError(f"{path}: is not JSON ({error})") from error
    keys = ("images", "annotations", "categories")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in keys):
        raise InputError(f"{path}: is not a COCO instances file: expected lists of {join_names(keys)}.")
    return content


def _by_id(path: str, kind: str, content: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    for position, each in enumerate(content[kind]):
        key = each.get("id") if isinstance(each, dict) else None
        if not isinstance(key, (int, str)):
            raise InputError(f"{path}: entry {position} of its {kind} has no id.")
        if key in found:
            raise InputError(f"{path}: two of its {kind} have the id {key}.")
        found[key] = each
    return found


def _find_class(category: Mapping[str, Any], find_class: Callable[[str], int]) -> int | None:
    name = category.get("name")
    if not isinstance(name, str) or not name.strip():
        return None
    try:
        return find_class(f"name:{name}" if name.strip().lstrip("+-").isdecimal() else name)  # digits are no index here
    except TargetError:
        return None


def _to_marking(where: str, annotation: Mapping[str, Any], index: int, image: Mapping[str, Any]) -> Marking:
    height, width = image.get("height"), image.get("width")
    picture = (height, width) if isinstance(height, int) and isinstance(width, int) else None
    drawing, bbox = annotation.get("segmentation"), annotation.get("bbox")
    if drawing:
        if isinstance(drawing, list) and picture is None:
            raise InputError(f"{where}: has polygons, but its image has no height and width.")
        return Marking(where, index, draw=partial(_draw, where, drawing, picture), picture=picture)
    try:
        left, top, across, down = map(float, bbox)  # type: ignore[arg-type]  # tried out here
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: its bbox is {shorten(bbox)}, expected left, top, width and height.") from None
    return Marking(where, index, check_box(where, (left, top, left + across, top + down)), picture=picture)


def _draw(where: str, drawing: Any, picture: tuple[int, int] | None) -> Mask:
    try:
        if isinstance(drawing, list) and picture is not None:
            for each in drawing:
                points = np.asarray(each, dtype=np.float64)
                if points.ndim != 1 or len(points) < 6 or len(points) % 2 or not np.isfinite(points).all():
                    expected = "expected a list x, y, x, y, ... of at least three points"
                    raise ValueError(f"a polygon is {shorten(each)}, {expected}")
            return fill_polygons(drawing, picture)
        rows, columns = drawing["size"]
        if picture not in (None, (rows, columns)):
            raise ValueError(f"its RLE has {columns} x {rows} pixels, but its image has {picture[1]} x {picture[0]}")
        runs = drawing["counts"]
        return fill_runs(unpack_runs(runs) if isinstance(runs, str) else runs, (rows, columns))
    except (TypeError, KeyError, OverflowError):
        said = f"its segmentation is {shorten(drawing)}"
        raise InputError(f"{where}: {said}, expected polygons, or RLE with counts and size.") from None
    except ValueError as error:
        raise InputError(f"{where}: its segmentation cannot be drawn: {error}.") from None


def fill_polygons(polygons: Sequence[Sequence[float]], size: tuple[int, int]) -> Mask:
    """The pixels (H,W) whose centres are inside of one of the polygons, each a list x, y, x, y, ... in pixels. Each
    edge turns over all pixels to the right of it: those turned an odd number of times are inside. pycocotools draws
    polygons on a grid five times as fine, and differs by pixels of the outline."""
    rows, columns = size
    mask = np.zeros(size, dtype=bool)
    for polygon in polygons:
        points = np.asarray(polygon, dtype=np.float64).reshape(-1, 2)
        crossings = np.zeros((rows, columns + 1), dtype=np.int64)
        for (x, y), (next_x, next_y) in zip(points, np.roll(points, -1, axis=0)):
            low, high = np.clip(np.ceil(np.array(sorted((y, next_y))) - 0.5), 0, rows).astype(int)
            if low < high:
                down = np.arange(low, high)
                across = x + (down + 0.5 - y) * (next_x - x) / (next_y - y)
                np.add.at(crossings, (down, np.clip(np.ceil(across - 0.5), 0, columns).astype(int)), 1)
        mask |= crossings.cumsum(1)[:, :columns] % 2 == 1
    return mask


def fill_runs(counts: Sequence[int], size: tuple[int, int]) -> Mask:
    """The pixels (H,W) of runs: so many outside, so many inside, and so on, column by column. Raises `ValueError`."""
    rows, columns = size
    lengths = np.asarray(counts, dtype=np.int64)
    if (lengths < 0).any() or lengths.sum() != rows * columns:
        raise ValueError(f"its RLE has {lengths.sum()} pixels, expected {rows * columns} ({columns} x {rows})")
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(columns, rows).T


def unpack_runs(text: str) -> list[int]:
    """Runs from COCO's compressed form: five bits a character, the lowest first. Raises `ValueError` for other text.
    From the fourth on each is what it is more than the one two before."""
    counts: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64:
            raise ValueError(f"its RLE contains {character!r}, which is not a valid character")
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:  # the last character of this number; its highest bit is the sign
            value -= (1 << shift) if code & 16 else 0
            counts.append(value + counts[-2] if len(counts) > 2 else value)
            value = shift = 0
    if shift:
        raise ValueError("its RLE ends within a number")
    return counts
