"""Test figures for papers: their files are read back, and the drawn texts and panels are measured."""

from __future__ import annotations

import base64
import io
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import cv2
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnchoredOffsetbox
from matplotlib.text import Text
from numpy.typing import NDArray
from PIL import Image

import gradcam
from gradcam.errors import GradcamError, ImageError
from gradcam.models.results import ImageExplanation

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
LONG = "a very long name of a class with many words, such as an espresso in a red cup on a saucer with a small spoon"
UNBROKEN = "Rindfleischetikettierungsüberwachungsaufgabenübertragungsgesetz" * 2
LAYER = "vision_model.encoder.layers.encoder_layer_11.layer_norm_before"


@pytest.fixture(scope="module")
def images(photo: Callable[[str], Path]) -> list[NDArray[np.uint8]]:
    """Return three images of different shapes."""
    names = ("cat_and_espresso.jpg", "coffee.jpg", "astronaut.jpg")
    pixels = [np.asarray(Image.open(photo(name)).convert("RGB").reduce(3)) for name in names]
    return [pixels[0], pixels[1][:90], pixels[2][:, :110]]


@pytest.fixture(scope="module")
def explanation(classifier: gradcam.Classifier, images: list[NDArray[np.uint8]]) -> ImageExplanation:
    return classifier.explain(images, target=[["Egyptian cat", "espresso"]] * 3)


@pytest.fixture(scope="module")
def compared(classifier: gradcam.Classifier, images: list[NDArray[np.uint8]]) -> dict[Any, ImageExplanation]:
    return classifier.compare(images, methods=["gradcam", "layercam", "eigencam"])


def find_texts(figure: Figure) -> Iterator[tuple[str, Any]]:
    """Draw the figure, and yield each visible text with its extent in pixels."""
    figure.set_dpi(100)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text.axes is not None:
            box = text.get_window_extent(renderer)
            if box.width and (
                text.axes.axison or text not in [*text.axes.get_xticklabels(), *text.axes.get_yticklabels()]
            ):
                yield text.get_text(), box


def panels(figure: Figure) -> list[Any]:
    return [axes for axes in figure.axes if axes.images]


def check_layout(figure: Figure) -> None:
    """Assert that the panels have one height, and that texts overlap neither each other, nor panels, nor the edges."""
    boxes = [axes.get_window_extent() for axes in panels(figure)]
    assert np.ptp([box.height for box in boxes]) < 1e-6
    texts = list(find_texts(figure))
    assert texts
    for (first, a), (second, b) in itertools.combinations(texts, 2):
        assert not a.shrunk(0.98, 0.98).overlaps(b.shrunk(0.98, 0.98)), (first, second)
    for text, box in texts:
        assert not any(box.shrunk(0.98, 0.98).overlaps(panel.shrunk(0.98, 0.98)) for panel in boxes), text
        assert figure.bbox.x0 <= box.x0 + 1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert box.y0 >= figure.bbox.y0 - 1, text
        assert box.y1 <= figure.bbox.y1 + 1, text
    for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)


def rename(explanation: ImageExplanation) -> ImageExplanation:
    labels = [*(explanation.labels or ())]
    labels[285], labels[967] = UNBROKEN, LONG
    return replace(explanation, labels=labels, layer=LAYER)


@pytest.mark.parametrize("width", [3.5, 7.0])
def test_nothing_overlaps_in_a_single_panel(explanation: ImageExplanation, width: float) -> None:
    for one in (explanation, rename(explanation)):
        for i, k in itertools.product(range(3), range(2)):
            figure = one.figure(i=i, k=k, width=width)
            check_layout(figure)
            assert figure.get_size_inches()[0] == width
            assert len(panels(figure)) == 2


@pytest.mark.parametrize("width", [3.5, 7.0])
def test_nothing_overlaps_in_grids(
    explanation: ImageExplanation, compared: dict[Any, ImageExplanation], width: float
) -> None:
    signed = replace(explanation, evidence="signed")
    long = {key: rename(value) for key, value in compared.items()}
    for drawn in (explanation, rename(explanation), signed, compared, long, [compared, long]):
        check_layout(gradcam.figure(drawn, width=width))
    # Four rows and two columns of heatmaps.
    pair = [{key: compared[key] for key in [*compared][:2]}, {key: long[key] for key in [*long][:2]}]
    figure = gradcam.figure([{key: value.select(i) for key, value in group.items()} for group in pair for i in (0, 1)])
    check_layout(figure)
    assert len(panels(figure)) == 4 * 3


def read_svg(data: bytes) -> tuple[list[str], list[NDArray[np.uint8]]]:
    root = ElementTree.fromstring(data)
    texts = ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]
    urls = [element.attrib[LINK] for element in root.iter(f"{SVG}image")]
    files = [base64.b64decode(url.partition("base64,")[2]) for url in urls]
    return texts, [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]


def check_images(embedded: list[NDArray[np.uint8]], expected: list[NDArray[np.uint8]]) -> None:
    """Assert that a file embeds these images, losslessly; a format may store images upside down."""
    for pixels in expected:
        matches = [image for image in embedded if image.shape == pixels.shape]
        assert any(np.array_equal(image, pixels) or np.array_equal(image[::-1], pixels) for image in matches)


def test_an_svg_has_text_and_all_pixels(explanation: ImageExplanation, tmp_path: Path) -> None:
    explanation.figure(tmp_path / "a.svg", i=0, alpha=0.7, colormap="viridis")
    texts, embedded = read_svg((tmp_path / "a.svg").read_bytes())
    values = [f"{100 * (explanation.probability(0, k) or 0):.0f} %, gradcam at layer4" for k in range(2)]
    assert {"image", "Egyptian cat", "espresso", *values, "0", "0.5", "1"} <= set(texts)
    assert any(text.startswith("positive evidence") for text in texts)
    overlays = [explanation.overlay(0, k, alpha=0.7, colormap="viridis") for k in range(2)]
    check_images(embedded, [explanation.images[0], *overlays])
    assert not np.array_equal(overlays[0], explanation.overlay(0, 0))


def test_a_pdf_has_text_in_truetype_and_all_pixels(explanation: ImageExplanation, tmp_path: Path) -> None:
    import pypdf

    explanation.figure(tmp_path / "a.pdf", i=1)
    (page,) = pypdf.PdfReader(tmp_path / "a.pdf").pages
    text = page.extract_text()
    assert "Egyptian cat" in text
    assert "gradcam at layer4" in text
    assert page.mediabox.width == 7 * 72
    check_images(
        [np.asarray(image.image.convert("RGB")) for image in page.images],  # type: ignore[union-attr]
        [explanation.images[1], *(explanation.overlay(1, k) for k in range(2))],
    )
    fonts = [font.get_object() for font in page["/Resources"]["/Font"].values()]  # type: ignore[index]
    kinds = {font["/DescendantFonts"][0].get_object()["/Subtype"] for font in fonts}
    assert kinds == {"/CIDFontType2"}  # TrueType outlines; a Type 3 font has no descendants


def test_a_png_has_300_pixels_per_inch(explanation: ImageExplanation, tmp_path: Path) -> None:
    explanation.figure(tmp_path / "a.png", i=0, width=4)
    with Image.open(tmp_path / "a.png") as image:
        assert image.width == 1200
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)


@pytest.mark.parametrize("evidence", ["positive", "signed"])
def test_the_colour_bar_has_the_colours_of_the_heatmap(
    explanation: ImageExplanation, tmp_path: Path, evidence: str
) -> None:
    drawn = replace(explanation, evidence=evidence)
    figure = drawn.figure(tmp_path / "a.png", i=0, colormap="inferno")
    with Image.open(tmp_path / "a.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    box = figure.axes[-1].get_position()
    row = pixels[round((1 - (box.y0 + box.y1) / 2) * len(pixels))]
    signed = evidence == "signed"
    for value in np.linspace(-1 if signed else 0, 1, 12)[1:-1]:
        share = (value + 1) / 2 if signed else value
        shown = row[round((box.x0 + share * box.width) * pixels.shape[1])]
        grey, heatmap = np.full((1, 1, 3), 128, np.uint8), np.full((1, 1), value, np.float32)
        options: Any = {"colormap": "inferno", "region": (0, 0, 1, 1), "signed": signed}
        assert np.abs(shown - gradcam.overlay(grey, heatmap, **options)[0, 0].astype(int)).max() <= 6
    labels = [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    assert labels == (["−1", "0", "1"] if signed else ["0", "0.5", "1"])


def test_the_colour_bar_of_a_colour_base_has_the_pure_colours(explanation: ImageExplanation, tmp_path: Path) -> None:
    figure = explanation.figure(tmp_path / "a.png", i=0, base="color")
    with Image.open(tmp_path / "a.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    box = figure.axes[-1].get_position()
    row = pixels[round((1 - (box.y0 + box.y1) / 2) * len(pixels))]
    turbo = cv2.cvtColor(cv2.applyColorMap(np.array([[191]], np.uint8), cv2.COLORMAP_TURBO), cv2.COLOR_BGR2RGB)[0, 0]
    assert np.abs(row[round((box.x0 + 0.75 * box.width) * pixels.shape[1])] - turbo.astype(int)).max() <= 6


def test_methods_are_columns_and_images_rows(compared: dict[Any, ImageExplanation], tmp_path: Path) -> None:
    figure = gradcam.figure(compared, tmp_path / "a.svg", names=["first", "second", "third"])
    texts, embedded = read_svg((tmp_path / "a.svg").read_bytes())
    assert [texts.count(name) for name in ("gradcam", "layercam", "eigencam", "layer4")] == [1, 1, 1, 3]
    first = next(iter(compared.values()))
    assert {first.label(i) for i in range(3)} <= set(texts)
    assert [text.partition(", ")[2] for text in texts if " %, " in text] == ["first", "second", "third"]
    check_images(embedded, [value.overlay(i) for value in compared.values() for i in range(3)])
    rows = [[round(axes.get_position().y0, 6), round(axes.get_position().x0, 6)] for axes in panels(figure)]
    assert len({y for y, _ in rows}) == 3
    assert len({x for _, x in rows}) == 4


def test_headings_return_where_they_change(classifier: gradcam.Classifier, images: list[NDArray[np.uint8]]) -> None:
    groups = [
        classifier.compare(images[0], methods=names) for names in (["gradcam", "layercam"], ["gradcam", "eigencam"])
    ]
    texts = [text for text, _ in find_texts(gradcam.figure(groups))]
    assert [text for text in texts if text in gradcam.METHODS] == ["gradcam", "layercam", "eigencam"]


def test_attributions_have_no_colour_bar(classifier: gradcam.Classifier, images: list[NDArray[np.uint8]]) -> None:
    attribution = classifier.attribute(images[0], "input-gradients", target="espresso")
    figure = attribution.figure()
    assert len(figure.axes) == len(panels(figure)) == 2
    assert "espresso" in [text for text, _ in find_texts(figure)]
    heatmap = classifier.explain(images[0], target="espresso")
    mixed = gradcam.figure([[heatmap, attribution]], alpha=0.3)
    assert len(mixed.axes) == len(panels(mixed)) + 1 == 4
    shown = [np.asarray(axes.images[0].get_array()) for axes in panels(mixed)]
    assert np.array_equal(shown[1], heatmap.overlay(alpha=0.3))
    assert np.array_equal(shown[2], attribution.draw())


def test_a_blank_heatmap_is_named(explanation: ImageExplanation) -> None:
    blank = replace(explanation, maps=explanation.maps * 0, heatmaps=explanation.heatmaps * 0)
    texts = " ".join(text.replace("\n", " ") for text, _ in find_texts(blank.figure(i=0, k=0)))
    assert "gradcam at layer4, no positive evidence" in texts


def test_titles_and_the_colour_bar_can_be_left_out(explanation: ImageExplanation) -> None:
    figure = explanation.figure(i=0, title=False, colorbar=False)
    assert list(find_texts(figure)) == []
    assert len(figure.axes) == 3


def test_a_panel_in_the_axes_of_a_user(explanation: ImageExplanation) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    assert explanation.figure(ax=left, i=2, k=1, alpha=0.2) is figure
    assert rename(explanation).figure(ax=right, k=1, colorbar=False) is figure
    figure.draw(FigureCanvasAgg(figure).get_renderer())
    assert np.array_equal(left.images[0].get_array(), explanation.overlay(2, 1, alpha=0.2))
    assert left.get_title().startswith("espresso\n")
    (bar,) = left.child_axes
    assert bar.get_ylabel() == "positive evidence"
    assert bar.get_window_extent().height == pytest.approx(left.get_window_extent().height)
    assert right.child_axes == []
    assert right.get_title().startswith("a very long name")
    boxes = [axes.title.get_window_extent() for axes in (left, right)]
    assert not boxes[0].overlaps(boxes[1])
    assert explanation.figure(ax=left, title=False, colorbar=False) is figure


@pytest.mark.parametrize("spacing", [(0.7, 0.7), (0.0004, 0.0004), (12.5, 12.5)])
def test_a_scale_bar_measures_the_image(explanation: ImageExplanation, spacing: tuple[float, float]) -> None:
    figure = replace(explanation, spacings=[spacing] * 3).figure(i=0)
    (axes,) = [axes for axes in figure.axes if axes.findobj(AnchoredOffsetbox)]
    assert axes is figure.axes[0]
    (anchored,) = axes.findobj(AnchoredOffsetbox)
    length, unit = anchored.txt_label.get_text().split()  # type: ignore[attr-defined]
    assert unit == "mm"
    (bar,) = anchored.size_bar.get_children()  # type: ignore[attr-defined]
    assert bar.get_width() * spacing[1] == pytest.approx(float(length))
    assert float(length) / 10.0 ** np.floor(np.log10(float(length)) + 1e-9) == pytest.approx(
        float(length[0] if length[0] != "0" else re.sub(r"[0.]", "", length)[0])
    )
    assert 0.1 < bar.get_width() / explanation.images[0].shape[1] <= 0.4


@pytest.mark.parametrize("spacings", [(), [None] * 3, [(1.0, 2.0)] * 3])
def test_there_is_no_scale_bar_without_square_pixels(explanation: ImageExplanation, spacings: Any) -> None:
    figure = replace(explanation, spacings=spacings).figure(i=0)
    assert figure.findobj(AnchoredOffsetbox) == []


def test_a_reader_can_give_the_spacing(classifier: gradcam.Classifier, images: list[NDArray[np.uint8]]) -> None:
    from gradcam.models.preprocess import Reading

    reader: Any = lambda path: Reading(images[0], images[0], None, (0.5, 0.5))  # noqa: E731
    loaded = gradcam.load_classifier(device="cpu", reader=reader)
    explanation = loaded.explain(["a.scan", "b.scan"])
    assert explanation.spacings == [(0.5, 0.5)] * 2
    assert explanation.select(1).spacings == [(0.5, 0.5)]
    assert classifier.explain(images[0]).spacings == [None]
    wrong: Any = lambda path: Reading(images[0], images[0], None, (0.5, -1))  # noqa: E731
    with pytest.raises(ImageError, match="expected the height and width of a pixel in mm"):
        gradcam.load_classifier(device="cpu", reader=wrong).explain("a.scan")


def test_wrong_arguments(explanation: ImageExplanation, compared: dict[Any, ImageExplanation], tmp_path: Path) -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: explanation.figure(tmp_path / "a.gif"), r"a.gif: a figure can only be written as .pdf, .svg, .png"),
        (lambda: explanation.figure(tmp_path / "no" / "a.pdf"), r"a.pdf: cannot be written \(No such file"),
        (lambda: explanation.figure(i=3), r"There is no map \[3, :\]: there are 3 image"),
        (lambda: explanation.figure(k=2), r"There is no map \[0, 2\]"),
        (lambda: explanation.figure(width=0), "The figure's width is 0, expected inches, such as 7"),
        (lambda: gradcam.figure(compared, width=2), "4 panels side by side do not fit into a width of 2 inches"),
        (lambda: gradcam.figure([explanation] * 6), "The figure would have 54 panels, more than 40"),
        (lambda: gradcam.figure(explanation.maps), r"expected the result of explain\(\)"),
        (lambda: gradcam.figure([]), r"The explanations are \[\], expected"),
        (lambda: gradcam.figure(explanation, names=["a"]), "There are 1 names for 3 images"),
        (
            lambda: gradcam.figure([explanation, replace(explanation, evidence="signed")]),
            "positive and signed evidence",
        ),
        (lambda: explanation.figure(ax=3), "ax is 3, expected the axes of a matplotlib figure"),
        (lambda: explanation.figure(ax=Figure().subplots(), width=3), "width= cannot be used with ax="),
        (lambda: explanation.figure("a.pdf", ax=Figure().subplots()), "path= cannot be used with ax="),
        (lambda: explanation.figure(colormap="nothing"), "There is no colour map 'nothing'"),
    ]
    for call, message in cases:
        with pytest.raises(GradcamError, match=message):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_volume_is_refused(explanation: ImageExplanation) -> None:
    volume = replace(explanation, maps=explanation.maps[:, :, None], heatmaps=explanation.heatmaps[:, :, None])
    with pytest.raises(ImageError, match=r"expected one map: floats \(h,w\)"):
        volume.figure()


def test_without_matplotlib(explanation: ImageExplanation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(GradcamError, match=r"Figures need matplotlib: pip install \"\.\[plots\]\""):
        explanation.figure()


def test_the_settings_of_the_user_stay(explanation: ImageExplanation, tmp_path: Path) -> None:
    with mpl.rc_context({"svg.fonttype": "path", "text.usetex": True, "savefig.bbox": "tight", "font.size": 20}):
        before = dict(mpl.rcParams)
        explanation.figure(tmp_path / "a.svg", i=0)
        assert dict(mpl.rcParams) == before
    texts, _ = read_svg((tmp_path / "a.svg").read_bytes())
    assert "espresso" in texts


CODE = """
import sys, gradcam
explanation = gradcam.load_classifier(device="cpu").explain(sys.argv[1], target=[["Egyptian cat", "espresso"]])
assert "matplotlib" not in sys.modules
for suffix in ("pdf", "svg", "png"):
    explanation.figure(f"{sys.argv[2]}/a.{suffix}", i=0)
assert "matplotlib.pyplot" not in sys.modules
"""


def test_two_runs_give_the_same_bytes(photo: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", CODE, str(photo("coffee.jpg")), str(tmp_path / name)]
        subprocess.run(command, check=True)
    for suffix in ("pdf", "svg", "png"):
        assert (tmp_path / f"one/a.{suffix}").read_bytes() == (tmp_path / f"two/a.{suffix}").read_bytes(), suffix
