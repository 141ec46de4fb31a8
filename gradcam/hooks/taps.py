"""Functions that edit or observe the gradient of a tensor."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import unserializable_hook

from gradcam.hooks import pytorch
from gradcam.hooks.autograd import GradientHook
from gradcam.hooks.containers import swap_contents

# The key of a gradient tap in the metadata of a tensor's `grad_fn`. The tensor's output index is appended to the key.
TAP = "gradcam tap"


class GradientTap:
    """Functions that edit or observe the complete gradient of a tensor.

    Edits run in one tensor hook. This hook and the user's own tensor hooks run in the order of registration, and
    `retain_grad()` shows the result. Observers run afterwards, in a hook on the tensor's `grad_fn`. If a later in-place
    operation gives the tensor another `grad_fn`, observers still get the gradient at the earlier `grad_fn`.
    """

    def __init__(self, tensor: Tensor, node: Node) -> None:
        self.edits: OrderedDict[int, tuple[int, GradientHook]] = OrderedDict()
        self.observers: OrderedDict[int, GradientHook] = OrderedDict()
        index = tensor.output_nr

        def edit(gradient: Tensor | None) -> Tensor | None:
            if gradient is None or not self.edits:
                return None
            # If a block and its last layer return the same tensor, the layer's edit is registered first, because the
            # layer finishes first. Sort the edits by the order in which their `Hooks` contexts were entered.
            functions = [function for _, function in sorted(self.edits.values(), key=lambda entry: entry[0])]
            return _apply_in_turn(functions, gradient)

        def observe(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            gradient = gradients[index]
            if gradient is None or not self.observers:
                return None
            replacement = _apply_in_turn(list(self.observers.values()), gradient)
            return (*gradients[:index], replacement, *gradients[index + 1 :])

        tensor.register_hook(unserializable_hook(edit))
        node.register_prehook(observe)


def _apply_in_turn(functions: list[GradientHook], gradient: Tensor) -> Tensor:
    for function in functions:
        replacement = function(gradient)
        gradient = gradient if replacement is None else replacement
    return gradient


def find_tap(tensor: Tensor) -> tuple[GradientTap, Tensor]:
    """Return the gradient tap on the tensor's `grad_fn`, and the tensor to continue with.

    Views and leaves are cloned: an in-place op would replace a view's `grad_fn`, and a leaf has no `grad_fn`. If
    PyTorch allows it, the clone's contents are swapped into the view object, so that all references to the view refer
    to the clone.
    """
    if tensor.grad_fn is None or pytorch.is_view(tensor):
        clone = tensor.clone()
        if tensor.grad_fn is None or not swap_contents(tensor, clone):
            tensor = clone
    node: Any = tensor.grad_fn
    key = f"{TAP} {tensor.output_nr}"
    if key not in node.metadata:
        node.metadata[key] = GradientTap(tensor, node)
    return node.metadata[key], tensor
