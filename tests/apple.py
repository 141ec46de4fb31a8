"""A stand-in for Apple's GPUs on any machine: the CPU holds the tensors, whose device is "mps" and has no float64."""

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("mps", 0)
MISSING_TYPES = (torch.float64, torch.complex128)
TO_NUMPY = (Tensor.numpy, Tensor.__array__)
GET_DEVICE = Tensor.device.__get__


class AppleGpu:
    """The tensors on the simulated GPU, tracked by their storages, which views share.

    `errors` has the errors that this device raised, because a caller may catch them.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._storages: dict[int, StorageWeakRef] = {}  # A weak reference keeps the address from being used again.

    def holds(self, tensor: Tensor) -> bool:
        return _find_storage(tensor) in self._storages

    def add(self, tensor: Tensor) -> None:
        """Move a tensor here. Raises `TypeError` for a type that these GPUs do not have."""
        if tensor.dtype in MISSING_TYPES:
            self.fail(f"Cannot convert a MPS Tensor to {tensor.dtype} dtype as the MPS framework doesn't support it.")
        self._storages[_find_storage(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def remove(self, tensor: Tensor) -> None:
        self._storages.pop(_find_storage(tensor), None)

    def fail(self, message: str) -> None:
        self.errors.append("".join(traceback.format_stack(limit=12)) + message)
        raise TypeError(message)

    def follow(self, inputs: Any, results: Any) -> None:
        """Add the results of an operation on tensors of this device, unless one of its inputs is on another device."""
        tensors = list(_list_tensors(inputs))
        if any(map(self.holds, tensors)):
            elsewhere = {_find_storage(tensor) for tensor in tensors if not self.holds(tensor)}
            for tensor in _list_tensors(results):
                if _find_storage(tensor) not in elsewhere:
                    self.add(tensor)


class _Operations(TorchDispatchMode):
    """Track tensors through all operations, those of the backward pass included."""

    def __init__(self, gpu: AppleGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._gpu.follow((args, kwargs), results)
        return results


class _Functions(TorchFunctionMode):
    """Handle the calls that name a device."""

    def __init__(self, gpu: AppleGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == GET_DEVICE and self._gpu.holds(args[0]):
            return DEVICE
        if func in TO_NUMPY and self._gpu.holds(args[0]):
            self._gpu.fail("can't convert mps:0 device type tensor to numpy.")
        is_there = self._find_target(func, args, kwargs)
        if is_there is None:
            results = func(*args, **kwargs)
            self._gpu.follow((args, kwargs), results)
            return results
        if any(self._gpu.holds(tensor) != is_there for tensor in _list_tensors((args[:1], kwargs))):
            args = (tree_map(_copy, args[0]), *args[1:])  # Another device has another storage.
        results = func(*tree_map(_to_cpu, args), **tree_map(_to_cpu, kwargs))
        for tensor in _list_tensors(results):
            (self._gpu.add if is_there else self._gpu.remove)(tensor)
        return results

    def _find_target(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool | None:
        """Return whether a call asks for a result on the GPU; None if it does not name a device."""
        if func is Tensor.cpu:
            return False
        devices = [kwargs["device"]] if kwargs.get("device") is not None else []
        devices += args[1:] if func is Tensor.to else []
        for value in devices:
            if isinstance(value, Tensor):
                return self._gpu.holds(value)
            if isinstance(value, (str, torch.device)):
                return torch.device(value).type == "mps"
        return None


@contextlib.contextmanager
def pretend_apple_gpu() -> Iterator[AppleGpu]:
    """Let this thread use a simulated device "mps"."""
    gpu = AppleGpu()
    with _Functions(gpu), _Operations(gpu):
        yield gpu


def _find_storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # Sparse tensors have none.
        return None


def _list_tensors(values: Any) -> Iterable[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _to_cpu(value: Any) -> Any:
    is_device = isinstance(value, (str, torch.device)) and str(value).startswith("mps")
    return torch.device("cpu") if is_device else value
