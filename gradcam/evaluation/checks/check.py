"""A verdict on one explanation of one picture: four tests that it can fail, and none that it can win."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gradcam.batch.save import describe_weights
from gradcam.cam.budget import Progress
from gradcam.cam.grid import find_doubt
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, shorten
from gradcam.evaluation.checks.tests import NOISE, SAMPLES, Exhibits, collect
from gradcam.evaluation.checks.verdict import (
    QUESTIONS,
    Outcome,
    Test,
    Thresholds,
    Verdict,
    read_calibration,
    read_thresholds,
)
from gradcam.evaluation.explainers import Explain, Explainer, find_explained
from gradcam.evaluation.subject import Subject
from gradcam.images.read import Pixels
from gradcam.layers.find import find_layer, unwrap
from gradcam.layers.reshape import to_reshape
from gradcam.models.classifier import Classifier, Picture
from gradcam.targets import ClassTarget

ALIKE = 0.9  # rank correlation from which on a rival is looked for in the same place


def judge(exhibits: Exhibits, thresholds: Mapping[str, Thresholds], labels: Sequence[str] | None) -> tuple[Test, ...]:
    """The four tests, in the order of `QUESTIONS`."""
    reasons = {
        "randomisation": _tell_randomisation(exhibits),
        "classes": _tell_classes(exhibits, labels),
        "covering": _tell_covering(exhibits),
        "stability": _tell_stability(exhibits),
    }
    return tuple(
        Test(
            name,
            question,
            _decide(name, exhibits, thresholds[name]),
            exhibits.values[name],
            thresholds[name],
            reasons[name],
        )
        for name, question in QUESTIONS.items()
    )


def _decide(name: str, exhibits: Exhibits, thresholds: Thresholds) -> Outcome:
    """A map that is the same everywhere marks nothing, so that there is nothing to cover."""
    if name == "covering" and exhibits.is_constant:
        return "failed"
    return thresholds.judge(exhibits.values[name])


def _tell_randomisation(exhibits: Exhibits) -> str:
    found = exhibits.randomisation
    correlations = found.correlations[0].tolist()
    if all(value == 1 for value in correlations):
        return "It is the same with whatever weights: it tells nothing of what the model has learnt."
    stages = f"{len(correlations)} stage{'' if len(correlations) == 1 else 's'}"
    return (
        f"With weights drawn anew from {found.layers[0]} down to {found.layers[-1]}, in {stages}, the maps' rank "
        f"correlation with it is {exhibits.values['randomisation']:.2f} on average, {max(correlations):.2f} at most."
    )


def _tell_classes(exhibits: Exhibits, labels: Sequence[str] | None) -> str:
    likeness = exhibits.likeness.tolist()
    if all(value == 1 for value in likeness):
        return f"It is the same for {len(likeness)} other class{'' if len(likeness) == 1 else 'es'}: no class is in it."
    rival = _name(exhibits.rivals[0], labels)
    strongest = f"{likeness[0]:.2f} with that of its strongest rival, {rival}"
    if len(likeness) == 1:
        return f"Its rank correlation is {strongest}."
    hint = ", which the model may rightly look for in the same place" if likeness[0] >= ALIKE else ""
    return (
        f"Its rank correlation with the maps of {len(likeness) - 1} classes drawn by chance is "
        f"{exhibits.values['classes']:.2f} on average, and {strongest}{hint}."
    )


def _tell_covering(exhibits: Exhibits) -> str:
    if exhibits.is_constant:
        return "The map is the same everywhere: it marks nothing that could be covered."
    found = exhibits.covering
    places = found.elsewhere.shape[1]
    return (
        f"With {found.shares[0]:.0%} to {found.shares[-1]:.0%} of the picture covered by it, the probability is "
        f"{found.own.mean():.2f} on average, and {found.elsewhere.mean():.2f} by the same map laid elsewhere: it is lower "
        f"than at {exhibits.values['covering']:.0%} of {places} other places."
    )


def _tell_stability(exhibits: Exhibits) -> str:
    return (
        f"Under noise of up to {NOISE:.0%} of the picture's range it changes by {exhibits.sensitivity:.0%} of its own "
        f"length at most, in {SAMPLES} draws."
    )


def _name(index: int, labels: Sequence[str] | None) -> str:
    return f"class {index}" if labels is None else labels[index]


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
