"""Test annotations (lists of boxes, label masks and COCO files) in the network's pixels, and their errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gradcam
from gradcam.errors import InputError
from gradcam.evaluation import Annotations, Truth, energy_pointing_game, localisation, pointing_game, read_annotations
from gradcam.evaluation.annotations.coco import fill_polygons, fill_runs, unpack_runs
from gradcam.evaluation.annotations.match import ModelView, project_box, project_mask
from gradcam.models.labels import find_class

NAMES = ["a.jpg", "cats/b.png", "cats/c.webp"]
LABELS = ["tench", "tiger cat", "espresso", "7"]
FULL_REGION = (0, 0, 50, 100)  # the region of an image of 100 x 50 pixels that the model sees: all of it
SIZE = (50, 100)


def read(path: Path, names: Sequence[str] = NAMES) -> Annotations:
    return read_annotations(path, names=names, find_class=lambda name: find_class(LABELS, name))


def write(folder: Path, text: str, name: str = "boxes.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def truth(annotations: Annotations, name: str = "a.jpg", **options: Any) -> Truth:
    objects = annotations.truth(name, FULL_REGION, SIZE, image_size=SIZE, **options)
    assert objects is not None
    return objects


def pixels(truth: Truth) -> list[tuple[int, int]]:
    """Return (row, column) of all pixels of an object."""
    return [(row, column) for row, column in truth.masks[0].nonzero().tolist()]


# Boxes


@pytest.mark.parametrize(
    "text",
    [
        "image,left,top,right,bottom\na.jpg,10,20,13,22\n",
        "xmin,ymin,xmax,ymax,filename\n10,20,13,22,a.jpg\n",
        "path,x,y,width,height\na.jpg,10,20,3,2\n",
        'File , TOP,bottom,LEFT,right,comment\n\n"a.jpg", 20 ,22,1e1,13.0,"a, b"\n,,,,,\n',
        "\ufeffimage,left,top,right,bottom\r\n./a.jpg,10,20,13,22\r\n",
        "filename,width,height,xmin,ymin,xmax,ymax\na.jpg,100,50,10,20,13,22\n",
    ],
)
def test_the_forms_of_a_list_of_boxes(tmp_path: Path, text: str) -> None:
    """The right and bottom edges are exclusive: from 10 to 13 there are three columns."""
    annotations = read(write(tmp_path, text))
    assert annotations.names == ["a.jpg"]
    assert annotations.notes == ()
    objects = truth(annotations)
    assert [boxes.tolist() for boxes in objects.boxes] == [[[10, 20, 13, 22]]]
    assert pixels(objects) == [(row, column) for row in (20, 21) for column in (10, 11, 12)]
    assert objects.masks.dtype == torch.bool
    assert objects.masks.shape == (1, 50, 100)


def test_a_list_with_tabs_or_in_utf_16(tmp_path: Path) -> None:
    text = "image\tleft\ttop\tright\tbottom\na.jpg\t10\t20\t13\t22\n"
    expected = [[10, 20, 13, 22]]
    assert truth(read(write(tmp_path, text, "boxes.tsv"))).boxes[0].tolist() == expected
    path = tmp_path / "wide.tsv"
    path.write_bytes(text.encode("utf-16"))
    assert truth(read(path)).boxes[0].tolist() == expected


def test_objects_of_a_class_include_those_without_a_class(tmp_path: Path) -> None:
    rows = ["0,0,5,5,Tiger_Cat", "10,0,15,5,2", "20,0,25,5,", "30,0,35,5,tiger cat", "40,0,45,5,name:7"]
    text = "image,left,top,right,bottom,class\n" + "".join(f"a.jpg,{row}\n" for row in rows)
    annotations = read(write(tmp_path, text))

    def lefts(index: int | None) -> list[float]:
        return truth(annotations, index=index).boxes[0][:, 0].tolist()

    assert lefts(1) == [0, 20, 30]
    assert lefts(2) == [10, 20]
    assert lefts(3) == [20, 40]
    assert lefts(0) == [20]
    assert lefts(None) == [0, 10, 20, 30, 40]
    assert annotations.classes("a.jpg") == [1, 2, 3]


def test_one_box_may_be_of_several_classes(tmp_path: Path) -> None:
    text = "image,left,top,right,bottom,class\na.jpg,0,0,5,5,1\na.jpg,0,0,5,5,2\na.jpg,0,0,5,5,\n"
    annotations = read(write(tmp_path, text))
    assert [len(truth(annotations, index=index).boxes[0]) for index in (0, 1, 2, None)] == [1, 2, 2, 3]


def test_a_picture_without_an_object_of_the_class_has_no_truth(tmp_path: Path) -> None:
    annotations = read(write(tmp_path, "image,left,top,right,bottom,class\na.jpg,0,0,5,5,espresso\n"))
    assert annotations.truth("a.jpg", FULL_REGION, SIZE, 0) is None
    assert annotations.truth("cats/b.png", FULL_REGION, SIZE, 2) is None
    assert annotations.truth("a.jpg", FULL_REGION, SIZE, 2) is not None
    assert annotations.classes("cats/b.png") == []


def test_pictures_are_found_by_longer_and_shorter_paths(tmp_path: Path) -> None:
    names = ["/data/a.jpg", "cats/b.png", "dogs/b.png", "c.webp", "deep/c.webp"]
    text = "image,left,top,right,bottom\na.jpg,1,0,5,5\nC:\\x\\cats\\b.png,2,0,5,5\n./deep/c.webp,3,0,5,5\nc.webp,4,0,5,5\n"
    annotations = read(write(tmp_path, text), names)
    assert annotations.names == ["/data/a.jpg", "cats/b.png", "c.webp", "deep/c.webp"]
    lefts = [truth(annotations, name).boxes[0][:, 0].tolist() for name in annotations.names]
    assert lefts == [[1], [2], [4], [3]]
    with pytest.raises(
        InputError, match=r"line 2: 'b.png' matches several images, 'cats/b.png', 'dogs/b.png': write a longer path"
    ):
        read(write(tmp_path, "image,left,top,right,bottom\nb.png,1,0,5,5\n"), names)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("dog.jpg,1,2,3,4,", r"line 2: the image 'dog.jpg' is not among the evaluated images"),
        ("xa.jpg,1,2,3,4,", r"line 2: the image 'xa.jpg' is not among"),
        ("a.jpg,1,2,1,4,", r"line 2: the box from left 1, top 2 to right 1, bottom 4 is empty"),
        ("a.jpg,1,2,3,1.5,", "line 2: .* is empty"), ("a.jpg,1,2,nan,4,", "line 2: the box .* is empty"),
        ("a.jpg,1,2,,4,", "2: the box is '1', '2', '', '4', expected four"), ("a.jpg,1,2,inf,4,", "is empty"),
        ("a.jpg,1,2,3,4,\na.jpg,1,2,3,4,dog", "line 3: No class is called 'dog'; the model has 4 classes"),
        ("a.jpg,1,2,3,four,", "line 2: the box is .*, expected four"), ("a.jpg,1,2,3,4,4", "line 2: Class 4 does not"),
        ("a.jpg,1,2,3,4,1\n\na.jpg,1.0,2,3,4,tiger cat", "line 4: the object of 'a.jpg' is already in line 2"),
        ("a.jpg,1,2,3,4", "line 2: this line has 5 columns, but the header has 6"),
        ("a.jpg,1,2,3,4,,,", "line 2: this line has 8 columns"),
        (",1,2,3,4,", "line 2: the image name is empty"), ('"a.jpg,1,2,3,4,', "cannot be read as a table"),
        ("", "there are no boxes below the header"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row_is_said_with_its_line(tmp_path: Path, rows: str, message: str) -> None:
    path = write(tmp_path, f"image,left,top,right,bottom,class\n{rows}\n")
    with pytest.raises(InputError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        "a.jpg,1,2,3,4", "image,left,top,right", "left,top,right,bottom",
        "image,left,top,right,bottom,xmin,ymin,xmax,ymax", "image,path,left,top,right,bottom",
        "image,left,left,top,right,bottom", "image,left,top,right,bottom,class,label",
    ],
)  # fmt: skip
def test_a_header_that_does_not_say_where_the_boxes_are(tmp_path: Path, header: str) -> None:
    with pytest.raises(
        InputError, match=r"line 1: the columns are .*, expected one column for the image .file, filename"
    ):
        read(write(tmp_path, header + "\na.jpg,1,2,3,4,5,6,7,8\n"))


def test_files_that_are_not_lists_of_boxes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is empty, expected a header"):
        read(write(tmp_path, "\n \n"))
    with pytest.raises(InputError, match="does not exist, expected annotations"):
        read(tmp_path / "nothing.csv")
    with pytest.raises(InputError, match="unknown suffix '.xml'"):
        read(write(tmp_path, "<a/>", "boxes.xml"))


@pytest.mark.parametrize("box", ["-2,0,5,5", "0,-1.5,5,5", "90,0,102,5", "0,0,5,52", "200,100,300,200"])
def test_a_box_that_is_not_in_the_picture(tmp_path: Path, box: str) -> None:
    annotations = read(write(tmp_path, f"image,left,top,right,bottom\na.jpg,{box}\n"))
    with pytest.raises(InputError, match=r"boxes.csv, line 2: the box from .* is not inside the image of 100 x 50"):
        truth(annotations)


def test_a_box_may_end_a_pixel_outside_and_is_cut_there(tmp_path: Path) -> None:
    annotations = read(write(tmp_path, "image,left,top,right,bottom\na.jpg,-1,-0.5,100.5,51\n"))
    assert truth(annotations).boxes[0].tolist() == [[0, 0, 100, 50]]


# From the image to the network's input


def require(projection: tuple[Any, Any] | None) -> tuple[Any, Any]:
    assert projection is not None
    return projection


def test_what_the_network_sees_by_hand() -> None:
    """The network sees the middle 50 x 50 of an image of 100 x 50 as 10 x 10: one pixel of the network covers 5 x 5."""
    view = ModelView((0, 25, 50, 50), (10, 10))
    mask, box = require(project_box((30, 10, 60, 40), view))
    assert box == pytest.approx((1, 2, 7, 8))
    assert np.argwhere(mask).tolist() == [[row, column] for row in range(2, 8) for column in range(1, 7)]
    # The box crosses the border of the region: 9 of its 25 columns remain.
    mask, box = require(project_box((0, 0, 34, 50), view))
    assert box == pytest.approx((0, 0, 1.8, 10))
    assert mask.sum(1).tolist() == [2] * 10  # the second pixel's centre is at 1.5
    assert project_box((0, 0, 25, 50), view) is None  # the box ends where the region starts
    assert project_box((75, 0, 100, 50), view) is None


def test_a_stretched_region_by_hand() -> None:
    """The network's input has half the rows and twice the columns of the region."""
    view = ModelView((2, 4, 8, 6), (4, 12))
    mask, box = require(project_box((5, 4, 7, 8), view))
    assert box == (2, 1, 6, 3)
    drawn = np.zeros((20, 20), dtype=bool)
    drawn[4:8, 5:7] = True
    projected = require(project_mask(drawn, view))
    assert projected[1] == (2, 1, 6, 3)
    assert np.array_equal(projected[0], mask)
    assert np.argwhere(mask).tolist() == [[row, column] for row in (1, 2) for column in (2, 3, 4, 5)]


def test_a_box_and_a_mask_of_it_are_the_same_to_the_network() -> None:
    generator = np.random.default_rng(0)
    count = 0
    for _ in range(300):
        height, width = generator.integers(5, 60, 2)
        y0, x0 = generator.integers(0, height - 2), generator.integers(0, width - 2)
        region = (y0, x0, generator.integers(1, height - y0 + 1), generator.integers(1, width - x0 + 1))
        view = ModelView(tuple(map(int, region)), (int(generator.integers(3, 40)), int(generator.integers(3, 40))))  # type: ignore[arg-type]
        (box_left, box_right), (box_top, box_bottom) = (
            sorted(generator.choice(np.arange(side + 1), 2, replace=False).tolist()) for side in (width, height)
        )
        drawn = np.zeros((height, width), dtype=bool)
        drawn[box_top:box_bottom, box_left:box_right] = True
        from_box, from_mask = project_box((box_left, box_top, box_right, box_bottom), view), project_mask(drawn, view)
        assert (from_box is None) == (from_mask is None)
        if from_box is not None and from_mask is not None:
            count += 1
            assert from_box[1] == pytest.approx(from_mask[1])
            x0, y0, x1, y1 = from_box[1]
            if min(x1 - x0, y1 - y0) > 1.001:  # A box of at least this size contains the centre of a pixel.
                assert np.array_equal(from_box[0], from_mask[0])
            assert from_box[0].any()
            assert from_mask[0].any()
    assert count > 100


def test_an_object_too_small_for_any_pixels_centre_takes_the_pixel_it_touches() -> None:
    view = ModelView((0, 0, 100, 100), (10, 10))
    drawn = np.zeros((100, 100), dtype=bool)
    drawn[38, 71:73] = True
    mask, box = require(project_mask(drawn, view))
    assert np.argwhere(mask).tolist() == [[3, 7]]
    assert box == pytest.approx((7.1, 3.8, 7.3, 3.9))
    mask, _ = require(project_box((71, 38, 73, 39), view))
    assert np.argwhere(mask).tolist() == [[3, 7]]
    mask, _ = require(project_box((69, 30, 71, 40), view))  # the box touches two pixels
    assert np.argwhere(mask).tolist() == [[3, 6], [3, 7]]


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
def test_truth_is_where_the_network_sees_the_object(tmp_path: Path, classifier: gradcam.Classifier, turn: int) -> None:
    """In the preprocessed image of a file with EXIF rotation, the annotated white box is where the truth is."""
    upright = np.zeros((300, 420, 3), dtype=np.uint8)
    upright[60:170, 110:260] = 255
    quarters = {1: 0, 3: 2, 6: 1, 8: 3}[turn]
    exif = Image.Exif()
    exif[0x0112] = turn
    Image.fromarray(np.ascontiguousarray(np.rot90(upright, quarters))).save(tmp_path / "a.png", exif=exif)
    annotations = read(write(tmp_path, "image,left,top,right,bottom\na.png,110,60,260,170\n"), ["a.png"])

    prepared = classifier.prepare(tmp_path / "a.png")
    picture = prepared.reading.picture.shape[:2]
    assert picture == (300, 420)
    objects = annotations.truth("a.png", classifier.region(*picture), prepared.image.shape[1:], image_size=picture)
    assert objects is not None
    middle = (prepared.image.min() + prepared.image.max()) / 2
    bright = (prepared.image > middle).all(0)
    rows, columns = bright.any(1).nonzero().flatten(), bright.any(0).nonzero().flatten()
    box = [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]
    assert objects.boxes[0][0].tolist() == pytest.approx(box, abs=1)
    assert (objects.masks[0] & bright).sum() / (objects.masks[0] | bright).sum() > 0.97


# Label masks


def save_mask(path: Path, numbers: Any, palette: bool = True) -> None:
    image = Image.fromarray(np.asarray(numbers))
    if palette:
        image = image.convert("L")
        image.putpalette([value for index in range(256) for value in (255 - index, index // 2, 7)])
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def make_numbers() -> np.ndarray[Any, Any]:
    """Return a label mask of 100 x 50 pixels with two objects, one of which has a border."""
    numbers = np.zeros((50, 100), dtype=np.uint8)
    numbers[9:21, 29:51] = 255
    numbers[10:20, 30:50] = 1
    numbers[40:45, 60:70] = 3
    return numbers


@pytest.mark.parametrize("palette", [True, False])
def test_numbers_of_a_mask_are_objects(tmp_path: Path, palette: bool) -> None:
    save_mask(tmp_path / "masks/a.png", make_numbers(), palette)
    annotations = read(tmp_path / "masks")
    assert annotations.names == ["a.jpg"]
    for index in (None, 0, 3):
        objects = truth(annotations, index=index)
        assert objects.boxes[0].tolist() == [[30, 10, 50, 20], [60, 40, 70, 45]]
        assert np.array_equal(objects.masks[0].numpy(), np.isin(make_numbers(), [1, 3]))
    assert annotations.classes("a.jpg") == []
    assert annotations.truth("cats/b.png", FULL_REGION, SIZE) is None


def test_numbers_of_a_mask_are_classes_where_a_table_says_so(tmp_path: Path) -> None:
    save_mask(tmp_path / "masks/a.png", make_numbers())
    write(tmp_path / "masks", "value,class\n3,espresso\n1,1\n", "classes.csv")
    annotations = read(tmp_path / "masks")
    assert truth(annotations, index=1).boxes[0].tolist() == [[30, 10, 50, 20]]
    assert truth(annotations, index=2).boxes[0].tolist() == [[60, 40, 70, 45]]
    assert annotations.truth("a.jpg", FULL_REGION, SIZE, 0) is None
    assert annotations.classes("a.jpg") == [1, 2]
    write(tmp_path / "masks", "class,value\ntench,255\nespresso,3\n1,1\n", "classes.csv")
    assert truth(read(tmp_path / "masks"), index=0).boxes[0].tolist() == [[29, 9, 51, 21]]


def test_black_and_white_masks_are_one_object(tmp_path: Path) -> None:
    numbers = np.where(make_numbers() == 1, 255, 0).astype(np.uint8)
    save_mask(tmp_path / "grey/a.png", numbers, False)
    Image.fromarray(numbers == 255).save(tmp_path / "grey/a.png")  # an image of one bit per pixel
    assert truth(read(tmp_path / "grey")).boxes[0].tolist() == [[30, 10, 50, 20]]
    save_mask(tmp_path / "grey/a.png", numbers, False)
    assert truth(read(tmp_path / "grey")).boxes[0].tolist() == [[30, 10, 50, 20]]


def test_masks_below_folders_and_those_of_other_pictures(tmp_path: Path) -> None:
    for name in ("cats/b.png", "cats/c.tif", "d.png", "other/e.png"):
        save_mask(tmp_path / name, make_numbers(), False)
    annotations = read(tmp_path)
    assert annotations.names == ["cats/b.png", "cats/c.webp"]
    assert annotations.notes == ["2 masks were left out, because their images were not given."]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a.png": (10, 20)},
            r"a.png: the annotation is for 20 x 10 pixels, but the image has 100 x 50 \(after EXIF",
        ),
        ({"a.png": (50, 100), "a.bmp": (50, 100)}, r"a.png: 'a.jpg' has a second mask, .*a.bmp"),
        ({"d.png": (50, 100)}, "there are 1 masks, but none has the name of one of the 3 images, such as 'a.jpg'"),
        ({}, "there are 0 masks"),
    ],
)
def test_masks_that_do_not_fit(tmp_path: Path, files: dict[str, tuple[int, int]], message: str) -> None:
    for name, size in files.items():
        save_mask(tmp_path / name, np.ones(size, dtype=np.uint8), False)
    with pytest.raises(InputError, match=message):
        truth(read(tmp_path))


@pytest.mark.parametrize(("height", "width"), [(40, 100), (50, 80)])
def test_masks_smaller_than_the_models_region_are_reported(tmp_path: Path, height: int, width: int) -> None:
    save_mask(tmp_path / "a.png", np.ones((height, width), dtype=np.uint8), False)
    message = f"for {width} x {height} pixels, but the model sees pixels up to x = 100 and y = 50"
    with pytest.raises(InputError, match=message):
        read(tmp_path).truth("a.jpg", FULL_REGION, SIZE)


def test_a_mask_that_may_be_of_several_pictures(tmp_path: Path) -> None:
    save_mask(tmp_path / "a.png", make_numbers(), False)
    with pytest.raises(InputError, match="'a.png' matches several images, 'a.jpg', 'a.webp'"):
        read(tmp_path, ["a.jpg", "a.webp"])


@pytest.mark.parametrize(
    ("image", "name", "message"),
    [
        (Image.new("RGB", (100, 50)), "a.png", "contains colours .RGB., expected labels"),
        (Image.new("LA", (100, 50)), "a.png", "contains colours .LA."),
        (Image.new("F", (100, 50)), "a.tif", "contains fractions"),
        (Image.new("L", (100, 50)), "a.jpg", "is JPEG, whose lossy compression"),
        (None, "a.png", "is not an image"),
    ],
)
def test_masks_that_hold_no_numbers(tmp_path: Path, image: Image.Image | None, name: str, message: str) -> None:
    if image is None:
        write(tmp_path, "nothing", name)
    else:
        image.save(tmp_path / name)
    annotations = read(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        truth(annotations)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("value,class\n1,dog\n", "classes.csv, line 2: No class is called 'dog'"),
        ("value,class\n0,tench\n", "line 2: the value is '0', expected an integer above 0"),
        ("value,class\n1,tench\n1,espresso\n", "line 3: the value is '1'"),
        ("value,class\none,tench\n", "line 2: the value is 'one'"),
        ("number,name\n1,tench\n", "line 1: the columns are .*, expected 'value' and 'class'"),
        ("value,class\n1,tench\n", "a.png: the pixel value 3 has no class in classes.csv"),
    ],
)
def test_what_is_wrong_with_the_classes_of_masks(tmp_path: Path, table: str, message: str) -> None:
    save_mask(tmp_path / "a.png", make_numbers(), False)
    write(tmp_path, table, "classes.csv")
    with pytest.raises(InputError, match=message):
        truth(read(tmp_path))


# COCO

POLYGON = [10, 20, 16, 20, 16, 24, 10, 24]
RUNS = {"size": [50, 100], "counts": [50 * 30 + 5, 10, 40, 10, 50 * 100 - 50 * 30 - 65]}  # two columns of ten pixels
# The RLE of `draw_packed`, encoded by pycocotools.
PACKED = "m054000000000000MM030M0330000000000000000000000000000000000_2LeM"


def draw_packed() -> np.ndarray[Any, Any]:
    mask = np.zeros((9, 40), dtype=bool)
    mask[2:7, 3:30] = True
    mask[4, 10:12] = False
    mask[0, 39] = True
    return mask


def coco(**changes: Any) -> dict[str, Any]:
    annotation = {"id": 11, "image_id": 5, "category_id": 90, "bbox": [10, 20, 6, 4], "segmentation": [POLYGON]}
    content = {
        "images": [{"id": 5, "file_name": "train/a.jpg", "height": 50, "width": 100}],
        "categories": [{"id": 90, "name": "Tiger Cat"}],
        "annotations": [{**annotation, **changes}],
    }
    return {key: content.get(key) for key in content}


def read_coco(folder: Path, content: Any) -> Annotations:
    return read(write(folder, json.dumps(content), "instances.json"))


def test_a_coco_file_has_polygons_runs_and_boxes(tmp_path: Path) -> None:
    content = coco()
    more = [{"segmentation": RUNS}, {"segmentation": [], "bbox": [70.5, 1, 4, 2]}, {"iscrowd": 1}]
    base = content["annotations"][0]
    content["annotations"] += [{**base, **changes, "id": 12 + number} for number, changes in enumerate(more)]
    objects = truth(read_coco(tmp_path, content), index=1)
    assert objects.boxes[0].tolist() == [[10, 20, 16, 24], [30, 5, 32, 15], [70.5, 1, 74.5, 3]]
    expected = np.zeros((50, 100), dtype=bool)
    # The pixel centre at 70.5 is inside, the one at 74.5 is not.
    expected[20:24, 10:16] = expected[5:15, 30:32] = expected[1:3, 70:74] = True
    assert np.array_equal(objects.masks[0].numpy(), expected)


def test_coco_images_and_categories_that_are_not_evaluated_are_noted(tmp_path: Path) -> None:
    content = coco()
    content["images"].append({"id": 6, "file_name": "z.jpg"})
    content["categories"] += [{"id": 91, "name": "dog"}, {"id": 92, "name": "7"}, {"id": 93, "name": "2"}]
    base = content["annotations"][0]
    content["annotations"] += [
        {**base, "id": 12, "image_id": 6, "segmentation": "what is never read"},
        {**base, "id": 13, "category_id": 91},
        {**base, "id": 14, "category_id": 92, "segmentation": None, "bbox": [1, 1, 2, 2]},
        {**base, "id": 15, "category_id": 93},
    ]
    annotations = read_coco(tmp_path, content)
    assert annotations.names == ["a.jpg"]
    # Category "7" is the class with that label; "2" is no label, and is not read as an index.
    assert annotations.classes("a.jpg") == [1, 3]
    assert truth(annotations, index=3).boxes[0].tolist() == [[1, 1, 3, 3]]
    assert annotations.notes == [
        "1 images in the file were left out, because they were not given.",
        "2 categories were left out, because the model has no such classes: 'dog', '2'.",
    ]


def test_polygons_are_filled_as_a_slow_loop_does() -> None:
    """A pixel is inside if a ray from its centre to the right crosses an odd number of edges."""
    generator = np.random.default_rng(2)
    for corners in (3, 4, 5, 9):
        polygon = (generator.random((corners, 2)) * [30, 20] - [3, 2]).round(2)
        expected = np.zeros((15, 23), dtype=bool)
        for row in range(15):
            for column in range(23):
                for (x, y), (to_x, to_y) in zip(polygon, np.roll(polygon, -1, axis=0)):
                    if (y <= row + 0.5) != (to_y <= row + 0.5):
                        crossing = x + (row + 0.5 - y) / (to_y - y) * (to_x - x)
                        expected[row, column] ^= crossing > column + 0.5
        assert expected.any()
        assert np.array_equal(fill_polygons([polygon.flatten().tolist()], (15, 23)), expected)


def test_several_polygons_are_one_object_also_where_they_overlap() -> None:
    mask = fill_polygons([[0, 0, 4, 0, 4, 4, 0, 4], [2, 2, 6, 2, 6, 6, 2, 6]], (8, 8))
    expected = np.zeros((8, 8), dtype=bool)
    expected[:4, :4] = expected[2:6, 2:6] = True
    assert np.array_equal(mask, expected)


def test_runs_go_down_the_columns() -> None:
    assert fill_runs([1, 2, 3, 1, 2], (3, 3)).tolist() == [
        [False, False, True],
        [True, False, False],
        [True, False, False],
    ]
    assert fill_runs([0, 4], (2, 2)).all()


def test_packed_runs_are_those_of_pycocotools(tmp_path: Path) -> None:
    assert unpack_runs("06") == [0, 6]
    assert np.array_equal(fill_runs(unpack_runs(PACKED), (9, 40)), draw_packed())
    content = coco(segmentation={"size": [9, 40], "counts": PACKED})
    content["images"][0].update(height=9, width=40)
    objects = read_coco(tmp_path, content).truth("a.jpg", (0, 0, 9, 40), (9, 40), 1)
    assert objects is not None
    assert np.array_equal(objects.masks[0].numpy(), draw_packed())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_id": 6}, "annotation 11: its image_id is 6, but no image in this file has this id"),
        ({"category_id": None}, "annotation 11: its category_id is None, but no category"),
        ({"segmentation": None, "bbox": [1, 2, 0, 4]}, "annotation 11: the box from left 1, top 2 to right 1,"),
        ({"segmentation": None, "bbox": [1, 2, 3]}, r"annotation 11: its bbox is \[1, 2, 3\], expected left, top"),
        ({"segmentation": None, "bbox": None}, "annotation 11: its bbox is None"),
        ({"segmentation": None, "bbox": [99, 2, 5, 5]}, "annotation 11: the box .* is not inside the image"),
        (
            {"segmentation": [[1, 2, 3, 4]]},
            "11: .* cannot be drawn: a polygon is .*, expected a list x, y, x, y, ... of at least three points",
        ),
        ({"segmentation": [[1, 2, 3, 4, 5, 6, 7]]}, "annotation 11: .* a polygon is"),
        ({"segmentation": {"size": [50, 100], "counts": [3, 4]}}, "11: .* its RLE has 7 pixels, expected 5000"),
        (
            {"segmentation": {"size": [5, 4], "counts": [20]}},
            "11: .* its RLE has 4 x 5 pixels, but its image has 100 x 50",
        ),
        ({"segmentation": {"size": [50, 100], "counts": "0 1"}}, "annotation 11: .* its RLE contains ' '"),
        ({"segmentation": {"size": [50, 100], "counts": "0o"}}, "annotation 11: .* ends within a number"),
        ({"segmentation": {"counts": "06"}}, "annotation 11: its segmentation is .*, expected polygons, or RLE"),
        ({"segmentation": 5}, "annotation 11: its segmentation is 5"),
        ({"iscrowd": 1}, "there is no object to evaluate .1 of its 1 images were given"),
    ],
)
def test_what_is_wrong_with_a_coco_file_is_said_with_the_annotation(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        truth(read_coco(tmp_path, coco(**changes)))
    assert str(tmp_path / "instances.json") in str(caught.value)


def test_duplicate_or_missing_parts_of_a_coco_file(tmp_path: Path) -> None:
    for key in ("images", "annotations", "categories"):
        content = coco()
        content[key] = content[key] * 2
        with pytest.raises(InputError, match=f"two entries of {key!r} have the id"):
            read_coco(tmp_path, content)
        content[key] = [{}]
        with pytest.raises(InputError, match=f"entry 0 of {key!r} has no id"):
            read_coco(tmp_path, content)
        del content[key]
        with pytest.raises(InputError, match="is not a COCO instances file"):
            read_coco(tmp_path, content)
    content = coco()
    content["images"].append({"id": 6, "file_name": "a.jpg"})
    with pytest.raises(InputError, match="image 6: this image and image 5 both match 'a.jpg'"):
        read_coco(tmp_path, content)
    content["images"][1] = {"id": 6}
    with pytest.raises(InputError, match="image 6: there is no file_name"):
        read_coco(tmp_path, content)
    content = coco()
    del content["images"][0]["width"]
    with pytest.raises(InputError, match="annotation 11: polygons need the height and width of their image"):
        read_coco(tmp_path, content)
    with pytest.raises(InputError, match="is not JSON"):
        read(write(tmp_path, "{", "instances.json"))


def test_a_coco_file_of_pictures_of_another_size(tmp_path: Path) -> None:
    annotations = read_coco(tmp_path, coco(segmentation=None))
    with pytest.raises(
        InputError, match="annotation 11: the annotation is for 100 x 50 pixels, but the image has 50 x 100"
    ):
        annotations.truth("a.jpg", (0, 0, 100, 50), (10, 10), image_size=(100, 50))


# The sample images


def test_gradcam_points_to_objects_of_the_samples(photo: Callable[[str], Path], classifier: gradcam.Classifier) -> None:
    folder = photo("boxes.csv").parent
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".jpg", ".png", ".webp"))
    annotations = read_annotations(folder / "boxes.csv", names=names, find_class=classifier.find_class)
    assert len(annotations.names) == 10
    hits, gains, overlaps = [], [], []
    for name in annotations.names:
        prepared = classifier.prepare(folder / name)
        picture = prepared.reading.picture.shape[:2]
        classes = annotations.classes(name)
        heatmaps = classifier.explain(prepared, target=[classes]).heatmaps[0]
        for index, heatmap in zip(classes, heatmaps):
            size = prepared.image.shape[1:]
            objects = annotations.truth(name, classifier.region(*picture), size, index, image_size=picture)
            assert objects is not None
            hits.append(pointing_game(heatmap[None], objects.masks).item())
            constant = energy_pointing_game(torch.ones_like(heatmap)[None], objects.masks).item()
            gains.append(energy_pointing_game(heatmap[None], objects.masks).item() - constant)
            overlaps.append(localisation(heatmap[None], objects.boxes).iou.item())
    assert hits == [1.0] * 11
    assert min(gains) >= 0  # The cat in chelsea.jpg fills the whole input, so its gain is 0.
    assert sum(gains) / len(gains) > 0.1
    assert sum(overlaps) / len(overlaps) > 0.7


def test_each_of_two_classes_has_its_mass_on_its_object(photo: Any, classifier: gradcam.Classifier) -> None:
    path = photo("cat_and_espresso.jpg")
    annotations = read_annotations(photo("boxes.csv"), names=_list_annotated(photo), find_class=classifier.find_class)
    prepared = classifier.prepare(path)
    picture = prepared.reading.picture.shape[:2]
    heatmaps = classifier.explain(prepared, target=[["Egyptian cat", "espresso"]]).heatmaps[0]
    truths = [
        annotations.truth(path.name, classifier.region(*picture), (224, 224), index, image_size=picture)
        for index in (285, 967)
    ]
    mass = [
        [energy_pointing_game(heatmap[None], truth.masks).item() for truth in truths if truth] for heatmap in heatmaps
    ]
    assert mass[0][0] > 0.8
    assert mass[0][1] < 0.3
    assert mass[1][1] > 0.7
    assert mass[1][0] < 0.4


def _list_annotated(photo: Callable[[str], Path]) -> list[str]:
    lines = photo("boxes.csv").read_text().splitlines()[1:]
    return [line.partition(",")[0] for line in lines]
