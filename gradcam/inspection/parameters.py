"""Gradients of parameters that are frozen, or that somebody else is training, without touching them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from gradcam.nested import map_tensors, tensors


class Aliases(TorchFunctionMode):
    """While this context lasts, this thread computes with aliases of these parameters: the same memory, as leaves.

    The parameters themselves are not changed in any way, `requires_grad` included, so that other threads may use and
    train them meanwhile. `on_use(parameter)` is called whenever one comes to an operation. What sees no alias is code
    beyond Python's reach: TorchScript, and a custom `autograd.Function` that is given the parameter itself. There a
    parameter that requires gradients has its own, and a frozen one has none.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], on_use: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._aliases = {id(it): (it, _alias(it)) for it in parameters if it.is_floating_point() or it.is_complex()}
        self._on_use = on_use

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        used = [it for it in map(self._find, tensors((args, kwargs))) if it is not None]
        if used:
            for parameter, _ in used:
                self._on_use(parameter)
            args, kwargs = map_tensors((args, kwargs), self._replace)
        return function(*args, **kwargs)

    def differentiate(self, score: Tensor, others: Sequence[Tensor]) -> dict[nn.Parameter, Tensor]:
        """The gradients of a score, one value, at the parameters that it depends on; no `.grad` is touched.

        `others`: leaves at which a gradient is computed as well, and thrown away, so that all on the way to them has one.
        """
        leaves = {parameter: [alias] for parameter, alias in self._aliases.values()}
        for parameter, found in leaves.items():
            if parameter.requires_grad and not parameter.is_inference():
                found.append(parameter)
        # As edges of the graph: tensors, autograd would take for arguments to replace, and leave this mode for the while,
        # which a checkpoint that repeats a part of the forward pass needs.
        targets = [(parameter, get_gradient_edge(leaf)) for parameter, found in leaves.items() for leaf in found]
        edges: list[GradientEdge] = [*(edge for _, edge in targets), *map(get_gradient_edge, others)]
        with self:
            gradients = torch.autograd.grad([get_gradient_edge(score)], edges, retain_graph=True, allow_unused=True)
        return _add_up((parameter, gradient) for (parameter, _), gradient in zip(targets, gradients))

    def _find(self, tensor: Tensor) -> tuple[nn.Parameter, Tensor] | None:
        return self._aliases.get(id(tensor))

    def _replace(self, tensor: Tensor) -> Tensor:
        found = self._find(tensor)
        return tensor if found is None else found[1]


def _alias(parameter: nn.Parameter) -> Tensor:
    # Autograd cannot use tensors that were made in inference mode; of those it is a copy.
    return (parameter.clone() if parameter.is_inference() else parameter).detach().requires_grad_()


def _add_up(gradients: Iterable[tuple[nn.Parameter, Tensor | None]]) -> dict[nn.Parameter, Tensor]:
    found: dict[nn.Parameter, Tensor] = {}
    for parameter, gradient in gradients:
        if gradient is not None:
            found[parameter] = found[parameter] + gradient if parameter in found else gradient
    return found
