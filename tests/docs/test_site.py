"""Test the site that scripts/check built, in a real browser, from the disk: sphinx-build -W docs docs/_build/html."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.browser import DESKTOP, PHONE, Visit, expect, needs_browser
from tests.docs.pages import ROOT

SITE = ROOT / "docs/_build/html"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SITE.exists(), reason="the site is not built: sphinx-build docs docs/_build/html"),
]


class Page(HTMLParser):
    """The links of a page, and the anchors that links can point to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.links.add(value)


def test_every_link_leads_somewhere() -> None:
    pages = {file: Page(file) for file in SITE.rglob("*.html") if "_static" not in file.parts}
    assert len(pages) > 150
    broken = []
    for file, page in pages.items():
        for link in page.links:
            address, place = urldefrag(link)
            if urlsplit(address).scheme:
                continue
            target = (file.parent / unquote(urlsplit(address).path)).resolve() if address else file
            lost = place and target in pages and unquote(place) not in pages[target].anchors
            if not target.exists() or lost:
                broken.append(f"{file.relative_to(SITE)}: {link}")
    assert broken == []


def test_every_script_of_the_gallery_drew_a_picture() -> None:
    scripts = list((ROOT / "docs/gallery").glob("*/*.py"))
    assert len({script.stem for script in scripts}) == len(scripts) >= 25  # the stem alone names the image
    for script in scripts:
        assert list((SITE / "_images").glob(f"sphx_glr_{script.stem}_001.*")), script
        assert list((SITE / "_downloads").rglob(script.name))
        assert list((SITE / "_downloads").rglob(f"{script.stem}.ipynb"))


def test_every_image_that_a_page_asks_for_is_on_the_site() -> None:
    marks = 0
    for file in [*(ROOT / "docs/howto").glob("*.md"), *(ROOT / "docs/start").glob("*.md")]:
        page = (SITE / file.relative_to(ROOT / "docs").with_suffix(".html")).read_text(encoding="utf-8")
        assert "<!-- image" not in page
        for sources in re.findall(r"<!-- image ([^:]+):", file.read_text(encoding="utf-8")):
            for source in sources.split():
                marks += 1
                script, _, number = Path(source).name.partition("#")
                gallery = source.startswith("gallery/")
                name = f"sphx_glr_{script}_{int(number or 1):03}" if gallery else Path(source).stem
                assert re.search(rf'src="[^"]*{re.escape(name)}\d*\.\w+"', page), (file.name, source)
    assert marks > 40


@needs_browser
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_search_finds_pages(visit: Callable[..., Visit], size: dict[str, int]) -> None:
    """No request leaves the machine: `visit` checks that."""
    page = visit(viewport=size).open(SITE)
    assert page.locator("h1").inner_text().startswith("gradcam")
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    page.keyboard.press("Control+k")
    page.keyboard.type("transformer")
    page.keyboard.press("Enter")
    first = page.locator("ul.search li a").first
    expect(first).to_be_visible()
    title = first.inner_text()
    first.click()
    expect(page.locator("h1")).to_contain_text(title.partition(" (")[0])
    assert "transformer" in page.locator("main").inner_text().lower()
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


@needs_browser
def test_dark_and_light(visit: Callable[..., Visit]) -> None:
    def brightness(page: Any) -> int:
        script = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
        return sum(page.evaluate(script))

    assert brightness(visit(color_scheme="light").open(SITE)) > 700
    assert brightness(visit(color_scheme="dark").open(SITE)) < 150
