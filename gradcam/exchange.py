"""Putting another tensor in the place of one that a layer gave, under every name that the model has for it.

A model may read a layer's output by another way than the return value: an attribute, a hook of its own that ran before.
What is only returned in its place is cut off from those. So the object itself, whoever holds it, gets the new contents.
"""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils import swap_tensors


def can_exchange(tensor: Tensor) -> bool:
    """Whether the object alone has its contents: no view of them, nothing that autograd saved, no weak reference."""
    return tensor._use_count() == 1 and not weakref.getweakrefs(tensor) and not isinstance(tensor, nn.Parameter)


def exchange(tensor: Tensor, other: Tensor) -> None:
    """Give each of two objects the contents of the other; attributes stay with the objects."""
    if tensor.retains_grad and not tensor.is_leaf:
        other.retain_grad()
    attributes = dict(vars(tensor))
    swap_tensors(tensor, other)
    vars(tensor).update(attributes)


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
