"""Test a page of cards: a single file, which a browser shows without any other."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradcam.errors import OutputError
from gradcam.report.cards import Card, CardPage
from tests.browser import DESKTOP, PHONE, Visit, needs_browser

HOSTILE = "<script>alert('x')</script> \x1b[31m & \"quoted\"\u202e"
FACTS = [("old", [("weights", HOSTILE)])]
PAGE = CardPage(HOSTILE, [("Method", HOSTILE)], ["One line."], FACTS, failures=[f"{HOSTILE}: is not a picture"])


def cards(count: int = 2) -> list[Card]:
    pictures = {name: np.full((300, 700, 3), tone, np.uint8) for name, tone in (("old", 40), ("new", 200))}
    return [Card(f"{i} {HOSTILE}", "another map", [("Moved", "3 %")], pictures, is_bad=i == 0) for i in range(count)]


def write(folder: Path) -> str:
    PAGE.write(folder / "index.html", cards())
    return (folder / "index.html").read_text(encoding="utf-8")


def test_texts_are_texts_and_pictures_are_in_the_page(tmp_path: Path) -> None:
    page = write(tmp_path)
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert") == 7  # the title is on the page twice
    assert not re.search("[\x1b\u202e]", page)
    assert page.count('src="data:image/jpeg;base64,') == page.count("<img ") == 4
    assert page.count('class="badge bad"') == 1
    assert page == write(tmp_path)


def test_the_policy_allows_the_style_and_the_script_that_are_in_it_alone(tmp_path: Path) -> None:
    page = write(tmp_path)
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', page)
    rules = dict(rule.split(" ", 1) for rule in html.unescape(policy).split("; "))
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"


def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        PAGE.write(tmp_path / "nowhere" / "index.html", cards())


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(("viewport", "across"), [(DESKTOP, 4), (PHONE, 2)])
def test_a_browser_shows_it(visit: Callable[..., Visit], tmp_path: Path, viewport: Any, across: int) -> None:
    write(tmp_path)
    page = visit(viewport=viewport, color_scheme="dark").open(tmp_path)
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    sizes = page.evaluate("[...document.images].map((it) => [it.naturalWidth, it.clientWidth])")
    assert [size[0] for size in sizes] == [320] * 4
    assert all(abs(size[1] * across - widths[1]) < 0.2 * widths[1] for size in sizes)
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", colour))) < 60  # the policy allowed the script, which set the dark theme
