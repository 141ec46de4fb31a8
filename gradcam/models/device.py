"""Set a model's device, precision and memory format, and find its input's device and dtype."""

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
    """Return the device with this name; raise `ModelError` if it is not available.

    "auto" means CUDA if CUDA is available, or else MPS, or else the CPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    offers = "choose auto, cpu, cuda, cuda:N or mps."
    if not re.fullmatch(r"(cpu|cuda|mps)(:\d+)?", str(name)):
        raise ModelError(f"There is no device {name!r}: {offers}")
    try:  # For an unsupported device, the type of the error depends on the build of PyTorch.
        device = torch.device(name)
        torch.empty(1, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError) as error:
        reason = str(error).split(". ")[0].split("\n")[0].rstrip(".") or type(error).__name__
        raise ModelError(f"The device {name!r} is not available ({reason}): {offers}") from error
    return device


def list_gpus() -> list[str]:
    """Return the names of all visible GPUs."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def check_device(device: torch.device, error: BaseException) -> None:
    """Raise `DeviceError` if the GPU is lost, because every later operation on a lost GPU fails too."""
    if device.type != "cuda" or not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return
    try:
        _run_on(device)
    except RuntimeError as failure:
        if not is_out_of_memory(failure):
            reason = " ".join(str(error).split(". ")[0].split("\n")[0].split()).rstrip(".")
            problem = f"{device} was lost ({reason}), and this process cannot use it any more"
            advice = "Continue with --resume. If the device does not come back, give another --device."
            raise DeviceError(f"{problem}. {advice}") from error


def _run_on(device: torch.device) -> None:
    torch.zeros(1, dtype=torch.float32, device=device).cpu()


def find_precision(name: str) -> torch.dtype:
    """Return the dtype with this name; raise `ModelError` if it is unknown."""
    if not isinstance(name, str) or name not in PRECISIONS:
        raise ModelError(f"There is no precision {shorten(name)}: choose {', '.join(PRECISIONS)}.")
    return getattr(torch, PRECISIONS[name])


def place_model(model: nn.Module, device: str, precision: str) -> nn.Module:
    """Move the model to the named device and precision, and return it in evaluation mode, with frozen weights.

    If the model is spread over several devices, its devices and its precision do not change.
    """
    dtype = find_precision(precision)
    if is_spread(model):
        if device != "auto" or dtype != torch.float32:
            advice = "leave the device at 'auto' and the precision at 'fp32'."
            raise ModelError(f"The model is spread over several devices, and keeps its devices and precision: {advice}")
        return model.eval().requires_grad_(False)
    target_device = find_device(device)
    try:
        return prepare_model(model, target_device, dtype)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # Possible causes of the error are too little memory, quantised weights and meta tensors.
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"The model cannot be moved to {target_device} in {precision}: {reason}") from error


def prepare_model(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move the model to a device and a dtype, and return it in evaluation mode, with frozen weights.

    The model is changed in place, so never pass the user's own model object. Batch norms always use float32. If
    channels-last is faster on the device, the weights of 2D convolutions get this memory format.
    """
    model.eval().requires_grad_(False).to(device)
    # On a GPU, channels-last is faster only on tensor cores. PyTorch uses the tensor cores in half precision.
    is_faster = device.type == "cpu" or dtype.itemsize < torch.float32.itemsize
    memory_format = torch.channels_last if is_faster else torch.preserve_format
    for module in model.modules():
        # Batch-norm statistics in half precision would save no time, and would double the error of probabilities.
        precision = torch.float32 if isinstance(module, _BatchNorm) else dtype
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                # Weights of 3D convolutions have five dimensions, which channels-last does not support.
                tensor_format = memory_format if tensor.ndim == 4 else torch.preserve_format
                tensor.data = tensor.data.to(precision, memory_format=tensor_format)
    return model


def is_spread(model: nn.Module) -> bool:
    """Return True if the model is spread over several devices, or if parts of the model are offloaded."""
    is_hooked = hasattr(model, "hf_device_map") or any(hasattr(module, "_hf_hook") for module in model.modules())
    return is_hooked or len({tensor.device for tensor in _tensors(model)}) > 1


def find_input_device(model: nn.Module) -> torch.device:
    """Return the device of the model's first tensor. Skip offloaded weights, which are on the meta device."""
    devices = (tensor.device for tensor in _tensors(model))
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def find_input_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first weight with at least two dimensions. Norms (1D) may have another dtype."""
    # Stop at the first weight, because listing all tensors takes longer than the pass of a small model.
    floating = (tensor for tensor in _tensors(model) if tensor.is_floating_point() and tensor.dtype.itemsize > 1)
    first = None
    for tensor in floating:
        if tensor.ndim > 1:
            return tensor.dtype
        first = first or tensor.dtype
    return first or torch.float32


def first_channels(model: nn.Module) -> int:
    """Return the first convolution's number of input channels; 0 if there is no convolution, or only a lazy one."""
    convolutions = (module for module in model.modules() if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)))
    return next((convolution.in_channels for convolution in convolutions), 0)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())
