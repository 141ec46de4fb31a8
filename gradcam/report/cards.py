"""One page in one file: pictures side by side under a title and numbers, to send to somebody or keep with a build."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from gradcam.errors import OutputError, printable
from gradcam.images.files import write_whole
from gradcam.images.read import Pixels
from gradcam.images.write import encode_image
from gradcam.report.pages import render
from gradcam.report.views import QUALITY, fit_view
from gradcam.storage.disk import describe_os_error

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
        static = resources.files("gradcam.report") / "static"
        own = {"style": "style.css", "script": "theme.js"}
        content: dict[str, Any] = {name: (static / file).read_text("utf-8") for name, file in own.items()}
        content |= {f"{name}_hash": _hash(content[name]) for name in own}
        text = render(
            "cards.html.j2",
            title=printable(self.title),
            summary=_clean(self.summary),
            lines=list(map(printable, self.lines)),
            facts=[(name, _clean(group)) for name, group in self.facts],
            failures=list(map(printable, self.failures)),
            cards=map(_to_card, cards),
            **content,
        )
        try:
            write_whole(path, text.encode())
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({describe_os_error(error)})") from error


def _hash(text: str) -> str:
    """What the page's policy says of a style or script that is in it, so that no other one is heeded."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _clean(facts: Facts) -> list[tuple[str, str]]:
    return [(printable(name), printable(value)) for name, value in facts]


def _to_card(card: Card) -> dict[str, Any]:
    figures = [(printable(caption), _to_source(pixels)) for caption, pixels in card.figures.items()]
    shown = {"title": printable(card.title), "badge": card.badge, "is_bad": card.is_bad}
    return shown | {"facts": _clean(card.facts), "figures": figures}


def _to_source(pixels: Pixels) -> str:
    data = encode_image(fit_view(pixels, SIDE), ".jpg", QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
