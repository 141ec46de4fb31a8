"""Test that the cascading randomisation of Adebayo et al. (NeurIPS 2018) repeats on two photographs."""

from pathlib import Path

import pytest
import torch

import gradcam
from gradcam.evaluation import Subject

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def correlations() -> dict[str, torch.Tensor]:
    """Return the rank correlations (2,2) of each method, after the top layer and after all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        from benchmark.cascade import make_explainers, run_cascade

        classifier = gradcam.load_classifier(device="cpu")
        images = classifier.batch(
            [gradcam.read_image(ROOT / "assets" / name) for name in ("chelsea.jpg", "koala.webp")]
        )
        subject = Subject(classifier.model, images, classifier.model(images).argmax(1))
        explainers = make_explainers("layer4")
        del explainers["guided Grad-CAM"]
        return {cascade.method: cascade.absolute for cascade in run_cascade(subject, explainers, stages=2)}


def test_gradcam_changes_more_with_the_top_layer_than_guided_backpropagation(
    correlations: dict[str, torch.Tensor],
) -> None:
    changed, unchanged = correlations["Grad-CAM"][:, 0], correlations["guided backpropagation"][:, 0]
    assert (unchanged > changed + 0.1).all()
    assert unchanged.min() > 0.99
    assert changed.mean() < 0.6


def test_gradcam_forgets_the_map_when_all_layers_are_shuffled(correlations: dict[str, torch.Tensor]) -> None:
    assert correlations["Grad-CAM"][:, -1].abs().max() < 0.7
