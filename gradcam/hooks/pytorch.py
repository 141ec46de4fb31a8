"""All that the package uses of PyTorch and that PyTorch may change: private functions, names of operations, error texts.

No other module names any of these; tests/hooks/test_pytorch.py checks that. Each function says which versions of PyTorch
it is for, and what it does with others.
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

# Operations that mix tokens.
MIXING = ("bmm", "attention", "dotproduct", "convolution", "roll", "flip", "fft", "gather", "index")
ATTENDING = ("softmax", "attention", "dotproduct")
# Operations that mix channels by weights; a convolution of groups does so only within each of them.
WEIGHING = ("convolution", "mm", "mv", "attention", "dotproduct", "linear", "bilinear")
# Functions whose values are not negative, except for a dip below zero that is small beside what they let through.
ACTIVATING = ("relu", "silu", "gelu", "hardswish", "mish", "softplus", "sigmoid", "hardsigmoid", "softmax")
CLAMPING = {"hardtanh": "_saved_min_val", "clampmin": "_saved_min", "clampb": "_saved_min"}
MAX_LEAK = 0.1  # slope of a leaky ReLU up to which it counts as a ReLU
# Operations that select, move, pool and resize values. "add" and "mul" need both of their values in the graph.
KEEPING_SIGNS = (
    *("pool", "view", "permute", "transpose", "tbackward", "slice", "select", "clone", "alias", "copy", "stride"),
    *("upsample", "expand", "cat", "stack", "pad", "squeeze", "split", "unbind", "shuffle", "roll"),
)
JOINING = ("addbackward", "mulbackward")
TAKING_WEIGHTS = ("Convolution", "Addmm", "Linear", "Mm", "NativeBatchNorm", "NativeLayerNorm", "NativeGroupNorm")
COPYING = ("CopyBackwards", "CloneBackward0")  # which recording itself adds
ROUTE_DETAILS = ("_saved_training", "_saved_dim")  # of an operation, which its name does not tell
PASSING_ON = ("CloneBackward0", "BackwardHookFunctionBackward", "torch::autograd::AccumulateGrad")
RESHAPING = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias", "Select", "Slice")
# The operation that computed an output, as `find_last_operation` names it.
LAST_OPERATIONS = {
    "Softmax": "softmax", "Sigmoid": "sigmoid", "LogSoftmax": "log_softmax",
    "Addmm": "linear", "Mm": "linear", "Linear": "linear", "Convolution": "linear",
}  # fmt: skip
# Derivatives of ReLUs, and which of their values are zero then. A clamp between 0 and anything but 6 is left out: it keeps
# values in a range, and is no activation.
RELU_NODES = {
    "ReluBackward": (), "HardtanhBackward": ("_saved_min_val",), "ThresholdBackward": ("_saved_threshold",),
    "ClampMinBackward": ("_saved_min",), "ClampBackward": ("_saved_min",),
}  # fmt: skip
OPAQUE_NODES = ("DifferentiableGraphBackward", "CompiledFunctionBackward")  # compiled code, whose operations are hidden

# What errors of PyTorch say, in part.
GRAPH_IS_FREED = ("second time",)
NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "_ALLOC_FAILED")
# Of a change in place: of a gradient that is one value seen many times, and of a leaf.
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
TAKES_LISTS = ("list", "must be Tensor")  # what models say that take no list of images

# Of all versions so far. They are PyTorch's own functions: a call of them costs no call of Python's.
is_view = Tensor._is_view  # for autograd
base_of: Callable[[Tensor], Tensor | None] = Tensor._base.__get__  # type: ignore[union-attr]  # what a view is of
is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor  # one of vmap, grad or jvp
find_backward_task = torch._C._current_graph_task_id  # the number of this thread's backward pass, -1 if there is none
find_running_node = torch._C._current_autograd_node  # the operation whose derivative this thread computes

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
CALLS = ("_compiled_call_impl", "forward")  # attributes of a compiled module
HAS_STANCE = hasattr(torch.compiler, "set_stance")  # from 2.6 on


def says(error: BaseException, parts: Iterable[str]) -> bool:
    """Return whether an error's text has one of these parts, in upper or lower case."""
    text = str(error).lower()
    return any(part.lower() in text for part in parts)


def _lower_name(node: Node) -> str:
    return node.name().lower()


def mixes_tokens(node: Node) -> bool:
    """Return whether an operation may mix the tokens of an image."""
    name = _lower_name(node)
    return hasattr(node, "_forward_cls") or any(word in name for word in MIXING)


def attends(node: Node) -> bool:
    """Return whether an operation is a part of attention."""
    name = _lower_name(node)
    return any(word in name for word in ATTENDING)


def has_weights(node: Node) -> bool:
    """Return whether an operation may mix channels by weights."""
    name = _lower_name(node)
    return any(word in name for word in WEIGHING)


def mixes_all_channels(node: Node) -> bool:
    """Return whether an operation mixes all channels by weights. Bilinear upsampling has no weights."""
    is_upsampling = _lower_name(node).startswith("upsample")
    return has_weights(node) and not is_upsampling and getattr(node, "_saved_groups", 1) == 1


def takes_weights(node: Node) -> bool:
    """Return whether inputs of an operation without a graph are weights."""
    return node.name().startswith(TAKING_WEIGHTS)


def is_adaptive_pool(node: Node) -> bool:
    """Return whether an operation is adaptive pooling."""
    return "adaptive" in _lower_name(node)


def activates(node: Node) -> bool:
    """Return whether an operation is an activation function whose values are not negative, such as ReLU."""
    name = _lower_name(node)
    for kind, least in CLAMPING.items():
        if name.startswith(kind):
            value = getattr(node, least, None)
            return value is not None and float(value) >= 0
    if name.startswith("leakyrelu"):
        return bool(getattr(node, "_saved_negative_slope", 1.0) <= MAX_LEAK)
    return name.startswith(ACTIVATING) or "swish" in name


def keeps_signs(node: Node, inputs: int) -> bool:
    """Return whether an operation on so many recorded inputs gives no negative values for inputs that are not negative."""
    name = _lower_name(node)
    return any(word in name for word in KEEPING_SIGNS) or (name.startswith(JOINING) and inputs > 1)


def read_selection(node: Node) -> tuple[Sequence[int], int, range] | None:
    """Return the input's shape, the axis, and the positions that a selection or a slice takes; None of other operations."""
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
    """Return whether an operation on a tensor of so many axes is a softmax over the last one."""
    if node is None or node.name() != "SoftmaxBackward0":
        return False
    axis: int = node._saved_dim  # type: ignore[attr-defined]
    return axis in (axes - 1, 2**64 - 1, -1)


def may_cast(nodes: Iterable[Node]) -> bool:
    """Return whether among these operations there may be a cast, or a function written in Python."""
    return any("Copy" in node.name() or is_python(node) for node in nodes)


def is_python(node: Node) -> bool:
    """Return whether an operation is a function written in Python. Hooks on modules are such, and do nothing: no."""
    return hasattr(node, "_forward_cls") and "Hook" not in node.name()


def is_error(node: Node) -> bool:
    """Return whether an operation stands for the error that its derivative would raise."""
    return "Error" in node.name()


def show_function(node: Node) -> str:
    """Return the name of a function written in Python."""
    return node.name().removesuffix("Backward")


def overwrites(node: Node) -> bool:
    """Return whether an operation is a copy into a tensor, whose first input is what was there before."""
    return node.name().endswith("CopyBackwards")


def is_copy(node: Node) -> bool:
    """Return whether an operation is a copy such as recording a layer adds."""
    return node.name().endswith(COPYING)


def passes_on(node: Node) -> bool:
    """Return whether an operation passes values on as they are."""
    return node.name() in PASSING_ON


def describe_operation(node: Node) -> tuple[Any, ...]:
    """Return what tells an operation from others: its name, the axis, and whether it is in training mode."""
    return (node.name(), *(getattr(node, name, None) for name in ROUTE_DETAILS))


def find_last_operation(tensor: Tensor) -> str:
    """Return the operation that computed the values: "linear", "softmax", "log_softmax", "sigmoid", or "" for others."""
    node: Any = tensor.grad_fn
    while node is not None and node.name().lstrip("_").startswith(RESHAPING):
        node = node.next_functions[0][0]
    if node is None:
        return ""
    name = node.name().partition("Backward")[0].lstrip("_")
    weighing = (start for start, kind in LAST_OPERATIONS.items() if kind == "linear")
    return "linear" if name.startswith(tuple(weighing)) else LAST_OPERATIONS.get(name, "")


def is_opaque(node: Node) -> bool:
    """Return whether an operation is compiled code, which hides the operations in it."""
    return any(name in node.name() for name in OPAQUE_NODES)


def is_relu(node: Node) -> bool:
    """Return whether an operation is a ReLU or a ReLU6, under any of their names.

    Before 2.14, a change of a view in place does not say which operation it is: True.
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
    """Return the tensor whose gradient a node accumulates, in a list; an empty list for other nodes."""
    return [node.variable] if hasattr(node, "variable") else []


def _find_edge(tensor: Tensor) -> GradientEdge:
    with torch.enable_grad():
        return get_gradient_edge(tensor)


find_edge = get_gradient_edge if VERSION >= (2, 6) else _find_edge  # before, a leaf has none while recording is off


def _find_default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


# The device on which tensors are made. Before 2.5, PyTorch's function raises after a device was reset.
find_default_device = torch.get_default_device if VERSION >= (2, 5) else _find_default_device


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward pass has ended, in whichever thread that is."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module runs as compiled code, which ignores hooks that come later."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def find_unhooked(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules whose code ignores hooks that come later: compiled ones, and before 2.5 PyTorch's encoder."""
    compiled = [*filter(is_compiled, modules)] if "torch._dynamo" in sys.modules else []
    kinds = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention) if VERSION < (2, 5) else ()
    return compiled + [module for module in modules if kinds and isinstance(module, kinds)]


def run_eagerly() -> Callable[[], None]:
    """Have all code call hooks; return what ends that. Before 2.6, compiled modules need `call_eagerly` as well."""
    with contextlib.ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if HAS_STANCE:
            stance = torch.compiler.set_stance("force_eager")
            stack.callback(stance.__exit__, None, None, None)
        return stack.pop_all().close


def read_calls(module: nn.Module) -> dict[str, Any]:
    """Return what a compiled module calls, to be restored."""
    return {name: value for name, value in vars(module).items() if name in CALLS}


def call_eagerly(module: nn.Module) -> None:
    """Have a compiled module run uncompiled."""
    module._compiled_call_impl = None
    if "_orig_mod" in module._modules:
        vars(module)["forward"] = module._modules["_orig_mod"]


def restore_calls(module: nn.Module, calls: dict[str, Any]) -> None:
    """Have a compiled module call what it did."""
    for name in CALLS:
        vars(module).pop(name, None)
    vars(module).update(calls)


def _has_autocast(device: str) -> bool:
    return device != "mps" and torch.is_autocast_enabled(device)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if device == "mps" else torch.autocast(device, enabled=False)


# Before 2.5, "mps" has no autocast.
is_autocast_enabled = torch.is_autocast_enabled if VERSION >= (2, 5) else _has_autocast
without_autocast = partial(torch.autocast, enabled=False) if VERSION >= (2, 5) else _without_autocast


def autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context with autocast to a dtype, or without autocast if it is None."""
    return without_autocast(device) if dtype is None else torch.autocast(device, dtype=dtype)


def synchronize(device: torch.device) -> None:
    """Wait for a device. Before 2.6 there is no `torch.accelerator`."""
    if hasattr(torch, "accelerator"):
        torch.accelerator.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    else:
        getattr(torch, device.type).synchronize(device)


def differentiate_edges(score: Tensor, edges: Sequence[GradientEdge]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a score, one value, at edges of the graph.

    The score is passed as an edge, too: modes would take a tensor for an argument to replace. Before 2.5 that is not
    possible, and the engine, of which modes see nothing, is called itself.
    """
    if VERSION >= (2, 5):
        return torch.autograd.grad([find_edge(score)], edges, retain_graph=True, allow_unused=True)
    options: Any = {"keep_graph": True, "create_graph": False, "inputs": tuple(edges), "allow_unreachable": True}
    run: Any = torch.autograd.Variable._execution_engine.run_backward
    return run((score,), (torch.ones_like(score),), **options, accumulate_grad=False)
