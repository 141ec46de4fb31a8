"""Which activations a score depends on, read off autograd's graph: without a number, so that it works on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from gradcam.tokens import Layout

FindLayout = Callable[[Sequence[int]], Layout | None]  # how a tensor of this shape lies on the picture
Edge = tuple[Node, int]  # an operation, and which of its outputs
MIXING = (
    "bmm",
    "attention",
    "dotproduct",
    "convolution",
    "roll",
    "flip",
    "fft",
    "gather",
    "index",
)  # tokens with tokens


def edge_of(tensor: Tensor) -> Edge | None:
    """Where in the graph a tensor comes from, None outside of it."""
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def find_dependence(scores: Iterable[Tensor], find_layout: FindLayout) -> dict[Edge, bool]:
    """Everything in the graph that leads to these scores, and whether it does so with more than its class token.

    Where a model reads `x[:, 0]` of its tokens, the gradient is zero on every patch, from there up to the last operation
    that mixes tokens, which is attention. `find_layout` tells class tokens from patches.
    """
    found: dict[Edge, bool] = {}
    waiting = [(edge, True) for edge in map(edge_of, scores) if edge is not None]
    while waiting:
        edge, with_patches = waiting.pop()
        if edge in found and found[edge] >= with_patches:
            continue
        found[edge] = with_patches
        node = edge[0]
        onward = _mixes_tokens(node) or (with_patches and not _reads_prefix(node, find_layout))
        waiting.extend(((other, index), onward) for other, index in node.next_functions if other is not None)
    return found


def is_softmax(node: Node | None, axes: int) -> bool:
    """Whether an operation on so many axes gives shares of a whole along the last one."""
    if node is None or node.name() != "SoftmaxBackward0":
        return False
    axis: int = node._saved_dim  # type: ignore[attr-defined]
    return axis in (axes - 1, 2**64 - 1, -1)


def _mixes_tokens(node: Node) -> bool:
    """A function written in Python may do anything."""
    name = node.name().lower()
    return hasattr(node, "_forward_cls") or any(word in name for word in MIXING)


def _reads_prefix(node: Node, find_layout: FindLayout) -> bool:
    """Whether the operation takes some of the tokens that come before the patches, and nothing else."""
    if node.name() not in ("SelectBackward0", "SliceBackward0"):
        return False
    shape, axis = node._saved_self_sym_sizes, node._saved_dim  # type: ignore[attr-defined]
    end = node._saved_index + 1 if node.name() == "SelectBackward0" else node._saved_end  # type: ignore[attr-defined]
    layout = find_layout(shape)
    if layout is None or not layout.prefix:
        return False
    return axis == 1 - layout.image_axis and 0 < end <= layout.prefix
