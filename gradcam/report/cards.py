"""One page in one file: pictures side by side under a title and numbers, to send to somebody or keep with a build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradcam.errors import printable
from gradcam.images.read import Pixels
from gradcam.images.write import encode_image, fit_view
from gradcam.report.views import QUALITY
from gradcam.web.render import render_whole, to_source, write_page

SIDE = 320  # pixels of a picture's longest side
Facts = Sequence[tuple[str, str]]  # names and values


@dataclass(frozen=True)
class Card:
    """One thing on the page: a title, a word on it, numbers, and pictures by their captions. `is_bad`: the word is red."""

    title: str
    badge: str
    facts: Facts
    figures: Mapping[str, Pixels]
    is_bad: bool = False


@dataclass(frozen=True)
class CardPage:
    """A page: what it is about in names and values, in lines, and in groups that can be opened; and what failed."""

    title: str
    summary: Facts
    lines: Sequence[str] = ()
    facts: Sequence[tuple[str, Facts]] = ()
    failures: Sequence[str] = field(default=())

    def write(self, path: Path, cards: Iterable[Card]) -> None:
        """Write the page with these cards, in this order, to one file that needs no other and no network. Raises
        `OutputError` where it cannot be written."""
        text = render_whole(
            "cards.html.j2",
            styles=("style.css",),
            scripts={"script": ("theme.js",)},
            title=printable(self.title),
            summary=_clean(self.summary),
            lines=list(map(printable, self.lines)),
            facts=[(name, _clean(group)) for name, group in self.facts],
            failures=list(map(printable, self.failures)),
            cards=map(_to_card, cards),
        )
        write_page(path, text)


def _clean(facts: Facts) -> list[tuple[str, str]]:
    return [(printable(name), printable(value)) for name, value in facts]


def _to_card(card: Card) -> dict[str, Any]:
    small = {caption: encode_image(fit_view(pixels, SIDE), ".jpg", QUALITY) for caption, pixels in card.figures.items()}
    figures = [(printable(caption), to_source(data)) for caption, data in small.items()]
    shown = {"title": printable(card.title), "badge": card.badge, "is_bad": card.is_bad}
    return shown | {"facts": _clean(card.facts), "figures": figures}
