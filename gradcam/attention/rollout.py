"""Attention from block to block: rollout, and rollout weighted by gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcam.attention.blocks import Blocks, find_blocks
from gradcam.attention.census import Census
from gradcam.attention.reaching import Keep, attention_kept, differentiable, passes_float16, plain, require_all
from gradcam.effort import Effort
from gradcam.errors import BlindLayerError
from gradcam.gradients import MOST_BYTES, jacobian, require_recording
from gradcam.perturbation.rerun import run_again
from gradcam.recording import Recorded
from gradcam.sites import at_least_float32, check_range
from gradcam.target_layer import TargetLayer
from gradcam.targets import Scored, compute_scores


def rollout(recorded: Recorded, census: Census, effort: Effort) -> Tensor:
    """Attention rollout: how much of each patch is mixed into what the head reads; of no class.

    Maps (N,K,h,w), the same for all classes. Abnar & Zuidema, ACL 2020, equation 1: a block passes on half of a token and
    half of what it attends to, by the mean over the heads; blocks are multiplied. The map is the row of the token that the
    head reads, the class token as a rule; the mean of their rows where it reads several, as a mean over all patches
    does. Which it reads is seen from the gradient at the last block's output, and not taken from the model's kind.
    Raises `ModelError` where the attention cannot be followed, `BlindLayerError` where the score has no gradient.
    """
    blocks = find_blocks(census, recorded)
    with _run(recorded, blocks, effort, plain) as run:
        ((gradient,),) = jacobian(_any_score(run.scored), [run.tokens], scaled=passes_float16(recorded))
    row = find_read(gradient, blocks)
    mixed = roll_out([at_least_float32(attention).mean(1) for attention in run.attentions], row)
    return blocks.to_grid(mixed)[:, None].repeat_interleave(recorded.scored.values.shape[1], 1)


def gradient_rollout(recorded: Recorded, census: Census, effort: Effort) -> Tensor:
    """Gradient-weighted rollout: attention counts by how much more of it would raise the score.

    Maps (N,K,h,w), none below zero. Chefer et al., ICCV 2021, equations 5 and 6 for self-attention: from the identity on,
    R becomes R + A R in each block, where A is the mean over the heads of attention times its gradient, positive ones only.
    The map is a row of R, as in `rollout`; the identity, which would add the same to every patch that the head reads, is
    taken away again.
    Raises `ModelError` where the attention cannot be followed, `BlindLayerError` where its gradient is exactly zero.
    """
    blocks = find_blocks(census, recorded)
    parts = []
    with _run(recorded, blocks, effort, differentiable) as run:
        inputs = [run.tokens, *run.attentions]
        most_bytes = MOST_BYTES // len(inputs)
        for at_tokens, *gradients in jacobian(
            run.scored.values, inputs, scaled=passes_float16(recorded), most_bytes=most_bytes
        ):
            row = find_read(at_tokens, blocks)
            weighted = [weigh(attention, each) for attention, each in zip(run.attentions, gradients)]
            parts.append(blocks.to_grid(accumulate(weighted, row)))
    return torch.cat(parts).transpose(0, 1)


def roll_out(attentions: Sequence[Tensor], row: Tensor) -> Tensor:
    """A row (T,) times the product of blocks (N,T,T), of which the last is the first factor: (N,T).

    Each block is half of its attention and half of the identity, its rows divided by their sums.
    """
    values = row.to(attentions[0]).expand(len(attentions[0]), 1, -1)
    for attention in reversed(attentions):
        half = attention / 2 + torch.eye(len(row), dtype=attention.dtype, device=attention.device) / 2
        values = values @ (half / half.sum(-1, keepdim=True))
    return values[:, 0]


def accumulate(weighted: Sequence[Tensor], row: Tensor) -> Tensor:
    """A row (T,) times what blocks (...,T,T) add to the identity, the product of I + block for each, less I: (...,T)."""
    start = row.to(weighted[0]).expand(*weighted[0].shape[:-2], 1, -1)
    added = torch.zeros_like(start)  # apart from the start, beside which it may be too small for float32
    for block in reversed(weighted):
        added = added + (start @ block + added @ block)
    return added[..., 0, :]


def weigh(attention: Tensor, gradient: Tensor | None) -> Tensor:
    """The mean over the heads of attention (N,heads,T,T) times gradients (k,N,heads,T,T), positive ones only: (k,N,T,T)."""
    if gradient is None:
        return torch.zeros_like(at_least_float32(attention).mean(1))[None]
    check_range(gradient, "The gradients at the attention are")
    return (at_least_float32(gradient) * at_least_float32(attention.detach())).relu().mean(2)


def find_read(gradient: Tensor | None, blocks: Blocks) -> Tensor:
    """The tokens that the head reads, those with gradients (k,*shape) at the last block's output: (T,), alike, sum 1."""
    name, _ = blocks.last
    if gradient is None or not gradient.any():
        raise blind_attention(name)
    check_range(gradient, f"The gradients at layer '{name}' are")
    is_read = gradient.movedim(1 + blocks.token_axis, -1).flatten(0, -2).any(0)
    return at_least_float32(is_read.to(gradient.dtype)) / is_read.sum()


def blind_attention(name: str) -> BlindLayerError:
    """The error for a score that does not change with the tokens behind this block."""
    return BlindLayerError(
        f"The gradient at the last block with attention, '{name}', is exactly zero: nothing there can change the score "
        "(weights of zero in the head, a probability that is exactly 0 or 1). Choose another score or class."
    )


@dataclass(frozen=True)
class _Run:
    """One more pass: its scores, the last block's output, and all blocks' attention, differentiable as it was kept."""

    scored: Scored
    tokens: Tensor
    attentions: list[Tensor]


@contextlib.contextmanager
def _run(recorded: Recorded, blocks: Blocks, effort: Effort, keep: Keep) -> Iterator[_Run]:
    """Around what is differentiated of that pass."""
    name, last = blocks.last
    with attention_kept(blocks, recorded, keep) as attentions:
        with TargetLayer(last, name=name) as layer:
            output = run_again(recorded, effort, 1)
            scored = compute_scores(recorded.scored.target, output, recorded.batch.images)
            require_recording(_any_score(scored), [name])
        require_all(attentions, blocks)
        effort.report(1, 1)
        yield _Run(scored, layer.activations, attentions)


def _any_score(scored: Scored) -> Tensor:
    """A number of each image (N,1) that depends on all of the output: no class of its own, as rollout is of none."""
    with torch.enable_grad():
        if scored.logits is None:
            return scored.values[:, :1]
        weights = torch.linspace(1, 2, scored.logits.shape[1], dtype=torch.float32, device="cpu").to(scored.logits)
        return (scored.logits * weights).sum(1, keepdim=True)
