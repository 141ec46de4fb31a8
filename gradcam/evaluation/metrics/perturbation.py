"""Measure how the class's probability changes when pixels are changed (perturbation metrics), and compute ADCC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gradcam.cam.methods.perturbation import check_number
from gradcam.errors import BlindLayerError, GradcamError, format_fields, shorten
from gradcam.evaluation.explainers import run_explain
from gradcam.evaluation.heatmap_sources import ExplainFunction
from gradcam.evaluation.metrics.imputation import NOISE, impute
from gradcam.evaluation.subject import Subject, check_heatmaps, count_pixels, make_generator, rank_pixels, scale_to_unit
from gradcam.options import argument_error, check_count

STEPS = 50
ROAD_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # shares of the pixels that `road` removes


@dataclass(frozen=True, eq=False)
class Curve:
    """The probability of each image's class while more and more pixels of the image are changed.

    Attributes
    ----------
    shares : Tensor (S,)
        The share of changed pixels after each step, float32, from 0 to 1.
    probabilities : Tensor (N,S)
        The probability of each image's class after each step, float32.
    areas : Tensor (N,)
        The area under each image's curve, by the trapezoid rule.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, insertion
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> explanation = gradcam.explain(classifier.model, images, "layer4")
    >>> curve = insertion(Subject(classifier.model, images), explanation, steps=4)
    >>> curve.shares.tolist(), [round(p, 1) for p in curve.probabilities[0].tolist()]
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.9, 0.7, 0.6])
    >>> round(curve.areas.item(), 1)
    0.5
    """

    shares: Tensor
    probabilities: Tensor
    areas: Tensor

    def __repr__(self) -> str:
        images, points = self.probabilities.shape
        return f"Curve({images} image(s), {points} points, mean area {self.areas.mean().item():.3g})"


def insertion(subject: Subject, heatmaps: Any, *, baseline: str = "blur", steps: int = STEPS, seed: int = 0) -> Curve:
    """Measure the class's probability while pixels are inserted, most relevant first; a larger area is better.

    The code of RISE changes 224 pixels per step in images of 224 x 224, which is 224 steps. With `steps=224`, this
    function gives the same numbers.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        One heatmap per image, at the images' size, from any library. Only the order of the values counts, so signed
        heatmaps are allowed.
    baseline : str, default "blur"
        The replacement of missing pixels: "blur", "mean" or "zero".
    steps : int, default 50
        Number of steps. Each step changes the same number of pixels, up to rounding. The curve has `steps` + 1 points.
    seed : int, default 0
        Random seed for the order of pixels of equal value, such as all pixels of a blank heatmap.

    Returns
    -------
    Curve
        The curve of each image. Its `areas` are in [0,1].

    Raises
    ------
    ImageError
        If the heatmaps are not one per image at the images' size, or contain NaN or infinite values.
    GradcamError
        If the baseline is unknown, or `steps` is below 1.
    ModelError
        If the model's output is NaN or infinite.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, insertion
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> explanation = gradcam.explain(classifier.model, images, "layer4")
    >>> subject = Subject(classifier.model, images)
    >>> curve, inverse = insertion(subject, explanation, steps=4), insertion(subject, -explanation.heatmaps, steps=4)
    >>> round(curve.areas.item(), 1), round(inverse.areas.item(), 1)  # the heatmap, and the negated heatmap
    (0.5, 0.1)

    References
    ----------
    Petsiuk et al., "RISE", BMVC 2018, section 4.2.
    """
    check_count(steps, "insertion: steps", "an int, 1 or more.")
    return _compute_curve(subject, _rank(subject, heatmaps, seed), baseline, steps, order=1)


def deletion(subject: Subject, heatmaps: Any, *, baseline: str = "zero", steps: int = STEPS, seed: int = 0) -> Curve:
    """Measure the class's probability while pixels are deleted, most relevant first; a smaller area is better.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        As in `insertion`.
    baseline : str, default "zero"
        The replacement of deleted pixels, as in `insertion`.
    steps : int, default 50
        As in `insertion`.
    seed : int, default 0
        As in `insertion`.

    Returns
    -------
    Curve
        The curve of each image. Its `areas` are in [0,1].

    Raises
    ------
    ImageError
        As in `insertion`.
    GradcamError
        As in `insertion`.
    ModelError
        As in `insertion`.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, deletion
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> explanation = gradcam.explain(classifier.model, images, "layer4")
    >>> curve = deletion(Subject(classifier.model, images), explanation, steps=4)
    >>> [round(p, 1) for p in curve.probabilities[0].tolist()]
    [0.6, 0.1, 0.0, 0.0, 0.0]

    References
    ----------
    Petsiuk et al., "RISE", BMVC 2018, section 4.2.
    """
    check_count(steps, "deletion: steps", "an int, 1 or more.")
    return _compute_curve(subject, _rank(subject, heatmaps, seed), baseline, steps, order=-1)


def sufficiency(
    subject: Subject, heatmaps: Any, *, share: float = 0.2, baseline: str = "blur", seed: int = 0
) -> Tensor:
    """Measure how much the class's probability drops if only the most relevant pixels are kept; lower is better.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        As in `insertion`.
    share : float, default 0.2
        The share of the pixels to keep, above 0 and below 1, rounded to whole pixels.
    baseline : str, default "blur"
        The replacement of the pixels that are not kept, as in `insertion`.
    seed : int, default 0
        As in `insertion`.

    Returns
    -------
    Tensor (N,)
        float32 in [-1,1]: p(image) - p(kept pixels). The result is negative if the kept pixels alone have a higher
        probability than the image.

    Raises
    ------
    ImageError
        As in `insertion`.
    GradcamError
        If the share is not between 0 and 1, or the baseline is unknown.
    ModelError
        As in `insertion`.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, sufficiency
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> explanation = gradcam.explain(classifier.model, images, "layer4")
    >>> subject = Subject(classifier.model, images)
    >>> [round(sufficiency(subject, explanation, share=share).item(), 1) for share in (0.3, 0.6)]
    [0.3, -0.3]

    References
    ----------
    DeYoung et al., "ERASER", ACL 2020, section 4.2, for rationales of a fixed length.
    """
    check_number("sufficiency", "share", share, most=1)
    ranks = _rank(subject, heatmaps, seed)
    counts = [count_pixels(share, ranks[0].numel())]
    return subject.probabilities - subject.score(_replace(subject.baseline(baseline), subject.images, ranks, counts))[0]


def _rank(subject: Subject, heatmaps: Any, seed: int) -> Tensor:
    """Return the rank of each pixel, int32 (N,1,H,W). Comparing int32 is twice as fast as comparing int64."""
    return rank_pixels(check_heatmaps(heatmaps, subject.size, subject.images.device), seed)[:, None].int()


def _replace(before: Tensor, after: Tensor, ranks: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """For each count, yield `before` with the `count` most relevant pixels replaced by pixels of `after`."""
    for count in counts:  # With weights 0 and 1, `lerp` is exact. On a CPU, it is ten times faster than `torch.where`.
        yield torch.lerp(before, after, (ranks < count).to(before.dtype))


def _compute_curve(subject: Subject, ranks: Tensor, baseline: str, steps: int, *, order: Literal[1, -1]) -> Curve:
    counts = [count_pixels(step / steps, ranks[0].numel()) for step in range(steps + 1)]
    before, after = (subject.baseline(baseline), subject.images)[::order]
    between = subject.score(_replace(before, after, ranks, counts[1:-1]))
    rows = [subject.baseline_probabilities(baseline)[None], between, subject.probabilities[None]]
    probabilities = torch.cat(rows[::order]).T
    shares = torch.tensor(counts, device=probabilities.device, dtype=torch.float32) / counts[-1]
    return Curve(shares, probabilities, torch.trapezoid(probabilities, shares))


@dataclass(frozen=True, eq=False)
class ConfidenceChange:
    """The change of the class's probability when the image is multiplied by its heatmap.

    Attributes
    ----------
    drop : Tensor (N,)
        The share of the probability that is lost, float32 in [0,1]. The mean over images is the average drop; lower is
        better.
    increase : Tensor (N,)
        1 if the probability rose, else 0, float32. The mean over images is the increase in confidence; higher is better.
    gain : Tensor (N,)
        The rise of the probability p, divided by the largest possible rise, 1 - p; float32 in [0,1]. The mean over
        images is the average gain; higher is better.

    Examples
    --------
    >>> import gradcam, torch
    >>> from gradcam.evaluation import Subject, confidence_change
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> change = confidence_change(Subject(classifier.model, images), torch.ones(1, 224, 224))  # hides nothing
    >>> change.drop, change.increase, change.gain
    (tensor([0.]), tensor([0.]), tensor([0.]))
    """

    drop: Tensor
    increase: Tensor
    gain: Tensor

    def __repr__(self) -> str:
        means = ", ".join(f"{name} {getattr(self, name).mean().item():.3g}" for name in ("drop", "increase", "gain"))
        return f"ConfidenceChange({len(self.drop)} image(s), means: {means})"


def confidence_change(subject: Subject, heatmaps: Any) -> ConfidenceChange:
    """Measure how the class's probability changes when the image is multiplied by its heatmap.

    Let Y be the class's probability for the image, and O its probability for the image multiplied by the heatmap. Then
    drop is max(0, Y - O) / Y, increase is O > Y, and gain is max(0, O - Y) / (1 - Y). The drop is zero if Y is zero,
    and the gain is zero if Y is one. The image is multiplied after preprocessing. The heatmap is scaled to [0,1] first:
    negative values become zero, and all values are divided by the maximum. A heatmap of ones hides nothing, and O is
    exactly Y. A blank heatmap hides everything.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        One heatmap per image, at the images' size, from any library.

    Returns
    -------
    ConfidenceChange
        The drop, increase and gain of each image.

    Raises
    ------
    ImageError
        If the heatmaps are not one per image at the images' size, or contain NaN or infinite values.
    ModelError
        If the model's output is NaN or infinite.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, confidence_change
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> explanation = gradcam.explain(classifier.model, images, "layer4")
    >>> change = confidence_change(Subject(classifier.model, images), explanation)
    >>> change.drop, change.increase  # the cat is more probable than before
    (tensor([0.]), tensor([1.]))

    References
    ----------
    Chattopadhay et al., "Grad-CAM++", WACV 2018, section 4.1; Zhang et al., "Opti-CAM", CVIU 2024, for the gain.
    """
    units = scale_to_unit(check_heatmaps(heatmaps, subject.size, subject.images.device))
    before = subject.probabilities
    (after,) = subject.score([subject.images * units[:, None].to(subject.images.dtype)])
    after = torch.where(units.amin((1, 2)) == 1, before, after)
    drop, gain = (
        torch.where(limit > 0, change.clamp(min=0) / torch.where(limit > 0, limit, 1.0), 0.0)
        for change, limit in ((before - after, before), (after - before, 1 - before))
    )
    return ConfidenceChange(drop, (after > before).float(), gain)


def coherency(subject: Subject, heatmaps: Any, explain: ExplainFunction) -> Tensor:
    """Measure how similar a class's heatmap remains when the image is multiplied by the heatmap; higher is better.

    The second heatmap explains the same class for the multiplied image. The result is (1 + r) / 2, where r is Pearson's
    correlation of the two heatmaps, both scaled to [0,1] as in `confidence_change`. If either heatmap is constant, or if
    computing the second heatmap raises `BlindLayerError`, r is 0 and the result is 1/2. If the first heatmap is
    constant, the second heatmap is not computed.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        One heatmap per image, at the images' size.
    explain : callable
        The method that computed `heatmaps`: a function of the model, images (N,C,H,W) and classes (N,) that returns
        heatmaps (N,H,W). The model is in evaluation mode during the call.

    Returns
    -------
    Tensor (N,)
        float32 in [0,1].

    Raises
    ------
    ImageError
        If `heatmaps`, or the result of `explain`, is not one heatmap per image at the images' size. Other errors of
        `explain` are passed on.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, coherency
    >>> def explain(model, images, classes):
    ...     return gradcam.explain(model, images, "layer4", target=classes).heatmaps[:, 0]
    >>> classifier = gradcam.load_classifier()
    >>> subject = Subject(classifier.model, classifier.batch(["photo.jpg"]))
    >>> heatmaps = explain(subject.model, subject.images, subject.classes)
    >>> round(coherency(subject, heatmaps, explain).item(), 1)
    1.0

    References
    ----------
    Poppi et al., "Revisiting the Evaluation of Class Activation Mapping for Explainability", CVPR Workshops 2021.
    """
    units = scale_to_unit(check_heatmaps(heatmaps, subject.size, subject.images.device))
    correlations = torch.zeros_like(subject.probabilities)
    varied = units.amax((1, 2)) != units.amin((1, 2))
    if varied.any():
        units = units[varied]
        images = subject.images[varied] * units[:, None].to(subject.images.dtype)
        try:
            with torch.enable_grad():
                second = run_explain(explain, subject.model, images, subject.classes[varied])
        except BlindLayerError:
            second = torch.zeros_like(units)
        second = scale_to_unit(check_heatmaps(second, units.shape, units.device))
        a, b = (maps.flatten(1) - maps.mean((1, 2))[:, None] for maps in (units, second))
        pearson = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))  # NaN if the second heatmap is constant
        correlations[varied] = torch.where(second.amax((1, 2)) == second.amin((1, 2)), 0.0, pearson.clamp(-1, 1))
    return (1 + correlations) / 2


@dataclass(frozen=True)
class Road:
    """The result of `road` for N images at S shares.

    Attributes
    ----------
    combined : Tensor (N,)
        The score, from -1/2 to 1/2; higher is better, chance is 0.
    most : Tensor (N,S)
        The class's probability with the most relevant pixels imputed, for each share.
    least : Tensor (N,S)
        The class's probability with the least relevant pixels imputed, for each share.
    shares : tuple of float
        The shares of the pixels that are imputed.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, road
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> result = road(Subject(classifier.model, images), images.mean(1), shares=[0.2, 0.5])
    >>> result.shares, result.most.shape, result.least.shape, result.combined.shape
    ((0.2, 0.5), torch.Size([1, 2]), torch.Size([1, 2]), torch.Size([1]))
    """

    combined: Tensor
    most: Tensor = field(repr=False)
    least: Tensor = field(repr=False)
    shares: tuple[float, ...] = field(repr=False)

    __repr__ = format_fields


def road(
    subject: Subject, heatmaps: Any, *, shares: Sequence[float] = ROAD_SHARES, noise: float = NOISE, seed: int = 0
) -> Road:
    """Compute the combined ROAD score: how much more the most relevant pixels matter than the least relevant pixels.

    Two images are made for each share: one without the most relevant pixels (MoRF), and one without the least relevant
    pixels (LeRF). `impute` fills in the removed pixels, so that the model cannot see the mask. Let p_most and p_least
    be the class's probabilities for the two images. The score is the mean of (p_least - p_most) / 2 over the shares.
    Pixels of equal value are in a random order, which is the same for MoRF and LeRF. A constant heatmap therefore
    scores about 0.

    The package grad-cam uses the same formula, with a percentile of 100 x (1 - share). This function removes exactly
    the given share, rounded to whole pixels. By contrast, grad-cam removes all pixels that reach the percentile. If
    many pixels have equal values, the package grad-cam may remove the complete image.

    Parameters
    ----------
    subject : Subject
        The model, the images and their classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        One heatmap per image, at the images' size, from any library. Only the order of the values counts.
    shares : sequence of float, default 0.1 to 0.9
        The shares of the pixels that are removed, in [0,1]. Share 0 leaves the image unchanged. With share 1, all pixels
        become zero plus noise.
    noise : float, default 0.01
        Standard deviation of the noise on imputed pixels, in the images' units.
    seed : int, default 0
        Random seed of the noise, and of the order of pixels with equal heatmap values. The noise is sampled once for
        each share.

    Returns
    -------
    Road
        The score of each image, `combined`, and the probabilities for each share. Higher is better; about 0 is chance.

    Raises
    ------
    ImageError
        If the heatmaps are not one per image at the images' size, or contain NaN or infinite values.
    GradcamError
        If there are no shares, if a share is outside [0,1], or if the noise is negative.
    ModelError
        If the model's output is NaN or infinite.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, road
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> explanation = gradcam.explain(classifier.model, images, "layer4")
    >>> result = road(Subject(classifier.model, images), explanation, shares=[0.3, 0.6])
    >>> round(result.combined.item(), 1)
    0.3

    References
    ----------
    Rong et al., "A Consistent and Efficient Evaluation Strategy for Attribution Methods" (ROAD), ICML 2022, section 5.
    """
    maps = check_heatmaps(heatmaps, subject.size, subject.images.device)
    checked = tuple(shares) if isinstance(shares, Sequence) else ()
    are_numbers = all(isinstance(share, (int, float)) and not isinstance(share, bool) for share in checked)
    if not checked or not are_numbers or not all(0 <= share <= 1 for share in checked):
        raise argument_error(shares, "shares", "a list of numbers from 0 to 1: the shares of pixels to remove.")
    checked = tuple(map(float, checked))
    scores = subject.score(_remove(subject.images, rank_pixels(maps, seed), checked, noise, seed))
    most, least = scores[0::2].T.contiguous(), scores[1::2].T.contiguous()
    return Road((least - most).mean(1) / 2, most, least, checked)


def _remove(images: Tensor, ranks: Tensor, shares: Sequence[float], noise: float, seed: int) -> Iterator[Tensor]:
    """Yield the images (N,C,H,W) for each share: without the most relevant pixels, then without the least relevant."""
    pixels, image_pairs = ranks[0].numel(), torch.cat([images, images])
    for share in shares:
        count = count_pixels(share, pixels)
        masks = torch.cat([ranks >= count, ranks < pixels - count])
        filled = impute(image_pairs, masks, noise=noise, generator=make_generator(seed, "road", share))
        yield from filled.split(len(images))


def complexity(heatmaps: Any) -> Tensor:
    """Measure how much of the image a heatmap marks, by the heatmap's mean in [0,1]; lower is better.

    The mean equals the L1 norm of the heatmap divided by the number of pixels. The heatmap is scaled to [0,1] first:
    negative values become zero, and all values are divided by the maximum. The complexity of a blank heatmap is 0, and
    the complexity of a constant heatmap is 1.

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (N,H,W)
        One heatmap per image, from any library.

    Returns
    -------
    Tensor (N,)
        float32 in [0,1].

    Raises
    ------
    ImageError
        If the heatmaps are not (N,H,W), or contain NaN or infinite values.

    Examples
    --------
    >>> import torch
    >>> from gradcam.evaluation import complexity
    >>> complexity(torch.tensor([[[0.0, 2.0], [0.0, 2.0]]]))
    tensor([0.5000])

    References
    ----------
    Poppi et al., "Revisiting the Evaluation of Class Activation Mapping for Explainability", CVPR Workshops 2021.
    """
    return scale_to_unit(check_heatmaps(heatmaps)).mean((1, 2))


def adcc(drop: Any, coherency: Any, complexity: Any) -> Tensor:
    """Compute the harmonic mean of coherency, 1 - complexity and 1 - drop for each image; higher is better.

    The result is 3 / (1 / coherency + 1 / (1 - complexity) + 1 / (1 - drop)). If coherency, 1 - complexity or 1 - drop
    is zero, the result is zero.

    Parameters
    ----------
    drop : Tensor (N,)
        The result of `confidence_change(...).drop`, in [0,1].
    coherency : Tensor (N,)
        The result of `coherency`, in [0,1].
    complexity : Tensor (N,)
        The result of `complexity`, in [0,1].

    Returns
    -------
    Tensor (N,)
        float32 in [0,1].

    Raises
    ------
    GradcamError
        If the inputs are not (N,), have values outside [0,1], or differ in length.

    Examples
    --------
    >>> from gradcam.evaluation import adcc
    >>> adcc(drop=[0.5, 0.0], coherency=[0.5, 1.0], complexity=[0.5, 1.0])
    tensor([0.5000, 0.0000])

    References
    ----------
    Poppi et al., "Revisiting the Evaluation of Class Activation Mapping for Explainability", CVPR Workshops 2021.
    """
    shares: dict[str, Tensor] = {}
    for name, value in {"drop": drop, "coherency": coherency, "complexity": complexity}.items():
        device = value.device if isinstance(value, Tensor) else "cpu"
        try:
            shares[name] = torch.as_tensor(value, dtype=torch.float32, device=device)
        except (TypeError, ValueError, RuntimeError):
            shares[name] = torch.empty((), dtype=torch.float32, device="cpu")
        if shares[name].ndim != 1 or not ((shares[name] >= 0) & (shares[name] <= 1)).all():
            raise GradcamError(f"The {name} is {shorten(value)}, expected a tensor (N,) of values from 0 to 1.")
    if len({len(share) for share in shares.values()}) > 1:
        lengths = ", ".join(f"{len(share)} of {name}" for name, share in shares.items())
        expected = "one value of drop, of coherency and of complexity for each image"
        raise GradcamError(f"The inputs have different lengths ({lengths}): expected {expected}.")
    parts = torch.stack([shares["coherency"], 1 - shares["complexity"], 1 - shares["drop"]])
    return torch.where((parts > 0).all(0), len(parts) / (1 / torch.where(parts > 0, parts, 1.0)).sum(0), 0.0)
