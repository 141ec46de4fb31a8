"""Look up the papers of methods and metrics in papers.bib, by the name above each entry."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

ENTRY = re.compile(r"^% (\w+)\n(@(\w+)\{.*?^\})", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"^  (\w+) = \{+(.*?)\}+,$", re.MULTILINE)


@dataclass(frozen=True)
class Paper:
    """A publication.

    `entry` is the complete BibTeX entry. Double braces protect its title from lower-casing. `authors` has the form
    "Surname, First name and Surname, First name".
    """

    authors: str
    title: str
    venue: str
    year: str
    is_article: bool
    entry: str

    def __str__(self) -> str:
        """Return one line: Selvaraju et al., Grad-CAM: ..., ICCV 2017."""
        surnames = [author.partition(",")[0] for author in self.authors.split(" and ")]
        names = " and ".join(surnames) if len(surnames) < 3 else f"{surnames[0]} et al."
        return f"{names}, {self.title}, {self.venue}{',' if self.is_article else ''} {self.year}"


@cache
def _read() -> dict[str, Paper]:
    text = resources.files(__package__).joinpath("papers.bib").read_text("utf-8")
    papers = {}
    for name, entry, entry_type in ENTRY.findall(text):
        fields = dict(FIELD.findall(entry))
        venue = fields.get("journal") or fields["booktitle"]
        papers[name] = Paper(fields["author"], fields["title"], venue, fields["year"], entry_type == "article", entry)
    return papers


def __getattr__(name: str) -> Paper:
    """Return the paper with this name in papers.bib."""
    if name not in _read():
        raise AttributeError(f"papers.bib has no {name}")
    return _read()[name]
