"""Methods that use a transformer's attention.

Rollout, gradient rollout and LeGrad use all blocks; Grad-ECLIP uses the last attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradcam.cam.deferred_checks import read_range
from gradcam.cam.forward import RecordedPass, has_float16
from gradcam.cam.grid import ZERO_CAUSES
from gradcam.cam.methods import attention_capture as capture
from gradcam.cam.methods.rerun import reproduces_first_pass, run_again, score_rows
from gradcam.errors import BlindLayerError, ModelError
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import MAX_GRADIENT_BYTES, find_dependence, jacobian, no_gradient_error
from gradcam.hooks.containers import (
    at_least_float32,
    find_floating_tensor,
    list_tensors,
    map_tensors,
    replace_tensor,
    swap_contents,
)
from gradcam.hooks.hooks import Hooks, TargetLayer, grad_mode_off
from gradcam.hooks.memory import RerunBudget
from gradcam.layers.layout import Layout
from gradcam.targets.base import TargetScores
from gradcam.targets.classes import compute_scores

# If there are at most this many classes, Grad-ECLIP computes gradients at all tokens. For so few classes, this takes
# less time than another run of a block.
MAX_CLASSES_AT_ALL_TOKENS = 4
Gradients = Sequence[Tensor | None]


def rollout(recorded: RecordedPass, log: capture.AttentionLog, budget: RerunBudget) -> Tensor:
    """Compute attention rollout: the share of each patch in the token that the classification head reads.

    Returns maps (N,K,h,w) that are equal for all classes. Abnar & Zuidema, ACL 2020, equation 1: a block's output at a
    token is modelled as half the token itself, and half the attention-weighted mean of all tokens. Attention is
    averaged over the attention heads, and the matrices of the blocks are multiplied. The map is the row of the token
    that the classification head reads, usually the class token. If the head reads several tokens, as mean pooling does,
    the map is the mean of the rows of these tokens. The gradient at the last block's output shows which tokens the head
    reads. Raises `ModelError` if the attention cannot be traced back to the image, and `BlindLayerError` if the score
    has no gradient.
    """
    blocks = capture.find_blocks(log, recorded)
    with _run_rollout(recorded, blocks, budget, capture.keep_values) as (scored, tokens, attentions):
        ((gradient,),) = _compute_jacobian(recorded, _make_any_score(scored), [tokens])
    row = find_read_tokens(gradient, blocks)
    mixture = roll_out([at_least_float32(attention).mean(1) for attention in attentions], row)
    return blocks.to_grid(mixture)[:, None].repeat_interleave(recorded.scored.values.shape[1], 1)


def gradient_rollout(recorded: RecordedPass, log: capture.AttentionLog, budget: RerunBudget) -> Tensor:
    """Compute gradient-weighted rollout: weight attention by its gradient, and accumulate it over the blocks.

    Returns non-negative maps (N,K,h,w). Chefer et al., ICCV 2021, equations 5 and 6 for self-attention: a relevance
    matrix R starts as the identity, and becomes R + A R in each block. A is the positive part of attention times
    gradient, averaged over the attention heads. The map is a row of R, as in `rollout`. The same row of the identity is
    subtracted, because it would add the same value to every patch that the classification head reads. Raises
    `ModelError` if the attention cannot be traced back to the image, and `BlindLayerError` if the gradient at the last
    block is exactly zero.
    """
    blocks = capture.find_blocks(log, recorded)
    parts = []
    with _run_rollout(recorded, blocks, budget, capture.keep_differentiable) as (scored, tokens, attentions):
        for token_gradient, *gradients in _compute_jacobian(recorded, scored.values, [tokens, *attentions]):
            row = find_read_tokens(token_gradient, blocks)
            weighted = [weigh(attention, gradient) for attention, gradient in zip(attentions, gradients)]
            parts.append(blocks.to_grid(accumulate(weighted, row)))
    return torch.cat(parts).transpose(0, 1)


def _compute_jacobian(recorded: RecordedPass, scores: Tensor, inputs: Sequence[Tensor]) -> Iterator[Gradients]:
    yield from jacobian(scores, inputs, scaled=_is_scaled(recorded), most_bytes=MAX_GRADIENT_BYTES // len(inputs))


def _is_scaled(recorded: RecordedPass) -> bool:
    return recorded.autocast == torch.float16 or has_float16(recorded.output, recorded.modules)


def roll_out(attentions: Sequence[Tensor], row: Tensor) -> Tensor:
    """Multiply a row (T,) by the matrices of the blocks (N,T,T), the last block first, and return (N,T).

    The matrix of a block is the mean of attention and identity, with each row divided by its sum.
    """
    values = row.to(attentions[0]).expand(len(attentions[0]), 1, -1)
    for attention in reversed(attentions):
        half = attention / 2 + torch.eye(len(row), dtype=attention.dtype, device=attention.device) / 2
        values = values @ (half / half.sum(-1, keepdim=True))
    return values[:, 0]


def accumulate(weighted: Sequence[Tensor], row: Tensor) -> Tensor:
    """Multiply a row (T,) by I + A for each block's A (...,T,T), the last block first. Return (...,T) minus the row."""
    start = row.to(weighted[0]).expand(*weighted[0].shape[:-2], 1, -1)
    # A separate sum: if the terms were added to `start`, small terms would be rounded away.
    added = torch.zeros_like(start)
    for block in reversed(weighted):
        added = added + (start @ block + added @ block)
    return added[..., 0, :]


def weigh(attention: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the positive part of attention times gradient, averaged over the attention heads, as (k,N,T,T).

    Attention is (N,heads,T,T), gradients are (k,N,heads,T,T).
    """
    if gradient is None:
        return torch.zeros_like(at_least_float32(attention).mean(1))[None]
    read_range(gradient, "The gradients at the attention are")
    return (at_least_float32(gradient) * at_least_float32(attention.detach())).relu().mean(2)


def find_read_tokens(gradient: Tensor | None, blocks: capture.AttentionBlocks) -> Tensor:
    """Return weights (T,) with sum 1. Tokens that the head reads have equal weights, and other tokens have weight 0.

    The head reads a token if any gradient (k,*shape) at the last block's output is nonzero at this token.
    """
    name, _ = blocks.last
    if gradient is None or not gradient.any():
        raise blind_attention(name)
    read_range(gradient, f"The gradients at layer '{name}' are")
    is_read = gradient.movedim(1 + blocks.token_axis, -1).flatten(0, -2).any(0)
    return at_least_float32(is_read.to(gradient.dtype)) / is_read.sum()


def blind_attention(name: str) -> BlindLayerError:
    """Return the error for a score that does not depend on the tokens after this block."""
    return BlindLayerError(f"The gradient at the last attention block, '{name}', is exactly zero. {ZERO_CAUSES}")


@contextlib.contextmanager
def _run_rollout(
    recorded: RecordedPass, blocks: capture.AttentionBlocks, budget: RerunBudget, keep: capture.KeepAttention
) -> Iterator[tuple[TargetScores, Tensor, list[Tensor]]]:
    """Run another pass; yield its scores, the last block's output, and the attention of all blocks."""
    name, last = blocks.last
    with capture.capture_attention(blocks, recorded, keep) as attentions:
        with TargetLayer(last, name=name) as layer:
            output = run_again(recorded, budget, 1)
            scored = compute_scores(recorded.scored.target, output, recorded.batch.images)
            if not _make_any_score(scored).requires_grad:
                raise no_gradient_error([name])
        capture.require_all(attentions, blocks)
        budget.report(1, 1)
        yield scored, layer.activations, attentions


def _make_any_score(scored: TargetScores) -> Tensor:
    """Return one score per image (N,1), for class-agnostic rollout. If there are logits, it depends on all logits."""
    with torch.enable_grad():
        if scored.logits is None:
            return scored.values[:, :1]
        weights = torch.linspace(1, 2, scored.logits.shape[1], dtype=torch.float32, device="cpu").to(scored.logits)
        return (scored.logits * weights).sum(1, keepdim=True)


def legrad(recorded: RecordedPass, log: capture.AttentionLog, budget: RerunBudget) -> Tensor:
    """Compute LeGrad: the positive gradients of each block's score at its attention, averaged over the blocks.

    Returns non-negative maps (N,K,h,w). Bousselham et al., ICCV 2025, equations 5 to 8: the score of a block is the
    score that the head computes for this block's output. The positive gradients of this score at the block's attention
    are averaged over attention heads and queries, and then over blocks. In the authors' code for CLIP, the
    classification head reads the mean of all tokens. Here, it reads the same tokens as in the model, such as the class
    token. If possible, all blocks share one pass: the outputs of the blocks enter the head as one larger batch. Raises
    `ModelError` if the attention cannot be traced back to the image, or if the head also reads earlier blocks, and
    `BlindLayerError` if all gradients are exactly zero.
    """
    blocks = capture.find_blocks(log, recorded)
    results, count = [], len(blocks.modules)
    with capture.capture_attention(blocks, recorded, capture.keep_differentiable) as attentions:
        run = partial(_run_legrad, recorded, blocks, budget, attentions)
        total = _score_blocks_together(recorded, run, count)
        if total is not None:
            budget.report(1, 1)
            results.append(_differentiate(recorded, total, attentions))
        for block in range(count) if total is None else ():
            (scores,), _ = run([block])
            results.append(_differentiate(recorded, scores, attentions[block : block + 1]))
            budget.report(block + 1, count)
    if not any(has_gradient for _, has_gradient in results):
        raise blind_attention(blocks.last[0])
    return blocks.to_grid(torch.stack([values for values, _ in results]).sum(0) / count)


def _score_blocks_together(recorded: RecordedPass, run: Callable[..., Any], count: int) -> Tensor | None:
    """Return the sum of all blocks' scores (N,K) from one pass; None if the head mixes the rows of a batch."""
    # The batch begins and ends with the last block's output. Both copies have to give the output of the recorded pass.
    blocks_in_batch = [count - 1, *range(count)]
    try:
        scores, output = run(blocks_in_batch)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # The model may raise any error for a batch of a different size.
        return None
    if not reproduces_first_pass(recorded, output, len(blocks_in_batch)):
        return None
    with torch.enable_grad():
        return torch.stack(list(scores[1:])).sum(0)


def _run_legrad(
    recorded: RecordedPass,
    blocks: capture.AttentionBlocks,
    budget: RerunBudget,
    attentions: list[Tensor],
    blocks_in_batch: Sequence[int],
) -> tuple[Sequence[Tensor], Any]:
    """Run the model with the outputs of several blocks as the head's input batch; return scores and output.

    `blocks_in_batch` are the indices of these blocks. The scores are (N,K) per block. `attentions` is filled with the
    attention of all blocks. The score of a block has gradients only at the attention of this block.
    """
    attentions.clear()
    outputs, joined = list[Tensor](), list[Node | None]()
    gates = list[Tensor]()  # The inputs of all blocks but the first. They are detached, so gradients stop there.

    def pass_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        tensor: Any = find_floating_tensor(output)  # A block returns one tensor.
        outputs.append(tensor)
        if len(outputs) < len(blocks.modules):
            gates.append(tensor.detach().requires_grad_())
            next_input = gates[-1].clone()  # Clone, because the next block may change the tensor in place.
        else:
            next_input = _join([outputs[block] for block in blocks_in_batch], blocks)
            joined.append(next_input.grad_fn)
        if not swap_contents(tensor, next_input):
            return replace_tensor(output, tensor, next_input)
        outputs[-1] = next_input  # After the swap, `next_input` holds the block's output.
        return None

    with grad_mode_off(), Hooks() as hooks:
        for module in blocks.modules.values():
            hooks.after_forward(module, pass_on)
        output = run_again(recorded, budget, 1)
        capture.require_all(attentions, blocks)
        scores = score_rows(recorded, output, len(blocks_in_batch), range(len(blocks_in_batch)))
        if not scores.requires_grad:
            raise no_gradient_error([blocks.last[0]])
        if _is_reached(gates, scores, without=joined[0]):
            raise ModelError(
                "The score also depends on earlier blocks through paths around the last attention block, "
                f"'{blocks.last[0]}'. This method leaves out these paths: choose 'gradient-rollout' or 'rollout'."
            )
        return scores.unbind(), output


def _join(outputs: Sequence[Tensor], blocks: capture.AttentionBlocks) -> Tensor:
    for shape in (tuple(output.shape) for output in outputs if output.shape != blocks.shape):
        problem = f"An attention block returns {shape}, but the last block returns {blocks.shape}"
        raise ModelError(f"{problem}. This method needs equal shapes: choose 'gradient-rollout' or 'rollout'.")
    return torch.cat(list(outputs), blocks.layout.image_axis)


def _is_reached(leaves: Sequence[Tensor], scores: Tensor, *, without: Node | None) -> bool:
    targets = {pytorch.find_edge(leaf).node for leaf in leaves}
    queue = [scores.grad_fn]
    visited = {without, *queue}
    for node in queue:  # The list grows during the loop.
        for next_node, _ in () if node is None else node.next_functions:
            if next_node not in visited:
                visited.add(next_node)
                queue.append(next_node)
    return not targets.isdisjoint(visited)


def _differentiate(recorded: RecordedPass, scores: Tensor, attentions: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Return the sum over attentions of the mean positive gradients (N,K,T), and whether any gradient is nonzero."""
    parts, has_gradient = [], False
    for gradients in _compute_jacobian(recorded, scores, attentions):
        present = [at_least_float32(gradient) for gradient in gradients if gradient is not None]
        for gradient in present:
            has_gradient = read_range(gradient, "The gradients at the attention are") != (0, 0) or has_gradient
        parts.append(torch.stack([gradient.relu().mean((2, 3)) for gradient in present]).sum(0))
    return torch.cat(parts).transpose(0, 1), has_gradient


def grad_eclip(recorded: RecordedPass, log: capture.AttentionLog, budget: RerunBudget) -> Tensor:
    """Compute Grad-ECLIP: the values of the last attention at each patch, weighted by gradients and attention.

    Returns non-negative maps (N,K,h,w). Zhao et al., ICML 2024: the map at patch i is ReLU(sum over c of w_c lambda_i
    v_ic), where c runs over the channels of all heads. v_ic are the attention's values. w_c is the score's gradient at
    the attention's output for the class token, before the projection. lambda_i is a loosened attention: the cosine
    between the class token's query and the patch's key. The cosines of all patches are scaled so that the lowest is 0
    and the highest is 1. Loosened attention replaces the softmax, because the softmax gives most patches little weight.

    Here, all queries that the classification head reads replace the class token, and the maps of these queries are
    added before the ReLU. Models with attention pooling or mean pooling are therefore supported too. The authors' code
    runs the last attention with a single head. Here, the model's heads are used. Usually, the recorded pass is
    sufficient. If the model is new, another pass records the last attention. Raises `ModelError` if there is no
    attention over the image, and `BlindLayerError` if the gradient is exactly zero.
    """
    number, layout = capture.find_last(log, recorded)
    attention, scores = capture.find_attention_tensors(log, number), recorded.scored.values
    if attention is None or not scores.requires_grad or not find_dependence(scores, [attention.output])[0]:
        capture.remember_last(log, number, recorded)
        log, attention, scores = _attend_again(recorded, budget, number)
    budget.report(1, 1)
    looseness = loosen(_split_heads(attention.query, recorded), _split_heads(attention.key, recorded), layout)
    values = _join_heads(_split_heads(attention.value, recorded)[..., layout.list_cells(), :])
    output = _join_heads(_split_heads(attention.output.detach(), recorded))
    parts, shares, has_gradient = [], [], False
    # Checkpoints recompute the attention in the backward pass, so the attention must be recorded as in the forward
    # pass.
    module = attention.enclosing_runs[-1].module if attention.enclosing_runs else recorded.model
    with capture.AttentionLog().record(module), torch.autograd.set_multithreading_enabled(False):
        for gradient, row in _compute_query_gradients(recorded, attention, log, scores):
            has_gradient = read_range(gradient, "The gradients at the last attention are") != (0, 0) or has_gradient
            rows = slice(None) if row is None else slice(row, row + 1)
            slopes = _join_heads(gradient)
            contribution = slopes @ values.transpose(-2, -1)
            shares.append((slopes * output[:, rows]).abs().sum((-2, -1)))
            parts.append((contribution * looseness[:, rows]).sum(-2).relu().unflatten(-1, layout.grid))
    if not has_gradient:
        raise blind_attention(log.attentions[number].where)
    # If even a change as large as the attention's output hardly changes the score, the gradient is only rounding error.
    # For example, the score may be the similarity of an image to itself.
    is_rounding = torch.cat(shares) <= recorded.score_tolerance * scores.detach().abs().T
    return torch.cat(parts).masked_fill(is_rounding[..., None, None], 0).transpose(0, 1)


def loosen(query: Tensor, key: Tensor, layout: Layout) -> Tensor:
    """Return scaled cosines (N,Q,P) between queries (N,heads,Q,d) and those keys (N,heads,T,d) that are patches.

    A cosine is computed over the channels of all heads. For each query, cosines are scaled so that the lowest is 0 and
    the highest is 1. If all cosines are equal, they become 1.
    """
    queries = torch.nn.functional.normalize(_join_heads(query), dim=-1)
    keys = torch.nn.functional.normalize(_join_heads(key)[:, layout.list_cells()], dim=-1)
    cosines = queries @ keys.transpose(-2, -1)
    lowest, highest = cosines.aminmax(dim=-1, keepdim=True)
    return torch.where(highest > lowest, (cosines - lowest) / (highest - lowest), torch.ones_like(cosines))


def _join_heads(tensor: Tensor) -> Tensor:
    """Return (...,heads,T,d) as (...,T,heads*d)."""
    return at_least_float32(tensor).transpose(-3, -2).flatten(-2)


def _split_heads(tensor: Tensor, recorded: RecordedPass, ndim: int = 4) -> Tensor:
    """Return tokens, or gradients at tokens, as (...,N,heads,T,d). If images and heads share an axis, split it."""
    return tensor if tensor.ndim == ndim else tensor.unflatten(-3, (recorded.batch.images, -1))


def _attend_again(
    recorded: RecordedPass, budget: RerunBudget, number: int
) -> tuple[capture.AttentionLog, capture.AttentionTensors, Tensor]:
    """Run another pass, with gradients after the last attention; return its log, attention tensors, and scores."""
    log = capture.AttentionLog()
    with grad_mode_off(), log.record(recorded.model):
        output = run_again(recorded, budget, 1)
        scores = compute_scores(recorded.scored.target, output, recorded.batch.images).values
        attention = capture.find_attention_tensors(log, number)
        if attention is None:
            where = log.attentions[number].where if number < len(log.attentions) else ""
            raise capture.cannot_follow(recorded, f"the queries and keys of the attention in '{where}' were not found")
        if not scores.requires_grad:
            raise no_gradient_error([log.attentions[number].where])
        return log, attention, scores


def _compute_query_gradients(
    recorded: RecordedPass, attention: capture.AttentionTensors, log: capture.AttentionLog, scores: Tensor
) -> Iterator[tuple[Tensor, int | None]]:
    """Yield pairs of gradients (k,N,heads,Q,d) at the attention's output, for k classes, and the index of a query.

    The gradients are those of the query with this index. If the index is None, the gradients are those of all queries.
    """
    rows = None
    if scores.shape[1] > MAX_CLASSES_AT_ALL_TOKENS:
        rows = _compute_single_query_gradients(recorded, attention, log, scores)
    if rows is not None:
        yield from rows
        return
    for (gradient,) in _compute_jacobian(recorded, scores, [attention.output]):
        if gradient is not None:
            yield _split_heads(gradient, recorded, 5), None


def _compute_single_query_gradients(
    recorded: RecordedPass, attention: capture.AttentionTensors, log: capture.AttentionLog, scores: Tensor
) -> list[tuple[Tensor, int | None]] | None:
    """Return the gradients for a classification head that reads a single token; None for other heads.

    In most blocks, the operations after the attention treat each token separately. The block therefore runs again on
    copies of the token that the head reads, with one copy per class. A single backward pass computes the gradient of a
    different class at each copy. Without copies, each class would need a backward pass for all tokens, although nearly
    all gradients are zero. Every copy has to reproduce the token's output.
    """
    enclosing_block = capture.find_enclosing_block(attention, log, recorded)
    if enclosing_block is None or _is_scaled(recorded):
        return None
    block_run, layout = enclosing_block
    axis, output = 1 - layout.image_axis, block_run.output
    if output is None or not output.requires_grad or not find_dependence(scores, [output])[0]:
        return None
    parts: list[tuple[Tensor, int | None]] = []
    for (gradient,) in _compute_jacobian(recorded, scores, [output]):
        if gradient is None:
            return None
        other_axes = tuple(i for i in range(gradient.ndim) if i != 1 + axis)
        read = gradient.any(other_axes).nonzero().flatten().tolist()
        if len(read) > 1:
            return None
        row = read[0] if read else 0
        part = _run_block_on_copies(recorded, attention.output, block_run, (axis, row), gradient.select(1 + axis, row))
        if part is None:
            return None
        parts.append((part, row))
    return parts


def _run_block_on_copies(
    recorded: RecordedPass, attended: Tensor, block_run: capture.ModuleRun, token: tuple[int, int], gradients: Tensor
) -> Tensor | None:
    """Run a block on copies of one token, and return gradients (k,N,heads,1,d) at the attention's output, `attended`.

    `token` is the axis and the index of the token. `gradients` (k,N,D) are the gradients at the block's output for this
    token. Return None if the block does not treat each token separately.
    """
    (axis, row), block_output = token, cast("Tensor", block_run.output)
    inputs = list_tensors((block_run.args, block_run.kwargs))
    block_input = next((tensor for tensor in inputs if tensor.shape == block_output.shape), None)
    query = _split_heads(attended.detach(), recorded)[..., row : row + 1, :]
    expected = block_output.detach().narrow(axis, row, 1)
    # Try as many copies as gradients. If the block accepts only its usual number of tokens, try this number.
    for count in (len(gradients), block_output.shape[axis]):
        if block_input is None or count < len(gradients):
            return None
        copies = block_input.detach().narrow(axis, row, 1).repeat_interleave(count, axis)
        leaf = query.expand(-1, -1, count, -1).clone().requires_grad_()
        with torch.enable_grad():
            replacement = leaf if attended.ndim == 4 else leaf.flatten(0, 1)
        with torch.enable_grad(), capture.AttentionPatch(lambda _: None, partial(_return_first, replacement)):
            try:
                output = _run_block(recorded, block_run, block_input, copies)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # The block may raise any error for a different number of tokens.
                continue
            difference = (output.detach() - expected).abs().amax() if output.shape == copies.shape else None
            if difference is not None and difference <= recorded.tolerance * expected.abs().amax():
                directions = torch.zeros_like(output)
                directions.narrow(axis, 0, len(gradients)).copy_(gradients.movedim(0, axis))
                (gradient,) = torch.autograd.grad(output, leaf, directions)
                return gradient[:, :, : len(gradients)].movedim(2, 0).unsqueeze(-2)
    return None


def _return_first(replacement: Tensor, *_: Tensor) -> Tensor:
    return replacement


def _run_block(recorded: RecordedPass, block_run: capture.ModuleRun, block_input: Tensor, tokens: Tensor) -> Tensor:
    """Return the block's output after replacing the block's input by `tokens`."""
    inputs = block_run.args, block_run.kwargs
    args, kwargs = map_tensors(inputs, lambda tensor: tokens if tensor is block_input else tensor)
    with pytorch.autocast(recorded.scored.values.device.type, recorded.autocast):
        output: Any = find_floating_tensor(block_run.module(*args, **kwargs))
    return output
