"""List the layers of a model whose output is a grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.hooks.containers import Batch, list_tensors
from gradcam.hooks.hooks import Hooks
from gradcam.layers.token_layout import find_layout, find_patches


def list_layers_with_grid(model: nn.Module, batch: Batch, reshape: str | tuple[int, ...] | None = None) -> list[str]:
    """Return the names of the layers whose output is a grid, found by one forward pass.

    There are three groups, in this order: layers that ran once, the last runs of all other layers, and their earlier
    runs. Each group begins with the layers that return a single tensor. Layers that finished later come first, so a
    block comes before its last submodule.

    Four kinds of layers are left out: modules that return their input unchanged, adaptive pooling, auxiliary heads, and
    queries of decoders. The grid of adaptive pooling is a coarser copy of the previous grid. Auxiliary heads do not
    lead to the score.
    """
    names = {module: name for name, module in _modules_outside_attention(model) if name}
    decoders = tuple(name for module, name in names.items() if "Decoder" in type(module).__name__)
    patches = find_patches(model.modules())
    runs: Counter[str] = Counter()
    # The key is True for layers that return several tensors.
    finished: dict[bool, list[tuple[str, int]]] = {False: [], True: []}

    def record_grid(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name = names[module]
        runs[name] += 1
        floating = [tensor for tensor in list_tensors(output) if tensor.is_floating_point()]
        is_auxiliary = any(part.startswith("aux") for part in name.split("."))
        if not floating or is_auxiliary or type(module).__name__.startswith("Adaptive"):
            return
        shape = floating[0].shape
        # A decoder's queries have no positions on the image.
        is_query = len(shape) == 3 and name.startswith(decoders)
        if is_query or returns_input(module, args, floating[0]):
            return
        if find_layout(shape, batch.size, module, batch.images, patches=patches, reshape=reshape):
            finished[len(floating) > 1].append((name, runs[name]))

    with torch.no_grad(), Hooks() as hooks:
        for module in names:
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.after_forward(module, record_grid)
        batch.run(model)
    runs_from_last = [(name, run) for has_several in (False, True) for name, run in reversed(finished[has_several])]
    single_runs = [name for name, _ in runs_from_last if runs[name] == 1]
    last_runs = [f"{name}#{run - 1}" for name, run in runs_from_last if runs[name] == run > 1]
    return single_runs + last_runs + [f"{name}#{run - 1}" for name, run in runs_from_last if run < runs[name]]


def _modules_outside_attention(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of a model, without the submodules of attention modules.

    Inside an attention module, tokens are not mixed yet, or are arranged in windows. Some attention modules start with
    a norm. This norm is yielded, because its input comes from outside the attention module. If a module contains
    blocks, it counts as a network, even if its name contains "attention".
    """
    yield name, module
    class_name = type(module).__name__.lower()
    is_attention = any(word in class_name for word in ("attention", "attn", "mhsa", "msa", "multihead"))
    is_attention = is_attention and not any("block" in type(part).__name__.lower() for part in module.modules())
    # An attention module with another name is recognised by its children: a softmax and a linear layer. A Sequential
    # with such children is not an attention module.
    children = [] if isinstance(module, nn.Sequential) else list(module.children())
    has_parts = all(any(isinstance(child, kind) for child in children) for kind in (nn.Softmax, nn.Linear))
    if not name or not (is_attention or has_parts):
        for child_name, child in module.named_children():
            yield from _modules_outside_attention(child, f"{name}.{child_name}".lstrip("."))
    else:
        first_name, first = next(module.named_children(), ("", None))
        if first is not None and "Norm" in type(first).__name__:
            yield f"{name}.{first_name}", first


def returns_input(module: nn.Module, args: tuple[Any, ...], tensor: Tensor) -> bool:
    """Return whether a module returned its input unchanged, as Identity and Dropout in evaluation mode do."""
    return any(tensor is argument for argument in args) and not getattr(module, "inplace", False)
