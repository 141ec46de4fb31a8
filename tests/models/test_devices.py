"""Test the choice of a device, and models that are spread over several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import ModelError
from gradcam.models.device import find_device
from tests.helpers import TINY, tiny_model


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes PyTorch claim to have these kinds of devices."""

    def claim(*kinds: str) -> None:
        empty = torch.empty

        def try_empty(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            if device.type != "cpu" and device.type not in kinds:
                raise RuntimeError("not there. More words.")
            return empty(*size, dtype=dtype)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in kinds)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in kinds)
        monkeypatch.setattr(torch, "empty", try_empty)

    return claim


@pytest.mark.parametrize(
    ("kinds", "device"), [(("cuda", "mps"), "cuda"), (("mps",), "mps"), (("cuda",), "cuda"), ((), "cpu")]
)
def test_auto_is_cuda_then_mps_then_the_cpu(machine: Any, kinds: tuple[str, ...], device: str) -> None:
    machine(*kinds)
    assert find_device("auto") == torch.device(device)


def test_an_unavailable_device_is_named_in_one_line(machine: Any) -> None:
    machine("mps")
    message = r"^The device 'cuda:1' is not available \(not there\): choose auto, cpu, cuda, cuda:N or mps\.$"
    with pytest.raises(ModelError, match=message):
        find_device("cuda:1")


class Spread(nn.Module):
    """A model with its first layers on one device and its last layers on another."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        full = tiny_model().eval()
        self.first, self.second = full[:3].to(first), full[3:].to(second)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.first(images).to(next(self.second.parameters()).device))


@pytest.mark.cuda
@pytest.mark.parametrize("layer", ["first.2", "second.4"])
@pytest.mark.parametrize("method", ["gradcam", "shapleycam", "ablationcam", "reciprocam", "scorecam", "rise"])
def test_a_model_on_two_devices_is_explained_on_its_devices(layer: str, method: str) -> None:
    plain = gradcam.explain(Spread("cpu", "cpu"), TINY, layer, method=method, target=2)
    explanation = gradcam.explain(Spread("cpu", "cuda"), TINY, layer, method=method, target=2)
    assert explanation.maps.device == explanation.scores.device == TINY.device
    torch.testing.assert_close(explanation.maps, plain.maps, rtol=1e-2, atol=1e-3 * plain.maps.abs().max().item())
