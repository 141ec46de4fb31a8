"""Attention pools, in the order of operations in which the gradients of many scores cost least.

A pool projects all cells of a grid to keys and values, though one query alone looks at them. Backwards, each score's
gradient then goes through both projections at every cell, and fifty sentences cost several times what the tower does. But
products may be grouped otherwise: the query is brought to where the cells are, rather than their keys to the query, and
the values are projected once the cells are mixed. Then a score's gradient meets each projection once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.hooks.hooks import Hooks

PARTS = ("q_proj", "k_proj", "v_proj", "c_proj")  # as CLIP's own pool has them, and whoever took it over from there
CLOSE = 1e-3  # by the length of the vectors: what is no other pool than this one


def find_pool(tower: nn.Module) -> nn.Module | None:
    """A tower's pool in CLIP's form, if it has one: the mean of all cells asks, and each cell answers."""
    pool = getattr(tower, "attnpool", None)
    is_known = all(isinstance(getattr(pool, name, None), nn.Linear) for name in PARTS)
    has_rest = isinstance(getattr(pool, "positional_embedding", None), Tensor) and hasattr(pool, "num_heads")
    return pool if isinstance(pool, nn.Module) and is_known and has_rest else None


class Pooled(torch.autograd.Function):
    """What a pool in CLIP's form gives for a grid (N,C,h,w): (N,D). Gradients reach the grid alone, not the weights."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, pool: Any) -> Tensor:
        ctx.save_for_backward(grid)
        ctx.pool = pool
        rows = []
        for cells in grid.flatten(2).transpose(1, 2):
            seen, _, asked, (_, values) = _ask(pool, cells)
            mixed = (asked @ seen.T).softmax(1) @ seen
            rows.append(torch.cat([F.linear(own, weight) for own, weight in zip(mixed, values)]))
        return pool.c_proj(torch.stack(rows) + pool.v_proj.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (grid,) = ctx.saved_tensors
        found = [_go_back(ctx.pool, *each) for each in zip(grid.flatten(2).transpose(1, 2), gradients[0].split(1))]
        joined = torch.stack(found) if len(found) > 1 else found[0].unsqueeze(0)  # without a copy
        return joined.transpose(1, 2).view(-1, *grid.shape[1:]), None


def _ask(pool: Any, cells: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The cells (T,C) as the pool sees them, their mean the first; what the mean asks each head with (heads,d), and the
    same where the cells are (heads,C); and each head's weights (d,C) for keys and values. The keys' bias adds the same
    to all cells of a head, which a softmax does not see."""
    seen = torch.cat([cells.mean(0, keepdim=True), cells]) + pool.positional_embedding
    query = pool.q_proj(seen[0]).unflatten(0, (pool.num_heads, -1))
    keys, values = (each.weight.unflatten(0, (pool.num_heads, -1)) for each in (pool.k_proj, pool.v_proj))
    return seen, query, torch.einsum("hd,hdc->hc", query, keys) * query.shape[1] ** -0.5, (keys, values)


def _go_back(pool: Any, cells: Tensor, gradient: Tensor) -> Tensor:
    """From the gradient (1,D) at what a pool gave to that at its cells (T,C), head by head. Where those of many scores
    come at once, `torch.mm` takes them as rows of one matrix; any other product would copy the weights for each."""
    seen, query, asked, (keys, values) = _ask(pool, cells)
    shares = torch.mm(asked, seen.T).softmax(1)
    at_values = torch.mm(gradient, pool.c_proj.weight).split(query.shape[1], 1)
    mixed = torch.cat([torch.mm(own, weight) for own, weight in zip(at_values, values)])
    at_shares = torch.mm(mixed, seen.T)
    scores = shares * (at_shares - (shares * at_shares).sum(1, keepdim=True))
    at_asked = (torch.mm(scores, seen) * query.shape[1] ** -0.5).split(1)
    at_query = torch.cat([torch.mm(own, weight.T) for own, weight in zip(at_asked, keys)], 1)
    # Each cell is in the mean as well, which gives it its part of what comes there.
    parts, slopes = (each[:, 1:] + each[:, :1] / len(cells) for each in (shares, scores))
    at_cells = torch.bmm(parts.T.unsqueeze(0), mixed.unsqueeze(0))[0] + torch.mm(slopes.T, asked)
    return at_cells + torch.mm(at_query, pool.q_proj.weight) / len(cells)


@contextlib.contextmanager
def cheap_pooling(tower: nn.Module) -> Iterator[None]:
    """While it lasts, a tower's pool gives what it gave, to the bit, with the derivative of `Pooled`. A pool that does
    something else than that stays as it is; so does one in half precision, which would round otherwise."""

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        (grid,) = (*args, *kwargs.values())
        is_whole = grid.dtype in (torch.float32, torch.float64) and output.dtype == grid.dtype
        if not (grid.requires_grad and torch.is_grad_enabled() and is_whole):
            return None
        own = Pooled.apply(grid, module)
        if own.shape != output.shape or not bool(torch.dist(own, output) <= CLOSE * output.norm()):
            return None
        return output.detach() + (own - own.detach())

    pool = find_pool(tower)
    with Hooks() as hooks:
        if pool is not None:
            hooks.after_forward(pool, replace)
        yield
