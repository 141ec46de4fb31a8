"""Extract the outputs of layers for a batch, in a forward pass that stops after the last requested layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import LayerError, join_names
from gradcam.hooks.autograd import no_floating_tensor_error
from gradcam.hooks.containers import detach_input, find_floating_tensor, map_tensors, to_inputs
from gradcam.hooks.hooks import Hooks, grad_mode_off, refuse_vmap
from gradcam.hooks.preserve import preserve_state
from gradcam.inspection.selection import Layers, select_layers, to_layer_list
from gradcam.layers.find import unwrap


def features(model: nn.Module, images: Any, layers: Layers) -> dict[str, Tensor]:
    """Extract the outputs of layers; the forward pass stops after the last requested layer.

    The returned tensors are detached copies with the layer's dtype and device. The model runs eagerly in evaluation
    mode, without gradients, and is left unchanged. Layers after the last requested layer do not run. Forward hooks on
    modules that contain the last requested layer do not run either. If such a hook was registered with
    ``always_call=True``, as in accelerate, the full forward pass runs. Several threads may call this function at once.

    Parameters
    ----------
    model : nn.Module
        Any model.
    images : Tensor, tuple or dict
        The model's input, on the model's device. A tuple is passed as positional arguments, a dict as keyword
        arguments.
    layers : str, nn.Module, or a sequence of them
        Dotted names, patterns such as `layer*.conv1`, and modules. A pattern skips layers that do not run or return no
        floating-point tensor.

    Returns
    -------
    dict of str to Tensor
        The outputs by dotted name, in the requested order. Layers that match a pattern are in the model's order. If a
        layer returns several tensors, its output is the first floating-point tensor. If a layer runs several times, its
        output is from the first run.

    Raises
    ------
    LayerError
        If a layer does not exist (the message lists similar names), does not run, or returns no floating-point tensor.
        Also if a pattern matches no layer that runs and returns such a tensor.
    ModelError
        If `model` is not a module.
    ImageError
        If `images` contains no tensor. Errors of the model itself are passed on unchanged.

    Examples
    --------
    >>> import torch, torchvision
    >>> from gradcam import inspection
    >>> model = torchvision.models.resnet50(weights=None)
    >>> inspection.features(model, torch.rand(2, 3, 64, 64), "avgpool")["avgpool"].shape
    torch.Size([2, 2048, 1, 1])
    """
    model = unwrap(model)
    groups = []
    for requested in to_layer_list(layers):
        # A pattern may match modules without a forward(), such as `ModuleList`. These modules are left out.
        group = select_layers(model, [requested])
        groups.append({name: module for name, module in group.items() if _has_forward(module)} or group)
    args, kwargs = to_inputs(images)
    with preserve_state(model) as modules, grad_mode_off():
        must_end = any(module._forward_hooks_always_called or "_hf_hook" in vars(module) for module in modules)
        must_end = must_end or bool(nn.modules.module._global_forward_hooks_always_called)
        args, kwargs = map_tensors((args, kwargs), detach_input)
        return _extract(partial(model, *args, **kwargs), groups, ends_early=not must_end)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


class _Stop(BaseException):
    """An exception that a hook raises to end a forward pass. Its argument is the extraction for which the pass ran.

    The class is not an `Exception`, because many models catch exceptions.
    """


# The innermost running call of `features` in this thread. If a model calls `features` in its own forward, only the
# inner call records outputs.
_innermost: ContextVar[object] = ContextVar("innermost", default=None)


def _extract(
    run_model: Callable[[], Any], groups: Sequence[Mapping[str, nn.Module]], *, ends_early: bool
) -> dict[str, Tensor]:
    """Run the model, and return outputs by layer. Raise `LayerError` if a group has no floating-point output."""
    layers = {name: module for group in groups for name, module in group.items()}
    outputs: dict[str, Tensor | None] = {}
    extraction, outer = object(), _innermost.get()

    def has_all() -> bool:
        return ends_early and len(outputs) == len(layers)

    def record(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if name in outputs or _innermost.get() is not extraction:
            return
        if (tensor := find_floating_tensor(output)) is not None:
            refuse_vmap(tensor)
            # If the model uses inference mode, the clone would otherwise be an inference tensor.
            with torch.inference_mode(False):
                tensor = tensor.detach().clone()
        outputs[name] = tensor
        if has_all():
            raise _Stop(extraction)

    try:
        _innermost.set(extraction)
        with Hooks() as hooks:
            for name, module in layers.items():
                hooks.after_forward(module, partial(record, name))
            run_model()
    except _Stop as stop:
        if stop.args != (extraction,):
            raise
    except Exception:
        if not has_all():  # If the model caught `_Stop`, later errors of the model do not matter.
            raise
    finally:
        _innermost.set(outer)
    tensors = {name: tensor for name in layers if (tensor := outputs.get(name)) is not None}
    for group in groups:
        if group.keys() & tensors.keys():
            continue
        if ran := [name for name in group if name in outputs]:
            raise no_floating_tensor_error(ran[:3])
        raise LayerError(
            f"Layer {join_names(list(group)[:3])} did not run in the forward pass: choose a layer on the path from the "
            "input to the output. (Hooks are skipped in modules whose forward() is called directly.)"
        )
    return tensors
