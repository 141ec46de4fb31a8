"""Whether a model has a classification head, as far as its modules tell."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradcam.families import gives_embedding

HEAD_NAMES = ("fc", "classifier", "head", "heads", "last_linear", "linear")
EMPTY_HEAD = (nn.Identity, nn.Sequential, nn.Dropout, nn.Flatten)
PASSIVE_MODULES = tuple(f"torch.nn.modules.{name}" for name in ("activation", "dropout", "flatten", "pooling"))


def find_end(model: nn.Module) -> nn.Module:
    """Return the module that makes the output: the last one of a sequence, or the only one with weights in a wrapper."""
    while not isinstance(model, torch.jit.ScriptModule) and not is_headless(model):
        if is_sequence(model):
            inner = [child for child in model.children() if type(child).__module__ not in PASSIVE_MODULES][-1:]
        else:
            inner = [] if _holds_tensors(model) else list(islice(filter(_has_weights, model.children()), 2))
        if len(inner) != 1:
            break
        (model,) = inner
    return model


def is_headless(model: nn.Module) -> bool:
    """Return whether the output is an embedding: by the model's class, or because nothing is left of its head."""
    if gives_embedding(model):
        return True
    if hasattr(type(model), "get_classifier") and hasattr(model, "num_classes"):  # timm's interface
        heads = [model.get_classifier()]  # type: ignore[operator]
    else:
        heads = [head for name in HEAD_NAMES if (head := model._modules.get(name)) is not None]
    # A matrix among the model's parameters may be a head, such as that of a cosine classifier.
    has_matrix = any(it is not None and it.ndim == 2 and len(it) > 1 for it in model._parameters.values())
    return bool(heads) and not has_matrix and all(map(_is_empty, heads))


def is_sequence(model: nn.Module) -> bool:
    """Return whether the model runs its children in the order in which they are registered."""
    return type(model).forward is nn.Sequential.forward


def ends_in_features(end: nn.Module) -> bool:
    """Return whether the last weights of a module are those of a batch norm over a grid, without a linear layer."""
    weighted = [module for module in end.modules() if module._parameters]
    is_norm = bool(weighted) and isinstance(weighted[-1], _BatchNorm) and not isinstance(weighted[-1], nn.BatchNorm1d)
    return is_norm and not any(isinstance(module, nn.Linear) for module in weighted)


def _is_empty(head: Any) -> bool:
    is_candidate = isinstance(head, (nn.Identity, nn.Sequential))
    return is_candidate and all(isinstance(module, EMPTY_HEAD) for module in head.modules())


def _holds_tensors(model: nn.Module) -> bool:
    """Return whether a wrapper has tensors, such as the prototypes that its scores are similarities to."""
    return bool(model._parameters or model._buffers) or any(isinstance(it, Tensor) for it in vars(model).values())


def _has_weights(module: nn.Module) -> bool:
    """Return whether a module may be more than a function. Quantised modules keep their weights elsewhere."""
    return next(module.parameters(), None) is not None or "quant" in type(module).__module__
