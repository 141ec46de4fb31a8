"""Test the page of one image in a real browser: every control, at phone and desktop width, dark and light."""

import http.server
import io
import itertools
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import gradcam
from gradcam import Classifier
from gradcam.targets import ClassTarget
from gradcam.web.page import MapSet, Page, PageTargets
from tests.browser import DESKTOP, PHONE, Visit, expect, is_remembered, needs_browser, wait_until

Photo = Callable[[str], Path]

pytestmark = [pytest.mark.slow, needs_browser]
Photo = Callable[[str], Path]  # the path of an asset
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script> & 'quoted'"
EVIDENCE = ("positive", "negative", "signed")


@pytest.fixture(scope="module")
def cat(classifier: gradcam.Classifier, photo: Photo, tmp_path_factory: pytest.TempPathFactory) -> Page:
    options: Any = {"layers": ["layer4", "head.0"], "methods": ["gradcam", "layercam"], "top": 6}
    page = gradcam.page(photo("cat_and_espresso.jpg"), classifier, **options)
    tests = [{"question": "Does it differ?", "outcome": "passed", "reason": "It does."}]
    verdict = {"of": "Of this map.", "outcome": "undecided", "summary": "Who knows.", "tests": tests}
    return page.with_verdict(verdict)


@pytest.fixture(scope="module")
def file(cat: Page, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "cat.html"
    cat.save(path)
    return path


@pytest.fixture
def go(visit: Callable[..., Visit], file: Path) -> Callable[..., Any]:
    def start(path: Path = file, **options: Any) -> Any:
        page = visit(**options).page
        page.goto(path.as_uri())
        return page

    return start


def read_target_name(page: Any) -> str:
    text: str = page.locator("#shown-name").inner_text()
    return text


def read_headline(page: Any) -> str:
    text: str = page.locator("#shown").inner_text()
    return text


def find_option(page: Any, name: str) -> Any:
    """Return the row of a target, which may lie outside the visible part of the list."""
    page.fill("#search", name)
    return page.locator("#targets [role=option]").first


def facts(page: Any) -> str:
    text: str = page.locator("#shown-facts").inner_text()
    return text


def pixels(page: Any, canvas: str = "#heatmap") -> Any:
    """Return the RGBA values of the drawn heatmap, without the image."""
    scores = page.locator(canvas).evaluate(
        """(it) => {
            const copy = Object.assign(document.createElement("canvas"), { width: it.width, height: it.height });
            const context = copy.getContext("2d", { willReadFrequently: true });
            context.drawImage(it, 0, 0);
            return [it.width, it.height, [...context.getImageData(0, 0, it.width, it.height).data]];
        }"""
    )
    return np.array(scores[2], np.uint8).reshape(scores[1], scores[0], 4)


def choose_tab(page: Any, tab: str, viewport: dict[str, int]) -> None:
    """Show a list that a phone shows only if its tab is chosen."""
    if viewport["width"] <= 640:
        page.locator(f"#tabs input[value={tab}]").check(force=True)


def choose(page: Any, group: str, value: str) -> None:
    page.locator(f"#{group} input[value='{value}']").check(force=True)


def at(page: Any, across: float, down: float) -> tuple[float, float]:
    """Return the screen position of a point in the region that the network sees."""
    box = page.locator("#seen").bounding_box()
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def expected_overlay(classifier: Classifier, picture: Path, index: int, **options: Any) -> Any:
    look = {"base": "color"} | {name: options.pop(name) for name in ("colormap", "alpha") if name in options}
    explanation = classifier.explain(picture, options.pop("layer", "layer4"), target=index, **options)
    y0, x0, height, width = explanation.regions[0]
    return explanation.overlay(outline=False, **look)[y0 : y0 + height, x0 : x0 + width].astype(float), explanation


def drawn_overlay(page: Any, explanation: Any) -> Any:
    """Return the image with the page's canvas blended over it, at the size of the region."""
    y0, x0, height, width = explanation.regions[0]
    heat = np.asarray(Image.fromarray(pixels(page)).resize((width, height), Image.Resampling.BILINEAR), float)
    alpha = heat[..., 3:] / 255
    picture = explanation.images[0][y0 : y0 + height, x0 : x0 + width].astype(float)
    return picture * (1 - alpha) + heat[..., :3] * alpha


@pytest.mark.parametrize("evidence", EVIDENCE)
@pytest.mark.parametrize("colormap", ["turbo", "viridis", "cividis"])
def test_the_heatmap_is_drawn_as_the_package_draws_it(
    go: Callable[..., Any], classifier: gradcam.Classifier, photo: Photo, evidence: str, colormap: str
) -> None:
    page = go()
    page.select_option("#colours", colormap)
    choose(page, "evidence", evidence)
    assert page.locator("#colours").is_disabled() == (evidence == "signed")  # It has its own colours.
    page.locator("#opacity").fill("80")
    picture = photo("cat_and_espresso.jpg")
    expected, explanation = expected_overlay(classifier, picture, 285, evidence=evidence, colormap=colormap, alpha=0.8)
    assert np.abs(drawn_overlay(page, explanation) - expected).mean() < 2.5
    other_class, _ = expected_overlay(classifier, picture, 967, evidence=evidence, colormap=colormap, alpha=0.8)
    # The overlay of another class differs clearly.
    assert np.abs(drawn_overlay(page, explanation) - other_class).mean() > 8


def test_the_list_has_all_classes_the_most_probable_first(go: Callable[..., Any], cat: Page) -> None:
    page = go()
    options = page.locator("#targets [role=option]")
    assert options.first.get_attribute("aria-setsize") == "1000"
    assert options.first.inner_text().split("\n") == ["Egyptian cat", "58 %"]
    assert read_headline(page) == "The network looked mostly here to say Egyptian cat (58 %)."
    page.locator("#targets").evaluate("(list) => { list.scrollTop = 1e9; }")
    page.wait_for_timeout(200)
    assert options.last.get_attribute("aria-posinset") == "1000"
    assert options.count() < 60  # Only the rows in view exist.
    assert page.locator("#counted").inner_text() == "1,000 classes"
    assert page.title() == "cat_and_espresso.jpg · Grad-CAM"


def test_a_click_the_arrow_keys_and_a_name_switch_the_class(go: Callable[..., Any]) -> None:
    page = go()
    before = pixels(page)
    page.locator("#targets [role=option]").nth(1).click()
    assert read_target_name(page) == "espresso"
    assert (pixels(page) != before).any()
    assert page.locator("#targets [aria-selected=true]").all_inner_texts()[0].startswith("espresso")
    assert "espresso" in page.locator("#said").inner_text()
    page.keyboard.press("ArrowDown")
    assert read_target_name(page) == "consomme"
    page.keyboard.press("ArrowUp")
    assert read_target_name(page) == "espresso"
    page.keyboard.press("End")
    last = read_target_name(page)
    assert page.locator("#targets [aria-selected=true]").bounding_box()["y"] < 800  # it is brought into view
    page.keyboard.press("Home")
    assert read_target_name(page) == "Egyptian cat" != last
    page.keyboard.press("/")
    page.keyboard.type("tripod")
    assert read_target_name(page) == "tripod"
    assert page.locator("#counted").inner_text() == "1 of 1,000"
    page.keyboard.press("Escape")
    assert page.locator("#search").input_value() == ""
    assert page.locator("#targets [role=option]").first.get_attribute("aria-setsize") == "1000"
    page.locator("#targets").focus()
    page.keyboard.type("cup")  # Typing in the list continues in the search field.
    assert read_target_name(page) == "cup"
    page.fill("#search", "967")
    assert read_target_name(page) == "espresso"
    page.fill("#search", "nothing is called this")
    assert page.locator("#counted").inner_text() == "No matches."
    assert read_target_name(page) == "espresso"


def test_layers_and_methods_are_tabs(go: Callable[..., Any], cat: Page) -> None:
    page = go()
    assert "gradcam at layer4 · 7 × 7 cells" in facts(page)
    before = pixels(page)
    choose(page, "layers", "head.0")
    assert "gradcam at head.0" in facts(page)
    assert (pixels(page) != before).any()
    choose(page, "methods", "layercam")
    assert "layercam at head.0" in facts(page)
    assert page.locator("#evidence input[value=signed]").is_disabled()  # it has no signs
    assert page.locator("#counted").inner_text() == "1,000 classes, 6 with heatmaps"
    find_option(page, "tripod").click()
    assert "has no heatmap of" in page.locator("#blank").inner_text()
    assert not pixels(page)[..., 3].any()
    page.keyboard.press("Escape")
    page.locator("#targets").focus()
    page.keyboard.press("Home")
    page.keyboard.press("[")
    assert "layercam at layer4" in facts(page)
    assert page.locator(".masthead a[href='#notes']").inner_text() == str(len(cat.notes))
    assert "6 of 1000 classes" in page.locator("#notes").inner_text()


def test_hovering_lists_the_targets_that_a_cell_supports(go: Callable[..., Any], cat: Page) -> None:
    page = go()
    values = cat.maps[0].maps
    for across, down in ((0.2, 0.3), (0.8, 0.4)):
        page.mouse.move(*at(page, across, down))
        row, column = int(down * 7), int(across * 7)
        order = list(np.argsort(-values[:, row, column])[:8])
        if cat.first not in order:  # The chosen class is always listed.
            order[-1] = cat.first
        names = page.locator("#place .label").all_inner_texts()
        assert names == [cat.targets.names[k] for k in order]
        numbers = [
            int(text.removesuffix(" %").replace("−", "-")) for text in page.locator("#place .number").all_inner_texts()
        ]
        # 100 % is the strongest cell of any class, so that a weak cell has small numbers.
        for number, k in zip(numbers, order):
            assert abs(number - 100 * values[k, row, column] / values.max()) < 2
    page.mouse.move(5, 5)
    assert page.locator("#place li").count() == 0


def test_a_click_keeps_the_place(go: Callable[..., Any]) -> None:
    page = go()
    page.mouse.click(*at(page, 0.2, 0.3))
    names = page.locator("#place .label").all_inner_texts()
    page.mouse.move(*at(page, 0.8, 0.4))
    assert page.locator("#place .label").all_inner_texts() == names
    assert page.locator("#cell").is_visible()
    choose(page, "layers", "head.0")  # Changing the layer keeps the selected cell.
    assert page.locator("#cell").is_visible()
    page.locator("#place .pick").nth(1).click()
    assert read_target_name(page) == page.locator("#place .label").nth(1).inner_text()
    page.locator("#release").click()
    assert page.locator("#release").is_hidden()
    page.mouse.click(*at(page, 0.2, 0.3))
    page.keyboard.press("Escape")
    assert page.locator("#cell").is_hidden()


def test_the_keys_move_over_the_picture(go: Callable[..., Any], cat: Page) -> None:
    page = go()
    page.locator("#stage").focus()
    page.keyboard.press("ArrowDown")  # The first key press selects the middle cell.
    page.keyboard.press("ArrowLeft")
    values = cat.maps[0].maps
    assert page.locator("#place .label").first.inner_text() == cat.targets.names[int(values[:, 3, 2].argmax())]
    page.keyboard.press("Enter")
    assert page.locator("#release").is_visible()
    assert page.locator("#said").inner_text().startswith("Strongest evidence in this cell: ")


def test_two_classes_are_compared(go: Callable[..., Any], classifier: gradcam.Classifier, photo: Photo) -> None:
    page = go()
    page.locator("#against").check()
    assert read_headline(page) == "Warm parts are evidence for Egyptian cat, cold parts for espresso."
    picture = photo("cat_and_espresso.jpg")
    target = ClassTarget(285, score="contrast", against=[967])
    explanation = classifier.explain(picture, "layer4", target=target, evidence="signed")
    y0, x0, height, width = explanation.regions[0]
    overlay = explanation.overlay(outline=False, base="color")
    expected = overlay[y0 : y0 + height, x0 : x0 + width].astype(float)
    assert np.abs(drawn_overlay(page, explanation) - expected).mean() < 2.5
    command = page.locator("#command").inner_text()
    score = "--score contrast --against 967"
    assert command.endswith(f"--class 285 {score} --layer layer4 --method gradcam --evidence signed --base color")
    assert page.locator("#legend-high").inner_text() == "for Egyptian cat"
    page.locator("#targets [role=option]").nth(4).click()  # The list selects the second class.
    assert read_headline(page) == "Warm parts are evidence for Egyptian cat, cold parts for soup bowl."
    page.locator("#swap").click()
    assert read_headline(page) == "Warm parts are evidence for soup bowl, cold parts for Egyptian cat."
    page.locator("input[name=side][value=a]").check(force=True)
    page.locator("#targets [role=option]").nth(0).click()
    assert "The two heatmaps are equal." in page.locator("#blank").inner_text()
    page.locator("#against").uncheck()
    assert read_target_name(page) == "Egyptian cat"


def test_opacity_colours_cells_and_outline(go: Callable[..., Any]) -> None:
    page = go()
    opacity = page.locator("#opacity")
    opacity.fill("100")
    assert pixels(page)[..., 3].max() == 255
    opacity.fill("0")
    assert pixels(page)[..., 3].max() == 0
    opacity.fill("50")
    page.select_option("#colours", "grey")
    rgba = pixels(page)
    opaque = rgba[rgba[..., 3] == rgba[..., 3].max()]
    assert (np.ptp(opaque[:, :3].astype(int), axis=1) <= 2).all()
    choose(page, "cells", "raw")
    assert pixels(page).shape == (7, 7, 4)
    assert page.locator("#heatmap").evaluate("(it) => getComputedStyle(it).imageRendering") == "pixelated"
    choose(page, "cells", "smooth")
    assert pixels(page).shape == (256, 256, 4)
    assert page.locator("#seen").is_visible()
    page.locator("#outline").uncheck()
    assert page.locator("#seen").is_hidden()


def test_the_heatmap_lies_on_what_the_network_saw(go: Callable[..., Any], cat: Page) -> None:
    page = go()
    picture, heat = (page.locator(item).bounding_box() for item in ("#image", "#heatmap"))
    y0, x0, height, width = cat.region
    scale = picture["width"] / 800
    for length, expected in (
        (heat["x"] - picture["x"], x0), (heat["y"] - picture["y"], y0), (heat["width"], width), (heat["height"], height)
    ):  # fmt: skip
        assert abs(length - expected * scale) < 1


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_side_by_side(go: Callable[..., Any], viewport: dict[str, int]) -> None:
    page = go(viewport=viewport)
    assert page.locator("#plain").is_hidden()
    choose_tab(page, "controls", viewport)
    page.locator("#beside").check()
    boxes = [page.locator(item).bounding_box() for item in ("#stage", "#plain")]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[1]["x"] >= boxes[0]["x"] + boxes[0]["width"]
    assert boxes[1]["x"] + boxes[1]["width"] <= viewport["width"]


def test_what_is_copied(go: Callable[..., Any], classifier: gradcam.Classifier, photo: Photo) -> None:
    page = go()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    choose(page, "evidence", "negative")
    page.select_option("#colours", "viridis")
    page.locator("#opacity").fill("70")
    page.locator("#copy-command").click()
    command = page.evaluate("navigator.clipboard.readText()")
    assert command == (
        "gradcam run cat_and_espresso.jpg --class 285 --layer layer4 --method gradcam --evidence negative "
        "--base color --colormap viridis --alpha 0.7"
    )
    expect(page.locator("#copy-command")).to_have_text("Copied")
    page.locator("#copy-python").click()
    code = page.evaluate("navigator.clipboard.readText()")
    code = code.replace('"cat_and_espresso.jpg"', repr(str(photo("cat_and_espresso.jpg"))))
    namespace: dict[str, Any] = {}
    exec(code.rpartition("\n")[0], namespace)  # Runs all but the line that saves the file.
    expected = (
        namespace["explanation"].overlay(outline=False, base="color", colormap="viridis", alpha=0.7).astype(float)
    )
    explanation = namespace["explanation"]
    y0, x0, height, width = explanation.regions[0]
    assert np.abs(drawn_overlay(page, explanation) - expected[y0 : y0 + height, x0 : x0 + width]).mean() < 2.5


def test_the_picture_is_downloaded(go: Callable[..., Any], cat: Page, tmp_path: Path) -> None:
    page = go()
    with page.expect_download() as waiting:
        page.locator("#download").click()
    assert waiting.value.suggested_filename == "cat_and_espresso-gradcam-Egyptian_cat-layer4.png"
    waiting.value.save_as(tmp_path / "a.png")
    image = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).astype(int)
    assert image.shape == (640, 800, 3)
    assert np.abs(image[:30] - cat.image[:30]).mean() < 4  # Outside the region, the image is unchanged.
    assert np.abs(image[100:500, 150:350] - cat.image[100:500, 150:350]).mean() > 15


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_and_light(go: Callable[..., Any], scheme: str) -> None:
    def is_dark() -> bool:
        ground: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, ground[4:-1].split(","))) < 200

    page = go(color_scheme=scheme)
    assert is_dark() == (scheme == "dark")
    page.locator("#theme-button").click()
    assert is_dark() == (scheme == "light")
    assert is_remembered(page, lambda: is_dark() == (scheme == "light"))


def test_keys_and_the_verdict(go: Callable[..., Any]) -> None:
    page = go()
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("e")
    assert "evidence against" in facts(page)
    page.keyboard.press("s")
    assert page.locator("#plain").is_visible()
    assert page.locator("#verdict").inner_text().split()[:2] == ["Check", "undecided"]
    assert "It does." in page.locator("#verdict").inner_text()
    page.get_by_role("link", name="undecided").click()
    assert page.url.endswith("#verdict")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_is_wider_than_the_screen(go: Callable[..., Any], viewport: dict[str, int]) -> None:
    page = go(viewport=viewport)
    page.locator("#against").check()
    page.mouse.click(*at(page, 0.3, 0.3))
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    for name, tab in (
        ("#stage", "list"),
        ("#targets", "list"),
        ("#controls", "controls"),
        ("#place", "place"),
        ("#command", "place"),
    ):
        choose_tab(page, tab, viewport)
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= viewport["width"]


def test_a_phone_is_touched(go: Callable[..., Any]) -> None:
    page = go(viewport=PHONE, has_touch=True, is_mobile=True)
    page.touchscreen.tap(*at(page, 0.2, 0.3))
    assert page.locator("#place li").count() == 8
    assert page.locator("#release").is_visible()
    assert page.locator("#targets").is_hidden()  # The tap opens the sheet with the evidence in the cell.
    page.locator("#tabs label").first.tap()
    page.locator("#targets [role=option]").nth(1).tap()
    assert read_target_name(page) == "espresso"


def test_the_page_lives_in_a_notebook_without_a_kernel(cat: Page, visit: Callable[..., Visit], tmp_path: Path) -> None:
    (tmp_path / "viewer.html").write_text(f"<!doctype html><meta charset=utf-8><body>{cat._repr_html_()}", "utf-8")
    page = visit().page
    page.goto((tmp_path / "viewer.html").as_uri())
    inside = page.frame_locator("iframe")
    inside.locator("#targets [role=option]").nth(1).click()
    assert inside.locator("#shown-name").inner_text() == "espresso"
    inside.locator("#copy-command").click()
    expect(inside.locator("#copy-command")).to_have_text("Copied")


def test_boxes_are_marked_and_hostile_texts_are_texts(go: Callable[..., Any], cat: Page, tmp_path: Path) -> None:
    maps = MapSet("layer4", HOSTILE, "signed", np.arange(18, dtype=np.float32).reshape(2, 3, 3) - 9)
    boxes, words = [[80, 64, 400, 320], None], [["--box", "it's"], None]
    targets = PageTargets("box", [HOSTILE, "cup"], [1, 2], [0.9, None], boxes, words, ["x", None])
    texts: Any = {"name": f"{HOSTILE}.jpg", "notes": [HOSTILE], "model": HOSTILE}
    page_of = replace(cat, targets=targets, maps=[maps], verdict=None, first=0, **texts)
    page_of.save(tmp_path / "hostile.html")
    page = go(tmp_path / "hostile.html")
    assert page.locator("#targets [role=option]").count() == 2
    assert page.locator("#counted").inner_text() == "2 boxes"
    assert page.locator("#targets .outlined").count() == 1  # The second has no box, and so no colour.
    assert HOSTILE in read_target_name(page)
    assert (pixels(page, "#objects")[96:480, 120:124, 3] > 0).any()  # the left edge of the box, at 1.5 times its size
    assert not pixels(page, "#objects")[200, 200:500, 3].any()
    assert """--box 'it'\\''s'""" in page.locator("#command").inner_text()
    assert page.locator(".frame img").count() == 2
    page.locator("#targets [role=option]").nth(1).click()
    assert page.locator("#command").inner_text().startswith("#")


def test_the_gallery_leads_to_the_pages_and_back(visit: Callable[..., Visit], photo: Photo, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from gradcam.cli import cli

    (tmp_path / "photos").mkdir()
    shutil.copy(photo("coffee.jpg"), tmp_path / "photos")
    shutil.copy(photo("rocket.jpg"), tmp_path / "photos")
    words = ["page", str(tmp_path / "photos"), "-o", str(tmp_path / "pages"), "--layer", "layer4", "-q"]
    assert CliRunner().invoke(cli, words, standalone_mode=False).return_value == 0
    page = visit().open(tmp_path / "pages")
    page.locator("#grid .card").first.click()
    page.get_by_role("link", name="Explore all heatmaps").click()
    expect(page.locator("#shown-name")).to_have_text("espresso")
    page.get_by_role("link", name="Gallery").click()
    expect(page.locator("#grid .card")).to_have_count(2)


SIZES = [(1280, 720), (1366, 768), (1440, 900), (1920, 1080), (820, 1180), (390, 844)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_all_parts_are_in_view_and_nothing_overlaps(go: Callable[..., Any], size: tuple[int, int]) -> None:
    width, height = size
    page = go(viewport={"width": width, "height": height})
    page.mouse.move(*at(page, 0.4, 0.4))
    parts = {"#stage", "#targets", "#search", "#place li:last-child", "#evidence", "#download", "#shown"}
    if width < 640:  # A phone shows one list at a time below the image.
        parts = {"#stage", "#targets", "#search", "#shown", "#tabs"}
    boxes = {part: page.locator(part).bounding_box() for part in parts}
    for part, box in boxes.items():
        assert box["x"] >= 0, part
        assert box["y"] >= 0, part
        assert box["x"] + box["width"] <= width, part
        assert box["y"] + box["height"] <= height, part
    for first, second in itertools.combinations(sorted(parts), 2):
        a, b = boxes[first], boxes[second]
        is_beside = a["x"] + a["width"] <= b["x"] + 1 or b["x"] + b["width"] <= a["x"] + 1
        assert is_beside or a["y"] + a["height"] <= b["y"] + 1 or b["y"] + b["height"] <= a["y"] + 1, (first, second)
    areas = {part: box["width"] * box["height"] for part, box in boxes.items()}
    assert max(areas, key=lambda part: areas[part]) == "#stage"
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_each_tab_of_a_phone_is_in_view_below_the_image(go: Callable[..., Any]) -> None:
    page = go(viewport=PHONE)
    for tab, part in (("place", "#place-hint"), ("controls", "#evidence"), ("list", "#targets")):
        choose_tab(page, tab, PHONE)
        assert page.locator("#stage").bounding_box()["y"] >= 0
        box = page.locator(part).bounding_box()
        assert page.locator("#tabs").bounding_box()["y"] < box["y"]
        assert box["y"] + box["height"] <= PHONE["height"]


def test_without_javascript_image_first_heatmap_and_names_are_visible(
    visit: Callable[..., Visit], file: Path, cat: Page
) -> None:
    page = visit(java_script_enabled=False).page
    page.goto(file.as_uri())
    for part in ("#image", "#first-map"):
        assert page.locator(part).bounding_box()["width"] > 300
    assert read_headline(page) == "The network looked mostly here to say Egyptian cat (58 %)."
    assert page.locator("#targets").inner_text().split("\n")[:2] == ["Egyptian cat 58 %", "espresso 11 %"]
    assert page.locator("#evidence").is_hidden()  # Controls without a script would do nothing.
    screenshot = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB")).astype(int)
    stage, (y0, x0, height, width) = page.locator("#stage").bounding_box(), cat.region
    scale = stage["width"] / 800
    top, left = int(stage["y"] + y0 * scale), int(stage["x"] + x0 * scale)
    part = screenshot[top : top + int(height * scale), left : left + int(width * scale / 2)]
    assert (part.max(2) - part.min(2)).mean() > 60  # The heatmap's colours are strong, and the cat's fur is not.


def test_a_link_opens_the_same_view(go: Callable[..., Any], file: Path) -> None:
    page = go()
    choose(page, "layers", "head.0")
    find_option(page, "espresso").click()
    page.select_option("#colours", "viridis")
    choose(page, "evidence", "signed")
    choose(page, "cells", "raw")
    page.locator("#opacity").fill("80")
    page.mouse.click(*at(page, 0.2, 0.3))
    wait_until(page, "location.hash.includes('place')")
    address, headline, before = page.url, read_headline(page), pixels(page)
    places = page.locator("#place .label").all_inner_texts()
    page.goto("about:blank")
    page.goto(address)
    assert read_headline(page) == headline == "Warm parts are evidence for espresso (11 %), cold parts against it."
    assert "head.0" in facts(page)
    assert (pixels(page) == before).all()
    assert page.locator("#place .label").all_inner_texts() == places
    page.goto("about:blank")
    page.goto(f"{file.as_uri()}#target=967&against=285")
    assert read_headline(page) == "Warm parts are evidence for espresso, cold parts for Egyptian cat."
    for wrong in ("#target=5000&layer=none&place=a,b&opacity=900&evidence=x", "#target=-1", "#%E0%A4%A"):
        page.goto("about:blank")
        page.goto(file.as_uri() + wrong)
        assert read_target_name(page) == "Egyptian cat"


def test_zoom_and_drag_move_the_image_and_the_cells(go: Callable[..., Any]) -> None:
    page = go()
    before = page.locator("#seen").bounding_box()
    page.mouse.move(*at(page, 0.2, 0.3))
    name = page.locator("#place .label").first.inner_text()
    page.locator("#zoom-in").click()
    page.locator("#zoom-in").click()
    after = page.locator("#seen").bounding_box()
    assert after["width"] == pytest.approx(2.25 * before["width"], rel=0.01)
    page.mouse.move(640, 300)
    stage = page.locator("#stage").bounding_box()
    x, y = stage["x"] + stage["width"] / 2, stage["y"] + stage["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 100, y + 50, steps=4)
    page.mouse.up()
    moved = page.locator("#seen").bounding_box()
    assert moved["x"] - after["x"] == pytest.approx(100, abs=2)
    assert page.locator("#release").is_hidden()  # Dragging pins no cell.
    page.mouse.move(*at(page, 0.2, 0.3))
    assert page.locator("#place .label").first.inner_text() == name  # The cell under the pointer is the same.
    page.locator("#zoom-reset").click()
    assert page.locator("#seen").bounding_box() == before


def test_small_heatmaps_show_classes_and_layers(go: Callable[..., Any], cat: Page) -> None:
    page = go()
    page.locator("#multiples-shown").check()
    labels = page.locator("#multiples .label").all_inner_texts()
    assert labels[:2] == ["Egyptian cat", "espresso"]
    assert labels[5:] == [f"{maps.method} at {maps.layer}" for maps in cat.maps]
    page.locator("#multiples button").nth(1).click()
    assert read_target_name(page) == "espresso"
    page.get_by_role("button", name="gradcam at head.0").click()
    assert "gradcam at head.0" in facts(page)
    assert pixels(page, "#multiples button:nth-child(8) canvas")[..., 3].any()


def test_letters_can_be_switched_off_and_work_in_capitals(go: Callable[..., Any]) -> None:
    page = go()
    page.keyboard.press("E")
    assert "evidence against" in facts(page)
    page.locator("#help-button").click()
    page.locator("#letters").uncheck()
    page.keyboard.press("Escape")
    for key in ("e", "s", "/", "?", "["):
        page.keyboard.press(key)
    assert "evidence against" in facts(page)
    assert page.locator("#plain").is_hidden()
    assert page.locator("#help").is_hidden()
    assert is_remembered(page, lambda: not page.locator("#letters").is_checked())


def test_arrow_keys_scroll_the_page_outside_of_the_list(go: Callable[..., Any]) -> None:
    page = go()
    page.keyboard.press("PageDown")
    wait_until(page, "scrollY > 100")
    assert read_target_name(page) == "Egyptian cat"


def test_the_chosen_row_is_distinct_in_forced_colours(go: Callable[..., Any]) -> None:
    page = go(forced_colors="active")
    script = "(row) => getComputedStyle(row).backgroundColor"
    chosen = page.locator("#targets [aria-selected=true]").evaluate(script)
    assert chosen != page.locator("#targets [aria-selected=false]").first.evaluate(script)


def test_masks_are_drawn_and_clicked(go: Callable[..., Any], cat: Page, tmp_path: Path) -> None:
    page_data = cat.to_data()
    mask = {"shape": [4, 4], "runs": [0, 2, 2, 2, 10]}  # the upper left quarter
    other = {"shape": [4, 4], "runs": [10, 2, 2, 2]}  # the lower right quarter
    targets = {
        "kind": "mask",
        "names": ["cat", "cup"],
        "indices": [1, 2],
        "shares": [None, None],
        "areas": [0.25, 0.25],
    }
    page_data = {**page_data, "targets": targets | {"masks": [mask, other]}, "first": 0, "verdict": None}
    maps = MapSet("layer4", "gradcam", "signed", np.arange(32, dtype=np.float32).reshape(2, 4, 4) - 9)
    page_data |= {"maps": [maps.to_data(2)]}
    text = re.sub(
        r'(id="data">).*?(</script>)',
        lambda match: match[1] + json.dumps(page_data) + match[2],
        cat.to_html(),
        flags=re.S,
    )
    (tmp_path / "masks.html").write_text(text, "utf-8")
    page = go(tmp_path / "masks.html")
    assert page.locator("#targets [role=option]").all_inner_texts() == ["cat\n25 %", "cup\n25 %"]
    drawn = pixels(page, "#objects")
    assert drawn[100, 598:602, 3].all()  # the right edge of the first mask
    assert not drawn[100, 100:500, 3].any()
    stage = page.locator("#stage").bounding_box()
    page.mouse.click(stage["x"] + 0.8 * stage["width"], stage["y"] + 0.8 * stage["height"])
    assert read_headline(page) == "The network looked mostly here to segment cup (25 % of the image)."
    page.locator("#objects-shown").uncheck()
    assert page.locator("#objects").is_hidden()


def test_a_caption_is_a_sentence_whose_words_are_pointed_at(go: Callable[..., Any], cat: Page, tmp_path: Path) -> None:
    words = ["a", " cat", " sleeps"]
    targets = {
        "kind": "word",
        "names": ["word 0, a", "word 1, cat", "word 2, sleeps"],
        "indices": [None] * 3,
        "shares": [0.9, 0.8, 0.7],
        "texts": words,
    }
    maps = MapSet("layer4", "gradcam", "signed", np.random.default_rng(0).random((3, 4, 4), np.float32))
    page_data = cat.to_data() | {"targets": targets, "first": 0, "verdict": None, "maps": [maps.to_data(3)]}
    text = re.sub(
        r'(id="data">).*?(</script>)',
        lambda match: match[1] + json.dumps(page_data) + match[2],
        cat.to_html(),
        flags=re.S,
    )
    (tmp_path / "caption.html").write_text(text, "utf-8")
    page = go(tmp_path / "caption.html")
    assert page.locator("#sentence").inner_text().split() == ["a", "cat", "sleeps"]
    before = pixels(page)
    page.locator("#sentence button").nth(2).hover()
    assert read_headline(page) == "The network looked mostly here to write sleeps (70 %)."
    assert (pixels(page) != before).any()


@pytest.fixture
def slow_address(file: Path) -> Iterator[str]:
    """Serve the page in two parts, with a pause before its data, so that the browser paints it without them."""
    first, mark, rest = file.read_bytes().partition(b'<script type="application/json"')

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(first)
            self.wfile.flush()
            time.sleep(0.7)
            self.wfile.write(mark + rest)

        def log_message(self, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_moves_after_the_first_paint(browser: Any, slow_address: str, viewport: dict[str, int]) -> None:
    page = Visit(browser, viewport=viewport).page
    page.add_init_script(
        """window.shift = 0;
        new PerformanceObserver((list) => { for (const entry of list.getEntries()) window.shift += entry.value; })
            .observe({ type: "layout-shift", buffered: true });"""
    )
    page.goto(slow_address)
    page.wait_for_timeout(700)
    assert page.evaluate("window.shift") < 0.05
    page.context.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the script of axe-core from npm. The test is skipped if npm is not available."""
    if (npm := shutil.which("npm")) is None:
        pytest.skip("there is no npm")
    folder = tmp_path_factory.mktemp("axe")
    words = [npm, "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", "axe-core@4"]
    try:
        subprocess.run(words, check=True, capture_output=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("npm has no axe-core to give")
    return (folder / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("colours", ["light", "dark", "forced"])
def test_accessibility(go: Callable[..., Any], axe: str, viewport: dict[str, int], colours: str) -> None:
    scheme = {"forced_colors": "active"} if colours == "forced" else {"color_scheme": colours}
    page = go(viewport=viewport, bypass_csp=True, **scheme)
    page.locator("#against").check()
    page.mouse.click(*at(page, 0.3, 0.3))
    page.evaluate(axe)
    data = json.loads(page.evaluate("async () => JSON.stringify((await axe.run()).violations)"))
    faults = [item for item in data if item["impact"] in ("serious", "critical", "moderate")]
    message = [(item["impact"], item["id"], [node["html"][:120] for node in item["nodes"][:3]]) for item in faults]
    assert message == []
