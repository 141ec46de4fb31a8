"""The owner of every hook that this package puts on a model."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, increment_version
from torch.utils import swap_tensors
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradcam.errors import ModelError

GradientHook = Callable[[Tensor], Tensor | None]  # what it returns replaces the gradient, None leaves it
ForwardHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
PreHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
BackwardHook = Callable[[tuple[Tensor | None, ...]], None]
PASSAGE = "gradcam passage"  # what a passage is called on the node that made the tensor, with the output's number
FEWEST_TO_SIFT = 64  # handles; of those, the ones whose tensors are gone are dropped whenever as many again have come
_openings = itertools.count()


class Hooks:
    """Hooks on modules, all removed when the context ends, however it ends. Forward hooks act only in the thread that
    entered the context: several threads may run one model, each with its own. Backward hooks do not filter, since on
    CUDA autograd calls them from threads of its own."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._thread: int | None = None
        self._opening = 0  # which of all owners this is, in the order in which they were entered
        self._most_handles = FEWEST_TO_SIFT

    def __enter__(self) -> Hooks:
        self._thread = threading.get_ident()
        self._opening = next(_openings)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        self._thread = None
        while self._handles:
            self._handles.pop().remove()

    def before_forward(self, module: nn.Module, function: PreHook) -> None:
        """Call `function(module, args, kwargs)` before the module runs; what it returns replaces its arguments."""

        def hook(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
            refuse_compiling()
            return function(module, args, *rest) if threading.get_ident() == self._thread else None  # as below

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after_forward(self, module: nn.Module, function: ForwardHook, *, repeated: ForwardHook | None = None) -> None:
        """Call `function(module, args, kwargs, output)` after the module ran; what it returns replaces the output.
        `repeated` is called in its place where a backward pass repeats the run for a checkpoint, in whichever thread
        autograd does that: on CUDA in one of its own."""

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
        self._handles.append(module.register_full_backward_hook(lambda module, grad_input, output: function(output)))

    def at_gradient(self, tensor: Tensor, function: GradientHook) -> None:
        """Call `function(gradient)` when the gradient of a tensor that requires one is there, before it flows on."""
        # Saving the tensor is no reason to warn. The mark goes on an object of our own.
        self._keep(tensor.register_hook(unserializable_hook(partial(function))))

    def pass_gradient(self, tensor: Tensor, function: GradientHook) -> Tensor:
        """Let `function` see or replace the gradient of a tensor that requires one; gives the tensor to go on with. The
        pair's other half. It is the gradient as `retain_grad()` shows it, of all uses together and behind every edit
        (`edit_gradient`), with respect to the tensor as it is now, whatever is done in place to it later. The graph is
        as without; only views and leaves go on as a clone, of whose uses it is the gradient."""
        passage, tensor = passage_of(tensor)
        self._add(passage.looks, function)
        return tensor

    def edit_gradient(self, tensor: Tensor, function: GradientHook) -> Tensor:
        """The same before any look at it, with a `function` that changes it; edits run in the order of their owners."""
        passage, tensor = passage_of(tensor)
        self._add(passage.edits, (self._opening, function))
        return tensor

    def _add(self, functions: OrderedDict[int, Any], function: Any) -> None:
        handle = RemovableHandle(functions)
        functions[handle.id] = function
        self._keep(handle)

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


class Passage:
    """What is done to the gradient that comes back to a tensor, where all of it has come together. Edits sit on the
    tensor, as a user's own hook would: in the order of registration, and `retain_grad()` shows what comes. Looks sit
    behind all that, on the node that made the tensor. What is done in place to it later makes it another node's."""

    def __init__(self, tensor: Tensor, node: Node) -> None:
        self.edits: OrderedDict[int, tuple[int, GradientHook]] = OrderedDict()
        self.looks: OrderedDict[int, GradientHook] = OrderedDict()
        index = tensor.output_nr

        def edit(gradient: Tensor | None) -> Tensor | None:
            if gradient is None or not self.edits:
                return None
            # A block may give what its last part gave, which then has run first, whoever was registered first.
            return _through([it for _, it in sorted(self.edits.values(), key=lambda edit: edit[0])], gradient)

        def look(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            gradient = gradients[index]
            if gradient is None or not self.looks:
                return None
            return (*gradients[:index], _through(list(self.looks.values()), gradient), *gradients[index + 1 :])

        tensor.register_hook(unserializable_hook(edit))
        node.register_prehook(look)


def passage_of(tensor: Tensor) -> tuple[Passage, Tensor]:
    """The passage of a tensor that requires gradients, and the tensor. Views go on as a clone: what is done to them in
    place leaves their node out. So do leaves, which have none. A view that nobody has looked at yet becomes its clone,
    for whoever has it by another name."""
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


def is_owned(tensor: Tensor, module: nn.Module) -> bool:
    """Whether it is a parameter or a buffer of the module, which has to stay what it is."""
    return isinstance(tensor, nn.Parameter) or any(tensor is buffer for buffer in module.buffers())


class Given:
    """What was given to the model in a tensor's place, for as long as anybody holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.reference: weakref.ref[Tensor] | None = weakref.ref(tensor)

    def __call__(self) -> Tensor | None:
        return None if self.reference is None else self.reference()

    def let_go(self) -> None:
        tensor = self()
        if tensor is not None and tensor.grad_fn is not None and not tensor._is_view():
            tensor.detach_()


_given: weakref.WeakValueDictionary[int, Given] = weakref.WeakValueDictionary()  # by the object's id


def can_exchange(tensor: Tensor) -> bool:
    """Whether the object alone has its contents: no view of them, nothing that autograd saved, no foreign weak reference."""
    known = _given.get(id(tensor))
    own = int(known is not None and known() is tensor)
    return tensor._use_count() == 1 and weakref.getweakrefcount(tensor) == own


def exchange(tensor: Tensor, other: Tensor) -> Given:
    """Give each of two objects the contents of the other; attributes stay with the objects."""
    if tensor.retains_grad and not tensor.is_leaf:
        other.retain_grad()
    known = _given.get(id(tensor))
    if known is None or known() is not tensor:
        known = _given[id(tensor)] = Given(tensor)
    attributes = dict(vars(tensor))
    known.reference = None  # PyTorch exchanges no tensor that a weak reference leads to
    swap_tensors(tensor, other)
    known.reference = weakref.ref(tensor)
    vars(tensor).update(attributes)
    return known


class OtherWay:
    """The memory that a layer's output was a view of: for whoever still holds it, a way around what is recorded. Who
    reads it from now on is in the graph with it; who reads another view of it gets an error of PyTorch's."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = weakref.ref(memory)  # as a rule nobody holds it, and it is gone
        memory.requires_grad_()
        increment_version(memory)

    def is_among(self, leaves: list[Tensor]) -> bool:
        memory = self._memory()
        return memory is not None and any(leaf is memory for leaf in leaves)

    def close(self) -> None:
        if (memory := self._memory()) is not None:
            memory.requires_grad = False
