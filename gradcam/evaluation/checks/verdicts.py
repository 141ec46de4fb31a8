"""What was asked of a map, what came out, and the verdict on it."""

# No torch is imported here: what a verdict says is told where nothing is computed any more.

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from gradcam.errors import GradcamError, shorten, show_fields

if TYPE_CHECKING:
    from gradcam.evaluation.checks.exhibits import Exhibits
    from gradcam.images import Pixels

Outcome = Literal["passed", "doubtful", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "doubtful", "failed")  # from the best to the worst
PASSED = "passed means that nothing here refuted the map, never that it is correct"

QUESTIONS = {
    "randomisation": "Does the map change when the weights are randomised?",
    "classes": "Does it differ between classes?",
    "covering": "Does covering what it marks lower the score more than covering as much elsewhere?",
    "stability": "Is it stable under noise?",
}


@dataclass(frozen=True)
class Thresholds:
    """From where on a value passes, and from where on it fails; between them it is doubtful."""

    passes: float
    fails: float

    def judge(self, value: float) -> Outcome:
        """The outcome of this value; what is no number fails."""
        sign = 1 if self.passes < self.fails else -1
        if sign * value <= sign * self.passes:
            return "passed"
        return "doubtful" if sign * value < sign * self.fails else "failed"

    def __str__(self) -> str:
        passes, fails = ("up to", "from") if self.passes < self.fails else ("from", "up to")
        return f"passes {passes} {self.passes:.2f}, fails {fails} {self.fails:.2f}"


@dataclass(frozen=True)
class Test:
    """One question, and how the map fared: `value` is what the thresholds are for, `reason` says it in a sentence."""

    name: str
    question: str
    outcome: Outcome
    value: float
    thresholds: Thresholds
    reason: str

    __repr__ = show_fields


@dataclass(frozen=True, eq=False)
class Verdict:
    """What four tests make of one explanation of one picture. "passed" means not refuted, never correct.

    `tests`: in the order of `QUESTIONS`. `calibrated`: whether the thresholds were measured on this very model.
    `index`, `label`, `probability`: of the class that is explained. `layer`: None where the method looks at none, or nobody
    knows. `labels`: of all classes. `picture`: what the network saw of it. `exhibits`: what the panel shows. `doubt`: why
    the map may lie in wrong places, None where nothing says so.
    """

    tests: tuple[Test, ...]
    calibrated: bool
    model: str
    method: str
    layer: str | None
    score: str
    index: int
    label: str | None
    probability: float
    seed: int
    labels: Sequence[str] | None = field(repr=False)
    picture: Pixels = field(repr=False)
    exhibits: Exhibits = field(repr=False)
    doubt: str | None = None

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
        """The class's label and index."""
        return f"class {self.index}" if self.label is None else f"{self.label} ({self.index})"

    @property
    def caution(self) -> str:
        """Why the map may lie in wrong places, if it may, and how far the thresholds are to be trusted, in sentences."""
        return " ".join(filter(None, (self.doubt, self._calibration)))

    @property
    def _calibration(self) -> str:
        known = read_calibration()
        if self.calibrated:
            return f"The thresholds were calibrated on this model, with {known['method']} at {known['layer']}."
        measured = f"they were measured on {known['model']}, as it comes with gradcam"
        return f"The thresholds are uncalibrated for this model: {measured}. Take them as a guide."

    def panel(self, *, height: int = 150) -> Pixels:
        """A picture that shows each test: RGB, uint8 (H,W,3), with cells of `height` pixels.

        Raises `ImageError` for a height that is not a number of pixels.
        """
        from gradcam.evaluation.checks.panel import draw_check

        return draw_check(self, height=height)

    def to_record(self) -> dict[str, Any]:
        """All of it but the exhibits, as what JSON has."""
        names = ("model", "method", "layer", "score", "index", "label", "probability", "seed", "calibrated", "outcome")
        tests = [
            {
                "name": test.name,
                "outcome": test.outcome,
                "value": test.value,
                "passes": test.thresholds.passes,
                "fails": test.thresholds.fails,
                "reason": test.reason,
            }
            for test in self.tests
        ]
        return {**{name: getattr(self, name) for name in names}, "doubt": self.doubt, "tests": tests}


@functools.cache
def read_calibration() -> dict[str, Any]:
    """What `scripts/calibrate_check` wrote: the model, its weights' hash, the thresholds, and the values behind them."""
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("thresholds.json").read_text("utf-8"))
    return found


def read_thresholds() -> dict[str, Thresholds]:
    """The calibrated thresholds of each test."""
    return {name: Thresholds(**found) for name, found in read_calibration()["thresholds"].items()}


def set_thresholds(knowing: Sequence[float], ignorant: Sequence[float]) -> Thresholds:
    """Thresholds between the values of maps that know the model and of those that do not, where lower is better.

    The worst of the former and the best of the latter leave a gap: its first third passes, its last one fails. Rounded to
    two digits. Raises `GradcamError` where there is no gap.
    """
    worst, best = max(knowing), min(ignorant)
    gap = best - worst
    if gap <= 0:
        raise GradcamError(
            f"Maps that know the model have up to {worst:.4g}, those that do not from {best:.4g}: no gap."
        )
    return Thresholds(round(best - gap * 2 / 3, 2), round(best - gap / 3, 2))
