"""Repeat the cascading randomisation of Adebayo et al. (NeurIPS 2018): how heatmaps change with the weights.

The weights are shuffled layer by layer, from the output to the input. After each stage, Spearman's rank correlation
compares the map with the map of the trained model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gradcam
from benchmark.cases import ROOT
from benchmark.measuring import Settings, report_progress
from benchmark.quality import PICTURES
from benchmark.tables import Table
from gradcam.evaluation import Subject, mean_interval, randomisation
from gradcam.evaluation.heatmap_sources import ExplainFunction
from gradcam.evaluation.metrics.soundness import rank_correlation

STAGES = 7
SCENES = 24
SCENE_SEED = 50


def make_explainers(layer: str) -> dict[str, ExplainFunction]:
    """Return the methods as functions of the model, the images and the classes. Grad-CAM always explains one layer."""

    def run_gradcam(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return gradcam.explain(model, images, layer, method="gradcam", target=classes.tolist()).heatmaps[:, 0]

    def run_guided(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return sum_channels(gradcam.attributions.guided_backpropagation(model, images, target=classes.tolist()))

    def run_guided_gradcam(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return sum_channels(gradcam.attributions.guided_gradcam(model, images, layer, target=classes.tolist()))

    return {"Grad-CAM": run_gradcam, "guided backpropagation": run_guided, "guided Grad-CAM": run_guided_gradcam}


def sum_channels(attribution: gradcam.attributions.Attribution) -> Tensor:
    """Return one signed value per pixel (N,H,W)."""
    return attribution.values[:, 0].sum(1)


@dataclass(frozen=True)
class Cascade:
    """The rank correlations (N,S) of one method, for N images and S layers, with and without absolute values."""

    method: str
    layers: tuple[str, ...]
    absolute: Tensor
    signed: Tensor


def run_cascade(
    subject: Subject, explainers: Mapping[str, ExplainFunction], *, stages: int = STAGES, seed: int = 0
) -> Iterator[Cascade]:
    """Yield the correlations of each method. All methods meet the same shuffled weights."""
    for method, explain in explainers.items():
        report_progress("cascade", method)
        before = explain(subject.model, subject.images, subject.classes)
        result = randomisation(subject, explain, before, stages=stages, seed=seed)
        absolute = [rank_correlation(before.abs(), maps.abs()) for maps in result.heatmaps.unbind(1)]
        yield Cascade(method, result.layers, torch.stack(absolute, 1), result.correlations)


def load_photographs() -> Subject:
    """Return the embedded model with photographs of assets/, each with its most probable class."""
    classifier = gradcam.load_classifier(device="cpu")
    names = PICTURES.read_text(encoding="utf-8").split()
    images = classifier.batch([gradcam.read_image(PICTURES.parent / name) for name in names])
    return Subject(classifier.model, images, classifier.model(images).argmax(1))


def load_scenes(count: int = SCENES) -> Subject:
    """Return the narrow VGG11 with drawn scenes, each with its highest-scoring shape or colour."""
    sys.path.insert(0, str(ROOT))  # Makes `tests` importable.
    from tests import drawn
    from tests.drawn.pictures import draw_scenes, to_images

    model, images = drawn.load("vgg11"), to_images(list(draw_scenes(SCENE_SEED, count)))
    return Subject(model, images, model(images).argmax(1))


# Each model with the layer of Grad-CAM, whose convolutions are the last before the head.
SUBJECTS = {"embedded model": (load_photographs, "layer4"), "narrow VGG11": (load_scenes, "features.18")}


def tabulate(title: str, cascades: Sequence[Cascade], images: int) -> Table:
    """Return a table with one row per layer: the mean correlation of each method, and half its 95 % interval."""
    header = [
        "shuffled down to",
        *(f"{cascade.method}, {kind}" for cascade in cascades for kind in list_kinds(cascade)),
    ]
    rows = []
    for stage, layer in enumerate(cascades[0].layers):
        cells = [format_mean(kind[:, stage]) for cascade in cascades for kind in list_kinds(cascade).values()]
        rows.append([layer, *cells])
    notes = [f"Mean of Spearman's rank correlation over {images} images, and half the 95 % interval."]
    raw: list[dict[str, Any]] = [
        {"method": cascade.method, "kind": kind, "layers": cascade.layers, "correlations": values.tolist()}
        for cascade in cascades
        for kind, values in list_kinds(cascade).items()
    ]
    return Table(f"cascade {title}", f"Cascading randomisation, {title}", header, rows, notes, raw)


def list_kinds(cascade: Cascade) -> Mapping[str, Tensor]:
    if cascade.method == "Grad-CAM":  # has no negative values
        return {"absolute": cascade.absolute}
    return {"absolute": cascade.absolute, "signed": cascade.signed}


def format_mean(values: Tensor) -> str:
    interval = mean_interval(values.tolist())
    return f"{interval.mean:.2f} ± {(interval.high - interval.low) / 2:.2f}"


def compare_cascade(settings: Settings) -> Iterator[Table]:
    """Run the cascade for both models on the CPU. No time is measured."""
    for title, (load, layer) in SUBJECTS.items():
        subject = load()
        yield tabulate(title, list(run_cascade(subject, make_explainers(layer))), len(subject.images))
