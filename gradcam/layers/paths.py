"""Find the paths through the autograd graph from the images to the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from gradcam.hooks import pytorch
from gradcam.hooks.autograd import Edge, get_edge
from gradcam.layers.layout import Layout

FindLayout = Callable[[Sequence[int]], Layout | None]  # Returns the layout of a tensor of this shape.


class GradientPaths:
    """The paths through the autograd graph from the images to the scores, and facts about the edges on these paths.

    `pictures` is the graph edge of the images that the model received. `find_layout` distinguishes class tokens from
    patches. The paths are found without saved tensors, because autograd may have saved no tensors.

    `depends` maps each edge that leads to the scores to a bool: False if the scores depend only on the class token at
    that edge. `whole` contains the edges that lie on every path. `weights` maps each edge to the number of later
    operations that mix channels by weights. If several paths lead to the scores, the smallest number is used. `pooled`
    contains the edges that the images reach only through adaptive pooling.
    """

    def __init__(self, scores: Iterable[Tensor], pictures: Edge | None, find_layout: FindLayout) -> None:
        self._find_layout = find_layout
        self.scores = [edge for edge in map(get_edge, scores) if edge is not None]
        self._order = _sort_edges(self.scores)
        self.depends = self._find_dependence()
        self.whole = frozenset[Edge]() if pictures is None else self._find_bottlenecks(pictures)
        self.weights = dict.fromkeys(self.scores, 0)
        for edge in self._order:
            count = self.weights[edge] + pytorch.mixes_all_channels(edge[0])
            for input_edge in _input_edges(edge):
                self.weights[input_edge] = min(self.weights.get(input_edge, count), count)
        self.pooled: set[Edge] = set()
        for edge in reversed(self._order):
            # Parameters have no inputs themselves, and are left out.
            inputs = [input_edge for input_edge in _input_edges(edge) if _input_edges(input_edge)]
            if pytorch.is_adaptive_pool(edge[0]) or (inputs and self.pooled.issuperset(inputs)):
                self.pooled.add(edge)

    def __contains__(self, edge: Edge | None) -> bool:
        return edge is not None and self.depends.get(edge, False)

    def _find_dependence(self) -> dict[Edge, bool]:
        # If the scores read only the class token, as in `x[:, 0]`, they do not depend on the patches after the last
        # attention. Before this attention, they depend on the patches, because attention mixes tokens.
        depends_on_patches: dict[Edge, bool] = {}
        pending = [(edge, True) for edge in self.scores]
        while pending:
            edge, with_patches = pending.pop()
            if edge in depends_on_patches and depends_on_patches[edge] >= with_patches:
                continue
            depends_on_patches[edge] = with_patches
            onward = pytorch.mixes_tokens(edge[0]) or (with_patches and not self._reads_prefix(edge[0]))
            pending.extend((input_edge, onward) for input_edge in _input_edges(edge))
        return depends_on_patches

    def _find_bottlenecks(self, pictures: Edge) -> frozenset[Edge]:
        """Return the edges that lie on every path from the images.

        The number of paths through an edge is the number of paths from the images to the edge (`paths_in`), times the
        number of paths from the edge to the end (`paths_out`). Usually, the end is the scores. If the scores read only
        a class token, the end is the last operation that mixes other tokens into the class token.
        """
        ends, order = self.scores, _sort_edges(self.scores, stop=self._reads_prefix)
        if pictures not in order:
            reading_edges = set(order)
            mixing = (edge for edge in self._order if edge not in reading_edges and pytorch.mixes_tokens(edge[0]))
            ends = [next(mixing, self._order[0])]
            order = _sort_edges(ends)
        paths_out = dict.fromkeys(order, 0) | dict.fromkeys(ends, 1)
        for edge in order:
            for input_edge in _input_edges(edge):
                if input_edge in paths_out:
                    paths_out[input_edge] += paths_out[edge]
        paths_in = dict.fromkeys(order, 0)
        for edge in reversed(order):
            paths_in[edge] = 1 if edge == pictures else sum(paths_in.get(source, 0) for source in _input_edges(edge))
        total = paths_out.get(pictures, 0)
        return frozenset(edge for edge in order if total and paths_in[edge] * paths_out[edge] == total)

    def _reads_prefix(self, node: Node) -> bool:
        """Return whether the operation selects only tokens outside the grid, such as the class token."""
        selection = pytorch.read_selection(node)
        if selection is None:
            return False
        shape, axis, positions = selection
        layout = self._find_layout(shape)
        if layout is None or "tokens" not in layout.kind or axis != 1 - layout.image_axis:
            return False
        cells = layout.list_cells()
        cell_tokens = range(shape[axis])[cells] if isinstance(cells, slice) else cells
        return len(positions) > 0 and not set(positions).intersection(cell_tokens)


def is_nonnegative(edge: Edge) -> bool:
    """Return whether all values come from activation functions with almost no negative values, such as ReLU."""
    pending, visited = [edge], {edge}
    while pending:
        current = pending.pop()
        if pytorch.is_activation(current[0]):
            continue
        inputs = _input_edges(current)
        if not inputs or not pytorch.keeps_nonnegative(current[0], len(inputs)):
            return False
        pending.extend(input_edge for input_edge in inputs if input_edge not in visited)
        visited.update(inputs)
    return True


def _input_edges(edge: Edge) -> list[Edge]:
    return [(node, index) for node, index in edge[0].next_functions if node is not None]


def _sort_edges(ends: Sequence[Edge], stop: Callable[[Node], bool] = lambda _: False) -> list[Edge]:
    """Return `ends` and all edges that lead to them, in topological order: each edge comes after the edges that use it.

    If `stop` returns True for an operation, the inputs of this operation are left out.
    """
    sorted_edges: list[Edge] = []
    visited: set[Edge] = set()
    for end in ends:
        pending = [(end, False)]
        while pending:
            edge, has_visited_inputs = pending.pop()
            if has_visited_inputs:
                sorted_edges.append(edge)
            elif edge not in visited:
                visited.add(edge)
                pending.append((edge, True))
                pending.extend((input_edge, False) for input_edge in ([] if stop(edge[0]) else _input_edges(edge)))
    return sorted_edges[::-1]
