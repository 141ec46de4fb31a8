"""Write a page of images, titles and numbers to a single file, to share or to store with a CI build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradcam.errors import escape_controls
from gradcam.images.read import Pixels
from gradcam.images.write import encode_image, shrink_to_fit
from gradcam.report.views import JPEG_QUALITY
from gradcam.web.render import render_standalone, to_data_url, write_page

CARD_IMAGE_PIXELS = 320  # The longest side of an image.
Facts = Sequence[tuple[str, str]]  # Pairs of name and value.


@dataclass(frozen=True)
class Card:
    """One entry of the page: a title, a badge, numbers, and images by caption. `is_bad` makes the badge red."""

    title: str
    badge: str
    facts: Facts
    figures: Mapping[str, Pixels]
    is_bad: bool = False


@dataclass(frozen=True)
class CardPage:
    """A page of cards.

    Above the cards, the page shows a summary, lines of text, collapsible groups of facts, and failures.
    """

    title: str
    summary: Facts
    lines: Sequence[str] = ()
    facts: Sequence[tuple[str, Facts]] = ()
    failures: Sequence[str] = ()

    def write(self, path: Path, cards: Iterable[Card]) -> None:
        """Write the page to one self-contained file, which opens without a network. Raises `OutputError`."""
        values: dict[str, Any] = {"title": escape_controls(self.title), "summary": _clean(self.summary)}
        values["facts"] = [(name, _clean(group)) for name, group in self.facts]
        values |= {name: list(map(escape_controls, getattr(self, name))) for name in ("lines", "failures")}
        options: Any = {"styles": ("style.css",), "scripts": {"script": ("theme.js",)}}
        text = render_standalone("cards.html.j2", cards=map(_to_card, cards), **options, **values)
        write_page(path, text)


def _clean(facts: Facts) -> list[tuple[str, str]]:
    return [(escape_controls(name), escape_controls(value)) for name, value in facts]


def _to_card(card: Card) -> dict[str, Any]:
    images = ((caption, shrink_to_fit(pixels, CARD_IMAGE_PIXELS)) for caption, pixels in card.figures.items())
    encoded_images = ((caption, encode_image(image, ".jpg", JPEG_QUALITY)) for caption, image in images)
    figures = [(escape_controls(caption), to_data_url(data)) for caption, data in encoded_images]
    fields = {"title": escape_controls(card.title), "badge": card.badge, "is_bad": card.is_bad}
    return fields | {"facts": _clean(card.facts), "figures": figures}
