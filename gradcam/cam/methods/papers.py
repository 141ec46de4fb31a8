"""Where methods and metrics are from: the publications in papers.bib, each by the name that stands above its entry."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

ENTRY = re.compile(r"^% (\w+)\n(@(\w+)\{.*?^\})", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"^  (\w+) = \{+(.*?)\}+,$", re.MULTILINE)


@dataclass(frozen=True)
class Paper:
    """A publication; `entry` is the whole of its BibTeX, and authors are "Surname, Given and Surname, Given"."""

    authors: str
    title: str
    venue: str
    year: str
    is_article: bool
    entry: str

    def __str__(self) -> str:
        """One line: Selvaraju et al., Grad-CAM: ..., ICCV 2017."""
        surnames = [author.partition(",")[0] for author in self.authors.split(" and ")]
        names = " and ".join(surnames) if len(surnames) < 3 else f"{surnames[0]} et al."
        return f"{names}, {self.title}, {self.venue}{',' if self.is_article else ''} {self.year}"

    def to_bibtex(self) -> str:
        """The entry, its title protected from being set in lower case."""
        return self.entry


@cache
def _read() -> dict[str, Paper]:
    text = resources.files(__package__).joinpath("papers.bib").read_text("utf-8")
    found = {}
    for name, entry, kind in ENTRY.findall(text):
        said = dict(FIELD.findall(entry))
        venue = said.get("journal") or said["booktitle"]
        found[name] = Paper(said["author"], said["title"], venue, said["year"], kind == "article", entry)
    return found


def __getattr__(name: str) -> Paper:
    """The paper of that name."""
    if name not in _read():
        raise AttributeError(f"papers.bib has no {name}")
    return _read()[name]
