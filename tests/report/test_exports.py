"""Test exports of boxes: read back by pycocotools, a plain YOLO parser, and the documented format of Label Studio."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcam
from gradcam.errors import OutputError
from gradcam.images.regions import encode_mask
from gradcam.report.exports import write_export
from gradcam.storage.records import Record
from gradcam.storage.store import Store
from tests.cli.test_batch import batch, photos
from tests.cli.test_cli import Command, folder, gradcam_command, pixels
from tests.report.test_report import make_record, make_result, write_run
from tests.stores import objects

__all__ = ["batch", "folder", "gradcam_command", "photos"]  # fixtures

BOXES = ((10, 20, 50, 60, 1.0), (60, 0, 80, 15, 0.4375))
CAT_AND_CUP = [
    make_result(None, index=285, label="Egyptian cat", boxes=BOXES),
    make_result(None, index=967, label="cup", boxes=BOXES[1:]),
]
RECORDS = [
    make_record("a.jpg", explained=CAT_AND_CUP),
    make_record("b/blank.png", explained=[make_result(None, index=967, label="cup", boxes=())]),
    make_record("broken.jpg", explained=[], error="broken.jpg: cannot be read"),
]
SAVE = (
    "--save",
    "boxes,mask",
    "--box-threshold",
    "0.5",
    "--box-method",
    "components",
    "--top-k",
    "2",
    "--fit",
    "whole",
)


def read_coco(path: Path) -> Any:
    coco = pytest.importorskip("pycocotools.coco")
    with contextlib.redirect_stdout(io.StringIO()):
        return coco.COCO(str(path))


def read_yolo(folder: Path, sizes: dict[str, tuple[int, int]]) -> dict[str, list[tuple[str, list[float]]]]:
    """Return the class and left, top, right, bottom in pixels of each box. `sizes` are (height, width) by stem."""
    names, rows = (folder / "classes.txt").read_text().splitlines(), {}
    for path in sorted((folder / "labels").rglob("*.txt")):
        stem = path.relative_to(folder / "labels").with_suffix("").as_posix()
        (height, width), rows[stem] = sizes[stem], []
        for line in path.read_text().splitlines():
            number, *numbers = line.split(" ")
            x, y, w, h = map(float, numbers)
            box = [(x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height]
            rows[stem].append((names[int(number)], box))
    return rows


def list_recorded(record: Record) -> list[tuple[str, tuple[float, ...]]]:
    return [(str(entry.label), tuple(box[:4])) for entry in record.explained for box in entry.boxes or ()]


@pytest.fixture
def run(batch: Command, folder: Path, photos: Path) -> list[Record]:
    """Explain five images, one of them broken, and return the records."""
    assert batch("photos", "-o", "out", *SAVE).status == 1
    return gradcam.read_manifest("out")


# By hand


@pytest.mark.parametrize(
    ("image_root", "file_name"),
    [("", "a.jpg"), ("photos", "photos/a.jpg"), ("photos/", "photos/a.jpg"), ("/data/?d=", "/data/?d=a.jpg")],
)
def test_a_slash_separates_the_image_root_from_the_name(tmp_path: Path, image_root: str, file_name: str) -> None:
    (path,) = write_export(write_run(tmp_path / "out", RECORDS), "coco", image_root=image_root)
    assert json.loads(Path(path).read_text())["images"][0]["file_name"] == file_name


def test_coco_by_hand(tmp_path: Path) -> None:
    (path,) = write_export(write_run(tmp_path / "out", RECORDS), "coco", image_root="photos/")
    assert path == str(tmp_path / "out/coco.json")
    content = json.loads(Path(path).read_text())
    assert content["images"] == [
        {"id": 1, "file_name": "photos/a.jpg", "width": 80, "height": 60},
        {"id": 2, "file_name": "photos/b/blank.png", "width": 80, "height": 60},
    ]
    assert content["categories"] == [{"id": 1, "name": "Egyptian cat"}, {"id": 2, "name": "cup"}]
    assert content["annotations"][1] == {
        "id": 2, "image_id": 1, "category_id": 1, "bbox": [60, 0, 20, 15], "area": 300, "iscrowd": 0, "score": 0.4375,
        "segmentation": [[60, 0, 80, 0, 80, 15, 60, 15]],
    }  # fmt: skip
    assert [row["category_id"] for row in content["annotations"]] == [1, 1, 2]


def test_the_outline_of_each_component_is_read_from_the_mask(tmp_path: Path) -> None:
    mask = np.zeros((60, 80), bool)
    mask[20:60, 10:50], mask[0:15, 60:80] = True, True
    mask[30, 20:30] = False
    result = make_result(None, index=285, label="cat", boxes=BOXES, mask_file="a-gradcam-mask.png")
    folder = write_run(tmp_path, [make_record("a.jpg", explained=[result])])
    (folder / "a-gradcam-mask.png").write_bytes(encode_mask(mask))
    (path,) = write_export(folder, "coco")
    coco = read_coco(Path(path))
    parts = [mask.copy(), mask.copy()]
    parts[0][:, 60:], parts[1][:, :60] = False, False
    for annotation, part in zip(coco.loadAnns(coco.getAnnIds()), parts):
        assert np.array_equal(coco.annToMask(annotation), part)
        assert annotation["area"] == part.sum()


def test_yolo_by_hand(tmp_path: Path) -> None:
    paths = write_export(write_run(tmp_path / "out", RECORDS), "yolo")
    assert paths == [str(tmp_path / "out/yolo/classes.txt")]
    labels = tmp_path / "out/yolo/labels"
    corner = "0.875000 0.125000 0.250000 0.250000"
    assert (labels / "a.txt").read_text() == f"0 0.375000 0.666667 0.500000 0.666667\n0 {corner}\n1 {corner}\n"
    assert (labels / "b/blank.txt").read_text() == ""
    assert not (labels / "broken.txt").exists()
    assert (tmp_path / "out/yolo/classes.txt").read_text() == "Egyptian cat\ncup\n"


def test_label_studio_by_hand(tmp_path: Path) -> None:
    """The keys are those of "Format of pre-annotations" in Label Studio's documentation."""
    (path,) = write_export(write_run(tmp_path / "out", RECORDS), "labelstudio", image_root="/data/local-files/?d=")
    tasks = json.loads(Path(path).read_text())
    assert [task["data"] for task in tasks] == [
        {"image": "/data/local-files/?d=a.jpg"}, {"image": "/data/local-files/?d=b/blank.png"}
    ]  # fmt: skip
    (prediction,) = tasks[0]["predictions"]
    assert prediction["model_version"] == f"gradcam {gradcam.__version__}"
    result = prediction["result"][1]
    assert result == {
        "id": "box1", "type": "rectanglelabels", "from_name": "label", "to_name": "image", "image_rotation": 0,
        "original_width": 80, "original_height": 60, "score": 0.4375,
        "value": {"x": 75, "y": 0, "width": 25, "height": 25, "rotation": 0, "rectanglelabels": ["Egyptian cat"]},
    }  # fmt: skip
    assert len({row["id"] for row in prediction["result"]}) == 3
    assert tasks[1]["predictions"][0]["result"] == []


def test_images_of_one_stem_get_different_label_files(tmp_path: Path) -> None:
    records = [make_record(name, explained=CAT_AND_CUP) for name in ("a.jpg", "a.png", "../c.jpg")]
    write_export(write_run(tmp_path / "out", records), "yolo")
    labels = tmp_path / "out/yolo/labels"
    names = {path.relative_to(labels).as_posix() for path in labels.rglob("*.txt")}
    assert names == {"a-jpg.txt", "a-png.txt", "_/c.txt"}
    assert not (tmp_path / "out/yolo/c.txt").exists()


def test_runs_without_boxes_or_with_several_methods_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="there are no boxes, expected a run of `gradcam batch` with --save boxes"):
        write_export(write_run(tmp_path / "none", [make_record("a.jpg")]), "coco")
    several = [make_result(None, method=name, boxes=BOXES) for name in ("gradcam", "layercam")]
    with pytest.raises(
        OutputError, match="the boxes are by gradcam at layer4 and by layercam at layer4, expected a run"
    ):
        write_export(write_run(tmp_path / "several", [make_record("a.jpg", explained=several)]), "yolo")


def test_boxes_on_a_reference_image_are_left_out(tmp_path: Path) -> None:
    results = [make_result(None, boxes=BOXES[:1]), make_result(None, boxes=BOXES[1:], on="reference", like="b.jpg")]
    (path,) = write_export(write_run(tmp_path, [make_record("a.jpg", explained=results)]), "coco")
    assert [row["bbox"] for row in json.loads(Path(path).read_text())["annotations"]] == [[10, 20, 40, 40]]


def test_shards_are_joined(tmp_path: Path) -> None:
    write_run(tmp_path, RECORDS[:1], manifest="manifest-1-of-2.jsonl")
    write_run(tmp_path, RECORDS[1:], manifest="manifest-2-of-2.jsonl")
    (path,) = write_export(tmp_path, "coco")
    assert [row["file_name"] for row in json.loads(Path(path).read_text())["images"]] == ["a.jpg", "b/blank.png"]


# Of a run, by the libraries of the formats


def test_pycocotools_reads_boxes_and_masks(gradcam_command: Command, folder: Path, run: list[Record]) -> None:
    outcome = gradcam_command("report", "out", "--format", "coco")
    assert (outcome.status, outcome.out) == (0, "  →  out/coco.json\n")
    coco = read_coco(folder / "out/coco.json")
    records = {record.image: record for record in run if record.error is None}
    assert {image["file_name"] for image in coco.imgs.values()} == set(records)
    for image_id, image in coco.imgs.items():
        record = records[image["file_name"]]
        assert (image["height"], image["width"]) == record.size
        annotations = coco.loadAnns(coco.getAnnIds(imgIds=[image_id]))
        boxes = []
        for annotation in annotations:
            x, y, width, height = annotation["bbox"]
            name = coco.cats[annotation["category_id"]]["name"]
            boxes.append((name, (x, y, x + width, y + height)))
            mask = coco.annToMask(annotation)
            assert mask.sum() == annotation["area"]
            rows, columns = np.nonzero(mask)
            assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == boxes[-1][1]
        assert boxes == list_recorded(record)
        for entry in record.explained:
            saved = pixels(folder / "out" / str(entry.mask_file))[..., 0] > 0
            own = [row for row in annotations if coco.cats[row["category_id"]]["name"] == entry.label]
            assert np.array_equal(np.any([coco.annToMask(row) for row in own], axis=0), saved)


def test_our_own_evaluation_reads_the_coco_file(gradcam_command: Command, folder: Path, run: list[Record]) -> None:
    gradcam_command("report", "out", "--format", "coco")
    names = [record.image for record in run]
    classifier = gradcam.load_classifier(device="cpu")
    annotations = gradcam.evaluation.read_annotations("out/coco.json", names=names, find_class=classifier.find_class)
    assert len(annotations.names) == len([record for record in run if record.error is None])


def test_a_yolo_parser_reads_the_boxes(gradcam_command: Command, folder: Path, run: list[Record]) -> None:
    assert gradcam_command("report", "out", "--format", "yolo").status == 0
    records = {record.image.rpartition(".")[0]: record for record in run if record.error is None}
    rows = read_yolo(folder / "out/yolo", {stem: record.size or (0, 0) for stem, record in records.items()})
    assert rows.keys() == records.keys()
    for stem, record in records.items():
        expected = list_recorded(record)
        assert [name for name, _ in rows[stem]] == [name for name, _ in expected]
        for (_, box), (_, expected_box) in zip(rows[stem], expected):
            assert box == pytest.approx(expected_box, abs=0.01)


def test_label_studio_has_percentages_of_the_recorded_boxes(
    gradcam_command: Command, folder: Path, run: list[Record]
) -> None:
    assert gradcam_command("report", "out", "--format", "labelstudio", "--image-root", "s3://bucket/").status == 0
    tasks = json.loads((folder / "out/labelstudio.json").read_text())
    records = {f"s3://bucket/{record.image}": record for record in run if record.error is None}
    assert [task["data"]["image"] for task in tasks] == list(records)
    for task in tasks:
        record = records[task["data"]["image"]]
        boxes = []
        for result in task["predictions"][0]["result"]:
            assert (result["original_height"], result["original_width"]) == record.size
            value, width, height = result["value"], result["original_width"], result["original_height"]
            left, top = value["x"] * width / 100, value["y"] * height / 100
            box = (left, top, left + value["width"] * width / 100, top + value["height"] * height / 100)
            boxes.append((*value["rectanglelabels"], pytest.approx(box)))
        assert boxes == list_recorded(record)


def test_a_store_and_a_disk_get_the_same_files(
    batch: Command, gradcam_command: Command, folder: Path, photos: Path
) -> None:
    with objects():
        for place in ("objects://bucket/out", "out"):
            batch("photos", "-o", place, *SAVE)
            for name in ("coco", "yolo", "labelstudio"):
                assert gradcam_command("report", place, "--format", name, "-q").status == 0
        store, yolo = Store("objects://bucket/out"), folder / "out/yolo"
        for path in [folder / "out/coco.json", folder / "out/labelstudio.json", *yolo.rglob("*.txt")]:
            assert store.read(path.relative_to(folder / "out").as_posix()) == path.read_bytes()


def test_an_image_root_needs_a_format_that_names_images(gradcam_command: Command, folder: Path) -> None:
    for name in ("html", "yolo"):
        outcome = gradcam_command("report", "out", "--format", name, "--image-root", "photos/")
        outcome.check_error(2, f"--image-root is for --format coco and labelstudio, but the format is {name}.")
