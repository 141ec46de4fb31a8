"""A model of the sweep: how to build it, and its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 5


@dataclass(frozen=True)
class Case:
    """A model to check. `make_images` returns its input for one image."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    make_images: Callable[[], Any]
    target: Any = 1

    @property
    def title(self) -> str:
        return f"{self.library} {self.name}"


def make_noise(*size: int, channels: int = 3) -> Callable[[], Tensor]:
    """Return a function that makes one random image (1,C,*size), the same in every call."""

    def make() -> Tensor:
        return torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(11))

    return make


def score_places(output: Any) -> Tensor:
    """Return the mean score (N,) of class 1 over all positions of a dense output."""
    logits = next(output[name] for name in ("logits", "out") if name in output) if isinstance(output, dict) else output
    if isinstance(logits, (tuple, list)):
        logits = logits[0]
    return logits[:, 1].flatten(1).mean(1)


def score_depth(output: Any) -> Tensor:
    """Return the mean depth (N,)."""
    return output.predicted_depth.flatten(1).mean(1)


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Fill a model, in evaluation mode, with random weights that let differences between images through."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = parameter.data
        if not values.is_floating_point() or values.ndim == 0 or values.numel() == 0:
            continue
        if values.ndim > 1:
            # With PyTorch's own initialisation, the output of many narrow layers hardly depends on the image.
            nn.init.normal_(values, std=(2 / max(1, values[0].numel())) ** 0.5, generator=generator)
        elif name.endswith("bias"):
            nn.init.normal_(values, std=0.1, generator=generator)
        else:
            nn.init.uniform_(values, 0.5, 1.5, generator=generator)
    return model.eval()
