"""Features: what layers give for a batch, from a forward pass that ends once the last of them is there."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import LayerError, join_names
from gradcam.hooks.hooks import Hooks, no_floating_tensor, recording_off, refuse_vmap
from gradcam.hooks.nested import caller_keeps, first_floating, map_tensors, to_inputs
from gradcam.hooks.preserve import preserve_state
from gradcam.inspection.selection import Layers, list_wanted, select_layers
from gradcam.layers.find import unwrap


def features(model: nn.Module, images: Any, layers: Layers) -> dict[str, Tensor]:
    """What these layers give for `images`, by their dotted names: the forward pass ends once the last of them is there.

        features(model, images, ["layer4", "avgpool"])["avgpool"]  # (N,2048,1,1) of a ResNet-50

    `images`: whatever the model takes, where the model is: pictures, preprocessed, or anything else. A tuple is passed as
    positional arguments, a dict as keyword arguments. `layers`: a dotted name, a pattern such as `layer*.conv1`, a module
    of the model, or a sequence of these. The dict is in the order that was asked for, and a pattern's layers are in the
    model's; those are left out that do not run or give no floating tensor. While one may still run, the pass goes on.

    A tensor is as it left the layer, in its precision and on its device, detached, and nobody else's: the model's later
    operations in place do not change it, nor does what is done to it change the model or `images`. Of a layer that gives
    several tensors it is the first floating one, and of one that runs several times what its first run gives.

    The model runs in evaluation mode, eagerly, without gradients, and is left as it was, as `gradcam.explain` has it. What
    comes behind the last layer does not run, nor do hooks on the modules around it; where one of those has to run whatever
    happens (`always_call=True`, accelerate's), the pass is not cut short. Several threads may do this at once.

    Raises `LayerError` for a layer that does not exist, with the nearest, for one that does not run or gives no floating
    tensor, and for a pattern that fits none or none that does; `ModelError` for what is no module; `ImageError` for images
    without a tensor. Errors of the model itself come through as they are.
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
