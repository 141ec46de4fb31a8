"""Images of a batch that depend on one another, as they do in a batch norm that takes the batch's own statistics.

The gradient of all images' scores together is then no image's own: another image's class would change this one's map.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm

from gradcam.errors import warn
from gradcam.gradients import graph_of

Placed = tuple[str, Tensor, Callable[[Tensor], Tensor]]  # a layer, what was recorded, and what brings that to (N,...)

DEPENDENT = (
    "The images of this batch depend on one another in the model (such as a batch norm without running statistics): "
    "a map here is not the one of its image alone. Explain them one by one for that."
)

# Operations that treat the rows of a batch alike, as they are used in convolutional networks: what is made of these alone
# keeps images apart, unless it goes along the first axis.
ROW_BY_ROW = frozenset(
    """
    AccumulateGrad AdaptiveAvgPool2D AdaptiveMaxPool2D Add Addmm AvgPool2D BackwardHookFunction Clamp Clone Convolution
    CudnnBatchNorm CudnnConvolution Div Elu Gather Gelu Hardsigmoid Hardswish Hardtanh LeakyRelu Linear LogSoftmax
    MaxPool2DWithIndices Mean Mish MkldnnConvolution Mul NativeBatchNorm NativeGroupNorm NativeLayerNorm Neg Prelu Relu
    ReshapeAlias Select Sigmoid Silu Softmax Softplus Squeeze Sub Sum T Tanh ToCopy UnsafeView View
    """.split()  # noqa: SIM905  (a list of strings would be a line each)
)

# By model, what was found to keep images apart: the operations behind the layers, and the layers.
_apart: weakref.WeakKeyDictionary[nn.Module, set[tuple[object, ...]]] = weakref.WeakKeyDictionary()


def warn_of_shared_statistics(modules: Iterable[nn.Module], images: int) -> None:
    """Warn where a batch norm has no running statistics, and so takes those of all images together."""
    if images > 1 and any(isinstance(module, _BatchNorm) and module.running_mean is None for module in modules):
        warn(DEPENDENT)


def depend_on_one_another(model: nn.Module, scores: Tensor, layers: Sequence[Placed]) -> bool:
    """Whether the first image's scores, of scores (N,K), have a gradient at another image's activations.

    Where the operations behind the layers do not tell, that takes one more backward pass, once for each such graph.
    """
    if len(scores) == 1 or not layers:
        return False
    graph = graph_of(scores)
    key = (*[(node.name(), getattr(node, "_saved_training", None)) for node in graph], *[name for name, _, _ in layers])
    if all(map(_goes_row_by_row, graph)) or key in _apart.setdefault(model, set()):
        return False
    with torch.enable_grad():
        first = scores[0].sum()
    found = torch.autograd.grad(first, [tensor for _, tensor, _ in layers], retain_graph=True, allow_unused=True)
    for (_, _, to_grid), gradient in zip(layers, found):
        if gradient is not None and to_grid(gradient)[1:].nan_to_num(0, 0, 0).any():
            warn(DEPENDENT)
            return True
    _apart[model].add(key)
    return False


def _goes_row_by_row(node: Node) -> bool:
    name = re.sub(r"(Backward)?\d*$", "", node.name().rpartition("::")[2])
    axes = getattr(node, "_saved_dim", None)
    is_along_rows = 0 in axes if isinstance(axes, (tuple, list)) else axes == 0
    return name in ROW_BY_ROW and not is_along_rows and not getattr(node, "_saved_training", False)
