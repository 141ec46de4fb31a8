"""Check whether a model has a classification head, and whether its output is probabilities."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import TargetError, warn
from gradcam.layers.model_names import BACKBONES

MAX_SUM_ERROR = 1e-2  # The rounding error of the sum of a thousand half-precision probabilities.
HEAD_NAMES = ("fc", "classifier", "head", "heads", "last_linear", "linear")
# Image towers of image-text models. Their last linear layer is a projection to the embedding space, not a classifier.
IMAGE_TOWERS = (
    r"open_clip\.(transformer|modified_resnet|timm_model)\.\w+|clip\.model\.(VisionTransformer|ModifiedResNet)"
)
EMBEDDER = re.compile(f"{BACKBONES}|{IMAGE_TOWERS}")
NO_CLASSES = (
    "the model has no image classes. Pass target=, a function from the model's output to one score per image. To compare "
    'images, load the model with --task matching (task="matching" in Python).'
)
PASSIVE_MODULES = tuple(f"torch.nn.modules.{name}" for name in ("activation", "dropout", "flatten", "pooling"))


def are_probabilities(values: Tensor) -> bool:
    """Return whether no value (N,C) is negative and each row sums to 1."""
    if values.ndim < 2 or values.shape[1] < 2:
        return False
    values = values.detach().float()
    return bool((values.amin() >= 0) & ((values.sum(1) - 1).abs().amax() < MAX_SUM_ERROR))


def require_class_head(model: nn.Module) -> None:
    """Raise `TargetError` if the model has no classification head; warn if the head may be missing."""
    end = find_output_module(model)
    if is_headless(end):
        reason = "has no classification head, or its num_classes is 0, so its output is an embedding"
        raise TargetError(f"{type(end).__name__} {reason}: {NO_CLASSES}")
    if end is not model and ends_in_features(end):
        reason = f"ends in {type(end).__name__} without a linear layer, so its output may be an embedding"
        advice = "pass target=, a function from the model's output to one score per image."
        warn(f"The model {reason}. An embedding has no classes: {advice}")


def find_output_module(model: nn.Module) -> nn.Module:
    """Return the module that computes the output: the last module of an `nn.Sequential`, or a wrapper's only module."""
    while not isinstance(model, torch.jit.ScriptModule):
        modules = (child for child in dict.fromkeys(reversed(model._modules.values())) if child is not None)
        children = (child for child in modules if type(child).__module__ not in PASSIVE_MODULES)
        last = next(children, None)
        if last is None or vars(model).get("makes_scores", getattr(type(model), "makes_scores", False)):
            break
        if type(model).forward is not nn.Sequential.forward:
            # A wrapper that has tensors itself may compute scores by comparing an embedding with these tensors.
            if next(children, None) is not None or model._parameters or model._buffers:
                break
            if any(isinstance(value, Tensor) for value in vars(model).values()):
                break
        model = last
    return model


def is_headless(model: nn.Module) -> bool:
    """Return whether the output is an embedding, because of the model's class or because the head was removed."""
    if isinstance(model, torch.jit.ScriptModule):  # Scripted modules do not expose their classes.
        return False
    if _is_embedder(f"{type(model).__module__}.{type(model).__qualname__}"):
        return not hasattr(getattr(model, "config", None), "text_config")  # Image-text models output similarities.
    heads: list[Any] = [head for name in HEAD_NAMES if (head := model._modules.get(name)) is not None]
    if hasattr(type(model), "get_classifier"):  # Use timm's interface. For a few headless models, it raises an error.
        if getattr(model, "num_classes", None) == 0:
            return True
        with contextlib.suppress(AttributeError, TypeError):
            heads = [head for head in [model.get_classifier()] if isinstance(head, nn.Module)]  # type: ignore[operator]
    has_matrix = any(x is not None and x.ndim == 2 and len(x) > 1 for x in model._parameters.values())
    kinds = (nn.Identity, nn.Sequential)
    is_empty = all(
        isinstance(head, kinds) and all(isinstance(part, kinds) for part in head.modules()) for head in heads
    )
    return bool(heads) and is_empty and not has_matrix


@functools.lru_cache(maxsize=64)
def _is_embedder(class_name: str) -> bool:
    return EMBEDDER.fullmatch(class_name) is not None


def ends_in_features(end: nn.Module) -> bool:
    """Return True if the last module with weights is a batch norm over a grid, and no linear layer precedes it."""
    modules = [module for _, module in end.named_modules(remove_duplicate=False)]
    weighted = (module for module in reversed(modules) if module._parameters)
    is_norm_last = isinstance(next(weighted, None), nn.BatchNorm2d)
    return is_norm_last and not any(isinstance(module, nn.Linear) for module in weighted)
