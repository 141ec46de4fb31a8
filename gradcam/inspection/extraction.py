"""STAND-IN, to be dropped when the real module is merged: what layers give, from a whole forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import LayerError, join_names
from gradcam.hooks import Hooks
from gradcam.inspection.selection import Layers, select_layers
from gradcam.isolation import undisturbed
from gradcam.layers import unwrap
from gradcam.nested import first_floating, map_tensors
from gradcam.recording import caller_keeps, to_batch


def features(model: nn.Module, images: Any, layers: Layers) -> dict[str, Tensor]:
    """What each layer gives in its first run, detached."""
    model, batch = unwrap(model), to_batch(images)
    chosen = select_layers(model, layers)
    names = {id(module): name for name, module in chosen.items()}
    found: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name, tensor = names[id(module)], first_floating(output)
        if tensor is None:
            raise LayerError(f"Layer '{name}' gave no floating-point tensor: choose a layer whose output is one.")
        found.setdefault(name, tensor.detach().clone())

    with undisturbed(model), torch.no_grad(), Hooks() as hooks:
        for module in chosen.values():
            hooks.after_forward(module, keep)
        args, kwargs = map_tensors((batch.args, batch.kwargs), caller_keeps)
        model(*args, **kwargs)
    missing = [name for name in chosen if name not in found]
    if missing:
        raise LayerError(f"Layer {join_names(missing)} did not run in the forward pass.")
    return {name: found[name] for name in chosen}
