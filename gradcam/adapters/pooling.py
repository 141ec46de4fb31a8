"""Compute the attention pools of CLIP's ResNets in a way that makes gradients of many scores cheap.

CLIP's own code projects every cell of the grid to a key and a value. The gradient of each score therefore passes
through both projections at every cell. The gradients for fifty sentences take several times as long as a forward pass.

But each head has only one query, and matrix products are associative. Therefore, this module multiplies the query by
the key weights, instead of multiplying every cell. The module also averages the cells before the projection to values,
so that only the mean is projected. The gradient of each score then passes through each projection once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.hooks.model_facts import ModelFacts

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "c_proj")  # as in CLIP, and in open_clip
MAX_DISTANCE = 1e-3  # between the outputs of a pool and of `pool_by_attention`, relative to the norm
IS_EQUAL = "computes what `pool_by_attention` does"  # key of the cached comparison


def find_pool(tower: nn.Module) -> nn.Module | None:
    """Return a tower's attention pool; None if there is none. The pool's query is the mean of the cells."""
    pool = getattr(tower, "attnpool", None)
    has_projections = all(isinstance(getattr(pool, name, None), nn.Linear) for name in PROJECTIONS)
    has_positions = isinstance(getattr(pool, "positional_embedding", None), Tensor) and hasattr(pool, "num_heads")
    return pool if isinstance(pool, nn.Module) and has_projections and has_positions else None


def pool_by_attention(pool: Any, grid: Tensor) -> Tensor:
    """Compute a pool's output (N,D) from a grid (N,C,h,w)."""
    cells = grid.flatten(2).transpose(1, 2)
    cells = torch.cat([cells.mean(1, keepdim=True), cells], 1) + pool.positional_embedding
    queries = pool.q_proj(cells[:, 0]).chunk(pool.num_heads, 1)
    key_weights, value_weights = pool.k_proj.weight.chunk(pool.num_heads), pool.v_proj.weight.chunk(pool.num_heads)
    # Compute one product per head, because a batched product would copy the weights for each score under vmap. Leave
    # out the keys' bias: the bias adds the same number to all logits of a head, so the softmax does not change.
    at_cells = torch.stack([query @ weight for query, weight in zip(queries, key_weights)], 1)
    weights = (at_cells @ cells.mT * queries[0].shape[1] ** -0.5).softmax(2)
    means = (weights @ cells).unbind(1)
    values = torch.cat([mean @ weight.T for mean, weight in zip(means, value_weights)], 1)
    return pool.c_proj(values if pool.v_proj.bias is None else values + pool.v_proj.bias)


@contextlib.contextmanager
def cheap_pooling(tower: nn.Module) -> Iterator[None]:
    """Replace the `forward` of a tower's pool by `pool_by_attention` within the block.

    The original `forward` is used if its output differs, if the user replaced `forward`, or if no gradient is required.
    In half precision, the original `forward` is also used, because `pool_by_attention` would round differently.
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
        vars(pool).pop("forward", None)  # `forward` may be missing, if another thread removed it.
