"""LeGrad: the gradient at each block's attention, of the score that the head gives that block's own output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from gradcam.attention.blocks import Blocks, find_blocks
from gradcam.attention.census import Census
from gradcam.attention.reaching import attention_kept, differentiable, passes_float16, require_all
from gradcam.attention.rollout import blind_attention
from gradcam.effort import Effort
from gradcam.errors import ModelError
from gradcam.exchange import can_exchange, exchange
from gradcam.grad_mode import recording_off
from gradcam.gradients import MOST_BYTES, jacobian, require_recording
from gradcam.hooks import Hooks
from gradcam.nested import first_floating, replace_tensor
from gradcam.perturbation.rerun import run_again
from gradcam.perturbation.rows import reproduces_plain, score_rows
from gradcam.recording import Recorded
from gradcam.sites import at_least_float32, check_range


def legrad(recorded: Recorded, census: Census, effort: Effort) -> Tensor:
    """LeGrad: where more attention would raise the score, in every block by itself.

    Maps (N,K,h,w), none below zero. Bousselham et al., ICCV 2025, equations 5 to 8: the score of a block is what the rest
    of the model behind the last block gives for this block's output; its positive gradients at the block's attention are
    averaged over heads and queries, and then over blocks. The authors' code for CLIP gives the head the mean of all
    tokens instead of what it reads, which for a class token is another score than the model's own.
    All blocks share one pass: their outputs go on behind the last block as one larger batch, where that is right.
    Raises `ModelError` where the attention cannot be followed, and where the head reads more than the last block;
    `BlindLayerError` where all gradients are exactly zero.
    """
    blocks = find_blocks(census, recorded)
    with attention_kept(blocks, recorded, differentiable) as attentions:
        found = _all_together(recorded, blocks, effort, attentions)
        if found is None:
            found = _one_by_one(recorded, blocks, effort, attentions)
    return blocks.to_grid(found)


@dataclass(frozen=True)
class _Run:
    """A pass in which the outputs of some blocks went on behind the last one.

    `scores`: (N,K) for each of those. `attentions`: of all blocks; through nothing but its own block's output does one
    reach a score.
    """

    scores: Sequence[Tensor]
    attentions: list[Tensor]
    output: Any


def _all_together(recorded: Recorded, blocks: Blocks, effort: Effort, attentions: list[Tensor]) -> Tensor | None:
    """(N,K,T), from one pass and one backward pass; None where the head does not treat the rows of a batch alike."""
    count = len(blocks.modules)
    shown = [count - 1, *range(count)]  # the last one twice, first and last: both have to give what the plain pass gave
    try:
        run = _run(recorded, blocks, effort, attentions, shown)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a model raises for a batch of another size than it was given
        return None
    if not reproduces_plain(recorded, run.output, len(shown)):
        return None
    effort.report(1, 1)
    with torch.enable_grad():
        total = torch.stack(list(run.scores[1:])).sum(0)
    found, is_felt = _differentiate(recorded, total, run.attentions)
    return _require_felt(found / count, is_felt, blocks)


def _one_by_one(recorded: Recorded, blocks: Blocks, effort: Effort, attentions: list[Tensor]) -> Tensor:
    """The same from a pass for each block."""
    found, count = [], len(blocks.modules)
    for block in range(count):
        run = _run(recorded, blocks, effort, attentions, [block])
        found.append(_differentiate(recorded, run.scores[0], run.attentions[block : block + 1]))
        effort.report(block + 1, count)
    total = torch.stack([values for values, _ in found]).mean(0)
    return _require_felt(total, any(is_felt for _, is_felt in found), blocks)


def _run(recorded: Recorded, blocks: Blocks, effort: Effort, attentions: list[Tensor], shown: Sequence[int]) -> _Run:
    attentions.clear()
    outputs: list[Tensor] = []
    gates: list[Tensor] = []  # what the next block gets in place of an output, where autograd ends
    joined: list[Node | None] = []

    def hand_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        tensor: Any = first_floating(output)  # of a block there is one
        outputs.append(tensor)
        if len(outputs) < len(blocks.modules):
            gates.append(tensor.detach().requires_grad_())
            goes_on = gates[-1].clone()  # which the next block may change in place
        else:
            goes_on = _join([outputs[block] for block in shown], blocks)
            joined.append(goes_on.grad_fn)
        if not can_exchange(tensor):
            return replace_tensor(output, tensor, goes_on)
        exchange(tensor, goes_on)
        outputs[-1] = goes_on  # which is what the block gave, now
        return None

    with recording_off(), Hooks() as hooks:
        for module in blocks.modules.values():
            hooks.after_forward(module, hand_on)
        output = run_again(recorded, effort, 1)
        require_all(attentions, blocks)
        scores = score_rows(recorded, output, len(shown), range(len(shown)))
        require_recording(scores, [blocks.last[0]])
        if _is_reached(gates, scores, without=joined[0]):
            raise ModelError(
                f"Behind the last block with attention, '{blocks.last[0]}', the score depends on earlier ones in other ways "
                "too, so that no block's output can stand in for its own: choose 'gradient-rollout' or 'rollout'."
            )
        return _Run(scores.unbind(), list(attentions), output)


def _join(outputs: Sequence[Tensor], blocks: Blocks) -> Tensor:
    other = next((tuple(output.shape) for output in outputs if output.shape != blocks.shape), None)
    if other is not None:
        raise ModelError(
            f"A block with attention gives {other} and the last one {blocks.shape}, so that the one cannot stand in for the "
            "other: choose 'gradient-rollout' or 'rollout'."
        )
    return torch.cat(list(outputs), blocks.layout.image_axis)


def _is_reached(leaves: Sequence[Tensor], scores: Tensor, *, without: Node | None) -> bool:
    """Whether a path leads from the scores to one of the leaves that does not pass through this node."""
    wanted = {get_gradient_edge(leaf).node for leaf in leaves}
    found = [scores.grad_fn]
    seen = {without, *found}
    for node in found:  # which grows on the way
        for other, _ in () if node is None else node.next_functions:
            if other not in seen:
                seen.add(other)
                found.append(other)
    return not wanted.isdisjoint(seen)


def _differentiate(recorded: Recorded, scores: Tensor, attentions: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """The sum over attentions of positive gradients of scores (N,K), as (N,K,T); and whether there are any gradients."""
    parts, is_felt = [], False
    most_bytes = MOST_BYTES // len(attentions)
    for gradients in jacobian(scores, attentions, scaled=passes_float16(recorded), most_bytes=most_bytes):
        found = [at_least_float32(gradient) for gradient in gradients if gradient is not None]
        for gradient in found:
            is_felt = check_range(gradient, "The gradients at the attention are") != (0, 0) or is_felt
        parts.append(torch.stack([gradient.relu().mean((2, 3)) for gradient in found]).sum(0))
    return torch.cat(parts).transpose(0, 1), is_felt


def _require_felt(values: Tensor, is_felt: bool, blocks: Blocks) -> Tensor:
    if not is_felt:
        raise blind_attention(blocks.last[0])
    return values
