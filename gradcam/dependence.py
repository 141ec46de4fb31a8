"""What lies between activations and a score: read off autograd's graph without a number, so also on the meta device."""

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
# Channels with channels, by weights; a convolution of groups does so within each of them only.
WEIGHING = ("convolution", "mm", "mv", "attention", "dotproduct", "linear", "bilinear")
# Functions whose values are not negative, but for a dip below zero that is small beside what they let through.
ACTIVATING = ("relu", "silu", "gelu", "hardswish", "mish", "softplus", "sigmoid", "hardsigmoid", "softmax")
CLAMPING = {"hardtanh": "_saved_min_val", "clampmin": "_saved_min", "clampb": "_saved_min"}
LEAST_LEAK = 0.1  # slope of a leaky ReLU below which it counts as one
# Operations that pick, move, pool and resize values. "add" and "mul" need both of their values in the graph.
KEEPING_SIGNS = (
    *("pool", "view", "permute", "transpose", "tbackward", "slice", "select", "clone", "alias", "copy", "stride"),
    *("upsample", "expand", "cat", "stack", "pad", "squeeze", "split", "unbind", "shuffle", "roll"),
)
JOINING = ("addbackward", "mulbackward")


def edge_of(tensor: Tensor) -> Edge | None:
    """Where in the graph a tensor comes from, None outside of it."""
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


class Ways:
    """The ways through autograd's graph on which pictures reach scores, and what they pass.

    `scores`: what is explained. `pictures`: where in the graph the model's copy of them comes from.
    `find_layout` tells class tokens from patches. Saved tensors are not looked at: there may be none.
    `depends`: everything that leads to the scores, and whether it does so with more than its class token. `whole`: all that
    no way goes round. `weights`: how many times weights mix the channels behind it, on the way that has the fewest.
    `pooled`: what the pictures reach through adaptive pooling alone.
    """

    def __init__(self, scores: Iterable[Tensor], pictures: Edge | None, find_layout: FindLayout) -> None:
        self._find_layout = find_layout
        self._scores = [edge for edge in map(edge_of, scores) if edge is not None]
        self._order = _sort(self._scores)
        self.depends = self._find_dependence()
        self.whole = frozenset[Edge]() if pictures is None else self._find_whole(pictures)
        self.weights = self._count_weights()
        self.pooled = self._find_pooled()

    def __contains__(self, edge: Edge | None) -> bool:
        """Whether the scores depend on more than a class token there."""
        return edge is not None and self.depends.get(edge, False)

    def _find_dependence(self) -> dict[Edge, bool]:
        """Where a model reads `x[:, 0]` of its tokens, the gradient is zero on every patch, up to the last attention.

        That is, from there up to the last operation that mixes tokens.
        """
        found: dict[Edge, bool] = {}
        waiting = [(edge, True) for edge in self._scores]
        while waiting:
            edge, with_patches = waiting.pop()
            if edge in found and found[edge] >= with_patches:
                continue
            found[edge] = with_patches
            onward = _mixes_tokens(edge[0]) or (with_patches and not self._reads_prefix(edge[0]))
            waiting.extend((given, onward) for given in _inputs(edge))
        return found

    def _find_whole(self, pictures: Edge) -> frozenset[Edge]:
        """What is on as many ways as there are: those from the pictures to it times those from it to the end.

        The end are the scores; where these read a class token only, it is the last operation that mixes tokens into it.
        """
        ends, order = self._scores, _sort(self._scores, stop=self._reads_prefix)
        if pictures not in order:
            reading = set(order)
            ends = [next((it for it in self._order if it not in reading and _mixes_tokens(it[0])), self._order[0])]
            order = _sort(ends)
        behind = dict.fromkeys(order, 0) | dict.fromkeys(ends, 1)
        before = dict.fromkeys(order, 0)
        for edge in order:
            for given in _inputs(edge):
                if given in behind:
                    behind[given] += behind[edge]
        for edge in reversed(order):
            before[edge] = 1 if edge == pictures else sum(before[given] for given in _inputs(edge) if given in before)
        total = behind.get(pictures, 0)
        return frozenset(edge for edge in order if total and before[edge] * behind[edge] == total)

    def _count_weights(self) -> dict[Edge, int]:
        fewest = dict.fromkeys(self._scores, 0)
        for edge in self._order:
            behind = fewest[edge] + _mixes_channels(edge[0])
            for given in _inputs(edge):
                fewest[given] = min(fewest.get(given, behind), behind)
        return fewest

    def _find_pooled(self) -> frozenset[Edge]:
        pooled: set[Edge] = set()
        for edge in reversed(self._order):
            given = [it for it in _inputs(edge) if _inputs(it)]  # no parameters
            if "adaptive" in edge[0].name().lower() or (given and pooled.issuperset(given)):
                pooled.add(edge)
        return frozenset(pooled)

    def _reads_prefix(self, node: Node) -> bool:
        """Whether the operation takes some of the tokens that come before the patches, and nothing else."""
        if node.name() not in ("SelectBackward0", "SliceBackward0"):
            return False
        shape, axis = node._saved_self_sym_sizes, node._saved_dim  # type: ignore[attr-defined]
        end = node._saved_index + 1 if node.name() == "SelectBackward0" else node._saved_end  # type: ignore[attr-defined]
        layout = self._find_layout(shape)
        if layout is None or not layout.prefix:
            return False
        return axis == 1 - layout.image_axis and 0 < end <= layout.prefix


def is_activated(edge: Edge) -> bool:
    """Whether all of it comes out of activation functions such as ReLU, and has been picked, moved, pooled or joined since.

    Next to nothing of it is negative then.
    """
    waiting, seen = [edge], {edge}
    while waiting:
        each = waiting.pop()
        if _activates(each[0]):
            continue
        given = _inputs(each)
        if not given or not _keeps_signs(each[0], len(given)):
            return False
        waiting.extend(it for it in given if it not in seen)
        seen.update(given)
    return True


def _inputs(edge: Edge) -> list[Edge]:
    return [(node, index) for node, index in edge[0].next_functions if node is not None]


def _sort(ends: Sequence[Edge], stop: Callable[[Node], bool] = lambda _: False) -> list[Edge]:
    """All that leads to these, each behind all that it leads to; not through operations at which to stop."""
    found: list[Edge] = []
    seen: set[Edge] = set()
    for end in ends:
        waiting = [(end, False)]
        while waiting:
            edge, is_done = waiting.pop()
            if is_done:
                found.append(edge)
            elif edge not in seen:
                seen.add(edge)
                waiting.append((edge, True))
                waiting.extend((given, False) for given in ([] if stop(edge[0]) else _inputs(edge)))
    return found[::-1]


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


def _mixes_channels(node: Node) -> bool:
    name = node.name().lower()
    is_upsampling = name.startswith("upsample")  # bilinear, and without weights
    return not is_upsampling and any(word in name for word in WEIGHING) and getattr(node, "_saved_groups", 1) == 1


def _activates(node: Node) -> bool:
    name = node.name().lower()
    for kind, least in CLAMPING.items():
        if name.startswith(kind):
            value = getattr(node, least, None)
            return value is not None and float(value) >= 0
    if name.startswith("leakyrelu"):
        return getattr(node, "_saved_negative_slope", 1.0) <= LEAST_LEAK
    return name.startswith(ACTIVATING) or "swish" in name


def _keeps_signs(node: Node, given: int) -> bool:
    name = node.name().lower()
    return any(word in name for word in KEEPING_SIGNS) or (name.startswith(JOINING) and given > 1)
