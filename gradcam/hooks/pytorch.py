"""PyTorch internals that may change between versions: private functions, names of operations, error texts.

tests/hooks/test_pytorch.py checks that no other module uses such functions, names or texts. Private attributes and base
classes of modules are used elsewhere too. Where versions of PyTorch differ, a comment or docstring says so.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# Activation functions with non-negative values. Some, such as SiLU, have small negative values too.
ACTIVATION_OPS = ("relu", "silu", "gelu", "hardswish", "mish", "softplus", "sigmoid", "hardsigmoid", "softmax")
CLAMP_MINIMA = {"hardtanh": "_saved_min_val", "clampmin": "_saved_min", "clampb": "_saved_min"}
MAX_LEAK = 0.1  # A leaky ReLU with at most this slope counts as a ReLU.
RESHAPING_OPS = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias", "Select", "Slice")
# Maps the start of PyTorch's name for an operation to the name that `find_last_operation` returns.
LAST_OPERATIONS = {
    "Softmax": "softmax", "Sigmoid": "sigmoid", "LogSoftmax": "log_softmax",
    "Addmm": "linear", "Mm": "linear", "Linear": "linear", "Convolution": "linear",
}  # fmt: skip
# Graph nodes of ReLUs, and their attributes that must be zero. A clamp counts as a ReLU only if its maximum is 6 or
# missing. Other clamps limit values to a range, and are no activation functions.
RELU_NODES = {
    "ReluBackward": (), "HardtanhBackward": ("_saved_min_val",), "ThresholdBackward": ("_saved_threshold",),
    "ClampMinBackward": ("_saved_min",), "ClampBackward": ("_saved_min",),
}  # fmt: skip

# The constants below contain parts of PyTorch's error texts.
GRAPH_IS_FREED = ("second time",)
NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "_ALLOC_FAILED")
# Errors for in-place changes: of a gradient with expanded memory, and of a leaf that requires gradients.
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

# All versions of PyTorch so far have the C functions below. Python wrappers around them would cost time.
is_view = Tensor._is_view  # Returns whether a tensor is a view for autograd.
get_view_base: Callable[[Tensor], Tensor | None] = Tensor._base.__get__  # type: ignore[union-attr] # of a view
is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor  # A tensor of vmap, grad or jvp.
find_backward_task = torch._C._current_graph_task_id  # The id of this thread's running backward pass, or -1.
find_running_node = torch._C._current_autograd_node  # The operation whose derivative this thread is computing.

set_grad_mode = torch._C._set_grad_enabled  # Sets the grad mode of this thread.

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
CALL_ATTRIBUTES = ("_compiled_call_impl", "forward")  # The attributes that hold a module's compiled code.
HAS_STANCE = hasattr(torch.compiler, "set_stance")  # True since PyTorch 2.6.


def message_contains(error: BaseException, parts: Iterable[str]) -> bool:
    """Return whether an error's text contains one of these parts, regardless of case."""
    text = str(error).lower()
    return any(part.lower() in text for part in parts)


Predicate = Callable[[Node], bool]


def _contains(*words: str) -> Predicate:
    """Return a function that checks whether an operation's name, in lower case, contains one of the words."""

    def contains(node: Node) -> bool:
        name = node.name().lower()
        return any(word in name for word in words)

    return contains


def _ends_with(*words: str) -> Predicate:
    return lambda node: node.name().endswith(words)


_may_mix_tokens = _contains("bmm", "attention", "dotproduct", "convolution", "roll", "flip", "fft", "gather", "index")
# Operations that select, move, pool or resize values.
_selects_or_moves = _contains(
    *("pool", "view", "permute", "transpose", "tbackward", "slice", "select", "clone", "alias", "copy", "stride"),
    *("upsample", "expand", "cat", "stack", "pad", "squeeze", "split", "unbind", "shuffle", "roll"),
)
is_attention_operation = _contains("softmax", "attention", "dotproduct")
# Operations that mix channels by weights.
has_weights = _contains("convolution", "mm", "mv", "attention", "dotproduct", "linear", "bilinear")
is_adaptive_pool = _contains("adaptive")
is_error_node = _contains("error")  # A node that raises an error in the backward pass.
is_opaque = _contains("differentiablegraphbackward", "compiledfunctionbackward")  # Compiled code hides its operations.
is_overwriting_copy = _ends_with("CopyBackwards")  # The first input of such a copy is the value that is overwritten.
is_copy = _ends_with("CopyBackwards", "CloneBackward0")  # Recording a layer may add such copies to the graph.
# Operations that pass their values on unchanged.
is_passthrough = _ends_with("CopyBackwards", "CloneBackward0", "BackwardHookFunctionBackward", "AccumulateGrad")


def mixes_tokens(node: Node) -> bool:
    """Return whether an operation may mix the tokens of an image."""
    return hasattr(node, "_forward_cls") or _may_mix_tokens(node)


def mixes_all_channels(node: Node) -> bool:
    """Return whether an operation mixes all channels by weights.

    Bilinear upsampling has no weights, and a grouped convolution mixes channels only within each group.
    """
    return has_weights(node) and not node.name().startswith("Upsample") and getattr(node, "_saved_groups", 1) == 1


def takes_weights(node: Node) -> bool:
    """Return whether an operation takes weights. Some inputs of such an operation have no graph."""
    ops = ("Convolution", "Addmm", "Linear", "Mm", "NativeBatchNorm", "NativeLayerNorm", "NativeGroupNorm")
    return node.name().startswith(ops)


def is_activation(node: Node) -> bool:
    """Return whether an operation is an activation function with non-negative values, such as ReLU."""
    name = node.name().lower()
    for prefix, minimum in CLAMP_MINIMA.items():
        if name.startswith(prefix):
            value = getattr(node, minimum, None)
            return value is not None and float(value) >= 0
    if name.startswith("leakyrelu"):
        return bool(getattr(node, "_saved_negative_slope", 1.0) <= MAX_LEAK)
    return name.startswith(ACTIVATION_OPS) or "swish" in name


def keeps_nonnegative(node: Node, inputs: int) -> bool:
    """Return whether an operation maps non-negative values to non-negative values.

    `inputs` is the number of recorded inputs. An addition or multiplication counts only if both inputs are recorded.
    """
    return _selects_or_moves(node) or (node.name().startswith(("AddBackward", "MulBackward")) and inputs > 1)


def read_selection(node: Node) -> tuple[Sequence[int], int, range] | None:
    """Return the input shape, axis and selected positions of a selection or slice; None for other operations."""
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
    last = (axes - 1, 2**64 - 1, -1)
    return node is not None and node.name() == "SoftmaxBackward0" and node._saved_dim in last  # type: ignore[attr-defined]


def may_cast(node: Node) -> bool:
    """Return whether an operation may be a cast, or is a function written in Python."""
    name = node.name()
    # The names of most of PyTorch's own operations end with a digit. A search for attributes of these nodes is slow.
    is_known = name[-1].isdigit() or name.endswith("AccumulateGrad")
    return "Copy" in name or (not is_known and is_python_function(node))


def copies_leaf(node: Node, leaves: Container[int]) -> bool:
    """Return whether an operation copies one of these leaves, given by their ids."""
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    return is_copy(node) and all(id(getattr(parent, "variable", None)) in leaves for parent in parents)


def is_python_function(node: Node) -> bool:
    """Return whether an operation is an autograd function written in Python, other than PyTorch's module hooks."""
    return hasattr(node, "_forward_cls") and "Hook" not in node.name()


def get_function_name(node: Node) -> str:
    """Return the name of an autograd function written in Python."""
    return node.name().removesuffix("Backward")


def describe_operation(node: Node) -> tuple[Any, ...]:
    """Return an operation's name, training flag and axis, to compare it with other operations."""
    return node.name(), getattr(node, "_saved_training", None), getattr(node, "_saved_dim", None)


def find_last_operation(tensor: Tensor) -> str:
    """Return the operation that computed the values: "linear", "softmax", "log_softmax", "sigmoid", or ""."""
    node: Any = tensor.grad_fn
    if node is not None and node.name() == "AddmmBackward0":  # the usual head, without further comparisons
        return "linear"
    while node is not None and node.name().lstrip("_").startswith(RESHAPING_OPS):
        node = node.next_functions[0][0]
    name = "" if node is None else node.name().lstrip("_")
    return next((operation for prefix, operation in LAST_OPERATIONS.items() if name.startswith(prefix)), "")


def is_relu(node: Node) -> bool:
    """Return whether an operation is a ReLU or a ReLU6, under any of their names.

    Before 2.14, PyTorch does not record which operation changed a view in place. For any in-place change of a view, the
    result is then True.
    """
    if "CopySlices" in node.name() and not hasattr(node, "_wrapped_node"):
        return True
    node = getattr(node, "_wrapped_node", node)
    name = node.name().rstrip("0123456789")
    if name not in RELU_NODES:
        return False
    zeros = [getattr(node, attribute) for attribute in RELU_NODES[name]]
    is_range = name == "ClampBackward" and getattr(node, "_saved_max", None) not in (None, 6)
    return not is_range and all(isinstance(value, (int, float)) and value == 0 for value in zeros)


def _find_edge(tensor: Tensor) -> GradientEdge:
    with torch.enable_grad():
        return get_gradient_edge(tensor)


# Before PyTorch 2.6, a leaf has no edge while grad mode is off.
find_edge = get_gradient_edge if VERSION >= (2, 6) else _find_edge


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass, in the thread in which the pass ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module runs as compiled code, which ignores hooks registered later."""
    # Lightning compiles the method `forward`. PyTorch 2.4 to 2.15 mark compiled functions by `_torchdynamo_orig_callable`.
    is_marked = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    return is_marked or module._compiled_call_impl is not None or "_orig_mod" in module._modules


def select_unusual(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that are in training mode, have buffers, or may be compiled, in a single fast loop."""
    return [
        module
        for module in modules
        if module.training
        or module._buffers
        or "forward" in (attributes := module.__dict__)
        or "_compiled_call_impl" in attributes
        or "_orig_mod" in attributes["_modules"]
    ]


def find_unhooked(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that ignore hooks registered later: compiled modules and, before PyTorch 2.5, its encoders."""
    unhooked = [*filter(is_compiled, modules)] if "torch._dynamo" in sys.modules else []
    if VERSION < (2, 5):
        encoders = nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention
        unhooked += [module for module in modules if isinstance(module, encoders)]
    return unhooked


def run_eagerly() -> Callable[[], None]:
    """Run compiled code and fast paths eagerly, so that all modules call hooks. Return a function that undoes this.

    Before PyTorch 2.6, compiled modules also need `call_eagerly`.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if HAS_STANCE:
            stack.callback(torch.compiler.set_stance("force_eager").__exit__, None, None, None)
        return stack.pop_all().close


def read_calls(module: nn.Module) -> dict[str, Any]:
    """Return the values of `CALL_ATTRIBUTES`, which a compiled module calls. `restore_calls` restores these values."""
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


# Returns whether autocast is enabled for any device. Call this first: reading a device's type takes as long as a kernel.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
# Before PyTorch 2.5, autocast does not support "mps".
is_autocast_enabled = torch.is_autocast_enabled if VERSION >= (2, 5) else _has_autocast
without_autocast = partial(torch.autocast, enabled=False) if VERSION >= (2, 5) else _without_autocast


def autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context that enables autocast to a dtype, or disables autocast if the dtype is None."""
    return without_autocast(device) if dtype is None else torch.autocast(device, dtype=dtype)


def synchronize(device: torch.device) -> None:
    """Wait for the work on a device."""
    if device.type == "mps":
        torch.mps.synchronize()
    else:
        getattr(torch, device.type).synchronize(device)


def differentiate_edges(score: Tensor, edges: Sequence[GradientEdge]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a scalar score at edges of the graph.

    The score is passed as an edge too, because a torch function mode might replace a tensor argument. Before PyTorch
    2.5, `torch.autograd.grad` does not accept an edge as output. For these versions, this function calls the autograd
    engine directly, which bypasses function modes.
    """
    if VERSION >= (2, 5):
        return torch.autograd.grad([find_edge(score)], edges, retain_graph=True, allow_unused=True)
    return differentiate(score, edges)


def differentiate(score: Tensor, inputs: Sequence[Tensor | GradientEdge]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a score with one value, and keep the graph.

    Unlike `torch.autograd.grad`, this function calls the autograd engine directly, which takes 30 us less.
    """
    options: Any = {"keep_graph": True, "create_graph": False, "inputs": tuple(inputs), "allow_unreachable": True}
    run: Any = torch.autograd.Variable._execution_engine.run_backward
    return run((score,), (torch.ones_like(score),), **options, accumulate_grad=False)
