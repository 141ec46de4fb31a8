"""Test images in every Python form: all forms give the same values."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

import gradcam
from gradcam import evaluation
from gradcam.errors import ImageError

pytestmark = pytest.mark.filterwarnings("ignore:A heatmap of .* is stretched")

Photo = Callable[[str], Path]
Forms = dict[str, Any]
FORMS = ("PathLike", "bytes", "bytearray", "memoryview", "BytesIO", "file", "PIL", "array", "tensor", "in a zip")
ORIENTATION = 0x0112


class CustomPath:
    """A path-like object that is not a pathlib.Path."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


class Upload:
    """An upload as web frameworks hand it over: its methods are coroutines, and the file is an attribute."""

    filename = "upload.png"

    def __init__(self, data: bytes) -> None:
        self.file = io.BytesIO(data)

    async def read(self) -> bytes:
        return await asyncio.to_thread(self.file.read)


@pytest.fixture
def forms(tmp_path: Path) -> Any:
    """Return a function that makes all forms of a PIL image, by name; PNG stores the image without loss."""

    def make(image: Image.Image, **options: Any) -> Forms:
        path = tmp_path / "picture.png"
        image.save(path, **options)
        data, values = path.read_bytes(), np.asarray(image)
        with zipfile.ZipFile(tmp_path / "pictures.zip", "w") as archive:
            archive.write(path, "picture.png")
        written = io.BytesIO()
        image.save(written, "PNG", **options)  # the position of the file is now at its end
        channels_first = values if values.ndim == 2 else values.transpose(2, 0, 1)
        return {
            "path": str(path), "PathLike": CustomPath(str(path)), "bytes": data, "bytearray": bytearray(data),
            "memoryview": memoryview(data), "BytesIO": written, "file": stack.enter_context(open(path, "rb")),
            "PIL": stack.enter_context(Image.open(path)), "array": values, "tensor": torch.tensor(channels_first),
            "in a zip": zipfile.Path(tmp_path / "pictures.zip", "picture.png"),
        }  # fmt: skip

    with contextlib.ExitStack() as stack:
        yield make


def opaque(photo: Photo) -> Image.Image:
    with Image.open(photo("coffee.jpg")) as image:
        return image.resize((300, 200))


def transparent(photo: Photo) -> Image.Image:
    image = opaque(photo).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def grey(photo: Photo) -> Image.Image:
    return opaque(photo).convert("L")


def deep(photo: Photo) -> Image.Image:
    values = np.asarray(grey(photo)).astype(np.uint16) * 257
    return Image.fromarray(values)


@pytest.mark.parametrize("kind", [opaque, transparent, grey, deep])
def test_a_picture_is_the_same_in_all_its_forms(
    classifier: gradcam.Classifier, photo: Photo, forms: Any, kind: Callable[[Photo], Image.Image]
) -> None:
    inputs_by_form = forms(kind(photo))
    expected, image = classifier.explain(inputs_by_form["path"]), gradcam.read_image(inputs_by_form["path"])
    drawn = gradcam.overlay(image, expected.heatmaps[0, 0])
    assert (image.min() < 255).any()
    prepared = classifier.prepare(inputs_by_form["path"])
    for name in FORMS:
        for _ in range(2):  # The second pass shows that the position of the file was restored.
            actual = classifier.prepare(inputs_by_form[name])
        assert torch.equal(actual.image, prepared.image), name
        np.testing.assert_array_equal(actual.reading.picture, prepared.reading.picture, name)
        np.testing.assert_array_equal(gradcam.read_image(inputs_by_form[name]), image, name)
        np.testing.assert_array_equal(gradcam.overlay(inputs_by_form[name], expected.heatmaps[0, 0]), drawn, name)


def test_files_in_all_forms_are_explained_in_their_order(
    classifier: gradcam.Classifier, photo: Photo, forms: Any
) -> None:
    inputs_by_form = forms(transparent(photo))
    inputs = [inputs_by_form[name] for name in FORMS] + [b"", inputs_by_form["path"]]
    actual = list(gradcam.explain_files(inputs, classifier, workers=2, batch_size=1))
    assert [result.name for result in actual] == [
        "picture.png",
        *(f"inputs[{place}]" for place in range(1, len(FORMS))),
        f"inputs[{len(FORMS)}]",
    ]  # The last path is left out, because it is the same file as the first input.
    expected = classifier.explain(inputs_by_form["path"])
    for result in actual[:-1]:
        (explanation,) = result.explanations.values()
        assert torch.equal(explanation.maps, expected.maps), result.name
    assert [result.path for result in actual[:2]] == [Path(inputs_by_form["path"]), None]
    assert str(actual[-1].error) == f"inputs[{len(FORMS)}]: the given bytes: is empty"


@pytest.mark.parametrize("name", ["bytes", "PIL", "array", "tensor", "file"])
def test_one_picture_is_no_sequence(classifier: gradcam.Classifier, photo: Photo, forms: Any, name: str) -> None:
    picture = forms(opaque(photo))[name]
    assert classifier.explain(picture).maps.shape[0] == 1
    assert classifier.explain([picture, picture]).maps.shape[0] == 2
    (result,) = gradcam.explain_files(picture, classifier)
    assert (result.name, result.error) == ("inputs[0]", None)


def test_a_tensor_of_pictures_is_a_sequence(classifier: gradcam.Classifier, photo: Photo, forms: Any) -> None:
    tensor = forms(opaque(photo))["tensor"]
    pair = torch.stack([tensor, tensor.flip(2)])
    actual, first = classifier.explain(pair), classifier.explain(tensor)
    assert actual.maps.shape[0] == 2
    torch.testing.assert_close(actual.maps[:1], first.maps, rtol=0, atol=1e-4)
    assert torch.equal(classifier.batch(pair)[:1], classifier.batch([tensor]))
    assert len(list(gradcam.explain_files(pair, classifier))) == 2


def test_studies_and_checks_take_pictures(classifier: gradcam.Classifier, photo: Photo) -> None:
    data = [photo(name).read_bytes() for name in ("koala.webp", "panda.webp", "macaw.webp", "coffee.jpg")]
    study = evaluation.evaluate(classifier, data[:2], methods=["gradcam"], metrics=["complexity"], controls=[])
    assert {measurement.image for measurement in study.measurements} == {"inputs[0]", "inputs[1]"}
    pictures = {"a": data[0], "b": io.BytesIO(data[1]), "c": Image.open(io.BytesIO(data[2])), "d": photo("coffee.jpg")}
    (mosaic,) = evaluation.make_mosaics(classifier, pictures, limit=1)
    full = {**pictures, "d": torch.tensor(gradcam.read_image(data[3])).permute(2, 0, 1)}
    assert torch.equal(evaluation.make_mosaics(classifier, full, limit=1)[0].image, mosaic.image)


def test_floats_from_0_to_1(classifier: gradcam.Classifier, photo: Photo) -> None:
    image = gradcam.read_image(photo("coffee.jpg"))
    tensor = (torch.tensor(image).permute(2, 0, 1) / 255).requires_grad_()
    expected = classifier.explain(image)
    for pixels in (tensor, image / 255, tensor.bfloat16().float(), tensor.double()):
        np.testing.assert_array_equal(classifier.explain(pixels).classes, expected.classes)
    for pixels in (tensor, image / 255, (image / 255).astype(np.float32)):
        np.testing.assert_array_equal(gradcam.read_image(pixels), image)
        drawn = gradcam.overlay(pixels, expected.heatmaps[0, 0])
        np.testing.assert_array_equal(drawn, gradcam.overlay(image, expected.heatmaps[0, 0]))
    assert abs(gradcam.read_image(tensor.bfloat16()).astype(int) - image).max() <= 1
    assert tensor.requires_grad
    assert tensor.grad is None


@pytest.mark.cuda
def test_tensors_on_a_device(photo: Photo) -> None:
    image = gradcam.read_image(photo("coffee.jpg"))
    tensor = torch.tensor(image, device="cuda").permute(2, 0, 1)
    np.testing.assert_array_equal(gradcam.read_image(tensor), image)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_opacity_by_hand(dtype: type) -> None:
    full = 1 if dtype is np.float32 else np.iinfo(dtype).max
    shares = np.array([[[1, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0.2]]])
    expected = [[[255, 0, 0], [255, 255, 255], [204, 204, 204]]]
    values = (shares * full).astype(dtype)
    np.testing.assert_array_equal(gradcam.read_image(values), expected)
    np.testing.assert_array_equal(gradcam.read_image(torch.tensor(values).permute(2, 0, 1)), expected)


def test_opacity_is_a_channel_for_a_network_of_four() -> None:
    class FourChannels:
        channels = 4

        def __call__(self, image: np.ndarray) -> torch.Tensor:
            return torch.tensor(image).permute(2, 0, 1).float()

        def region(self, height: int, width: int) -> tuple[int, int, int, int]:
            return 0, 0, height, width

    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(2, 2)
    ).eval()
    classifier = gradcam.Classifier("four", model, FourChannels(), 2, None, "0")
    values = np.random.default_rng(0).integers(0, 256, (8, 9, 4), np.uint8)
    np.testing.assert_array_equal(classifier.batch([values])[0].permute(1, 2, 0).numpy(), values)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"]
)
def test_every_mode_of_pil(classifier: gradcam.Classifier, tmp_path: Path, mode: str) -> None:
    image = Image.radial_gradient("L").crop((0, 0, 200, 150))
    for step in {"I;16": ["I", "I;16"], "RGBa": ["RGBA", "RGBa"], "PA": ["P", "PA"]}.get(mode, [mode]):
        image = image.convert(step)
    before = np.array(image)
    actual = gradcam.read_image(image)
    assert (actual.shape, actual.dtype) == ((150, 200, 3), np.uint8)
    assert classifier.explain(image).overlay().shape == actual.shape
    np.testing.assert_array_equal(np.array(image), before)
    with_file = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}
    if mode in with_file:
        image.save(tmp_path / "a.png")
        np.testing.assert_array_equal(gradcam.read_image(tmp_path / "a.png"), actual)


def test_a_palette_with_a_transparent_colour(photo: Photo, tmp_path: Path) -> None:
    image = opaque(photo).convert("P")
    image.save(tmp_path / "a.png", transparency=3)
    expected = gradcam.read_image(tmp_path / "a.png")
    np.testing.assert_array_equal(gradcam.read_image(Image.open(tmp_path / "a.png")), expected)
    assert (expected[np.asarray(image) == 3] == 255).all()


@pytest.mark.parametrize("orientation", [3, 6])
def test_the_orientation_of_a_picture_of_pils(photo: Photo, tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    opaque(photo).save(tmp_path / "a.jpg", exif=exif)
    expected = gradcam.read_image(tmp_path / "a.jpg")
    np.testing.assert_array_equal(gradcam.read_image(Image.open(tmp_path / "a.jpg")), expected)
    np.testing.assert_array_equal(gradcam.read_image((tmp_path / "a.jpg").read_bytes()), expected)


def test_an_open_file_is_left_where_it_was(photo: Photo) -> None:
    with open(photo("coffee.jpg"), "rb") as file:
        file.seek(100)
        np.testing.assert_array_equal(gradcam.read_image(file), gradcam.read_image(photo("coffee.jpg")))
        assert file.tell() == 100  # The file is still open.


def test_a_stream_that_cannot_go_back(photo: Photo) -> None:
    reading, writing = os.pipe()
    data = Image.open(photo("coffee.jpg")).resize((20, 10))
    with open(writing, "wb") as file:
        data.save(file, "BMP")
    with open(reading, "rb") as file:
        np.testing.assert_array_equal(gradcam.read_image(file), np.asarray(data))


def test_a_reader_of_the_users_gets_a_file_of_bytes(photo: Photo) -> None:
    calls = []

    def read(path: str | os.PathLike[str]) -> np.ndarray:
        calls.append((Path(path).suffix, Path(path).read_bytes()))
        if len(calls) > 2:
            raise ValueError("no more")
        return gradcam.read_image(path)

    classifier = gradcam.load_classifier(device="cpu", reader=read)
    data = photo("coffee.jpg").read_bytes()
    with open(photo("coffee.jpg"), "rb") as file:
        assert torch.equal(classifier.explain(file).maps, classifier.explain(data).maps)
    classifier.explain(Image.open(photo("coffee.jpg")))  # the file is already read
    assert calls == [(".jpg", data), ("", data)]
    with pytest.raises(ImageError, match="^the given bytes: the reader read failed"):
        classifier.explain(data)


def test_urls_as_paths(classifier: gradcam.Classifier, photo: Photo) -> None:
    class StorePath:
        """A path like those of universal-pathlib: `str` returns the URL, and it is not an `os.PathLike`."""

        def __str__(self) -> str:
            return "memory://forms/coffee.jpg"

        def read_bytes(self) -> bytes:
            return photo("coffee.jpg").read_bytes()

    try:
        MemoryFileSystem().pipe_file("/forms/coffee.jpg", photo("coffee.jpg").read_bytes())
        for path in (CustomPath("memory://forms/coffee.jpg"), StorePath()):
            (result,) = gradcam.explain_files([path], classifier)
            assert (result.name, result.error) == ("coffee.jpg", None)
    finally:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
    np.testing.assert_array_equal(gradcam.read_image(StorePath()), gradcam.read_image(photo("coffee.jpg")))


def closed_file(photo: Photo) -> Any:
    with open(photo("coffee.jpg"), "rb") as file:
        return file


def closed_picture(photo: Photo) -> Any:
    with Image.open(photo("coffee.jpg")) as image:
        return image


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (closed_file, r"coffee\.jpg: is closed"),
        (closed_picture, r"coffee\.jpg: is closed"),
        (lambda photo: io.StringIO("text"), 'the given file: is not open in binary mode: open it with "rb"'),
        (lambda photo: io.TextIOWrapper(io.BytesIO(photo("coffee.jpg").read_bytes()), "utf-8"), "not open in binary mode"),
        (lambda photo: Upload(photo("coffee.jpg").read_bytes()), r"upload\.png: has an asynchronous read\(\): .*\.file"),
        (lambda photo: b"", "the given bytes: is empty"),
        (lambda photo: io.BytesIO(), "the given file: is empty"),
        (lambda photo: b"nothing", "the given bytes: is not an image"),
        (lambda photo: photo("coffee.jpg").read_bytes()[:5000], "the given bytes: is damaged or cut off"),
        (lambda photo: Image.open(io.BytesIO(photo("coffee.jpg").read_bytes()[:5000])), "is damaged or cut off"),
        (lambda photo: "https://example.org/a.jpg", r"^https://example\.org/a\.jpg: is a URL\. Give a file or its bytes"),
        (lambda photo: CustomPath("s3://bucket/a.jpg"), "^s3://bucket/a.jpg: is a URL"),
        (lambda photo: torch.randn(3, 8, 8), r"float32 \(8, 8, 3\) with values from .*, expected uint8, .* from 0 to 1"),
        (lambda photo: torch.full((3, 8, 8), 255.0), "expected uint8, uint16, or floats from 0 to 1"),
        (lambda photo: torch.full((3, 8, 8), torch.nan), "expected uint8, uint16, or floats from 0 to 1"),
        (lambda photo: torch.zeros(3, 8, 8, dtype=torch.int64), "int64 .* expected uint8"),
        (lambda photo: torch.zeros(20, 30, 3), r"expected channels first, .*: use \.permute\(2, 0, 1\)"),
        (lambda photo: torch.zeros(0, 3), r"expected one image: \(C,H,W\) or \(H,W\)"),
    ],
)  # fmt: skip
def test_what_is_no_picture(classifier: gradcam.Classifier, photo: Photo, make: Any, message: str) -> None:
    for take in (gradcam.read_image, classifier.explain, lambda item: gradcam.overlay(item, np.zeros((2, 2)))):
        with pytest.raises(ImageError, match=message) as caught:
            take(make(photo))
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((3, 4, 5), np.uint8), r"uint8 \(3, 4, 5\), expected an array \(H,W\), \(H,W,3\) or \(H,W,4\)"),
        (np.zeros((4, 5, 2)), r"float64 \(4, 5, 2\), expected an array"),
        (np.zeros((1, 4, 5, 3), np.uint8), "expected an array"), (np.zeros((0, 5, 3), np.uint8), "expected an array"),
        (np.full((4, 5, 3), 1.5), "values from 1.5 to 1.5, expected uint8"), ([[1]], "expected a path"),
        (np.full((4, 5, 3), True), "bool .* expected uint8"), (None, "The image is None, expected a path"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_on(values: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        gradcam.overlay(values, np.zeros((2, 2)))
    with pytest.raises(ImageError, match=message):
        gradcam.read_image(values)
