"""From one map to its numbers: each metric of the table, by the function that computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from gradcam.errors import GradcamError
from gradcam.evaluation.boxes import Localisation, localisation
from gradcam.evaluation.classes import class_difference
from gradcam.evaluation.curves import Curve, deletion, insertion, sufficiency
from gradcam.evaluation.explainers import Explain
from gradcam.evaluation.grid import grid_pointing_game
from gradcam.evaluation.masking import ConfidenceChange, coherency, confidence_change
from gradcam.evaluation.metrics import METRICS
from gradcam.evaluation.noise import max_sensitivity
from gradcam.evaluation.pointing import energy_pointing_game, pointing_game
from gradcam.evaluation.randomising import randomisation
from gradcam.evaluation.removal import road
from gradcam.evaluation.subject import Subject
from gradcam.evaluation.summaries import adcc, complexity

if TYPE_CHECKING:
    from gradcam.evaluation.annotations.reading import Truth

CURVES = ("insertion", "deletion")  # metrics that are areas under one


@dataclass(frozen=True, eq=False)
class Case:
    """One map of one picture, and all that its numbers are made of; what several of them share is computed once.

    `subject`: of one image, which all methods share. `heatmaps`: (1,H,W). `explain`: the method itself. `truth`: where the
    object is, None where nobody says so. `seed`: of whatever is drawn.
    """

    subject: Subject
    heatmaps: Tensor
    explain: Explain
    truth: Truth | None = None
    seed: int = field(default=0, kw_only=True)

    @cached_property
    def insertion(self) -> Curve:
        return insertion(self.subject, self.heatmaps, seed=self.seed)

    @cached_property
    def deletion(self) -> Curve:
        return deletion(self.subject, self.heatmaps, seed=self.seed)

    @cached_property
    def change(self) -> ConfidenceChange:
        return confidence_change(self.subject, self.heatmaps)

    @cached_property
    def coherency(self) -> Tensor:
        return coherency(self.subject, self.heatmaps, self.explain)

    @cached_property
    def complexity(self) -> Tensor:
        return complexity(self.heatmaps)

    @cached_property
    def localisation(self) -> Localisation:
        return localisation(self.heatmaps, _require(self).boxes)


def _require(case: Case) -> Truth:
    if case.truth is None:
        raise GradcamError("This picture has no annotations, of which the metric is made.")
    return case.truth


MEASURES: Mapping[str, Callable[[Case], Tensor]] = {
    "average-drop": lambda case: case.change.drop,
    "increase": lambda case: case.change.increase,
    "average-gain": lambda case: case.change.gain,
    "insertion": lambda case: case.insertion.areas,
    "deletion": lambda case: case.deletion.areas,
    "road": lambda case: road(case.subject, case.heatmaps, seed=case.seed).combined,
    "sufficiency": lambda case: sufficiency(case.subject, case.heatmaps, seed=case.seed),
    "pointing-game": lambda case: pointing_game(case.heatmaps, _require(case).masks),
    "energy-pointing": lambda case: energy_pointing_game(case.heatmaps, _require(case).masks),
    "iou": lambda case: case.localisation.iou,
    "localisation-error": lambda case: case.localisation.errors,
    # The mean over the stages: from the topmost layer alone to all of them.
    "randomisation": lambda case: randomisation(
        case.subject, case.explain, case.heatmaps, seed=case.seed
    ).correlations.mean(1),
    "max-sensitivity": lambda case: max_sensitivity(case.subject, case.explain, case.heatmaps, seed=case.seed),
    "class-difference": lambda case: class_difference(case.subject, case.explain, heatmaps=case.heatmaps),
    "adcc": lambda case: adcc(case.change.drop, case.coherency, case.complexity),
    "coherency": lambda case: case.coherency,
    "complexity": lambda case: case.complexity,
}


def measure(case: Case, metrics: Sequence[str]) -> dict[str, float]:
    """The numbers of one map by these metrics; those that need annotations are left out where there are none.

    Raises as the metrics do, and `GradcamError` for a number that is NaN or infinite.
    """
    wanted = [name for name in metrics if case.truth is not None or METRICS[name].group != "annotations"]
    return {name: _to_number(name, MEASURES[name](case)) for name in wanted}


def list_curves(case: Case, metrics: Sequence[str]) -> dict[str, list[float]]:
    """The probabilities along the curves of these metrics, of those that have one."""
    curves = {"insertion": lambda: case.insertion, "deletion": lambda: case.deletion}
    return {name: curves[name]().probabilities[0].tolist() for name in CURVES if name in metrics}


def measure_mosaic(heatmaps: Tensor, metrics: Sequence[str]) -> dict[str, float]:
    """The numbers of a mosaic's maps (1,4,H,W), one for each of its classes: means over the four.

    Raises as `grid_pointing_game` does.
    """
    found = grid_pointing_game(heatmaps)
    numbers = {"grid-mass": found.mass, "grid-maximum": found.hits}
    return {name: _to_number(name, numbers[name].float().mean(1)) for name in metrics if name in numbers}


def _to_number(name: str, value: Tensor) -> float:
    """Of one image. Raises `GradcamError` where it is no number that a mean could be made of."""
    number = float(value.reshape(-1)[0])
    if not math.isfinite(number):
        raise GradcamError(f"{name} is {number} here: the model's output, or the map, has no number of it.")
    return number
