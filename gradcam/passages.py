"""Where a gradient passes on its way back through a tensor, and can be seen and changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradcam.exchange import can_exchange, exchange

GradientHook = Callable[[Tensor], Tensor | None]  # what it returns replaces the gradient, None leaves it

PASSAGE = "gradcam passage"  # what a passage is called on the node that made the tensor, with the output's number


class Passage:
    """What is done to the gradient that comes back to a tensor, where all of it has come together.

    Edits sit on the tensor, as a hook of a user's own would: their order is that of registration, and `retain_grad()` shows
    what they made. Looks sit behind all that, on the node that made the tensor, and see what flows on. What is done in
    place to the tensor later makes it another node's: both stay where they are.
    """

    def __init__(self, tensor: Tensor, node: Node) -> None:
        self._edits: OrderedDict[int, tuple[int, GradientHook]] = OrderedDict()
        self._looks: OrderedDict[int, GradientHook] = OrderedDict()
        index = tensor.output_nr

        def edit(gradient: Tensor | None) -> Tensor | None:
            return self._edit(gradient) if self._edits and gradient is not None else None

        def look(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            gradient = gradients[index]
            if gradient is None or not self._looks:
                return None
            return (*gradients[:index], _through(list(self._looks.values()), gradient), *gradients[index + 1 :])

        tensor.register_hook(unserializable_hook(edit))
        node.register_prehook(look)

    def add_edit(self, order: int, function: GradientHook) -> RemovableHandle:
        handle = RemovableHandle(self._edits)
        self._edits[handle.id] = (order, function)
        return handle

    def add_look(self, function: GradientHook) -> RemovableHandle:
        handle = RemovableHandle(self._looks)
        self._looks[handle.id] = function
        return handle

    def _edit(self, gradient: Tensor) -> Tensor:
        # A block may give what its last part gave, which then has run first, whoever was registered first.
        edits = sorted(self._edits.values(), key=lambda edit: edit[0])
        return _through([function for _, function in edits], gradient)


def passage_of(tensor: Tensor) -> tuple[Passage, Tensor]:
    """The passage of a tensor that requires gradients, and the tensor.

    Views go on as a clone: what is done to them in place leaves their node out. So do leaves, which have none. A view that
    nobody has looked at yet becomes its clone, for whoever has it by another name.
    """
    if tensor.grad_fn is None or tensor._is_view():
        clone = tensor.clone()
        if tensor.grad_fn is not None and can_exchange(tensor):
            exchange(tensor, clone)
        else:
            tensor = clone
    node: Any = tensor.grad_fn
    key = f"{PASSAGE} {tensor.output_nr}"
    passage = node.metadata.get(key)
    if not isinstance(passage, Passage):
        passage = node.metadata[key] = Passage(tensor, node)
    return passage, tensor


def _through(functions: list[GradientHook], gradient: Tensor) -> Tensor:
    for function in functions:
        replacement = function(gradient)
        gradient = gradient if replacement is None else replacement
    return gradient
