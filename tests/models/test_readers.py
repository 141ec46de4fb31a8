"""Test readers: the model's input and the image to draw on, for every bit depth and user-defined functions."""

from __future__ import annotations

import dataclasses
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import gradcam
from gradcam.errors import GradcamError, ImageError, ModelError
from gradcam.models.classifier import Classifier
from gradcam.models.preprocess import Preprocessing, Reading, read_image_file, to_reader, to_reading
from tests.images.test_images import PIXELS

RAMP = np.arange(6, dtype=np.uint16).reshape(2, 3)


@pytest.fixture
def grey_classifier() -> Classifier:
    """Return a classifier with one channel and a normalisation that does not change values."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    model = nn.Sequential(*layers).eval()
    preprocess = Preprocessing(size=(8, 8), resize=8, mean=(0.0,), std=(1.0,))
    return Classifier(name="grey", model=model, preprocess=preprocess, classes=3, labels=None, layer="1")


def save(path: Path, values: np.ndarray) -> Path:
    Image.fromarray(values).save(path)
    return path


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_a_difference_of_one_in_65535_changes_the_models_input(
    tmp_path: Path, grey_classifier: Classifier, suffix: str
) -> None:
    values = np.full((8, 8), 30000, np.uint16)
    image = read_image_file(save(tmp_path / f"one.{suffix}", values)).values
    values[3, 4] += 1
    brighter_image = read_image_file(save(tmp_path / f"other.{suffix}", values)).values
    difference = (grey_classifier.batch([brighter_image]) - grey_classifier.batch([image]))[0, 0]
    expected = torch.zeros(8, 8)
    expected[3, 4] = 1 / 65535
    torch.testing.assert_close(difference, expected, rtol=0, atol=3e-8)  # float32 near 0.46 has steps of 3e-8


def test_a_deep_file_with_a_small_value_range_is_stretched_for_drawing_only(
    tmp_path: Path, grey_classifier: Classifier
) -> None:
    values = np.linspace(40, 3200, 64).astype(np.uint16).reshape(8, 8)
    path = save(tmp_path / "scan.png", values)
    explanation = grey_classifier.explain(path)
    assert explanation.notes == ["showing values from 40 to 3200 of 65535"]
    picture = explanation.images[0]
    np.testing.assert_array_equal(picture[..., 0], np.round((values - 40.0) * 255 / 3160))
    np.testing.assert_array_equal(picture[..., 0], picture[..., 2])
    expected = grey_classifier.model(torch.from_numpy(values / 65535.0)[None, None].float())
    torch.testing.assert_close(explanation.output, expected, rtol=0, atol=1e-6)
    assert gradcam.read_image(path).max() == 12  # 3200 / 257, as an image viewer shows it


def test_files_with_eight_bits_are_read_unchanged(tmp_path: Path) -> None:
    for name, values in {"rgb.png": PIXELS, "grey.png": PIXELS[..., 0]}.items():
        path = save(tmp_path / name, values)
        reading = read_image_file(path)
        np.testing.assert_array_equal(reading.values, gradcam.read_image(path))
        assert reading.values is reading.picture
        assert reading.note is None


@pytest.mark.parametrize("size", [(1, 1), (2000, 3), (3, 2000)])
def test_extreme_and_constant_deep_pictures_are_explained(
    tmp_path: Path, classifier: Classifier, size: tuple[int, int]
) -> None:
    explanation = classifier.explain(save(tmp_path / "a.png", np.full(size, 700, np.uint16)), target=3)
    assert explanation.overlay().shape == (*size, 3)
    assert explanation.notes == [None]
    np.testing.assert_array_equal(explanation.images[0], np.full((*size, 3), 3))
    explanation_of_array = classifier.explain(np.full(size, 700 / 65535, np.float32), target=3)
    torch.testing.assert_close(explanation.output, explanation_of_array.output, rtol=0, atol=1e-4)


UNSCALED = "values from {} are passed to the model unscaled"
INFINITE = [np.nan, 0.25, -np.inf, np.inf, 0.75]


@pytest.mark.parametrize(
    ("row", "dtype", "levels", "note"),
    [
        (
            [-1000, 0, 3000],
            np.int32,
            [0, 64, 255],
            f"showing values from {{}}; {UNSCALED}".replace("{}", "-1000 to 3000"),
        ),
        ([0.0, 0.5, 1.0], np.float32, [0, 128, 255], None),
        ([0.0, 128.0, 255.0], np.float32, [0, 128, 255], UNSCALED.format("0 to 255")),
        (INFINITE, np.float32, [0, 64, 0, 191, 191], "3 value(s) are NaN or infinite"),
    ],
)
def test_floats_and_long_integers_go_to_the_model_unchanged(
    tmp_path: Path, row: list[float], dtype: type, levels: list[int], note: str | None
) -> None:
    reading = read_image_file(save(tmp_path / "a.tif", np.array([row], dtype)))
    assert reading.values.dtype == dtype
    expected = [0.25, 0.25, 0.25, 0.75, 0.75] if row is INFINITE else row
    np.testing.assert_array_equal(reading.values, [expected])
    np.testing.assert_array_equal(reading.picture[0, :, 0], levels)
    assert reading.note == note


def test_a_file_of_nothing_but_nan_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tif", np.full((2, 2), np.nan, np.float32))
    with pytest.raises(ImageError) as caught:
        read_image_file(path)
    assert str(caught.value) == f"{path}: contains only NaN or infinite values"


def test_pictures_of_all_kinds_are_explained_together(tmp_path: Path, grey_classifier: Classifier) -> None:
    generator = np.random.default_rng(0)
    rgb = generator.integers(0, 256, (9, 12, 3), dtype=np.uint8)
    deep = generator.integers(0, 65536, (20, 10), dtype=np.uint16)
    floats = generator.random((8, 8, 1), dtype=np.float32)
    pictures = [rgb, save(tmp_path / "a.png", deep), floats, str(save(tmp_path / "b.png", rgb)), floats[..., 0]]
    together = grey_classifier.explain(pictures, target=1)
    assert [picture.shape[:2] for picture in together.images] == [(9, 12), (20, 10), (8, 8), (9, 12), (8, 8)]
    for i, picture in enumerate(pictures):
        alone = grey_classifier.explain(picture, target=1)
        torch.testing.assert_close(together.maps[i], alone.maps[0], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(together.images[i], alone.images[0])
        assert together.overlay(i).shape == together.images[i].shape


def test_an_array_is_one_picture_or_several(grey_classifier: Classifier) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (2, 9, 8, 1), dtype=np.uint16)
    together = grey_classifier.explain(values, target=1)
    assert len(together.images) == 2
    for i in range(2):
        for alone in (values[i], values[i, :, :, 0]):
            torch.testing.assert_close(together.maps[i], grey_classifier.explain(alone, target=1).maps[0])


def test_attributions_have_the_note_of_the_reader(grey_classifier: Classifier) -> None:
    attribution = grey_classifier.attribute(np.array([[40, 3200]], np.uint16), method="input-gradients", target=1)
    assert attribution.notes == ["showing values from 40 to 3200 of 65535"]
    assert attribution.draw().shape == (1, 2, 3)


PICTURE = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
STRETCHED = np.repeat((RAMP * 51)[..., None], 3, axis=2)


@pytest.mark.parametrize(
    ("returned", "values", "picture", "note"),
    [
        (RAMP, RAMP, STRETCHED, "showing values from 0 to 5 of 65535"),
        (RAMP.astype(">u2"), RAMP, STRETCHED, "showing values from 0 to 5 of 65535"),
        (RAMP[::-1], RAMP[::-1], STRETCHED[::-1], "showing values from 0 to 5 of 65535"),
        ((RAMP, PICTURE), RAMP, PICTURE, None),
        ((np.ones((2, 3, 7)), PICTURE), np.ones((2, 3, 7)), PICTURE, None),
        (Reading(RAMP, PICTURE, "by night"), RAMP, PICTURE, "by night"),
        (PICTURE, PICTURE, PICTURE, None),
    ],
)
def test_a_function_returns_an_array_or_also_an_image(
    returned: Any, values: np.ndarray, picture: np.ndarray, note: str | None
) -> None:
    paths = []

    def read(path: Any) -> Any:
        paths.append(path)
        return returned

    reading = to_reader(read)("scan.raw")
    assert paths == ["scan.raw"]
    assert reading.values.dtype == values.dtype
    assert reading.values.dtype.isnative
    np.testing.assert_array_equal(reading.values, values)
    np.testing.assert_array_equal(reading.picture, picture)
    assert reading.note == note


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "The result is None, expected an array, (array, image), or a Reading."),
        ([[1, 2]], "The result is [[1, 2]], expected an array"),
        ((RAMP, PICTURE, "note"), "expected an array, (array, image), or a Reading."),
        (np.zeros(3), "The image is float64 (3,), expected an RGB array"),
        (np.zeros((1, 2, 3, 4)), "The image is float64 (1, 2, 3, 4), expected"),
        (np.zeros((0, 3)), "The image is float64 (0, 3), expected"),
        (np.zeros((2, 3, 0)), "The image is float64 (2, 3, 0), expected"),
        (np.zeros((2, 3), bool), "The image is bool (2, 3), expected"),
        (np.zeros((2, 3), complex), "The image is complex128 (2, 3), expected"),
        (np.array([["a"]]), "The image is <U1 (1, 1), expected"),
        (np.array([[1, np.nan, np.inf]]), "The image is float64 (1, 3), and 2 value(s) are NaN or infinite"),
        (np.array([[1, 1e300]]), "and 1 value(s) are NaN or infinite"),
        ((RAMP, None, 3), "expected an array, (array, image)"),
        ((RAMP, PICTURE[:1]), "The image to draw on is 3 x 1, but the array is 3 x 2: expected the same size."),
        ((RAMP, PICTURE.transpose(1, 0, 2)), "is 2 x 3, but the array is 3 x 2"),
        ((RAMP, PICTURE[..., 0]), "The image is uint8 (2, 3), expected an RGB array"),
        ((RAMP, PICTURE / 255), "The image is float64 (2, 3, 3), expected an RGB array"),
        (("scan", PICTURE), "The image is 'scan', expected"),
        (Reading(RAMP, PICTURE, 3), "The note is 3, expected a string or None."),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_return_value_is_named(returned: Any, reason: str) -> None:
    def read_scan(path: Any) -> Any:
        return returned

    with pytest.raises(ImageError) as caught:
        to_reader(read_scan)(Path("folder/scan.raw"))
    message = str(caught.value)
    assert message.startswith(f"{Path('folder/scan.raw')}: the result of the reader read_scan cannot be used. ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such\n  header"), "ValueError: no such header"),
        (KeyError("band"), "KeyError: 'band'"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_an_error_of_a_function_is_one_line(error: Exception, reason: str) -> None:
    def read_scan(path: Any) -> Any:
        raise error

    with pytest.raises(ImageError) as caught:
        to_reader(read_scan)("scan.raw")
    assert str(caught.value) == f"scan.raw: the reader read_scan failed ({reason})"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [ImageError("scan.raw: of a night"), ModelError("no"), KeyboardInterrupt()])
def test_errors_of_this_package_and_interruptions_pass(error: BaseException) -> None:
    def read_scan(path: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        to_reader(read_scan)("scan.raw")
    assert caught.value is error


class Scanner:
    def __call__(self, path: Any) -> Any:
        raise ValueError("off")


def test_a_callable_object_is_named_after_its_class() -> None:
    with pytest.raises(ImageError, match=r"a\.raw: the reader Scanner failed \(ValueError: off\)"):
        to_reader(Scanner())("a.raw")


@pytest.mark.parametrize("function", [None, "module:function", 3])
def test_a_reader_is_a_function(function: Any) -> None:
    with pytest.raises(GradcamError, match="expected a function from an image's path to an array"):
        to_reader(function)


def read_raw(path: Any) -> np.ndarray:
    return np.fromfile(path, "<u2").reshape(8, 8)


def test_a_classifier_uses_a_user_defined_reader(tmp_path: Path, grey_classifier: Classifier) -> None:
    values = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    (tmp_path / "scan.raw").write_bytes(struct.pack("<64H", *values.ravel()))
    raw_classifier = dataclasses.replace(grey_classifier, reader=to_reader(read_raw))
    theirs = grey_classifier.explain(values, target=2)
    ours = raw_classifier.explain([tmp_path / "scan.raw"], target=2)
    torch.testing.assert_close(ours.maps, theirs.maps)
    np.testing.assert_array_equal(ours.images[0], theirs.images[0])
    reader = pickle.loads(pickle.dumps(raw_classifier.reader))  # other processes receive the reader pickled
    np.testing.assert_array_equal(reader(tmp_path / "scan.raw").values, values)


def test_arrays_do_not_go_through_the_reader() -> None:
    def fail(path: Any) -> Any:
        raise AssertionError

    reading = to_reading(RAMP, to_reader(fail))
    np.testing.assert_array_equal(reading.values, RAMP)
    assert reading.note == "showing values from 0 to 5 of 65535"
