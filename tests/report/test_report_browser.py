"""Test the gallery in a real browser: the system's Chromium, driven by Playwright."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradcam.errors import escape_controls
from gradcam.images.draw import overlay
from gradcam.images.read import Pixels, read_image
from gradcam.images.write import write_image
from gradcam.report.gallery import write_report
from gradcam.report.views import find_stem
from gradcam.storage.records import Explained, Prediction, Record
from tests.browser import PHONE, Visit, expect, is_remembered, needs_browser, wait_until
from tests.report.test_report import HOSTILE, make_record, make_result, write_run
from tests.views import write_views

pytestmark = [pytest.mark.slow, needs_browser]
GREEN, RED = (30, 160, 60), (210, 30, 40)


def plain(colour: tuple[int, ...]) -> Pixels:
    return np.full((300, 400, 3), colour, np.uint8)


def warm(picture: Pixels) -> Pixels:
    rows, columns = np.mgrid[-1 : 1 : picture.shape[0] * 1j, -1 : 1 : picture.shape[1] * 1j]
    return overlay(picture, np.exp(-3 * (rows**2 + columns**2)))


def write_gallery(folder: Path, records: Sequence[Record], pictures: dict[str, Pixels], **settings: Any) -> Path:
    """Write a folder with overlays, views and the page. A record without an image has only overlays."""
    write_run(folder, records, {"model": "resnet50", "settings": {"alpha": 0.5, **settings}})
    for record in records:
        picture = pictures.get(record.image)
        overlay = plain(RED) if picture is None or (picture == GREEN).all() else warm(picture)
        overlays = [overlay] * len(record.explained)
        for entry, image in zip(record.explained, overlays):
            (folder / str(entry.overlay)).parent.mkdir(parents=True, exist_ok=True)
            write_image(folder / str(entry.overlay), image)
        if record.explained:
            write_views(folder, str(find_stem(record)), picture, overlays)
    write_report(folder)
    return folder


def predicted(*classes: tuple[int, str, float]) -> dict[str, Any]:
    return {"predictions": [Prediction(*item) for item in classes]}


CAT, TABBY, CUP = (285, "Egyptian cat"), (281, "tabby"), (967, "espresso")


def make_four_results() -> list[Explained]:
    """Return the results of two classes by two methods."""
    return [
        make_result(f"both-{method}-{index}-{label}.jpg", index=index, label=label, method=method)
        for method in ("gradcam", "layercam")
        for index, label in (CUP, TABBY)
    ]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, photo: Callable[[str], Path]) -> Path:
    blank = [make_result("animals/9-gradcam.jpg", blank=True)]
    cat = predicted((*CAT, 0.37), (*TABBY, 0.18), (968, "cup", 0.0004))
    both: Any = {"explained": make_four_results(), "size": (300, 400), "region": (0, 50, 300, 300)}
    records = [
        make_record("animals/chelsea.jpg", size=(300, 451), **cat),
        make_record("animals/10.jpg", **predicted((*TABBY, 0.9))),
        make_record("animals/9.jpg", explained=blank, note="shown as its values are", **predicted((*TABBY, 0.5))),
        Record("broken.jpg", "resnet50", error="broken.jpg: is damaged or cut off"),
        make_record("both.jpg", **both, **predicted((*CUP, 0.58))),
        make_record("alone.jpg", **predicted((*CUP, 0.95))),
    ]
    names = {"animals/chelsea.jpg": "chelsea.jpg", "animals/10.jpg": "koala.webp", "animals/9.jpg": "panda.webp"}
    pictures = {image: read_image(photo(name)) for image, name in names.items()}
    return write_gallery(tmp_path_factory.mktemp("zoo"), records, {**pictures, "both.jpg": plain(GREEN)})


INPUT_ORDER = ["animals/chelsea.jpg", "animals/10.jpg", "animals/9.jpg", "broken.jpg", "both.jpg", "alone.jpg"]


def list_cards(page: Any) -> list[str]:
    """Return the names on the cards, in the order of the document."""
    names: list[str] = page.locator("#grid .card .name").all_text_contents()
    return names


def count(page: Any) -> str:
    text: str = page.locator("#count").inner_text()
    return text


def colour_of(locator: Any) -> Any:
    """Return the mean colour of a screenshot of the element."""
    decode = "[...box.querySelectorAll('img')].map((image) => image.decode())"
    locator.evaluate(f"async (box) => await Promise.all({decode})")
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(locator.screenshot())).convert("RGB"))
    middle = pixels[pixels.shape[0] // 4 : pixels.shape[0] // 2, pixels.shape[1] // 4 : pixels.shape[1] // 2]
    return middle.mean((0, 1))


def wait_for_detail(page: Any, name: str) -> None:
    expect(page.locator("#detail-name")).to_have_text(name)
    expect(page.locator("#detail")).to_have_attribute("data-state", "ready")


def test_every_picture_has_a_card(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit().open(zoo)
    assert page.title() == f"{zoo.name} · Grad-CAM"
    assert list_cards(page) == INPUT_ORDER
    assert count(page) == "6 images"
    cards = page.locator("#grid .card")
    assert cards.nth(1).locator(".verdict").inner_text().split("\n") == ["tabby", "90 %"]
    assert cards.nth(3).locator(".error").inner_text() == "broken.jpg: is damaged or cut off"
    assert page.locator(".badge").all_inner_texts() == ["empty heatmap"]
    wait_until(page, "() => document.querySelectorAll('#grid img.here').length === 5")
    assert page.locator("#failures").inner_text() == "1"
    page.get_by_text("Settings of the run").click()
    assert page.get_by_text("alpha", exact=True).is_visible()


def test_cards_lie_beside_and_below_each_other(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit(viewport={"width": 900, "height": 800}).open(zoo)
    boxes = [card.bounding_box() for card in page.locator("#grid li").all()]
    rows = sorted({box["y"] for box in boxes})
    assert [sum(box["y"] == row for box in boxes) for row in rows] == [4, 2]
    for i, box in enumerate(boxes):
        for earlier in boxes[:i]:
            is_right, is_left = box["x"] >= earlier["x"] + earlier["width"], earlier["x"] >= box["x"] + box["width"]
            assert is_right or is_left or box["y"] >= earlier["y"] + earlier["height"]
    assert max(box["x"] + box["width"] for box in boxes) <= 900
    assert page.locator("main").bounding_box()["height"] > rows[1] - rows[0] + boxes[0]["height"]


def test_the_search_covers_file_names_and_predicted_and_explained_classes(
    visit: Callable[..., Visit], zoo: Path, labelled: Path
) -> None:
    page = visit().open(zoo)
    page.fill("#search", "TABBY")
    assert list_cards(page) == ["animals/10.jpg", "animals/9.jpg", "both.jpg"]  # both.jpg has a heatmap of the tabby
    page.fill("#search", "espresso alone")
    assert list_cards(page) == ["alone.jpg"]
    page = visit().open(labelled)
    page.fill("#search", "tabby")  # the label of an image with another predicted class
    assert list_cards(page) == ["wrong.jpg"]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a gallery of three images with labels, two of which are the predicted class."""
    records = [
        make_record(
            "right.jpg",
            explained=[make_result("right-gradcam.jpg", index=CUP[0], label=CUP[1])],
            **predicted((*CUP, 0.9)),
        ),
        make_record(
            "wrong.jpg",
            explained=[make_result("wrong-gradcam.jpg", index=TABBY[0], label=TABBY[1])],
            **predicted((*CAT, 0.6)),
        ),
        make_record(
            "also right.jpg",
            explained=[make_result("b-gradcam.jpg", index=CAT[0], label=CAT[1])],
            **predicted((*CAT, 0.7)),
        ),
    ]
    return write_gallery(tmp_path_factory.mktemp("labelled"), records, {}, classes=None, top_k=1)


def test_wrong_predictions_are_marked_and_filtered_if_there_are_labels(
    visit: Callable[..., Visit], zoo: Path, labelled: Path
) -> None:
    page = visit().open(labelled)
    assert page.locator("[title='wrong.jpg'] .verdict .label").inner_text() == "wrong: Egyptian cat"
    for value, names in (("wrong", ["wrong.jpg"]), ("right", ["right.jpg", "also right.jpg"])):
        page.locator(f"#label-row input[value={value}]").check(force=True)
        assert list_cards(page) == names
    assert list_cards(visit().open(labelled, "label=wrong")) == ["wrong.jpg"]
    assert visit().open(zoo).locator("#label-row").is_hidden()


@pytest.mark.parametrize("width", [820, 1160, 1280])
def test_the_toolbar_does_not_move(visit: Callable[..., Visit], zoo: Path, width: int) -> None:
    page = visit(viewport={"width": width, "height": 800}).open(zoo)
    parts = ["#search", "#class", "#sort", "#least", "#grid"]
    before = [page.locator(part).bounding_box() for part in parts]
    for text in ("x", "tabby", "nothing has this name"):
        page.fill("#search", text)
        boxes = [page.locator(part).bounding_box() for part in parts]
        assert [(box["x"], box["y"]) for box in boxes] == [(box["x"], box["y"]) for box in before]


def test_pictures_in_place_of_overlays(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit().open(zoo)
    green = page.locator("#grid li").nth(4).locator(".thumb")
    wait_until(page, "() => document.querySelectorAll('#grid img.here').length === 5")
    assert np.abs(colour_of(green) - RED).max() < 8
    page.get_by_text("Images", exact=True).last.click()
    wait_until(page, "() => document.querySelectorAll('#grid img.here').length === 4")
    images = "[...document.querySelectorAll('#grid img')]"
    wait_until(page, f"() => {images}.every((i) => getComputedStyle(i).opacity === '1')")
    assert np.abs(colour_of(green) - GREEN).max() < 8


DONE = [name for name in INPUT_ORDER if name != "broken.jpg"]


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda page: page.fill("#search", "NIM 9"), ["animals/9.jpg"]),
        (
            lambda page: page.select_option("#class", label="tabby (3)"),
            ["animals/10.jpg", "animals/9.jpg", "both.jpg"],
        ),
        (lambda page: page.fill("#least", "50"), ["animals/10.jpg", "animals/9.jpg", "both.jpg", "alone.jpg"]),
        (lambda page: page.fill("#most", "50"), ["animals/chelsea.jpg", "animals/9.jpg"]),
        (lambda page: page.get_by_label("Failed", exact=True).check(force=True), ["broken.jpg"]),
        (lambda page: page.get_by_label("Done", exact=True).check(force=True), DONE),
        (lambda page: page.fill("#search", "nothing is called this"), []),
    ],
    ids=["name", "class", "least", "most", "failed", "done", "nothing"],
)
def test_filters(visit: Callable[..., Visit], zoo: Path, act: Callable[[Any], object], expected: list[str]) -> None:
    started = visit()
    page = started.open(zoo)
    act(page)
    assert list_cards(page) == expected
    assert count(page) == f"{len(expected)} of 6"
    assert page.locator("#nothing").is_visible() == (not expected)
    page.reload()
    assert list_cards(page) == expected
    page.locator("#clear").click()
    assert list_cards(page) == INPUT_ORDER
    assert "#" not in page.url or page.url.endswith("#")
    assert not page.locator("#clear").is_visible()


BY_NAME = ["alone.jpg", "animals/9.jpg", "animals/10.jpg", "animals/chelsea.jpg", "both.jpg", "broken.jpg"]
BY_CONFIDENCE = ["alone.jpg", "animals/10.jpg", "both.jpg", "animals/9.jpg", "animals/chelsea.jpg", "broken.jpg"]
BY_CLASS = ["animals/chelsea.jpg", "alone.jpg", "both.jpg", "animals/10.jpg", "animals/9.jpg", "broken.jpg"]


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("input", INPUT_ORDER), ("name", BY_NAME), ("surest", BY_CONFIDENCE),
        ("least-sure", [*BY_CONFIDENCE[4::-1], BY_CONFIDENCE[5]]), ("class", BY_CLASS),
    ],
)  # fmt: skip
def test_sorting(visit: Callable[..., Visit], zoo: Path, sort: str, expected: list[str]) -> None:
    page = visit().open(zoo)
    page.select_option("#sort", "name" if sort == "input" else "input")
    page.select_option("#sort", sort)
    assert list_cards(page) == expected
    page.reload()
    assert list_cards(page) == expected
    page.fill("#search", "animals")
    assert list_cards(page) == [name for name in expected if name.startswith("animals")]


def test_a_view_is_kept_in_the_address(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit().open(zoo, "which=done&sort=name&class=967&least=60&image=alone.jpg")
    wait_for_detail(page, "alone.jpg")
    assert page.locator("#detail-place").inner_text() == "1 of 1"
    page.keyboard.press("Escape")
    assert list_cards(page) == ["alone.jpg"]
    assert page.input_value("#least") == "60"
    assert page.input_value("#sort") == "name"
    page = visit().open(zoo, "sort=constructor&which=x&class=x&least=x&look=x&image=x&other=x")
    assert list_cards(page) == INPUT_ORDER


def test_the_way_back_leads_to_the_gallery(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit().open(zoo)
    page.locator(".card").nth(1).click()
    wait_for_detail(page, "animals/10.jpg")
    page.keyboard.press("ArrowRight")
    wait_for_detail(page, "animals/9.jpg")
    page.go_back()
    expect(page.locator("#detail")).not_to_be_visible()
    assert list_cards(page) == INPUT_ORDER


def test_the_slider_fades_between_picture_and_overlay(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit().open(zoo, "image=both.jpg")
    wait_for_detail(page, "both.jpg")
    stack, fade = page.locator(".stack").first, page.locator("#fade")

    def opacity() -> float:
        return float(page.locator(".overlay").first.evaluate("(image) => getComputedStyle(image).opacity"))

    assert opacity() == 1
    assert np.abs(colour_of(stack) - RED).max() < 8
    page.keyboard.press(" ")
    assert opacity() == 0
    assert fade.input_value() == "0"
    assert np.abs(colour_of(stack) - GREEN).max() < 8
    page.keyboard.press("3")
    assert opacity() == 0.33
    assert np.abs(colour_of(stack) - (0.67 * np.array(GREEN) + 0.33 * np.array(RED))).max() < 8
    page.keyboard.press(" ")
    page.keyboard.press(" ")
    assert opacity() == 0.33  # the previous opacity is restored
    page.keyboard.press("9")
    assert opacity() == 1
    fade.fill("60")
    assert opacity() == 0.6
    fade.press("ArrowLeft")  # with the focus, the slider handles the arrow keys
    assert opacity() == 0.59
    assert page.locator("#detail-name").inner_text() == "both.jpg"
    page.locator("#next").click()
    wait_for_detail(page, "alone.jpg")
    page.locator("#previous").click()
    wait_for_detail(page, "both.jpg")
    assert opacity() == 0.59
    page.keyboard.press("0")  # keys also work after a click
    assert opacity() == 0


def test_classes_and_methods_are_side_by_side(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit(viewport={"width": 1280, "height": 1400}).open(zoo, "image=both.jpg")
    wait_for_detail(page, "both.jpg")
    figures = page.locator("figure")
    captions = [re.sub(r"\s+", " ", text) for text in figures.locator("figcaption").all_inner_texts()]
    assert captions == [
        f"{label} layer4 · {method} · score 8.50 overlay enlarge"
        for method in ("gradcam", "layercam") for label in ("espresso", "tabby")
    ]  # fmt: skip
    boxes = [figure.bounding_box() for figure in figures.all()]
    assert boxes[0]["y"] == boxes[1]["y"] < boxes[2]["y"] == boxes[3]["y"]
    assert boxes[0]["x"] == boxes[2]["x"] < boxes[1]["x"] == boxes[3]["x"]
    page.keyboard.press("]")
    assert figures.locator("strong").all_inner_texts() == ["espresso"]
    assert figures.locator(".stack").bounding_box()["width"] > boxes[0]["width"]
    page.keyboard.press("]")
    assert figures.locator("strong").all_inner_texts() == ["tabby"]
    page.keyboard.press("[")
    page.keyboard.press("[")
    assert figures.count() == 4
    page.keyboard.press("[")
    assert "layercam" in figures.locator(".facts").inner_text()
    page.get_by_role("button", name="show all").click()
    figures.nth(2).get_by_role("button", name="enlarge").click()
    assert figures.count() == 1
    assert figures.get_attribute("data-k") == "2"


def test_the_detail_view_shows_predictions_and_facts(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit().open(zoo, "image=animals%2Fchelsea.jpg")
    wait_for_detail(page, "animals/chelsea.jpg")
    rows = page.locator(".predictions li")
    assert [row.inner_text().split("\n") for row in rows.all()] == [
        ["Egyptian cat", "37 %"], ["tabby", "18 %"], ["cup", "< 0.1 %"],
    ]  # fmt: skip
    widths = rows.locator(".bar").evaluate_all(
        "(bars) => bars.map((bar) => new DOMMatrix(getComputedStyle(bar, '::after').transform).a)"
    )
    assert widths == [0.37, 0.18, 0.0004]
    link = page.get_by_role("link", name="overlay")
    assert link.evaluate("(link) => link.href") == (zoo / "animals/chelsea-gradcam.jpg").as_uri()
    page.keyboard.press("ArrowRight")
    wait_for_detail(page, "animals/10.jpg")
    page.keyboard.press("ArrowRight")
    wait_for_detail(page, "animals/9.jpg")
    assert page.locator("figure .badge").inner_text() == "no positive evidence"
    assert page.locator(".note").inner_text() == "shown as its values are"
    page.keyboard.press("ArrowRight")
    wait_for_detail(page, "broken.jpg")
    assert page.locator(".failure").inner_text() == "broken.jpg: is damaged or cut off"
    assert not page.locator("#fade").is_visible()
    page.keyboard.press("ArrowRight")
    wait_for_detail(page, "both.jpg")
    assert "400 × 300; the model saw 300 × 300, from x = 50, y = 0" in page.locator("#facts").inner_text()
    assert page.locator("#detail-place").inner_text() == "5 of 6"


def test_overlays_alone(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit().open(zoo, "image=alone.jpg")
    wait_for_detail(page, "alone.jpg")
    assert page.locator("#fade").is_disabled()
    remark = "The original image is not available, so the overlay cannot fade."
    assert page.locator("#fade-remark").inner_text() == remark
    page.keyboard.press("0")
    page.keyboard.press(" ")
    assert page.locator(".overlay").evaluate("(image) => getComputedStyle(image).opacity") == "1"
    assert np.abs(colour_of(page.locator(".stack")) - RED).max() < 8
    assert page.locator("#next").is_disabled()


def read_focus(page: Any) -> str:
    """Return the focused element: the name on a card, or an id."""
    text: str = page.evaluate("document.activeElement.title || document.activeElement.id")
    return text


def test_the_keyboard_is_enough(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit(viewport={"width": 900, "height": 800}).open(zoo)  # this width has four columns
    page.keyboard.press("ArrowDown")
    assert read_focus(page) == "animals/chelsea.jpg"
    for key, name in [
        ("ArrowRight", "animals/10"), ("ArrowDown", "alone"), ("ArrowDown", "alone"), ("ArrowLeft", "both"),
        ("ArrowUp", "animals/chelsea"), ("End", "alone"), ("ArrowRight", "alone"), ("Home", "animals/chelsea"),
    ]:  # fmt: skip
        page.keyboard.press(key)
        assert read_focus(page) == f"{name}.jpg"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    assert page.locator("#grid button[tabindex='0']").count() == 1
    page.keyboard.press("/")
    assert read_focus(page) == "search"
    page.keyboard.type("animals/?")
    assert page.input_value("#search") == "animals/?"
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    assert read_focus(page) == "animals/chelsea.jpg"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    wait_for_detail(page, "animals/10.jpg")
    page.keyboard.press("ArrowRight")
    wait_for_detail(page, "animals/9.jpg")
    page.keyboard.press("ArrowRight")
    wait_for_detail(page, "animals/9.jpg")  # the last of the three search results
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    assert page.locator("#detail").is_visible()
    page.keyboard.press("Tab")
    assert read_focus(page) == "previous"
    page.keyboard.press(" ")  # the space key presses the focused button
    wait_for_detail(page, "animals/10.jpg")
    page.keyboard.press("ArrowRight")
    wait_for_detail(page, "animals/9.jpg")
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).not_to_be_visible()
    # The card of the last viewed image has the focus.
    wait_until(page, "document.activeElement.title === 'animals/9.jpg'")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()


def test_every_control_has_a_name(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit().open(zoo)
    page.get_by_text("Settings of the run").click()
    roles = ("button", "textbox", "searchbox", "spinbutton", "combobox", "radio", "slider", "link", "dialog", "list")
    unnamed = re.compile(rf"- ({'|'.join(roles)})(?! \")\b")
    assert unnamed.findall(page.locator("body").aria_snapshot()) == []
    page.locator(".card").nth(4).click()
    wait_for_detail(page, "both.jpg")
    snapshot = page.locator("#detail").aria_snapshot()
    assert 'slider "Fade from the image to the overlay"' in snapshot
    assert 'button "Next image"' in snapshot
    assert [name for name in unnamed.findall(snapshot) if name != "list"] == []
    card = page.locator("#grid li").nth(4)
    assert (card.get_attribute("aria-posinset"), card.get_attribute("aria-setsize")) == ("5", "6")


HOSTILE_NAMES = [
    f"{HOSTILE}.jpg", "a b#c?d%20e&f+g.jpg", "quote\"'`</script>.jpg".replace("/", "∕"), "grün/猫.jpg",
    "javascript:alert(1).jpg", "&lt;b&gt;.jpg", "gpj\u202e\x1b[2J\n.jpg", "__proto__.jpg", os.fsdecode(b"not-utf8-\xff.jpg"),
]  # fmt: skip


def test_hostile_names_and_labels_run_nothing(visit: Callable[..., Visit], tmp_path: Path) -> None:
    label = f"</script><script>alert(2)</script>{HOSTILE}"
    records = [
        make_record(name, note=label, explained=[make_result(f"{name[:-4]}-gradcam.jpg", label=label, layer=label)],
             **predicted((i, label, 0.5)))
        for i, name in enumerate(HOSTILE_NAMES)
    ]  # fmt: skip
    records.append(Record("b.jpg", label, error=label))
    folder = write_gallery(tmp_path / HOSTILE, records, dict.fromkeys(HOSTILE_NAMES, plain(GREEN)))
    printable_names = [escape_controls(name) for name in HOSTILE_NAMES]
    page = visit().open(folder)
    assert list_cards(page) == [*printable_names, "b.jpg"]
    assert page.locator(".card .label").first.inner_text() == label
    assert page.locator(".card .error").inner_text() == label
    assert page.locator("h1").inner_text() == HOSTILE
    wait_until(page, f"() => document.querySelectorAll('#grid img.here').length === {len(HOSTILE_NAMES)}")
    for place, name in enumerate(printable_names):
        page.locator(".card").nth(place).click()
        wait_for_detail(page, name)
        assert page.locator("figcaption strong").inner_text() == label
        assert page.locator(".note").inner_text() == label
        assert np.abs(colour_of(page.locator(".stack")) - RED).max() < 8
        assert page.get_by_role("link", name="overlay").evaluate("(link) => link.href").startswith("file:///")
        page.keyboard.press("0")
        assert np.abs(colour_of(page.locator(".stack")) - GREEN).max() < 8
        page.keyboard.press("9")
        page.keyboard.press("Escape")
    page.locator(".card").nth(HOSTILE_NAMES.index("__proto__.jpg")).click()
    page.reload()
    wait_for_detail(page, "__proto__.jpg")
    assert page.locator("img[src=x], [onerror]").count() == 0
    assert page.evaluate("document.querySelectorAll('script:not([src]):not([type])').length") == 0


def test_ten_thousand_pictures(visit: Callable[..., Visit], tmp_path: Path) -> None:
    names = [f"{i // 100:03}/{i:05}.jpg" for i in range(10_000)]
    classes = [predicted((i % 1000, f"class {i % 1000}", (i % 101) / 101)) for i in range(10_000)]
    records = [make_record(name, size=None, **fields) for name, fields in zip(names, classes)]
    write_run(tmp_path, records)
    (tmp_path / "099").mkdir()
    write_image(tmp_path / "099/09999-gradcam.jpg", plain(RED))
    write_views(tmp_path, "one", None, [plain(RED)])
    views = tmp_path / "report/views"
    for record in records:
        path = views / f"{record.image[:-4]}.0.jpg"
        path.parent.mkdir(exist_ok=True)
        os.link(views / "one.0.jpg", path)
    write_report(tmp_path)
    started = visit()
    page = started.open(tmp_path)
    assert count(page) == "10,000 images"

    def count_nodes() -> int:
        nodes: int = page.evaluate("document.querySelectorAll('#grid *').length")
        return nodes

    def wait_for_card(name: str) -> None:
        wait_until(page, "(name) => document.querySelector(`[title='${name}'] img.here`)", name)
        assert page.locator(f"[title='{name}']").evaluate(
            "(card) => { const box = card.getBoundingClientRect(); return box.top < innerHeight && box.bottom > 0; }"
        )

    wait_for_card("000/00000.jpg")
    max_nodes = count_nodes()
    for share in (0.25, 0.5, 0.75):
        page.evaluate("(share) => scrollTo(0, share * document.documentElement.scrollHeight)", share)
        wait_until(
            page,
            "(least) => [...document.querySelectorAll('#grid li')].some((card) => Number(card.dataset.place) >= least"
            " && card.getBoundingClientRect().top >= 0 && card.querySelector('img.here'))",
            int(share * 9900),
        )
        max_nodes = max(max_nodes, count_nodes())
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    wait_for_card("099/09999.jpg")
    max_nodes = max(max_nodes, count_nodes())
    assert list_cards(page)[-1] == "099/09999.jpg"
    assert max_nodes < 1000
    assert len([url for url in started.requests if url.endswith(".jpg")]) < 600
    page.locator("[title='099/09999.jpg']").click()
    wait_for_detail(page, "099/09999.jpg")
    assert page.locator("#detail-place").inner_text() == "10,000 of 10,000"
    page.keyboard.press("Escape")
    wait_until(page, "!location.hash.includes('image=')")  # after closing, the card has the focus again
    page.keyboard.press("Home")
    assert read_focus(page) == "000/00000.jpg"
    page.fill("#search", "0999")
    assert count(page) == "11 of 10,000"  # matches 00999, and 09990 to 09999
    page.fill("#search", "")
    page.select_option("#sort", "surest")
    assert list_cards(page)[0] == "001/00100.jpg"


def measure_brightness(page: Any) -> float:
    """Return the brightness of the page's background, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return float(np.mean([int(value) for value in re.findall(r"\d+", colour)[:3]]))


def test_dark_and_light(visit: Callable[..., Visit], zoo: Path) -> None:
    assert measure_brightness(visit(color_scheme="light").open(zoo)) > 230
    page = visit(color_scheme="dark").open(zoo)
    assert measure_brightness(page) < 40
    page.get_by_role("button", name="Switch to light").click()
    assert measure_brightness(page) > 230
    assert is_remembered(page, lambda: measure_brightness(page) > 230)
    page.get_by_role("button", name="Switch to dark").click()
    assert measure_brightness(page) < 40
    page = visit(color_scheme="light").open(zoo)
    page.emulate_media(color_scheme="dark")  # without a choice, the page follows the system
    wait_until(page, "() => document.documentElement.dataset.theme === 'dark'")
    assert measure_brightness(page) < 40


def test_storage_may_be_forbidden(visit: Callable[..., Visit], zoo: Path) -> None:
    started = visit(color_scheme="light")
    started.page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError'); } });"
        "history.replaceState = () => { throw new DOMException('no', 'SecurityError'); };"
    )
    page = started.open(zoo)
    page.get_by_role("button", name="Switch to dark").click()
    assert measure_brightness(page) < 40
    page.fill("#search", "animals/1")
    assert list_cards(page) == ["animals/10.jpg"]
    assert page.url.endswith("#q=animals%2F1")


@pytest.mark.parametrize("size", [PHONE, {"width": 320, "height": 600}])
def test_a_phone_is_wide_enough(visit: Callable[..., Visit], tmp_path: Path, zoo: Path, size: dict[str, int]) -> None:
    long = f"folder/{'a_very_long_name_without_a_place_to_break' * 4}.jpg"
    record = make_record(long, note="x" * 300, model="m" * 200, **predicted((1, "a label " * 20, 0.5)))
    page = visit(viewport=size, has_touch=True, is_mobile=True).open(write_gallery(tmp_path, [record], {}))

    def reach() -> float:
        right: float = page.evaluate(
            "Math.max(document.documentElement.scrollWidth, ...[...document.querySelectorAll("
            "'button, input, select, dd, h1, .card, .stack, figcaption, .note, #facts')].filter((each) => "
            "each.checkVisibility()).map((each) => each.getBoundingClientRect().right))"
        )
        return right

    assert reach() <= size["width"]
    page.locator("#more-button").click()
    page.get_by_text("Settings of the run").click()
    assert page.locator("#least").is_visible()
    assert reach() <= size["width"]
    page.locator(".card").click()
    expect(page.locator("#detail")).to_have_attribute("data-state", "ready")
    assert reach() <= size["width"]
    page = visit(viewport=size, is_mobile=True).open(zoo)
    boxes = [card.bounding_box() for card in page.locator("#grid li").all()]
    assert sum(box["y"] == boxes[0]["y"] for box in boxes) == (2 if size == PHONE else 1)


def test_missing_details_are_reported(visit: Callable[..., Visit], tmp_path: Path) -> None:
    folder = write_gallery(tmp_path, [make_record("a.jpg"), make_record("b.jpg")], {})
    started = visit()
    page = started.open(folder)
    shutil.rmtree(next((folder / "report").glob("details-*")))
    page.locator(".card").first.click()
    wait_for_detail(page, "a.jpg")
    assert "cannot be loaded." in page.locator(".note").inner_text()
    write_report(folder)
    page.keyboard.press("ArrowRight")  # details load again once the report is rewritten
    wait_for_detail(page, "b.jpg")
    assert page.locator("figure").count() == 1
    assert all("ERR_FILE_NOT_FOUND" in wrong for wrong in started.wrongs)
    started.wrongs.clear()


def test_an_overlay_that_is_gone_gives_way_to_its_view(visit: Callable[..., Visit], tmp_path: Path) -> None:
    folder = write_gallery(tmp_path, [make_record("a.jpg")], {"a.jpg": plain(GREEN)})
    (folder / "a-gradcam.jpg").unlink()
    started = visit()
    page = started.open(folder, "image=a.jpg")
    wait_for_detail(page, "a.jpg")
    wait_until(page, "() => document.querySelector('.overlay').src.endsWith('/report/views/a.0.jpg')")
    assert np.abs(colour_of(page.locator(".stack")) - RED).max() < 8
    assert all("ERR_FILE_NOT_FOUND" in wrong for wrong in started.wrongs)
    started.wrongs.clear()


def test_a_page_without_views_or_records(visit: Callable[..., Visit], tmp_path: Path) -> None:
    write_report(write_run(tmp_path / "none", []))
    page = visit().open(tmp_path / "none")
    assert count(page) == "0 images"
    assert page.locator("#nothing").inner_text() == "This run has no images."
    write_report(write_run(tmp_path / "bare", [make_record("a.jpg", explained=[make_result(None)])]))
    page = visit().open(tmp_path / "bare", "image=a.jpg")
    wait_for_detail(page, "a.jpg")
    assert page.locator("#fade-remark").inner_text() == "No overlays were written."
    page.keyboard.press("Escape")
    assert page.locator(".missing").inner_text() == "not available"


def test_without_javascript_the_page_says_what_it_needs(visit: Callable[..., Visit], zoo: Path) -> None:
    page = visit(java_script_enabled=False).open(zoo)
    assert page.get_by_text("needs JavaScript. The folder “report”").is_visible()
    assert not visit().open(zoo).get_by_text("needs JavaScript").is_visible()
    assert page.get_by_text("resnet50").first.is_visible()
