"""Results of the tests of a heatmap: outcomes, reasons, and the data that the tests used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gradcam.errors import format_fields
from gradcam.evaluation.checks.placement import PlacementGrid
from gradcam.evaluation.metrics.soundness import Randomisation

Outcome = Literal["passed", "undecided", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "undecided", "failed")  # from best to worst
PASSED_NOTE = "A passed test does not prove that the heatmap is right."  # added to the outcome "passed"
QUESTIONS = {
    "stability": "Does the heatmap stay the same under a little noise?",
    "classes": "Does the heatmap differ between classes?",
    "randomisation": "Does the heatmap change when the weights are re-initialised?",
    "placement": "Does the heatmap follow the image?",
    "covering": "Do the marked pixels matter for the class?",
}


@dataclass(frozen=True)
class TestResult:
    """The result of one test: its outcome, the measured value, and the reason in sentences."""

    name: str
    outcome: Outcome
    value: float
    reason: str

    __repr__ = format_fields

    @property
    def question(self) -> str:
        """Return the question that the test answers."""
        return QUESTIONS[self.name]


@dataclass(frozen=True, eq=False)
class CheckArtifacts:
    """The data that the tests of a verdict compared. Fields of tests that did not run are None or empty.

    `noisy_maps` (S,H,W) are heatmaps of noisy images. `noisy_correlations` (S,) are the rank correlations of
    `noisy_maps` with `heatmap`. `rivals` are the rival class and random classes, and `rival_names` are their names.
    `rival_maps` (K,H,W) are the heatmaps of these classes, and `rival_correlations` (K,) are the rank correlations of
    `rival_maps` with `heatmap`. `placed_maps` (4,H',W') are the heatmaps of the test images in `grid`. `uncertainty`
    (H,W) is computed as in the function `uncertainty`.
    """

    heatmap: Tensor
    noisy_maps: Tensor
    noisy_correlations: Tensor
    rivals: tuple[int, ...] = ()
    rival_names: tuple[str, ...] = ()
    rival_maps: Tensor | None = None
    rival_correlations: Tensor | None = None
    randomisation: Randomisation | None = None
    grid: PlacementGrid | None = None
    placed_maps: Tensor | None = None
    uncertainty: Tensor | None = None

    __repr__ = format_fields
