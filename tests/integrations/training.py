"""A small model that is trained, and everything that a training leaves behind."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

CLASSES = 4


def seed_all(seed: int = 0) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class Noise(nn.Module):
    """Takes random numbers in evaluation mode, too, and counts its runs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + 0.01 * torch.rand(1, device=x.device, dtype=x.dtype) + 0.01 * (random.random() + np.random.rand())


def build_net(*, noisy: bool = False) -> nn.Sequential:
    """Build a model with batch norm and dropout, and with noise instead of dropout if it is noisy."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Noise() if noisy else nn.Dropout(0.3),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def make_data(count: int = 24, size: int = 24) -> list[tuple[Tensor, int]]:
    return [(torch.rand(3, size, size), number % CLASSES) for number in range(count)]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return the weights, buffers, gradients and flags of a model, the random states and PyTorch's switches."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [None if x.grad is None else x.grad.clone() for x in model.parameters()],
        "flags": [module.training for module in model.modules()],
        "requires_grad": [x.requires_grad for x in model.parameters()],
        "hooks": [len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules()],
        "random": (torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype(np.int64)), random.getstate()),
        "grad mode": torch.is_grad_enabled(),
        "switches": (
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled,
            torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads(),
        ),
    }  # fmt: skip


def assert_identical(first: Any, second: Any) -> None:
    """Check that two nested values are equal, tensors bit for bit."""
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_identical(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second):
            assert_identical(one, other)
    else:
        assert first == second


def read_events(folder: str | Path) -> dict[str, list[tuple[int, np.ndarray]]]:
    """Return the images that TensorBoard would show: by tag, the step and the pixels of each."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"images": 0}).Reload()
    return {
        tag: [
            (event.step, np.array(Image.open(io.BytesIO(event.encoded_image_string)))) for event in events.Images(tag)
        ]
        for tag in events.Tags()["images"]
    }
