"""Test each library on models that cause other libraries to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.cases import SEED, Case, build_model
from benchmark.contenders import BARE, CONTENDERS
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table, correlate


def try_in_place(contender: str) -> str:
    """Compare a contender's map at a convolution before an in-place ReLU with the definition of Grad-CAM."""
    torch.manual_seed(SEED)
    body, head = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True)), nn.Linear(8, 5)
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()
    images = torch.randn(1, 3, 32, 32)
    activations = body[0](images).detach().requires_grad_()
    (gradients,) = torch.autograd.grad(head(activations.relu().mean((2, 3)))[0, 1], activations)
    weighted = (gradients.mean((2, 3), keepdim=True) * activations).sum(1).relu().detach()
    heatmap = find_first_map(contender, Case(model, "0.0", images, [[1]]))
    expected = nn.functional.interpolate(weighted[None], heatmap.shape[-2:], mode="bilinear")[0]
    return "exact" if correlate(heatmap, expected) > 0.99 else "wrong"


def find_first_map(contender: str, case: Case) -> Tensor:
    """Return the first map (1,h,w) of a contender's result, which may have any type."""
    with CONTENDERS[contender].attach(case) as call:
        result: Any = call()
    while isinstance(result, list):
        result = result[0]
    result = torch.as_tensor(getattr(result, "maps", result)).detach()
    return result.reshape(-1, *result.shape[-2:])[:1].relu()


def try_frozen(contender: str) -> str:
    find_first_map(contender, make_small_case(build_model("ResNet-50", "cpu").requires_grad_(False)))
    return "works"


def try_bfloat16(contender: str) -> str:
    case = make_small_case(build_model("ResNet-50", "cpu").bfloat16())
    find_first_map(contender, replace(case, images=case.images.bfloat16()))
    return "works"


def try_training(contender: str) -> str:
    """Return the changes that a contender makes to a model in training mode."""
    model = build_model("ResNet-50", "cpu").train()
    statistics = model.bn1.running_mean.clone()  # type: ignore[union-attr]
    find_first_map(contender, make_small_case(model))
    changes = [
        "" if model.training else "evaluation mode",
        "`.grad` filled" if any(parameter.grad is not None for parameter in model.parameters()) else "",
        "" if torch.equal(model.bn1.running_mean, statistics) else "changed running statistics",  # type: ignore[union-attr]
        "hooks" if any(module._forward_hooks for module in model.modules()) else "",
    ]
    return ", ".join(filter(None, changes)) or "nothing"


def make_small_case(model: nn.Module) -> Case:
    return Case(model, "layer4", torch.randn(2, 3, 64, 64), [[1], [1]])


TRAITS = {
    "a layer before an in-place ReLU": try_in_place,
    "a frozen model": try_frozen,
    "a bfloat16 model": try_bfloat16,
    "changes left on a model in training mode": try_training,
}


def compare_traits(settings: Settings) -> Iterator[Table]:
    """Test each contender on models that cause other libraries to fail."""
    names = [name for name in settings.present if name not in {BARE, "by hand"}]
    rows = []
    for trait, attempt in TRAITS.items():
        report_progress("traits", trait)
        rows.append([trait, *(describe_attempt(attempt, name) for name in names)])
    notes = ["Each library is used as its documentation says, once, on the CPU."]
    yield Table("traits", "Models that other libraries fail on", ["", *names], rows, notes)


def describe_attempt(attempt: Callable[[str], str], contender: str) -> str:
    try:
        return attempt(contender)
    except Exception as error:  # The failure is the result, whatever its type.
        return f"raises {type(error).__name__}"
