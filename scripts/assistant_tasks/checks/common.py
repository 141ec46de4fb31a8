"""Run the check of one task, and compute expected maps with plain autograd, without the package."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[3]
ASSETS = ROOT / "assets"
TASKS = Path(__file__).resolve().parents[1] / "tasks"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def run_check(check: Callable[[ModuleType], None]) -> None:
    """Import the answer that the command line names, and check it. The last line of an error is its reason."""
    torch.manual_seed(0)
    check(import_file(Path(sys.argv[1]), "answer"))


def import_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_command(line: Any) -> subprocess.CompletedProcess[str]:
    """Run a `gradcam` command without a shell, in the current folder."""
    assert isinstance(line, str), f"the command is {line!r}, not a text"
    words = shlex.split(line)
    assert words[:1] == ["gradcam"], f"the command begins with {words[:1]}, not with gradcam"
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)


def expect_map(received: Any, expected: Tensor, name: str = "map") -> None:
    """Compare a map with the expected one: the same shape, and values within 1e-5 of the largest value."""
    received = torch.as_tensor(received).detach().float().cpu()
    assert received.shape == expected.shape, (
        f"the {name} has the shape {tuple(received.shape)}, not {tuple(expected.shape)}"
    )
    assert expected.abs().max() > 0, f"the expected {name} is blank"
    difference = float((received - expected).abs().max() / expected.abs().max())
    assert difference <= 1e-5, f"the {name} differs by {difference:.1e} of its largest value"


def differentiate(
    model: nn.Module, layer: str, inputs: Any, score: Callable[[Any], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's activations, the gradient of the scores (N,) at the layer, and the scores."""
    recorded: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda _, __, output: recorded.append(output))
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.enable_grad():
            scores = score(model(**inputs) if isinstance(inputs, dict) else model(*inputs))
            (gradient,) = torch.autograd.grad(scores.sum(), recorded[0])
    finally:
        handle.remove()
        for module, training in modes.items():
            module.training = training
    return recorded[0].detach(), gradient, scores.detach()


def weigh_channels(activations: Tensor, gradient: Tensor) -> Tensor:
    """Return signed Grad-CAM: the sum over channels of the activations times the mean gradient of the channel."""
    places = tuple(range(2, gradient.ndim))
    return (activations * gradient.mean(places, keepdim=True)).sum(1)


def grad_cam(model: nn.Module, layer: str, inputs: Any, score: Callable[[Any], Tensor]) -> Tensor:
    activations, gradient, _ = differentiate(model, layer, inputs, score)
    return weigh_channels(activations, gradient).relu()


def pick(classes: Any) -> Callable[[Tensor], Tensor]:
    """Return the score of one class for all images, or of one class per image."""
    return lambda output: output.gather(1, torch.as_tensor(classes).expand(len(output))[:, None])[:, 0]


def record_state(model: nn.Module) -> dict[str, Any]:
    """Return what an explanation must not change: hooks, modes, values and gradients."""
    modules = dict(model.named_modules())
    return {
        "hooks": {f"{name}.{kind}": len(getattr(m, kind)) for name, m in modules.items() for kind in HOOKS},
        "training mode": {name: module.training for name, module in modules.items()},
        "requires_grad": {name: weight.requires_grad for name, weight in model.named_parameters()},
        ".grad": {name: weight.grad is None for name, weight in model.named_parameters()},
        "weights": {name: value.sum().item() for name, value in model.state_dict().items()},
    }


def expect_unchanged(before: dict[str, Any], model: nn.Module) -> None:
    after = record_state(model)
    for key, value in before.items():
        assert after[key] == value, f"the answer changed the model: {key}"


def read_rgb(path: Path | str) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def make_scene(seed: int, size: tuple[int, int] = (64, 64)) -> Tensor:
    """Return an image (1,3,H,W) with a few blurred spots."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, 3, 6, 6, generator=generator)
    return nn.functional.interpolate(coarse, size, mode="bicubic")


class SmallNet(nn.Sequential):
    """A small classifier with layers `features`, `pool`, `flatten` and `head`."""

    def __init__(self, classes: int, *, channels: int = 3, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 12, 5, stride=2, padding=2), nn.BatchNorm2d(12), nn.ReLU(),
            nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, classes)
