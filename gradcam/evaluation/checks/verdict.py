"""The verdict of a check: its outcome and control maps, as text, as a record and as an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradcam.errors import shorten
from gradcam.evaluation.checks.control_maps import RIVALS, ControlMap
from gradcam.evaluation.checks.findings import OUTCOMES, PASSED_NOTE, CheckArtifacts, Outcome, TestResult
from gradcam.evaluation.checks.near_controls import EMPTY_RECORD, Displacement, NearFindings
from gradcam.evaluation.checks.panel import PanelData, draw_verdict
from gradcam.images.read import Pixels
from gradcam.models.labels import name_class
from gradcam.options import keep_old_names
from gradcam.renames import CHECK, add_old_keys

MIN_SAME_CORRELATION = 0.9  # Heatmaps with a lower rank correlation never count as the same.


@keep_old_names
@dataclass(frozen=True, eq=False)
class Verdict:
    """The result of five tests of one heatmap of one image.

    - "passed": the heatmap beats every control map. Only the rival class's heatmap may be as good. A passed test does not
      prove that the heatmap is right.
    - "undecided": a control map is as good as the heatmap, the rival class's heatmap is better, or there is too little
      evidence to explain.
    - "failed": a control map is better than the heatmap, or the heatmap ignores the weights, the class or the image. The
      rival class's heatmap does not count here.

    Attributes
    ----------
    tests : tuple of TestResult
        The tests that were run, in order. Each test has a `name`, `outcome`, `value` and `reason`. After a failed test,
        the remaining tests are not run.
    controls : tuple of ControlMap
        The control maps and their results. Empty if a failed test, or too little evidence, prevented the comparison.
    model : str
        The classifier's name.
    method : str
        The method's name.
    layer : str or None
        The target layer; None if the method uses no layer, or if the layer is unknown.
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
    artifacts : CheckArtifacts
        The data that the tests compared, such as heatmaps of noisy images.
    doubt : str or None
        A sentence with the reason why the heatmap may be misplaced on the image; None if there is no such reason.
    notes : tuple of str
        Sentences that report what could not be tested or compared, and why.
    title : str or None
        A readable name of the target if it is not a class, such as "box 0, person".
    target_fields : mapping
        The explained target, as record keys and values: "box", "number", "text" and so on.
    near : NearFindings or None
        The comparison with near controls, such as the heatmap moved by one cell; None unless all tests passed, and None
        for words.

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

    tests: tuple[TestResult, ...]
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
    artifacts: CheckArtifacts = field(repr=False)
    doubt: str | None = None
    notes: tuple[str, ...] = ()
    title: str | None = None
    target_fields: Mapping[str, Any] = field(default_factory=dict)
    near: NearFindings | None = None

    def __repr__(self) -> str:
        tests = ", ".join(f"{test.name} {test.outcome} ({test.value:.2g})" for test in self.tests)
        place = "" if self.layer is None else f" at {self.layer}"
        doubt = f"; {shorten(self.doubt)}" if self.doubt else ""
        return f"Verdict({self.outcome}: {shorten(self.class_name)} by {self.method}{place}; {tests}{doubt})"

    @property
    def outcome(self) -> Outcome:
        """Return the worst outcome of all tests, or "failed" if there is a `doubt`."""
        return "failed" if self.doubt else max((test.outcome for test in self.tests), key=OUTCOMES.index)

    @property
    def class_name(self) -> str:
        """Return the explained class with its index, or the `title` if the target is not a class."""
        return self.title or name_class(self.index, self.label, with_index=True)

    @property
    def resolution(self) -> Displacement | None:
        """Return the smallest displacement that was refuted: moved by it in any direction, the heatmap does worse.

        None if the verdict is not "passed", or if the target is a word.
        """
        return None if self.near is None else self.near.resolution

    @property
    def class_verified(self) -> bool | None:
        """Return whether the heatmaps of all compared other classes do worse; None if no class was compared."""
        return None if self.near is None else self.near.class_verified

    @property
    def distinguished_from(self) -> list[str]:
        """Return the names of the control maps that the heatmap beats."""
        return [control.name for control in self.controls if control.is_distinguished]

    @property
    def rival(self) -> str | None:
        """Return the rival class and its heatmap's rank correlation as text; None if the correlation is below 0.9."""
        correlations = self.artifacts.rival_correlations
        if correlations is None or float(correlations[0]) < MIN_SAME_CORRELATION:
            return None
        return f"{self.artifacts.rival_names[0]} ({float(correlations[0]):.2f})"

    @property
    def summary(self) -> str:
        """Return the result in sentences: the control maps that the heatmap is distinguished from, and a next step."""
        sentences = [self.doubt] if self.doubt else []
        if words := [control.words for control in self.controls if control.is_distinguished]:
            sentences.append(f"The heatmap is distinguished from {', '.join(words)}.")
        strict_controls = [control for control in self.controls if control.name not in RIVALS]
        if as_good := [control.words for control in strict_controls if not control.is_distinguished]:
            sentences.append(f"The heatmap is not distinguished from {', '.join(as_good)}.")
        if self.near is not None:
            sentences.append(self.near.summary)
        if self.rival is not None:
            noun = "Another word" if "word" in self.target_fields else "The most probable alternative"
            sentences.append(f"{noun} has the same heatmap: {self.rival}.")
        if self.outcome == "undecided" and not self.target_fields.get("from_text"):
            hint = ", or in which the object is in a different place" if self.controls else ""
            sentences.append(f"For a clearer result, try an image in which the target has a higher probability{hint}.")
        return " ".join([*sentences, *self.notes])

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
        summary = f"{self.summary} {PASSED_NOTE}" if self.outcome == "passed" else self.summary
        data = PanelData(self.image, self.tests, self.controls, self.artifacts)
        return draw_verdict(data, self.outcome, title, summary, height=height)

    def to_record(self) -> dict[str, Any]:
        """Return everything except the artifacts, ready for JSON."""
        names = ("model", "method", "layer", "score", "index", "label", "probability", "seed", "outcome")
        control_fields = ("name", "order", "effect", "alike", "is_distinguished")
        record = {
            **{name: getattr(self, name) for name in names},
            **self.target_fields,
            "doubt": self.doubt,
            "tests": [dict(vars(test)) for test in self.tests],
            "controls": [{name: getattr(control, name) for name in control_fields} for control in self.controls],
            "distinguished_from": self.distinguished_from,
            "same_map": self.rival,
            "notes": list(self.notes),
            **(EMPTY_RECORD if self.near is None else self.near.to_record()),
        }
        return add_old_keys(CHECK, record)
