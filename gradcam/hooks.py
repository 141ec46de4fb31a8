"""The owner of every hook that this package puts on a model."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

ForwardHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
PreHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
BackwardHook = Callable[[tuple[Tensor | None, ...]], None]
GradientHook = Callable[[Tensor], Tensor | None]  # what it returns replaces the gradient, None leaves it

FEWEST_TO_SIFT = 64  # handles; of those, the ones whose tensors are gone are dropped whenever as many again have come
PASSAGE = "gradcam passage"  # what a passage is called on the node of the tensor that left it

_openings = itertools.count()


class Hooks:
    """Hooks on modules, all removed when the context ends, however it ends.

    Forward hooks act only in the thread that entered the context: several threads may run one model, each with hooks of
    its own. Backward hooks do not filter, since on CUDA autograd calls them from threads of its own.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._thread: int | None = None
        self._opening = 0  # which of all owners this is, in the order in which they were entered
        self._most_handles = FEWEST_TO_SIFT

    def __enter__(self) -> Hooks:
        self._thread = threading.get_ident()
        self._opening = next(_openings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread = None
        while self._handles:
            self._handles.pop().remove()

    def before_forward(self, module: nn.Module, function: PreHook) -> None:
        """Call `function(module, args, kwargs)` before the module runs; what it returns replaces its arguments."""

        def hook(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
            if threading.get_ident() != self._thread:
                return None  # as below
            (kwargs,) = rest
            return function(module, args, kwargs)

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after_forward(self, module: nn.Module, function: ForwardHook) -> None:
        """Call `function(module, args, kwargs, output)` after the module ran; what it returns replaces the output."""

        def hook(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
            if threading.get_ident() != self._thread:
                # Also while the hook is half registered or half removed: another thread may then get (module, args,
                # output) without the keyword arguments, because PyTorch keeps that flag in a second dictionary.
                return None
            kwargs, output = rest
            return function(module, args, kwargs, output)

        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def after_backward(self, module: nn.Module, function: BackwardHook) -> None:
        """Call `function(grad_output)` when the gradient at the module's outputs is there (a full backward hook)."""

        def hook(module: nn.Module, grad_input: Any, grad_output: tuple[Tensor | None, ...]) -> None:
            function(grad_output)

        self._handles.append(module.register_full_backward_hook(hook))

    def at_gradient(self, tensor: Tensor, function: GradientHook) -> None:
        """Call `function(gradient)` when the gradient of a tensor that requires one is there, before it flows on."""

        def hook(gradient: Tensor) -> Tensor | None:
            return function(gradient)

        self._keep(tensor.register_hook(unserializable_hook(hook)))  # saving the tensor is no reason to warn

    def pass_gradient(self, tensor: Tensor, function: GradientHook) -> Tensor:
        """A clone of a tensor that requires gradients, whose gradient goes through `function` on its way back.

        The pair's other half: a private identity with a full backward hook. What is done in place to the clone changes
        neither the tensor nor its gradient, and a gradient that comes to the tensor by another way is not seen here. Of
        several owners all share one clone, and `function` gets the gradient behind every edit (`edit_gradient`).
        """
        passage, leaving = _passage_of(tensor)
        self._keep(passage.add_look(function))
        return leaving

    def edit_gradient(self, tensor: Tensor, function: GradientHook) -> Tensor:
        """The same clone, with `function` at its gradient before it flows on; edits run in the order of their owners."""
        passage, leaving = _passage_of(tensor)
        self._keep(passage.add_edit(self._opening, function))
        return leaving

    def _keep(self, handle: RemovableHandle) -> None:
        """Own a handle of something short-lived: of a whole epoch's tensors only those that are still there are kept."""
        self._handles.append(handle)
        if len(self._handles) > self._most_handles:
            self._handles = [it for it in self._handles if it.hooks_dict_ref() is not None]
            self._most_handles = max(FEWEST_TO_SIFT, 2 * len(self._handles))


class _Passage:
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


def _passage_of(tensor: Tensor) -> tuple[_Passage, Tensor]:
    """The passage that the tensor just left, or a new one, and the tensor that leaves it."""
    metadata: Any = {} if tensor.grad_fn is None else tensor.grad_fn.metadata
    passage = metadata.get(PASSAGE)
    if isinstance(passage, _Passage):
        return passage, tensor
    passage = _Passage()
    return passage, passage.send(tensor)


def _through(functions: list[GradientHook], gradient: Tensor) -> Tensor:
    for function in functions:
        replacement = function(gradient)
        gradient = gradient if replacement is None else replacement
    return gradient
