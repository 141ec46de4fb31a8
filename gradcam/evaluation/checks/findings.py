"""What was asked of a map, what came out, and what the tests looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gradcam.errors import show_fields
from gradcam.evaluation.checks.grounds import Ground
from gradcam.evaluation.metrics.soundness import Randomisation

Outcome = Literal["passed", "undecided", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "undecided", "failed")  # from the best to the worst
PASSED = "A passed test does not prove that the heatmap is right."  # follows the outcome "passed"
QUESTIONS = {
    "stability": "Does the heatmap stay the same under a little noise?",
    "classes": "Does the heatmap differ between classes?",
    "randomisation": "Does the heatmap change when the weights are re-initialised?",
    "placement": "Does the heatmap follow the image?",
    "covering": "Do the marked pixels matter for the class?",
}


@dataclass(frozen=True)
class Test:
    """One question, and how the map fared: `value` is the number, `reason` says it in sentences."""

    name: str
    outcome: Outcome
    value: float
    reason: str

    __repr__ = show_fields

    @property
    def question(self) -> str:
        """What is asked."""
        return QUESTIONS[self.name]


@dataclass(frozen=True, eq=False)
class Exhibits:
    """What the tests looked at. `noisy_maps` (S,H,W), and `noisy_likeness` (S,) with the map; `rivals`: the most probable
    other class, and others by chance, their maps (K,H,W) and `likeness` (K,); what the tests did not come to is None.
    `ground`: where it was tried, `placed` the map on it (4,H',W'). `uncertainty` (H,W): as the function of that name."""

    heatmap: Tensor
    noisy_maps: Tensor
    noisy_likeness: Tensor
    rivals: tuple[int, ...] = ()
    rival_maps: Tensor | None = None
    likeness: Tensor | None = None
    randomisation: Randomisation | None = None
    ground: Ground | None = None
    placed: Tensor | None = None
    uncertainty: Tensor | None = None

    __repr__ = show_fields
