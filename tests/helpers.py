"""Provide a small model, and record everything on a model that an explanation might change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def strict(schema: Any) -> Any:
    """Return a JSON schema with undescribed keys as errors, so that no key is undocumented."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: strict(entry) for key, entry in schema.items()}
    return {"additionalProperties": False, **parts} if "properties" in parts else parts


def tiny_model() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
    second = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Dropout(), nn.Linear(6, 5))


def tiny_vit(**options: Any) -> Any:
    """Return a Hugging Face ViT configuration with two layers, 16 features and images of 32 pixels."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.ViTConfig(**(sizes | {"image_size": 32, "patch_size": 8} | options))


TINY = torch.randn(3, 3, 12, 16, generator=torch.Generator().manual_seed(1))


def traces(model: nn.Module) -> dict[str, Any]:
    """Return everything on a model that an explanation might change."""
    return {
        "hooks": [(name, kind, list(getattr(m, kind))) for name, m in model.named_modules() for kind in HOOKS],
        "training": [(name, m.training) for name, m in model.named_modules()],
        "modules": [(name, id(m)) for name, m in model.named_modules()],
        "attributes": [(name, sorted(vars(m))) for name, m in model.named_modules()],
        "requires_grad": [(name, p.requires_grad) for name, p in model.named_parameters()],
        "values": [
            (name, t.detach().clone(), t.dtype, t.stride(), t._version)
            for name, t in model.state_dict(keep_vars=True).items()
        ],
        "grad": [(name, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()],
        "mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "random": torch.get_rng_state(),
    }


def assert_same(before: Any, after: Any) -> None:
    if isinstance(before, Tensor):
        # NaN counts as equal to NaN, because some libraries leave parameters uninitialised.
        assert before.shape == after.shape
        assert torch.equal(before, after) or torch.allclose(before, after, rtol=0, atol=0, equal_nan=True)
    elif isinstance(before, dict):
        assert before.keys() == after.keys()
        for key in before:
            assert_same(before[key], after[key])
    elif isinstance(before, (list, tuple)):
        assert len(before) == len(after)
        for before_item, after_item in zip(before, after):
            assert_same(before_item, after_item)
    else:
        assert before == after


class FunctionModule(nn.Module):
    """A module with these parts, whose forward pass is any function of it and the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Any, **more: Any) -> Any:
        return self.function(self, *inputs, **more)


class Compiled:
    """A module compiled by a backend that counts its runs; it reports whether a call runs compiled code."""

    def __init__(self, module: nn.Module, images: Tensor) -> None:
        self.runs, self._images = 0, images
        torch.compiler.reset()  # Forget what other tests compiled, or failed to compile.
        self.module = torch.compile(module, backend=self._compile)
        assert self.is_compiled()

    def _compile(self, graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run

    def is_compiled(self) -> bool:
        before = self.runs
        with torch.no_grad():
            self.module(self._images)
        return self.runs > before


def set_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a submodule like `model.set_submodule`, which PyTorch has since 2.5."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
