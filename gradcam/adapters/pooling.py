"""Attention pools of CLIP's ResNets, computed in the order of operations in which gradients of many scores cost least.

Such a pool projects every cell of the grid to a key and a value, although a single query attends to them, so the gradient
of each score passes through both projections at every cell: fifty sentences cost several times the tower's forward pass.
Matrix products are associative. Here the query is projected to the cells, and a head's weighted mean of the cells is
projected to values, so that the gradient of each score passes through each projection once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.hooks.model_facts import ModelFacts

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "c_proj")  # as in CLIP, and in open_clip
MAX_DISTANCE = 1e-3  # relative to the length of the vectors: a larger one means that the pool computes something else
IS_EQUAL = "computes what `attend` does"  # the key under which the comparison is cached


def find_pool(tower: nn.Module) -> nn.Module | None:
    """Return a tower's attention pool if it has CLIP's form: the mean of all cells attends to the cells and to itself."""
    pool = getattr(tower, "attnpool", None)
    has_projections = all(isinstance(getattr(pool, name, None), nn.Linear) for name in PROJECTIONS)
    has_positions = isinstance(getattr(pool, "positional_embedding", None), Tensor) and hasattr(pool, "num_heads")
    return pool if isinstance(pool, nn.Module) and has_projections and has_positions else None


def pool_by_attention(pool: Any, grid: Tensor) -> Tensor:
    """Return the vectors (N,D) that a pool computes from a grid (N,C,h,w)."""
    cells = grid.flatten(2).transpose(1, 2)
    cells = torch.cat([cells.mean(1, keepdim=True), cells], 1) + pool.positional_embedding
    queries = pool.q_proj(cells[:, 0]).chunk(pool.num_heads, 1)
    key_weights, value_weights = pool.k_proj.weight.chunk(pool.num_heads), pool.v_proj.weight.chunk(pool.num_heads)
    # One product per head: a batched one would copy the weights for each score under vmap. The bias of the keys adds the
    # same number to all logits of a head, which the softmax ignores.
    at_cells = torch.stack([query @ weight for query, weight in zip(queries, key_weights)], 1)
    weights = (at_cells @ cells.mT * queries[0].shape[1] ** -0.5).softmax(2)
    means = (weights @ cells).unbind(1)
    values = torch.cat([mean @ weight.T for mean, weight in zip(means, value_weights)], 1)
    return pool.c_proj(values if pool.v_proj.bias is None else values + pool.v_proj.bias)


@contextlib.contextmanager
def cheap_pooling(tower: nn.Module) -> Iterator[None]:
    """Let a tower's pool compute its output by `attend`.

    A pool stays unchanged if its output differs from that of `attend`, if its `forward` was replaced, or in half
    precision, which would round differently.
    """
    pool: Any = find_pool(tower)
    if pool is None or "forward" in vars(pool):
        yield
        return
    original_forward, facts = pool.forward, ModelFacts(pool)
    facts.read()

    def forward(grid: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_full_precision = grid.dtype in (torch.float32, torch.float64)
        is_full_precision = is_full_precision and not torch.is_autocast_enabled(grid.device.type)
        is_grid = grid.ndim == 4 and grid[0, 0].numel() + 1 == len(pool.positional_embedding)
        if not (is_full_precision and is_grid and grid.requires_grad and torch.is_grad_enabled()):
            return original_forward(grid, *args, **kwargs)
        if facts.get(IS_EQUAL):
            return pool_by_attention(pool, grid)
        output, pooled = original_forward(grid, *args, **kwargs), pool_by_attention(pool, grid)
        if pooled.shape != output.shape or not bool(torch.dist(pooled, output) <= MAX_DISTANCE * output.norm()):
            return output
        facts.set(IS_EQUAL, True)
        return pooled

    pool.forward = forward
    try:
        yield
    finally:
        vars(pool).pop("forward", None)  # Another thread may have removed it.
