"""PyTorch internals that may change between versions: private functions, names of operations, error texts.

No other module uses these; tests/hooks/test_pytorch.py checks that. Where versions of PyTorch differ, a comment or
docstring says so.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# Parts of the names of operations that mix tokens.
TOKEN_MIXING_OPS = ("bmm", "attention", "dotproduct", "convolution", "roll", "flip", "fft", "gather", "index")
ATTENTION_OPS = ("softmax", "attention", "dotproduct")
# Operations that mix channels by weights. A grouped convolution mixes channels only within each group.
CHANNEL_MIXING_OPS = ("convolution", "mm", "mv", "attention", "dotproduct", "linear", "bilinear")
# Functions whose values are non-negative, except for a dip below zero that is small compared with the positive values.
ACTIVATION_OPS = ("relu", "silu", "gelu", "hardswish", "mish", "softplus", "sigmoid", "hardsigmoid", "softmax")
CLAMP_MINIMA = {"hardtanh": "_saved_min_val", "clampmin": "_saved_min", "clampb": "_saved_min"}
MAX_LEAK = 0.1  # Slope of a leaky ReLU up to which it counts as a ReLU.
# Operations that select, move, pool and resize values. "add" and "mul" count only if both inputs are in the graph.
NONNEGATIVE_OPS = (
    *("pool", "view", "permute", "transpose", "tbackward", "slice", "select", "clone", "alias", "copy", "stride"),
    *("upsample", "expand", "cat", "stack", "pad", "squeeze", "split", "unbind", "shuffle", "roll"),
)
BINARY_OPS = ("addbackward", "mulbackward")
WEIGHTED_OPS = ("Convolution", "Addmm", "Linear", "Mm", "NativeBatchNorm", "NativeLayerNorm", "NativeGroupNorm")
COPY_OPS = ("CopyBackwards", "CloneBackward0")  # Copies that are added when a layer is recorded.
OPERATION_DETAILS = ("_saved_training", "_saved_dim")  # Attributes that distinguish operations of the same name.
PASSTHROUGH_OPS = (*COPY_OPS, "BackwardHookFunctionBackward", "AccumulateGrad")
RESHAPING_OPS = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias", "Select", "Slice")
# The names that `find_last_operation` gives to the operation that computed an output.
LAST_OPERATIONS = {
    "Softmax": "softmax", "Sigmoid": "sigmoid", "LogSoftmax": "log_softmax",
    "Addmm": "linear", "Mm": "linear", "Linear": "linear", "Convolution": "linear",
}  # fmt: skip
# Graph nodes of ReLUs, and their attributes that must be zero. A clamp counts only if its maximum is 6 or missing:
# other clamps keep values in a range, and are no activations.
RELU_NODES = {
    "ReluBackward": (), "HardtanhBackward": ("_saved_min_val",), "ThresholdBackward": ("_saved_threshold",),
    "ClampMinBackward": ("_saved_min",), "ClampBackward": ("_saved_min",),
}  # fmt: skip
OPAQUE_NODES = ("DifferentiableGraphBackward", "CompiledFunctionBackward")  # Compiled code, which hides its operations.

# Parts of PyTorch's error texts.
GRAPH_IS_FREED = ("second time",)
NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "_ALLOC_FAILED")
# Errors for an in-place change of an expanded gradient, and of a leaf.
IN_PLACE_REFUSALS = ("refers to a single memory location", "in-place operation")
INFERENCE_TENSOR = "Inference tensors cannot be saved for backward"
HOOKED_VIEW = "BackwardHookFunction"
CHANGED_IN_PLACE = "has been modified by an inplace operation"
UNRECORDED_VIEW = "created in no_grad mode"
CHANGED_LEAF = "a leaf Variable that requires grad"
RECURRENT = "cudnn RNN backward can only be called in training mode"
NOT_DIFFERENTIABLE_TWICE = "backward is not implemented"
NO_FORMULA = "no autograd formula was registered"
REENTRANT = "is incompatible with .grad()"
NO_DERIVATIVE = "the derivative for"
TAKES_LISTS = ("list", "must be Tensor")  # Errors of models that take no list of images.

# All versions so far have these. They are PyTorch's own C functions, without a Python wrapper that would cost time.
is_view = Tensor._is_view  # As autograd defines it.
get_view_base: Callable[[Tensor], Tensor | None] = Tensor._base.__get__  # type: ignore[union-attr] # of a view
is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor  # A tensor of vmap, grad or jvp.
find_backward_task = torch._C._current_graph_task_id  # The id of this thread's running backward pass, or -1.
find_running_node = torch._C._current_autograd_node  # The operation whose derivative this thread is computing.

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
CALL_ATTRIBUTES = ("_compiled_call_impl", "forward")  # Attributes of a compiled module.
HAS_STANCE = hasattr(torch.compiler, "set_stance")  # Since 2.6.


def message_contains(error: BaseException, parts: Iterable[str]) -> bool:
    """Return whether an error's text contains one of these parts, in upper or lower case."""
    text = str(error).lower()
    return any(part.lower() in text for part in parts)


def _lower_name(node: Node) -> str:
    return node.name().lower()


def mixes_tokens(node: Node) -> bool:
    """Return whether an operation may mix the tokens of an image."""
    name = _lower_name(node)
    return hasattr(node, "_forward_cls") or any(word in name for word in TOKEN_MIXING_OPS)


def is_attention_operation(node: Node) -> bool:
    """Return whether an operation is a part of attention."""
    name = _lower_name(node)
    return any(word in name for word in ATTENTION_OPS)


def has_weights(node: Node) -> bool:
    """Return whether an operation may mix channels by weights."""
    name = _lower_name(node)
    return any(word in name for word in CHANNEL_MIXING_OPS)


def mixes_all_channels(node: Node) -> bool:
    """Return whether an operation mixes all channels by weights. Bilinear upsampling has no weights."""
    is_upsampling = _lower_name(node).startswith("upsample")
    return has_weights(node) and not is_upsampling and getattr(node, "_saved_groups", 1) == 1


def takes_weights(node: Node) -> bool:
    """Return whether an operation's inputs without a graph are weights."""
    return node.name().startswith(WEIGHTED_OPS)


def is_adaptive_pool(node: Node) -> bool:
    """Return whether an operation is adaptive pooling."""
    return "adaptive" in _lower_name(node)


def is_activation(node: Node) -> bool:
    """Return whether an operation is an activation function with non-negative values, such as ReLU."""
    name = _lower_name(node)
    for prefix, minimum in CLAMP_MINIMA.items():
        if name.startswith(prefix):
            value = getattr(node, minimum, None)
            return value is not None and float(value) >= 0
    if name.startswith("leakyrelu"):
        return bool(getattr(node, "_saved_negative_slope", 1.0) <= MAX_LEAK)
    return name.startswith(ACTIVATION_OPS) or "swish" in name


def keeps_nonnegative(node: Node, inputs: int) -> bool:
    """Return whether an operation maps non-negative values to non-negative values.

    `inputs` is the number of recorded inputs.
    """
    name = _lower_name(node)
    return any(word in name for word in NONNEGATIVE_OPS) or (name.startswith(BINARY_OPS) and inputs > 1)


def read_selection(node: Node) -> tuple[Sequence[int], int, range] | None:
    """Return a selection's or slice's input shape, axis and selected positions; None for other operations."""
    if node.name() not in ("SelectBackward0", "SliceBackward0"):
        return None
    saved: Any = node
    shape, axis = saved._saved_self_sym_sizes, saved._saved_dim
    positions = range(shape[axis])
    if node.name() == "SliceBackward0":
        return shape, axis, positions[saved._saved_start : saved._saved_end]
    index = saved._saved_index
    return shape, axis, positions[index - 2**64 if index >= 2**63 else index :][:1]


def is_softmax(node: Node | None, axes: int) -> bool:
    """Return whether an operation on a tensor with `axes` axes is a softmax over the last axis."""
    if node is None or node.name() != "SoftmaxBackward0":
        return False
    axis: int = node._saved_dim  # type: ignore[attr-defined]
    return axis in (axes - 1, 2**64 - 1, -1)


def may_cast(nodes: Iterable[Node]) -> bool:
    """Return whether one of these operations may be a cast, or a function written in Python."""
    return any("Copy" in node.name() or is_python_function(node) for node in nodes)


def is_python_function(node: Node) -> bool:
    """Return whether an operation is a function written in Python; False for module hooks, which change nothing."""
    return hasattr(node, "_forward_cls") and "Hook" not in node.name()


def is_error_node(node: Node) -> bool:
    """Return whether an operation is a placeholder for the error that its derivative would raise."""
    return "Error" in node.name()


def get_function_name(node: Node) -> str:
    """Return the name of a function written in Python."""
    return node.name().removesuffix("Backward")


def is_overwriting_copy(node: Node) -> bool:
    """Return whether an operation is a copy into a tensor. Its first input is the tensor's previous value."""
    return node.name().endswith("CopyBackwards")


def is_copy(node: Node) -> bool:
    """Return whether an operation is a copy, such as those that are added when a layer is recorded."""
    return node.name().endswith(COPY_OPS)


def is_passthrough(node: Node) -> bool:
    """Return whether an operation passes its values on unchanged."""
    return node.name().endswith(PASSTHROUGH_OPS)


def describe_operation(node: Node) -> tuple[Any, ...]:
    """Return an operation's name, training flag and axis, to compare it with other operations."""
    return (node.name(), *(getattr(node, name, None) for name in OPERATION_DETAILS))


def find_last_operation(tensor: Tensor) -> str:
    """Return the operation that computed the values: "linear", "softmax", "log_softmax", "sigmoid", or ""."""
    node: Any = tensor.grad_fn
    while node is not None and node.name().lstrip("_").startswith(RESHAPING_OPS):
        node = node.next_functions[0][0]
    if node is None:
        return ""
    name = node.name().partition("Backward")[0].lstrip("_")
    weighing = (start for start, operation in LAST_OPERATIONS.items() if operation == "linear")
    return "linear" if name.startswith(tuple(weighing)) else LAST_OPERATIONS.get(name, "")


def is_opaque(node: Node) -> bool:
    """Return whether an operation is compiled code, which hides the operations in it."""
    return any(name in node.name() for name in OPAQUE_NODES)


def is_relu(node: Node) -> bool:
    """Return whether an operation is a ReLU or a ReLU6, under any of their names.

    Before 2.14, PyTorch does not record which operation changed a view in place; the result is then True.
    """
    is_of_view = "CopySlices" in node.name()
    if is_of_view and not hasattr(node, "_wrapped_node"):
        return True
    node = getattr(node, "_wrapped_node", node)
    name = node.name().rstrip("0123456789")
    if name not in RELU_NODES:
        return False
    zeros = [getattr(node, attribute) for attribute in RELU_NODES[name]]
    largest = getattr(node, "_saved_max", None)
    is_range = name == "ClampBackward" and largest not in (None, 6)
    return not is_range and all(isinstance(value, (int, float)) and value == 0 for value in zeros)


def list_leaf(node: Node) -> list[Tensor]:
    """Return a list with the tensor whose gradient a node accumulates; an empty list for other nodes."""
    return [node.variable] if hasattr(node, "variable") else []


def _find_edge(tensor: Tensor) -> GradientEdge:
    with torch.enable_grad():
        return get_gradient_edge(tensor)


# Before 2.6, a leaf has no edge while grad mode is off.
find_edge = get_gradient_edge if VERSION >= (2, 6) else _find_edge


def _find_default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


# The device of new tensors. Before 2.5, PyTorch's function raises an error after the device was reset.
find_default_device = torch.get_default_device if VERSION >= (2, 5) else _find_default_device


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass, in the thread that ends it."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module runs as compiled code, which ignores hooks registered later."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def find_unhooked(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that ignore hooks registered later: compiled ones and, before 2.5, PyTorch's encoder."""
    compiled = [*filter(is_compiled, modules)] if "torch._dynamo" in sys.modules else []
    encoder_classes = (
        (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention) if VERSION < (2, 5) else ()
    )
    return compiled + [module for module in modules if encoder_classes and isinstance(module, encoder_classes)]


def run_eagerly() -> Callable[[], None]:
    """Make all code call hooks, and return a function that undoes this.

    Before 2.6, compiled modules also need `call_eagerly`.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if HAS_STANCE:
            stance = torch.compiler.set_stance("force_eager")
            stack.callback(stance.__exit__, None, None, None)
        return stack.pop_all().close


def read_calls(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a compiled module calls, for `restore_calls`."""
    return {name: value for name, value in vars(module).items() if name in CALL_ATTRIBUTES}


def call_eagerly(module: nn.Module) -> None:
    """Make a compiled module run uncompiled."""
    module._compiled_call_impl = None
    if "_orig_mod" in module._modules:
        vars(module)["forward"] = module._modules["_orig_mod"]


def restore_calls(module: nn.Module, calls: dict[str, Any]) -> None:
    """Make a compiled module call its compiled code again."""
    for name in CALL_ATTRIBUTES:
        vars(module).pop(name, None)
    vars(module).update(calls)


def _has_autocast(device: str) -> bool:
    return device != "mps" and torch.is_autocast_enabled(device)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if device == "mps" else torch.autocast(device, enabled=False)


# Before 2.5, autocast does not support "mps".
is_autocast_enabled = torch.is_autocast_enabled if VERSION >= (2, 5) else _has_autocast
without_autocast = partial(torch.autocast, enabled=False) if VERSION >= (2, 5) else _without_autocast


def autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context that enables autocast to a dtype, or disables autocast if the dtype is None."""
    return without_autocast(device) if dtype is None else torch.autocast(device, dtype=dtype)


def synchronize(device: torch.device) -> None:
    """Wait for the work on a device. `torch.accelerator` exists since 2.6."""
    if hasattr(torch, "accelerator"):
        torch.accelerator.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    else:
        getattr(torch, device.type).synchronize(device)


def differentiate_edges(score: Tensor, edges: Sequence[GradientEdge]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a scalar score at edges of the graph.

    The score is passed as an edge too, because a torch function mode might replace a tensor argument. Before 2.5,
    `torch.autograd.grad` takes no edge as output, so the engine is called directly, which bypasses modes.
    """
    if VERSION >= (2, 5):
        return torch.autograd.grad([find_edge(score)], edges, retain_graph=True, allow_unused=True)
    options: Any = {"keep_graph": True, "create_graph": False, "inputs": tuple(edges), "allow_unreachable": True}
    run: Any = torch.autograd.Variable._execution_engine.run_backward
    return run((score,), (torch.ones_like(score),), **options, accumulate_grad=False)
