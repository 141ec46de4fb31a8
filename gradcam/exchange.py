"""Putting another tensor in the place of one that a layer gave, under every name that the model has for it.

A model may read a layer's output by another way than the return value: an attribute, a hook of its own that ran before.
What is only returned in its place is cut off from those. So the object itself, whoever holds it, gets the new contents.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils import swap_tensors


def is_owned(tensor: Tensor, module: nn.Module) -> bool:
    """Whether it is a parameter or a buffer of the module, which has to stay what it is."""
    return isinstance(tensor, nn.Parameter) or any(tensor is buffer for buffer in module.buffers())


class Given:
    """What was given to the model in a tensor's place, for as long as anybody holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self._reference: weakref.ref[Tensor] | None = weakref.ref(tensor)

    def __call__(self) -> Tensor | None:
        return None if self._reference is None else self._reference()

    def let_go(self) -> None:
        """Take it out of the graph, for there is no backward pass any more."""
        tensor = self()
        if tensor is not None and tensor.grad_fn is not None and not tensor._is_view():
            tensor.detach_()

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """PyTorch exchanges no tensor that a weak reference leads to."""
        tensor, self._reference = self(), None
        yield
        self._reference = None if tensor is None else weakref.ref(tensor)


_given: weakref.WeakValueDictionary[int, Given] = weakref.WeakValueDictionary()  # by the object's id


def can_exchange(tensor: Tensor) -> bool:
    """Whether the object alone has its contents: no view of them, nothing that autograd saved, no foreign weak reference."""
    known = _given.get(id(tensor))
    own = 0 if known is None or known() is not tensor else 1
    return tensor._use_count() == 1 and weakref.getweakrefcount(tensor) == own


def exchange(tensor: Tensor, other: Tensor) -> Given:
    """Give each of two objects the contents of the other; attributes stay with the objects."""
    if tensor.retains_grad and not tensor.is_leaf:
        other.retain_grad()
    known = _given.get(id(tensor))
    if known is None or known() is not tensor:
        known = _given[id(tensor)] = Given(tensor)
    attributes = dict(vars(tensor))
    with known.unseen():
        swap_tensors(tensor, other)
    vars(tensor).update(attributes)
    return known


class OtherWay:
    """The memory that a layer's output was a view of: for whoever still holds it, a way around what is recorded.

    Who reads it from now on is in the graph with it; who reads another view of it gets an error of PyTorch's.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = weakref.ref(memory)  # as a rule nobody does, and it is gone
        memory.requires_grad_()
        increment_version(memory)

    def is_among(self, leaves: list[Tensor]) -> bool:
        """Whether it is one of these."""
        memory = self._memory()
        return memory is not None and any(leaf is memory for leaf in leaves)

    def close(self) -> None:
        """Leave it as it was."""
        memory = self._memory()
        if memory is not None:
            memory.requires_grad = False
