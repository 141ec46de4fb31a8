"""Check one heatmap of one image with five tests, and compare the heatmap with eight control maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from gradcam.batch.image_results import describe_instance
from gradcam.cam.methods.base import Method
from gradcam.cam.verify_layout import find_misplacement
from gradcam.errors import GradcamError, ModelError, describe_unexpected, shorten
from gradcam.evaluation.checks.control_maps import (
    ANOTHER_WORD,
    CONTROL_DESCRIPTIONS,
    MIN_EVIDENCE,
    RIVAL,
    SIGNIFICANCE_LEVEL,
    ControlMap,
    compare_with_control,
    evaluate_covering,
    make_control_maps,
    make_spectrum_noise,
    move_randomly,
)
from gradcam.evaluation.checks.findings import CheckArtifacts, Outcome, TestResult
from gradcam.evaluation.checks.folder import FolderVerdict, check_folder
from gradcam.evaluation.checks.near_controls import (
    MASK_BATCHES,
    RANDOM_CLASSES,
    WORD_MASKS,
    NearFindings,
    choose_near_classes,
    choose_rivals,
    compare_near,
    compare_word_maps,
    find_grid,
    measure_evidence,
)
from gradcam.evaluation.checks.placement import (
    CELLS,
    PlacementGrid,
    compute_placement_chance,
    find_recognised_grid,
    place_alone,
    read_bundled_images,
    replace_images,
    resize,
)
from gradcam.evaluation.checks.uncertainty import MAX_NOISE_SHARE, add_noise, spread, undo_views, view_images
from gradcam.evaluation.checks.verdict import MIN_SAME_CORRELATION, Verdict
from gradcam.evaluation.explainers import Explainer, StepCounter, run_explain
from gradcam.evaluation.heatmap_sources import ExplainFunction, find_explainable
from gradcam.evaluation.metrics.soundness import (
    Randomisation,
    explain_or_blank,
    make_random_networks,
    randomise_in_stages,
    rank_correlation,
)
from gradcam.evaluation.subject import Subject, check_heatmaps, make_generator
from gradcam.images.read import crop
from gradcam.layers.find import find_layer, unwrap, without_wrappers
from gradcam.layers.layout import to_reshape
from gradcam.models.classifier import Classifier, ImageInput
from gradcam.models.instance_scores import COSINE_KINDS, PROBABILITY_KINDS, ImageScores, find_instance_classifier
from gradcam.models.labels import name_class
from gradcam.models.preprocess import find_canvas
from gradcam.models.task_models import TaskModel
from gradcam.options import Progress, accept_old_parameters
from gradcam.targets.base import Instance
from gradcam.targets.classes import ClassTarget
from gradcam.targets.word_controls import describe_word_from_text

RANDOMISATION_STAGES = 3  # Stage 1 randomises the head, stage 2 also half of the layers, stage 3 all layers.
NOISE_SAMPLES = 4
LARGE_SHIFT_DIVISOR = 4  # The views of the placement test are shifted by a quarter of the height or width.
MAX_SAME_CORRELATION = 0.999  # Heatmaps with a higher rank correlation always count as the same.
MIN_PROBABILITY_ABOVE_CHANCE = 0.1  # A recognised class exceeds chance (1 / classes) by at least this much.
RANDOM_NETWORKS = 9  # By chance, an untrained model beats nine other untrained models in one of ten cases.
MIN_PLACEMENT_ORDER = 0.6  # smallest area under the ROC curve that passes the placement test
# The largest number of heatmaps in a check. The terms of the sum are: the image, noisy images, other classes, other
# weights, another image, the grid, five views, the control maps, and the near controls: batches of hidden parts, and the
# classes of the two neighbouring indices.
MAX_HEATMAPS = 1 + NOISE_SAMPLES + (1 + RANDOM_CLASSES) + RANDOMISATION_STAGES + 1 + CELLS + 5 + (1 + 2 * CELLS)
MAX_HEATMAPS += MASK_BATCHES + 2
CONSTANT_MESSAGE = "The heatmap is constant: it highlights no part of the image."
ALONE_NOTE = "In a grid of images, the model does not recognise the class, so the image was tested alone."


@overload
def check(classifier: Classifier, image: ImageInput, **options: Any) -> Verdict: ...


@overload
def check(classifier: Classifier, image: list[Any], **options: Any) -> FolderVerdict: ...


@accept_old_parameters  # type: ignore[misc]  # The overloads do not repeat the options.
def check(
    classifier: Classifier,
    image: ImageInput | list[Any],
    *,
    method: str | ExplainFunction | None = None,
    layer: str | nn.Module | None = None,
    target: Any = None,
    score: str = "logit",
    reshape: Any = None,
    other_images: Sequence[ImageInput] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict | FolderVerdict:
    """Test whether a heatmap can be trusted, and compare the heatmap with control maps that do not explain the class.

    - stability: does the heatmap stay the same under a little noise?
    - classes: does the heatmap differ between classes? The test fails if none of three random classes
      changes the heatmap more than a little noise does.
    - randomisation: does the heatmap change when the weights are re-initialised (a sanity check)? The test fails if
      new weights do not change the heatmap more than a little noise does.
    - placement: does the heatmap follow the image? The image is placed in each cell of a 2 x 2 grid with three other
      images, and the heatmap has to mark the image's cell. The value is the area under the ROC curve.
    - covering: do the marked pixels matter for the class? The value is the share of the class's evidence on the marked
      pixels. Evidence is the difference in log-odds between the image with only the marked pixels and the image without
      the marked pixels. Missing pixels are filled in four ways: mean colour, blur, another image, inpainting.

    There are eight control maps. Two are copies of the heatmap, mirrored and shifted. Three explain something else: a
    different image, the rival class (the most probable of the other classes), or a network with random weights. Three
    are computed without the model: noise with the heatmap's spectrum, a central blob, and the image's edges. To pass,
    the heatmap must be distinguished from every control map except the rival's heatmap. The rival's heatmap may be the
    same, because similar classes can depend on the same pixels. All numbers are measured on this image and this model.

    If the target is a word, the other words of the answer replace the other classes. If the image does not
    make the word at least 1.5 times as probable as a blank image, the word follows from the text: the result is undecided,
    and no test is run.

    The image is tested alone, without a grid, in two cases. If the model does not recognise the class among other
    images, the placement test shifts and mirrors the image. If the target has a fixed position, such as a box, or is a word,
    there is no placement test. In both cases, the covering test also compares the heatmap with nineteen copies at random
    positions. For a word, the covering test hides random parts of the image. Its value is then the correlation of the
    heatmap on the hidden pixels with the fall of the word's log-odds.

    Parameters
    ----------
    classifier : Classifier
        The model.
    image : image or list of images
        The image, as in `Classifier.explain`. With a list of 6 or more images, each image is checked. The result is then
        a `FolderVerdict`, which also reports the bugs that repeat over the images, such as displaced heatmaps.
    method : str, Method or callable, default None
        A name in `METHODS` or `CONTROLS`, a method, `FILE.py:NAME`, or a function of a model, images (N,C,H,W) and
        classes (N,) that returns heatmaps (N,H,W), from any library. A function receives one image at a time. The tests
        also call the function with other images, with other classes, and with re-initialised copies of the model. None
        selects "gradcam" for classifiers, and the task's default method for other models.
    layer : str or nn.Module, default None
        As in `Classifier.explain`. Custom functions ignore the layer.
    target : int or str, default None
        A class by index or label; None for the top class. For a list of images, also a list of classes, one per image.
        For models of other tasks, such as detectors: a target as in `explain`. If the target selects several boxes or
        masks, the first one is tested. For models of other tasks, the tests use other detections or other targets
        instead of other classes.
    score : str, default "logit"
        As in `targets.ClassTarget`. Custom functions ignore the score.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`. Custom functions ignore this parameter.
    other_images : sequence of images, default ()
        Three or more comparison images. The tests use the three images with the lowest probability of the class. If you
        pass fewer than three images, the package's five photographs replace them.
    seed : int, default 0
        Random seed.
    progress : callable, default None
        Called with the number of finished steps and the total.

    Returns
    -------
    Verdict or FolderVerdict
        The results. `outcome` is "passed", "undecided" or "failed". `distinguished_from` names the control maps that the
        heatmap beats.

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
    Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018, for the tests of weights and classes; Böhle et al.,
    "Convolutional Dynamic Alignment Networks", CVPR 2021, section 4.2, for the grid of images; Binder et al.,
    "Shortcomings of Top-Down Randomization-Based Sanity Checks", CVPR 2023, for why the test of weights alone proves
    little.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise GradcamError(f"seed is {shorten(seed)}, expected an int.")
    if isinstance(image, list):
        options = {"method": method, "layer": layer, "target": target, "score": score, "reshape": reshape, "seed": seed}
        return check_folder(check, classifier, image, {**options, "other_images": other_images, "progress": progress})
    ClassTarget(score=score)  # An unknown score raises an error that lists the valid scores.
    prepared = classifier.prepare(image)
    comparison_images = other_images if len(other_images) >= CELLS - 1 else read_bundled_images()
    requested_target = target
    if isinstance(classifier, TaskModel):
        image_scores, target = find_instance_classifier(classifier, prepared, target)
        classifier, method = image_scores, method or image_scores.method
    method = method or classifier.default_method
    images = classifier.batch([prepared])
    index = classifier.find_class(target) if isinstance(target, str) else target
    subject = Subject(classifier.model, images, index, activation=classifier.activation)
    source = find_explainable(method)
    if layer is not None:
        layer_name = find_layer(unwrap(classifier.model), layer).name
    else:
        layer_name = classifier.layer_for(source) if isinstance(source, Method) else classifier.layer
    explain = Explainer((source,), layer_name, score, classifier.activation, reshape, seed).only(source.name)
    class_index = int(subject.classes)
    kind = classifier.instance(class_index).kind if isinstance(classifier, ImageScores) else "class"
    words = classifier.instances if isinstance(classifier, ImageScores) and kind == "word" else ()
    others = torch.cat([resize(classifier.batch([other]), images.shape[2:]) for other in comparison_images])
    counter = StepCounter(progress, MAX_HEATMAPS)
    flags = kind not in ("class", *COSINE_KINDS), kind in ("class", *PROBABILITY_KINDS)
    checks = SanityChecks(subject, explain, others, classifier.labels, seed, counter, *flags, words)
    target_layer = layer_name if isinstance(source, Method) and source.has_layer else None
    # The places of pieces are known.
    doubtful_layer = target_layer if getattr(classifier, "pixel_size", None) is None else None
    tests, controls = checks.run()
    doubt = doubtful_layer and find_misplacement(unwrap(classifier.model), images, doubtful_layer, to_reshape(reshape))
    near, is_class = None, kind == "class"
    if not doubt and not words and all(test.outcome == "passed" for test in tests):
        near = checks.compare_near(find_grid(subject, layer_name, reshape) if is_class else None, is_class)
    counter.reach(MAX_HEATMAPS)
    return Verdict(
        tests=tests,
        controls=controls,
        model=classifier.name,
        method=source.name,
        layer=target_layer and without_wrappers(target_layer),
        score=score,
        **_describe_target(classifier, class_index, requested_target),
        probability=float(subject.probabilities),
        seed=seed,
        labels=classifier.labels,
        image=crop(prepared.reading.picture, find_canvas(classifier.preprocess, prepared)),
        artifacts=checks.artifacts,
        doubt=doubt,
        notes=tuple(checks.notes),
        near=near,
    )


def _measure_preference(model: nn.Module, images: Tensor, activation: Any, index: int | None = None) -> float:
    """Return a class's probability for the first image, minus its mean probability for three of the other images.

    The three images with the lowest probability of the class are used. If `index` is None, the class is the top class
    of the first image.
    """
    probabilities = Subject(model, images, activation=activation).all_probabilities
    first, *other_values = probabilities[:, int(probabilities[0].argmax()) if index is None else index].tolist()
    lowest = sorted(other_values)[: CELLS - 1]
    return float(first - sum(lowest) / len(lowest))


def _describe_target(classifier: Classifier, index: int, target: Any) -> dict[str, Any]:
    """Return the fields of `Verdict` that describe the explained target."""
    label = classifier.label(index)
    if not isinstance(classifier, ImageScores):
        return {"index": index, "label": label}
    instance = classifier.instance(index)
    fields = {name: value for name, value in describe_instance(instance, target).items() if value is not None}
    return {"index": instance.index, "label": instance.name, "title": label, "target_fields": fields}


@dataclass(eq=False)
class SanityChecks:
    """The five tests of the heatmap of one image. `other_images` (M,C,H,W) are the comparison images.

    `has_fixed_place` is True if the target belongs to its place in the image, such as a box. `words` are all words of the
    answer, if one of them is tested. A word has a fixed place, too, because the answer does not describe moved images. The
    tests store their data in `artifacts`. `notes` report the control maps that could not be compared.
    """

    subject: Subject
    explain: ExplainFunction
    other_images: Tensor
    labels: Sequence[str] | None
    seed: int
    counter: StepCounter
    has_fixed_place: bool
    is_probability: bool  # True if the target's score is a probability
    words: Sequence[Instance] = ()
    notes: list[str] = field(default_factory=list)
    artifacts: CheckArtifacts = field(init=False)

    @property
    def fits_other_images(self) -> bool:
        """Return whether the target can be explained in other images, unlike a box."""
        return bool(self.words) or not self.has_fixed_place

    def run(self) -> tuple[tuple[TestResult, ...], tuple[ControlMap, ...]]:
        """Run the tests until a test fails. If no test fails, compare the heatmap with control maps."""
        heatmap, index = self.compute_heatmaps(self.subject.images), int(self.subject.classes)
        if self.words and (reason := describe_word_from_text(self.words[index % len(self.words)])):
            self.artifacts = CheckArtifacts(heatmap[0], heatmap[:0], heatmap.new_zeros(0))
            return (TestResult("covering", "undecided", 0.0, reason),), ()
        limit = self._add_noise(heatmap)
        if bool(heatmap.amax() == heatmap.amin()):
            return (TestResult("covering", "failed", 0.0, CONSTANT_MESSAGE),), ()
        too_little = self._describe_too_little(heatmap)
        results = [self._test_stability(heatmap)]
        if too_little:
            limit = MAX_SAME_CORRELATION
            # With too little evidence, heatmaps are mostly rounding errors. Instability is then not the method's fault.
            results = [replace(results[0], outcome="undecided") if results[0].outcome == "failed" else results[0]]
        for test in (self._test_classes, self._test_randomisation, self._test_other_image):
            if results[-1].outcome != "failed":
                results += test(heatmap, limit)
        if results[-1].outcome == "failed":
            return tuple(results), ()
        if too_little:
            return (*results, TestResult("covering", "undecided", 0.0, too_little)), ()
        other_images = self._choose_other_images() if self.fits_other_images else self.other_images
        grid, placed_maps, placement = self._test_placement(heatmap, other_images)
        compare = self._test_word if self.words else self._test_covering
        covering, controls = compare(grid, placed_maps, other_images)
        return (*results, *placement, covering), controls

    def compute_heatmaps(self, images: Tensor, index: int | None = None, model: nn.Module | None = None) -> Tensor:
        """Compute the heatmaps of images, one at a time; `index` and `model` replace the subject's class and model."""
        explain = run_explain if model is None else explain_or_blank
        maps = []
        for image in images.split(1):
            classes = self.subject.classes if index is None else torch.full_like(self.subject.classes, index)
            heatmap = explain(self.explain, model or self.subject.model, image.detach().clone(), classes)
            maps.append(check_heatmaps(heatmap, (1, *image.shape[2:]), image.device))
            self.counter.step()
        return torch.cat(maps)

    def _add_noise(self, heatmap: Tensor) -> float:
        """Explain noisy images, and return the rank correlation at which two heatmaps count as the same."""
        images = add_noise(self.subject.images, NOISE_SAMPLES, make_generator(self.seed, "noise"))
        noisy_maps = self.compute_heatmaps(images)
        correlations = rank_correlation(heatmap.expand_as(noisy_maps), noisy_maps)
        self.artifacts = CheckArtifacts(heatmap[0], noisy_maps, correlations)
        return min(MAX_SAME_CORRELATION, max(MIN_SAME_CORRELATION, float(correlations.min())))

    def _describe_too_little(self, heatmap: Tensor) -> str | None:
        """Return a sentence that says why there is too little evidence to explain; None if there is enough evidence."""
        if not self.is_probability:
            return None
        subject = self.subject
        probability, count = float(subject.probabilities), subject.all_probabilities.shape[1]
        if not self.has_fixed_place and probability < 1 / count + MIN_PROBABILITY_ABOVE_CHANCE:
            return f"The probability is {probability:.2f}, near chance: there is too little evidence to explain."
        grid = place_alone(subject, self.other_images)
        masks = torch.stack([grid.mark(heatmap.expand(CELLS, -1, -1)), grid.cells])
        covered = grid.subject.score(grid.cover(mask)[1] for mask in masks)
        if probability - (lowest := float(covered.min())) < MIN_EVIDENCE:
            reason = f"The probability is {probability:.2f} and stays at {lowest:.2f} or more if the pixels"
            reason += " with the highest heatmap values, or all pixels, are covered"
            return f"{reason}: there is too little evidence to explain."
        return self._describe_untrained() if self.fits_other_images else None

    def _describe_untrained(self) -> str | None:
        """Return a sentence that says why the model appears to be untrained; None if it appears to be trained.

        A model prefers this image if the class is more probable in this image than in the other images. The model's
        preference is compared with the preferences of re-initialised copies, each for the copy's own top class. The
        preference of a trained model is stronger than the preference of every copy.
        """
        subject = self.subject
        images = torch.cat([subject.images, self.other_images])
        measure = partial(_measure_preference, images=images, activation=subject.activation)
        preference = measure(subject.model, index=int(subject.classes))
        try:
            networks = make_random_networks(subject, RANDOM_NETWORKS, self.seed)
            ahead = sum(measure(network) >= preference for network in networks)  # A network with NaN does not count.
        except ModelError:  # If the model cannot be copied, the randomisation test reports the error.
            return None
        if ahead == 0:
            return None
        return (
            f"The model appears to be untrained, so there is too little evidence to explain. The probability of the "
            f"{'word' if self.words else 'class'} is {preference:.2f} higher than in the other images. For {ahead} "
            f"of {RANDOM_NETWORKS} copies of the model with random weights, the difference is at least as large."
        )

    def _test_stability(self, heatmap: Tensor) -> TestResult:
        correlations = self.artifacts.noisy_correlations
        noise = [make_spectrum_noise(heatmap[0], self.seed, number) for number in range(NOISE_SAMPLES)]
        chance = float(rank_correlation(heatmap.expand(NOISE_SAMPLES, -1, -1), torch.stack(noise)).max())
        value = float(correlations.mean())
        outcome: Outcome = "passed" if float(correlations.min()) > chance else "undecided"
        reason = (
            f"With noise of up to {MAX_NOISE_SHARE * 100:.0f} % of the image's range, the rank correlation with the "
            f"original heatmap is {value:.2f} on average. For random smooth maps, the correlation is at most {chance:.2f}."
        )
        return TestResult("stability", "failed" if value <= chance else outcome, value, reason)

    def _test_classes(self, heatmap: Tensor, limit: float) -> list[TestResult]:
        subject, rivals = self.subject, self._choose_rivals()
        maps = torch.cat([self.compute_heatmaps(subject.images, index) for index in rivals])
        correlations = rank_correlation(heatmap.expand_as(maps), maps)
        random_correlations = correlations[1:] if len(rivals) > 1 else correlations
        value = float(random_correlations.mean())
        names = tuple(name_class(index, None if self.labels is None else self.labels[index]) for index in rivals)
        has_words = len(self.words) > 1
        rival, others = (
            ("another word", "other words") if has_words else ("the most probable alternative", "random classes")
        )
        reason = f"The rank correlation with the heatmap of {rival}, {names[0]}, is {correlations[0]:.2f}"
        if len(rivals) > 1:
            reason += f". For {len(rivals) - 1} {others}, the correlation is {value:.2f} on average"
        outcome: Outcome = "passed"
        if bool((random_correlations >= limit).all()):
            # A colour and its object are two words of one place, so one other word with the same heatmap proves nothing.
            outcome = "undecided" if self.words and len(rivals) == 1 else "failed"
            reason += f". Two heatmaps with a correlation of {limit:.2f} or more count as the same"
            if outcome == "failed":
                reason += f": the heatmap ignores the {'word' if self.words else 'class'}"
        fields: Any = {"rivals": rivals, "rival_names": names, "rival_maps": maps, "rival_correlations": correlations}
        self.artifacts = replace(self.artifacts, **fields)
        return [TestResult("classes", outcome, value, f"{reason}.")]

    def _choose_rivals(self) -> tuple[int, ...]:
        """Return the most probable other class and random classes, or the words that depend most on the image."""
        if len(self.words) > 1:
            others = [i for i in range(len(self.words)) if i != int(self.subject.classes)]
            others.sort(key=lambda i: (self.words[i].without_image or 0) / max(self.words[i].score or 0, 1e-12))
            return tuple(others[: 1 + RANDOM_CLASSES])
        return choose_rivals(self.subject, self.seed)

    def _test_randomisation(self, heatmap: Tensor, limit: float) -> list[TestResult]:
        subject = self.subject
        try:
            maps_by_layer = {
                name: self.compute_heatmaps(subject.images, model=model)
                for name, model in randomise_in_stages(subject, RANDOMISATION_STAGES, self.seed)
            }
        except ModelError as error:
            return [TestResult("randomisation", "undecided", 0.0, str(error))]
        maps = torch.cat([*maps_by_layer.values()])
        correlations = rank_correlation(heatmap.expand_as(maps), maps)
        reason = (
            f"The rank correlation with the original heatmap is {correlations[0]:.2f} if the weights of "
            f"{next(iter(maps_by_layer))} are re-initialised, and {correlations[-1]:.2f} if all weights are re-initialised"
        )
        outcome: Outcome = "passed"
        if float(correlations[-1]) >= limit:
            outcome, ignored = "failed", "the heatmap ignores what the model has learnt"
            reason += f". Two heatmaps with a correlation of {limit:.2f} or more count as the same: {ignored}"
        elif float(correlations[0]) >= limit:
            outcome = "undecided"
            reason += ". The heatmap ignores what the head has learnt"
        randomised = Randomisation(tuple(maps_by_layer), correlations[None], maps[None])
        self.artifacts = replace(self.artifacts, randomisation=randomised)
        return [TestResult("randomisation", outcome, float(correlations.mean()), f"{reason}.")]

    def _test_other_image(self, heatmap: Tensor, limit: float) -> list[TestResult]:
        """Return a list with a failed placement test if another image has the same heatmap, otherwise an empty list."""
        if not self.fits_other_images:
            return []
        other_heatmap = self.compute_heatmaps(self._choose_other_images()[:1])
        correlation = float(rank_correlation(heatmap, other_heatmap))
        reason = f"The rank correlation with the heatmap of another image is {correlation:.2f}"
        result = TestResult("placement", "failed", 1 / 2, f"{reason}: the heatmap ignores the image.")
        return [result] if correlation >= limit else []

    def _choose_other_images(self) -> Tensor:
        """Return the three comparison images with the lowest probability of the class."""
        probabilities = replace_images(self.subject, self.other_images).probabilities
        return self.other_images[probabilities.argsort(stable=True)[: CELLS - 1]]

    def _test_placement(self, heatmap: Tensor, other_images: Tensor) -> tuple[PlacementGrid, Tensor, list[TestResult]]:
        """Return the test images, the heatmaps, and the results. A target with a fixed position gets no results."""
        grid = None if self.has_fixed_place else find_recognised_grid(self.subject, other_images)
        placed_maps, results, view_maps = heatmap.expand(CELLS, -1, -1), list[TestResult](), heatmap
        if grid is not None:
            placed_maps = self.compute_heatmaps(grid.images)
            results.append(_evaluate_placement(grid.order(placed_maps)))
        elif not self.has_fixed_place:
            self.notes.append(ALONE_NOTE)
            results.append(self._test_views(heatmap))
        if not self.has_fixed_place:
            view_maps = undo_views(self.compute_heatmaps(view_images(self.subject.images)))
        grid = grid or place_alone(self.subject, other_images)
        uncertainty = spread(torch.cat([heatmap, self.artifacts.noisy_maps, view_maps]))
        self.artifacts = replace(self.artifacts, grid=grid, placed_maps=placed_maps, uncertainty=uncertainty)
        return grid, placed_maps, results

    def _test_views(self, heatmap: Tensor) -> TestResult:
        """Test whether the heatmap moves with the image when the image is shifted and mirrored."""
        view_maps = self.compute_heatmaps(view_images(self.subject.images, LARGE_SHIFT_DIVISOR))
        before = heatmap.expand_as(view_maps)
        moved_back = rank_correlation(before, undo_views(view_maps, LARGE_SHIFT_DIVISOR))
        unmoved = rank_correlation(before, view_maps)
        value, ahead = float(moved_back.mean()), int((moved_back > unmoved).sum())
        reason = (
            f"The image was shifted in four directions and mirrored, and the heatmap moved with it in {ahead} of "
            f"{len(moved_back)} cases. The rank correlation with the original heatmap is {value:.2f} after the heatmap is "
            f"moved back, and {float(unmoved.mean()):.2f} before."
        )
        outcome: Outcome = "passed" if ahead >= len(moved_back) - 1 and value >= 1 / 2 else "undecided"
        return TestResult("placement", "failed" if ahead == 0 else outcome, value, reason)

    def _test_covering(
        self, grid: PlacementGrid, placed_maps: Tensor, other_images: Tensor
    ) -> tuple[TestResult, tuple[ControlMap, ...]]:
        """Compare the heatmap with its control maps by the evidence on the marked pixels."""
        maps = self._make_controls(grid, placed_maps, self._list_makers(grid, other_images))
        moved_maps = move_randomly(placed_maps[0], self.seed) if grid.is_alone else []
        moved_masks = (grid.mark(moved.expand_as(placed_maps)) for moved in moved_maps)
        masks = [grid.cells, *map(grid.mark, (placed_maps, *maps.values())), *moved_masks]
        total, marked, *control_evidence = grid.measure(*masks).mean(1).tolist()
        if total <= 0:
            reason = "Covering the whole image does not make the class less probable: there is nothing to explain."
            return TestResult("covering", "undecided", 0.0, reason), ()
        effect, *control_effects = (value / total for value in (marked, *control_evidence))
        results = grid.mean_order(placed_maps), effect
        controls = []
        for (name, control), control_effect in zip(maps.items(), control_effects):
            alike = float(rank_correlation(placed_maps[:1], control[:1]))
            control_results = grid.mean_order(control), control_effect
            controls.append(compare_with_control(name, control[0], alike, results, control_results))
        return evaluate_covering(effect, controls, control_effects[len(maps) :]), tuple(controls)

    def _test_word(
        self, grid: PlacementGrid, heatmaps: Tensor, other_images: Tensor
    ) -> tuple[TestResult, tuple[ControlMap, ...]]:
        """Compare the heatmap of a word with its control maps by the evidence on random masks."""
        evidence = measure_evidence(self.subject, None, self.seed, self.counter.step, count=WORD_MASKS)
        makers = self._list_makers(grid, other_images)
        if len(self.words) > 1 and (rival_maps := self.artifacts.rival_maps) is not None:
            makers[ANOTHER_WORD] = lambda: evidence.find_best(rival_maps).expand_as(heatmaps)
        maps = self._make_controls(grid, heatmaps, makers)
        return compare_word_maps(evidence, heatmaps[0], {name: maps[name][0] for name in maps}, self.seed)

    def _make_controls(self, grid: PlacementGrid, heatmaps: Tensor, makers: dict[str, Any]) -> dict[str, Tensor]:
        """Return the control maps (4,H,W) by name, and note the ones that cannot be computed."""
        maps, errors = make_control_maps(heatmaps, grid.images, makers, self.seed)
        for name, error in errors.items():
            message = str(error) if isinstance(error, GradcamError) else describe_unexpected(error)
            self.notes.append(f"The heatmap was not compared with {CONTROL_DESCRIPTIONS[name]}: {message}")
        return maps

    def _list_makers(self, grid: PlacementGrid, other_images: Tensor) -> dict[str, Callable[[], Tensor]]:
        """Return, by name, one function for each control map that needs the model."""

        def explain_other_image() -> Tensor:
            return self.compute_heatmaps(resize(other_images[:1], grid.images.shape[2:])).expand(CELLS, -1, -1)

        def explain_random_network() -> Tensor:
            *_, (_, model) = randomise_in_stages(self.subject, 1, self.seed)
            return self._explain_grid(grid, model=model)

        makers = {"another image": explain_other_image} if self.fits_other_images else {}
        if len(self.words) <= 1:
            makers[RIVAL] = partial(self._explain_grid, grid, index=self.artifacts.rivals[0])
        return {**makers, "random weights": explain_random_network}

    def compare_near(self, cells: Sequence[int] | None, has_classes: bool) -> NearFindings:
        """Compare the heatmap with near controls, on evidence that does not come from the heatmap."""
        subject, artifacts, class_maps = self.subject, self.artifacts, dict[str, tuple[int, Tensor]]()
        if has_classes and artifacts.rival_maps is not None:
            maps = dict(zip(artifacts.rivals, artifacts.rival_maps))
            for i in choose_near_classes(subject, artifacts.rivals):
                name = name_class(i, None if self.labels is None else self.labels[i], with_index=True)
                class_maps[name] = i, maps[i] if i in maps else self.compute_heatmaps(subject.images, i)[0]
        evidence = measure_evidence(subject, cells, self.seed, self.counter.step)
        return compare_near(artifacts.heatmap, evidence, cells, class_maps, self.seed)

    def _explain_grid(self, grid: PlacementGrid, **options: Any) -> Tensor:
        images = grid.images[:1] if grid.is_alone else grid.images  # Without a grid, all images are equal.
        return self.compute_heatmaps(images, **options).expand(CELLS, -1, -1)


def _evaluate_placement(order: Tensor) -> TestResult:
    value, chance = float(order.diagonal().mean()), compute_placement_chance(order)
    reason = (
        f"The image was placed in a grid with three other images. In {value * 100:.0f} % of cases, a random pixel of this "
        "image has a higher heatmap value than a random pixel of the other images. A heatmap that ignores the image "
        f"reaches at least this percentage with a probability of {chance * 100:.0f} %."
    )
    outcome: Outcome = "passed" if value >= MIN_PLACEMENT_ORDER and chance <= SIGNIFICANCE_LEVEL else "undecided"
    return TestResult("placement", "failed" if value <= 1 / 2 else outcome, value, reason)
