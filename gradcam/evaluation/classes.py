"""Whether a map depends on the class at all."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradcam.errors import TargetError
from gradcam.evaluation.explainers import Explain, run_explain
from gradcam.evaluation.heatmaps import check_heatmaps
from gradcam.evaluation.ranks import rank_correlation
from gradcam.evaluation.subject import Subject


def class_difference(subject: Subject, explain: Explain, *, heatmaps: Any = None) -> Tensor:
    """1 minus the rank correlation of each image's map with that of the class's strongest rival: float32 (N,) in [0,2].

    Whether maps tell classes apart is what Selvaraju et al. ask of them ("Grad-CAM", ICCV 2017, section 5.1); the measure is
    that of Adebayo et al. (NeurIPS 2018, section 3). 0 says that the map is the same for both, 1 that they have nothing in
    common. The rival is the most probable other class. Where both are of one kind, such as two dogs, they may rightly be
    looked for in one place: a small difference alone refutes nothing, none at all does.
    `explain` makes heatmaps (N,H,W) from a model, images and classes; `heatmaps`, those of the subject's classes, are made
    by it where they are not given. Constant maps are as in `rank_correlation`.

    Raises `TargetError` where the model has one class only, `ImageError` for heatmaps of another form.
    """
    made = run_explain(explain, subject.model, subject.images, subject.classes) if heatmaps is None else heatmaps
    before = check_heatmaps(made, subject.size, subject.images.device)
    rivals = run_explain(explain, subject.model, subject.images, find_rivals(subject))
    return 1 - rank_correlation(before, check_heatmaps(rivals, subject.size, subject.images.device))


def find_rivals(subject: Subject) -> Tensor:
    """The most probable class of each image beside its own: int64 (N,). Raises `TargetError` where there is no other."""
    count = subject.all_probabilities.shape[1]
    if count < 2:
        raise TargetError(f"The model has {count} class: there is no other to compare its map with.")
    others = subject.all_probabilities.scatter(1, subject.classes[:, None], float("-inf"))
    return others.argmax(1)
