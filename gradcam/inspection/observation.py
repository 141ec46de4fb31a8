"""One forward and one backward pass, of which the gradients at layers and at their parameters are measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.gradients import HALF_PRECISION_SCALES
from gradcam.hooks import ForwardHook, Hooks
from gradcam.inspection.parameters import Aliases
from gradcam.inspection.statistics import measure, to_statistics
from gradcam.inspection.verdicts import LayerGradients, ParameterGradient, join
from gradcam.layers import gives_back
from gradcam.nested import first_floating, replace_tensor
from gradcam.passages import GradientHook
from gradcam.sites import at_least_float32
from gradcam.target_layer import refuse_vmap

Measured = tuple[int, Tensor]  # how many values, and the numbers of `measure`


class Observation:
    """What is seen of these layers while a model runs, and while a score is differentiated.

    `runs`: how often each ran. `silent`: those that gave no floating tensor. `idle`: those that gave back their input.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.runs: dict[str, int] = {}
        self.silent: set[str] = set()
        self.idle: set[str] = set()
        self._layers = layers
        self._owners = {
            id(parameter): name for name, layer in layers.items() for parameter in layer.parameters(recurse=False)
        }
        self._clock = itertools.count()
        self._finished: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._scale = 1.0
        self._is_differentiating = False
        self._activations: dict[str | None, list[Measured]] = {}  # None: what comes to the model's output
        self._parameters: dict[nn.Parameter, Measured] = {}

    def note_use(self, parameter: nn.Parameter) -> None:
        """A parameter came to an operation: those of attention are used by it, and their own layer never runs."""
        name = self._owners.get(id(parameter))
        if name is not None:
            self._used.setdefault(name, next(self._clock))

    def follow(self, hooks: Hooks) -> None:
        """Look at the layers' outputs, and at the gradients that come back to them."""
        for name, layer in self._layers.items():
            if not isinstance(layer, torch.jit.ScriptModule):  # which takes no hook, and only a model's parts can be
                hooks.after_forward(layer, self._follow(name, hooks))

    def follow_output(self, output: Any, hooks: Hooks) -> Any:
        """The model's output, at whose first floating tensor the gradient is measured as well."""
        tensor = first_floating(output)
        if tensor is None or not tensor.requires_grad:
            return output
        return replace_tensor(output, tensor, hooks.pass_gradient(tensor, self._keep(None)))

    def _follow(self, name: str, hooks: Hooks) -> ForwardHook:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if self._is_differentiating:  # a checkpoint repeats what has been seen
                return None
            self.runs[name] = self.runs.get(name, 0) + 1
            self._finished.setdefault(name, next(self._clock))
            tensor = first_floating(output)
            if tensor is None:
                self.silent.add(name)
                return None
            refuse_vmap(tensor)
            if gives_back(module, args, tensor):
                self.idle.add(name)
            if not tensor.requires_grad:
                return None
            return replace_tensor(output, tensor, hooks.pass_gradient(tensor, self._keep(name)))

        return look

    def _keep(self, name: str | None) -> GradientHook:
        def keep(gradient: Tensor) -> None:
            if gradient.numel():
                self._activations.setdefault(name, []).append(self._measure(gradient))

        return keep

    def _measure(self, gradient: Tensor) -> Measured:
        return gradient.numel(), measure(at_least_float32(gradient) / self._scale)

    def differentiate(self, score: Tensor, aliases: Aliases, leaves: Sequence[Tensor], *, is_scaled: bool) -> None:
        """Measure the gradients of a score, of one value; where there is float16 in its graph, at the first scale at which
        all are finite. Where none is such a scale, they are those of the score as it is.
        """
        self._is_differentiating = True
        for scale in (*HALF_PRECISION_SCALES, 1.0) if is_scaled else (1.0,):
            self._scale = scale
            self._activations.clear()
            gradients = aliases.differentiate(score * scale, leaves)
            self._parameters = {parameter: self._measure(it) for parameter, it in gradients.items() if it.numel()}
            if is_scaled and self._is_finite():
                break

    def _is_finite(self) -> bool:
        found = [*itertools.chain(*self._activations.values()), *self._parameters.values()]
        return all(to_statistics(*measured).is_finite for measured in found)

    @property
    def left_out(self) -> set[str]:
        """Layers that say nothing by themselves: they gave back their input, or no floating tensor, and own no parameter."""
        return {name for name in self.idle | self.silent if name not in self._owners.values()}

    def seen(self) -> list[str]:
        """The layers that ran, or whose parameters were used, in order of execution."""
        return sorted(self._finished | self._used, key=lambda name: self._finished.get(name, self._used.get(name, 0)))

    def reference(self) -> float:
        """The norm of the gradient at the model's output; where that has none, at the last layer that has one."""
        for name in (None, *reversed(self.seen())):
            found = [to_statistics(*measured) for measured in self._activations.get(name, ())]
            norm = join(found).norm if found else 0.0
            if 0 < norm < math.inf:
                return norm
        return 0.0

    def describe(self, name: str) -> LayerGradients:
        """What is known of a layer, without a verdict."""
        layer = self._layers[name]
        found = [to_statistics(*measured) for measured in self._activations.get(name, ())]
        return LayerGradients(
            name=name,
            type=type(layer).__name__,
            runs=self.runs.get(name, 0),
            activations=join(found) if found else None,
            parameters=tuple(self._describe(key, it) for key, it in layer.named_parameters(recurse=False)),
        )

    def _describe(self, name: str, parameter: nn.Parameter) -> ParameterGradient:
        found = self._parameters.get(parameter)
        precision = torch.float32 if parameter.device.type == "mps" else torch.float64
        norm = torch.linalg.vector_norm(parameter.detach(), dtype=None if parameter.is_complex() else precision).item()
        return ParameterGradient(name, norm, None if found is None else to_statistics(*found))
