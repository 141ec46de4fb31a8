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

    `shares`: float32 (S,), of the pixels changed, from 0 to 1. `probabilities`: (N,S). `areas`: (N,), by the trapezoid rule.
    """

    shares: Tensor
    probabilities: Tensor
    areas: Tensor

    def __repr__(self) -> str:
        images, points = self.probabilities.shape
        return f"Curve({images} image(s), {points} points, mean area {self.areas.mean().item():.3g})"


def insertion(subject: Subject, heatmaps: Any, *, baseline: str = "blur", steps: int = STEPS, seed: int = 0) -> Curve:
    """The class's probability as pixels appear on a baseline, the map's highest first: a `Curve`; more area is better.

    Petsiuk et al., BMVC 2018 (RISE), section 4.2. `heatmaps`: one per image, of any library, as `check_heatmaps` takes them;
    their order alone counts, so that signed ones are taken as they are. `baseline`: one of `BASELINES`. `steps`: of about
    equally many pixels, to the nearest; the curve has one point more, and `shares` are those of the pixels that did change.
    Areas are in [0,1] where probabilities are. RISE's own code changes 224 pixels at a time in pictures of 224 x 224:
    `steps=224` gives its numbers. Pixels of one value, such as all of a blank map, appear in an order drawn by `seed`.
    Raises `ImageError` for heatmaps that do not fit, and `GradcamError` for an unknown baseline and for steps below 1.
    """
    check_count(steps, "insertion: steps", "an int, 1 or more.")
    return _curve(subject, _places(subject, heatmaps, seed), baseline, steps, order=1)


def deletion(subject: Subject, heatmaps: Any, *, baseline: str = "zero", steps: int = STEPS, seed: int = 0) -> Curve:
    """The class's probability as a baseline takes the pixels' places, the map's highest first; less area is better.

    Petsiuk et al., BMVC 2018 (RISE), section 4.2. All else, errors too, is as in `insertion`.
    """
    check_count(steps, "deletion: steps", "an int, 1 or more.")
    return _curve(subject, _places(subject, heatmaps, seed), baseline, steps, order=-1)


def sufficiency(
    subject: Subject, heatmaps: Any, *, share: float = SHARE, baseline: str = "blur", seed: int = 0
) -> Tensor:
    """The probability lost where only the map's highest `share` of the pixels is kept: float32 (N,); less is better.

    DeYoung et al., ACL 2020 (ERASER), section 4.2: p(picture) - p(what is kept), for rationales of a fixed length. The rest
    is the baseline. In [-1,1]; below zero where the kept part is more probable than the whole. `share` is between 0 and 1,
    of pixels to the nearest one. Ties, `heatmaps`, `baseline` and errors are as in `insertion`.
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
    """How the class's probability changes when the picture is multiplied with its map, each float32 (N,) in [0,1].

    `drop`: share of the probability that is lost; its mean over pictures is the average drop, and less is better.
    `increase`: 1 where it grew, else 0; the mean is the increase in confidence, and more is better.
    `gain`: share of what the probability lacked that was won; the mean is the average gain, and more is better.
    """

    drop: Tensor
    increase: Tensor
    gain: Tensor

    def __repr__(self) -> str:
        means = ", ".join(f"{name} {getattr(self, name).mean().item():.3g}" for name in ("drop", "increase", "gain"))
        return f"ConfidenceChange({len(self.drop)} image(s), means: {means})"


def confidence_change(subject: Subject, heatmaps: Any) -> ConfidenceChange:
    """What the picture times its map keeps of the class's probability: a `ConfidenceChange`.

    With Y the probability of the picture, and O that of picture times map, drop is max(0, Y - O) / Y, and increase says
    whether O > Y (Chattopadhay et al., WACV 2018 (Grad-CAM++), section 4.1); gain is max(0, O - Y) / (1 - Y) (Zhang et al.,
    CVIU 2024 (Opti-CAM)). The picture is multiplied as the model takes it, after preprocessing, by the map in [0,1]:
    negative values are zero, the rest is divided by the maximum. Where Y is zero the drop is zero; where Y is one the gain.
    A map that is one everywhere hides nothing: O is Y itself, without the rounding of another pass. A blank map hides all.
    `heatmaps`: one per image, as `check_heatmaps` takes them; raises `ImageError` for those that do not fit.
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
    """How alike a map is to that of picture times map, for the same class: float32 (N,) in [0,1]; more is better.

    Poppi et al., CVPR Workshops 2021 (ADCC): Pearson's correlation r of the two, as (1 + r) / 2. Both are taken in [0,1], as
    in `confidence_change`. `explain`: what made the maps, from the model, which is in evaluation mode meanwhile, images
    (N,C,H,W) and classes (N,) to heatmaps (N,H,W). r is 0 where either map is constant, and where the second cannot be made
    since no gradient is left (`BlindLayerError`); images whose first map is constant are not explained again.
    Raises `ImageError` for heatmaps of either kind that do not fit, and whatever else `explain` raises.
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
    """ROAD of N images at S shares. `combined`: (N,), from -1/2 to 1/2, higher is better; 0 is what chance has.

    `most`: (N,S), the classes' probabilities with the most relevant pixels imputed; `least`: with the least relevant.
    `shares`: of the pixels that are imputed.
    """

    combined: Tensor
    most: Tensor = field(repr=False)
    least: Tensor = field(repr=False)
    shares: tuple[float, ...] = field(repr=False)

    __repr__ = show_fields


def road(
    subject: Subject, heatmaps: Any, *, shares: Sequence[float] = SHARES, noise: float = NOISE, seed: int = 0
) -> Road:
    """ROAD, combined, for heatmaps (N,H,W) of the subject's images: of any library, sign and scale, by order alone.

    Rong et al., ICML 2022, section 5: a share of the pixels is taken away, the most relevant ones first (MoRF) or the least
    relevant ones first (LeRF), and imputed by `impute`, which leaves no mask that the model might see. Combined as in the
    package grad-cam: the mean over the shares of (p_least - p_most) / 2, with the class's probabilities. Higher is better.
    grad-cam's percentile is 100 x (1 - share), which is what stays.

    Exactly so many pixels are taken away, `count_pixels`: those of one value are in an order by chance, the seed's, the same
    for both ends, so that a constant map scores what a random one does, about 0. grad-cam takes away all pixels that are as
    high as the percentile, which may be the whole picture. Share 0 is the image itself; share 1, where nothing is known, is
    zero and noise. `noise` is drawn by the seed, once for each share. Nothing is divided by probabilities, such as of 0.
    Raises `ImageError` for heatmaps of another form, `GradcamError` for shares that are not in [0,1] and for the noise.
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
    """How much of the picture a map marks: its mean in [0,1], float32 (N,); less is better.

    Poppi et al., CVPR Workshops 2021 (ADCC): the map's L1 norm, by the number of its pixels. Negative values are zero, and
    the rest is divided by the maximum: a blank map has 0, a constant one 1. `heatmaps`, errors: as in `check_heatmaps`.
    """
    return to_unit(check_heatmaps(heatmaps)).mean((1, 2))


def adcc(drop: Any, coherency: Any, complexity: Any) -> Tensor:
    """The harmonic mean of coherency, 1 - complexity and 1 - drop: float32 (N,) in [0,1]; more is better.

    Poppi et al., CVPR Workshops 2021: 3 / (1 / coherency + 1 / (1 - complexity) + 1 / (1 - drop)), of each image. The three
    are what `coherency`, `complexity` and `confidence_change(...).drop` give: (N,), in [0,1]. Where one of the three parts
    is zero, so is their mean. Raises `GradcamError` for values of another form, or outside [0,1].
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
