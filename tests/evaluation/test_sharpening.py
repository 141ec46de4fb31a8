"""Test which metrics improve by sharpening: each one on a map, and on its eighth power, which has the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.evaluation import METRICS, Metric, Subject, metric
from gradcam.evaluation.study.run import MetricInputs


def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    return gradcam.explain(model, images, "layer4", target=classes[:, None]).heatmaps[:, 0]


def sharpen(maps: Tensor) -> Tensor:
    return maps.double().pow(8).float()


def measure(tested: Metric, subject: Subject, explain_image: Any, power: Any) -> float:
    """Return one metric of an image with a box as its object, or of a mosaic."""
    maps = power(explain_image(subject.model, subject.images, subject.classes))
    if tested.is_of_mosaics:
        mosaic = torch.rand(1, 4, 32, 32, generator=torch.Generator().manual_seed(0))
        mosaic[:, 0, :16, :16] += 0.2
        return MetricInputs(mosaic=power(mosaic)).measure([tested])[tested.name]
    mask = torch.zeros(1, *subject.size[1:], dtype=torch.bool)
    mask[:, 20:80, 30:90] = True
    boxes = [torch.tensor([[30.0, 20.0, 90.0, 80.0]])]

    def sharpened(*inputs: Any) -> Tensor:
        return power(explain_image(*inputs))

    case = MetricInputs(subject=subject, heatmaps=maps, explain=sharpened, masks=mask, boxes=boxes, seed=0)
    return case.measure([tested])[tested.name]


@pytest.fixture(scope="module")
def subject(classifier: gradcam.Classifier, photo: Any) -> Subject:
    images = classifier.batch([photo("coffee.jpg")])
    return Subject(classifier.model, nn.functional.interpolate(images, 128, mode="bilinear", antialias=True))


# On a single image, these may be 0 or 1 both times, although they do not depend on the order alone.
STEP_METRICS = ("increase", "average-gain", "localisation-error", "corloc")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METRICS if name not in STEP_METRICS])
def test_sharpening_changes_what_is_not_by_order_and_nothing_else(name: str, subject: Subject) -> None:
    plain, sharp = (measure(METRICS[name], subject, explain, power) for power in (lambda maps: maps, sharpen))
    assert (abs(sharp - plain) < 2e-3) == METRICS[name].by_order, (plain, sharp)


def test_metrics_of_steps_are_not_by_order_either() -> None:
    assert not any(METRICS[name].by_order for name in STEP_METRICS)


def test_a_metric_of_ones_own_says_so_itself() -> None:
    for by_order in (True, False):
        decorate = metric("mine", summary="a number", better="higher", needs=("heatmaps",), by_order=by_order)
        assert decorate(lambda heatmaps: heatmaps.amax((1, 2))).by_order is by_order
