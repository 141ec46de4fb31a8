"""How a class's probability changes as a map's pixels appear, vanish, or are all that is left; and ADCC, made of that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gradcam.cam.methods.perturbation import check_number
from gradcam.errors import BlindLayerError, GradcamError, shorten, show_fields
from gradcam.evaluation.controls import Explain
from gradcam.evaluation.explainers import run_explain
from gradcam.evaluation.metrics.imputation import NOISE, impute
from gradcam.evaluation.subject import Subject, check_heatmaps, count_pixels, draw, rank_pixels, to_unit
from gradcam.options import check_count, refuse

STEPS = 50  # of a curve
SHARE = 0.2  # of the pixels that is to suffice
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # that ROAD takes away


@dataclass(frozen=True, eq=False)
class Curve:
    """The probability of each image's class, step by step.

    Attributes
    ----------
    shares : Tensor (S,)
        Of the pixels that are changed, float32, from 0 to 1.
    probabilities : Tensor (N,S)
        Of the class.
    areas : Tensor (N,)
        Under the curve, by the trapezoid rule.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, insertion
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> curve = insertion(Subject(classifier.model, images), images.mean(1), steps=4)  # as dark and bright as it is
    >>> [round(share, 2) for share in curve.shares.tolist()]
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """

    shares: Tensor
    probabilities: Tensor
    areas: Tensor

    def __repr__(self) -> str:
        images, points = self.probabilities.shape
        return f"Curve({images} image(s), {points} points, mean area {self.areas.mean().item():.3g})"


def insertion(subject: Subject, heatmaps: Any, *, baseline: str = "blur", steps: int = STEPS, seed: int = 0) -> Curve:
    """Measure the class's probability as pixels appear on a baseline, the map's highest first; more area is better.

    RISE's own code changes 224 pixels at a time in pictures of 224 x 224: `steps=224` gives its numbers.

    Parameters
    ----------
    subject : Subject
        A model, images and classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        One per image, of any library. Their order alone counts, so that signed ones are taken as they are.
    baseline : str, default "blur"
        What stands for pixels that are not there: a key of `BASELINES`.
    steps : int, default 50
        Of about equally many pixels, to the nearest; the curve has one point more.
    seed : int, default 0
        Of the order of pixels of one value, such as all of a blank map.

    Returns
    -------
    Curve
        With its `areas`, in [0,1] where probabilities are.

    Raises
    ------
    ImageError
        For heatmaps that do not fit.
    GradcamError
        For an unknown baseline, and for steps below 1.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, insertion
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> heatmaps = gradcam.explain(classifier.model, images, "layer4").heatmaps[:, 0]
    >>> insertion(Subject(classifier.model, images), heatmaps, steps=10).probabilities.shape
    torch.Size([1, 11])

    References
    ----------
    Petsiuk et al., "RISE", BMVC 2018, section 4.2.
    """
    check_count(steps, "insertion: steps", "an int, 1 or more.")
    return _curve(subject, _places(subject, heatmaps, seed), baseline, steps, order=1)


def deletion(subject: Subject, heatmaps: Any, *, baseline: str = "zero", steps: int = STEPS, seed: int = 0) -> Curve:
    """Measure the class's probability as a baseline takes the pixels' places, the map's highest first; less area is
    better.

    Parameters
    ----------
    subject : Subject
        A model, images and classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        As in `insertion`.
    baseline : str, default "zero"
        As in `insertion`.
    steps : int, default 50
        As in `insertion`.
    seed : int, default 0
        As in `insertion`.

    Returns
    -------
    Curve
        With its `areas`.

    Raises
    ------
    GradcamError
        As `insertion` does.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, deletion
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> heatmaps = gradcam.explain(classifier.model, images, "layer4").heatmaps[:, 0]
    >>> curve = deletion(Subject(classifier.model, images), heatmaps, steps=10)
    >>> bool(curve.probabilities[0, -1] < curve.probabilities[0, 0])
    True

    References
    ----------
    Petsiuk et al., "RISE", BMVC 2018, section 4.2.
    """
    check_count(steps, "deletion: steps", "an int, 1 or more.")
    return _curve(subject, _places(subject, heatmaps, seed), baseline, steps, order=-1)


def sufficiency(
    subject: Subject, heatmaps: Any, *, share: float = SHARE, baseline: str = "blur", seed: int = 0
) -> Tensor:
    """Measure the probability that is lost where only the map's highest pixels are kept; less is better.

    Parameters
    ----------
    subject : Subject
        A model, images and classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        As in `insertion`.
    share : float, default 0.2
        Of the pixels that are kept, to the nearest one.
    baseline : str, default "blur"
        What stands for the rest, as in `insertion`.
    seed : int, default 0
        As in `insertion`.

    Returns
    -------
    Tensor (N,)
        float32 in [-1,1]: p(picture) - p(what is kept); below zero where the kept part is more probable than the whole.

    Raises
    ------
    GradcamError
        As `insertion` does, and for a share that is not between 0 and 1.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, sufficiency
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> heatmaps = gradcam.explain(classifier.model, images, "layer4").heatmaps[:, 0]
    >>> sufficiency(Subject(classifier.model, images), heatmaps, share=0.5).shape
    torch.Size([1])

    References
    ----------
    DeYoung et al., "ERASER", ACL 2020, section 4.2, for rationales of a fixed length.
    """
    check_number("sufficiency", "share", share, most=1)
    places = _places(subject, heatmaps, seed)
    counts = [count_pixels(share, places[0].numel())]
    (kept,) = subject.score(_replace(subject.baseline(baseline), subject.images, places, counts))
    return subject.probabilities - kept


def _places(subject: Subject, heatmaps: Any, seed: int) -> Tensor:
    """The place of each pixel in its map's order, int32 (N,1,H,W): compared in half the time of int64."""
    return rank_pixels(check_heatmaps(heatmaps, subject.size, subject.images.device), seed)[:, None].int()


def _replace(before: Tensor, after: Tensor, places: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """`before` with the first pixels of `after` in it, so many after one another."""
    for count in counts:  # a weight of 0 or 1 gives these exactly, in a tenth of `torch.where`'s time on a processor
        yield torch.lerp(before, after, (places < count).to(before.dtype))


def _curve(subject: Subject, places: Tensor, baseline: str, steps: int, *, order: Literal[1, -1]) -> Curve:
    counts = [count_pixels(step / steps, places[0].numel()) for step in range(steps + 1)]
    before, after = (subject.baseline(baseline), subject.images)[::order]
    between = subject.score(_replace(before, after, places, counts[1:-1]))
    rows = [subject.baseline_probabilities(baseline)[None], between, subject.probabilities[None]]
    probabilities = torch.cat(rows[::order]).T
    shares = torch.tensor(counts, device=probabilities.device, dtype=torch.float32) / counts[-1]
    return Curve(shares, probabilities, torch.trapezoid(probabilities, shares))


@dataclass(frozen=True, eq=False)
class ConfidenceChange:
    """How the class's probability changes when the picture is multiplied with its map.

    Attributes
    ----------
    drop : Tensor (N,)
        The share of the probability that is lost, float32 in [0,1]. Its mean is the average drop, and less is better.
    increase : Tensor (N,)
        1 where it grew, else 0. The mean is the increase in confidence, and more is better.
    gain : Tensor (N,)
        The share that was won of what the probability lacked, in [0,1]. The mean is the average gain, and more is
        better.

    Examples
    --------
    >>> import gradcam, torch
    >>> from gradcam.evaluation import Subject, confidence_change
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> change = confidence_change(Subject(classifier.model, images), torch.ones(1, 224, 224))  # which hides nothing
    >>> change.drop, change.gain
    (tensor([0.]), tensor([0.]))
    """

    drop: Tensor
    increase: Tensor
    gain: Tensor

    def __repr__(self) -> str:
        means = ", ".join(f"{name} {getattr(self, name).mean().item():.3g}" for name in ("drop", "increase", "gain"))
        return f"ConfidenceChange({len(self.drop)} image(s), means: {means})"


def confidence_change(subject: Subject, heatmaps: Any) -> ConfidenceChange:
    """Measure what the picture times its map keeps of the class's probability.

    With Y the probability of the picture and O that of picture times map, drop is max(0, Y - O) / Y, increase is
    whether O > Y, and gain is max(0, O - Y) / (1 - Y). The picture is multiplied as the model takes it, after
    preprocessing, by the map in [0,1]: negative values are zero, the rest is divided by the maximum. Where Y is zero
    the drop is zero; where Y is one the gain. A map that is one everywhere hides nothing, a blank map all.

    Parameters
    ----------
    subject : Subject
        A model, images and classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        One per image, of any library.

    Returns
    -------
    ConfidenceChange
        `drop`, `increase` and `gain` of each image.

    Raises
    ------
    ImageError
        For heatmaps that do not fit.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, confidence_change
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> heatmaps = gradcam.explain(classifier.model, images, "layer4").heatmaps[:, 0]
    >>> change = confidence_change(Subject(classifier.model, images), heatmaps)
    >>> change.drop.shape, change.increase.shape
    (torch.Size([1]), torch.Size([1]))

    References
    ----------
    Chattopadhay et al., "Grad-CAM++", WACV 2018, section 4.1; the gain is Zhang et al.'s, "Opti-CAM", CVIU 2024.
    """
    units = to_unit(check_heatmaps(heatmaps, subject.size, subject.images.device))
    before = subject.probabilities
    (after,) = subject.score([subject.images * units[:, None].to(subject.images.dtype)])
    after = torch.where(units.amin((1, 2)) == 1, before, after)
    drop, gain = (
        torch.where(most > 0, change.clamp(min=0) / torch.where(most > 0, most, 1.0), 0.0)
        for change, most in ((before - after, before), (after - before, 1 - before))
    )
    return ConfidenceChange(drop, (after > before).float(), gain)


def coherency(subject: Subject, heatmaps: Any, explain: Explain) -> Tensor:
    """Measure how alike a map is to that of picture times map, for the same class; more is better.

    It is Pearson's correlation r of the two, as (1 + r) / 2, both taken in [0,1] as in `confidence_change`. r is 0
    where either map is constant, and where the second cannot be made since no gradient is left.

    Parameters
    ----------
    subject : Subject
        A model, images and classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        One per image.
    explain : callable
        What made the maps: from the model, images (N,C,H,W) and classes (N,) to heatmaps (N,H,W).

    Returns
    -------
    Tensor (N,)
        float32 in [0,1].

    Raises
    ------
    ImageError
        For heatmaps of either kind that do not fit. Whatever else `explain` raises comes through.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, coherency
    >>> def explain(model, images, classes):
    ...     return gradcam.explain(model, images, "layer4", target=classes).heatmaps[:, 0]
    >>> classifier = gradcam.load_classifier()
    >>> subject = Subject(classifier.model, classifier.batch(["photo.jpg"]))
    >>> heatmaps = explain(subject.model, subject.images, subject.classes)
    >>> bool(coherency(subject, heatmaps, explain) > 0.5)
    True

    References
    ----------
    Poppi et al., "Revisiting the Evaluation of Class Activation Mapping for Explainability", CVPR Workshops 2021.
    """
    units = to_unit(check_heatmaps(heatmaps, subject.size, subject.images.device))
    correlations = torch.zeros_like(subject.probabilities)
    varied = units.amax((1, 2)) != units.amin((1, 2))
    if varied.any():
        units = units[varied]
        images = subject.images[varied] * units[:, None].to(subject.images.dtype)
        try:
            with torch.enable_grad():
                again = run_explain(explain, subject.model, images, subject.classes[varied])
        except BlindLayerError:
            again = torch.zeros_like(units)
        again = to_unit(check_heatmaps(again, units.shape, units.device))
        a, b = (each.flatten(1) - each.mean((1, 2))[:, None] for each in (units, again))
        found = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))  # NaN for a flat one
        correlations[varied] = torch.where(again.amax((1, 2)) == again.amin((1, 2)), 0.0, found.clamp(-1, 1))
    return (1 + correlations) / 2


@dataclass(frozen=True)
class Road:
    """ROAD of N images at S shares.

    Attributes
    ----------
    combined : Tensor (N,)
        From -1/2 to 1/2, higher is better; 0 is what chance has.
    most : Tensor (N,S)
        The classes' probabilities with the most relevant pixels imputed.
    least : Tensor (N,S)
        The same with the least relevant pixels imputed.
    shares : tuple of float
        Of the pixels that are imputed.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, road
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> found = road(Subject(classifier.model, images), images.mean(1), shares=[0.2, 0.5])
    >>> found.most.shape, found.shares
    (torch.Size([1, 2]), (0.2, 0.5))
    """

    combined: Tensor
    most: Tensor = field(repr=False)
    least: Tensor = field(repr=False)
    shares: tuple[float, ...] = field(repr=False)

    __repr__ = show_fields


def road(
    subject: Subject, heatmaps: Any, *, shares: Sequence[float] = SHARES, noise: float = NOISE, seed: int = 0
) -> Road:
    """Compute ROAD, combined: how much the most relevant pixels matter more than the least relevant ones.

    A share of the pixels is taken away, the most relevant first or the least relevant first, and imputed by `impute`,
    which leaves no mask that the model might see. Combined is the mean over the shares of half the difference of the
    class's probabilities, as in the package grad-cam, whose percentile is 100 x (1 - share). Exactly so many pixels are
    taken away, those of one value in an order by chance, the same for both ends, so that a constant map scores about 0;
    grad-cam takes away all pixels that are as high as the percentile, which may be the whole picture.

    Parameters
    ----------
    subject : Subject
        A model, images and classes.
    heatmaps : Tensor, array or Explanation (N,H,W)
        One per image, of any library, sign and scale: their order alone counts.
    shares : sequence of float, default 0.1 to 0.9
        Of the pixels that are taken away, in [0,1]. 0 is the image itself; 1, where nothing is known, is zero and
        noise.
    noise : float, default 0.01
        Standard deviation of what is added to imputed pixels, in the images' units.
    seed : int, default 0
        Of the noise and of the order of equal pixels.

    Returns
    -------
    Road
        Its `combined` (N,) is higher where the map is better; about 0 is chance.

    Raises
    ------
    ImageError
        For heatmaps of another form.
    GradcamError
        For shares outside [0,1], and for noise that is no number from zero up.

    Examples
    --------
    >>> import gradcam
    >>> from gradcam.evaluation import Subject, road
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> heatmaps = gradcam.explain(classifier.model, images, "layer4").heatmaps[:, 0]
    >>> bool(road(Subject(classifier.model, images), heatmaps, shares=[0.3, 0.6]).combined > 0)
    True

    References
    ----------
    Rong et al., "A Consistent and Efficient Evaluation Strategy for Attribution Methods" (ROAD), ICML 2022, section 5.
    """
    maps = check_heatmaps(heatmaps, subject.size, subject.images.device)
    checked = tuple(shares) if isinstance(shares, Sequence) else ()
    are_numbers = all(isinstance(share, (int, float)) and not isinstance(share, bool) for share in checked)
    if not checked or not are_numbers or not all(0 <= share <= 1 for share in checked):
        raise refuse(shares, "shares", "numbers from 0 to 1: the parts of the pixels to take.")
    checked = tuple(map(float, checked))
    scores = subject.score(_remove(subject.images, rank_pixels(maps, seed), checked, noise, seed))
    most, least = scores[0::2].T.contiguous(), scores[1::2].T.contiguous()
    return Road((least - most).mean(1) / 2, most, least, checked)


def _remove(images: Tensor, places: Tensor, shares: Sequence[float], noise: float, seed: int) -> Iterator[Tensor]:
    """The images (N,C,H,W) without the most relevant pixels, and without the least relevant, of each share in turn."""
    pixels = places[0].numel()
    twice = torch.cat([images, images])
    for share in shares:
        count = count_pixels(share, pixels)
        known = torch.cat([places >= count, places < pixels - count])
        yield from impute(twice, known, noise=noise, generator=draw(seed, "road", share)).split(len(images))


def complexity(heatmaps: Any) -> Tensor:
    """Measure how much of the picture a map marks: its mean, in [0,1]; less is better.

    Negative values are zero, and the rest is divided by the maximum: a blank map has 0, a constant one 1.

    Parameters
    ----------
    heatmaps : Tensor, array or Explanation (N,H,W)
        One per image.

    Returns
    -------
    Tensor (N,)
        float32.

    Raises
    ------
    ImageError
        For heatmaps of another form.

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
    return to_unit(check_heatmaps(heatmaps)).mean((1, 2))


def adcc(drop: Any, coherency: Any, complexity: Any) -> Tensor:
    """Compute the harmonic mean of coherency, 1 - complexity and 1 - drop, of each image; more is better.

    Parameters
    ----------
    drop : Tensor (N,)
        What `confidence_change(...).drop` gives, in [0,1].
    coherency : Tensor (N,)
        What `coherency` gives, in [0,1].
    complexity : Tensor (N,)
        What `complexity` gives, in [0,1].

    Returns
    -------
    Tensor (N,)
        float32 in [0,1]; zero where one of the three parts is.

    Raises
    ------
    GradcamError
        For values of another form, or outside [0,1].

    Examples
    --------
    >>> from gradcam.evaluation import adcc
    >>> adcc(drop=[0.5], coherency=[0.5], complexity=[0.5])
    tensor([0.5000])

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
        raise GradcamError(f"There are {lengths}, expected one of each for every image.")
    parts = torch.stack([shares["coherency"], 1 - shares["complexity"], 1 - shares["drop"]])
    inverse = (1 / torch.where(parts > 0, parts, 1.0)).sum(0)
    return torch.where((parts > 0).all(0), len(parts) / inverse, 0.0)
