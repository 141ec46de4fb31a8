"""The verdict on a map: what it was told apart from, in words, numbers and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradcam.errors import shorten
from gradcam.evaluation.checks.findings import OUTCOMES, PASSED, Exhibits, Outcome, Test
from gradcam.evaluation.checks.panel import Shown, draw_verdict
from gradcam.evaluation.checks.shams import RIVAL, Sham
from gradcam.images.read import Pixels
from gradcam.models.labels import name_class

ALIKE = 0.9  # rank correlation from which on one map serves two classes


@dataclass(frozen=True, eq=False)
class Verdict:
    """What tests make of one explanation of one picture, and what it was told apart from.

    "passed" means that the map was told apart from every sham, and refuted by nothing; never that it is correct.
    "undecided" means that a sham does as well here, or that there is too little to explain. "failed" means that shams do
    better, or that the map does not depend on weights, class or picture.

    Attributes
    ----------
    tests : tuple of Test
        Those that were asked, in the order of their questions; each has a `name`, `outcome`, `value` and `reason`. Once
        one has failed, no more are asked.
    shams : tuple of Sham
        What the map was to be told apart from, and how each fared. Empty where the tests did not come to that.
    model : str
        The classifier's name.
    method : str
        The method's name.
    layer : str or None
        None where the method looks at none, or nobody knows.
    score : str
        Which number of the class was explained.
    index : int or None
        The explained class; None where something else than a class is explained.
    label : str or None
        Its name.
    probability : float
        Its probability.
    seed : int
        Of all that was drawn.
    labels : sequence of str or None
        Of all classes.
    picture : array (H,W,3)
        What the network saw of it: RGB, uint8.
    exhibits : Exhibits
        What the panel shows.
    doubt : str or None
        Why the map may lie in wrong places; None where nothing says so.
    notes : tuple of str
        What could not be tried, and why.
    title : str or None
        What is explained in place of a class, as people call it: "box 0, person".
    thing : mapping
        The same by the keys that a record has for it: "box", "number", "text" and so on.

    Examples
    --------
    >>> import gradcam
    >>> verdict = gradcam.evaluation.check(gradcam.load_classifier(), "photos/coffee.jpg", method="centre")
    >>> verdict.outcome, verdict.class_name, verdict.told_apart
    ('failed', 'espresso (967)', [])
    >>> verdict.to_record()["tests"][-1]["outcome"]
    'failed'
    >>> gradcam.write_image("verdict.png", verdict.panel())
    """

    tests: tuple[Test, ...]
    shams: tuple[Sham, ...]
    model: str
    method: str
    layer: str | None
    score: str
    index: int | None
    label: str | None
    probability: float
    seed: int
    labels: Sequence[str] | None = field(repr=False)
    picture: Pixels = field(repr=False)
    exhibits: Exhibits = field(repr=False)
    doubt: str | None = None
    notes: tuple[str, ...] = ()
    title: str | None = None
    thing: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        tests = ", ".join(f"{test.name} {test.outcome} ({test.value:.2g})" for test in self.tests)
        place = "" if self.layer is None else f" at {self.layer}"
        doubt = f"; {shorten(self.doubt)}" if self.doubt else ""
        return f"Verdict({self.outcome}: {shorten(self.class_name)} by {self.method}{place}; {tests}{doubt})"

    @property
    def outcome(self) -> Outcome:
        """The worst of the tests'; of a map that may lie in wrong places it is failed."""
        return "failed" if self.doubt else max((test.outcome for test in self.tests), key=OUTCOMES.index)

    @property
    def class_name(self) -> str:
        """The explained class, by its label and index, or what else is explained."""
        return self.title or name_class(self.index, self.label, with_index=True)

    @property
    def told_apart(self) -> list[str]:
        """The names of the shams that the map does better than."""
        return [sham.name for sham in self.shams if sham.is_apart]

    @property
    def rival(self) -> str | None:
        """The most probable other class, where the same map serves it: its name and the maps' rank correlation."""
        likeness = self.exhibits.likeness
        if likeness is None or float(likeness[0]) < ALIKE:
            return None
        first = self.exhibits.rivals[0]
        name = name_class(first, None if self.labels is None else self.labels[first])
        return f"{name} ({float(likeness[0]):.2f})"

    @property
    def summary(self) -> str:
        """What follows from the tests, in sentences: what the map was told apart from, and what would decide."""
        said = [self.doubt] if self.doubt else []
        if self.told_apart:
            said.append(f"Told apart from {', '.join(_words(self.shams, apart=True))}.")
        others = [sham for sham in self.shams if sham.name != RIVAL]
        if as_good := _words(others, apart=False):
            said.append(f"Not told apart from {', '.join(as_good)}.")
        if self.rival is not None:
            said.append(f"The same map serves {self.rival}.")
        if self.outcome == "undecided":
            where = ", or one with the object elsewhere" if self.shams else ""
            said.append(f"What would decide: a picture of which the model is surer{where}.")
        return " ".join([*said, *self.notes])

    def panel(self, *, height: int = 150) -> Pixels:
        """Draw each test in a row.

        Parameters
        ----------
        height : int, default 150
            Of each cell, in pixels. Shown is the part that the network saw.

        Returns
        -------
        array (H,W,3)
            RGB, uint8.

        Raises
        ------
        ImageError
            For a height that is not a number of pixels.
        """
        place = "" if self.layer is None else f" at {self.layer}"
        title = f"{self.class_name}, {self.probability:.0%}, by {self.method}{place} in {self.model}"
        said = f"{self.summary} {PASSED[:1].upper()}{PASSED[1:]}."
        shown = Shown(self.picture, self.tests, self.shams, self.exhibits, self.labels)
        return draw_verdict(shown, self.outcome, title, said, height=height)

    def to_record(self) -> dict[str, Any]:
        """Write all of it but the exhibits, as what JSON has."""
        names = ("model", "method", "layer", "score", "index", "label", "probability", "seed", "outcome")
        tests = [{name: getattr(it, name) for name in ("name", "outcome", "value", "reason")} for it in self.tests]
        parts = ("name", "order", "effect", "alike", "is_apart")
        shams = [{name: getattr(sham, name) for name in parts} for sham in self.shams]
        found = {**{name: getattr(self, name) for name in names}, **self.thing, "doubt": self.doubt, "tests": tests}
        return {
            **found,
            "shams": shams,
            "told_apart": self.told_apart,
            "same_map": self.rival,
            "notes": list(self.notes),
        }


def _words(shams: Sequence[Sham], *, apart: bool) -> list[str]:
    return [sham.words for sham in shams if sham.is_apart == apart]
