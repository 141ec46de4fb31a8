"""How a model that we load computes: where, how precisely, and in which order its tensors lie in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradcam.errors import DeviceError, ModelError, shorten
from gradcam.hooks.memory import is_out_of_memory
from gradcam.options import PRECISIONS


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA, then MPS, then the CPU. Raises `ModelError` where it is not to be had."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    offers = "choose auto, cpu, cuda, cuda:N or mps."
    if not re.fullmatch(r"(cpu|cuda|mps)(:\d+)?", str(name)):
        raise ModelError(f"There is no device {name!r}: {offers}")
    try:  # each build of PyTorch says in an error of its own what it lacks
        device = torch.device(name)
        torch.empty(1, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError) as error:
        reason = str(error).split(". ")[0].split("\n")[0].rstrip(".") or type(error).__name__
        raise ModelError(f"The device {name!r} is not available ({reason}): {offers}") from error
    return device


def list_gpus() -> list[str]:
    """The names of all GPUs that are visible."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def check_device(device: torch.device, error: BaseException) -> None:
    """Raises `DeviceError` where this error came since the GPU is lost: whatever else it is asked fails as well."""
    if device.type != "cuda" or not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return
    try:
        _ask(device)
    except RuntimeError as failure:
        if not is_out_of_memory(failure):
            reason = " ".join(str(error).split(". ")[0].split("\n")[0].split()).rstrip(".")
            raise DeviceError(
                f"{device} was lost ({reason}), and this process cannot use it any more. Continue with --resume. If "
                "the device does not come back, give another --device."
            ) from error


def _ask(device: torch.device) -> None:
    torch.zeros(1, dtype=torch.float32, device=device).cpu()


def find_precision(name: str) -> torch.dtype:
    """The dtype of that name. Raises `ModelError` for an unknown one."""
    if not isinstance(name, str) or name not in PRECISIONS:
        raise ModelError(f"There is no precision {shorten(name)}: choose {', '.join(PRECISIONS)}.")
    return getattr(torch, PRECISIONS[name])


def place(model: nn.Module, device: str, precision: str) -> nn.Module:
    """The model itself, prepared for a device and a precision by their names; one that is spread is left where it lies."""
    dtype = find_precision(precision)
    if is_spread(model):
        if device != "auto" or dtype != torch.float32:
            raise ModelError(
                "The model is spread over several devices, and keeps its devices and precision: leave the device at 'auto' "
                "and the precision at 'fp32'."
            )
        return _freeze(model)
    chosen = find_device(device)
    try:
        return prepare(model, chosen, dtype)
    except (RuntimeError, ValueError, NotImplementedError) as error:  # of memory, of quantised weights, of meta tensors
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"The model cannot be moved to {chosen} in {precision}: {reason}") from error


def prepare(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model itself, in evaluation mode and frozen, on `device`, computing in `dtype`; never for a caller's. Batch
    norms compute in float32 in any precision. Weights of convolutions over pictures lie channels-last, but for float32
    on other devices than the CPU."""
    _freeze(model).to(device)
    is_faster = device.type == "cpu" or dtype.itemsize < torch.float32.itemsize  # there, or on a GPU's tensor cores
    memory_format = torch.channels_last if is_faster else torch.preserve_format
    for module in model.modules():
        # Rounded statistics would double the error of a probability; in float32 they take no longer.
        precision = torch.float32 if isinstance(module, _BatchNorm) else dtype
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                kept = memory_format if tensor.ndim == 4 else torch.preserve_format  # which volumes' weights are not
                tensor.data = tensor.data.to(precision, memory_format=kept)
    return model


def _freeze(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def is_spread(model: nn.Module) -> bool:
    """Whether the model was laid over several devices, or parts of it aside, on purpose."""
    is_hooked = hasattr(model, "hf_device_map") or any(hasattr(module, "_hf_hook") for module in model.modules())
    return is_hooked or len({tensor.device for tensor in _tensors(model)}) > 1


def find_input_device(model: nn.Module) -> torch.device:
    """Where the model's input goes: to its first parameter. One on the meta device lies aside until it is needed."""
    devices = (tensor.device for tensor in _tensors(model))
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def find_input_dtype(model: nn.Module) -> torch.dtype:
    """The precision of the model's input: that of its first weights, since norms may be more precise than the rest."""
    floating = [tensor for tensor in _tensors(model) if tensor.is_floating_point() and tensor.dtype.itemsize > 1]
    weights = [tensor for tensor in floating if tensor.ndim > 1]
    return next((tensor.dtype for tensor in (*weights, *floating)), torch.float32)


def first_channels(model: nn.Module) -> int:
    """How many channels the first convolution takes; 0 where there is none, or none that knows."""
    convolutions = (module for module in model.modules() if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)))
    return next((convolution.in_channels for convolution in convolutions), 0)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())
