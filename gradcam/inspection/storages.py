"""How much memory a model's activations take, where several of them may share one piece of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gradcam.nested import tensors


class Storages:
    """The memory behind tensors, each piece of it counted once.

    Views, and what operations in place give back, lie in memory that is counted already. Nothing is kept alive: of each
    piece a weak reference is held, so that another tensor that comes to lie in the same place is told apart.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.total = 0  # bytes of all that was added so far, those known beforehand too
        self._known: dict[int, StorageWeakRef] = {}
        self.add(list(known))

    def add(self, output: object) -> None:
        """Count what the tensors in `output` take anew: of a view of something larger only what they show of it."""
        new: dict[int, int] = {}
        references = {}
        for given in tensors(output):
            tensor = given.values() if given.is_nested else given
            size = tensor.numel() * tensor.itemsize
            storage = _storage(tensor)
            if storage is None:
                self.total += size
                continue
            reference = StorageWeakRef(storage)
            if reference.cdata not in self._known:
                references[reference.cdata] = reference
                new[reference.cdata] = min(new.get(reference.cdata, 0) + size, storage.nbytes())
        self._known |= references
        self.total += sum(new.values())


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """None for sparse tensors and others without one, which count as if they were dense and new."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
