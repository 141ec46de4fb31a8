"""Test the local page in a real browser: every control, phone and desktop, dark and light, and errors."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import gradcam
from tests.browser import DESKTOP, PHONE, Visit, expect, needs_browser, wait_until
from tests.ui.serving import HOSTILE, MODELS, Serving, make_bomb, serve
from tests.web.test_page_browser import SIZES, axe, choose, choose_tab, pixels, read_target_name

__all__ = ["axe"]  # a fixture
pytestmark = [pytest.mark.slow, needs_browser]
Go = Callable[..., Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ui")
    (folder / "mine.py").write_text(MODELS)
    return folder


@pytest.fixture(scope="module")
def serving(place: Path, photo: Callable[[str], Path]) -> Iterator[Serving]:
    strip = place / "strip"
    strip.mkdir()
    for name in ("cat_and_espresso.jpg", "coffee.jpg"):
        (strip / name).write_bytes(photo(name).read_bytes())
    with serve("strip", "--allow-code", folder=place) as server:
        yield server


@pytest.fixture
def go(browser: Any, serving: Serving) -> Iterator[Go]:
    visits: list[Visit] = []

    def start(**options: Any) -> Any:
        visits.append(Visit(browser, **options))
        page = visits[-1].page
        page.goto(serving.address)
        expect(page.locator("#shown-name")).not_to_be_empty()
        return page

    yield start
    for visit in visits:
        assert [request for request in visit.requests if not request.startswith((serving.base, "data:"))] == []
        # The browser logs every 4xx status. Tests cause these on purpose, and the page explains them.
        assert [error for error in visit.wrongs if "status of 4" not in error] == []
        visit.context.close()


def drag(page: Any, *places: tuple[float, float], release: bool = True) -> None:
    page.locator("#stage").scroll_into_view_if_needed()
    box = page.locator("#stage").bounding_box()
    points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in places]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=4)
    if release:
        page.mouse.up()


def send_files(page: Any, *files: tuple[str, bytes], by: str = "drop") -> None:
    """Send drop or paste events with files, as a user's action does."""
    page.evaluate(
        """([files, kind]) => {
            const carried = new DataTransfer();
            for (const [name, text] of files) {
                const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
                carried.items.add(new File([bytes], name));
            }
            const event = kind === "drop"
                ? new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true })
                : new ClipboardEvent("paste", { clipboardData: carried, bubbles: true, cancelable: true });
            document.body.dispatchEvent(event);
        }""",
        [[[name, base64.b64encode(data).decode()] for name, data in files], by],
    )


def open_settings(page: Any) -> None:
    """Open the settings, which are closed on small screens."""
    if page.locator("#controls").get_attribute("open") is None:
        page.locator("#controls summary").click()


def command(page: Any) -> str:
    text: str = page.locator("#command").inner_text()
    return text


@pytest.mark.parametrize(("viewport", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_a_dropped_picture_is_explained_and_a_brush_is_followed(
    go: Go, photo: Callable[[str], Path], tmp_path: Path, viewport: dict[str, int], scheme: str
) -> None:
    page = go(viewport=viewport, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("html").get_attribute("data-theme") == scheme
    send_files(page, ("koala.webp", photo("koala.webp").read_bytes()))
    expect(page.locator("#title")).to_have_text("koala.webp")
    expect(page.locator("#shown-name")).to_have_text("koala")
    expect(page.locator("#strip button[aria-pressed=true]")).to_have_text("koala.webp")
    before = pixels(page)
    choose_tab(page, "brush", viewport)
    page.locator("#tools input[value='brush']").check(force=True)
    page.locator("#kinds input[value='mean']").check(force=True)
    page.locator("#size").fill("25")
    drag(page, (0.35, 0.4), (0.65, 0.6), release=False)
    expect(page.locator("#brushed")).to_contain_text("before the edit")
    page.mouse.up()
    expect(page.locator("#undo")).to_be_enabled()
    assert not np.array_equal(pixels(page), before)
    match = re.fullmatch(r"gradcam run koala.webp --edit (mean:[\d:.,+]+) --class (\d+) .*", command(page))
    assert match, command(page)
    assert f'["{match[1]}"]' in page.locator("#python").inner_text()
    words = [*command(page).split()[1:], "-o", str(tmp_path / "edited.png"), "--json"]
    words[1] = str(photo("koala.webp"))
    stdout = subprocess.run(
        [sys.executable, "-m", "gradcam", *words], capture_output=True, text=True, check=True
    ).stdout
    share = next(load["probability"] for load in json.loads(stdout)["predictions"])
    top = page.locator("#targets [role=option] .number").first.inner_text()
    assert abs(float(top.split()[0].replace("<", "")) / 100 - share) < 0.01, (
        "the copied command sees what the page shows"
    )
    page.locator("#undo").click()
    expect(page.locator("#undo")).to_be_disabled()
    assert "--edit" not in command(page)
    assert (pixels(page) == before).all()


def test_a_window_is_moved_and_kept_by_mouse_and_by_keys(go: Go) -> None:
    page = go()
    assert page.locator("#kinds, #size").evaluate_all("(parts) => parts.map((part) => part.disabled)") == [True, True]
    page.locator("#tools input[value='window']").check(force=True)
    page.locator("#kinds input[value='erase']").check(force=True)
    box = page.locator("#stage").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"], steps=3)
    expect(page.locator("#brushed")).to_contain_text("before the edit")
    assert "--edit" not in command(page)
    assert "edited image" in page.locator("#shown-facts").inner_text()
    page.mouse.down()
    page.mouse.up()
    expect(page.locator("#command")).to_contain_text(re.compile(r"--edit erase:\d+,\d+,\d+,\d+ "))
    page.mouse.move(5, 5)
    page.locator("#stage").focus()
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    expect(page.locator("#command")).to_contain_text(re.compile("--edit erase.*--edit erase"))
    page.locator("#restore").click()
    expect(page.locator("#restore")).to_be_disabled()
    assert "edited image" not in page.locator("#shown-facts").inner_text()
    page.locator("#tools input[value='look']").check(force=True)
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"])
    expect(page.locator("#place li").first).to_be_visible()


def test_layer_method_class_and_the_page_s_own_controls(go: Go) -> None:
    page = go()
    page.locator("#layer").fill("layer3")
    page.locator("#layer").press("Enter")
    expect(page.locator("#shown-facts")).to_contain_text("gradcam at layer3 · 14 × 14")
    assert page.locator("#stages option").count() == 5
    page.select_option("#method", "layercam")
    expect(page.locator("#shown-facts")).to_contain_text("layercam at layer3")
    assert "--layer layer3 --method layercam" in command(page)
    page.select_option("#method", "")
    page.locator("#layer").fill("")
    page.locator("#layer").press("Enter")
    expect(page.locator("#shown-facts")).to_contain_text("gradcam at layer4")
    page.locator("#search").fill("espresso")
    expect(page.locator("#shown-name")).to_have_text("espresso")
    open_settings(page)
    choose(page, "evidence", "signed")
    page.locator("#search").fill("")
    page.locator("#strip button").nth(1).click()
    expect(page.locator("#title")).to_have_text("coffee.jpg")
    assert page.locator("#evidence input:checked").get_attribute("value") == "signed", "it stays chosen"
    page.locator("#layer").fill("nowhere")
    page.locator("#layer").press("Enter")
    expect(page.locator("#trouble")).to_contain_text("nowhere")
    assert read_target_name(page)


def test_two_checkpoints_are_compared(go: Go, place: Path, classifier: gradcam.Classifier) -> None:
    import torch

    state = {name: value.clone() for name, value in classifier.model.state_dict().items()}
    last = next(name for name in reversed(state) if name.endswith("bias"))
    state[last] = state[last].flip(0)
    torch.save(state, place / "other.pth")
    page = go()
    page.locator("#more-asking summary").click()
    page.locator("#other-weights").fill("other.pth")
    page.locator("#is-compared").check()
    expect(page.locator("#second-name")).to_have_text(read_target_name(page))
    assert page.locator("#shown-facts").inner_text().startswith("First model: efficientnet_lite0 · ")
    assert np.any(pixels(page, "#second-map")[..., 3])
    assert page.locator("#both tr").count() == 5
    assert "--weights other.pth" in page.locator("#second-command").inner_text()
    page.locator("#search").fill("espresso")
    expect(page.locator("#second-name")).to_have_text("espresso")
    page.locator("#is-compared").uncheck()
    expect(page.locator("#second")).to_be_hidden()
    assert "First model" not in page.locator("#shown-facts").inner_text()


def test_progress_is_shown_and_a_newer_question_wins(go: Go) -> None:
    page = go()
    page.select_option("#method", "rise")
    expect(page.locator("#waited")).to_contain_text(re.compile(r"\d+ of [\d,]+ passes"))
    page.select_option("#method", "")
    expect(page.locator("#waiting")).to_be_hidden()
    expect(page.locator("#shown-facts")).to_contain_text("gradcam at")
    expect(page.locator("#trouble")).to_be_hidden()


def test_a_tab_that_is_closed_in_the_middle_stops_its_work(go: Go, serving: Serving) -> None:
    page = go()
    page.select_option("#method", "rise")
    expect(page.locator("#waited")).to_contain_text("passes")
    page.close()
    second_page = go()  # It must not wait for the 4000 passes of RISE.
    assert read_target_name(second_page)


def test_pictures_that_are_none_are_told_and_others_are_taken(go: Go, photo: Callable[[str], Path]) -> None:
    page = go()
    before = page.locator("#strip li").count()
    coffee = photo("coffee.jpg").read_bytes()
    send_files(page, ("notes.txt", b"A text."), ("huge.png", make_bomb()), (f"{HOSTILE}.jpg", coffee))
    expect(page.locator("#title")).to_have_text(f"{HOSTILE}.jpg")
    expect(page.locator("#strip li")).to_have_count(before + 1)
    expect(page.locator("#trouble")).to_have_text(re.compile("^notes.txt.*\nhuge.png.*60000 x 60000"))
    send_files(page, ("pasted.jpg", coffee), by="paste")
    expect(page.locator("#title")).to_have_text("pasted.jpg")
    expect(page.locator("#trouble")).to_be_hidden()


def test_what_is_told_of_files_does_not_depend_on_which_answer_comes_first(go: Go) -> None:
    page = go()

    def wait(route: Any) -> None:
        routes.append(route)

    routes: list[Any] = []
    page.route("**/drop", wait)
    for name in ("a.txt", "b.txt"):  # Drop the second file before the first is answered.
        send_files(page, (name, b"A text."))
    while len(routes) < 2:
        page.wait_for_timeout(20)
    for route in reversed(routes):
        route.continue_()
        page.wait_for_timeout(200)
    page.unroute("**/drop")
    expect(page.locator("#trouble")).to_have_text(re.compile("^[ab].txt.*\n[ab].txt"))
    page.locator("#tools input[value='brush']").check(force=True)
    send_files(page, ("c.txt", b"A text."))
    expect(page.locator("#trouble")).to_have_text(re.compile("^c.txt"))
    drag(page, (0.4, 0.4), (0.5, 0.5), release=False)  # Its quick answer must not change the file message.
    expect(page.locator("#brushed")).to_contain_text("before the edit")
    expect(page.locator("#trouble")).to_have_text(re.compile("^c.txt"))
    page.mouse.up()
    expect(page.locator("#trouble")).to_be_hidden()


def test_a_file_of_two_gigabytes_is_refused_before_it_is_sent(go: Go) -> None:
    page = go()
    page.evaluate(
        """() => {
            const file = new File(["x"], "large.jpg");
            Object.defineProperty(file, "size", { value: 2e9 });
            take([file]);
        }"""
    )
    expect(page.locator("#trouble")).to_contain_text("large.jpg is larger than 200 MB")


def test_fifty_drops_at_once(go: Go, photo: Callable[[str], Path]) -> None:
    page = go()
    before = page.locator("#strip li").count()
    data = photo("rocket.jpg").read_bytes()
    send_files(page, *((f"{i}.jpg", data) for i in range(50)))
    expect(page.locator("#strip li")).to_have_count(before + 50)
    expect(page.locator("#title")).to_have_text("0.jpg")
    expect(page.locator("#trouble")).to_be_hidden()


def test_labels_are_texts_and_nan_is_told(go: Go) -> None:
    page = go()
    page.locator("#model").fill("mine.py:small")
    page.locator("#model").press("Enter")
    expect(page.locator("#shown-facts")).to_contain_text("at layer ·")
    page.locator("#model").fill("mine.py:nan")
    page.locator("#model").press("Enter")
    expect(page.locator("#trouble")).to_contain_text("NaN")
    page.locator("#model").fill("no_such_model")
    page.locator("#model").press("Enter")
    expect(page.locator("#trouble")).to_contain_text("no_such_model")
    page.locator("#model").fill("")
    page.locator("#model").press("Enter")
    expect(page.locator("#trouble")).to_be_hidden()
    page.locator("#more-asking summary").click()
    page.locator("#weights").fill("nowhere.pth")
    page.locator("#weights").press("Tab")
    expect(page.locator("#trouble")).to_have_text("File 'nowhere.pth' does not exist.")


def test_hostile_labels_of_the_model(browser: Any, place: Path, photo: Callable[[str], Path]) -> None:
    (place / "labels.txt").write_text(f"cat\n{HOSTILE}\n</script><script>alert(2)</script>\n")
    words = ("--model", "mine.py:small", "--labels", "labels.txt", "--size", "64", str(photo("coffee.jpg")))
    with serve(*words, folder=place) as serving:
        visit = Visit(browser)
        visit.page.goto(serving.address)
        expect(visit.page.locator("#targets [role=option]")).to_have_count(3)
        names = visit.page.locator("#targets .label").all_inner_texts()
        assert sorted(names) == sorted(["cat", HOSTILE, "</script><script>alert(2)</script>"])
        assert visit.wrongs == []
        visit.context.close()


def test_boxes_are_listed_and_drawn(browser: Any, place: Path, tmp_path: Path) -> None:
    from tests.cli.test_tasks import MODELS as TASKS
    from tests.cli.test_tasks import write_noise

    (place / "tasks.py").write_text(TASKS)
    street = write_noise(tmp_path / "street.png", 0)
    with serve("--model", "tasks.py:detector", str(street), folder=place) as serving:
        visit = Visit(browser)
        page = visit.page
        page.goto(serving.address)
        expect(page.locator("#objects")).to_be_visible()
        page.locator("#targets [role=option]").nth(1).click()
        assert "--box 1" in command(page)
        page.locator("#tools input[value='window']").check(force=True)
        drag(page, (0.5, 0.5))
        expect(page.locator("#command")).to_contain_text("--edit blur:")
        assert visit.wrongs == []
        visit.context.close()


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("colours", ["light", "dark", "forced"])
def test_accessibility(browser: Any, empty: Serving, axe: str, viewport: dict[str, int], colours: str) -> None:
    scheme = {"forced_colors": "active"} if colours == "forced" else {"color_scheme": colours}
    visit = Visit(browser, viewport=viewport, bypass_csp=True, **scheme)
    page = visit.page
    page.route("**/strip", lambda route: route.fulfill(json=[]))  # The start screen is for an empty strip.
    page.goto(empty.address)
    expect(page.locator("#start-screen")).to_be_visible()
    assert list_faults(page, axe) == []
    page.locator("#example").click()
    expect(page.locator("#shown-name")).not_to_be_empty()
    page.locator("#more-asking summary").click()
    page.locator("#is-compared").check()
    expect(page.locator("#second")).to_be_visible()
    send_files(page, ("notes.txt", b"A text."))
    expect(page.locator("#trouble")).to_be_visible()
    assert list_faults(page, axe) == []
    page.locator("#title").click()
    for tab in ("place", "brush", "controls") if viewport == PHONE else ():
        choose_tab(page, tab, viewport)
        assert list_faults(page, axe) == []
    visit.context.close()


def list_faults(page: Any, axe: str) -> list[Any]:
    page.evaluate(axe)
    violations = json.loads(page.evaluate("async () => JSON.stringify((await axe.run()).violations)"))
    return [
        (item["impact"], item["id"], [node["html"][:160] for node in item["nodes"][:3]])
        for item in violations
        if item["impact"] in ("serious", "critical", "moderate")
    ]


def test_the_page_stays_whole_when_an_image_fails(browser: Any, place: Path, photo: Callable[[str], Path]) -> None:
    folder = place / "odd"
    folder.mkdir()
    for name in ("-a.jpg", f"b{'_long' * 30}.jpg"):
        (folder / name).write_bytes(photo("coffee.jpg").read_bytes())
    (folder / "c.jpg").write_bytes(b"A text.")
    with serve("odd", folder=place) as serving:
        visit = Visit(browser)
        page = visit.page
        page.goto(serving.address)
        expect(page.locator("#title")).to_have_text("-a.jpg")
        assert page.evaluate(
            "document.querySelector('#strip').scrollWidth <= document.querySelector('#strip').clientWidth"
        )
        hint = page.locator("#brushed").inner_text()
        page.locator("#tools input[value='brush']").check(force=True)
        drag(page, (0.4, 0.4), (0.6, 0.6))
        expect(page.locator("#undo")).to_be_enabled()
        before, line = command(page), page.locator("#brushed").inner_text()
        assert before.startswith("gradcam run odd/-a.jpg --edit blur:")
        first = re.search(r"\((.*?)\)", page.locator("#shown").inner_text())
        assert line.startswith(f"{read_target_name(page)}: {first[1]}"), "the line follows the last whole answer"
        page.locator("#strip button").nth(2).click()
        expect(page.locator("#trouble")).to_contain_text("c.jpg")
        assert (page.locator("#title").inner_text(), command(page)) == ("-a.jpg", before)
        assert page.locator("#strip button[aria-pressed=true]").inner_text() == "-a.jpg"
        drag(page, (0.2, 0.2), (0.3, 0.3))
        expect(page.locator("#command")).to_contain_text(re.compile("odd/-a.jpg --edit blur.*--edit blur"))
        page.locator("#restore").click()
        expect(page.locator("#brushed")).to_have_text(hint)
        send_files(page, ("-d.jpg", photo("coffee.jpg").read_bytes()), ("e.jpg", b"A text."), ("f.jpg", b"A text."))
        expect(page.locator("#title")).to_have_text("-d.jpg")
        assert command(page).startswith("gradcam run ./-d.jpg --class")
        expect(page.locator("#trouble")).to_have_text(re.compile("e.jpg.*\n.*f.jpg"))
        visit.context.close()


def test_the_commands_of_two_models_are_complete(browser: Any, place: Path, photo: Callable[[str], Path]) -> None:
    (place / "two").mkdir()
    (place / "two" / "coffee.jpg").write_bytes(photo("coffee.jpg").read_bytes())
    with serve("two", "--allow-code", "--reshape", "channels-first", folder=place) as serving:
        visit = Visit(browser)
        page = visit.page
        page.goto(serving.address)
        expect(page.locator("#shown-name")).not_to_be_empty()
        assert "--layer layer4 --reshape channels-first --method gradcam" in command(page)
        assert 'reshape="channels-first")' in page.locator("#python").inner_text()
        assert 'explain("two/coffee.jpg"' in page.locator("#python").inner_text()
        page.locator("#more-asking summary").click()
        page.locator("#other-model").fill("mine.py:small")
        page.locator("#is-compared").check()
        second = page.locator("#second-command")
        expect(second).to_contain_text("gradcam run two/coffee.jpg --model mine.py:small")
        assert "--reshape" not in second.inner_text(), "which is for the other model"
        open_settings(page)
        choose(page, "evidence", "negative")
        page.locator("#opacity").fill("70")
        page.select_option("#colours", "viridis")
        expect(second).to_contain_text("--evidence negative --base color --colormap viridis --alpha 0.7")
        # Set the state that RISE would leave, because RISE itself takes too long.
        page.evaluate("() => { sets[0].layer = second.maps[0].layer = 'input'; refresh(); }")
        for item in (command(page), second.inner_text()):
            assert "--method gradcam --evidence" in item
            assert "--layer" not in item
            assert "--reshape" not in item
        assert visit.wrongs == []
        visit.context.close()


# ---- Start screen, token, layout


@pytest.fixture(scope="module")
def empty(place: Path) -> Iterator[Serving]:
    with serve(folder=place) as server:
        yield server


def test_an_example_and_three_models_are_offered_at_the_start(browser: Any, place: Path) -> None:
    with serve(folder=place) as serving:
        visit = Visit(browser)
        page = visit.page
        page.goto(serving.address)
        drop, window = page.locator("#start-screen .drop").bounding_box(), DESKTOP["width"] * DESKTOP["height"]
        assert drop["width"] * drop["height"] > 0.25 * window
        assert page.locator("#starters label").all_inner_texts() == [
            "efficientnet_lite0\nincluded", "resnet50\ndownloads 98 MB", "vit_b_16\ndownloads 331 MB"
        ]  # fmt: skip
        assert page.locator("#example img").evaluate("(image) => image.naturalWidth") == 560
        assert 100 < page.locator("#models option").count() < 300
        page.locator("#starters label").nth(1).click()
        assert page.locator("#model").input_value() == "resnet50"
        page.locator("#starters label").first.click()
        assert page.locator("#model").input_value() == ""
        for typed, checked in {
            "vit_b_16": ["vit_b_16"],
            "convnext_tiny": [],
            "efficientnet_lite0": [""],
            "": [""],
        }.items():
            page.locator("#model").fill(typed)
            values = page.locator("#starters :checked").evaluate_all("(inputs) => inputs.map((input) => input.value)")
            assert values == checked
        assert page.get_by_role("button", name="Explain").is_hidden()  # There is no image to explain.
        page.locator("#example").click()
        expect(page.locator("#shown-name")).to_have_text("Egyptian cat")
        assert page.locator("#start-screen").is_hidden()
        assert "rollout" not in page.locator("#method option").all_inner_texts()
        assert visit.wrongs == []
        visit.context.close()


def test_the_token_is_in_no_address_and_a_reload_finds_it(browser: Any, serving: Serving) -> None:
    visit = Visit(browser)
    page = visit.page
    page.goto("about:blank")
    page.goto(serving.address)
    expect(page.locator("#shown-name")).not_to_be_empty()
    assert serving.token not in page.url
    page.locator("#search").fill("espresso")
    expect(page.locator("#shown-name")).to_have_text("espresso")
    wait_until(page, "location.hash.includes('target=967')")
    page.reload()
    expect(page.locator("#shown-name")).to_have_text("espresso")  # The view is in the address.
    assert page.url == f"{serving.base}/#target=967"
    page.go_back()
    assert page.url == "about:blank"
    page.go_forward()
    expect(page.locator("#shown-name")).to_have_text("espresso")
    assert serving.token not in page.url
    other = visit.context.new_page()  # Another tab has no token.
    response = other.goto(f"{serving.base}/")
    assert response.status == 403
    expect(other.locator("p")).to_contain_text("open the address that gradcam ui printed")
    other.evaluate("sessionStorage.setItem('gradcam-token', 'old')")  # from a server that has ended
    other.goto(f"{serving.base}/")
    expect(other.locator("p")).to_contain_text("open the address that gradcam ui printed")
    wait_until(other, "sessionStorage.getItem('gradcam-token') === null")
    assert [text for text in visit.wrongs if "status of 403" not in text] == []
    visit.context.close()


SHIFT = """window.shift = 0;
    new PerformanceObserver((list) => { for (const entry of list.getEntries()) window.shift += entry.value; })
        .observe({ type: "layout-shift", buffered: true });"""


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_all_parts_are_in_view_and_nothing_moves(browser: Any, empty: Serving, size: tuple[int, int]) -> None:
    # On a busy machine, the browser may paint between two changes that otherwise appear together.
    assert any(edit_and_measure_shift(browser, empty, size) < 0.05 for _ in range(3))


def edit_and_measure_shift(browser: Any, empty: Serving, size: tuple[int, int]) -> float:
    """Open the page, edit the image, and return the layout shift; fail if a part is out of view."""
    width, height = size
    visit = Visit(browser, viewport={"width": width, "height": height})
    page = visit.page
    page.add_init_script(SHIFT)
    page.goto(empty.address)
    page.wait_for_timeout(300)
    if not empty.ask("strip").json():  # Later visits find the example, and open it.
        page.locator("#example").click()
    expect(page.locator("#shown-name")).to_have_text("Egyptian cat")
    page.wait_for_timeout(700)  # Shifts within half a second of a click do not count, and the answer comes later.
    point_at(page, 0.4, 0.4)
    parts = ["#stage", "#targets", "#search", "#shown", "#strip", "#model"]
    if width > 640:
        expect(page.locator("#place li")).to_have_count(8)
        parts += ["#place li:last-child", "#tools", "#brushed", "#undo", "#save-page"]
    else:
        parts.append("#tabs")
    require_in_view(page, parts, size)
    choose_tab(page, "brush", {"width": width})
    page.locator("#tools label").nth(1).click()
    drag(page, (0.35, 0.4), (0.65, 0.6), release=False)
    expect(page.locator("#brushed")).to_contain_text("before the edit")
    page.wait_for_timeout(300)
    require_in_view(page, ["#stage", "#tools", "#brushed", "#undo", "#shown"], size)
    page.mouse.up()
    expect(page.locator("#undo")).to_be_enabled()
    page.wait_for_timeout(300)
    shift: float = page.evaluate("window.shift")
    assert page.evaluate("scrollY") == 0
    page.locator("#restore").click()
    expect(page.locator("#restore")).to_be_disabled()
    assert visit.wrongs == []
    visit.context.close()
    return shift


def point_at(page: Any, across: float, down: float) -> None:
    box = page.locator("#stage").bounding_box()
    page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])


def require_in_view(page: Any, parts: list[str], size: tuple[int, int]) -> None:
    """Fail unless all parts are inside of the window, none overlaps another, and the image is the largest."""
    boxes = {part: page.locator(part).bounding_box() for part in parts}
    for part, box in boxes.items():
        assert box["x"] >= 0, part
        assert box["y"] >= 0, part
        assert box["x"] + box["width"] <= size[0] + 0.5, part
        assert box["y"] + box["height"] <= size[1] + 0.5, part
    for first, second in itertools.combinations(parts, 2):
        a, b = boxes[first], boxes[second]
        is_beside = a["x"] + a["width"] <= b["x"] + 1 or b["x"] + b["width"] <= a["x"] + 1
        assert is_beside or a["y"] + a["height"] <= b["y"] + 1 or b["y"] + b["height"] <= a["y"] + 1, (first, second)
    areas = {part: box["width"] * box["height"] for part, box in boxes.items()}
    assert max(areas, key=lambda part: areas[part]) == "#stage"
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_each_sheet_of_a_phone_is_in_view(go: Go) -> None:
    page = go(viewport=PHONE)
    parts = {"place": "#place-hint", "brush": "#tools", "controls": "#evidence", "list": "#targets"}
    for tab, part in parts.items():
        choose_tab(page, tab, PHONE)
        assert page.locator("#stage").bounding_box()["y"] >= 0
        box = page.locator(part).bounding_box()
        assert page.locator("#tabs").bounding_box()["y"] < box["y"]
        assert box["y"] + box["height"] <= PHONE["height"]
        assert page.locator("#save-page").is_visible() == (tab == "controls")


# ---- Changes, cancelling, saving


def test_changes_of_classes_are_listed_while_brushing_and_afterwards(go: Go) -> None:
    page = go()
    before = page.locator("#targets [role=option] .number").first.inner_text()
    assert "(" not in before
    page.locator("#tools label").nth(1).click()
    page.locator("#size").fill("30")
    drag(page, (0.2, 0.3), (0.4, 0.6), release=False)
    pattern, row = re.compile(r"^([\d.]+) % \((−|\+)(\d+)\)$"), page.locator("#targets [aria-selected=true]")

    def require_change() -> None:
        expect(row.locator(".number")).to_have_text(pattern)
        share, sign, points = pattern.fullmatch(row.locator(".number").inner_text()).groups()  # type: ignore[union-attr]
        difference = float(share) - float(before.split()[0])
        assert abs(difference - int(points) * (-1 if sign == "−" else 1)) < 1.5

    require_change()
    page.mouse.up()
    expect(page.locator("#undo")).to_be_enabled()
    require_change()
    assert row.inner_text().split("\n")[0] == page.locator("#shown-name").inner_text()
    page.locator("#undo").click()
    expect(page.locator("#targets [aria-selected=true] .number")).to_have_text(before)


CANCELLABLE = """
import pathlib, time
import torch
from torch import nn

class Wait(nn.Module):
    def forward(self, values):
        if len(values) > 1:  # a batch of masked images
            time.sleep(0.1)
        return values

def many():
    torch.manual_seed(0)
    waits = [Wait() for _ in range(100)]
    return nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.ReLU(), *waits, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
"""


def test_cancel_stops_a_slow_method_and_the_last_answer_stays(
    browser: Any, place: Path, photo: Callable[[str], Path]
) -> None:
    (place / "cancel.py").write_text(CANCELLABLE)
    with serve("--model", "cancel.py:many", "--size", "64", str(photo("coffee.jpg")), folder=place) as serving:
        visit = Visit(browser)
        page = visit.page
        page.goto(serving.address)
        expect(page.locator("#shown-facts")).to_contain_text("gradcam at")
        before, text = pixels(page), command(page)
        page.select_option("#method", "scorecam")
        page.locator("#cancel").click()
        start = time.monotonic()
        expect(page.locator("#waiting")).to_be_hidden()
        assert (pixels(page) == before).all()
        assert command(page) == text
        assert page.locator("#method").input_value() == ""  # as the answer on screen
        page.select_option("#method", "layercam")  # It waits for the end of the cancelled pass, of at least 10 s.
        expect(page.locator("#shown-facts")).to_contain_text("layercam at")
        assert time.monotonic() - start < 9
        assert visit.wrongs == []
        visit.context.close()


def test_the_page_is_saved_and_opens_without_the_server(go: Go, browser: Any, tmp_path: Path) -> None:
    page = go()
    page.locator("#tools label").nth(1).click()
    drag(page, (0.2, 0.3), (0.4, 0.6))
    expect(page.locator("#undo")).to_be_enabled()
    page.locator("#search").fill("espresso")
    text = command(page).replace("strip/", "")
    with page.expect_download() as waiting:
        page.locator("#save-page").click()
    assert waiting.value.suggested_filename == "cat_and_espresso.html"
    waiting.value.save_as(tmp_path / "saved.html")
    visit = Visit(browser)
    visit.page.goto((tmp_path / "saved.html").as_uri())
    expect(visit.page.locator("#shown-name")).to_have_text("espresso")
    assert visit.page.locator("#command").inner_text() == text
    assert " --edit blur:" in text
    assert (pixels(visit.page) == pixels(page)).all()
    assert visit.wrongs == []
    visit.context.close()


def test_models_and_files_used_before_are_suggested(go: Go) -> None:
    page = go()
    page.locator("#model").fill("mine.py:small")
    page.locator("#model").press("Enter")
    expect(page.locator("#shown-facts")).to_contain_text("at layer ·")
    suggested = "(list) => [...list.children].map((option) => option.value)"
    assert page.locator("#models").evaluate(suggested)[0] == "mine.py:small"
    page.evaluate("localStorage.setItem('gradcam-weights', 'best.pth')")
    page.reload()
    expect(page.locator("#shown-name")).not_to_be_empty()
    assert page.locator("#models").evaluate(suggested)[0] == "mine.py:small"
    assert page.locator("#files").evaluate(suggested) == ["best.pth"]


def test_two_models_show_the_same_class_place_and_zoom(go: Go) -> None:
    page = go(viewport={"width": 1280, "height": 720})
    page.locator("#more-asking summary").click()
    page.locator("#is-compared").check()
    expect(page.locator("#second")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("#title").click()
    point_at(page, 0.3, 0.5)
    stage, second = "#stage", "#second .frame"
    expect(page.locator("#second-cell")).to_be_visible()

    def place_in(frame: str, part: str) -> list[float]:
        outer, inner = page.locator(frame).bounding_box(), page.locator(part).bounding_box()
        scale = outer["width"]
        return [(inner["x"] - outer["x"]) / scale, (inner["y"] - outer["y"]) / scale, inner["width"] / scale]

    for _ in range(2):
        assert place_in(stage, "#cell") == pytest.approx(place_in(second, "#second-cell"), abs=0.01)
        assert place_in(stage, "#image") == pytest.approx(place_in(second, "#second-image"), abs=0.01)
        point_at(page, 0.3, 0.5)
        page.mouse.click(*centre(page, "#stage"))  # pins a cell
        page.locator("#zoom-in").click()
    assert place_in(second, "#second-image")[2] > 1.4
    assert np.array_equal(pixels(page), pixels(page, "#second-map"))
    page.locator("#search").fill("espresso")
    assert page.locator("#second-name").inner_text() == "espresso"
    boxes = [page.locator(part).bounding_box() for part in (stage, second, "#targets")]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert boxes[1]["x"] + boxes[1]["width"] <= boxes[2]["x"]
    assert all(box["y"] + box["height"] <= 720 for box in boxes)


def centre(page: Any, part: str) -> tuple[float, float]:
    box = page.locator(part).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


# ---- The terminal


SLOW = (
    MODELS
    + """
import pathlib, time

class Slow(Small):
    def forward(self, images):
        if pathlib.Path("serving").exists():
            pathlib.Path("begun").touch()
            time.sleep(60)
        return super().forward(images)

def slow():
    return Slow(1.0)
"""
)


def run_ui(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "gradcam", "ui", "--no-browser", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, **options)


def test_a_second_ui_and_a_port_that_is_taken_get_one_line(serving: Serving) -> None:
    port = serving.base.rpartition(":")[2]
    second = run_ui("--port", port)
    assert (second.returncode, second.stdout) == (2, "")
    assert len(second.stderr.splitlines()) == 1
    assert f"already running on port {port}" in second.stderr
    with socket.socket() as busy_socket:
        busy_socket.bind(("127.0.0.1", 0))
        busy_socket.listen()
        ui = run_ui("--port", str(busy_socket.getsockname()[1]))
    assert ui.returncode == 2
    assert len(ui.stderr.splitlines()) == 1
    assert "--port 0" in ui.stderr


def test_the_browser_s_command_line_has_no_token(tmp_path: Path) -> None:
    """Keep the token out of the browser's command line, which other users of the machine can read."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/given\n')
    browser.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-m", "gradcam", "ui", "--port", "0"],
        env=os.environ | {"BROWSER": f"{browser} %s"}, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            printed = process.stdout.readline().strip()  # type: ignore[union-attr]
            while not (tmp_path / "given").exists() or not (url := (tmp_path / "given").read_text().strip()):
                time.sleep(0.05)
            token = printed.partition("token=")[2]
            assert token
            assert token not in url
            response = httpx.get(url, trust_env=False)
            assert response.headers["location"] == f"/?token={token}"
        finally:
            process.terminate()


def test_another_host_is_warned_of_and_an_interruption_ends_it_quietly(place: Path) -> None:
    with serve("--host", "0.0.0.0", folder=place) as server:
        assert any("Warning: with --host 0.0.0.0" in line for line in server.lines)
        assert server.ask("strip").json() == []
        server.process.send_signal(signal.SIGINT)
        remaining = server.process.stdout.read()
        assert "Traceback" not in remaining
        status = server.process.wait(20)
        assert status in (0, 130)
        server.process.poll = lambda: None


@pytest.mark.parametrize(("sent", "statuses"), [(signal.SIGINT, (0, 130)), (signal.SIGTERM, (143,))])
def test_a_signal(place: Path, photo: Callable[[str], Path], sent: signal.Signals, statuses: tuple[int, ...]) -> None:
    (place / "slow.py").write_text(SLOW)
    with (
        serve("--host", "localhost", "--model", "slow.py:slow", str(photo("coffee.jpg")), folder=place) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        (place / "begun").unlink(missing_ok=True)
        assert not any("Warning" in line for line in server.lines), "nobody else reaches it"
        (place / "serving").touch()
        futures = [pool.submit(server.ask, "ask", method="POST", json={"tab": tab, "picture": 0}) for tab in "ab"]
        wait_for(place / "begun")
        server.process.send_signal(sent)
        assert server.process.wait(15) in statuses  # One forward pass takes a minute.
        remaining = server.process.stdout.read()
        assert "Traceback" not in remaining, remaining
        # The second request may arrive after the server has closed.
        ends = [item.exception() or item.result().json() for item in futures]
        assert {"stopped": True} in ends
        assert all(end == {"stopped": True} or isinstance(end, httpx.ConnectError) for end in ends), ends
        server.process.poll = lambda: None
    (place / "serving").unlink()


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_is_no_place_is_told() -> None:
    ui = run_ui("nowhere", "--port", "0")
    assert ui.returncode == 2
    assert ui.stderr.splitlines()[-1].startswith("Error: nowhere: there is no such image")
