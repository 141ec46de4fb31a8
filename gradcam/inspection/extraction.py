"""Features: what layers give for a batch, from a forward pass that ends once the last of them is there."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import LayerError, join_names
from gradcam.hooks.autograd import no_floating_tensor
from gradcam.hooks.hooks import Hooks, recording_off, refuse_vmap
from gradcam.hooks.nested import caller_keeps, first_floating, map_tensors, to_inputs
from gradcam.hooks.preserve import preserve_state
from gradcam.inspection.selection import Layers, list_wanted, select_layers
from gradcam.layers.find import unwrap


def features(model: nn.Module, images: Any, layers: Layers) -> dict[str, Tensor]:
    """Extract what layers give for images; the forward pass ends once the last of them is there.

    A tensor is as it left the layer, in its precision and on its device, detached, and nobody else's: the model's later
    operations in place do not change it. The model runs in evaluation mode, eagerly, without gradients, and is left as
    it was. What comes behind the last layer does not run, nor do hooks on the modules around it; where one of those has
    to run whatever happens (`always_call=True`, accelerate's), the pass is not cut short. Several threads may do this
    at once.

    Parameters
    ----------
    model : nn.Module
        Any model.
    images : Tensor, tuple or dict
        Whatever the model takes, where the model is. A tuple is passed as positional arguments, a dict as keyword
        arguments.
    layers : str, nn.Module, or a sequence of them
        Dotted names, patterns such as `layer*.conv1`, and modules. Of a pattern those are left out that do not run or
        give no floating tensor.

    Returns
    -------
    dict of str to Tensor
        By dotted name, in the order that was asked for; a pattern's in the model's order. Of a layer that gives several
        tensors the first floating one, and of one that runs several times what its first run gives.

    Raises
    ------
    LayerError
        For a layer that does not exist, with the nearest, for one that does not run or gives no floating tensor, and
        for a pattern that fits none or none that does.
    ModelError
        For what is no module.
    ImageError
        For images without a tensor. Errors of the model itself come through as they are.

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
    for each in list_wanted(layers):
        group = select_layers(model, [each])  # of a pattern those that have a forward(), as `ModuleList` has not
        kinds = {name: type(it).forward is not nn.Module.forward or "forward" in vars(it) for name, it in group.items()}
        groups.append({name: it for name, it in group.items() if kinds[name]} or group)
    args, kwargs = to_inputs(images)
    with preserve_state(model) as modules, recording_off():
        must_end = nn.modules.module._global_forward_hooks_always_called or any(
            module._forward_hooks_always_called or "_hf_hook" in vars(module) for module in modules
        )
        extraction = _Extraction(groups, ends_early=not must_end)
        return extraction.run(model, *map_tensors((args, kwargs), caller_keeps))


class _Stop(BaseException):
    """Ends the forward pass of its owner. It is no `Exception`, which many a model takes for an error of its own."""

    def __init__(self, owner: _Extraction) -> None:
        super().__init__("the rest of this forward pass is not needed")
        self.owner = owner


class _Running(threading.local):
    def __init__(self) -> None:
        self.extractions: list[_Extraction] = []


_running = _Running()


class _Extraction:
    """One forward pass, and what was found in it. Of those inside one another, the innermost alone sees what runs."""

    def __init__(self, groups: Sequence[Mapping[str, nn.Module]], *, ends_early: bool) -> None:
        self._groups = groups
        self._layers = {name: module for group in groups for name, module in group.items()}
        self._ends_early = ends_early
        self._has_stopped = False
        self._found: dict[str, Tensor | None] = {}

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        try:
            _running.extractions.append(self)
            with Hooks() as hooks:
                for name, module in self._layers.items():
                    hooks.after_forward(module, partial(self._keep, name))
                model(*args, **kwargs)
        except _Stop as stop:
            if stop.owner is not self:
                raise
        except Exception:
            if not self._has_stopped:  # a model that caught the end is in trouble for want of the layer's output
                raise
        finally:
            _running.extractions[:] = [it for it in _running.extractions if it is not self]
        found = {name: tensor for name in self._layers if (tensor := self._found.get(name)) is not None}
        for group in self._groups:
            if group.keys() & found.keys():
                continue
            if ran := [name for name in group if name in self._found]:
                raise no_floating_tensor(ran[:3])
            raise LayerError(
                f"Layer {join_names(list(group)[:3])} did not run in the forward pass: choose one on the way from the input "
                "to the output. (Hooks are skipped in modules whose forward() is called directly.)"
            )
        return found

    def _keep(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if name in self._found or _running.extractions[-1] is not self:
            return
        tensor = first_floating(output)
        if tensor is not None:
            refuse_vmap(tensor)
            with torch.inference_mode(False):  # which a model may have on; a clone made in it is such a tensor as well
                tensor = tensor.detach().clone()
        self._found[name] = tensor
        if self._ends_early and len(self._found) == len(self._layers):
            self._has_stopped = True
            raise _Stop(self)
