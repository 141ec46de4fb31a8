"""Test mosaics: their cells, how often images are used, accepted sizes, and messages for too few classes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamError, ImageError, InputError
from gradcam.evaluation.metrics.mosaic import Mosaic, arrange_tiles, make_mosaics, to_tiles
from tests.colours import COLOURS, SIZE, ColourNet, classifier_of, picture
from tests.helpers import assert_same, traces

PICTURES = {colour: picture(colour) for colour in COLOURS}


class Strict(ColourNet):
    """A network that takes images of one size only, like one with a table of positions."""

    def __init__(self, size: int = SIZE, error: type[Exception] = AssertionError) -> None:
        super().__init__()
        self.size, self.error = size, error

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] != (self.size, self.size):
            raise self.error("CUDA out of memory" if self.error is RuntimeError else "another size")
        return super().forward(x)


def cells(mosaic: Mosaic) -> list[Tensor]:
    height, width = (length // 2 for length in mosaic.image.shape[1:])
    top, bottom = mosaic.image[:, :height], mosaic.image[:, height:]
    return [top[..., :width], top[..., width:], bottom[..., :width], bottom[..., width:]]


def test_each_cell_is_the_picture_that_is_named_at_the_networks_own_size() -> None:
    mosaics = make_mosaics(classifier_of(ColourNet()), PICTURES)
    assert len(mosaics) == 15  # the number of ways to choose four of six images
    for mosaic in mosaics:
        assert mosaic.image.shape == (3, 2 * SIZE, 2 * SIZE)
        assert len(set(mosaic.classes)) == 4
        for cell, name, index in zip(cells(mosaic), mosaic.names, mosaic.classes, strict=True):
            assert torch.equal(cell, PICTURES[name])
            assert COLOURS[index] == name


@pytest.mark.parametrize(("count", "limit", "expected"), [(4, 64, 1), (5, 64, 5), (6, 64, 15), (6, 4, 4), (6, 9, 9)])
def test_no_four_images_repeat_and_all_are_used_about_equally_often(count: int, limit: int, expected: int) -> None:
    pictures = {colour: PICTURES[colour] for colour in COLOURS[:count]}
    mosaics = make_mosaics(classifier_of(ColourNet()), pictures, limit=limit)
    assert len(mosaics) == len({frozenset(mosaic.names) for mosaic in mosaics}) == expected
    uses = Counter(name for mosaic in mosaics for name in mosaic.names)
    assert max(uses.values()) - min(uses[name] for name in pictures) <= 1


def test_each_image_appears_in_each_cell() -> None:
    pictures = {f"{colour} {i}": picture(colour, strength=1 - i / 20) for colour in COLOURS for i in range(2)}
    mosaics = make_mosaics(classifier_of(ColourNet()), pictures, limit=48)
    assert len(mosaics) == 48
    places = Counter((name, place) for mosaic in mosaics for place, name in enumerate(mosaic.names))
    assert set(places) == {(name, place) for name in pictures for place in range(4)}
    uses = Counter(name for mosaic in mosaics for name in mosaic.names)
    assert max(uses.values()) - min(uses.values()) <= 1


def test_pictures_of_one_class_are_never_together() -> None:
    pictures = PICTURES | {f"red {i}": picture("red", strength=1 - i / 50) for i in range(9)}
    mosaics = make_mosaics(classifier_of(ColourNet()), pictures, limit=40)
    assert len(mosaics) == 40
    assert all(len(set(mosaic.classes)) == 4 for mosaic in mosaics)
    assert {name for mosaic in mosaics for name in mosaic.names} == set(pictures)


def test_the_seed_decides_and_nothing_else() -> None:
    classifier = classifier_of(ColourNet())
    first = make_mosaics(classifier, PICTURES, seed=3)
    torch.manual_seed(17)
    again, reseeded = make_mosaics(classifier, PICTURES, seed=3), make_mosaics(classifier, PICTURES, seed=4)
    assert [mosaic.names for mosaic in first] == [mosaic.names for mosaic in again]
    assert all(torch.equal(a.image, b.image) for a, b in zip(first, again, strict=True))
    assert [mosaic.names for mosaic in first] != [mosaic.names for mosaic in reseeded]


def test_pictures_that_the_model_is_not_sure_of_are_left_out() -> None:
    pictures = PICTURES | {"pale": picture("red", strength=0.4)}
    classifier = classifier_of(ColourNet())
    with torch.no_grad():
        probability = float(classifier.model(pictures["pale"][None]).softmax(1).max())
    for least, is_taken in ((probability - 0.01, True), (probability + 0.01, False)):
        names = {tile.name for tile in to_tiles(classifier, pictures, least=least)}
        assert ("pale" in names) == is_taken
        assert names >= set(PICTURES)
    (tile,) = (tile for tile in to_tiles(classifier, pictures, least=0) if tile.name == "pale")
    assert tile.probability == pytest.approx(probability)
    assert tile.index == classifier.find_class(tile_label := classifier.label(tile.index) or "")
    assert tile_label in COLOURS


def test_pictures_are_read_and_prepared_as_the_model_has_them(classifier: gradcam.Classifier, photo: Any) -> None:
    names = ["koala.webp", "macaw.webp", "panda.webp", "lemur.webp"]
    mosaics = make_mosaics(classifier, {name: photo(name) for name in names})
    assert len(mosaics) == 1
    labels = {"koala.webp": 105, "macaw.webp": 88, "panda.webp": 388, "lemur.webp": 383}
    assert mosaics[0].image.shape == (3, 448, 448)
    for cell, name, index in zip(cells(mosaics[0]), mosaics[0].names, mosaics[0].classes, strict=True):
        assert index == labels[name]
        torch.testing.assert_close(cell, classifier.prepare(photo(name)).image)


@pytest.mark.parametrize("size", [8, 9])
def test_a_network_of_one_size_gets_pictures_of_half_of_it(size: int) -> None:
    pictures = {colour: picture(colour, size) for colour in COLOURS[:4]}
    tiles = to_tiles(classifier_of(Strict(size)), pictures)
    (mosaic,) = arrange_tiles(Strict(size), tiles)
    assert mosaic.image.shape == (3, size, size)
    for position, (cell, name) in enumerate(zip(cells(mosaic), mosaic.names, strict=True)):
        assert cell.shape == (3, size // 2 + (position // 2) * (size % 2), size // 2 + (position % 2) * (size % 2))
        # A constant plane stays constant when it is halved, so its mean and its sign stay.
        torch.testing.assert_close(cell.mean((1, 2)), pictures[name].mean((1, 2)), rtol=0.01, atol=0)
        assert torch.equal(cell.sign(), pictures[name].sign()[:, : cell.shape[1], : cell.shape[2]])


def test_halved_pictures_are_smoothed_and_not_skipped() -> None:
    """A line becomes two lines, of 3/8 and 1/8: the triangle filter is four pixels wide around every second pixel."""
    plain = {
        colour: torch.stack([picture(colour)[0] * 0 + sign for sign in picture(colour)[:, 0, 0].sign()])
        for colour in COLOURS[:4]
    }
    lined = {name: image.clone() for name, image in plain.items()}
    for image in lined.values():
        image[:, :, 4] += 0.1
    halved = [arrange_tiles(Strict(), to_tiles(classifier_of(Strict()), pictures))[0] for pictures in (plain, lined)]
    for before, after in zip(*map(cells, halved), strict=True):
        expected = torch.tensor([0, 0.0125, 0.0375, 0]).expand(3, 4, 4)
        torch.testing.assert_close(after - before, expected, rtol=0, atol=1e-6)


def test_out_of_memory_does_not_mean_that_the_size_is_refused() -> None:
    model = Strict(error=RuntimeError)
    with pytest.raises(RuntimeError, match="out of memory"):
        make_mosaics(classifier_of(model), PICTURES)


def test_too_few_classes_are_named_with_their_probabilities() -> None:
    pictures = {colour: PICTURES[colour] for colour in ("red", "cyan")}
    pictures |= {"red 2": picture("red", strength=0.9), "grey": torch.zeros(3, SIZE, SIZE)}
    with pytest.raises(InputError) as caught:
        make_mosaics(classifier_of(ColourNet()), pictures, min_probability=0.7)
    message = str(caught.value)
    assert message.startswith(
        "A mosaic needs images of four classes. Only images whose predicted class has a probability of 0.7 or more are "
        "used: they have 2 classes."
    )
    assert "red 1.00 (red), cyan 1.00 (cyan), red 2 1.00 (red), grey 0.17 (red)." in message
    assert message.endswith("Give images of more classes, or lower the required probability (min_probability).")


def test_of_many_pictures_the_most_probable_are_named() -> None:
    pictures = {f"{i}": picture("red", strength=1 - i / 20) for i in range(15)}
    with pytest.raises(
        InputError, match=r"they have 1 class. Images: .* 11 [\d.]+ \(red\), and 3 less probable ones\."
    ):
        make_mosaics(classifier_of(ColourNet()), pictures)
    with pytest.raises(InputError, match="they have 0 classes. Images: none"):
        make_mosaics(classifier_of(ColourNet()), {})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_probability": 1.5}, GradcamError, "min_probability is 1.5, expected a probability"),
        ({"min_probability": True}, GradcamError, "min_probability is True"),
        ({"limit": 0}, GradcamError, "limit is 0, expected the largest number of mosaics"),
        ({"images": [picture("red")]}, ImageError, "expected a mapping from names to images"),
        ({"images": PICTURES | {"red": picture("red", 10)}}, ImageError, "3 x 8 x 8 and 3 x 10 x 10"),
    ],
)
def test_errors_are_reported(options: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"images": PICTURES, **options}
    with pytest.raises(error, match=message):
        make_mosaics(classifier_of(ColourNet()), **options)


def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"nothing")
    with pytest.raises(ImageError, match=r"a\.png"):
        make_mosaics(classifier_of(ColourNet()), {"a": tmp_path / "a.png"})


class Counting(Strict):
    """A network with batch norm, whose running statistics would change in training mode."""

    def __init__(self) -> None:
        super().__init__(2 * SIZE)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] == SIZE:
            return ColourNet.forward(self, x)
        return super().forward(self.norm(x))


@pytest.mark.parametrize("make", [ColourNet, Strict, Counting])
def test_the_model_is_left_as_it_was(make: type[nn.Module]) -> None:
    model = make()
    classifier = classifier_of(model)
    model.train()
    before = traces(model)
    make_mosaics(classifier, PICTURES)
    assert_same(before, traces(model))
