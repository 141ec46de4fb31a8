"""Measure the time, the multiply-adds (computed from shapes) and the memory of a forward pass, on any device."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gradcam.hooks.containers import list_tensors
from gradcam.hooks.pytorch import synchronize

Formula = Callable[..., int]
# Operators of these namespaces count as 0 multiply-adds, unless they have a formula or are listed in `UNKNOWN`.
NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "dtensor")
NEGLIGIBLE = ("torchvision::nms", "torchvision::roi_align", "torchvision::roi_pool", "torchvision::ps_roi_align")
# PyTorch operators that multiply, but have no formula. Their number of multiply-adds is unknown.
# `matmul` is listed for nested tensors. For other tensors, PyTorch decomposes it into operators with formulas.
UNKNOWN = (
    "_addmm_activation", "_cdist_forward", "_cslt_sparse_mm", "_dyn_quant_matmul_4bit", "_euclidean_dist", "_fft_c2c",
    "_fft_c2r", "_fft_r2c", "_grouped_mm", "_int_mm", "_mixed_dtypes_linear",
    "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_grouped_mm", "_sparse_mm_reduce_impl", "_sparse_semi_structured_addmm", "_sparse_semi_structured_linear",
    "_sparse_semi_structured_mm", "_sparse_sparse_matmul", "_transformer_encoder_layer_fwd", "_trilinear",
    "_triton_multi_head_attention", "_triton_scaled_dot_attention", "_weight_int4pack_mm",
    "_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm", "addbmm", "cholesky_inverse", "cholesky_solve", "conv_tbc",
    "linalg_cholesky_ex", "linalg_eig", "linalg_eigh", "linalg_inv_ex", "linalg_lstsq", "linalg_lu",
    "linalg_lu_factor_ex", "linalg_matrix_exp", "linalg_qr", "linalg_solve_triangular", "_linalg_det", "_linalg_eigh",
    "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "_lstm_mps", "lstm_mps", "matmul", "mkldnn_convolution",
    "mkldnn_linear", "miopen_rnn", "quantized_gru", "quantized_lstm",
)  # fmt: skip


class MultiplyAdds(TorchDispatchMode):
    """A dispatch mode that counts, in `total`, the multiply-adds that this thread computes while the mode is on.

    The formulas of `torch.utils.flop_counter` count two operations per multiply-add in matrix products, convolutions
    and attention. `FORMULAS` has formulas for other operators. Biases, norms, activations, pooling and interpolation
    count as 0, as usual. `unknown` is the number of operators with unknown cost, such as quantised operators and
    operators of other packages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = self.unknown = 0

    supports_higher_order_operators = True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(operator, "_overloadpacket", operator)
        formula, divisor = FORMULAS.get(str(packet)), 1
        if formula is None:
            formula, divisor = flop_registry.get(packet), 2  # PyTorch counts a multiply-add as two operations.
        if formula is None and packet is not operator and not any(tensor.is_nested for tensor in list_tensors(args)):
            with self:
                output = operator.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = operator(*args, **kwargs)
        if formula is None:
            namespace, _, name = operator.name().partition("::")  # Higher-order operators have no namespace.
            name = name.partition(".")[0]
            is_free = namespace in NAMESPACES and name.removesuffix("_") not in UNKNOWN
            self.unknown += not (is_free or f"{namespace}::{name}" in NEGLIGIBLE)
            return output
        try:
            self.total += int(formula(*args, **kwargs, out_val=output)) // divisor
        except Exception:  # Some formulas do not support nested tensors and similar arguments.
            self.unknown += 1
        return output


def _count_attention(query: Tensor, *parameters: Any, **__: Any) -> int:
    """Return the multiply-adds of the fused operator for self-attention in `nn.MultiheadAttention`."""
    _, _, width, _, weight, _, last_weight = parameters[:7]
    images, tokens, _ = query.shape
    return images * tokens * (weight.numel() + last_weight.numel() + 2 * tokens * int(width))


def _count_scaled_products(query: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> int:
    """Return the multiply-adds of fused attention on the CPU.

    Older versions of PyTorch have no formula for this operator.
    """
    return prod(query.shape[:-1]) * keys.shape[-2] * (query.shape[-1] + values.shape[-1])


def _count_recurrence(values: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Return the multiply-adds of a recurrent network, which multiplies each input vector with each matrix once."""
    return prod(values.shape[:-1]) * sum(weight.numel() for weight in weights if weight.ndim > 1)


FORMULAS: dict[str, Formula] = {
    "aten.linear": lambda values, weight, *_, **__: (
        (values.values() if values.is_nested else values).numel() * weight.shape[0]
    ),
    **dict.fromkeys(["aten.mv", "aten.dot", "aten.vdot"], lambda values, *_, **__: values.numel()),
    "aten.addmv": lambda bias, matrix, *_, **__: matrix.numel(),
    "aten._native_multi_head_attention": _count_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu": _count_scaled_products,
    "aten._cudnn_rnn": _count_recurrence,
    "aten.mkldnn_rnn_layer": lambda values, first, second, *_, **__: _count_recurrence(values, (first, second)),
    "torchvision.deform_conv2d": lambda values, weight, *_, out_val, **__: out_val.numel() * prod(weight.shape[1:]),
}


class Storages:
    """Counts the memory of tensors, and counts each storage once.

    Views and outputs of in-place operations add no memory, because their storage is already counted. Storages are
    referenced weakly, so that tensors can be freed. If a new tensor gets the address of a freed tensor, the memory of
    the new tensor is counted.
    """

    def __init__(self, tensors_before: Iterable[Tensor]) -> None:
        self.total = 0  # The sum in bytes, including the tensors passed to the constructor.
        self._counted: dict[int, StorageWeakRef] = {}
        self.add(list(tensors_before))

    def add(self, output: object) -> None:
        """Count the new memory of the tensors in `output`. For a view of a larger storage, count the view's size."""
        new: dict[int, int] = {}
        references = {}
        for value in list_tensors(output):
            tensor = value.values() if value.is_nested else value
            size = tensor.numel() * tensor.itemsize
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # Sparse tensors and similar ones have no storage.
                self.total += size
                continue
            reference = StorageWeakRef(storage)
            if reference.cdata not in self._counted:
                references[reference.cdata] = reference
                new[reference.cdata] = min(new.get(reference.cdata, 0) + size, storage.nbytes())
        self._counted |= references
        self.total += sum(new.values())


class Clock:
    """A clock for work on one or several devices.

    For a single CUDA device, a time stamp is an event in the device's stream, so reading the clock does not wait. In
    all other cases, each reading synchronises the devices.
    """

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
        self._uses_events = [device.type for device in self._accelerators] == ["cuda"]

    def read(self) -> Any:
        """Return the present time: an event for a single CUDA device, otherwise seconds."""
        if not self._uses_events:
            self.wait()
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._accelerators[0]))
        return event

    def wait(self) -> None:
        """Wait until the devices have finished all work, so that `between` can compare time stamps."""
        for device in self._accelerators:
            synchronize(device)

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two time stamps."""
        return start.elapsed_time(end) / 1000 if self._uses_events else end - start
