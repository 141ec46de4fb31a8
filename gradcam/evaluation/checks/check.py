"""A verdict on one explanation of one picture: what it can be told apart from, by tests that it can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.batch.findings import describe_instance
from gradcam.cam.grid import find_doubt
from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError, ModelError, describe_unexpected, shorten
from gradcam.evaluation.checks.findings import Exhibits, Outcome, Test
from gradcam.evaluation.checks.grounds import (
    CELLS,
    Ground,
    count_as_good,
    find_ground,
    make_alone,
    read_others,
    resize,
)
from gradcam.evaluation.checks.shams import EFFECT, RIVAL, SHAMS, ControlMap, draw_noise, judge_sham, make_shams
from gradcam.evaluation.checks.uncertainty import spread, undo_views, view_images
from gradcam.evaluation.checks.verdict import ALIKE, Verdict
from gradcam.evaluation.controls import Explain, find_explained
from gradcam.evaluation.explainers import Counter, Explainer, run_explain
from gradcam.evaluation.metrics.soundness import (
    Randomisation,
    draw_models,
    draw_networks,
    explain_or_blank,
    find_rivals,
    rank_correlation,
)
from gradcam.evaluation.subject import Subject, check_heatmaps, draw
from gradcam.images.read import crop
from gradcam.layers.find import find_layer, unwrap, without_wrappers
from gradcam.layers.layout import to_reshape
from gradcam.models.classifier import Classifier, Picture
from gradcam.models.kinds import TaskModel
from gradcam.models.labels import name_class
from gradcam.models.preprocess import find_canvas
from gradcam.models.scores import COSINES, IN_UNIT, PictureScores, find_among
from gradcam.options import Progress, accept_old_parameters
from gradcam.targets.classes import ClassTarget

STAGES = 3  # the head, the middle, all of it
OTHERS = 3  # classes drawn by chance, beside the strongest rival
SAMPLES = 4  # of noise
NOISE = 0.02  # the largest change of a value, as a share of the image's whole range
SAME = 0.999  # rank correlation from which on two maps are one, whatever noise does
ENOUGH = 0.2  # of the probability, that has to be there to be explained
CHANCE = 0.1  # above that of any class, from where on a model is said to know one
NETWORKS = 9  # with weights drawn anew: one of ten is the best by chance
SURELY = 0.6  # of the area under the ROC curve, from which on a map marks its picture's place
PLACES = 19  # beside a map's own, where a picture stands by itself: one in twenty is as good by chance
LEVEL = 0.05
# The map, with noise, of other classes, weights and pictures, in four places, of five views, and shams in these places.
MOST_MAPS = 1 + SAMPLES + (1 + OTHERS) + STAGES + 1 + CELLS + 5 + (1 + 2 * CELLS)
BLANK = "The heatmap is constant: it marks nothing."


@accept_old_parameters
def check(
    classifier: Classifier,
    image: Picture,
    *,
    method: str | Explain | None = None,
    layer: str | nn.Module | None = None,
    target: Any = None,
    score: str = "logit",
    reshape: Any = None,
    other_images: Sequence[Picture] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """Test whether a heatmap can be trusted, and compare it with control maps that explain nothing.

    - stability: does the heatmap stay the same under a little noise?
    - classes: does the heatmap differ between classes? The test fails if the heatmaps of three random classes are as
      similar to it as heatmaps of noisy images.
    - randomisation: does the heatmap change when the weights are re-initialised (a sanity check)? The test fails if noise
      changes the heatmap as much.
    - placement: does the heatmap follow the image? The image is placed in each cell of a 2 x 2 grid with three other
      images, and the heatmap has to mark that cell. The value is the area under the ROC curve.
    - covering: do the marked pixels matter for the class? The value is the share of the class's evidence that lies on
      them. Evidence is the difference in log-odds between the image with only these pixels and the image without them.
      Missing pixels are filled in four ways: mean colour, blur, another image, inpainting.

    There are eight control maps. Two are copies of the heatmap, mirrored and shifted. Three are heatmaps of something
    else: a different image, the rival class (the most probable of the other classes), and a network with random weights.
    Three are made without the model: noise with the heatmap's spectrum, a central blob, and the image's edges. A heatmap
    that is distinguished from all of them passes. Only the heatmap of the rival class may be the same, because similar
    classes can depend on the same pixels. All numbers are measured on this image and this model.

    The image is tested alone, without a grid, in two cases. If the model does not recognise the class among other images,
    the placement test shifts and mirrors the image. If the target has a fixed place, such as a box, there is no placement
    test. In both cases, the covering test compares the heatmap with copies of it at nineteen random positions.

    Parameters
    ----------
    classifier : Classifier
        The model.
    image : image
        The image, as in `Classifier.explain`.
    method : str, Method or callable, default None
        A name in `METHODS` or `CONTROLS`, a method, `FILE.py:NAME`, or a function of a model, images (N,C,H,W) and
        classes (N,) that returns heatmaps (N,H,W), from any library. It is called with one image at a time. The tests
        also call it with other images, with other classes, and with re-initialised copies of the model. None is
        "gradcam" for classifiers, and the default of the task for other models.
    layer : str or nn.Module, default None
        As in `Classifier.explain`, for methods by name.
    target : int or str, default None
        A class by index or label; None for the top class. For models of other tasks, such as detectors: a target as in
        `explain`. If the target selects several boxes or masks, the first one is tested. In place of other classes, the
        tests then use the model's other detections or other targets.
    score : str, default "logit"
        As in `targets.ClassTarget`, for methods by name.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`, for methods by name.
    other_images : sequence of images, default ()
        Three or more comparison images. The tests use the three images with the lowest probability of the class. If you
        pass fewer than three images, the package's five photographs replace them.
    seed : int, default 0
        Random seed.
    progress : callable, default None
        Called with the number of finished steps and the total.

    Returns
    -------
    Verdict
        Its `outcome` is "passed", "undecided" or "failed"; `distinguished_from` names the control maps that
        the heatmap beats.

    Raises
    ------
    GradcamError
        If the method is unknown, or the seed is not an int. Also as in `Classifier.explain`.
    TargetError
        If the target is more than one class, or if the score is unknown.

    Examples
    --------
    >>> import gradcam
    >>> verdict = gradcam.evaluation.check(gradcam.load_classifier(), "photos/coffee.jpg")
    >>> verdict.outcome, [test.name for test in verdict.tests]
    ('passed', ['stability', 'classes', 'randomisation', 'placement', 'covering'])
    >>> "mirrored" in verdict.distinguished_from
    True

    References
    ----------
    Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018, for weights and classes; Böhle et al.,
    "Convolutional Dynamic Alignment Networks", CVPR 2021, section 4.2, for the grid of images; Binder et al.,
    "Shortcomings of Top-Down Randomization-Based Sanity Checks", CVPR 2023, for why weights alone decide little.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise GradcamError(f"seed is {shorten(seed)}, expected an int.")
    ClassTarget(score=score)  # of an unknown one it says which there are
    prepared = classifier.prepare(image)
    shown = other_images if len(other_images) >= CELLS - 1 else read_others()
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
    found = int(subject.classes)
    kind = classifier.instance(found).kind if isinstance(classifier, PictureScores) else "class"
    inquiry = Inquiry(
        subject,
        explain,
        torch.cat([resize(classifier.batch([it]), images.shape[2:]) for it in shown]),
        classifier.labels,
        seed,
        Counter(progress, MOST_MAPS),
        has_place=kind not in ("class", *COSINES),
        is_probability=kind in ("class", *IN_UNIT),
    )
    used = place if isinstance(explained, Method) and explained.has_layer else None
    tests, shams, exhibits = inquiry.ask()
    inquiry.counter.reach(MOST_MAPS)
    return Verdict(
        tests=tests,
        controls=shams,
        model=classifier.name,
        method=explained.name,
        layer=used and without_wrappers(used),
        score=score,
        **_name(classifier, found, wanted),
        probability=float(subject.probabilities),
        seed=seed,
        labels=classifier.labels,
        image=crop(prepared.reading.picture, find_canvas(classifier.preprocess, prepared)),
        artifacts=exhibits,
        doubt=used and find_doubt(unwrap(classifier.model), images, used, to_reshape(reshape)),
        notes=tuple(inquiry.notes),
    )


def _tell_from_others(model: nn.Module, images: Tensor, activation: Any, index: int | None = None) -> float:
    """How much more probable a class, or the most probable one, is on the first image than on those that show it least."""
    found = Subject(model, images, activation=activation).all_probabilities
    own, *others = found[:, int(found[0].argmax()) if index is None else index].tolist()
    least = sorted(others)[: CELLS - 1]
    return float(own - sum(least) / len(least))


def _name(classifier: Classifier, index: int, target: Any) -> dict[str, Any]:
    """What a verdict says of what is explained."""
    label = classifier.label(index)
    if not isinstance(classifier, PictureScores):
        return {"index": index, "label": label}
    instance = classifier.instance(index)
    said = {name: value for name, value in describe_instance(instance, target).items() if value is not None}
    return {"index": instance.index, "label": instance.name, "title": label, "target_fields": said}


@dataclass(frozen=True, eq=False)
class Inquiry:
    """The tests of the map of one image. `beside`: other pictures (M,C,H,W). `has_place`: what is explained is at a place of
    this picture, so that it is not looked for in others. `is_probability`: of the score."""

    subject: Subject
    explain: Explain
    beside: Tensor
    labels: Sequence[str] | None
    seed: int
    counter: Counter
    has_place: bool
    is_probability: bool
    notes: list[str] = field(default_factory=list)

    def ask(self) -> tuple[tuple[Test, ...], tuple[ControlMap, ...], Exhibits]:
        """The tests one after another, until one has failed; the shams once the others have passed."""
        tests: list[Test] = []
        steps = (self._ask_stability, self._ask_classes, self._ask_weights, self._ask_picture)
        heatmap = self.look(self.subject.images)
        exhibits, limit = self._disturb(heatmap)
        if bool(heatmap.amax() == heatmap.amin()):
            return (Test("covering", "failed", 0.0, BLANK),), (), exhibits
        too_little = self._tell_too_little(heatmap)
        for step in steps:
            exhibits, found = step(exhibits, SAME if too_little else limit)
            # Where there is nothing to explain, a map of rounding and noise is the model's fault, not the method's.
            is_excused = too_little is not None and step == self._ask_stability
            tests += [replace(it, outcome="undecided") if is_excused and it.outcome == "failed" else it for it in found]
            if any(test.outcome == "failed" for test in tests):
                return tuple(tests), (), exhibits
        if too_little:
            return (*tests, Test("covering", "undecided", 0.0, too_little)), (), exhibits
        exhibits, more, shams = self._ask_ground(exhibits)
        return (*tests, *more), shams, exhibits

    def look(self, images: Tensor, index: int | None = None, model: nn.Module | None = None) -> Tensor:
        """The maps (N,H,W) of images (N,C,H,W), one by one, of the class or of another one, of the model or another."""
        explain = run_explain if model is None else explain_or_blank
        maps = []
        for image in images.split(1):
            classes = self.subject.classes if index is None else torch.full_like(self.subject.classes, index)
            made = explain(self.explain, model or self.subject.model, image.detach().clone(), classes)
            maps.append(check_heatmaps(made, (1, *image.shape[2:]), image.device))
            self.counter.step()
        return torch.cat(maps)

    def _disturb(self, heatmap: Tensor) -> tuple[Exhibits, float]:
        """The map under noise, and how alike two maps have to be to be one."""
        images, generator = self.subject.images, draw(self.seed, "noise")
        radius = NOISE * float(images.amax() - images.amin())
        drawn = torch.rand((SAMPLES, *images.shape[1:]), generator=generator, dtype=torch.float32, device="cpu")
        noisy = self.look(images + ((2 * drawn - 1) * radius).to(images.device, images.dtype))
        likeness = rank_correlation(heatmap.expand_as(noisy), noisy)
        return Exhibits(heatmap[0], noisy, likeness), min(SAME, max(ALIKE, float(likeness.min())))

    def _tell_too_little(self, heatmap: Tensor) -> str | None:
        """Why there is nothing that a map could explain; None where there is."""
        if not self.is_probability:
            return None
        subject = self.subject
        probability, count = float(subject.probabilities), subject.all_probabilities.shape[1]
        if not self.has_place and probability < 1 / count + CHANCE:
            return f"The probability is {probability:.2f}, near chance: there is too little to explain."
        ground = make_alone(subject, self.beside)
        masks = torch.stack([ground.mark(heatmap.expand(CELLS, -1, -1)), ground.whole])
        left = ground.subject.score(ground.cover(mask)[1] for mask in masks)
        if probability - float(left.min()) < ENOUGH:
            least = f"The probability is {probability:.2f} and stays at {float(left.min()):.2f} or more"
            return f"{least} if the marked pixels or the whole image are covered: there is too little to explain."
        return None if self.has_place else self._tell_untrained()

    def _tell_untrained(self) -> str | None:
        """Why there is nothing that was learnt; None where there is. If the weights were drawn by chance, drawing them anew
        would change nothing: each network, of its own class, would be as likely to tell the picture most from others."""
        subject = self.subject
        images = torch.cat([subject.images, self.beside])
        own = _tell_from_others(subject.model, images, subject.activation, int(subject.classes))
        try:
            drawn = [
                _tell_from_others(model, images, subject.activation)
                for model in draw_networks(subject, NETWORKS, self.seed)
            ]
        except ModelError:  # of which the test by weights will tell
            return None
        ahead = sum(it >= own for it in drawn)  # of one that gives NaN, none
        if ahead == 0:
            return None
        return (
            f"{ahead} of {NETWORKS} re-initialised copies of the model {'prefers' if ahead == 1 else 'prefer'} "
            "this image to the comparison images at least as clearly as the model does. For the model, the difference in "
            f"probability is {own:.2f}: there is too little to explain."
        )

    def _ask_stability(self, exhibits: Exhibits, limit: float) -> tuple[Exhibits, list[Test]]:
        value, heatmap = float(exhibits.noisy_likeness.mean()), exhibits.heatmap
        shams = torch.stack([draw_noise(heatmap, self.seed, number) for number in range(SAMPLES)])
        by_chance = rank_correlation(heatmap.expand_as(shams), shams)
        highest = float(by_chance.max())
        outcome: Outcome = "passed" if float(exhibits.noisy_likeness.min()) > highest else "undecided"
        reason = (
            f"With noise of up to {NOISE * 100:.0f} % of the image's range, the rank correlation with the original heatmap "
            f"is {value:.2f} on average. For random smooth maps, it is at most {highest:.2f}."
        )
        return exhibits, [Test("stability", "failed" if value <= highest else outcome, value, reason)]

    def _ask_classes(self, exhibits: Exhibits, limit: float) -> tuple[Exhibits, list[Test]]:
        subject = self.subject
        known = [int(find_rivals(subject)), int(subject.classes)]
        generator = draw(self.seed, "other classes")
        shuffled = torch.randperm(
            subject.all_probabilities.shape[1], generator=generator, dtype=torch.int64, device="cpu"
        )
        rivals = (known[0], *[index for index in shuffled.tolist() if index not in known][:OTHERS])
        maps = torch.cat([self.look(subject.images, index) for index in rivals])
        likeness = rank_correlation(exhibits.heatmap.expand_as(maps), maps)
        others = likeness[1:] if len(rivals) > 1 else likeness
        first = name_class(rivals[0], None if self.labels is None else self.labels[rivals[0]])
        reason = f"The rank correlation with the heatmap of the rival class, {first}, is {likeness[0]:.2f}"
        if len(rivals) > 1:
            reason += f". For {len(others)} random classes, it is {float(others.mean()):.2f} on average"
        outcome: Outcome = "passed"
        if bool((others >= limit).all()):
            outcome = "failed"
            reason += f". At {limit:.2f} or more, two heatmaps count as the same: the heatmap ignores the class"
        test = Test("classes", outcome, float(others.mean()), f"{reason}.")
        return replace(exhibits, rivals=rivals, rival_maps=maps, likeness=likeness), [test]

    def _ask_weights(self, exhibits: Exhibits, limit: float) -> tuple[Exhibits, list[Test]]:
        subject = self.subject
        try:
            found = {
                name: self.look(subject.images, model=model) for name, model in draw_models(subject, STAGES, self.seed)
            }
        except ModelError as error:
            return exhibits, [Test("randomisation", "undecided", 0.0, str(error))]
        maps = torch.cat([*found.values()])
        likeness = rank_correlation(exhibits.heatmap.expand_as(maps), maps)
        reason = (
            f"The rank correlation with the original heatmap is {likeness[0]:.2f} if the weights of {next(iter(found))} are "
            f"re-initialised, and {likeness[-1]:.2f} if all weights are re-initialised"
        )
        outcome: Outcome = "passed"
        if float(likeness[-1]) >= limit:
            outcome = "failed"
            reason += f". At {limit:.2f} or more, two heatmaps count as the same: "
            reason += "the heatmap ignores what the model has learnt"
        elif float(likeness[0]) >= limit:
            outcome = "undecided"
            reason += ". The heatmap ignores what the head has learnt"
        drawn = Randomisation(tuple(found), likeness[None], maps[None])
        test = Test("randomisation", outcome, float(likeness.mean()), f"{reason}.")
        return replace(exhibits, randomisation=drawn), [test]

    def _ask_picture(self, exhibits: Exhibits, limit: float) -> tuple[Exhibits, list[Test]]:
        """Fails at once where another picture has the same map."""
        if self.has_place:
            return exhibits, []
        other = self.look(self._choose_others()[:1])
        likeness = float(rank_correlation(exhibits.heatmap[None], other))
        if likeness < limit:
            return exhibits, []
        reason = (
            f"The rank correlation with the heatmap of another image is {likeness:.2f}: the heatmap ignores the image."
        )
        return exhibits, [Test("placement", "failed", 1 / 2, reason)]

    def _choose_others(self) -> Tensor:
        """Three other pictures, which show the class least."""
        subject = self.subject
        classes = [int(subject.classes)] * len(self.beside)
        found = Subject(subject.model, self.beside, classes, activation=subject.activation)
        return self.beside[found.probabilities.argsort(stable=True)[: CELLS - 1]]

    def _ask_ground(self, exhibits: Exhibits) -> tuple[Exhibits, list[Test], tuple[ControlMap, ...]]:
        others = self.beside if self.has_place else self._choose_others()
        ground = None if self.has_place else find_ground(self.subject, others)
        tests: list[Test] = []
        if ground is None:
            placed = exhibits.heatmap.expand(CELLS, -1, -1)
            if not self.has_place:
                self.notes.append(
                    "The model does not recognise the class among other images, so the image was tested alone."
                )
                tests.append(self._follow(exhibits.heatmap))
        else:
            placed = self.look(ground.images)
            order = ground.order(placed)
            tests.append(_judge_order(float(order[:, 0].mean()), count_as_good(order)))
        chosen = ground or make_alone(self.subject, others)
        views = (
            undo_views(self.look(view_images(self.subject.images))) if not self.has_place else exhibits.heatmap[None]
        )
        uncertainty = spread(torch.cat([exhibits.heatmap[None], exhibits.noisy_maps, views]))
        exhibits = replace(exhibits, ground=chosen, placed=placed, uncertainty=uncertainty)
        test, shams = self._cover(exhibits, chosen, placed, others)
        return exhibits, [*tests, test], shams

    def _follow(self, heatmap: Tensor) -> Test:
        """Where the picture is shifted and mirrored, does its map go with it, or stay?"""
        found = self.look(view_images(self.subject.images, far=True))
        goes, stays = (
            rank_correlation(heatmap.expand_as(found), each) for each in (undo_views(found, far=True), found)
        )
        value, ahead = float(goes.mean()), int((goes > stays).sum())
        reason = (
            f"The image was shifted in four directions and mirrored, and the heatmap moved with it in {ahead} of "
            f"{len(goes)} cases. The rank correlation with the original heatmap is {value:.2f} after the heatmap is moved "
            f"back, and {float(stays.mean()):.2f} before."
        )
        outcome: Outcome = "passed" if ahead >= len(goes) - 1 and value >= 1 / 2 else "undecided"
        return Test("placement", "failed" if ahead == 0 else outcome, value, reason)

    def _cover(
        self, exhibits: Exhibits, ground: Ground, placed: Tensor, others: Tensor
    ) -> tuple[Test, tuple[ControlMap, ...]]:
        """The map beside its shams on a ground."""
        made = make_shams(placed, ground.images, dict(self._list_makers(exhibits, ground, others)), self.seed)
        maps = {name: each for name, each in made.items() if isinstance(each, Tensor)}
        for name, error in made.items():
            if isinstance(error, Exception):
                said = str(error) if isinstance(error, GradcamError) else describe_unexpected(error)
                self.notes.append(f"Not compared with {SHAMS[name]}: {said}")
        places = [] if ground.cells is not None else move_by_chance(placed[0], self.seed)
        tried = [
            ground.whole,
            *map(ground.mark, (placed, *maps.values(), *(each.expand_as(placed) for each in places))),
        ]
        found = ground.measure(*tried).mean(1)
        whole, own, *rest = found.tolist()
        if whole <= 0:
            reason = "Covering the whole image does not make the class less probable: there is nothing to explain."
            return Test("covering", "undecided", 0.0, reason), ()
        effect = own / whole

        def order(each: Tensor) -> float | None:
            return None if ground.cells is None else float(ground.order(each)[:, 0].mean())

        shams = tuple(
            judge_sham(
                name,
                each[0],
                float(rank_correlation(placed[:1], each[:1].float())),
                (order(placed), effect),
                (order(each), value / whole),
            )
            for (name, each), value in zip(maps.items(), rest)
        )
        elsewhere = [value / whole for value in rest[len(maps) :]]
        return _judge_effect(effect, shams, elsewhere), shams

    def _list_makers(
        self, exhibits: Exhibits, ground: Ground, others: Tensor
    ) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """The shams that take the model, as functions."""
        size = ground.images.shape[2:]

        def look_elsewhere() -> Tensor:
            return self.look(resize(others[:1], size)).expand(CELLS, -1, -1)

        def look_by_chance() -> Tensor:
            *_, (_, model) = draw_models(self.subject, 1, self.seed)
            return self._look_on(ground, model=model)

        if not self.has_place:
            yield "another image", look_elsewhere
        yield RIVAL, partial(self._look_on, ground, index=exhibits.rivals[0])
        yield "random weights", look_by_chance

    def _look_on(self, ground: Ground, **how: Any) -> Tensor:
        if ground.cells is None:
            return self.look(ground.images[:1], **how).expand(CELLS, -1, -1)
        return self.look(ground.images, **how)


def move_by_chance(heatmap: Tensor, seed: int) -> list[Tensor]:
    """A map (H,W) at places by chance, each as likely as its own: shifted around the picture's sides, and mirrored."""
    generator = draw(seed, "elsewhere")
    moved = []
    for _ in range(PLACES):
        down, right, mirrored = (
            int(torch.randint(most, (1,), generator=generator, dtype=torch.int64, device="cpu"))
            for most in (*heatmap.shape, 2)
        )
        moved.append((heatmap.flip(1) if mirrored else heatmap).roll((down, right), (0, 1)))
    return moved


def _judge_order(value: float, chance: float) -> Test:
    reason = (
        "In a grid with three other images, a random pixel of this image has a higher heatmap value than a random pixel of "
        f"the others in {value * 100:.0f} % of cases. For a heatmap that ignores the image, the probability of this result "
        f"or a better one is {chance * 100:.0f} %."
    )
    outcome: Outcome = "passed" if value >= SURELY and chance <= LEVEL else "undecided"
    return Test("placement", "failed" if value <= 1 / 2 else outcome, value, reason)


def _judge_effect(effect: float, shams: Sequence[ControlMap], elsewhere: Sequence[float]) -> Test:
    counted = [sham for sham in shams if sham.name != RIVAL]
    better = [sham for sham in counted if sham.is_better]
    as_good = [sham for sham in counted if not sham.is_distinguished]
    best = max(counted, key=lambda sham: sham.effect)
    share, most = max(0.0, effect), max(0.0, best.effect)
    reason = (
        f"{share * 100:.0f} % of the class's evidence lies on the marked pixels. "
        f"The best control map, {best.words}, reaches {most * 100:.0f} %"
    )
    if best.is_distinguished and effect - best.effect < EFFECT:
        reason += ", but does not follow the image"
    rival = next((sham for sham in shams if sham.name == RIVAL), None)
    outcome: Outcome = "passed"
    if elsewhere:
        chance = (1 + sum(value >= effect for value in elsewhere)) / (1 + len(elsewhere))
        reason += f". Moved to random positions, the heatmap does at least as well in {chance * 100:.0f} % of cases"
        outcome = "passed" if chance <= LEVEL else "undecided"
    if better:
        worse = ", ".join(sham.words for sham in better)
        return Test("covering", "failed", effect, f"{reason}. The heatmap is worse than {worse}.")
    if rival is not None and rival.is_better:
        return Test("covering", "undecided", effect, f"{reason}. The heatmap is worse than {rival.words}.")
    if as_good:
        return Test("covering", "undecided", effect, f"{reason}. The heatmap is not better than {as_good[0].words}.")
    return Test("covering", outcome if effect >= ENOUGH else "undecided", effect, f"{reason}.")
