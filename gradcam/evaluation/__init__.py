"""How far a map can be trusted: metrics of heatmaps from any library, a check of one explanation, and studies of many.

subject = gradcam.evaluation.Subject(model, images, classes)
gradcam.evaluation.road(subject, heatmaps).combined         # heatmaps (N,H,W), of whatever made them
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradcam.evaluation.annotations.reading import Annotations as Annotations
    from gradcam.evaluation.annotations.reading import Truth as Truth
    from gradcam.evaluation.annotations.reading import read_annotations as read_annotations
    from gradcam.evaluation.boxes import Localisation as Localisation
    from gradcam.evaluation.boxes import localisation as localisation
    from gradcam.evaluation.checks.checking import check as check
    from gradcam.evaluation.checks.verdicts import Verdict as Verdict
    from gradcam.evaluation.classes import class_difference as class_difference
    from gradcam.evaluation.controls import CONTROLS as CONTROLS
    from gradcam.evaluation.controls import Control as Control
    from gradcam.evaluation.curves import Curve as Curve
    from gradcam.evaluation.curves import deletion as deletion
    from gradcam.evaluation.curves import insertion as insertion
    from gradcam.evaluation.curves import sufficiency as sufficiency
    from gradcam.evaluation.explainers import Explainer as Explainer
    from gradcam.evaluation.grid import GridPointing as GridPointing
    from gradcam.evaluation.grid import grid_pointing_game as grid_pointing_game
    from gradcam.evaluation.imputation import impute as impute
    from gradcam.evaluation.intervals import Interval as Interval
    from gradcam.evaluation.intervals import mean_interval as mean_interval
    from gradcam.evaluation.intervals import paired_difference as paired_difference
    from gradcam.evaluation.masking import ConfidenceChange as ConfidenceChange
    from gradcam.evaluation.masking import coherency as coherency
    from gradcam.evaluation.masking import confidence_change as confidence_change
    from gradcam.evaluation.metrics import METRICS as METRICS
    from gradcam.evaluation.metrics import Metric as Metric
    from gradcam.evaluation.mosaics import Mosaic as Mosaic
    from gradcam.evaluation.mosaics import make_mosaics as make_mosaics
    from gradcam.evaluation.noise import max_sensitivity as max_sensitivity
    from gradcam.evaluation.pointing import energy_pointing_game as energy_pointing_game
    from gradcam.evaluation.pointing import pointing_game as pointing_game
    from gradcam.evaluation.randomising import Randomisation as Randomisation
    from gradcam.evaluation.randomising import randomisation as randomisation
    from gradcam.evaluation.recommendation.outcome import Recommendation as Recommendation
    from gradcam.evaluation.recommendation.recommending import recommend as recommend
    from gradcam.evaluation.removal import Road as Road
    from gradcam.evaluation.removal import road as road
    from gradcam.evaluation.study.measurements import Measurement as Measurement
    from gradcam.evaluation.study.study import evaluate as evaluate
    from gradcam.evaluation.subject import Subject as Subject
    from gradcam.evaluation.summaries import adcc as adcc
    from gradcam.evaluation.summaries import complexity as complexity

_HOMES = {
    "Annotations": "annotations.reading",
    "CONTROLS": "controls",
    "ConfidenceChange": "masking",
    "Control": "controls",
    "Curve": "curves",
    "Explainer": "explainers",
    "GridPointing": "grid",
    "Interval": "intervals",
    "Localisation": "boxes",
    "METRICS": "metrics",
    "Measurement": "study.measurements",
    "Metric": "metrics",
    "Mosaic": "mosaics",
    "Randomisation": "randomising",
    "Recommendation": "recommendation.outcome",
    "Road": "removal",
    "Subject": "subject",
    "Truth": "annotations.reading",
    "Verdict": "checks.verdicts",
    "adcc": "summaries",
    "check": "checks.checking",
    "class_difference": "classes",
    "coherency": "masking",
    "complexity": "summaries",
    "confidence_change": "masking",
    "deletion": "curves",
    "energy_pointing_game": "pointing",
    "evaluate": "study.study",
    "grid_pointing_game": "grid",
    "impute": "imputation",
    "insertion": "curves",
    "localisation": "boxes",
    "make_mosaics": "mosaics",
    "max_sensitivity": "noise",
    "mean_interval": "intervals",
    "paired_difference": "intervals",
    "pointing_game": "pointing",
    "randomisation": "randomising",
    "read_annotations": "annotations.reading",
    "recommend": "recommendation.recommending",
    "road": "removal",
    "sufficiency": "curves",
}

__all__ = [*_HOMES]  # noqa: PLE0604  (names, all of them strings)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
