"""Export the boxes of a run as annotations: COCO JSON, YOLO text files, or a Label Studio file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gradcam._version import __version__
from gradcam.batch.result_names import plan_stems
from gradcam.errors import OutputError
from gradcam.images.regions import Mask, label_components
from gradcam.report.report_folder import ReportFolder, open_report_folder, read_pixels, read_records
from gradcam.storage.disk import open_thread_pool
from gradcam.storage.records import Explained, Record
from gradcam.storage.store import Store

AUTHOR = f"gradcam {__version__}"

# An image (file_name, width, height) and its boxes (bbox, score, ...), in the form of COCO, but without ids.
BoxedImage = tuple[dict[str, Any], list[dict[str, Any]]]


def write_export(place: Path | Store, export_format: str, image_root: str = "") -> list[str]:
    """Write the boxes of a run into its folder, in a format of `EXPORTS`, and return the paths or URLs of the files.

    Label files of single images are not returned. `image_root` is put before the name of each image, in formats that
    name images. Images that failed are left out. Raises `OutputError` if the run has no boxes, or boxes by several
    methods or layers, and `StoreError` for an object store.
    """
    # There can be more threads than cores, because the threads mostly wait for the disk or the store.
    with open_report_folder(place) as files, open_thread_pool(16) as pool:
        records = [record for record in read_records(files) if record.error is None]
        classes = _list_classes([entry for record in records for entry in _list_entries(record)], files)
        read_mask = partial(read_pixels, place) if export_format == "coco" else lambda _: None
        images = pool.map(lambda record: _to_image(record, classes, image_root, read_mask), records)
        outputs = EXPORTS[export_format](images, classes)
        list(pool.map(lambda name: files.write(name, outputs[name].encode()), outputs))
        return [files.reader.show(name) for name in outputs if not name.startswith("yolo/labels")]


def _list_entries(record: Record) -> list[Explained]:
    """Return the results with boxes. Leave out results on a reference image."""
    return [entry for entry in record.explained if entry.boxes is not None and entry.on is None]


def _list_classes(entries: Sequence[Explained], files: ReportFolder) -> list[str]:
    """Return the names of the classes, in the order of their indices."""
    sources = dict.fromkeys(f"{entry.method} at {entry.layer}" for entry in entries)
    if len(sources) != 1:  # Boxes of several methods would be duplicate annotations.
        boxes = f"the boxes are by {' and by '.join(sources)}" if sources else "there are no boxes"
        expected = "expected a run of `gradcam batch` with --save boxes, one --method and one --layer"
        raise OutputError(f"{files.reader.show()}: {boxes}, {expected}")
    pairs = sorted({(np.inf if entry.index is None else entry.index, _name(entry)) for entry in entries})
    return list(dict.fromkeys(name for _, name in pairs))


def _name(entry: Explained) -> str:
    return " ".join((entry.label or entry.title).split())


def _to_image(record: Record, classes: Sequence[str], image_root: str, read_mask: Any) -> BoxedImage:
    """Return an image with its boxes. If there is a mask, a box gets the outline of its component in the mask.

    `read_mask` is a function that returns the pixels of a file, or None if the file is unreadable, as in a tar.
    """
    (height, width), boxes = record.size or (1, 1), []
    for entry in _list_entries(record):
        pixels = None if entry.mask_file is None else read_mask(entry.mask_file)
        labels, rows = label_components(np.zeros((1, 1)) if pixels is None else pixels[..., 0])
        outlines: Any = {tuple(edges): _outline(labels == number) for number, edges in rows}
        for left, top, right, bottom, score in entry.boxes or ():
            polygon = [left, top, right, top, right, bottom, left, bottom]
            bbox = [left, top, right - left, bottom - top]
            box = {"category_id": classes.index(_name(entry)) + 1, "bbox": bbox, "score": score, "iscrowd": 0}
            box |= outlines.get((left, top, right, bottom), {"segmentation": [polygon], "area": bbox[2] * bbox[3]})
            boxes.append(box)
    separator = "" if not image_root or image_root.endswith(("/", "=")) else "/"  # "?d=" ends a Label Studio URL.
    return {"file_name": f"{image_root}{separator}{record.image}", "width": width, "height": height}, boxes


def _outline(mask: Mask) -> dict[str, Any]:
    """Return a mask in COCO's run-length encoding, column by column and background first, and the mask's area."""
    pixels = mask.T.ravel().astype(np.int8)
    runs = np.diff(np.flatnonzero(np.diff(pixels, prepend=np.int8(0))), prepend=0, append=pixels.size)
    return {"segmentation": {"size": list(mask.shape), "counts": runs.tolist()}, "area": int(mask.sum())}


def _to_shares(image: dict[str, Any], box: dict[str, Any]) -> list[float]:
    """Return left, top, width and height of a box as shares of the image."""
    return [number / image[side] for number, side in zip(box["bbox"], ("width", "height") * 2)]


def _to_coco(images: Iterable[BoxedImage], classes: Sequence[str]) -> dict[str, str]:
    rows, annotations = [], list[dict[str, Any]]()
    for number, (image, boxes) in enumerate(images, 1):
        rows.append({"id": number, **image})
        annotations += [{"id": len(annotations) + i, "image_id": number, **box} for i, box in enumerate(boxes, 1)]
    categories = [{"id": number, "name": name} for number, name in enumerate(classes, 1)]
    content = {"info": {"description": f"boxes from heatmaps, by {AUTHOR}"}, "categories": categories}
    return {"coco.json": json.dumps({**content, "images": rows, "annotations": annotations}) + "\n"}


def _to_yolo(images: Iterable[BoxedImage], classes: Sequence[str]) -> dict[str, str]:
    outputs, boxed_images = {"yolo/classes.txt": "".join(f"{name}\n" for name in classes)}, list(images)
    stems = plan_stems([SimpleNamespace(name=image["file_name"]) for image, _ in boxed_images])  # type: ignore[misc]
    for image, boxes in boxed_images:
        rows = [(box["category_id"] - 1, *_to_shares(image, box)) for box in boxes]
        lines = (f"{number} {x + w / 2:.6f} {y + h / 2:.6f} {w:.6f} {h:.6f}\n" for number, x, y, w, h in rows)
        outputs[f"yolo/labels/{stems[image['file_name']]}.txt"] = "".join(lines)
    return outputs


def _to_label_studio(images: Iterable[BoxedImage], classes: Sequence[str]) -> dict[str, str]:
    shared, tasks = {"type": "rectanglelabels", "from_name": "label", "to_name": "image", "image_rotation": 0}, []
    for image, boxes in images:
        shared |= {"original_width": image["width"], "original_height": image["height"]}
        results = []
        for number, box in enumerate(boxes):
            value: Any = {"rectanglelabels": [classes[box["category_id"] - 1]], "rotation": 0}
            value |= zip(("x", "y", "width", "height"), (100 * share for share in _to_shares(image, box)))
            results.append({"id": f"box{number}", "score": box["score"], "value": value, **shared})
        prediction = {"model_version": AUTHOR, "result": results}
        tasks.append({"data": {"image": image["file_name"]}, "predictions": [prediction]})
    return {"labelstudio.json": json.dumps(tasks) + "\n"}


# The functions that return the contents of an export's files by name. The keys are in `options.REPORT_FORMATS`.
EXPORTS: dict[str, Any] = {"coco": _to_coco, "yolo": _to_yolo, "labelstudio": _to_label_studio}
