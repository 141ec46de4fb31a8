"""Compare one supplied heatmap with this package's exact map, and with the exact map under each known pipeline bug."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.cam.compare import compare
from gradcam.cam.explain import Explanation
from gradcam.cam.methods.base import Method
from gradcam.errors import GradcamError, GradcamWarning, ModelError, format_fields
from gradcam.evaluation.explainers import Explainer, run_explain
from gradcam.evaluation.heatmap_sources import Explainable
from gradcam.evaluation.metrics.soundness import rank_correlation
from gradcam.evaluation.subject import Subject, check_heatmaps, correlate, scale_to_unit
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import find_layer, unwrap
from gradcam.models.classifier import Classifier
from gradcam.models.fits import check_sizes, find_step, get_steps, show_whole
from gradcam.models.preprocess import ASSUMED, Prepared
from gradcam.targets.classes import ClassTarget

REFERENCE_METHODS = ("gradcam", "hirescam", "layercam", "gradcam++")  # exact maps to compare a custom function with
SAMPLES = 48  # Maps are compared on a grid of 48 x 48 samples, so images of all sizes share one grid of displacements.
MAX_SHIFT = 18  # largest displacement, in samples: 3/8 of the image
CLASS_OFFSETS = (1, -1, 2, -2, 3, -3)  # Of several offsets that fit equally well, the first is reported.
SCALES = (0.5, 0.57, 0.66, 0.75, 0.87, 1.15, 1.32, 1.5, 1.75, 2.0)
CROP_SHARES = (1.0, 0.875)  # side of a centre crop, as a share of the shorter side
MIN_PROBABILITY = 1e-30
EXACT, RIVAL, BGR, CROP = "exact", "class rival", "BGR", "crop"


@dataclass(frozen=True, eq=False)
class MapEvidence:
    """The comparison of one supplied heatmap with exact maps.

    `deviation` is the largest absolute difference from the exact map of each reference method, after both maps are
    scaled to [0,1]. `rank_correlation` is Spearman's correlation with these maps. `cells` is the (height, width) of the
    layer's grid. `fits` maps each reference method and each hypothesis to Pearson's correlation. `surfaces` maps each
    reference method to its correlation at all displacements (2S+1,2S+1), in samples. `gains` maps each colour order or
    normalisation to the gain in the score of the class (`measure_gains`). `network_offset` is the distance (across,
    down), in cells, of receptive fields from the places where the heatmap draws their cells; None if it cannot be measured.
    """

    class_index: int
    probability: float
    size: tuple[int, ...]
    cells: tuple[int, ...]
    gains: Mapping[str, float]
    network_offset: tuple[float, float] | None
    is_constant: bool = False
    deviation: Mapping[str, float] = field(default_factory=dict)
    rank_correlation: Mapping[str, float] = field(default_factory=dict)
    fits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    surfaces: Mapping[str, Tensor] = field(default_factory=dict)

    __repr__ = format_fields


@dataclass(frozen=True, eq=False)
class ExactMaps:
    """The exact maps of one image: of its class, of other classes, and of recoloured and cropped images.

    `explanations` are the explanations of the image by reference method. `samples` maps each reference method to the
    maps (48,48) of all hypotheses. `evidence` is what is known without a supplied heatmap.
    """

    subject: Subject
    evidence: MapEvidence
    explanations: Mapping[str, Explanation]
    samples: Mapping[str, Mapping[str, Tensor]]

    def compare(self, heatmap: Tensor) -> MapEvidence:
        """Compare a heatmap (1,H,W) with the exact maps."""
        supplied, exact = to_samples(heatmap), self.explanations
        is_constant = bool(heatmap.amax() == heatmap.amin())
        fits = {name: correlate(supplied, torch.stack([*maps.values()])) for name, maps in self.samples.items()}
        if is_constant and float(heatmap.amax()) != 0:  # A blank heatmap may be exact, any other constant is not.
            fits = {name: torch.zeros_like(values) for name, values in fits.items()}
        return replace(
            self.evidence,
            is_constant=is_constant,
            fits={name: dict(zip(self.samples[name], values.tolist())) for name, values in fits.items()},
            surfaces={name: correlate_shifted(supplied[0], maps[EXACT]) for name, maps in self.samples.items()},
            deviation={name: measure_deviation(heatmap, exact[name]) for name in exact},
            rank_correlation={name: float(rank_correlation(heatmap, exact[name].heatmaps[:, 0])) for name in exact},
        )


def measure_evidence(
    classifier: Classifier, prepared: Prepared, source: Explainable, explainer: Explainer, target: Any = None
) -> MapEvidence:
    """Compare the heatmap that `source` computes for one image with exact maps; raise errors as `Explainer` does."""
    if isinstance(source, Method):  # The exact map of a method of this package is the method's map.
        evidence = compute_exact_maps(classifier, prepared, explainer, target, methods=()).evidence
        fits, deviation, ranks = {source.name: {EXACT: 1.0}}, {source.name: 0.0}, {source.name: 1.0}
        return replace(evidence, fits=fits, deviation=deviation, rank_correlation=ranks)
    exact = compute_exact_maps(classifier, prepared, explainer, target)
    subject = exact.subject
    heatmap = run_explain(explainer.only(source.name), subject.model, subject.images, subject.classes)
    return exact.compare(check_heatmaps(heatmap, subject.size, subject.images.device))


def compute_exact_maps(
    classifier: Classifier,
    prepared: Prepared,
    explainer: Explainer,
    target: Any = None,
    *,
    methods: Sequence[str] = REFERENCE_METHODS,
) -> ExactMaps:
    """Explain an image, and the image under each hypothesis, with the reference methods at the explainer's layer."""
    images, model, layer = make_input(classifier, prepared), classifier.model, str(explainer.layer)
    subject = Subject(model, images, target, activation=classifier.activation)
    index, count = int(subject.classes), subject.all_probabilities.shape[1]
    colours = make_colour_variants(classifier, images)
    gains, offset = measure_gains(subject, colours, is_fixed=target is not None), measure_offset(model, images, layer)

    def explain(variants: Tensor, classes: Sequence[int]) -> dict[str, Explanation]:
        indices = torch.tensor([classes] * len(variants), dtype=torch.int64, device=images.device)
        score = ClassTarget(indices, score=explainer.score, activation=classifier.activation)
        options: Any = {"target": score, "reshape": explainer.reshape}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradcamWarning)  # The check of the image warns, too.
            explanations = compare(model, variants, layers=[layer], methods=methods, **options) if methods else {}
        return {method: explanation for (_, method), explanation in explanations.items()}

    rival = int(subject.all_probabilities[0].scatter(0, subject.classes, -1).argmax())
    classes = {f"class {k:+d}": (index + k) % count for k in CLASS_OFFSETS} | {RIVAL: rival}
    classes = {EXACT: index} | {name: i for name, i in classes.items() if i != index}
    explanations = explain(images, list(classes.values()))
    recoloured = explain(torch.cat([*colours.values()]), [index]) if colours else {}
    cropped = {f"{CROP} {share}": explain(crop, [index]) for share, crop in crop_centre(images)}
    samples = {}
    for method, explanation in explanations.items():
        maps = dict(zip(classes, to_samples(explanation.heatmaps[0])))
        maps |= dict(zip(colours, to_samples(recoloured[method].heatmaps[:, 0]))) if colours else {}
        maps |= {name: to_samples(crop[method].heatmaps[0])[0] for name, crop in cropped.items()}
        samples[method] = maps | transform_maps(maps[EXACT])
    cells = next((tuple(explanation.maps.shape[2:]) for explanation in explanations.values()), (1, 1))
    evidence = MapEvidence(index, float(subject.probabilities), subject.size[1:], cells, gains, offset)
    return ExactMaps(subject, evidence, explanations, samples)


def make_input(classifier: Classifier, prepared: Prepared) -> Tensor:
    """Return the model's input (1,C,H,W): the default crop, or the whole image if the classifier's fit is "whole"."""
    images = classifier.batch([prepared])
    if classifier.fit != "whole":
        return images
    step, steps = find_step(classifier.model), get_steps(classifier.preprocess)
    check_sizes(classifier.model, images, step)
    return show_whole(prepared.reading.values, steps, step)[None].to(images)


def make_colour_variants(classifier: Classifier, images: Tensor) -> dict[str, Tensor]:
    """Return images (1,3,H,W) in BGR order and with other normalisations, by name; {} for other numbers of channels."""
    if images.shape[1] != 3:
        return {}
    try:
        steps = get_steps(classifier.preprocess)
    except ModelError:
        return {BGR: images.flip(1)}
    mean, std = (images.new_tensor(values).reshape(-1, 1, 1) for values in (steps.mean, steps.std))
    means, stds = (images.new_tensor(values).reshape(-1, 1, 1) for values in (ASSUMED.mean, ASSUMED.std))
    values = images * std + mean
    normalised = {
        "the mean and std of ImageNet": (values - means) / stds,
        "mean 0.5 and std 0.5": (values - 0.5) / 0.5,
        "values from 0 to 1": values,
        "values from 0 to 255": values * 255,
        "two normalisations": (images - mean) / std,
        "BGR after normalisation": images.flip(1),
    }
    variants = {BGR: (values.flip(1) - mean) / std}
    for name, variant in normalised.items():
        if not any(torch.allclose(variant, other, atol=1e-3) for other in (images, *variants.values())):
            variants[name] = variant
    return variants


def measure_gains(subject: Subject, variants: Mapping[str, Tensor], *, is_fixed: bool) -> dict[str, float]:
    """Return the gain of the class (`is_fixed`), or of the top class, for each variant of the image.

    The gain is in log-probability, divided by the standard deviation over the classes. Without the division, every
    variant of higher contrast would be better, because larger inputs give larger logits.
    """
    images = torch.cat([subject.images, *variants.values()])
    probabilities = Subject(subject.model, images, activation=subject.activation).all_probabilities
    logs = probabilities.cpu().double().clamp(min=MIN_PROBABILITY).log()
    scores = (logs - logs.mean(1, keepdim=True)) / logs.std(1, keepdim=True).clamp(min=MIN_PROBABILITY)
    values = scores[:, int(subject.classes)] if is_fixed else scores.amax(1)
    return dict(zip(variants, (values[1:] - values[0]).tolist()))


def crop_centre(images: Tensor) -> list[tuple[float, Tensor]]:
    """Return the square crops at the centre of images (1,C,H,W), with their shares; [] for square images."""
    height, width = images.shape[2:]
    sides = [(share, round(share * min(height, width))) for share in CROP_SHARES] if height != width else []
    rows = ((share, images.narrow(2, (height - side) // 2, side), side) for share, side in sides)
    return [(share, crop.narrow(3, (width - side) // 2, side)) for share, crop, side in rows]


def to_samples(heatmaps: Tensor) -> Tensor:
    """Resize heatmaps (N,H,W) to float64 (N,48,48) on the CPU, with antialiasing."""
    size = (SAMPLES, SAMPLES)
    resized = F.interpolate(heatmaps[:, None].float(), size, mode="bilinear", antialias=True, align_corners=False)
    return resized[:, 0].cpu().double()


def transform_maps(exact: Tensor) -> dict[str, Tensor]:
    """Return copies of the exact map (48,48), transformed by each known bug of placement."""
    axes = {"along x": (1, 0), "along y": (0, 1), "along both axes": (1, 1)}
    factors = {f"scaled by {scale:g} {axis}": (scale**x, scale**y) for axis, (x, y) in axes.items() for scale in SCALES}
    matrices = F.pad(torch.diag_embed(1 / torch.tensor([*factors.values()], dtype=torch.float64, device="cpu")), (0, 1))
    grid = F.affine_grid(matrices, [len(factors), 1, *exact.shape], align_corners=False)
    scaled = F.grid_sample(exact.expand(len(factors), 1, -1, -1), grid, align_corners=False)[:, 0]
    flipped = {"mirrored": exact.flip(1), "upside down": exact.flip(0), "rotated": exact.flip(0, 1), "swapped": exact.T}
    return flipped | dict(zip(factors, scaled))


def correlate_shifted(supplied: Tensor, exact: Tensor) -> Tensor:
    """Return the correlation (2S+1,2S+1) of a map with the exact map, shifted by -S to S samples (down, across).

    Only the pixels in which both maps overlap count, so values that a shift moves out of the image do not matter.
    """
    maps = [torch.stack([torch.ones_like(values), values, values**2]) for values in (supplied, exact)]
    first, second = (
        torch.fft.rfft2(F.pad(values, (pad, 2 * MAX_SHIFT - pad) * 2)) for values, pad in zip(maps, (MAX_SHIFT, 0))
    )
    sums = torch.fft.irfft2(first[:, None] * second.conj())[..., : 2 * MAX_SHIFT + 1, : 2 * MAX_SHIFT + 1]
    count = sums[0, 0]
    variances = (count * sums[2, 0] - sums[1, 0] ** 2) * (count * sums[0, 2] - sums[0, 1] ** 2)
    surface = (count * sums[1, 1] - sums[1, 0] * sums[0, 1]) / variances.clamp(min=1e-6).sqrt()
    return torch.where(variances > 1e-6, surface, 0.0).clamp(-1, 1)


def measure_deviation(heatmap: Tensor, explanation: Explanation) -> float:
    """Return the largest difference from the exact map, scaled to [0,1], for the interpolation that fits best."""
    maps = explanation.maps[:, :1].float().clamp(min=0)
    resized = [F.interpolate(maps, heatmap.shape[1:], mode=mode) for mode in ("nearest", "bilinear", "bicubic")]
    candidates = torch.cat([explanation.heatmaps[:, :1], *resized])[:, 0]
    return float((scale_to_unit(heatmap) - scale_to_unit(candidates)).abs().amax((1, 2)).amin())


def measure_offset(model: nn.Module, images: Tensor, layer: str) -> tuple[float, float] | None:
    """Return the distance (across, down), in cells, of receptive fields at the centre from the places of their cells.

    The centre of a receptive field is the mean position of the squared gradient with respect to the image. Return None
    for layers without a grid, and for models that cannot be differentiated.
    """
    outputs: list[Tensor] = []

    def select_centre(_: Any, __: Any, ___: Any, output: Any) -> None:
        rows, columns = (slice((length - 1) // 2, length // 2 + 1) for length in output.shape[2:])
        outputs[:] = [output[:, :, rows, columns].sum(), output.detach()]

    pixels = images.detach().clone().requires_grad_()
    try:
        with preserve_state(unwrap(model)), torch.enable_grad(), Hooks() as hooks:
            hooks.after_forward(find_layer(unwrap(model), layer).module, select_centre)
            model(pixels)
            weights = torch.autograd.grad(outputs[0], pixels)[0].cpu().double().square().sum((0, 1))
    except (GradcamError, RuntimeError, AttributeError, ValueError, IndexError):
        return None
    rows, columns = (
        torch.linspace(-0.5, 0.5, 2 * length + 1, dtype=torch.float64, device="cpu")[1::2] for length in weights.shape
    )
    height, width = outputs[1].shape[2:]
    across, down = (weights.sum(0) * columns).sum() * width, (weights.sum(1) * rows).sum() * height
    offset = float(across / weights.sum()), float(down / weights.sum())
    return offset if math.isfinite(sum(offset)) else None
