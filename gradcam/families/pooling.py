"""Attention pools, in the order of operations in which the gradients of many scores cost least.

A pool projects all cells of a grid to keys and values, though one query alone looks at them. Backwards, each score's
gradient then goes through both projections at every cell, and fifty sentences cost several times what the tower does. But
products may be grouped otherwise: the query is brought to where the cells are, and a head's values are weighted once for
all cells. Then a score's gradient meets each projection once; and where the mean over the cells is all that is asked for,
nothing has to be brought to the cells at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradcam.hooks.autograd import Edge, edge_of
from gradcam.hooks.facts import Facts

PARTS = ("q_proj", "k_proj", "v_proj", "c_proj")  # as CLIP's own pool has them, and whoever took it over from there
CLOSE = 1e-3  # by the length of the vectors: what is no other pool than this one
PASSAGE = ["Clone"]  # from what a `TargetLayer` kept to what goes on
SAME = "computes what `Pooled` does"  # the key of that fact


def find_pool(tower: nn.Module) -> nn.Module | None:
    """A tower's pool in CLIP's form, if it has one: the mean of all cells asks, and each cell answers."""
    pool = getattr(tower, "attnpool", None)
    is_known = all(isinstance(getattr(pool, name, None), nn.Linear) for name in PARTS)
    has_rest = isinstance(getattr(pool, "positional_embedding", None), Tensor) and hasattr(pool, "num_heads")
    return pool if isinstance(pool, nn.Module) and is_known and has_rest else None


class Looked(NamedTuple):
    """How the mean of a picture's cells looked at itself and at them, T in all, by head: the query (heads,d), keys and
    values (heads,T,d), and the shares (heads,T)."""

    query: Tensor
    keys: Tensor
    values: Tensor
    shares: Tensor


class Pooled(torch.autograd.Function):
    """What a pool in CLIP's form gives for a grid (N,C,h,w): (N,D). Gradients reach the grid alone, not the weights."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, pool: Any) -> Tensor:
        ctx.save_for_backward(grid)
        ctx.pool = pool
        ctx.looked = [_look(pool, cells) for cells in grid.flatten(2).transpose(1, 2)]
        return pool.c_proj(torch.stack([(it.shares[:, None] @ it.values).flatten() for it in ctx.looked]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (grid,) = ctx.saved_tensors
        looked = ctx.looked
        if torch.is_grad_enabled():  # for second derivatives, of which what was kept knows nothing
            looked = [_look(ctx.pool, cells) for cells in grid.flatten(2).transpose(1, 2)]
        found = [_go_back(ctx.pool, *each) for each in zip(looked, gradients[0].split(1))]
        joined = torch.stack(found) if len(found) > 1 else found[0].unsqueeze(0)  # without a copy
        return joined.transpose(1, 2).view(-1, *grid.shape[1:]), None


def _look(pool: Any, cells: Tensor) -> Looked:
    seen = torch.cat([cells.mean(0, keepdim=True), cells]) + pool.positional_embedding
    query = pool.q_proj(seen[0]).unflatten(0, (pool.num_heads, -1))
    keys, values = (it(seen).unflatten(1, (pool.num_heads, -1)).transpose(0, 1) for it in (pool.k_proj, pool.v_proj))
    shares = ((keys @ query[..., None])[..., 0] * query.shape[1] ** -0.5).softmax(1)
    return Looked(query, keys, values, shares)


def _meet(pool: Any, looked: Looked, gradients: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """From gradients (K,D) at what a pool gave to those at each head's weighted values (K,d), at what its softmax takes
    (K,T), and at all heads' queries (K,C). Where many scores come one at a time, to be taken together, `torch.mm` makes
    their gradients rows of one matrix; any other product would copy the weights for each."""
    scale = looked.query.shape[1] ** -0.5
    at_values = torch.mm(gradients, pool.c_proj.weight).split(looked.query.shape[1], 1)
    slopes, at_queries = [], []
    for own, keys, values, shares in zip(at_values, looked.keys, looked.values, looked.shares):
        at_shares = shares * torch.mm(own, values.T)
        slopes.append((at_shares - shares * at_shares.sum(1, keepdim=True)) * scale)
        at_queries.append(torch.mm(slopes[-1], keys))
    return [*at_values], slopes, torch.cat(at_queries, 1)


def _go_back(pool: Any, looked: Looked, gradient: Tensor) -> Tensor:
    """From the gradient (1,D) at what a pool gave to that at its cells (T,C)."""
    at_values, by_head, at_query = _meet(pool, looked, gradient)
    query, count = looked.query, looked.shares.shape[1] - 1
    key_weights, value_weights = (it.weight.unflatten(0, (pool.num_heads, -1)) for it in (pool.k_proj, pool.v_proj))
    asked = torch.einsum("hd,hdc->hc", query, key_weights)
    mixed = torch.cat([torch.mm(own, weight) for own, weight in zip(at_values, value_weights)])
    # Each cell is in the mean as well, which gives it its part of what comes there.
    parts, slopes = (each[:, 1:] + each[:, :1] / count for each in (looked.shares, torch.cat(by_head)))
    at_cells = torch.bmm(parts.T.unsqueeze(0), mixed.unsqueeze(0))[0] + torch.mm(slopes.T, asked)
    return at_cells + torch.mm(at_query, pool.q_proj.weight) / count


def mean_gradients(scores: Tensor, grid: Tensor, nodes: Sequence[Node]) -> Tensor | None:
    """The means over the cells of the gradients of scores (N,K) at what a `TargetLayer` kept (N,C,h,w): (N,K,C), where
    nothing but `Pooled` looks at it; None otherwise. `nodes`: what leads from there to the scores. A head's shares add up
    to one, and the slopes of its softmax to zero: so the mean has the values' part whole, and nothing comes by the
    keys."""
    node = _find_pooled(grid, nodes)
    if node is None:
        return None
    with torch.enable_grad():
        values = scores.sum(0)
    each = torch.eye(len(values), dtype=values.dtype, device=values.device)
    edge = torch.autograd.graph.GradientEdge(node, 0)
    (at_pool,) = torch.autograd.grad(values, [edge], grad_outputs=each, is_grads_batched=True, retain_graph=True)
    rows = []
    for looked, gradients in zip(node.looked, at_pool.unbind(1)):
        at_values, _, at_query = _meet(node.pool, looked, gradients)
        at_cells = torch.cat(at_values, 1) @ node.pool.v_proj.weight + at_query @ node.pool.q_proj.weight
        rows.append(at_cells / (looked.shares.shape[1] - 1))
    return torch.stack(rows)


def _find_pooled(grid: Tensor, nodes: Sequence[Node]) -> Any | None:
    """The node of the one `Pooled` that looks at what was kept, behind nothing but a `TargetLayer`'s own operations."""
    users: dict[Edge, list[Any]] = {}
    for node in nodes:
        for edge in node.next_functions:
            users.setdefault(edge, []).append(node)  # type: ignore[arg-type]  # edges to no node are not looked up
    start = edge_of(grid) or next((edge for edge in users if getattr(edge[0], "variable", None) is grid), None)
    passage: list[str] = []
    while start is not None and len(users.get(start, [])) == 1:
        (node,) = users[start]
        if getattr(node, "_forward_cls", None) is Pooled:
            return node if passage == PASSAGE else None
        passage.append(node.name().rstrip("0123456789").removesuffix("Backward"))
        start = node, 0
    return None


@contextlib.contextmanager
def cheap_pooling(tower: nn.Module) -> Iterator[None]:
    """While it lasts, a tower's pool computes what it does by `Pooled`, but for rounding. A pool that is found to do
    something else, the first time, stays as it is; so does one that somebody has changed, and one in half precision, which
    would round otherwise."""
    pool: Any = find_pool(tower)
    if pool is None or "forward" in vars(pool):
        yield
        return
    own_forward, facts = pool.forward, Facts(pool)
    facts.read()

    def forward(grid: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_whole = grid.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(grid.device.type)
        is_grid = grid.ndim == 4 and grid[0, 0].numel() + 1 == len(pool.positional_embedding)
        if not (is_whole and is_grid and grid.requires_grad and torch.is_grad_enabled()):
            return own_forward(grid, *args, **kwargs)
        if facts.get(SAME):
            return Pooled.apply(grid, pool)
        output, found = own_forward(grid, *args, **kwargs), Pooled.apply(grid, pool)
        if found.shape != output.shape or not bool(torch.dist(found, output) <= CLOSE * output.norm()):
            return output
        facts.set(SAME, True)
        return found

    pool.forward = forward
    try:
        yield
    finally:
        vars(pool).pop("forward", None)  # another thread may have taken it away
