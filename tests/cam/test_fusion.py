from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradcam
from gradcam.errors import GradcamError
from tests.helpers import TINY, tiny_model


def explain(layer: str, **options: Any) -> gradcam.Explanation:
    return gradcam.explain(tiny_model(), TINY, layer, **options)


def normalise_maps(values: Tensor) -> Tensor:
    """Divide each map by its own largest magnitude, in a loop."""
    result = values.clone()
    for heatmap in result.flatten(0, 1):
        heatmap /= max(abs(value) for value in heatmap.flatten().tolist()) or 1
    return result


@pytest.mark.parametrize("reduction", ["mean", "max"])
@pytest.mark.parametrize("evidence", ["positive", "negative", "signed"])
def test_each_heatmap_has_its_own_maximum_first(reduction: str, evidence: str) -> None:
    explanations = [explain(layer, target=[[0, 3]] * 3, evidence=evidence) for layer in ("0", "3")]
    first, second = (item.heatmaps for item in explanations)
    expected = (first + second) / 2 if reduction == "mean" else torch.where(first.abs() >= second.abs(), first, second)
    fused = gradcam.fuse(explanations, reduction)
    torch.testing.assert_close(fused.maps, expected)
    torch.testing.assert_close(fused.heatmaps, normalise_maps(expected))
    assert (fused.layer, fused.method, fused.evidence) == ("0+3", "gradcam", evidence)
    assert fused.classes.tolist() == [[0, 3]] * 3
    assert fused.maps.shape == (3, 2, 12, 16)


def test_the_result_of_compare_can_be_fused() -> None:
    explanations = gradcam.compare(tiny_model(), TINY, layers=["0", "3"], methods=["gradcam", "layercam"])
    fused = gradcam.fuse(explanations)
    assert (fused.layer, fused.method) == ("0+3", "gradcam+layercam")
    torch.testing.assert_close(fused.maps, sum(item.heatmaps for item in explanations.values()) / 4)


@pytest.mark.filterwarnings("ignore:.*for some of the images")
def test_blank_maps_stay_blank() -> None:
    blank = explain("0", target=lambda output: output[:, :1] * 0 + output[:, 1:2] * torch.tensor([[0.0], [1], [1]]))
    fused = gradcam.fuse([blank, blank], "max")
    assert not fused.heatmaps[0].any()
    assert fused.heatmaps[1].max() in (0, 1)


def test_a_fused_explanation_keeps_its_images(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    explanations = classifier.compare(photo("koala.webp"), layers=["layer3", "layer4"], methods=["gradcam"])
    fused = gradcam.fuse(explanations)
    image, region = gradcam.read_image(photo("koala.webp")), classifier.region(*fused.images[0].shape[:2])
    expected = gradcam.overlay(image, fused.heatmaps[0, 0], region=region, outline=True)
    assert (fused.overlay() == expected).all()


@pytest.mark.parametrize(
    ("make", "reduction", "message"),
    [
        (list, "mean", "expected a non-empty list"),
        (dict, "mean", "expected a non-empty list"),
        (lambda: explain("0"), "mean", "expected a non-empty list"),
        (lambda: [explain("0"), "heatmap"], "mean", "expected a non-empty list"),
        (lambda: [explain("0")], "min", "reduction is 'min', expected one of 'mean', 'max'"),
        (lambda: [explain("0", target=1), explain("3", target=2)], "mean", "different classes"),
        (lambda: [explain("0", target=1), explain("3", target=lambda x: x[:, 1])], "mean", "different classes"),
        (
            lambda: [explain("0", target=1), explain("3", target=[[1, 2]] * 3)],
            "mean",
            r"\(3, 1, .*and \(3, 2, 12, 16\)",
        ),
        (lambda: [explain("0"), explain("3", evidence="signed")], "mean", "show positive and signed evidence"),
    ],
)
def test_wrong_explanations_to_fuse_are_errors(make: Callable[[], Any], reduction: str, message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        gradcam.fuse(make(), reduction)
