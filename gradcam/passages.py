"""What a layer's output goes through behind the layer, so that the gradient that comes back can be seen and changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

GradientHook = Callable[[Tensor], Tensor | None]  # what it returns replaces the gradient, None leaves it

PASSAGE = "gradcam passage"  # what a passage is called on the node of the tensor that left it


class Passage:
    """The private identity that a layer's output goes through, and what is done to the gradient that comes back.

    Edits sit on the clone that leaves it, as a hook of a user's own on that tensor would: their order is that of
    registration, and `retain_grad()` shows what they made. The full backward hook behind them shows what flows on.
    """

    def __init__(self) -> None:
        self._edits: OrderedDict[int, tuple[int, GradientHook]] = OrderedDict()
        self._looks: OrderedDict[int, GradientHook] = OrderedDict()

    def send(self, tensor: Tensor) -> Tensor:
        """The clone of the tensor, which knows this passage for as long as nobody changes it in place."""
        identity = nn.Identity()
        identity.register_full_backward_hook(self._look)
        leaving = identity(tensor).clone()

        def hook(gradient: Tensor) -> Tensor | None:
            return self._edit(gradient) if self._edits else None

        leaving.register_hook(unserializable_hook(hook))
        leaving.grad_fn.metadata[PASSAGE] = self
        return leaving

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

    def _look(self, module: nn.Module, grad_input: Any, grad_output: tuple[Tensor | None, ...]) -> Any:
        (gradient,) = grad_output
        if gradient is None or not self._looks:
            return None
        return (_through(list(self._looks.values()), gradient),)


def passage_of(tensor: Tensor) -> tuple[Passage, Tensor]:
    """The passage that the tensor just left, or a new one, and the tensor that leaves it."""
    metadata: Any = {} if tensor.grad_fn is None else tensor.grad_fn.metadata
    passage = metadata.get(PASSAGE)
    if isinstance(passage, Passage):
        return passage, tensor
    passage = Passage()
    return passage, passage.send(tensor)


def _through(functions: list[GradientHook], gradient: Tensor) -> Tensor:
    for function in functions:
        replacement = function(gradient)
        gradient = gradient if replacement is None else replacement
    return gradient
