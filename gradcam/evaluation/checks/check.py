"""A verdict on one explanation of one picture: four tests that it can fail, and none that it can win."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.batch.findings import describe_instance
from gradcam.batch.save import describe_weights
from gradcam.cam.grid import find_doubt
from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError, shorten
from gradcam.evaluation.checks import verdict
from gradcam.evaluation.checks.verdict import MARKED, Exhibits, Occlusion, Test, Verdict, find_marked
from gradcam.evaluation.controls import Explain, find_explained
from gradcam.evaluation.explainers import Counter, Explainer, run_explain
from gradcam.evaluation.metrics.soundness import find_rivals, max_sensitivity, randomisation, rank_correlation
from gradcam.evaluation.subject import Subject, check_heatmaps, draw
from gradcam.images.read import crop
from gradcam.layers.find import find_layer, unwrap, without_wrappers
from gradcam.layers.layout import to_reshape
from gradcam.models.classifier import Classifier, Picture
from gradcam.models.kinds import TaskModel
from gradcam.models.labels import name_class
from gradcam.models.scores import PictureScores, find_among
from gradcam.options import Progress
from gradcam.targets.classes import ClassTarget

ALIKE = 0.9  # rank correlation from which on a rival is looked for in the same place
STAGES = 8
OTHERS = 10  # classes drawn by chance, beside the strongest rival
SAMPLES = 10
NOISE = 0.02  # the largest change of a value, as a share of the image's whole range
SHARES = (0.1, 0.3, 0.5, 0.7)
PLACES = 20
DRAWN = 3  # times as many places are drawn as are taken


def check(
    classifier: Classifier,
    picture: Picture,
    *,
    method: str | Explain | None = None,
    layer: str | nn.Module | None = None,
    target: Any = None,
    score: str = "logit",
    reshape: Any = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """Ask four questions of the map of one picture, each of which could refute it.

    - randomisation: does it change when the weights are randomised, from the top down? The value is the mean rank
      correlation over eight stages.
    - classes: does it differ between classes? The value is the mean rank correlation with the maps of ten other classes
      drawn by chance. That with the strongest rival refutes nothing: two kinds of bear are rightly looked for in one
      place.
    - covering: does covering what it marks lower the score more than covering as much elsewhere? The value is the share
      of twenty other places that it beats. A map that knows nothing has any value with equal chance, and a blob in the
      middle may pass where the object is there: it fails the first two.
    - stability: does it stay under noise? The value is the largest relative change in ten draws.

    "passed" means not refuted, never correct. A layer whose cells lie elsewhere than they are drawn (`Verdict.doubt`)
    fails whatever the tests say. `scripts/calibrate_check` measured the thresholds on the embedded model, and the
    verdict says where they are uncalibrated.

    Parameters
    ----------
    classifier : Classifier
        The model.
    picture : picture
        As in `Classifier.explain`.
    method : str, Method or callable, default None
        A name in `METHODS` or `CONTROLS`, a method itself, `FILE.py:NAME`, or a function of a model, images (N,C,H,W)
        and classes (N,) that gives heatmaps (N,H,W), of any library; it is called one image at a time. None is
        "gradcam", or what suits a model of another task.
    layer : str or nn.Module, default None
        As in `Classifier.explain`, for methods by name.
    target : int or str, default None
        A class by index or label; None for the top class. Of a model of another task, such as a detector, what `explain`
        takes, of which the first is judged; the other classes are then what else was found in the picture, such as its
        other boxes, or what else the target names.
    score : str, default "logit"
        As in `targets.ClassTarget`, for methods by name.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`, for methods by name.
    seed : int, default 0
        Of all that is drawn.
    progress : callable, default None
        Called with the passes done and the number of all.

    Returns
    -------
    Verdict
        Its `outcome` is "passed", "doubtful" or "failed"; `tests` has the four.

    Raises
    ------
    GradcamError
        For an unknown method, a seed that is no int, and as `Classifier.explain` does.
    TargetError
        For more than one class, and for an unknown score.

    Examples
    --------
    >>> import gradcam
    >>> verdict = gradcam.evaluation.check(gradcam.load_classifier(), "photos/coffee.jpg")
    >>> verdict.outcome, [test.name for test in verdict.tests]
    ('passed', ['randomisation', 'classes', 'covering', 'stability'])

    References
    ----------
    Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018; Yeh et al., "On the (In)fidelity and Sensitivity of
    Explanations", NeurIPS 2019.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise GradcamError(f"seed is {shorten(seed)}, expected an int.")
    ClassTarget(score=score)  # of an unknown one it says which there are
    prepared = classifier.prepare(picture)
    wanted = target
    if isinstance(classifier, TaskModel):
        own, target = find_among(classifier, prepared, target)
        classifier, method = own, method or own.method
    method = method or classifier.default_method
    images = classifier.batch([prepared])
    index = classifier.find_class(target) if isinstance(target, str) else target
    subject = Subject(classifier.model, images, index, activation=classifier.activation)
    explained = find_explained(method)
    if layer is not None:
        place = find_layer(unwrap(classifier.model), layer).name
    else:
        place = classifier.layer_for(explained) if isinstance(explained, Method) else classifier.layer
    explain = Explainer((explained,), place, score, classifier.activation, reshape, seed).only(explained.name)
    exhibits = collect(subject, explain, seed=seed, progress=progress)
    used = place if isinstance(explained, Method) and explained.has_layer else None
    found, known = int(subject.classes), verdict.read_calibration()
    is_known = classifier.name == known["model"] and describe_weights(classifier)["sha256"] == known["weights"]
    return Verdict(
        tests=_judge(exhibits, classifier.labels),
        calibrated=bool(is_known),
        model=classifier.name,
        method=explained.name,
        layer=used and without_wrappers(used),
        score=score,
        **_name(classifier, found, wanted),
        probability=float(subject.probabilities),
        seed=seed,
        labels=classifier.labels,
        picture=crop(prepared.reading.picture, classifier.region(*prepared.reading.picture.shape[:2])),
        exhibits=exhibits,
        doubt=used and find_doubt(unwrap(classifier.model), images, used, to_reshape(reshape)),
    )


def _name(classifier: Classifier, index: int, target: Any) -> dict[str, Any]:
    """What a verdict says of what is explained."""
    label = classifier.label(index)
    if not isinstance(classifier, PictureScores):
        return {"index": index, "label": label}
    instance = classifier.instance(index)
    said = {name: value for name, value in describe_instance(instance, target).items() if value is not None}
    return {"index": instance.index, "label": instance.name, "title": label, "thing": said}


def collect(subject: Subject, explain: Explain, *, seed: int = 0, progress: Progress | None = None) -> Exhibits:
    """Everything of one image: N is 1. Raises as `explain` and the functions of the four tests do."""
    known = [int(find_rivals(subject)), int(subject.classes)]
    count, generator = subject.all_probabilities.shape[1], draw(seed, "other classes")
    shuffled = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu").tolist()
    rivals = (known[0], *[index for index in shuffled if index not in known][:OTHERS])  # the strongest first
    counter = Counter(progress, 1 + STAGES + len(rivals) + SAMPLES + (1 + PLACES) * len(SHARES))
    noisy: list[Tensor] = []

    def counted(model: nn.Module, images: Tensor, classes: Tensor) -> Any:
        made = run_explain(explain, model, images.detach(), classes)  # it may ask for gradients in place
        counter.step()
        return made

    def kept(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        noisy.append(check_heatmaps(counted(model, images, classes), (len(images), *images.shape[2:])))
        return noisy[-1]

    def look(index: int) -> Tensor:
        made = counted(subject.model, subject.images, torch.full_like(subject.classes, index))
        return check_heatmaps(made, subject.size, subject.images.device)

    heatmap = look(int(subject.classes))
    randomised = randomisation(subject, counted, heatmap, stages=STAGES, seed=seed)
    counter.reach(1 + STAGES)  # of which a small model has fewer
    others = torch.cat([look(rival) for rival in rivals])
    likeness = rank_correlation(heatmap.expand(len(rivals), -1, -1), others)
    radius = NOISE * float(subject.images.amax() - subject.images.amin())
    sensitivity = max_sensitivity(subject, kept, heatmap, radius=radius, samples=SAMPLES, seed=seed)
    occlusion = occlude(subject, heatmap, seed=seed, progress=counter.step)
    return Exhibits(heatmap[0], randomised, rivals, others, likeness, occlusion, float(sensitivity), torch.cat(noisy))


def occlude(
    subject: Subject,
    heatmaps: Any,
    *,
    shares: Sequence[float] = SHARES,
    places: int = PLACES,
    seed: int = 0,
    progress: Progress | None = None,
) -> Occlusion:
    """Cover the most relevant pixels with the picture's mean, share after share, and as many of the map laid elsewhere.
    Elsewhere are the map's mirror images and quarter turns (half turns where the picture is no square), shifted by
    chance and around the picture's borders: masks of the same area and shape. Three times as many are drawn as
    `places`, and those are taken whose most relevant three tenths lie least on the map's own. A constant map has a
    rate of one half; one that knows nothing has any with equal chance. Raises `ImageError` for other heatmaps."""
    maps = check_heatmaps(heatmaps, subject.size, subject.images.device)
    placed = torch.stack([_choose_places(each, places, seed) for each in maps])
    counter = Counter(progress, (1 + places) * len(shares))
    images, means = subject.images, subject.images.mean((2, 3), keepdim=True)

    def occluded() -> Iterator[Tensor]:
        for place in (maps, *placed.unbind(1)):
            for share in shares:
                yield torch.where(find_marked(place, share, seed)[:, None], means, images)
                counter.step()

    left = subject.score(occluded()).reshape(1 + places, len(shares), len(maps)).permute(2, 0, 1)
    return Occlusion(tuple(shares), left[:, 0], left[:, 1:], placed)


def _choose_places(heatmap: Tensor, places: int, seed: int) -> Tensor:
    """One map (H,W) at so many other places (P,H,W), those that overlap the least first."""
    generator = draw(seed, "elsewhere")
    drawn = []
    for _ in range(DRAWN * places):
        turns, mirrored, down, right = (
            int(torch.randint(most, (1,), generator=generator, dtype=torch.int64, device="cpu"))
            for most in (4, 2, *heatmap.shape)
        )
        turned = torch.rot90(heatmap, turns if heatmap.shape[0] == heatmap.shape[1] else 2 * (turns % 2))
        drawn.append((turned.flip(1) if mirrored else turned).roll((down, right), (0, 1)))
    moved = torch.stack(drawn)
    overlaps = (find_marked(moved, MARKED, seed) & find_marked(heatmap[None], MARKED, seed)).flatten(1).sum(1)
    return moved[overlaps.argsort(stable=True)[:places]]


def _judge(exhibits: Exhibits, labels: Sequence[str] | None) -> tuple[Test, ...]:
    found, values = exhibits.occlusion, exhibits.values
    reasons = {
        "randomisation": _tell_randomisation(exhibits),
        "classes": _tell_classes(exhibits, labels),
        "covering": f"With {found.shares[0]:.0%} to {found.shares[-1]:.0%} of the picture covered by it, the probability is "
        f"{found.own.mean():.2f} on average, and {found.elsewhere.mean():.2f} by the same map laid elsewhere: it is lower "
        f"than at {values['covering']:.0%} of {found.elsewhere.shape[1]} other places.",
        "stability": f"Under noise of up to {NOISE:.0%} of the picture's range it changes by {exhibits.sensitivity:.0%} of "
        f"its own length at most, in {SAMPLES} draws.",
    }
    thresholds = verdict.read_thresholds()
    outcomes = {name: thresholds[name].judge(value) for name, value in values.items()}
    if exhibits.is_constant:
        outcomes["covering"] = "failed"
        reasons["covering"] = "The map is the same everywhere: it marks nothing that could be covered."
    return tuple(
        Test(name, question, outcomes[name], values[name], thresholds[name], reasons[name])
        for name, question in verdict.QUESTIONS.items()
    )


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
    first = exhibits.rivals[0]
    rival = name_class(first, None if labels is None else labels[first])
    strongest = f"{likeness[0]:.2f} with that of its strongest rival, {rival}"
    if len(likeness) == 1:
        return f"Its rank correlation is {strongest}."
    hint = ", which the model may rightly look for in the same place" if likeness[0] >= ALIKE else ""
    return (
        f"Its rank correlation with the maps of {len(likeness) - 1} classes drawn by chance is "
        f"{exhibits.values['classes']:.2f} on average, and {strongest}{hint}."
    )
