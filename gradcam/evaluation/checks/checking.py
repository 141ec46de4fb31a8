"""A verdict on one explanation of one picture: four tests that it can fail, and none that it can win."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradcam.batch.weights import describe_weights
from gradcam.classifiers import Classifier
from gradcam.classifiers.classifier import Picture
from gradcam.effort import Progress
from gradcam.errors import GradcamError, shorten
from gradcam.evaluation.checks.exhibits import collect
from gradcam.evaluation.checks.judging import judge
from gradcam.evaluation.checks.verdicts import Verdict, read_calibration, read_thresholds
from gradcam.evaluation.explainers import Explain, Explainer, find_explained
from gradcam.evaluation.subject import Subject
from gradcam.images import Pixels
from gradcam.layers import find_layer, unwrap
from gradcam.methods import METHODS
from gradcam.reshaping import to_reshape
from gradcam.sites import find_doubt
from gradcam.targets import ClassTarget


def check(
    classifier: Classifier,
    picture: Picture,
    *,
    method: str | Explain = "gradcam",
    layer: str | nn.Module | None = None,
    target: Any = None,
    score: str = "logit",
    reshape: Any = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """Ask four questions of the map of one picture, each of which could refute it, and give the `Verdict`.

    - randomisation: does it change when the weights are randomised, from the top down (`randomisation`)? The value is the
      mean rank correlation over eight stages.
    - classes: does it differ between classes? The value is the mean rank correlation with the maps of ten other classes
      drawn by chance. That with the strongest rival is told as well, and refutes nothing: two kinds of bear are rightly
      looked for in one place.
    - covering: does covering what it marks lower the score more than covering as much elsewhere (`covering.cover`)? The
      value is the share of twenty other places that it beats. An ignorant map has any value with equal chance, and a blob in
      the middle may pass where the object is there: it fails the first two.
    - stability: does it stay under noise (`max_sensitivity`)? The value is the largest relative change in ten draws.

    A layer whose cells lie elsewhere than they are drawn (`Verdict.doubt`) fails whatever the tests say.

    "passed" means not refuted, never correct. Thresholds are those that `scripts/calibrate_check` measured on the embedded
    model, and the verdict says where they are uncalibrated.
    `picture`: as in `Classifier.explain`. `method`: a name in `METHODS` or `CONTROLS`, or a function of
    a model, images (N,C,H,W) and classes (N,) that gives heatmaps (N,H,W), of any library; it is called one image at a time.
    `layer`, `score`, `reshape`: as in `Classifier.explain`; for methods by name. `target`: None for the top class, an index,
    or a label. `progress`: called with the passes done and the number of all.

    Raises as `Classifier.explain` does, `GradcamError` for an unknown method, `TargetError` for more than one class.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise GradcamError(f"seed is {shorten(seed)}, expected an int.")
    ClassTarget(score=score)  # of an unknown one it says which there are
    prepared = classifier.prepare(picture)
    images = classifier.batch([prepared])
    index = classifier.find_class(target) if isinstance(target, str) else target
    subject = Subject(classifier.model, images, index, activation=classifier.activation)
    place = classifier.layer if layer is None else find_layer(unwrap(classifier.model), layer).name
    if callable(method):
        name, explain = getattr(method, "__name__", type(method).__name__), method
    else:
        name = find_explained(method)
        place = classifier.layer_for(name) if layer is None and name in METHODS else place
        explain = Explainer((name,), place, score, classifier.activation, reshape, seed).only(name)
    exhibits = collect(subject, explain, seed=seed, progress=progress)
    found = int(subject.classes)
    explained = place if name in METHODS and not callable(method) and METHODS[name].place == "layer" else None
    return Verdict(
        tests=judge(exhibits, read_thresholds(), classifier.labels),
        calibrated=_is_calibrated(classifier),
        model=classifier.name,
        method=name,
        layer=explained,
        score=score,
        index=found,
        label=classifier.label(found),
        probability=float(subject.probabilities),
        seed=seed,
        labels=classifier.labels,
        picture=_cut(classifier, prepared.reading.picture),
        exhibits=exhibits,
        doubt=explained and find_doubt(unwrap(classifier.model), images, explained, to_reshape(reshape)),
    )


def _is_calibrated(classifier: Classifier) -> bool:
    """Whether these are the very weights that thresholds were measured on."""
    known = read_calibration()
    return bool(classifier.name == known["model"] and describe_weights(classifier)["sha256"] == known["weights"])


def _cut(classifier: Classifier, picture: Pixels) -> Pixels:
    """What the network saw of it."""
    top, left, height, width = classifier.region(*picture.shape[:2])
    return picture[top : top + height, left : left + width]
