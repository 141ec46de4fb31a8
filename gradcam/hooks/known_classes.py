"""Recognise models that process each image of a batch alone, by the classes of their modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from torch import nn

from gradcam.hooks.model_state import list_global_hooks, list_hooks


def _is_batch_first(module: Any) -> bool:
    """Return False for torchvision's `Permute`, if it moves the batch axis. No other class below can move this axis."""
    return type(module).__name__ != "Permute" or module.dims[0] == 0


# All classes in these packages process each image alone, in evaluation mode. The models of the last package are those
# that are included in gradcam.
PACKAGES = (
    "torchvision.models.",
    "torchvision.ops.",
    "timm.models.",
    "timm.layers.",
    "gradcam.models.providers.embedded",
)
# These classes also process each image alone, if the function is true for the module. The batch axis has to be the first
# axis, as it is in the classes above, and in a sequence of these modules.
CLASSES: dict[type[nn.Module], Callable[[Any], bool]] = dict.fromkeys(
    (
        *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Dropout, nn.Dropout2d),
        *(nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear),
        *(nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Hardsigmoid),
        *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool3d),
    ),
    _is_batch_first,
)
CLASSES |= {
    nn.Flatten: lambda module: module.start_dim > 0,
    nn.LayerNorm: lambda module: len(module.normalized_shape) == 1,
    nn.MultiheadAttention: lambda module: module.batch_first,
}


def process_images_alone(modules: Sequence[nn.Module]) -> bool:
    """Return True if it is known that a model with these modules processes each image of a batch alone.

    False means that it is unknown. The result is only valid in evaluation mode. It does not hold for batch norm without
    running statistics, of which `warn_of_shared_statistics` warns.
    """
    functions_by_class = {kind: _find_functions(kind) for kind in set(map(type, modules))}
    if any(list_global_hooks()) or None in functions_by_class.values():
        return False
    return not any(
        not module.__dict__.keys().isdisjoint(functions_by_class[type(module)] or ())
        or ((module._forward_hooks or module._forward_pre_hooks) and list_hooks(module))
        or not CLASSES.get(type(module), _is_batch_first)(module)
        for module in modules
    )


def _find_functions(kind: type[nn.Module]) -> set[str] | None:
    """Return the names of the functions that a module of this class runs; None if the class is not known.

    A class is known if it is in `CLASSES` or `PACKAGES`, and none of its functions was replaced.
    """
    is_known = kind in CLASSES or kind.__module__.startswith(PACKAGES)
    if not is_known or not isinstance(kind.forward, FunctionType):
        return None
    names = {"_call_impl"}
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        functions = {name: value for name, value in vars(base).items() if isinstance(value, FunctionType)}
        if any(function.__module__ != base.__module__ for function in functions.values()):
            return None
        names |= functions.keys()
    return names
