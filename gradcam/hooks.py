"""The owner of every hook that this package puts on a model."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradcam.errors import ModelError
from gradcam.passages import GradientHook, passage_of

ForwardHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
PreHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
BackwardHook = Callable[[tuple[Tensor | None, ...]], None]

FEWEST_TO_SIFT = 64  # handles; of those, the ones whose tensors are gone are dropped whenever as many again have come

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
            refuse_compiling()
            if threading.get_ident() != self._thread:
                return None  # as below
            (kwargs,) = rest
            return function(module, args, kwargs)

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after_forward(self, module: nn.Module, function: ForwardHook, *, repeated: ForwardHook | None = None) -> None:
        """Call `function(module, args, kwargs, output)` after the module ran; what it returns replaces the output.

        `repeated` is called in its place where a backward pass repeats the run for a checkpoint, in whichever thread
        autograd does that: on CUDA in one of its own.
        """

        def hook(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
            refuse_compiling()
            repeats = repeated is not None and is_backward_running()
            if len(rest) < 2 or not (repeats or threading.get_ident() == self._thread):
                # Also while the hook is half registered or half removed: another thread may then get (module, args,
                # output) without the keyword arguments, because PyTorch keeps that flag in a second dictionary.
                return None
            kwargs, output = rest
            return (repeated if repeated is not None and repeats else function)(module, args, kwargs, output)

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
        """Let `function` see or replace the gradient of a tensor that requires one; gives the tensor to go on with.

        The pair's other half. It is the gradient as `retain_grad()` shows it, of all uses together and behind every edit
        (`edit_gradient`), with respect to the tensor as it is now, whatever is done in place to it later. The graph is as
        without; only views and leaves go on as a clone, of whose uses it is the gradient.
        """
        passage, tensor = passage_of(tensor)
        self._keep(passage.add_look(function))
        return tensor

    def edit_gradient(self, tensor: Tensor, function: GradientHook) -> Tensor:
        """The same before any look at it, with a `function` that changes it; edits run in the order of their owners."""
        passage, tensor = passage_of(tensor)
        self._keep(passage.add_edit(self._opening, function))
        return tensor

    def _keep(self, handle: RemovableHandle) -> None:
        """Own a handle of something short-lived: of a whole epoch's tensors only those that are still there are kept."""
        self._handles.append(handle)
        if len(self._handles) > self._most_handles:
            self._handles = [it for it in self._handles if it.hooks_dict_ref() is not None]
            self._most_handles = max(FEWEST_TO_SIFT, 2 * len(self._handles))


def is_backward_running() -> bool:
    """In this thread: PyTorch itself tells checkpoints and hooks so."""
    return torch._C._current_graph_task_id() != -1


def refuse_compiling() -> None:
    """Raises `ModelError` while torch.compile traces, which then leaves these calls uncompiled where it may."""
    if torch.compiler.is_compiling():
        raise ModelError(
            "Hooks cannot be part of a compiled function: run the model uncompiled while you look inside it."
        )
