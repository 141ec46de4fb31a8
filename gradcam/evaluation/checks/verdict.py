"""The verdict on a map: what it was told apart from, in words, numbers and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradcam.errors import shorten
from gradcam.evaluation.checks.findings import OUTCOMES, PASSED, Exhibits, Outcome, Test
from gradcam.evaluation.checks.panel import Shown, draw_verdict
from gradcam.evaluation.checks.shams import RIVAL, ControlMap
from gradcam.images.read import Pixels
from gradcam.models.labels import name_class
from gradcam.options import keep_old_names
from gradcam.renames import CHECK, add_old_keys

ALIKE = 0.9  # rank correlation from which on one map serves two classes


@keep_old_names
@dataclass(frozen=True, eq=False)
class Verdict:
    """The result of five tests of one heatmap of one image.

    - "passed": the heatmap beats every control map, except perhaps the rival class's heatmap. A passed test does not
      prove that the heatmap is right.
    - "undecided": a control map does as well as the heatmap, or there is too little to explain.
    - "failed": a control map does better than the heatmap, or the heatmap ignores the weights, the class or the image.

    Attributes
    ----------
    tests : tuple of Test
        The tests that were run, in order; each has a `name`, `outcome`, `value` and `reason`. Once one test has failed,
        the remaining ones are not run.
    controls : tuple of ControlMap
        The control maps and their results. Empty if the tests ended before they were compared.
    model : str
        The classifier's name.
    method : str
        The method's name.
    layer : str or None
        The target layer; None if the method uses none, or if it is unknown.
    score : str
        The explained score of the class, such as "logit".
    index : int or None
        The explained class; None if the target is not a class.
    label : str or None
        The name of the explained class.
    probability : float
        The probability of the explained class or target.
    seed : int
        The random seed.
    labels : sequence of str or None
        The names of all classes.
    image : array (H,W,3)
        The part of the image that the model sees: RGB, uint8.
    artifacts : Exhibits
        The data behind the panel.
    doubt : str or None
        Why the heatmap may be misplaced on the image; None if there is no sign of that.
    notes : tuple of str
        What could not be tested or compared, and why.
    title : str or None
        A readable name of the target if it is not a class, such as "box 0, person".
    target_fields : mapping
        The explained target, as record keys and values: "box", "number", "text" and so on.

    Examples
    --------
    >>> import gradcam
    >>> verdict = gradcam.evaluation.check(gradcam.load_classifier(), "photos/coffee.jpg", method="centre")
    >>> verdict.outcome, verdict.class_name, verdict.distinguished_from
    ('failed', 'espresso (967)', [])
    >>> verdict.to_record()["tests"][-1]["outcome"]
    'failed'
    >>> gradcam.write_image("verdict.png", verdict.panel())
    """

    tests: tuple[Test, ...]
    controls: tuple[ControlMap, ...]
    model: str
    method: str
    layer: str | None
    score: str
    index: int | None
    label: str | None
    probability: float
    seed: int
    labels: Sequence[str] | None = field(repr=False)
    image: Pixels = field(repr=False)
    artifacts: Exhibits = field(repr=False)
    doubt: str | None = None
    notes: tuple[str, ...] = ()
    title: str | None = None
    target_fields: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        tests = ", ".join(f"{test.name} {test.outcome} ({test.value:.2g})" for test in self.tests)
        place = "" if self.layer is None else f" at {self.layer}"
        doubt = f"; {shorten(self.doubt)}" if self.doubt else ""
        return f"Verdict({self.outcome}: {shorten(self.class_name)} by {self.method}{place}; {tests}{doubt})"

    @property
    def outcome(self) -> Outcome:
        """The worst outcome of all tests; "failed" if there is a `doubt`."""
        return "failed" if self.doubt else max((test.outcome for test in self.tests), key=OUTCOMES.index)

    @property
    def class_name(self) -> str:
        """The explained class with its index, or the `title` if the target is not a class."""
        return self.title or name_class(self.index, self.label, with_index=True)

    @property
    def distinguished_from(self) -> list[str]:
        """The names of the control maps that the heatmap beats."""
        return [control.name for control in self.controls if control.is_distinguished]

    @property
    def rival(self) -> str | None:
        """The rival class, with its heatmap's rank correlation to the checked heatmap; None if that is below 0.9."""
        likeness = self.artifacts.likeness
        if likeness is None or float(likeness[0]) < ALIKE:
            return None
        first = self.artifacts.rivals[0]
        name = name_class(first, None if self.labels is None else self.labels[first])
        return f"{name} ({float(likeness[0]):.2f})"

    @property
    def summary(self) -> str:
        """The result in sentences: the control maps that the heatmap is distinguished from, and what to try next."""
        said = [self.doubt] if self.doubt else []
        if self.distinguished_from:
            said.append(f"Distinguished from {', '.join(_words(self.controls, apart=True))}.")
        others = [control for control in self.controls if control.name != RIVAL]
        if as_good := _words(others, apart=False):
            said.append(f"Not distinguished from {', '.join(as_good)}.")
        if self.rival is not None:
            said.append(f"The rival class has the same heatmap: {self.rival}.")
        if self.outcome == "undecided":
            where = ", or in which the object is in a different place" if self.controls else ""
            said.append(f"For a clearer result, try an image in which the probability is higher{where}.")
        return " ".join([*said, *self.notes])

    def panel(self, *, height: int = 150) -> Pixels:
        """Draw a panel with one row per test.

        Parameters
        ----------
        height : int, default 150
            The height of each cell, in pixels. Cells show the part of the image that the model sees.

        Returns
        -------
        array (H,W,3)
            RGB, uint8.

        Raises
        ------
        ImageError
            If `height` is not a positive number of pixels.
        """
        place = "" if self.layer is None else f" at {self.layer}"
        title = f"{self.class_name}, {self.probability * 100:.0f} %, by {self.method}{place} in {self.model}"
        said = " ".join([self.summary, *([PASSED] if self.outcome == "passed" else [])])
        shown = Shown(self.image, self.tests, self.controls, self.artifacts, self.labels)
        return draw_verdict(shown, self.outcome, title, said, height=height)

    def to_record(self) -> dict[str, Any]:
        """Return everything except the artifacts, ready for JSON."""
        names = ("model", "method", "layer", "score", "index", "label", "probability", "seed", "outcome")
        tests = [{name: getattr(it, name) for name in ("name", "outcome", "value", "reason")} for it in self.tests]
        parts = ("name", "order", "effect", "alike", "is_distinguished")
        record = {
            **{name: getattr(self, name) for name in names},
            **self.target_fields,
            "doubt": self.doubt,
            "tests": tests,
            "controls": [{name: getattr(control, name) for name in parts} for control in self.controls],
            "distinguished_from": self.distinguished_from,
            "same_map": self.rival,
            "notes": list(self.notes),
        }
        return add_old_keys(CHECK, record)


def _words(controls: Sequence[ControlMap], *, apart: bool) -> list[str]:
    return [control.words for control in controls if control.is_distinguished == apart]
