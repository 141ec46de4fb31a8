from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gradcam
from gradcam.errors import GradcamError, ImageError
from gradcam.images.draw import GAP_PIXELS, overlay
from gradcam.images.sheets import LINE_HEIGHT, MARGIN, PanelRow, draw_panel
from gradcam.models import panels

RED = np.full((20, 40, 3), (200, 0, 0), np.uint8)
GREEN = np.full((40, 40, 3), (0, 150, 0), np.uint8)


def test_pictures_lie_under_their_columns_at_one_height() -> None:
    panel = draw_panel(
        ["first", "second"], [PanelRow("row", [RED, GREEN]), PanelRow("other", [GREEN, RED])], height=100
    )
    top = MARGIN + 2 * LINE_HEIGHT
    second = MARGIN + 200 + GAP_PIXELS  # the first column is as wide as its widest image
    assert (panel[top : top + 100, MARGIN : MARGIN + 200] == (200, 0, 0)).all()
    assert (panel[top : top + 100, second : second + 100] == (0, 150, 0)).all()
    below = top + 100 + GAP_PIXELS + LINE_HEIGHT
    assert (panel[below : below + 100, MARGIN : MARGIN + 100] == (0, 150, 0)).all()
    assert (panel[below : below + 100, second : second + 200] == (200, 0, 0)).all()
    assert (panel[top + 100 : top + 100 + GAP_PIXELS] == 255).all()
    assert panel.flags.writeable


def test_names_and_titles_are_written() -> None:
    blank = draw_panel(["", ""], [PanelRow("", [RED, RED])])
    panel = draw_panel(["", "method"], [PanelRow("class", [RED, RED])])
    assert blank.shape == panel.shape
    rows, columns = np.nonzero((blank != panel).any(2))
    header, title = rows < MARGIN + LINE_HEIGHT, rows >= MARGIN + LINE_HEIGHT
    assert header.any()
    assert title.any()
    assert columns[header].min() >= MARGIN + 448 + GAP_PIXELS  # The header is above its column.
    assert rows.max() < MARGIN + 2 * LINE_HEIGHT


def test_a_long_title_fits() -> None:
    panel = draw_panel(["a"], [PanelRow("a very long name of a class " * 5, [RED])], height=20)
    ink = np.nonzero((panel < 128).any(2))[1]
    assert ink.max() < panel.shape[1] - MARGIN // 2


@pytest.mark.parametrize("signed", [False, True])
def test_the_bar_has_the_colours_of_the_overlay(signed: bool) -> None:
    panel = draw_panel(["a"], [PanelRow("a", [GREEN])], height=20, signed=signed)
    grey = np.full((1, 3, 3), 128, np.uint8)
    values = np.array([[-1.0 if signed else 0.0, 0.5, 1.0]])
    for colour in overlay(grey, values, signed=signed)[0]:
        distance = np.abs(panel[-(MARGIN + LINE_HEIGHT) :].astype(int) - colour.astype(int)).sum(2)
        assert distance.min() <= 12


def test_the_panel_of_a_comparison(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    methods = ["gradcam", "eigencam"]
    explanations = classifier.compare(
        [photo("koala.webp"), photo("cat_and_espresso.jpg")], layers=["layer3", "layer4"], methods=methods,
        target=[[285, 967]] * 2,
    )  # fmt: skip
    panel = gradcam.panel(explanations, 1, height=560)  # the height of the visible region, so that nothing is scaled
    top, left, height, width = explanations["layer4", "gradcam"].regions[1]
    assert (height, width) == (560, 560)
    picture = explanations["layer4", "gradcam"].images[1]
    for row, (layer, k) in enumerate([("layer3", 0), ("layer3", 1), ("layer4", 0), ("layer4", 1)]):
        start = MARGIN + LINE_HEIGHT + row * (LINE_HEIGHT + 560 + GAP_PIXELS) + LINE_HEIGHT
        expected = [picture, *(explanations[layer, method].overlay(1, k, outline=False) for method in methods)]
        for column, full in enumerate(expected):
            side = MARGIN + column * (560 + GAP_PIXELS)
            cell = panel[start : start + 560, side : side + 560]
            assert np.array_equal(cell, full[top : top + height, left : left + width])


def test_what_is_no_comparison(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    explanations = classifier.compare(photo("koala.webp"), layers=["layer3", "layer4"], methods=["gradcam", "fem"])
    with pytest.raises(ImageError, match="There is no image 1: there are 1"):
        gradcam.panel(explanations, 1)
    with pytest.raises(GradcamError, match="expected the result of Classifier.compare"):
        gradcam.panel(list(explanations.values()))  # type: ignore[arg-type]
    del explanations["layer3", "fem"]
    with pytest.raises(
        GradcamError, match="no explanation by fem at layer3: a panel needs every method at every layer"
    ):
        gradcam.panel(explanations)


def test_titles_name_the_class_the_layer_and_the_grid(
    classifier: gradcam.Classifier, photo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(
        panels, "draw_panel", lambda columns, rows, **options: titles.extend(row.title for row in rows) or RED
    )
    explanations = classifier.compare(
        photo("koala.webp"), layers=["layer3", "layer4"], methods=["gradcam"], target=[["koala", 106]],
        evidence="signed",
    )  # fmt: skip
    gradcam.panel(explanations)
    assert titles == [
        "koala (105) at layer3 (14 x 14), signed evidence",
        "wombat (106) at layer3 (14 x 14), signed evidence",
        "koala (105) at layer4 (7 x 7), signed evidence",
        "wombat (106) at layer4 (7 x 7), signed evidence",
    ]


def test_what_does_not_go_together(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    explanations = classifier.compare(photo("koala.webp"), layers=["layer4"], methods=["gradcam"])
    other_comparison = classifier.compare(photo("koala.webp"), layers=["layer4"], methods=["hirescam"], target="wombat")
    with pytest.raises(GradcamError, match="different classes: pass the same target="):
        gradcam.panel({**explanations, **other_comparison})


@pytest.mark.parametrize("height", [0, -3, 2.5, "a", True])
def test_a_height_that_cannot_be(height: object) -> None:
    with pytest.raises(ImageError, match="expected the height of each image in pixels"):
        draw_panel(["a"], [PanelRow("a", [RED])], height=height)  # type: ignore[arg-type]
