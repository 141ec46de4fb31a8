"""Test that the maps of all classes at once equal the maps of separate backward passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradcam
from gradcam.cam.all_classes import explain_all_classes, record_layer_outputs
from gradcam.cam.methods.table import METHODS


def make_network(channels: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.SiLU(),  # Its second derivative is not zero.
        nn.Conv2d(channels, 6, 3), nn.BatchNorm2d(6), nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("method", ["gradcam", "hirescam"])
@pytest.mark.parametrize("channels", [4, 90])  # fewer channels than cells, and more
def test_maps_equal_those_of_separate_passes(method: str, channels: int) -> None:
    model, images = make_network(channels), torch.rand(1, 3, 8, 8)
    with record_layer_outputs({"1": model[1]}) as outputs:
        known = gradcam.explain(model, images, "1", method=method, target=[[2]], evidence="signed").maps[0]
    (activations,) = outputs["1"]
    assert activations is not None
    steps: list[None] = []
    result = explain_all_classes(
        model, images, model[1], METHODS[method], activations=activations, known=known, classes=torch.tensor([2]),
        report=lambda: steps.append(None),
    )  # fmt: skip
    assert result is not None
    assert len(steps) == (channels if method == "gradcam" and channels <= 64 else 64)
    expected = gradcam.explain(model, images, "1", method=method, target=[list(range(5))], evidence="signed").maps[0]
    torch.testing.assert_close(result.at(torch.arange(5)), expected, rtol=1e-4, atol=1e-6)


def test_there_is_no_result_if_the_known_map_differs() -> None:
    model, images = make_network(4), torch.rand(1, 3, 8, 8)
    with record_layer_outputs({"1": model[1]}) as outputs:
        known = gradcam.explain(model, images, "1", target=[[2]], evidence="signed").maps[0]
    (activations,) = outputs["1"]
    for factor, is_equal in ((1, True), (1.01, False)):
        result = explain_all_classes(
            model, images, model[1], METHODS["gradcam"], activations=activations, known=factor * known,
            classes=torch.tensor([2]),
        )  # fmt: skip
        assert (result is not None) == is_equal
