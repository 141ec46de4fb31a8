"""What a pass costs: its time on any device, its multiply-adds by the shapes of what is computed, its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gradcam.hooks.nested import tensors
from gradcam.hooks.pytorch import synchronize

Formula = Callable[..., int]
# Operators of these, and of PyTorch itself but for what is below, multiply nothing with weights: they count as none.
NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "dtensor")
NEGLIGIBLE = ("torchvision::nms", "torchvision::roi_align", "torchvision::roi_pool", "torchvision::ps_roi_align")
# Operators of PyTorch's that do multiply, and for which there is no formula: how much is not known.
UNKNOWN = (  # of matmul that is the one of nested tensors; others come as the products that they are made of
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
    """Counts the multiply-adds of what this thread computes while the mode is on, in `total`. By the formulas of
    PyTorch's own counter (`torch.utils.flop_counter`), two operations to a multiply-add: matrix products, convolutions,
    attention; and by those below for what it leaves out. Biases, norms, activations, pooling and interpolation count as
    none, as everywhere. `unknown`: how many operators came for which there is no formula, quantised ones and those of
    other packages."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.unknown = 0

    supports_higher_order_operators = True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(operator, "_overloadpacket", operator)
        formula = FORMULAS.get(str(packet))
        if formula is None and (flops := flop_registry.get(packet)) is not None:

            def formula(*args: Any, **kwargs: Any) -> int:
                return int(flops(*args, **kwargs)) // 2

        if formula is None and packet is not operator and not any(it.is_nested for it in tensors(args)):
            with self:
                output = operator.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = operator(*args, **kwargs)
        if formula is None:
            namespace, _, name = operator.name().partition("::")  # of a higher-order operator: a name alone
            name = name.partition(".")[0]
            is_none = namespace in NAMESPACES and name.removesuffix("_") not in UNKNOWN
            self.unknown += not (is_none or f"{namespace}::{name}" in NEGLIGIBLE)
            return output
        try:
            self.total += formula(*args, **kwargs, out_val=output)
        except Exception:  # a formula that does not know this form of its operator, such as nested tensors
            self.unknown += 1
        return output


def _of_attention(query: Tensor, *rest: Any, **__: Any) -> int:
    """Of `nn.MultiheadAttention` in one operator, which attends to the query itself."""
    _, _, width, _, weight, _, last_weight = rest[:7]
    images, tokens, _ = query.shape
    return images * tokens * (weight.numel() + last_weight.numel() + 2 * tokens * int(width))


def _of_scaled_products(query: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> int:
    """Of attention on the processor, for which older releases of PyTorch have no formula."""
    return prod(query.shape[:-1]) * keys.shape[-2] * (query.shape[-1] + values.shape[-1])


def _of_recurrence(values: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Of all layers of a recurrent network: each matrix is multiplied with each row once."""
    return prod(values.shape[:-1]) * sum(weight.numel() for weight in weights if weight.ndim > 1)


FORMULAS: dict[str, Formula] = {
    "aten.linear": lambda values, weight, *_, **__: (
        (values.values() if values.is_nested else values).numel() * weight.shape[0]
    ),
    "aten.mv": lambda matrix, *_, **__: matrix.numel(),
    "aten.addmv": lambda bias, matrix, *_, **__: matrix.numel(),
    "aten.dot": lambda vector, *_, **__: vector.numel(),
    "aten.vdot": lambda vector, *_, **__: vector.numel(),
    "aten._native_multi_head_attention": _of_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu": _of_scaled_products,
    "aten._cudnn_rnn": _of_recurrence,
    "aten.mkldnn_rnn_layer": lambda values, first, second, *_, **__: _of_recurrence(values, (first, second)),
    "torchvision.deform_conv2d": lambda values, weight, *_, out_val, **__: out_val.numel() * prod(weight.shape[1:]),
}


class Storages:
    """The memory behind tensors, each piece of it counted once. Views, and what operations in place give back, lie in
    memory that is counted already. Nothing is kept alive: of each piece a weak reference is held, so that another
    tensor that comes to lie in the same place is told apart."""

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
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse ones and others without, as if they were dense and new
                self.total += size
                continue
            reference = StorageWeakRef(storage)
            if reference.cdata not in self._known:
                references[reference.cdata] = reference
                new[reference.cdata] = min(new.get(reference.cdata, 0) + size, storage.nbytes())
        self._known |= references
        self.total += sum(new.values())


@dataclass(frozen=True)
class Clock:
    """`read` takes the time; `wait`, called once at the end, makes times ready for `between`, which gives seconds."""

    read: Callable[[], Any]
    wait: Callable[[], None]
    between: Callable[[Any, Any], float]


def find_clock(devices: Collection[torch.device]) -> Clock:
    """The clock for what runs on these devices. On one CUDA device times are events in its stream, for which nothing
    waits. Several devices, and those of other kinds, are waited for at each reading."""
    others = [device for device in devices if device.type not in ("cpu", "meta")]

    def wait() -> None:
        for device in others:
            synchronize(device)

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(others[0]))
        return event

    def read() -> float:
        wait()
        return time.perf_counter()

    if len(others) == 1 and others[0].type == "cuda":
        return Clock(mark, wait, lambda begun, ended: begun.elapsed_time(ended) / 1000)
    return Clock(read if others else time.perf_counter, wait, lambda begun, ended: ended - begun)
